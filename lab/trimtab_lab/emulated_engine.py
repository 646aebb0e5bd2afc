"""An emulated vLLM as one object: its ranks, models, tokenizer and state, without any HTTP.

The one rule: everything the HTTP pages need is asked of this; nothing here knows aiohttp.
"""

import asyncio
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq.asyncio

from trimtab_lab.answer import Speaker
from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_runner import EngineRunner
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.kv_publisher import KvPublisher
from trimtab_lab.kv_wire import Encoding, HashForm, KvBatchEncoder, KvEventLog
from trimtab_lab.metrics_page import RankMetrics, metrics_page
from trimtab_lab.request_body import BadRequestError
from trimtab_lab.step_time import StepTime
from trimtab_lab.token_chain import LoraAdapter
from trimtab_lab.vocabulary import TINY_MODEL_DIR, Vocabulary

RESPONSES_KEPT = 1000
"""Conversations of the Responses API remembered; older ones are forgotten and answer 404."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorSettings:
    model_name: str = "tiny"
    model_dir: Path = TINY_MODEL_DIR
    lora_names: tuple[str, ...] = ()
    ranks: int = 1
    """Data-parallel size: that many engines behind one HTTP port."""
    kv_events_endpoint: str | None = "tcp://*:5557"
    """None: no KV events. Rank r has the port plus r."""
    kv_replay_endpoint: str | None = None
    kv_topic: str = ""
    kv_encoding: Encoding = "map"
    kv_hash_form: HashForm = "int"
    kv_buffer_steps: int = 10_000
    bind_host: str = "127.0.0.1"
    """Where wildcard endpoints are bound."""
    answer_tokens_min: int = 64
    answer_tokens_max: int = 512
    tokenizer_as_filed: bool = False
    expert_costs: Mapping[int, float] = field(default_factory=dict)
    """What the metrics page says of each expert; those that it leaves out cost 1."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    step_time: StepTime = field(default_factory=StepTime)


