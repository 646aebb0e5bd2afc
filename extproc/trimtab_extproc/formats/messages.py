"""Anthropic's Messages API: its blocks become the chat messages that vLLM makes of them.

The one rule: the conversion is vLLM's, the dropped billing headers included; a block that it refuses is
`NotUnderstood`. What depends on the template (system messages inside the conversation, thinking turned off) is kept in
both forms for the card to decide.
"""

import json
from typing import Any

import msgspec

from trimtab_extproc.formats.chat import brings_template
from trimtab_extproc.formats.fields import SharedBody, forwarded_ids, output_tokens, salt_of
from trimtab_extproc.formats.json_body import NotUnderstood, decode_body
from trimtab_extproc.formats.parsed_request import ChatSource, JsonObject, Kind, ParsedRequest, Source

Content = str | list[JsonObject]


class AnthropicMessage(msgspec.Struct):
    """One turn."""

    role: str
    content: Content


class MessagesBody(SharedBody, kw_only=True):
    """`POST /v1/messages`."""

    messages: list[AnthropicMessage]
    system: Content | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None
    thinking: JsonObject | None = None
    output_config: JsonObject | None = None
    max_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


MESSAGES = msgspec.json.Decoder(MessagesBody)
BILLING_HEADER = "x-anthropic-billing-header"
"""A system block that starts with this differs in every request; the engine drops it."""
ROLES = frozenset({"user", "assistant", "system"})
BLOCK_TYPES = frozenset(
    (
        "text",
        "image",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    )
)
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def parse_messages(raw: bytes) -> ParsedRequest:
    """A message to be created; raises `NotUnderstood`."""
    body = decode_body(MESSAGES, raw)
    try:
        source = _source(body)
    except (LookupError, TypeError, AttributeError, ValueError):
        raise NotUnderstood("fields") from None
    return ParsedRequest(
        kind=Kind.MESSAGES,
        model=body.model,
        sources=(source,),
        stream=bool(body.stream),
        claims_prefix=not brings_template(None, body.chat_template_kwargs),
        cache_salt=salt_of(body),
        max_tokens=output_tokens(body.max_tokens),
    )


def _source(body: MessagesBody) -> Source:
    system = _system_texts(body.system)
    inline = [text for message in body.messages if message.role == "system" and (text := _system_text(message))]
    turns = _turns(body.messages)
    messages = _with_system(system, turns)
    if ids := forwarded_ids(body, messages):
        return ids
    fields: JsonObject = {"messages": messages}
    _add_tools(fields, body)
    effort = (body.output_config or {}).get("effort")
    if effort is not None:
        fields["reasoning_effort"] = effort
    if body.chat_template_kwargs is not None:
        fields["chat_template_kwargs"] = body.chat_template_kwargs
    merged = None
    if inline:
        users = [turn for turn in turns if turn["role"] != "system"]
        merged = {**fields, "messages": _with_system(system + inline, users)}
    thinking = body.thinking or {}
    return ChatSource(body=fields, system_first=merged, is_thinking_off=thinking.get("type") == "disabled")


def _with_system(texts: list[str], turns: list[JsonObject]) -> list[JsonObject]:
    messages = [{"role": "system", "content": "".join(texts)}, *turns] if texts else turns
    if not messages:
        raise NotUnderstood("fields")
    return messages


def _system_texts(system: Content | None) -> list[str]:
    if not system:
        return []
    if isinstance(system, str):
        return [system]
    return [
        text for block in map(_checked, system) if (text := _text_of(block)) and not text.startswith(BILLING_HEADER)
    ]


def _system_text(message: AnthropicMessage) -> str | None:
    """The text of a system message inside the conversation; None or empty: the engine drops it."""
    if isinstance(message.content, str):
        return None if message.content.startswith(BILLING_HEADER) else message.content
    return "".join(_system_texts(message.content))


def _turns(messages: list[AnthropicMessage]) -> list[JsonObject]:
    turns: list[JsonObject] = []
    for message in messages:
        if message.role not in ROLES:
            raise NotUnderstood("fields")
        if message.role == "system":
            if text := _system_text(message):
                turns.append({"role": "system", "content": text})
        elif isinstance(message.content, str):
            turns.append({"role": message.role, "content": message.content})
        else:
            _add_turn(turns, message.role, message.content)
    return turns


