"""An engine model run in real time, with its KV events published and its tokens handed to whoever waits for them.

The one rule: the model decides what happens, the clock only when. A step's events go out when the step is over, just
before its tokens; a client that leaves is out of the engine at once. One runner is one data-parallel rank.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest, EngineStats, FinishedRequest, NewToken, Refusal
from trimtab_lab.kv_publisher import KvPublisher
from trimtab_lab.served_counts import ServedCounts

FINISHED_KEPT = 10_000
"""Finished requests remembered for the debug page; older ones are forgotten."""


LAG_MAX_S = 0.025
"""A timer that rings late by less is made up for by the next step, so that many short steps take their time in all."""


class EngineDiedError(Exception):
    """The engine was restarted under a request."""


@dataclass(slots=True, eq=False)
class TokenStream:
    """One request's tokens as they come. `news` is set whenever there is something; several streams may share one."""

    request_id: str
    news: asyncio.Event
    tokens: deque[NewToken] = field(default_factory=deque)
    finished: FinishedRequest | None = None
    """Set together with the last token."""
    has_died: bool = False

    def take(self) -> list[NewToken]:
        """The tokens since the last call. Raises EngineDiedError."""
        if self.has_died:
            raise EngineDiedError(self.request_id)
        tokens = list(self.tokens)
        self.tokens.clear()
        return tokens


class EngineRunner:
    def __init__(self, model: EngineModel, publisher: KvPublisher | None, *, rank: int = 0) -> None:
        self.model = model
        self.publisher = publisher
        self.rank = rank
        self.finished: deque[FinishedRequest] = deque(maxlen=FINISHED_KEPT)
        self.counts = ServedCounts(context_tokens_max=self.model.settings.context_tokens_max)
        self.is_asleep = False
        self.is_up = True
        self.batches_to_lose = 0
        self._must_forget = False
        self._streams: dict[str, TokenStream] = {}
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._shown = model.stats()

    @property
    def stats(self) -> EngineStats:
        """The model's counters as of its last finished step (or abort), which is when an engine reports them."""
        return self._shown

    def submit(self, request: EngineRequest, news: asyncio.Event) -> TokenStream | Refusal:
        refusal = self.model.add(request, time.monotonic())
        if refusal is not None:
            return refusal
        stream = TokenStream(request.request_id, news)
        self._streams[request.request_id] = stream
        self._work.set()
        self._idle.clear()
        return stream

    def abort(self, request_id: str) -> None:
        """The client left, or nobody wants the rest. Unknown ids do nothing."""
        finished = self.model.abort(request_id, time.monotonic())
        if finished is not None:
            self._end(finished)
            self._shown = self.model.stats()
            if not self.model.has_work:
                self._idle.set()

    async def idle(self) -> None:
        """Return once no request is left."""
        await self._idle.wait()

    def abort_all(self) -> None:
        for request_id in self.model.request_ids():
            self.abort(request_id)

    def sleep(self) -> None:
        """Stop computing, drop all requests and the cache. Its clearing is announced only by the first step after."""
        self.is_asleep = True
        self.abort_all()
        self._must_forget = True
        if not self.model.is_stepping:
            self._forget()

    def wake_up(self) -> None:
        self.is_asleep = False
        self._work.set()

    async def restart(self, *, down_s: float = 0.0) -> None:
        """A new engine process in place: requests die, the cache and the counters are new, sequence numbers from 0."""
        self.is_up = False
        for request_id in self.model.restart():
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                stream.has_died = True
                stream.news.set()
        self.counts = ServedCounts(context_tokens_max=self.model.settings.context_tokens_max)
        self.is_asleep = self._must_forget = False
        self._idle.set()
        if self.publisher is not None:
            self.publisher.log.restart()
        self._shown = self.model.stats()
        await asyncio.sleep(down_s)
        self.is_up = True
        self._work.set()

    async def run(self) -> None:
        """Step while there is work; never returns. Cancel it to stop."""
        model = self.model
        free_s = 0.0  # when the step before was over by its price; 0: there was none just before
        while True:
            if self.is_asleep or not self.is_up or not model.has_work:
                self._work.clear()
                await self._work.wait()
                free_s = 0.0
                continue
            epoch, now_s = model.epoch, time.monotonic()
            plan = model.schedule(free_s if now_s - free_s < LAG_MAX_S else now_s)
            if plan is None:
                continue
            free_s = plan.started_s + plan.duration_s
            await asyncio.sleep(max(free_s - time.monotonic(), 0.0))
            if model.epoch != epoch:
                continue  # restarted during the step, which therefore never ended
            outcome = model.complete(time.monotonic())
            if outcome.kv_events and self.publisher is not None:
                if self.batches_to_lose:
                    self.batches_to_lose -= 1
                    self.publisher.lose(outcome.kv_events)
                else:
                    self.publisher.publish(outcome.kv_events)
            self.counts.step(outcome)
            for token in outcome.new_tokens:
                stream = self._streams.get(token.request_id)
                if stream is not None:
                    stream.tokens.append(token)
                    stream.news.set()
            for finished in outcome.finished:
                self._end(finished)
            self._shown = model.stats()
            if self._must_forget:
                self._forget()
            if not model.has_work:
                self._idle.set()

    def _forget(self) -> None:
        """Drop the cache of an engine that has gone to sleep, between two steps so that nothing announces it."""
        self._must_forget = False
        self.model.reset_prefix_cache()
        self._shown = self.model.stats()

    def _end(self, finished: FinishedRequest) -> None:
        self.finished.append(finished)
        self.counts.request(finished)
        stream = self._streams.pop(finished.request_id, None)
        if stream is not None:
            stream.finished = finished
            stream.news.set()
