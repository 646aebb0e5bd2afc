//! How good each slot is for a request, and which of the best is taken.
//!
//! The least score wins; ties go to the fewest requests, then to a draw. Never to the lowest number, which would herd.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    Product,
    RoundRobin,
    LeastRequest,
}

impl Policy {
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "product" => Some(Self::Product),
            "round_robin" => Some(Self::RoundRobin),
            "least_request" => Some(Self::LeastRequest),
            _ => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Product => "product",
            Self::RoundRobin => "round_robin",
            Self::LeastRequest => "least_request",
        }
    }
}

/// Every candidate once per round.
pub struct Rounds {
    round: u64,
    last_round: Vec<u64>,
}

impl Default for Rounds {
    fn default() -> Self {
        Self { round: 1, last_round: Vec::new() }
    }
}

impl Rounds {
    pub fn score(&self, slot: usize) -> f64 {
        if self.last_round[slot] >= self.round { 1.0 } else { 0.0 }
    }

    pub fn picked(&mut self, slot: usize) {
        if self.last_round[slot] >= self.round {
            self.round += 1;
        }
        self.last_round[slot] = self.round;
    }

    pub fn slot_reset(&mut self, slot: usize) {
        if slot == self.last_round.len() {
            self.last_round.push(0);
        }
        self.last_round[slot] = 0;
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    Least,
    Fewest,
    Drawn,
}

impl How {
    pub fn words(self) -> &'static str {
        match self {
            Self::Least => "least score",
            Self::Fewest => "fewest requests among equals",
            Self::Drawn => "drawn among equals",
        }
    }
}

/// A seeded source of draws (splitmix64).
pub struct TieBreak(pub u64);

impl TieBreak {
    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// The `count` best slots, best first, and how the first was found. Infinite scores are no candidates.
    pub fn best(&mut self, score: &[f64], batch: &[i64], count: usize) -> (Vec<u32>, Option<How>) {
        let mut ranked: Vec<u32> = Vec::with_capacity(count);
        let mut reason = None;
        while ranked.len() < count {
            let mut least = f64::INFINITY;
            for (slot, &s) in score.iter().enumerate() {
                if s < least && !ranked.contains(&(slot as u32)) {
                    least = s;
                }
            }
            if least == f64::INFINITY {
                break;
            }
            let equals = |slot: usize| score[slot] == least && !ranked.contains(&(slot as u32));
            let mut number = 0;
            let mut fewest = i64::MAX;
            let mut with_fewest = 0u64;
            for slot in (0..score.len()).filter(|&slot| equals(slot)) {
                number += 1;
                match batch[slot].cmp(&fewest) {
                    std::cmp::Ordering::Less => (fewest, with_fewest) = (batch[slot], 1),
                    std::cmp::Ordering::Equal => with_fewest += 1,
                    std::cmp::Ordering::Greater => {}
                }
            }
            let mut how = if number > 1 { How::Fewest } else { How::Least };
            let mut nth = 0;
            if with_fewest > 1 {
                nth = self.draw() % with_fewest;
                how = How::Drawn;
            }
            let chosen = (0..score.len()).filter(|&slot| equals(slot) && batch[slot] == fewest).nth(nth as usize);
            let Some(slot) = chosen else { break };
            ranked.push(slot as u32);
            reason = reason.or(Some(how));
        }
        (ranked, reason)
    }
}
