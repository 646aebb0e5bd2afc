"""Hotspots through the whole of a decision: the policy switches the detector, and a changed decision says so."""

from typing import Literal

import pytest
from picker_rig import DIGEST, SEED, PickerRig, chat

from trimtab_core.chunks import hash_chunks, root_hash
from trimtab_extproc.hotspot_metrics import HotspotCollector
from trimtab_state import Policy, ServedModel

ENDPOINTS = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000")
DOCUMENT = "what this class has in common, and nobody else " * 60


@pytest.fixture
def rig() -> PickerRig:
    rig = PickerRig()
    rig.announce(*ENDPOINTS)
    return rig


async def burst(rig: PickerRig, requests: int = 40) -> list[str]:
    """Every other request is of one class, which the first endpoint holds; where those went."""
    chosen = []
    for number in range(requests):
        for text in (DOCUMENT + str(number), f"{number} " * 900):
            rig.now_s += 0.05
            placed = await rig.place(chat(text))
            rig.reservations.first_token(placed.reservation_id, now_s=rig.now_s)
            rig.finish(placed)
            if text.startswith(DOCUMENT):
                chosen.append(placed.endpoint)
    return chosen


def held(rig: PickerRig) -> None:
    """The first endpoint holds the class's prefix, as its engine says."""
    rendered = f"<user>{DOCUMENT}".encode()
    rig.hold(ENDPOINTS[0], hash_chunks(rendered, root_hash(SEED), SEED))


async def test_a_decision_that_was_changed_says_by_what(rig: PickerRig) -> None:
    held(rig)
    chosen = await burst(rig)
    assert chosen[0] == ENDPOINTS[0]
    assert len(set(chosen)) > 1
    changed = [entry for entry in rig.decisions.to_json(now_s=rig.now_s, count=256) if entry["hotspot"] is not None]
    assert changed
    assert len(changed[0]["hotspot"]) == 16
    assert changed[0]["reason"].endswith(", away from a hotspot")
    verdicts = {row["endpoint"]: row["verdict"] for row in changed[0]["endpoints"]}
    assert verdicts[ENDPOINTS[0]] == "no candidate: holds the prefix of a hotspot"
    assert verdicts[changed[0]["endpoint"]].startswith("won: ")
    assert rig.count("trimtab_hotspot_moved_requests_total") == len(changed)


@pytest.mark.parametrize("mode", ["alarm", "off"])
async def test_the_policy_says_what_the_detector_may_do(mode: Literal["alarm", "off"], rig: PickerRig) -> None:
    rig.announce(*ENDPOINTS, policy=Policy(hotspots=mode))
    held(rig)
    assert set(await burst(rig)) == {ENDPOINTS[0]}
    view = rig.scheduler.hotspots()
    assert (len(view.hotspots), view.raised) == ((1, 1) if mode == "alarm" else (0, 0))


async def test_a_policy_that_changes_is_in_force_at_once_and_what_was_counted_stays(rig: PickerRig) -> None:
    rig.announce(*ENDPOINTS, policy=Policy(hotspots="alarm"))
    held(rig)
    await burst(rig)
    rig.announce(*ENDPOINTS, policy=Policy(hotspots="act"))
    assert len(set(await burst(rig, 5))) > 1
    rig.announce(*ENDPOINTS, policy=Policy(hotspot_window_s=1.0))
    rig.scheduler.advance(rig.now_s)
    assert rig.scheduler.hotspots().arrivals <= 21
    rig.announce(*ENDPOINTS, policy=Policy(hotspots="off"))
    assert rig.scheduler.hotspots().arrivals == 0


async def test_while_round_robin_places_the_alarm_stays(rig: PickerRig) -> None:
    rig.announce(*ENDPOINTS, policy=Policy(hotspots="alarm"))
    held(rig)
    await burst(rig)
    rig.announce(*ENDPOINTS, policy=Policy(hotspots="alarm", policy="round_robin"))
    chosen = await burst(rig)
    assert set(chosen) == set(ENDPOINTS)
    for endpoint in ENDPOINTS:
        rig.hold(endpoint, hash_chunks(f"<user>{DOCUMENT}".encode(), root_hash(SEED), SEED))
    await burst(rig, 5)
    (hotspot,) = rig.scheduler.hotspots().hotspots
    assert (hotspot.holders, hotspot.others) == (1, 3)


async def test_an_approximate_endpoint_holds_what_was_learned_of_it() -> None:
    rig = PickerRig()
    rig.announce(*ENDPOINTS, is_beating=False)
    for name in ENDPOINTS:
        rig.beat(name, approximate="no KV events", models={"m": ServedModel(card=DIGEST)})
    chosen = await burst(rig)
    assert len(set(chosen)) > 1
    assert rig.scheduler.hotspots().raised == 1


async def test_the_metrics_name_no_class(rig: PickerRig) -> None:
    rig.announce(*ENDPOINTS, policy=Policy(hotspots="alarm"))
    held(rig)
    await burst(rig)
    rig.telemetry.registry.register(HotspotCollector(("pool", "tests"), rig.scheduler.hotspots, lambda: 3))
    assert rig.count("trimtab_hotspot_classes") == 1
    assert rig.count("trimtab_hotspot_acted_on_classes") == 0
    assert rig.count("trimtab_hotspot_window_arrivals") == 80
    assert rig.count("trimtab_hotspot_raised_total") == 1
    assert rig.count("trimtab_hotspot_acted_on_total") == 0
    assert rig.count("trimtab_hotspot_alarms_written_total") == 3
    families = [family for family in rig.telemetry.registry.collect() if family.name.startswith("trimtab_hotspot")]
    assert {label for family in families for sample in family.samples for label in sample.labels} == {
        "pool",
        "pool_namespace",
    }


async def test_every_replica_names_a_class_alike() -> None:
    names = set()
    for serial in range(2):
        rig = PickerRig()
        rig.announce(*ENDPOINTS, policy=Policy(hotspots="alarm"))
        held(rig)
        for number in range(30):
            for text in (f"{DOCUMENT}{serial}{number}", f"{serial} {number} " * 500):
                rig.now_s += 0.05
                rig.finish(await rig.place(chat(text)))
        names |= {hotspot.prefix_class for hotspot in rig.scheduler.hotspots().hotspots}
    assert len(names) == 1
    assert names <= set(hash_chunks(f"<user>{DOCUMENT}".encode(), root_hash(SEED), SEED).tolist())
