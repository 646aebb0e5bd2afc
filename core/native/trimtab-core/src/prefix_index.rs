//! The prefix index: which slots hold which chunks, and how many tokens each has cached up to there.
//!
//! One table for all slots: 64-byte buckets of four (hash, set of slots, tokens), spread over shards so that growing
//! stalls for one shard's size only. A shard grows by a quarter, which keeps the load between 0.45 and 0.56; buckets are
//! taken by multiplication, in the order of the hashes, so that growing is one pass over memory.
//! Tokens are kept once per chunk; a slot that differs (another block size or tokenisation, or a count beyond 24 bits) is
//! an exception beside it.
//! `walk` is exact: a slot's hit ends at the first chunk that it does not hold, never later.

use crate::endpoint_sets::{EMPTY, EndpointSets, FoldMap};
use crate::zeroed::{Zeroable, Zeroed};

const SHARD_BITS: u32 = 4;
const SHARDS: usize = 1 << SHARD_BITS;
const SLOTS_PER_BUCKET: usize = 4;
const TOKENS_MASK: u32 = 0x00FF_FFFF;
const LOAD_MAX_PERCENT: usize = 56;
const PREFETCH_AHEAD: usize = 16;
const BUCKETS_MIN: usize = 16;

/// Entry i: `keys[i]` is held by the set `sets[i]` (0: the entry is free) with `tokens[i] & TOKENS_MASK` tokens.
/// The high byte of `tokens[0]` counts the entries that hashed here and went further (255: for ever).
#[repr(C, align(64))]
#[derive(Clone, Copy, Default)]
struct Bucket {
    keys: [u64; SLOTS_PER_BUCKET],
    sets: [u32; SLOTS_PER_BUCKET],
    tokens: [u32; SLOTS_PER_BUCKET],
}

// SAFETY: arrays of integers.
unsafe impl Zeroable for Bucket {}

impl Bucket {
    /// Without branches: which entry it is cannot be foreseen, and a wrong guess costs more than four comparisons.
    #[inline(always)]
    fn find(&self, key: u64) -> Option<usize> {
        let mut found = 0u32;
        for i in 0..SLOTS_PER_BUCKET {
            found |= u32::from((self.keys[i] == key) & (self.sets[i] != EMPTY)) << i;
        }
        if found == 0 { None } else { Some(found.trailing_zeros() as usize & (SLOTS_PER_BUCKET - 1)) }
    }
    #[inline(always)]
    fn overflow(&self) -> u32 {
        self.tokens[0] >> 24
    }
    fn overflow_add(&mut self, change: i32) {
        let count = self.overflow();
        if count != 255 {
            self.tokens[0] = (self.tokens[0] & TOKENS_MASK) | ((count as i32 + change) as u32 * (1 << 24));
        }
    }
    #[inline(always)]
    fn set_tokens(&mut self, i: usize, tokens: u32) {
        self.tokens[i] = (self.tokens[i] & !TOKENS_MASK) | tokens.min(TOKENS_MASK);
    }
}

#[derive(Default)]
struct Shard {
    buckets: Zeroed<Bucket>,
    used: usize,
}

impl Shard {
    #[inline(always)]
    fn home(&self, key: u64) -> usize {
        (((key << SHARD_BITS) as u128 * self.buckets.len() as u128) >> 64) as usize
    }

    /// The bucket behind, around the end.
    #[inline(always)]
    fn behind(&self, at: usize) -> usize {
        if at + 1 == self.buckets.len() { 0 } else { at + 1 }
    }

    #[inline(always)]
    fn find(&self, key: u64) -> Option<(usize, usize)> {
        if self.buckets.is_empty() {
            return None;
        }
        let mut at = self.home(key);
        loop {
            let bucket = &self.buckets[at];
            if let Some(i) = bucket.find(key) {
                return Some((at, i));
            }
            if bucket.overflow() == 0 {
                return None;
            }
            at = self.behind(at);
        }
    }

