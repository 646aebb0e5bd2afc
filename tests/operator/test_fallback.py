"""Fallback: what alarms lead to, in virtual time."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_operator.api.policy import Fallback, Mode
from trimtab_operator.fallback import ALARM_SPACING_S, ALARMS_KEPT_MAX, CLOCK_SLACK_S, Decision, FallbackState
from trimtab_state.documents import Policy

START_S = 1_800_000_000.0
RULES = Fallback(alarms=3, window_seconds=60, quiet_seconds=100, minimum_stay_seconds=200)


@dataclass
class Pool:
    """A state, its clock, and the stream that a new operator would read again."""

    rules: Fallback = RULES
    mode: Mode = "Auto"
    now_s: float = START_S
    state: FallbackState = field(default_factory=FallbackState)
    stored: Policy | None = None
    stream: list[tuple[str, float]] = field(default_factory=list)

    def alarm(self, prefix_class: str = "a") -> None:
        self.stream.append((prefix_class, self.now_s))
        self.state.alarm(prefix_class, self.now_s)

    def turn(self, step_s: float = 0.0) -> Decision:
        self.now_s += step_s
        self.state.heard(self.now_s)
        decision = self.state.decide(self.now_s, self.rules, self.mode)
        self.stored = decision.document(batch_limit=None)
        return decision

    def alarms(self, count: int, *, every_s: float = ALARM_SPACING_S) -> Decision:
        self.turn()
        decision = self.turn(1.0)
        for _ in range(count):
            self.alarm()
            decision = self.turn(every_s)
        return decision

    def quiet(self, seconds: float) -> Decision:
        decision = self.turn()
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            decision = self.turn(min(2.0, end_s - self.now_s))
        return decision

    def restart(self) -> None:
        """Another operator takes over, with what the store holds."""
        self.state = FallbackState(self.stored)
        for prefix_class, raised_s in self.stream:
            self.state.alarm(prefix_class, raised_s)


def test_a_quiet_pool_stays_with_the_product() -> None:
    pool = Pool()
    decision = pool.quiet(1_000.0)
    assert (decision.policy, decision.stage, decision.reason) == ("product", "watching", "")
    assert decision.since_s == START_S
    assert not decision.changed


def test_alarms_that_keep_firing_switch_to_round_robin_and_say_why() -> None:
    pool = Pool()
    assert pool.alarms(2).policy == "product"
    decision = pool.alarms(1, every_s=0.0)
    assert (decision.policy, decision.stage, decision.changed) == ("round_robin", "active", True)
    assert decision.reason == "3 hotspot alarms of one prefix class within 60 s"
    assert decision.since_s == pool.now_s
    again = pool.turn(1.0)
    assert not again.changed
    assert (again.since_s, again.reason) == (decision.since_s, decision.reason)


def test_alarms_further_apart_than_the_window_are_none_too_many() -> None:
    pool = Pool()
    for _ in range(20):
        assert pool.alarms(1, every_s=31.0).policy == "product"


def test_four_pickers_that_see_one_hotspot_make_one_alarm() -> None:
    pool = Pool()
    pool.turn()
    for offset_s in (0.0, 0.3, 1.1, 9.9):
        pool.state.alarm("a", pool.now_s + offset_s)
    assert pool.turn(9.9).policy == "product"


def test_three_classes_at_once_are_three_alarms() -> None:
    pool = Pool()
    pool.turn()
    pool.now_s += 1.0
    for prefix_class in ("a", "b", "c"):
        pool.alarm(prefix_class)
    decision = pool.turn()
    assert decision.policy == "round_robin"
    assert decision.reason == "3 hotspot alarms of 3 prefix classes within 60 s"


def test_quiet_switches_back_but_not_before_the_minimum_stay() -> None:
    pool = Pool()
    since_s = pool.alarms(3, every_s=10.0).since_s
    assert pool.quiet(since_s + 199.0 - pool.now_s).policy == "round_robin"
    decision = pool.turn(1.0)
    assert (decision.policy, decision.changed) == ("product", True)
    assert decision.reason == "no hotspot alarm for 100 s"
    assert decision.document(batch_limit=7) == Policy(batch_limit=7, fallback="watching", since_s=pool.now_s)


def test_a_hotspot_that_lasts_keeps_round_robin() -> None:
    pool = Pool()
    pool.alarms(3)
    for _ in range(100):
        assert pool.alarms(1, every_s=98.0).policy == "round_robin"
    assert pool.quiet(100.0).policy == "product"


def test_alarms_from_before_the_return_do_not_count_again() -> None:
    pool = Pool(rules=Fallback(alarms=3, window_seconds=3_600, quiet_seconds=5, minimum_stay_seconds=0))
    pool.alarms(3)
    assert pool.quiet(10.0).policy == "product"
    assert pool.quiet(600.0).policy == "product"
    assert pool.alarms(2).policy == "product"
    assert pool.alarms(1).policy == "round_robin"


@pytest.mark.parametrize(
    ("mode", "policy"), [("Product", "product"), ("RoundRobin", "round_robin"), ("LeastRequest", "least_request")]
)
def test_an_override_wins_at_once_and_back_to_auto_starts_clean(mode: Mode, policy: str) -> None:
    pool = Pool()
    pool.alarms(3, every_s=20.0)
    pool.mode = mode
    decision = pool.turn()
    assert (decision.policy, decision.stage, decision.since_s) == (policy, "off", pool.now_s)
    assert decision.reason == f"spec.mode is {mode}"
    assert decision.document(batch_limit=None).reason == ""
    assert pool.alarms(10).policy == policy
    pool.mode = "Auto"
    decision = pool.turn()
    assert (decision.policy, decision.stage, decision.reason) == ("product", "watching", "")
    assert pool.alarms(2).policy == "product"
    assert pool.alarms(1).policy == "round_robin"


def test_an_override_that_ends_while_the_operator_is_away_ends_clean_too() -> None:
    pool = Pool(mode="Product")
    pool.alarms(10)
    pool.restart()
    pool.mode = "Auto"
    assert pool.turn().policy == "product"
    assert pool.quiet(5.0).policy == "product"


def test_a_fallback_that_is_not_enabled_hears_nothing() -> None:
    pool = Pool()
    assert pool.alarms(3).policy == "round_robin"
    pool.rules = msgspec.structs.replace(RULES, enabled=False)
    decision = pool.turn()
    assert (decision.policy, decision.stage, decision.changed) == ("product", "off", True)
    assert pool.alarms(20).policy == "product"
    pool.rules = RULES
    assert pool.turn().policy == "product"


def test_a_restart_in_round_robin_waits_until_it_has_heard() -> None:
    pool = Pool()
    pool.alarms(3)
    reason, since_s = pool.turn().reason, pool.turn().since_s
    state = FallbackState(pool.stored)
    later_s = pool.now_s + 1_000.0
    decision = state.decide(later_s, RULES, "Auto")
    assert (decision.policy, decision.reason, decision.since_s) == ("round_robin", reason, since_s)
    state.alarm("a", later_s - 50.0)
    state.heard(later_s)
    assert state.decide(later_s, RULES, "Auto").policy == "round_robin"
    state.heard(later_s + 50.0)
    decision = state.decide(later_s + 50.0, RULES, "Auto")
    assert (decision.policy, decision.changed) == ("product", True)


def test_quiet_does_not_pass_while_alarms_cannot_be_read() -> None:
    pool = Pool()
    pool.alarms(3)
    pool.now_s += 10_000.0
    assert pool.state.decide(pool.now_s, RULES, "Auto").policy == "round_robin"
    pool.state.heard(pool.now_s, missed=True)
    assert pool.state.decide(pool.now_s, RULES, "Auto").policy == "round_robin"
    assert pool.quiet(99.0).policy == "round_robin"
    assert pool.quiet(1.0).policy == "product"


@pytest.mark.parametrize("step_s", [-100_000.0, -60.0, -4.0])
def test_a_clock_that_is_set_back_lengthens_a_stay_by_no_more_than_the_slack(step_s: float) -> None:
    pool = Pool()
    pool.alarms(3, every_s=10.0)
    pool.now_s += step_s
    assert pool.turn().policy == "round_robin"
    still_s = -step_s if step_s > -CLOCK_SLACK_S else 0.0
    assert pool.quiet(199.0 + still_s).policy == "round_robin"
    assert pool.quiet(1.0).policy == "product"


@pytest.mark.parametrize(("stay_s", "quiet_s", "missed"), [(200, 5, False), (0, 200, False), (0, 200, True)])
def test_time_that_has_passed_counts_when_a_clock_is_set_back(stay_s: int, quiet_s: int, missed: bool) -> None:
    pool = Pool(rules=Fallback(alarms=3, window_seconds=60, quiet_seconds=quiet_s, minimum_stay_seconds=stay_s))
    pool.alarms(3)
    pool.alarms(1, every_s=0.0)
    pool.state.heard(pool.now_s, missed=missed)
    pool.quiet(150.0)
    pool.now_s -= 86_400.0
    assert pool.state.decide(pool.now_s, pool.rules, "Auto").policy == "round_robin"
    assert pool.turn().policy == "round_robin"
    assert pool.quiet(24.0).policy == "round_robin"
    assert pool.quiet(26.0).policy == "product"


def test_the_first_decision_of_a_pool_is_no_change() -> None:
    assert not Pool(mode="RoundRobin").turn().changed
    assert not Pool().turn().changed


def test_an_hour_of_difference_between_two_operators_clocks_costs_one_minimum_stay() -> None:
    pool = Pool()
    pool.alarms(3)
    pool.restart()
    pool.now_s -= 3_600.0
    assert pool.turn().policy == "round_robin"
    assert pool.quiet(199.0).policy == "round_robin"
    assert pool.quiet(1.0).policy == "product"


def test_two_clocks_that_differ_a_little_do_not_move_the_beginning() -> None:
    pool = Pool()
    since_s = pool.alarms(3).since_s
    for _ in range(100):
        assert pool.state.decide(pool.now_s + 0.5, RULES, "Auto").since_s == since_s
        assert pool.state.decide(pool.now_s, RULES, "Auto").since_s == since_s


def test_memory_is_bounded_however_many_alarms_there_are() -> None:
    state = FallbackState()
    for i in range(2 * ALARMS_KEPT_MAX):
        state.alarm(f"{i:016x}", START_S + i / 1_000)
    assert len(state._alarms) == ALARMS_KEPT_MAX
    state.decide(START_S + 10_000.0, RULES, "Auto")
    assert state._alarms == []


steps = st.lists(
    st.tuples(
        st.sampled_from([0.5, 2.0, 7.0, 30.0, 90.0]),
        st.lists(st.sampled_from(["a", "b"]), max_size=3),
        st.sampled_from(["go on", "go on", "go on", "restart"]),
    ),
    max_size=60,
)
rules = st.builds(
    Fallback,
    alarms=st.integers(1, 6),
    window_seconds=st.sampled_from([5, 60, 300]),
    quiet_seconds=st.sampled_from([5, 60, 200]),
    minimum_stay_seconds=st.sampled_from([0, 30, 300]),
)


@given(rules=rules, steps=steps)
@settings(max_examples=200, deadline=None)
def test_it_never_swings_faster_than_the_minimum_stay_and_always_returns_after_quiet(
    rules: Fallback, steps: list[tuple[float, list[str], str]]
) -> None:
    pool = Pool(rules=rules)
    pool.turn()
    turns: list[tuple[float, str]] = []
    for step_s, classes, what in steps:
        for prefix_class in classes:
            pool.alarm(prefix_class)
        if what == "restart":
            pool.restart()
        decision = pool.turn(step_s)
        if decision.changed:
            turns.append((pool.now_s, decision.policy))
    for (before_s, before), (after_s, after) in pairwise(turns):
        assert before != after
        if before == "round_robin":
            assert after_s - before_s >= rules.minimum_stay_seconds
    patience_s = max(rules.quiet_seconds, rules.minimum_stay_seconds)
    assert pool.quiet(patience_s + 4.0).policy == "product"
    assert pool.quiet(patience_s + 4.0).policy == "product"


@given(rules=rules, steps=steps)
@settings(max_examples=200, deadline=None)
def test_a_restart_at_any_moment_decides_as_the_one_that_did_not(
    rules: Fallback, steps: list[tuple[float, list[str], str]]
) -> None:
    steady, restarted = Pool(rules=rules), Pool(rules=rules)
    assert steady.turn() == restarted.turn()
    for step_s, classes, what in steps:
        for pool in (steady, restarted):
            for prefix_class in classes:
                pool.alarm(prefix_class)
        if what == "restart":
            restarted.restart()
        ours, theirs = steady.turn(step_s), restarted.turn(step_s)
        assert (ours.policy, ours.stage, ours.since_s, ours.changed) == (
            theirs.policy,
            theirs.stage,
            theirs.since_s,
            theirs.changed,
        )


@given(
    rules=rules,
    steps=st.lists(
        st.tuples(
            st.sampled_from([2.0, 2.0, 30.0, -1.0, -4.0, -600.0, -1e6, 1e6, 5_000.0]),
            st.lists(st.sampled_from(["a", "b"]), max_size=3),
            st.sampled_from(["go on", "go on", "restart", "miss"]),
            st.sampled_from(["Auto", "Auto", "Auto", "Product", "RoundRobin"]),
        ),
        max_size=40,
    ),
)
@settings(max_examples=200, deadline=None)
def test_whatever_clock_store_and_people_do_a_quiet_pool_comes_back(
    rules: Fallback, steps: list[tuple[float, list[str], str, Mode]]
) -> None:
    pool = Pool(rules=rules)
    for step_s, classes, what, mode in steps:
        pool.mode = mode
        for prefix_class in classes:
            pool.alarm(prefix_class)
        if what == "restart":
            pool.restart()
        if what == "miss":
            pool.state.heard(pool.now_s, missed=True)
        decision = pool.turn(step_s)
        assert decision.policy == {"Product": "product", "RoundRobin": "round_robin"}.get(mode, decision.policy)
        assert decision.since_s <= pool.now_s + 2 * CLOCK_SLACK_S
        assert (decision.stage == "active") <= (decision.policy == "round_robin")
    pool.mode = "Auto"
    patience_s = max(rules.quiet_seconds, rules.minimum_stay_seconds) + CLOCK_SLACK_S + 4.0
    assert pool.quiet(patience_s).policy == "product"


@given(
    rules=rules,
    alarms=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 400.0)), max_size=25),
    more=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 400.0)), max_size=5),
    stored=st.sampled_from(
        [Policy(fallback="watching", since_s=START_S), Policy(policy="round_robin", fallback="active", since_s=START_S)]
    ),
    shuffle=st.randoms(use_true_random=False),
)
@settings(max_examples=300, deadline=None)
def test_more_alarms_never_mean_less_round_robin_and_their_order_means_nothing(
    rules: Fallback,
    alarms: list[tuple[str, float]],
    more: list[tuple[str, float]],
    stored: Policy,
    shuffle: "object",
) -> None:
    def policy(told: list[tuple[str, float]]) -> str:
        state = FallbackState(stored)
        for prefix_class, after_s in told:
            state.alarm(prefix_class, START_S + after_s)
        state.heard(START_S + 400.0)
        return state.decide(START_S + 400.0, rules, "Auto").policy

    shuffled = list(alarms)
    shuffle.shuffle(shuffled)  # type: ignore[attr-defined]
    assert policy(shuffled) == policy(alarms)
    if policy(alarms) == "round_robin":
        assert policy(alarms + more) == "round_robin"


def test_the_document_goes_through_the_store_as_it_is() -> None:
    pool = Pool()
    pool.alarms(3)
    assert pool.stored is not None
    assert msgspec.json.decode(msgspec.json.encode(pool.stored), type=Policy) == pool.stored
    assert not math.isnan(pool.stored.since_s)
