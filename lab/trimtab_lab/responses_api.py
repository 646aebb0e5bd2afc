"""OpenAI's Responses API, as the emulated engine serves it: stateful, since an answer can be gone on from by its id.

The one rule: what an id stands for lives in this engine's memory alone, bounded, and dies with it.
"""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from trimtab_lab.emulated_engine import EmulatedEngine
from trimtab_lab.engine_request import FinishReason
from trimtab_lab.generation import Delta, Generation
from trimtab_lab.inference_http import InferenceHttp, json_response
from trimtab_lab.reply import named_sse, response_object, response_usage
from trimtab_lab.request_body import BadRequestError, decode_body, response_request


class ResponsesApi:
    def __init__(self, engine: EmulatedEngine) -> None:
        self._engine = engine
        self._http = InferenceHttp(engine)

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/responses", self._response), web.get("/v1/responses/{id}", self._stored_response)]

    async def _response(self, http: web.Request) -> web.StreamResponse:
        body = decode_body(await http.read())
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self._engine.responses:
            message = f"Response with id '{previous}' not found."
            raise BadRequestError(message, status=404, kind="NotFoundError", param="response_id")
        earlier = () if previous is None else self._engine.responses[previous][0]
        request = response_request(body, self._engine.vocabulary, earlier)
        generation = await self._http.generation(http, request, "resp")
        conversation = _Conversation(self._engine, generation, previous)
        return await self._http.answered(http, generation, conversation.frames, conversation.whole)

    async def _stored_response(self, http: web.Request) -> web.Response:
        stored = self._engine.responses.get(http.match_info["id"])
        if stored is None:
            message = f"Response with id '{http.match_info['id']}' not found."
            raise BadRequestError(message, status=404, kind="NotFoundError", param="response_id")
        return json_response(stored[1])


class _Conversation:
    """An answer of the Responses API, remembered for the next turn."""

    def __init__(self, engine: EmulatedEngine, generation: Generation, previous: str | None) -> None:
        self._engine = engine
        self._item_id = f"msg_{uuid.uuid4().hex[:16]}"
        self._previous = previous
        self._created = int(time.time())

    async def frames(self, generation: Generation, model: str) -> AsyncIterator[bytes]:
        item: dict[str, Any] = {
            "id": self._item_id, "content": [], "role": "assistant", "status": "in_progress", "type": "message",
        }  # fmt: skip
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        start = self._object(generation, model, "in_progress", None, usage=False)
        number = 0

        def frame(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return named_sse({**fields, "sequence_number": number - 1, "type": kind})

        yield frame("response.created", response=start) + frame("response.in_progress", response=start)
        texts: list[str] = []
        reason = FinishReason.ABORT
        async for news in generation.deltas():
            out = b""
            for delta in news:
                if not texts and delta.token_ids:
                    out += frame("response.output_item.added", item=item, output_index=0)
                    out += frame("response.content_part.added", part=part, **place)
                texts.append(delta.text)
                reason = delta.finish_reason or reason
                if delta.text:
                    out += frame("response.output_text.delta", delta=delta.text, logprobs=[], **place)
            yield out
        text = "".join(texts)
        whole_part = {**part, "text": text}
        status = _response_status(reason)
        whole = self._object(generation, model, status, text, usage=True)
        self._remember(generation, text, whole)
        yield (
            frame("response.output_text.done", text=text, logprobs=[], **place)
            + frame("response.content_part.done", part=whole_part, **place)
            + frame(
                "response.output_item.done",
                item={**item, "content": [whole_part], "status": "completed"},
                output_index=0,
            )
            + frame("response.completed" if status == "completed" else "response.incomplete", response=whole)
        )

    def whole(self, generation: Generation, model: str, deltas: list[Delta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        reason = next((delta.finish_reason for delta in deltas if delta.finish_reason), FinishReason.ABORT)
        value = self._object(generation, model, _response_status(reason), text, usage=True)
        self._remember(generation, text, value)
        return value

    def _object(
        self, generation: Generation, model: str, status: str, text: str | None, *, usage: bool
    ) -> dict[str, Any]:
        counts = response_usage(
            prompt_tokens=generation.prompt_tokens,
            output_tokens=generation.output_tokens,
            cached_tokens=generation.cached_tokens,
        )
        return response_object(
            reply_id=generation.reply_id,
            created=self._created,
            model=model,
            status=status,
            text=text,
            item_id=self._item_id,
            tokens_max=generation.request.tokens_max,
            previous_response_id=self._previous,
            usage=counts if usage else None,
        )

    def _remember(self, generation: Generation, text: str, whole: dict[str, Any]) -> None:
        messages = [*generation.request.messages, {"role": "assistant", "content": text}]
        self._engine.remember_response(generation.reply_id, messages, whole)


def _response_status(reason: FinishReason) -> str:
    return "completed" if reason is FinishReason.STOP else "incomplete"
