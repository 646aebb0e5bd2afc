//! The terms of a decision for every slot: what a placement shows. The decision itself keeps no such arrays; they are
//! worked out when they are asked for, from what it looked at.

use std::sync::Arc;

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
    pub batch: i64,
    /// The least P of each slot: a block.
    pub floor: Arc<Vec<f64>>,
    pub scoring: Scoring,
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

    pub fn p_tokens(&self) -> Vec<f64> {
        let hits = self.all_hits();
        self.of_candidates(0.0, |slot| {
            p_tokens(self.queued_tokens[slot], self.prompt_tokens as f64, hits[slot] as f64, self.floor[slot])
        })
    }

    pub fn batch(&self) -> Vec<i64> {
        self.of_candidates(0, |slot| self.present[slot] as i64 + self.batch)
    }

    pub fn score(&self) -> Vec<f64> {
        let batch = |slot: usize| self.present[slot] + self.batch as f64;
        match &self.scoring {
            Scoring::Given(scores) => scores.clone(),
            Scoring::LeastRequest => self.of_candidates(f64::INFINITY, batch),
            Scoring::Product => {
                let p_tokens = self.p_tokens();
                self.of_candidates(f64::INFINITY, |slot| p_tokens[slot] * batch(slot))
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
