"""Bodies of inference requests, read as vLLM reads them.

The one rule: what vLLM refuses is refused with its status and error form; what it ignores is ignored. No I/O, and no
tokenising: a prompt is handed on as text or token ids.
"""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from trimtab_lab.vocabulary import UnusableTextError, Vocabulary

Api = Literal["chat", "completion", "embedding", "response", "message"]
JSON_BODY = msgspec.json.Decoder(dict[str, Any])
CHOICES_MAX = 128


class BadRequestError(Exception):
    """A request that is answered with an error. Carries what the answer says."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    api: Api
    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    tokens_max: int | None
    """None: to the end of the context."""
    tokens_min: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    seed: int = 0
    choices: int = 1
    stream: bool = False
    usage_at_end: bool = False
    usage_in_chunks: bool = False
    token_ids_wanted: bool = False
    cache_salt: str | None = None
    reads_cache: bool = True
    messages: tuple[dict[str, Any], ...] = ()
    """The normalised chat, where there is one."""


def decode_body(raw: bytes) -> dict[str, Any]:
    try:
        return JSON_BODY.decode(raw)
    except msgspec.DecodeError as error:
        raise BadRequestError(
            f"1 validation error:\n  {{'type': 'json_invalid', 'loc': 'body', 'msg': 'JSON decode error', "
            f"'ctx': {{'error': {str(error)!r}}}}}",
            kind="Bad Request",
            param="body",
        ) from error


def chat_request(body: dict[str, Any], vocabulary: Vocabulary) -> InferenceRequest:
    messages = normalise_messages(_required(body, "messages", list))
    return InferenceRequest(
        api="chat",
        prompts=(render(body, messages, vocabulary),),
        tokens_max=_count(body, "max_completion_tokens", _count(body, "max_tokens", None)),
        messages=tuple(messages),
        **_shared(body),
    )


def completion_request(body: dict[str, Any]) -> InferenceRequest:
    return InferenceRequest(
        api="completion",
        prompts=_prompts(body.get("prompt"), "prompt"),
        tokens_max=_count(body, "max_tokens", 16),
        **_shared(body),
    )


def embedding_request(body: dict[str, Any]) -> InferenceRequest:
    return InferenceRequest(
        api="embedding", prompts=_prompts(body.get("input"), "input"), tokens_max=0, model=_model(body)
    )


def response_request(
    body: dict[str, Any], vocabulary: Vocabulary, earlier: tuple[dict[str, Any], ...]
) -> InferenceRequest:
    """`earlier`: the conversation that `previous_response_id` stands for."""
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    messages += [message for message in earlier if message["role"] != "system" or not messages]
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        messages += [item for item in given if isinstance(item, dict) and "role" in item]
    else:
        raise _missing("input", body)
    messages = normalise_messages(messages)
    return InferenceRequest(
        api="response",
        prompts=(render(body, messages, vocabulary),),
        tokens_max=_count(body, "max_output_tokens", None),
        messages=tuple(messages),
        **_shared(body),
    )


def message_request(body: dict[str, Any], vocabulary: Vocabulary) -> InferenceRequest:
    """Anthropic's Messages API."""
    messages: list[dict[str, Any]] = []
    system = body.get("system")
    if isinstance(system, list):
        texts = [part.get("text", "") for part in system if isinstance(part, dict)]
        system = "".join(text for text in texts if not text.startswith("x-anthropic-billing-header"))
    if system:
        messages.append({"role": "system", "content": system})
    messages = normalise_messages(messages + _required(body, "messages", list))
    shared = _shared(body)
    shared["stop"] = tuple(body.get("stop_sequences") or ())
    return InferenceRequest(
        api="message",
        prompts=(render({}, messages, vocabulary),),
        tokens_max=_count(body, "max_tokens", None),
        messages=tuple(messages),
        **shared,
    )


def render(body: dict[str, Any], messages: list[dict[str, Any]], vocabulary: Vocabulary) -> str:
    """The chat's prompt text, by the model's own template."""
    if body.get("chat_template"):
        raise BadRequestError(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template."
        )
    continues = bool(body.get("continue_final_message", False))
    generates = bool(body.get("add_generation_prompt", not continues))
    if continues and generates:
        raise BadRequestError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    variables = dict(body.get("chat_template_kwargs") or {})
    variables.setdefault("tools", body.get("tools"))
    if body.get("documents") is not None:
        variables.setdefault("documents", body["documents"])
    if not vocabulary.template_names_developer:
        messages = without_developer(messages)
    try:
        text = vocabulary.render_chat(messages, add_generation_prompt=generates, **variables)
    except UnusableTextError as error:
        raise BadRequestError(str(error)) from error
    if continues and messages:
        last = messages[-1]["content"].strip()
        text = text[: text.rindex(last) + len(last)]
    return text


