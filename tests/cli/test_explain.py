"""`trimtab explain` shows what a picker wrote down, as a person reads it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from trimtab.__main__ import main
from trimtab.explain import ExplainOptions, as_table, explain
from trimtab.probes import free_ports


def decision(**changed: Any) -> dict[str, Any]:
    return {
        "age_s": 2.25,
        "request_id": "r-1",
        "kind": "chat",
        "model": "tiny",
        "endpoint": "10.0.0.2:8000",
        "policy": "product",
        "reason": "product: least score",
        "approximate": None,
        "approximate_detail": None,
        "prompt_tokens": 1431,
        "p_own_tokens": 23,
        "alternatives": ["10.0.0.1:8000"],
        "candidate_count": 2,
        "endpoints": [
            row("10.0.0.2:8000", 1408, 0.0, 23.0, 2, 46.0, "won: product: least score"),
            row("10.0.0.1:8000", 0, 12000.4, 13431.0, 1, 13431.0, "lost: holds less of the prompt"),
        ],
    } | changed


def row(
    name: str,
    hit: int | None,
    queued: float | None,
    p: float | None,
    batch: int | None,
    score: float | None,
    verdict: str,
) -> dict[str, Any]:
    return {
        "endpoint": name,
        "hit_tokens": hit,
        "queued_tokens": queued,
        "p_tokens": p,
        "batch": batch,
        "score": score,
        "verdict": verdict,
    }


def test_a_decision_is_a_table_with_the_winner_marked() -> None:
    assert as_table(decision()).splitlines() == [
        "2.2 s ago, chat for tiny, 1431 prompt tokens, request r-1",
        "  endpoint         hit  queued       P  B  score = P x B",
        "  10.0.0.2:8000  1,408       0      23  2             46  <-- won: product: least score",
        "  10.0.0.1:8000      0  12,000  13,431  1         13,431      lost: holds less of the prompt",
    ]


def test_an_endpoint_that_was_no_candidate_has_no_numbers_but_a_reason() -> None:
    rows = [*decision()["endpoints"], row("10.0.0.3:8000", None, None, None, None, None, "no candidate: draining")]
    last = as_table(decision(endpoints=rows)).splitlines()[-1]
    assert last == "  10.0.0.3:8000      -       -       -  -              -      no candidate: draining"


def test_what_is_not_known_exactly_and_what_is_not_shown_is_said() -> None:
    lines = as_table(decision(candidate_count=70, approximate="card", approximate_detail="no template")).splitlines()
    assert lines[-2:] == ["  and 68 more", "  The prefix is not known exactly: card (no template)"]


def test_what_acted_on_an_endpoint_besides_its_tokens_and_requests_is_said() -> None:
    terms = {"expert_factor": 1.5, "network_tokens": 80.0, "p_before_log_tokens": 12_345.6, "weighted_batch": 6.5}
    slow = row("10.0.0.2:8000", 0, 0.0, 900.4, 3, 5852.6, "won: product: least score")
    shown = decision(
        endpoints=[slow | {"weighted_batch": 6.5, "terms": terms}, decision()["endpoints"][1] | {"terms": {}}],
        waited_s=1.256,
        **{"class": "gold", "objective": "chat-gold", "objective_known": True, "priority": 10},
    )
    lines = as_table(shown).splitlines()
    assert "class gold, objective chat-gold, priority 10, waited 1.26 s for a place, request r-1" in lines[0]
    assert "    900  6.5          5,853  <-- won" in lines[2]
    assert lines[4:] == [
        "  10.0.0.2:8000: experts x 1.50, network + 80 tokens, P before its logarithm 12,346,"
        " B with the weights of classes 6.50"
    ]


def test_an_objective_that_nobody_knows_is_told_as_such() -> None:
    title = as_table(decision(objective="chat-glod", objective_known=False, priority=0)).splitlines()[0]
    assert "1431 prompt tokens, objective chat-glod (not known), request r-1" in title


def test_a_request_that_went_elsewhere_than_first_chosen_says_so() -> None:
    title = as_table(decision(moved_from=["10.0.0.7:8000"])).splitlines()[0]
    assert "moved from 10.0.0.7:8000, which another picker chose at the same moment, or which went then" in title


def test_a_refused_request_is_told_with_what_kept_each_endpoint_from_it() -> None:
    refused = {"status": 429, "reason": "endpoints_full", "message": "every endpoint of the pool is at its limit"}
    full = row("10.0.0.1:8000", None, None, None, None, None, "no candidate: at its limit")
    entry = {name: decision()[name] for name in ("age_s", "request_id", "kind", "model", "policy")}
    entry |= {"refused": refused, "endpoints": [full], "candidate_count": 0}
    assert as_table(entry).splitlines() == [
        "2.2 s ago, chat for tiny, refused with 429 endpoints_full: every endpoint of the pool is at its limit,"
        " request r-1",
        "  10.0.0.1:8000  no candidate: at its limit",
    ]


@pytest.fixture
def picker_pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Serve decision lists on ports while `explain` runs: its event loop is its own, so the pages get a thread."""
    import threading

    stops: list[Any] = []

    def serve(decisions: list[dict[str, Any]], *, status: int = 200) -> str:
        [port] = free_ports(1)
        started, loop = threading.Event(), asyncio.new_event_loop()

        async def page(request: web.Request) -> web.Response:
            return web.json_response({"decisions": decisions[: int(request.query["count"])]}, status=status)

        async def run() -> None:
            app = web.Application()
            app.router.add_get("/decisions", page)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            stop = asyncio.Event()
            stops.append((loop, stop, thread))
            started.set()
            await stop.wait()
            await runner.cleanup()

        def work() -> None:
            loop.run_until_complete(run())
            loop.close()

        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        return f"http://127.0.0.1:{port}"

    yield serve
    for loop, stop, thread in stops:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def test_decisions_of_several_pickers_are_merged_with_the_newest_last(picker_pages: Any) -> None:
    first = picker_pages([decision(age_s=1.0, request_id="b"), decision(age_s=9.0, request_id="old")])
    second = picker_pages([decision(age_s=0.5, request_id="c"), decision(age_s=2.0, request_id="a")])
    text = explain(ExplainOptions(urls=(first, second), last=3, as_json=False))
    titles = [line for line in text.splitlines() if "prompt tokens" in line]
    assert [title.split("request ")[1].split(",")[0] for title in titles] == ["a", "b", "c"]
    assert titles[0].endswith(f"picker {second}")


