"""What all inference endpoints of the emulated engine have in common: into the engine, answer or stream, out again.

The one rule: a stream's headers go out as soon as the request is in the engine; the first `data:` follows with the
first token. A handler that is cancelled (the client left) takes its requests out of the engine before it ends.
"""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from trimtab_lab.emulated_engine import EmulatedEngine
from trimtab_lab.engine_runner import EngineDiedError
from trimtab_lab.generation import Delta, Generation, tokenise
from trimtab_lab.reply import DONE, JSON, died_object, error_object, sse
from trimtab_lab.request_body import BadRequestError, InferenceRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


def json_response(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=JSON.encode(value), status=status, headers=headers, content_type="application/json")


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequestError as error:
        return json_response(error_object(error), status=error.status)
    except EngineDiedError:
        return json_response(died_object(), status=500)
    except web.HTTPNotFound:
        return json_response({"detail": "Not Found"}, status=404)
    except web.HTTPMethodNotAllowed as error:
        headers = {"Allow": ",".join(sorted(error.allowed_methods))}
        return json_response({"detail": "Method Not Allowed"}, status=405, headers=headers)


def reply_id(http: web.Request, prefix: str) -> str:
    """The id of an answer: the client's own request id if it sent one."""
    return f"{prefix}-{http.headers.get('X-Request-Id') or uuid.uuid4().hex[:16]}".replace("resp-", "resp_")


class InferenceHttp:
    """Runs one request's generation for whatever API asked for it."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self.engine = engine

    async def generation(self, http: web.Request, request: InferenceRequest, prefix: str) -> Generation:
        """Into the engine with it. Raises BadRequestError before a byte of an answer is sent."""
        engine = self.engine
        if not engine.is_up:
            raise EngineDiedError(prefix)
        if engine.is_draining:
            return Generation(request, [], reply_id=reply_id(http, prefix))  # vLLM: 200, and an empty stream
        lora = engine.adapter(request.model)
        runner = engine.rank_for(http.headers.get("X-data-parallel-rank"))
        prompts = await tokenise(request, engine.vocabulary, context_tokens_max=engine.context_tokens_max)
        generation = Generation(request, prompts, reply_id=reply_id(http, prefix))
        engine.inference_requests += 1
        try:
            generation.open(runner, engine.speaker, lora)
        except BadRequestError as error:
            if error.status == 503:
                engine.rejected["max_num_queued_reqs"] += 1
            raise
        return generation

    async def answered(
        self,
        http: web.Request,
        generation: Generation,
        frames: Callable[[Generation, str], AsyncIterator[bytes]],
        whole: Callable[[Generation, str, list[Delta]], dict[str, Any]],
    ) -> web.StreamResponse:
        model = generation.request.model or self.engine.settings.model_name
        try:
            if not generation.request.stream:
                deltas = [delta async for news in generation.deltas() for delta in news]
                headers = self._load_header() if "endpoint-load-metrics-format" in http.headers else None
                return json_response(whole(generation, model, deltas), headers=headers)
            response = web.StreamResponse(headers=SSE_HEADERS)
            await response.prepare(http)
            try:
                async for frame in frames(generation, model):
                    await response.write(frame)
            except EngineDiedError:
                await response.write(sse(died_object()) + DONE)
            await response.write_eof()
            return response
        finally:
            generation.close()

    def _load_header(self) -> dict[str, str]:
        stats = [runner.stats for runner in self.engine.runners]
        waiting = float(sum(rank.waiting for rank in stats))
        usage = max(rank.kv_usage for rank in stats)
        text = f"TEXT named_metrics.num_requests_waiting={waiting}, named_metrics.kv_cache_usage_perc={usage}"
        return {"endpoint-load-metrics": text}
