"""The emulated engine's other pages: health, models, metrics, tokenizer, KV event sources, controls.

The one rule: what vLLM has is here under vLLM's path; what only a test wants is under `/lab/` and vLLM has none of it.
"""

from typing import Any

from aiohttp import web

from trimtab_lab.emulated_engine import EmulatedEngine
from trimtab_lab.engine_request import FinishedRequest
from trimtab_lab.generation import tokenise_text
from trimtab_lab.inference_http import json_response
from trimtab_lab.metrics_page import CONTENT_TYPE
from trimtab_lab.request_body import BadRequestError, decode_body, normalise_messages, render


class EnginePages:
    def __init__(self, engine: EmulatedEngine) -> None:
        self._engine = engine

    def routes(self) -> list[web.RouteDef]:
        routes = [
            web.get("/health", self._health),
            web.get("/ping", self._health),
            web.get("/version", self._version),
            web.get("/load", self._load),
            web.get("/metrics", self._metrics),
            web.get("/v1/models", self._models),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
            web.get("/is_sleeping", self._is_sleeping),
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake_up),
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
            web.get("/lab/cache", self._lab_cache),
            web.get("/lab/requests", self._lab_requests),
            web.post("/lab/restart", self._lab_restart),
            web.post("/lab/reset_prefix_cache", self._reset_prefix_cache),
            web.post("/lab/sleep", self._sleep),
            web.post("/lab/wake_up", self._wake_up),
            web.post("/lab/lose_events", self._lab_lose_events),
        ]
        if self._engine.settings.kv_encoding == "map":  # releases that send arrays have no such page yet
            routes.append(web.get("/kv_event_sources", self._kv_event_sources))
        return routes

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.is_up else 503)

    async def _version(self, http: web.Request) -> web.Response:
        return json_response({"version": "0.32.0" if self._engine.settings.kv_encoding == "map" else "0.23.0"})

    async def _load(self, http: web.Request) -> web.Response:
        return json_response({"server_load": 0})  # as long as load tracking is off

    async def _metrics(self, http: web.Request) -> web.Response:
        return web.Response(body=self._engine.metrics_text().encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _models(self, http: web.Request) -> web.Response:
        return json_response(self._engine.models_page())

    async def _kv_event_sources(self, http: web.Request) -> web.Response:
        return json_response(self._engine.kv_event_sources_page())

    async def _tokenize(self, http: web.Request) -> web.Response:
        engine, body = self._engine, decode_body(await http.read())
        engine.adapter(body.get("model"))
        if isinstance(body.get("messages"), list):
            text = render(body, normalise_messages(body["messages"]), engine.vocabulary)
        elif isinstance(body.get("prompt"), str):
            text = body["prompt"]
        else:
            raise BadRequestError("1 validation error: prompt or messages required", kind="Bad Request", param="body")
        tokens = (await tokenise_text(text, engine.vocabulary)).tolist()
        names = [engine.vocabulary.token_name(token) for token in tokens] if body.get("return_token_strs") else None
        return json_response(
            {"count": len(tokens), "max_model_len": engine.context_tokens_max, "tokens": tokens, "token_strs": names}
        )

    async def _detokenize(self, http: web.Request) -> web.Response:
        engine, body = self._engine, decode_body(await http.read())
        engine.adapter(body.get("model"))
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise BadRequestError("1 validation error: tokens required", kind="Bad Request", param="body.tokens")
        try:
            return json_response({"prompt": engine.vocabulary.decode(tokens)})
        except KeyError as error:
            raise BadRequestError(f"Token id {error} is out of vocabulary") from error

    async def _is_sleeping(self, http: web.Request) -> web.Response:
        return json_response({"is_sleeping": self._engine.is_asleep})

    async def _sleep(self, http: web.Request) -> web.Response:
        self._engine.sleep()
        return json_response({"status": "sleeping", "level": int(http.query.get("level", "1"))})

    async def _wake_up(self, http: web.Request) -> web.Response:
        self._engine.wake_up()
        return json_response({"status": "awake", "tags": None})

    async def _reset_prefix_cache(self, http: web.Request) -> web.Response:
        preempt = http.query.get("reset_running_requests", "false").lower() in ("1", "true")
        return json_response({"success": self._engine.reset_prefix_cache(preempt_running=preempt)})

    async def _lab_cache(self, http: web.Request) -> web.Response:
        """The live cache of each rank. Every whole-block prefix of a chain is a live block, and there are no others."""
        return json_response(
            {
                "ranks": [
                    {
                        "rank": runner.rank,
                        "epoch": runner.model.epoch,
                        "block_tokens": runner.model.settings.block_tokens,
                        "live_blocks": len(runner.model.cached_copies()),
                        "next_sequence": None if runner.publisher is None else runner.publisher.log.next_sequence,
                        "has_work": runner.model.has_work,
                        "chains": [
                            {
                                "tokens": chain.tokens,
                                "block_hashes": [int.from_bytes(digest[-8:], "big") for digest in chain.block_hashes],
                                "lora_name": chain.lora_name,
                                "cache_salt": chain.cache_salt,
                            }
                            for chain in runner.model.live_chains()
                        ],
                    }
                    for runner in self._engine.runners
                ]
            }
        )

    async def _lab_requests(self, http: web.Request) -> web.Response:
        """Finished requests, oldest first, and how many inference requests were taken since the process began."""
        return json_response(
            {
                "inference_requests": self._engine.inference_requests,
                "requests": [
                    _finished_page(runner.rank, finished)
                    for runner in self._engine.runners
                    for finished in runner.finished
                ],
            }
        )

    async def _lab_restart(self, http: web.Request) -> web.Response:
        await self._engine.restart(down_s=float(http.query.get("down_s", "0")))
        return json_response({"epoch": self._engine.runners[0].model.epoch})

    async def _lab_lose_events(self, http: web.Request) -> web.Response:
        """The next `batches` of KV events of a rank get their number but are not sent (replay still has them)."""
        runner = self._engine.rank_for(http.query.get("rank", "0"))
        runner.batches_to_lose = int(http.query.get("batches", "1"))
        return json_response({"batches": runner.batches_to_lose})


def _finished_page(rank: int, finished: FinishedRequest) -> dict[str, Any]:
    started = finished.scheduled_s
    first = finished.first_token_s
    return {
        "id": finished.request_id,
        "rank": rank,
        "reason": finished.reason.value,
        "prompt_tokens": finished.prompt_tokens,
        "output_tokens": finished.output_tokens,
        "cached_tokens": finished.cached_tokens,
        "queue_s": None if started is None else started - finished.arrived_s,
        "first_token_s": None if first is None else first - finished.arrived_s,
        "total_s": finished.finished_s - finished.arrived_s,
        "preemptions": finished.preemptions,
    }
