"""The shipped roles: enough for all that the operator and its webhook do, and nothing in them that they never do."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from api_calls import ApiCalls
from declared import declared_policy, declared_pool
from fault_proxy import Call, FaultProxy, fault_proxy
from objective_crd import objective_crd
from valkey_server import ValkeyProcess, free_port
from waiting_on import eventually

from trimtab_operator.injection.marks import ENABLED, INJECT
from trimtab_operator.kube import (
    DEPLOYMENTS,
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    POLICIES,
    POOLS,
    SECRETS,
    SERVICES,
    WEBHOOKS,
    Kube,
    KubeError,
    Object,
    Resource,
)

pytestmark = pytest.mark.timeout(240)

MANIFEST = Path(__file__).parents[2] / "manifests" / "operator-rbac.yaml"
SYSTEM = "trimtab-system"
RBAC = "rbac.authorization.k8s.io/v1"
KINDS = {
    "ServiceAccount": Resource("v1", "serviceaccounts", "ServiceAccount"),
    "ClusterRole": Resource(RBAC, "clusterroles", "ClusterRole", is_namespaced=False),
    "ClusterRoleBinding": Resource(RBAC, "clusterrolebindings", "ClusterRoleBinding", is_namespaced=False),
    "Role": Resource(RBAC, "roles", "Role"),
    "RoleBinding": Resource(RBAC, "rolebindings", "RoleBinding"),
}
CONFIGURATION = f"trimtab-injection-{SYSTEM}"
Right = tuple[str, str, str]
"""API group, resource, verb."""


def documents() -> list[Object]:
    return [body for body in yaml.safe_load_all(MANIFEST.read_text()) if body]


def granted(account: str) -> set[Right]:
    """By the manifest, through whatever binding."""
    bodies = documents()
    roles = {
        body["roleRef"]["name"]
        for body in bodies
        if body["kind"].endswith("Binding") and body["subjects"][0]["name"] == account
    }
    return {
        (group, resource, verb)
        for body in bodies
        if body["kind"].endswith("Role") and body["metadata"]["name"] in roles
        for rule in body["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def right_of(call: Call) -> Right | None:
    """What the call needs; None: everybody may."""
    parts = call.path.strip("/").split("/")
    group, parts = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:]) if len(parts) > 3 else ("", [])
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    if not parts:
        return None
    resource, is_named = "/".join([parts[0], *parts[2:]]), len(parts) > 1
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    reading = "watch" if call.is_watch else "get" if is_named else "list"
    return group, resource, verbs.get(call.method, reading)


@contextlib.asynccontextmanager
async def roles_of(kube: Kube, kube_config: Path, namespaces: Iterable[str]) -> AsyncIterator[dict[str, str]]:
    """The manifest applied; for these namespaces only, or for all if there are none. Yields tokens by account."""
    with contextlib.suppress(KubeError):
        await kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
    bodies = []
    for body in documents():
        name = body["metadata"]["name"]
        if not namespaces or body["kind"] != "ClusterRoleBinding" or not name.endswith("-pools"):
            bodies.append(body)
            continue
        # As the manifest's own words say.
        bodies += [
            {**body, "kind": "RoleBinding", "metadata": {"name": name, "namespace": namespace}}
            for namespace in namespaces
        ]
    made: list[tuple[Resource, Object]] = []
    try:
        for body in bodies:
            await kube.create(KINDS[body["kind"]], body)
            made.append((KINDS[body["kind"]], body["metadata"]))
        with ApiCalls(kube_config) as api:
            tokens = {}
            for account in ("trimtab-operator", "trimtab-webhook"):
                path = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/{account}/token"
                status, answer = api.call("POST", path, {"spec": {"expirationSeconds": 3600}})
                assert status == 201, answer
                tokens[account] = answer["status"]["token"]
        yield tokens
    finally:
        for resource, about in made:
            await kube.delete(resource, about.get("namespace"), about["name"])


class Rig:
    """An operator and a webhook with nothing but their roles' rights; every call of theirs is on record."""

    def __init__(self, kube: Kube, proxy: FaultProxy, webhook_proxy: FaultProxy, store: ValkeyProcess) -> None:
        self.kube = kube
        self.proxy = proxy
        self.webhook_proxy = webhook_proxy
        self.store = store

    async def start(
        self, stack: contextlib.AsyncExitStack, folder: Path, tokens: dict[str, str], flags: list[str]
    ) -> None:
        port = free_port()
        common = ["--operator-namespace", SYSTEM, "--bind", "127.0.0.1", *flags]
        run = ["run", "--store", self.store.url, "--metrics-port", str(free_port()), *common]
        webhook = ["webhook", "--metrics-port", str(port), "--webhook-port", "0", *common]
        for account, proxy, words in (
            ("trimtab-operator", self.proxy, run),
            ("trimtab-webhook", self.webhook_proxy, webhook),
        ):
            config = yaml.safe_load(proxy.kubeconfig.read_text())
            config["users"][0]["user"] = {"token": tokens[account]}
            path = folder / f"{account}.kubeconfig"
            path.write_text(yaml.safe_dump(config))
            with (folder / f"{account}.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "trimtab_operator", *words, "--kubeconfig", str(path)),
                    env={"PATH": os.environ["PATH"], "POD_NAME": account},
                    stderr=log,
                )
            stack.push_async_callback(ended, process, goes_at_once=words is run)
        await eventually(lambda: is_ready(port), within_s=60)


