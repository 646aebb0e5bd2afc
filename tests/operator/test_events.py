"""Kubernetes Events on a real API server: what is posted, and what is held back."""

import pytest

from trimtab_operator.events import BURST, NOTE_BYTES_MAX, OBJECTS_MAX, REFILL_S, REPEAT_S, EventPoster, clipped
from trimtab_operator.kube import CONFIG_MAPS, EVENTS, NAMESPACES, Kube, Object

START_S = 1_800_000_000.0


class Clock:
    now_s = START_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def thing(kube: Kube, namespace: str) -> Object:
    """What the Events are about."""
    metadata = {"name": "chat", "namespace": namespace}
    return await kube.create(CONFIG_MAPS, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})


async def events_of(kube: Kube, namespace: str) -> list[Object]:
    found, _ = await kube.list_all(EVENTS, namespace)
    return found


async def test_an_event_says_about_whom_what_and_who_says_it(kube: Kube, thing: Object) -> None:
    poster = EventPoster(kube, instance="operator-1", clock=Clock())
    assert await poster.post(thing, "FallbackStarted", "5 hotspot alarms", "Warning", action="SwitchPolicy")
    (event,) = await events_of(kube, thing["metadata"]["namespace"])
    assert event["regarding"] == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "chat",
        "namespace": thing["metadata"]["namespace"],
        "uid": thing["metadata"]["uid"],
        "resourceVersion": thing["metadata"]["resourceVersion"],
    }
    said = {key: event[key] for key in ("reason", "note", "type", "action", "reportingController", "reportingInstance")}
    assert said == {
        "reason": "FallbackStarted",
        "note": "5 hotspot alarms",
        "type": "Warning",
        "action": "SwitchPolicy",
        "reportingController": "trimtab.dev/operator",
        "reportingInstance": "operator-1",
    }
    assert event["eventTime"] == "2027-01-15T08:00:00.000000Z"


async def test_what_was_said_last_is_not_said_again_but_every_turn_is(kube: Kube, thing: Object) -> None:
    clock = Clock()
    poster = EventPoster(kube, clock=clock)
    said = []
    for reason in ("Started", "Started", "Ended", "Started", "Started"):
        clock.now_s += 1.0
        said.append(await poster.post(thing, reason, "note", topic="Fallback"))
    assert said == [True, False, True, True, False]
    assert await poster.post(thing, "Started", "another note", topic="Fallback")
    assert not await poster.post(thing, "Started", "another note", topic="Fallback")
    assert await poster.post(thing, "Started", "another note", topic="Something else")
    clock.now_s += REPEAT_S
    assert await poster.post(thing, "Started", "another note", topic="Fallback")
    assert (poster.posted, poster.suppressed) == (6, 3)
    assert len(await events_of(kube, thing["metadata"]["namespace"])) == 6


async def test_one_object_cannot_flood_the_api_server(kube: Kube, thing: Object) -> None:
    clock = Clock()
    poster = EventPoster(kube, clock=clock)
    said = [await poster.post(thing, "Changed", f"{i}") for i in range(3 * BURST)]
    assert sum(said) == BURST
    other = {**thing, "metadata": {**thing["metadata"], "name": "other"}}
    assert await poster.post(other, "Changed", "0"), "another object has room of its own"
    clock.now_s += REFILL_S
    assert [await poster.post(thing, "Changed", f"later {i}") for i in range(2)] == [True, False]


async def test_texts_of_any_length_are_taken(kube: Kube, thing: Object) -> None:
    poster = EventPoster(kube, instance="i" * 500, clock=Clock())
    assert await poster.post(thing, "R" * 500, "ä" * 4_000)
    (event,) = await events_of(kube, thing["metadata"]["namespace"])
    assert len(event["note"].encode()) <= NOTE_BYTES_MAX
    assert event["note"].endswith("ä…")
    long = {**thing, "metadata": {**thing["metadata"], "name": "x" * 253}}
    assert await poster.post(long, "Changed", "")


async def test_an_object_without_a_namespace_has_its_events_in_the_default_one(kube: Kube, namespace: str) -> None:
    body = await kube.get(NAMESPACES, None, namespace)
    assert body is not None
    assert await EventPoster(kube, clock=Clock()).post(body, "Changed", "note")
    found, _ = await kube.list_all(EVENTS, "default", field_selector=f"regarding.name={namespace}")
    assert len(found) == 1


async def test_an_api_server_that_refuses_is_no_error(kube: Kube, thing: Object) -> None:
    poster = EventPoster(kube, clock=Clock())
    nowhere = {**thing, "metadata": {**thing["metadata"], "namespace": "nowhere"}}
    assert not await poster.post(nowhere, "Changed", "note")
    assert poster.failed == 1


async def test_the_objects_remembered_are_bounded(kube: Kube) -> None:
    poster = EventPoster(kube, clock=Clock())
    for i in range(OBJECTS_MAX + 10):
        regarding = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{i}", "namespace": "n"}}
        poster._may_speak(regarding, "topic", ("reason", "note"), START_S)
    assert len(poster._spoken) == OBJECTS_MAX


def test_a_text_is_cut_between_characters() -> None:
    assert clipped("abc", 3) == "abc"
    for room in range(4, 12):
        assert len(clipped("äöüß" * 5, room).encode()) <= room