def without_developer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As vLLM does for a template that does not know the role: `developer` becomes `system`, and where that leaves more
    than one system message or one that is not the first, all of them become one in front."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    systems = [message["content"] for message in messages if message["role"] in ("developer", "system")]
    if len(systems) == 1 and messages[0]["role"] in ("developer", "system"):
        return [{**messages[0], "role": "system"}, *messages[1:]]
    others = [message for message in messages if message["role"] not in ("developer", "system")]
    return [{"role": "system", "content": "\n\n".join(text for text in systems if text)}, *others]


def normalise_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages as the template sees them: text parts joined by a newline, no content is empty content."""
    if not messages:
        raise BadRequestError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    normal = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequestError(
                "1 validation error: each message needs a role", kind="Bad Request", param="body.messages"
            )
        content = message.get("content")
        if content is None:
            text = ""
        elif isinstance(content, str):
            text = content
        elif isinstance(content, list):
            text = "\n".join(_part_text(part) for part in content)
        else:
            raise BadRequestError("1 validation error: content must be text or a list of parts", kind="Bad Request")
        normal.append({**message, "content": text})
    return normal


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        if part.get("type") in ("text", "input_text", "output_text", "thinking"):
            return str(part.get("text", part.get("thinking", "")))
        if part.get("type") == "refusal":
            return str(part.get("refusal", ""))
    raise BadRequestError("This is not a multimodal model")


def _shared(body: dict[str, Any]) -> dict[str, Any]:
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        message = "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)"
        raise BadRequestError(message, param="cache_salt")
    stop = body.get("stop") or ()
    options = body.get("stream_options") or {}
    if options and not body.get("stream"):
        message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise BadRequestError(message, param="stream_options")
    choices = _count(body, "n", None)
    choices = 1 if choices is None else choices
    if not 1 <= choices <= CHOICES_MAX:
        bound = f"at least 1, got {choices}." if choices < 1 else f"at most {CHOICES_MAX}, got {choices}."
        raise BadRequestError(f"n must be {bound}")
    if choices > 1 and body.get("temperature") == 0:
        raise BadRequestError(f"n must be 1 when using greedy sampling, got {choices}.")
    return {
        "model": _model(body),
        "tokens_min": _count(body, "min_tokens", 0) or 0,
        "ignore_eos": bool(body.get("ignore_eos", False)),
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "seed": _count(body, "seed", 0) or 0,
        "choices": choices,
        "stream": bool(body.get("stream", False)),
        "usage_at_end": bool(options.get("include_usage", False)),
        "usage_in_chunks": bool(options.get("continuous_usage_stats", False)),
        "token_ids_wanted": bool(body.get("return_token_ids", False)),
        "cache_salt": salt,
        "reads_cache": body.get("prompt_logprobs") is None,
    }


def _model(body: dict[str, Any]) -> str | None:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequestError("1 validation error: model must be a string", kind="Bad Request", param="body.model")
    return model


def _prompts(given: Any, field: str) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list) and given:
        if all(isinstance(item, int) for item in given):
            return (tuple(given),)
        if all(isinstance(item, str) for item in given):
            return tuple(given)
        if all(isinstance(item, list) and item and all(isinstance(token, int) for token in item) for item in given):
            return tuple(tuple(item) for item in given)
    message = f"Either {field} or prompt_embeds must be provided and non-empty. (parameter={field})"
    raise BadRequestError(message, param=field)


def _count(body: dict[str, Any], field: str, default: int | None) -> int | None:
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequestError(
            f"1 validation error: {field} must be an integer", kind="Bad Request", param=f"body.{field}"
        )
    return value


def _required(body: dict[str, Any], field: str, kind: type[list[Any]]) -> list[Any]:
    value = body.get(field)
    if not isinstance(value, kind):
        raise _missing(field, body)
    return value


def _missing(field: str, body: dict[str, Any]) -> BadRequestError:
    return BadRequestError(
        f"1 validation error:\n  {{'type': 'missing', 'loc': 'body.{field}', 'msg': 'Field required', "
        f"'input': '<dict of {len(body)} items>'}}",
        kind="Bad Request",
        param=f"body.{field}",
    )
