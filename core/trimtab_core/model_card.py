"""The model card: all that a picker needs to know of a model to tell an engine's prompts as bytes, without its files.

The one rule: two cards with the same digest render and read every request alike. A card is made beside the engine, from
the model's files and the engine's flags, and says `exact` only when probes of the engine itself gave the same bytes;
otherwise `reason` says why not. It holds nothing that differs from one endpoint of a model to the next.

A card travels through the shared state: `decode` takes bytes from outside and trusts none of them.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import msgspec
import numpy as np

from trimtab_core.chat_messages import ContentFormat
from trimtab_core.errors import DataError
from trimtab_core.not_renderable import NotRenderable
from trimtab_core.token_table import TokenTable, UnknownToken

CARD_VERSION = 1
CARD_BYTES_MAX = 64 << 20
"""A larger encoded card is refused before it is read."""
ADDED_TOKEN_SETS_MAX = 16
"""Compiled searches for added tokens that are kept, one for each distinct set."""

Normalizer = Literal["none", "nfc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """How one served model's prompts read. Compare cards by `digest`, not by `==`."""

    template: str | None = field(default=None, repr=False)
    """The chat template of requests without tools. None: the engine has none, or does not render with one."""
    tools_template: str | None = field(default=None, repr=False)
    """The chat template of requests with tools."""
    content_format: ContentFormat = "string"
    """What `template` takes as a message's content."""
    tools_content_format: ContentFormat = "string"
    """What `tools_template` takes as a message's content."""
    default_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The server's own template variables; a request's `chat_template_kwargs` come before them."""
    exclude_tools_when_tool_choice_none: bool = False
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token` and the like: variables of the template."""
    chat_prefix: str = ""
    """Text that the engine puts in front of a rendered chat. `render_chat` has already put it there."""
    completion_prefix: str = ""
    """Text that the engine puts in front of a prompt given as text: the BOS token, for models that want one."""
    normalizer: Normalizer = "none"
    """What the tokenizer does to text before it cuts it up."""
    space_marker: bool = False
    """The vocabulary writes a space as U+2581, so that the character itself reads back as a space."""
    added_tokens: tuple[str, ...] = field(default=(), repr=False)
    """Tokens that are found before the text is normalised, which therefore splits there. Empty without normaliser."""
    tokens_per_byte: float = 0.25
    """Tokens for a byte of ordinary text, for the part of a prompt that no endpoint holds."""
    image_tokens: int = 0
    """Tokens of one image, where that is known; 0: unknown."""
    block_tokens: int = 16
    """Tokens in one of the engine's KV blocks."""
    table: TokenTable | None = field(default=None, repr=False)
    """The bytes of each token id. None: tokens cannot be turned back into the text they came from."""
    exact: bool = False
    """Whether the engine's own answers to the probes were this card's, byte for byte."""
    reason: str = "not probed"
    """Why the card is not exact; empty when it is."""

    def normalize(self, text: str) -> bytes:
        """`text` as the engine's tokens will spell it. `NotRenderable` for a lone surrogate, which engines refuse."""
        if self.normalizer == "nfc" and not text.isascii() and not unicodedata.is_normalized("NFC", text):
            text = _normalize_between(text, self.added_tokens)
        if self.space_marker:
            text = text.replace("\u2581", " ")
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError:
            raise NotRenderable("the prompt holds a lone surrogate") from None

    def text_of_tokens(self, ids: Sequence[int]) -> bytes:
        """The bytes of a prompt that is given as token ids. `NotRenderable` if any of them has none."""
        if self.table is None:
            raise NotRenderable("the bytes of this model's tokens are not known")
        try:
            return self.table.bytes_of(np.asarray(ids, dtype=np.uint32))
        except (UnknownToken, OverflowError, ValueError, TypeError):
            raise NotRenderable("the prompt holds token ids without known bytes") from None

    def encode(self) -> bytes:
        """The card as bytes, for `decode`. Equal cards give equal bytes."""
        return msgspec.msgpack.encode(
            _Wire(
                version=CARD_VERSION,
                template=self.template,
                tools_template=None if self.tools_template == self.template else self.tools_template,
                content_format=self.content_format,
                tools_content_format=self.tools_content_format,
                default_template_kwargs=json.dumps(dict(self.default_template_kwargs)),
                exclude_tools_when_tool_choice_none=self.exclude_tools_when_tool_choice_none,
                special_tokens=dict(sorted(self.special_tokens.items())),
                chat_prefix=self.chat_prefix,
                completion_prefix=self.completion_prefix,
                normalizer=self.normalizer,
                space_marker=self.space_marker,
                added_tokens=self.added_tokens,
                tokens_per_byte=self.tokens_per_byte,
                image_tokens=self.image_tokens,
                block_tokens=self.block_tokens,
                table=None if self.table is None else self.table.encode(),
                exact=self.exact,
                reason=self.reason,
            )
        )

    @classmethod
    def decode(cls, packed: bytes) -> "ModelCard":
        """The card that `encode` packed. Raises `DataError` on anything else, and on a version it does not know."""
        if len(packed) > CARD_BYTES_MAX:
            raise DataError("model card: too large")
        try:
            wire = msgspec.msgpack.decode(packed, type=_Wire)
            kwargs = json.loads(wire.default_template_kwargs)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DataError(f"model card: {type(error).__name__}") from None
        if wire.version != CARD_VERSION:
            raise DataError(f"model card: unknown version {wire.version}")
        if not isinstance(kwargs, dict) or not 0 < wire.tokens_per_byte < 16 or not 0 < wire.block_tokens < 1 << 20:
            raise DataError("model card: values out of range")
        return cls(
            template=wire.template,
            tools_template=wire.template if wire.tools_template is None else wire.tools_template,
            content_format=wire.content_format,
            tools_content_format=wire.tools_content_format,
            default_template_kwargs=kwargs,
            exclude_tools_when_tool_choice_none=wire.exclude_tools_when_tool_choice_none,
            special_tokens=wire.special_tokens,
            chat_prefix=wire.chat_prefix,
            completion_prefix=wire.completion_prefix,
            normalizer=wire.normalizer,
            space_marker=wire.space_marker,
            added_tokens=wire.added_tokens,
            tokens_per_byte=wire.tokens_per_byte,
            image_tokens=wire.image_tokens,
            block_tokens=wire.block_tokens,
            table=None if wire.table is None else TokenTable.decode(wire.table),
            exact=wire.exact,
            reason=wire.reason,
        )

    def digest(self) -> str:
        """The card's name in the shared state: SHA-256 of `encode()`, in hex. Not cached: keep it beside the card."""
        return hashlib.sha256(self.encode()).hexdigest()


