"""Templates run in a sandbox and within limits; the clock is the caller's."""

from collections.abc import Iterator
from datetime import datetime

import pytest

from trimtab_core.chat_template import (
    TEMPLATE_CHARS_MAX,
    RenderClock,
    RenderLimits,
    compile_template,
    parse_template,
)
from trimtab_core.not_renderable import NotRenderable

NOON = datetime(2024, 2, 29, 12, 0)


def ticking(step_s: float) -> RenderClock:
    """A clock that goes on by `step_s` whenever it is looked at."""

    def times() -> Iterator[float]:
        now_s = 0.0
        while True:
            yield now_s
            now_s += step_s

    return RenderClock(monotonic=times().__next__, local_time=lambda: NOON)


def render(source: str, step_s: float = 0.0, output_bytes: int = 1 << 20, **variables: object) -> str:
    limits = RenderLimits(time_s=1.0, output_bytes=output_bytes)
    return compile_template(source).render(variables, limits=limits, clock=ticking(step_s))


def test_the_date_is_the_callers() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "29 Feb 2024"


def test_json_keeps_letters_and_html_and_order() -> None:
    value = {"z": "<é&'>", "a": [1.0, None, True]}
    assert render("{{ v | tojson }}", v=value) == '{"z": "<é&\'>", "a": [1.0, null, true]}'


def test_generation_blocks_are_their_body() -> None:
    source = "{% generation %}{% set x = 1 %}[{{ x }}]{% endgeneration %}{{ x is defined }}"
    assert render(source) == "[1]False"


def test_loops_can_break_and_continue() -> None:
    skip, stop = "{% if i == 1 %}{% continue %}{% endif %}", "{% if i == 3 %}{% break %}{% endif %}"
    assert render("{% for i in range(9) %}" + skip + stop + "{{ i }}{% endfor %}") == "02"


def test_a_block_takes_its_line_with_it() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ v | tojson }}",
        "{% for m in v %}{% endfor %}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ given.append(1) }}",
        "{{ given.__class__.__init__.__globals__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
    ],
)
def test_what_goes_wrong_in_a_template_or_breaks_out_of_it_is_a_refusal(source: str) -> None:
    with pytest.raises(NotRenderable):
        render(source, given=[1])


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% generation %}", "x" * (TEMPLATE_CHARS_MAX + 1)])
def test_what_is_no_template_is_a_refusal(source: str) -> None:
    with pytest.raises(NotRenderable):
        compile_template(source)
    with pytest.raises(NotRenderable):
        parse_template(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}x{{ i }}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% if v.a %}{% endif %}{% endfor %}",
        "{% for i in range(99999) %}{% if v['a'] %}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_long_is_stopped_whether_it_prints_or_not(source: str) -> None:
    with pytest.raises(NotRenderable, match="too long"):
        render(source, step_s=0.3, v={"a": 0})


def test_a_template_that_prints_too_much_is_stopped() -> None:
    assert render("{{ v }}", output_bytes=6, v="ééé") == "ééé"
    with pytest.raises(NotRenderable, match="too long"):
        render("{{ v }}", output_bytes=5, v="ééé")
    with pytest.raises(NotRenderable, match="too long"):
        render("{% for i in range(99999) %}{{ v }}{% endfor %}", v="x" * 1000)


def test_one_template_can_render_inside_of_another_ones_rendering() -> None:
    """Threads and nested calls each have their own limits."""
    inner = compile_template("{{ strftime_now('%Y') }}")

    class Nested:
        def __str__(self) -> str:
            return inner.render({}, limits=RenderLimits(), clock=ticking(0))

    assert render("{{ a }}{{ strftime_now('%m') }}", a=Nested()) == "202402"


def test_the_names_that_a_template_reads_are_known() -> None:
    template = compile_template("{% set x = tools %}{% for m in messages %}{{ m.a ~ x ~ 'developer' }}{% endfor %}")
    assert template.variables == {"tools", "messages"}
    assert template.names_developer
