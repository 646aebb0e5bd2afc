"""Chats that a template only wraps: the same text as the template gives, and only where that is certain."""

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_core.chat_skeleton import SKELETONS_MAX, Skeletons
from trimtab_core.chat_template import RenderClock, RenderLimits, compile_template, parse_template
from trimtab_core.model_card import ModelCard
from trimtab_core.not_renderable import NotRenderable
from trimtab_core.rendering import render_chat

CLOCK = RenderClock(monotonic=time.monotonic, local_time=datetime.now)
LIMITS = RenderLimits()
TEMPLATES = Path(__file__).parents[2] / "data/rendering/templates"
GOLDEN = {path.stem: path.read_text() for path in TEMPLATES.glob("*.jinja")}
WRAPPING = {
    **{name: GOLDEN[name] for name in ("chatml", "phi3_5", "qwen2_5")},
    "places": "{% for m in messages %}{{ loop.index }}{{ m.role | upper }}{{ m.content }}{{ loop.last }}{% endfor %}",
    "rest": "{{ messages[0].content ~ bos_token }}{% for m in messages[1:] %}[{{ m['content'] }}]{% endfor %}",
    "picky": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
    "{% endif %}"
    "{{ m.content }}{% endfor %}",
    "types": "{% for m in messages %}{% if m.content is string and (m.content or m.x) %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "before": "{% for m in messages %}{{ messages[loop.index0 - 1].role }}:{{ m.content }}{% endfor %}",
    "counted": "{% for m in messages if m.role != 'system' %}{{ m.content }}/{{ messages | length }}{% endfor %}",
}
LOOKING = {
    "a filter": "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "a method": "{% for m in messages %}{{ m.content.strip() }}{% endfor %}",
    "a part": "{% for m in messages %}{{ m.content[0] }}{% endfor %}",
    "a comparison": "{% for m in messages %}{% if m.content == 'x' %}y{% endif %}{{ m.content }}{% endfor %}",
    "a compared truth": "{% for m in messages %}{% if (m.content and 'a') == 'a' %}y{% endif %}{% endfor %}",
    "a value that decides": "{% for m in messages %}{{ m.content or 'x' }}{% endfor %}",
    "a search": "{% for m in messages %}{{ 'x' in m.content }}{% endfor %}",
    "a name for it": "{% for m in messages %}{% set c = m.content %}{{ c }}{% endfor %}",
    "a name for a message": "{% set m = messages[0] %}{{ m.content }}",
    "a name for the list": "{% set all = messages[1:] %}{% for m in all %}{{ m.content | upper }}{% endfor %}",
    "the whole message": "{% for m in messages %}{{ m }}{% endfor %}",
    "the whole list": "{{ messages }}",
    "the list in a filter": "{{ messages | map(attribute='content') | join }}",
    "a field that is worked out": "{% for m in messages %}{{ m['con' ~ 'tent'] | upper }}{% endfor %}",
    "a function": "{% for m in messages %}{{ namespace(x=m.content).x }}{% endfor %}",
    "a message elsewhere": "{% for m in messages %}{{ loop.previtem.content | upper }}{% endfor %}",
    "a message among others": "{% for m in messages %}{{ (m if true else m).content | upper }}{% endfor %}",
    "its letters": "{% for m in messages %}{% for c in m.content %}{{ c }}.{% endfor %}{% endfor %}",
    "the loop's memory": "{% for m in messages %}{% if loop.changed(m.content) %}x{% endif %}{% endfor %}",
    "a macro": "{% macro f(x) %}{{ x | upper }}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
    "the clock": "{{ strftime_now('%f') }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "arithmetic": "{% for m in messages %}{{ m.content * 2 }}{{ '%s' % m.content }}{% endfor %}",
    "a new meaning of the list": "{% set messages = [1] %}{% for m in messages %}{{ m.content }}{% endfor %}",
    "one name for two": "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in tools %}{{ m.x }}{% endfor %}",
}
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "\ue000trimtab:0:a\ue001"]),
            "content": st.text(max_size=6)
            | st.sampled_from(["\ue000trimtab:1:a\ue001", "x-anthropic-billing-header: 1\nrest"]),
        }
    ),
    min_size=1,
    max_size=4,
)


def card(template: str) -> ModelCard:
    return ModelCard(template=template, tools_template=template, special_tokens={"bos_token": "<s>"}, chat_prefix="^")


def text(template: str, messages: list[dict[str, Any]], **more: Any) -> str | None:
    try:
        return render_chat(card(template), {"messages": messages, **more}, clock=CLOCK)
    except NotRenderable:
        return None


@pytest.mark.parametrize("name", sorted(WRAPPING))
@settings(deadline=None)
@given(messages=MESSAGES)
def test_the_text_is_what_the_template_gives(name: str, messages: list[dict[str, Any]]) -> None:
    # A field that no template sees makes the template run.
    assert text(WRAPPING[name], messages) == text(WRAPPING[name], messages, x=1)


@pytest.mark.parametrize("name", sorted(WRAPPING))
def test_a_template_that_only_wraps_is_taken_for_one(name: str) -> None:
    assert compile_template(WRAPPING[name]).skeletons.is_usable


@pytest.mark.parametrize("looks", sorted(LOOKING))
def test_a_template_that_looks_at_the_contents_runs_each_time(looks: str) -> None:
    assert not compile_template(LOOKING[looks]).skeletons.is_usable


@pytest.mark.parametrize("name", sorted(GOLDEN))
@settings(deadline=None)
@given(messages=MESSAGES)
def test_the_templates_of_real_models_give_the_same_either_way(name: str, messages: list[dict[str, Any]]) -> None:
    assert text(GOLDEN[name], messages) == text(GOLDEN[name], messages, x=1)


@pytest.mark.parametrize("message", [{"role": []}, {"content": "x"}, {"role": "user", "content": None}, [], "x"])
def test_what_is_no_plain_message_is_left_to_the_template(message: Any) -> None:
    messages = [{"role": "user", "content": "hello"}, message]
    assert text(WRAPPING["chatml"], messages) == text(WRAPPING["chatml"], messages, x=1)


def test_a_row_of_roles_is_rendered_once_and_kept_within_bounds() -> None:
    template = compile_template(WRAPPING["chatml"])
    skeletons = Skeletons(parse_template(WRAPPING["chatml"]))
    asked = []

    def render(messages: list[dict[str, Any]]) -> str:
        asked.append(messages)
        return template.render({"messages": messages, "add_generation_prompt": True}, limits=LIMITS, clock=CLOCK)

    for _ in range(3):
        assert skeletons.text(("user",), ["hello"], (), render) is not None
    assert len(asked) == 2  # with two sets of marks
    for number in range(SKELETONS_MAX + 3):
        skeletons.text(("user",), ["hello"], (("bos_token", str(number)),), render)
    assert len(skeletons._kept) <= SKELETONS_MAX
    assert skeletons.text(("user",), [""], (), render) is None


def test_text_of_a_template_that_looks_like_a_mark_is_left_to_the_template() -> None:
    source = "{% for m in messages %}{{ m.content }}{{ '\ue000trimtab:0:a\ue001' }}{% endfor %}"
    messages = [{"role": "user", "content": "hello"}]
    assert text(source, messages) == "^hello\ue000trimtab:0:a\ue001"
