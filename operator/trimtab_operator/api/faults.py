"""What is wrong with a JSON value by a structural schema, in words that name the field and the remedy.

The one rule: every fault of the value is found, and a value without faults can be read. The API server refuses the same
where it has the same schema; this is for the cluster that still has an older one.
"""

import difflib
import json
import re
from collections.abc import Iterator
from typing import Any, Final

from trimtab_operator.api.open_api import Schema
from trimtab_operator.api.patterns import WORDS

SHOWN_MAX: Final = 60
"""Characters of a wrong value that are shown."""
INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1
_NOUNS: Final = {
    "string": "text",
    "integer": "a whole number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
}


def faults(value: Any, schema: Schema, path: str) -> Iterator[str]:
    """One text for each, `path: expected this, got that; remedy`."""
    if value is None and schema.get("nullable"):
        return
    expected = _expected(schema)
    if "x-kubernetes-int-or-string" in schema:
        if not isinstance(value, str | int) or isinstance(value, bool):
            yield f"{path}: expected {expected}, got {_shown(value)}; {_other_kind(value, schema)}"
        else:
            yield from _text_faults(str(value), schema, path, expected)
        return
    match schema["type"], value:
        case "object", dict():
            yield from _object_faults(value, schema, path)
        case "array", list():
            yield from _size_faults(len(value), schema.get("maxItems"), path)
            for index, item in enumerate(value):
                yield from faults(item, schema["items"], f"{path}[{index}]")
        case "string", str():
            yield from _text_faults(value, schema, path, expected)
        case "boolean", bool():
            pass
        case "integer", int() if not isinstance(value, bool):
            low, high = schema.get("minimum", INT_MIN), schema.get("maximum", INT_MAX)
            if not low <= value <= high:
                yield f"{path}: expected {expected}, got {_shown(value)}; {_in_range(schema)}"
        case _:
            yield f"{path}: expected {expected}, got {_shown(value)}; {_other_kind(value, schema)}"


def _object_faults(value: dict[str, Any], schema: Schema, path: str) -> Iterator[str]:
    if "additionalProperties" in schema:
        yield from _size_faults(len(value), schema.get("maxProperties"), path)
        for name, item in value.items():
            yield from faults(item, schema["additionalProperties"], f"{path}[{name}]")
        return
    known = schema["properties"]
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}: expected {_expected(known[name])}, got nothing; it must be given"
    for name, item in value.items():
        if name in known:
            yield from faults(item, known[name], f"{path}.{name}")
        else:
            near = difflib.get_close_matches(name.lower(), [word.lower() for word in known], n=1)
            meant = [word for word in known if near and word.lower() == near[0]]
            remedy = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(known)}"
            yield f"{path}.{name}: expected no such field; {remedy}"


def _text_faults(value: str, schema: Schema, path: str, expected: str) -> Iterator[str]:
    if "enum" in schema:
        if value not in schema["enum"]:
            near = [word for word in schema["enum"] if word.lower() == value.strip().lower()]
            remedy = f"did you mean {near[0]}?" if near else _in_range(schema)
            yield f"{path}: expected {expected}, got {_shown(value)}; {remedy}"
        return
    if not value and schema.get("minLength"):
        yield f"{path}: expected {expected}, got an empty text; it must be given"
    elif len(value) > schema.get("maxLength", len(value)):
        yield f"{path}: expected at most {schema['maxLength']} characters, got {len(value)}; shorten it"
    elif "pattern" in schema and re.fullmatch(schema["pattern"], value) is None:
        yield f"{path}: expected {expected}, got {_shown(value)}; write it so"


def _size_faults(size: int, size_max: int | None, path: str) -> Iterator[str]:
    if size_max is not None and size > size_max:
        yield f"{path}: expected at most {size_max} entries, got {size}; remove some"


def _expected(schema: Schema) -> str:
    if "enum" in schema:
        return schema["enum"][0] if len(schema["enum"]) == 1 else f"one of {', '.join(schema['enum'])}"
    if "pattern" in schema:
        return WORDS.get(schema["pattern"], f"text that matches {schema['pattern']}")
    noun = _NOUNS[schema["type"]]
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{noun} from {low} to {high}"
    return noun if low is None else f"{noun} >= {low}"


def _in_range(schema: Schema) -> str:
    if "default" in schema:
        return f"correct it, or leave it out for {json.dumps(schema['default'])}"
    return "correct it, or leave it out" if schema.get("nullable") else "correct it"


def _other_kind(value: Any, schema: Schema) -> str:
    kind = schema.get("type", "string")
    if isinstance(value, str) and kind in ("integer", "boolean"):
        return "write it without quotes"
    if kind == "string" and isinstance(value, int | float | bool):
        return "write it in quotes"
    return _in_range(schema)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."
