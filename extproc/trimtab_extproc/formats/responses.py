"""The Responses API: its items become the chat messages that vLLM makes of them.

The one rule: items that vLLM folds into one message (reasoning, text and tool calls of one turn) are folded the same
way, and an item that it refuses is `NotUnderstood`. A request that continues a stored response claims no prefix: what
came before it lives in one engine's memory alone.
"""

import json
from typing import Any

import msgspec

from trimtab_core.chat_messages import CallAsMade
from trimtab_extproc.formats.chat import brings_template
from trimtab_extproc.formats.fields import SharedBody, forwarded_ids, output_tokens, salt_of
from trimtab_extproc.formats.json_body import NotUnderstood, decode_body
from trimtab_extproc.formats.parsed_request import ChatSource, JsonObject, Kind, ParsedRequest, Source


class ResponsesBody(SharedBody, kw_only=True):
    """`POST /v1/responses`."""

    input: str | list[JsonObject]
    instructions: str | None = None
    tools: list[JsonObject] | None = None
    tool_choice: Any = None
    reasoning: JsonObject | None = None
    previous_response_id: str | None = None
    previous_input_messages: Any = None
    max_output_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


RESPONSES = msgspec.json.Decoder(ResponsesBody)
UNFINISHED = frozenset({"in_progress", "incomplete"})
CUSTOM_TOOL_INPUT = "input"
"""The one argument of the function that stands for a free-form tool."""
CUSTOM_TOOL_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {CUSTOM_TOOL_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [CUSTOM_TOOL_INPUT],
    "additionalProperties": False,
}
NAMESPACE_SEPARATOR = "__"


def parse_responses(raw: bytes) -> ParsedRequest:
    """A response to be created; raises `NotUnderstood`."""
    body = decode_body(RESPONSES, raw)
    try:
        source = _source(body)
    except (LookupError, TypeError, AttributeError):
        raise NotUnderstood("fields") from None
    return ParsedRequest(
        kind=Kind.RESPONSES,
        model=body.model,
        sources=(source,),
        stream=bool(body.stream),
        claims_prefix=body.previous_response_id is None
        and body.previous_input_messages is None
        and not brings_template(None, body.chat_template_kwargs),
        cache_salt=salt_of(body),
        previous_response_id=body.previous_response_id,
        max_tokens=output_tokens(body.max_output_tokens),
    )


def _source(body: ResponsesBody) -> Source:
    messages: list[JsonObject] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    continues = False
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _messages_of(body.input)
        continues = bool(body.input) and _is_unfinished(body.input[-1])
    if not messages:
        raise NotUnderstood("fields")
    if ids := forwarded_ids(body, messages):
        return ids
    fields: JsonObject = {
        "messages": messages,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
    }
    if body.tools:
        fields["tools"] = [made for tool in body.tools for made in _functions_of(tool)]
        fields["tool_choice"] = "auto" if body.tool_choice is None else body.tool_choice
    effort = (body.reasoning or {}).get("effort")
    if effort is not None:
        fields["reasoning_effort"] = effort
    if body.chat_template_kwargs is not None:
        fields["chat_template_kwargs"] = body.chat_template_kwargs
    return ChatSource(body=fields)


def _messages_of(items: list[JsonObject]) -> list[JsonObject]:
    """Items in a row as chat messages. Only the messages that are made here may take up a later item."""
    messages: list[JsonObject] = []
    for item in items:
        previous = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
        if message := _message_of(item, previous):
            messages.append(message)
    return messages


def _message_of(item: JsonObject, previous: JsonObject | None) -> JsonObject | None:
    """The message for an item; None where it went into `previous`, an assistant's."""
    match item.get("type", "message"):
        case "function_call" | "custom_tool_call":
            call = _call_of(item)
            if previous is None:
                return {"role": "assistant", "tool_calls": [call]}
            previous["tool_calls"] = [*(previous.get("tool_calls") or ()), call]
            return None
        case "reasoning":
            return _fold(previous, "reasoning", _reasoning_of(item))
        case "function_call_output" | "custom_tool_call_output":
            return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        case "message" if item["role"] == "assistant" and item.get("content") is not None:
            content = item["content"]
            # Of several parts the engine reads the first and leaves the rest.
            return _fold(previous, "content", content[0]["text"] if isinstance(content, list) else content)
        case "message":
            return {name: value for name, value in item.items() if name not in ("type", "status", "id")}
        case _:
            raise NotUnderstood("item")


def _fold(previous: JsonObject | None, field: str, value: Any) -> JsonObject | None:
    if previous is not None and previous.get(field) is None:
        previous[field] = value
        return None
    return {"role": "assistant", field: value}


def _call_of(item: JsonObject) -> JsonObject:
    name = item["name"]
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({CUSTOM_TOOL_INPUT: item.get("input") or ""}, ensure_ascii=False)
    else:
        arguments = item["arguments"]
        if namespace := item.get("namespace"):
            name = f"{namespace}{NAMESPACE_SEPARATOR}{name}"
    # The engine does not check the messages that it makes here, so templates see the fields in this order.
    return CallAsMade(id=item["call_id"], function={"name": name, "arguments": arguments}, type="function")


def _reasoning_of(item: JsonObject) -> str:
    if item.get("encrypted_content"):
        raise NotUnderstood("item")
    parts = item.get("content") or item.get("summary") or []
    text = parts[0]["text"] if parts else ""
    if not isinstance(text, str):
        raise NotUnderstood("item")
    return text


def _is_unfinished(item: JsonObject) -> bool:
    return item.get("type", "message") in ("message", "reasoning") and item.get("status") in UNFINISHED


def _functions_of(tool: JsonObject) -> list[JsonObject]:
    """The functions that the template is shown for a tool; built-in tools are not shown."""
    match tool.get("type"):
        case "function":
            return [_function(tool, tool["name"])]
        case "namespace":
            return [
                _function(inner, f"{tool['name']}{NAMESPACE_SEPARATOR}{inner['name']}")
                for inner in tool["tools"]
                if inner.get("type") == "function"
            ]
        case "custom":
            return [_function({**tool, "parameters": CUSTOM_TOOL_SCHEMA}, tool["name"])]
        case _:
            return []


def _function(tool: JsonObject, name: str) -> JsonObject:
    function = {"name": name, "description": tool.get("description"), "parameters": tool.get("parameters")}
    for field in ("strict", "defer_loading"):
        if tool.get(field) is not None:
            function[field] = tool[field]
    return {"type": "function", "function": function}
