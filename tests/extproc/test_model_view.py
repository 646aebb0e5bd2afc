"""Who may be chosen for a model, and how each candidate renders its prompts."""

import msgspec
import pytest

from trimtab_core.model_card import ModelCard
from trimtab_extproc import model_view
from trimtab_extproc.endpoint_table import Endpoint
from trimtab_extproc.model_view import ModelView, build_view
from trimtab_state import Heartbeat, ServedModel

EXACT = ModelCard(template="a", exact=True, reason="", tokens_per_byte=0.2)
OTHER = ModelCard(template="b", exact=True, reason="", tokens_per_byte=0.4)
INEXACT = ModelCard(template="c", exact=False, reason="mistral", tokens_per_byte=0.6)
CARDS = {"exact": EXACT, "other": OTHER, "inexact": INEXACT}


def endpoint(slot: int) -> Endpoint:
    return Endpoint(name=f"e{slot}", slot=slot, address=f"10.0.0.{slot}:8000", rank=None)


def beat(slot: int, *, state: str = "serving", approximate: str | None = None, **models: ServedModel) -> Heartbeat:
    return Heartbeat(endpoint=f"e{slot}", epoch="1", state=state, models=models, approximate=approximate)  # type: ignore[arg-type]


def view(
    model: str | None, *heartbeats: Heartbeat | None, draining: tuple[str, ...] = (), slot_count: int | None = None
) -> ModelView:
    """One member per heartbeat; None: a member without one."""
    return build_view(
        model,
        members=[endpoint(slot) for slot in range(len(heartbeats))],
        draining=set(draining),
        heartbeats={heartbeat.endpoint: heartbeat for heartbeat in heartbeats if heartbeat is not None},
        cards=CARDS,
        slot_count=len(heartbeats) if slot_count is None else slot_count,
    )


M = ServedModel(card="exact")


@pytest.mark.parametrize("state", ["draining", "asleep", "unreachable"])
def test_an_endpoint_that_says_it_cannot_serve_is_no_candidate(state: str) -> None:
    seen = view("m", beat(0, m=M), beat(1, state=state, m=M))
    assert seen.candidates.tolist() == [True, False]
    assert seen.excluded == {1: state}


def test_an_endpoint_that_the_operator_takes_out_is_no_candidate_whatever_it_says() -> None:
    seen = view("m", beat(0, m=M), beat(1, m=M), draining=("e1",))
    assert seen.candidates.tolist() == [True, False]
    assert seen.excluded == {1: "draining"}


def test_an_endpoint_whose_hashes_come_of_another_secret_is_a_candidate_in_approximate_mode() -> None:
    beats = [msgspec.structs.replace(beat(slot, m=M), seed_digest=digest) for slot, digest in enumerate(("a", "b", ""))]
    seen = build_view(
        "m",
        members=[endpoint(slot) for slot in range(3)],
        draining=set(),
        heartbeats={heartbeat.endpoint: heartbeat for heartbeat in beats},
        cards=CARDS,
        slot_count=3,
        seed_digest="a",
    )
    assert seen.candidates.tolist() == [True, True, True]
    assert seen.exact.tolist() == [True, False, True]
    assert seen.approximate_reasons == {1: "secret"}


def test_an_endpoint_without_heartbeat_is_a_candidate_in_approximate_mode() -> None:
    seen = view("m", beat(0, m=M), None)
    assert seen.candidates.tolist() == [True, True]
    assert seen.variant_of_slot.tolist() == [0, 1]
    assert seen.variants[1].card is None
    assert seen.exact.tolist() == [True, False]
    assert seen.approximate_reasons == {1: "no_heartbeat"}


def test_only_endpoints_that_list_the_model_or_list_nothing_are_candidates() -> None:
    seen = view("m", beat(0, m=M), beat(1, other=M), beat(2), None)
    assert seen.candidates.tolist() == [True, False, True, True]
    assert seen.excluded == {1: "another model"}
    assert seen.model_label == "m"


def test_a_model_that_nobody_lists_leaves_every_endpoint_and_no_label() -> None:
    seen = view("strange", beat(0, m=M), beat(1, n=M))
    assert seen.candidates.tolist() == [True, True]
    assert seen.model_label == "unknown"
    assert seen.exact.tolist() == [True, True]


def test_no_model_name_means_the_engines_base_model() -> None:
    seen = view(None, beat(0, adapter=ServedModel(card="other", lora=True), m=M))
    assert [variant.key for variant in seen.variants] == [("exact", None)]


def test_an_adapter_renders_under_its_own_name() -> None:
    adapter = ServedModel(card="exact", lora=True)
    assert [variant.key for variant in view("adapter", beat(0, m=M, adapter=adapter)).variants] == [
        ("exact", "adapter")
    ]
    assert [variant.key for variant in view("m", beat(0, m=M, adapter=adapter)).variants] == [("exact", None)]


def test_equal_cards_are_one_variant_and_distinct_ones_are_several() -> None:
    seen = view("m", beat(0, m=M), beat(1, m=ServedModel(card="other")), beat(2, m=M))
    assert seen.variant_of_slot.tolist() == [0, 1, 0]
    assert seen.exact.all()
    assert seen.tokens_per_byte == pytest.approx(0.3)


def test_what_is_not_exact_says_why() -> None:
    seen = view(
        "m",
        beat(0, m=ServedModel()),
        beat(1, m=ServedModel(card="never told")),
        beat(2, m=ServedModel(card="inexact")),
        beat(3, approximate="hybrid model", m=M),
        beat(4, m=M),
    )
    assert seen.approximate_reasons == {0: "no_card", 1: "no_card", 2: "card", 3: "engine"}
    assert seen.exact.tolist() == [False, False, False, False, True]
    assert seen.variant_of_slot.tolist() == [0, 0, 0, 1, 1]
    assert seen.tokens_per_byte == pytest.approx(0.4)


def test_beyond_the_bound_of_variants_an_endpoint_goes_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_view, "VARIANTS_MAX", 1)
    seen = view("m", beat(0, m=M), beat(1, m=ServedModel(card="other")), beat(2, m=M))
    assert seen.variant_of_slot.tolist() == [0, -1, 0]
    assert seen.approximate_reasons == {1: "too_many_cards"}


def test_arrays_run_over_all_slots() -> None:
    seen = view("m", beat(0, m=M), slot_count=5)
    assert [len(array) for array in (seen.candidates, seen.exact, seen.variant_of_slot)] == [5, 5, 5]
    assert seen.candidates.sum() == 1


def test_what_sidecars_have_measured_goes_before_what_a_sample_text_said() -> None:
    measured = msgspec.structs.replace(beat(0, m=M), tokens_per_byte=0.18)
    assert view("m", measured, beat(1, m=M)).tokens_per_byte == pytest.approx(0.18)
    senseless = msgspec.structs.replace(measured, tokens_per_byte=float("inf"))
    assert view("m", senseless, beat(1, m=M)).tokens_per_byte == pytest.approx(0.2)
