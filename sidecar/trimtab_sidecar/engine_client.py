"""The engine's HTTP side, as far as a sidecar asks: metrics, models, event sources, sleep.

The one rule: an engine that does not answer is an `EngineUnreachable`, whatever the cause; an endpoint that it does not
have gives None. Answers are bounded; nothing is retried here.
"""

from dataclasses import dataclass

import aiohttp
import msgspec

from trimtab_sidecar.engine_metrics import METRICS_BYTES_MAX, EngineMetrics, parse_metrics
from trimtab_sidecar.probes import EngineUnreachable

TIMEOUT_S = 5.0
"""An answer that takes longer counts as none: an engine's metrics take some 4 ms, but its loop may be busy."""
JSON_BYTES_MAX = 4 * 1024 * 1024
MODELS_MAX = 4_096
"""Models and adapters of one engine; more are left out."""
MODEL_CHARS_MAX = 512
"""A model with a longer name is left out."""


class EngineRefused(EngineUnreachable):
    """Nobody listens at the engine's port: it is down, rather than slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """A name that the engine serves under."""

    name: str
    is_lora: bool
    root: str
    """What the engine says the name stands for: a path or a hub id."""


class EngineClient:
    """`url` is the engine's base URL; `session` carries the engine's API key, where it wants one."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url.rstrip("/")
        self.session = session

    async def metrics(self) -> EngineMetrics | None:
        """None: the engine serves no metrics."""
        body = await self._get("/metrics", METRICS_BYTES_MAX)
        return None if body is None else parse_metrics(body.decode("utf-8", "replace"))

    async def check_health(self) -> None:
        """Raises EngineUnreachable where /health does not say yes: an engine whose core died answers 503 there only."""
        await self._get("/health", JSON_BYTES_MAX)

    async def models(self) -> tuple[EngineModel, ...]:
        """The served names, base models before adapters. An adapter is one that names a parent."""
        answer = await self._json("/v1/models")
        entries = answer.get("data") if isinstance(answer, dict) else None
        models = []
        for entry in entries[:MODELS_MAX] if isinstance(entries, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("id"), str) and len(entry["id"]) <= MODEL_CHARS_MAX:
                root = entry.get("root")
                models.append(
                    EngineModel(
                        name=entry["id"],
                        is_lora=bool(entry.get("parent")),
                        root=root if isinstance(root, str) else entry["id"],
                    )
                )
        return tuple(sorted(models, key=lambda model: model.is_lora))

    async def kv_event_sources(self) -> object:
        """The answer of /kv_event_sources; None where the release has no such endpoint (before vLLM 0.27)."""
        return await self._json("/kv_event_sources")

    async def is_sleeping(self) -> bool | None:
        """The answer of /is_sleeping; None where the engine has it not (it is a development endpoint)."""
        answer = await self._json("/is_sleeping")
        value = answer.get("is_sleeping") if isinstance(answer, dict) else None
        return value if isinstance(value, bool) else None

    async def _json(self, path: str) -> object:
        body = await self._get(path, JSON_BYTES_MAX)
        if body is None:
            return None
        try:
            # Strict: text with half a UTF-16 pair in it could be passed on to nobody.
            return msgspec.json.decode(body)
        except (ValueError, RecursionError):
            return None

    async def _get(self, path: str, bytes_max: int) -> bytes | None:
        """The body; None for 404, 405 and 501. Raises `EngineUnreachable`."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self.session.get(self.url + path, timeout=timeout) as response:
                if response.status in (404, 405, 501):
                    return None
                if response.status >= 300:
                    raise EngineUnreachable(f"{path}: HTTP {response.status}")
                return await _read(response, bytes_max)
        except aiohttp.ClientConnectorError as error:
            raise EngineRefused(f"{path}: {type(error).__name__}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineUnreachable(f"{path}: {type(error).__name__}") from error


async def _read(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """At most `bytes_max` bytes of the body."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > bytes_max:
            break
    return b"".join(parts)[:bytes_max]
