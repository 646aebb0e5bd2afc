"""The webhook's certificate: made, renewed, mended, and trusted before it is served."""

import asyncio
import base64
import dataclasses
import functools
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from injection_pods import engine, pod
from injection_webhook import Cluster, client_context, cluster, eventually, has_sidecar

from trimtab_operator.injection.authority import (
    CAS_MAX,
    LIFE_S,
    ServingPair,
    ca_bundle,
    fault_of,
    life_of,
    make_pair,
    renew_at_s,
    split_bundle,
)
from trimtab_operator.injection.certificate_secret import pair_in
from trimtab_operator.injection.certificates import SECRET_NAME, CertificateKeeper
from trimtab_operator.injection.served_certificate import CertificateUnusableError, ServedCertificate
from trimtab_operator.injection.webhook_configuration import WebhookAddress, configuration_name
from trimtab_operator.kube import SECRETS, WEBHOOKS, Object

NOW_S = 1_800_000_000.0
HOSTS = ["trimtab-webhook.trimtab.svc", "trimtab-webhook.trimtab.svc.cluster.local"]


@pytest.fixture
async def install(kube_config: Path) -> AsyncIterator[Cluster]:
    async with cluster(kube_config) as made:
        yield made


def test_a_pair_holds_for_its_hosts_and_its_life() -> None:
    pair = make_pair([*HOSTS, "127.0.0.1"], now_s=NOW_S)
    assert fault_of(pair, [*HOSTS, "127.0.0.1"]) is None
    begin_s, end_s = life_of(pair.certificate)
    assert begin_s < NOW_S < renew_at_s(pair.certificate) < end_s == NOW_S + LIFE_S
    assert 0.65 < (renew_at_s(pair.certificate) - NOW_S) / LIFE_S < 0.67


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"certificate": b"-----BEGIN"}, "cannot be read"),
        ({"key": b"x"}, "cannot be read"),
        ({"ca": b""}, "cannot be read"),
        ({"key": make_pair(HOSTS, now_s=NOW_S).key}, "another one's"),
        ({"ca": make_pair(HOSTS, now_s=NOW_S).ca}, "none of its CAs"),
    ],
)
def test_a_damaged_pair_is_known(change: dict[str, bytes], fault: str) -> None:
    pair = dataclasses.replace(make_pair(HOSTS, now_s=NOW_S), **change)
    assert fault in (fault_of(pair, HOSTS) or "")


def test_a_pair_for_other_hosts_is_known() -> None:
    assert "does not name" in (fault_of(make_pair(HOSTS[:1], now_s=NOW_S), HOSTS) or "")


def test_a_bundle_keeps_what_still_holds_each_once_and_not_for_ever() -> None:
    old, older, oldest, over = (
        make_pair(HOSTS, now_s=NOW_S, life_s=life_s).ca for life_s in (5_000.0, 4_000.0, 3_000.0, 100.0)
    )
    new = make_pair(HOSTS, now_s=NOW_S).ca
    bundle = ca_bundle(new, [oldest + old + over, b"rubbish" + old + older], now_s=NOW_S + 1_000)
    assert split_bundle(bundle) == [new, old, older]
    assert len(split_bundle(bundle)) == CAS_MAX


def test_a_pair_that_cannot_be_served_leaves_the_one_before_it() -> None:
    served = ServedCertificate()
    pair = make_pair(HOSTS, now_s=NOW_S)
    assert served.use(pair)
    assert not served.use(pair)
    for broken in ({"key": make_pair(HOSTS, now_s=NOW_S).key}, {"certificate": b"x"}):
        with pytest.raises(CertificateUnusableError):
            served.use(dataclasses.replace(pair, **broken))
    assert served.pair == pair


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://10.0.0.1:9443", "10.0.0.1"),
        ("https://[::1]:9443", "::1"),
        ("https://webhook.example/x", "webhook.example"),
    ],
)
def test_the_certificate_is_for_the_host_that_is_called(url: str, host: str) -> None:
    assert WebhookAddress(namespace="t", url=url).hosts() == (host,)
    assert WebhookAddress(namespace="trimtab").hosts() == tuple(HOSTS)


