"""OpenAI chat messages as an engine hands them to its chat template.

The one rule: the output is what vLLM's own parsing yields for the same JSON, key order included, since some templates
print whole objects. Messages that the engine answers with 400 are `NotRenderable`. The input is never changed.

An image, a sound or a video ends the text: `MEDIA_MARK` goes in before the first of them, and what follows it in the
rendered text is no longer known byte for byte. The data of media items is never looked at.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trimtab_core.not_renderable import NotRenderable

ContentFormat = Literal["string", "openai"]
"""What a template takes for a message's content: one string, or OpenAI's list of parts."""
Message = dict[str, Any]

MEDIA_MARK = "\ue000trimtab: media from here\ue001"
"""Stands in the rendered text where the first media item is. A text that holds it ends there: its own loss."""

_BILLING_HEADER = "x-anthropic-billing-header"
_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MODALITIES = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
}
_KNOWN_PART_FIELDS = frozenset(
    [
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    ]
)
"""Fields of a part that its template does not get to see; any other field is passed on."""
_CALL_FIELDS = ("id", "function", "type")
_CALLED_FUNCTION_FIELDS = ("arguments", "name")
_TOOL_FIELDS = ("function", "type")
_TOOL_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


class CallAsMade(dict[str, Any]):
    """A tool call that the engine made itself from another API's items: it keeps its fields' order, unchecked."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages as the template gets them."""

    messages: list[Message]
    media_items: int
    """Images, sounds and videos in them; when it is not 0, `MEDIA_MARK` stands before the first."""


class _MediaCount:
    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items = 0


def parse_messages(messages: Any, content_format: ContentFormat) -> Conversation:
    """A request's `messages` for a template that takes `content_format`."""
    if not isinstance(messages, list) or not messages:
        raise NotRenderable("messages are not a list with at least one message")
    media = _MediaCount()
    parsed = [_parse_message(message, content_format, media) for message in messages]
    return Conversation(messages=parsed, media_items=media.items)


def developer_as_system(messages: list[Message]) -> list[Message]:
    """For a template that does not know the role `developer`: such messages become system messages, and all system
    messages become one, at the front, where a developer message made that necessary."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    converted = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    places = [at for at, message in enumerate(converted) if message["role"] == "system"]
    if places == [0]:
        return converted
    contents = (_joined_text(converted[at].get("content", "")) for at in places)
    merged = {"role": "system", "content": "\n\n".join(content for content in contents if content)}
    return [merged, *(message for message in converted if message["role"] != "system")]


def _joined_text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return str(content)


def _parse_message(message: Any, content_format: ContentFormat, media: _MediaCount) -> Message:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise NotRenderable("a message has no role")
    if (text := plain_content(role, message)) is not None:
        # What all the rest comes to for most messages.
        return {"role": role, "content": text if content_format == "string" else [{"type": "text", "text": text}]}
    content = _parse_content(role, _parts(role, message.get("content")), content_format, media)
    parsed: Message = {"role": role, "content": content}
    if role == "assistant":
        _add_assistant_fields(parsed, message)
    elif role == "tool":
        if "tool_call_id" in message:
            parsed["tool_call_id"] = message["tool_call_id"]
        if isinstance(content, list) and all(part.get("type") == "text" for part in content):
            # Most templates expect a string from a tool, whatever they expect elsewhere.
            parsed["content"] = "\n".join(part.get("text", "") for part in content)
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            parsed[field] = message[field]
    if role == "developer":
        parsed["tools"] = _tools_of_developer(message.get("tools"))
    return parsed


def plain_content(role: str, message: Message) -> str | None:
    """The text of a message with nothing but its role and a text that engines leave as it is; None for all others."""
    text = message.get("content")
    if len(message) != 2 or type(text) is not str or role in ("tool", "developer"):
        return None
    return None if role == "system" and text.startswith(_BILLING_HEADER) else text


def _parts(role: str, content: Any) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        parts: list[Any] = [{"type": "text", "text": content}]
    elif isinstance(content, list):
        parts = content
    else:
        raise NotRenderable("a message's content is neither text nor a list of parts")
    return _without_billing_header(parts) if role == "system" else parts


def _without_billing_header(parts: Iterable[Any]) -> list[Any]:
    """Claude Code's first line differs in every request; engines drop it so that the prefix stays the same."""
    kept = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str) or not text.startswith(_BILLING_HEADER):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _parse_content(
    role: str, parts: list[Any], content_format: ContentFormat, media: _MediaCount
) -> str | list[dict[str, Any]]:
    first_media = False
    wrapped: list[dict[str, Any]] = []
    texts: list[str] = []
    for part in parts:
        kind, value = _parse_part(part)
        if kind == "media":
            if media.items == 0:
                first_media = True
                wrapped.append({"type": "text", "text": MEDIA_MARK})
            media.items += 1
            wrapped.append({"type": value, **_extra_fields(part)})
        elif value is not None:
            if kind == "tool_reference":
                wrapped.append({"type": "tool_reference", "name": value})
            else:
                extra = _extra_fields(part) if isinstance(part, dict) else {}
                wrapped.append({"type": "text", "text": value, **extra})
            if value:
                texts.append(value)
    if content_format == "openai":
        return wrapped
    # The engine puts the placeholders of media in front of the message's text, wherever they stood in it.
    return (MEDIA_MARK if first_media else "") + "\n".join(texts)


