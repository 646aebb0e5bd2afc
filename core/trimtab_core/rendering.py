"""A chat request's prompt, rendered as the engine renders it.

The one rule: what is returned is the text that the engine tokenises, or the head of it (`complete` is false then);
where that is not certain the answer is `NotRenderable`, never a guess. Only the card's templates are rendered: a
request that brings its own is refused, as engines refuse it.

Bodies are OpenAI's chat requests as parsed JSON, with vLLM's additions; they are never changed. Nothing here depends on
anything but the arguments, so a big prompt may be rendered on any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_core.chat_messages import MEDIA_MARK, Message, developer_as_system, parse_messages, plain_content
from trimtab_core.chat_skeleton import PLAIN_ROLES
from trimtab_core.chat_template import ChatTemplate, RenderClock, RenderLimits, compile_template
from trimtab_core.model_card import ModelCard
from trimtab_core.not_renderable import NotRenderable

__all__ = [
    "NotRenderable",
    "RenderClock",
    "RenderLimits",
    "RenderedPrompt",
    "render_chat",
    "render_completion",
    "render_prompt",
]

_END_MARK = "TRIMTAB-THE-FINAL-MESSAGE-ENDS-HERE "
"""Marks where a continued message ends. The space at its end shows whether the template trims."""
_ENGINE_ARGUMENTS = frozenset(
    [
        "chat_template",
        "tokenize",
        "conversation",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "padding",
        "truncation",
        "max_length",
        "tokenizer",
        "model_config",
        "self",
        "messages",
    ]
)
"""Names that mean something else to an engine than a template variable; a request that sets one is not rendered."""
_PLAIN = {"add_generation_prompt": True, "continue_final_message": False}
"""The variables of a chat that says nothing but its messages, to a server without variables of its own."""
_ALWAYS_ACCEPTED = frozenset({"documents", "add_generation_prompt", "continue_final_message"})
_FUNCTION_FIELDS = ("name", "description", "parameters")
_OPTIONAL_FUNCTION_FIELDS = ("strict", "defer_loading")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """The text of one engine prompt, before the tokenizer's normalisation (`ModelCard.normalize`)."""

    text: str
    complete: bool
    """False: the prompt goes on with an image, a sound or a video at the end of `text`."""
    media_items: int
    """Images, sounds and videos in the prompt."""


def render_chat(
    card: ModelCard, body: Mapping[str, Any], limits: RenderLimits | None = None, *, clock: RenderClock
) -> str:
    """The text of a chat request's prompt, up to its first media item; see `render_prompt`."""
    return render_prompt(card, body, limits, clock=clock).text


def render_prompt(
    card: ModelCard, body: Mapping[str, Any], limits: RenderLimits | None = None, *, clock: RenderClock
) -> RenderedPrompt:
    """What the engine makes of a chat request, the card's prefix included. Raises `NotRenderable`."""
    if body.get("chat_template") is not None:
        raise NotRenderable("the request brings its own chat template")
    plain = _plain_text(card, body, limits or RenderLimits(), clock)
    if plain is not None:
        return RenderedPrompt(text=card.chat_prefix + plain, complete=True, media_items=0)
    variables = _variables(card, body) if len(body) > 1 or card.default_template_kwargs else dict(_PLAIN)
    tools = variables.pop("tools", None)
    with_tools = tools is not None
    source = card.tools_template if with_tools else card.template
    if source is None:
        raise NotRenderable("the card has no chat template")
    template = compile_template(source)
    content_format = card.tools_content_format if with_tools else card.content_format
    conversation = parse_messages(body.get("messages"), content_format)
    messages = conversation.messages
    if not template.names_developer:
        messages = developer_as_system(messages)
    accepted = {name: value for name, value in variables.items() if name in template.variables | _ALWAYS_ACCEPTED}
    accepted |= {"tools": tools, "documents": _documents(accepted.get("documents"))}
    text = _render(template, messages, {**card.special_tokens, **accepted}, limits or RenderLimits(), clock)
    prefix = card.completion_prefix if body.get("add_special_tokens") else card.chat_prefix
    if conversation.media_items:
        before, mark, _ = text.partition(MEDIA_MARK)
        if not mark:
            raise NotRenderable("where the first media item stands does not show in the rendered text")
        text = before
    return RenderedPrompt(
        text=prefix + text, complete=not conversation.media_items, media_items=conversation.media_items
    )