def test_json_has_everything_in_the_order_of_the_table(picker_pages: Any) -> None:
    url = picker_pages([decision(age_s=1.0), decision(age_s=2.0)])
    assert json.loads(explain(ExplainOptions(urls=(url,), last=5, as_json=True))) == [
        decision(age_s=2.0) | {"picker": url},
        decision(age_s=1.0) | {"picker": url},
    ]


def test_a_decision_that_the_hotspot_detector_changed_says_so() -> None:
    lines = as_table(decision(hotspot="00000000000000ab")).splitlines()
    assert "Changed by the hotspot detector: class 00000000000000ab" in lines[-1]
    assert "hotspot" not in as_table(decision(hotspot=None))


def test_no_decision_yet_is_said(picker_pages: Any) -> None:
    assert explain(ExplainOptions(urls=(picker_pages([]),), last=5, as_json=False)).startswith("No request was placed")


def test_no_picker_there_is_an_error_that_names_the_flag_and_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    [port] = free_ports(1)
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--url", f"http://127.0.0.1:{port}"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"--url http://127.0.0.1:{port}: no picker answers there" in error
    assert "kubectl port-forward" in error


def test_a_page_that_is_no_pickers_is_an_error(picker_pages: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--url", picker_pages([], status=404)])
    assert "is this a picker's metrics port?" in capsys.readouterr().err


def test_a_client_that_sends_a_terminals_commands_is_not_obeyed() -> None:
    shown = as_table(decision(request_id="r\x9b2J", objective="\x1b]0;gold\x07\u202e", objective_known=False))
    assert "request r\ufffd2J" in shown
    assert "objective \ufffd]0;gold\ufffd\ufffd (not known)" in shown
