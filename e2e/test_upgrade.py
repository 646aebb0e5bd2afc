"""The chart is upgraded and rolled back under load."""

import pytest
from demo_pool import FRONT, NAMESPACE, PICKERS, running, settled
from kubectl import kubectl, rolled_out, until
from release import NAME, helm, install_or_upgrade
from release import NAMESPACE as SYSTEM
from traffic import Load


def names(component: str) -> set[str]:
    return {pod["metadata"]["name"] for pod in running(component)}


@pytest.mark.parametrize("how", ["upgrade", "rollback"])
def test_nobody_notices(how: str) -> None:
    pickers, envoys = names("picker"), names("envoy")
    with Load(FRONT, streams=3, stream_tokens=5000) as load:
        if how == "upgrade":
            # A change in every pod of the release, and in the pools' too: what a new version is.
            pull = ("--set", "image.pullPolicy=Never", "--set", "store.valkey.image.pullPolicy=Never")
            install_or_upgrade("--set", "operator.logLevel=warning", "--set", "webhook.logLevel=warning", *pull)
        else:
            helm("rollback", NAME, "--namespace", SYSTEM, "--wait", "--timeout=300s")
        until("new pickers", lambda: names("picker") - pickers)
        rolled_out(NAMESPACE, PICKERS)
        until("new Envoys", lambda: names("envoy") - envoys)
        rolled_out(NAMESPACE, "trimtab-demo-envoy")
        settled(endpoints=3)
        load.more(60)
    load.assert_nothing_failed()
    assert load.tally["whole_streams"] == 3
    kubectl("-n", SYSTEM, "wait", "--for=condition=Available", "deployment", "--all", "--timeout=120s")
