"""The chunk chain: a prompt's bytes as a sequence of keyed 64-bit hashes, one for each 64 bytes.

The one rule: sidecar and picker call the same functions with the same seed, so that equal text gives equal hashes
and unequal prefixes never do (but for 64-bit chance). Nothing here looks at tokens.

    local_k = xxh3_64(bytes[64k : 64k + 64], seed)
    h_k     = fold((h_{k-1} XOR local_k) * MULTIPLIER mod 2^64)        fold(x) = x XOR (x >> 32)
    h_{-1}  = root_hash(seed, LoRA name, cache_salt)

The step is a bijection of `h_{k-1} XOR local_k`, so it adds no collisions of its own, and the local hashes are
independent of one another, which lets a fast implementation overlap them. Golden vectors: `tests/core/test_chunks.py`.
"""

import hashlib
import hmac

import numpy as np
import numpy.typing as npt
import xxhash

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]

CHUNK_BYTES = 64
MULTIPLIER = 0x9E37_79B9_7F4A_7C15
MASK = 0xFFFF_FFFF_FFFF_FFFF


def pool_seed(secret: bytes, namespace: str, name: str) -> int:
    """The 64-bit hash seed of the pool `namespace/name`: the head of HMAC-SHA256 under the install's secret."""
    digest = hmac.new(secret, f"{namespace}/{name}".encode(), hashlib.sha256).digest()
    return int.from_bytes(digest[:8], "little")


def seed_digest(seed: int) -> str:
    """Eight hex digits by which two sides see whether their hashes agree: too short to give the seed away."""
    return hashlib.sha256(b"trimtab seed" + seed.to_bytes(8, "little")).hexdigest()[:8]


def root_hash(seed: int, lora_name: str | None = None, cache_salt: str | None = None) -> int:
    """`h_{-1}`: what two requests must share besides text before an engine may reuse KV blocks between them.

    Each part is tagged and length-prefixed, so that no name can imitate a salt, and an empty one differs from none.
    """
    material = bytearray()
    for tag, part in ((b"L", lora_name), (b"S", cache_salt)):
        if part is not None:
            encoded = part.encode("utf-8", "surrogatepass")
            material += tag + len(encoded).to_bytes(4, "little") + encoded
    return xxhash.xxh3_64_intdigest(bytes(material), seed)


def extend_chain(previous: int, text: bytes, seed: int) -> list[int]:
    """Hashes of the whole chunks of `text`, which starts at a chunk's edge whose chain so far is `previous`.

    The last `len(text) % 64` bytes are no chunk yet and are left out.
    """
    digest, chain, h, view = xxhash.xxh3_64_intdigest, [], previous, memoryview(text)
    for start in range(0, len(text) - CHUNK_BYTES + 1, CHUNK_BYTES):
        x = ((h ^ digest(view[start : start + CHUNK_BYTES], seed)) * MULTIPLIER) & MASK
        h = x ^ (x >> 32)
        chain.append(h)
    return chain


def hash_chunks(text: bytes, root: int, seed: int) -> U64:
    """The chain of a whole prompt: `len(text) // 64` hashes, shape (chunks,)."""
    return np.array(extend_chain(root, text, seed), dtype=np.uint64)
