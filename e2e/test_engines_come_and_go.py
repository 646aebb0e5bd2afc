"""Engines are replaced, added and taken away under load, and nobody's request fails."""

from demo_pool import ENGINES, FRONT, NAMESPACE, decisions, settled
from kubectl import items, kubectl, log, rolled_out
from traffic import Load


def addresses() -> set[str]:
    pods = items("-n", NAMESPACE, "pods", "-l", f"app={ENGINES}")
    return {f"{pod['status'].get('podIP')}:8000" for pod in pods if "deletionTimestamp" not in pod["metadata"]}


def test_a_rolling_update_of_the_engines_fails_no_request() -> None:
    before = addresses()
    with Load(FRONT) as load:
        kubectl("-n", NAMESPACE, "rollout", "restart", f"deployment/{ENGINES}")
        rolled_out(NAMESPACE, ENGINES)
        settled(endpoints=3)
        load.more(30)
    log.info("%d requests while three engines were replaced", load.tally["requests"])
    load.assert_nothing_failed()
    assert not before & addresses()
    assert {one["endpoint"] for one in decisions(10)} <= addresses()


def test_more_engines_take_their_share() -> None:
    before = addresses()
    with Load(FRONT, talkers=16) as load:
        kubectl("-n", NAMESPACE, "scale", f"deployment/{ENGINES}", "--replicas=5")
        settled(endpoints=5)
        load.more(400)
    load.assert_nothing_failed()
    # Conversations stay where they are as long as nobody is crowded: new ones go to the new engines.
    fresh = [one for one in decisions() if max(endpoint["hit_tokens"] for endpoint in one["endpoints"]) == 0]
    assert {one["endpoint"] for one in fresh} & (addresses() - before)


def test_fewer_engines_fail_no_request() -> None:
    with Load(FRONT) as load:
        kubectl("-n", NAMESPACE, "scale", f"deployment/{ENGINES}", "--replicas=2")
        settled(endpoints=2)
        load.more(30)
    load.assert_nothing_failed()
    kubectl("-n", NAMESPACE, "scale", f"deployment/{ENGINES}", "--replicas=3")
    rolled_out(NAMESPACE, ENGINES)
    settled(endpoints=3)
