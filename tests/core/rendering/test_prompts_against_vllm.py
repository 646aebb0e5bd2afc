"""A real vLLM reads prompts as the goldens say and as model cards render them.

`TRIMTAB_VLLM=/path/to/vllm pytest -m engine tests/core/rendering`; with `TRIMTAB_RECORD=1` what it answers becomes the
goldens. Each test starts engines of its own, one at a time.
"""

import json
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import aiohttp
import pytest
from golden_prompts import (
    DATA,
    NOT_RENDERED_ON_PURPOSE,
    SPECIAL_TOKENS,
    TEMPLATES,
    Golden,
    card_for,
    cases,
    read_golden,
    template_source,
    write_golden,
)
from vllm_engine import VllmProcess, model_copy, running_vllm

from trimtab_core.chat_template import RenderClock
from trimtab_core.model_card import ModelCard
from trimtab_core.not_renderable import NotRenderable
from trimtab_core.rendering import render_chat, render_completion
from trimtab_sidecar.card_builder import build_card
from trimtab_sidecar.model_files import read_model_files
from trimtab_sidecar.token_pieces import TokenPieces, read_token_pieces

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif("TRIMTAB_VLLM" not in os.environ, reason="TRIMTAB_VLLM does not name a vllm command"),
]

CLOCK = RenderClock(monotonic=time.monotonic, local_time=datetime.now)
ONLY_COMPLETIONS_KNOW = frozenset({"documents", "reasoning_effort", "add_special_tokens"})
PLAIN_PROMPTS = (
    "Once upon a time",
    "  leading <|im_start|>user\n\ttabs\r\n",
    "e\u0301\u0323 A\u030a <|im_end|>\u0338 \u1112\u1161\u11ab",
    "東京 \u2581 👩‍🚀 \u0000\u007f\ufeff",
    "{{ not a template }}" * 50,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_copy(tmp_path_factory.mktemp("vllm"), **SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def pieces(model: Path) -> TokenPieces:
    return read_token_pieces(read_model_files(model).tokenizer)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VllmProcess]:
    """One engine that takes each request's own template, so that one start serves all templates."""
    with running_vllm(model, "--trust-request-chat-template") as process:
        yield process


def text_of(pieces: TokenPieces, tokens: list[int] | None) -> str | None:
    return None if tokens is None else ModelCard(table=pieces.table).text_of_tokens(tokens).decode()


def ours(card: ModelCard, body: dict[str, object]) -> str | None:
    try:
        return card.normalize(render_chat(card, body, clock=CLOCK)).decode()
    except NotRenderable:
        return None


async def built_card(engine: VllmProcess, model: Path, *flags: str) -> ModelCard:
    async with aiohttp.ClientSession() as session:
        return await build_card(
            session=session,
            base_url=engine.url,
            engine_args=["vllm", "serve", str(model), *flags],
            model_dir=None,
            served_model="tiny",
            block_tokens=32,
            env={},
            clock=CLOCK,
        )


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_engine_still_answers_what_was_recorded(engine: VllmProcess, pieces: TokenPieces, template: str) -> None:
    source = template_source(template)
    answers = {
        name: text_of(pieces, engine.chat_tokens({"chat_template": source, **body}))
        for name, body in cases().items()
        if "chat_template" not in body
    }
    if os.environ.get("TRIMTAB_RECORD") == "1":
        write_golden(template, Golden(engine=f"vllm {engine.version()}", recorded_at=datetime.now(), answers=answers))
    if "strftime_now" in source:
        recorded = {name: ours(card_for(source), cases()[name]) for name, text in answers.items() if text is not None}
        answers = {name: text for name, text in answers.items() if text is not None}
        assert {name: text for name, text in answers.items() if name not in NOT_RENDERED_ON_PURPOSE} == {
            name: text for name, text in recorded.items() if name not in NOT_RENDERED_ON_PURPOSE
        }
    else:
        assert answers == read_golden(template).answers


@pytest.mark.parametrize("template", TEMPLATES)
def test_tokenize_reads_chats_as_completions_do(engine: VllmProcess, template: str) -> None:
    """Probes use `/tokenize`; what they prove must hold for completions."""
    source = template_source(template)
    for name, body in cases().items():
        old_name_for_reasoning = "reasoning_content" in json.dumps(body)
        if ONLY_COMPLETIONS_KNOW & body.keys() or old_name_for_reasoning or "chat_template" in body:
            continue
        request = {"chat_template": source, **body}
        by_completions = engine.chat_tokens(request)
        if by_completions is not None:
            assert engine.tokenize(request) == by_completions, name


def test_plain_prompts_read_as_the_card_says(engine: VllmProcess, pieces: TokenPieces) -> None:
    card = card_for(template_source("chatml"), added_tokens=pieces.added_tokens)
    for prompt in PLAIN_PROMPTS:
        for special in (True, False):
            tokens = engine.tokenize({"prompt": prompt, "add_special_tokens": special})
            expected = card.normalize(render_completion(card, prompt, add_special_tokens=special)).decode()
            assert text_of(pieces, tokens) == expected


async def test_the_card_of_the_model_as_it_is_is_exact(engine: VllmProcess, model: Path) -> None:
    card = await built_card(engine, model, "--trust-request-chat-template")
    assert (card.exact, card.reason) == (True, "")
    assert (card.normalizer, card.completion_prefix, card.content_format) == ("nfc", "", "string")


async def test_the_probes_find_out_that_the_engine_has_another_template(engine: VllmProcess, model: Path) -> None:
    card = await built_card(engine, model, "--chat-template", str(DATA / "templates" / "qwen3.jinja"))
    assert not card.exact
    assert card.reason.startswith("probe '")


SERVERS = {
    "defaults and excluded tools": (
        "qwen3",
        "--default-chat-template-kwargs",
        '{"enable_thinking": false}',
        "--exclude-tools-when-tool-choice-none",
    ),
    "parts": ("own_parts", "--chat_template_content_format=openai"),
    "parts as strings": ("own_parts", "--chat-template-content-format", "string"),
    "dated": ("own_dated", "--default-chat-template-kwargs.date_string", "yesterday"),
}


@pytest.mark.parametrize("name", SERVERS)
async def test_the_card_of_an_engine_with_flags_is_exact(model: Path, pieces: TokenPieces, name: str) -> None:
    template, *flags = SERVERS[name]
    given = ("--chat-template", str(DATA / "templates" / f"{template}.jinja"), *flags)
    with running_vllm(model, *given) as engine:
        card = await built_card(engine, model, *given)
        assert (card.exact, card.reason) == (True, "")
        for case, body in cases().items():
            # tool_choice none is all that an engine without a tool parser takes with tools.
            request = {**body, "tool_choice": "none"} if "tools" in body else body
            tokens = engine.chat_tokens(request)
            if tokens is not None and case not in NOT_RENDERED_ON_PURPOSE:
                assert ours(card, request) == text_of(pieces, tokens), case


async def test_a_bos_token_goes_in_front_of_plain_prompts_and_not_of_chats(tmp_path: Path) -> None:
    bos = "<|endoftext|>"
    model = model_copy(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **SPECIAL_TOKENS)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [0], "tokens": [bos]}},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    with running_vllm(model, weights=False) as engine:
        card = await built_card(engine, model)
        assert (card.exact, card.reason) == (True, "")
        assert (card.completion_prefix, card.chat_prefix, card.normalizer) == (bos, "", "none")
        body = {**cases()["turns"], "add_special_tokens": True}
        assert text_of(read_token_pieces(tokenizer), engine.chat_tokens(body)) == ours(card, body)
