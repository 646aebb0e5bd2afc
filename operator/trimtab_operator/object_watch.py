"""One kind of object, listed and then watched for ever, told to a sink.

The one rule: what the sink was told last stays until something newer is known: a watch that breaks, or an API server
that is away, takes nothing back. Each start over tells what went meanwhile. Of a kind that a cluster need not have
(`is_optional`) there is nothing while it does not, and that is no fault.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trimtab_operator.kube import Kube, KubeError, Object, Resource

logger = logging.getLogger(__name__)

RETRY_MIN_S: Final = 0.5
RETRY_MAX_S: Final = 30.0
"""Of a server that refuses, or is not reached."""
CUT_RETRY_MAX_S: Final = 2.0
"""Of a watch that was begun and then broke off, or was ended: some proxies end every one after a while, and until it is
begun anew nothing is heard."""
BROKEN: Final = "WatchBroken"
"""`KubeError.reason` of such a watch."""
ABSENT_S: Final = 10.0
"""How often a kind that the cluster did not have is looked for."""
GONE: Final = 410
NOT_FOUND: Final = 404
FORBIDDEN: Final = 403


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """Called synchronously; an object is put again whenever it may have changed."""

    put: Callable[[Object], None]
    drop: Callable[[str, str], None]
    """(namespace, name)"""


class ObjectWatch:
    """`namespace` None: of all namespaces. `synced` is set once the first list has been told."""

    def __init__(
        self,
        kube: Kube,
        resource: Resource,
        namespace: str | None,
        sink: Sink,
        *,
        rng: random.Random,
        field_selector: str = "",
        label_selector: str = "",
        is_optional: bool = False,
    ) -> None:
        self.synced = asyncio.Event()
        self.refusal = ""
        """Why we may not read it; empty: we may, or nobody has said otherwise."""
        self._kube = kube
        self._resource = resource
        self._namespace = namespace
        self._sink = sink
        self._rng = rng
        self._selectors = {"field_selector": field_selector, "label_selector": label_selector}
        self._is_optional = is_optional
        self._told: set[tuple[str, str]] = set()
        self._version = ""
        """What was told last; empty: nothing yet, or no more to be gone on from."""
        self._has_heard = False
        """The watch has told anything, be it a bookmark."""

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = RETRY_MIN_S
        clock = asyncio.get_running_loop().time
        while True:
            began_s, asked_s, is_cut = math.inf, 0.0, True
            try:
                if not self._version:
                    self._version = await self._list()
                # A list may take its time; only a watch that has held shows that all is well again.
                began_s = clock()
                await self._follow()
            except KubeError as error:
                asked_s, is_cut = error.retry_after_s, error.reason == BROKEN
                if self._is_optional and await self._is_absent(error):
                    self._lose_all()
                    pause_s = RETRY_MIN_S
                    await asyncio.sleep(ABSENT_S * self._rng.uniform(0.5, 1.0))
                    continue
                if error.status:
                    # Refused (410: too old), so it has to be listed anew. A broken watch goes on where it was.
                    self._version = ""
                is_known = self._is_optional and str(error) == self.refusal
                self.refusal = str(error) if error.status == FORBIDDEN else self.refusal
                if error.status != GONE and not is_known:
                    level = logging.INFO if self.synced.is_set() else logging.WARNING
                    about = {"kind": self._resource.kind, "namespace": self._namespace, "error": str(error)}
                    logger.log(level, "not watched for a moment", extra=about)
            if clock() - began_s > pause_s or (is_cut and self._has_heard):
                pause_s = RETRY_MIN_S
            longest_s = CUT_RETRY_MAX_S if is_cut else RETRY_MAX_S
            pause_s = min(pause_s, longest_s)
            await asyncio.sleep(max(asked_s, pause_s * self._rng.uniform(0.5, 1.0)))
            pause_s = min(pause_s * 2, longest_s)

    async def _list(self) -> str:
        version = ""
        present = set()
        # By page, so that what the sink does not keep of a large list is gone before the next page comes.
        async for found, listed_at in self._kube.pages(self._resource, self._namespace, **self._selectors):
            version = listed_at
            for body in found:
                present.add(_key(body))
                self._put(body)
        for key in self._told - present:
            self._drop(key)
        self.refusal = ""
        self.synced.set()
        return version

    async def _is_absent(self, error: KubeError) -> bool:
        """Whether it was refused because the cluster has no such kind. Who may not read it is not told, so its list of
        kinds is asked, which everybody may."""
        if error.status not in (NOT_FOUND, FORBIDDEN):
            return False
        try:
            return self._resource.kind not in await self._kube.kinds(self._resource.api_version)
        except KubeError:
            return False

    def _lose_all(self) -> None:
        self._version, self.refusal = "", ""
        for key in tuple(self._told):
            self._drop(key)
        self.synced.set()

    async def _follow(self) -> None:
        """One watch, from where the last has ended, until the server ends it."""
        self._has_heard = False
        async for event in self._kube.watch(self._resource, self._namespace, self._version, **self._selectors):
            self._has_heard = True
            self._version = event.object["metadata"]["resourceVersion"]
            if event.type == "DELETED":
                self._drop(_key(event.object))
            elif event.type in ("ADDED", "MODIFIED"):
                self._put(event.object)

    def _put(self, body: Object) -> None:
        key = _key(body)
        self._told.add(key)
        try:
            self._sink.put(body)
        except Exception:
            # One odd object must not end the knowledge of all others.
            logger.exception("object not understood", extra={"kind": self._resource.kind, "object": "/".join(key)})

    def _drop(self, key: tuple[str, str]) -> None:
        self._told.discard(key)
        self._sink.drop(*key)


def _key(body: Object) -> tuple[str, str]:
    return body["metadata"].get("namespace", ""), body["metadata"]["name"]
