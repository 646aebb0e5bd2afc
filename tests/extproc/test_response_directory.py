"""Which endpoint made a response: asking never waits long, telling never waits at all."""

import asyncio

import pytest

from trimtab_extproc import response_directory
from trimtab_extproc.response_directory import ResponseDirectory
from trimtab_state import StateUnavailable


class SlowStore:
    """A response map whose store answers when the test lets it, or not at all."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.gate = asyncio.Event()
        self.told: list[str] = []

    async def put(self, response_id: str, endpoint: str) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.told.append(response_id)

    async def get(self, response_id: str) -> str | None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return f"endpoint of {response_id}"


async def test_a_store_that_does_not_answer_in_time_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_directory, "LOOKUP_TIMEOUT_S", 0.01)
    store = SlowStore()
    assert await ResponseDirectory(store).endpoint_of("resp_1") is None
    store.gate.set()
    assert await ResponseDirectory(store).endpoint_of("resp_1") == "endpoint of resp_1"


async def test_a_store_that_is_away_knows_nothing_and_is_told_in_vain() -> None:
    store = SlowStore(StateUnavailable("away"))
    store.gate.set()
    directory = ResponseDirectory(store)
    assert await directory.endpoint_of("resp_1") is None
    directory.remember("resp_1", "e")
    await directory.close()
    assert store.told == []


async def test_what_waits_for_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_directory, "PENDING_MAX", 2)
    store = SlowStore()
    directory = ResponseDirectory(store)
    for index in range(5):
        directory.remember(f"resp_{index}", "e")
    store.gate.set()
    await directory.close()
    assert store.told == ["resp_0", "resp_1"]
