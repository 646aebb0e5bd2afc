"""Status and Events of pools on a real API server say what is, not what was asked for."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import pytest
from declared import LABELS, POOL, declared_policy, declared_pool
from operator_parts import DeclaredPool
from valkey_server import ValkeyProcess
from waiting_on import eventually

from trimtab_operator.injection.marks import ENABLED, INJECT
from trimtab_operator.kube import EVENTS, NAMESPACES, PODS, POLICIES, POOLS, Object

OTHERS = "somebody-elses-picker"
"""So that only a policy makes the pool ours."""


async def status(cluster: DeclaredPool, name: str = POOL) -> Mapping[str, Any]:
    """Of the policy."""
    body = await cluster.kube.get(POLICIES, cluster.namespace, name) or {}
    found: Mapping[str, Any] = body.get("status", {})
    return found


async def condition(cluster: DeclaredPool, type_: str, name: str = POOL) -> Mapping[str, Any]:
    found = [each for each in (await status(cluster, name)).get("conditions", []) if each["type"] == type_]
    return found[0] if found else {}


async def events(cluster: DeclaredPool, reason: str) -> list[Object]:
    found, _ = await cluster.kube.list_all(EVENTS, cluster.namespace)
    return [event for event in found if event["reason"] == reason]


async def put_pod(cluster: DeclaredPool, name: str, labels: Mapping[str, str], image: str = "vllm:1") -> None:
    """One that is ready."""
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": cluster.namespace, "labels": dict(labels)},
        "spec": {"containers": [{"name": "main", "image": image}]},
    }
    await cluster.kube.create(PODS, body)
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    said = {"status": {"phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}], "conditions": [ready]}}
    await cluster.kube.merge(PODS, cluster.namespace, name, said, subresource="status")


async def test_what_the_pickers_are_to_be_told_is_not_active_before_the_store_has_it(
    cluster: DeclaredPool, server: ValkeyProcess
) -> None:
    await cluster.put_pool()
    await cluster.put_policy()
    parts = cluster.operator(server.url)

    async def is_placed(how: str, reason: str) -> bool:
        fallback = await condition(cluster, "Fallback")
        return ((await status(cluster)).get("activePolicy"), fallback.get("reason")) == (how, reason)

    async with parts.at_work():
        await eventually(lambda: is_placed("Product", "Watching"))
        server.kill()
        await cluster.put_policy(mode="RoundRobin")
        await eventually(lambda: is_placed("Product", "NotTold"))

        async def is_away() -> bool:
            return (await condition(cluster, "StoreReachable")).get("reason") == "StoreUnavailable"

        await eventually(is_away)
        assert f"127.0.0.1:{urlsplit(server.url).port}" in (await condition(cluster, "StoreReachable"))["message"]
        server.start()
        await eventually(lambda: is_placed("RoundRobin", "Overridden"))


@pytest.mark.parametrize(("picker", "type_"), [("", "Normal"), (OTHERS, "Warning")])
async def test_a_policy_that_is_deleted_is_told_of_on_its_pool(
    cluster: DeclaredPool, server: ValkeyProcess, picker: str, type_: str
) -> None:
    await cluster.put_pool(picker=picker)
    await cluster.put_policy()
    async with cluster.operator(server.url).at_work():
        await eventually(cluster.pickers)
        await eventually(lambda: status(cluster))
        await cluster.delete_policy()

        async def found() -> list[Object]:
            return await events(cluster, "NoPolicy")

        (event,) = await eventually(found)
    assert (event["regarding"]["kind"], event["regarding"]["name"], event["type"]) == (POOLS.kind, POOL, type_)
    assert event["note"].startswith(f"SchedulingPolicy {POOL} is deleted")


async def test_two_pools_that_ask_for_the_same_pods_name_each_other(
    cluster: DeclaredPool, server: ValkeyProcess
) -> None:
    kube, namespace = cluster.kube, cluster.namespace
    await kube.merge(NAMESPACES, None, namespace, {"metadata": {"labels": {INJECT: ENABLED}}})
    await put_pod(cluster, "engine", {**LABELS, "model": "qwen"})
    for name, selector in ((POOL, LABELS), ("code", {"model": "qwen"})):
        await kube.apply(declared_pool(namespace, name, selector={"matchLabels": selector}), manager="test")
        policy = declared_policy(namespace, name, pool=name, sidecar={"inject": True})
        await kube.apply(policy, manager="test")

    async def says(name: str, reason: str, text: str) -> bool:
        parts.look()
        said = await condition(cluster, "SidecarsInjected", name)
        return said.get("reason") == reason and text in said["message"]

    parts = cluster.operator(server.url)
    async with parts.at_work():
        await eventually(lambda: says("code", "SeveralPools", f"1 pod with pool {POOL}."), within_s=40)
        await eventually(lambda: says(POOL, "SeveralPools", "1 pod with pool code."), within_s=40)
        await eventually(lambda: says(POOL, "SeveralPools", "the sidecar of this one, which is the oldest"))
        await eventually(lambda: says("code", "SeveralPools", f"the sidecar of the oldest ({POOL})"))
        await kube.apply(declared_policy(namespace, "code", pool="code"), manager="test")
        await eventually(lambda: says(POOL, "PodsNotInjected", "1 of 1 pod"), within_s=40)


async def test_the_version_is_that_of_the_pickers_that_are_ready(cluster: DeclaredPool, server: ValkeyProcess) -> None:
    await cluster.put_pool()
    await cluster.put_policy()

    async def version() -> str:
        return str((await status(cluster)).get("pickers", {}).get("version", ""))

    async with cluster.operator(server.url, picker_image="trimtab:2").at_work():
        deployment = await eventually(cluster.pickers)
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        await put_pod(cluster, "picker-old", labels, image="trimtab:1")

        async def is_old() -> bool:
            return await version() == "1 -> 2"

        await eventually(is_old, within_s=40)
        await put_pod(cluster, "picker-new", labels, image="trimtab:2")
        await cluster.kube.delete(PODS, cluster.namespace, "picker-old", grace_s=0)

        async def is_new() -> bool:
            return await version() == "2"

        await eventually(is_new, within_s=40)
