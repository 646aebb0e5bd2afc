"""Frames captured from real engines, as the tests read them."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab_core.token_table import TokenTable

ROOT = Path(__file__).parents[2]
CAPTURES = ROOT / "tests/data/engine_captures"
TINY_MODEL = ROOT / "lab/trimtab_lab/data/tiny_model"
SEED = 0x5EED


def fixture_payloads() -> list[dict[str, Any]]:
    """One payload of each vLLM release, encoded with that release's own structs."""
    return [json.loads(line) for line in (CAPTURES / "fixture_payloads_by_version.jsonl").read_text().splitlines()]


def frames(name: str) -> Iterator[tuple[int, bytes, Any]]:
    """(sequence, payload, decoded events) of each captured frame, from a live vLLM 0.32 with blocks of 32."""
    with gzip.open(CAPTURES / f"{name}.jsonl.gz", "rt") as file:
        for line in file:
            record = json.loads(line)
            _, sequence, payload = (bytes.fromhex(part) for part in record["frames_hex"])
            yield int.from_bytes(sequence, "big"), payload, record["decoded"]


def metrics_text(name: str) -> str:
    with gzip.open(CAPTURES / f"{name}.txt.gz", "rt") as file:
        return file.read()


def tiny_pieces() -> list[bytes | None]:
    """Bytes of each id of the tiny model, straight from its byte-level BPE vocabulary."""
    tokenizer = json.loads((TINY_MODEL / "tokenizer.json").read_text())
    alphabet = _byte_alphabet()
    pieces: dict[int, bytes] = {
        index: bytes(alphabet[char] for char in piece)
        for piece, index in tokenizer["model"]["vocab"].items()
        if all(char in alphabet for char in piece)
    }
    pieces |= {token["id"]: token["content"].encode() for token in tokenizer["added_tokens"]}
    return [pieces.get(index) for index in range(max(pieces) + 1)]


def tiny_table() -> TokenTable:
    return TokenTable.from_pieces(tiny_pieces())


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE gives the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
