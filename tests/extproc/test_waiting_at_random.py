"""Requests that come, wait, leave and end in any order, while the pool and its policy change under them."""

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest
from picker_rig import DIGEST, PickerRig, chat

from trimtab_extproc.events import Placed, Refused
from trimtab_state import Policy, ServedModel
from trimtab_state.request_class import Overflow, RequestClass

NAMES = [f"10.0.0.{n}:8000" for n in range(1, 5)]
OBJECTIVE, TENANT = "x-gateway-inference-objective", "x-gateway-inference-fairness-id"
CLASSES = (
    RequestClass(name="urgent", priority=5, objectives=("now",), weight_milli=4_000),
    RequestClass(name="spare", priority=-1, objectives=("whenever",)),
)
WAIT_S = 5.0
STEPS = 250


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    task: "asyncio.Task[Placed | Refused]"
    size: int
    allowed: tuple[str, ...] | None
    model: str
    seen_s: float | None = None
    """When it was first seen to wait."""
    is_over: bool = False
    """Its client has left, or its answer has ended."""


class Crowd:
    """Everybody who asks, and the pool they ask."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rig = PickerRig()
        self.asked: list[Asked] = []
        self.faults: list[dict[str, Any]] = []
        self.limit: int | None = 3
        self.members = NAMES
        self.change(is_waiting=True)

    def change(self, *, is_waiting: bool) -> None:
        overflow = Overflow(wait_s=WAIT_S if is_waiting else 0.0, waiting_max=self.rng.choice([3, 40]))
        policy = Policy(batch_limit=self.limit, overflow=overflow, classes=CLASSES)
        self.rig.announce(*self.members, policy=policy, is_beating=False)
        for name in self.members:
            models = {"m": ServedModel(card=DIGEST)}
            if name != NAMES[0]:
                models["k"] = ServedModel(card=DIGEST, lora=True)
            self.rig.beat(name, models=models)

    def ask(self) -> None:
        rng = self.rng
        size, model = rng.choice([1, 1, 1, 1, 2, 3, 7]), rng.choice("mmk")
        allowed = rng.choice([None, None, None, (NAMES[1],), (NAMES[0], NAMES[2])])
        headers = {TENANT: rng.choice("aab"), OBJECTIVE: rng.choice(["", "", "", "now", "whenever"])}
        request = chat(headers=headers, subset=allowed, model=model, **({"n": size} if size > 1 else {}))
        task = asyncio.get_running_loop().create_task(self.rig.picker.pick(request))
        self.asked.append(Asked(task=task, size=size, allowed=allowed, model=model))

    def end_one(self) -> None:
        """An answer, or the patience of a client."""
        open_ones = [asked for asked in self.asked if not asked.is_over]
        if not open_ones:
            return
        asked = self.rng.choice(open_ones)
        asked.is_over = True
        if not asked.task.done():
            asked.task.cancel()
        elif isinstance(told := asked.task.result(), Placed):
            self.rig.finish(told)

    def step(self) -> None:
        rng, rig = self.rng, self.rig
        kind = rng.random()
        if kind < 0.5:
            for _ in range(rng.choice([1, 1, 5])):
                self.ask()
        elif kind < 0.85:
            for _ in range(rng.choice([1, 1, 4])):
                self.end_one()
        elif kind < 0.9:
            rig.now_s += rng.choice([0.1, 1.0, WAIT_S])
            rig.picker.waiting.advance(rig.now_s)
        elif kind < 0.95:
            self.limit = rng.choice([1, 2, 3, 3, None])
            self.change(is_waiting=rng.random() < 0.8)
        else:
            self.members = rng.choice([NAMES, NAMES, NAMES[:2], NAMES[1:]])
            self.change(is_waiting=True)

    def check(self) -> None:
        """Nothing is lost, and nobody waits for an endpoint that has room for it and is kept for nobody."""
        rig = self.rig
        told = [a.task.result() for a in self.asked if a.task.done() and not a.task.cancelled() and not a.is_over]
        open_ids = {one.reservation_id for one in told if isinstance(one, Placed)}
        assert {record.reservation_id for record in rig.scheduler.open_reservations()} <= open_ids
        assert len(rig.reservations) == len(open_ids)
        waiting = [asked for asked in self.asked if not asked.task.done()]
        assert len(rig.picker.waiting) == len(waiting)
        for asked in waiting:
            asked.seen_s = rig.now_s if asked.seen_s is None else asked.seen_s
            assert rig.now_s < asked.seen_s + WAIT_S
        requests = rig.requests()
        for asked in waiting:
            assert self.limit is not None
            fit = [
                name
                for name in self.members
                if (asked.allowed is None or name in asked.allowed)
                and not (asked.model == "k" and name == NAMES[0] and self.members != NAMES[:1])
                and (requests[name] + asked.size <= self.limit or requests[name] == 0)
            ]
            is_hidden = asked.size > 1 and any(other.size >= asked.size and other is not asked for other in waiting)
            assert len(fit) <= any(other.size > 1 for other in waiting) or is_hidden, (asked, requests)


@pytest.mark.parametrize("seed", range(12))
async def test_nothing_is_lost_and_nobody_waits_for_a_place_that_is_free(seed: int) -> None:
    crowd = Crowd(seed)
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: crowd.faults.append(fault))
    for _ in range(STEPS):
        for _ in range(crowd.rng.choice([1, 1, 3])):
            crowd.step()
        for _ in range(6):
            await asyncio.sleep(0)
        crowd.rig.picker.waiting.advance(crowd.rig.now_s)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not crowd.faults
        crowd.check()
    while any(not asked.is_over for asked in crowd.asked):
        crowd.end_one()
    for _ in range(6):
        await asyncio.sleep(0)
    assert not crowd.faults
    assert not any(crowd.rig.requests().values())
    assert not crowd.rig.scheduler.load().weight_milli.any()
    assert len(crowd.rig.picker.waiting) == len(crowd.rig.reservations) == 0
    crowd.rig.scheduler.check_invariants()
