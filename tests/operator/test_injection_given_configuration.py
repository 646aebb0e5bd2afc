"""A webhook configuration that a chart has made: the operator puts its CA into it, and does nothing else with it."""

import base64
import secrets

import pytest

from trimtab_operator.injection.certificates import CertificateKeeper
from trimtab_operator.injection.webhook_configuration import WebhookAddress, configuration_name, webhook_configuration
from trimtab_operator.kube import NAMESPACES, SECRETS, WEBHOOKS, Kube, Object


async def no_pause(_: float) -> None:
    """Settling takes no time here."""


@pytest.fixture
async def system(kube: Kube) -> str:
    name = f"system-{secrets.token_hex(4)}"
    await kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


def keeper_of(kube: Kube, system: str) -> CertificateKeeper:
    return CertificateKeeper(kube, system, makes_configuration=False, sleep=no_pause)


async def given(kube: Kube, system: str) -> Object:
    """As a chart makes it: without a CA, and with a time limit of its own."""
    body = webhook_configuration(WebhookAddress(namespace=system), b"")
    (webhook,) = body["webhooks"]
    del webhook["clientConfig"]["caBundle"]
    webhook["timeoutSeconds"] = 7
    return await kube.create(WEBHOOKS, body)


async def found(kube: Kube, system: str) -> Object:
    body = await kube.get(WEBHOOKS, None, configuration_name(system))
    assert body is not None
    return body


async def test_its_ca_is_filled_in_and_all_else_is_left(kube: Kube, system: str) -> None:
    before = await given(kube, system)
    state = await keeper_of(kube, system).ensure()
    assert (state.renewed, state.fault, state.is_awaited) == (True, "", False)
    after = await found(kube, system)
    trusted = after["webhooks"][0]["clientConfig"].pop("caBundle")
    assert after["webhooks"] == before["webhooks"]
    assert after["metadata"]["labels"] == before["metadata"]["labels"]
    secret = await kube.get(SECRETS, system, "trimtab-webhook-certificate")
    assert secret is not None
    assert secret["data"]["ca.crt"] == trusted
    (mine,) = [entry for entry in after["metadata"]["managedFields"] if entry["manager"] == "trimtab"]
    assert list(mine["fieldsV1"]) == ["f:webhooks"]
    assert "f:timeoutSeconds" not in str(mine)


async def test_one_that_lost_its_ca_gets_it_back(kube: Kube, system: str) -> None:
    await given(kube, system)
    keeper = keeper_of(kube, system)
    await keeper.ensure()
    first = (await found(kube, system))["webhooks"][0]["clientConfig"]["caBundle"]
    # As `helm upgrade --force` does.
    await kube.delete(WEBHOOKS, None, configuration_name(system))
    await given(kube, system)
    state = await keeper.ensure()
    assert not state.renewed
    again = base64.b64decode((await found(kube, system))["webhooks"][0]["clientConfig"]["caBundle"])
    assert again in base64.b64decode(first)


async def test_one_that_is_gone_is_not_made_again(kube: Kube, system: str) -> None:
    await given(kube, system)
    keeper = keeper_of(kube, system)
    await keeper.ensure()
    await kube.delete(WEBHOOKS, None, configuration_name(system))
    state = await keeper.ensure()
    assert state.is_awaited
    assert configuration_name(system) in state.fault
    assert await kube.get(WEBHOOKS, None, configuration_name(system)) is None


async def test_one_that_comes_later_is_waited_for_with_a_certificate_ready(kube: Kube, system: str) -> None:
    keeper = keeper_of(kube, system)
    state = await keeper.ensure()
    assert (state.renewed, state.is_awaited) == (True, True)
    await given(kube, system)
    state = await keeper.ensure()
    assert (state.renewed, state.is_awaited, state.fault) == (False, False, "")
    assert (await found(kube, system))["webhooks"][0]["clientConfig"]["caBundle"]


async def test_it_is_looked_for_again_soon(kube: Kube, system: str) -> None:
    pauses: list[float] = []

    class EnoughError(Exception):
        pass

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            await given(kube, system)
            return
        raise EnoughError

    keeper = CertificateKeeper(kube, system, makes_configuration=False, sleep=pause)
    with pytest.raises(EnoughError):
        await keeper.run()
    assert pauses[0] < pauses[1]
