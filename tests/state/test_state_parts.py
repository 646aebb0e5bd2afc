"""The small parts: keys, clocks, backoff, retry times, tails, outboxes."""

import logging
import random

import numpy as np
import pytest
from pool_processes import Changes, u32, u64

from trimtab_state import ConfigError, PoolKeys, StateUnavailable
from trimtab_state.backoff import Backoff
from trimtab_state.connected_clock import ConnectedClock
from trimtab_state.entry_tail import EntryTail
from trimtab_state.generation import Generation
from trimtab_state.kv_codec import decode_entry
from trimtab_state.kv_outbox import KvOutbox
from trimtab_state.load_codec import LoadEntry, LoadKind, LoadOperation, decode_load_entry
from trimtab_state.load_outbox import LoadOutbox
from trimtab_state.outage_log import OutageLog
from trimtab_state.retry_times import RetryTimes
from trimtab_state.settings import StateSettings
from trimtab_state.stream_position import StreamCursors

KEYS = PoolKeys("team-a", "llama")


def test_all_keys_of_a_pool_share_one_hash_tag() -> None:
    keys = [KEYS.control, KEYS.generation, KEYS.notify, KEYS.kv_log, KEYS.load_log, KEYS.alarms, KEYS.endpoints]
    keys += [KEYS.replicas, KEYS.snapshot_wanted, KEYS.response_order, KEYS.kv_snapshot("[::1]:1/2")]
    keys += [KEYS.heartbeat("a}b{"), KEYS.replica(2**64 - 1), KEYS.card("d"), KEYS.response("}{")]
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert key.startswith("trimtab:{team-a/llama}:")
        assert key[key.index("{") + 1 : key.index("}")] == "team-a/llama"


@pytest.mark.parametrize("name", ["", "a/b", "a}b", "{", "a b", "a:b"])
def test_names_that_could_leave_the_hash_tag_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        PoolKeys(name, "ok")
    with pytest.raises(ConfigError):
        PoolKeys("ok", name)


def test_a_response_id_of_any_length_gives_a_short_key() -> None:
    assert KEYS.response("resp_1") == KEYS.prefix + "response:resp_1"
    long = KEYS.response("x" * 100_000)
    assert len(long) < 200
    assert long != KEYS.response("x" * 100_001)
    assert KEYS.response("\ud800" * 200)


def test_the_connected_clock_stands_still_while_the_store_is_away() -> None:
    clock = ConnectedClock(step_max_s=2.0)
    assert clock.contact(100.0) == 0.0, "the first contact starts it"
    assert clock.contact(101.0) == 1.0
    assert clock.contact(150.0) == 3.0, "a long silence moves it by one bounded step"
    clock.away()
    assert clock.contact(400.0) == 3.0
    assert clock.contact(399.0) == 3.0, "it never goes back"
    assert clock.contact(400.0) == 4.0


def test_backoff_doubles_up_to_its_bound_and_is_never_the_full_story_twice() -> None:
    backoff = Backoff(0.1, 1.0, random.Random(5))
    waits = [backoff.next_s() for _ in range(8)]
    for wait, bound in zip(waits, (0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0), strict=True):
        assert bound / 2 <= wait <= bound
    assert len(set(waits)) == 8
    backoff.reset()
    assert backoff.next_s() <= 0.1


def test_retry_times_delay_what_was_tried_until_there_is_news() -> None:
    times: RetryTimes[str] = RetryTimes(1.0)
    assert times.due({"a", "b"}, 10.0) == ["a", "b"]
    times.tried("a", 10.0)
    assert times.due({"a", "b"}, 10.5) == ["b"]
    assert times.next_s({"a"}, 99.0) == 11.0
    assert times.next_s(set(), 99.0) == 99.0
    assert times.due({"a"}, 11.0) == ["a"]
    times.tried("a", 11.0)
    times.now("a")
    assert times.due({"a"}, 11.0) == ["a"]
    times.tried("a", 11.0)
    assert times.due(set(), 11.1) == []
    assert times.due({"a"}, 11.2) == ["a"], "what was no longer wanted is forgotten"


