"""What the chart renders: for all sets of values, that it does; and of what it renders, what must always hold."""

import itertools
from typing import Any

import pytest
import yaml
from helm import CHART, KUBE_VERSION, NAMESPACE, ROOT, Helm, Object, named, of_kind, pod_specs
from value_sets import DIGEST, VALUE_SETS

from trimtab_operator.injection.webhook_configuration import WebhookAddress, webhook_configuration
from trimtab_operator.settings import ENVOY_IMAGE, parse_settings
from trimtab_state.store_url import parse_store_url

STORE = "redis://store"


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS.keys())
def test_helm_lint_has_nothing_to_say(helm: Helm, values: dict[str, Any]) -> None:
    flags = ("--strict", "--namespace", NAMESPACE, "--kube-version", KUBE_VERSION)
    assert "0 chart(s) failed" in helm.done("lint", CHART, *flags, values=values)


@pytest.mark.parametrize("case", VALUE_SETS)
def test_both_helms_render_the_same(helm3: Helm, helm4: Helm, case: str) -> None:
    def by_name(helm: Helm) -> dict[tuple[str, str], Object]:
        # A password is made at random, and so is what changes with it; kinds that helm does not know come in no order.
        found = {(o["kind"], o["metadata"]["name"]): o for o in helm.of_set(case) if o["kind"] != "Secret"}
        for name, template in pod_templates(list(found.values())).items():
            if name.endswith("-valkey"):
                del template["metadata"]["annotations"]["checksum/config"]
        return found

    assert by_name(helm3) == by_name(helm4)


@pytest.mark.parametrize("case", VALUE_SETS)
def test_every_object_is_named_once_and_labelled(helm4: Helm, case: str) -> None:
    objects = helm4.of_set(case)
    seen = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(seen) == len(set(seen))
    for body in objects:
        about = body["metadata"]
        assert about["labels"]["app.kubernetes.io/managed-by"] == "Helm", about["name"]
        assert about["labels"]["app.kubernetes.io/instance"] == "trimtab"
        assert len(about["name"]) <= 63 or body["kind"] in ("CustomResourceDefinition", "ClusterRole")


@pytest.mark.parametrize("case", VALUE_SETS)
def test_every_container_is_locked_down(helm4: Helm, case: str) -> None:
    specs = pod_specs(helm4.of_set(case))
    assert len(specs) >= 2
    for name, spec in specs.items():
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not spec.get("hostPID")
        assert not spec.get("hostIPC")
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert container["resources"]["requests"]["cpu"], name
            assert container["resources"]["limits"]["memory"], name


@pytest.mark.parametrize("case", VALUE_SETS)
def test_the_processes_take_their_flags(helm4: Helm, case: str) -> None:
    for name, spec in pod_specs(helm4.of_set(case)).items():
        for container in spec["containers"]:
            if container["command"] != ["trimtab-operator"]:
                continue
            environment = {entry["name"]: entry.get("value", "") for entry in container["env"]}
            if environment.get("TRIMTAB_STORE") == "":
                environment["TRIMTAB_STORE"] = STORE
            settings = parse_settings(container["args"], {**environment, "POD_NAMESPACE": NAMESPACE})
            assert settings.picker_image != "" or name
            assert settings.namespaces == tuple(VALUE_SETS[case].get("watchNamespaces", ()))


