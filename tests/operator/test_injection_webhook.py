"""A real API server creates pods and calls the webhook, whole and broken."""

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from declared import declared_pool
from injection_pods import EVENTS, SHAPES, engine, pod, sidecar_of
from injection_webhook import (
    Cluster,
    as_text,
    client_context,
    cluster,
    eventually,
    has_sidecar,
    kubectl,
    other_webhook,
    relayed,
    tls_server,
)

from trimtab_operator.injection.authority import make_pair
from trimtab_operator.injection.certificate_secret import pair_in
from trimtab_operator.injection.certificates import SECRET_NAME
from trimtab_operator.injection.marks import INJECT, INJECTED, LEFT_ALONE_NOTE
from trimtab_operator.injection.pool_book import Match
from trimtab_operator.kube import NAMESPACES, PODS, POLICIES, POOLS, SECRETS, Kube, Object


@pytest.fixture
async def webhook(kube_config: Path) -> AsyncIterator[Cluster]:
    async with cluster(kube_config) as made:
        await made.start()
        yield made


async def page(made: Cluster, path: str) -> tuple[int, str]:
    assert made.server is not None
    url = f"http://127.0.0.1:{made.server.health_port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def count(made: Cluster, name: str) -> float:
    """A metric by its name and labels, 0 where it is not there yet."""
    _, text = await page(made, "/metrics")
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.parametrize("kind", ["Native", "Container"])
async def test_the_api_server_takes_pods_of_all_shapes(webhook: Cluster, kind: str) -> None:
    namespace = await webhook.place(kind=kind)
    await webhook.is_called(namespace, pod(engine("--model", "m")))
    quality = {"Guaranteed": "Guaranteed", "amounts of the whole pod": None}
    for shape, make in SHAPES.items():
        body = make()
        created = await webhook.create(namespace, body)
        container = sidecar_of(created)
        assert created["metadata"]["labels"][INJECTED] == "true", shape
        assert container in created["spec"]["initContainers" if kind == "Native" else "containers"], shape
        assert container.get("restartPolicy") == ("Always" if kind == "Native" else None), shape
        assert created["status"]["qosClass"] == quality.get(shape, "Burstable") or quality.get(shape, "") is None, shape


@pytest.mark.parametrize("kind", ["Native", "Container"])
async def test_the_api_server_finds_nothing_odd_in_injected_pods(webhook: Cluster, kind: str) -> None:
    namespace = await webhook.place(kind=kind)
    await webhook.is_called(namespace, pod(engine("--model", "m")))
    plain = await webhook.namespace(enabled=False)
    text = as_text(*(make() for make in SHAPES.values()))
    words = ("create", "--dry-run=server", "--validate=strict", "-f", "-", "-n")
    injected = await kubectl(webhook.kube_config, *words, namespace, text=text)
    untouched = await kubectl(webhook.kube_config, *words, plain, text=text)
    assert injected.stdout.count("created (server dry run)") == len(SHAPES), injected.stdout
    warnings = [line for line in injected.stdout.splitlines() if "Warning" in line and "trimtab:" not in line]
    assert sorted(warnings) == sorted(line for line in untouched.stdout.splitlines() if "Warning" in line)


async def test_a_policy_and_a_namespace_both_have_to_ask(webhook: Cluster) -> None:
    body = pod(engine("--model", "m"))
    namespace = await webhook.place()
    await webhook.is_called(namespace, body)

    plain = await webhook.namespace(enabled=False)
    await webhook.pool(plain)
    await webhook.policy(plain)
    await webhook.knows(plain)
    assert not has_sidecar(await webhook.create(plain, body))

    unasked = await webhook.namespace()
    await webhook.pool(unasked)
    await webhook.policy(unasked, inject=False)
    assert not has_sidecar(await webhook.create(unasked, body))

    # The label comes to a namespace that is there.
    await webhook.kube.merge(NAMESPACES, None, plain, {"metadata": {"labels": {INJECT: "enabled"}}})
    await webhook.is_called(plain, body)


