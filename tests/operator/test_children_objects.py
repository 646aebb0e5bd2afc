"""What a pool gets, without any server: names, what each object says, and what makes its pods start anew."""

import base64
import json
import re

import pytest
from child_objects import ACCESS, POLICIES, container, install, named, objects, policy, pool
from hypothesis import example, given
from hypothesis import strategies as st

from trimtab_extproc.settings import parse_settings
from trimtab_operator.children.desired import desired
from trimtab_operator.children.envoy import workers
from trimtab_operator.children.labels import APPLIED, CHILD_SELECTOR, CONFIG, INSTALL, MANAGED_BY, POOL_LABEL, is_ours
from trimtab_operator.children.names import (
    child_name,
    endpoints_name,
    envoy_name,
    label_value,
    picker_name,
    store_secret_name,
)
from trimtab_operator.children.store_secret import StoreAccess, access_in
from trimtab_operator.kube import Object

OPERATOR = install().namespace
LONG = "a-very-long-name-of-a-pool-that-somebody-took-from-a-model-hub-llama-4-maverick-17b-128e-instruct-fp8"
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?")


def test_a_short_name_stays_readable() -> None:
    assert child_name("chat") == "trimtab-chat"
    assert envoy_name("chat") == "trimtab-chat-envoy"
    assert endpoints_name("chat") == "trimtab-chat-endpoints"
    assert store_secret_name("chat") == "trimtab-chat-store"
    assert label_value("chat") == "chat"


def services(name: str) -> list[str]:
    """All that one pool has of the kind of which it has most."""
    return [picker_name(name), envoy_name(name), endpoints_name(name)]


POOL_NAMES = st.lists(
    st.sampled_from(["chat", "trimtab", "envoy", "endpoints", "store", "a", "9", "x" * 25, "-", "--", "."]), max_size=9
).map(lambda parts: f"p{''.join(parts)}q")


def taken_from(name: str) -> list[str]:
    """Pools called as another's children are, without what every child's name has."""
    return [child.removeprefix("trimtab-") for child in services(name)] + [label_value(name)]


TAKEN_NAMES = POOL_NAMES.flatmap(lambda name: st.sampled_from([name, *taken_from(name)]).map(lambda one: [name, one]))
"""A pool, and one that would like to be called as it is."""


@given(
    st.tuples(
        st.lists(POOL_NAMES | POOL_NAMES.map(lambda name: f"{name}-envoy"), min_size=2, max_size=6),
        st.lists(TAKEN_NAMES, max_size=3),
    ).map(lambda both: list(dict.fromkeys([*both[0], *(name for pair in both[1] for name in pair)])))
)
@example(["chat.v1", "chat-v1-d07b66b7", *taken_from("chat-v1-d07b66b7")[:2]])
@example([LONG, *dict.fromkeys(taken_from(LONG))])
@example(["chat", "chat-envoy", "chat-endpoints", "chat-store", "chat-envoy-envoy", "envoy", "chat--envoy"])
def test_no_two_children_of_any_pools_of_a_namespace_share_a_name(names: list[str]) -> None:
    found = [service for name in names for service in services(name)]
    assert len(set(found)) == len(found)
    assert len({store_secret_name(name) for name in names}) == len(names)
    assert len({label_value(name) for name in names}) == len(names)
    for name in names:
        is_plain = "." not in name and not name.endswith(("-envoy", "-endpoints"))
        if is_plain and len(name) <= 55 and not re.search("-[0-9a-f]{8}$", name):
            assert picker_name(name) == f"trimtab-{name}"


@pytest.mark.parametrize(
    "name", [LONG, "x" * 55, "x" * 56, "x" * 253, "llama.4", "9", "a" * 44 + "-" * 20 + "b", "a.b." * 60 + "c"]
)
def test_any_pool_name_gives_names_that_a_service_and_a_label_may_have(name: str) -> None:
    names = [child_name(name), envoy_name(name), endpoints_name(name), store_secret_name(name)]
    assert all(SERVICE_NAME.fullmatch(one) for one in names), names
    assert len(set(names)) == len(names)
    assert LABEL_VALUE.fullmatch(label_value(name))


def test_pools_that_differ_only_in_what_is_cut_off_have_different_names() -> None:
    assert child_name(LONG) != child_name(LONG + "-2")
    assert label_value(LONG) != label_value(LONG + "-2")
    assert child_name("llama.4") != child_name("llama-4")


def test_every_object_says_whose_it_is() -> None:
    for body in objects():
        about = body["metadata"]
        assert about["labels"][MANAGED_BY] == "trimtab"
        assert about["labels"][POOL_LABEL] == about["annotations"][POOL_LABEL] == "chat"
        (owner,) = about["ownerReferences"]
        assert owner["uid"] == pool().uid
        assert (owner["controller"], owner["blockOwnerDeletion"]) == (True, False)
        assert is_ours(body, pool().key, "some other uid", OPERATOR)
        assert all(part.split("=")[0] in about["labels"] for part in CHILD_SELECTOR.split(","))
        if body["kind"] == "Deployment":
            assert body["spec"]["template"]["metadata"]["labels"][INSTALL] == install().namespace


