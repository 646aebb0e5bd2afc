"""From msgspec types to the structural OpenAPI v3 schema that a CustomResourceDefinition wants.

The one rule: mechanical. What a field means, its bounds and default stand in its type; nothing is added here that is
not said there. Structural means: no references, no unions but `nullable`, every level with a type of its own.
"""

import typing
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
from msgspec import inspect

from trimtab_operator.api.rules import Rule

Schema = dict[str, Any]

ORDER: Final = (
    "description", "type", "format", "nullable", "default", "enum", "minimum", "maximum", "minLength", "maxLength",
    "pattern", "minProperties", "maxProperties", "minItems", "maxItems", "required", "x-kubernetes-int-or-string",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type", "x-kubernetes-validations",
    "properties", "additionalProperties", "items",
)  # fmt: skip
"""Of the keywords, as a reader wants them."""
INT32_MAX: Final = 2**31 - 1


def structural(kind: type, *, with_defaults: bool = True) -> Schema:
    """Of one Struct. Raises TypeError for types that a structural schema cannot express.

    Without defaults, as for a status: a field that its writer leaves out stays out.
    """
    schema = _schema(inspect.type_info(kind))
    return schema if with_defaults else _without_defaults(schema)


def readable(value: Any, schema: Schema) -> Any:
    """The JSON value as the Struct takes it: what may be a number or a text is a text."""
    if "x-kubernetes-int-or-string" in schema:
        return str(value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        return {name: readable(item, known.get(name) or schema["additionalProperties"]) for name, item in value.items()}
    if isinstance(value, list):
        return [readable(item, schema["items"]) for item in value]
    return value


def _schema(type_: inspect.Type) -> Schema:
    extra: Schema = {}
    while isinstance(type_, inspect.Metadata):
        extra = dict(type_.extra_json_schema or {}) | extra  # the outer one wins
        type_ = type_.type
    schema = _bare(type_) | extra
    if schema.get("x-kubernetes-int-or-string"):
        del schema["type"]
    unknown = schema.keys() - set(ORDER)
    if unknown:
        raise TypeError(f"a structural schema has no {unknown}")
    return {keyword: schema[keyword] for keyword in ORDER if keyword in schema}


def _bare(type_: inspect.Type) -> Schema:
    match type_:
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.IntType():
            small = type_.le is not None and type_.le <= INT32_MAX
            return {"type": "integer", "format": "int32" if small else "int64"} | _bounds(
                minimum=type_.ge, maximum=type_.le
            )
        case inspect.StrType():
            return {"type": "string"} | _bounds(
                minLength=type_.min_length, maxLength=type_.max_length, pattern=type_.pattern
            )
        case inspect.LiteralType():
            return {"type": "string", "enum": list(type_.values)}
        case inspect.ListType() | inspect.VarTupleType():
            return {"type": "array", "items": _schema(type_.item_type)} | _bounds(
                minItems=type_.min_length, maxItems=type_.max_length
            )
        case inspect.DictType():
            return {"type": "object", "additionalProperties": _schema(type_.value_type)} | _bounds(
                minProperties=type_.min_length, maxProperties=type_.max_length
            )
        case inspect.UnionType():
            kept = [member for member in type_.types if not isinstance(member, inspect.NoneType)]
            if len(kept) != 1 or len(type_.types) != 2:
                raise TypeError(f"no union but with null: {type_}")
            return _schema(kept[0]) | {"nullable": True}
        case inspect.StructType():
            return _object(type_.cls, type_.fields, getattr(type_.cls, "RULES", ()))
        case inspect.TypedDictType():
            return _object(type_.cls, type_.fields, ())
    raise TypeError(f"no structural schema for {type_}")


def _object(cls: type, fields: tuple[inspect.Field, ...], rules: tuple[Rule, ...]) -> Schema:
    # As declared: the inspection sorts the words of Literals and the fields of TypedDicts.
    declared = typing.get_type_hints(cls, include_extras=True)
    fields = tuple(sorted(fields, key=lambda field: list(declared).index(field.name)))
    schema: Schema = {"type": "object"}
    if cls.__doc__:
        schema["description"] = " ".join(cls.__doc__.split())
    if required := [field.encode_name for field in fields if field.required]:
        schema["required"] = required
    if rules:
        schema["x-kubernetes-validations"] = [rule.schema() for rule in rules]
    schema["properties"] = {field.encode_name: _property(field, declared[field.name]) for field in fields}
    return schema


def _property(field: inspect.Field, hint: Any) -> Schema:
    schema = _schema(field.type)
    if "enum" in schema:
        schema["enum"] = list(_words(hint))
    if not schema.get("description"):
        raise TypeError(f"{field.name} has no description")
    default = _default(field)
    if default is not None:
        schema["default"] = default
    return {keyword: schema[keyword] for keyword in ORDER if keyword in schema}


def _default(field: inspect.Field) -> Any:
    """None: none. An object's own fields bring their defaults themselves, so that it is given empty."""
    default = field.default
    if default is msgspec.UNSET:
        return None
    if default is msgspec.NODEFAULT:
        if field.default_factory is msgspec.NODEFAULT:
            return None
        default = field.default_factory()
    if isinstance(default, msgspec.Struct):
        if default != type(default)():
            raise TypeError(f"{field.name}: the default of an object must be what its fields' defaults make of it")
        return {}
    return default


def _words(hint: Any) -> Iterator[str]:
    """Of the Literal in a type."""
    for argument in typing.get_args(hint):
        if typing.get_origin(hint) is Literal:
            yield argument
        else:
            yield from _words(argument)


def _bounds(**keywords: Any) -> Schema:
    return {keyword: value for keyword, value in keywords.items() if value is not None}


def _without_defaults(schema: Schema) -> Schema:
    bare = {keyword: value for keyword, value in schema.items() if keyword != "default"}
    if "properties" in bare:
        bare["properties"] = {name: _without_defaults(inner) for name, inner in bare["properties"].items()}
    for keyword in ("items", "additionalProperties"):
        if keyword in bare:
            bare[keyword] = _without_defaults(bare[keyword])
    return bare
