"""The cluster, by kubectl: commands, objects as JSON, and waiting that says what it waits for.

The one rule: the cluster is whatever KUBECONFIG names, and nothing here asks which one.
"""

import json
import logging
import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger("e2e")

T = TypeVar("T")

Object = dict[str, Any]
COMMAND_TIMEOUT_S = 180.0
TOLD_EVERY_S = 10.0


def run(*words: str, text: str | None = None, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Standard output. What fails is an AssertionError with what the command said."""
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}{done.stdout}"
    return done.stdout


def kubectl(*words: str, text: str | None = None, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    return run("kubectl", *words, text=text, timeout_s=timeout_s)


def get(*words: str) -> Object:
    """One object, or a list of them."""
    found: Object = json.loads(kubectl("get", *words, "-o", "json"))
    return found


def items(*words: str) -> list[Object]:
    return list(get(*words)["items"])


def is_there(*words: str) -> bool:
    return bool(kubectl("get", *words, "--ignore-not-found", "-o", "name").strip())


def patch(namespace: str, what: str, spec: Object) -> None:
    kubectl("-n", namespace, "patch", what, "--type=merge", "-p", json.dumps({"spec": spec}))


def rolled_out(namespace: str, deployment: str, *, timeout_s: float = 300.0) -> None:
    kubectl(
        *("-n", namespace, "rollout", "status", f"deployment/{deployment}", f"--timeout={timeout_s:.0f}s"),
        timeout_s=timeout_s + 10,
    )


def until(what: str, look: Callable[[], T], *, timeout_s: float = 180.0, every_s: float = 1.0) -> T:
    """What `look` returns once it is true. Until then it may fail an assertion, or miss what will be there later."""
    began = told = time.monotonic()
    last: object = None
    while True:
        try:
            if found := look():
                log.info("%s: after %.0f s", what, time.monotonic() - began)
                return found
            last = found
        except (AssertionError, LookupError) as error:
            last = repr(error)
        now = time.monotonic()
        assert now - began < timeout_s, f"not in {timeout_s:.0f} s: {what}; last: {last}"
        if now - told > TOLD_EVERY_S:
            told = now
            log.info("waiting: %s (%.0f s; %.200s)", what, now - began, last)
        time.sleep(every_s)