def test_what_only_looks_like_ours_is_not() -> None:
    mine = objects()[0]
    about = mine["metadata"]
    key, uid = pool().key, pool().uid

    def variant(**metadata: object) -> Object:
        return {**mine, "metadata": {**about, **metadata}}

    stranger = {"kind": "Deployment", "name": "x", "uid": "1", "controller": True}
    other_pool = {**about["ownerReferences"][0], "name": "other", "uid": "2"}
    assert not is_ours(variant(ownerReferences=[stranger]), key, uid, OPERATOR)
    assert not is_ours(variant(ownerReferences=[other_pool]), key, uid, OPERATOR)
    assert not is_ours(variant(ownerReferences=[], labels={}), key, uid, OPERATOR)
    assert not is_ours(variant(ownerReferences=[], annotations={POOL_LABEL: "other"}), key, uid, OPERATOR)
    assert not is_ours({"metadata": {"name": "trimtab-chat", "namespace": "ns"}}, key, uid, OPERATOR)
    assert is_ours(variant(labels={}), key, uid, OPERATOR)
    assert not is_ours(mine, key, uid, "another-namespace")
    assert is_ours(variant(annotations={}), key, uid, "another-namespace")
    assert is_ours(variant(ownerReferences=[{**stranger, "controller": False}]), key, uid, OPERATOR)


def test_the_same_input_gives_the_same_bytes() -> None:
    assert json.dumps(objects(POLICIES["everything set"])) == json.dumps(objects(POLICIES["everything set"]))


@pytest.mark.parametrize("spec", POLICIES.values(), ids=POLICIES)
def test_a_picker_takes_its_own_command_line(spec: Object) -> None:
    args = container(named(objects(spec), "Deployment", "trimtab-chat"))["args"]
    settings = parse_settings(args, {"TRIMTAB_STORE": "redis://store", "TRIMTAB_SECRET": "s"})
    wanted = policy(spec)
    assert settings.is_secure_serving is wanted.picker.tls
    assert settings.body_bytes_max == wanted.picker.body_bytes_max
    assert settings.bodies_bytes_max >= 2 * settings.body_bytes_max
    assert settings.drain_timeout_s == wanted.picker.stream_seconds_max
    assert settings.is_mode_override_allowed is (wanted.standalone.enabled is not False)
    assert (settings.pool_namespace, settings.pool_name) == ("ns", "chat")
    assert not settings.is_conformance_test


