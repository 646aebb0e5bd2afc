"""Token counts in a response, in the words of every format.

The one rule: counts only grow while a stream goes on, so an event that knows less takes nothing back.
"""

from typing import Annotated

import msgspec

TOKENS_MAX = 2**31 - 1
Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]
"""A count that an engine can mean; usage with any other is no usage."""


class TokenDetails(msgspec.Struct):
    """The part of the usage that tells of the cache."""

    cached_tokens: Tokens | None = None


class UsageFields(msgspec.Struct):
    """`usage` as chat completions, responses and messages write it."""

    prompt_tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    prompt_tokens_details: TokenDetails | None = None
    input_tokens_details: TokenDetails | None = None
    cache_read_input_tokens: Tokens | None = None
    cache_creation_input_tokens: Tokens | None = None


class TokenUsage:
    """What has been told so far; None: nothing."""

    __slots__ = ("cached_tokens", "completion_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        """Tokens of the prompt, the cached ones among them."""
        self.cached_tokens: int | None = None
        """Tokens of the prompt that the engine took from its cache."""
        self.completion_tokens: int | None = None

    def add(self, fields: UsageFields) -> None:
        """Take in one event's counts."""
        details = fields.prompt_tokens_details or fields.input_tokens_details or TokenDetails()
        prompt, cached = fields.prompt_tokens, details.cached_tokens
        if prompt is None and fields.input_tokens is not None:
            # Anthropic counts cached tokens apart; the other formats count them in.
            apart = (fields.cache_read_input_tokens or 0) + (fields.cache_creation_input_tokens or 0)
            prompt = fields.input_tokens + apart
        if cached is None:
            cached = fields.cache_read_input_tokens
        completion = fields.output_tokens if fields.completion_tokens is None else fields.completion_tokens
        self.prompt_tokens = _larger(self.prompt_tokens, prompt)
        self.cached_tokens = _larger(self.cached_tokens, cached)
        self.completion_tokens = _larger(self.completion_tokens, completion)


def _larger(known: int | None, new: int | None) -> int | None:
    if known is None or new is None:
        return new if known is None else known
    return max(known, new)
