"""References to variables are read as the kubelet and a shell read them."""

import pytest

from trimtab_operator.injection.engine_words import read_words
from trimtab_operator.injection.environment import VALUES_CHARS_MAX, Environment
from trimtab_operator.injection.references import escaped, escaped_but, expand, is_script, script_expanded

VALUES = {"A": "a", "B": "b", "EMPTY": "", "MONEY": "$$"}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("$(A)", "a"),
        ("___$(B)___", "___b___"),
        ("$(A)$(B)", "ab"),
        ("$(EMPTY)", ""),
        ("$(MONEY)", "$$"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$a"),
        ("$$$$(A)", "$$(A)"),
        ("foo$$bar", "foo$bar"),
        ("$A ${B}", "$A ${B}"),
        ("$(A", "$(A"),
        ("$(", "$("),
        ("$)", "$)"),
        ("$", "$"),
        ("$()", "$()"),
        ("$(A $(B)", "$(A b"),
    ],
)
def test_kubernetes_references(text: str, result: str) -> None:
    assert expand(text, VALUES.get) == result


@pytest.mark.parametrize("text", ["", "$", "$$", "$(A)", "$$(A)", "a$(B", '{"x": "$$$(A)"}'])
def test_what_is_escaped_comes_out_as_it_was(text: str) -> None:
    assert expand(escaped(text), VALUES.get) == text


def test_only_the_named_references_are_left_to_the_kubelet() -> None:
    text = escaped_but("$(A) $(B) $C $$", frozenset({"A"}))
    assert expand(text, VALUES.get) == "a $(B) $C $$"


@pytest.mark.parametrize(
    ("script", "result"),
    [
        ("vllm serve $A", "vllm serve a"),
        ('vllm serve "${A}-$B"', 'vllm serve "a-b"'),
        ("vllm serve '$A'", "vllm serve '$A'"),
        ('echo "it\'s $A"', 'echo "it\'s a"'),
        ("echo \\$A", "echo \\$A"),
        ("echo ${A:-x} $(date) $UNKNOWN", "echo ${A:-x} $(date) $UNKNOWN"),
        ("a \\\n  --b", "a    --b"),
        ("trailing \\", "trailing \\"),
    ],
)
def test_a_shells_plain_variables(script: str, result: str) -> None:
    assert script_expanded(script, VALUES.get) == result


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["sh", "-c", "x"], True),
        (["/bin/bash", "-lc", "x"], True),
        (["sh", "x.sh", "y"], False),
        (["bash", "--config", "x"], False),
        (["vllm", "-c", "x"], False),
        (["sh", "-c"], False),
    ],
)
def test_which_command_is_a_script(words: list[str], answer: bool) -> None:
    assert is_script(words) is answer


def test_values_that_refer_to_each_other_do_not_grow_without_end() -> None:
    env = [{"name": "E0", "value": "0123456789"}]
    env += [{"name": f"E{n}", "value": f"$(E{n - 1})" * 2} for n in range(1, 60)]
    environment = Environment({"env": env})
    known = [name for n in range(60) if (name := environment.value(f"E{n}")) is not None]
    assert 5 < len(known) < 20
    assert sum(map(len, known)) <= VALUES_CHARS_MAX
    words = read_words({"args": ["$(E12)" * 1_000, "--model", "m"]}, environment, "vllm")
    assert words.words == ()
    script = "x $E12 " * 1_000
    assert len(read_words({"command": ["sh", "-c", script]}, environment, "vllm").words[2]) == len(script)


def test_a_command_line_that_would_be_too_long_as_a_variable_is_left_out() -> None:
    words = read_words({"args": ["--model", "m", "--x", "\x01" * 50_000]}, Environment({}), "vllm")
    assert words.model == "m"
    assert words.encoded() == "[]"


def test_an_entry_that_comes_twice_counts_as_its_last() -> None:
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)"}, {"name": "A", "value": "2"}]
    environment = Environment({"env": env})
    assert (environment.value("A"), environment.value("B")) == ("2", "1")


def test_a_value_is_known_only_if_all_that_it_refers_to_is() -> None:
    env = [
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "URL", "value": "x://$(SECRET)"},
        {"name": "TEXT", "value": "$(NOBODY)"},
    ]
    environment = Environment({"env": env})
    assert environment.value("URL") is None
    assert environment.value("TEXT") == "$(NOBODY)"
    assert [entry["name"] for entry in environment.entries(["URL"])] == ["SECRET", "URL"]
    # Now somebody may have a value after all.
    environment = Environment({"env": env, "envFrom": [{"configMapRef": {"name": "c"}}]})
    assert environment.value("TEXT") is None
