"""Model cards for the tests of the request formats."""

from trimtab_core.model_card import ModelCard
from trimtab_core.token_table import TokenTable

SIMPLE_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADDED_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LETTERS = TokenTable.from_pieces([None, *(bytes([letter]) for letter in b"abcdefgh")])
"""Token 0 has no bytes; tokens 1 to 8 are the letters a to h."""


def exact_card(template: str = SIMPLE_TEMPLATE, **fields: object) -> ModelCard:
    """A card that says of itself that it is exact."""
    made: dict[str, object] = {
        "template": template,
        "tools_template": template,
        "normalizer": "nfc",
        "added_tokens": ADDED_TOKENS,
        "table": LETTERS,
        "exact": True,
        "reason": "",
    }
    return ModelCard(**(made | fields))  # type: ignore[arg-type]
