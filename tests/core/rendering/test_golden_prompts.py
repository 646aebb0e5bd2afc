"""Prompts rendered here are those that a real vLLM computed, byte for byte."""

import pytest
from golden_prompts import (
    NOT_RENDERED_ON_PURPOSE,
    TEMPLATES,
    Golden,
    card_for,
    cases,
    read_golden,
    template_source,
)

from trimtab_core.model_card import ModelCard
from trimtab_core.not_renderable import NotRenderable
from trimtab_core.rendering import render_chat

ANSWERED_MIN = 60
"""Cases that the engine took with each template: fewer, and the recording is broken."""


def rendered(card: ModelCard, name: str, golden: Golden) -> str | None:
    try:
        return card.normalize(render_chat(card, cases()[name], clock=golden.clock())).decode()
    except NotRenderable:
        return None


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_prompt_that_the_engine_took_reads_as_the_engine_read_it(template: str) -> None:
    golden = read_golden(template)
    card = card_for(template_source(template))
    taken = {name: text for name, text in golden.answers.items() if text is not None}
    assert len(taken) >= ANSWERED_MIN
    ours = {name: rendered(card, name, golden) for name in taken if name not in NOT_RENDERED_ON_PURPOSE}
    assert ours == {name: text for name, text in taken.items() if name not in NOT_RENDERED_ON_PURPOSE}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_card_that_went_through_the_shared_state_renders_the_same(template: str) -> None:
    golden = read_golden(template)
    card = card_for(template_source(template))
    travelled = ModelCard.decode(card.encode())
    for name in ("tool call with text", "continue spaces", "documents", "combining after special"):
        assert rendered(travelled, name, golden) == rendered(card, name, golden)


def test_what_template_errors_refuse_is_refused_here_too() -> None:
    """Of the requests that the engine refused because its template did, none is rendered here."""
    golden = read_golden("own_dated")
    card = card_for(template_source("own_dated"))
    refused = [name for name in ("two calls", "continue and generate", "no messages", "lone surrogate", "empty tools")]
    assert [golden.answers[name] for name in refused] == [None] * len(refused)
    assert [rendered(card, name, golden) for name in refused] == [None] * len(refused)
