"""What /metrics shows of the pool: read from the parts at the scrape, counted at the step that it is about."""

import pytest
from picker_rig import PickerRig, chat
from test_picker import chain_of

from trimtab_extproc.events import Refused
from trimtab_extproc.pool_report import PoolReport
from trimtab_extproc.telemetry import FIRST_TOKEN_SIGHTS, REFUSALS
from trimtab_state import ControlDocument, EndpointSpec, Policy

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"


@pytest.fixture
def rig() -> PickerRig:
    rig = PickerRig()
    rig.telemetry.watch(report_of(rig).gauges)
    return rig


def report_of(rig: PickerRig) -> PoolReport:
    return PoolReport(
        scheduler=rig.scheduler,
        table=rig.table,
        fleet=rig.fleet,
        reservations=rig.reservations,
        clock=lambda: rig.now_s,
    )


def shown(rig: PickerRig, name: str) -> dict[str, float]:
    """A gauge of endpoints, by endpoint."""
    return {
        sample.labels["model_server"]: sample.value
        for family in rig.telemetry.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def state(rig: PickerRig, endpoint: str) -> list[str]:
    return [
        sample.labels["state"]
        for family in rig.telemetry.registry.collect()
        for sample in family.samples
        if sample.name == "trimtab_endpoint_state" and sample.labels["model_server"] == endpoint
    ]


async def test_the_product_is_that_of_a_prompt_which_is_cached_there(rig: PickerRig) -> None:
    rig.announce(A)
    rig.beat(A, block_tokens=32)
    assert shown(rig, "trimtab_endpoint_product") == {A: 32 * 1}
    await rig.place(chat("z" * 8_000))
    queued = shown(rig, "trimtab_endpoint_queued_tokens")[A]
    assert queued > 500
    assert shown(rig, "trimtab_endpoint_product") == {A: queued * 2}


async def test_an_endpoint_has_one_state(rig: PickerRig) -> None:
    rig.announce(A, B, C, is_beating=False)
    rig.beat(A)
    rig.beat(B, state="asleep")
    rig.beat("10.0.0.9:8000")
    assert state(rig, A) == ["serving"]
    assert state(rig, B) == ["asleep"]
    assert state(rig, C) == ["no_heartbeat"]
    assert state(rig, "10.0.0.9:8000") == ["not_member"]
    draining = ControlDocument(
        namespace="tests", name="pool", endpoints=(EndpointSpec(name=A, address=A, draining=True),)
    )
    rig.fleet.on_control(draining)
    assert state(rig, A) == ["draining"]
    described = [report_of(rig).endpoint(name) for name in (A, C, "10.0.0.9:8000")]
    assert [found and found["state"] for found in described] == ["draining", "not_member", "not_member"]


async def test_only_endpoints_whose_cache_is_known_count_as_exact(rig: PickerRig) -> None:
    rig.announce(A, B, is_beating=False)
    rig.beat(A)
    assert shown(rig, "trimtab_endpoint_exact") == {A: 1, B: 0}
    assert shown(rig, "trimtab_endpoint_candidate") == {A: 1, B: 1}


async def test_what_an_engine_reports_is_shown_beside_what_we_count(rig: PickerRig) -> None:
    rig.announce(A, B, is_beating=False)
    rig.beat(A, running=3, waiting=2, kv_usage=0.25)
    assert shown(rig, "trimtab_endpoint_reported_requests") == {A: 5}
    assert shown(rig, "trimtab_endpoint_kv_usage") == {A: 0.25}


async def test_the_policy_in_force_is_the_only_one_that_is_shown_as_such(rig: PickerRig) -> None:
    rig.announce(A, policy=Policy(policy="round_robin"))
    assert rig.count("trimtab_policy", policy="round_robin") == 1
    assert rig.count("trimtab_policy") == 1


async def test_a_first_token_is_timed_from_the_choice_by_whoever_saw_it(rig: PickerRig) -> None:
    rig.announce(A)
    text = "z" * 4_000
    seen = await rig.place(chat(text))
    rig.now_s += 0.75
    rig.hold(A, chain_of(text))
    rig.reservations.first_token(seen.reservation_id, now_s=rig.now_s)
    assert rig.count("trimtab_first_token_seconds_count") == 1
    assert rig.count("trimtab_first_token_seconds_sum") == 0.75
    assert rig.count("trimtab_first_tokens_total", seen_by="kv_events") == 1

    streamed = await rig.place(chat("y" * 4_000))
    rig.now_s += 0.25
    rig.reservations.first_token(streamed.reservation_id, now_s=rig.now_s)
    rig.reservations.first_token(streamed.reservation_id, now_s=rig.now_s + 1)
    assert rig.count("trimtab_first_token_seconds_sum") == 1.0
    assert rig.count("trimtab_first_tokens_total", seen_by="response") == 1


async def test_a_first_token_that_nobody_saw_is_counted_and_not_timed(rig: PickerRig) -> None:
    rig.announce(A)
    placed = await rig.place(chat("z" * 4_000))
    rig.reservations.assumed([placed.reservation_id])
    assert ("first_token", placed.reservation_id) in rig.log.entries
    assert rig.count("trimtab_first_tokens_total", seen_by="prefill_rate") == 1
    assert rig.count("trimtab_first_token_seconds_count") == 0


async def test_single_requests_are_spread_over_their_hit_rates(rig: PickerRig) -> None:
    rig.announce(A)
    text = "a long story " * 100
    await rig.place(chat("something else entirely, " * 40))
    rig.hold(A, chain_of(text))
    placed = await rig.place(chat(text))
    assert rig.count("trimtab_predicted_hit_ratio_bucket", le="0.0") == 1
    assert rig.count("trimtab_predicted_hit_ratio_bucket", le="0.8") == 1
    assert rig.count("trimtab_predicted_hit_ratio_bucket", le="1.0") == 2
    rig.reservations.used(placed.reservation_id, prompt_tokens=300, cached_tokens=135)
    assert rig.count("trimtab_measured_hit_ratio_bucket", le="0.4") == 0
    assert rig.count("trimtab_measured_hit_ratio_bucket", le="0.5") == 1


async def test_the_oldest_reservation_is_as_old_as_its_request(rig: PickerRig) -> None:
    rig.announce(A)
    assert rig.count("trimtab_oldest_reservation_seconds") == 0
    first = await rig.place()
    rig.now_s += 5
    await rig.place()
    rig.now_s += 2
    assert rig.count("trimtab_oldest_reservation_seconds") == 7
    rig.finish(first)
    assert rig.count("trimtab_oldest_reservation_seconds") == 2


async def test_counts_of_what_goes_wrong_begin_at_zero(rig: PickerRig) -> None:
    # Prometheus does not see the step of a series that begins with 1.
    text = rig.telemetry.expose().decode()
    for reason in REFUSALS:
        assert f'trimtab_rejected_total{{pool="pool",pool_namespace="tests",reason="{reason}"}} 0.0' in text
    for sight in FIRST_TOKEN_SIGHTS:
        assert f'trimtab_first_tokens_total{{pool="pool",pool_namespace="tests",seen_by="{sight}"}} 0.0' in text
    rig.announce()
    assert isinstance(await rig.ask(), Refused)
    assert rig.count("trimtab_rejected_total", reason="no_endpoints") == 1


async def test_the_scheduler_is_timed_apart_from_the_reading_of_the_request(rig: PickerRig) -> None:
    rig.announce(A)
    await rig.place()
    assert rig.count("trimtab_scheduler_seconds_count") == rig.count("trimtab_decision_seconds_count") == 1
