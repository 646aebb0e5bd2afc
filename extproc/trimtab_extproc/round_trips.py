"""How far the endpoints are: the time that a TCP connection to each of them takes, now and then.

The one rule: the least of the last few counts, for everything but the way itself (a busy process, a full queue) can
only add to it; and it is approached in steps, so that one odd value moves nothing far. An endpoint that does not
answer is unknown, not near. Where a proxy stands between that answers in the endpoint's place, this measures the proxy:
annotate the pods there.

Bounds: `AT_ONCE_MAX` connections at a time, each for at most `TIMEOUT_S`.
"""

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping

from trimtab_extproc.endpoint_table import bare_host

INTERVAL_S = 5.0
AT_ONCE_MAX = 8
TIMEOUT_S = 2.0
SAMPLES_MAX = 12
STEP = 0.5
"""How much of the way to the newest minimum a new sample moves what is known."""
FAILURES_MAX = 3
"""In a row; then what was known is forgotten."""
_TCP_INFO_RTT = struct.Struct("=I")
_TCP_INFO_RTT_AT = 68
_TCP_INFO_BYTES = 104

Probe = Callable[[str], Awaitable[float]]
"""Seconds of a round trip to `ip:port`; raises OSError or TimeoutError."""


class RoundTrip:
    """What is known of the way to one address."""

    def __init__(self) -> None:
        self.value_s: float | None = None
        self._samples: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._failures = 0

    def took(self, seconds: float) -> None:
        """One more connection was made."""
        self._failures = 0
        self._samples.append(seconds)
        least_s = min(self._samples)
        self.value_s = least_s if self.value_s is None else self.value_s + STEP * (least_s - self.value_s)

    def failed(self) -> None:
        """There was no answer."""
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            self._samples.clear()
            self.value_s = None


class RoundTrips:
    """Of the addresses that `addresses` names at the time; `tell` is given all that is known after each round."""

    def __init__(
        self,
        *,
        addresses: Callable[[], Iterable[str]],
        tell: Callable[[Mapping[str, float]], None],
        probe: Probe | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._addresses = addresses
        self._tell = tell
        self._probe: Probe = connect_s if probe is None else probe
        self._interval_s = interval_s
        self._trips: dict[str, RoundTrip] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.measure()
            await asyncio.sleep(self._interval_s)

    async def measure(self) -> None:
        """One round."""
        wanted = list(self._addresses())
        if not wanted and not self._trips:
            return
        before = self._trips
        self._trips = {address: before.get(address) or RoundTrip() for address in wanted}
        places = asyncio.Semaphore(AT_ONCE_MAX)
        await asyncio.gather(*(self._one(address, trip, places) for address, trip in self._trips.items()))
        self._tell({address: trip.value_s for address, trip in self._trips.items() if trip.value_s is not None})

    async def _one(self, address: str, trip: RoundTrip, places: asyncio.Semaphore) -> None:
        async with places:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    trip.took(await self._probe(address))
            except (OSError, TimeoutError, ValueError, OverflowError):  # the last two: an address that is none
                trip.failed()


async def connect_s(address: str) -> float:
    """Connects and hangs up. By the kernel's own clock where it tells, else by ours."""
    host, _, port = address.rpartition(":")
    host = bare_host(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        started_s = time.perf_counter()
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        took_s = time.perf_counter() - started_s
        return _kernels_s(connection) or took_s


def _kernels_s(connection: socket.socket) -> float:
    """The smoothed round trip of a connection, which is that of its handshake; 0: not told."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO_BYTES)
    except OSError:
        return 0.0
    if len(info) < _TCP_INFO_RTT_AT + _TCP_INFO_RTT.size:
        return 0.0
    (microseconds,) = _TCP_INFO_RTT.unpack_from(info, _TCP_INFO_RTT_AT)
    return float(microseconds) * 1e-6
