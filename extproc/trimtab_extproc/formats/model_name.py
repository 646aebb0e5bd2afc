"""The model that a request names, where nothing else of it is read: it keeps it off endpoints without that model.

The one rule: no answer is better than an error. Only the name is taken, from the two forms that engines take bodies in.
"""

import msgspec

MODEL_CHARS_MAX = 512
"""A longer name is none."""
FORM_FIELD = b'name="model"'


class NamedBody(msgspec.Struct):
    """Any JSON object."""

    model: str | None = None


NAMED = msgspec.json.Decoder(NamedBody)


def model_in_json(body: bytes) -> str | None:
    """`model` of a JSON object."""
    try:
        return _checked(NAMED.decode(body).model)
    except (msgspec.DecodeError, RecursionError):
        return None


def model_in_form(body: bytes) -> str | None:
    """The field `model` of a multipart form, as uploads of sound have it."""
    at = body.find(FORM_FIELD)
    start = body.find(b"\r\n\r\n", at) + 4 if at >= 0 else 0
    if start < 4:
        return None
    end = body.find(b"\r\n", start, start + MODEL_CHARS_MAX)
    return None if end < 0 else _checked(body[start:end].decode("utf-8", "replace"))


def _checked(model: str | None) -> str | None:
    return model if model and len(model) <= MODEL_CHARS_MAX else None
