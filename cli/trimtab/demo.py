"""`trimtab demo`: the same conversations through round robin and through Trimtab, and what came out.

Its one rule: both replays are the same requests at the same times on fresh engines; only who chooses differs. It must
not change a figure on its way from the report.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from tqdm import tqdm

from trimtab.commands import MODEL_NAME
from trimtab.decision_times import decision_times
from trimtab.demo_plan import DemoPlan, emulated_plan, real_plan
from trimtab.engine_choice import EngineChoice
from trimtab.machine_load import CpuTimes, busy_share
from trimtab.output_file import cannot_be_written, check_output_file
from trimtab.probes import get_text
from trimtab.stack import Stack, StackSettings, running
from trimtab_core.selection import CORE_NAME, CORE_REASON
from trimtab_lab.replay import Progress, ReplaySettings, RequestResult, replay
from trimtab_lab.report import Summary, plot, summarise, table

PICKERS: Final = 2
BUSY_SHARE_MAX: Final = 0.85
"""Above it, times are made by this machine's CPU as much as by scheduling, and the demo says so."""
LATE_S_MAX: Final = 0.25
"""A client that sends later than this (99th percentile) was starved."""
TIMEOUT_S: Final = 120.0
PLOT_SUFFIXES: Final = (".png", ".svg", ".pdf", ".jpg")
POLICIES: Final = ("round_robin", "trimtab")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line says."""

    choice: EngineChoice
    trace: Path | None
    rate: float | None
    """Requests per second; None: what fits the engines."""
    json_path: Path | None
    plot_path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One replay."""

    policy: str
    results: list[RequestResult]
    summary: Summary
    busy_share: float | None
    """Of the machine's CPU; None where the system does not say."""
    unchosen: int
    """Requests that Envoy sent on without a picker's choice, because the pickers were late or away."""


async def demo(options: DemoOptions, *, say: Callable[[str], None]) -> None:
    """Run it all and print. Raises ProcessError if a part fails, UsageError before anything is started or, where a file
    cannot be written after all, at the end.
    """
    started_s = time.monotonic()
    vllm = options.choice.vllm_command()
    if options.json_path is not None:
        check_output_file("--json", options.json_path)
    check_output_file("--plot", options.plot_path, suffixes=PLOT_SUFFIXES)
    plan = _plan(options)
    endpoints = options.choice.endpoint_count
    # A failed build has a whole log for its reason.
    reason = CORE_REASON.partition("\n")[0]
    kind = "real vLLM servers" if vllm else "emulated vLLM pods"
    say(
        f"{len(plan.sendings)} requests of {plan.sessions} conversations at {plan.rate_per_s:g}/s to {endpoints} "
        f"{kind}, lengths divided by {plan.divisor}. First round robin, then Trimtab with {PICKERS} pickers on the "
        f"{CORE_NAME} core ({reason}). Sending takes {_duration(plan.run_s)} in all; starts and last answers come "
        "on top."
    )
    arms: list[Arm] = []
    for policy in POLICIES:
        settings = StackSettings(
            endpoints=endpoints,
            pickers=PICKERS if policy == "trimtab" else 0,
            engine_flags=plan.engine_flags,
            vllm=vllm,
        )
        say(f"Starting {'everything' if settings.pickers else 'Envoy and engines'} ...")
        async with running(settings) as stack:
            arms.append(await stack.supervisor.guard(_replayed(policy, stack, plan)))
    say("")
    say(table({arm.policy: arm.summary for arm in arms}))
    if vllm:
        say("\nNote: the tiny model computes a prompt in next to no time. Compare the prefix hits, not the times.")
    for warning in warnings(arms):
        say(f"\nNote: {warning}")
    if options.json_path is not None:
        try:
            options.json_path.write_text(json.dumps(document(plan, arms), indent=2) + "\n")
        except OSError as error:
            raise cannot_be_written("--json", options.json_path, error) from error
        say(f"\nFigures: {options.json_path}")
    title = f"{len(plan.sendings)} requests of the trace at {plan.rate_per_s:g}/s, {endpoints} endpoints"
    if any(arm.summary["ttft_p50_s"] is not None for arm in arms):
        try:
            await asyncio.to_thread(plot, {arm.policy: arm.results for arm in arms}, options.plot_path, title=title)
        except OSError as error:
            raise cannot_be_written("--plot", options.plot_path, error) from error
        say(f"Plot: {options.plot_path}")
    say(f"Done in {time.monotonic() - started_s:.0f} s.")


