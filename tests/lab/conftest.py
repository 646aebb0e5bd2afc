"""Emulated engines for tests: served in this process on free loopback ports."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from lab_rig import FAST, Consumer, Emulator, Start, free_ports

from trimtab_lab.emulated_engine import EmulatorSettings
from trimtab_lab.emulator import serving
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.step_time import StepTime


@pytest.fixture
def emulated() -> Start:
    @asynccontextmanager
    async def start(
        *, blocks: int = 512, block_tokens: int = 16, step_time: StepTime = FAST, **more: Any
    ) -> AsyncIterator[Emulator]:
        ranks = more.get("ranks", 1)
        ports = free_ports(2 * ranks)
        engine_settings = EngineSettings(
            block_count=blocks, block_tokens=block_tokens, context_tokens_max=min((blocks - 1) * block_tokens, 4096)
        )
        settings = EmulatorSettings(
            **{
                "kv_events_endpoint": f"tcp://*:{ports[0]}",
                "kv_replay_endpoint": f"tcp://*:{ports[ranks]}",
                "kv_topic": "kv@pod@tiny",
                "engine": engine_settings,
                "step_time": step_time,
                **{name: value for name, value in more.items() if name != "engine_changes"},
            }
        )
        settings = replace(settings, engine=replace(engine_settings, **more.get("engine_changes", {})))
        async with (
            serving(settings, host="127.0.0.1", port=0) as (engine, port),
            aiohttp.ClientSession() as session,
        ):
            yield Emulator(engine, port, session, ports[0])

    return start


@pytest.fixture
async def consumer() -> AsyncIterator[Consumer]:
    consumer = Consumer()
    yield consumer
    consumer.close()
