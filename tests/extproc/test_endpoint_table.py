"""Names, addresses and slots."""

import pytest

from trimtab_extproc import endpoint_table
from trimtab_extproc.endpoint_table import EndpointTable


class Numbered:
    """Gives out slots, the lowest free one first, and remembers which came back."""

    def __init__(self) -> None:
        self.taken: set[int] = set()

    def add_slot(self) -> int:
        slot = next(number for number in range(len(self.taken) + 1) if number not in self.taken)
        self.taken.add(slot)
        return slot

    def remove_slot(self, slot: int) -> None:
        self.taken.remove(slot)


@pytest.fixture
def slots() -> Numbered:
    return Numbered()


@pytest.fixture
def table(slots: Numbered) -> EndpointTable:
    return EndpointTable(slots)


@pytest.mark.parametrize(
    ("name", "address", "host", "rank"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000", "10.0.0.1", None),
        ("10.0.0.1:8000/3", "10.0.0.1:8000", "10.0.0.1", 3),
        ("[::1]:8000/0", "[::1]:8000", "::1", 0),
        ("10.0.0.1:8000/x", "10.0.0.1:8000", "10.0.0.1", None),
        ("10.0.0.1:8000/" + "9" * 5_000, "10.0.0.1:8000", "10.0.0.1", None),
    ],
)
def test_a_name_says_address_and_rank(
    name: str, address: str, host: str, rank: int | None, table: EndpointTable
) -> None:
    endpoint = table.open(name)
    assert endpoint is not None
    assert (endpoint.address, endpoint.host, endpoint.rank) == (address, host, rank)


def test_a_name_keeps_its_slot_until_it_is_forgotten(table: EndpointTable, slots: Numbered) -> None:
    first = table.open("10.0.0.1:8000")
    assert table.open("10.0.0.1:8000") is first
    assert first is not None
    assert table.at_slot(first.slot) is first
    table.forget("10.0.0.1:8000")
    table.forget("10.0.0.1:8000")
    assert table.named("10.0.0.1:8000") is None
    assert table.at_slot(first.slot) is None
    assert not slots.taken


def test_a_place_is_an_address_with_all_its_ranks_or_a_bare_ip_with_all_its_ports(table: EndpointTable) -> None:
    for name in ("10.0.0.1:8000/0", "10.0.0.1:8000/1", "10.0.0.1:8001", "10.0.0.2:8000", "[::1]:8000"):
        table.open(name)

    def names(place: str) -> list[str]:
        return [endpoint.name for endpoint in table.at_place(place)]

    assert names("10.0.0.1:8000") == ["10.0.0.1:8000/0", "10.0.0.1:8000/1"]
    assert names("10.0.0.1") == ["10.0.0.1:8000/0", "10.0.0.1:8000/1", "10.0.0.1:8001"]
    assert names("::1") == names("[::1]") == names("[::1]:8000") == ["[::1]:8000"]
    assert names("10.0.0.3") == []
    table.forget("10.0.0.1:8000/0")
    assert names("10.0.0.1:8000") == ["10.0.0.1:8000/1"]


def test_beyond_its_bound_the_table_ignores_and_counts(
    table: EndpointTable, slots: Numbered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_table, "ENDPOINTS_MAX", 2)
    assert table.open("a:1") is not None
    assert table.open("b:1") is not None
    assert table.open("c:1") is None
    assert table.open("a:1") is not None
    assert (table.ignored_count, len(table), len(slots.taken)) == (1, 2, 2)
