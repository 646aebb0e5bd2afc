"""vLLM's events of every release become the same values, and nothing that is not understood is claimed."""

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidecar_captures import fixture_payloads, frames

from trimtab_sidecar import sglang_events, vllm_events
from trimtab_sidecar.engine_events import BlocksRemoved, BlocksStored, CacheCleared, EventBatch, EventFormatError

RELEASES = fixture_payloads()
M64 = 0xFFFF_FFFF_FFFF_FFFF


def payload(*events: object, rank: object = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def stored(**changes: object) -> dict[str, object]:
    event: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [5, 6, 7, 8],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return event | changes


def only(batch: EventBatch) -> BlocksStored:
    (event,) = batch.events
    assert isinstance(event, BlocksStored)
    return event


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release["vllm_version"])
def test_every_release_decodes_to_the_same_events(release: dict[str, str]) -> None:
    batch = vllm_events.decode(bytes.fromhex(release["payload_hex"]))
    assert (batch.undecodable, batch.unknown, batch.refused_blocks, batch.rank, batch.time_s) == (0, 0, 0, 0, 1.5)
    first, second, third = batch.events
    assert isinstance(first, BlocksStored)
    assert first.blocks.tolist() == [111, M64]
    assert first.tokens.tolist() == [1, 2, 3, 4]
    assert (first.parent, first.block_tokens, first.medium, first.group, first.lora_name) == (None, 2, "GPU", 0, None)
    assert first.cache_salt == ("salt" if "extra_keys" in release["fields_stored"] else None)
    assert isinstance(second, BlocksRemoved)
    assert second.blocks.tolist() == [111]
    assert isinstance(third, CacheCleared)


@pytest.mark.parametrize("name", ["pod1_sha256_int_block32", "lora_and_salt"])
def test_every_captured_frame_decodes_whole(name: str) -> None:
    for _, raw, decoded in frames(name):
        batch = vllm_events.decode(raw)
        assert batch.time_s == decoded[0]
        assert len(batch.events) == len(decoded[1])
        assert (batch.undecodable, batch.unknown, batch.refused_blocks) == (0, 0, 0)
        for event, said in zip(batch.events, decoded[1], strict=True):
            if isinstance(event, BlocksStored):
                assert event.blocks.tolist() == said["block_hashes"]
                assert event.tokens.tolist() == said["token_ids"]
                assert (event.parent, event.lora_name) == (said["parent_block_hash"], said["lora_name"])
            elif isinstance(event, BlocksRemoved):
                assert event.blocks.tolist() == said["block_hashes"]


def test_a_hash_has_the_same_key_as_integer_and_as_bytes() -> None:
    digest = bytes(range(32))
    as_integer = int.from_bytes(digest, "big") & M64
    event = only(vllm_events.decode(payload(stored(block_hashes=[digest, as_integer], parent_block_hash=digest))))
    assert event.blocks.tolist() == [as_integer, as_integer]
    assert event.parent == as_integer


def test_unknown_fields_and_events_are_passed_over() -> None:
    batch = vllm_events.decode(
        payload(
            stored(colour="red"),
            {"type": "BlockPainted", "colour": "red"},
            ["BlockPainted", "red"],
            ["BlockRemoved", [1], "GPU", 0, None, None, "later", {"and": "more"}],
        )
    )
    assert [type(event) for event in batch.events] == [BlocksStored, BlocksRemoved]
    assert (batch.unknown, batch.undecodable) == (2, 0)


def test_lora_name_and_salt_are_told_apart() -> None:
    keys = [["a1", "s1"], ["a1"]]
    event = only(vllm_events.decode(payload(stored(lora_name="a1", lora_id=1, extra_keys=keys))))
    assert (event.lora_name, event.cache_salt, len(event.blocks)) == ("a1", "s1", 2)


def test_an_adapter_that_has_only_a_number_is_not_claimed() -> None:
    batch = vllm_events.decode(payload(stored(lora_id=3)))
    assert (batch.events, batch.refused_blocks) == ((), 2)


@pytest.mark.parametrize(
    ("keys", "usable"),
    [
        ([None, [["image", 3]]], 1),
        ([["salt"], [["image", 3]]], 1),
        ([[["image", 0]], None], 0),
        ([["image-before-0.19", "salt"], None], 0),
        ([None, ["image-before-0.19"]], 1),
        ([None, [b"digest of embeddings"]], 1),
        ([[b"digest of embeddings"], None], 0),
        ([{"new": "form"}, None], 0),
    ],
)
def test_the_prefix_ends_at_the_first_block_that_is_not_understood(keys: list[object], usable: int) -> None:
    batch = vllm_events.decode(payload(stored(extra_keys=keys)))
    assert batch.refused_blocks == 2 - usable
    if usable:
        event = only(batch)
        assert event.blocks.tolist() == [1]
        assert event.tokens.tolist() == [5, 6]
    else:
        assert batch.events == ()


def test_a_text_key_on_a_later_block_is_no_salt() -> None:
    batch = vllm_events.decode(payload(stored(parent_block_hash=9, extra_keys=[["text"], None])))
    assert (batch.events, batch.refused_blocks) == ((), 2)


def test_an_offload_event_is_a_reference_without_tokens() -> None:
    event = only(vllm_events.decode(payload(stored(token_ids=[], block_size=0, medium="CPU"))))
    assert (event.tokens.tolist(), event.block_tokens, event.medium) == ([], 0, "CPU")
    # Even with tokens: it leaves out the extra keys, so nothing may be built on it.
    event = only(vllm_events.decode(payload(stored(medium="STORAGE"))))
    assert (event.tokens.tolist(), event.block_tokens) == ([], 0)


