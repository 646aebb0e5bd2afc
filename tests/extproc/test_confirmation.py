"""Choices that are held back until those of the other pickers at the same moment are known."""

import asyncio
import contextlib
from collections.abc import Callable

import numpy as np
import pytest
from picker_rig import PickerRig, chat

from trimtab_core.hotspot import HotspotView
from trimtab_extproc import confirmation
from trimtab_extproc.confirmation import CHOICES_MAX, CONFIRM_TOKENS_MIN
from trimtab_extproc.events import Placed, Refused
from trimtab_extproc.picker import Undecided
from trimtab_state import Policy
from trimtab_state.peer_placements import Question
from trimtab_state.request_class import Overflow

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
LARGE = "word " * 2_000
NO_CHUNKS, NO_TOKENS = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint32)
PEER = 77


class Peers:
    """Other pickers, whose answer the test gives: the endpoints that they took before us."""

    def __init__(self) -> None:
        self.is_askable = True
        self.round_trip_s = 0.0005
        self.asked = 0
        self.waiting: list[asyncio.Future[frozenset[str] | None]] = []

    def ask(self) -> Question:
        self.asked += 1
        self.waiting.append(asyncio.get_running_loop().create_future())
        return Question(self.asked, self.waiting[-1])  # type: ignore[arg-type]

    async def answer(self, question: Question, until_s: float) -> frozenset[str] | None:
        return await question.position  # type: ignore[return-value]

    def say(self, *endpoints: str, is_known: bool = True) -> None:
        self.waiting.pop(0).set_result(frozenset(endpoints) if is_known else None)


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
def rig(peers: Peers) -> PickerRig:
    rig = PickerRig(peers=peers)
    rig.announce(A, B)
    return rig


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def takes(rig: PickerRig, endpoint: str, number: int = 1, p_tokens: int = 2_500) -> None:
    """A peer's placement has been heard of."""
    rig.fleet.on_peer_reserve(PEER, number, endpoint, p_tokens, 1, NO_CHUNKS, NO_TOKENS)


def begun(rig: PickerRig, text: str = LARGE) -> tuple[str, "asyncio.Task[Placed | Refused]"]:
    """Where it was placed first, and the rest of it."""
    undecided = rig.picker.pick_now(chat(text))
    assert isinstance(undecided, Undecided)
    assert undecided.unconfirmed is not None
    assert undecided.unconfirmed.choice is not None
    first = undecided.unconfirmed.choice.endpoint.name
    return first, asyncio.get_running_loop().create_task(rig.picker.decide(undecided))


async def test_a_choice_that_nobody_else_made_stands(rig: PickerRig, peers: Peers) -> None:
    first, deciding = begun(rig)
    await turn()
    assert not deciding.done()
    assert rig.requests()[first] == 1, "it is reserved and told to the others meanwhile"
    assert rig.count("trimtab_decisions_total") == 0
    peers.say(B if first == A else A)
    placed = await deciding
    assert isinstance(placed, Placed)
    assert placed.endpoint == first
    assert [entry[0] for entry in rig.log.entries] == ["reserve"]
    assert rig.last()["moved_from"] == []
    assert rig.count("trimtab_confirmations_total", result="kept") == 1
    assert rig.count("trimtab_decisions_total") == 1


async def test_a_request_whose_endpoint_another_picker_took_before_goes_elsewhere(rig: PickerRig, peers: Peers) -> None:
    first, deciding = begun(rig)
    takes(rig, first)
    peers.say(first)
    await turn()
    assert not deciding.done(), "the new choice has to be confirmed too"
    peers.say()
    placed = await deciding
    assert isinstance(placed, Placed)
    assert placed.endpoint == (B if first == A else A)
    assert rig.requests() == {A: 1, B: 1}
    assert [entry[0] for entry in rig.log.entries] == ["reserve", "finished", "reserve"]
    assert rig.last()["moved_from"] == [first]
    assert rig.count("trimtab_confirmations_total", result="moved") == 1
    assert rig.count("trimtab_confirmations_total") == 1
    assert rig.count("trimtab_decisions_total") == 1, "a request is counted once"


async def test_it_stays_where_that_is_the_best_all_the_same(rig: PickerRig, peers: Peers) -> None:
    first, deciding = begun(rig)
    other = B if first == A else A
    for number in range(2, 6):
        takes(rig, other, number, p_tokens=10_000)
    takes(rig, first)
    peers.say(first, other)
    placed = await deciding
    assert isinstance(placed, Placed)
    assert placed.endpoint == first
    assert peers.asked == 1
    assert rig.requests()[first] == 2


