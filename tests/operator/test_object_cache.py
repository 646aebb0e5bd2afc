"""Lists and watches in any order: an object never goes back."""

import copy
import itertools
import random

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.labels import POOL_LABEL
from trimtab_operator.children.names import label_value
from trimtab_operator.kube import Object
from trimtab_operator.object_cache import GONE_MAX, ObjectCache
from trimtab_operator.report.pool_status import CONTROLLER

KEY = PoolKey("ns", "chat")


def pool(version: int, name: str = "chat", uid: str = "u1", **more: object) -> Object:
    about = {"namespace": "ns", "name": name, "uid": uid, "resourceVersion": str(version), **more}
    return {"kind": "InferencePool", "metadata": about, "spec": {"round": version}}


def child(version: int, pool_name: str, *, is_annotated: bool = True) -> Object:
    about: Object = {"namespace": "ns", "name": "c", "uid": "c1", "resourceVersion": str(version)}
    about["labels"] = {POOL_LABEL: label_value(pool_name)}
    if is_annotated:
        about["annotations"] = {POOL_LABEL: pool_name}
    return {"kind": "ConfigMap", "metadata": about}


def test_every_order_of_a_life_ends_the_same() -> None:
    """Two versions, the end, and a list that still has the first: whatever comes when, it is gone in the end."""
    steps = (("put", 1), ("put", 2), ("drop", 3), ("put", 1))
    for order in itertools.permutations(steps):
        cache = ObjectCache()
        for step, version in order:
            (cache.put if step == "put" else cache.drop)("InferencePool", pool(version))
        assert cache.pool(KEY) is None, order
        assert not cache.is_known(KEY)


def test_one_made_again_under_the_same_name_stays_when_the_end_of_the_first_comes_late() -> None:
    cache = ObjectCache()
    cache.put("InferencePool", pool(1))
    cache.put("InferencePool", pool(4, uid="u2"))
    assert list(cache.drop("InferencePool", pool(3))) == []
    found = cache.pool(KEY)
    assert found is not None
    assert found["metadata"]["uid"] == "u2"


def test_a_child_out_of_the_selector_and_back_again_is_there() -> None:
    cache = ObjectCache()
    cache.put("ConfigMap", child(1, "chat"))
    assert list(cache.drop("ConfigMap", child(2, "chat"))) == [KEY]
    assert list(cache.put("ConfigMap", child(3, "chat"))) == [KEY]
    assert len(cache.children(KEY)) == 1


def test_what_a_list_lacks_goes_unless_something_newer_came_meanwhile() -> None:
    cache = ObjectCache()
    cache.put("InferencePool", pool(1))
    cache.put("InferencePool", pool(2, name="other", uid="u2"))
    before = cache.uids("InferencePool", None)
    cache.put("InferencePool", pool(9, name="other", uid="u2"))
    assert list(cache.drop_uids("InferencePool", before, "7")) == [KEY]
    assert cache.keys() == {PoolKey("ns", "other")}


def test_nothing_is_to_be_looked_at_where_only_the_version_is_new() -> None:
    cache = ObjectCache()
    first = pool(1)
    again = copy.deepcopy(first)
    again["metadata"]["resourceVersion"] = "2"
    again["metadata"]["managedFields"] = [{"manager": "somebody"}]
    assert list(cache.put("InferencePool", first)) == [KEY]
    assert list(cache.put("InferencePool", again)) == []
    found = cache.pool(KEY)
    assert found is not None
    assert "managedFields" not in found["metadata"]


def test_what_we_have_written_ourselves_is_no_news() -> None:
    cache = ObjectCache()
    policy: Object = {"metadata": {"namespace": "ns", "name": "p", "uid": "p1", "resourceVersion": "1"}}
    policy["spec"] = {"targetRef": {"name": "chat"}}
    assert list(cache.put("SchedulingPolicy", copy.deepcopy(policy))) == [KEY]
    policy["metadata"]["resourceVersion"] = "2"
    policy["status"] = {"conditions": [{"type": "PrefixAware", "message": "2 x odd reason"}]}
    assert list(cache.put("SchedulingPolicy", copy.deepcopy(policy))) == []
    # It is known all the same: the next status is compared with it.
    assert cache.policies(KEY)[0]["status"] == policy["status"]
    policy["metadata"]["resourceVersion"], policy["spec"]["mode"] = "3", "Product"
    assert list(cache.put("SchedulingPolicy", copy.deepcopy(policy))) == [KEY]


def test_of_a_pools_parents_the_gateways_are_news_and_ours_is_not() -> None:
    cache = ObjectCache()
    ours = {"controllerName": CONTROLLER, "parentRef": {"name": "trimtab-chat-envoy"}}
    theirs = {"controllerName": "gateway.example/controller", "parentRef": {"name": "public"}}
    news = []
    for version, parents in enumerate(([], [ours], [ours | {"conditions": [1]}], [theirs, ours], [theirs]), 1):
        body = pool(version)
        body["spec"] = {}
        body["status"] = {"parents": parents}
        news.append(bool(list(cache.put("InferencePool", body))))
    assert news == [True, False, False, True, False]
    found = cache.pool(KEY)
    assert found is not None
    assert found["status"]["parents"] == [theirs]


def test_a_child_of_a_pool_with_a_long_name_is_found_by_label_and_annotation_or_by_the_pool() -> None:
    name = "a" * 80
    key = PoolKey("ns", name)
    cache = ObjectCache()
    assert list(cache.put("ConfigMap", child(1, name))) == [key]
    assert len(cache.children(key)) == 1
    # Without its annotation it is the pool that says whose it is.
    cache.put("InferencePool", pool(2, name=name))
    assert list(cache.put("ConfigMap", child(3, name, is_annotated=False))) == [key]


def test_ends_are_remembered_up_to_a_bound() -> None:
    cache = ObjectCache()
    rng = random.Random(5)
    for number in range(GONE_MAX + 50):
        cache.drop("InferencePool", pool(rng.randrange(1, 10**6), name=str(number), uid=str(number)))
    assert len(cache._gone) == GONE_MAX
