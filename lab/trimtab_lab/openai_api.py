"""OpenAI's Chat Completions, Completions and Embeddings, as the emulated engine serves them.

The one rule: parse, generate, and frame the answer as vLLM does; what is common to all APIs is in `inference_http.py`.
"""

import asyncio
import base64
import time
import uuid
from array import array
from collections.abc import AsyncIterator
from hashlib import blake2b
from typing import Any

from aiohttp import web

from trimtab_lab.emulated_engine import EmulatedEngine
from trimtab_lab.engine_request import EngineRequest, FinishReason, Refusal
from trimtab_lab.generation import Delta, Generation, tokenise
from trimtab_lab.inference_http import InferenceHttp, json_response, reply_id
from trimtab_lab.reply import (
    DONE,
    ChatFrames,
    CompletionFrames,
    chat_object,
    completion_object,
    running_usage,
    usage_object,
)
from trimtab_lab.request_body import (
    BadRequestError,
    chat_request,
    completion_request,
    decode_body,
    embedding_request,
)

EMBEDDING_SIZE = 64


class OpenAiApi:
    def __init__(self, engine: EmulatedEngine) -> None:
        self._engine = engine
        self._http = InferenceHttp(engine)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._completion),
            web.post("/v1/embeddings", self._embedding),
        ]

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        request = chat_request(decode_body(await http.read()), self._engine.vocabulary)
        generation = await self._http.generation(http, request, "chatcmpl")
        return await self._http.answered(http, generation, self._chat_frames, self._chat_json)

    async def _completion(self, http: web.Request) -> web.StreamResponse:
        request = completion_request(decode_body(await http.read()))
        generation = await self._http.generation(http, request, "cmpl")
        return await self._http.answered(http, generation, self._completion_frames, self._completion_json)

    async def _embedding(self, http: web.Request) -> web.Response:
        engine, body = self._engine, decode_body(await http.read())
        request = embedding_request(body)
        lora = engine.adapter(request.model)
        runner = engine.rank_for(http.headers.get("X-data-parallel-rank"))
        prompts = await tokenise(request, engine.vocabulary, context_tokens_max=engine.context_tokens_max)
        answer_id, news = reply_id(http, "embd"), asyncio.Event()
        streams = []
        try:
            for index, prompt in enumerate(prompts):
                engine_request = EngineRequest(
                    request_id=f"{answer_id}-{index}-{uuid.uuid4().hex[:8]}",
                    prompt=prompt,
                    output=(),
                    prefill_only=True,
                    lora=lora,
                )
                stream = runner.submit(engine_request, news)
                if isinstance(stream, Refusal):
                    raise BadRequestError("The engine's queue is full.", status=503, kind="ServiceUnavailableError")
                streams.append(stream)
            while any(stream.finished is None for stream in streams):
                news.clear()
                await news.wait()
                for stream in streams:
                    stream.take()
        finally:
            for stream in streams:
                if stream.finished is None:
                    runner.abort(stream.request_id)
        as_text = body.get("encoding_format") == "base64"
        tokens = sum(map(len, prompts))
        return json_response(
            {
                "id": answer_id,
                "object": "list",
                "created": int(time.time()),
                "model": request.model or engine.settings.model_name,
                "data": [
                    {"index": index, "object": "embedding", "embedding": _embedding_of(prompt, as_text=as_text)}
                    for index, prompt in enumerate(prompts)
                ],
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
            }
        )

    async def _chat_frames(self, generation: Generation, model: str) -> AsyncIterator[bytes]:
        request, count = generation.request, generation.choice_count
        frames = ChatFrames(reply_id=generation.reply_id, created=int(time.time()), model=model)
        prompt_tokens = generation.prompt_tokens
        prompt_ids = generation.prompts[0].tolist() if request.token_ids_wanted and count else None
        produced, open_choices, is_first = [0] * count, count, True
        async for news in generation.deltas():
            out = []
            if is_first and any(delta.token_ids for delta in news):
                is_first = False
                usage = running_usage(prompt_tokens, 0) if request.usage_in_chunks else None
                out += [frames.first(index, usage, prompt_ids) for index in range(count)]
            for delta in news:
                produced[delta.index] += len(delta.token_ids)
                usage = running_usage(prompt_tokens, produced[delta.index]) if request.usage_in_chunks else None
                ids = delta.token_ids if request.token_ids_wanted else None
                if delta.finish_reason is None:
                    out.append(frames.delta(delta.index, delta.text, usage, ids))
                elif not is_first:  # aborted before its first token: no choice at all
                    open_choices -= 1
                    out.append(
                        frames.last(
                            delta.index,
                            delta.text,
                            finish_reason=delta.finish_reason.value,
                            stop_reason=delta.stop_reason,
                            usage=usage,
                            token_ids=ids,
                            is_end=open_choices == 0 and not request.usage_at_end,
                        )
                    )
            if out:
                yield b"".join(out)
        yield (frames.usage(_usage(generation)) if request.usage_at_end and count else b"") + DONE

    def _chat_json(self, generation: Generation, model: str, deltas: list[Delta]) -> dict[str, Any]:
        wanted = generation.request.token_ids_wanted
        return chat_object(
            reply_id=generation.reply_id,
            created=int(time.time()),
            model=model,
            choices=_choices(generation, deltas),
            usage=_usage(generation),
            prompt_ids=generation.prompts[0].tolist() if wanted and generation.prompts else None,
        )

    async def _completion_frames(self, generation: Generation, model: str) -> AsyncIterator[bytes]:
        request = generation.request
        frames = CompletionFrames(reply_id=generation.reply_id, created=int(time.time()), model=model)
        produced, open_choices = [0] * generation.choice_count, generation.choice_count
        async for news in generation.deltas():
            out = []
            for delta in news:
                is_first = produced[delta.index] == 0
                if is_first and not delta.token_ids:
                    continue  # aborted before its first token
                prompt = generation.prompts[delta.index // request.choices]
                produced[delta.index] += len(delta.token_ids)
                open_choices -= delta.finish_reason is not None
                out.append(
                    frames.delta(
                        delta.index,
                        delta.text,
                        finish_reason=None if delta.finish_reason is None else delta.finish_reason.value,
                        stop_reason=delta.stop_reason,
                        usage=running_usage(len(prompt), produced[delta.index]) if request.usage_in_chunks else None,
                        prompt_ids=prompt.tolist() if request.token_ids_wanted and is_first else None,
                        token_ids=delta.token_ids if request.token_ids_wanted else None,
                        is_end=open_choices == 0 and not request.usage_at_end,
                    )
                )
            if out:
                yield b"".join(out)
        yield (frames.usage(_usage(generation)) if request.usage_at_end and produced else b"") + DONE

    def _completion_json(self, generation: Generation, model: str, deltas: list[Delta]) -> dict[str, Any]:
        request = generation.request
        return completion_object(
            reply_id=generation.reply_id,
            created=int(time.time()),
            model=model,
            choices=_choices(generation, deltas),
            usage=_usage(generation),
            prompt_ids=[
                generation.prompts[index // request.choices].tolist() if request.token_ids_wanted else None
                for index in range(generation.choice_count)
            ],
        )


def _choices(generation: Generation, deltas: list[Delta]) -> list[tuple[str, str, str | None, list[int] | None]]:
    choices = []
    for index in range(generation.choice_count):
        own = [delta for delta in deltas if delta.index == index]
        reason = own[-1].finish_reason or FinishReason.ABORT
        ids = [token for delta in own for token in delta.token_ids] if generation.request.token_ids_wanted else None
        choices.append(("".join(delta.text for delta in own), reason.value, own[-1].stop_reason, ids))
    return choices


def _usage(generation: Generation) -> dict[str, Any]:
    return usage_object(
        prompt_tokens=generation.prompt_tokens,
        output_tokens=generation.output_tokens,
        cached_tokens=generation.cached_tokens,
        chat=generation.request.api == "chat",
    )


def _embedding_of(prompt: "array[int]", *, as_text: bool) -> list[float] | str:
    """A unit-range vector that is a function of the tokens."""
    digest = blake2b(prompt.tobytes(), digest_size=EMBEDDING_SIZE).digest()
    vector = array("f", ((byte - 127.5) / 1024 for byte in digest))
    return base64.b64encode(vector.tobytes()).decode() if as_text else vector.tolist()
