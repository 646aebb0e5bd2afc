"""One pool from `kubectl apply` to an answered request and back: real API server, store, operator, pickers, Envoy."""

import os
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest
from operator_rig import ENGINE_PORT, POOL, OperatorRig
from waiting_on import eventually

from trimtab_operator.kube import DEPLOYMENTS, EVENTS, PODS, POOLS, SERVICES
from trimtab_state import Alarm, AlarmWriter, connect

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="a cluster's DNS for Envoy needs a mount namespace, so root"),
]


async def settled(rig: OperatorRig, engines: int) -> None:
    """Every part is ready, and every endpoint is known exactly."""

    async def is_well() -> bool:
        prefix = await rig.condition("PrefixAware")
        ready = await rig.condition("Ready")
        document = await rig.control()
        return (
            prefix.get("reason") == "Exact"
            and ready.get("reason") == "Ready"
            and document is not None
            and len(document.endpoints) == engines
        )

    await eventually(is_well, within_s=120)


async def is_ready(rig: OperatorRig, pod: str) -> bool:
    body = await rig.kube.get(PODS, rig.namespace, pod) or {}
    return any(
        each == {**each, "type": "Ready", "status": "True"} for each in body.get("status", {}).get("conditions", ())
    )


async def ask(session: aiohttp.ClientSession, url: str, text: str, **body: object) -> aiohttp.ClientResponse:
    """One chat, streamed."""
    request = {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": True, **body}
    return await session.post(f"{url}/v1/chat/completions", json=request)


async def test_a_pool_is_applied_serves_and_goes(rig: OperatorRig) -> None:
    # An engine that comes before its pool serves; its sidecar waits for the pool's Secret.
    await rig.start_engine("engine-a")
    await eventually(lambda: is_ready(rig, "engine-a"), within_s=60)
    await rig.start_operator()
    await rig.apply_policy(picker={"tls": False}, standalone={"enabled": True, "replicas": 1})
    await rig.apply_pool()
    await rig.start_engine("engine-b")
    await settled(rig, 2)
    url = rig.front()
    text = "Which pod holds this prompt? " * 200
    async with aiohttp.ClientSession() as session:
        await eventually(lambda: is_chosen_by_a_picker(session, rig))
        before = await counts(session, rig)
        served = []
        for _ in range(3):
            async with await ask(session, url, text, max_tokens=4) as response:
                assert response.status == 200, await response.text()
                await response.read()
            served.append({pod: count - before[pod] for pod, count in (await counts(session, rig)).items()})
        # The same prompt three times: one pod has all of them.
        assert sorted(served[-1].values()) == [0, 3]

        # The pod that serves is deleted while it streams: the stream ends well, the next request goes elsewhere.
        busy = max(served[-1], key=served[-1].__getitem__)
        async with await ask(session, url, text, max_tokens=300) as response:
            assert response.status == 200
            await response.content.readline()
            await rig.kube.delete(PODS, rig.namespace, busy, grace_s=60)

            address = f"{rig.node.ip_of(busy)}:{ENGINE_PORT}"
            await eventually(lambda: is_no_candidate(session, rig, address), within_s=5)
            other = next(name for name in served[-1] if name != busy)
            so_far = (await counts(session, rig))[other]
            async with await ask(session, url, text, max_tokens=2) as second:
                assert second.status == 200
                await second.read()
            assert await eventually(lambda: has_served(session, rig, other, so_far + 1), within_s=5)
            last = [line async for line in response.content if line.strip()][-1]
            assert last.strip() == b"data: [DONE]"

    await rig.kube.delete(POOLS, rig.namespace, POOL)

    async def is_swept() -> bool:
        left = [
            *(await rig.kube.list_all(DEPLOYMENTS, rig.namespace))[0],
            *(await rig.kube.list_all(SERVICES, rig.namespace))[0],
        ]
        return not left and not await rig.store_keys()

    await eventually(is_swept, within_s=60)


async def test_an_operator_that_was_away_and_a_pool_that_is_made_again(rig: OperatorRig) -> None:
    await rig.start_operator()
    await rig.apply_policy(picker={"tls": False}, standalone={"enabled": True, "replicas": 1})
    await rig.apply_pool()
    await rig.start_engine("engine-a")
    await settled(rig, 1)
    url = rig.front()
    async with aiohttp.ClientSession() as session:
        # Killed: requests go on. A pod that came meanwhile is a member once an operator is back.
        rig.supervisor.kill("operator")
        async with await ask(session, url, "Is anybody there?", max_tokens=2) as response:
            assert response.status == 200
        await rig.start_engine("engine-b")
        children = {child["metadata"]["uid"] for child in (await rig.kube.list_all(DEPLOYMENTS, rig.namespace))[0]}
        await rig.start_operator(name="operator-2")
        await settled(rig, 2)
        assert children == {
            child["metadata"]["uid"] for child in (await rig.kube.list_all(DEPLOYMENTS, rig.namespace))[0]
        }

        # Deleted and made again under its running sidecars: they are logged in again, and known as before.
        await rig.kube.delete(POOLS, rig.namespace, POOL)

        async def is_gone() -> bool:
            return not (await rig.kube.list_all(DEPLOYMENTS, rig.namespace))[0] and await rig.control() is None

        await eventually(is_gone, within_s=60)
        await rig.apply_pool()
        await settled(rig, 2)
        await eventually(lambda: is_chosen_by_a_picker(session, rig), within_s=60)


async def test_alarms_that_keep_firing_switch_the_pool_and_quiet_brings_it_back(rig: OperatorRig) -> None:
    await rig.start_operator()
    fallback = {"alarms": 2, "windowSeconds": 60, "quietSeconds": 5, "minimumStaySeconds": 0}
    await rig.apply_policy(standalone={"enabled": False}, fallback=fallback)
    await rig.apply_pool()

    async def policy_is(name: str) -> bool:
        document = await rig.control()
        return document is not None and document.policy.policy == name

    await eventually(lambda: policy_is("product"))
    store = connect(rig.store.url)
    try:
        for prefix_class in ("00000000000000aa", "00000000000000bb"):
            await AlarmWriter(store, rig.keys).write(Alarm(prefix_class=prefix_class, acted=True))
    finally:
        await store.close()
    await eventually(lambda: policy_is("round_robin"))
    condition = await eventually(lambda: fallback_condition(rig, "True"))
    assert "2 hotspot alarms of 2 prefix classes" in condition["message"]
    await eventually(lambda: policy_is("product"))
    await eventually(lambda: fallback_condition(rig, "False"))

    async def are_told() -> bool:
        events, _ = await rig.kube.list_all(EVENTS, rig.namespace)
        reasons = {event["reason"] for event in events if event["regarding"]["kind"] == "SchedulingPolicy"}
        return {"FallbackStarted", "FallbackEnded"} <= reasons

    # An Event is written after the status that it tells of.
    await eventually(are_told)


async def test_a_service_of_somebody_elses_is_never_adopted(rig: OperatorRig) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"trimtab-{POOL}", "namespace": rig.namespace},
        "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 9002}]},
    }
    before = await rig.kube.create(SERVICES, theirs)
    await rig.start_operator()
    await rig.apply_policy(standalone={"enabled": False})
    await rig.apply_pool()

    async def is_said() -> bool:
        return (await rig.condition("ResolvedRefs")).get("reason") == "ServiceNotOurs"

    await eventually(is_said)
    assert await rig.kube.get(SERVICES, rig.namespace, f"trimtab-{POOL}") == before
    await rig.kube.delete(SERVICES, rig.namespace, f"trimtab-{POOL}")

    async def is_ours() -> bool:
        return (await rig.condition("ResolvedRefs")).get("status") == "True"

    await eventually(is_ours)


