"""Processes of a benchmark: started together, their CPU read from /proc, stopped by process id."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from control_plane import die_with_parent

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, user and system, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Processes:
    """Named processes that end with this object, and with this process, whatever happens."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[object], **environment: str) -> int:
        """Its process id; its output goes to `<name>.log`."""
        with (self._log_folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | environment,
                preexec_fn=die_with_parent,
            )
        self._running[name] = process
        return process.pid

    def check(self) -> None:
        """Raises RuntimeError with the end of its log if one has ended."""
        for name, process in self._running.items():
            if process.poll() is not None:
                tail = (self._log_folder / f"{name}.log").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{tail}")

    def stop(self) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()


@contextmanager
def processes(log_folder: Path) -> Iterator[Processes]:
    group = Processes(log_folder)
    try:
        yield group
    finally:
        group.stop()
