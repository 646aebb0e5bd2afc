"""Pickers and Envoys are replaced by new ones while long answers stream through them."""

from demo_pool import ENVOY, FRONT, NAMESPACE, PICKERS, POLICY, running, settled
from kubectl import kubectl, log, patch, rolled_out, until
from traffic import Load

STREAMS = 6


def names(component: str) -> set[str]:
    return {pod["metadata"]["name"] for pod in running(component)}


def test_streams_go_on_while_the_pickers_are_replaced() -> None:
    before = names("picker")
    with Load(FRONT, talkers=4, streams=STREAMS, stream_tokens=5000) as load:
        until("all streams are open", lambda: load.tally["open_streams"] == STREAMS)
        patch(NAMESPACE, POLICY, {"picker": {"logLevel": "warning"}})
        until("new pickers", lambda: names("picker") - before)
        rolled_out(NAMESPACE, PICKERS)
        until("the old ones are told to go", lambda: not names("picker") & before)
        log.info("%d of %d streams are still open", load.tally["open_streams"], STREAMS)
        settled(endpoints=3)
        load.more(30)
    load.assert_nothing_failed()
    assert load.tally["whole_streams"] == STREAMS


def test_streams_go_on_while_envoy_is_replaced() -> None:
    """What an Envoy has in hand it finishes; its connections it closes when they are idle, and then a client that
    sends at that very moment has to try again, as OpenAI's does unless it is told not to."""
    before = names("envoy")
    with Load(FRONT, talkers=4, streams=STREAMS, stream_tokens=5000) as load:
        until("all streams are open", lambda: load.tally["open_streams"] == STREAMS)
        patch(NAMESPACE, POLICY, {"standalone": {"accessLog": True}})
        until("new Envoys", lambda: names("envoy") - before)
        rolled_out(NAMESPACE, ENVOY)
        until("the old ones are told to go", lambda: not names("envoy") & before)
        load.more(30)
    load.assert_nothing_failed()
    assert load.tally["whole_streams"] == STREAMS


def test_what_was_replaced_is_gone_when_its_streams_are() -> None:
    def left() -> bool:
        words = ("-n", NAMESPACE, "get", "pods", "-o", "name", "-l", "app.kubernetes.io/managed-by=trimtab")
        return len(kubectl(*words).split()) == len(running("picker")) + len(running("envoy"))

    until("no old pod is left", left)
