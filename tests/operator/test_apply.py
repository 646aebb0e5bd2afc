"""A pool's children on a real API server: made, put right when somebody changes them, removed; never another's."""

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from child_objects import ACCESS, POLICIES, POOL_UID, install, objects, policy, pool

from trimtab_operator.apply import ApplyReport, ChildApplier
from trimtab_operator.children.desired import desired
from trimtab_operator.children.labels import CHILD_SELECTOR
from trimtab_operator.children.store_secret import StoreAccess
from trimtab_operator.kube import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    KINDS,
    PDBS,
    SECRETS,
    SERVICES,
    Kube,
    KubeError,
    Object,
    Resource,
)

OPERATOR = install().namespace
CHILD_RESOURCES = (SECRETS, SERVICES, CONFIG_MAPS, DEPLOYMENTS, PDBS)


class Site:
    """A namespace with the children of one pool."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.kube = kube
        self.namespace = namespace
        self.pool = pool(namespace=namespace)
        self.applier = ChildApplier(kube, OPERATOR)

    def objects(self, spec: Object | None = None, **changes: Any) -> list[Object]:
        return objects(spec, of=self.pool, **changes)

    async def children(self) -> list[Object]:
        """What the operator's cache would hold: by label, with kinds."""
        found = []
        for resource in CHILD_RESOURCES:
            bodies, _ = await self.kube.list_all(resource, self.namespace, label_selector=CHILD_SELECTOR)
            found += [{**body, "kind": resource.kind, "apiVersion": resource.api_version} for body in bodies]
        return found

    async def sync(self, wanted: list[Object] | None = None, *, found: list[Object] | None = None) -> ApplyReport:
        """One round, with what a cache that is up to date would hold."""
        return await self.applier.sync(
            self.pool.key,
            POOL_UID,
            self.objects() if wanted is None else wanted,
            await self.children() if found is None else found,
        )

    async def versions(self) -> dict[str, str]:
        return {f"{c['kind']}/{c['metadata']['name']}": c["metadata"]["resourceVersion"] for c in await self.children()}

    async def get(self, resource: Resource, name: str) -> Object:
        found = await self.kube.get(resource, self.namespace, name)
        assert found is not None, f"there is no {resource.kind} {name}"
        return found

    async def patch(self, resource: Resource, name: str, body: Object, *, subresource: str | None = None) -> None:
        """As a person with kubectl would."""
        await kubectl_patch(self.kube, resource, self.namespace, name, body, "kubectl-edit", subresource)


async def kubectl_patch(
    kube: Kube, resource: Resource, namespace: str, name: str, body: Object, manager: str, subresource: str | None
) -> None:
    path = resource.path(namespace, name, subresource)
    query = {"fieldManager": manager}
    await kube._json("PATCH", path, query=query, body=body, content_type="application/merge-patch+json")


@pytest.fixture
def site(kube: Kube, namespace: str) -> Site:
    return Site(kube, namespace)


async def test_a_pools_children_are_made_once_and_left_alone_after_that(site: Site) -> None:
    first = await site.sync()
    assert sorted(first.changed) == [
        "ConfigMap/trimtab-chat-envoy",
        "Deployment/trimtab-chat",
        "Deployment/trimtab-chat-envoy",
        "PodDisruptionBudget/trimtab-chat",
        "PodDisruptionBudget/trimtab-chat-envoy",
        "Secret/trimtab-chat-store",
        "Service/trimtab-chat",
        "Service/trimtab-chat-endpoints",
        "Service/trimtab-chat-envoy",
    ]
    assert first.is_complete
    before = await site.versions()
    assert await site.sync() == ApplyReport()
    # An operator that was started anew knows only what is there.
    site.applier = ChildApplier(site.kube, OPERATOR)
    assert await site.sync() == ApplyReport()
    # A cache that is behind costs some requests and changes nothing.
    assert await site.sync(found=[]) == ApplyReport()
    assert await site.versions() == before


@pytest.mark.parametrize("spec", POLICIES.values(), ids=POLICIES)
async def test_the_servers_own_spelling_is_not_taken_for_a_change(site: Site, spec: Object) -> None:
    await site.sync(site.objects(spec))
    before = await site.versions()
    assert await site.sync(site.objects(spec)) == ApplyReport()
    assert await site.versions() == before


async def test_a_policy_that_changes_is_followed_by_the_objects_that_it_concerns(site: Site) -> None:
    await site.sync()
    report = await site.sync(site.objects({"picker": {"replicas": 3, "priorityClassName": "high"}}))
    assert report.changed == ["Deployment/trimtab-chat"]
    assert (await site.get(DEPLOYMENTS, "trimtab-chat"))["spec"]["replicas"] == 3
    report = await site.sync()
    assert report.changed == ["Deployment/trimtab-chat"]
    # What is not asked for any more is gone, and not only no longer looked at.
    pod = (await site.get(DEPLOYMENTS, "trimtab-chat"))["spec"]["template"]["spec"]
    assert "priorityClassName" not in pod