async def test_a_pod_opts_out_by_its_label_and_other_pods_are_left_alone(webhook: Cluster) -> None:
    namespace = await webhook.place()
    await webhook.is_called(namespace, pod(engine("--model", "m")))
    out = pod(engine("--model", "m"))
    out["metadata"]["labels"][INJECT] = "disabled"
    assert not has_sidecar(await webhook.create(namespace, out))
    stranger = pod(engine("--model", "m"))
    stranger["metadata"]["labels"] = {"app": "other"}
    assert not has_sidecar(await webhook.create(namespace, stranger))
    assert await count(webhook, 'trimtab_webhook_skips_total{reason="no_pool"}') == 1
    nameless = pod(engine("--model", "m"))
    nameless["metadata"]["labels"] = None
    assert not has_sidecar(await webhook.create(namespace, nameless))


async def test_the_operators_own_namespace_is_never_injected_into(webhook: Cluster) -> None:
    namespace = await webhook.place()
    await webhook.is_called(namespace, pod(engine("--model", "m")))
    own = webhook.install.namespace  # labelled as if it asked
    await webhook.pool(own)
    await webhook.policy(own)
    await webhook.knows(own)
    assert not has_sidecar(await webhook.create(own, pod(engine("--model", "m"))))


async def test_a_pool_that_comes_later_takes_no_sidecar_from_an_older_one(webhook: Cluster) -> None:
    namespace = await webhook.place()
    await webhook.is_called(namespace, pod(engine("--model", "m")))
    labels = {"model": "m"}
    await webhook.kube.create(POOLS, declared_pool(namespace, "younger", selector={"matchLabels": labels}))
    both = pod(engine("--model", "m"))
    both["metadata"]["labels"] |= labels

    async def secret() -> str:
        return next(
            volume["secret"]["secretName"]
            for volume in (await webhook.create(namespace, both))["spec"]["volumes"]
            if volume["name"] == "trimtab-access"
        )

    # A pool that asks for none does not stand in the way.
    assert await secret() == "trimtab-chat-store"
    await webhook.policy(namespace, "younger")

    async def is_asking() -> bool:
        assert webhook.server is not None
        return isinstance(webhook.server.book.match(namespace, labels), Match)

    await eventually(is_asking)
    assert await secret() == "trimtab-chat-store"
    # Where the older one does not ask, the younger has its turn.
    await webhook.kube.delete(POLICIES, namespace, "chat")

    async def is_the_youngers() -> bool:
        return await secret() == "trimtab-younger-store"

    await eventually(is_the_youngers)


async def test_kubectl_shows_the_flag_that_the_engine_lacks(webhook: Cluster) -> None:
    namespace = await webhook.place()
    await webhook.is_called(namespace, pod(engine("--model", "m")))
    ran = await kubectl(
        webhook.kube_config, "create", "-n", namespace, "-f", "-", text=as_text(pod(engine("--model", "m")))
    )
    assert f"Warning: trimtab: container vllm publishes no KV events; add {EVENTS[0]} '{EVENTS[1]}'" in ran.stdout


async def test_the_last_policy_that_made_sense_counts(webhook: Cluster) -> None:
    namespace = await webhook.place()
    await webhook.is_called(namespace, pod(engine("--model", "m")))
    assert webhook.server is not None
    found = await webhook.kube.get(POLICIES, namespace, "chat")
    assert found is not None
    webhook.server.book.put_policy({**found, "spec": {**found["spec"], "sidecar": {"inject": "perhaps"}}})
    assert has_sidecar(await webhook.create(namespace, pod(engine("--model", "m"))))