class _Wire(msgspec.Struct, frozen=True, kw_only=True):
    """The card's form on the wire: a MessagePack map; a reader skips fields that it does not know."""

    version: int
    template: str | None
    tools_template: str | None
    content_format: ContentFormat
    tools_content_format: ContentFormat
    default_template_kwargs: str
    exclude_tools_when_tool_choice_none: bool
    special_tokens: dict[str, str]
    chat_prefix: str
    completion_prefix: str
    normalizer: Normalizer
    space_marker: bool
    added_tokens: tuple[str, ...]
    tokens_per_byte: float
    image_tokens: int
    block_tokens: int
    table: bytes | None
    exact: bool
    reason: str


@lru_cache(maxsize=ADDED_TOKEN_SETS_MAX)
def _search(added_tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Finds added tokens: the leftmost, and the longest of those that start there."""
    return re.compile("|".join(re.escape(token) for token in sorted(added_tokens, key=len, reverse=True)))


def _normalize_between(text: str, added_tokens: tuple[str, ...]) -> str:
    """NFC of each stretch between added tokens: what follows such a token must not combine with its last letter."""
    if not added_tokens:
        return unicodedata.normalize("NFC", text)
    pieces: list[str] = []
    at = 0
    for match in _search(added_tokens).finditer(text):
        pieces += (unicodedata.normalize("NFC", text[at : match.start()]), match.group())
        at = match.end()
    return "".join(pieces) + unicodedata.normalize("NFC", text[at:])
