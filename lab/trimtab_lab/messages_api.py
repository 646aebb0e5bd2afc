"""Anthropic's Messages API, as the emulated engine serves it.

The one rule: text in, text out; no tools, no thinking.
"""

from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from trimtab_lab.emulated_engine import EmulatedEngine
from trimtab_lab.engine_request import FinishReason
from trimtab_lab.generation import Delta, Generation
from trimtab_lab.inference_http import InferenceHttp
from trimtab_lab.reply import named_sse
from trimtab_lab.request_body import decode_body, message_request

_STOP_REASONS = {FinishReason.LENGTH: "max_tokens", FinishReason.STOP: "end_turn", FinishReason.ABORT: "end_turn"}


class MessagesApi:
    def __init__(self, engine: EmulatedEngine) -> None:
        self._engine = engine
        self._http = InferenceHttp(engine)

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/messages", self._message)]

    async def _message(self, http: web.Request) -> web.StreamResponse:
        request = message_request(decode_body(await http.read()), self._engine.vocabulary)
        generation = await self._http.generation(http, request, "chatcmpl")
        return await self._http.answered(http, generation, _message_frames, _message_json)


async def _message_frames(generation: Generation, model: str) -> AsyncIterator[bytes]:
    usage = {"input_tokens": generation.prompt_tokens, "output_tokens": 0}
    message = {
        "id": generation.reply_id,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": model,
        "usage": usage,
    }
    started, reason = False, FinishReason.ABORT
    async for news in generation.deltas():
        out = b""
        for delta in news:
            if not started:
                started = True
                out += named_sse({"type": "message_start", "message": message})
                block = {"type": "text", "text": ""}
                out += named_sse({"type": "content_block_start", "index": 0, "content_block": block})
            if delta.text:
                text = {"type": "text_delta", "text": delta.text}
                out += named_sse({"type": "content_block_delta", "index": 0, "delta": text})
            reason = delta.finish_reason or reason
        yield out
    usage = {"input_tokens": generation.prompt_tokens, "output_tokens": generation.output_tokens}
    usage["cache_read_input_tokens"] = generation.cached_tokens
    yield (
        named_sse({"type": "content_block_stop", "index": 0})
        + named_sse({"type": "message_delta", "delta": {"stop_reason": _STOP_REASONS[reason]}, "usage": usage})
        + named_sse({"type": "message_stop"})
    )


def _message_json(generation: Generation, model: str, deltas: list[Delta]) -> dict[str, Any]:
    reason = next((delta.finish_reason for delta in deltas if delta.finish_reason), FinishReason.ABORT)
    return {
        "id": generation.reply_id,
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "".join(delta.text for delta in deltas)}],
        "model": model,
        "stop_reason": _STOP_REASONS[reason],
        "usage": {
            "input_tokens": generation.prompt_tokens,
            "output_tokens": generation.output_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": generation.cached_tokens,
        },
    }
