"""`python -m trimtab_lab.emulator`: an emulated vLLM as a process, HTTP and KV events and all.

The one rule: this is where everything is put together, and nowhere else. It needs no GPU and no weights; requests take
the time that `--step-*` prices say.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from trimtab_lab.emulated_engine import EmulatedEngine, EmulatorSettings
from trimtab_lab.engine_pages import EnginePages
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.inference_http import errors_as_json
from trimtab_lab.messages_api import MessagesApi
from trimtab_lab.openai_api import OpenAiApi
from trimtab_lab.responses_api import ResponsesApi
from trimtab_lab.step_time import StepTime
from trimtab_lab.vocabulary import TINY_MODEL_DIR

BODY_BYTES_MAX = 256 << 20
ABORT_GRACE_S = 0.15
"""How long streams get to send their last frame after SIGTERM."""


@asynccontextmanager
async def serving(settings: EmulatorSettings, *, host: str, port: int) -> AsyncIterator[tuple[EmulatedEngine, int]]:
    """An emulated engine that serves HTTP while the context is open: the engine, and the port (if 0 was asked for)."""
    engine = EmulatedEngine(settings)
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[errors_as_json])
    for api in (OpenAiApi(engine), ResponsesApi(engine), MessagesApi(engine), EnginePages(engine)):
        app.add_routes(api.routes())
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await engine.open()
    try:
        await runner.setup()
        site = web.TCPSite(runner, host, port, reuse_address=True)
        await site.start()
        bound = runner.addresses[0][1]
        yield engine, bound
    finally:
        await runner.cleanup()
        await engine.close()


async def serve(settings: EmulatorSettings, *, host: str, port: int, shutdown_timeout_s: float) -> None:
    """Serve until SIGTERM or SIGINT; then abort everything, or let it finish for up to `shutdown_timeout_s`."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(settings, host=host, port=port) as (engine, bound):
        ready = {"port": bound, "kv_event_sources": engine.kv_event_sources_page(), "pid": os.getpid()}
        print(json.dumps(ready), flush=True)
        await stop.wait()
        if shutdown_timeout_s > 0:
            await engine.drain(timeout_s=shutdown_timeout_s)
        if engine.has_work:
            engine.abort_all()
            await asyncio.sleep(ABORT_GRACE_S)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trimtab_lab.emulator",
        description="An emulated vLLM: OpenAI API, metrics and KV events, no model.",
    )
    engine, step = EngineSettings(), StepTime()
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="HTTP port; 0: any free one, printed at the start")
    add("--model-name", default="tiny", help="name of the base model")
    add("--model-dir", "--model", type=Path, default=TINY_MODEL_DIR, help="with tokenizer.json, chat_template.jinja")
    add("--lora", nargs="*", default=[], metavar="NAME", help="LoRA adapters served beside the base model")
    add("--data-parallel-size", type=int, default=1)
    add("--kv-events-port", type=int, default=5557, help="PUB port of rank 0; rank r has it plus r; -1: no events")
    add("--kv-replay-port", type=int, default=None, help="ROUTER port of rank 0; none: no replay")
    add("--kv-events-endpoint", default=None, help="whole endpoint instead; without * or :: the PUB socket connects")
    add("--kv-topic", default="")
    add("--kv-encoding", choices=("map", "array"), default="map", help="map: vLLM since 0.24; array: 0.22 and 0.23")
    add("--kv-hash", choices=("int", "bytes"), default="int")
    add("--kv-buffer-steps", type=int, default=10_000)
    add("--num-gpu-blocks", type=int, default=engine.block_count, help="KV blocks (one of them never serves)")
    add("--block-size", type=int, default=engine.block_tokens)
    add("--max-num-batched-tokens", type=int, default=None, help=f"{engine.batched_tokens_max} / the prompt divisor")
    add("--max-num-seqs", type=int, default=engine.requests_max)
    add("--max-model-len", type=int, default=engine.context_tokens_max)
    add("--max-num-queued-reqs", type=int, default=None)
    add("--no-prefix-caching", action="store_true")
    add("--hash-seed", default=engine.hash_seed, help="engines with one seed hash equal blocks equally")
    add("--answer-tokens", default="64:512", metavar="MIN:MAX", help="length of answers nobody cuts short")
    add("--tokenizer-as-filed", action="store_true", help="not with Qwen2's pre-tokeniser and NFC, as vLLM loads it")
    add("--expert-costs", default="", metavar="N=COST,...", help="what the metrics say of experts, 1: as the others")
    add("--step-base-ms", type=float, default=step.base_s * 1e3, help="time of any step")
    add("--step-prefill-token-us", type=float, default=step.prefill_token_s * 1e6)
    add("--step-decode-request-us", type=float, default=step.decode_request_s * 1e6)
    add("--step-prefill-attention-ns", type=float, default=step.prefill_attention_s * 1e9, help="per token pair")
    add("--step-decode-attention-ns", type=float, default=step.decode_attention_s * 1e9, help="per context token")
    add("--prompt-divisor", type=float, default=1.0, help="prices for prompts scaled down by this much")
    add("--speed", type=float, default=1.0, help="how many times as fast")
    add("--shutdown-timeout", type=float, default=0.0, help="seconds that requests may finish after SIGTERM")
    return parser.parse_args(arguments)


def settings_from(options: argparse.Namespace) -> EmulatorSettings:
    events = options.kv_events_endpoint
    if events is None and options.kv_events_port >= 0:
        events = f"tcp://*:{options.kv_events_port}"
    answer_min, _, answer_max = options.answer_tokens.partition(":")
    step_time = StepTime(
        base_s=options.step_base_ms / 1e3,
        prefill_token_s=options.step_prefill_token_us / 1e6,
        decode_request_s=options.step_decode_request_us / 1e6,
        prefill_attention_s=options.step_prefill_attention_ns / 1e9,
        decode_attention_s=options.step_decode_attention_ns / 1e9,
    )
    return EmulatorSettings(
        model_name=options.model_name,
        model_dir=options.model_dir,
        lora_names=tuple(options.lora),
        ranks=options.data_parallel_size,
        kv_events_endpoint=events,
        kv_replay_endpoint=None if options.kv_replay_port is None else f"tcp://*:{options.kv_replay_port}",
        kv_topic=options.kv_topic,
        kv_encoding=options.kv_encoding,
        kv_hash_form=options.kv_hash,
        kv_buffer_steps=options.kv_buffer_steps,
        bind_host=options.host,
        answer_tokens_min=int(answer_min),
        answer_tokens_max=int(answer_max or answer_min),
        tokenizer_as_filed=options.tokenizer_as_filed,
        expert_costs={
            int(expert): float(cost)
            for expert, _, cost in (entry.partition("=") for entry in options.expert_costs.split(",") if entry)
        },
        engine=EngineSettings(
            block_count=options.num_gpu_blocks,
            block_tokens=options.block_size,
            batched_tokens_max=options.max_num_batched_tokens
            or max(1, round(EngineSettings().batched_tokens_max / options.prompt_divisor)),
            requests_max=options.max_num_seqs,
            context_tokens_max=options.max_model_len,
            queued_requests_max=options.max_num_queued_reqs,
            prefix_caching=not options.no_prefix_caching,
            hash_seed=options.hash_seed,
        ),
        step_time=step_time.for_shorter_prompts(options.prompt_divisor).faster(options.speed),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    import uvloop

    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    # The tokenizer's own thread pool would take the cores that the engines under test share.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    uvloop.run(
        serve(settings_from(options), host=options.host, port=options.port, shutdown_timeout_s=options.shutdown_timeout)
    )


if __name__ == "__main__":
    main()
