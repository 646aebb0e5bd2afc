//! The prefix index: which slots hold which chunks, and how many tokens each has cached up to there.
//!
//! One table for all slots: a chunk's entry names the set of slots that hold it. Tokens are kept once per chunk; a slot
//! that differs (another block size or tokenisation, or a count beyond 24 bits) is an exception beside it.
//! `walk` is exact: a slot's hit ends at the first chunk that it does not hold, never later.
//! No change costs more than its own chunks and a bounded piece of what is due, `clear` included: it takes the slot out
//! of the sets, and the entries that nobody is left for go one by one later.

use crate::bucket_table::{BLOCK, BucketTable, Entry, Found, PREFETCH_AHEAD, TOKENS_MASK};
use crate::endpoint_sets::{EMPTY, EndpointSets, FoldMap};

#[derive(Default)]
pub struct PrefixIndex {
    table: BucketTable,
    sets: EndpointSets,
    slots: Vec<OfSlot>,
    /// Exceptions of all slots.
    exception_count: usize,
    pair_count: u64,
}

#[derive(Default)]
struct OfSlot {
    /// Chunks that it holds.
    held: u64,
    /// Those of them whose tokens differ from the chunk's own.
    exceptions: FoldMap<u64, u32>,
}

/// What a walk found for each slot: tokens and chunks of the longest held prefix.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Hit {
    pub tokens: u32,
    pub chunks: u32,
}

impl PrefixIndex {
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the tokens of `key` on `slot`, which holds it from now on.
    #[inline]
    pub fn add(&mut self, slot: u32, key: u64, tokens: u32) {
        if self.slots.len() <= slot as usize {
            self.slots.resize_with(slot as usize + 1, OfSlot::default);
        }
        let Some(place) = self.table.find(key) else {
            let set = self.sets.toggle(EMPTY, slot);
            self.table.insert(Entry { key, set, tokens }, &mut self.sets);
            self.count_new(slot);
            if tokens > TOKENS_MASK {
                self.except(slot, key, tokens);
            }
            return;
        };
        let (set, mut of_chunk) = self.table.entry(place);
        let holders = self.sets.len(set);
        let is_held = self.sets.contains(set, slot);
        if holders == u32::from(is_held) {
            self.table.set_tokens(place, tokens);
            of_chunk = tokens.min(TOKENS_MASK);
        }
        if !is_held {
            let set = self.sets.toggle(set, slot);
            self.table.set(place, set);
            self.count_new(slot);
        }
        if of_chunk != tokens {
            self.except(slot, key, tokens);
        } else if is_held {
            self.make_even(slot, key);
        }
    }

    #[inline]
    fn count_new(&mut self, slot: u32) {
        self.slots[slot as usize].held += 1;
        self.pair_count += 1;
    }

    #[cold]
    fn except(&mut self, slot: u32, key: u64, tokens: u32) {
        self.exception_count += usize::from(self.slots[slot as usize].exceptions.insert(key, tokens).is_none());
    }

