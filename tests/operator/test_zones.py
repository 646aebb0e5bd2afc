"""The zones of nodes: a refusal is not for ever, and what was learnt before a failure is told."""

import asyncio
from typing import Any

import pytest
from virtual_time import in_virtual_time

from trimtab_operator.kube import Kube, KubeError, Object, Resource
from trimtab_operator.membership.pod_view import ZONE
from trimtab_operator.membership.zones import REFUSED_S, Zones


class Nodes(Kube):
    """`failing`: what a node's name is answered with."""

    def __init__(self) -> None:
        self.failing: dict[str, KubeError] = {}
        self.asked: list[str] = []

    async def get(self, resource: Resource, namespace: str | None, name: str, **_: Any) -> Object | None:
        self.asked.append(name)
        if name in self.failing:
            raise self.failing[name]
        return {"metadata": {"labels": {ZONE: f"zone-of-{name}"}}}


def test_what_was_learnt_before_a_failure_is_told_and_the_rest_is_asked_for_again() -> None:
    async def work() -> None:
        nodes = Nodes()
        zones = Zones(nodes)
        nodes.failing["b"] = KubeError(500, "InternalError", "by the test")
        assert await zones.learn({"a", "b", "c"})
        assert (zones.of("a"), zones.of("b"), zones.of("c")) == ("zone-of-a", "", "")
        assert not await zones.learn({"a", "b", "c"})
        nodes.failing.clear()
        assert await zones.learn({"a", "b", "c"})
        assert zones.of("c") == "zone-of-c"
        assert nodes.asked == ["a", "b", "b", "b", "c"]

    in_virtual_time(work())


def test_a_refusal_is_said_once_and_asked_about_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        nodes = Nodes()
        zones = Zones(nodes)
        nodes.failing["a"] = KubeError(403, "Forbidden", "nodes may not be read")
        for _ in range(20):
            assert not await zones.learn({"a"})
            await asyncio.sleep(REFUSED_S / 10)
        assert 2 <= len(nodes.asked) <= 3
        nodes.failing.clear()
        await asyncio.sleep(REFUSED_S)
        assert await zones.learn({"a"})

    in_virtual_time(work())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
