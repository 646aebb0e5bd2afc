"""A reference page of one kind, from its CustomResourceDefinition.

The one rule: says what the schema says and adds nothing but the order: the object, then each part of it in turn.
"""

import json
from collections.abc import Iterator
from typing import Any

from trimtab_operator.api.open_api import Schema
from trimtab_operator.api.patterns import WORDS


def reference_page(crd: dict[str, Any], *, source: str, example: str) -> str:
    """Markdown. `source`: a sentence on where the schema comes from; `example`: an object as YAML."""
    spec = crd["spec"]
    version = spec["versions"][0]
    root = version["schema"]["openAPIV3Schema"]
    lines = [
        f"# {spec['names']['kind']}",
        "",
        root["description"],
        "",
        source,
        "",
        "| | |",
        "|---|---|",
        f"| apiVersion | `{spec['group']}/{version['name']}` |",
        f"| kind | `{spec['names']['kind']}` ({spec['scope'].lower()}) |",
        f"| kubectl | {', '.join(f'`{name}`' for name in _kubectl_names(spec['names']))} |",
        "",
        "```yaml",
        example.rstrip(),
        "```",
    ]
    if columns := version.get("additionalPrinterColumns"):
        lines += ["", "`kubectl get` shows:", "", "| column | |", "|---|---|"]
        lines += [f"| {column['name'].upper()} | {_column_words(column)} |" for column in columns]
    for name in ("spec", "status"):
        lines += _parts(name, root["properties"][name])
    return "\n".join(lines) + "\n"


def _kubectl_names(names: dict[str, Any]) -> list[str]:
    return [names["plural"], *names.get("shortNames", ()), *names.get("categories", ())]


def _column_words(column: dict[str, Any]) -> str:
    return f"{column['description']}{' With `-o wide`.' if column.get('priority') else ''}"


def _parts(path: str, schema: Schema) -> Iterator[str]:
    yield from ("", f"## {path}", "", _cell(schema["description"]), "")
    yield from ("| field | type | default | |", "|---|---|---|---|")
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        yield f"| `{name}` | {_type(field)} | {_default(field, name in required)} | {_cell(_words(field))} |"
    if rules := schema.get("x-kubernetes-validations"):
        yield ""
        for rule in rules:
            about = f"`{path}{rule['fieldPath']}`: " if "fieldPath" in rule else ""
            yield f"- {about}{rule['message']}."
    for name, field in schema["properties"].items():
        below, suffix = _inner(field)
        if "properties" in below:
            yield from _parts(f"{path}.{name}{suffix}", below)


def _inner(schema: Schema) -> tuple[Schema, str]:
    """What a list or a map consists of, and how that is written in a path."""
    if "items" in schema:
        return schema["items"], "[]"
    if "additionalProperties" in schema:
        return schema["additionalProperties"], "[*]"
    return schema, ""


def _words(schema: Schema) -> str:
    """The description, and what holds of the entries."""
    words = str(schema["description"])
    if rules := schema.get("x-kubernetes-validations") if "properties" not in schema else None:
        words += "".join(f" Rule: {rule['message']}." for rule in rules)
    return words


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    inner, suffix = _inner(schema)
    if suffix == "[]":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list of {_type(inner)}{most}"
    if suffix == "[*]":
        most = f", at most {schema['maxProperties']}" if "maxProperties" in schema else ""
        return f"map of {_type(inner)}{most}"
    if "x-kubernetes-int-or-string" in schema:
        return "quantity"
    if schema.get("format") == "date-time":
        return "time"
    return str(schema["type"]) + _bounds(schema)


def _bounds(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None:
        return f", {low} to {high}" if high is not None and high < 2**31 - 1 else f" >= {low}"
    if "pattern" in schema and schema["pattern"] in WORDS:
        return f": {WORDS[schema['pattern']]}"
    return ""


def _default(schema: Schema, is_required: bool) -> str:
    if is_required:
        return "required"
    if "default" not in schema or schema["default"] in ({}, []):
        return "null" if schema.get("nullable") else ""
    return f"`{json.dumps(schema['default'])}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