async def test_others_that_always_come_first_do_not_hold_it_up_for_ever(rig: PickerRig, peers: Peers) -> None:
    first, deciding = begun(rig)
    chosen = first
    for number in range(1, CHOICES_MAX + 1):
        takes(rig, chosen, number, p_tokens=1_000 * number * number)
        peers.say(A, B)
        await turn()
        chosen = next((entry[2] for entry in reversed(rig.log.entries) if entry[0] == "reserve"), "")
    placed = await deciding
    assert isinstance(placed, Placed)
    assert peers.asked <= CHOICES_MAX
    assert sum(rig.requests().values()) == CHOICES_MAX + 1


async def test_without_an_answer_the_choice_stands(rig: PickerRig, peers: Peers) -> None:
    first, deciding = begun(rig)
    takes(rig, first)
    peers.say(is_known=False)
    placed = await deciding
    assert isinstance(placed, Placed)
    assert placed.endpoint == first
    assert rig.count("trimtab_confirmations_total", result="unknown") == 1


@pytest.mark.parametrize("moment", ["before it was looked at", "while it waits", "while its second choice waits"])
async def test_who_leaves_meanwhile_leaves_no_reservation(rig: PickerRig, peers: Peers, moment: str) -> None:
    undecided = rig.picker.pick_now(chat(LARGE))
    assert isinstance(undecided, Undecided)
    deciding = asyncio.get_running_loop().create_task(rig.picker.decide(undecided))
    if moment != "before it was looked at":
        await turn()
    if moment == "while its second choice waits":
        first = next(name for name, count in rig.requests().items() if count)
        takes(rig, first)
        peers.say(first)
        await turn()
        assert peers.asked == 2
        rig.fleet.on_peer_finished(PEER, 1)
    deciding.cancel()
    rig.picker.drop(undecided)  # as the stream's end does, whether or not the task has ever run
    with contextlib.suppress(asyncio.CancelledError):
        await deciding
    assert rig.requests() == {A: 0, B: 0}
    assert len(rig.reservations) == 0
    told = [entry[0] for entry in rig.log.entries]
    assert told.count("reserve") == told.count("finished")
    assert rig.count("trimtab_decisions_total") == 0


async def test_where_others_took_all_room_it_waits_its_turn(rig: PickerRig, peers: Peers) -> None:
    rig.announce(A, B, policy=Policy(batch_limit=1, overflow=Overflow(wait_s=5.0)))
    _, deciding = begun(rig)
    takes(rig, A, 1)
    takes(rig, B, 2)
    peers.say(A, B)
    await turn()
    assert not deciding.done()
    assert len(rig.picker.waiting) == 1
    assert rig.requests() == {A: 1, B: 1}
    rig.fleet.on_peer_finished(PEER, 2)
    rig.picker.waiting.advance(rig.now_s)
    placed = await deciding
    assert isinstance(placed, Placed)
    assert placed.endpoint == B
    assert rig.count("trimtab_confirmations_total", result="refused") == 1


async def test_and_where_nobody_waits_it_is_refused(rig: PickerRig, peers: Peers) -> None:
    rig.announce(A, B, policy=Policy(batch_limit=1))
    _, deciding = begun(rig)
    takes(rig, A, 1)
    takes(rig, B, 2)
    peers.say(A, B)
    refused = await deciding
    assert isinstance(refused, Refused)
    assert refused.reason == "endpoints_full"
    assert rig.requests() == {A: 1, B: 1}


async def test_the_place_that_it_gives_up_is_for_those_who_wait(rig: PickerRig, peers: Peers) -> None:
    rig.announce(A, B, C, policy=Policy(batch_limit=1, overflow=Overflow(wait_s=5.0)))
    takes(rig, A, 1)
    takes(rig, B, 2)
    first, deciding = begun(rig)
    assert first == C
    small = asyncio.get_running_loop().create_task(rig.picker.pick(chat("small")))
    await turn()
    assert len(rig.picker.waiting) == 1
    rig.fleet.on_peer_finished(PEER, 1)
    takes(rig, C, 3)
    peers.say(C)
    await turn()
    peers.say()
    placed = await deciding
    assert isinstance(placed, Placed)
    assert placed.endpoint == A, "it came before the one who waits"
    assert not small.done()
    rig.fleet.on_peer_finished(PEER, 3)
    rig.picker.waiting.advance(rig.now_s)
    assert isinstance(await small, Placed)


def arrivals(rig: PickerRig) -> int:
    """Requests that the hotspot detector has counted."""
    view: HotspotView = rig.scheduler.hotspots()
    return view.arrivals


async def test_the_hotspot_detector_counts_a_request_once(rig: PickerRig, peers: Peers) -> None:
    rig.announce(A, B, policy=Policy(hotspots="act"))
    first, deciding = begun(rig)
    takes(rig, first)
    peers.say(first)
    await turn()
    peers.say()
    await deciding
    assert arrivals(rig) == 1


