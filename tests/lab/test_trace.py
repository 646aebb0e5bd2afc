"""The shipped trace, its transformations, and the text made for it."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_lab.trace import (
    SHIPPED_TRACE,
    TraceError,
    TraceRequest,
    at_rate,
    encode_trace,
    load_trace,
    main,
    renumbered,
    shorter,
    spread,
    whole_sessions,
)
from trimtab_lab.trace_text import TraceText
from trimtab_lab.vocabulary import Vocabulary

VOCABULARY = Vocabulary()


def request(at_s: float, prompt_tokens: int, *blocks: int) -> TraceRequest:
    return TraceRequest(at_s=at_s, prompt_tokens=prompt_tokens, output_tokens=10, block_ids=blocks)


def shared_hits(requests: list[TraceRequest], *, pods: int, by_session: bool) -> float:
    """Share of prompt tokens that caches without end would hit, placed in turn or by session."""
    caches: list[set[int]] = [set() for _ in range(pods)]
    hit = total = 0
    for number, entry in enumerate(requests):
        cache = caches[(entry.session if by_session else number) % pods]
        blocks = next((n for n, block in enumerate(entry.block_ids) if block not in cache), len(entry.block_ids))
        hit += min(blocks * entry.block_tokens, entry.prompt_tokens - 1)
        total += entry.prompt_tokens
        cache.update(entry.block_ids)
    return hit / total


def test_the_shipped_trace_is_small_has_its_licence_and_whole_sessions_of_four_and_more() -> None:
    assert SHIPPED_TRACE.stat().st_size < 300_000
    assert "Apache License" in (SHIPPED_TRACE.parent / "LICENSE.mooncake").read_text()
    assert SHIPPED_TRACE.name in (SHIPPED_TRACE.parent / "NOTICE.mooncake").read_text()
    requests = load_trace()
    assert len(requests) == 2903
    assert whole_sessions(requests) == requests
    assert [entry.at_s for entry in requests] == sorted(entry.at_s for entry in requests)
    assert requests[0].block_ids[0] == 0


def test_the_shipped_trace_rewards_affinity_far_more_than_turns() -> None:
    requests = load_trace()
    turns, affinity = (shared_hits(requests, pods=4, by_session=by_session) for by_session in (False, True))
    assert turns < 0.45
    assert affinity > 0.7


def test_sessions_are_drawn_whole_and_the_same_for_a_seed() -> None:
    requests = load_trace()
    drawn = whole_sessions(requests, count=20, seed=7)
    assert drawn == whole_sessions(requests, count=20, seed=7)
    assert drawn != whole_sessions(requests, count=20, seed=8)
    sessions = {entry.session for entry in drawn}
    assert len(sessions) == 20
    assert drawn == [entry for entry in requests if entry.session in sessions]


def test_the_sampling_script_writes_the_same_file_again(tmp_path: Path) -> None:
    main([str(SHIPPED_TRACE), str(tmp_path / "again.jsonl.gz")])
    assert (tmp_path / "again.jsonl.gz").read_bytes() == SHIPPED_TRACE.read_bytes()


def test_a_trace_survives_writing_and_reading(tmp_path: Path) -> None:
    requests = renumbered([request(0.5, 600, 7, 9), request(1.5, 513, 7, 3)])
    assert [entry.block_ids for entry in requests] == [(0, 1), (0, 2)]
    for name, data in (("a.gz", encode_trace(requests)), ("b.jsonl", gzip.decompress(encode_trace(requests)))):
        (tmp_path / name).write_bytes(data)
        assert load_trace(tmp_path / name) == requests


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1]}',
        '{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[]}',
        '{"timestamp":0,"input_length":1,"hash_ids":[1]}',
    ],
)
def test_what_is_no_trace_is_refused_with_the_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "x").write_text(line + "\n")
    with pytest.raises(TraceError, match="line 1"):
        load_trace(tmp_path / "x")


def test_arrivals_can_be_spread_and_set_to_a_rate_without_changing_the_requests() -> None:
    requests = load_trace()[:500]
    moved = at_rate(spread(requests, seed=3), 5.0)
    assert moved[0].at_s == 0
    assert moved[-1].at_s == pytest.approx(499 / 5.0)
    assert sorted(entry.block_ids for entry in moved) == sorted(entry.block_ids for entry in requests)
    assert len({entry.at_s for entry in moved}) == 500
    assert at_rate(requests[:1], 1.0)[0].at_s == 0


@given(st.sampled_from([1, 2, 8, 32, 128]), st.integers(1, 512), st.integers(1, 6))
def test_shorter_prompts_keep_their_blocks_and_divide_their_length(divisor: int, last: int, blocks: int) -> None:
    whole = request(0, 512 * (blocks - 1) + last, *range(blocks))
    [short] = shorter([whole], divisor)
    assert short.block_ids == whole.block_ids
    assert 1 <= short.last_block_tokens <= short.block_tokens == 512 // divisor
    assert whole.prompt_tokens / divisor <= short.prompt_tokens < whole.prompt_tokens / divisor + 1


def test_a_divisor_that_does_not_divide_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="divisor"):
        shorter([], 3)


@pytest.mark.parametrize(("divisor", "over_tokens_max"), [(1, 11), (8, 11), (32, 11)])
def test_a_chat_has_the_length_that_the_trace_says(divisor: int, over_tokens_max: int) -> None:
    """Longer only where the last block is shorter than what the template itself puts around a message."""
    text = TraceText(VOCABULARY)
    for entry in shorter(load_trace()[:25], divisor):
        over = len(VOCABULARY.encode(text.prompt(entry))) - entry.prompt_tokens
        assert over == 0 or (entry.last_block_tokens <= over_tokens_max and 0 < over <= over_tokens_max)


def test_equal_leading_blocks_give_equal_leading_tokens_and_no_more() -> None:
    text = TraceText(VOCABULARY)
    [one, two, three] = shorter([request(0, 2100, 0, 1, 2, 3, 9), request(0, 1500, 0, 1, 5), request(0, 9, 0)], 8)
    tokens = [VOCABULARY.encode(text.prompt(entry)).tolist() for entry in (one, two, three)]
    shared = next(n for n, (a, b) in enumerate(zip(tokens[0], tokens[1], strict=False)) if a != b)
    assert 128 <= shared < 128 + 8, "two blocks, and the start of the next message's frame"
    again = TraceText(Vocabulary())
    assert [again.prompt(entry) for entry in (one, two)] == [text.prompt(entry) for entry in (one, two)]
    assert TraceText(VOCABULARY, seed=1).prompt(one) != text.prompt(one)


def test_chats_begin_with_the_system_and_end_with_the_user() -> None:
    for entry in load_trace()[:50]:
        roles = [message["role"] for message in TraceText(VOCABULARY).messages(shorter([entry], 32)[0])]
        assert roles[0] == ("system" if len(roles) > 1 else "user")
        assert roles[-1] == "user"
        assert "system" not in roles[1:]
