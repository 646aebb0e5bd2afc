"""The chart as helm sees it: both versions of helm that are in use, what they render, and what they refuse."""

import copy
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from value_sets import VALUE_SETS

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "trimtab"
NAMESPACE = "trimtab-system"
KUBE_VERSION = "1.34.0"
TIMEOUT_S = 100
Object = dict[str, Any]
Values = Mapping[str, Any]


def find(version: int) -> str:
    """By HELM3 and HELM4, on PATH (`helm3`, `helm4`, or a `helm` of that version), or built by e2e/cluster/build.

    Raises FileNotFoundError.
    """
    if named := os.environ.get(f"HELM{version}"):
        return named
    if found := shutil.which(f"helm{version}"):
        return found
    if (found := shutil.which("helm")) and _says(found).startswith(f"v{version}."):
        return found
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    built = Path(os.environ.get("CLUSTER_CACHE") or Path(cache) / "trimtab-cluster") / "bin" / f"helm{version}"
    if not built.exists():
        raise FileNotFoundError(f"neither on PATH nor at {built}")
    return str(built)


def _says(program: str) -> str:
    return subprocess.run([program, "version", "--template", "{{.Version}}"], stdout=subprocess.PIPE, text=True).stdout


class Helm:
    """One of them. `version` is 3 or 4."""

    def __init__(self, version: int, program: str, folder: Path) -> None:
        self.version = version
        self._program = program
        self._folder = folder
        self._files = 0
        self._sets: dict[str, list[Object]] = {}

    def run(
        self, *words: str | Path, values: Values | None = None, config: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Whatever it ends with."""
        command = [self._program, *map(str, words)]
        if values is not None:
            self._files += 1
            path = self._folder / f"values-{self._files}.yaml"
            path.write_text(yaml.safe_dump(dict(values)))
            command += ["--values", str(path)]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._folder),
            # Never the cluster that the person at the keyboard is logged in to.
            "KUBECONFIG": str(config or self._folder / "none"),
        }
        return subprocess.run(
            command, env=environment, cwd=self._folder, capture_output=True, text=True, timeout=TIMEOUT_S
        )

    def done(self, *words: str | Path, values: Values | None = None, config: Path | None = None) -> str:
        """What it says. Fails where it fails."""
        ran = self.run(*words, values=values, config=config)
        assert ran.returncode == 0, f"{' '.join(map(str, words))}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    def text(
        self,
        values: Values | None = None,
        *flags: str,
        chart: Path = CHART,
        release: str = "trimtab",
        namespace: str = NAMESPACE,
    ) -> str:
        """Of all objects, without a cluster."""
        where = ("--namespace", namespace, "--kube-version", KUBE_VERSION)
        return self.done("template", release, chart, *where, *flags, values=values or {})

    def objects(self, values: Values | None = None, *flags: str, **more: Any) -> list[Object]:
        return objects_in(self.text(values, *flags, **more))

    def of_set(self, name: str) -> list[Object]:
        """Of one of the `VALUE_SETS`: rendered once, and a copy for each who asks."""
        if name not in self._sets:
            self._sets[name] = self.objects(VALUE_SETS[name])
        return copy.deepcopy(self._sets[name])

    def refusal(self, values: Values) -> str:
        """Why values are not taken. Fails where they are."""
        ran = self.run("template", "trimtab", CHART, "--kube-version", KUBE_VERSION, values=values)
        assert ran.returncode != 0, f"taken: {values}"
        return ran.stderr


def helm_of(version: int, folder: Path) -> Helm:
    """Skips, loudly, where there is none; in CI it fails."""
    try:
        program = find(version)
    except OSError as error:
        reason = f"no helm {version}: {error}. Set HELM{version}, or run e2e/cluster/build helm"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return Helm(version, program, folder)


def objects_in(text: str) -> list[Object]:
    return [body for body in yaml.load_all(text, Loader=yaml.CSafeLoader) if body]


def named(objects: Sequence[Object], kind: str, name: str) -> Object:
    found = [body for body in objects if body["kind"] == kind and body["metadata"]["name"] == name]
    assert len(found) == 1, (
        f"{len(found)} of {kind} {name} among {[o['kind'] + '/' + o['metadata']['name'] for o in objects]}"
    )
    return found[0]


def of_kind(objects: Sequence[Object], kind: str) -> list[Object]:
    return [body for body in objects if body["kind"] == kind]


def pod_specs(objects: Sequence[Object]) -> dict[str, Object]:
    """By the name of what they belong to."""
    found = {}
    for body in objects:
        if body["kind"] == "Pod":
            found[body["metadata"]["name"]] = body["spec"]
        elif body["kind"] in ("Deployment", "StatefulSet", "Job"):
            found[body["metadata"]["name"]] = body["spec"]["template"]["spec"]
    return found
