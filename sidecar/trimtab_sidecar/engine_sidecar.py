"""The sidecar of one engine process: finds its ranks, watches it, and speaks for each of them.

The one rule: what is said of the engine was seen, and recently. An engine that does not answer is `unreachable`, one
that sleeps `asleep`, one that is to go `draining`, whatever it still answers. This module polls and decides; events are
`EndpointSidecar`'s.
"""

import asyncio
import logging
import time

import aiohttp
import zmq.asyncio

from trimtab_core.chunks import seed_digest
from trimtab_core.model_card import ModelCard
from trimtab_core.token_table import TokenTable
from trimtab_sidecar import sglang_events, vllm_events
from trimtab_sidecar.card_process import CardRequest
from trimtab_sidecar.checkpoint import CheckpointFile
from trimtab_sidecar.endpoint_sidecar import EndpointSidecar, MakePublisher
from trimtab_sidecar.engine_card import EngineCard
from trimtab_sidecar.engine_client import EngineClient, EngineModel, EngineRefused
from trimtab_sidecar.engine_metrics import EngineMetrics, RankMetrics
from trimtab_sidecar.kv_sources import (
    KvSource,
    SourceError,
    configured_sources,
    discovered_sources,
    of_ranks,
    reachable,
)
from trimtab_sidecar.probes import EngineUnreachable
from trimtab_sidecar.scrape_pace import ScrapePace
from trimtab_sidecar.settings import SidecarSettings, endpoint_address, engine_host, script_words
from trimtab_sidecar.tail_watch import TailWatch
from trimtab_state.documents import EndpointState, Heartbeat, ServedModel

logger = logging.getLogger(__name__)

FAILURES_UNTIL_UNREACHABLE = 2
"""Answers missed in a row until a silent engine counts as unreachable; one that refuses connections does at once."""
BLOCK_TOKENS_DEFAULT = 16
CHECKPOINT_SHARE = 50
"""Checkpoints take at most 1 / this of the time."""
DECODERS = {"vllm": vllm_events.decode, "sglang": sglang_events.decode}


