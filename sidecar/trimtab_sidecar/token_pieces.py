"""The bytes of each token id, read from a `tokenizer.json`.

The one rule: a piece gets bytes only if the bytes of any run of tokens are those of its tokens, joined, and equal to
the text that they were made from. `NotInvertible` says why a whole tokenizer cannot promise that; a single added token
that cannot (it strips the spaces around it) just has no bytes. What the engine really loads may differ from the file:
the probes decide.

Two families promise it: byte-level BPE, whose alphabet is a letter for each byte, and SentencePiece's with byte
fallback, where U+2581 stands for a space and `<0xNN>` for a byte.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_core.model_card import Normalizer
from trimtab_core.token_table import TABLE_TOKENS_MAX, TokenTable

_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KEEPING_BEHAVIORS = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})


class NotInvertible(Exception):  # noqa: N818 - a finding about a tokenizer, not an error
    """Text cannot be told from this tokenizer's tokens; `reason` is one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPieces:
    """A tokenizer's vocabulary, read backwards."""

    table: TokenTable
    normalizer: Normalizer
    space_marker: bool
    """U+2581 in a text reads back as a space."""
    added_tokens: tuple[str, ...]
    """Tokens that are found before the text is normalised, sorted."""
    stripping_tokens: tuple[str, ...]
    """Added tokens that swallow spaces beside them and therefore have no bytes, sorted."""


def read_token_pieces(tokenizer: Mapping[str, Any]) -> TokenPieces:
    """The pieces of a parsed `tokenizer.json`. Raises `NotInvertible`."""
    model = _object(tokenizer.get("model"))
    if not model:
        raise NotInvertible("there is no tokenizer.json with a model in it")
    vocabulary = _vocabulary(model)
    normalizer = _read_normalizer(tokenizer.get("normalizer"))
    splitters = list(_flatten(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    for splitter in splitters:
        _check_splitter(splitter)
    decoders = [part.get("type") for part in _flatten(tokenizer.get("decoder"), "decoders")]
    byte_level = "ByteLevel" in decoders or any(part.get("type") == "ByteLevel" for part in splitters)
    pieces: dict[int, bytes | None]
    if byte_level:
        pieces = _byte_level_pieces(vocabulary)
    elif model.get("byte_fallback"):
        pieces = _sentence_pieces(vocabulary)
    else:
        raise NotInvertible("characters outside of the vocabulary are lost (no byte level and no byte fallback)")
    added = [_object(token) for token in tokenizer.get("added_tokens") or ()]
    stripping = set()
    for token in added:
        content, at = token.get("content"), token.get("id")
        if not isinstance(content, str) or not isinstance(at, int):
            raise NotInvertible("an added token has no content or no id")
        if token.get("lstrip") or token.get("rstrip"):
            stripping.add(content)
            pieces[at] = None
        else:
            pieces[at] = (content if byte_level else content.replace(_SPACE, " ")).encode("utf-8", "replace")
    if not pieces or min(pieces) < 0 or max(pieces) >= TABLE_TOKENS_MAX:
        raise NotInvertible("token ids are out of range")
    return TokenPieces(
        table=TokenTable.from_pieces([pieces.get(at) for at in range(max(pieces) + 1)]),
        normalizer=normalizer,
        space_marker=not byte_level,
        added_tokens=tuple(sorted(str(token["content"]) for token in added if not token.get("normalized"))),
        stripping_tokens=tuple(sorted(stripping)),
    )


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _flatten(value: Any, parts_field: str) -> Iterator[Mapping[str, Any]]:
    """A component, or the components of a sequence of them, in order."""
    component = _object(value)
    if component.get("type") == "Sequence":
        for part in component.get(parts_field) or ():
            yield from _flatten(part, parts_field)
    elif component:
        yield component


def _vocabulary(model: Mapping[str, Any]) -> dict[str, int]:
    kind, vocabulary = model.get("type", "BPE"), model.get("vocab")
    if kind == "Unigram" and isinstance(vocabulary, list):
        return {str(entry[0]): at for at, entry in enumerate(vocabulary)}
    if kind != "BPE" or not isinstance(vocabulary, Mapping):
        raise NotInvertible(f"a {kind} tokenizer does not keep every character of the text")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise NotInvertible("pieces carry marks for the place in a word, which are not text")
    return {str(piece): int(at) for piece, at in vocabulary.items()}


def _read_normalizer(value: Any) -> Normalizer:
    normalizer: Normalizer = "none"
    for part in _flatten(value, "normalizers"):
        kind = part.get("type")
        if kind == "NFC":
            normalizer = "nfc"
        elif kind == "Prepend":
            raise NotInvertible("the normaliser puts a dummy prefix in front of the text")
        elif kind == "Replace" and _object(part.get("pattern")) == {"String": " "} and part.get("content") == _SPACE:
            continue
        else:
            raise NotInvertible(f"the normaliser {kind} changes the text")
    return normalizer


def _check_splitter(splitter: Mapping[str, Any]) -> None:
    kind = splitter.get("type")
    if kind == "ByteLevel":
        if splitter.get("add_prefix_space"):
            raise NotInvertible("the pre-tokeniser puts a dummy prefix in front of the text")
    elif kind == "Metaspace":
        if splitter.get("replacement", _SPACE) != _SPACE:
            raise NotInvertible("the pre-tokeniser writes spaces as another character than U+2581")
        scheme = splitter.get("prepend_scheme", "always" if splitter.get("add_prefix_space", True) else "never")
        if scheme != "never":
            raise NotInvertible("the pre-tokeniser puts a dummy prefix in front of the text")
    elif kind in ("Split", "Punctuation"):
        if splitter.get("behavior", "Isolated") not in _KEEPING_BEHAVIORS:
            raise NotInvertible(f"the pre-tokeniser {kind} removes text")
    elif kind not in ("Digits", "UnicodeScripts"):
        raise NotInvertible(f"the pre-tokeniser {kind} removes text")


def _byte_letters() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 characters stand for themselves, the other bytes for the
    characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _byte_level_pieces(vocabulary: Mapping[str, int]) -> dict[int, bytes | None]:
    letters = _byte_letters()
    if missing := letters.keys() - vocabulary.keys():
        raise NotInvertible(f"{len(missing)} of the 256 bytes are not in the vocabulary")
    pieces: dict[int, bytes | None] = {}
    for piece, at in vocabulary.items():
        try:
            pieces[at] = bytes([letters[letter] for letter in piece])
        except KeyError:  # such a piece can only be made by an added token of the same name
            pieces[at] = None
    return pieces


def _sentence_pieces(vocabulary: Mapping[str, int]) -> dict[int, bytes | None]:
    pieces: dict[int, bytes | None] = {}
    seen = set()
    for piece, at in vocabulary.items():
        if match := _BYTE_PIECE.fullmatch(piece):
            pieces[at] = bytes([int(match[1], 16)])
            seen.add(pieces[at])
        else:
            pieces[at] = piece.replace(_SPACE, " ").encode("utf-8", "replace")
    if len(seen) != 256:
        raise NotInvertible(f"{256 - len(seen)} of the 256 bytes have no piece of their own")
    return pieces
