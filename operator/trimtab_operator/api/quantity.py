"""Amounts as Kubernetes writes them: `500m`, `2`, `4Gi`, `1e3`.

The one rule: reads what the API server reads, exactly (decimals, no floats). Negative amounts are refused: no
container wants less than nothing.
"""

import re
from decimal import Decimal
from typing import Final

QUANTITY: Final = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)(m|u|n|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]{1,2})?$"
"""Pattern, for RE2 and Python alike."""
QUANTITY_LENGTH_MAX: Final = 32
_FACTORS: Final = {
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
    **{letter: Decimal(1000) ** -power for power, letter in enumerate("mun", 1)},
}


def amount(text: str) -> Decimal:
    """Raises ValueError."""
    found = re.fullmatch(QUANTITY, text)
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    number, suffix = found[1], found[3] or ""
    if suffix in _FACTORS:
        return Decimal(number) * _FACTORS[suffix]
    return Decimal(number + suffix)
