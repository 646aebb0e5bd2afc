"""Engine flags are read as the engine's own parser reads them."""

import pytest

from trimtab_sidecar.engine_flags import EngineFlags, parse_engine_flags


def test_no_arguments_are_the_engines_defaults() -> None:
    assert parse_engine_flags([]) == EngineFlags()


@pytest.mark.parametrize(
    "words",
    [
        ["--chat-template", "/t.jinja", "--tokenizer-mode", "Slow"],
        ["--chat-template=/t.jinja", "--tokenizer-mode=slow"],
        ["--chat_template", "/t.jinja", "--tokenizer_mode=slow"],
        ["--chat-template", "/other.jinja", "--chat-template", "/t.jinja", "--tokenizer-mode", "slow"],
    ],
)
def test_every_spelling_of_a_flag_means_the_same(words: list[str]) -> None:
    flags = parse_engine_flags(["vllm", "serve", "org/name", *words])
    assert (flags.model, flags.chat_template, flags.tokenizer_mode) == ("org/name", "/t.jinja", "slow")


def test_the_model_may_stand_anywhere() -> None:
    assert parse_engine_flags(["python3", "-m", "vllm.entrypoints.openai.api_server", "--model=/m"]).model == "/m"
    assert parse_engine_flags(["vllm", "serve", "--port", "8000", "--model", "/m"]).model == "/m"
    assert parse_engine_flags(["/usr/bin/vllm", "serve", "/m", "--port", "8000"]).model == "/m"
    assert parse_engine_flags(["python3", "-m", "sglang.launch_server", "--model-path", "/m"]).model == "/m"


def test_a_template_can_be_given_as_text() -> None:
    template = "{% for m in messages %}{{ m.content }}=\n{% endfor %}"
    assert parse_engine_flags(["--chat-template", template]).chat_template == template
    assert parse_engine_flags(["--chat-template=" + template]).chat_template == template


def test_default_variables_come_as_an_object_or_one_by_one() -> None:
    whole = parse_engine_flags(["--default-chat-template-kwargs", '{"enable_thinking": false, "n": {"a": 1}}'])
    assert whole.default_template_kwargs == {"enable_thinking": False, "n": {"a": 1}}
    dotted = ["--default-chat-template-kwargs.enable_thinking", "false", "--default_chat_template_kwargs.n.a=1"]
    assert parse_engine_flags(dotted).default_template_kwargs == {"enable_thinking": False, "n": {"a": 1}}
    assert parse_engine_flags(["--default-chat-template-kwargs.s", "plain"]).default_template_kwargs == {"s": "plain"}
    assert parse_engine_flags(["--default-chat-template-kwargs", "broken"]).default_template_kwargs == {}


def test_switches_can_be_turned_on_and_off() -> None:
    name = "exclude-tools-when-tool-choice-none"
    assert parse_engine_flags(["--" + name]).exclude_tools_when_tool_choice_none
    assert parse_engine_flags(["--" + name.replace("-", "_"), "--port", "1"]).exclude_tools_when_tool_choice_none
    assert not parse_engine_flags(["--" + name, "--no-" + name]).exclude_tools_when_tool_choice_none


def test_a_served_model_can_have_several_names() -> None:
    flags = parse_engine_flags(["vllm", "serve", "/m", "--served-model-name", "a", "b", "--port", "8000"])
    assert flags.served_model_names == ("a", "b")


@pytest.mark.parametrize("shell", [["sh", "-c"], ["/bin/bash", "-ec"], ["bash", "-lc"]])
def test_a_shells_script_is_read(shell: list[str]) -> None:
    script = "exec vllm serve /m --chat-template '/a b.jinja' # comment\n"
    flags = parse_engine_flags([*shell, script])
    assert (flags.model, flags.chat_template) == ("/m", "/a b.jinja")


def test_a_script_that_no_shell_would_take_is_left_alone() -> None:
    assert parse_engine_flags(["sh", "-c", "vllm serve 'open"]) == EngineFlags()


def test_a_flag_at_the_end_without_a_value_is_skipped() -> None:
    assert parse_engine_flags(["--chat-template"]).chat_template is None
