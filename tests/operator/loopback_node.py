"""A node made of this machine's processes: runs the pods of one namespace of a real API server on loopback addresses.

The one rule: it does what a kubelet, the Deployment controller and cluster DNS do for the objects it finds, by what
they say: commands, arguments, environment, secrets, volumes, probes, preStop, grace periods, rolling updates. It knows
nothing of Trimtab, but for what a shared network namespace needs: what listens on all addresses, or dials its own pod's
loopback, is told the pod's address; and paths of mounts lie below the node's own folder.
"""

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import envoy
import grpc
import grpc.aio
from cluster_dns import ClusterDns
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trimtab.processes import ProcessError, Supervisor
from trimtab_operator.kube import CONFIG_MAPS, DEPLOYMENTS, PODS, SECRETS, SERVICES, Kube, KubeError, Object

NODE_NAME = "loopback"
PERIOD_S = 0.2
HASH_LABEL = "pod-template-hash"
FOR_LISTENERS = {"trimtab-extproc", "trimtab-sidecar"}
"""Commands that take `--bind`."""
BINARIES = {
    "envoy": str(Path(envoy.__file__).parent / "_bin" / "envoy"),
    **{
        name: str(Path(sys.executable).parent / name)
        for name in ("trimtab-extproc", "trimtab-sidecar", "trimtab-operator", "python")
    },
}
"""What the images hold."""
_numbers = itertools.count(1)


def _address() -> str:
    """A loopback address that no other pod of this test process has."""
    number = next(_numbers)
    return f"127.{20 + os.getpid() % 200}.{number // 250}.{number % 250 + 1}"


@dataclass(slots=True, kw_only=True)
class _Pod:
    name: str
    ip: str
    folder: Path
    processes: list[str] = field(default_factory=list)
    is_ready: bool = False
    stopping: asyncio.Task[None] | None = None


