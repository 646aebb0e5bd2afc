"""How far the endpoints are, as the picker measures it."""

import asyncio
import socket
from collections.abc import Mapping

import pytest

from trimtab_extproc.round_trips import AT_ONCE_MAX, FAILURES_MAX, SAMPLES_MAX, RoundTrip, RoundTrips, connect_s


def test_the_least_of_the_last_few_counts_approached_in_steps() -> None:
    trip = RoundTrip()
    trip.took(0.010)
    trip.took(0.500)
    assert trip.value_s == 0.010
    trip.took(0.002)
    assert trip.value_s == pytest.approx(0.006)
    for _ in range(20):
        trip.took(0.002)
    assert trip.value_s == pytest.approx(0.002, rel=1e-3)


def test_a_way_that_became_longer_is_believed_after_a_while() -> None:
    trip = RoundTrip()
    for _ in range(SAMPLES_MAX):
        trip.took(0.001)
    for _ in range(SAMPLES_MAX - 1):
        trip.took(0.1)
    assert trip.value_s == pytest.approx(0.001)
    for _ in range(10):
        trip.took(0.1)
    assert trip.value_s == pytest.approx(0.1, rel=1e-2)


def test_one_who_does_not_answer_becomes_unknown_and_not_near() -> None:
    trip = RoundTrip()
    trip.took(0.01)
    for _ in range(FAILURES_MAX - 1):
        trip.failed()
    assert trip.value_s == 0.01
    trip.failed()
    assert trip.value_s is None
    trip.took(0.5)
    assert trip.value_s == 0.5


async def test_only_so_many_are_asked_at_once_and_all_that_answer_are_told() -> None:
    at_once, most = 0, 0
    told: list[Mapping[str, float]] = []

    async def probe(address: str) -> float:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        if address == "a3":
            raise OSError("refused")
        return float(address[1:])

    trips = RoundTrips(addresses=lambda: [f"a{n}" for n in range(40)], tell=told.append, probe=probe)
    await trips.measure()
    assert most == AT_ONCE_MAX
    assert told[-1] == {f"a{n}": float(n) for n in range(40) if n != 3}


async def test_where_nobody_asks_nobody_is_connected_to() -> None:
    told: list[Mapping[str, float]] = []
    wanted = ["a"]

    async def probe(address: str) -> float:
        return 1.0

    trips = RoundTrips(addresses=lambda: wanted, tell=told.append, probe=probe)
    await trips.measure()
    wanted.clear()
    await trips.measure()
    await trips.measure()
    assert told == [{"a": 1.0}, {}]


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("[::1]", socket.AF_INET6)])
async def test_a_real_connection_is_timed(host: str, family: socket.AddressFamily) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((host.strip("[]"), 0))
        except OSError:
            pytest.skip("no IPv6 here")
        listener.listen()
        seconds = await connect_s(f"{host}:{listener.getsockname()[1]}")
    assert 0 < seconds < 2


async def test_nobody_at_an_address_is_an_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(OSError, match=r"refused|Connect"):
        await connect_s(f"127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["10.0.0.1:99999", "10.0.0.1:", "10.0.0.1", "", "[::1:80", "a b:80", "::1:x"])
async def test_an_address_that_is_none_is_unknown_and_ends_nothing(address: str) -> None:
    told: list[Mapping[str, float]] = []
    await RoundTrips(addresses=lambda: [address], tell=told.append).measure()
    assert told == [{}]