async def test_a_rotated_password_reaches_the_secret_and_rolls_the_pickers_out(site: Site) -> None:
    await site.sync()
    rotated = StoreAccess(url="redis://trimtab-x:new@store:6379/0", secret="seed", is_own_user=True)
    report = await site.sync(site.objects(access=rotated))
    assert report.changed == ["Secret/trimtab-chat-store", "Deployment/trimtab-chat"]


HAND: dict[str, tuple[Resource, str, Object]] = {
    "replicas": (DEPLOYMENTS, "trimtab-chat", {"spec": {"replicas": 9}}),
    "labels": (DEPLOYMENTS, "trimtab-chat", {"metadata": {"labels": None}}),
    "one label": (SERVICES, "trimtab-chat", {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}}),
    "annotations": (DEPLOYMENTS, "trimtab-chat", {"metadata": {"annotations": None}}),
    "owner": (SECRETS, "trimtab-chat-store", {"metadata": {"ownerReferences": None}}),
    "the Secret's value": (SECRETS, "trimtab-chat-store", {"data": {"secret": "Zm9yZ2Vk"}}),
    "the Secret's key": (SECRETS, "trimtab-chat-store", {"data": {"store-url": None}}),
    "Envoy's configuration": (CONFIG_MAPS, "trimtab-chat-envoy", {"data": {"envoy.json": "{}"}}),
    "the Service's selector": (SERVICES, "trimtab-chat", {"spec": {"selector": {"app.kubernetes.io/name": "x"}}}),
    "the Service's ports": (SERVICES, "trimtab-chat-envoy", {"spec": {"ports": [{"port": 81, "targetPort": 1}]}}),
    "the Service's type": (SERVICES, "trimtab-chat-envoy", {"spec": {"type": "NodePort"}}),
    "the budget": (PDBS, "trimtab-chat", {"spec": {"maxUnavailable": 2}}),
    "strategy": (DEPLOYMENTS, "trimtab-chat", {"spec": {"strategy": {"type": "Recreate", "rollingUpdate": None}}}),
    "grace": (DEPLOYMENTS, "trimtab-chat", {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}}),
}


@pytest.mark.parametrize(("resource", "name", "change"), HAND.values(), ids=HAND)
async def test_what_is_changed_by_hand_is_put_right(site: Site, resource: Resource, name: str, change: Object) -> None:
    await site.sync()
    before = await site.get(resource, name)
    await site.patch(resource, name, change)
    assert _shape(await site.get(resource, name)) != _shape(before)
    report = await site.sync()
    assert report == ApplyReport(changed=[f"{resource.kind}/{name}"])
    assert _shape(await site.get(resource, name)) == _shape(before)
    assert await site.sync() == ApplyReport()


def _shape(body: Object) -> Object:
    """Without what tells only when and by whom it was written."""
    moving = ("resourceVersion", "generation", "managedFields")
    about = {name: value for name, value in body["metadata"].items() if name not in moving}
    return {**body, "metadata": about}


async def test_an_image_or_an_argument_changed_by_hand_is_put_right(site: Site) -> None:
    await site.sync()
    for field, value in (("image", "theirs"), ("args", ["--pool-name=theirs"]), ("command", ["sh"])):
        live = await site.get(DEPLOYMENTS, "trimtab-chat")
        changed = copy.deepcopy(live)
        changed["spec"]["template"]["spec"]["containers"][0][field] = value
        await site.kube.replace(DEPLOYMENTS, changed)
        assert (await site.sync()).changed == ["Deployment/trimtab-chat"]
        container = (await site.get(DEPLOYMENTS, "trimtab-chat"))["spec"]["template"]["spec"]["containers"][0]
        assert container[field] == live["spec"]["template"]["spec"]["containers"][0][field]


async def test_what_others_add_stays(site: Site) -> None:
    await site.sync()
    await site.patch(
        SERVICES, "trimtab-chat-envoy", {"metadata": {"annotations": {"cloud.example/scheme": "internal"}}}
    )
    assert await site.sync() == ApplyReport()
    await site.sync(site.objects({"standalone": {"port": 81}}))
    live = await site.get(SERVICES, "trimtab-chat-envoy")
    assert live["metadata"]["annotations"]["cloud.example/scheme"] == "internal"


@pytest.mark.parametrize("resource", CHILD_RESOURCES, ids=lambda resource: resource.kind)
async def test_a_deleted_child_is_made_again(site: Site, resource: Resource) -> None:
    await site.sync()
    (name, *_) = [c["metadata"]["name"] for c in await site.children() if c["kind"] == resource.kind]
    assert await site.kube.delete(resource, site.namespace, name)
    assert await site.sync() == ApplyReport(changed=[f"{resource.kind}/{name}"])