class LoopbackNode:
    """`async with LoopbackNode(...) as node`: pods run while the block does."""

    def __init__(self, kube: Kube, namespace: str, folder: Path) -> None:
        self.kube = kube
        self.namespace = namespace
        self.supervisor = Supervisor(log_dir=folder / "logs")
        self._folder = folder
        self._dns = ClusterDns()
        self._resolver = folder / "resolv.conf"
        self._pods: dict[str, _Pod] = {}
        self._task: asyncio.Task[None] | None = None
        self.errors: list[str] = []

    async def __aenter__(self) -> "LoopbackNode":
        self._folder.mkdir(parents=True, exist_ok=True)
        address = _address()
        self._resolver.write_text(f"nameserver {address}\noptions ndots:1\n")
        await self._dns.start(address)
        await self.supervisor.__aenter__()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: Any) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        stopping = [pod.stopping for pod in self._pods.values() if pod.stopping is not None]
        for task in stopping:
            task.cancel()
        await asyncio.gather(*stopping, return_exceptions=True)
        # Nobody is left whom a late end could serve.
        self.supervisor.stop_grace_s = 0.5
        await self.supervisor.__aexit__(*error)
        self._dns.stop()

    def ip_of(self, pod: str) -> str:
        return self._pods[pod].ip

    def process_of(self, pod: str, container: str) -> str:
        """The supervisor's name of a container's process."""
        return next(name for name in self._pods[pod].processes if name.startswith(f"{pod}.{container}."))

    def pods_of(self, prefix: str) -> list[str]:
        """Names of the running pods that begin so."""
        return sorted(n for n, pod in self._pods.items() if n.startswith(prefix) and pod.stopping is None)

    async def _run(self) -> None:
        while True:
            try:
                await self._sync()
            except KubeError as error:
                self.errors.append(str(error))
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(PERIOD_S)

    async def _sync(self) -> None:
        deployments, _ = await self.kube.list_all(DEPLOYMENTS, self.namespace)
        for deployment in deployments:
            await self._roll(deployment)
        pods, _ = await self.kube.list_all(PODS, self.namespace)
        names = {pod["metadata"]["name"] for pod in pods}
        owners = {d["metadata"]["name"] for d in deployments}
        for body in pods:
            metadata = body["metadata"]
            owner = metadata.get("annotations", {}).get("loopback/deployment")
            if owner is not None and owner not in owners and "deletionTimestamp" not in metadata:
                await self.kube.delete(PODS, self.namespace, metadata["name"])
            await self._sync_pod(body)
        for name in set(self._pods) - names:
            await self._end(self._pods.pop(name), grace_s=0.0)
        await self._name_services([body for body in pods if "deletionTimestamp" not in body["metadata"]])

    # -- what the Deployment and ReplicaSet controllers do

    async def _roll(self, deployment: Object) -> None:
        metadata, spec = deployment["metadata"], deployment["spec"]
        name, wanted = metadata["name"], spec.get("replicas", 1)
        template = spec["template"]
        digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]
        pods, _ = await self.kube.list_all(PODS, self.namespace, label_selector=_selector(spec["selector"]))
        living = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        current = [pod for pod in living if pod["metadata"]["labels"].get(HASH_LABEL) == digest]
        ready = [pod for pod in current if _is_ready(pod)]
        for _ in range(wanted - len(current)):
            await self.kube.create(PODS, self._pod_of(name, template, digest))
        if len(ready) >= wanted:
            for pod in [*(pod for pod in living if pod not in current), *current[wanted:]]:
                await self.kube.delete(PODS, self.namespace, pod["metadata"]["name"])
        status = {
            "observedGeneration": metadata["generation"],
            "replicas": len(living),
            "updatedReplicas": min(wanted, len(current)),
            "readyReplicas": sum(map(_is_ready, living)),
            "availableReplicas": sum(map(_is_ready, living)),
        }
        if any(deployment.get("status", {}).get(key, 0) != value for key, value in status.items()):
            await self.kube.merge(DEPLOYMENTS, self.namespace, name, {"status": status}, subresource="status")

    def _pod_of(self, deployment: str, template: Object, digest: str) -> Object:
        metadata = template.get("metadata", {})
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{deployment}-{digest}-{os.urandom(3).hex()}",
                "namespace": self.namespace,
                "labels": {**metadata.get("labels", {}), HASH_LABEL: digest},
                "annotations": {**metadata.get("annotations", {}), "loopback/deployment": deployment},
            },
            "spec": {**template["spec"], "nodeName": NODE_NAME},
        }

    # -- what the kubelet does

    async def _sync_pod(self, body: Object) -> None:
        metadata = body["metadata"]
        name = metadata["name"]
        pod = self._pods.get(name)
        if pod is None:
            if "deletionTimestamp" in metadata:
                await self._forget(name)
                return
            pod = self._pods[name] = _Pod(name=name, ip=_address(), folder=self._folder / name)
            pod.folder.mkdir()
            await self._status(pod, is_ready=False)
            try:
                await self._start(pod, body)
            except LookupError:
                # As a kubelet does where a Secret is missing: again later.
                shutil.rmtree(pod.folder)
                del self._pods[name]
                return
        if "deletionTimestamp" in metadata:
            if pod.stopping is None:
                pod.stopping = asyncio.create_task(self._terminate(pod, body))
            return
        for volume in body["spec"].get("volumes", []):
            if "secret" in volume:
                await self._refresh(volume, pod.folder / volume["name"])
        is_ready = await self._probe(pod, body)
        if is_ready != pod.is_ready:
            pod.is_ready = is_ready
            await self._status(pod, is_ready=is_ready)

    async def _start(self, pod: _Pod, body: Object) -> None:
        mounts = await self._volumes(pod, body)
        for container in [*body["spec"].get("initContainers", []), *body["spec"]["containers"]]:
            words, env = await self._command(pod, container, body, mounts)
            name = f"{pod.name}.{container['name']}.{len(pod.processes)}"
            pod.processes.append(name)
            try:
                await self.supervisor.start(name, words, env=env)
            except ProcessError as error:
                self.errors.append(str(error))

    async def _command(
        self, pod: _Pod, container: Object, body: Object, mounts: Mapping[str, Path]
    ) -> tuple[list[str], dict[str, str]]:
        env: dict[str, str] = {}
        for entry in container.get("env", []):
            env[entry["name"]] = _expand(await self._value(entry, pod, body), env)
        words = [_expand(word, env) for word in [*container.get("command", []), *container.get("args", [])]]
        paths = {m["mountPath"]: mounts[m["name"]] for m in container.get("volumeMounts", []) if m["name"] in mounts}
        words = [_moved(word, paths) for word in words]
        env = {name: _moved(value, paths) for name, value in env.items()}
        program = words[0]
        words[0] = BINARIES.get(program, program)
        if program in FOR_LISTENERS:
            words += ["--bind", pod.ip]
        if program == "trimtab-sidecar":
            # Its loopback is the pod's.
            words = [re.sub(r"//(127\.0\.0\.1|localhost):", f"//{pod.ip}:", word) for word in words]
        if container["name"] == "drain":
            words = [word.replace("127.0.0.1:", f"{pod.ip}:") for word in words]
        if program == "envoy":
            mount = f"mount --bind {shlex.quote(str(self._resolver))} /etc/resolv.conf"
            words = ["unshare", "-m", "sh", "-c", f"{mount} && exec {shlex.join(words)}"]
        return words, env

    async def _value(self, entry: Object, pod: _Pod, body: Object) -> str:
        source = entry.get("valueFrom")
        if source is None:
            return str(entry.get("value", ""))
        if (reference := source.get("secretKeyRef")) is not None:
            secret = await self.kube.get(SECRETS, self.namespace, reference["name"])
            if secret is None:
                raise LookupError(f"{pod.name}: no Secret {reference['name']}")
            return base64.b64decode(secret["data"][reference["key"]]).decode()
        path = source["fieldRef"]["fieldPath"]
        fields = {
            "status.podIP": pod.ip,
            "metadata.name": pod.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": body["metadata"]["uid"],
            "spec.nodeName": NODE_NAME,
        }
        return fields[path]

    async def _volumes(self, pod: _Pod, body: Object) -> dict[str, Path]:
        """Folders by volume name; those of the host are left where they are."""
        folders: dict[str, Path] = {}
        for volume in body["spec"].get("volumes", []):
            name = volume["name"]
            folder = folders[name] = pod.folder / name
            folder.mkdir()
            if (source := volume.get("configMap")) is not None:
                found = await self.kube.get(CONFIG_MAPS, self.namespace, source["name"])
                for file, text in (found or {}).get("data", {}).items():
                    # Envoy's listeners, and its admin API on what is its own loopback only in a pod.
                    (folder / file).write_text(re.sub(r'"(0\.0\.0\.0|127\.0\.0\.1)"', f'"{pod.ip}"', text))
            elif "secret" in volume:
                await self._refresh(volume, folder)
            elif (source := volume.get("hostPath")) is not None:
                folder.rmdir()
                folders[name] = Path(source["path"])
        return folders

    async def _refresh(self, volume: Object, folder: Path) -> None:
        """What the Secret of a volume holds now: a kubelet looks again and again, also where there was none."""
        source = volume["secret"]
        found = await self.kube.get(SECRETS, self.namespace, source["secretName"])
        if found is None and not source.get("optional"):
            raise LookupError(f"no Secret {source['secretName']}")
        for file, text in (found or {}).get("data", {}).items():
            value = base64.b64decode(text)
            if not (folder / file).exists() or (folder / file).read_bytes() != value:
                (folder / f"..{file}").write_bytes(value)
                (folder / f"..{file}").replace(folder / file)

    async def _probe(self, pod: _Pod, body: Object) -> bool:
        for container in body["spec"]["containers"]:
            if not all(self.supervisor.is_running(name) for name in pod.processes):
                return False
            probe = container.get("readinessProbe")
            if probe is not None and not await _answers(probe, container, pod.ip):
                return False
        return True

    async def _status(self, pod: _Pod, *, is_ready: bool) -> None:
        condition = {"type": "Ready", "status": "True" if is_ready else "False", "reason": "Probe", "message": ""}
        status = {
            "phase": "Running",
            "podIP": pod.ip,
            "podIPs": [{"ip": pod.ip}],
            "conditions": [condition | {"lastTransitionTime": "2026-01-01T00:00:00Z"}],
        }
        with contextlib.suppress(KubeError):
            await self.kube.merge(PODS, self.namespace, pod.name, {"status": status}, subresource="status")

    async def _terminate(self, pod: _Pod, body: Object) -> None:
        try:
            await asyncio.gather(
                *(
                    self._pre_stop(pod, container, body, container.get("lifecycle", {}).get("preStop", {}))
                    for container in [*body["spec"]["containers"], *body["spec"].get("initContainers", [])]
                )
            )
            grace_s = float(body["metadata"].get("deletionGracePeriodSeconds", 30))
            await self._end(pod, grace_s=grace_s)
        finally:
            self._pods.pop(pod.name, None)
            await self._forget(pod.name)

    async def _pre_stop(self, pod: _Pod, container: Object, body: Object, hook: Object) -> None:
        if "exec" in hook:
            mounts = {v["name"]: pod.folder / v["name"] for v in body["spec"].get("volumes", [])}
            words, env = await self._command(
                pod, {**container, "command": hook["exec"]["command"], "args": []}, body, mounts
            )
            run = await asyncio.create_subprocess_exec(*words, env={**os.environ, **env})
            await run.wait()
        elif "httpGet" in hook:
            url = f"http://{hook['httpGet'].get('host', pod.ip)}:{hook['httpGet']['port']}{hook['httpGet']['path']}"
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
                with contextlib.suppress(aiohttp.ClientError):
                    await session.get(url)
        elif "sleep" in hook:
            await asyncio.sleep(hook["sleep"]["seconds"])

    async def _end(self, pod: _Pod, *, grace_s: float) -> None:
        async def stop(name: str) -> None:
            with contextlib.suppress(KeyError):
                self.supervisor.stop_grace_s = grace_s
                await self.supervisor.stop(name)

        await asyncio.gather(*(stop(name) for name in pod.processes))

    async def _forget(self, name: str) -> None:
        with contextlib.suppress(KubeError):
            await self.kube.delete(PODS, self.namespace, name, grace_s=0)

    # -- what cluster DNS does

    async def _name_services(self, pods: list[Object]) -> None:
        services, _ = await self.kube.list_all(SERVICES, self.namespace)
        records: dict[str, list[str]] = {}
        for service in services:
            selector = service["spec"].get("selector")
            if selector and service["spec"].get("clusterIP") == "None":
                backends = [
                    self._pods[pod["metadata"]["name"]]
                    for pod in pods
                    if selector.items() <= pod["metadata"].get("labels", {}).items()
                    and pod["metadata"]["name"] in self._pods
                ]
                name = f"{service['metadata']['name']}.{self.namespace}.svc.cluster.local"
                records[name] = [pod.ip for pod in backends if pod.is_ready]
        self._dns.records = records


