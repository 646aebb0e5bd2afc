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
        let mut left = score.to_vec();
        let mut ranked: Vec<u32> = Vec::with_capacity(count);
        let mut reason = None;
        while ranked.len() < count {
            let least = least(&left);
            if least == f64::INFINITY {
                break;
            }
            let equals = || left.iter().zip(batch).enumerate().filter(|(_, (of, _))| **of == least);
            let (mut number, mut fewest, mut with_fewest) = (0, i64::MAX, 0u64);
            for (_, (_, &requests)) in equals() {
                number += 1;
                match requests.cmp(&fewest) {
                    std::cmp::Ordering::Less => (fewest, with_fewest) = (requests, 1),
                    std::cmp::Ordering::Equal => with_fewest += 1,
                    std::cmp::Ordering::Greater => {}
                }
            }
            let nth = if with_fewest > 1 { self.draw() % with_fewest } else { 0 };
            let chosen = equals().filter(|(_, (_, requests))| **requests == fewest).nth(nth as usize);
            let Some((slot, _)) = chosen else { break };
            left[slot] = f64::INFINITY;
            ranked.push(slot as u32);
            reason = reason.or(Some(match (number, with_fewest) {
                (1, _) => How::Least,
                (_, 1) => How::Fewest,
                _ => How::Drawn,
            }));
        }
        (ranked, reason)
    }
}

/// The least of many, several at a time.
fn least(scores: &[f64]) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [f64::INFINITY; LANES];
    let (whole, rest) = scores.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, &score) in lanes.iter_mut().zip(chunk) {
            *lane = if score < *lane { score } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f64::INFINITY, |least, &score| if score < least { score } else { least })
}
