//! Speculation: the chunks of requests that were just routed, before the engine's events tell of them.
//!
//! A claim belongs to one reservation and goes with it. Claims on the same chunk of the same slot are counted; the
//! smallest token count claimed stands until the last one goes.

use std::collections::{BTreeMap, VecDeque};

use crate::endpoint_sets::FoldMap;
use crate::prefix_index::PrefixIndex;
use crate::reservation::Key;

pub struct Claim {
    pub slot: u32,
    pub chunks: Vec<u64>,
    pub tokens: Vec<u32>,
    order: u64,
    expires_s: Option<f64>,
}

pub struct Speculation {
    pub index: PrefixIndex,
    chunks_max: usize,
    chunk_count: usize,
    claims: FoldMap<Key, Claim>,
    /// Claims by age, the oldest first: the ones to go when there are too many.
    by_age: BTreeMap<u64, Key>,
    next_order: u64,
    /// (chunk, slot) -> claims on it beyond the first.
    more: FoldMap<(u64, u32), u32>,
    expiries: VecDeque<(f64, Key)>,
}

impl Speculation {
    pub fn new(chunks_max: usize) -> Self {
        Self {
            index: PrefixIndex::new(),
            chunks_max,
            chunk_count: 0,
            claims: FoldMap::default(),
            by_age: BTreeMap::new(),
            next_order: 0,
            more: FoldMap::default(),
            expiries: VecDeque::new(),
        }
    }

    pub fn claim(&mut self, key: Key, slot: u32, chunks: Vec<u64>, tokens: Vec<u32>) {
        if chunks.is_empty() || self.claims.contains_key(&key) {
            return;
        }
        self.acquire(slot, &chunks, &tokens);
        let order = self.next_order;
        self.next_order += 1;
        self.by_age.insert(order, key);
        self.claims.insert(key, Claim { slot, chunks, tokens, order, expires_s: None });
        while self.chunk_count > self.chunks_max {
            let Some((_, &oldest)) = self.by_age.first_key_value() else { break };
            self.end(oldest);
        }
    }

    pub fn claim_of(&self, key: Key) -> Option<&Claim> {
        self.claims.get(&key)
    }

    pub fn move_to(&mut self, key: Key, slot: u32) {
        let Some(mut claim) = self.claims.remove(&key) else { return };
        if claim.slot != slot {
            self.release(claim.slot, &claim.chunks);
            claim.slot = slot;
            self.acquire(slot, &claim.chunks, &claim.tokens);
        }
        self.claims.insert(key, claim);
    }

    pub fn end(&mut self, key: Key) {
        if let Some(claim) = self.claims.remove(&key) {
            self.by_age.remove(&claim.order);
            self.release(claim.slot, &claim.chunks);
        }
    }

    /// The claim goes when `expire` is told that time; times do not fall from one call to the next.
    pub fn expire_at(&mut self, key: Key, expires_s: f64) {
        if let Some(claim) = self.claims.get_mut(&key)
            && claim.expires_s.is_none()
        {
            claim.expires_s = Some(expires_s);
            self.expiries.push_back((expires_s, key));
        }
    }

    pub fn expire(&mut self, now_s: f64) {
        while let Some(&(expires_s, key)) = self.expiries.front() {
            if expires_s > now_s {
                return;
            }
            self.expiries.pop_front();
            if self.claims.get(&key).is_some_and(|claim| claim.expires_s.is_some_and(|at| at <= now_s)) {
                self.end(key);
            }
        }
    }

    pub fn drop_slot(&mut self, slot: u32) {
        let keys: Vec<Key> = self.claims.iter().filter(|(_, c)| c.slot == slot).map(|(&k, _)| k).collect();
        keys.into_iter().for_each(|key| self.end(key));
    }

    fn acquire(&mut self, slot: u32, chunks: &[u64], tokens: &[u32]) {
        self.chunk_count += chunks.len();
        for (k, (&chunk, &count)) in chunks.iter().zip(tokens).enumerate() {
            self.index.prefetch(chunks, k + 8);
            if self.index.add_smaller(slot, chunk, count) {
                *self.more.entry((chunk, slot)).or_insert(0) += 1;
            }
        }
    }

    fn release(&mut self, slot: u32, chunks: &[u64]) {
        self.chunk_count -= chunks.len();
        for (k, &chunk) in chunks.iter().enumerate() {
            self.index.prefetch(chunks, k + 8);
            if !self.more.is_empty()
                && let Some(others) = self.more.get_mut(&(chunk, slot))
            {
                *others -= 1;
                if *others == 0 {
                    self.more.remove(&(chunk, slot));
                }
                continue;
            }
            self.index.remove(slot, chunk);
        }
    }

    /// Raises nothing: says what is wrong, for tests.
    pub fn check(&self) -> Result<(), String> {
        let mut counts: BTreeMap<(u64, u32), u32> = BTreeMap::new();
        for claim in self.claims.values() {
            for &chunk in &claim.chunks {
                *counts.entry((chunk, claim.slot)).or_insert(0) += 1;
            }
        }
        if counts.values().map(|&n| n as usize).sum::<usize>() != self.chunk_count {
            return Err("claimed chunks are miscounted".into());
        }
        if counts.len() as u64 != self.index.pairs() {
            return Err("the index holds other pairs than are claimed".into());
        }
        for (&(chunk, slot), &n) in &counts {
            if self.index.tokens_of(slot, chunk).is_none() {
                return Err(format!("chunk {chunk} of slot {slot} is claimed, not held"));
            }
            if self.more.get(&(chunk, slot)).copied().unwrap_or(0) != n - 1 {
                return Err("claims on one chunk are miscounted".into());
            }
        }
        if self.claims.len() != self.by_age.len() {
            return Err("claims and their ages differ".into());
        }
        Ok(())
    }
}