def _plain_text(card: ModelCard, body: Mapping[str, Any], limits: RenderLimits, clock: RenderClock) -> str | None:
    """A chat of plain messages and nothing else, where the template only wraps them: the same text for less."""
    messages = body.get("messages")
    if len(body) != 1 or card.default_template_kwargs or card.template is None or card.content_format != "string":
        return None
    template = compile_template(card.template)
    if not template.skeletons.is_usable or not isinstance(messages, list) or not messages:
        return None
    roles, contents, chars = [], [], 0
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in PLAIN_ROLES:
            return None
        if (content := plain_content(role, message)) is None:
            return None
        roles.append(role)
        contents.append(content)
        chars += len(content)
    if 4 * chars > limits.output_bytes:
        return None
    variables = {**card.special_tokens, "add_generation_prompt": True, "tools": None, "documents": None}

    def render(marked: list[Message]) -> str:
        return template.render({**variables, "messages": marked}, limits=limits, clock=clock)

    return template.skeletons.text(tuple(roles), contents, tuple(card.special_tokens.items()), render)


def render_completion(card: ModelCard, prompt: str, *, add_special_tokens: bool = True) -> str:
    """The text of a prompt that is given as text (`/v1/completions`)."""
    return card.completion_prefix + prompt if add_special_tokens else prompt


def _variables(card: ModelCard, body: Mapping[str, Any]) -> dict[str, Any]:
    """The template variables, `tools` among them: the server's, then the request's kwargs, then its own fields."""
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        raise NotRenderable("chat_template_kwargs are not an object")
    if not _ENGINE_ARGUMENTS.isdisjoint(given) or not _ENGINE_ARGUMENTS.isdisjoint(card.default_template_kwargs):
        raise NotRenderable("a template variable is named like an argument of the engine")
    generate = body.get("add_generation_prompt", True)
    resume = body.get("continue_final_message", False)
    if not isinstance(generate, bool) or not isinstance(resume, bool):
        raise NotRenderable("add_generation_prompt or continue_final_message is not a boolean")
    if generate and resume:
        raise NotRenderable("add_generation_prompt and continue_final_message exclude each other")
    effort = body.get("reasoning_effort")
    own = {
        "add_generation_prompt": generate,
        "continue_final_message": resume,
        "documents": body.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in given:
        own["enable_thinking"] = effort != "none"
    server = {**card.default_template_kwargs, **_set_only({"tools": _tools(card, body)})}
    return {**server, **_set_only({**given, **_set_only(own)})}


def _set_only(values: Mapping[str, Any]) -> dict[str, Any]:
    """Engines read null and "auto" as not set, so that they do not hide a default."""
    return {name: value for name, value in values.items() if value is not None and value != "auto"}


def _tools(card: ModelCard, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Tools in the form that templates print: the API's fields, in its order, an absent description as null."""
    tools = body.get("tools")
    if tools is None or (card.exclude_tools_when_tool_choice_none and body.get("tool_choice") == "none"):
        return None
    if not isinstance(tools, list) or not tools:
        raise NotRenderable("tools are not a list with at least one tool")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or not isinstance(function := tool.get("function"), Mapping):
        raise NotRenderable("a tool is not a function")
    if tool.get("type", "function") != "function" or not isinstance(function.get("name"), str):
        raise NotRenderable("a tool is not a function")
    described: dict[str, Any] = {name: function.get(name) for name in _FUNCTION_FIELDS}
    deferred = tool.get("defer_loading")
    optional = {"defer_loading": deferred, **_set_only({n: function.get(n) for n in _OPTIONAL_FUNCTION_FIELDS})}
    described |= {name: optional[name] for name in _OPTIONAL_FUNCTION_FIELDS if optional.get(name) is not None}
    dumped = {"type": "function", "function": described}
    return dumped if deferred is None else {**dumped, "defer_loading": deferred}


def _documents(documents: Any) -> Any:
    if documents is not None and not (
        isinstance(documents, list) and all(isinstance(document, Mapping) for document in documents)
    ):
        raise NotRenderable("documents are not a list of objects")
    return documents


def _render(
    template: ChatTemplate,
    messages: list[Message],
    variables: dict[str, Any],
    limits: RenderLimits,
    clock: RenderClock,
) -> str:
    # Transformers hands this one to its renderer, not to the template.
    if not variables.pop("continue_final_message", False):
        return template.render({**variables, "messages": messages}, limits=limits, clock=clock)
    marked, final_text = _mark_end(messages)
    if "content" not in template.source:
        raise NotRenderable("the template does not name a message's content")
    text = template.render({**variables, "messages": marked}, limits=limits, clock=clock)
    mark = _END_MARK.strip()
    at = text.rfind(mark)
    if at < 0 or final_text.strip() not in text:
        raise NotRenderable("the message to continue does not appear in the rendered text")
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()


def _mark_end(messages: list[Message]) -> tuple[list[Message], str]:
    """The messages with the end of the last one's text marked, and that text."""
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + _END_MARK}], content
    if isinstance(content, list):
        for place in range(len(content) - 1, -1, -1):
            if "text" in content[place]:
                text = content[place]["text"]
                marked = [*content]
                marked[place] = {**content[place], "text": text + _END_MARK}
                return [*messages[:-1], {**last, "content": marked}], text
    raise NotRenderable("the message to continue has no text")