def _selector(selector: Object) -> str:
    return ",".join(f"{name}={value}" for name, value in selector["matchLabels"].items())


def _is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _expand(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes does it: unknown names stay."""
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda found: env.get(found[1], found[0]), text)


def _moved(text: str, paths: Mapping[str, Path]) -> str:
    for path in sorted(paths, key=len, reverse=True):
        if text == path or f"{path}/" in text or text.endswith(path):
            return text.replace(path, str(paths[path]))
    return text


async def _answers(probe: Object, container: Object, ip: str) -> bool:
    ports = {port.get("name"): port["containerPort"] for port in container.get("ports", [])}
    if (get := probe.get("httpGet")) is not None:
        port = ports.get(get["port"], get["port"])
        timeout = aiohttp.ClientTimeout(total=2)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"http://{ip}:{port}{get.get('path', '/')}") as response,
            ):
                return response.status < 400
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
    if (check := probe.get("grpc")) is not None:
        async with grpc.aio.insecure_channel(f"{ip}:{check['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=check.get("service", ""))
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    if (dial := probe.get("tcpSocket")) is not None:
        try:
            _, writer = await asyncio.open_connection(ip, ports.get(dial["port"], dial["port"]))
        except OSError:
            return False
        writer.close()
        return True
    raise NotImplementedError(f"probe {probe}")