@pytest.mark.parametrize("spec", POLICIES.values(), ids=POLICIES)
def test_no_pod_is_killed_before_its_longest_stream_has_ended(spec: Object) -> None:
    bodies = objects(spec)
    longest_s = policy(spec).picker.stream_seconds_max
    picker = named(bodies, "Deployment", "trimtab-chat")
    settings = parse_settings(container(picker)["args"], {"TRIMTAB_STORE": "redis://store", "TRIMTAB_SECRET": "s"})
    grace_s = picker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert settings.drain_timeout_s >= longest_s
    assert grace_s > settings.drain_delay_s + settings.drain_timeout_s
    for body in bodies:
        if body["kind"] == "Deployment":
            assert body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > longest_s
            assert body["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_containers_have_no_rights_that_they_do_not_need() -> None:
    for body in objects():
        if body["kind"] != "Deployment":
            continue
        pod = body["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        for one in [*pod["containers"], *pod.get("initContainers", [])]:
            security = one["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert security["runAsUser"] == 65532
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}


def test_no_secret_stands_in_the_open() -> None:
    for body in objects():
        if body["kind"] != "Secret":
            text = json.dumps(body)
            assert "word" not in text.replace("password", "")
            assert ACCESS.secret not in re.findall(r"\w+", text)
    data = objects()[0]["data"]
    assert base64.b64decode(data["store-url"]).decode() == ACCESS.url
    assert base64.b64decode(data["secret"]).decode() == ACCESS.secret


def test_the_secret_is_read_back_when_the_store_cannot_be_asked() -> None:
    again = access_in(objects()[0], reason="the store is away")
    assert again == StoreAccess(url=ACCESS.url, secret=ACCESS.secret, is_own_user=True, reason="the store is away")
    shared = StoreAccess(url="redis://operator:pw@store:6379", secret="s", is_own_user=False)
    found = access_in(objects(access=shared)[0], reason="")
    assert found is not None
    assert not found.is_own_user
    assert access_in({"data": {"store-url": "!"}}, reason="") is None
    assert access_in({}, reason="") is None


def test_a_pickers_own_port_is_the_pools_and_the_others_make_way() -> None:
    for number in (9003, 9090, 443):
        reference = {"name": "trimtab-chat", "port": {"number": number}}
        bodies = objects(of=pool(endpointPickerRef=reference))
        deployment = named(bodies, "Deployment", "trimtab-chat")
        ports = [port["containerPort"] for port in container(deployment)["ports"]]
        assert ports[0] == number
        assert len(set(ports)) == 3
        assert named(bodies, "Service", "trimtab-chat")["spec"]["ports"][0]["port"] == number
        sysctls = deployment["spec"]["template"]["spec"]["securityContext"].get("sysctls", [])
        assert bool(sysctls) is (number < 1024)


def test_every_target_port_is_a_port_of_the_pods_service_and_a_host_of_envoys_cluster() -> None:
    bodies = objects(of=pool(targetPorts=[{"number": 8000}, {"number": 8001}], appProtocol="kubernetes.io/h2c"))
    service = named(bodies, "Service", "trimtab-chat-endpoints")
    assert [port["port"] for port in service["spec"]["ports"]] == [8000, 8001]
    assert {port["appProtocol"] for port in service["spec"]["ports"]} == {"kubernetes.io/h2c"}
    assert service["spec"]["selector"] == {"app": "vllm"}
    config = json.loads(named(bodies, "ConfigMap", "trimtab-chat-envoy")["data"]["envoy.json"])
    (cluster,) = [one for one in config["staticResources"]["clusters"] if one["name"] == "pool"]
    sockets = [
        one["endpoint"]["address"]["socketAddress"] for one in cluster["loadAssignment"]["endpoints"][0]["lbEndpoints"]
    ]
    assert {(s["address"], s["portValue"]) for s in sockets} == {
        ("trimtab-chat-endpoints.ns.svc.cluster.local", 8000),
        ("trimtab-chat-endpoints.ns.svc.cluster.local", 8001),
    }


def config_hashes(bodies: list[Object]) -> dict[str, str]:
    return {
        body["metadata"]["name"]: body["spec"]["template"]["metadata"]["annotations"][CONFIG]
        for body in bodies
        if body["kind"] == "Deployment"
    }


def test_a_new_password_rolls_out_the_pickers_and_leaves_envoy_alone() -> None:
    rotated = StoreAccess(url=ACCESS.url.replace("word", "other"), secret=ACCESS.secret, is_own_user=True)
    before, after = config_hashes(objects()), config_hashes(objects(access=rotated))
    assert before["trimtab-chat"] != after["trimtab-chat"]
    assert before["trimtab-chat-envoy"] == after["trimtab-chat-envoy"]


def test_a_new_configuration_rolls_out_envoy_and_leaves_the_pickers_alone() -> None:
    before, after = config_hashes(objects()), config_hashes(objects({"standalone": {"accessLog": True}}))
    assert before["trimtab-chat"] == after["trimtab-chat"]
    assert before["trimtab-chat-envoy"] != after["trimtab-chat-envoy"]


def test_what_was_asked_shows_in_each_objects_hash() -> None:
    def hashes(bodies: list[Object]) -> dict[tuple[str, str], str]:
        return {(b["kind"], b["metadata"]["name"]): b["metadata"]["annotations"][APPLIED] for b in bodies}

    before, after = hashes(objects()), hashes(objects({"picker": {"replicas": 3}}))
    assert {name for name in before if before[name] != after[name]} == {("Deployment", "trimtab-chat")}


def test_pods_run_where_the_policy_says_and_envoys_service_is_annotated_as_it_says() -> None:
    bodies = objects(POLICIES["everything set"])
    for name, key in (("trimtab-chat", "gpu"), ("trimtab-chat-envoy", "edge")):
        pod = named(bodies, "Deployment", name)["spec"]["template"]["spec"]
        assert [toleration["key"] for toleration in pod["tolerations"]] == [key]
        assert pod["nodeSelector"]
        assert pod["priorityClassName"] == "system-cluster-critical"
    notes = named(bodies, "Service", "trimtab-chat-envoy")["metadata"]["annotations"]
    assert notes["service.beta.kubernetes.io/aws-load-balancer-internal"] == "true"
    assert notes[POOL_LABEL] == "chat"


def test_without_a_word_in_the_policy_the_installation_decides_on_envoy() -> None:
    bodies = desired(pool(), policy(), install(standalone_by_default=False), ACCESS)
    assert not [body for body in bodies if body["metadata"]["name"] == "trimtab-chat-envoy"]
    bodies = desired(pool(), policy({"standalone": {"enabled": True}}), install(standalone_by_default=False), ACCESS)
    assert [body for body in bodies if body["metadata"]["name"] == "trimtab-chat-envoy"]


@pytest.mark.parametrize(
    ("amounts", "count"),
    [
        ({}, 2),
        ({"requests": {"cpu": "1"}}, 2),
        ({"requests": {"cpu": "1"}, "limits": {"cpu": "2500m"}}, 3),
        ({"limits": {"cpu": "7.2"}}, 8),
        ({"limits": {"cpu": "1e9"}}, 2),
        ({"limits": {"cpu": "900"}}, 64),
    ],
)
def test_envoy_has_as_many_workers_as_it_may_use_cores(amounts: Object, count: int) -> None:
    assert workers(amounts) == count