async def test_what_another_webhook_drops_is_put_back(webhook: Cluster) -> None:
    """One built on types that do not know `restartPolicy` of init containers, called after ours."""
    namespace = await webhook.place()
    await webhook.is_called(namespace, pod(engine("--model", "m")))
    calls = []

    async def drop(review: Object) -> web.StreamResponse:
        inits = review["request"]["object"]["spec"].get("initContainers") or []
        patch = [
            {"op": "remove", "path": f"/spec/initContainers/{index}/restartPolicy"}
            for index, container in enumerate(inits)
            if "restartPolicy" in container
        ]
        calls.append(len(patch))
        response: Object = {"uid": review["request"]["uid"], "allowed": True}
        if patch:
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
        return web.json_response({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})

    async with other_webhook(webhook.kube, f"zz-{webhook.number}", drop):

        async def is_called() -> bool:
            created = await webhook.create(namespace, pod(engine("--model", "m")))
            assert sidecar_of(created)["restartPolicy"] == "Always"
            return 1 in calls

        await eventually(is_called)


async def test_an_engine_changed_by_a_later_webhook_is_told_as_it_is(webhook: Cluster) -> None:
    namespace = await webhook.place()
    await webhook.is_called(namespace, pod(engine("--model", "m")))

    async def change(review: Object) -> web.StreamResponse:
        patch = [{"op": "replace", "path": "/spec/containers/0/args/1", "value": "another"}]
        response = {
            "uid": review["request"]["uid"],
            "allowed": True,
            "patchType": "JSONPatch",
            "patch": base64.b64encode(json.dumps(patch).encode()).decode(),
        }
        return web.json_response({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})

    async with other_webhook(webhook.kube, f"zz-{webhook.number}", change):

        async def told() -> bool:
            created = await webhook.create(namespace, pod(engine("--model", "m")))
            engines = next(e["value"] for e in sidecar_of(created)["env"] if e["name"] == "TRIMTAB_ENGINE_ARGS")
            if created["spec"]["containers"][0]["args"][1] != "another":
                return False
            assert json.loads(engines)[1] == "another"
            return True

        await eventually(told)


@pytest.mark.parametrize("fault", ["stopped", "hanging", "garbage", "error", "wrong certificate"])
async def test_a_webhook_that_does_not_work_blocks_no_pod(webhook: Cluster, fault: str) -> None:
    namespace = await webhook.place()
    await webhook.is_called(namespace, pod(engine("--model", "m")))
    await webhook.stop()
    secret = await webhook.kube.get(SECRETS, webhook.install.namespace, SECRET_NAME)
    pair = pair_in(secret)
    assert pair is not None

    async def answer(review: Object) -> web.StreamResponse:
        if fault == "hanging":
            await asyncio.sleep(60)
        if fault == "error":
            raise web.HTTPInternalServerError
        return web.Response(text='{"response": 7}' if fault == "garbage" else "{}")

    async with contextlib.AsyncExitStack() as stack:
        if fault == "wrong certificate":
            pair = make_pair(["127.0.0.1"], now_s=time.time())
        if fault != "stopped":
            await stack.enter_async_context(tls_server(pair, answer, webhook.port))
        created = await webhook.create(namespace, pod(engine("--model", "m")))
        assert not has_sidecar(created)


async def test_a_replica_is_ready_only_once_it_knows_the_pools_and_has_a_certificate(kube_config: Path) -> None:
    async with cluster(kube_config) as made:
        await made.kube.delete(SECRETS, made.install.namespace, SECRET_NAME)
        starting = asyncio.create_task(made.start())

        async def is_served() -> bool:
            return made.server is not None and made.server.health_port != 0

        await eventually(is_served)
        assert (await page(made, "/healthz"))[0] == 200
        assert (await page(made, "/readyz"))[0] == 503
        assert not starting.done()
        await made.keeper(sleep=lambda _: asyncio.sleep(0)).ensure()
        await starting
        assert (await page(made, "/readyz"))[0] == 200


