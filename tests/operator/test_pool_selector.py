"""A pool's selector that no pod's labels can match: said in the status, never asked of the API server."""

from pathlib import Path

import pytest
from child_objects import objects, policy, pool
from membership_pods import Pods
from valkey_server import running
from waiting_on import eventually

from trimtab_operator.children.endpoints import made_selector
from trimtab_operator.kube import Kube
from trimtab_operator.membership.zones import Zones
from trimtab_operator.pool_run import PoolRun
from trimtab_state import connect

GOOD = {"app": "vllm", "example.com/team-1": "a.b_C-9", "x": "", "a" * 63: "v" * 63}
BAD_KEYS = (
    "a b",
    "app in (a,b),z",
    "app=vllm,x",
    "!app",
    "-app",
    "app/",
    "/app",
    "Example.com/app",
    "a" * 64,
    "a/b/c",
    "",
)
BAD_VALUES = ("a b", "a,b", "-a", "v" * 64, "é", "a\n")


def selecting(**labels: str) -> dict[str, dict[str, dict[str, str]]]:
    return {"selector": {"matchLabels": labels}}


def test_labels_of_every_shape_are_taken() -> None:
    assert pool(**selecting(**GOOD)).selector_problem == ""
    assert pool(**selecting(**{f"{'p' * 253}/name": "v"})).selector_problem == ""


@pytest.mark.parametrize("key", [*BAD_KEYS, f"{'p' * 254}/name", "app\n"])
def test_a_key_that_no_label_can_have_is_named_with_what_it_would_have_to_be(key: str) -> None:
    problem = pool(**selecting(app="vllm", **{key: "z"})).selector_problem
    assert repr(key)[:80].rstrip("'") in problem
    assert "is no label's key: up to 63 letters" in problem
    assert len(problem) < 300


@pytest.mark.parametrize("value", BAD_VALUES)
def test_a_value_that_no_label_can_have_is_named_with_its_key(value: str) -> None:
    problem = pool(**selecting(app=value)).selector_problem
    assert problem.startswith(f"{value!r}, of app, is no label's value")


async def test_while_a_selector_is_wrong_the_last_good_one_goes_on(kube: Kube, namespace: str, tmp_path: Path) -> None:
    pods, looks = Pods(kube, namespace), []
    await pods.add("a", "127.0.9.1")
    with running() as server:
        store = connect(server.url)
        good = pool(namespace=namespace)
        run = PoolRun(
            kube=kube,
            store=store,
            key=good.key,
            zones=Zones(kube),
            changed=looks.append,
            clock=lambda: 1e9,
        )
        run.start()

        async def found() -> bool:
            return run.members is not None and len(run.members.endpoints) == 2

        try:
            bad = pool(namespace=namespace, **selecting(**{"app in (a,b),z": "z"}))
            run.configure(bad, policy())
            assert run.members is None
            run.configure(good, policy())
            await pods.add("b", "127.0.9.2")
            await eventually(found)
            run.configure(bad, policy())
            await pods.add("c", "127.0.9.3")

            async def followed() -> bool:
                return run.members is not None and len(run.members.endpoints) == 3

            await eventually(followed)
            run.check()
            # An operator that starts meanwhile finds by what the pool's objects were made.
            await run.stop()
            run = PoolRun(
                kube=kube, store=store, key=good.key, zones=Zones(kube), changed=looks.append, clock=lambda: 1e9
            )
            run.start()
            run.configure(bad, policy(), made_selector=made_selector(objects(of=good), good.key.name))
            await eventually(followed)
        finally:
            await run.stop()
            await store.close()
