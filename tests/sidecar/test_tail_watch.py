"""When an engine's log is asked for its end."""

from trimtab_sidecar.tail_watch import TailWatch


def watch_that_asked_at(now_s: float) -> TailWatch:
    watch = TailWatch(check_s=5.0)
    assert watch.look(work=1, frames=0, now_s=now_s)
    return watch


def test_work_without_an_event_is_a_reason_to_ask() -> None:
    watch = watch_that_asked_at(0.0)
    assert not watch.look(work=1, frames=0, now_s=10.0)
    assert watch.look(work=2, frames=0, now_s=11.0)
    assert not watch.look(work=2, frames=0, now_s=30.0)


def test_a_question_that_comes_too_soon_is_asked_later_and_not_forgotten() -> None:
    watch = watch_that_asked_at(0.0)
    assert not watch.look(work=2, frames=0, now_s=1.0)
    assert not watch.look(work=2, frames=0, now_s=4.0)
    assert watch.look(work=2, frames=0, now_s=7.0)
    assert not watch.look(work=2, frames=0, now_s=100.0)


def test_while_events_come_nothing_is_asked_and_afterwards_it_is() -> None:
    watch = watch_that_asked_at(0.0)
    for second in range(10, 20):
        assert not watch.look(work=second, frames=second, now_s=float(second))
    assert watch.look(work=19, frames=19, now_s=20.0)
