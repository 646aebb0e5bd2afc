"""A hotspot from the requests to round robin and back: real API server, store, operator, pickers, Envoy and engines."""

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import AsyncIterator

import aiohttp
import pytest
from operator_rig import OperatorRig
from test_operator_end_to_end import ask, counts, fallback_condition, is_chosen_by_a_picker, pickers, settled
from waiting_on import eventually

from trimtab_operator.kube import EVENTS
from trimtab_state import Alarm, AlarmReader, connect

pytestmark = [
    pytest.mark.load,
    pytest.mark.stack,
    pytest.mark.timeout(420),
    pytest.mark.skipif(os.geteuid() != 0, reason="a cluster's DNS for Envoy needs a mount namespace, so root"),
]

DOCUMENT = "All of this class begin with these words, and nobody else does. " * 400
WINDOW_S, QUIET_S = 15, 20
"""A quiet longer than the 15 s after which a detector tells again what lasts."""
BURST_INTERVAL_S = 0.08
ALONE_SHARE = 0.2
"""Drawn, so that both pickers, to which Envoy goes in turns, have their part of what is not of the class."""
ENGINES = ("engine-a", "engine-b", "engine-c", "engine-d")


@contextlib.asynccontextmanager
async def burst(session: aiohttp.ClientSession, url: str) -> AsyncIterator[None]:
    """While it lasts, four of five requests are of one class. Each has to be answered."""

    async def one(text: str) -> None:
        async with await ask(session, url, text, max_tokens=1) as response:
            assert response.status == 200, await response.text()
            await response.read()

    rng = random.Random(7)

    async def many() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in itertools.count():
                text = f"{number} is alone. " * 20 if rng.random() < ALONE_SHARE else f"{DOCUMENT}{number}"
                tasks.create_task(one(text))
                await asyncio.sleep(BURST_INTERVAL_S)

    going = asyncio.create_task(many())
    try:
        yield
    finally:
        if going.done():
            going.result()  # it never ends by itself: a request failed, and that is what there is to say
        going.cancel()
        await asyncio.wait([going])


async def policy_is(rig: OperatorRig, name: str) -> bool:
    document = await rig.control()
    return document is not None and document.policy.policy == name


async def hotspots(session: aiohttp.ClientSession, rig: OperatorRig) -> list[int]:
    """Classes with an alarm, by picker."""
    found = []
    for url in pickers(rig):
        async with session.get(f"{url}/state") as response:
            found.append(len((await response.json())["hotspots"]))
    return found


async def alarms(rig: OperatorRig) -> list[Alarm]:
    """All that were written."""
    store = connect(rig.store.url)
    try:
        return [aged.alarm for aged in await AlarmReader(store, rig.keys, lookback_s=600.0).read()]
    finally:
        await store.close()


async def test_a_hotspot_that_lasts_brings_round_robin_and_its_end_the_product(rig: OperatorRig) -> None:
    await rig.start_operator()
    await rig.apply_policy(
        picker={"tls": False, "replicas": 2},
        standalone={"enabled": True, "replicas": 1},
        # It only tells: acting would end the hotspot before the operator hears of it.
        hotspots={"mode": "Alarm", "windowSeconds": WINDOW_S},
        fallback={"alarms": 2, "windowSeconds": 60, "quietSeconds": QUIET_S, "minimumStaySeconds": 0},
    )
    await rig.apply_pool()
    for name in ENGINES:
        await rig.start_engine(name)
    await settled(rig, len(ENGINES))
    url = rig.front()
    async with aiohttp.ClientSession() as session:
        await eventually(lambda: is_chosen_by_a_picker(session, rig), within_s=60)
        async with await ask(session, url, DOCUMENT, max_tokens=1) as response:
            await response.read()
        assert await policy_is(rig, "product")

        async with burst(session, url):
            # Each picker sees its part of the class and names it alike.
            await eventually(lambda: each_has_one(session, rig), within_s=60)
            await eventually(lambda: policy_is(rig, "round_robin"), within_s=90)
            condition = await eventually(lambda: fallback_condition(rig, "True"))
            assert condition["reason"] == "HotspotAlarms"
            assert "of one prefix class within 60 s" in condition["message"]
            # Round robin spreads the prefix, and what would come of the product is known all the same.
            before = await counts(session, rig)
            await asyncio.sleep(QUIET_S + WINDOW_S)
            after = await counts(session, rig)
            assert await policy_is(rig, "round_robin"), story(await alarms(rig))
            assert await each_has_one(session, rig), story(await alarms(rig))
            served = sorted(after[name] - before[name] for name in ENGINES)
            assert served[0] > 0.7 * served[-1] > 0

        await eventually(lambda: policy_is(rig, "product"), within_s=QUIET_S + WINDOW_S + 60)
        await eventually(lambda: fallback_condition(rig, "False"))
        assert await hotspots(session, rig) == [0, 0]

    written = await alarms(rig)
    assert len({alarm.prefix_class for alarm in written}) == 1
    assert len({alarm.replica for alarm in written}) == 2
    assert {alarm.holders + alarm.others for alarm in written} == {4}
    assert {alarm.holders for alarm in written} <= {1, 2}
    assert not any(alarm.acted for alarm in written)
    last = {alarm.replica: alarm.raised for alarm in written}
    assert [*last.values()] == [False, False]
    events, _ = await rig.kube.list_all(EVENTS, rig.namespace)
    reasons = [event["reason"] for event in events if event["regarding"]["kind"] == "SchedulingPolicy"]
    # There and back, once: the mode does not swing while the hotspot lasts.
    assert sorted(reason for reason in reasons if reason.startswith("Fallback")) == ["FallbackEnded", "FallbackStarted"]


async def each_has_one(session: aiohttp.ClientSession, rig: OperatorRig) -> bool:
    return await hotspots(session, rig) == [1, 1]


def story(written: list[Alarm]) -> str:
    """For whoever has to find out why it went otherwise."""
    return "\n".join(
        f"{alarm.replica[:4]} {alarm.raised} {alarm.in_class} of {alarm.arrivals}, held by {alarm.holders} of "
        f"{alarm.holders + alarm.others}"
        for alarm in written
    )
