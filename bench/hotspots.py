"""What the hotspot detector does to hotspots, and to traffic that has none: emulated engines in virtual time.

    python bench/hotspots.py [--only burst,common,ordinary,fallback] [--seeds 8] [--trace FILE] [--plot FILE] [--quick]

- `burst`: one prefix class as reasoning models make it: a long document that one engine holds, and for a minute many
  requests with long answers about it, among others that share nothing with it but a system prompt.
- `common`: a system prompt that all requests begin with.
- `ordinary`: traffic that nobody calls a hotspot: the shipped conversations, and fifty applications that are asked
  equally often, or some much more than others.
- `fallback`: a hotspot of five minutes, with the operator's fallback and its defaults: the way into round robin and
  back.

Settings: `alarm` (places as a picker without a detector does, and counts alarms), `again` (the same with other draws
among equals) and `act`. Each serves the same requests. Ratios to `alarm` are geometric means over the seeds, with their
relative standard errors (`_se`); what is no further from 1 than `again` is noise. `alarms`: raised in one run;
`alarm_s`: for how long there was one; `alarms_per_hour`: the same per hour of traffic. Where none was raised `act`
would be the same again, and is left out.

One JSON object a line. A run is a function of its seed. Every request has to be answered, or no figure is given.
"""

import argparse
import json
import logging
import math
import random
import statistics
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from trimtab_core.hotspot import HotspotSettings
from trimtab_extproc.hotspot_watch import HotspotWatch
from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.trace import SHIPPED_TRACE, at_rate, load_trace, shorter, spread, whole_sessions
from trimtab_lab.virtual_picker import VOCABULARY, Asked, VirtualPicker, VirtualPolicy, token_table
from trimtab_operator.api.policy import Fallback
from trimtab_operator.fallback import FallbackState

Row = dict[str, object]
TABLE = token_table()
ENGINES = 8
TELLS = HotspotSettings(acts=False)
SETTINGS = {"alarm": TELLS, "again": TELLS, "act": HotspotSettings()}
APPLICATIONS = 24
SYSTEM_TOKENS, APPLICATION_TOKENS = 400, 1_200
DIVISOR = 8
"""Of the trace's lengths."""
BURSTS = ((3.0, 8_000, (200, 600)), (4.0, 8_000, (600, 1_800)), (5.0, 24_000, (100, 300)))
"""Requests a second, tokens of the document, and of the answers."""
FALLBACK_BEGIN_S, FALLBACK_END_S, FALLBACK_S = 60.0, 360.0, 960.0


@dataclass
class Load:
    """Requests in order of time."""

    asked: list[Asked] = field(default_factory=list)

    def add(self, at_s: float, prompt: list[int], answer_tokens: int, kind: str) -> None:
        request = EngineRequest(request_id=str(len(self.asked)), prompt=prompt, output=[1] * answer_tokens)
        self.asked.append(Asked(at_s=at_s, request=request, kind=kind))


def tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=count)


def times(rng: random.Random, rate_per_s: float, start_s: float, end_s: float) -> Iterator[float]:
    at_s = start_s + rng.expovariate(rate_per_s)
    while at_s < end_s:
        yield at_s
        at_s += rng.expovariate(rate_per_s)