async def test_switching_envoy_off_removes_exactly_its_objects(site: Site) -> None:
    await site.sync()
    before = await site.versions()
    report = await site.sync(site.objects({"standalone": {"enabled": False}}))
    envoys = {name for name in before if name.endswith("-envoy")}
    assert set(report.removed) == envoys
    # The picker is told that nobody heeds mode overrides now.
    assert report.changed == ["Deployment/trimtab-chat"]
    after = await site.versions()
    assert set(after) == set(before) - envoys
    assert {name for name in after if after[name] != before[name]} == {"Deployment/trimtab-chat"}


async def test_a_foreign_service_of_the_same_name_is_untouched_byte_for_byte(site: Site) -> None:
    theirs = {
        "metadata": {"name": "trimtab-chat", "namespace": site.namespace, "labels": {"app": "theirs"}},
        "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 9002}]},
    }
    before = await site.kube.create(SERVICES, theirs)
    for _ in range(2):
        report = await site.sync()
        assert report.foreign == ["Service/trimtab-chat"]
        assert not report.is_complete
    assert len(await site.children()) == 8
    assert await site.applier.remove_all(site.pool.key, [*await site.children(), {**before, "kind": "Service"}])
    assert json.dumps(await site.get(SERVICES, "trimtab-chat")) == json.dumps(before)


async def test_what_another_installation_has_made_is_foreign_and_stays(site: Site) -> None:
    await site.sync()
    before = await site.versions()
    other = ChildApplier(site.kube, "trimtab-blue")
    wanted = desired(site.pool, policy(), install(namespace="trimtab-blue"), ACCESS)
    for _ in range(2):
        report = await other.sync(site.pool.key, POOL_UID, wanted, await site.children())
        assert len(report.foreign) == 9
        assert report.installations == dict.fromkeys(report.foreign, OPERATOR)
    # Neither what it no longer wants nor a pool that is gone makes it touch any.
    assert await other.sync(site.pool.key, POOL_UID, [], await site.children()) == ApplyReport()
    assert await other.remove_all(site.pool.key, await site.children()) == ApplyReport()
    assert await site.sync() == ApplyReport()
    assert await site.versions() == before


async def test_what_says_no_installation_is_taken_over(site: Site) -> None:
    await site.sync()
    for child in await site.children():
        resource = KINDS[child["kind"]]
        note = {"metadata": {"annotations": {"trimtab.dev/install": None}}}
        await site.patch(resource, child["metadata"]["name"], note)
    other = ChildApplier(site.kube, "trimtab-blue")
    wanted = desired(site.pool, policy(), install(namespace="trimtab-blue"), ACCESS)
    assert len((await other.sync(site.pool.key, POOL_UID, wanted, await site.children())).changed) == 9
    notes = {child["metadata"]["annotations"]["trimtab.dev/install"] for child in await site.children()}
    assert notes == {"trimtab-blue"}


@pytest.mark.parametrize("name", ["chat-envoy", "chat-endpoints", "chat-store"])
async def test_a_pool_whose_name_ends_like_one_of_ours_lives_beside_the_other(site: Site, name: str) -> None:
    await site.sync()
    other = pool(name, site.namespace)
    report = await site.applier.sync(other.key, POOL_UID, objects(of=other), [])
    assert report.is_complete
    assert len(report.changed) == 9
    assert await site.sync() == ApplyReport()


async def test_all_of_a_pool_that_is_gone_is_removed_and_nothing_of_another(site: Site) -> None:
    await site.sync()
    other = pool("code", site.namespace)
    await site.applier.sync(other.key, POOL_UID, objects(of=other), [])
    report = await site.applier.remove_all(site.pool.key, await site.children())
    assert len(report.removed) == 9
    left = await site.children()
    assert {c["metadata"]["annotations"]["trimtab.dev/pool"] for c in left} == {"code"}
    assert len(left) == 9
    assert await site.applier.remove_all(site.pool.key, []) == ApplyReport()


async def test_a_child_that_was_made_anew_meanwhile_is_not_removed_by_what_a_cache_says_of_the_old_one(
    site: Site,
) -> None:
    await site.sync()
    stale = await site.children()
    await site.kube.delete(SECRETS, site.namespace, "trimtab-chat-store")
    await site.sync()
    report = await site.applier.remove_all(site.pool.key, stale)
    assert "Secret/trimtab-chat-store" not in report.removed
    assert await site.get(SECRETS, "trimtab-chat-store")