    #[inline]
    fn make_even(&mut self, slot: u32, key: u64) {
        if self.exception_count > 0 {
            self.exception_count -= usize::from(self.slots[slot as usize].exceptions.remove(&key).is_some());
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

    /// `slot` no longer holds `key`; nothing happens if it did not.
    #[inline]
    pub fn remove(&mut self, slot: u32, key: u64) {
        let Some(place) = self.table.find(key) else { return };
        let (set, _) = self.table.entry(place);
        if !self.sets.contains(set, slot) {
            return;
        }
        self.slots[slot as usize].held -= 1;
        self.pair_count -= 1;
        self.make_even(slot, key);
        let rest = self.sets.toggle(set, slot);
        if rest == EMPTY {
            self.table.remove(place);
        } else {
            self.table.set(place, rest);
        }
    }

    /// Removals first, then additions: an entry that is in both is held afterwards.
    pub fn apply(&mut self, slot: u32, added: &[u64], tokens: &[u32], removed: &[u64]) {
        (0..PREFETCH_AHEAD).for_each(|k| self.prefetch(removed, k));
        for (k, &key) in removed.iter().enumerate() {
            self.prefetch(removed, k + PREFETCH_AHEAD);
            self.remove(slot, key);
        }
        (0..PREFETCH_AHEAD).for_each(|k| self.prefetch(added, k));
        for (k, (&key, &count)) in added.iter().zip(tokens).enumerate() {
            self.prefetch(added, k + PREFETCH_AHEAD);
            self.add(slot, key, count);
        }
    }

    /// Everything of `slot` goes. One pass over the sets, not over the chunks.
    pub fn clear(&mut self, slot: u32) {
        if self.held(slot) == 0 {
            return;
        }
        self.sets.clear_slot(slot);
        let of_slot = std::mem::take(&mut self.slots[slot as usize]);
        self.exception_count -= of_slot.exceptions.len();
        self.pair_count -= of_slot.held;
    }

    /// Time for a piece of what is due.
    pub fn tidy(&mut self) {
        if self.sets.ghosts() > 0 {
            self.table.sweep(&mut self.sets);
        }
    }

    /// All (hash, tokens) of `slot`, ordered by hash. One pass over the whole table.
    pub fn export(&self, slot: u32) -> Vec<(u64, u32)> {
        let mut out = Vec::with_capacity(self.held(slot) as usize);
        if out.capacity() == 0 {
            return out;
        }
        let has = self.sets.with(slot);
        for Entry { key, set, tokens } in self.table.iter() {
            if has[set as usize] {
                out.push((key, self.tokens_on(key, slot, tokens)));
            }
        }
        out.sort_unstable();
        out
    }

    /// Tokens up to the end of `key` on `slot`; none where the slot does not hold it.
    #[inline]
    pub fn tokens_of(&self, slot: u32, key: u64) -> Option<u32> {
        let (set, tokens) = self.table.get(key);
        if self.sets.contains(set, slot) { Some(self.tokens_on(key, slot, tokens)) } else { None }
    }

    #[inline]
    fn tokens_on(&self, key: u64, slot: u32, of_chunk: u32) -> u32 {
        if self.exception_count == 0 {
            return of_chunk;
        }
        *self.slots[slot as usize].exceptions.get(&key).unwrap_or(&of_chunk)
    }

    pub fn held(&self, slot: u32) -> u64 {
        self.slots.get(slot as usize).map_or(0, |of_slot| of_slot.held)
    }

    /// Distinct chunks.
    pub fn chunks(&self) -> usize {
        (self.table.len() - self.sets.ghosts()) as usize
    }

    /// Places in use: distinct chunks, and those that nobody holds any more and that are still to be dropped.
    pub fn entries(&self) -> usize {
        self.table.len() as usize
    }

    /// (slot, chunk) pairs.
    pub fn pairs(&self) -> u64 {
        self.pair_count
    }

    pub fn bytes(&self) -> usize {
        let exceptions = self.slots.iter().map(|of_slot| of_slot.exceptions.capacity() * 18);
        self.table.bytes() + self.sets.bytes() + self.slots.capacity() * size_of::<OfSlot>() + exceptions.sum::<usize>()
    }

    /// Fetches the place of `keys[k]` ahead of its use, if there is such a key.
    #[inline(always)]
    pub fn prefetch(&self, keys: &[u64], k: usize) {
        if let Some(&key) = keys.get(k) {
            self.table.prefetch(key);
        }
    }

    /// The longest prefix of `chain` that each slot of `alive` holds, into `hits` (by slot; others stay as they are).
    ///
    /// `alive` is a bitmap of slots; it is used up. Slots that hold nothing of it are not written. Cost: one look-up per
    /// chunk until nobody is left, plus work at each depth where the set of holders changes.
    pub fn walk(&self, chain: &[u64], alive: &mut [u64], mut found_hit: impl FnMut(u32, Hit)) {
        let Some(&first) = chain.first() else { return };
        if self.table.get(first).0 == EMPTY {
            return;
        }
        // By blocks, in three steps: ask for a block's buckets, look into them a block later, use what they say (and look
        // further, for chunks that their buckets had no room for) after another. So the walk seldom waits for memory.
        let mut found = [Found::default(), Found::default()];
        let mut ahead = self.table.look_ahead(&chain[..chain.len().min(BLOCK)]);
        let mut previous_set = EMPTY;
        let blocks = chain.len().div_ceil(BLOCK);
        let block = |n: usize| &chain[(n * BLOCK).min(chain.len())..((n + 1) * BLOCK).min(chain.len())];
        for n in 0..=blocks {
            if n < blocks {
                self.table.look_up(block(n), block(n + 1), &mut ahead, &mut found[n % 2]);
            }
            if n == 0 {
                continue;
            }
            let (keys, found) = (block(n - 1), &mut found[(n - 1) % 2]);
            self.table.look_behind(keys, found);
            let sets = &found.sets[..keys.len()];
            if previous_set != EMPTY && sets.iter().fold(true, |same, &set| same & (set == previous_set)) {
                continue;
            }
            for (k, &set) in ((n - 1) * BLOCK..).zip(sets) {
                if set == previous_set && set != EMPTY {
                    continue;
                }
                let words = self.sets.words(set);
                let mut left = 0;
                for (w, live) in alive.iter_mut().enumerate() {
                    let holders = words.get(w).copied().unwrap_or(0);
                    let gone = *live & !holders;
                    *live &= holders;
                    left |= *live;
                    if gone != 0 && k > 0 {
                        self.settle(gone, w, chain, k, &mut found_hit);
                    }
                }
                if left == 0 {
                    return;
                }
                previous_set = set;
            }
        }
        for (w, live) in alive.iter_mut().enumerate() {
            self.settle(std::mem::take(live), w, chain, chain.len(), &mut found_hit);
        }
    }

    /// The slots of word `w` in `gone` hold the first `chunks` chunks of `chain`.
    fn settle(&self, mut gone: u64, w: usize, chain: &[u64], chunks: usize, found: &mut impl FnMut(u32, Hit)) {
        let (last, (_, tokens)) = match chunks.checked_sub(1) {
            Some(at) if gone != 0 => (chain[at], self.table.get(chain[at])),
            _ => return,
        };
        while gone != 0 {
            let slot = w as u32 * 64 + gone.trailing_zeros();
            gone &= gone - 1;
            found(slot, Hit { tokens: self.tokens_on(last, slot, tokens), chunks: chunks as u32 });
        }
    }

    /// The deepest chunk of `chain` beyond `shallowest` chunks that each slot of `wanted` holds: for tables of samples,
    /// where a chunk implies all before it. Found slots go from `wanted`; hits are written for them alone.
    pub fn deepest(&self, chain: &[u64], shallowest: usize, wanted: &mut [u64], mut found: impl FnMut(u32, Hit)) {
        if self.pairs() == 0 || wanted.iter().all(|&w| w == 0) {
            return;
        }
        for k in (shallowest..chain.len()).rev().take(PREFETCH_AHEAD) {
            self.prefetch(chain, k);
        }
        for k in (shallowest..chain.len()).rev() {
            if k >= shallowest + PREFETCH_AHEAD {
                self.prefetch(chain, k - PREFETCH_AHEAD);
            }
            let (set, tokens) = self.table.get(chain[k]);
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
        self.table.check()?;
        self.sets.check()?;
        let mut held = vec![0u64; self.slots.len()];
        let mut references: FoldMap<u32, u64> = FoldMap::default();
        for entry in self.table.iter() {
            *references.entry(entry.set).or_insert(0) += 1;
            for (w, &word) in self.sets.words(entry.set).iter().enumerate() {
                for bit in (0..64).filter(|bit| word >> bit & 1 == 1) {
                    held[w * 64 + bit] += 1;
                }
            }
        }
        if self.slots.iter().zip(&held).any(|(of_slot, &n)| of_slot.held != n)
            || held.iter().sum::<u64>() != self.pair_count
        {
            return Err("pairs are miscounted".into());
        }
        if references.len() + 1 != self.sets.count() || references.iter().any(|(&s, &n)| self.sets.references(s) != n) {
            return Err("references to sets are miscounted".into());
        }
        let mut exceptions = 0;
        for (slot, of_slot) in self.slots.iter().enumerate() {
            exceptions += of_slot.exceptions.len();
            if let Some(key) = of_slot.exceptions.keys().find(|&&key| self.tokens_of(slot as u32, key).is_none()) {
                return Err(format!("chunk {key}: odd count of slot {slot}, not a holder"));
            }
        }
        if exceptions != self.exception_count {
            return Err("exceptions are miscounted".into());
        }
        Ok(())
    }
}