def engines(count: int = ENGINES, **settings: Any) -> list[EngineModel]:
    fields = {"block_count": 8_192, "context_tokens_max": 32_768, "batched_tokens_max": 2_048} | settings
    return [EngineModel(EngineSettings(**fields)) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one request."""

    kind: str
    at_s: float
    engine: int | None
    ttft_s: float
    tpot_s: float | None
    prompt_tokens: int
    cached_tokens: int


class Run:
    """One load under one setting; `outcomes` in the order of the requests."""

    def __init__(
        self,
        load: Load,
        setting: str,
        seed: int,
        *,
        count: int = ENGINES,
        fallback: Fallback | None = None,
    ) -> None:
        self.raised = self.acted = 0
        self.alarm_s = 0.0
        """How long there was an alarm."""
        self.switches: list[tuple[float, str]] = []
        self.alarms: list[float] = []
        """When the shared state was told of one."""
        self._state = FallbackState()
        self._fallback = fallback
        self._next_s = self._last_s = 0.0
        self._watch: HotspotWatch | None = None
        picker = VirtualPicker(
            engines(count),
            seed=seed + 1_000 * (setting == "again"),
            policy=VirtualPolicy(),
            table=TABLE,
            hotspots=SETTINGS[setting],
            on_tick=self._tick,
        )
        picker.run(load.asked)
        if any(each.finished_s is None for each in load.asked):
            raise SystemExit("requests were lost; no figure is given")
        self.outcomes = [
            Outcome(
                kind=each.kind,
                at_s=each.at_s,
                engine=each.engine,
                ttft_s=each.ttft_s,
                tpot_s=each.tpot_s,
                prompt_tokens=len(each.request.prompt),
                cached_tokens=each.cached_tokens,
            )
            for each in load.asked
        ]
        view = picker.hotspots()
        self.raised, self.acted = view.raised, view.acted

    def _tick(self, picker: VirtualPicker, now_s: float) -> None:
        """The picker's watch, and every 2 s the operator, with nothing but time between them."""
        view = picker.hotspots()
        self.alarm_s += (now_s - self._last_s) * bool(view.hotspots)
        self._last_s = now_s
        if self._fallback is None:
            return
        if self._watch is None:
            self._watch = HotspotWatch(
                view=picker.hotspots,
                window_s=lambda: 60.0,
                writer=None,  # type: ignore[arg-type]  # nothing is written: what it would write goes on from here
                replica=lambda: 0,
                clock=lambda: now_s,
            )
        for alarm in self._watch.look(now_s):
            if alarm.raised:
                self._state.alarm(alarm.prefix_class, now_s)
                self.alarms.append(now_s)
        if now_s >= self._next_s:
            self._next_s = now_s + 2.0
            self._state.heard(now_s)
            decision = self._state.decide(now_s, self._fallback, "Auto")
            if decision.policy != picker.policy.policy:
                self.switches.append((now_s, decision.policy))
                picker.policy = replace(picker.policy, policy=decision.policy)


def summary(runs: Sequence[Run], plain: Sequence[Run], kind: str) -> Row:
    served = [each for run in runs for each in run.outcomes if each.kind == kind]
    ttft_s = sorted(each.ttft_s for each in served)
    tpot_s = [tpot for each in served if (tpot := each.tpot_s) is not None]
    row: Row = {
        "ttft_mean_ms": round(1e3 * statistics.mean(ttft_s), 1),
        "ttft_p95_ms": round(1e3 * ttft_s[int(0.95 * len(ttft_s))], 1),
        "ttft_p99_ms": round(1e3 * ttft_s[int(0.99 * len(ttft_s))], 1),
        "tpot_ms": round(1e3 * statistics.mean(tpot_s), 2),
        "hit": round(sum(each.cached_tokens for each in served) / sum(each.prompt_tokens for each in served), 4),
    }
    for what in ("ttft_s", "tpot_s"):
        logs = [math.log(mean(a, kind, what) / mean(b, kind, what)) for a, b in zip(runs, plain, strict=True)]
        error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
        row |= {f"{what[:4]}_ratio": round(math.exp(statistics.mean(logs)), 3), f"{what[:4]}_se": round(error, 3)}
    return row


def mean(run: Run, kind: str, what: str) -> float:
    values = [getattr(each, what) for each in run.outcomes if each.kind == kind]
    return float(statistics.mean(value for value in values if value is not None))


def compared(
    experiment: str, load: Callable[[int], Load], seeds: int, settings: Sequence[str] = tuple(SETTINGS), **of_run: Any
) -> Iterator[Row]:
    plain: list[Run] = []
    for setting in settings:
        if setting == "act" and not any(run.raised for run in plain):
            continue  # there is nothing to act on: the same again
        runs = [Run(load(seed), setting, seed, **of_run) for seed in range(seeds)]
        plain = plain or runs
        for kind in sorted({each.kind for each in plain[0].outcomes}):
            yield {
                "experiment": experiment,
                "setting": setting,
                "kind": kind,
                **summary(runs, plain, kind),
                "alarms": round(statistics.mean(run.raised for run in runs), 2),
                "alarm_s": round(statistics.mean(run.alarm_s for run in runs), 1),
            }


# The loads.


def burst_load(
    seed: int,
    *,
    rate: float,
    document_tokens: int = 8_000,
    answer: tuple[int, int] = (200, 600),
    begin_s: float = 40.0,
    end_s: float = 110.0,
    seconds: float = 150.0,
    others_rate: float = 6.0,
) -> Load:
    """One engine has held the document for a while when the burst begins: it was asked about now and then."""
    rng = random.Random(seed)
    system = tokens(rng, SYSTEM_TOKENS)
    applications = [system + tokens(rng, APPLICATION_TOKENS) for _ in range(APPLICATIONS)]
    document = system + tokens(rng, document_tokens)
    moments = [(at_s, "others") for at_s in times(rng, others_rate, 0.0, seconds)]
    moments += [(at_s, "class") for at_s in times(rng, 0.2, 0.0, begin_s)]
    moments += [(at_s, "class") for at_s in times(rng, rate, begin_s, end_s)]
    load = Load()
    for at_s, kind in sorted(moments):
        if kind == "class":
            load.add(at_s, document + tokens(rng, rng.randint(40, 160)), rng.randint(*answer), kind)
        else:
            load.add(at_s, rng.choice(applications) + tokens(rng, rng.randint(40, 400)), rng.randint(30, 90), kind)
    return load


def common_load(seed: int, *, rate: float = 12.0, seconds: float = 180.0) -> Load:
    """Everybody's prompt begins with the same 2,000 tokens, and then there are conversations."""
    rng = random.Random(seed)
    system = tokens(rng, 2_000)
    load = Load()
    talks = [list(system) for _ in range(60)]
    for at_s in times(rng, rate, 0.0, seconds):
        number = rng.randrange(len(talks))
        prompt = talks[number] + tokens(rng, rng.randint(40, 300))
        answer = rng.randint(30, 150)
        talks[number] = prompt + [1] * answer
        if len(talks[number]) > 8_000:
            talks[number] = list(system)
        load.add(at_s, prompt, answer, "all")
    return load


def trace_load(seed: int, *, path: Path, rate: float, seconds: float) -> Load:
    """Conversations of a trace, their blocks made of tokens drawn from the block's number."""
    requests = spread(whole_sessions(load_trace(path), seed=seed), seed=seed)
    start = random.Random(seed).randrange(max(1, len(requests) - int(rate * seconds)))
    requests = at_rate(shorter(requests[start : start + int(rate * seconds)], DIVISOR), rate)
    load = Load()
    for request in requests:
        prompt: list[int] = []
        for block in request.block_ids:
            prompt += tokens(random.Random(block), request.block_tokens)
        load.add(request.at_s, prompt[: request.prompt_tokens], request.output_tokens, "all")
    return load


def applications_load(seed: int, *, popularity: float, rate: float, seconds: float) -> Load:
    """Fifty applications with prompts of 300 to 3,000 tokens; the n-th most popular is asked 1/n^popularity as often
    as the first."""
    rng = random.Random(seed)
    system = tokens(rng, SYSTEM_TOKENS)
    applications = [system + tokens(rng, rng.randint(300, 3_000)) for _ in range(50)]
    shares = list(accumulate((n + 1) ** -popularity for n in range(50)))
    load = Load()
    for at_s in times(rng, rate, 0.0, seconds):
        chosen = applications[bisect(shares, rng.random() * shares[-1])]
        load.add(at_s, chosen + tokens(rng, rng.randint(40, 400)), rng.randint(30, 150), "all")
    return load


# The experiments.


def burst(seeds: int, _: argparse.Namespace) -> Iterator[Row]:
    for rate, document, answer in BURSTS:
        name = f"burst of {rate:g}/s, document of {document:,} tokens, answers of {answer[0]} to {answer[1]:,}"
        yield from compared(name, partial(burst_load, rate=rate, document_tokens=document, answer=answer), seeds)


def common(seeds: int, _: argparse.Namespace) -> Iterator[Row]:
    for count in (4, 8, 16):
        yield from compared(f"common, {count} engines", common_load, seeds, ("alarm",), count=count)


def ordinary(seeds: int, options: argparse.Namespace) -> Iterator[Row]:
    seconds = 60.0 if options.quick else 240.0
    loads: dict[str, Callable[..., Load]] = {
        "trace": partial(trace_load, path=options.trace, seconds=seconds),
        "even": partial(applications_load, popularity=0.0, seconds=seconds),
        "popular": partial(applications_load, popularity=1.0, seconds=seconds),
    }
    for name, load in loads.items():
        for count, rate in ((4, 4.0), (8, 12.0), (16, 16.0)):
            experiment = f"ordinary, {name}, {count} engines, {rate:g}/s"
            for row in compared(experiment, partial(load, rate=rate), seeds, ("alarm", "act"), count=count):
                yield row | {"alarms_per_hour": round(float(str(row["alarms"])) * 3600 / seconds, 2)}


def fallback_runs(seeds: int, setting: str, *, is_quick: bool) -> list[Run]:
    end_s, seconds = (180.0, 700.0) if is_quick else (FALLBACK_END_S, FALLBACK_S)
    return [
        Run(
            burst_load(seed, rate=6.0, begin_s=FALLBACK_BEGIN_S, end_s=end_s, seconds=seconds),
            setting,
            seed,
            fallback=Fallback(),
        )
        for seed in range(seeds)
    ]


def fallback(seeds: int, options: argparse.Namespace) -> Iterator[Row]:
    plain: list[Run] = []
    for setting in ("alarm", "act"):
        runs = fallback_runs(seeds, setting, is_quick=options.quick)
        plain = plain or runs
        yield {
            "experiment": "fallback",
            "setting": setting,
            "switches": [[(round(at_s), to) for at_s, to in run.switches] for run in runs],
            "alarms_raised": [run.raised for run in runs],
            "alarms_told": [len(run.alarms) for run in runs],
            **{kind: summary(runs, plain, kind) for kind in ("class", "others")},
        }


def plot(path: Path) -> None:
    """A burst with and without acting, and the way into round robin and back; seed 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rate, document, answer = BURSTS[-1]
    load = partial(burst_load, 0, rate=rate, document_tokens=document, answer=answer)
    runs = {name: Run(load(), name, 0) for name in ("alarm", "act")}
    names = {"alarm": "alarms alone", "act": "acted on"}
    colours = {"alarm": "#ea580c", "act": "#2563eb"}
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
        for name, run in runs.items():
            points = [
                (each.at_s, 1e3 * tpot) for each in run.outcomes if each.kind == "class" and (tpot := each.tpot_s)
            ]
            left.plot(*zip(*points, strict=True), ".", color=colours[name], markersize=3, label=names[name])
            counts = [
                sum(each.engine == slot and each.kind == "class" for each in run.outcomes) for slot in range(ENGINES)
            ]
            places = [slot + (0.2 if name == "act" else -0.2) for slot in range(ENGINES)]
            middle.bar(places, sorted(counts, reverse=True), 0.4, color=colours[name], label=names[name])
        left.set(title="A burst: time per token of the class", xlabel="request sent, s", ylabel="ms per token")
        left.set_ylim(0)
        left.legend(frameon=False)
        middle.set(title="Requests of the class by engine", xlabel="engines, the busiest first")
        (run,) = fallback_runs(1, "alarm", is_quick=False)
        right.axvspan(FALLBACK_BEGIN_S, FALLBACK_END_S, color="#fde68a", label="hotspot")
        right.plot(run.alarms, [0.5] * len(run.alarms), "|", color="#b91c1c", markersize=14, label="alarms told")
        steps = [(0.0, "product"), *run.switches, (FALLBACK_S, run.switches[-1][1] if run.switches else "product")]
        right.step(
            [at_s for at_s, _ in steps], [policy == "round_robin" for _, policy in steps], where="post", color="#1f2430"
        )
        right.set(title="Alarms alone: into round robin and back", xlabel="s")
        right.set_yticks([0, 1], ["product", "round\nrobin"])
        right.legend(frameon=False, loc="center right")
        figure.savefig(path, dpi=130, facecolor="white")
        pyplot.close(figure)


EXPERIMENTS = {"burst": burst, "common": common, "ordinary": ordinary, "fallback": fallback}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--trace", type=Path, default=SHIPPED_TRACE)
    parser.add_argument("--quick", action="store_true", help="to see that it works, not for figures")
    parser.add_argument("--plot", type=Path, help="draw a picture as well")
    options = parser.parse_args()
    logging.disable()  # what the watch says
    for name in filter(None, options.only.split(",")):
        for row in EXPERIMENTS[name](2 if options.quick else options.seeds, options):
            print(json.dumps(row), flush=True)
    if options.plot is not None:
        plot(options.plot)


if __name__ == "__main__":
    main()
