"""What the extensions of the score buy and what they cost: emulated engines in virtual time, one picker in front.

    python bench/extensions.py [--only logarithm,network,classes,limit,priorities,experts] [--seeds 6] [--seconds 40]
                               [--quick]

Each experiment runs the same requests under several settings; the first is the plain product. A row shows the mean and
the 95th percentile of the time to first token, and the mean time of a token after it, of one kind of request, over all
seeds; `ttft_ratio` and `tpot_ratio` are the geometric means of the seeds' ratios to the plain product on the same
requests, each with its relative standard error (`_se`). `again` is the plain product once more with other draws among
equals: what is no further from 1 than it is noise. A run is a function of its seed. Every request has to be answered
or refused, or no figure is given.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from trimtab_core.extra_terms import ExtraTerms
from trimtab_extproc.wait_queue import Waiter, WaitQueue
from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.expert_parallel import ExpertParallel
from trimtab_lab.virtual_picker import VOCABULARY, Asked, VirtualPicker, VirtualPolicy, token_table

Row = dict[str, object]
TABLE = token_table()
SYSTEM_TOKENS = 512
SYSTEMS = 4
CONTINUES = 0.7
"""Of the requests that are a conversation's next turn."""
THINK_S = 2.0


def tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=count)


@dataclass
class Talk:
    """A conversation: what the next prompt begins with, and when it can be sent."""

    text: list[int]
    ready_s: float