async def test_a_child_that_is_deleted_while_the_store_is_away_is_made_again(rig: OperatorRig) -> None:
    await rig.start_operator()
    await rig.apply_policy(standalone={"enabled": False})
    await rig.apply_pool()

    async def is_there() -> bool:
        return await rig.kube.get(SERVICES, rig.namespace, f"trimtab-{POOL}") is not None

    await eventually(is_there)
    rig.store.kill()
    await rig.kube.delete(SERVICES, rig.namespace, f"trimtab-{POOL}")
    await eventually(is_there)


async def fallback_condition(rig: OperatorRig, status: str) -> Mapping[str, Any]:
    condition = await rig.condition("Fallback")
    return condition if condition.get("status") == status else {}


async def is_chosen_by_a_picker(session: aiohttp.ClientSession, rig: OperatorRig) -> bool:
    """Envoy asks the pickers by now; until it has found them it goes round robin."""
    async with await ask(session, rig.front(), "hello", max_tokens=1) as response:
        await response.read()
    decisions = 0
    for url in pickers(rig):
        async with session.get(f"{url}/decisions") as response:
            decisions += len((await response.json())["decisions"])
    return decisions > 0


def pickers(rig: OperatorRig) -> list[str]:
    """URLs of the pickers' pages."""
    pods = [pod for pod in rig.node.pods_of(f"trimtab-{POOL}-") if "-envoy-" not in pod]
    return [f"http://{rig.node.ip_of(pod)}:9090" for pod in pods]


async def is_no_candidate(session: aiohttp.ClientSession, rig: OperatorRig, address: str) -> bool:
    """Every picker knows that it is draining."""
    for url in pickers(rig):
        async with session.get(f"{url}/state") as response:
            rows = (await response.json())["endpoints"]
        if any(row["candidate"] for row in rows if row["endpoint"] == address):
            return False
    return True


async def has_served(session: aiohttp.ClientSession, rig: OperatorRig, pod: str, count: int) -> bool:
    return (await counts(session, rig))[pod] == count


async def counts(session: aiohttp.ClientSession, rig: OperatorRig) -> dict[str, int]:
    """Finished and running requests by engine pod."""
    found = {}
    for pod in rig.node.pods_of("engine-"):
        async with session.get(f"http://{rig.node.ip_of(pod)}:{ENGINE_PORT}/metrics") as response:
            lines = (await response.text()).splitlines()
        found[pod] = int(
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:request_success_total"))
        )
    return found
