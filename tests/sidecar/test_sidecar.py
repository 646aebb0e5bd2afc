"""Whole sidecars: emulated engines, a real store, and what followers of the pool then hold."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from sidecar_processes import Pod
from valkey_server import ValkeyProcess, running
from zmq_engine import until

from trimtab_core.model_card import ModelCard

TEXTS = [
    "The first of several texts that are long enough to fill a few blocks of sixteen tokens each, and then some more.",
    "Another one, which differs from its very first word, so that no block of it can be shared with any other text.",
    "A third text, with letters that are more than a byte: Zürich, 東京, привет, and with ``code`` like x = [1, 2, 3].",
]


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with running() as server:
        yield server


@pytest.fixture
async def pod(server: ValkeyProcess, tmp_path: Path) -> AsyncIterator[Pod]:
    server.command("FLUSHALL")
    async with aiohttp.ClientSession() as http:
        pod = Pod(server.url, tmp_path, http)
        yield pod
        await pod.close()


async def test_a_pod_is_told_with_its_card_its_load_and_its_cache(pod: Pod) -> None:
    await pod.start_engine("--lora", "adapter")
    await pod.start_sidecar()
    await pod.follow()
    beat = await pod.serves()
    assert beat.approximate is None
    assert (beat.block_tokens, beat.kv_capacity_tokens) == (16, 3_200)
    assert {name: model.lora for name, model in beat.models.items()} == {"tiny": False, "adapter": True}
    digest = beat.models["tiny"].card
    assert digest is not None
    assert digest == beat.models["adapter"].card
    card = ModelCard.decode(pod.mirror.cards[digest])
    assert (card.exact, card.reason) == (True, "")
    await pod.chat(TEXTS[0])
    await pod.chat(TEXTS[0], cache_salt="salt")
    await pod.chat(TEXTS[1], model="adapter")
    await pod.chat(TEXTS[2], n=2)
    assert await pod.agrees() > 10
    await until(lambda: (b := pod.heartbeat()) is not None and b.prompt_tokens_total > 0)
    metrics = await pod.own_metrics()
    assert metrics["decode_errors_total"] == metrics["unknown_parents_total"] == metrics["gaps_total"] == 0
    assert metrics["chunks"] == len(pod.mirror.chunks[pod.endpoint()])
    assert metrics["state_connected"] == 1
    assert {"requests_running", "requests_waiting", "kv_usage"} <= metrics.keys()
    text = (pod.directory / "sidecar.log").read_text()
    assert pod.logs()
    assert not any(part in text for part in ("first of several", "Another one", "third text"))


async def test_evictions_and_lost_frames_leave_the_same_cache(pod: Pod) -> None:
    await pod.start_engine("--num-gpu-blocks", "60")
    await pod.start_sidecar()
    await pod.follow()
    await pod.serves()
    for number in range(30):
        if number % 5 == 3:
            await pod.lab("lose_events?batches=2")
        await pod.chat(f"{number} {TEXTS[number % 3]} {TEXTS[(number + 1) % 3]}")
    await pod.agrees()
    metrics = await pod.own_metrics()
    assert metrics["gaps_total"] > 0
    assert metrics["gaps_lost_total"] == 0
    assert metrics["removed_blocks_total"] > 0


async def test_each_rank_behind_a_port_is_an_endpoint_of_its_own(pod: Pod) -> None:
    await pod.start_engine(ranks=2)
    await pod.start_sidecar()
    await pod.follow()
    await pod.serves(0)
    await pod.serves(1)
    await pod.chat(TEXTS[0], rank=0)
    await pod.chat(TEXTS[1], rank=1)
    await pod.chat(TEXTS[2], rank=1)
    assert await pod.agrees(1) > await pod.agrees(0) > 0
    assert pod.heartbeat() is None


async def test_a_release_that_sends_arrays_and_tells_no_sources_is_read_by_its_flags(pod: Pod) -> None:
    await pod.start_engine("--kv-encoding", "array", "--kv-hash", "bytes")
    config = (
        f'{{"publisher": "zmq", "enable_kv_cache_events": true, "endpoint": "tcp://*:{pod.ports[0]}",'
        f' "replay_endpoint": "tcp://*:{pod.ports[1]}"}}'
    )
    await pod.start_sidecar("--engine-args", json.dumps(["vllm", "serve", "tiny", "--kv-events-config", config]))
    await pod.follow()
    await pod.serves()
    await pod.chat(TEXTS[0])
    assert await pod.agrees() > 0


async def test_an_engine_without_events_is_told_by_its_load_and_marked(pod: Pod) -> None:
    await pod.start_engine("--kv-events-port", "-1")
    await pod.start_sidecar()
    await pod.follow()
    beat = await pod.serves()
    assert beat.approximate == "the engine publishes no KV events"


async def test_an_engine_that_restarts_is_unreachable_then_empty_in_a_new_epoch(pod: Pod) -> None:
    await pod.start_engine()
    await pod.start_sidecar()
    await pod.follow()
    first = await pod.serves()
    await pod.chat(TEXTS[0])
    assert await pod.agrees() > 0
    await pod.lab("restart?down_s=0.5")
    await until(lambda: (b := pod.heartbeat()) is not None and b.state == "unreachable")
    second = await pod.serves()
    await until(lambda: (b := pod.heartbeat()) is not None and b.epoch != first.epoch)
    assert await pod.agrees() == 0
    await pod.chat(TEXTS[1])
    assert await pod.agrees() > 0
    assert second.endpoint == first.endpoint


async def test_an_engine_that_sleeps_is_told_so_and_has_no_cache(pod: Pod) -> None:
    await pod.start_engine()
    await pod.start_sidecar()
    await pod.follow()
    await pod.serves()
    await pod.chat(TEXTS[0])
    assert await pod.agrees() > 0
    await pod.lab("sleep")
    await until(lambda: (b := pod.heartbeat()) is not None and b.state == "asleep")
    assert await pod.agrees() == 0
    await pod.lab("wake_up")
    await pod.serves()
    await pod.chat(TEXTS[1])
    assert await pod.agrees() > 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_sidecar_that_restarts_loses_nothing(pod: Pod, how: signal.Signals) -> None:
    await pod.start_engine()
    sidecar = await pod.start_sidecar()
    await pod.follow()
    first = await pod.serves()
    await pod.chat(TEXTS[0])
    await pod.agrees()
    checkpoints = pod.directory / "checkpoints"
    await until(lambda: list(checkpoints.glob("*.checkpoint")))
    sidecar.send_signal(how)
    assert await sidecar.wait() == (0 if how is signal.SIGTERM else -how)
    await pod.chat(TEXTS[1])
    await pod.start_sidecar()
    await until(lambda: (b := pod.heartbeat()) is not None and b.incarnation != first.incarnation)
    assert await pod.agrees() > 0
    beat = pod.heartbeat()
    assert beat is not None
    assert beat.epoch == first.epoch
    metrics = await pod.own_metrics()
    assert metrics["epoch_changes_total"] == metrics["gaps_lost_total"] == metrics["unknown_parents_total"] == 0
    # The cache was never seen empty: a follower keeps what the endpoint had until it hears better.
    assert pod.mirror.gone_endpoints == []


async def test_drain_is_told_before_it_returns_and_stays(pod: Pod) -> None:
    await pod.start_engine()
    await pod.start_sidecar()
    await pod.follow()
    await pod.serves()
    assert await pod.drain() == 0
    await until(lambda: (b := pod.heartbeat()) is not None and b.state == "draining")
    beats = pod.heartbeat()
    await until(lambda: (b := pod.heartbeat()) is not None and beats is not None and b.beat > beats.beat + 2)
    assert (beat := pod.heartbeat()) is not None
    assert beat.state == "draining"
    assert await pod.terminate() == 0
    # A draining pod's sidecar takes its endpoint out of the shared state itself.
    await until(lambda: pod.endpoint() in pod.mirror.gone_endpoints)


async def test_drain_tells_the_store_where_the_sidecar_is_gone(pod: Pod) -> None:
    await pod.start_engine()
    sidecar = await pod.start_sidecar()
    await pod.follow()
    await pod.serves()
    sidecar.kill()
    await sidecar.wait()
    assert await pod.drain() == 0
    await until(lambda: (b := pod.heartbeat()) is not None and b.state == "draining")


async def test_a_store_that_is_away_does_not_stop_the_events(pod: Pod, server: ValkeyProcess) -> None:
    await pod.start_engine()
    await pod.start_sidecar()
    await pod.follow()
    await pod.serves()
    server.kill()
    try:
        for text in TEXTS:
            await pod.chat(text)
        live = await pod.live_chunks()
        for _ in range(2_000):
            if (await pod.own_metrics())["chunks"] == len(live):
                break
            await asyncio.sleep(0.01)
        assert (await pod.own_metrics())["chunks"] == len(live) > 0
    finally:
        server.start()
    assert await pod.agrees() == len(live)


async def test_settings_that_make_no_sense_end_the_process_with_a_message(pod: Pod) -> None:
    pod.url = "http://127.0.0.1:1"
    sidecar = await pod.start_sidecar("--scrape-s", "0")
    assert await sidecar.wait() == 2
    assert "--scrape-s" in (pod.directory / "sidecar.log").read_text()
