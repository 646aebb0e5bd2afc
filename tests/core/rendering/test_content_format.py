"""The content format is read off a template as engines do."""

import pytest

from trimtab_core.content_format import content_format_of

PARTS = [
    "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for c in m['content'] | selectattr('type') %}{% endfor %}{% endfor %}",
    "{% for m in messages[1:] %}{% for c in m['content'][:2] %}{% endfor %}{% endfor %}",
    "{% set a = messages[1:] %}{% set b = a %}{% for m in b %}{% for c in m.content %}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}",
    "{% macro f(x, y) %}{% for c in y %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(1, m.content) }}"
    "{% endfor %}",
    "{% macro f(y) %}{% for c in y %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(y=m.content) }}{% endfor %}",
]
STRINGS = [
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}",
    "{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}{% for m in messages %}{{ f(m) }}"
    "{% endfor %}",
    "{% for m in messages %}{% for c in tools %}{{ c.content }}{% endfor %}{% endfor %}",
    "{% for t in tools %}{% for c in t.content %}{% endfor %}{% endfor %}",
    "no loop",
]


@pytest.mark.parametrize("source", PARTS)
def test_a_loop_over_content_means_parts(source: str) -> None:
    assert content_format_of(source) == "openai"


@pytest.mark.parametrize("source", STRINGS)
def test_no_loop_over_content_means_a_string(source: str) -> None:
    assert content_format_of(source) == "string"
