"""Messages reach the template in the engine's form; what only goldens of media models could show is pinned here."""

import copy
from typing import Any

import pytest

from trimtab_core.chat_messages import MEDIA_MARK, Conversation, developer_as_system, parse_messages
from trimtab_core.not_renderable import NotRenderable

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}


def text(value: str, **extra: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **extra}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def parse(*messages: dict[str, Any], form: Any = "openai") -> Conversation:
    return parse_messages(list(messages), form)


def test_a_media_item_ends_the_text_in_place_where_the_template_takes_parts() -> None:
    conversation = parse(user(text("look:"), IMAGE, text("well?"), IMAGE))
    assert conversation.media_items == 2
    assert conversation.messages[0]["content"] == [
        text("look:"),
        text(MEDIA_MARK),
        {"type": "image"},
        text("well?"),
        {"type": "image"},
    ]


def test_a_media_item_ends_the_text_at_the_front_of_its_message_where_the_template_takes_strings() -> None:
    conversation = parse(user(text("before")), user(text("look:"), IMAGE), form="string")
    assert [message["content"] for message in conversation.messages] == ["before", MEDIA_MARK + "look:"]


@pytest.mark.parametrize(
    ("part", "modality"),
    [
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "audio"),
        ({"type": "video_url", "video_url": {"url": "http://v"}}, "video"),
        ({"image_url": "http://i"}, "image"),
        ({"type": "image_url", "image_url": {"url": "http://i"}, "uuid": "one"}, "image"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "image"),
    ],
)
def test_every_kind_of_media_counts_and_none_of_its_data_gets_through(part: dict[str, Any], modality: str) -> None:
    conversation = parse(user(part))
    assert conversation.media_items == 1
    assert conversation.messages[0]["content"] == [text(MEDIA_MARK), {"type": modality}]


def test_fields_of_a_part_that_the_api_does_not_know_reach_the_template() -> None:
    conversation = parse(user(text("a", cache_control={"type": "ephemeral"}), {**IMAGE, "min_pixels": 3, "uuid": None}))
    assert conversation.messages[0]["content"][0]["cache_control"] == {"type": "ephemeral"}
    assert conversation.messages[0]["content"][2] == {"type": "image", "min_pixels": 3}


def test_the_request_is_not_changed() -> None:
    call = {"type": "function", "function": {"arguments": '{"a": 1}', "name": "f"}, "id": "1"}
    messages = [
        {"role": "system", "content": [text("x-anthropic-billing-header: 1\nreal")]},
        {"role": "developer", "content": "d", "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "content": [text("a"), text("b")], "tool_call_id": "1"},
    ]
    before = copy.deepcopy(messages)
    developer_as_system(parse_messages(messages, "openai").messages)
    assert messages == before


def test_arguments_that_are_no_object_become_an_empty_one() -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": given}} for given in ("", "no", "[1]", "null", None)]
    parsed = parse({"role": "assistant", "content": None, "tool_calls": calls}).messages[0]
    assert [call["function"]["arguments"] for call in parsed["tool_calls"]] == [{}] * 5


def test_arguments_nested_too_deep_to_read_become_an_empty_object() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "[" * 200_000}}
    parsed = parse({"role": "assistant", "content": None, "tool_calls": [call]}).messages[0]
    assert parsed["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        {"role": "user"},
        ["hello"],
        [{"content": "no role"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user", "content": 3}],
        [user(3)],
        [user({"type": "hologram", "hologram": "x"})],
        [user({"text": "no type"})],
        [user({"type": ["text"], "text": "x"})],
        [user({"type": "text", "text": 3})],
        [user({"type": "prompt_embeds", "data": "AAAA"})],
        [{"role": "assistant", "content": "x", "tool_calls": "f()"}],
        [{"role": "assistant", "content": "x", "tool_calls": ["f()"]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "type": "custom", "custom": {}}]}],
    ],
)
def test_messages_that_an_engine_answers_with_400_are_not_rendered(messages: Any) -> None:
    with pytest.raises(NotRenderable):
        parse_messages(messages, "string")