def test_the_store_is_reached_by_the_url_that_the_values_describe(helm4: Helm) -> None:
    def address(case: str) -> Any:
        container = pod_specs(helm4.of_set(case))["trimtab-operator"]["containers"][0]
        environment = {entry["name"]: entry for entry in container["env"]}
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        found = parse_store_url(environment["TRIMTAB_STORE"]["value"].replace("$(TRIMTAB_SENTINEL_PASSWORD)", "s3"))
        for file in (found.password_file, found.ca_certs):
            assert file is None or str(file).rpartition("/")[0] in mounts
        return found

    own = address("defaults")
    assert own.hosts == ((f"trimtab-valkey.{NAMESPACE}.svc.cluster.local", 6379),)
    assert own.password_file is not None
    sentinels = address("sentinels")
    assert (sentinels.topology, sentinels.service, sentinels.db) == ("sentinel", "mymaster", 1)
    assert sentinels.hosts == (("s-0.redis", 26379), ("s-1.redis", 26379))
    assert (sentinels.username, sentinels.sentinel_username, sentinels.sentinel_password) == ("trim tab", "s", "s3")
    assert (sentinels.tls, sentinels.verify, sentinels.check_hostname) == (True, True, False)
    cluster = address("cluster")
    assert (cluster.topology, cluster.tls, cluster.verify) == ("cluster", True, False)
    assert cluster.hosts == (("redis-0", 6379), ("2001:db8::1", 6379))


def test_a_url_is_never_seen_in_a_pod(helm4: Helm) -> None:
    for case in ("store by URL", "store by Secret"):
        objects = helm4.of_set(case)
        environment = pod_specs(objects)["trimtab-operator"]["containers"][0]["env"]
        source = next(entry for entry in environment if entry["name"] == "TRIMTAB_STORE")["valueFrom"]["secretKeyRef"]
        assert source == {"name": "trimtab-store" if case == "store by URL" else "redis-url", "key": "url"}
    assert len(of_kind(objects, "Secret")) == 0


def test_the_images_are_put_together_from_registry_repository_tag_and_digest(helm4: Helm) -> None:
    def images(values: dict[str, Any]) -> dict[str, str]:
        specs = pod_specs(helm4.objects(values))
        return {name: spec["containers"][0]["image"] for name, spec in specs.items()}

    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert images({})["trimtab-operator"] == f"trimtab:{version}"
    own = {"image": {"registry": "ghcr.io", "repository": "a/b", "tag": "c"}}
    assert images(own)["trimtab-webhook"] == "ghcr.io/a/b:c"
    mirrored = images(VALUE_SETS["everything"])
    assert mirrored["trimtab-operator"] == f"mirror.example.com:5000/hub/trimtab/trimtab@{DIGEST}"
    assert mirrored["trimtab-valkey"].startswith("mirror.example.com:5000/hub/valkey/valkey:")


def test_the_envoy_of_pools_is_the_operators_own_choice(helm4: Helm) -> None:
    arguments = pod_specs(helm4.objects())["trimtab-operator"]["containers"][0]["args"]
    assert f"--envoy-image=docker.io/{ENVOY_IMAGE}" in arguments


def test_the_webhook_configuration_is_the_operators_own_but_for_whom_to_trust(helm: Helm) -> None:
    (rendered,) = of_kind(helm.objects(), "MutatingWebhookConfiguration")
    expected = webhook_configuration(WebhookAddress(namespace=NAMESPACE), b"x")
    assert rendered["metadata"]["name"] == expected["metadata"]["name"]
    del expected["webhooks"][0]["clientConfig"]["caBundle"]
    assert rendered["webhooks"] == expected["webhooks"]


@pytest.mark.parametrize("component", ["operator", "webhook"])
def test_chart_and_manifest_run_the_same(helm4: Helm, component: str) -> None:
    manifest = [body for body in yaml.safe_load_all((ROOT / "manifests" / "operator.yaml").read_text()) if body]
    shipped = named(manifest, "Deployment", f"trimtab-{component}")["spec"]
    rendered = named(helm4.objects(), "Deployment", f"trimtab-{component}")["spec"]
    assert rendered["replicas"] == shipped["replicas"]
    pod, other = rendered["template"]["spec"], shipped["template"]["spec"]
    assert pod["serviceAccountName"] == other["serviceAccountName"]
    assert other["securityContext"].items() <= pod["securityContext"].items()
    (container,), (its_own,) = pod["containers"], other["containers"]
    for field in ("command", "livenessProbe", "readinessProbe", "resources", "securityContext"):
        assert container[field] == its_own[field], field
    for field in ("env", "ports", "volumeMounts"):
        assert {each["name"] for each in its_own[field]} <= {each["name"] for each in container[field]}
    assert container["args"][0] == its_own["args"][0]


