"""The tiny model's tokenizer and chat template, as vLLM loads and applies them.

The one rule: the same text gives the same tokens as the engine's own `/tokenize`. The tokenizer file says "GPT-2
pre-tokeniser, no normaliser"; transformers 5, which the engine uses, replaces both by Qwen2's and NFC for this model
type, so this module does too unless told to take the file literally.

Special tokens cut a text before anything else looks at it, so the parts between them tokenise independently. That is
what makes the cache of parts exact, and a chat that grows by a turn costs the turn.
"""

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

TINY_MODEL_DIR = Path(__file__).parent / "data" / "tiny_model"
SEGMENT_CACHE_BYTES_MAX = 64 << 20
"""Text and tokens kept for parts seen before; the part used longest ago goes first."""

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class UnusableTextError(Exception):
    """Text that no tokenizer takes (a lone surrogate), or messages that the template cannot render."""


class Vocabulary:
    """Text to tokens and back, and chats to text."""

    def __init__(self, model_dir: Path = TINY_MODEL_DIR, *, as_filed: bool = False) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        if not as_filed:
            self._tokenizer.normalizer = normalizers.NFC()
            self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        self.size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = frozenset(self._special.values())
        self._cut = re.compile("(" + "|".join(map(re.escape, self._special)) + ")")
        config = json.loads((model_dir / "tokenizer_config.json").read_text())
        self.eos_id: int = self._special[config["eos_token"]]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise_exception
        template = (model_dir / "chat_template.jinja").read_text()
        self.template_names_developer = '"developer"' in template or "'developer'" in template
        self._template = environment.from_string(template)
        self._template_variables = {
            name: config[name] for name in ("bos_token", "eos_token", "pad_token") if config.get(name) is not None
        }
        self._pieces = [self._piece_bytes(token_id) for token_id in range(self.size)]
        self._segments: OrderedDict[str, array[int]] = OrderedDict()
        self._segments_bytes = 0

    def encode(self, text: str) -> "array[int]":
        """Tokens of a text; special tokens written out in it count as such. Raises UnusableTextError."""
        tokens = array("I")
        for part in self._cut.split(text):
            if part in self._special:
                tokens.append(self._special[part])
            elif part:
                tokens.extend(self._encode_part(part))
        return tokens

    def unknown_parts(self, text: str) -> list[str]:
        """The parts of a text that `encode` would have to tokenise."""
        return [part for part in dict.fromkeys(self._cut.split(text)) if part and not self._is_known(part)]

    def tokenise_parts(self, parts: list[str]) -> list["array[int]"]:
        """Tokens of parts without special tokens. Touches no state and releases the interpreter lock, so it may run in
        a thread; hand the result to `learn`. Raises UnusableTextError."""
        try:
            return [array("I", part.ids) for part in self._tokenizer.encode_batch_fast(parts, add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError) as error:
            raise UnusableTextError(
                "TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]"
            ) from error

    def learn(self, parts: list[str], tokens: list["array[int]"]) -> None:
        """Keep what `tokenise_parts` found."""
        for part, part_tokens in zip(parts, tokens, strict=True):
            if part not in self._segments:
                self._segments[part] = part_tokens
                self._segments_bytes += len(part) + 4 * len(part_tokens)
        while self._segments_bytes > SEGMENT_CACHE_BYTES_MAX:
            gone, gone_tokens = self._segments.popitem(last=False)
            self._segments_bytes -= len(gone) + 4 * len(gone_tokens)

    def decode(self, tokens: Iterable[int], *, show_special: bool = True) -> str:
        """Text of tokens; broken UTF-8 shows as U+FFFD. Raises KeyError for an id outside the vocabulary."""
        pieces = []
        for token in tokens:
            if not 0 <= token < self.size:
                raise KeyError(token)
            if show_special or token not in self._special_ids:
                pieces.append(self._pieces[token])
        return b"".join(pieces).decode("utf-8", "replace")

    def token_name(self, token: int) -> str:
        """The token as the tokenizer file spells it."""
        return str(self._tokenizer.id_to_token(token))

    def render_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **variables: Any) -> str:
        """The chat template applied to normalised messages. Raises UnusableTextError."""
        try:
            return str(
                self._template.render(
                    messages=messages,
                    add_generation_prompt=add_generation_prompt,
                    **{**self._template_variables, **variables},
                )
            )
        except (TemplateError, TypeError) as error:
            raise UnusableTextError(str(error)) from error

    def plain_words(self) -> list[int]:
        """Tokens that are a space and a lower-case word, and tokenise back to themselves among words."""
        words = []
        for token, piece in enumerate(self._pieces):
            text = piece.decode("utf-8", "replace")
            if re.fullmatch(" [a-z]{2,}", text) and list(self.encode(text)) == [token]:
                words.append(token)
        return words

    def _is_known(self, part: str) -> bool:
        return part in self._special or part in self._segments

    def _encode_part(self, part: str) -> "array[int]":
        known = self._segments.get(part)
        if known is not None:
            self._segments.move_to_end(part)
            return known
        [tokens] = self.tokenise_parts([part])
        self.learn([part], [tokens])
        return tokens

    def _piece_bytes(self, token_id: int) -> bytes:
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if token_id in self._special_ids:
            return str(name).encode()
        return bytes(_BYTE_OF_CHAR[char] for char in name)


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and on, in order."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_of_char()


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
