"""Answers of the emulated engine as JSON objects and SSE frames, in vLLM 0.32's shape.

The one rule: field for field what vLLM sends, so that a client (or a proxy that reads along) cannot tell. Pure: text
and numbers in, bytes out.
"""

from typing import Any

import msgspec

from trimtab_lab.request_body import BadRequestError

FINGERPRINT = "vllm-0.32.0-emulated"
DONE = b"data: [DONE]\n\n"
JSON = msgspec.json.Encoder()


def sse(value: object) -> bytes:
    return b"data: " + JSON.encode(value) + b"\n\n"


def named_sse(value: dict[str, Any]) -> bytes:
    """A frame of the Responses and Messages APIs, which name the event."""
    return b"event: " + str(value["type"]).encode() + b"\n" + sse(value)


def error_object(error: BadRequestError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}}


def died_object() -> dict[str, Any]:
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}


def usage_object(*, prompt_tokens: int, output_tokens: int, cached_tokens: int, chat: bool) -> dict[str, Any]:
    details: dict[str, Any] = {"cached_tokens": cached_tokens}
    if chat:
        details["created_cache_tokens"] = 0
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": details,
    }


def running_usage(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "completion_tokens_details": None,
    }


class ChatFrames:
    """SSE frames of one streamed chat completion."""

    def __init__(self, *, reply_id: str, created: int, model: str) -> None:
        self._head = {"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._fast_head = JSON.encode(self._head)[:-1] + b',"choices":[{"index":'

    def first(self, index: int, usage: dict[str, Any] | None, prompt_ids: list[int] | None) -> bytes:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        frame: dict[str, Any] = {**self._head, "choices": [choice]}
        if usage is not None:
            frame["usage"] = usage
        return sse({**frame, "prompt_token_ids": prompt_ids, "prompt_text": None})

    def delta(self, index: int, text: str, usage: dict[str, Any] | None, token_ids: list[int] | None) -> bytes:
        if usage is None and token_ids is None:  # the frame of nearly every token
            return b'data: %b%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n' % (
                self._fast_head,
                index,
                JSON.encode(text),
            )
        choice = {
            "index": index,
            "delta": {"content": text},
            "logprobs": None,
            "finish_reason": None,
            "token_ids": token_ids,
        }
        return sse({**self._head, "choices": [choice], **({} if usage is None else {"usage": usage})})

    def last(
        self,
        index: int,
        text: str,
        *,
        finish_reason: str,
        stop_reason: str | None,
        usage: dict[str, Any] | None,
        token_ids: list[int] | None,
        is_end: bool,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": {"content": text},
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "token_ids": token_ids,
        }
        frame: dict[str, Any] = {**self._head, "choices": [choice]}
        if usage is not None:
            frame["usage"] = usage
        if is_end:
            frame["system_fingerprint"] = FINGERPRINT
        return sse(frame)

    def usage(self, usage: dict[str, Any]) -> bytes:
        return sse({**self._head, "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT})


class CompletionFrames:
    """SSE frames of one streamed text completion."""

    def __init__(self, *, reply_id: str, created: int, model: str) -> None:
        self._head = {"id": reply_id, "object": "text_completion", "created": created, "model": model}

    def delta(
        self,
        index: int,
        text: str,
        *,
        finish_reason: str | None,
        stop_reason: str | None,
        usage: dict[str, Any] | None,
        prompt_ids: list[int] | None,
        token_ids: list[int] | None,
        is_end: bool,
    ) -> bytes:
        choice = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "prompt_token_ids": prompt_ids,
            "token_ids": token_ids,
        }
        frame: dict[str, Any] = {**self._head, "choices": [choice]}
        if usage is not None:
            frame["usage"] = usage
        if is_end:
            frame["system_fingerprint"] = FINGERPRINT
        return sse(frame)

    def usage(self, usage: dict[str, Any]) -> bytes:
        return sse({**self._head, "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT})


def chat_object(
    *,
    reply_id: str,
    created: int,
    model: str,
    choices: list[tuple[str, str, str | None, list[int] | None]],
    usage: dict[str, Any],
    prompt_ids: list[int] | None,
) -> dict[str, Any]:
    """`choices`: (text, finish_reason, stop_reason, token ids if wanted)."""
    usage = {**usage, "completion_tokens_details": None}
    usage["prompt_tokens_details"] = {**usage["prompt_tokens_details"], "multimodal_tokens": None}
    return {
        "id": reply_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": text,
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": finish_reason,
                "stop_reason": stop_reason,
                "token_ids": token_ids,
                "routed_experts": None,
            }
            for index, (text, finish_reason, stop_reason, token_ids) in enumerate(choices)
        ],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt_ids,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def completion_object(
    *,
    reply_id: str,
    created: int,
    model: str,
    choices: list[tuple[str, str, str | None, list[int] | None]],
    usage: dict[str, Any],
    prompt_ids: list[list[int] | None],
) -> dict[str, Any]:
    usage = {**usage, "completion_tokens_details": None}
    usage["prompt_tokens_details"] = {
        **usage["prompt_tokens_details"],
        "created_cache_tokens": None,
        "multimodal_tokens": None,
    }
    return {
        "id": reply_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "text": text,
                "logprobs": None,
                "finish_reason": finish_reason,
                "stop_reason": stop_reason,
                "token_ids": token_ids,
                "prompt_logprobs": None,
                "prompt_token_ids": prompt_ids[index],
                "routed_experts": None,
            }
            for index, (text, finish_reason, stop_reason, token_ids) in enumerate(choices)
        ],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def response_object(
    *,
    reply_id: str,
    created: int,
    model: str,
    status: str,
    text: str | None,
    item_id: str,
    tokens_max: int | None,
    previous_response_id: str | None,
    usage: dict[str, Any] | None,
) -> dict[str, Any]:
    """An object of the Responses API; `text` None while it is in progress."""
    part: dict[str, Any] = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
    item = {"id": item_id, "content": [part], "role": "assistant", "status": "completed", "type": "message"}
    return {
        "id": reply_id,
        "created_at": created,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": None,
        "model": model,
        "object": "response",
        "output": [] if text is None else [item],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "none",
        "tools": [],
        "top_p": 1.0,
        "background": False,
        "max_output_tokens": tokens_max,
        "previous_response_id": previous_response_id,
        "service_tier": "auto",
        "status": status,
        "truncation": "disabled",
        "usage": usage,
        "user": None,
    }


def response_usage(*, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + output_tokens,
    }
