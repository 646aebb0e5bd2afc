"""Control document, notices, alarms and the response map over a real store."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest
from pool_processes import KEYS, QUICK, Replica, Sidecar, tasks, until, until_read
from valkey_server import ValkeyProcess

from trimtab_state import (
    Alarm,
    AlarmReader,
    AlarmWriter,
    ControlDocument,
    ControlWriter,
    EndpointSpec,
    Policy,
    PoolKeys,
    ResponseMap,
    ServedModel,
    StateUnavailable,
    Store,
    connect,
)
from trimtab_state.documents import decode_control

SLOW_POLL = replace(QUICK, poll_s=3_600.0, command_timeout_s=10.0)
"""Nothing is seen by polling, so what is seen was notified."""
DOCUMENT = ControlDocument(namespace="default", name="pool", endpoints=(EndpointSpec(name="a", address="a"),))


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    made = connect(store_url, QUICK)
    yield made
    await made.close()


async def test_control_draining_cards_and_snapshots_are_seen_without_a_poll(store: Store) -> None:
    replica, sidecar = Replica(store, SLOW_POLL), Sidecar(store, "a", SLOW_POLL)
    writer = ControlWriter(store, KEYS)
    async with tasks(replica.follower.run(), sidecar.publisher.run()):
        await until(lambda: replica.mirror.connected)
        assert replica.mirror.controls == [None], "there is no document yet"
        await writer.put(DOCUMENT)
        await until(lambda: replica.mirror.controls[-1] is not None)
        sidecar.publisher.card("d1", b"one")
        sidecar.beat(models={"m": ServedModel(card="d1")})
        await until(lambda: "a" in replica.mirror.heartbeats)
        assert replica.mirror.cards == {"d1": b"one"}
        sidecar.add({1: 1})
        await until(lambda: replica.mirror.chunks.get("a") == {1: 1})
        for state in ("draining", "asleep", "serving"):
            sidecar.beat(models={"m": ServedModel(card="d1")}, state=state)
            await until(lambda state=state: replica.mirror.heartbeats["a"].state == state)
        sidecar.publisher.card("d2", b"two")
        sidecar.beat(models={"m": ServedModel(card="d2")})
        await until(lambda: replica.mirror.cards.get("d2") == b"two")


async def test_a_heartbeat_rewritten_in_place_is_seen_though_its_count_is_the_same(store: Store) -> None:
    """As a preStop hook does that only has the store."""
    replica, sidecar = Replica(store, QUICK), Sidecar(store, "a", QUICK)
    async with tasks(replica.follower.run()):
        async with tasks(sidecar.publisher.run()):
            sidecar.beat()
            await until(lambda: "a" in replica.mirror.heartbeats)
        draining = msgspec.structs.replace(replica.mirror.heartbeats["a"], state="draining")
        await store.execute("SET", KEYS.heartbeat("a"), msgspec.json.encode(draining), "PX", 10_000)
        await until(lambda: replica.mirror.heartbeats["a"].state == "draining")


async def test_the_version_grows_with_each_change_and_only_then(store: Store) -> None:
    writer = ControlWriter(store, KEYS)
    assert await writer.put(DOCUMENT) == 1
    assert await writer.put(DOCUMENT) == 1
    changed = msgspec.structs.replace(DOCUMENT, policy=Policy(policy="round_robin", reason="alarms"))
    assert await writer.put(changed) == 2
    again = ControlWriter(store, KEYS)
    assert await again.put(changed) == 2, "an operator that starts again goes on"
    assert await again.put(DOCUMENT) == 3


async def test_the_document_comes_back_whoever_removes_or_overwrites_it(store: Store) -> None:
    writer = ControlWriter(store, KEYS, settings=QUICK)
    await writer.put(DOCUMENT)
    async with tasks(writer.run()):
        for wrong in (b"[]", b'{"namespace":"other","name":"pool"}'):
            await store.execute("SET", KEYS.control, wrong)
            data = await until_read(lambda: store.execute("GET", KEYS.control), lambda found, old=wrong: found != old)
            assert decode_control(data).endpoints == DOCUMENT.endpoints
        await store.execute("DEL", KEYS.control)
        await until_read(lambda: store.execute("EXISTS", KEYS.control), bool)


async def test_every_key_of_a_living_pool_expires(store: Store) -> None:
    replica, sidecar = Replica(store, QUICK), Sidecar(store, "a", QUICK)
    writer, alarms, responses = ControlWriter(store, KEYS), AlarmWriter(store, KEYS), ResponseMap(store, KEYS)
    async with tasks(replica.publisher.run(), sidecar.publisher.run(), writer.run()):
        await writer.put(DOCUMENT)
        await alarms.write(Alarm(prefix_class=f"{1:016x}"))
        await responses.put("r", "a")
        sidecar.publisher.card("d", b"card")
        replica.reserve(1, "a")
        for _ in range(3):
            sidecar.add({1: 1})
            sidecar.beat()
            await asyncio.sleep(0.3)
    keys = await store.keys_with_prefix(KEYS.prefix, 100)
    assert len(keys) >= 13
    for key in keys:
        assert await store.execute("PTTL", key) > 0, key


async def test_a_deleted_pool_leaves_nothing_and_its_neighbours_stay(store: Store) -> None:
    neighbour = PoolKeys("default", "pool2")
    for keys in (KEYS, neighbour):
        await ControlWriter(store, keys).put(DOCUMENT)
        await ResponseMap(store, keys).put("r", "a")
    await ControlWriter(store, KEYS).delete_pool()
    assert await store.keys_with_prefix(KEYS.prefix, 100) == []
    assert len(await store.keys_with_prefix(neighbour.prefix, 100)) >= 4


async def test_the_sweep_takes_out_endpoints_without_a_heartbeat(store: Store) -> None:
    writer = ControlWriter(store, KEYS)
    assert await writer.sweep() == 0
    await store.execute("SADD", KEYS.endpoints, "dead", "alive")
    await store.execute("SET", KEYS.heartbeat("alive"), "{}")
    assert await writer.sweep() == 1
    assert await store.execute("SMEMBERS", KEYS.endpoints) == {b"alive"}


async def test_alarms_are_read_once_and_in_order(store: Store) -> None:
    writer, reader = AlarmWriter(store, KEYS), AlarmReader(store, KEYS)
    assert await reader.read() == []
    alarms = [Alarm(prefix_class=f"{2**64 - i:016x}", holders=i, arrivals=9, window_s=60.0) for i in (1, 2, 3)]
    for alarm in alarms[:2]:
        await writer.write(alarm)
    assert [found.alarm for found in await reader.read()] == alarms[:2]
    assert await reader.read() == []
    await store.execute("XADD", KEYS.alarms, "*", "b", b"{")
    await writer.write(alarms[2])
    assert [found.alarm for found in await reader.read()] == [alarms[2]]
    assert reader.malformed == 1


async def test_the_alarm_stream_is_bounded(store: Store) -> None:
    writer = AlarmWriter(store, KEYS, settings=replace(QUICK, alarm_entries_max=10))
    for i in range(400):
        await writer.write(Alarm(prefix_class=f"{i:016x}"))
    assert await store.execute("XLEN", KEYS.alarms) < 200


async def test_a_response_is_known_to_every_replica(store: Store) -> None:
    one, two = ResponseMap(store, KEYS), ResponseMap(store, KEYS)
    await one.put("resp_1", "10.0.0.1:8000")
    assert await two.get("resp_1") == "10.0.0.1:8000"
    assert await two.get("resp_2") is None
    await store.execute("FLUSHALL")
    assert await one.get("resp_1") == "10.0.0.1:8000", "from its own memory"
    assert await two.get("resp_1") == "10.0.0.1:8000"


async def test_responses_are_bounded_in_the_store_and_in_the_process(store: Store) -> None:
    settings = replace(QUICK, responses_max=5, responses_cached_max=3)
    responses = ResponseMap(store, KEYS, settings=settings)
    for i in range(20):
        await responses.put(f"r{i}", "a")
    other = ResponseMap(store, KEYS, settings=settings)
    known = [i for i in range(20) if await other.get(f"r{i}") is not None]
    assert known == [15, 16, 17, 18, 19]
    assert len(responses._cached) == 3
    assert len(other._cached) == 3


async def test_many_commands_at_once_wait_for_a_connection(store: Store) -> None:
    assert all(await asyncio.gather(*(store.execute("PING") for _ in range(200))))


async def test_a_refused_command_is_unavailable_with_its_reason(store: Store, server: ValkeyProcess) -> None:
    server.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(StateUnavailable, match="maxmemory"):
        await store.execute("SET", "a", "b")
    with pytest.raises(StateUnavailable) as refused:
        await store.batch([("SET", "a", "secret value"), ("PING",)], atomic=True)
    assert "secret value" not in str(refused.value)
    with pytest.raises(StateUnavailable) as refused:
        await store.batch([("SET", "a", "secret value"), ("PING",)])
    assert "secret value" not in str(refused.value)
    server.command("CONFIG", "SET", "maxmemory", "0")
    server.kill()
    with pytest.raises(StateUnavailable, match="Connect"):
        await store.execute("PING")
