"""One picker in front of a virtual fleet: extra terms, limits, waiting."""

from typing import Any

import numpy as np
import pytest

from trimtab_core.extra_terms import ExtraTerms
from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.virtual_picker import VOCABULARY, Asked, VirtualPicker, VirtualPolicy, token_table

TABLE = token_table()


def asked(at_s: float, *, prompt: int = 200, output: int = 20, first: int = 0, **fields: Any) -> Asked:
    """A prompt of its own, but for those that begin with the same token."""
    tokens = [(first * 977 + n) % VOCABULARY for n in range(prompt)]
    name = f"{at_s} {first} {prompt}"
    return Asked(at_s=at_s, request=EngineRequest(request_id=name, prompt=tokens, output=[7] * output), **fields)


def fleet(count: int = 2) -> list[EngineModel]:
    return [EngineModel(EngineSettings(block_count=2_048, context_tokens_max=16_384)) for _ in range(count)]


def serve(requests: list[Asked], *, engines: int = 2, **settings: Any) -> list[Asked]:
    settings.setdefault("policy", VirtualPolicy())
    VirtualPicker(fleet(engines), seed=1, table=TABLE, **settings).run(requests)
    return requests


def test_every_request_is_served_and_a_next_turn_finds_its_prefix() -> None:
    first, second = asked(0.0, first=1), asked(5.0, first=1, prompt=300)
    served = serve([first, second, asked(0.1, first=2)])
    assert all(each.finished_s is not None for each in served)
    assert second.engine == first.engine
    assert second.cached_tokens >= 192


def test_the_same_seed_gives_the_same_run() -> None:
    def run() -> list[tuple[int | None, float]]:
        return [(each.engine, each.ttft_s) for each in serve([asked(0.01 * n, first=n) for n in range(40)])]

    assert run() == run()


def test_the_client_sees_the_way_there_and_back() -> None:
    near, far = (serve([asked(0.0)], engines=1, round_trips_s=[trip_s])[0].ttft_s for trip_s in (0.0, 0.4))
    assert far == pytest.approx(near + 0.4)


def test_with_round_trips_in_the_score_the_far_engine_is_left_alone() -> None:
    trips_s = [0.5, 0.001]
    policy = VirtualPolicy(extra=lambda _: ExtraTerms(rtt_s=np.array(trips_s)))
    served = serve([asked(0.5 * n, first=n) for n in range(6)], round_trips_s=trips_s, policy=policy)
    assert {each.engine for each in served} == {1}


def test_at_the_limit_requests_are_refused_or_wait() -> None:
    def burst() -> list[Asked]:
        return [asked(0.001 * n, first=n) for n in range(8)]

    refused = serve(burst(), policy=VirtualPolicy(batch_max=2))
    assert [each.is_refused for each in refused] == [False] * 4 + [True] * 4
    waited = serve(burst(), policy=VirtualPolicy(batch_max=2, wait_s=60.0))
    assert not any(each.is_refused for each in waited)
    assert all(each.waited_s > 0 for each in waited[4:])
    in_vain = serve(burst(), policy=VirtualPolicy(batch_max=2, wait_s=0.1))
    assert [each.is_refused for each in in_vain] == [False] * 4 + [True] * 4
