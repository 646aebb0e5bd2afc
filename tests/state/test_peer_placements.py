"""Of two replicas that place on one endpoint at the same moment, the later in the log learns of the other at once."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from pool_processes import KEYS, QUICK, Replica, tasks, until
from test_store_topologies import cluster
from valkey_server import ValkeyProcess

from trimtab_state import PoolFollower, Store, connect
from trimtab_state.load_codec import LoadEntry, LoadKind, LoadOperation, encode_load_entry
from trimtab_state.peer_placements import PLACEMENTS_MAX, PeerPlacements, PlacementTrail

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
SOON_S = 20.0
"""Long enough that only a store which is away makes an answer late."""


def peers_of(replica: Replica) -> PeerPlacements:
    return PeerPlacements(replica.publisher, replica.follower)


@asynccontextmanager
async def replicas(store: Store, count: int) -> AsyncIterator[list[Replica]]:
    """Started, and each follows all others."""
    started = [Replica(store, QUICK) for _ in range(count)]
    async with tasks(*(part.run() for one in started for part in (one.publisher, one.follower))):
        await until(lambda: all(len(one.follower.load.peers) == count - 1 for one in started))
        await until(lambda: all(peers_of(one).is_askable for one in started))
        yield started


def until_s() -> float:
    return asyncio.get_running_loop().time() + SOON_S


async def both_at_once(one: Replica, two: Replica) -> list[frozenset[str] | None]:
    """Both place on A in the same moment; what each learns of the other."""
    asked = []
    for replica in (one, two):
        replica.reserve(1, A)
        asked.append((peers_of(replica), peers_of(replica).ask()))
    return [await peers.answer(question, until_s()) for peers, question in asked]


async def test_the_first_in_the_log_keeps_its_place_and_the_second_learns_of_it(store_url: str) -> None:
    store = connect(store_url, QUICK)
    async with replicas(store, 2) as (one, two):
        found = await both_at_once(one, two)
        assert sorted(map(sorted, map(list, found))) == [[], [A]]  # type: ignore[arg-type]
        loser = one if found[0] else two
        assert (two if loser is one else one).load() == loser.mirror.open_load(), "and it knows the load by now"
    await store.close()


async def test_what_was_known_at_the_placement_is_no_news(store_url: str) -> None:
    store = connect(store_url, QUICK)
    async with replicas(store, 2) as (one, two):
        one.reserve(1, A)
        one.reserve(2, B)
        one.move(2, C)
        await until(lambda: two.mirror.open_load() == one.load())
        two.reserve(1, A)
        assert await peers_of(two).answer(peers_of(two).ask(), until_s()) == frozenset()
    await store.close()


async def test_what_is_read_beside_the_follower_is_passed_on_once_and_in_order(store_url: str) -> None:
    store = connect(store_url, QUICK)
    rng = random.Random(5)
    async with replicas(store, 3) as those:
        for number in range(1, 200):
            replica = rng.choice(those)
            replica.reserve(number, rng.choice((A, B, C)), rng.randrange(1, 500))
            if rng.random() < 0.7:
                question = peers_of(replica).ask()
                if rng.random() < 0.5:
                    assert await peers_of(replica).answer(question, until_s()) is not None
            if rng.random() < 0.4:
                replica.finish(rng.choice(list(replica.open)))
            await asyncio.sleep(rng.choice((0, 0, 0.001, 0.004)))

        def agree() -> bool:
            return all(
                reader.mirror.open_load() == sorted(load for one in those if one is not reader for load in one.load())
                for reader in those
            )

        await until(agree, "all know the same")
        assert [one.follower.load.gaps for one in those] == [0, 0, 0]
        assert [one.follower.counters.resyncs for one in those] == [0, 0, 0], "nobody took it for another log"
        assert [one.publisher.leases_lost for one in those] == [0, 0, 0]
    await store.close()


async def test_many_at_once_share_a_round_trip(store_url: str) -> None:
    store = connect(store_url, QUICK)
    async with replicas(store, 2) as (one, two):
        before = one.follower.counters.load_entries
        asked = []
        for number in range(1, 41):
            two.reserve(number, A)
            asked.append(peers_of(two).ask())
        for question in asked:
            assert await peers_of(two).answer(question, until_s()) == frozenset()
        await until(lambda: one.mirror.open_load() == two.load())
        assert one.follower.counters.load_entries - before <= 2, "one entry tells all of them"
    await store.close()


async def test_replicas_that_burst_end_where_one_would_have_put_them(store_url: str) -> None:
    """Each places on the endpoint with the fewest requests, all start at the same moment, and whoever comes second on
    one places again."""
    store = connect(store_url, QUICK)
    endpoints = [f"10.0.1.{number}:8000" for number in range(4)]
    async with replicas(store, 4) as those:

        def best(replica: Replica, rng: random.Random) -> str:
            known = [load[1] for load in (*replica.mirror.open_load(), *replica.load())]
            least = min(known.count(endpoint) for endpoint in endpoints)
            return rng.choice([endpoint for endpoint in endpoints if known.count(endpoint) == least])

        async def place(replica: Replica, number: int, rng: random.Random) -> None:
            peers = peers_of(replica)
            while True:
                endpoint = best(replica, rng)
                replica.reserve(number, endpoint)
                taken = await peers.answer(peers.ask(), until_s())
                assert taken is not None
                if endpoint not in taken:
                    return
                replica.finish(number)
                number += 1

        for burst in range(20):
            rng = random.Random(burst)
            await asyncio.gather(*(place(one, 100 * burst + 1, rng) for one in those))
            placed = Counter(load[1] for one in those for load in one.load())
            assert placed == dict.fromkeys(endpoints, 1), f"burst {burst}"
            for one in those:
                for number in list(one.open):
                    one.finish(number)
            await until(lambda: not any(one.mirror.open_load() for one in those))
    await store.close()


async def test_a_store_that_hangs_answers_late_and_is_not_asked_for_longer_and_longer(
    server: ValkeyProcess, store_url: str
) -> None:
    store = connect(store_url, QUICK)
    async with replicas(store, 2) as (one, _):
        peers, loop = peers_of(one), asyncio.get_running_loop()
        server.pause()
        try:
            pauses = []
            for number in range(2):
                await until(lambda: peers.is_askable)
                one.reserve(number + 1, A)
                questions = [peers.ask(), peers.ask()]
                ends_s = loop.time() + 0.01
                assert [await peers.answer(question, ends_s) for question in questions] == [None, None]
                assert not peers.is_askable
                pauses.append(peers._not_before_s - ends_s)
            assert pauses[1] > pauses[0] * 1.5
        finally:
            server.resume()
        await until(lambda: peers.is_askable)
        assert await peers.answer(peers.ask(), until_s()) == frozenset()
    await store.close()


async def test_without_peers_or_a_store_nobody_is_asked(server: ValkeyProcess, store_url: str) -> None:
    store = connect(store_url, QUICK)
    alone = Replica(store, QUICK)
    async with tasks(alone.publisher.run(), alone.follower.run()):
        await until(lambda: alone.follower.connected and alone.publisher.connected)
        assert not peers_of(alone).is_askable
    await alone.publisher.close()
    async with replicas(store, 2) as (one, _):
        peers = peers_of(one)
        question = peers.ask()
        server.kill()
        assert await peers.answer(question, until_s()) in (None, frozenset())
        await until(lambda: not peers.is_askable)
    assert await peers.answer(peers.ask(), asyncio.get_running_loop().time() + 0.01) is None
    await store.close()


async def test_a_lease_that_was_lost_meanwhile_is_no_answer(server: ValkeyProcess, store_url: str) -> None:
    store = connect(store_url, QUICK)
    async with replicas(store, 2) as (one, two):
        server.command("DEL", KEYS.replica(one.publisher.incarnation))
        one.publisher._renew_at_s = 0.0
        one.reserve(1, A)
        assert await peers_of(one).answer(peers_of(one).ask(), until_s()) is None
        assert one.publisher.leases_lost == 1
        await until(lambda: two.mirror.open_load() == one.load(), "the new incarnation tells it")
    await store.close()


def test_the_trail_is_bounded_and_forgets_the_oldest() -> None:
    trail = PlacementTrail()
    trail.add((1, 0), A)
    for number in range(PLACEMENTS_MAX):
        trail.add((2, number), B)
    assert trail.since(0, (9, 0)) == {B}
    assert trail.since(trail.count, (9, 0)) == frozenset()
    trail.add((3, 0), C)
    assert trail.since(trail.count - 1, (9, 0)) == {C}
    assert trail.since(trail.count - 1, (3, 0)) == frozenset(), "it stands behind ours"


def test_a_follower_that_is_not_connected_takes_nothing_that_was_read_beside_it() -> None:
    class Nobody:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"told of {name}")

    follower = PoolFollower(connect("redis://127.0.0.1:1"), KEYS, Nobody())  # type: ignore[arg-type]
    assert not follower.take_behind([(b"1-1", {b"b": b""})])


async def test_what_is_too_much_for_one_look_is_left_to_the_follower(store_url: str) -> None:
    store = connect(store_url, QUICK)
    few = replace(QUICK, read_entries_max=4)
    async with replicas(store, 2) as (one, two):
        one.follower._settings = few
        for number in range(1, 40):
            two.reserve(number, B)
            await two.publisher._flush()
        one.reserve(1, A)
        answer = await peers_of(one).answer(peers_of(one).ask(), until_s())
        assert answer is None or answer <= {B}
        await until(lambda: one.mirror.open_load() == two.load(), "nothing is left out")
        assert one.follower.load.gaps == 0
    await store.close()


async def test_a_peer_that_tells_much_at_once_does_not_hold_up_the_loop(store_url: str) -> None:
    store = connect(store_url, QUICK)
    async with replicas(store, 2) as (one, two):
        follower = one.follower
        peer = follower.load._peers[two.publisher.incarnation]
        await until(lambda: peer.is_synced)
        entries, position = [], peer.position or 0
        for number in range(1, 4):
            operations = [LoadOperation(LoadKind.RESERVE, 1_000 * number + n, B, 10, 1) for n in range(400)]
            data = encode_load_entry(LoadEntry(two.publisher.incarnation, position + number, operations))
            entries.append((f"{1 << 45}-{number}".encode(), {b"b": data}))
        follower.read_behind()
        assert not follower.take_behind(entries[::-1])
        assert not one.mirror.open_load(), "its own reads pass them on, which make way for others"
        assert follower.take_behind(entries[1::-1])
        assert len(one.mirror.open_load()) == 800
    await store.close()


async def test_over_a_cluster_it_is_the_same() -> None:
    async with cluster() as (server, _):
        store = connect(f"redis+cluster://127.0.0.1:{server.port}", QUICK)
        async with replicas(store, 2) as (one, two):
            found = await both_at_once(one, two)
            assert sorted(map(sorted, map(list, found))) == [[], [A]]  # type: ignore[arg-type]
        await store.close()
