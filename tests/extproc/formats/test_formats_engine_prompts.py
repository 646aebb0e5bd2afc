"""Our prompts against those that vLLM 0.32.0 made of the same requests (recorded by `record_engine_prompts.py`)."""

import json
from pathlib import Path
from typing import Any

import pytest
from format_cards import exact_card

from trimtab_core.chunks import hash_chunks, root_hash
from trimtab_extproc.formats import TokenSource, parse_request, rendering_for

DATA = Path(__file__).parents[2] / "data" / "formats"
SEED = 7
CLAIMS_NOTHING = {
    ("/v1/messages", "tools empty"),
    ("/v1/responses", "built-in tools alone"),
    # Engines refuse these later on, or read them as ids that no client means.
    ("/v1/completions", "huge id"),
    ("/v1/completions", "bool ids"),
}
"""Taken by the engine, and left unclaimed by us: a good choice is lost, nothing worse."""


def cases() -> list[Any]:
    found = []
    for file in ("engine_prompts_any_order.json", "engine_prompts_system_first.json"):
        recorded = json.loads((DATA / file).read_text(encoding="utf-8"))
        for case in recorded["cases"]:
            found.append(pytest.param(recorded["template"], case, id=f"{file[15:-5]}:{case['path']}:{case['name']}"))
    return found


@pytest.mark.parametrize(("template", "case"), cases())
def test_our_prompt_is_the_engines_byte_for_byte(template: str, case: dict[str, Any]) -> None:
    body = json.dumps(case["body"]).encode()
    parsed = parse_request("POST", case["path"], {"content-type": "application/json"}, body)
    rendering = rendering_for(parsed, exact_card(template), None, SEED)
    if case["answer"] != 200:
        # The engine refuses it, so a claim would do no harm; but nothing may break.
        assert rendering.is_exact
        return
    if (case["path"], case["name"]) in CLAIMS_NOTHING:
        assert sum(len(prompt.chain) for prompt in rendering.prompts) == 0
        return
    if "ids" in case:
        assert [source.ids.tolist() for source in parsed.sources if isinstance(source, TokenSource)] == case["ids"]
        assert [prompt.tokens for prompt in rendering.prompts] == [len(ids) for ids in case["ids"]]
        return
    texts = [text.encode() for text in case["texts"]]
    assert rendering.reason == ""
    assert [prompt.size_bytes for prompt in rendering.prompts] == [len(text) for text in texts]
    expected = [hash_chunks(text, root_hash(SEED), SEED).tolist() for text in texts]
    assert [prompt.chain.tolist() for prompt in rendering.prompts] == expected


def test_thinking_turned_off_becomes_the_effort_that_the_template_heeds() -> None:
    # vLLM's /v1/messages/count_tokens: 39 tokens with this template, unlike with the effort "low" (38).
    recorded = json.loads((DATA / "engine_prompts_any_order.json").read_text(encoding="utf-8"))
    assert prompt_with_thinking_off(recorded["template"]) == prompt_with_effort(recorded["template"], "none")


def test_thinking_turned_off_becomes_low_effort_where_the_template_takes_none_for_another() -> None:
    # vLLM's /v1/messages/count_tokens: 29 tokens with this template, as with the effort "low", and 41 without one.
    recorded = json.loads((DATA / "engine_prompts_system_first.json").read_text(encoding="utf-8"))
    assert prompt_with_thinking_off(recorded["template"]) == prompt_with_effort(recorded["template"], "low")


def prompt_with_thinking_off(template: str) -> list[int]:
    body = {
        "model": "tiny",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "Hi"}],
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "high"},
    }
    return chain("/v1/messages", template, body)


def prompt_with_effort(template: str, effort: str) -> list[int]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
    return chain("/v1/chat/completions", template, body)


def chain(path: str, template: str, body: dict[str, Any]) -> list[int]:
    parsed = parse_request("POST", path, {}, json.dumps(body).encode())
    (prompt,) = rendering_for(parsed, exact_card(template), None, SEED).prompts
    assert len(prompt.chain) > 0
    return prompt.chain.tolist()