def test_a_tail_keeps_the_newest_row_within_its_bounds() -> None:
    tail: EntryTail[LoadEntry] = EntryTail(3, 10)

    def add(*sequences: int, weight: int = 1) -> None:
        for sequence in sequences:
            tail.add(LoadEntry(1, sequence, ()), weight)

    assert tail.needs == 0
    add(5, 6, 6, 5)
    assert tail.needs == 4
    add(7, 8)
    assert tail.needs == 5, "bounded by entries"
    add(9, weight=9)
    assert tail.needs == 7, "bounded by weight"
    add(10, weight=99)
    assert tail.needs == 9, "one is always kept"
    add(20)
    assert tail.needs == 19, "what does not join on starts a new row"
    add(21, 22)
    assert [entry.sequence for entry in tail.take_after(20)] == [21, 22]
    assert tail.needs == 0


def test_entries_are_sent_again_byte_for_byte_until_they_have_arrived() -> None:
    outbox = KvOutbox("a", 9, StateSettings(), epoch="e")
    outbox.add(Changes(False, u64([1]), u32([1]), u64([])), "e")
    first = outbox.entries(10)
    outbox.add(Changes(False, u64([2]), u32([2]), u64([])), "e")
    again = outbox.entries(10)
    assert again[:1] == first
    assert [decode_entry(data).sequence for data in again] == [1, 2]
    outbox.arrived(1)
    assert outbox.entries(10) == again[1:]
    outbox.arrived(1)
    assert not outbox.has_work


def test_an_outbox_that_overflows_leaves_a_gap() -> None:
    outbox = KvOutbox("a", 9, StateSettings(kv_queue_chunks_max=3), epoch="e")
    assert outbox.add(Changes(False, u64([1, 2]), u32([1, 2]), u64([])), "e")
    assert len(outbox.entries(10)) == 1
    assert not outbox.add(Changes(False, u64([3, 4]), u32([3, 4]), u64([])), "e")
    assert not outbox.has_work
    assert outbox.add(Changes(False, u64([5]), u32([5]), u64([])), "e")
    assert [decode_entry(data).sequence for data in outbox.entries(10)] == [3]


def test_chunks_that_were_sent_make_room_for_others() -> None:
    outbox = KvOutbox("a", 9, StateSettings(kv_queue_chunks_max=3), epoch="e")
    for chunk in range(50):
        assert outbox.add(Changes(False, u64([chunk]), u32([1]), u64([chunk + 1])), "e")
        outbox.arrived(len(outbox.entries(10)))
    assert outbox.dropped == 0


def test_a_change_of_another_epoch_clears_what_was_before() -> None:
    outbox = KvOutbox("a", 9, StateSettings(), epoch="e1")
    outbox.add(Changes(False, u64([1]), u32([1]), u64([])), "e1")
    outbox.add(Changes(False, u64([2]), u32([2]), u64([])), "e2")
    (entry,) = (decode_entry(data) for data in outbox.entries(10))
    assert entry.cleared
    assert entry.epoch == "e2"
    assert entry.added.tolist() == [2]


def test_load_operations_are_cut_into_bounded_entries() -> None:
    outbox = LoadOutbox(9, StateSettings(load_ops_per_entry_max=4))
    for reservation_id in range(10):
        assert outbox.add(LoadOperation(LoadKind.FINISHED, reservation_id))
    entries = [decode_load_entry(data) for data in outbox.entries(99)]
    assert [(e.sequence, len(e.operations)) for e in entries] == [(1, 4), (2, 4), (3, 2)]


