"""What a request asks of an engine, as far as choosing an endpoint needs to know it: plain values, no rendering.

The one rule: a value here is the same for every endpoint. What depends on the model card (the template, the engine's
flags) is left in a source and decided in `prompts`. Nothing but `kind` and `reason` may reach a log or a metric;
texts are in no `repr`.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from trimtab_core.chunks import U32

JsonObject = dict[str, Any]
Reason = Literal["path", "encoding", "content_type", "empty", "json", "nesting", "surrogate", "fields", "item"]
"""Why a request was not understood: its path stands for no prompt that we know; its body is packed or no JSON by its
headers, is empty, is no JSON, is nested too deep or holds half a UTF-16 pair; a field is not the API's; an item of its
conversation is none that we can follow."""


class Kind(Enum):
    """The kind of request, a small closed set: it may label a metric."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OTHER = "other"
    """Not understood, or not a prompt: routed by load alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSource:
    """A conversation that the engine renders through its chat template."""

    body: JsonObject = field(repr=False)
    """What `render_chat` reads, in the form of a chat completion: messages, tools, tool_choice, add_generation_prompt,
    continue_final_message, documents, reasoning_effort, chat_template_kwargs. Never a chat template."""
    system_first: JsonObject | None = field(default=None, repr=False)
    """The body for a template that takes a system message at the front only; None: the same."""
    is_thinking_off: bool = False
    """The client turned thinking off by name, which the engine turns into the effort that its template understands."""
    adds_special_tokens: bool = False
    """The engine puts the tokenizer's own special tokens in front, as it does for completions."""
    takes_default_kwargs: bool = True
    """The engine's default template arguments apply (they do not for embeddings)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """Text that the engine tokenises as it is."""

    text: str = field(repr=False)
    adds_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSource:
    """Token ids that the engine takes as they are; not checked against any vocabulary."""

    ids: U32 = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueSource:
    """A prompt that cannot be claimed: only its rough size is known."""

    size_bytes: int


Source = ChatSource | TextSource | TokenSource | OpaqueSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One request. The defaults are those of a request that nobody understood."""

    kind: Kind = Kind.OTHER
    model: str | None = None
    sources: tuple[Source, ...] = ()
    """One per engine prompt, in the client's order."""
    sequences: int = 1
    """Engine requests in all: prompts x n; at most SEQUENCES_MAX."""
    stream: bool = False
    cache_reads: bool = True
    """False: the engine computes the whole prompt whatever it has cached."""
    claims_prefix: bool = True
    """False: the engine's prompt is not the one that the body spells."""
    cache_salt: str | None = field(default=None, repr=False)
    previous_response_id: str | None = None
    """The response that this one continues; it lives in one engine's memory."""
    response_id: str | None = None
    """The response that the path names; it lives in one engine's memory."""
    max_tokens: int | None = None
    """Output tokens at most, per sequence; None: not said."""
    reason: Reason | None = None
    """Why the request was not understood; None: it was."""


SEQUENCES_MAX = 16_384
"""The engine's own limit on n. A request that asks for more counts as this many, and the engine refuses it."""
