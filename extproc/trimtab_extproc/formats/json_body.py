"""A request's JSON body as a typed value.

The one rule: what the engine would read is read here, and what it would refuse is `NotUnderstood`, never an exception
of another kind. The engine reads with Python's json module (NaN, other UTFs, the last of two equal keys), then converts
leniently ("2" is 2). The strict and fast decoder comes first; a body that it refuses gets the slow reading.
"""

import json
from typing import Any, TypeVar

import msgspec

from trimtab_extproc.formats.parsed_request import Reason

SLOW_BYTES_MAX = 2**20
"""A body over this size that the fast decoder refuses is not read a second time: it is not understood."""

Body = TypeVar("Body", bound=msgspec.Struct)


class NotUnderstood(Exception):  # noqa: N818 - it is a refusal, not an error
    """The body is none that an engine would take, or none that we can follow; the request goes by load."""

    def __init__(self, reason: Reason, model: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.model = model


def decode_body(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """`body` as the decoder's type; raises `NotUnderstood`."""
    try:
        return decoder.decode(body)
    except RecursionError:
        raise NotUnderstood("nesting") from None
    except msgspec.DecodeError:
        return _decode_slowly(decoder, body)


def _decode_slowly(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    if not body:
        raise NotUnderstood("empty")
    if len(body) > SLOW_BYTES_MAX:
        raise NotUnderstood("json")
    try:
        value: Any = json.loads(body)
    except RecursionError:
        raise NotUnderstood("nesting") from None
    except ValueError:
        raise NotUnderstood("json") from None
    if not isinstance(value, dict):
        raise NotUnderstood("json")
    try:
        # A lone surrogate in any text: the engine answers 400, and no hash could be made of it.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise NotUnderstood("surrogate", _model_of(value)) from None
    except (RecursionError, ValueError):
        raise NotUnderstood("json", _model_of(value)) from None
    try:
        converted: Body = msgspec.convert(value, decoder.type, strict=False)
    except (msgspec.ValidationError, RecursionError):
        raise NotUnderstood("fields", _model_of(value)) from None
    return converted


def _model_of(value: dict[str, Any]) -> str | None:
    model = value.get("model")
    return model if isinstance(model, str) and model.isprintable() else None
