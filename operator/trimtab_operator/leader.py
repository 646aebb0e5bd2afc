"""Which of the operator's replicas works: the one that holds the Lease.

The one rule: who is not sure to hold it does not work: a holder that could not renew in time ends its process, and one
that stops gives the Lease back, so that the next takes over at once. The official client's election keeps times as
local time without a zone, in annotations of its own, and does not give the Lease back; hence this one.

Another's Lease has run out when it did not change for `lease_s` by our own monotonic clock: clocks of two machines are
never compared.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from trimtab_operator.ending import EndingError
from trimtab_operator.kube import LEASES, Kube, KubeError, Object

logger = logging.getLogger(__name__)

LEASE_S: Final = 15
RENEW_DEADLINE_S: Final = 10.0
RETRY_S: Final = 2.0
TRY_S: Final = 4.0
"""How long one try may take: a connection that is dead must not use up the whole deadline."""
REFUSED: Final = (409, 404)
"""Somebody else was faster."""


class LeadershipLostError(EndingError):
    """The Lease could not be renewed in time: end the process."""


class Leadership:
    """One per process. `identity` must be its own."""

    def __init__(
        self,
        kube: Kube,
        *,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.is_held = False
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        self._rng = rng
        self._lease: Object | None = None
        self._seen: tuple[object, float] = (None, clock())
        """Another's Lease as it was last seen to change, and when."""

    async def acquire(self) -> None:
        """Wait until the Lease is ours."""
        while not await self._try():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(RETRY_S * self._rng.uniform(0.8, 1.2))
        self.is_held = True
        logger.info("leading", extra={"identity": self._identity})

    async def keep(self) -> None:
        """Renew until cancelled. Raises LeadershipLostError."""
        renewed_s = self._clock()
        while True:
            await asyncio.sleep(RETRY_S)
            began_s = self._clock()
            try:
                async with asyncio.timeout(min(TRY_S, max(0.1, renewed_s + RENEW_DEADLINE_S - began_s))):
                    if await self._try():
                        renewed_s = began_s
            except TimeoutError:
                pass
            if self._clock() - renewed_s >= RENEW_DEADLINE_S or not self._is_ours():
                self.is_held = False
                raise LeadershipLostError("the Lease could not be renewed in time: another replica may lead now")

    async def release(self) -> None:
        """Give it back. Never raises."""
        if not self.is_held:
            return
        self.is_held = False
        try:
            # Read again: a renewal that was cut short may have come through.
            self._lease = await self._kube.get(LEASES, self._namespace, self._name)
            if self._lease is None or not self._is_ours():
                return
            spec = {**self._lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
            await self._kube.replace(LEASES, {**self._lease, "spec": spec})
        except KubeError as error:
            logger.warning("the Lease could not be given back: %s", error)

    def _is_ours(self) -> bool:
        return self._lease is not None and self._lease["spec"].get("holderIdentity") == self._identity

    async def _try(self) -> bool:
        """Take or renew it, if that may be done."""
        try:
            lease = await self._kube.get(LEASES, self._namespace, self._name)
            if lease is None:
                body = {
                    "apiVersion": LEASES.api_version,
                    "kind": LEASES.kind,
                    "metadata": {"namespace": self._namespace, "name": self._name},
                    "spec": self._spec({}),
                }
                self._lease = await self._kube.create(LEASES, body)
                return True
            self._lease = lease
            spec = lease.get("spec") or {}
            if not self._may_take(spec):
                return False
            self._lease = await self._kube.replace(LEASES, {**lease, "spec": self._spec(spec)})
            return True
        except KubeError as error:
            level = logging.DEBUG if error.status in REFUSED else logging.WARNING
            logger.log(level, "the Lease: %s", error)
            return False

    def _may_take(self, spec: Object) -> bool:
        holder = spec.get("holderIdentity")
        if not holder or holder == self._identity:
            return True
        mark = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        now_s = self._clock()
        if mark != self._seen[0]:
            self._seen = (mark, now_s)
        return now_s - self._seen[1] > float(spec.get("leaseDurationSeconds") or LEASE_S)

    def _spec(self, before: Object) -> Object:
        is_new = before.get("holderIdentity") != self._identity
        return {
            **before,
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_S,
            "renewTime": _now(),
            "acquireTime": _now() if is_new else before.get("acquireTime"),
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (1 if is_new and before else 0),
        }


def _now() -> str:
    """As Kubernetes writes it (MicroTime)."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
