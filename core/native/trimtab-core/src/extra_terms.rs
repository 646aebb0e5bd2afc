//! What the class of a request and the network between add to the terms of each slot; see `trimtab_core.extra_terms`.
//!
//! Every step is the reference's, in its order: the two must be equal to the last bit.

/// Weight of an ordinary request, and of one that came past us.
pub const ORDINARY_MILLI: i64 = 1000;

/// Those of one request. Arrays may be shorter than the number of slots: beyond, the factor is 1, the round trip 0.
#[derive(Clone, Copy, Default)]
pub struct ExtraTerms<'a> {
    pub expert_factor: &'a [f64],
    pub rtt_s: &'a [f64],
    /// 0: never.
    pub log_above_tokens: f64,
}

impl ExtraTerms<'_> {
    /// Whether any of them changes P.
    pub fn act_on_p(&self) -> bool {
        !self.expert_factor.is_empty() || !self.rtt_s.is_empty() || self.log_above_tokens > 0.0
    }

    /// From P with its floor to P as it is in the score; the rates are those of the slots.
    pub fn apply(&self, p_tokens: &mut [f64], prefill_rate: &[f64]) {
        p_tokens.iter_mut().zip(self.expert_factor).for_each(|(p, factor)| *p *= factor);
        for (p, (rtt, rate)) in p_tokens.iter_mut().zip(self.rtt_s.iter().zip(prefill_rate)) {
            *p += rtt * rate;
        }
        smooth(p_tokens, self.log_above_tokens);
    }
}

/// The logarithm of what is above the threshold; 0: of nothing.
pub fn smooth(p_tokens: &mut [f64], above: f64) {
    if above > 0.0 {
        for p in p_tokens.iter_mut().filter(|p| **p > above) {
            *p = above + above * ((*p - above) / above).ln_1p();
        }
    }
}

/// B of a slot, from the weights there and this request's batch.
#[inline(always)]
pub fn weighted(present_milli: f64, batch: f64) -> f64 {
    (present_milli + batch * ORDINARY_MILLI as f64) / ORDINARY_MILLI as f64
}
