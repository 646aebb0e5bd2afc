"""An API server as the chart's tests use it: by kubectl, as an administrator."""

import json
import os
import subprocess
from pathlib import Path

import yaml
from control_plane import binaries
from helm import NAMESPACE, Object

TIMEOUT_S = 60


class Cluster:
    def __init__(self, config: Path) -> None:
        self.config = config
        self._kubectl = binaries() / "kubectl"

    def run(self, *words: str, body: str | None = None) -> subprocess.CompletedProcess[str]:
        """Whatever it ends with."""
        return subprocess.run(
            [self._kubectl, *words],
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": str(self.config)},
            input=body,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    def done(self, *words: str, body: str | None = None) -> str:
        ran = self.run(*words, body=body)
        assert ran.returncode == 0, f"kubectl {' '.join(words)}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        where = ("--namespace", namespace) if namespace else ()
        text = self.done("get", kind, name, *where, "--ignore-not-found", "--output", "json", "--show-managed-fields")
        found: Object | None = json.loads(text) if text else None
        return found

    def names(self, kinds: str, namespace: str | None = None) -> set[str]:
        """`kind/name`, as kubectl has it."""
        where = ("--namespace", namespace) if namespace else ()
        return set(self.done("get", kinds, *where, "--output", "name").split())

    def apply(self, body: Object, *, manager: str = "tests") -> None:
        self.done("apply", "--server-side", "--field-manager", manager, "--filename", "-", body=yaml.safe_dump(body))

    def token(self, account: str) -> str:
        """As a pod of that service account has it."""
        return self.done("create", "token", account, "--namespace", NAMESPACE).strip()
