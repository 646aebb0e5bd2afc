"""Extra terms: what the class of a request and the network between add to the terms of each slot.

The one rule: they act inside the terms of the slot. A factor on the request would be the same for every slot, cancel in
the argmin and do nothing.

    P_i = P_i * expert_factor_i        experts that the class is likely to use are slower on some slots
        + rtt_i * prefill_rate_i       what the slot would prefill while the request travels
    P_i = T + T * log1p((P_i - T) / T) where P_i is above the threshold T
    B_i = sum over the engine requests there of the weights of their classes, + 1 for each of this request's own

The factor comes before the round trip: travelling takes as long whichever experts are asked. The logarithm comes last,
over all of P. It is continuous at T, with the slope of P itself, and rises everywhere: no order of two P is ever
turned, but that of two products can be, for very long prompts, in favour of the slot with fewer requests.

Weights are whole thousandths, so that a sum of them never drifts, whatever comes and goes. A request's own weight is
not in its own B, where it would make it care less for the load of the slots: the heavier it is, the less it would mind
to join a full one.

Nothing here changes what is booked: a reservation brings its tokens and its weight, whatever its P was in the score.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

ORDINARY_MILLI = 1_000
"""Weight of an ordinary request, and of one that came past us."""
WEIGHT_MILLI_MAX = 1_000_000
"""The heaviest class."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtraTerms:
    """Those of one request. The defaults add nothing.

    `weight_milli`: of its class, in thousandths of an ordinary request, 1 to `WEIGHT_MILLI_MAX`.
    `expert_factor[i]`: how many times longer the class's tokens take on slot i than on a balanced one; above 0.
    `rtt_s[i]`: round trip to slot i; not below 0. Arrays may be shorter than the scheduler's own: a slot beyond their
    end has the factor 1 and no round trip. Both finite.
    `log_above_tokens`: the threshold above which P grows with its logarithm; 0: never.
    """

    weight_milli: int = ORDINARY_MILLI
    expert_factor: F64 | None = None
    rtt_s: F64 | None = None
    log_above_tokens: float = 0.0


PLAIN = ExtraTerms()
"""Of a request without any."""


def factors(extra: ExtraTerms, slots: int) -> F64:
    """The expert factor of every slot."""
    return _of_slots(extra.expert_factor, slots, 1.0)


def network_tokens(extra: ExtraTerms, prefill_rate: F64) -> F64:
    """What each slot would prefill during its round trip."""
    return _of_slots(extra.rtt_s, len(prefill_rate), 0.0) * prefill_rate


def smoothed(p_tokens: F64, log_above_tokens: float) -> F64:
    """P with its logarithm above the threshold."""
    if log_above_tokens <= 0:
        return p_tokens
    above = log_above_tokens
    # One by one: the array's own logarithm may differ in the last bit from the C library's.
    values = (p if p <= above else above + above * math.log1p((p - above) / above) for p in p_tokens.tolist())
    return np.fromiter(values, dtype=np.float64, count=len(p_tokens))


def weighted(weight_milli: npt.NDArray[np.int64], external: npt.NDArray[np.int64], batch: int) -> F64:
    """B of every slot. `weight_milli`: of our requests there; those that came past us are ordinary ones."""
    present_milli = (weight_milli + external * ORDINARY_MILLI).astype(np.float64)
    b: F64 = (present_milli + float(batch * ORDINARY_MILLI)) / float(ORDINARY_MILLI)
    return b


def _of_slots(values: F64 | None, slots: int, otherwise: float) -> F64:
    filled = np.full(slots, otherwise, dtype=np.float64)
    if values is not None:
        filled[: len(values)] = values[:slots]
    return filled
