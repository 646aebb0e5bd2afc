"""Replays against real servers, and what the reports make of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from lab_rig import Start
from PIL import Image

from trimtab_lab import report
from trimtab_lab.replay import Progress, ReplaySettings, RequestResult, Sending, chat_sendings, replay
from trimtab_lab.report import Summary, summarise, table
from trimtab_lab.trace import at_rate, load_trace, shorter, whole_sessions
from trimtab_lab.trace_text import TraceText
from trimtab_lab.vocabulary import Vocabulary


def result(**changes: object) -> RequestResult:
    plain: dict[str, object] = {
        "index": 0, "due_s": 0.0, "late_s": 0.0, "ttft_s": 0.1, "tpot_s": 0.01, "total_s": 0.2, "prompt_tokens": 100,
        "cached_tokens": 32, "output_tokens": 11, "endpoint": "10.0.0.1:8000", "decision_s": None, "status": 200,
    }  # fmt: skip
    return RequestResult(**(plain | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def server(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


# -- replay


async def test_a_trace_replayed_against_an_engine_hits_what_the_engine_says_it_hit(emulated: Start) -> None:
    requests = at_rate(shorter(whole_sessions(load_trace(), count=6, seed=1), 32), 200)
    sendings = chat_sendings(requests, TraceText(Vocabulary()))
    progress: list[Progress] = []
    async with emulated(blocks=4096) as emulator:
        results = await replay(sendings, ReplaySettings(url=emulator.url), on_progress=progress.append)
        served = (await emulator.get("/lab/requests"))["requests"]
    assert [entry.error for entry in results] == [""] * len(requests)
    assert [entry.output_tokens for entry in results] == [request.output_tokens for request in requests]
    assert sum(entry.cached_tokens for entry in results) == sum(page["cached_tokens"] for page in served) > 0
    assert sum(entry.prompt_tokens for entry in results) == sum(page["prompt_tokens"] for page in served)
    assert all(entry.ttft_s is not None and 0 < entry.ttft_s <= entry.total_s for entry in results)
    assert all((entry.tpot_s is None) == (entry.output_tokens < 2) for entry in results)
    assert (progress[-1].finished, progress[-1].sent, progress[-1].failed) == (len(requests), len(requests), 0)


async def test_requests_are_sent_at_their_time_however_slow_the_ones_before() -> None:
    """The server answers nobody until all have arrived: a closed loop would never finish."""
    waiting = 0
    all_there = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal waiting
        waiting += 1
        if waiting == 20:
            all_there.set()
        await all_there.wait()
        return web.Response(status=503, text="enough")

    async with server(handler) as url:
        sendings = [Sending(due_s=number * 0.005, body=b"{}") for number in range(20)]
        results = await replay(sendings, ReplaySettings(url=url, timeout_s=20))
    assert [entry.status for entry in results] == [503] * 20
    assert results[0].error == "HTTP 503: enough"


async def test_the_served_endpoint_and_the_scheduling_time_are_read_from_headers() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        headers = {"x-trimtab-endpoint": "10.0.0.7:8000", "x-trimtab-scheduler-us": "87.5"}
        chunk = {"choices": [{"delta": {"content": "x"}}]}
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": None}
        lines = [
            f"data: {json.dumps(value, separators=(',', ':'))}\n\n"
            for value in (chunk, {"choices": [], "usage": usage})
        ]
        return web.Response(text="".join([*lines, "data: [DONE]\n\n"]), headers=headers)

    async with server(handler) as url:
        [entry] = await replay([Sending(due_s=0, body=b"{}")], ReplaySettings(url=url))
    assert entry.is_ok
    assert (entry.endpoint, entry.decision_s, entry.cached_tokens) == ("10.0.0.7:8000", 87.5e-6, 0)
    assert entry.tpot_s is None


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('data: {"choices":[{"delta":{"content":"x"}}]}\n\n', "the stream ended early"),
        ('data: {"error":{"message":"died"}}\n\ndata: [DONE]\n\n', "in the stream"),
        ('data: {"choices":[{"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n', "aborted by the engine"),
        ("data: [DONE]\n\n", "no token came"),
        ('data: {"usage":{"x"\n\ndata: [DONE]\n\n', "not JSON"),
    ],
)
async def test_an_answer_that_ends_badly_is_a_failure_though_the_status_is_200(body: str, error: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text=body)

    async with server(handler) as url:
        [entry] = await replay([Sending(due_s=0, body=b"{}")], ReplaySettings(url=url))
    assert error in entry.error
    assert entry.status == 200


async def test_nobody_listening_and_nobody_answering_are_failures() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError("unreachable")

    async with server(handler) as url:
        [slow] = await replay([Sending(due_s=0, body=b"{}")], ReplaySettings(url=url, timeout_s=0.05))
    [refused] = await replay([Sending(due_s=0, body=b"{}")], ReplaySettings(url=url))
    assert (slow.error, slow.status) == ("timeout", 0)
    assert refused.error.startswith("ClientConnectorError")


# -- report

KEYS = {
    "ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "hit_rate",
    "decision_p50_s", "decision_p99_s", "requests", "failed", "requests_per_endpoint",
}  # fmt: skip


def test_a_summary_counts_failures_apart_and_weighs_hits_by_tokens() -> None:
    results = [
        result(ttft_s=0.1, prompt_tokens=100, cached_tokens=0),
        result(ttft_s=0.3, prompt_tokens=300, cached_tokens=200, endpoint="10.0.0.2:8000"),
        result(ttft_s=9.0, error="timeout", cached_tokens=100),
    ]
    summary = summarise(results, decision_s=[1e-4, 3e-4])
    assert set(summary) == KEYS
    assert summary["ttft_mean_s"] == pytest.approx(0.2)
    assert summary["ttft_p50_s"] == pytest.approx(0.2)
    assert summary["ttft_p99_s"] == pytest.approx(0.298)
    assert summary["hit_rate"] == pytest.approx(0.5)
    assert summary["decision_p50_s"] == pytest.approx(2e-4)
    assert (summary["requests"], summary["failed"]) == (3, 1)
    assert summary["requests_per_endpoint"] == {"10.0.0.1:8000": 1, "10.0.0.2:8000": 1}


def test_what_nobody_measured_is_none_and_shows_as_a_dash() -> None:
    summary = summarise([])
    assert set(summary) == KEYS
    assert summary["ttft_mean_s"] is None
    assert summary["decision_p99_s"] is None
    assert summary["hit_rate"] is None
    assert "TTFT mean" in table({"nothing": summary})
    assert "None" not in table({"nothing": summary})


def summaries() -> dict[str, Summary]:
    return {
        "round_robin": summarise([result(ttft_s=0.4, cached_tokens=20)]),
        "product": summarise([result(ttft_s=0.1, cached_tokens=60, endpoint="10.0.0.2:8000")]),
    }


def test_the_table_sets_policies_side_by_side_and_compares_the_last_with_the_first() -> None:
    lines = table(summaries()).splitlines()
    assert lines[0].split("  ")[-1].strip() == "product / round_robin"
    [mean] = [line for line in lines if line.startswith("TTFT mean")]
    assert mean.split()[2:] == ["400", "ms", "100", "ms", "x", "0.25"]
    [hits] = [line for line in lines if line.startswith("prefix hits")]
    assert hits.split("  ")[-1].strip() == "+40.0 points"
    assert any(line.split() == ["10.0.0.2:8000", "0", "1"] for line in lines)
    assert len({len(line) for line in lines if line.startswith(("TTFT", "-"))}) == 1


def test_the_plot_is_a_png_of_a_readable_size(tmp_path: Path) -> None:
    runs = {
        name: [
            result(ttft_s=0.05 * (number % 9 + 1) * factor, endpoint=f"10.0.0.{number % 4}:8000")
            for number in range(60)
        ]
        for name, factor in (("round_robin", 3.0), ("product", 1.0))
    }
    report.plot(runs, tmp_path / "plot.png", title="Two policies")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.format == "PNG"
        assert image.width > 1500
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 20, "something is drawn"


def test_a_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        report.plot({"product": [result(error="timeout")]}, tmp_path / "plot.png")
