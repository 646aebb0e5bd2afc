"""The emulated engine against what a real vLLM 0.32 did with the same requests (recorded by `record_vllm.py`)."""

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.kv_wire import KvBatchEncoder
from trimtab_lab.token_chain import LoraAdapter

RECORD = Path(__file__).parent.parent / "data" / "lab" / "vllm_0_32_sequence.jsonl.gz"


class Names:
    """Hashes by order of appearance: two engines hash differently, but must mean the same."""

    def __init__(self) -> None:
        self._names: dict[int, int] = {}

    def __call__(self, event: dict[str, Any]) -> dict[str, Any]:
        named = dict(event)
        if "block_hashes" in event:
            named["block_hashes"] = [self._names.setdefault(block, len(self._names)) for block in event["block_hashes"]]
        if event.get("parent_block_hash") is not None:
            named["parent_block_hash"] = self._names[event["parent_block_hash"]]
        return named


def entries() -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(RECORD.read_bytes()).splitlines()]


@pytest.fixture(scope="module")
def served() -> list[tuple[dict[str, Any], int, list[list[dict[str, Any]]]]]:
    """(recorded entry, cached tokens here, event batches here) of each request, served one after another."""
    model = EngineModel(
        EngineSettings(block_count=64, block_tokens=32, context_tokens_max=1024, batched_tokens_max=256)
    )
    encoder, out, now_s = KvBatchEncoder(), [], 0.0
    for number, entry in enumerate(entries()):
        batches: list[list[dict[str, Any]]] = []
        cached = 0
        if "reset" in entry:
            assert model.reset_prefix_cache()
        else:
            adapter = LoraAdapter(name="a1", adapter_id=1) if entry.get("model") == "a1" else None
            request = EngineRequest(
                request_id=str(number),
                prompt=entry["prompt"],
                output=entry["output"],
                lora=adapter,
                cache_salt=entry.get("cache_salt"),
            )
            assert model.add(request, now_s) is None
            while model.has_work:
                outcome = model.step(now_s)
                assert outcome is not None
                model.check_invariants()
                now_s = outcome.ended_s
                cached = sum(done.cached_tokens for done in outcome.finished)
                if outcome.kv_events:
                    batches.append(msgspec.msgpack.decode(encoder.encode(outcome.kv_events, timestamp_s=0.0))[1])
        out.append((entry, cached, batches))
    return out


def test_cached_tokens_are_the_real_engines_request_by_request(
    served: list[tuple[dict[str, Any], int, list[list[dict[str, Any]]]]],
) -> None:
    real = [entry.get("cached_tokens", 0) for entry, _, _ in served]
    assert [cached for _, cached, _ in served] == real
    assert sum(real) > 5000


def test_events_are_the_real_engines_one_by_one_and_in_its_order(
    served: list[tuple[dict[str, Any], int, list[list[dict[str, Any]]]]],
) -> None:
    real_names, own_names = Names(), Names()
    kinds = set()
    for number, (entry, _, batches) in enumerate(served):
        real = [real_names(event) for batch in entry["batches"] for event in batch]
        own = [own_names(event) for batch in batches for event in batch]
        assert own == real, f"request {number}"
        kinds |= {event["type"] for event in real}
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def test_events_come_in_the_real_engines_batches(
    served: list[tuple[dict[str, Any], int, list[list[dict[str, Any]]]]],
) -> None:
    for number, (entry, _, batches) in enumerate(served):
        assert list(map(len, batches)) == list(map(len, entry["batches"])), f"request {number}"