async def test_a_pool_that_was_made_again_takes_its_children_over(site: Site) -> None:
    await site.sync()
    wanted = site.objects()
    for body in wanted:
        body["metadata"]["ownerReferences"][0]["uid"] = "a-later-pool"
    report = await site.applier.sync(site.pool.key, "a-later-pool", wanted, await site.children())
    assert len(report.changed) == 9
    for child in await site.children():
        (owner,) = child["metadata"]["ownerReferences"]
        assert owner["uid"] == "a-later-pool"


async def test_fields_that_cannot_be_changed_are_changed_by_making_the_object_again(site: Site) -> None:
    wrong = site.objects()
    for body in wrong:
        if body["kind"] == "Service" and body["metadata"]["name"] == "trimtab-chat":
            del body["spec"]["clusterIP"]
        if body["kind"] == "Deployment" and body["metadata"]["name"] == "trimtab-chat":
            body["spec"]["selector"]["matchLabels"]["old"] = "yes"
            body["spec"]["template"]["metadata"]["labels"]["old"] = "yes"
        if body["kind"] == "ConfigMap":
            body["immutable"] = True
            body["data"]["envoy.json"] = "{}"
    await site.sync(wrong)
    report = await site.sync()
    assert sorted(report.recreated) == [
        "ConfigMap/trimtab-chat-envoy (immutable)",
        "Deployment/trimtab-chat (spec.selector)",
        "Service/trimtab-chat (spec.clusterIP)",
    ]
    assert report.errors == []
    assert (await site.get(SERVICES, "trimtab-chat"))["spec"]["clusterIP"] == "None"
    assert "old" not in (await site.get(DEPLOYMENTS, "trimtab-chat"))["spec"]["selector"]["matchLabels"]
    assert await site.sync() == ApplyReport()


async def test_what_the_server_refuses_of_one_object_does_not_stop_the_others(site: Site) -> None:
    wanted = site.objects()
    (deployment,) = [b for b in wanted if (b["kind"], b["metadata"]["name"]) == ("Deployment", "trimtab-chat")]
    deployment["spec"]["template"]["spec"]["nodeSelector"] = {"kind": "no value of a label"}
    report = await site.sync(wanted)
    (error,) = report.errors
    assert error.startswith("Deployment/trimtab-chat: ")
    assert len(report.changed) == 8


async def test_an_object_that_somebodys_finalizer_holds_is_waited_for(site: Site) -> None:
    await site.sync()
    await site.patch(SERVICES, "trimtab-chat", {"metadata": {"finalizers": ["example.com/hold"]}})
    await site.kube.delete(SERVICES, site.namespace, "trimtab-chat")
    assert await site.sync() == ApplyReport()
    await site.patch(SERVICES, "trimtab-chat", {"spec": {"publishNotReadyAddresses": True}})
    (error,) = (await site.sync()).errors
    assert "being deleted" in error
    await site.patch(SERVICES, "trimtab-chat", {"metadata": {"finalizers": None}})
    assert (await site.sync()).changed == ["Service/trimtab-chat"]


async def test_an_autoscalers_replicas_hold_and_those_set_by_hand_do_not(site: Site) -> None:
    await site.sync()
    scale = {"spec": {"replicas": 6}}
    where = (site.kube, DEPLOYMENTS, site.namespace, "trimtab-chat", scale)
    await kubectl_patch(*where, "kubectl", "scale")
    assert (await site.sync()).changed == ["Deployment/trimtab-chat"]
    await kubectl_patch(*where, "kube-controller-manager", "scale")
    assert await site.sync() == ApplyReport()
    # Other fields of ours are put right all the same, without touching the number.
    await site.patch(DEPLOYMENTS, "trimtab-chat", {"spec": {"revisionHistoryLimit": 99}})
    assert (await site.sync()).changed == ["Deployment/trimtab-chat"]
    spec = (await site.get(DEPLOYMENTS, "trimtab-chat"))["spec"]
    assert (spec["replicas"], spec["revisionHistoryLimit"]) == (6, 3)


async def test_an_api_server_that_is_away_is_an_error_of_the_whole_round(site: Site, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n"
        'clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]\nusers: [{name: u, user: {token: t}}]\n'
    )
    kube = await Kube.connect(str(kubeconfig))
    try:
        with pytest.raises(KubeError) as raised:
            await ChildApplier(kube, OPERATOR).sync(site.pool.key, POOL_UID, site.objects(), [])
        assert raised.value.status == 0
    finally:
        await kube.close()


async def test_two_operators_that_work_at_once_end_with_the_same_objects(site: Site) -> None:
    other = ChildApplier(site.kube, OPERATOR)
    reports = await asyncio.gather(
        site.sync(), other.sync(site.pool.key, POOL_UID, site.objects(), await site.children())
    )
    assert all(report.is_complete for report in reports)
    assert await site.sync() == ApplyReport()
    assert {resource.kind for resource in CHILD_RESOURCES} <= set(KINDS)
