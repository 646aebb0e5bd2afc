"""What can be set about a scheduler. Parsed once, by whoever starts the process; frozen from then on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Every field has a default that suits a pool nobody has tuned."""

    block_tokens: int = 16
    """Tokens per KV block of a slot that has not reported yet; also the floor of its P."""
    kv_capacity_tokens: int = 500_000
    """KV capacity of a slot that has not reported yet: the bound of what is learned about it in approximate mode."""
    prefill_rate: float = 8000.0
    """Tokens per second that a slot is taken to prefill until its own first tokens show its rate."""
    prefill_rate_memory_s: float = 10.0
    """Seconds of prefilling after which an observation of the rate has faded to 1/e of its weight."""
    grace_s: float = 2.0
    """Seconds that the speculative chunks of a request outlive its first token, until the engine's events are in."""
    late_signal_factor: float = 4.0
    """Where a signal of the first token is expected: multiple of the modelled wait after which it is taken as lost."""
    late_signal_s: float = 1.0
    """Seconds on top of that multiple."""
    speculative_chunks_max: int = 2_000_000
    """Most speculative chunks held, all slots together. Beyond, the oldest reservation's chunks go first."""
    reservations_max: int = 100_000
    """Most open reservations of one replica. Beyond, `place` rejects, and a peer's reservations are ignored."""
    retry_after_s: float = 1.0
    """What a rejected client is told to wait."""
