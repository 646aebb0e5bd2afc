"""Rules between fields, which the schema of a field cannot say: in CEL for the API server, in Python for the operator.

The one rule: both say the same. The API server refuses what breaks a rule; the operator asks again, since the CRD in a
cluster may be older than it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Must hold of every object of one kind."""

    cel: str
    """`self` is the object."""
    needs: tuple[str, ...]
    """Fields that `cel` reads without asking whether they are there. They all have defaults; but the API server also
    tries the rules on the default of the object itself, `{}`, before it fills in those of its fields."""
    message: str
    """What is expected and what to do. The field is named beside it, by the API server and by the operator."""
    holds: Callable[[Any], bool]
    """The same of the object as the operator reads it."""
    field: str = ""
    """The field that the message is about, as `.limits`; empty: the object itself."""

    def schema(self) -> dict[str, str]:
        """As in `x-kubernetes-validations`."""
        guard = " && ".join(f"has(self.{field})" for field in self.needs)
        rule = {"rule": f"!({guard}) || ({self.cel})" if guard else self.cel, "message": self.message}
        return rule | {"fieldPath": self.field} if self.field else rule


def broken(part: Any, path: str) -> Iterator[str]:
    """The rules that a Struct with RULES, or one in it, breaks: `path.field: message` for each."""
    for rule in part.RULES:
        if not rule.holds(part):
            yield f"{path}{rule.field}: {rule.message}"
    for field in msgspec.structs.fields(part):
        inner = getattr(part, field.name)
        if isinstance(inner, msgspec.Struct):
            yield from broken(inner, f"{path}.{field.encode_name}")
        elif isinstance(inner, list):
            for index, item in enumerate(inner):
                if isinstance(item, msgspec.Struct):
                    yield from broken(item, f"{path}.{field.encode_name}[{index}]")
