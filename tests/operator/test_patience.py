"""No Envoy of a pool gives up sooner than a request may wait in a picker, however the wait is changed."""

from collections.abc import Mapping
from typing import Any

import pytest
from child_objects import policy
from operator_parts import DeclaredPool, OperatorParts
from valkey_server import ValkeyProcess
from waiting_on import eventually

from trimtab_operator.children.labels import CONFIG
from trimtab_operator.kube import DEPLOYMENTS, POLICIES, Object
from trimtab_operator.patience import are_replaced, as_patient_as, told_wait_s
from trimtab_operator.policy_document import wait_s
from trimtab_state import StateUnavailable

ENVOY = "trimtab-chat-envoy"


def waits(seconds: int | None) -> dict[str, Any]:
    """None: they are refused."""
    full = {"action": "Reject"} if seconds is None else {"action": "Wait", "waitSeconds": seconds}
    return {"batchLimit": 2, "whenFull": full}


def envoys(config: str = "new", generation: int = 3, **status: int) -> Object:
    return {
        "metadata": {"generation": generation},
        "spec": {"template": {"metadata": {"annotations": {CONFIG: config}}}},
        "status": {"observedGeneration": generation, "replicas": 2, "updatedReplicas": 2} | status,
    }


@pytest.mark.parametrize(
    ("deployment", "expected"),
    [
        (None, True),
        (envoys(), True),
        (envoys(config="old"), False),
        (envoys(observedGeneration=2), False),
        (envoys(replicas=3), False),
        (envoys(updatedReplicas=1), False),
        (envoys() | {"status": None}, False),
        # Of the first generation there are no older ones.
        (envoys(generation=1) | {"status": None}, True),
        (envoys(generation=1, config="old") | {"status": None}, False),
        (envoys(replicas=0, updatedReplicas=0), True),
    ],
)
def test_envoys_are_replaced_when_none_of_before_runs(deployment: Mapping[str, Any] | None, expected: bool) -> None:
    assert are_replaced(deployment, "new") is expected


@pytest.mark.parametrize(
    ("asked", "before_s", "is_borne", "expected"),
    [(20, 5.0, False, 5.0), (20, 5.0, True, 20.0), (3, 5.0, False, 3.0), (20, 0.0, False, 0.0), (None, 5.0, True, 0.0)],
)
def test_a_longer_wait_is_held_back_and_a_shorter_one_is_not(
    asked: int | None, before_s: float, is_borne: bool, expected: float
) -> None:
    assert told_wait_s(policy(waits(asked)), before_s=before_s, is_borne=is_borne) == expected


@pytest.mark.parametrize(("asked", "longest_s", "made_for_s"), [(5, 20.0, 20.0), (20, 5.0, 20.0), (None, 7.0, 7.0)])
def test_envoys_are_made_for_the_longest_wait_that_there_may_be(
    asked: int | None, longest_s: float, made_for_s: float
) -> None:
    spec = policy(waits(asked))
    assert wait_s(as_patient_as(spec, longest_s)) == made_for_s
    assert as_patient_as(spec, wait_s(spec)) is spec


async def put_waits(cluster: DeclaredPool, seconds: int | None, *, has_envoy: bool = True) -> None:
    await cluster.put_policy(**waits(seconds), standalone={"enabled": has_envoy, "replicas": 2})


async def envoy(cluster: DeclaredPool) -> Object:
    body: Object = await eventually(lambda: cluster.kube.get(DEPLOYMENTS, cluster.namespace, ENVOY))
    return body


def has_config(cluster: DeclaredPool, *, other_than: Object) -> Any:
    async def has_it() -> bool:
        return config_of(await envoy(cluster)) != config_of(other_than)

    return has_it


def config_of(deployment: Object) -> str:
    found: str = deployment["spec"]["template"]["metadata"]["annotations"][CONFIG]
    return found