async def secret(made: Cluster) -> Object:
    found = await made.kube.get(SECRETS, made.install.namespace, SECRET_NAME)
    assert found is not None
    return found


async def trusted(made: Cluster) -> list[bytes]:
    found = await made.kube.get(WEBHOOKS, None, configuration_name(made.install.namespace))
    assert found is not None
    return split_bundle(base64.b64decode(found["webhooks"][0]["clientConfig"]["caBundle"]))


class Sleeps:
    """Counts the pauses, and notes what was trusted and served during each."""

    def __init__(self, made: Cluster) -> None:
        self._made = made
        self.seen: list[tuple[list[bytes], bytes]] = []

    async def __call__(self, _: float) -> None:
        self.seen.append((await trusted(self._made), base64.b64decode((await secret(self._made))["data"]["tls.crt"])))


async def test_what_is_right_is_not_touched(install: Cluster) -> None:
    before = await secret(install)
    state = await install.keeper().ensure()
    assert not state.renewed
    assert await secret(install) == before
    assert state.expires_s == life_of(base64.b64decode(before["data"]["tls.crt"]))[1]


async def test_a_new_ca_is_trusted_before_its_certificate_is_served_and_the_old_one_after(install: Cluster) -> None:
    old = pair_in(await secret(install))
    assert old is not None
    sleeps = Sleeps(install)
    late_s = renew_at_s(old.certificate) + 1
    keeper = install.keeper(clock=lambda: late_s, sleep=sleeps)
    assert (await keeper.ensure()).renewed
    new = pair_in(await secret(install))
    assert new is not None
    assert new.certificate != old.certificate
    ((while_pausing, served_then),) = sleeps.seen
    assert served_then == old.certificate
    assert while_pausing == await trusted(install) == split_bundle(new.ca)
    assert split_bundle(new.ca)[1:] == split_bundle(old.ca)
    assert not (await keeper.ensure()).renewed


async def test_an_old_ca_is_trusted_no_longer_than_it_holds(install: Cluster) -> None:
    first = pair_in(await secret(install))
    assert first is not None
    times = [renew_at_s(first.certificate) + 1]
    keeper = install.keeper(clock=lambda: times[-1], sleep=Sleeps(install))
    await keeper.ensure()
    assert len(await trusted(install)) == 2
    times.append(life_of(first.certificate)[1] + 1)
    await keeper.ensure()
    (last,) = await trusted(install)
    assert last not in split_bundle(first.ca)


@pytest.mark.parametrize("damage", ["deleted", "emptied", "another type", "cut short"])
async def test_a_secret_that_is_gone_or_damaged_is_made_again_and_what_is_served_stays_trusted(
    install: Cluster, damage: str
) -> None:
    before = await secret(install)
    ca = split_bundle(base64.b64decode(before["data"]["ca.crt"]))
    namespace = install.install.namespace
    if damage in ("deleted", "another type"):
        await install.kube.delete(SECRETS, namespace, SECRET_NAME)
    if damage == "another type":
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET_NAME, "namespace": namespace}}
        await install.kube.create(SECRETS, body)
    if damage == "emptied":
        empty: dict[str, Any] = {"data": {"tls.crt": "", "tls.key": ""}}
        await install.kube.merge(SECRETS, namespace, SECRET_NAME, empty)
    if damage == "cut short":
        cut = {"data": {"tls.crt": before["data"]["tls.crt"][:80]}}
        await install.kube.merge(SECRETS, namespace, SECRET_NAME, cut)
    state = await install.keeper(sleep=lambda _: asyncio.sleep(0)).ensure()
    assert state.renewed
    pair = pair_in(await secret(install))
    assert pair is not None
    assert fault_of(pair, install.address.hosts()) is None
    assert (await trusted(install))[1:] == ca