def test_too_many_samples_are_thinned_and_the_deepest_stays() -> None:
    outbox = LoadOutbox(9, StateSettings(samples_per_reservation_max=10))
    samples = np.arange(1_000, dtype=np.uint64), np.arange(1_000, dtype=np.uint32)
    outbox.add(LoadOperation(LoadKind.RESERVE, 1, "a", 1, 1, *samples))
    (entry,) = (decode_load_entry(data) for data in outbox.entries(9))
    kept = entry.operations[0].sample_hashes.tolist()
    assert len(kept) == 10
    assert kept[0] == 0
    assert kept[-1] == 999
    assert kept == entry.operations[0].sample_tokens.tolist()


def test_load_that_waits_too_long_is_dropped_for_the_lease() -> None:
    outbox = LoadOutbox(9, StateSettings(load_queue_ops_max=3))
    assert all(outbox.add(LoadOperation(LoadKind.FINISHED, i)) for i in range(3))
    assert len(outbox.entries(9)) == 1
    assert not outbox.add(LoadOperation(LoadKind.FINISHED, 3))
    assert not outbox.has_work
    assert outbox.sequence == 2


def test_a_generation_is_changed_only_against_one_that_was_known() -> None:
    generation = Generation(KEYS, StateSettings())
    names = {generation.commands()[0][2] for _ in range(3)}
    assert len(names) == 3, "a lost key never comes back under a name that was used"
    assert not generation.is_changed(b"one")
    assert not generation.is_changed(b"one")
    assert generation.is_changed(b"two")
    assert generation.is_changed(None)


def test_an_outage_is_logged_at_its_start_at_each_other_reason_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage = OutageLog("all waits")
    outage.over()
    for reason in ("TimeoutError: 1", "TimeoutError: 2", "AuthenticationError: no", "AuthenticationError: no"):
        outage.failed(StateUnavailable(reason))
    outage.over()
    outage.over()
    assert [record.getMessage() for record in caplog.records] == [
        "store away, all waits: TimeoutError: 1",
        "store away, all waits: AuthenticationError: no",
        "store is back; over: all waits",
    ]


def test_the_lag_of_a_reader_is_that_of_the_stream_where_it_is_most_behind() -> None:
    cursors = StreamCursors(("a", "b"))
    cursors.start([(10_000, 0), (0, 0)], lookback_s=4.0)
    assert cursors.lag_s([(10_000, 0), (0, 0)], looked_ago_s=60.0) == 4.0
    cursors.advance("a", (9_500, 3))
    cursors.advance("b", (7_000, 0))
    assert cursors.lag_s([(10_000, 0), (8_250, 1)], looked_ago_s=60.0) == 1.25
    cursors.advance("a", (10_000, 0))
    cursors.advance("b", (8_250, 1))
    assert cursors.lag_s([(10_000, 0), (8_250, 1)], looked_ago_s=60.0) == 0.0


def test_a_stream_that_was_quiet_is_not_late_with_the_entry_that_just_came() -> None:
    cursors = StreamCursors(["busy", "quiet"])
    cursors.start([(100_000, 0), (50_000, 0)], 0.0)
    assert cursors.lag_s([(100_000, 0), (50_000, 0)], looked_ago_s=1.0) == 0.0
    # An entry after 51 s, which is not read yet.
    assert cursors.lag_s([(100_200, 0), (101_000, 0)], looked_ago_s=1.0) == 1.0
    # It is still not read a second later.
    assert cursors.lag_s([(100_200, 0), (101_000, 1)], looked_ago_s=1.0) == 51.0
    cursors.advance("busy", (100_200, 0))
    cursors.advance("quiet", (101_000, 1))
    assert cursors.lag_s([(100_450, 0), (101_000, 1)], looked_ago_s=1.0) == 0.25


def test_what_waits_longest_is_asked_for_first_so_that_none_starves() -> None:
    times: RetryTimes[str] = RetryTimes(1.0)
    wanted = {"a", "b", "c"}
    asked = []
    for step in range(6):
        now_s = 2.0 * step
        first = times.due(wanted, now_s)[0]
        asked.append(first)
        times.tried(first, now_s)
    assert asked == ["a", "b", "c"] * 2