async def test_one_that_had_a_place_and_then_waits_is_counted_once_too(rig: PickerRig, peers: Peers) -> None:
    rig.announce(A, B, policy=Policy(hotspots="act", batch_limit=1, overflow=Overflow(wait_s=5.0)))
    _, deciding = begun(rig)
    takes(rig, A, 1)
    takes(rig, B, 2)
    peers.say(A, B)
    await turn()
    assert len(rig.picker.waiting) == 1
    rig.fleet.on_peer_finished(PEER, 2)
    rig.picker.waiting.advance(rig.now_s)
    assert isinstance(await deciding, Placed)
    assert arrivals(rig) == 1
    assert rig.count("trimtab_decision_seconds_count") == 1
    assert rig.count("trimtab_decisions_total") == 1


def _deleted(rig: PickerRig, endpoint: str) -> None:
    rig.announce(*({A, B, C} - {endpoint}))


def _asleep(rig: PickerRig, endpoint: str) -> None:
    rig.beat(endpoint, state="asleep", beat=2)


@pytest.mark.parametrize("change", [_deleted, _asleep])
@pytest.mark.parametrize("is_known", [True, False], ids=["with an answer", "without"])
async def test_an_endpoint_that_goes_meanwhile_is_not_sent_the_request(
    rig: PickerRig, peers: Peers, change: Callable[[PickerRig, str], None], is_known: bool
) -> None:
    rig.announce(A, B, C)
    first, deciding = begun(rig)
    change(rig, first)
    peers.say(is_known=is_known)
    await turn()
    if is_known:
        peers.say()
    placed = await deciding
    assert isinstance(placed, Placed)
    assert placed.endpoint != first
    assert rig.requests().get(first, 0) == 0
    assert rig.requests()[placed.endpoint] == 1
    assert rig.last()["moved_from"] == [first]


async def test_one_for_which_none_is_left_is_refused(rig: PickerRig, peers: Peers) -> None:
    _, deciding = begun(rig)
    rig.beat(A, state="asleep", beat=2)
    rig.beat(B, state="asleep", beat=2)
    peers.say()
    refused = await deciding
    assert isinstance(refused, Refused)
    assert refused.status == 503
    assert len(rig.reservations) == 0


async def test_endpoints_that_come_and_go_do_not_hold_it_up_for_ever(rig: PickerRig, peers: Peers) -> None:
    chosen, deciding = begun(rig)
    for number in range(1, 2 * CHOICES_MAX):
        if deciding.done():
            break
        rig.announce(*(f"10.0.{number}.{last}:8000" for last in range(2)))
        peers.say()
        await turn()
    placed = await deciding
    assert isinstance(placed, Placed)
    assert placed.endpoint != chosen
    assert peers.asked <= CHOICES_MAX
    assert sum(rig.requests().values()) == 1


def _not_askable(_: PickerRig, peers: Peers) -> None:
    peers.is_askable = False


def _far_store(_: PickerRig, peers: Peers) -> None:
    peers.round_trip_s = 0.05


def _one_endpoint(rig: PickerRig, _: Peers) -> None:
    rig.announce(A)


def _round_robin(rig: PickerRig, _: Peers) -> None:
    rig.announce(A, B, policy=Policy(policy="round_robin"))


@pytest.mark.parametrize("change", [_not_askable, _far_store, _one_endpoint, _round_robin])
async def test_where_it_would_not_pay_nobody_is_asked(
    rig: PickerRig, peers: Peers, change: Callable[[PickerRig, Peers], None]
) -> None:
    change(rig, peers)
    assert isinstance(rig.picker.pick_now(chat(LARGE)), Placed)
    assert peers.asked == 0


async def test_a_small_prompt_is_placed_at_once(rig: PickerRig, peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(rig.picker.pick_now(chat("small")), Placed)
    monkeypatch.setattr(confirmation, "CONFIRM_TOKENS_MIN", 1)
    peers.round_trip_s = 0.0
    assert isinstance(rig.picker.pick_now(chat("small")), Undecided)
    assert CONFIRM_TOKENS_MIN > 1


async def test_a_prompt_prepared_beside_the_loop_is_confirmed_as_well(rig: PickerRig, peers: Peers) -> None:
    asked = asyncio.get_running_loop().create_task(rig.picker.pick(chat("word " * 30_000)))
    async with asyncio.timeout(20):
        while not peers.waiting:  # noqa: ASYNC110 (a thread's work)
            await asyncio.sleep(0.001)
    peers.say()
    assert isinstance(await asked, Placed)