def test_blocks_on_another_machine_are_not_this_endpoints() -> None:
    remote = {"type": "BlockRemoved", "block_hashes": [1], "medium": "STORAGE", "locality": "REMOTE"}
    assert vllm_events.decode(payload(stored(locality="REMOTE"), remote)).events == ()


def test_a_windowed_group_may_have_fewer_hashes_than_tokens_or_none() -> None:
    events = vllm_events.decode(
        payload(
            stored(block_hashes=[1], kv_cache_spec_kind="sliding_window", group_idx=1),
            stored(block_hashes=[], kv_cache_spec_kind="sliding_window", group_idx=1),
            stored(block_hashes=[]),
        )
    ).events
    assert [(event.group, event.kind, len(event.blocks)) for event in events if isinstance(event, BlocksStored)] == [
        (1, "sliding_window", 1),
        (1, "sliding_window", 0),
        (0, None, 0),
    ]


@pytest.mark.parametrize(
    ("bad", "uncertain"),
    [
        ({"type": "BlockStored", "block_hashes": "x"}, False),
        (stored(token_ids=["a", "b"]), False),
        (stored(token_ids=[1 << 40] * 4), False),
        (stored(block_hashes=[1.5, 2]), False),
        (stored(extra_keys=[None]), False),
        ({"type": "BlockRemoved", "block_hashes": [None]}, True),
        ([], True),
        (7, True),
        ({"no": "type"}, True),
    ],
)
def test_a_broken_event_is_counted_and_spoils_no_other(bad: object, uncertain: bool) -> None:
    batch = vllm_events.decode(payload(bad, stored()))
    assert len(batch.events) == 1
    assert (batch.undecodable, batch.removals_uncertain) == (1, uncertain)


def test_hashes_that_do_not_match_their_tokens_are_not_claimed() -> None:
    batch = vllm_events.decode(payload(stored(token_ids=[1, 2, 3, 4, 5])))
    assert (batch.events, batch.refused_blocks) == ((), 2)


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x90", msgspec.msgpack.encode({"a": 1}), b"\x91" * 5_000])
def test_a_payload_that_is_no_batch_raises(raw: bytes) -> None:
    with pytest.raises(EventFormatError):
        vllm_events.decode(raw)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=9)
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)
EVENTS = st.one_of(
    TREES,
    st.lists(TREES, max_size=12).map(lambda rest: ["BlockStored", *rest]),
    st.lists(TREES, max_size=5).map(lambda rest: ["BlockRemoved", *rest]),
    st.dictionaries(st.sampled_from(vllm_events.POSITIONS["BlockStored"]), TREES).map(lambda some: stored(**some)),
)


@pytest.mark.parametrize("decode", [vllm_events.decode, sglang_events.decode])
@given(events=st.lists(EVENTS, max_size=4), rank=TREES)
def test_no_event_whatever_its_form_brings_the_decoder_down(decode: object, events: list[object], rank: object) -> None:
    batch = decode(payload(*events, rank=rank))  # type: ignore[operator]
    assert batch.undecodable + batch.unknown <= len(events)
    for event in batch.events:
        if isinstance(event, BlocksStored):
            assert event.blocks.dtype == np.uint64
            assert len(event.tokens) <= len(event.blocks) * event.block_tokens


@pytest.mark.parametrize("decode", [vllm_events.decode, sglang_events.decode])
@given(raw=st.binary(max_size=64))
def test_no_bytes_bring_the_decoder_down(decode: object, raw: bytes) -> None:
    with contextlib.suppress(EventFormatError):
        decode(raw)  # type: ignore[operator]


def test_sglang_hashes_are_signed_and_its_last_page_may_be_short() -> None:
    batch = sglang_events.decode(
        payload(
            ["BlockStored", [-1], None, [1, 2, 3, 4], 4, None],
            ["BlockStored", [-2], -1, [5], 1, None, "CPU_PINNED"],
            ["BlockStored", [-3], None, [1, 2], 2, None, "GPU", {"cache_salt": "s"}],
            stored(block_hashes=[4], token_ids=[1, 2], cache_salt="s"),
            ["BlockRemoved", [-2], "CPU_PINNED"],
            ["AllBlocksCleared"],
        )
    )  # fmt: skip
    one, two, three, four, removed, _ = batch.events
    assert isinstance(one, BlocksStored)
    assert isinstance(two, BlocksStored)
    assert isinstance(three, BlocksStored)
    assert isinstance(four, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert one.blocks.tolist() == [M64]
    assert (two.parent, two.medium, two.block_tokens, two.tokens.tolist()) == (M64, "CPU_PINNED", 1, [5])
    assert (three.cache_salt, four.cache_salt) == ("s", "s")
    assert removed.blocks.tolist() == [M64 - 1]
    assert batch.undecodable == 0


def test_sglang_pairs_of_tokens_are_not_claimed() -> None:
    batch = sglang_events.decode(payload(["BlockStored", [1], None, [[1, 2], [2, 3]], 2, None]))
    assert (batch.events, batch.refused_blocks) == ((), 1)


@pytest.mark.parametrize("field", ["group_idx", "block_size"])
def test_an_event_with_an_absurd_number_is_left_out_and_spoils_no_other(field: str) -> None:
    batch = vllm_events.decode(payload(stored(**{field: 2**63}), stored()))
    assert (len(batch.events), batch.undecodable) == (1, 1)
