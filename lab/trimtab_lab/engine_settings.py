"""What an emulated engine is set to, by vLLM's names turned into units.

The one rule: settings that cannot work together do not come into being.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    block_count: int = 4096
    """KV blocks, the null block included, so `block_count - 1` serve requests."""
    block_tokens: int = 16
    batched_tokens_max: int = 2048
    """Tokens computed in one step; longer prompts are computed in chunks."""
    requests_max: int = 256
    """Requests running at once; the others wait."""
    context_tokens_max: int = 32768
    """Longest prompt plus output."""
    queued_requests_max: int | None = None
    """Waiting requests beyond which new ones are refused; None: no limit."""
    prefix_caching: bool = True
    hash_seed: str = "trimtab-lab"
    """Goes into every block hash. Engines of one seed give equal blocks equal hashes."""

    def __post_init__(self) -> None:
        for name in ("block_tokens", "batched_tokens_max", "requests_max", "context_tokens_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if -(-self.context_tokens_max // self.block_tokens) > self.block_count - 1:
            raise ValueError(
                f"{self.block_count - 1} blocks of {self.block_tokens} tokens cannot hold one request of "
                f"context_tokens_max={self.context_tokens_max} tokens"
            )
