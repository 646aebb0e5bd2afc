"""The commands themselves, as a person runs them: they work as printed, and nothing outlives them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from trimtab_lab.trace import encode_trace, load_trace, whole_sessions

pytestmark = pytest.mark.stack


@asynccontextmanager
async def command(*arguments: str | Path, cwd: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running `trimtab`, killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trimtab", *map(str, arguments)),
        cwd=cwd,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def read_until(process: asyncio.subprocess.Process, mark: str) -> str:
    """Output up to and including the line that holds `mark`."""
    assert process.stdout is not None
    text = ""
    while mark not in text:
        line = (await process.stdout.readline()).decode()
        assert line, f"it ended before it said {mark!r}:\n{text}"
        text += line
    return text


def descendants(pid: int) -> set[int]:
    """Everything that a process started, and what that started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = set(), [pid]
    while queue:
        new = children.get(queue.pop(), [])
        found.update(new)
        queue.extend(new)
    return found


async def all_gone(pids: Sequence[int]) -> None:
    while any(is_alive(pid) for pid in pids):  # noqa: ASYNC110 (strangers' processes send no events)
        await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Not one that has ended and that nobody has asked after yet, which is how orphans stay in some containers."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def short_trace(tmp_path: Path) -> Path:
    path = tmp_path / "short.jsonl.gz"
    path.write_bytes(encode_trace(whole_sessions(load_trace(), count=8, seed=3)))
    return path


async def test_the_demo_compares_both_and_writes_figures_and_a_plot(short_trace: Path, tmp_path: Path) -> None:
    flags = ("--endpoints", "2", "--trace", short_trace, "--rate", "5", "--json", "figures.json", "--plot", "plot.png")
    async with command("demo", *flags, cwd=tmp_path) as process:
        output, _ = await process.communicate()
    text = output.decode()
    assert process.returncode == 0, text
    figures = json.loads((tmp_path / "figures.json").read_text())
    for policy in ("round_robin", "trimtab"):
        assert figures[policy]["failed"] == 0
        assert figures[policy]["requests"] == figures["run"]["requests"] >= 20
        assert sum(figures[policy]["requests_per_endpoint"].values()) == figures[policy]["requests"]
        assert figures[policy]["ttft_p95_s"] > 0
        # Which of them finds more is a matter of load too, and so of this machine.
        assert 0 < figures[policy]["hit_rate"] < 1
    assert figures["trimtab"]["decision_p50_s"] > 0
    assert figures["round_robin"]["decision_p50_s"] is None
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "prefix hits" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_a_demo_that_is_interrupted_leaves_no_process(
    number: signal.Signals, short_trace: Path, tmp_path: Path
) -> None:
    async with command("demo", "--endpoints", "2", "--trace", short_trace, "--rate", "1", cwd=tmp_path) as process:
        await read_until(process, "Starting")
        while len(started := descendants(process.pid)) < 4:  # noqa: ASYNC110 (guardian, two engines, Envoy)
            await asyncio.sleep(0.02)
        process.send_signal(number)
        output, _ = await process.communicate()
        assert process.returncode == (-9 if number is signal.SIGKILL else 130)
        assert b"Traceback" not in output
        await all_gone(sorted(started))


async def test_a_failing_part_ends_the_demo_with_its_name_and_log(short_trace: Path, tmp_path: Path) -> None:
    async with command("demo", "--endpoints", "1", "--trace", short_trace, "--rate", "1", cwd=tmp_path) as process:
        await read_until(process, "Starting")
        while not (envoys := [p for p in descendants(process.pid) if is_envoy(p)]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        started = descendants(process.pid)
        os.kill(envoys[0], signal.SIGKILL)
        output, _ = await process.communicate()
    text = output.decode()
    assert process.returncode == 1
    assert "trimtab: envoy ended with signal SIGKILL" in text
    assert "envoy.log" in text
    assert "Traceback" not in text
    await all_gone(sorted(started))


async def test_local_prints_commands_that_work(tmp_path: Path) -> None:
    async with command("local", "--endpoints", "2", cwd=tmp_path) as process:
        text = await read_until(process, "Ctrl-C ends it all.")
        curl = text[text.index("curl -s") : text.index("# With the OpenAI")]
        answer = json.loads(await shell(curl))
        assert answer["choices"][0]["message"]["role"] == "assistant"
        client = text[text.index("python3 - <<") : text.index("# Why")].replace("python3", sys.executable)
        assert (await shell(client)).strip()
        explain = next(line for line in text.splitlines() if " explain --url" in line)
        table = await shell(explain)
        assert table.count("<-- won") == 2
        top = next(line for line in text.splitlines() if " top --url" in line)
        shown = await shell(top.removesuffix(" --watch"))
        assert shown.count("serving") == 2
        started = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        await process.communicate()
        assert process.returncode == 0, "Ctrl-C is how it is ended, and no error of make's"
    await all_gone(sorted(started))


async def shell(line: str) -> str:
    process = await asyncio.create_subprocess_shell(
        line, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


def is_envoy(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(b"/envoy")
    except OSError:
        return False
