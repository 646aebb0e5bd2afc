//! How many of the last arrivals begin with which prefix; see `trimtab_core.hotspot_arrivals`.

use std::collections::VecDeque;

use crate::endpoint_sets::FoldMap;

pub const STEP_CHUNKS: usize = 16;
const PLACES_MAX: usize = 128;
const ARRIVALS_MAX: usize = 16_384;
const PREFIXES_MAX: usize = 32_768;
/// No prefix: the beginning of all.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Prefix {
    chunk: u64,
    parent: u32,
    count: u32,
    /// A prompt left it, and none that goes on from here came yet.
    is_mark: bool,
}

/// The window. Prefixes are numbered; numbers of those that went are given out again.
#[derive(Default)]
pub struct Arrivals {
    prefixes: Vec<Prefix>,
    free: Vec<u32>,
    number_of: FoldMap<u64, u32>,
    /// Each arrival with the deepest prefix that counts it.
    window: VecDeque<(f64, u32)>,
    /// The prefixes of the last arrival, rising in depth.
    path: Vec<u32>,
}

impl Arrivals {
    pub fn len(&self) -> usize {
        self.window.len()
    }

    pub fn is_empty(&self) -> bool {
        self.window.is_empty()
    }

    pub fn prefixes(&self) -> usize {
        self.number_of.len()
    }

    /// Arrivals that begin with the prefix that ends in this chunk.
    pub fn count(&self, chunk: u64) -> usize {
        self.number_of.get(&chunk).map_or(0, |&number| self.prefixes[number as usize].count as usize)
    }

    /// One more arrival.
    pub fn add(&mut self, chain: &[u64], now_s: f64) {
        let places = || chain.iter().skip(STEP_CHUNKS - 1).step_by(STEP_CHUNKS).take(PLACES_MAX).copied();
        let place_count = (chain.len() / STEP_CHUNKS).min(PLACES_MAX);
        self.path.clear();
        let mut here = NONE;
        for chunk in places() {
            let Some(&there) = self.number_of.get(&chunk) else { break };
            let prefix = &mut self.prefixes[there as usize];
            if prefix.parent != here {
                break;
            }
            prefix.count += 1;
            self.path.push(there);
            here = there;
        }
        let known = self.path.len();
        let mut new = place_count - known;
        let is_mark = here == NONE || !self.prefixes[here as usize].is_mark;
        if is_mark {
            new = new.min(1);
        } else if new > 0 {
            self.prefixes[here as usize].is_mark = false;
        }
        while !self.window.is_empty()
            && (self.window.len() >= ARRIVALS_MAX || self.number_of.len() + new > PREFIXES_MAX)
        {
            self.forget_oldest();
        }
        for chunk in places().skip(known).take(new) {
            if self.number_of.contains_key(&chunk) {
                break; // a hash that two prefixes share: no sense can be made of it
            }
            here = self.insert(Prefix { chunk, parent: here, count: 1, is_mark });
            self.path.push(here);
        }
        self.window.push_back((now_s, here));
    }

    /// The deepest prefix of the last arrival that enough arrivals begin with, or deeper where those part: its last
    /// chunk, its length in chunks, and how many begin with it. They are never more with depth, so whether they are
    /// enough is asked of a few only.
    pub fn deepest(&self, is_enough: impl Fn(usize) -> bool, parting_share: usize) -> Option<(u64, usize, usize)> {
        let count = |number: &u32| self.prefixes[*number as usize].count as usize;
        let depth = self.path.partition_point(|number| is_enough(count(number)));
        let enough = count(self.path.get(depth.checked_sub(1)?)?);
        let depth = self.path.partition_point(|number| enough.saturating_sub(count(number)) * parting_share < enough);
        let number = self.path.get(depth.checked_sub(1)?)?;
        Some((self.prefixes[*number as usize].chunk, depth * STEP_CHUNKS, count(number)))
    }

    pub fn forget_before(&mut self, time_s: f64) {
        while self.window.front().is_some_and(|&(at_s, _)| at_s < time_s) {
            self.forget_oldest();
        }
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }

    fn insert(&mut self, prefix: Prefix) -> u32 {
        let number = self.free.pop().unwrap_or(self.prefixes.len() as u32);
        self.number_of.insert(prefix.chunk, number);
        match self.prefixes.get_mut(number as usize) {
            Some(place) => *place = prefix,
            None => self.prefixes.push(prefix),
        }
        number
    }

    fn forget_oldest(&mut self) {
        let Some((_, mut number)) = self.window.pop_front() else { return };
        while number != NONE {
            let prefix = &mut self.prefixes[number as usize];
            prefix.count -= 1;
            if prefix.count == 0 {
                self.number_of.remove(&prefix.chunk);
                self.free.push(number);
            }
            number = prefix.parent;
        }
    }

    /// What is wrong with the counts, if anything.
    pub fn check(&self) -> Result<(), String> {
        let mut counts: FoldMap<u64, u32> = FoldMap::default();
        for &(_, deepest) in &self.window {
            let mut number = deepest;
            while number != NONE {
                let prefix = self.prefixes[number as usize];
                *counts.entry(prefix.chunk).or_default() += 1;
                number = prefix.parent;
            }
        }
        let is_same = counts.len() == self.number_of.len()
            && self.number_of.iter().all(|(chunk, &number)| {
                counts.get(chunk) == Some(&self.prefixes[number as usize].count)
                    && self.prefixes[number as usize].chunk == *chunk
            });
        if !is_same || self.free.len() + self.number_of.len() != self.prefixes.len() {
            return Err("arrivals are miscounted".into());
        }
        if self.window.len() > ARRIVALS_MAX || self.number_of.len() > PREFIXES_MAX {
            return Err("the window is too long".into());
        }
        Ok(())
    }
}
