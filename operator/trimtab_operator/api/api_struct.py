"""What all parts of our API objects have in common.

The one rule: camelCase on the wire, and an unknown field is an error that names it.
"""

from typing import ClassVar

import msgspec

from trimtab_operator.api.rules import Rule


class ApiStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Part of an API object."""

    RULES: ClassVar[tuple[Rule, ...]] = ()
