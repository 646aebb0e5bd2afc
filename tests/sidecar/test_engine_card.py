"""A card is made in a child, and a child that breaks costs the card at most."""

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from sidecar_captures import TINY_MODEL, tiny_pieces
from zmq_engine import until

from trimtab_core.model_card import ModelCard
from trimtab_sidecar import card_process, engine_card
from trimtab_sidecar.card_process import CardError, CardRequest, card_from_child
from trimtab_sidecar.engine_card import EngineCard
from trimtab_sidecar.probes import EngineUnreachable


def request(url: str, **changes: object) -> CardRequest:
    fields: dict[str, object] = {
        "base_url": url,
        "engine_args": (),
        "model_dir": str(TINY_MODEL),
        "served_model": "tiny",
        "block_tokens": 16,
    }
    return CardRequest(**fields | changes)  # type: ignore[arg-type]


@pytest.fixture
async def engine() -> AsyncIterator[str]:
    """An engine whose /tokenize takes plain prompts, byte by byte, and no chats: its cards are made, but not proven."""
    app = web.Application()
    ids = {piece[0]: index for index, piece in enumerate(tiny_pieces()) if piece is not None and len(piece) == 1}

    async def tokenize(http: web.Request) -> web.Response:
        prompt = (await http.json()).get("prompt")
        if prompt is None:
            return web.json_response({"error": "no chats"}, status=400)
        return web.json_response({"tokens": [ids[byte] for byte in prompt.encode()]})

    app.router.add_post("/tokenize", tokenize)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_card_that_nothing_proves_comes_with_its_reason(engine: str) -> None:
    card = await card_from_child(request(engine))
    assert not card.exact
    assert card.reason
    assert card.table is not None


async def test_an_engine_that_is_away_is_told_apart_from_a_card_that_cannot_be_made() -> None:
    with pytest.raises(EngineUnreachable):
        await card_from_child(request("http://127.0.0.1:1"))


async def test_a_child_that_breaks_or_talks_nonsense_is_a_card_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CardError, match="ended with 1"):
        await card_from_child(request("http://127.0.0.1:1"))
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    with pytest.raises(CardError):
        await card_from_child(request("http://127.0.0.1:1"))


async def test_a_child_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setattr(card_process, "CHILD_S", 0.01)
    with pytest.raises(CardError, match="too long"):
        await card_from_child(request(engine))


async def test_a_card_is_made_once_and_again_when_the_engine_may_be_another(engine: str) -> None:
    made: list[tuple[ModelCard | None, ModelCard]] = []
    card = EngineCard(lambda before, after: made.append((before, after)))
    async with asyncio.TaskGroup() as tasks:
        for process in (1, 1, 1):
            await card.follow(tasks, request(engine), process)
        assert len(made) == 1
        await card.follow(tasks, request(engine), 2)
        assert len(made) == 1  # nobody waits for it
        await until(lambda: len(made) == 2)
        await card.follow(tasks, request(engine, block_tokens=32), 2)
        await until(lambda: len(made) == 3)
    assert made[0][0] is None
    assert made[1][0] is made[0][1]
    assert card.card is made[2][1]
    assert card.card.block_tokens == 32
    assert card.digest == card.card.digest()


async def test_a_card_at_hand_stands_where_a_new_one_cannot_be_made(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ModelCard] = []
    card = EngineCard(lambda before, after: made.append(after))
    async with asyncio.TaskGroup() as tasks:
        await card.follow(tasks, request(engine), 1)
        monkeypatch.setattr(sys, "executable", "/bin/false")
        await card.follow(tasks, request(engine), 2)
    assert card.card is made[0]
    assert len(made) == 1


async def test_an_engine_that_answers_no_probe_has_a_card_that_says_so_until_it_does(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_card, "RETRY_MIN_S", 0.0)
    made: list[ModelCard] = []
    card = EngineCard(lambda before, after: made.append(after))
    async with asyncio.TaskGroup() as tasks:
        await card.follow(tasks, request("http://127.0.0.1:1"), 1)
        assert (made[0].exact, made[0].table) == (False, None)
        assert "no card could be made" in made[0].reason
        await card.follow(tasks, request("http://127.0.0.1:1"), 1)
    async with asyncio.TaskGroup() as tasks:
        await card.follow(tasks, request(engine), 1)
    assert made[-1].table is not None
