"""A request's own text in one fixed form, for endpoints whose prompts nobody can render (approximate mode).

The one rule: a conversation that goes on from another one has the other's bytes as its prefix. So what templates put in
front (tools, documents) comes first, then the messages in order, and nothing stands at the end that the next turn would
not have there. The data of media counts as no text: a short digest stands for it.
"""

from typing import Any

import msgspec
import xxhash

from trimtab_extproc.formats.fields import is_text_part
from trimtab_extproc.formats.parsed_request import ChatSource, JsonObject, OpaqueSource, Source, TextSource

ENCODER = msgspec.json.Encoder()
MESSAGE_FIELDS = ("name", "tool_call_id", "reasoning", "reasoning_content", "tool_calls", "tools")
"""What a message may hold besides its role and content."""
ITEM_END = "\x1e"
FIELD_END = "\x1f"


def canonical_bytes(source: Source) -> bytes:
    """The canonical form of one engine prompt; of token ids, four bytes each."""
    if isinstance(source, TextSource):
        return source.text.encode()
    if isinstance(source, ChatSource):
        return _chat(source.body).encode()
    if isinstance(source, OpaqueSource):
        return b""
    return source.ids.astype("<u4").tobytes()


def _chat(body: JsonObject) -> str:
    pieces: list[str] = []
    for field in ("tools", "documents"):
        for item in body.get(field) or ():
            pieces += (field, FIELD_END, _json(item), ITEM_END)
    for message in body["messages"]:
        _add_message(pieces, message)
    return "".join(pieces)


def _add_message(pieces: list[str], message: JsonObject) -> None:
    pieces += (_text(message.get("role")), FIELD_END)
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            pieces += (_part(part), FIELD_END)
    else:
        pieces += (_text(content), FIELD_END)
    for field in MESSAGE_FIELDS:
        if value := message.get(field):
            pieces += (field, FIELD_END, _text(value), FIELD_END)
    pieces.append(ITEM_END)


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return _text(part)
    if is_text_part(part):
        return next(
            (value for name in ("text", "refusal", "thinking", "name") if isinstance(value := part.get(name), str)), ""
        )
    return f"media {xxhash.xxh3_64_hexdigest(ENCODER.encode(part))}"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return ENCODER.encode(value).decode()
