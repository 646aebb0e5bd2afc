"""What a response body tells while it streams by: that the first token is there, the response's id, the token usage.

The one rule: it takes the body in pieces cut anywhere, keeps a bounded part of it whatever comes, and never raises. It
reads only bodies of successful answers: the caller has seen the status.

A stream (SSE) shows its first token with the first event that the engine makes from output: engines send nothing before
that but `response.created` and its like. A body in one piece comes when all is done, so its first byte shows it.
"""

import json
import re
from contextlib import suppress

import msgspec

from trimtab_extproc.formats.head_and_tail import HEAD_BYTES, HeadAndTail
from trimtab_extproc.formats.token_usage import TokenUsage, UsageFields

ID_CHARS_MAX = 256
"""A longer id is none."""

BEFORE_OUTPUT = frozenset(
    {"response.created", "response.in_progress", "response.queued", "ping", "error", "response.failed"}
)
"""Types of events that an engine sends without having computed a token."""
HEAD_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')
TYPE_FIRST = re.compile(rb'\s*\{\s*"type"\s*:\s*"([^"\\]{1,64})"')
ERROR_FIRST = re.compile(rb'\s*\{\s*"error"\s*:')
# Inside a JSON string every quote is escaped, so this can only be a key.
USAGE_KEY = re.compile(rb'"usage"\s*:\s*(?=\{)')
JSON_DECODER = json.JSONDecoder()


class Inner(msgspec.Struct):
    """The response that an event carries."""

    id: str | None = None
    usage: UsageFields | None = None


class StreamEvent(msgspec.Struct):
    """One event's data."""

    id: str | None = None
    type: str | None = None
    choices: list[msgspec.Raw] | None = None
    error: msgspec.Raw = msgspec.Raw()
    response: Inner | None = None
    message: Inner | None = None
    usage: UsageFields | None = None


EVENT = msgspec.json.Decoder(StreamEvent)


class ResponseReader:
    """Follows one response body. Feed it pieces, and once `end=True`; read the attributes at any time."""

    __slots__ = ("_event", "_line", "_mode", "first_token", "response_id", "usage")

    def __init__(self, content_type: str = "", content_encoding: str = "") -> None:
        """The headers of the response. A packed body is not unpacked: its first byte is all that it tells."""
        media_type = content_type.partition(";")[0].strip().lower()
        if content_encoding.strip().lower() not in ("", "identity"):
            self._mode = "packed"
        elif media_type == "text/event-stream":
            self._mode = "stream"
        else:
            self._mode = "whole"
        self._line = HeadAndTail()
        self._event = ""
        self.first_token = False
        """A token of output has been computed."""
        self.response_id: str | None = None
        """The id by which a later request can name this response."""
        self.usage = TokenUsage()

    def feed(self, data: bytes, *, end: bool = False) -> bool:
        """Take the next piece. True: the first token showed in this one."""
        before = self.first_token
        if self._mode == "stream":
            self._feed_stream(data, end)
        else:
            self.first_token |= not data.isspace() and bool(data)
            if self._mode == "whole":
                self._line.add(data)
                if end and self._line.size:
                    self._read(self._line.kept.strip(), self._line.is_whole)
                    self._line.clear()
        return self.first_token and not before

    def _feed_stream(self, data: bytes, end: bool) -> None:
        start = 0
        while (at := data.find(b"\n", start)) >= 0:
            self._line.add(data[start:at])
            self._read_line()
            start = at + 1
        self._line.add(data[start:])
        if end:
            self._read_line()

    def _read_line(self) -> None:
        line = self._line
        if line.head.startswith(b"data:"):
            if not self._knows_all_but_usage(line):
                payload = line.kept[5:].strip()
                if payload and payload != b"[DONE]":
                    self._read(payload, line.is_whole)
        elif line.head.startswith(b"event:"):
            self._event = line.head[6:70].strip().decode("utf-8", "replace")
        elif not line.head.strip():
            self._event = ""
        line.clear()

    def _knows_all_but_usage(self, line: HeadAndTail) -> bool:
        """Most events of a long stream are skipped here, unread."""
        return self.first_token and self.response_id is not None and b'"usage"' not in line.kept

    def _read(self, payload: bytes, is_whole: bool) -> None:
        if is_whole:
            try:
                self._take(EVENT.decode(payload))
            except (msgspec.DecodeError, RecursionError):
                self._scrape(payload)
        else:
            self._scrape(payload)

    def _take(self, event: StreamEvent) -> None:
        inner = event.response or event.message or Inner()
        self._take_id(inner.id or event.id)
        for usage in (event.usage, inner.usage):
            if usage is not None:
                self.usage.add(usage)
        if bytes(event.error) in (b"", b"null") and (event.type or self._event) not in BEFORE_OUTPUT:
            self.first_token |= event.choices is None or bool(event.choices)

    def _scrape(self, payload: bytes) -> None:
        """Read a payload that is cut short in the middle, or that is not what we expect."""
        head = payload[:HEAD_BYTES]
        if found := HEAD_ID.search(head):
            self._take_id(found[1].decode("utf-8", "replace"))
        if keys := list(USAGE_KEY.finditer(payload)):
            text = payload[keys[-1].end() :].decode("utf-8", "replace")
            with suppress(ValueError, RecursionError):
                self.usage.add(msgspec.convert(JSON_DECODER.raw_decode(text)[0], UsageFields))
        kind = self._event
        if not kind and (found := TYPE_FIRST.match(head)):
            kind = found[1].decode("utf-8", "replace")
        if not ERROR_FIRST.match(head) and kind not in BEFORE_OUTPUT:
            self.first_token = True

    def _take_id(self, response_id: str | None) -> None:
        if self.response_id is None and response_id and len(response_id) <= ID_CHARS_MAX:
            self.response_id = response_id
