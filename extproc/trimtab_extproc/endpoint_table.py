"""The endpoints that this process has heard of: their names, addresses and the scheduler's slots.

The one rule: a slot is opened when a name is first seen, from whatever source, and everything inside the core speaks of
slots. It must not decide who may be chosen.

Bounds: `ENDPOINTS_MAX` names; what is said of more is ignored and counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

ENDPOINTS_MAX = 8_192
RANK_DIGITS_MAX = 6
"""A rank with more digits is none."""


class Slots(Protocol):
    """Whoever numbers the endpoints."""

    def add_slot(self) -> int: ...

    def remove_slot(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One engine that can be chosen."""

    name: str
    """`ip:port`, or `ip:port/rank`."""
    slot: int
    address: str
    """`ip:port`, as the gateway dials it."""
    rank: int | None

    @property
    def host(self) -> str:
        """The address without its port, and without the brackets of IPv6."""
        return bare_host(self.address.rpartition(":")[0])


def bare_host(text: str) -> str:
    """A host without the brackets of IPv6."""
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


class EndpointTable:
    """Names to slots and back, and addresses to the endpoints behind them."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._by_name: dict[str, Endpoint] = {}
        self._by_slot: dict[int, Endpoint] = {}
        self._by_place: dict[str, list[Endpoint]] = {}
        """Both by address and by bare host."""
        self.ignored_count = 0

    def open(self, name: str) -> Endpoint | None:
        """The endpoint of that name, new if need be; None beyond `ENDPOINTS_MAX`."""
        endpoint = self._by_name.get(name)
        if endpoint is not None:
            return endpoint
        if len(self._by_name) >= ENDPOINTS_MAX:
            self.ignored_count += 1
            return None
        address, _, rank = name.partition("/")
        endpoint = Endpoint(
            name=name,
            slot=self._slots.add_slot(),
            address=address,
            rank=int(rank) if rank.isdecimal() and len(rank) <= RANK_DIGITS_MAX else None,
        )
        self._by_name[name] = endpoint
        self._by_slot[endpoint.slot] = endpoint
        for place in {endpoint.address, endpoint.host}:
            self._by_place.setdefault(place, []).append(endpoint)
        return endpoint

    def forget(self, name: str) -> None:
        """Give the endpoint's slot back, with all that the scheduler knows of it."""
        endpoint = self._by_name.pop(name, None)
        if endpoint is None:
            return
        del self._by_slot[endpoint.slot]
        for place in {endpoint.address, endpoint.host}:
            rest = [other for other in self._by_place[place] if other is not endpoint]
            if rest:
                self._by_place[place] = rest
            else:
                del self._by_place[place]
        self._slots.remove_slot(endpoint.slot)

    def named(self, name: str) -> Endpoint | None:
        """The endpoint of that name, if it is known."""
        return self._by_name.get(name)

    def at_slot(self, slot: int) -> Endpoint | None:
        """The endpoint whose slot that is."""
        return self._by_slot.get(slot)

    def at_place(self, place: str) -> list[Endpoint]:
        """The endpoints at `ip:port` (more than one with data-parallel ranks), or at a bare IP (all its ports)."""
        return self._by_place.get(bare_host(place), [])

    def all(self) -> Iterable[Endpoint]:
        """Every endpoint known."""
        return self._by_name.values()

    def __len__(self) -> int:
        return len(self._by_name)