def test_two_replicas_are_kept_apart_and_up(helm4: Helm) -> None:
    objects = helm4.objects()
    for name in ("trimtab-operator", "trimtab-webhook"):
        deployment = named(objects, "Deployment", name)
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        budget = named(objects, "PodDisruptionBudget", name)["spec"]
        assert budget["maxUnavailable"] == 1
        selectors = [budget["selector"]["matchLabels"], deployment["spec"]["selector"]["matchLabels"]]
        spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
        selectors += [each["labelSelector"]["matchLabels"] for each in spread]
        selectors.append(named(objects, "Service", name)["spec"]["selector"])
        for selector in selectors:
            assert selector.items() <= labels.items()
            assert "helm.sh/chart" not in selector
        assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    single = helm4.of_set("one replica, no webhook")
    assert of_kind(single, "PodDisruptionBudget") == []


def test_another_version_of_the_chart_alone_makes_no_pod_again(helm4: Helm, tmp_path: Any) -> None:
    packed = helm4.done("package", CHART, "--version", "9.9.9", "--destination", tmp_path)
    values = {"store": {"valkey": {"auth": {"existingSecret": "s"}}}}
    now = pod_templates(helm4.objects(values))
    later = pod_templates(helm4.objects(values, chart=tmp_path / "trimtab-9.9.9.tgz"))
    assert now == later, packed