async def test_what_is_no_review_is_refused_and_odd_pods_are_allowed(webhook: Cluster) -> None:
    secret = await webhook.kube.get(SECRETS, webhook.install.namespace, SECRET_NAME)
    pair = pair_in(secret)
    assert pair is not None
    url = f"https://127.0.0.1:{webhook.port}/inject"
    connector = aiohttp.TCPConnector(ssl=client_context(pair.ca))
    pod_made = {"uid": "u", "namespace": "n", "kind": {"kind": "Pod"}, "operation": "CREATE"}
    odd: list[tuple[bytes, int]] = [
        (b"", 400),
        (b"[]", 400),
        (b"{}", 400),
        (b"[" * 100_000, 400),
        *(
            (json.dumps({"request": request}).encode(), 200)
            for request in (
                {"uid": "u"},
                {**pod_made, "object": None},
                {**pod_made, "object": {"metadata": {"labels": 7}}},
            )
        ),
    ]
    async with aiohttp.ClientSession(connector=connector) as session:
        for body, status in odd:
            async with session.post(url, data=body) as response:
                assert response.status == status, body[:80]
                if status == 200:
                    assert (await response.json())["response"] == {"uid": "u", "allowed": True}
    assert await count(webhook, 'trimtab_webhook_requests_total{outcome="error"}') == len(odd)


async def test_an_api_server_that_was_away_takes_nothing_from_what_is_known(kube_config: Path) -> None:
    async with cluster(kube_config) as made, relayed(kube_config) as relay:
        through = await Kube.connect(str(relay.kube_config))
        try:
            await made.start(through)
            namespace = await made.place()
            await made.is_called(namespace, pod(engine("--model", "m")))
            await relay.cut()
            # Other requests still reach the API server, and it reaches the webhook.
            assert has_sidecar(await made.create(namespace, pod(engine("--model", "m"))))
            assert (await page(made, "/readyz"))[0] == 200
            await made.kube.delete(POLICIES, namespace, "chat")
            await relay.mend()

            async def left_alone() -> bool:
                return not has_sidecar(await made.create(namespace, pod(engine("--model", "m"))))

            await eventually(left_alone)
            await made.policy(namespace)
            await made.is_called(namespace, pod(engine("--model", "m")))
        finally:
            await made.stop()
            await through.close()


async def test_a_pod_whose_engine_cannot_be_told_starts_all_the_same_and_says_why(webhook: Cluster) -> None:
    wrong, right = await webhook.place(engineContainer="nosuch"), await webhook.place()
    await webhook.is_called(right, pod(engine("--model", "m")))
    created = await webhook.create(wrong, pod(engine("--model", "m")))
    assert not has_sidecar(created)
    assert "no container is named nosuch" in created["metadata"]["annotations"][LEFT_ALONE_NOTE]


async def test_a_pod_that_would_grow_too_large_is_left_as_it_is(webhook: Cluster) -> None:
    namespace = await webhook.place()
    await webhook.is_called(namespace, pod(engine("--model", "m")))
    entries = [{"name": "SECRET", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    entries += [{"name": f"E{n}", "value": f"$(SECRET){'x' * 20_000}"} for n in range(20)]
    words = [f"$(E{n})" for n in range(20)]
    assert not has_sidecar(await webhook.create(namespace, pod(engine("--model", "m", *words, env=entries))))
    assert await count(webhook, 'trimtab_webhook_skips_total{reason="too_large"}') == 1


async def test_pools_and_policies_that_go_are_forgotten(webhook: Cluster) -> None:
    namespace = await webhook.place()
    await webhook.is_called(namespace, pod(engine("--model", "m")))
    await webhook.kube.delete(POLICIES, namespace, "chat")

    async def left_alone() -> bool:
        return not has_sidecar(await webhook.create(namespace, pod(engine("--model", "m"))))

    await eventually(left_alone)


async def test_a_dry_run_leaves_nothing_behind(webhook: Cluster) -> None:
    namespace = await webhook.place()
    await webhook.is_called(namespace, pod(engine("--model", "m")))
    text = as_text(pod(engine("--model", "m")))
    ran = await kubectl(
        webhook.kube_config, "create", "-n", namespace, "--dry-run=server", "-o", "json", "-f", "-", text=text
    )
    shown, _ = json.JSONDecoder().raw_decode(ran.stdout, ran.stdout.index("{\n"))
    assert has_sidecar(shown)
    assert await webhook.kube.get(PODS, namespace, shown["metadata"]["name"]) is None
