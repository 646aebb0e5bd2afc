"""The emulator as a process of its own: its command line, and how it ends."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from lab_rig import free_ports

from trimtab_lab.emulator import parse_arguments, settings_from

STREAM = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3000, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """A running emulator and what it printed when it was ready."""
    events = free_ports(1)[0]
    command = ["-m", "trimtab_lab.emulator", "--port", "0", "--kv-events-port", str(events), *flags]
    child = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        yield child, json.loads(await child.stdout.readline())
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


@pytest.mark.parametrize(("flags", "reason"), [([], "abort"), (["--shutdown-timeout", "30"], "length")])
async def test_sigterm_aborts_streams_cleanly_or_lets_them_finish(flags: list[str], reason: str) -> None:
    body = STREAM if reason == "abort" else STREAM | {"max_tokens": 60}
    async with process("--speed", "4", *flags) as (child, ready), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{ready['port']}"
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            await response.content.readline()
            child.send_signal(signal.SIGTERM)
            text = await response.text()
        assert response.status == 200
        assert f'"finish_reason":"{reason}"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert await child.wait() == 0
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{url}/health")


async def test_a_killed_process_leaves_a_broken_stream_and_a_closed_port() -> None:
    async with process() as (child, ready), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{ready['port']}/v1/chat/completions"
        async with session.post(url, json=STREAM) as response:
            await response.content.readline()
            child.kill()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.text()


async def test_a_taken_events_port_ends_the_process_with_an_error() -> None:
    async with process() as (_, ready):
        port = ready["kv_event_sources"]["0"]["endpoint"].rpartition(":")[2]
        command = ["-m", "trimtab_lab.emulator", "--port", "0", "--kv-events-port", port]
        second = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        _, stderr = await second.communicate()
        assert second.returncode != 0
        assert b"Address already in use" in stderr


def test_flags_become_settings() -> None:
    line = "--kv-events-port 6000 --kv-replay-port 6100 --lora a b --block-size 32 --num-gpu-blocks 4096"
    line += " --data-parallel-size 2 --answer-tokens 9 --kv-encoding array --kv-hash bytes"
    settings = settings_from(parse_arguments(line.split()))
    assert settings.kv_events_endpoint == "tcp://*:6000"
    assert settings.kv_replay_endpoint == "tcp://*:6100"
    assert (settings.lora_names, settings.ranks) == (("a", "b"), 2)
    assert (settings.engine.block_tokens, settings.engine.block_count) == (32, 4096)
    assert (settings.answer_tokens_min, settings.answer_tokens_max) == (9, 9)
    assert (settings.kv_encoding, settings.kv_hash_form) == ("array", "bytes")
    assert settings_from(parse_arguments(["--kv-events-port", "-1"])).kv_events_endpoint is None


def test_a_prompt_divisor_scales_prices_and_the_step_so_that_a_scaled_prompt_costs_what_the_whole_one_did() -> None:
    whole, scaled = (settings_from(parse_arguments(["--prompt-divisor", divisor])) for divisor in ("1", "8"))
    assert scaled.engine.batched_tokens_max * 8 == whole.engine.batched_tokens_max
    big = whole.step_time.duration_s(prefill_chunks=[(2048, 4096)], decode_contexts=[8000])
    small = scaled.step_time.duration_s(prefill_chunks=[(256, 512)], decode_contexts=[1000])
    assert small == pytest.approx(big, rel=0.01)
    faster = settings_from(parse_arguments(["--speed", "2"])).step_time
    assert faster.duration_s(prefill_chunks=[(2048, 4096)], decode_contexts=[8000]) == pytest.approx(big / 2)