def test_what_a_process_reads_at_its_start_makes_it_start_again(helm4: Helm) -> None:
    def templates(store: dict[str, Any]) -> dict[str, Object]:
        return pod_templates(helm4.objects({"store": store}))

    def changed(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
        before, after = templates(first), templates(second)
        assert before == templates(first)
        return {name for name in before if before[name] != after[name]}

    def password(text: str) -> dict[str, Any]:
        return {"valkey": {"auth": {"password": text}}}

    def url(text: str) -> dict[str, Any]:
        return {"mode": "external", "external": {"url": text}}

    # The operator reads the password at each login.
    assert changed(password("a"), password("b")) == {"trimtab-valkey"}
    given = {"auth": {"existingSecret": "s"}}
    assert changed({"valkey": given}, {"valkey": {**given, "maxMemoryMiB": 100}}) == {"trimtab-valkey"}
    assert changed(url("redis://:a@b"), url("redis://:c@b")) == {"trimtab-operator"}
    assert changed({"valkey": given}, {"valkey": {**given, "podLabels": {"a": "b"}}}) == {"trimtab-valkey"}
    # One at random is another one with each rendering, and is asked for from Valkey's next start on.
    first, second = templates({}), templates({})
    assert {name for name in first if first[name] != second[name]} == {"trimtab-valkey"}


def test_a_webhook_on_the_nodes_network_can_be_rolled_out(helm4: Helm) -> None:
    deployment = named(helm4.objects({"webhook": {"hostNetwork": True}}), "Deployment", "trimtab-webhook")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def pod_templates(objects: list[Object]) -> dict[str, Object]:
    return {o["metadata"]["name"]: o["spec"]["template"] for o in of_kind(objects, "Deployment")}


def test_the_store_keeps_what_it_is_told_and_has_room_for_it(helm4: Helm) -> None:
    def sizes(values: dict[str, Any]) -> tuple[int, int]:
        objects = helm4.objects({"store": {"valkey": values}})
        conf = named(objects, "ConfigMap", "trimtab-valkey")["data"]["valkey.conf"].splitlines()
        assert "maxmemory-policy noeviction" in conf
        (limit,) = [line.split()[1].removesuffix("mb") for line in conf if line.startswith("maxmemory ")]
        pod = pod_specs(objects)["trimtab-valkey"]["containers"][0]["resources"]["limits"]["memory"]
        return int(limit), int(pod.removesuffix("Mi"))

    small = sizes({"sizing": {"pools": 1, "pods": 1, "blocksPerPod": 1000, "tokensPerBlock": 16}})
    large = sizes({"sizing": {"pools": 1, "pods": 512, "blocksPerPod": 60_000, "tokensPerBlock": 16}})
    assert small[0] == 64 + 320 + 1
    assert large[0] - small[0] == pytest.approx(512 * 60_000 * 24 / 2**20, abs=2)
    for data, pod in (small, large, sizes({"maxMemoryMiB": 100})):
        assert pod > 1.25 * data
    assert sizes({"maxMemoryMiB": 100})[0] == 100


def test_releases_in_two_namespaces_share_no_name_of_the_clusters_scope(helm4: Helm) -> None:
    def names(namespace: str) -> set[tuple[str, str]]:
        return {
            (body["kind"], body["metadata"]["name"])
            for body in helm4.objects(namespace=namespace)
            if "namespace" not in body["metadata"] and body["kind"] != "CustomResourceDefinition"
        }

    assert names("a") & names("b") == set()


def test_no_secret_but_the_stores_is_made(helm4: Helm) -> None:
    assert [o["metadata"]["name"] for o in of_kind(helm4.objects(), "Secret")] == ["trimtab-store"]


def test_the_custom_resource_definitions_are_those_of_the_project(helm: Helm) -> None:
    rendered = {o["metadata"]["name"]: o for o in of_kind(helm.objects(), "CustomResourceDefinition")}
    shipped = {}
    for path in (ROOT / "crds").glob("*.yaml"):
        body = yaml.safe_load(path.read_text())
        shipped[body["metadata"]["name"]] = body
    assert rendered.keys() == shipped.keys()
    for name, body in shipped.items():
        assert rendered[name]["spec"] == body["spec"]
        notes = rendered[name]["metadata"]["annotations"]
        assert body["metadata"]["annotations"].items() <= notes.items()
        # With a kind all its objects go.
        assert notes["helm.sh/resource-policy"] == "keep"
        assert "Prune=false" in notes["argocd.argoproj.io/sync-options"]


def test_a_kind_that_the_cluster_has_is_left_alone_without_looking(helm4: Helm) -> None:
    told = helm4.objects({}, "--api-versions", "inference.networking.k8s.io/v1/InferencePool")
    assert [o["spec"]["names"]["kind"] for o in of_kind(told, "CustomResourceDefinition")] == ["SchedulingPolicy"]
    always = {"crds": {"inferencePool": "always"}}
    insisted = helm4.objects(always, "--api-versions", "inference.networking.k8s.io/v1/InferencePool")
    assert len(of_kind(insisted, "CustomResourceDefinition")) == 2


def test_a_network_policy_guards_each_pod_and_lets_in_who_must_come(helm4: Helm) -> None:
    objects = helm4.of_set("everything")
    policies = {o["metadata"]["name"]: o["spec"] for o in of_kind(objects, "NetworkPolicy")}
    specs = {o["metadata"]["name"]: o["spec"]["template"] for o in of_kind(objects, "Deployment")}
    assert policies.keys() == specs.keys()
    for name, policy in policies.items():
        assert policy["podSelector"]["matchLabels"].items() <= specs[name]["metadata"]["labels"].items()
        ports = {port["name"] for container in specs[name]["spec"]["containers"] for port in container["ports"]}
        opened = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
        assert opened == ports
    (test,) = of_kind(objects, "Pod")
    peers = list(itertools.chain.from_iterable(rule["from"] for rule in policies["trimtab-valkey"]["ingress"]))
    peers = [peer["podSelector"]["matchLabels"] for peer in peers if "podSelector" in peer]
    for labels in (test["metadata"]["labels"], specs["trimtab-operator"]["metadata"]["labels"]):
        assert any(peer.items() <= labels.items() for peer in peers)
