"""Whatever gets lost, repeated or restarted, the frames applied are a run of one process's log, or a loss was told."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_sidecar.engine_log import NOWHERE, EngineLog, LogPosition, ReplayEnd, Verdict, digest

WHOLE_FRAMES = 3


def frame(process: int, sequence: int) -> bytes:
    return f"{process}/{sequence}".encode()


@dataclass
class Engine:
    """Processes that follow each other, each with a log and a bounded buffer of it."""

    buffer_steps: int
    process: int = 0
    length: int = 0

    def publish(self) -> tuple[int, bytes]:
        self.length += 1
        return self.length - 1, frame(self.process, self.length - 1)

    def restart(self) -> None:
        self.process, self.length = self.process + 1, 0

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        first = max(start, self.length - self.buffer_steps, 0)
        return [(sequence, frame(self.process, sequence)) for sequence in range(first, self.length)]


@dataclass
class Reader:
    """What the feed does with the log's verdicts, without sockets."""

    engine: Engine
    log: EngineLog
    rng: random.Random
    applied: list[bytes] = field(default_factory=list)
    """Since the last restart or loss that was told."""
    answers: bool = True

    def hear(self, sequence: int, payload: bytes) -> None:
        verdict = self.log.live(sequence, payload)
        if verdict is Verdict.ASK:
            if self.answers:
                self.catch_up()
                return
            verdict = self.log.live_without_replay(sequence, payload)
        if verdict is Verdict.RESTARTED:
            self.restart()
            verdict = self.log.live(sequence, payload)
        self.take(verdict, payload)

    def take(self, verdict: Verdict, payload: bytes) -> None:
        assert verdict is not Verdict.RESTARTED
        if verdict is Verdict.LOST:
            self.applied.clear()
        if verdict in (Verdict.APPLY, Verdict.LOST):
            self.applied.append(payload)

    def restart(self) -> None:
        self.log.forget()
        self.applied.clear()

    def catch_up(self) -> None:
        for _ in range(200):
            drop_after = self.rng.choice([WHOLE_FRAMES, 5, 100])
            if self.round(drop_after) is ReplayEnd.CURRENT:
                return
        raise AssertionError("a replay never came to its end")

    def round(self, drop_after: int) -> ReplayEnd:
        """One answer, of which a full socket drops some frames after the first ones."""
        for index, (sequence, payload) in enumerate(self.engine.replay(self.log.replay_from())):
            if index >= drop_after and self.rng.random() < 0.3:
                continue
            verdict = self.log.replayed(sequence, payload)
            if verdict is Verdict.RESTARTED:
                self.restart()
                return ReplayEnd.RESTARTED
            self.take(verdict, payload)
        end = self.log.replay_ended()
        if end is ReplayEnd.RESTARTED:
            self.restart()
        return end

    def check(self) -> None:
        """What was applied is one process's, without a hole."""
        if not self.applied:
            return
        process, first = map(int, self.applied[0].split(b"/"))
        assert self.applied == [frame(process, first + index) for index in range(len(self.applied))]


STEPS = st.lists(
    st.sampled_from(["publish", "publish", "lose", "restart", "restart unseen", "ask", "stale"]), max_size=60
)


@pytest.mark.parametrize("can_replay", [True, False])
@given(steps=STEPS, buffer_steps=st.integers(1, 8), seed=st.integers(0, 2**32))
@settings(max_examples=200)
def test_frames_are_applied_in_order_or_a_loss_is_told(
    can_replay: bool, steps: list[str], buffer_steps: int, seed: int
) -> None:
    engine = Engine(buffer_steps)
    reader = Reader(
        engine, EngineLog(can_replay=can_replay, whole_frames=WHOLE_FRAMES), random.Random(seed), answers=can_replay
    )
    old: list[tuple[int, bytes]] = []
    for step in steps:
        if step == "publish":
            old.append(engine.publish())
            reader.hear(*old[-1])
        elif step == "lose":
            old.append(engine.publish())
        elif step == "restart":
            engine.restart()
            reader.log.suspect()  # the connection broke
        elif step == "restart unseen" and can_replay:
            engine.restart()
            reader.log.suspect()
            for _ in range(reader.log.position.sequence + 1):  # the next frame looks contiguous
                engine.publish()
        elif step == "ask" and can_replay:
            reader.catch_up()
        elif step == "stale" and old and can_replay:
            reader.log.suspect()
            reader.hear(*reader.rng.choice(old))  # left over in the socket from before
        reader.check()
    if can_replay:
        reader.catch_up()
        reader.check()
        held = [frame(engine.process, sequence) for sequence in range(engine.length)]
        assert reader.applied == held[len(held) - len(reader.applied) :]
        assert len(reader.applied) >= min(len(held), buffer_steps)


def test_a_position_is_confirmed_by_the_digest_of_its_frame() -> None:
    log = EngineLog(can_replay=True, position=LogPosition(sequence=4, digest=digest(b"known")))
    assert log.is_suspect
    assert log.live(5, b"next") is Verdict.ASK
    assert log.replay_from() == 4
    assert log.replayed(4, b"known") is Verdict.SKIP
    assert log.replayed(5, b"next") is Verdict.APPLY
    assert log.replay_ended() is ReplayEnd.CURRENT
    assert not log.is_suspect


def test_another_digest_at_our_position_is_another_process() -> None:
    log = EngineLog(can_replay=True, position=LogPosition(sequence=4, digest=digest(b"known")))
    log.replay_from()
    assert log.replayed(4, b"other") is Verdict.RESTARTED


def test_a_log_that_ends_before_our_position_is_another_process() -> None:
    log = EngineLog(can_replay=True, position=LogPosition(sequence=4, digest=1))
    log.replay_from()
    assert log.replay_ended() is ReplayEnd.RESTARTED


def test_an_empty_log_is_current_for_a_reader_that_has_nothing() -> None:
    log = EngineLog(can_replay=True)
    assert log.replay_from() == 0
    assert log.replay_ended() is ReplayEnd.CURRENT


def test_the_first_frame_ever_seen_may_have_any_number() -> None:
    for can_replay in (True, False):
        log = EngineLog(can_replay=can_replay)
        verdict = log.live_without_replay(700, b"x") if can_replay else log.live(700, b"x")
        assert verdict is Verdict.APPLY
        assert log.position.sequence == 700


def test_a_checkpoint_that_nothing_can_confirm_is_not_believed() -> None:
    log = EngineLog(can_replay=False, position=LogPosition(sequence=4, digest=1))
    assert log.live(5, b"looks contiguous") is Verdict.LOST
    log = EngineLog(can_replay=False, position=LogPosition(sequence=4, digest=1))
    assert log.live(2, b"went back") is Verdict.RESTARTED
    log.forget()
    assert log.position.sequence == NOWHERE
    assert log.live(2, b"went back") is Verdict.APPLY
