"""A supervisor of local processes: starts them, waits until they are ready, and leaves none behind.

Its one rule: a process that was started here is gone when the supervisor is, be it left by the end of its block, by
Ctrl-C, by an error or by kill -9 (then the guardian does it). It must not know what the processes are for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from trimtab.guardian import KEEP_FOLDER
from trimtab.machine_load import load_text

T = TypeVar("T")
Ready = Callable[[], Awaitable[bool]]
"""Asked again and again while a process starts; True when it can be used."""

LOG_TAIL_LINES: Final = 25
"""Lines of a failing process's log that its error carries; the whole log stays on disk."""
READY_POLL_S: Final = 0.05
READY_S: Final = 90.0
"""From the start of a process until it can be used: seconds, and far more on a machine that is busy with others."""
MARK_VARIABLE: Final = "TRIMTAB_RUN"
"""Environment variable by which the guardian knows a run's processes."""
STOP_GRACE_S: Final = 5.0
"""From SIGTERM to SIGKILL."""


class ProcessError(Exception):
    """A process ended by itself, or did not become ready in time. The message has its log's last lines and place."""


@dataclass(slots=True, kw_only=True)
class _Child:
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ready: Ready | None
    ready_timeout_s: float
    log: Path
    process: asyncio.subprocess.Process
    watch: asyncio.Task[None]
    wanted: bool = True
    """False once we have stopped it ourselves: its end is no failure then."""


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Local processes with their logs in one directory. Use as `async with`; single-threaded, like its event loop."""

    log_dir: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="trimtab-")))
    """Removed at the end, after kill -9 too, unless an error is what ends the block."""
    stop_grace_s: float = STOP_GRACE_S
    _children: dict[str, _Child] = field(default_factory=dict)
    _guardian: asyncio.subprocess.Process | None = None
    _mark: str = field(default_factory=lambda: secrets.token_hex(16))
    """Every process of this run carries it in its environment."""
    _failures: asyncio.Queue[ProcessError] = field(default_factory=asyncio.Queue)

    async def __aenter__(self) -> Self:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        guardian = Path(__file__).with_name("guardian.py")
        self._guardian = await asyncio.create_subprocess_exec(
            *(sys.executable, "-ISE", str(guardian), str(self.log_dir.absolute())),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._tell_guardian(f"={MARK_VARIABLE}={self._mark}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        is_failure = kind is not None and not issubclass(kind, asyncio.CancelledError | KeyboardInterrupt)
        if is_failure:
            self._tell_guardian(KEEP_FOLDER)
        # Shielded, so that a second Ctrl-C does not leave the stopping half done; the guardian covers a third.
        await asyncio.shield(asyncio.ensure_future(self._close()))
        if not is_failure:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    async def start(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        ready: Ready | None = None,
        ready_timeout_s: float = READY_S,
    ) -> None:
        """Start a process and wait until it is ready. Raises ProcessError; a name in use is a ValueError."""
        if name in self._children:
            raise ValueError(f"process {name!r} is already there")
        await self._spawn(
            name,
            tuple(str(part) for part in argv),
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            ready=ready,
            ready_timeout_s=ready_timeout_s,
        )

    async def stop(self, name: str) -> None:
        """End a process: SIGTERM, after the grace SIGKILL, to its whole group. One that has ended is fine."""
        child = self._children[name]
        child.wanted = False
        self._signal(child, signal.SIGCONT)
        self._signal(child, signal.SIGTERM)
        try:
            await asyncio.wait_for(child.process.wait(), self.stop_grace_s)
        except TimeoutError:
            pass
        finally:
            self._signal(child, signal.SIGKILL)
        await child.process.wait()
        await child.watch

    async def restart(self, name: str) -> None:
        """Start an ended process again with the same command, and wait until it is ready; a running one ends first."""
        child = self._children[name]
        await self.stop(name)
        del self._children[name]
        await self._spawn(name, child.argv, env=child.env, ready=child.ready, ready_timeout_s=child.ready_timeout_s)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process's group. Its end counts as wanted from now on, unless it is only paused."""
        child = self._children[name]
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            child.wanted = False
        self._signal(child, number)

    def pid(self, name: str) -> int:
        """Process id, which is its group's id too."""
        return self._children[name].process.pid

    def is_running(self, name: str) -> bool:
        """Whether the process was started and has not ended."""
        child = self._children.get(name)
        return child is not None and child.process.returncode is None

    def names(self) -> tuple[str, ...]:
        """Names in the order of their start."""
        return tuple(self._children)

    def log_path(self, name: str) -> Path:
        """Where the process's output goes; it exists as long as the supervisor, and after a failure."""
        return self._children[name].log

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; raise ProcessError at once if a process ends by itself meanwhile."""
        task = asyncio.ensure_future(work)
        failure = asyncio.ensure_future(self._failures.get())
        try:
            await asyncio.wait({task, failure}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise failure.result()
        finally:
            for other in (task, failure):
                other.cancel()
            await asyncio.gather(task, failure, return_exceptions=True)

    async def _spawn(
        self, name: str, argv: tuple[str, ...], *, env: Mapping[str, str], ready: Ready | None, ready_timeout_s: float
    ) -> None:
        log = self.log_dir / f"{name}.log"
        with log.open("ab") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**env, MARK_VARIABLE: self._mark},
                    process_group=0,
                )
            except OSError as error:
                raise ProcessError(f"{name}: cannot start {argv[0]}: {error.strerror}") from error
        self._tell_guardian(f"+{process.pid}")
        watch = asyncio.ensure_future(self._watch(name, process))
        child = _Child(
            name=name,
            argv=argv,
            env=env,
            ready=ready,
            ready_timeout_s=ready_timeout_s,
            log=log,
            process=process,
            watch=watch,
        )
        self._children[name] = child
        await self._await_ready(child)

    async def _await_ready(self, child: _Child) -> None:
        deadline_s = time.monotonic() + child.ready_timeout_s
        while child.ready is not None:
            if child.process.returncode is not None:
                child.wanted = False
                raise self._failure(child, f"ended with {_ending(child.process.returncode)} while starting")
            if await child.ready():
                return
            if time.monotonic() > deadline_s:
                child.wanted = False
                raise self._failure(child, f"was not ready within {child.ready_timeout_s:g} s", is_slow=True)
            await asyncio.sleep(READY_POLL_S)

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        child = self._children[name]
        # What it started itself must not stay, and then the number may be given to another group.
        _kill_group(process.pid, signal.SIGKILL)
        self._tell_guardian(f"-{process.pid}")
        if child.wanted:
            self._failures.put_nowait(self._failure(child, f"ended with {_ending(code)}"))

    async def _close(self) -> None:
        # Last started, first stopped: what depends on others goes before them. Signals first, so that all end together.
        children = list(reversed(self._children.values()))
        for child in children:
            child.wanted = False
        await asyncio.gather(*(self.stop(child.name) for child in children))
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
            await self._guardian.wait()
            self._guardian = None

    def _signal(self, child: _Child, number: signal.Signals) -> None:
        # After its end `_watch` has cleared its group, and the number may belong to somebody else.
        if child.process.returncode is None:
            _kill_group(child.process.pid, number)

    def _tell_guardian(self, line: str) -> None:
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.write(f"{line}\n".encode())

    def _failure(self, child: _Child, what: str, *, is_slow: bool = False) -> ProcessError:
        lines = child.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        remarks = [] if lines else ["it wrote nothing yet" if is_slow else "it wrote nothing"]
        if is_slow and (load := load_text()) is not None:
            remarks.append(load)
        if remarks:
            lines.append(f"({'; '.join(remarks)})")
        tail = "\n".join(f"    {line}" for line in lines)
        return ProcessError(f"{child.name} {what}. The end of {child.log}:\n{tail}")


def _kill_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
