"""Nothing that the supervisor started is left behind, however its block ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

from trimtab import guardian as guardian_module
from trimtab.probes import free_ports, listening
from trimtab.processes import ProcessError, Supervisor

SLEEPER = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(600)",
]
WITH_GRANDCHILD = [
    sys.executable,
    "-c",
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)",
]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def has_written(supervisor: Supervisor, name: str) -> str:
    while not (text := supervisor.log_path(name).read_text()):  # noqa: ASYNC110 (a file sends no event)
        await asyncio.sleep(0.01)
    return text


async def gone(pid: int) -> None:
    while is_alive(pid):  # noqa: ASYNC110 (nor does a stranger's process)
        await asyncio.sleep(0.01)


async def test_leaving_the_block_ends_every_process_and_removes_the_logs(tmp_path: Path) -> None:
    async with Supervisor(log_dir=tmp_path / "logs") as supervisor:
        await supervisor.start("one", SLEEPER)
        await supervisor.start("two", SLEEPER)
        pids = [supervisor.pid("one"), supervisor.pid("two")]
        assert supervisor.names() == ("one", "two")
        assert all(is_alive(pid) for pid in pids)
    assert not any(is_alive(pid) for pid in pids)
    assert not (tmp_path / "logs").exists()


async def test_an_error_ends_every_process_and_keeps_the_logs(tmp_path: Path) -> None:
    pids: list[int] = []

    async def fail() -> None:
        async with Supervisor(log_dir=tmp_path / "logs") as supervisor:
            await supervisor.start("one", SLEEPER)
            await has_written(supervisor, "one")
            pids.append(supervisor.pid("one"))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await fail()
    assert not is_alive(pids[0])
    assert (tmp_path / "logs" / "one.log").read_text() == "here\n"


async def test_one_that_ignores_sigterm_is_killed_and_so_is_one_that_is_paused(tmp_path: Path) -> None:
    async with Supervisor(log_dir=tmp_path / "logs", stop_grace_s=0.1) as supervisor:
        await supervisor.start("stubborn", STUBBORN)
        await supervisor.start("paused", SLEEPER)
        await has_written(supervisor, "stubborn")
        supervisor.kill("paused", signal.SIGSTOP)
        pids = [supervisor.pid("stubborn"), supervisor.pid("paused")]
    assert not any(is_alive(pid) for pid in pids)


async def test_what_a_process_started_itself_ends_with_it(tmp_path: Path) -> None:
    async with Supervisor(log_dir=tmp_path / "logs") as supervisor:
        await supervisor.start("parent", WITH_GRANDCHILD)
        grandchild = int(await has_written(supervisor, "parent"))
        supervisor.kill("parent", signal.SIGKILL)
        await gone(grandchild)


async def test_kill_minus_nine_of_the_supervisor_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import asyncio
        from pathlib import Path
        from trimtab.processes import Supervisor
        async def main():
            async with Supervisor(log_dir=Path({str(tmp_path / "logs")!r})) as supervisor:
                await supervisor.start("parent", {WITH_GRANDCHILD!r})
                while not (text := supervisor.log_path("parent").read_text()):
                    await asyncio.sleep(0.01)
                print(supervisor.pid("parent"), text, flush=True)
                await asyncio.sleep(600)
        asyncio.run(main())
    """)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    assert process.stdout is not None
    pids = [int(word) for word in (await process.stdout.readline()).split()]
    assert [is_alive(pid) for pid in pids] == [True, True]
    process.kill()
    await process.wait()
    for pid in pids:
        await gone(pid)
    while (tmp_path / "logs").exists():  # noqa: ASYNC110 (nor does a folder)
        await asyncio.sleep(0.01)


async def test_the_guardian_finds_a_process_that_nobody_named_to_it_by_the_runs_mark() -> None:
    mark = f"TRIMTAB_RUN={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    # In a session of its own, as some start their helpers, and never told: its parent died first.
    ours, other = [
        await asyncio.create_subprocess_exec(*SLEEPER, env={**os.environ, name: run}, start_new_session=True)
        for run in (value, uuid.uuid4().hex)
    ]
    guardian = await asyncio.create_subprocess_exec(
        sys.executable, "-ISE", guardian_module.__file__, stdin=subprocess.PIPE
    )
    await guardian.communicate(f"={mark}\n".encode())
    assert await ours.wait() == -signal.SIGKILL
    assert other.returncode is None
    other.kill()
    await other.wait()


async def test_a_process_that_fails_while_starting_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "print('about to fail'); raise SystemExit(3)"]
    with pytest.raises(ProcessError, match=r"(?s)bad ended with status 3 while starting.*bad\.log.*about to fail"):
        async with Supervisor(log_dir=tmp_path / "logs") as supervisor:
            await supervisor.start("bad", argv, ready=listening(free_ports(1)[0]))


async def test_a_process_that_never_gets_ready_is_named(tmp_path: Path) -> None:
    silent = [sys.executable, "-c", "import time; time.sleep(600)"]
    said = r"(?s)slow was not ready within 0\.2 s.*\(it wrote nothing yet; the machine's load is \d+ on \d+ cores\)"
    with pytest.raises(ProcessError, match=said):
        async with Supervisor(log_dir=tmp_path / "logs") as supervisor:
            await supervisor.start("slow", silent, ready=listening(free_ports(1)[0]), ready_timeout_s=0.2)


async def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="cannot start /nowhere/envoy"):
        async with Supervisor(log_dir=tmp_path / "logs") as supervisor:
            await supervisor.start("envoy", ["/nowhere/envoy"])


async def test_work_under_guard_ends_when_a_process_does(tmp_path: Path) -> None:
    async with Supervisor(log_dir=tmp_path / "logs") as supervisor:
        await supervisor.start("one", SLEEPER)
        os.kill(supervisor.pid("one"), signal.SIGKILL)
        with pytest.raises(ProcessError, match="one ended with signal SIGKILL"):
            await supervisor.guard(asyncio.Event().wait())


async def test_our_own_kill_is_no_failure_and_a_restart_brings_it_back(tmp_path: Path) -> None:
    async with Supervisor(log_dir=tmp_path / "logs") as supervisor:
        [port] = free_ports(1)
        server = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
        await supervisor.start("server", server, ready=listening(port))
        first = supervisor.pid("server")
        supervisor.kill("server")
        await gone(first)
        assert await supervisor.guard(asyncio.sleep(0, "work")) == "work"
        await supervisor.restart("server")
        assert supervisor.is_running("server")
        assert supervisor.pid("server") != first
        assert await listening(port)()


async def test_names_are_used_once(tmp_path: Path) -> None:
    async with Supervisor(log_dir=tmp_path / "logs") as supervisor:
        await supervisor.start("one", SLEEPER)
        with pytest.raises(ValueError, match="already"):
            await supervisor.start("one", SLEEPER)


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(50))) == 50
