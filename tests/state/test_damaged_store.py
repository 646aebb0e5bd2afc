"""A store in which somebody else has written: what is damaged is passed over, and the rest is followed."""

from dataclasses import replace

import pytest
from pool_processes import KEYS, QUICK, Replica, Sidecar, tasks, until
from valkey_server import ValkeyProcess

from trimtab_state import ControlDocument, ControlWriter, EndpointSpec, ServedModel, connect

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
DAMAGED = {
    "endpoints": KEYS.endpoints,
    "replicas": KEYS.replicas,
    "control": KEYS.control,
    "heartbeat": KEYS.heartbeat(B),
    "snapshot": KEYS.kv_snapshot(B),
    "card": KEYS.card("d2"),
    "lease": KEYS.replica(77),
}


@pytest.mark.parametrize("name", DAMAGED)
async def test_a_key_of_another_type_hides_nothing_else(name: str, server: ValkeyProcess) -> None:
    store = connect(server.url, QUICK)
    sidecar, other = Sidecar(store, A, QUICK), Sidecar(store, B, QUICK)
    async with tasks(sidecar.publisher.run(), other.publisher.run()):
        await ControlWriter(store, KEYS, settings=QUICK).put(
            ControlDocument(namespace="default", name="pool", endpoints=(EndpointSpec(name=A, address=A),))
        )
        for each, digest in ((sidecar, "d1"), (other, "d2")):
            each.publisher.card(digest, b"a card")
            each.beat(models={"m": ServedModel(card=digest)})
            each.add({1: 16, 2: 32})
            await each.publisher.flushed()
    key = DAMAGED[name]
    server.command("SADD", KEYS.replicas, f"{77:016x}")
    server.command("DEL", key)
    server.command("XADD", key, "*", "not", "ours")
    replica = Replica(store, QUICK)
    async with tasks(replica.follower.run()):
        await until(lambda: replica.mirror.chunks.get(A) == {1: 16, 2: 32}, "chunks of the other endpoint")
        await until(lambda: replica.mirror.cards.get("d1") == b"a card", "its card")
        await until(lambda: replica.follower.connected, "connected")
    await store.close()


async def test_a_stream_of_another_type_is_named_with_the_remedy(
    server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    server.command("SET", KEYS.kv_log, "no stream")
    store = connect(server.url, QUICK)
    replica = Replica(store, QUICK)
    async with tasks(replica.follower.run()):
        await until(lambda: KEYS.kv_log in caplog.text, "a line about the key")
        assert "delete it" in caplog.text
        assert not replica.follower.connected
        server.command("DEL", KEYS.kv_log)
        await until(lambda: replica.follower.connected, "connected again")
    await store.close()


async def test_endpoints_that_only_a_log_names_are_forgotten(server: ValkeyProcess) -> None:
    settings = replace(QUICK, heartbeat_ttl_s=2.0)
    store = connect(server.url, settings)
    silent, beating = Sidecar(store, B, settings), Sidecar(store, A, settings)
    replica = Replica(store, settings)
    async with tasks(replica.follower.run(), silent.publisher.run(), beating.publisher.run(), beating.beating(0.1)):
        silent.add({1: 16})
        beating.add({1: 16})
        await until(lambda: replica.mirror.chunks.get(A) == {1: 16}, "chunks")
        await until(lambda: B in replica.follower.kv.endpoints, "the silent one")
        await until(lambda: B not in replica.follower.kv.endpoints, "nothing kept of the silent one")
        assert not replica.follower.kv.wanted
    await store.close()
