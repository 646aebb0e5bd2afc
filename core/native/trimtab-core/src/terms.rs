//! The terms of a decision for every slot: what a placement shows. The decision itself keeps no such arrays; they are
//! worked out when they are asked for, from what it looked at.

use std::sync::Arc;

use crate::extra_terms::{smooth, weighted};
use crate::hotspot::LeftOut;

/// Arrays run over slots. Slots that were no candidates have 0, and an infinite score.
#[derive(Debug)]
pub struct Terms {
    pub candidates: Vec<u64>,
    pub prompt_tokens: i64,
    /// Hits of all prompts together, of the slots that have any.
    pub hits: Vec<(u32, i64)>,
    pub queued_tokens: Vec<f64>,
    /// Requests there before this one.
    pub present: Vec<f64>,
    /// The same with the weights of their classes, in thousandths.
    pub present_milli: Vec<f64>,
    pub batch: i64,
    /// What P is multiplied by, and what is added to it then; 1 and 0 beyond their ends.
    pub expert_factor: Vec<f64>,
    pub network_tokens: Vec<f64>,
    pub log_above_tokens: f64,
    /// The least P of each slot: a block.
    pub floor: Arc<Vec<f64>>,
    pub scoring: Scoring,
    /// Holders of a hotspot's prefix that were no candidates for once.
    pub left_out: Option<LeftOut>,
}

#[derive(Debug)]
pub enum Scoring {
    /// P times B.
    Product,
    /// B.
    LeastRequest,
    Given(Vec<f64>),
}

impl Terms {
    fn is_candidate(&self, slot: usize) -> bool {
        self.candidates[slot / 64] >> (slot % 64) & 1 == 1
    }

    fn of_candidates<T>(&self, otherwise: T, of: impl Fn(usize) -> T) -> Vec<T>
    where
        T: Copy,
    {
        (0..self.present.len()).map(|slot| if self.is_candidate(slot) { of(slot) } else { otherwise }).collect()
    }

    /// Of all slots, candidates or not.
    fn all_hits(&self) -> Vec<i64> {
        let mut hits = vec![0; self.present.len()];
        self.hits.iter().for_each(|&(slot, tokens)| hits[slot as usize] = tokens);
        hits
    }

    pub fn hit_tokens(&self) -> Vec<i64> {
        let hits = self.all_hits();
        self.of_candidates(0, |slot| hits[slot])
    }

    pub fn queued_tokens(&self) -> Vec<f64> {
        self.of_candidates(0.0, |slot| self.queued_tokens[slot])
    }

    /// Before the logarithm.
    pub fn p_linear_tokens(&self) -> Vec<f64> {
        let hits = self.all_hits();
        self.of_candidates(0.0, |slot| {
            let (queued, prompt) = (self.queued_tokens[slot], self.prompt_tokens as f64);
            let p = p_tokens(queued, prompt, hits[slot] as f64, self.floor[slot]);
            p * self.factor_of(slot) + self.network_of(slot)
        })
    }

    pub fn p_tokens(&self) -> Vec<f64> {
        let mut p_tokens = self.p_linear_tokens();
        smooth(&mut p_tokens, self.log_above_tokens);
        p_tokens
    }

    pub fn network_tokens(&self) -> Vec<f64> {
        self.of_candidates(0.0, |slot| self.network_of(slot))
    }

    pub fn expert_factor(&self) -> Vec<f64> {
        self.of_candidates(0.0, |slot| self.factor_of(slot))
    }

    fn factor_of(&self, slot: usize) -> f64 {
        self.expert_factor.get(slot).copied().unwrap_or(1.0)
    }

    fn network_of(&self, slot: usize) -> f64 {
        self.network_tokens.get(slot).copied().unwrap_or(0.0)
    }

    pub fn weighted_batch(&self) -> Vec<f64> {
        self.of_candidates(0.0, |slot| self.weight_of(slot))
    }

    fn weight_of(&self, slot: usize) -> f64 {
        weighted(self.present_milli[slot], self.batch as f64)
    }

    pub fn batch(&self) -> Vec<i64> {
        self.of_candidates(0, |slot| self.present[slot] as i64 + self.batch)
    }

    pub fn score(&self) -> Vec<f64> {
        match &self.scoring {
            Scoring::Given(scores) => scores.clone(),
            Scoring::LeastRequest => self.of_candidates(f64::INFINITY, |slot| self.weight_of(slot)),
            Scoring::Product => {
                let p_tokens = self.p_tokens();
                let mut score = self.of_candidates(f64::INFINITY, |slot| p_tokens[slot] * self.weight_of(slot));
                let left_out = self.left_out.iter().flat_map(|left_out| &left_out.slots);
                left_out.for_each(|&slot| score[slot as usize] = f64::INFINITY);
                score
            }
        }
    }
}

/// P of a slot. All are whole numbers far below 2^53, so the order of the sum does not matter.
#[inline(always)]
pub fn p_tokens(queued: f64, prompt: f64, hit: f64, floor: f64) -> f64 {
    let p = queued + (prompt - hit);
    if p > floor { p } else { floor }
}