class EngineSidecar:
    """One engine process. `endpoints` is empty until the engine has been reached once."""

    def __init__(
        self,
        settings: SidecarSettings,
        engine_url: str,
        *,
        seed: int,
        session: aiohttp.ClientSession,
        context: zmq.asyncio.Context,
        make_publisher: MakePublisher,
    ) -> None:
        self.url = engine_url
        self.address = endpoint_address(settings.endpoint_host, engine_url)
        self.endpoints: tuple[EndpointSidecar, ...] = ()
        self.is_draining = False
        self.is_reachable = False
        self.scrapes = 0
        self.scrape_errors = 0
        self.card = EngineCard(self._use_card)
        self._settings = settings
        self._seed, self._seed_digest = seed, seed_digest(seed)
        self._client = EngineClient(session, engine_url)
        self._context = context
        self._make_publisher = make_publisher
        self.metrics = EngineMetrics()
        self._models: tuple[EngineModel, ...] = ()
        self._models_at_s = 0.0
        self._is_asleep = False
        self._asks_sleep = settings.engine == "vllm"
        self._failures = 0
        self._pace = ScrapePace(busy_s=settings.scrape_s, idle_s=settings.scrape_idle_s)
        self._tails: dict[int, TailWatch] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(tasks))
            tasks.create_task(self._beat_regularly())
            tasks.create_task(self._checkpoint_regularly())

    def drain(self) -> None:
        """The pod is going: say so, now and from now on."""
        self.is_draining = True
        self._beat()

    def write_checkpoints(self) -> float:
        """Write what changed; returns the seconds it took."""
        return sum(endpoint.write_checkpoint() for endpoint in self.endpoints)

    def state(self, rank: RankMetrics) -> EndpointState:
        if self.is_draining:
            return "draining"
        if not self.is_reachable:
            return "unreachable"
        return "asleep" if self._is_asleep or rank.is_asleep else "serving"

    def approximate(self, endpoint: EndpointSidecar) -> str | None:
        """Why the endpoint's hits cannot be told exactly, None if they can."""
        card = self.card.card
        if card is None or not card.exact:
            return "no model card" if card is None else card.reason
        if endpoint.source is None:
            return "the engine publishes no KV events"
        if endpoint.prefixes is None:
            return endpoint.feed_error or "the text of tokens is not known"
        if self._settings.engine == "sglang" and any(model.is_lora for model in self._models):
            return "SGLang's KV events do not tell adapters apart"
        return endpoint.prefixes.approximate

    # The engine, as it is seen.

    async def _watch(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            before = (self.metrics, self._models)
            try:
                await self._look(tasks)
                self._failures = 0
                if not self.is_reachable:
                    self.is_reachable = True
                    logger.info("engine reached", extra={"engine": self.url})
            except EngineUnreachable as error:
                self._missed(error)
            self._beat()
            is_busy = any(rank.running or rank.waiting for rank in self.metrics.ranks.values())
            pause_s = self._pace.next(changed=before != (self.metrics, self._models), busy=is_busy)
            # Events mean that the engine works, even while its counts look the same between two looks.
            frames = self._frames()
            deadline_s = time.monotonic() + pause_s
            while time.monotonic() < deadline_s:
                await asyncio.sleep(min(self._settings.scrape_s, max(deadline_s - time.monotonic(), 0.0)))
                if self._frames() != frames:
                    break

    def _missed(self, error: EngineUnreachable) -> None:
        self.scrape_errors += 1
        self._failures += 1
        if self.is_reachable and (isinstance(error, EngineRefused) or self._failures >= FAILURES_UNTIL_UNREACHABLE):
            self.is_reachable = False
            logger.warning("engine unreachable", extra={"engine": self.url, "error": str(error)})
            for endpoint in self.endpoints:
                if endpoint.feed is not None:
                    endpoint.feed.suspect()

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        """One look at the engine. Raises EngineUnreachable."""
        self.scrapes += 1
        found = await self._client.metrics()
        if self._settings.engine == "vllm":
            # Not for SGLang, some releases of which generate a token for each such question.
            await self._client.check_health()
        metrics = EngineMetrics() if found is None else found
        self.metrics = metrics
        now_s = time.monotonic()
        if not self._models or found is None or now_s - self._models_at_s >= self._settings.models_s:
            self._models = await self._client.models()
            self._models_at_s = now_s
        await self._follow_process(tasks, metrics)
        if not self.endpoints:
            self._start(tasks, await self._find_sources(metrics))
        await self._follow_sleep(metrics)
        for endpoint in self.endpoints:
            if endpoint.feed is not None:
                rank = metrics.rank(endpoint.rank)
                work = (rank.prompt_tokens_total, rank.generation_tokens_total)
                tail = self._tails.setdefault(endpoint.rank, TailWatch(check_s=self._settings.tail_check_s))
                if tail.look(work=work, frames=endpoint.feed.frames, now_s=now_s):
                    endpoint.feed.check_tail()

    async def _follow_process(self, tasks: asyncio.TaskGroup, metrics: EngineMetrics) -> None:
        """Notice another process, and have the card made anew whenever there is one."""
        if metrics.process_start_s is not None:
            for endpoint in self.endpoints:
                endpoint.engine_is(f"{metrics.process_start_s:.2f}")
        names = tuple(model.name for model in self._models if not model.is_lora)
        request = CardRequest(
            base_url=self.url,
            engine_args=self._settings.engine_args,
            model_dir=None if self._settings.model_dir is None else str(self._settings.model_dir),
            served_model=names[0] if names else None,
            block_tokens=metrics.rank(0).block_tokens or BLOCK_TOKENS_DEFAULT,
            api_key=self._settings.api_key,
        )
        epochs = sum(endpoint.counts.epochs for endpoint in self.endpoints)
        await self.card.follow(tasks, request, metrics.process_start_s, epochs)

    def _use_card(self, before: ModelCard | None, card: ModelCard) -> None:
        for endpoint in self.endpoints:
            endpoint.publisher.card(self.card.digest, self.card.packed)
            if card.table is not None and (before is None or not _same_table(before.table, card.table)):
                endpoint.use_table(card.table)

    async def _find_sources(self, metrics: EngineMetrics) -> dict[int, KvSource | None]:
        """The ranks behind the engine's port, with their event sources. Raises EngineUnreachable."""
        settings, host = self._settings, engine_host(self.url)
        try:
            if settings.kv_events is not None:
                first = KvSource(
                    rank=0,
                    events=reachable(settings.kv_events, host),
                    replay=None if settings.kv_replay is None else reachable(settings.kv_replay, host),
                    topic=settings.kv_topic,
                    binds_here=settings.kv_bind,
                )
                sources = of_ranks(first, settings.ranks)
            else:
                answer = await self._client.kv_event_sources()
                if answer is None:
                    sources = configured_sources(script_words(settings.engine_args), host)
                else:
                    sources = discovered_sources(answer, host)
        except SourceError as error:
            logger.error("KV event sources not understood", extra={"engine": self.url, "error": str(error)})
            sources = ()
        if sources:
            return {source.rank: source for source in sources}
        logger.warning("the engine publishes no KV events", extra={"engine": self.url})
        return dict.fromkeys(metrics.ranks or (0,))

    def _start(self, tasks: asyncio.TaskGroup, sources: dict[int, KvSource | None]) -> None:
        settings = self._settings
        table = None if self.card.card is None else self.card.card.table
        endpoints = []
        for rank, source in sources.items():
            name = self.address if len(sources) == 1 else f"{self.address}/{rank}"
            file = None if settings.checkpoint_dir is None else CheckpointFile(settings.checkpoint_dir, name)
            endpoints.append(
                EndpointSidecar(
                    endpoint=name,
                    rank=rank,
                    source=source,
                    decode=DECODERS[settings.engine],
                    table=table,
                    seed=self._seed,
                    make_publisher=self._make_publisher,
                    checkpoint_file=file,
                    context=self._context,
                )
            )
        self.endpoints = tuple(endpoints)
        for endpoint in self.endpoints:
            endpoint.publisher.card(self.card.digest, self.card.packed)
            if self.metrics.process_start_s is not None:
                endpoint.engine_is(f"{self.metrics.process_start_s:.2f}")
            tasks.create_task(endpoint.run())
        logger.info("endpoints", extra={"engine": self.url, "endpoints": [endpoint.endpoint for endpoint in endpoints]})

    async def _follow_sleep(self, metrics: EngineMetrics) -> None:
        says = [rank.is_asleep for rank in metrics.ranks.values()]
        discarded = [endpoint for endpoint in self.endpoints if metrics.rank(endpoint.rank).is_cache_discarded]
        if self._asks_sleep and all(value is None for value in says):
            answer = await self._client.is_sleeping()
            self._asks_sleep = answer is not None
            self._is_asleep = bool(answer)
            discarded = list(self.endpoints) if answer else []
        for endpoint in discarded:
            endpoint.cache_discarded()

    # What is said of it.

    def _beat(self) -> None:
        models = {model.name: ServedModel(card=self.card.digest or None, lora=model.is_lora) for model in self._models}
        for endpoint in self.endpoints:
            rank = self.metrics.rank(endpoint.rank)
            is_up = self.is_reachable
            endpoint.heartbeat(
                Heartbeat(
                    endpoint=endpoint.endpoint,
                    epoch=endpoint.epoch,
                    state=self.state(rank),
                    running=rank.running if is_up else 0,
                    waiting=rank.waiting if is_up else 0,
                    kv_usage=rank.kv_usage if is_up else 0.0,
                    kv_capacity_tokens=rank.kv_capacity_tokens or 0,
                    block_tokens=self._block_tokens(endpoint, rank),
                    models=models,
                    approximate=self.approximate(endpoint),
                    prompt_tokens_total=rank.prompt_tokens_total,
                    generation_tokens_total=rank.generation_tokens_total,
                    tokens_per_byte=0.0 if endpoint.prefixes is None else endpoint.prefixes.tokens_per_byte,
                    expert_costs=dict(rank.expert_costs),
                    seed_digest=self._seed_digest,
                )
            )

    def _block_tokens(self, endpoint: EndpointSidecar, rank: RankMetrics) -> int:
        seen = 0 if endpoint.prefixes is None else endpoint.prefixes.block_tokens
        return rank.block_tokens or seen or BLOCK_TOKENS_DEFAULT

    def _frames(self) -> int:
        return sum(endpoint.feed.frames for endpoint in self.endpoints if endpoint.feed is not None)

    async def _beat_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            self._beat()

    async def _checkpoint_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._settings.checkpoint_s)
            took_s = self.write_checkpoints()
            await asyncio.sleep(max(took_s * CHECKPOINT_SHARE - self._settings.checkpoint_s, 0.0))


def _same_table(one: TokenTable | None, other: TokenTable) -> bool:
    return one is not None and one.data == other.data and one.encode() == other.encode()