@dataclass
class Load:
    """Requests in order of time."""

    rng: random.Random
    asked: list[Asked] = field(default_factory=list)
    talks: list[Talk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.systems = [tokens(self.rng, SYSTEM_TOKENS) for _ in range(SYSTEMS)]

    def chat(self, at_s: float, *, new_tokens: tuple[int, int], output: tuple[int, int], **fields: Any) -> None:
        """A turn of a conversation: of one that waits for its next, or of a new one."""
        rng = self.rng
        ready = [talk for talk in self.talks if talk.ready_s <= at_s]
        talk = rng.choice(ready) if ready and rng.random() < CONTINUES else None
        if talk is None:
            talk = Talk(list(rng.choice(self.systems)), 0.0)
            self.talks.append(talk)
        prompt = talk.text + tokens(rng, rng.randint(*new_tokens))
        answer = tokens(rng, rng.randint(*output))
        talk.text, talk.ready_s = prompt + answer, at_s + THINK_S + 0.03 * len(answer)
        if len(talk.text) > 6_000:
            self.talks.remove(talk)
        self.add(at_s, prompt, answer, **fields)

    def add(self, at_s: float, prompt: list[int], answer: list[int], *, experts: Any = None, **fields: Any) -> None:
        name = str(len(self.asked))
        request = EngineRequest(request_id=name, prompt=prompt, output=answer, experts=experts)
        self.asked.append(Asked(at_s=at_s, request=request, **fields))


def times(rng: random.Random, rate_per_s: float, seconds: float) -> Iterator[float]:
    at_s = rng.expovariate(rate_per_s)
    while at_s < seconds:
        yield at_s
        at_s += rng.expovariate(rate_per_s)


def engines(count: int, **settings: Any) -> list[EngineModel]:
    fields = {"block_count": 8_192, "context_tokens_max": 16_384, "batched_tokens_max": 2_048} | settings
    return [EngineModel(EngineSettings(**fields)) for _ in range(count)]


@dataclass(frozen=True)
class Setting:
    """One way to run a load."""

    name: str
    policy: VirtualPolicy
    fleet: Callable[[], list[EngineModel]]
    round_trips_s: Sequence[float] | None = None
    line: Callable[[], Any] = lambda: None
    draws: int = 0

    def run(self, load: Callable[[int], Load], seed: int) -> list[Asked]:
        asked = load(seed).asked
        picker = VirtualPicker(
            self.fleet(),
            seed=seed + 1_000 * self.draws,
            policy=self.policy,
            round_trips_s=self.round_trips_s,
            line=self.line(),
            table=TABLE,
        )
        picker.run(asked)
        if any(each.finished_s is None and not each.is_refused for each in asked):
            raise SystemExit("requests were lost; no figure is given")
        return asked


def figures(runs: list[list[Asked]], plain: list[list[Asked]], kind: str) -> Row:
    of_kind = [[each for each in run if each.kind == kind] for run in runs]
    served = [each for run in of_kind for each in run if not each.is_refused]
    ttft_s = sorted(each.ttft_s for each in served)
    tpot_s = [tpot for each in served if (tpot := each.tpot_s) is not None]
    prompts = sum(len(each.request.prompt) for each in served)
    return {
        "ttft_mean_ms": round(1e3 * statistics.mean(ttft_s), 1),
        "ttft_p95_ms": round(1e3 * ttft_s[int(0.95 * len(ttft_s))], 1),
        "tpot_ms": round(1e3 * statistics.mean(tpot_s), 2),
        "hit": round(sum(each.cached_tokens for each in served) / prompts, 3),
        "refused": round(1 - len(served) / sum(map(len, of_kind)), 4),
        **ratio("ttft", [[mean(run, kind, "ttft_s") for run in each] for each in (runs, plain)]),
        **ratio("tpot", [[mean(run, kind, "tpot_s") for run in each] for each in (runs, plain)]),
    }


def mean(run: list[Asked], kind: str, what: str) -> float:
    values = [getattr(each, what) for each in run if each.kind == kind and not each.is_refused]
    return float(statistics.mean(value for value in values if value is not None))


def ratio(name: str, means: list[list[float]]) -> Row:
    """Of the first to the second, seed by seed."""
    logs = [math.log(these / those) for these, those in zip(*means, strict=True)]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    return {f"{name}_ratio": round(math.exp(statistics.mean(logs)), 3), f"{name}_se": round(error, 3)}


def compared(experiment: str, load: Callable[[int], Load], settings: list[Setting], seeds: int) -> Iterator[Row]:
    """Rows of each setting and kind; the first setting is what the others are compared with."""
    first = settings[0]
    again = Setting("again", first.policy, first.fleet, first.round_trips_s, first.line, draws=1)
    plain: list[list[Asked]] = []
    for setting in [first, again, *settings[1:]]:
        runs = [setting.run(load, seed) for seed in range(seeds)]
        plain = plain or runs
        for kind in sorted({each.kind for each in plain[0]}):
            yield {"experiment": experiment, "setting": setting.name, "kind": kind} | figures(runs, plain, kind)


def always(terms: ExtraTerms, _: Asked) -> ExtraTerms:
    """For every request."""
    return terms


# The experiments.


def logarithm(seeds: int, seconds: float) -> Iterator[Row]:
    """Chats, and one request in thirty with a document of 20k to 90k tokens."""

    def load(seed: int) -> Load:
        made = Load(random.Random(seed))
        for at_s in times(made.rng, 9.0, seconds):
            if made.rng.random() < 1 / 30:
                document = tokens(made.rng, made.rng.randint(20_000, 90_000))
                made.add(at_s, document, tokens(made.rng, 100), kind="long")
            else:
                made.chat(at_s, new_tokens=(100, 1_000), output=(40, 160), kind="chat")
        return made

    def fleet() -> list[EngineModel]:
        return engines(6, block_count=16_384, context_tokens_max=131_072, batched_tokens_max=4_096)

    def above(threshold: float) -> VirtualPolicy:
        return VirtualPolicy(extra=lambda _: ExtraTerms(log_above_tokens=threshold))

    settings = [Setting("off", VirtualPolicy(), fleet)]
    settings += [Setting(f"above {n:,}", above(float(n)), fleet) for n in (1_024, 8_192, 32_768)]
    yield from compared("logarithm", load, settings, seeds)


def network(seeds: int, seconds: float) -> Iterator[Row]:
    """Three engines near (1 ms) and three far; at a low and a high rate."""
    for far_ms in (30, 150):
        for rate in (4.0, 24.0):

            def load(seed: int, rate: float = rate, kind: str = f"{rate:g}/s, far {far_ms} ms") -> Load:
                made = Load(random.Random(seed))
                for at_s in times(made.rng, rate, seconds):
                    made.chat(at_s, new_tokens=(100, 1_000), output=(30, 90), kind=kind)
                return made

            trips_s = [0.001] * 3 + [far_ms / 1e3] * 3
            known = ExtraTerms(rtt_s=np.array(trips_s))
            settings = [
                Setting("off", VirtualPolicy(), lambda: engines(6), trips_s),
                Setting("on", VirtualPolicy(extra=partial(always, known)), lambda: engines(6), trips_s),
            ]
            yield from compared("network", load, settings, seeds)


def classes(seeds: int, seconds: float) -> Iterator[Row]:
    """Gold requests among others: few in a fleet with room, few in a busy one, and many in a busy one."""
    for rate, share in ((12.0, 1 / 30), (20.0, 1 / 30), (20.0, 1 / 6)):

        def load(seed: int, rate: float = rate, share: float = share) -> Load:
            made = Load(random.Random(seed))
            for at_s in times(made.rng, rate, seconds):
                kind = "gold" if made.rng.random() < share else "other"
                made.chat(at_s, new_tokens=(200, 1_500), output=(60, 240), kind=f"{kind}, {share:.0%} of {rate:g}/s")
            return made

        def weight(milli: int) -> VirtualPolicy:
            gold = ExtraTerms(weight_milli=milli)
            return VirtualPolicy(extra=lambda asked: gold if asked.kind.startswith("gold") else None)

        settings = [Setting("off", VirtualPolicy(), lambda: engines(4))]
        settings += [Setting(f"gold x {n}", weight(1_000 * n), lambda: engines(4)) for n in (4, 16)]
        yield from compared("classes", load, settings, seeds)


class ByTenant:
    """The picker's own queue, as the virtual picker wants a line."""

    def __init__(self, priority: Callable[[Asked], int] = lambda _: 0) -> None:
        self._priority = priority
        self._queue: WaitQueue[Asked] = WaitQueue()
        self._waiters: dict[str, Waiter[Asked]] = {}

    def add(self, asked: Asked) -> None:
        priority = self._priority(asked)
        waiter = Waiter(
            item=asked, group="", tenant=asked.tenant, since_s=asked.at_s, deadline_s=math.inf, priority=priority
        )
        self._waiters[asked.request.request_id] = waiter
        self._queue.add(waiter, waiting_max=100_000)

    def first(self) -> Asked | None:
        waiter = self._queue.next_of([""])
        return None if waiter is None else waiter.item

    def take(self, asked: Asked) -> None:
        waiter = self._waiters.pop(asked.request.request_id)
        if self._queue.next_of([""]) is waiter:
            self._queue.take(waiter)
        else:
            self._queue.remove(waiter)

    def all(self) -> list[Asked]:
        return [waiter.item for waiter in self._waiters.values()]


def limit(seeds: int, seconds: float) -> Iterator[Row]:
    """Bursts of one tenant that fill the fleet, and another tenant's even trickle."""

    def load(seed: int) -> Load:
        made = Load(random.Random(seed))
        moments = [(at_s, "trickle") for at_s in times(made.rng, 2.0, seconds)]
        for start_s in np.arange(2.0, seconds - 4.0, 15.0):
            moments += [(start_s + at_s, "burst") for at_s in times(made.rng, 60.0, 2.5)]
        for at_s, kind in sorted(moments):
            made.chat(at_s, new_tokens=(200, 1_500), output=(100, 200), kind=kind, tenant=kind)
        return made

    def fleet() -> list[EngineModel]:
        return engines(4)

    settings = [
        Setting("no limit", VirtualPolicy(), fleet),
        Setting("12, refused", VirtualPolicy(batch_max=12), fleet),
        Setting("12, waits 10 s, one line", VirtualPolicy(batch_max=12, wait_s=10.0), fleet),
        Setting("12, waits 10 s, by tenant", VirtualPolicy(batch_max=12, wait_s=10.0), fleet, line=ByTenant),
    ]
    yield from compared("limit", load, settings, seeds)


def priorities(seeds: int, seconds: float) -> Iterator[Row]:
    """The bursts of `limit`, of requests of three objectives alike: one in ten is gold, one in three may be shed."""

    def load(seed: int) -> Load:
        made = Load(random.Random(seed))
        moments = list(times(made.rng, 2.0, seconds))
        for start_s in np.arange(2.0, seconds - 4.0, 15.0):
            moments += [start_s + at_s for at_s in times(made.rng, 60.0, 2.5)]
        for at_s in sorted(moments):
            (kind,) = made.rng.choices(("gold", "ordinary", "sheddable"), (3, 17, 10))
            made.chat(at_s, new_tokens=(200, 1_500), output=(100, 200), kind=kind)
        return made

    ranks = {"gold": 10, "ordinary": 0, "sheddable": -1}

    def priority(asked: Asked) -> int:
        return ranks[asked.kind]

    def waits(ranked: Callable[[Asked], int]) -> Callable[[], ByTenant]:
        return lambda: ByTenant(ranked)

    def not_shed(asked: Asked) -> int:
        return max(0, priority(asked))

    def fleet() -> list[EngineModel]:
        return engines(4)

    limited = partial(VirtualPolicy, batch_max=12, wait_s=10.0)
    settings = [
        Setting("all alike", limited(), fleet, line=ByTenant),
        Setting("gold first", limited(priority=not_shed), fleet, line=waits(not_shed)),
        Setting("gold first, shed", limited(priority=priority), fleet, line=waits(priority)),
    ]
    yield from compared("priorities", load, settings, seeds)


EXPERTS = 64
DEVICES = 8
HOT = tuple(8.0 if expert < 8 else 0.15 for expert in range(EXPERTS))
"""Of code: nine picks in ten fall on eight of the experts."""
COLD = tuple(0.15 if expert < 8 else 1.0 for expert in range(EXPERTS))
SPREAD = ExpertParallel(tuple(expert % DEVICES for expert in range(EXPERTS)), (1.0,) * DEVICES)
PACKED = ExpertParallel(tuple(expert // DEVICES for expert in range(EXPERTS)), (1.0,) * DEVICES)


def experts(seeds: int, seconds: float) -> Iterator[Row]:
    """A mixture-of-experts model, on four engines with the experts that code uses spread over their devices, and on
    four with all of those on one device. A third of the requests are code."""

    def load(seed: int) -> Load:
        made = Load(random.Random(seed))
        for at_s in times(made.rng, 8.0, seconds):
            kind = "code" if made.rng.random() < 1 / 3 else "chat"
            mix = HOT if kind == "code" else COLD
            made.chat(at_s, new_tokens=(200, 1_500), output=(40, 160), kind=kind, experts=mix)
        return made

    placed = [SPREAD] * 4 + [PACKED] * 4

    def fleet() -> list[EngineModel]:
        settings = EngineSettings(block_count=8_192, context_tokens_max=16_384)
        return [EngineModel(settings, experts=where) for where in placed]

    mixed = tuple((hot / sum(HOT) + 2 * cold / sum(COLD)) / 3 for hot, cold in zip(HOT, COLD, strict=True))
    costs = [where.costs(mixed) for where in placed]

    def factor(mix: tuple[float, ...]) -> ExtraTerms:
        expected = [sum(p * cost for p, cost in zip(mix, of, strict=True)) / sum(mix) for of in costs]
        return ExtraTerms(expert_factor=np.array(expected))

    terms = {"code": factor(HOT), "chat": factor(COLD)}
    settings = [
        Setting("off", VirtualPolicy(), fleet),
        Setting("on", VirtualPolicy(extra=lambda asked: terms[asked.kind]), fleet),
    ]
    yield from compared("experts", load, settings, seeds)


EXPERIMENTS = {each.__name__: each for each in (logarithm, network, classes, limit, priorities, experts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="which ones, comma-separated")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=40.0, help="of traffic, in virtual time")
    parser.add_argument("--quick", action="store_true", help="to see that it works, not for figures")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    seeds, seconds = (2, 10.0) if arguments.quick else (arguments.seeds, arguments.seconds)
    for name in arguments.only.split(","):
        for row in EXPERIMENTS[name](seeds, seconds):
            words = "  ".join(f"{key} {value}" for key, value in row.items())
            print(json.dumps(row) if arguments.json else words, flush=True)


if __name__ == "__main__":
    main()
