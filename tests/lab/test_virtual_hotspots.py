"""Hotspots in a virtual fleet: what a detector sees there, and what comes of it."""

import random

import pytest

from trimtab_core.hotspot import HotspotSettings
from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.virtual_picker import VOCABULARY, Asked, VirtualPicker, VirtualPolicy, token_table

TABLE = token_table()
ENGINES = 4


def burst() -> list[Asked]:
    """A class that one engine holds brings half of the requests; the others share nothing."""
    rng = random.Random(5)
    document = rng.choices(range(VOCABULARY), k=3_000)
    asked = []
    for number in range(120):
        is_class = number % 2 == 0
        prompt = (document if is_class else []) + rng.choices(range(VOCABULARY), k=100)
        at_s = 3.0 * (number > 0) + number * 0.2
        request = EngineRequest(request_id=str(number), prompt=prompt, output=[1] * 20)
        asked.append(Asked(at_s=at_s, request=request, kind="class" if is_class else "others"))
    return asked


def served(hotspots: HotspotSettings | None, policy: str = "product") -> tuple[list[Asked], VirtualPicker]:
    settings = EngineSettings(block_count=4_096, context_tokens_max=8_192)
    picker = VirtualPicker(
        [EngineModel(settings) for _ in range(ENGINES)],
        seed=1,
        policy=VirtualPolicy(policy=policy),
        table=TABLE,
        hotspots=hotspots,
    )
    asked = burst()
    picker.run(asked)
    return asked, picker


def engines_of_class(asked: list[Asked]) -> set[int | None]:
    return {each.engine for each in asked if each.kind == "class"}


def test_a_detector_that_only_tells_changes_no_placement() -> None:
    without, _ = served(None)
    told, picker = served(HotspotSettings(acts=False))
    assert [each.engine for each in told] == [each.engine for each in without]
    assert len(engines_of_class(told)) == 1
    assert (picker.hotspots().raised, picker.hotspots().acted) == (1, 0)


def test_acting_makes_as_many_holders_as_the_class_needs_and_no_more() -> None:
    asked, picker = served(HotspotSettings())
    assert picker.hotspots().acted == 1
    assert len(engines_of_class(asked)) in (2, 3)
    # Each new holder computed the document once, and nobody else did.
    computed = [each for each in asked if each.kind == "class" and each.cached_tokens < 2_000]
    assert len(computed) == len(engines_of_class(asked))


@pytest.mark.parametrize("policy", ["round_robin", "least_request"])
def test_where_another_policy_places_from_the_beginning_the_prefix_is_everywhere_and_nothing_is_told(
    policy: str,
) -> None:
    asked, picker = served(HotspotSettings(), policy)
    assert len(engines_of_class(asked)) == ENGINES
    assert picker.hotspots().raised == 0
