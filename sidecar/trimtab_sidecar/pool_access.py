"""The pool's way into the shared state: where its store is, and the seed of its chunk hashes.

The one rule: both come together, at the start, or from the pool's Secret as a folder that the kubelet keeps current.
That Secret may come later than the pod, and be another one some day. One that goes changes nothing: its pool may be
made again under the running engines.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

from trimtab_core.chunks import pool_seed
from trimtab_state.errors import ConfigError
from trimtab_state.store_url import parse_store_url

logger = logging.getLogger(__name__)

URL_FILE = "store-url"
SECRET_FILE = "secret"
LOOK_S = 1.0
"""How often the folder is looked at. The kubelet refreshes it once a minute or so."""
REMIND_S = 60.0
"""How often the log says that the Secret is still waited for."""
CURRENT = "..data"
"""What the kubelet's links lead through: it is replaced whole, so that files behind one of its targets agree."""


class AccessError(ValueError):
    """What is given makes no sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAccess:
    """Of one pool."""

    store_url: str = field(repr=False)
    seed: int = field(repr=False)
    """Of the pool's chunk hashes."""


def pool_access(store_url: str, secret: bytes, *, namespace: str, name: str) -> PoolAccess:
    """Of the pool `namespace/name`. Raises AccessError."""
    try:
        parse_store_url(store_url)
    except ConfigError as error:
        raise AccessError(str(error)) from error
    return PoolAccess(store_url=store_url, seed=pool_seed(secret, namespace, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessFolder:
    """The Secret of the pool `namespace/name`, mounted at `folder`."""

    folder: Path
    namespace: str
    name: str

    def read(self) -> PoolAccess | None:
        """None: the Secret is not there, or lacks a key. Raises AccessError."""
        current = self.folder / CURRENT
        try:
            place = current.resolve(strict=True) if current.is_symlink() else self.folder
            url, secret = ((place / file).read_bytes().strip() for file in (URL_FILE, SECRET_FILE))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise AccessError(f"{self.folder}: {error.strerror}") from error
        if not url or not secret:
            return None
        try:
            return pool_access(url.decode(), secret, namespace=self.namespace, name=self.name)
        except ValueError as error:
            raise AccessError(f"{self.folder / URL_FILE}: {error}") from error

    async def found(self) -> PoolAccess:
        """As soon as it is there and makes sense."""
        waited_s, problem = 0.0, ""
        while True:
            try:
                access, found = self.read(), ""
            except AccessError as error:
                access, found = None, str(error)
            if access is not None:
                break
            if waited_s % REMIND_S == 0 or found != problem:
                problem = found
                logger.warning(
                    "waiting for the pool's Secret: nothing is told of the engine, which serves all the same",
                    extra={
                        "pool": f"{self.namespace}/{self.name}",
                        "folder": str(self.folder),
                        **({"error": problem} if problem else {}),
                    },
                )
            await asyncio.sleep(LOOK_S)
            waited_s += LOOK_S
        if waited_s:
            logger.info("the pool's Secret is there", extra={"waited_s": waited_s})
        return access

    async def changed(self, before: PoolAccess) -> PoolAccess:
        """What the Secret says, once that is something else that makes sense."""
        while True:
            with contextlib.suppress(AccessError):
                access = self.read()
                if access is not None and access != before:
                    return access
            await asyncio.sleep(LOOK_S)