async def rolled(cluster: DeclaredPool, *, old: int = 0, new: int = 2) -> None:
    """As far as the Deployment's controller has come, which this cluster has none of."""
    generation = (await envoy(cluster))["metadata"]["generation"]
    status = {"observedGeneration": generation, "replicas": old + new, "updatedReplicas": new, "readyReplicas": new}
    body = {"status": status}
    await cluster.kube.merge(DEPLOYMENTS, cluster.namespace, ENVOY, body, subresource="status")


def told(parts: OperatorParts, seconds: float) -> Any:
    async def are_told() -> bool:
        try:
            control = await parts.control()
        except StateUnavailable:
            return False
        return control is not None and control.policy.overflow.wait_s == seconds

    return are_told


def said(cluster: DeclaredPool, text: str) -> Any:
    """Whether the condition holds these words; empty: it is not there."""

    async def is_said() -> bool:
        body = await cluster.kube.get(POLICIES, cluster.namespace, "chat") or {}
        found = [each for each in body.get("status", {}).get("conditions", []) if each["type"] == "WaitInForce"]
        if not found:
            return not text and bool(body.get("status"))
        return bool(text) and found[0]["reason"] == "EnvoysBeingReplaced" and text in found[0]["message"]

    return is_said


async def test_a_longer_wait_comes_after_the_envoys_and_a_shorter_one_before_them(
    cluster: DeclaredPool, server: ValkeyProcess
) -> None:
    await cluster.put_pool()
    await put_waits(cluster, 5)
    parts = cluster.operator(server.url)
    async with parts.at_work():
        await eventually(told(parts, 5.0))
        before = await envoy(cluster)
        await rolled(cluster)

        await put_waits(cluster, 20)
        await eventually(has_config(cluster, other_than=before))
        await eventually(said(cluster, "Requests wait for 5 s, and not yet for the 20 s"))
        await rolled(cluster, old=2, new=1)
        await eventually(said(cluster, "Replaced are 1 of 2"))
        assert await told(parts, 5.0)()

    # Another operator goes on with it.
    parts = cluster.operator(server.url)
    async with parts.at_work():

        async def has_looked() -> bool:
            return parts.run is not None and parts.run.decision is not None and len(parts.looks) >= 2

        await eventually(has_looked)
        assert await told(parts, 5.0)()
        await rolled(cluster)
        await eventually(told(parts, 20.0))
        await eventually(said(cluster, ""))

        # A store that does not take the shorter wait: the Envoys stay patient.
        patient = await envoy(cluster)
        server.pause()
        looks = len(parts.looks)
        await put_waits(cluster, 3)

        async def has_looked_again() -> bool:
            return len(parts.looks) > looks

        await eventually(has_looked_again)
        assert config_of(await envoy(cluster)) == config_of(patient)
        server.resume()
        await eventually(told(parts, 3.0))
        await eventually(has_config(cluster, other_than=patient))


async def test_requests_are_refused_until_the_envoys_let_them_wait_at_all(
    cluster: DeclaredPool, server: ValkeyProcess
) -> None:
    await cluster.put_pool()
    await put_waits(cluster, None)
    parts = cluster.operator(server.url)
    async with parts.at_work():
        await eventually(parts.control)
        before = await envoy(cluster)
        await put_waits(cluster, 20)
        await eventually(has_config(cluster, other_than=before))
        await eventually(said(cluster, "Requests are refused at once, and not yet"))
        assert await told(parts, 0.0)()
        await rolled(cluster)
        await eventually(told(parts, 20.0))


async def test_a_pool_behind_another_gateway_is_told_at_once(cluster: DeclaredPool, server: ValkeyProcess) -> None:
    await cluster.put_pool()
    await put_waits(cluster, 5, has_envoy=False)
    parts = cluster.operator(server.url)
    async with parts.at_work():
        await eventually(told(parts, 5.0))
        await put_waits(cluster, 20, has_envoy=False)
        await eventually(told(parts, 20.0))
        await eventually(said(cluster, ""))