    /// A place for `key`, which is not in the table; the caller fills it.
    fn vacancy(&mut self, key: u64) -> (usize, usize) {
        if (self.used + 1) * 100 > self.buckets.len() * SLOTS_PER_BUCKET * LOAD_MAX_PERCENT {
            self.grow();
        }
        self.used += 1;
        let mut at = self.home(key);
        loop {
            if let Some(i) = self.buckets[at].sets.iter().position(|&set| set == EMPTY) {
                return (at, i);
            }
            self.buckets[at].overflow_add(1);
            at = self.behind(at);
        }
    }

    fn free(&mut self, key: u64, at: usize, i: usize) {
        self.used -= 1;
        self.buckets[at].sets[i] = EMPTY;
        self.buckets[at].set_tokens(i, 0);
        let mut passed = self.home(key);
        while passed != at {
            self.buckets[passed].overflow_add(-1);
            passed = self.behind(passed);
        }
    }

    #[cold]
    fn grow(&mut self) {
        let larger = (self.buckets.len() * 5 / 4).max(BUCKETS_MIN);
        let old = std::mem::replace(&mut self.buckets, Zeroed::new(larger));
        self.used = 0;
        for bucket in old.iter() {
            for i in 0..SLOTS_PER_BUCKET {
                if bucket.sets[i] != EMPTY {
                    let (at, j) = self.vacancy(bucket.keys[i]);
                    let place = &mut self.buckets[at];
                    place.keys[j] = bucket.keys[i];
                    place.sets[j] = bucket.sets[i];
                    place.set_tokens(j, bucket.tokens[i] & TOKENS_MASK);
                }
            }
        }
    }
}

pub struct PrefixIndex {
    shards: Vec<Shard>,
    sets: EndpointSets,
    /// (chunk, slot) -> tokens, where they differ from the chunk's own.
    exceptions: FoldMap<(u64, u32), u32>,
    /// Chunks of each slot.
    held: Vec<u64>,
    pair_count: u64,
}

/// What a walk found for each slot: tokens and chunks of the longest held prefix.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Hit {
    pub tokens: u32,
    pub chunks: u32,
}

impl Default for PrefixIndex {
    fn default() -> Self {
        Self::new()
    }
}