class EmulatedEngine:
    """Open it inside a running event loop; close it there."""

    def __init__(self, settings: EmulatorSettings) -> None:
        if not 1 <= settings.ranks <= 256:
            raise ValueError(f"ranks must be 1 to 256, got {settings.ranks}")
        self.settings = settings
        self.vocabulary = Vocabulary(settings.model_dir, as_filed=settings.tokenizer_as_filed)
        self.speaker = Speaker(
            self.vocabulary, tokens_min=settings.answer_tokens_min, tokens_max=settings.answer_tokens_max
        )
        self.loras = {
            name: LoraAdapter(name=name, adapter_id=number, path=f"adapters/{name}")
            for number, name in enumerate(settings.lora_names, start=1)
        }
        self.process_start_s = time.time()
        self.rejected: Counter[str] = Counter()
        self.responses: OrderedDict[str, tuple[tuple[dict[str, Any], ...], dict[str, Any]]] = OrderedDict()
        self.is_draining = False
        self.inference_requests = 0
        self._context = zmq.asyncio.Context()
        self.runners = [self._runner(rank) for rank in range(settings.ranks)]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def context_tokens_max(self) -> int:
        return self.settings.engine.context_tokens_max

    @property
    def is_up(self) -> bool:
        return all(runner.is_up for runner in self.runners)

    @property
    def is_asleep(self) -> bool:
        return any(runner.is_asleep for runner in self.runners)

    async def open(self) -> None:
        for runner in self.runners:
            if runner.publisher is not None:
                runner.publisher.open()
            self._tasks.append(asyncio.create_task(runner.run(), name=f"engine-{runner.rank}"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for runner in self.runners:
            if runner.publisher is not None:
                await runner.publisher.close()
        self._context.destroy(linger=0)

    def adapter(self, model: str | None) -> LoraAdapter | None:
        """The adapter that a model name means; None for the base model. Raises BadRequestError for an unknown name."""
        if not model or model == self.settings.model_name:
            return None
        if model in self.loras:
            return self.loras[model]
        raise BadRequestError(
            f"The model `{model}` does not exist. Valid aliases: {self.settings.model_name}.",
            status=404,
            kind="NotFoundError",
            param="model",
        )

    def rank_for(self, header: str | None) -> EngineRunner:
        """The rank a request asks for, or the least loaded as vLLM's own balancer counts. Raises BadRequestError."""
        if header is not None and header.strip().lstrip("+-").isdigit():
            rank = int(header)
            if not 0 <= rank < len(self.runners):
                raise BadRequestError(f"data_parallel_rank {rank} is out of range [0, {len(self.runners)}).")
            return self.runners[rank]
        return min(self.runners, key=lambda runner: 4 * (load := runner.model.stats()).waiting + load.running)

    def remember_response(self, reply_id: str, messages: Sequence[dict[str, Any]], response: dict[str, Any]) -> None:
        self.responses[reply_id] = (tuple(messages), response)
        while len(self.responses) > RESPONSES_KEPT:
            self.responses.popitem(last=False)

    async def restart(self, *, down_s: float = 0.0) -> None:
        """All ranks die and come back empty after `down_s`."""
        self.process_start_s = time.time() + down_s
        self.rejected.clear()
        self.responses.clear()
        await asyncio.gather(*(runner.restart(down_s=down_s) for runner in self.runners))

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        return all([runner.model.reset_prefix_cache(preempt_running=preempt_running) for runner in self.runners])

    def sleep(self) -> None:
        for runner in self.runners:
            runner.sleep()

    def wake_up(self) -> None:
        for runner in self.runners:
            runner.wake_up()

    def abort_all(self) -> None:
        for runner in self.runners:
            runner.abort_all()

    async def drain(self, *, timeout_s: float) -> None:
        """Let what is in the engine finish, for at most `timeout_s`; new requests get an empty answer meanwhile."""
        self.is_draining = True
        idle = asyncio.gather(*(runner.idle() for runner in self.runners))
        try:
            await asyncio.wait_for(idle, timeout_s)
        except TimeoutError:
            return

    @property
    def has_work(self) -> bool:
        return any(runner.model.has_work for runner in self.runners)

    def models_page(self) -> dict[str, Any]:
        """`GET /v1/models`."""
        base = self._model_card(self.settings.model_name, str(self.settings.model_dir), None, self.context_tokens_max)
        adapters = [
            self._model_card(lora.name, lora.path, self.settings.model_name, None) for lora in self.loras.values()
        ]
        return {"object": "list", "data": [base, *adapters]}

    def kv_event_sources_page(self) -> dict[str, Any]:
        """`GET /kv_event_sources`."""
        return {
            str(runner.rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": runner.publisher.endpoint,
                "replay_endpoint": runner.publisher.replay_endpoint,
                "buffer_steps": self.settings.kv_buffer_steps,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": runner.publisher.topic,
            }
            for runner in self.runners
            if runner.publisher is not None
        }

    def metrics_text(self) -> str:
        """`GET /metrics`."""
        running: set[str] = set()
        waiting: set[str] = set()
        for runner in self.runners:
            for name, is_running in runner.model.lora_requests():
                (running if is_running else waiting).add(name)
        cpu = os.times()
        return metrics_page(
            [RankMetrics(rank=r.rank, stats=r.stats, counts=r.counts, is_asleep=r.is_asleep) for r in self.runners],
            model_name=self.settings.model_name,
            settings=self.settings.engine,
            process_start_s=self.process_start_s,
            cpu_s=cpu.user + cpu.system,
            rejected=self.rejected,
            lora_names=self.settings.lora_names,
            lora_running=sorted(running),
            lora_waiting=sorted(waiting),
            expert_costs=self.settings.expert_costs,
            now_s=time.time(),
        )

    def _model_card(self, name: str, root: str, parent: str | None, length: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": length,
            "permission": [],
        }

    def _runner(self, rank: int) -> EngineRunner:
        settings = self.settings
        publisher = None
        if settings.kv_events_endpoint is not None:
            publisher = KvPublisher(
                self._context,
                encoder=KvBatchEncoder(encoding=settings.kv_encoding, hash_form=settings.kv_hash_form, rank=rank),
                log=KvEventLog(buffer_steps=settings.kv_buffer_steps),
                endpoint=settings.kv_events_endpoint,
                replay_endpoint=settings.kv_replay_endpoint,
                topic=settings.kv_topic,
                bind_host=settings.bind_host,
            )
        return EngineRunner(EngineModel(settings.engine, settings.step_time), publisher, rank=rank)
