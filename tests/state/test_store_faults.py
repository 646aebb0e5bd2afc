"""Whatever happens to a real store, the followers end with exactly what the writers hold."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import pytest
from pool_processes import BRIEF, KEYS, QUICK, Replica, Sidecar, tasks, until
from valkey_server import ValkeyProcess, running

from trimtab_state import (
    ControlDocument,
    ControlWriter,
    EndpointSpec,
    ServedModel,
    StateSettings,
    StateUnavailable,
    Store,
    connect,
)
from trimtab_state.load_codec import (
    Lease,
    LeaseHead,
    LoadEntry,
    LoadKind,
    LoadOperation,
    encode_lease,
    encode_load_entry,
)
from trimtab_state.store import Command

A, B = "10.0.0.1:8000", "[::1]:8000/3"


class World:
    """Two sidecars, two replicas and an operator around one store."""

    def __init__(self, url: str, settings: StateSettings = QUICK, seed: int = 1) -> None:
        self.settings = settings
        self.store: Store = connect(url, settings)
        self.rng = random.Random(seed)
        self.sidecars = [Sidecar(self.store, endpoint, settings) for endpoint in (A, B)]
        self.replicas = [Replica(self.store, settings) for _ in range(2)]
        self.control = ControlWriter(self.store, KEYS, settings=settings)
        self.last_id = 0

    def run(self, replica: Replica) -> list[object]:
        return [replica.publisher.run(), replica.follower.run()]

    def all(self) -> list[object]:
        parts: list[object] = [self.control.run()]
        for sidecar in self.sidecars:
            sidecar.publisher.card("d", b"card")
            parts += [sidecar.publisher.run(), self.beating(sidecar)]
        for replica in self.replicas:
            parts += self.run(replica)
        return parts

    async def beating(self, sidecar: Sidecar) -> None:
        while True:
            sidecar.beat(models={"m": ServedModel(card="d")})
            await asyncio.sleep(0.05)

    async def put_control(self) -> None:
        endpoints = tuple(EndpointSpec(name=name, address=name.partition("/")[0]) for name in (A, B))
        await self.control.put(ControlDocument(namespace="default", name="pool", endpoints=endpoints))

    def work(self, steps: int = 30) -> None:
        """Random changes of chunks and reservations."""
        rng = self.rng
        for _ in range(steps):
            sidecar, replica = rng.choice(self.sidecars), rng.choice(self.replicas)
            sidecar.add({rng.getrandbits(64): rng.randrange(1, 9999) for _ in range(rng.randrange(1, 12))})
            if len(sidecar.chunks) > 20 and rng.getrandbits(1):
                sidecar.remove(rng.sample(sorted(sidecar.chunks), 9))
            self.last_id += 1
            replica.reserve(self.last_id, rng.choice((A, B)), rng.randrange(1, 5000), samples=rng.randrange(4))
            for reservation_id in [i for i in replica.open if rng.random() < 0.2]:
                step = rng.randrange(3)
                if step == 0 and replica.open[reservation_id].p_tokens:
                    replica.first_token(reservation_id)
                elif step == 1:
                    replica.move(reservation_id, rng.choice((A, B)))
                else:
                    replica.finish(reservation_id)

    def agrees(self) -> bool:
        """Each replica has the writers' chunks, the other replica's load, the document, the heartbeats and the card."""
        one, two = self.replicas
        return (
            one.mirror.open_load() == two.load()
            and two.mirror.open_load() == one.load()
            and one.mirror.weights() == two.weights()
            and two.mirror.weights() == one.weights()
            and all(
                r.mirror.chunks.get(s.endpoint) == s.chunks and s.endpoint not in r.mirror.unsynced
                for r in self.replicas
                for s in self.sidecars
            )
            and all(
                set(r.mirror.heartbeats) == {A, B}
                and r.mirror.cards == {"d": b"card"}
                and bool(r.mirror.controls)
                and r.mirror.controls[-1] is not None
                for r in self.replicas
            )
        )

    async def settled(self, what: str) -> None:
        await until(self.agrees, what)

    def lost_nothing(self) -> None:
        """No peer, endpoint or document was ever given up."""
        for replica in self.replicas:
            assert replica.mirror.gone_peers == []
            assert replica.mirror.gone_endpoints == []
            assert all(document is None or document.endpoints for document in replica.mirror.controls)

    async def is_away(self) -> None:
        await until(
            lambda: (
                not any(r.mirror.connected or r.publisher.connected for r in self.replicas)
                and not any(s.publisher.connected for s in self.sidecars)
            ),
            "everybody sees that the store is away",
        )


@pytest.fixture
async def world(store_url: str) -> AsyncIterator[World]:
    made = World(store_url)
    yield made
    await made.store.close()


async def started(world: World) -> None:
    with suppress(StateUnavailable):  # A busy machine; the writer goes on by itself.
        await world.put_control()
    world.work()
    await world.settled("at the start")


async def test_late_start_a_follower_that_starts_last_has_all(world: World) -> None:
    async with tasks(*world.all()):
        await started(world)
        for _ in range(20):
            world.work(5)
            await asyncio.sleep(0.01)
        late = Replica(world.store, QUICK)
        async with tasks(*world.run(late)):
            await until(lambda: late.mirror.connected)
            expected = sorted(world.replicas[0].load() + world.replicas[1].load())
            await until(lambda: late.mirror.open_load() == expected, "load")
            await until(lambda: all(late.mirror.chunks.get(s.endpoint) == s.chunks for s in world.sidecars), "chunks")


async def test_missed_part_a_follower_that_lost_its_connection_has_all(world: World, server: ValkeyProcess) -> None:
    async with tasks(*world.all()):
        await started(world)
        for _ in range(5):
            server.command("CLIENT", "KILL", "TYPE", "normal")
            world.work(10)
            await asyncio.sleep(0.05)
        await world.settled("after lost connections")
        world.lost_nothing()


async def test_trimmed_stream_entries_that_nobody_read_are_made_up_for(world: World, server: ValkeyProcess) -> None:
    async with tasks(*world.all()):
        await started(world)
        for _ in range(10):
            world.work(20)
            for stream in (KEYS.kv_log, KEYS.load_log, KEYS.notify):
                server.command("XTRIM", stream, "MAXLEN", "0")
            await asyncio.sleep(0.02)
        await world.settled("after trims")
        world.lost_nothing()


async def test_killed_store_brought_back_empty_is_filled_again(world: World, server: ValkeyProcess) -> None:
    async with tasks(*world.all()):
        await started(world)
        server.kill()
        await world.is_away()
        world.work()
        server.start()
        await world.settled("after the restart")
        world.work()
        await world.settled("and further on")
        world.lost_nothing()
        late = Replica(world.store, QUICK)
        async with tasks(*world.run(late)):
            await until(lambda: all(late.mirror.chunks.get(s.endpoint) == s.chunks for s in world.sidecars), "chunks")
            await until(lambda: late.mirror.controls[-1:] not in ([], [None]), "control document")


async def test_a_flushed_store_is_filled_again_though_no_connection_broke(world: World, server: ValkeyProcess) -> None:
    async with tasks(*world.all()):
        await started(world)
        for _ in range(3):
            server.command("FLUSHALL")
            world.work()
            await asyncio.sleep(0.05)
        await world.settled("after the flush")
        await until(lambda: server.command("EXISTS", KEYS.control, KEYS.generation) == b":2\r\n")
        world.lost_nothing()


async def test_paused_store_stops_the_clocks_of_leases_and_heartbeats(server: ValkeyProcess) -> None:
    world = World(server.url, BRIEF)
    async with tasks(*world.all()):
        await started(world)
        server.pause()
        try:
            await world.is_away()
            world.work()
            await asyncio.sleep(2 * BRIEF.lease_s)  # Longer than any time to live, by the server's clock too.
        finally:
            server.resume()
        world.work()
        await world.settled("after the pause")
        for replica in world.replicas:
            assert replica.mirror.gone_endpoints == []
            # The leases have expired by the server's clock, so the replicas took new incarnations; the old ones ended.
            assert len(replica.mirror.gone_peers) <= 2
    await world.store.close()


async def test_lease_expiry_a_killed_replica_is_gone_once(server: ValkeyProcess) -> None:
    world = World(server.url, replace(QUICK, lease_s=3.0))
    one, two = world.replicas
    async with tasks(*world.all()):
        await started(world)
        dead = Replica(world.store, BRIEF)
        async with tasks(*world.run(dead)):
            dead.reserve(900, A)
            await until(lambda: dead.publisher.incarnation in one.mirror.peers, "the third replica is seen")
        # Its tasks have ended without a goodbye, as after kill -9.
        await until(lambda: dead.publisher.incarnation in one.mirror.gone_peers, "its lease expires")
        await until(lambda: dead.publisher.incarnation in two.mirror.gone_peers, "its lease expires")
        await world.settled("without it")
        assert one.mirror.gone_peers.count(dead.publisher.incarnation) == 1
        replicas = await world.store.execute("SMEMBERS", KEYS.replicas)
        await until(lambda: len(replicas) >= 2)
        assert f"{dead.publisher.incarnation:016x}".encode() not in await world.store.execute("SMEMBERS", KEYS.replicas)
    await world.store.close()


async def test_clean_shutdown_of_a_replica_is_seen_at_once(world: World) -> None:
    settings = StateSettings(lease_s=3_600.0)
    one, two = Replica(world.store, settings), Replica(world.store, settings)
    async with tasks(one.follower.run(), one.publisher.run()):
        async with tasks(two.publisher.run()):
            two.reserve(1, A)
            await until(lambda: one.mirror.open_load() == two.load(), "load")
        await two.publisher.close()
        await until(lambda: one.mirror.gone_peers == [two.publisher.incarnation], "goodbye")
        assert await world.store.execute("EXISTS", KEYS.replica(two.publisher.incarnation)) == 0


async def test_clean_shutdown_of_a_sidecar_is_seen_at_once(world: World) -> None:
    settings = StateSettings(heartbeat_ttl_s=3_600.0)
    sidecar, replica = Sidecar(world.store, A, settings), Replica(world.store, settings)
    async with tasks(replica.follower.run()):
        async with tasks(sidecar.publisher.run()):
            sidecar.add({1: 1})
            sidecar.beat()
            await until(lambda: A in replica.mirror.heartbeats and replica.mirror.chunks.get(A) == {1: 1})
            sidecar.beat(state="draining")
            await until(lambda: replica.mirror.heartbeats[A].state == "draining")
        await sidecar.publisher.close()
        await until(lambda: replica.mirror.gone_endpoints == [A])
        assert replica.mirror.unsynced == {A}


async def test_a_sidecar_that_dies_is_gone_after_its_time_to_live(world: World) -> None:
    sidecar, replica = Sidecar(world.store, A, BRIEF), Replica(world.store, BRIEF)
    async with tasks(replica.follower.run()):
        async with tasks(sidecar.publisher.run()):
            sidecar.beat()
            await until(lambda: A in replica.mirror.heartbeats)
        await until(lambda: replica.mirror.gone_endpoints == [A])


async def test_own_lease_lost_takes_a_new_incarnation_and_tells_everything_again(
    world: World, server: ValkeyProcess
) -> None:
    one, two = world.replicas
    async with tasks(*world.all()):
        await started(world)
        old = one.publisher.incarnation
        server.command("DEL", KEYS.replica(old))
        await until(lambda: one.publisher.incarnation != old, "a new incarnation")
        world.work()
        await world.settled("with the new incarnation")
        assert two.mirror.gone_peers == [old]
        assert one.mirror.leases_lost == 1
        assert one.publisher.leases_lost == 1
        assert old in one.publisher.own_incarnations
        assert one.publisher.incarnation in one.publisher.own_incarnations
        assert old not in one.mirror.gone_peers, "it does not hear of itself"


async def test_login_refused_is_a_store_that_is_away() -> None:
    with running(password="right") as server:
        world = World(server.url, BRIEF)
        async with tasks(*world.all()):
            await started(world)
            server.command("CONFIG", "SET", "requirepass", "other")
            server.accept("other")
            server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await world.is_away()
            await asyncio.sleep(2 * BRIEF.lease_s)
            world.work()
            server.command("CONFIG", "SET", "requirepass", "right")
            server.accept("right")
            await world.settled("once the password is right again")
            for replica in world.replicas:
                assert replica.mirror.gone_endpoints == []
        await world.store.close()


async def test_commands_refused_by_the_acl_are_a_store_that_is_away() -> None:
    with running() as server:
        server.command("ACL", "SETUSER", "pool", "on", ">secret", "~*", "+@all")
        url = server.url.replace("redis://", "redis://pool:secret@")
        world = World(url)
        async with tasks(*world.all()):
            await started(world)
            server.command("ACL", "SETUSER", "pool", "-xadd", "-set", "-xread")
            await world.is_away()
            world.work()
            server.command("ACL", "SETUSER", "pool", "+@all")
            await world.settled("once it is allowed again")
        await world.store.close()


async def test_a_store_that_stays_away_makes_publishers_drop_and_tell_the_rest_by_snapshot_and_lease() -> None:
    settings = replace(QUICK, kv_queue_chunks_max=100, load_queue_ops_max=50)
    with running() as server:
        world = World(server.url, settings)
        async with tasks(*world.all()):
            await started(world)
            server.kill()
            await world.is_away()
            world.work(300)
            assert all(s.publisher.dropped for s in world.sidecars)
            assert all(r.publisher.dropped for r in world.replicas)
            server.start()
            await world.settled("after the restart")
        await world.store.close()


async def test_failover_to_a_replica_with_lower_ids_loses_nothing_for_good() -> None:
    """A replica whose replication had stopped takes over the address, as with a proxy or a Service in front."""
    with running() as first, running() as second:
        second.command("REPLICAOF", "127.0.0.1", str(first.port))
        world = World(first.url)
        async with tasks(*world.all()):
            await started(world)
            await until(lambda: second.command("EXISTS", KEYS.control) == b":1\r\n", "replication")
            second.command("REPLICAOF", "NO", "ONE")
            for _ in range(20):
                world.work(10)
                await asyncio.sleep(0.01)
            await world.settled("what the second will not have")
            first.kill()
            await world.is_away()
            second.command("CONFIG", "SET", "port", str(first.port))
            first.port, second.port = second.port, first.port
            world.work()
            await world.settled("after the failover")
            for replica in world.replicas:
                assert replica.mirror.gone_endpoints == []
        await world.store.close()


async def test_a_stream_whose_ids_have_gone_back_is_read_again_from_its_start(
    world: World, server: ValkeyProcess
) -> None:
    replica, far = world.replicas[0], f"{2**50}"
    entry = LoadEntry(7, 1, [LoadOperation(LoadKind.RESERVE, 1, A, 10, 1)])
    following = LoadEntry(7, 2, [LoadOperation(LoadKind.RESERVE, 2, A, 10, 1)])
    lease = Lease(LeaseHead(7, 0, 1), [])
    await world.store.execute("SET", KEYS.replica(7), encode_lease(lease))
    await world.store.execute("XADD", KEYS.load_log, f"{far}-1", "b", encode_load_entry(entry))
    async with tasks(replica.follower.run()):
        await until(lambda: list(replica.mirror.peers.get(7, ())) == [1])
        # One transaction, so that the follower never finds the stream missing.
        await world.store.batch(
            [
                ("DEL", KEYS.load_log),
                ("XADD", KEYS.load_log, "5-1", "b", encode_load_entry(entry)),
                ("XADD", KEYS.load_log, "5-2", "b", encode_load_entry(following)),
            ],
            atomic=True,
        )
        await until(lambda: list(replica.mirror.peers.get(7, ())) == [1, 2], "the new entry")
        assert replica.follower.counters.resyncs == 1


async def test_malformed_values_and_entries_are_counted_and_skipped(world: World, server: ValkeyProcess) -> None:
    async with tasks(*world.all()):
        await started(world)
        wrong: list[Command] = [("XADD", stream, "*", "b", b"\xffwrong") for stream in (KEYS.kv_log, KEYS.load_log)]
        wrong += [("XADD", stream, "*", "other", b"") for stream in (KEYS.kv_log, KEYS.load_log, KEYS.notify)]
        wrong += [("SADD", KEYS.endpoints, b"\xff", b"c"), ("SADD", KEYS.replicas, b"no", b"f" * 16)]
        wrong += [("SET", KEYS.heartbeat("c"), b"{"), ("SET", KEYS.replica(2**64 - 1), b"\x09")]
        wrong += [("SET", KEYS.control, b"[]"), ("XADD", KEYS.notify, "*", "k", "control", "n", "")]
        await world.store.batch(wrong)
        world.work()
        await world.settled("in spite of them")
        await until(lambda: all(r.follower.counters.malformed >= 6 for r in world.replicas))
        world.lost_nothing()


async def test_a_malformed_snapshot_is_asked_for_again(world: World) -> None:
    sidecar, replica = Sidecar(world.store, A, QUICK), Replica(world.store, QUICK)
    async with tasks(sidecar.publisher.run()):
        sidecar.add({1: 1})
        sidecar.beat()
        await until(lambda: sidecar.publisher.snapshots_written > 0)
        await world.store.execute("SET", KEYS.kv_snapshot(A), b"\x01cut off")
        async with tasks(replica.follower.run(), sidecar.beating(0.05)):
            await until(lambda: replica.mirror.chunks.get(A) == {1: 1})
            assert replica.follower.counters.malformed >= 1


async def test_a_store_that_is_not_there_at_first_is_waited_for() -> None:
    with running() as server:
        server.kill()
        world = World(server.url)
        with pytest.raises(StateUnavailable):
            await world.put_control()
        async with tasks(*world.all()):
            world.work()
            await asyncio.sleep(0.2)
            server.start()
            await world.settled("once it is there")
        await world.store.close()
