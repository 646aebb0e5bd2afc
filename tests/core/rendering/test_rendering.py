"""What a request's fields do to its rendering, where the goldens do not say it already."""

import contextlib
import copy
from datetime import datetime
from typing import Any

import pytest
from golden_prompts import card_for, cases, template_source

from trimtab_core.chat_template import RenderClock, RenderLimits
from trimtab_core.model_card import ModelCard
from trimtab_core.not_renderable import NotRenderable
from trimtab_core.rendering import render_chat, render_completion, render_prompt

CLOCK = RenderClock(monotonic=lambda: 0.0, local_time=lambda: datetime(2025, 6, 1))
HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
SHOW_ALL = (
    "{{ [tools, documents, enable_thinking, reasoning_effort, add_generation_prompt, bos_token]"
    " | map('string') | join('|') }}"
)


def chat(card: ModelCard, **fields: Any) -> str:
    return render_chat(card, {"messages": [HELLO], **fields}, clock=CLOCK)


def test_requests_with_tools_have_a_template_of_their_own() -> None:
    card = ModelCard(template="plain", tools_template="{{ tools | length }} tools")
    assert chat(card) == "plain"
    assert chat(card, tools=[TOOL, TOOL]) == "2 tools"
    assert chat(card, chat_template_kwargs={"tools": [TOOL]}) == "1 tools"


def test_tools_that_are_not_to_be_used_are_left_out_if_the_engine_says_so() -> None:
    keeps = ModelCard(template="plain", tools_template="tools")
    drops = ModelCard(template="plain", tools_template="tools", exclude_tools_when_tool_choice_none=True)
    assert chat(keeps, tools=[TOOL], tool_choice="none") == "tools"
    assert chat(drops, tools=[TOOL], tool_choice="none") == "plain"
    assert chat(drops, tools=[TOOL], tool_choice="auto") == "tools"


def test_the_requests_variables_come_before_the_servers_and_null_hides_none() -> None:
    card = card_for("{{ a }} {{ b }} {{ c }}", default_template_kwargs={"a": 1, "b": 2, "c": 3})
    assert chat(card, chat_template_kwargs={"a": 9, "b": None, "c": "auto"}) == "9 2 3"


def test_fields_of_the_request_come_before_its_template_variables() -> None:
    card = card_for("{{ reasoning_effort }} {{ add_generation_prompt }}")
    given = {"reasoning_effort": "low", "add_generation_prompt": False}
    assert chat(card, chat_template_kwargs=given) == "low True"
    assert chat(card, chat_template_kwargs=given, reasoning_effort="high") == "high True"


@pytest.mark.parametrize(("effort", "thinking"), [("none", "False"), ("low", "True"), ("high", "True")])
def test_effort_turns_thinking_on_or_off_unless_the_request_says_which(effort: str, thinking: str) -> None:
    card = card_for("{{ enable_thinking }}", default_template_kwargs={"enable_thinking": "server"})
    assert chat(card) == "server"
    assert chat(card, reasoning_effort=effort) == thinking
    assert chat(card, reasoning_effort=effort, chat_template_kwargs={"enable_thinking": 7}) == "7"


def test_variables_that_the_template_does_not_name_do_not_reach_it() -> None:
    card = card_for(SHOW_ALL)
    assert chat(card, chat_template_kwargs={"bos_token": "B"}) == "None|None|||True|B"
    assert chat(card) == "None|None|||True|<|endoftext|>"


def test_special_tokens_go_in_front_of_a_chat_only_when_asked_for() -> None:
    card = card_for("{{ messages[0].content }}", completion_prefix="<s>")
    assert chat(card) == "Hello"
    assert chat(card, add_special_tokens=True) == "<s>Hello"
    assert chat(card_for("{{ messages[0].content }}", chat_prefix="<c>")) == "<c>Hello"


def test_special_tokens_go_in_front_of_a_plain_prompt_unless_refused() -> None:
    card = ModelCard(completion_prefix="<s>")
    assert render_completion(card, "Once") == "<s>Once"
    assert render_completion(card, "Once", add_special_tokens=False) == "Once"


def test_the_text_ends_where_the_first_image_stands() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look:"}, IMAGE, IMAGE]}, HELLO]}
    by_parts = render_prompt(card_for(template_source("qwen3_vl")), body, clock=CLOCK)
    assert (by_parts.text, by_parts.complete, by_parts.media_items) == ("<|im_start|>user\nLook:", False, 2)
    by_strings = render_prompt(card_for(template_source("chatml")), body, clock=CLOCK)
    assert (by_strings.text, by_strings.complete) == ("<|im_start|>user\n", False)
    without = render_prompt(card_for(template_source("chatml")), {"messages": [HELLO]}, clock=CLOCK)
    assert (without.complete, without.media_items) == (True, 0)


def test_a_prefix_before_an_image_does_not_depend_on_what_follows_it() -> None:
    card = card_for(template_source("qwen3_vl"))
    texts = {
        render_chat(card, {"messages": [HELLO, {"role": "user", "content": [*parts]}]}, clock=CLOCK)
        for parts in ([IMAGE], [IMAGE, {"type": "text", "text": "what?"}], [IMAGE, IMAGE])
    }
    assert len(texts) == 1


def test_an_image_that_does_not_show_in_the_text_is_a_refusal() -> None:
    card = card_for("{% for m in messages %}{% for part in m.content[1:] %}{{ part.text }}{% endfor %}{% endfor %}")
    with pytest.raises(NotRenderable, match="media item"):
        render_chat(card, {"messages": [{"role": "user", "content": [IMAGE]}]}, clock=CLOCK)


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ 1 }}"},
        {"chat_template": ""},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": ["enable_thinking"]},
        {"tools": []},
        {"tools": "f"},
        {"tools": ["f"]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "web_search", "function": {"name": "f"}}]},
        {"tools": [{"type": "function", "function": {"name": None}}]},
        {"documents": "d"},
        {"documents": ["d"]},
        {"continue_final_message": True},
        {"add_generation_prompt": "yes"},
        {"continue_final_message": 1, "add_generation_prompt": False},
        {"messages": None},
    ],
)
def test_requests_that_an_engine_refuses_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(NotRenderable):
        chat(card_for("{{ messages[0].content }}{{ documents }}{{ tools }}"), **fields)


def test_a_card_without_a_template_refuses() -> None:
    with pytest.raises(NotRenderable):
        chat(ModelCard())
    with pytest.raises(NotRenderable):
        chat(ModelCard(template="x"), tools=[TOOL])


def test_refusals_name_nothing_of_the_request() -> None:
    card = card_for("{{ raise_exception('bad: ' ~ messages[0].content) }}")
    with pytest.raises(NotRenderable) as refusal:
        chat(card)
    assert "Hello" not in refusal.value.reason


def test_limits_hold_for_big_prompts() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 1000}]}
    with pytest.raises(NotRenderable):
        render_chat(card_for("{{ messages[0].content }}"), body, RenderLimits(output_bytes=999), clock=CLOCK)


def test_no_case_changes_its_request() -> None:
    card = card_for(template_source("qwen3"))
    for name, body in cases().items():
        before = copy.deepcopy(body)
        with contextlib.suppress(NotRenderable):
            render_chat(card, body, clock=CLOCK)
        assert body == before, name