impl PrefixIndex {
    pub fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
            sets: EndpointSets::new(),
            exceptions: FoldMap::default(),
            held: Vec::new(),
            pair_count: 0,
        }
    }

    #[inline(always)]
    fn shard_of(key: u64) -> usize {
        (key >> (64 - SHARD_BITS)) as usize
    }

    /// Sets the tokens of `key` on `slot`, which holds it from now on.
    pub fn add(&mut self, slot: u32, key: u64, tokens: u32) {
        if self.held.len() <= slot as usize {
            self.held.resize(slot as usize + 1, 0);
        }
        let shard = &mut self.shards[Self::shard_of(key)];
        match shard.find(key) {
            None => {
                let (at, i) = shard.vacancy(key);
                let empty = self.sets.adopt_empty();
                let set = self.sets.toggle(empty, slot);
                let bucket = &mut shard.buckets[at];
                bucket.keys[i] = key;
                bucket.sets[i] = set;
                bucket.set_tokens(i, tokens);
                self.held[slot as usize] += 1;
                self.pair_count += 1;
                if tokens > TOKENS_MASK {
                    self.exceptions.insert((key, slot), tokens);
                }
            }
            Some((at, i)) => {
                let bucket = &mut shard.buckets[at];
                let set = bucket.sets[i];
                let held = self.sets.contains(set, slot);
                if !held {
                    bucket.sets[i] = self.sets.toggle(set, slot);
                    self.held[slot as usize] += 1;
                    self.pair_count += 1;
                } else if self.sets.len(set) == 1 {
                    bucket.set_tokens(i, tokens);
                }
                if bucket.tokens[i] & TOKENS_MASK != tokens {
                    self.exceptions.insert((key, slot), tokens);
                } else if held && !self.exceptions.is_empty() {
                    self.exceptions.remove(&(key, slot));
                }
            }
        }
    }

    /// `add`, but where `slot` holds `key` already the smaller count stays, and that it did is answered.
    pub fn add_smaller(&mut self, slot: u32, key: u64, tokens: u32) -> bool {
        match self.tokens_of(slot, key) {
            Some(standing) => {
                if tokens < standing {
                    self.add(slot, key, tokens);
                }
                true
            }
            None => {
                self.add(slot, key, tokens);
                false
            }
        }
    }

    /// Fetches the place of `keys[k]` ahead of its use, if there is such a key.
    #[inline(always)]
    pub fn prefetch(&self, keys: &[u64], k: usize) {
        self.prefetch_at(keys, k);
    }

    /// `slot` no longer holds `key`; nothing happens if it did not.
    pub fn remove(&mut self, slot: u32, key: u64) {
        let shard = &mut self.shards[Self::shard_of(key)];
        let Some((at, i)) = shard.find(key) else { return };
        let set = shard.buckets[at].sets[i];
        if !self.sets.contains(set, slot) {
            return;
        }
        self.held[slot as usize] -= 1;
        self.pair_count -= 1;
        if !self.exceptions.is_empty() {
            self.exceptions.remove(&(key, slot));
        }
        let rest = self.sets.toggle(set, slot);
        shard.buckets[at].sets[i] = rest;
        if rest == EMPTY {
            self.sets.drop_empty();
            shard.free(key, at, i);
        }
    }

    /// Removals first, then additions: an entry that is in both is held afterwards.
    pub fn apply(&mut self, slot: u32, added: &[u64], tokens: &[u32], removed: &[u64]) {
        for (k, &key) in removed.iter().enumerate() {
            self.prefetch_at(removed, k + PREFETCH_AHEAD);
            self.remove(slot, key);
        }
        for (k, (&key, &count)) in added.iter().zip(tokens).enumerate() {
            self.prefetch_at(added, k + PREFETCH_AHEAD);
            self.add(slot, key, count);
        }
    }

    /// Everything of `slot` goes. One pass over the whole table.
    pub fn clear(&mut self, slot: u32) {
        if self.held(slot) == 0 {
            return;
        }
        // Sets that come up during the pass are without the slot; their numbers may be those of earlier ones, though.
        let had = self.sets.with(slot);
        for shard in &mut self.shards {
            for at in 0..shard.buckets.len() {
                for i in 0..SLOTS_PER_BUCKET {
                    let (key, set) = (shard.buckets[at].keys[i], shard.buckets[at].sets[i]);
                    if !had.get(set as usize).is_some_and(|&had| had) || !self.sets.contains(set, slot) {
                        continue;
                    }
                    let rest = self.sets.toggle(set, slot);
                    shard.buckets[at].sets[i] = rest;
                    if rest == EMPTY {
                        self.sets.drop_empty();
                        shard.free(key, at, i);
                    }
                }
            }
        }
        self.exceptions.retain(|&(_, of), _| of != slot);
        self.pair_count -= self.held(slot);
        self.held[slot as usize] = 0;
    }

    /// All (hash, tokens) of `slot`, ordered by hash.
    pub fn export(&self, slot: u32) -> Vec<(u64, u32)> {
        let mut out = Vec::with_capacity(self.held(slot) as usize);
        if out.capacity() == 0 {
            return out;
        }
        let has = self.sets.with(slot);
        for bucket in self.shards.iter().flat_map(|shard| shard.buckets.iter()) {
            for i in 0..SLOTS_PER_BUCKET {
                if has[bucket.sets[i] as usize] {
                    out.push((bucket.keys[i], self.tokens_on(bucket.keys[i], slot, bucket.tokens[i] & TOKENS_MASK)));
                }
            }
        }
        out.sort_unstable();
        out
    }

    /// Tokens up to the end of `key` on `slot`; none where the slot does not hold it.
    #[inline]
    pub fn tokens_of(&self, slot: u32, key: u64) -> Option<u32> {
        let (set, tokens) = self.find(key);
        if set != EMPTY && self.sets.contains(set, slot) { Some(self.tokens_on(key, slot, tokens)) } else { None }
    }

    /// The number of the set that holds `key` (the empty one if nobody does), and the chunk's own token count.
    #[inline(always)]
    fn find(&self, key: u64) -> (u32, u32) {
        let shard = &self.shards[Self::shard_of(key)];
        if shard.buckets.is_empty() {
            return (EMPTY, 0);
        }
        let mut at = shard.home(key);
        loop {
            let bucket = &shard.buckets[at];
            if let Some(i) = bucket.find(key) {
                return (bucket.sets[i], bucket.tokens[i] & TOKENS_MASK);
            }
            if bucket.overflow() == 0 {
                return (EMPTY, 0);
            }
            at = shard.behind(at);
        }
    }

    #[inline]
    fn tokens_on(&self, key: u64, slot: u32, of_chunk: u32) -> u32 {
        if self.exceptions.is_empty() { of_chunk } else { *self.exceptions.get(&(key, slot)).unwrap_or(&of_chunk) }
    }

    pub fn held(&self, slot: u32) -> u64 {
        self.held.get(slot as usize).copied().unwrap_or(0)
    }

    /// Distinct chunks.
    pub fn chunks(&self) -> usize {
        self.shards.iter().map(|shard| shard.used).sum()
    }

    /// (slot, chunk) pairs.
    pub fn pairs(&self) -> u64 {
        self.pair_count
    }

    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|s| s.buckets.len() * size_of::<Bucket>()).sum::<usize>()
            + self.sets.bytes()
            + self.exceptions.capacity() * 24
    }

    #[inline(always)]
    fn prefetch_at(&self, keys: &[u64], k: usize) {
        #[cfg(target_arch = "x86_64")]
        if let Some(&key) = keys.get(k) {
            let shard = &self.shards[Self::shard_of(key)];
            if !shard.buckets.is_empty() {
                // SAFETY: `home` is within the buckets, and a prefetch reads nothing.
                unsafe {
                    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                    _mm_prefetch(shard.buckets.as_ptr().add(shard.home(key)).cast::<i8>(), _MM_HINT_T0);
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (keys, k);
    }

    /// The longest prefix of `chain` that each slot of `alive` holds, into `hits` (by slot; others stay as they are).
    ///
    /// `alive` is a bitmap of slots; it is used up. Cost: one look-up per chunk until nobody is left, plus work at each
    /// depth where the set of holders changes.
    pub fn walk(&self, chain: &[u64], alive: &mut [u64], hits: &mut [Hit]) {
        let mut previous_set = EMPTY;
        let mut last = (0u64, 0u32);
        for k in 0..PREFETCH_AHEAD.min(chain.len()) {
            self.prefetch_at(chain, k);
        }
        let mut depth = 0;
        for (k, &key) in chain.iter().enumerate() {
            self.prefetch_at(chain, k + PREFETCH_AHEAD);
            let (set, tokens) = self.find(key);
            if set != previous_set || set == EMPTY {
                let words = self.sets.words(set);
                let mut left = 0;
                for (w, live) in alive.iter_mut().enumerate() {
                    let holders = words.get(w).copied().unwrap_or(0);
                    let gone = *live & !holders;
                    *live &= holders;
                    left |= *live;
                    self.settle(gone, w, k, last, hits);
                }
                if left == 0 {
                    return;
                }
                previous_set = set;
            }
            last = (key, tokens);
            depth = k + 1;
        }
        for (w, live) in alive.iter_mut().enumerate() {
            self.settle(std::mem::take(live), w, depth, last, hits);
        }
    }

    /// The deepest chunk of `chain` beyond `shallowest` chunks that each slot of `wanted` holds: for tables of samples,
    /// where a chunk implies all before it. Found slots go from `wanted`; hits are written for them alone.
    pub fn deepest(&self, chain: &[u64], shallowest: usize, wanted: &mut [u64], mut found: impl FnMut(u32, Hit)) {
        if self.pairs() == 0 || wanted.iter().all(|&w| w == 0) {
            return;
        }
        for k in (shallowest..chain.len()).rev().take(PREFETCH_AHEAD) {
            self.prefetch_at(chain, k);
        }
        for k in (shallowest..chain.len()).rev() {
            if k >= shallowest + PREFETCH_AHEAD {
                self.prefetch_at(chain, k - PREFETCH_AHEAD);
            }
            let (set, tokens) = self.find(chain[k]);
            if set == EMPTY {
                continue;
            }
            let mut left = 0;
            for (w, live) in wanted.iter_mut().enumerate() {
                let mut here = *live & self.sets.words(set).get(w).copied().unwrap_or(0);
                *live ^= here;
                left |= *live;
                while here != 0 {
                    let slot = w as u32 * 64 + here.trailing_zeros();
                    here &= here - 1;
                    found(slot, Hit { tokens: self.tokens_on(chain[k], slot, tokens), chunks: k as u32 + 1 });
                }
            }
            if left == 0 {
                return;
            }
        }
    }

    /// What is wrong with the state, if anything. Costs as much as the whole table: for tests.
    pub fn check(&self) -> Result<(), String> {
        let mut held = vec![0u64; self.held.len()];
        let mut references: FoldMap<u32, u64> = FoldMap::default();
        for (number, shard) in self.shards.iter().enumerate() {
            let mut used = 0;
            for (at, bucket) in shard.buckets.iter().enumerate() {
                for i in (0..SLOTS_PER_BUCKET).filter(|&i| bucket.sets[i] != EMPTY) {
                    used += 1;
                    if Self::shard_of(bucket.keys[i]) != number || shard.find(bucket.keys[i]) != Some((at, i)) {
                        return Err(format!("chunk {}: not where it is looked for", bucket.keys[i]));
                    }
                    *references.entry(bucket.sets[i]).or_insert(0) += 1;
                    for (w, &word) in self.sets.words(bucket.sets[i]).iter().enumerate() {
                        for bit in (0..64).filter(|bit| word >> bit & 1 == 1) {
                            held[w * 64 + bit] += 1;
                        }
                    }
                }
            }
            if used != shard.used {
                return Err(format!("shard {number}: entries are miscounted"));
            }
        }
        if held != self.held || held.iter().sum::<u64>() != self.pair_count {
            return Err("pairs are miscounted".into());
        }
        if references.len() + 1 != self.sets.count() || references.iter().any(|(&s, &n)| self.sets.references(s) != n) {
            return Err("references to sets are miscounted".into());
        }
        match self.exceptions.keys().find(|&&(key, slot)| self.tokens_of(slot, key).is_none()) {
            Some((key, slot)) => Err(format!("chunk {key}: odd count of slot {slot}, not a holder")),
            None => Ok(()),
        }
    }

    /// The slots of word `w` in `gone` hold `chunks` chunks, the last of which is `last`.
    #[inline]
    fn settle(&self, mut gone: u64, w: usize, chunks: usize, last: (u64, u32), hits: &mut [Hit]) {
        while gone != 0 {
            let slot = w as u32 * 64 + gone.trailing_zeros();
            gone &= gone - 1;
            let tokens = if chunks == 0 { 0 } else { self.tokens_on(last.0, slot, last.1) };
            hits[slot as usize] = Hit { tokens, chunks: chunks as u32 };
        }
    }
}