def _parse_part(part: Any) -> tuple[Literal["text", "tool_reference", "media"], str | None]:
    """What a content part is, with its text, its tool's name or its modality. None: it counts for nothing."""
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, dict):
        raise NotRenderable("a content part is neither text nor an object")
    kind = part.get("type")
    if kind == "prompt_embeds" or "prompt_embeds" in part:
        raise NotRenderable("a content part holds prompt embeddings")
    if kind is None or part.get("uuid") is not None:
        for field, modality in _MODALITIES.items():
            if field in part:
                return "media", modality
        if "tool_reference" in part:
            return "tool_reference", _text_or_none(part.get("name"))
        raise NotRenderable("a content part has no type")
    if not isinstance(kind, str):
        raise NotRenderable("a content part's type is not text")
    if kind in _TEXT_FIELDS:
        return "text", _text_or_none(part.get(_TEXT_FIELDS[kind]))
    if kind == "tool_reference":
        return "tool_reference", _text_or_none(part.get("name"))
    if kind in _MODALITIES:
        return "media", _MODALITIES[kind]
    raise NotRenderable("a content part is of a type that the engine does not know")


def _text_or_none(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise NotRenderable("a content part's text is not text")


def _extra_fields(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in _KNOWN_PART_FIELDS}


def _add_assistant_fields(parsed: Message, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise NotRenderable("tool_calls are not a list")
    if calls:
        parsed["tool_calls"] = [_parse_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        parsed["reasoning"] = parsed["reasoning_content"] = reasoning


def _parse_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        raise NotRenderable("an assistant's tool call is not a function call")
    if call.get("type", "function") != "function":
        raise NotRenderable("an assistant's tool call is not a function call")
    ordered = dict(function) if isinstance(call, CallAsMade) else _in_order(function, _CALLED_FUNCTION_FIELDS)
    ordered["arguments"] = _parse_arguments(function.get("arguments"))
    return {**(call if isinstance(call, CallAsMade) else _in_order(call, _CALL_FIELDS)), "function": ordered}


def _parse_arguments(arguments: Any) -> dict[str, Any]:
    """Templates take the arguments as an object; a call in the history that has none, or broken ones, gets `{}`."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _tools_of_developer(tools: Any) -> Any:
    if not isinstance(tools, list):
        return tools
    return [
        {**_in_order(tool, _TOOL_FIELDS), "function": _in_order(tool["function"], _TOOL_FUNCTION_FIELDS)}
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
        else tool
        for tool in tools
    ]


def _in_order(fields: Mapping[str, Any], order: tuple[str, ...]) -> dict[str, Any]:
    """The known fields in the order of the API's types, then all others as they came."""
    known = {name: fields[name] for name in order if name in fields}
    return known | {name: value for name, value in fields.items() if name not in known}
