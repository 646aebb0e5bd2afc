"""Several pickers in virtual time: who hears what and when, and that a burst comes out as if one had decided."""

import random
from collections import Counter

import numpy as np
import pytest

from trimtab_core.placement import Prompt
from trimtab_core.token_table import TokenTable
from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.step_time import StepTime
from trimtab_lab.virtual_fleet import Arrival, run_fleet
from trimtab_lab.virtual_fleet_replicas import Delays, ReplicatedRouter
from trimtab_lab.virtual_words import Words

ENGINES = 4
TOKENS = 64
ROUND_TRIP_S = 0.0005


def test_a_reader_hears_each_word_once_and_each_writers_in_order_whether_it_looks_or_waits() -> None:
    for seed in range(50):
        rng, words = random.Random(seed), Words()
        heard: dict[str, list[tuple[str, int]]] = {"x": [], "y": []}
        sent: Counter[str] = Counter()
        now_s = 0.0
        for _ in range(200):
            now_s += rng.choice((0.0, 0.1, 1.0))
            if rng.random() < 0.6:
                writer = rng.choice("abc")
                sent[writer] += 1
                for reader in heard:

                    def arrive(
                        at_s: float,
                        logged_s: float,
                        to: list[tuple[str, int]] = heard[reader],
                        word: tuple[str, int] = (writer, sent[writer]),
                    ) -> None:
                        assert logged_s <= at_s
                        to.append(word)

                    words.send(
                        writer, reader, logged_s=now_s + rng.random(), due_s=now_s + 3 * rng.random(), arrive=arrive
                    )
            elif rng.random() < 0.5:
                words.read("x", now_s, now_s)
            while words.arrive_by(now_s):
                pass
        while words.arrive_by(now_s + 100.0):
            pass
        for of_reader in heard.values():
            for writer, count in sent.items():
                assert [number for name, number in of_reader if name == writer] == list(range(1, count + 1)), seed


def met(seed: int, *, is_confirmed: bool, bursts: int = 20) -> tuple[int, set[float]]:
    """Requests of bursts, one for each engine, that came to an engine which another one of the burst has; and how long
    after its arrival each was sent."""
    price = StepTime(
        base_s=0.05, prefill_token_s=0.001, decode_request_s=0, prefill_attention_s=0, decode_attention_s=0
    )
    settings = EngineSettings(block_count=512, block_tokens=16, context_tokens_max=1024)
    engines = [EngineModel(settings, price) for _ in range(ENGINES)]
    rng, arrivals, prompts = random.Random(seed), [], {}
    for burst in range(bursts):
        for number in range(ENGINES):
            name = f"{burst}-{number}"
            tokens = [rng.randrange(256) for _ in range(TOKENS)]
            request = EngineRequest(request_id=name, prompt=tokens, output=[1, 2])
            arrivals.append(Arrival(at_s=10.0 * burst + 0.0001 * number, request=request))
            prompts[name] = Prompt(chain=np.zeros(0, dtype=np.uint64), size_bytes=4 * TOKENS)
    router = ReplicatedRouter(
        engines,
        prompts,
        TokenTable.from_pieces([bytes([number]) for number in range(256)]),
        replicas=ENGINES,
        delays=Delays(
            load_s=lambda _: 0.002,
            kv_s=lambda _: 0.005,
            confirm_s=(lambda _: ROUND_TRIP_S) if is_confirmed else None,
            round_trip_s=ROUND_TRIP_S,
        ),
        seed=seed,
        chunk_seed=1,
        root=1,
        tokens_per_byte=0.25,
        confirm_tokens=TOKENS // 2,
        choices_max=4,
    )
    served = run_fleet(engines, arrivals, router)
    router.check(10.0 * bursts + 100.0)
    came_s = {arrival.request.request_id: arrival.at_s for arrival in arrivals}
    engines_of: dict[str, Counter[int]] = {}
    for entry in served:
        engines_of.setdefault(entry.finished.request_id.partition("-")[0], Counter())[entry.engine] += 1
    waited_s = {round(entry.finished.arrived_s - came_s[entry.finished.request_id], 6) for entry in served}
    return sum(count - 1 for burst in engines_of.values() for count in burst.values()), waited_s


@pytest.mark.parametrize("seed", range(5))
def test_confirmed_placement_spreads_a_burst_as_one_picker_would(seed: int) -> None:
    unconfirmed, waited_s = met(seed, is_confirmed=False)
    assert unconfirmed > 5
    assert waited_s == {0.0}
    confirmed, waited_s = met(seed, is_confirmed=True)
    assert confirmed == 0
    assert waited_s >= {ROUND_TRIP_S}
    assert max(waited_s) <= 4 * ROUND_TRIP_S
