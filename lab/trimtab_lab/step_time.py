"""How long one step of an engine takes, from what the step computes.

The one rule: duration = base + prefill tokens + decoding requests + attention, each with a settable price. The defaults
are those of an 8-billion-parameter model in 16 bit on one data-centre GPU: the base is the time to read the weights.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    base_s: float = 8e-3
    """Seconds of any step, however small (weights are read once per step)."""
    prefill_token_s: float = 80e-6
    """Seconds per prompt token computed."""
    decode_request_s: float = 30e-6
    """Seconds per request that gets one more output token."""
    prefill_attention_s: float = 2e-9
    """Seconds per pair of a computed prompt token and a token before it."""
    decode_attention_s: float = 65e-9
    """Seconds per token of context read for one output token."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")

    def duration_s(self, *, prefill_chunks: list[tuple[int, int]], decode_contexts: list[int]) -> float:
        """Seconds of a step. `prefill_chunks`: (tokens computed now, tokens before them); `decode_contexts`: tokens
        before the one token of each decoding request."""
        prefill_tokens = sum(tokens for tokens, _ in prefill_chunks)
        pairs = sum(tokens * before + tokens * (tokens + 1) // 2 for tokens, before in prefill_chunks)
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.prefill_attention_s * pairs
            + self.decode_request_s * len(decode_contexts)
            + self.decode_attention_s * sum(decode_contexts)
        )

    def faster(self, factor: float) -> "StepTime":
        """The same engine on hardware that is `factor` times as fast."""
        return StepTime(**{name: getattr(self, name) / factor for name in self.__slots__})

    def for_shorter_prompts(self, divisor: float) -> "StepTime":
        """Prices under which prompts of a `divisor`-th of the length cost what the whole ones did.

        For traces whose lengths were scaled down: queueing and prefill weigh as before, decoding is not scaled.
        """
        return StepTime(
            base_s=self.base_s,
            prefill_token_s=self.prefill_token_s * divisor,
            decode_request_s=self.decode_request_s,
            prefill_attention_s=self.prefill_attention_s * divisor * divisor,
            decode_attention_s=self.decode_attention_s * divisor,
        )
