"""A part of Trimtab is killed under load, as by a machine that goes: nobody's request fails, and all is well again."""

from demo_pool import ENGINES, FRONT, NAMESPACE, PICKERS, decisions, running, settled
from kubectl import items, kubectl, rolled_out, until
from release import NAMESPACE as SYSTEM
from traffic import Load


def kill(namespace: str, *pods: str) -> None:
    """Without a word: no hook, no time."""
    kubectl("-n", namespace, "delete", "pod", *pods, "--grace-period=0", "--force", "--wait=false")


def of(component: str) -> list[str]:
    pods = items("-n", SYSTEM, "pods", "-l", f"app.kubernetes.io/component={component}")
    return [pod["metadata"]["name"] for pod in pods]


def engines() -> list[str]:
    return [pod["metadata"]["name"] for pod in items("-n", NAMESPACE, "pods", "-l", f"app={ENGINES}")]


def test_a_picker() -> None:
    with Load(FRONT, streams=4) as load:
        kill(NAMESPACE, running("picker")[0]["metadata"]["name"])
        rolled_out(NAMESPACE, PICKERS)
        load.more(60)
        settled(endpoints=3)
    load.assert_nothing_failed()
    assert load.tally["whole_streams"] == 4


def test_the_store() -> None:
    with Load(FRONT) as load:
        pods = of("store")
        kill(SYSTEM, *pods)
        load.more(40)
        until("another store", lambda: set(of("store")) - set(pods))
        kubectl("-n", SYSTEM, "wait", "--for=condition=Available", "deployment", "--all", "--timeout=120s")
        # It comes up empty, and everybody tells it all anew.
        settled(endpoints=3)
        load.more(60)
    load.assert_nothing_failed()
    newest = decisions(20)
    assert {one["approximate"] for one in newest} == {None}


def test_the_operator() -> None:
    with Load(FRONT) as load:
        kill(SYSTEM, *of("operator"))
        load.more(30)
        kubectl("-n", SYSTEM, "wait", "--for=condition=Available", "deployment", "--all", "--timeout=120s")
        # The new one goes on where the old one was.
        kubectl("-n", NAMESPACE, "scale", f"deployment/{ENGINES}", "--replicas=4")
        settled(endpoints=4)
        kubectl("-n", NAMESPACE, "scale", f"deployment/{ENGINES}", "--replicas=3")
        settled(endpoints=3)
    load.assert_nothing_failed()


def test_an_engine() -> None:
    """What it had in hand is lost; nothing else is, and no new request goes there for long."""
    with Load(FRONT, talkers=6) as load:
        pod = items("-n", NAMESPACE, "pods", "-l", f"app={ENGINES}")[0]
        kill(NAMESPACE, pod["metadata"]["name"])
        until("another pod is there", lambda: pod["metadata"]["name"] not in engines() and len(engines()) == 3)
        rolled_out(NAMESPACE, ENGINES)
        settled(endpoints=3)
        failed = load.tally["failed"]
        load.more(60)
        assert load.tally["failed"] == failed, load.tally
    # Six talk, each with one request at a time.
    assert load.tally["failed"] <= 6, load.tally
