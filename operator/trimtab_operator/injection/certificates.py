"""Keeps the webhook's certificate and what the API server trusts, on the one operator that leads.

The one rule: a certificate is served only after its CA has been trusted for a while, and a CA is trusted for as long as
a certificate of it may be served; so at no moment does the API server meet one that it does not know.
"""

import asyncio
import base64
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from trimtab_operator.injection.authority import (
    LIFE_S,
    ServingPair,
    ca_bundle,
    fault_of,
    life_of,
    make_pair,
    renew_at_s,
)
from trimtab_operator.injection.certificate_secret import pair_in, secret_of
from trimtab_operator.injection.webhook_configuration import (
    WebhookAddress,
    configuration_name,
    trusted_only,
    webhook_configuration,
)
from trimtab_operator.kube import SECRETS, WEBHOOKS, Kube, KubeError, Object

logger = logging.getLogger(__name__)

CertificateMode = Literal["self", "certManager", "existingSecret"]
"""`self`: made and renewed here. Else: somebody else's, and the webhook's configuration with it."""
SECRET_NAME: Final = "trimtab-webhook-certificate"
SETTLE_S: Final = 5.0
"""How long API servers may take to hear of a new CA."""
CHECK_S: Final = 60.0
RETRY_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateState:
    """What `ensure` has found or made."""

    expires_s: float | None
    """Unix time; None: there is no certificate that can be read."""
    renewed: bool = False
    fault: str = ""
    """What is wrong and cannot be put right here; empty: nothing."""
    is_awaited: bool = False
    """The webhook's configuration is somebody else's to make, and not there yet."""


class CertificateKeeper:
    """`ensure` and `run` raise KubeError and nothing else; `run` only where `once` would."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        *,
        mode: CertificateMode = "self",
        secret_name: str = SECRET_NAME,
        makes_configuration: bool = True,
        address: WebhookAddress | None = None,
        life_s: float = LIFE_S,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._mode = mode
        self._secret_name = secret_name
        self._makes_configuration = makes_configuration
        self._address = address or WebhookAddress(namespace=namespace)
        self._life_s = life_s
        self._clock = clock
        self._sleep = sleep
        self.state = CertificateState(expires_s=None, fault="not looked at yet")

    async def run(self) -> None:
        """Until cancelled: look again and again, sooner where something failed."""
        while True:
            try:
                state = await self.ensure()
                pause_s = RETRY_S if state.is_awaited else CHECK_S
            except KubeError as error:
                logger.warning("the webhook's certificate was not looked after", extra={"error": str(error)})
                pause_s = RETRY_S
            await self._sleep(pause_s)

    async def ensure(self) -> CertificateState:
        """Make, renew or mend what is to be; idempotent."""
        self.state = await (self._keep() if self._mode == "self" else self._look())
        return self.state

    async def _look(self) -> CertificateState:
        pair = pair_in(await self._kube.get(SECRETS, self._namespace, self._secret_name))
        if pair is None:
            return CertificateState(expires_s=None, fault=f"Secret {self._secret_name} has no tls.crt and tls.key")
        try:
            return CertificateState(expires_s=life_of(pair.certificate)[1])
        except ValueError:
            return CertificateState(expires_s=None, fault=f"tls.crt of Secret {self._secret_name} cannot be read")

    async def _keep(self) -> CertificateState:
        secret = await self._kube.get(SECRETS, self._namespace, self._secret_name)
        pair, now_s = pair_in(secret), self._clock()
        reason = self._reason_to_renew(pair, now_s)
        if pair is not None and reason is None:
            is_trusted = await self._trust(ca_bundle(pair.ca, (), now_s=now_s))
            return self._kept(pair, is_trusted=is_trusted)
        present = await self._kube.get(WEBHOOKS, None, configuration_name(self._namespace))
        old = [_bundle_in(present), *([pair.ca] if pair is not None else [])]
        new = make_pair(self._address.hosts(), now_s=now_s, life_s=self._life_s)
        bundle = ca_bundle(new.ca, old, now_s=now_s)
        logger.info("new certificate of the webhook", extra={"reason": reason})
        is_trusted = await self._trust(bundle)
        if present is not None:
            await self._sleep(SETTLE_S)
        new = ServingPair(certificate=new.certificate, key=new.key, ca=bundle)
        await self._store(new, secret)
        return self._kept(new, is_trusted=is_trusted, renewed=True)

    def _kept(self, pair: ServingPair, *, is_trusted: bool, renewed: bool = False) -> CertificateState:
        return CertificateState(
            expires_s=life_of(pair.certificate)[1],
            renewed=renewed,
            fault="" if is_trusted else f"there is no {WEBHOOKS.kind} {configuration_name(self._namespace)}",
            is_awaited=not is_trusted,
        )

    def _reason_to_renew(self, pair: ServingPair | None, now_s: float) -> str | None:
        if pair is None:
            return "there is none"
        if (fault := fault_of(pair, self._address.hosts())) is not None:
            return fault
        begin_s, _ = life_of(pair.certificate)
        if now_s < begin_s:
            return "it does not hold yet"
        return "two thirds of its life are over" if now_s >= renew_at_s(pair.certificate) else None

    async def _trust(self, bundle: bytes) -> bool:
        """False: the configuration is somebody else's to make, and there is none."""
        if self._makes_configuration:
            await self._kube.apply(webhook_configuration(self._address, bundle))
            return True
        # Never made here: an apply to nothing would, once the chart has taken it away.
        if await self._kube.get(WEBHOOKS, None, configuration_name(self._namespace)) is None:
            return False
        await self._kube.apply(trusted_only(self._namespace, bundle))
        return True

    async def _store(self, pair: ServingPair, present: Object | None) -> None:
        version = None if present is None else present["metadata"]["resourceVersion"]
        body = secret_of(pair, namespace=self._namespace, name=self._secret_name, resource_version=version)
        if present is None:
            await self._kube.create(SECRETS, body)
            return
        if present.get("type") != body["type"]:
            # A Secret's type cannot be changed.
            await self._kube.delete(SECRETS, self._namespace, self._secret_name, uid=present["metadata"]["uid"])
            del body["metadata"]["resourceVersion"]
            await self._kube.create(SECRETS, body)
            return
        await self._kube.replace(SECRETS, body)


def _bundle_in(configuration: Object | None) -> bytes:
    """All that the configuration trusts so far."""
    bundles: list[Any] = [
        webhook.get("clientConfig", {}).get("caBundle") for webhook in (configuration or {}).get("webhooks") or ()
    ]
    parts = []
    for bundle in bundles:
        try:
            parts.append(base64.b64decode(bundle or ""))
        except (ValueError, TypeError):
            continue
    return b"\n".join(parts)
