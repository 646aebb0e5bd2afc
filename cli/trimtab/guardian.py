"""A process that outlives its parent by a moment, to kill the process groups that the parent left behind and to remove
its folder.

Its one rule: end of input means that the parent is gone, however it went; then every group still on the list is killed,
and every process that carries the run's mark in its environment: the parent may have died between starting one and
saying so, and some make groups of their own.
It is started as a script with nothing but the standard library, and must import nothing else: it has to start in
milliseconds and to work when everything else is broken.

Its argument, if any: the run's folder, which goes last. Lines on its standard input: `=MARK` the run's mark, `+PGID` a
group to watch, `-PGID` one that has ended, `!` the folder stays: an error is being reported that points to it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

SETTLE_S = 0.2
"""How long a process that was just being started may take to carry the mark."""
KEEP_FOLDER = "!"
SWEEPS_MAX = 10
"""Looks for marked processes; the last finds none unless they multiply faster than they are killed."""


def main() -> None:
    """Follow standard input to its end, then kill what is left."""
    # Ctrl-C and the like are for the parent, which stops its processes in order; we only watch.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    mark = b""
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    for line in sys.stdin:
        if line[0] == "=":
            mark = line[1:].strip().encode()
            continue
        if line[0] == KEEP_FOLDER:
            folder = None
            continue
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for _ in range(SWEEPS_MAX if mark else 0):
        time.sleep(SETTLE_S)
        found = marked(mark)
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if not found:
            break
    if folder is not None:
        import shutil  # Not at the top: it takes longer to load than all the rest.

        shutil.rmtree(folder, ignore_errors=True)


def marked(mark: bytes) -> list[int]:
    """The processes with the mark in their environment, where the system shows it (Linux)."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError):
            process = int(name)
            with open(f"/proc/{process}/environ", "rb") as environ:
                if mark in environ.read().split(b"\0"):
                    found.append(process)
    return found


if __name__ == "__main__":
    main()
