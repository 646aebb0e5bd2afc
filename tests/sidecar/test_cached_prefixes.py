"""A rank's cached prefixes are those of the engine's live blocks, and nothing else is claimed."""

from collections import Counter
from typing import Any

import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidecar_captures import SEED, TINY_MODEL, frames, tiny_table

from trimtab_core.chunks import hash_chunks, root_hash
from trimtab_sidecar import vllm_events
from trimtab_sidecar.cached_prefixes import OTHER_GROUPS_MAX, CachedPrefixes
from trimtab_sidecar.engine_events import BlocksRemoved, BlocksStored, CacheCleared, EngineEvent, EventBatch

TABLE = tiny_table()
BLOCK_TOKENS = 32


class LiteralCache:
    """The engine's cache straight from the decoded events: the whole token row of each block, and its references."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[tuple[int, ...], str | None, str | None]] = {}
        self.held: Counter[int] = Counter()

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "BlockStored":
            row, lora, salt = self.rows.get(event["parent_block_hash"], ((), event["lora_name"], None))
            if event["parent_block_hash"] is None:
                first = list(event["extra_keys"][0] or ())
                salt = next((key for key in first if key != lora), None)
            for index, block in enumerate(event["block_hashes"]):
                size = event["block_size"]
                row += tuple(event["token_ids"][index * size : (index + 1) * size])
                self.rows[block] = (row, lora, salt)
                self.held[block] += 1
        elif event["type"] == "BlockRemoved":
            self.held.subtract(event["block_hashes"])
            self.held = +self.held
        else:
            self.held.clear()

    def texts(self) -> set[bytes]:
        return {text(self.rows[block][0]) for block in self.held}

    def chunks(self) -> dict[int, int]:
        """Hash -> tokens: each block claims the chunks that end in it."""
        claimed: dict[int, int] = {}
        for block in self.held:
            row, lora, salt = self.rows[block]
            before = len(text(row[:-BLOCK_TOKENS])) // 64
            hashes = hash_chunks(text(row), root_hash(SEED, lora, salt), SEED).tolist()[before:]
            for index, chunk in enumerate(hashes):
                tokens = len(row) if index == len(hashes) - 1 else len(row) - BLOCK_TOKENS
                claimed[chunk] = min(claimed.get(chunk, tokens), tokens)
        return claimed


def text(row: tuple[int, ...]) -> bytes:
    return TABLE.bytes_of(np.array(row, dtype=np.uint32))


def published(prefixes: CachedPrefixes) -> dict[int, int]:
    hashes, tokens = prefixes.chunks()
    return dict(zip(hashes.tolist(), tokens.tolist(), strict=True))


def batch(*events: EngineEvent, uncertain: bool = False) -> EventBatch:
    return EventBatch(events=events, time_s=1.0, rank=0, undecodable=uncertain, removals_uncertain=uncertain)


def stored(blocks: list[int], parent: int | None = None, **more: Any) -> BlocksStored:
    tokens = np.arange(1_000, 1_000 + len(blocks) * BLOCK_TOKENS, dtype=np.uint32) % 3_000 + 300
    return BlocksStored(
        blocks=np.array(blocks, dtype=np.uint64),
        parent=parent,
        tokens=more.pop("tokens", tokens),
        block_tokens=more.pop("block_tokens", BLOCK_TOKENS),
        **more,
    )


def removed(*blocks: int, **more: Any) -> BlocksRemoved:
    return BlocksRemoved(blocks=np.array(blocks, dtype=np.uint64), **more)


@pytest.mark.parametrize("name", ["pod1_sha256_int_block32", "lora_and_salt"])
def test_after_each_captured_frame_the_chunks_are_those_of_the_live_blocks(name: str) -> None:
    prefixes, literal, told = CachedPrefixes(TABLE, SEED), LiteralCache(), dict[int, int]()
    for _, payload, decoded in frames(name):
        prefixes.apply(vllm_events.decode(payload))
        for event in decoded[1]:
            literal.apply(event)
        assert published(prefixes) == literal.chunks()
        changes = prefixes.drain()
        told = {} if changes.cleared else told
        for chunk in changes.removed.tolist():
            del told[chunk]
        told |= dict(zip(changes.added.tolist(), changes.tokens.tolist(), strict=True))
        assert told == literal.chunks()
    assert prefixes.counts.undecodable == prefixes.chains.dropped_unknown_parent == 0
    assert len(told) > 15


def test_captured_chats_are_the_text_of_the_chat_template() -> None:
    literal = LiteralCache()
    for _, _, decoded in list(frames("pod1_sha256_int_block32"))[:4]:
        for event in decoded[1]:
            literal.apply(event)
    chats = sorted((t for t in literal.texts() if t.startswith(b"<|im_start|>")), key=len)
    longest = chats[-1].decode()
    turns = [turn.split("\n", 1) for turn in longest.split("<|im_start|>")[1:]]
    messages = [{"role": role, "content": content.removesuffix("<|im_end|>\n")} for role, content in turns[:-1]]
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        (TINY_MODEL / "chat_template.jinja").read_text()
    )
    rendered = template.render(messages=messages, add_generation_prompt=True)
    assert [role for role, _ in turns] == ["system", "user", "assistant"]
    assert longest.startswith(rendered)
    # So a picker that renders the same chat finds all whole chunks of the prompt.
    prefixes = CachedPrefixes(TABLE, SEED)
    for _, payload, _ in list(frames("pod1_sha256_int_block32"))[:3]:
        prefixes.apply(vllm_events.decode(payload))
    assert set(hash_chunks(rendered.encode(), root_hash(SEED), SEED).tolist()) <= published(prefixes).keys()


def test_adapters_and_salts_have_roots_of_their_own() -> None:
    keys = {(None, None), ("a1", None), ("a1", "s1"), ("b1", None)}
    seen: dict[tuple[str | None, str | None], set[int]] = {}
    for _, payload, decoded in list(frames("lora_and_salt"))[:4]:
        prefixes = CachedPrefixes(TABLE, SEED)
        prefixes.apply(vllm_events.decode(payload))
        (event,) = decoded[1]
        salt = [key for key in event["extra_keys"][0] or () if key != event["lora_name"]]
        seen[(event["lora_name"], salt[0] if salt else None)] = set(published(prefixes))
    assert seen.keys() == keys
    # All four frames hold the same tokens; no chunk is in two of them.
    assert sum(map(len, seen.values())) == len(set[int]().union(*seen.values())) > 0


def test_a_block_stored_twice_stays_until_it_is_removed_twice() -> None:
    prefixes = CachedPrefixes(TABLE, SEED)
    prefixes.apply(batch(stored([1, 2])))
    whole = published(prefixes)
    prefixes.apply(batch(stored([1, 2]), removed(1, 2)))
    assert published(prefixes) == whole
    prefixes.apply(batch(removed(1, 2)))
    assert published(prefixes) == {}


def test_a_cleared_cache_is_empty() -> None:
    prefixes = CachedPrefixes(TABLE, SEED)
    prefixes.apply(batch(stored([1, 2]), CacheCleared()))
    assert published(prefixes) == {}
    assert prefixes.drain().cleared


def test_an_offloaded_block_is_held_until_both_media_have_dropped_it() -> None:
    prefixes = CachedPrefixes(TABLE, SEED)
    empty = np.empty(0, dtype=np.uint32)
    prefixes.apply(batch(stored([1, 2]), stored([2], tokens=empty, block_tokens=0, medium="CPU")))
    whole = published(prefixes)
    prefixes.apply(batch(removed(2)))
    assert published(prefixes) == whole
    prefixes.apply(batch(removed(2, medium="CPU")))
    assert len(published(prefixes)) < len(whole)


def test_chains_are_built_from_full_attention_alone_and_other_groups_make_it_approximate() -> None:
    prefixes = CachedPrefixes(TABLE, SEED)
    prefixes.apply(batch(stored([1, 2], group=1, kind="full_attention")))
    whole = published(prefixes)
    assert prefixes.approximate is None
    prefixes.apply(batch(stored([8, 9], group=0, kind="sliding_window"), removed(1, 2, group=0)))
    assert published(prefixes) == whole
    assert prefixes.approximate is not None
    assert "sliding_window" in prefixes.approximate
    prefixes.forget_engine()
    assert (published(prefixes), prefixes.approximate) == ({}, None)


def test_a_second_group_of_full_attention_makes_it_approximate_too() -> None:
    prefixes = CachedPrefixes(TABLE, SEED)
    prefixes.apply(batch(stored([1, 2], group=0, kind="full_attention"), stored([1, 2], group=1, kind="mla_attention")))
    assert prefixes.approximate is not None
    prefixes.apply(batch(removed(1, 2, group=0)))
    assert published(prefixes) == {}


def test_an_unreadable_removal_withdraws_everything_until_it_is_confirmed_again() -> None:
    prefixes = CachedPrefixes(TABLE, SEED)
    prefixes.apply(batch(stored([1, 2])))
    whole = published(prefixes)
    prefixes.apply(batch(uncertain=True))
    assert published(prefixes) == {}
    # A child of block 2 can only be stored if the engine still holds 1 and 2.
    prefixes.apply(batch(stored([3], parent=2)))
    assert published(prefixes).items() >= whole.items()


EVENTS = st.one_of(
    st.builds(
        stored,
        st.lists(st.integers(0, 9), max_size=3),
        st.none() | st.integers(0, 9),
        lora_name=st.sampled_from([None, "a"]),
        cache_salt=st.sampled_from([None, "s"]),
        medium=st.sampled_from(["GPU", "CPU"]),
        group=st.integers(0, 1),
        kind=st.sampled_from([None, "full_attention", "sliding_window"]),
    ),
    st.builds(lambda blocks, **more: removed(*blocks, **more), st.lists(st.integers(0, 9), max_size=3),
              medium=st.sampled_from(["GPU", "CPU"]), group=st.integers(0, 1)),
    st.just(CacheCleared()),
)  # fmt: skip


@given(st.lists(st.tuples(st.lists(EVENTS, max_size=4), st.booleans()), max_size=12))
def test_any_events_leave_a_map_that_does_not_contradict_itself(steps: list[tuple[list[EngineEvent], bool]]) -> None:
    prefixes, told = CachedPrefixes(TABLE, SEED), dict[int, int]()
    for events, uncertain in steps:
        prefixes.apply(batch(*events, uncertain=uncertain))
        prefixes.chains.check_invariants()
        changes = prefixes.drain()
        told = {} if changes.cleared else told
        for chunk in changes.removed.tolist():
            del told[chunk]
        told |= dict(zip(changes.added.tolist(), changes.tokens.tolist(), strict=True))
        assert told == published(prefixes)


def test_tokens_per_byte_are_measured_once_there_is_enough_text() -> None:
    prefixes = CachedPrefixes(TABLE, SEED)
    rates = []
    for number in range(400):
        tokens = np.arange(300 + number, 332 + number, dtype=np.uint32)
        blocks = np.array([number + 1], dtype=np.uint64)
        prefixes.chains.store(parent=None, blocks=blocks, tokens=tokens, block_tokens=32, root=number)
        rates.append(prefixes.tokens_per_byte)
    assert rates[0] == 0.0
    seen = [rate for rate in rates if rate]
    assert seen[-1] == pytest.approx(prefixes.chains.tokens_seen / prefixes.chains.bytes_seen, rel=0.05)
    assert len(set(seen)) < 10


def test_what_is_remembered_of_other_groups_is_bounded() -> None:
    prefixes = CachedPrefixes(TABLE, SEED)
    for group in range(1_000):
        blocks = np.array([group], dtype=np.uint64)
        event = BlocksStored(
            blocks=blocks,
            parent=None,
            tokens=np.empty(0, dtype=np.uint32),
            block_tokens=0,
            group=group,
            kind="k" * 10_000,
        )
        prefixes.apply(EventBatch(events=(event,), time_s=0.0, rank=None))
    assert len(prefixes.other_groups) == OTHER_GROUPS_MAX
    assert prefixes.approximate is not None
    assert len(prefixes.approximate) < 200
