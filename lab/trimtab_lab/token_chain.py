"""A request's tokens together with the hash chain over its whole blocks.

The one rule: the hash of a block covers its tokens, all tokens before it, and the extra keys (LoRA adapter, cache salt
on the first block), so equal hashes mean an interchangeable KV block. It grows at the end only.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from trimtab_lab.kv_events import ExtraKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """A LoRA adapter that the engine serves beside its base model."""

    name: str
    adapter_id: int
    """Positive, as the engine numbers them: 1, 2, ..."""
    path: str = ""
    """Part of the block hash, so that a name pointed at other weights does not reuse the old ones' KV."""


class TokenChain:
    """Tokens of one request, prompt first, and `hashes[i]` of its i-th whole block of `block_tokens` tokens."""

    __slots__ = ("_start", "block_tokens", "cache_salt", "hashes", "lora", "tokens")

    def __init__(
        self,
        tokens: Iterable[int],
        *,
        block_tokens: int,
        root: bytes,
        lora: LoraAdapter | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.tokens = array("I", tokens)
        self.block_tokens = block_tokens
        self.lora = lora
        self.cache_salt = cache_salt or None
        self.hashes: list[bytes] = []
        lora_part = b"" if lora is None else _tagged(b"lora", lora.name) + _tagged(b"path", lora.path)
        salt_part = b"" if self.cache_salt is None else _tagged(b"salt", self.cache_salt)
        self._start = lora_part + salt_part + root
        self._extend()

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if len(self.tokens) % self.block_tokens == 0:
            self._extend()

    def extra_keys(self, block_index: int) -> ExtraKeys:
        keys: tuple[str, ...] = () if self.lora is None else (self.lora.name,)
        if block_index == 0 and self.cache_salt is not None:
            keys += (self.cache_salt,)
        return keys or None

    def _extend(self) -> None:
        size, tokens, hashes = self.block_tokens, self.tokens, self.hashes
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            before = hashes[-1] if hashes else self._start
            hashes.append(sha256(before + tokens[start : start + size].tobytes()).digest())


def _tagged(tag: bytes, text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return tag + len(encoded).to_bytes(4, "little") + encoded
