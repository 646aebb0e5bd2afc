"""Priorities of the cluster's InferenceObjectives, from `kubectl apply` to who is served first: all parts, all real."""

import asyncio
import os
from typing import Any

import aiohttp
import pytest
from objective_crd import objective_crd, put_objective
from operator_rig import POOL, OperatorRig
from waiting_on import eventually

from trimtab.explain import as_table
from trimtab_operator.objectives import OBJECTIVES

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="a cluster's DNS for Envoy needs a mount namespace, so root"),
]


async def ask(
    session: aiohttp.ClientSession, rig: OperatorRig, objective: str, served: list[str], *, max_tokens: int = 2
) -> int:
    """The status; the objective's name is noted when its answer is there."""
    messages = [{"role": "user", "content": f"asked for {objective}"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"x-gateway-inference-objective": objective} if objective else {}
    async with session.post(f"{rig.front()}/v1/chat/completions", json=body, headers=headers) as response:
        await response.read()
        served.append(objective)
        return response.status


async def page(session: aiohttp.ClientSession, rig: OperatorRig, path: str) -> str:
    """Of the one picker."""
    ip = rig.node.ip_of(rig.node.pods_of(f"trimtab-{POOL}")[0])
    async with session.get(f"http://{ip}:9090{path}") as response:
        return await response.text()


async def decisions(session: aiohttp.ClientSession, rig: OperatorRig) -> list[dict[str, Any]]:
    ip = rig.node.ip_of(rig.node.pods_of(f"trimtab-{POOL}")[0])
    async with session.get(f"http://{ip}:9090/decisions?count=20") as response:
        found: list[dict[str, Any]] = (await response.json(content_type=None))["decisions"]
        return found


async def test_objectives_of_the_cluster_say_who_is_served_first_and_who_is_refused(rig: OperatorRig) -> None:
    async with objective_crd(rig.kube), aiohttp.ClientSession() as session:
        await put_objective(rig.kube, rig.namespace, "gold", 10)
        await put_objective(rig.kube, rig.namespace, "crawl", -1)
        await rig.start_operator()
        await rig.apply_policy(
            picker={"tls": False, "replicas": 1},
            standalone={"enabled": True, "replicas": 1},
            batchLimit=1,
            whenFull={"action": "Wait", "waitSeconds": 60},
        )
        await rig.apply_pool()
        await rig.start_engine("engine")

        async def is_served() -> bool:
            prefix, ready = await rig.condition("PrefixAware"), await rig.condition("Ready")
            if (prefix.get("reason"), ready.get("reason")) != ("Exact", "Ready"):
                return False
            served: list[str] = []
            await ask(session, rig, "gold", served)
            newest = (await decisions(session, rig))[:1]
            return bool(newest) and newest[0]["priority"] == 10

        await eventually(is_served, within_s=120)
        assert "objective gold, priority 10" in as_table((await decisions(session, rig))[0])
        control = await rig.control()
        assert control is not None
        assert control.policy.overflow.wait_s == 60

        async def waiting(count: int) -> bool:
            text = await page(session, rig, "/metrics")
            found = [line for line in text.splitlines() if line.startswith("trimtab_waiting_requests{")]
            return float(found[0].rpartition(" ")[2]) == count

        async def is_busy() -> bool:
            text = await page(session, rig, "/metrics")
            return any(
                line.startswith("trimtab_open_reservations{") and line.endswith(" 1.0") for line in text.splitlines()
            )

        served: list[str] = []
        busy = asyncio.create_task(ask(session, rig, "", served, max_tokens=700))
        await eventually(is_busy)
        tasks = []
        for count, name in enumerate(("unheard-of", "gold"), 1):
            tasks.append(asyncio.create_task(ask(session, rig, name, served)))
            await eventually(lambda count=count: waiting(count))
        assert await ask(session, rig, "crawl", served) == 429
        assert not busy.done()
        assert await asyncio.gather(busy, *tasks) == [200, 200, 200]
        assert served == ["crawl", "", "gold", "unheard-of"]
        assert 'reason="sheddable"} 1.0' in await page(session, rig, "/metrics")
        shown = as_table((await decisions(session, rig))[0])
        assert "objective unheard-of (not known), waited" in shown

        # Another priority is followed while everything runs.
        await rig.kube.merge(OBJECTIVES, rig.namespace, "crawl", {"spec": {"priority": 3}})

        async def is_followed() -> bool:
            await ask(session, rig, "crawl", served)
            return (await decisions(session, rig))[0]["priority"] == 3

        await eventually(is_followed)