def _add_turn(turns: list[JsonObject], role: str, blocks: list[JsonObject]) -> None:
    """A turn made of blocks. Results of tools become messages of their own, before the rest of their turn."""
    parts: list[JsonObject] = []
    calls: list[JsonObject] = []
    reasoning: list[str] = []
    for block in map(_checked, blocks):
        match block["type"]:
            case "text":
                if text := _text_of(block):
                    parts.append({"type": "text", "text": text})
            case "image" if block.get("source"):
                parts.append(_image(block["source"]))
            case "thinking" if block.get("thinking") is not None:
                reasoning.append(block["thinking"])
            case "tool_use":
                calls.append(_call(block))
            case "tool_result" if role == "user":
                turns += _tool_messages(block)
            case "tool_result":
                content = block.get("content")
                parts.append({"type": "text", "text": f"Tool result: {content or ''}"})
            case "tool_addition" | "tool_removal":
                raise NotUnderstood("item")
            case _:
                pass
    turn: JsonObject = {"role": role}
    if reasoning:
        turn["reasoning"] = "".join(reasoning)
    if calls:
        turn["tool_calls"] = calls
    if parts:
        only_text = len(parts) == 1 and parts[0]["type"] == "text"
        turn["content"] = parts[0]["text"] if only_text else parts
    if role != "user" or "content" in turn:
        turns.append(turn)


def _checked(block: JsonObject) -> JsonObject:
    if block.get("type") not in BLOCK_TYPES:
        raise NotUnderstood("item")
    return block


def _text_of(block: JsonObject) -> str | None:
    text = block.get("text") if block["type"] == "text" else None
    if text is not None and not isinstance(text, str):
        raise NotUnderstood("fields")
    return text


def _call(block: JsonObject) -> JsonObject:
    arguments = block.get("input") or {}
    if not isinstance(arguments, dict):
        raise NotUnderstood("fields")
    function = {"name": block.get("name") or "", "arguments": json.dumps(arguments)}
    # Without an id the engine makes one up from its clock; templates do not print it.
    return {"id": block.get("id") or "call_", "type": "function", "function": function}


def _tool_messages(block: JsonObject) -> list[JsonObject]:
    content = block.get("content")
    texts: list[str] = []
    images: list[JsonObject] = []
    references: list[JsonObject] = []
    if isinstance(content, str):
        texts.append(content)
    for item in content if isinstance(content, list) else ():
        match item.get("type"):
            case "text":
                texts.append(item.get("text", ""))
            case "image":
                images.append(_image(item.get("source", {})))
            case "tool_reference":
                if name := item.get("tool_name") or item.get("name"):
                    references.append({"type": "tool_reference", "name": name})
    call_id = block.get("tool_use_id") or ""
    messages: list[JsonObject] = [{"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}]
    if images:
        messages.append({"role": "user", "content": images})
    if references:
        messages.append({"role": "tool", "tool_call_id": call_id, "content": references})
    return messages


def _image(source: JsonObject) -> JsonObject:
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _add_tools(fields: JsonObject, body: MessagesBody) -> None:
    choice = body.tool_choice
    tools = _tools_in_force(body)
    if choice is not None:
        kind = choice["type"]
        fields["tool_choice"] = TOOL_CHOICES.get(kind) or {"type": "function", "function": {"name": choice["name"]}}
    elif tools is not None:
        fields["tool_choice"] = "auto"
    if tools is not None:
        fields["tools"] = [_function(tool) for tool in tools]


def _function(tool: JsonObject) -> JsonObject:
    schema = tool["input_schema"]
    if "type" not in schema:
        schema = {**schema, "type": "object"}
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": schema}
    for field in ("strict", "defer_loading"):
        if tool.get(field) is not None:
            function[field] = tool[field]
    return {"type": "function", "function": function}


def _tools_in_force(body: MessagesBody) -> list[JsonObject] | None:
    """The tools at the end of the conversation: system messages may add and remove some on the way."""
    changes = [
        block
        for message in body.messages
        if message.role == "system" and not isinstance(message.content, str)
        for block in message.content
        if block.get("type") in ("tool_addition", "tool_removal")
    ]
    if not changes:
        return body.tools
    tools = {tool["name"]: tool for tool in body.tools or ()}
    removed: set[str] = set()
    for block in changes:
        change = block["tool"]
        if change["type"] == "tool_definition":
            name = change["definition"]["name"]
            tools[name] = change["definition"]
        else:
            name = change["name"]
            if block["type"] == "tool_addition":
                tools[name] = {**tools[name], "defer_loading": None}
            elif name not in tools:
                raise NotUnderstood("item")
        if block["type"] == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in tools.items() if name not in removed]
