"""A process that outlives its parent by a moment, to kill the process groups that the parent left behind.

Its one rule: end of input means that the parent is gone, however it went; then every group still on the list is killed.
It is started as a script with nothing but the standard library, and must import nothing else: it has to start in
milliseconds and to work when everything else is broken.

Lines on its standard input: `+PGID` a group to watch, `-PGID` one that has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Follow standard input to its end, then kill what is left."""
    # Ctrl-C and the like are for the parent, which stops its processes in order; we only watch.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