async def ended(process: asyncio.subprocess.Process, *, goes_at_once: bool) -> None:
    """An operator gives its Lease back; a webhook that is told to go serves on for a while."""
    if process.returncode is None:
        process.terminate() if goes_at_once else process.kill()
        await asyncio.wait_for(process.wait(), 30)


async def is_ready(port: int) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/readyz") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def pod_on_a_node(kube: Kube, namespace: str) -> None:
    node = f"node-{namespace}"
    await kube.create(
        NODES,
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": node, "labels": {"topology.kubernetes.io/zone": "a"}},
        },
    )
    body = await kube.create(
        PODS,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "engine", "namespace": namespace, "labels": {"app": "vllm"}},
            "spec": {"nodeName": node, "containers": [{"name": "engine", "image": "x"}]},
        },
    )
    body["status"] = {
        "phase": "Running",
        "podIP": "127.77.0.1",
        "podIPs": [{"ip": "127.77.0.1"}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    await kube.replace(PODS, body, subresource="status")


async def everything_it_does(rig: Rig, namespace: str) -> None:
    """Make, change, mend and let go."""
    kube = rig.kube
    await kube.merge(NAMESPACES, None, namespace, {"metadata": {"labels": {INJECT: ENABLED}}})
    wanted = {"standalone": {"enabled": True, "replicas": 2}, "sidecar": {"inject": True}}
    await kube.create(POLICIES, declared_policy(namespace, **wanted))
    await kube.create(POOLS, declared_pool(namespace))
    await pod_on_a_node(kube, namespace)

    async def is_made() -> bool:
        status = (await kube.get(POLICIES, namespace, "chat") or {}).get("status") or {}
        parents = (await kube.get(POOLS, namespace, "chat") or {}).get("status", {}).get("parents") or []
        events, _ = await kube.list_all(EVENTS, namespace)
        return (status.get("endpoints") or {}).get("total", 0) == 1 and bool(parents) and bool(events)

    await eventually(is_made, within_s=60)

    # A child changed by hand so that it has to be made again, one whose Envoy is wanted no more, a Secret that is gone.
    await kube.delete(SECRETS, namespace, "trimtab-chat-store")
    before = await kube.get(DEPLOYMENTS, namespace, "trimtab-chat")
    assert before is not None
    await kube.merge(DEPLOYMENTS, namespace, "trimtab-chat", {"spec": {"replicas": 7}})

    async def is_mended() -> bool:
        body = await kube.get(DEPLOYMENTS, namespace, "trimtab-chat") or {}
        secret = await kube.get(SECRETS, namespace, "trimtab-chat-store")
        return body["spec"]["replicas"] == before["spec"]["replicas"] and secret is not None

    await eventually(is_mended, within_s=60)
    await kube.merge(POLICIES, namespace, "chat", {"spec": {"standalone": {"enabled": False}}})

    async def has_no_envoy() -> bool:
        return await kube.get(SERVICES, namespace, "trimtab-chat-envoy") is None

    await eventually(has_no_envoy, within_s=60)
    await kube.merge(POLICIES, namespace, "chat", {"spec": {"standalone": {"enabled": True}}})
    await eventually(lambda: kube.get(SERVICES, namespace, "trimtab-chat-envoy"), within_s=60)
    await kube.delete(POOLS, namespace, "chat")

    async def is_gone() -> bool:
        left: list[Any] = []
        for resource in (DEPLOYMENTS, SERVICES, SECRETS):
            left += (await kube.list_all(resource, namespace))[0]
        return not left

    await eventually(is_gone, within_s=60)


@contextlib.asynccontextmanager
async def rig_of(
    kube: Kube, kube_config: Path, folder: Path, *namespaces: str, flags: tuple[str, ...] = ()
) -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as stack:
        for name in ("store", "operator", "webhook"):
            (folder / name).mkdir()
        store = ValkeyProcess(folder / "store")
        await asyncio.to_thread(store.start)
        stack.callback(store.kill)
        tokens = await stack.enter_async_context(roles_of(kube, kube_config, namespaces))
        rig = Rig(
            kube,
            await stack.enter_async_context(fault_proxy(kube_config, folder / "operator")),
            await stack.enter_async_context(fault_proxy(kube_config, folder / "webhook")),
            store,
        )
        stack.push_async_callback(kube.delete, WEBHOOKS, None, CONFIGURATION)
        where = [word for namespace in namespaces for word in ("--namespace", namespace)]
        await rig.start(stack, folder, tokens, [*where, *flags])
        yield rig


def refused(proxy: FaultProxy) -> list[tuple[str, str]]:
    return [(call.method, call.path) for call, status in proxy.answers if status in (401, 403)]


def rights_used(proxy: FaultProxy) -> set[Right]:
    done = set()
    for call, status in proxy.answers:
        if (right := right_of(call)) is not None:
            done.add(right)
            if right[2] == "patch" and status == 201:
                # Server-side apply of what was not there: the API server asks for both.
                done.add((*right[:2], "create"))
    return done


NEVER_SEEN_HERE = {
    # A certificate is renewed after two thirds of its life.
    ("", "secrets", "update"),
    # This API server writes a node's zone on its pods; older ones do not.
    ("", "nodes", "get"),
}


async def test_the_roles_for_all_namespaces_are_enough_and_not_too_much(
    kube: Kube, kube_config: Path, namespace: str, tmp_path: Path
) -> None:
    async with objective_crd(kube), rig_of(kube, kube_config, tmp_path) as rig:
        await everything_it_does(rig, namespace)
        assert refused(rig.proxy) == []
        assert refused(rig.webhook_proxy) == []
        assert granted("trimtab-operator") - rights_used(rig.proxy) <= NEVER_SEEN_HERE
        assert granted("trimtab-webhook") == rights_used(rig.webhook_proxy)


async def test_the_roles_for_one_namespace_are_enough_and_reach_no_other(
    kube: Kube, kube_config: Path, namespace: str, tmp_path: Path
) -> None:
    async with objective_crd(kube), rig_of(kube, kube_config, tmp_path, namespace) as rig:
        await everything_it_does(rig, namespace)
        assert refused(rig.proxy) == []
        assert refused(rig.webhook_proxy) == []
        elsewhere = [
            call.path
            for call, _ in [*rig.proxy.answers, *rig.webhook_proxy.answers]
            if right_of(call) is not None
            and not call.path.startswith("/apis/apiextensions.k8s.io/")
            and not call.path.startswith("/apis/admissionregistration.k8s.io/")
            and not call.path.startswith("/api/v1/nodes/")
            and call.path != "/api/v1/namespaces/kube-system"
            and f"/namespaces/{namespace}" not in call.path
            and f"/namespaces/{SYSTEM}/" not in call.path
        ]
        assert elsewhere == []