def document(plan: DemoPlan, arms: Sequence[Arm]) -> dict[str, Any]:
    """What `--json` writes: an object for each policy, and the run's circumstances."""
    return {
        **{arm.policy: arm.summary for arm in arms},
        "run": {
            "core": CORE_NAME,
            "requests": len(plan.sendings),
            "sessions": plan.sessions,
            "rate_per_s": plan.rate_per_s,
            "length_divisor": plan.divisor,
            "cpu_busy_share": {arm.policy: arm.busy_share for arm in arms},
            "unchosen_requests": {arm.policy: arm.unchosen for arm in arms},
        },
    }


def warnings(arms: Sequence[Arm]) -> list[str]:
    """What a reader has to know before believing the figures."""
    found = []
    for arm in arms:
        late = sorted(result.late_s for result in arm.results)[int(0.99 * (len(arm.results) - 1))]
        if arm.busy_share is not None and arm.busy_share > BUSY_SHARE_MAX:
            found.append(
                f"{arm.policy}: the machine's CPU was {arm.busy_share:.0%} busy, so times are partly its own. "
                "A lower --rate or fewer --endpoints gives cleaner figures."
            )
        if late > LATE_S_MAX:
            found.append(f"{arm.policy}: requests left up to {late:.2f} s late, the machine was too busy to send them.")
        if arm.unchosen:
            found.append(
                f"{arm.policy}: {arm.unchosen} requests went on by round robin, since no picker answered in time."
            )
        failed = [result for result in arm.results if not result.is_ok]
        if failed:
            found.append(f"{arm.policy}: {len(failed)} requests failed, the first one with: {failed[0].error}")
    return found


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _plan(options: DemoOptions) -> DemoPlan:
    choice = options.choice
    if not choice.is_real:
        return emulated_plan(trace=options.trace, rate_per_s=options.rate, endpoints=choice.endpoint_count)
    return real_plan(
        trace=options.trace,
        rate_per_s=options.rate,
        endpoints=choice.endpoint_count,
        context_tokens=choice.context_tokens,
        engine_flags=choice.vllm_flags(),
    )


async def _replayed(policy: str, stack: Stack, plan: DemoPlan) -> Arm:
    before = CpuTimes.now()
    settings = ReplaySettings(url=stack.url, model=MODEL_NAME, timeout_s=TIMEOUT_S)
    # Where nobody watches a terminal, a line now and then is enough.
    interval_s = 0.2 if sys.stdout.isatty() else 10.0
    with tqdm(
        total=len(plan.sendings), desc=f"{policy:11}", unit="req", file=sys.stdout, mininterval=interval_s
    ) as bar:

        def show(progress: Progress) -> None:
            bar.update(progress.finished - bar.n)
            bar.set_postfix({"open": progress.sent - progress.finished, "failed": progress.failed}, refresh=False)

        results = await replay(plan.sendings, settings, on_progress=show)
    busy = busy_share(before, CpuTimes.now())
    pages = [await get_text(f"{picker.url}/metrics") for picker in stack.pickers]
    allowed = await get_text(f"{stack.admin_url}/stats?filter=ext_proc.failure_mode_allowed$")
    # The two stacks have different ports; the engines are the same ones to a reader.
    names = {ports.address: f"pod {number}" for number, ports in enumerate(stack.engines, start=1)}
    results = [msgspec.structs.replace(result, endpoint=names.get(result.endpoint, "")) for result in results]
    summary = summarise(results, decision_s=decision_times(pages))
    return Arm(policy=policy, results=results, summary=summary, busy_share=busy, unchosen=_counted(allowed))


def _counted(statistics: str) -> int:
    """The sum of Envoy's statistics, one `name: value` a line."""
    return sum(int(line.rpartition(": ")[2]) for line in statistics.splitlines())
