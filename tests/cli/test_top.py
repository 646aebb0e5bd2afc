"""`trimtab top` shows what pickers believe now, as a person reads it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from typing import Any

import pytest

from trimtab.__main__ import main
from trimtab.probes import free_ports
from trimtab.top import CLEAR, METRICS, Look, as_text


def endpoint(name: str, **changed: Any) -> dict[str, Any]:
    return {
        "endpoint": name,
        "member": True,
        "candidate": True,
        "state": "serving",
        "approximate": None,
        "unsynced": False,
        "requests": 3,
        "external": 1,
        "queued_tokens": 1200.4,
        "product": 6002.0,
        "prefill_rate": 15000.0,
        "reported_requests": 4,
        "kv_usage": 0.456,
        "index_chunks": 2048,
    } | changed


def state(**changed: Any) -> dict[str, Any]:
    return {
        "ready": True,
        "connected": True,
        "policy": "product",
        "policy_reason": None,
        "members": 2,
        "open_reservations": 3,
        "hotspots": [],
        "index_digest": "aa",
        "endpoints": [endpoint("10.0.0.1:8000"), endpoint("10.0.0.2:8000", state="draining", candidate=False)],
    } | changed


def look(url: str = "http://a", *, time_s: float = 10.0, metrics: tuple[float, ...] = (), **changed: Any) -> Look:
    values = metrics or (100, 4, 2, 50_000, 20_000)
    counted = dict(zip(METRICS, map(float, values), strict=True))
    return Look(url=url, time_s=time_s, state=state(**changed), metrics=counted)


def test_one_look_shows_totals_and_a_line_for_each_endpoint() -> None:
    assert as_text([look()]).splitlines() == [
        "placed by product, 1 of 2 endpoints may be chosen, no hotspot",
        "",
        "picker    ready  store  open  requests  refused  waiting  hit rate  index",
        "http://a    yes    yes     3       100        4        2     40.0%",
        "",
        "endpoint          state  cache  B  external  reported  queued  P x (B+1)  prefill/s   KV  chunks",
        "10.0.0.1:8000   serving  exact  4         1         4   1,200      6,002     15,000  46%   2,048",
        "10.0.0.2:8000  draining      -  4         1         4   1,200      6,002     15,000  46%   2,048",
    ]


def test_a_second_look_shows_rates_and_a_picker_that_began_anew_counts_from_zero() -> None:
    first, restarted = look(), look("http://b")
    now = [
        look(time_s=12.0, metrics=(110, 4, 0, 60_000, 29_000)),
        look("http://b", time_s=12.0, metrics=(6, 0, 0, 100, 10)),
    ]
    lines = as_text(now, [first, restarted]).splitlines()
    assert "  requests/s  refused/s  waiting  hit rate  index" in lines[2]
    assert lines[3].split() == ["http://a", "yes", "yes", "3", "5.0", "0.0", "0", "90.0%"]
    assert lines[4].split() == ["http://b", "yes", "yes", "3", "3.0", "0.0", "0", "10.0%", "alike"]


def test_pickers_that_do_not_know_the_same_or_do_not_answer_are_told() -> None:
    gone = Look(url="http://c", time_s=10.0, state={}, metrics={})
    lines = as_text([look(ready=False), look("http://b"), look("http://d", index_digest="bb"), gone]).splitlines()
    assert lines[0].endswith("pickers do not know the same caches (now)")
    assert lines[3].split()[:3] == ["http://a", "NO", "yes"]
    assert [line.split()[-1] for line in lines[3:6]] == ["alike", "40.0%", "differs"]
    assert lines[6].split()[:3] == ["http://c", "no", "answer"]


def test_a_fallback_a_hotspot_and_what_is_not_known_are_said() -> None:
    hotspots = [{"acted_on": True}, {"acted_on": False}]
    rows = [
        endpoint("a:1", approximate="no_heartbeat", state="no_heartbeat", reported_requests=None, kv_usage=None),
        endpoint("b:1", member=False, candidate=False, state="not_member"),
        endpoint("d:1", member=False, candidate=False, state="not_member", requests=0, external=0),
        endpoint("c:1", candidate=False),
    ]
    lines = as_text(
        [look(policy="round_robin", policy_reason="hotspot alarms", hotspots=hotspots, endpoints=rows)]
    ).splitlines()
    assert lines[0] == (
        "placed by round_robin (hotspot alarms), 1 of 2 endpoints may be chosen, hotspots: 2, 1 acted on"
    )
    assert "no_heartbeat  no_heartbeat  4         1         -" in lines[-3]
    assert lines[-2].split()[:4] == ["b:1", "not_member", "-", "4"], "what is gone is shown while it has requests"
    assert "not chosen" in lines[-1]
    assert not any(line.startswith("d:1") for line in lines)


@pytest.mark.parametrize(("is_terminal", "start"), [(True, CLEAR), (False, "\n")])
def test_watching_draws_a_terminal_anew_scrolls_elsewhere_and_is_ended_by_an_interrupt(
    is_terminal: bool, start: str
) -> None:
    [port] = free_ports(1)
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "trimtab", "top", "--watch", "--url", url]
    with subprocess.Popen(command, stdout=theirs) as process:
        os.close(theirs)
        shown = ""
        while "no answer" not in shown:
            read = os.read(ours, 4096)
            assert read, shown
            shown += read.decode()
        process.send_signal(signal.SIGINT)
    os.close(ours)
    assert shown.startswith(start + "picker")
    assert process.returncode == 0


def test_nobody_there_is_an_error_that_names_the_flag_and_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    [port] = free_ports(1)
    with pytest.raises(SystemExit) as ended:
        main(["top", "--url", f"http://127.0.0.1:{port}"])
    assert ended.value.code == 2
    assert "no picker answers there" in capsys.readouterr().err
