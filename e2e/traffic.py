"""Load on a pool from inside the cluster, while a test does something to it.

    with Load(url, talkers=6) as load:
        ...                             # something that nobody should notice
    assert load.tally["failed"] == 0

The one rule: the client (`load.py`) repeats nothing, and its last word is what counts.
"""

import json
import logging
import os
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kubectl import kubectl, rolled_out, until

log = logging.getLogger("e2e")

NAMESPACE = "trimtab-e2e"
PROGRAM = Path(__file__).with_name("load.py")
END_S = 180.0
SHOWN_OF = 5
"""One of so many lines of the client is shown."""
CLIENT = """
apiVersion: v1
kind: Namespace
metadata: {{name: {namespace}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: client, namespace: {namespace}}}
spec:
  selector: {{matchLabels: {{app: client}}}}
  template:
    metadata: {{labels: {{app: client}}}}
    spec:
      terminationGracePeriodSeconds: 0
      automountServiceAccountToken: false
      containers:
        - {{name: client, image: {image}}}
"""


def start_client() -> None:
    """The pod that all load comes from."""
    image = os.environ.get("E2E_CLIENT_IMAGE", "localhost/client:e2e")
    kubectl("apply", "-f", "-", text=CLIENT.format(namespace=NAMESPACE, image=image))
    rolled_out(NAMESPACE, "client")


class Load:
    """Conversations and long answers, from the beginning of the `with` to its end."""

    _count = 0

    def __init__(self, url: str, *, talkers: int = 6, streams: int = 0, stream_tokens: int = 1000) -> None:
        Load._count += 1
        self._stop_file = f"/tmp/stop-{Load._count}"
        self._flags = [f"--url={url}", f"--stop-file={self._stop_file}", f"--talkers={talkers}"]
        self._flags += [f"--streams={streams}", f"--stream-tokens={stream_tokens}"]
        self.tally: dict[str, Any] = {"requests": 0, "failed": 0, "open_streams": 0, "whole_streams": 0}

    def __enter__(self) -> Self:
        words = ["kubectl", "-n", NAMESPACE, "exec", "-i", "deployment/client", "--", "python3", "-", *self._flags]
        kubectl("-n", NAMESPACE, "exec", "deployment/client", "--", "rm", "-f", self._stop_file)
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(PROGRAM.read_text())
        self._process.stdin.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        until("the load has begun", lambda: self._process.poll() is not None or self.tally["requests"] > 0)
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for number, line in enumerate(self._process.stdout):
            self.tally = json.loads(line)
            if number % SHOWN_OF == 0:
                told = {name: self.tally[name] for name in ("requests", "failed", "open_streams", "whole_streams")}
                log.info("load: %s", told)

    def more(self, requests: int) -> None:
        """Waits until so many more are answered."""
        aim = self.tally["requests"] + requests
        until(f"{requests} more requests", lambda: self.tally["requests"] >= aim, timeout_s=120.0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            kubectl("-n", NAMESPACE, "exec", "deployment/client", "--", "touch", self._stop_file)
            self._process.wait(END_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def assert_nothing_failed(self) -> None:
        """With what did, if something did."""
        assert self.tally["failed"] == 0, json.dumps(self.tally, indent=2)
        assert self.tally["requests"] > 0
