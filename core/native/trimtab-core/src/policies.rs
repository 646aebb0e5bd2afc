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
pub struct TieBreak {
    state: u64,
    /// The least score of each block of slots.
    minima: Vec<f64>,
    /// Slots with the least score and the fewest requests among them, rising.
    equals: Vec<u32>,
}

const BLOCK: usize = 32;

impl TieBreak {
    pub fn new(seed: u64) -> Self {
        Self { state: seed, minima: Vec::new(), equals: Vec::new() }
    }

    fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// The `count` best slots, best first, and how the first was found. Infinite scores are no candidates. `requests`
    /// are those before this one. The scores are used up.
    pub fn best(&mut self, score: &mut [f64], requests: &[f64], count: usize) -> (Vec<u32>, Option<How>) {
        let mut ranked: Vec<u32> = Vec::with_capacity(count);
        let mut reason = None;
        self.minima.clear();
        self.minima.extend(score.chunks(BLOCK).map(least));
        self.equals.clear();
        while ranked.len() < count {
            let mut number = self.equals.len();
            if self.equals.is_empty() {
                let least = least(&self.minima);
                if least == f64::INFINITY {
                    break;
                }
                number = self.gather(score, requests, least);
            }
            let with_fewest = self.equals.len() as u64;
            let nth = if with_fewest > 1 { self.draw() % with_fewest } else { 0 };
            let slot = self.equals.remove(nth as usize) as usize;
            score[slot] = f64::INFINITY;
            if self.equals.is_empty() {
                // Only then are the minima asked for again; those that were drawn before are in blocks of their own.
                let drawn = ranked.iter().map(|&slot| slot as usize).chain([slot]);
                for block in drawn.map(|slot| slot / BLOCK) {
                    let end = score.len().min((block + 1) * BLOCK);
                    self.minima[block] = least(&score[block * BLOCK..end]);
                }
            }
            ranked.push(slot as u32);
            reason = reason.or(Some(match (number, with_fewest) {
                (1, _) => How::Least,
                (_, 1) => How::Fewest,
                _ => How::Drawn,
            }));
        }
        (ranked, reason)
    }

    /// Fills `equals`; how many slots have the least score at all.
    fn gather(&mut self, score: &[f64], requests: &[f64], least: f64) -> usize {
        let (mut number, mut fewest) = (0, f64::INFINITY);
        let blocks = self.minima.iter().zip(score.chunks(BLOCK).zip(requests.chunks(BLOCK)));
        for (block, (_, (scores, requests))) in blocks.enumerate().filter(|(_, (minimum, _))| **minimum == least) {
            for (n, (_, &of_slot)) in scores.iter().zip(requests).enumerate().filter(|(_, (of, _))| **of == least) {
                number += 1;
                if of_slot < fewest {
                    fewest = of_slot;
                    self.equals.clear();
                }
                if of_slot == fewest {
                    self.equals.push((block * BLOCK + n) as u32);
                }
            }
        }
        number
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