async def test_a_bundle_that_somebody_changed_is_put_right(install: Cluster) -> None:
    name = configuration_name(install.install.namespace)
    found = await install.kube.get(WEBHOOKS, None, name)
    assert found is not None
    before = await trusted(install)
    found["webhooks"][0]["clientConfig"]["caBundle"] = base64.b64encode(make_pair(["x"], now_s=NOW_S).ca).decode()
    found["webhooks"][0]["failurePolicy"] = "Fail"
    await install.kube.replace(WEBHOOKS, found)
    await install.keeper().ensure()
    assert await trusted(install) == before
    found = await install.kube.get(WEBHOOKS, None, name)
    assert found is not None
    assert found["webhooks"][0]["failurePolicy"] == "Ignore"
    assert found["webhooks"][0]["timeoutSeconds"] == 3


async def test_a_configuration_that_was_deleted_comes_back(install: Cluster) -> None:
    before = await trusted(install)
    await install.kube.delete(WEBHOOKS, None, configuration_name(install.install.namespace))
    await install.keeper().ensure()
    assert await trusted(install) == before


@pytest.mark.parametrize("mode", ["certManager", "existingSecret"])
async def test_somebody_elses_certificate_is_only_read(install: Cluster, mode: Any) -> None:
    late_s = NOW_S + 10 * LIFE_S
    before = await secret(install), await trusted(install)
    keeper = install.keeper(mode=mode, clock=lambda: late_s)
    state = await keeper.ensure()
    assert state.expires_s is not None
    assert (await secret(install), await trusted(install)) == before
    await install.kube.delete(SECRETS, install.install.namespace, SECRET_NAME)
    state = await keeper.ensure()
    assert (state.expires_s, SECRET_NAME in state.fault) == (None, True)
    assert await install.kube.get(SECRETS, install.install.namespace, SECRET_NAME) is None


async def test_the_configuration_for_a_service_is_taken(install: Cluster) -> None:
    keeper = CertificateKeeper(install.kube, install.install.namespace, sleep=Sleeps(install))
    await keeper.ensure()
    found = await install.kube.get(WEBHOOKS, None, configuration_name(install.install.namespace))
    assert found is not None
    client = found["webhooks"][0]["clientConfig"]
    assert client["service"]["name"] == "trimtab-webhook"
    assert "url" not in client


async def test_rotation_under_load_costs_no_pod_its_sidecar(install: Cluster) -> None:
    server = await install.start()
    namespace = await install.place()
    await install.is_called(namespace, pod(engine("--model", "m")))
    is_over = asyncio.Event()
    made: list[bool] = []

    async def create() -> None:
        while not is_over.is_set():
            made.append(has_sidecar(await install.create(namespace, pod(engine("--model", "m")))))

    load = [asyncio.create_task(create()) for _ in range(4)]
    certificates = set()
    # So short a life that every look renews it.
    keeper = install.keeper(life_s=900.0, sleep=lambda _: asyncio.sleep(1))
    await install.kube.delete(SECRETS, install.install.namespace, SECRET_NAME)
    try:
        for _ in range(3):
            assert (await keeper.ensure()).renewed
            stored = pair_in(await secret(install))
            assert stored is not None
            certificates.add(stored.certificate)
            await eventually(functools.partial(serves, server.port, stored))
            # New connections, as they come and go in a long life, meet the new certificate.
            await asyncio.sleep(0.5)
    finally:
        is_over.set()
        await asyncio.gather(*load)
    assert len(certificates) == 3
    assert len(made) > 50
    assert all(made)


async def serves(port: int, pair: ServingPair) -> bool:
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context(pair.ca))
    served = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return bool(served == ssl.PEM_cert_to_DER_cert(pair.certificate.decode()))
