"""What a kubelet does with one container: variables, references, mounts; then it runs it, and at the end its preStop.

The one rule: it reads the container as the API server has it. Only what a machine without pods needs is changed: mount
paths lead to folders of the test, and what binds or dials all of loopback stays on loopback.
"""

import asyncio
import base64
import contextlib
import os
import re
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from trimtab_operator.kube import CONFIG_MAPS, SECRETS, Kube, Object

POD_IP = "127.0.0.1"


class Kubelet:
    """Of one pod. `folders`: where the volumes are, by name."""

    def __init__(self, kube: Kube, pod: Object, folders: Mapping[str, Path]) -> None:
        self._kube = kube
        self._pod = pod
        self._folders = folders

    async def command(self, container: Object) -> tuple[list[str], dict[str, str]]:
        """Words and environment to start the container's program with."""
        env = await self.env(container)
        words = [*container.get("command", []), *container.get("args", [])]
        return self._program([self._moved(_expand(word, env), container) for word in words]), env

    async def pre_stop(self, container: Object) -> tuple[list[str], dict[str, str]]:
        """Of the hook: in the container's environment, its words as they stand."""
        words = container["lifecycle"]["preStop"]["exec"]["command"]
        return self._program([self._moved(word, container) for word in words]), await self.env(container)

    async def env(self, container: Object) -> dict[str, str]:
        env: dict[str, str] = {}
        for source in container.get("envFrom", []):
            env |= await self._all_of(source)
        for entry in container.get("env", []):
            value = await self._value(entry, env)
            if value is not None:
                env[entry["name"]] = self._moved(value, container)
        return env

    async def mount_secrets(self) -> None:
        """Write into the folders of Secrets what these hold now, as a kubelet does again and again."""
        for volume in self._pod["spec"].get("volumes", []):
            source, folder = volume.get("secret"), self._folders.get(volume["name"])
            if source is None or folder is None:
                continue
            folder.mkdir(exist_ok=True)
            values = await self._object("secret", source["secretName"])
            assert values is not None or source.get("optional"), f"the kubelet would not start the pod: {source}"
            for name, value in (values or {}).items():
                (folder / name).write_text(value)

    async def _value(self, entry: Object, env: Mapping[str, str]) -> str | None:
        source = entry.get("valueFrom")
        if source is None:
            return _expand(entry.get("value", ""), env)
        if "fieldRef" in source:
            return {"status.podIP": POD_IP, "metadata.name": self._pod["metadata"]["name"]}[
                source["fieldRef"]["fieldPath"]
            ]
        kind = "secretKeyRef" if "secretKeyRef" in source else "configMapKeyRef"
        reference = source[kind]
        values = await self._object("secret" if kind == "secretKeyRef" else "configMap", reference["name"])
        if values is None or reference["key"] not in values:
            assert reference.get("optional"), f"the kubelet would not start the container: {reference}"
            return None
        return values[reference["key"]]

    async def _all_of(self, source: Object) -> dict[str, str]:
        for kind in ("secret", "configMap"):
            if (reference := source.get(f"{kind}Ref")) is not None:
                values = await self._object(kind, reference["name"]) or {}
                return {source.get("prefix", "") + name: value for name, value in values.items()}
        return {}

    async def _object(self, kind: str, name: str) -> dict[str, str] | None:
        found = await self._kube.get(
            SECRETS if kind == "secret" else CONFIG_MAPS, self._pod["metadata"]["namespace"], name
        )
        if found is None:
            return None
        data = found.get("data") or {}
        return {key: base64.b64decode(value).decode() if kind == "secret" else value for key, value in data.items()}

    def _moved(self, text: str, container: Object) -> str:
        for mount in container.get("volumeMounts", []):
            folder = self._folders.get(mount["name"])
            if folder is not None:
                path = re.escape(mount["mountPath"])
                text = re.sub(rf"{path}(?=/|\"|$)", str(folder), text)
        return f"--bind={POD_IP}" if text == "--bind=" else text

    def _program(self, words: list[str]) -> list[str]:
        return [str(Path(sys.executable).parent / words[0]), *words[1:]]


def _expand(text: str, env: Mapping[str, str]) -> str:
    """As the kubelet does: `$$` is a dollar, unknown names stay."""
    return re.sub(
        r"\$(?:\$|\(([^()]*)\))", lambda found: "$" if found[1] is None else env.get(found[1], found[0]), text
    )


@contextlib.asynccontextmanager
async def process(words: list[str], env: Mapping[str, str], log: Path) -> AsyncIterator[Process]:
    """With no other environment than this one; killed at the end if it still runs."""
    with log.open("ab") as output:
        started = await asyncio.create_subprocess_exec(
            *words, env={"PATH": os.environ["PATH"], **env}, stdout=output, stderr=output
        )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()
