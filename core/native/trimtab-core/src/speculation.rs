//! Speculation: the chunks of requests that were just routed, before the engine's events tell of them.
//!
//! A claim belongs to one reservation and stands for what the index will show; once the index has, the claim is gone, so
//! that an eviction is believed at once. Claims on the same chunk of the same slot are counted; the
//! smallest token count claimed stands until the last one goes.
//!
//! Writing every chunk of a long prompt into a table would cost more than all the rest of a decision. So a claim stays
//! *loose*, a mere copy of its part of the chain, as long as no other claim on its slot has any chunk of it: then there
//! is nothing to count, and its deepest match with a prompt is their longest common run, found by bisection. That is
//! exact because a chunk's hash stands for all the text before it: two chains that meet at a position are equal up to
//! there. Once another claim on the slot has one of its chunks, both are written down in the table of shared claims.
//! So are the claims of peers, which are known by samples only.

use std::collections::{BTreeMap, VecDeque};

use crate::chunks::CHUNK_BYTES;
use crate::endpoint_sets::FoldMap;
use crate::prefix_index::{Hit, PrefixIndex};
use crate::reservation::Key;

/// Most loose claims: each costs every decision a look at it. Further ones are written down at once.
const LOOSE_MAX: usize = 8192;

/// How many tokens a prompt is taken to have up to each of its chunks: a claim, not knowledge.
#[derive(Clone, Debug)]
pub struct TokenModel {
    pub size_bytes: i64,
    pub prompt_tokens: i64,
    pub deepest_bytes: i64,
    pub deepest_tokens: i64,
    pub block_tokens: i64,
}

impl TokenModel {
    /// Tokens up to the end of the chunk at `position`, in whole blocks.
    pub fn at(&self, position: usize) -> u32 {
        let end = (position as i64 + 1) * CHUNK_BYTES as i64;
        let tokens = if self.deepest_bytes > 0 && end <= self.deepest_bytes {
            end * self.deepest_tokens / self.deepest_bytes
        } else {
            let rest_bytes = (self.size_bytes - self.deepest_bytes).max(1);
            let rest_tokens = self.prompt_tokens - self.deepest_tokens;
            self.deepest_tokens + ((end - self.deepest_bytes) * rest_tokens).div_euclid(rest_bytes)
        };
        (tokens.max(0) / self.block_tokens * self.block_tokens) as u32
    }
}

/// Where a run of a claim's chunks lies in its prompt: the first is at `start` there, and `at` among the claim's.
pub struct Run {
    pub start: usize,
    pub at: usize,
    pub tokens: TokenModel,
}

/// How a claim's chunks came: whole runs of our own prompts, or a peer's samples.
pub enum Origins {
    Runs(Vec<Run>),
    Samples(Vec<u32>),
}

pub struct Claim {
    pub slot: u32,
    pub chunks: Vec<u64>,
    /// Chunks after whose appearance in the slot's index there is nothing left to claim; none: nothing will.
    pub awaited: Vec<u64>,
    origins: Origins,
    order: u64,
    expires_s: Option<f64>,
    /// Its place among the loose ones; `None`: it is written down.
    loose_at: Option<usize>,
}

impl Claim {
    /// The token count of each chunk.
    pub fn tokens(&self) -> Vec<u32> {
        match &self.origins {
            Origins::Samples(tokens) => tokens.clone(),
            Origins::Runs(runs) => {
                let mut tokens = Vec::with_capacity(self.chunks.len());
                for (run, chunks) in self.runs(runs) {
                    tokens.extend((run.start..run.start + chunks.len()).map(|position| run.tokens.at(position)));
                }
                tokens
            }
        }
    }

    fn runs<'a>(&'a self, runs: &'a [Run]) -> impl Iterator<Item = (&'a Run, &'a [u64])> {
        runs.iter().enumerate().map(|(n, run)| {
            let end = runs.get(n + 1).map_or(self.chunks.len(), |next| next.at);
            (run, &self.chunks[run.at..end])
        })
    }

    /// Whether the two have a chunk in common; for samples, whose positions are unknown, not told.
    fn meets(&self, other: &Claim) -> bool {
        let (Origins::Runs(ours), Origins::Runs(theirs)) = (&self.origins, &other.origins) else { return false };
        self.runs(ours).any(|(a, of_a)| {
            other.runs(theirs).any(|(b, of_b)| {
                let from = a.start.max(b.start);
                match (of_a.get(from - a.start), of_b.get(from - b.start)) {
                    (Some(one), Some(another)) => one == another,
                    _ => false,
                }
            })
        })
    }
}

/// The head of a loose claim, kept together with the others' for a quick look at all of them.
struct Loose {
    head: u64,
    start: u32,
    slot: u32,
    key: Key,
}

pub struct Speculation {
    /// Claims that are written down.
    shared: PrefixIndex,
    /// (chunk, slot) -> claims on it beyond the first, of those written down.
    more: FoldMap<(u64, u32), u32>,
    loose: Vec<Loose>,
    chunks_max: usize,
    chunk_count: usize,
    claims: FoldMap<Key, Claim>,
    of_slot: FoldMap<u32, Vec<Key>>,
    /// Claims by age, the oldest first: the ones to go when there are too many.
    by_age: BTreeMap<u64, Key>,
    next_order: u64,
    expiries: VecDeque<(f64, Key)>,
    /// (slot, chunk) -> claims that wait for it.
    awaiting: FoldMap<(u32, u64), Vec<Key>>,
}

impl Speculation {
    pub fn new(chunks_max: usize) -> Self {
        Self {
            shared: PrefixIndex::new(),
            more: FoldMap::default(),
            loose: Vec::new(),
            chunks_max,
            chunk_count: 0,
            claims: FoldMap::default(),
            of_slot: FoldMap::default(),
            by_age: BTreeMap::new(),
            next_order: 0,
            expiries: VecDeque::new(),
            awaiting: FoldMap::default(),
        }
    }

    /// The slot's index has none of `awaited` yet.
    pub fn claim(&mut self, key: Key, slot: u32, chunks: Vec<u64>, origins: Origins, awaited: Vec<u64>) {
        if chunks.is_empty() || self.claims.contains_key(&key) {
            return;
        }
        let order = self.next_order;
        self.next_order += 1;
        self.by_age.insert(order, key);
        self.acquire(key, Claim { slot, chunks, awaited, origins, order, expires_s: None, loose_at: None });
        while self.chunk_count > self.chunks_max {
            let Some((_, &oldest)) = self.by_age.first_key_value() else { break };
            self.end(oldest);
        }
    }

    pub fn claim_of(&self, key: Key) -> Option<&Claim> {
        self.claims.get(&key)
    }

    /// The slot's index has these chunks now. Claims that waited for nothing else are over.
    pub fn confirm(&mut self, slot: u32, chunks: &[u64]) {
        if !self.of_slot.contains_key(&slot) || self.awaiting.is_empty() {
            return;
        }
        for &chunk in chunks {
            for key in self.awaiting.get(&(slot, chunk)).cloned().unwrap_or_default() {
                match self.claims.get_mut(&key) {
                    Some(claim) if claim.awaited.len() > 1 => {
                        claim.awaited.retain(|&other| other != chunk);
                        self.await_no_more(slot, chunk, key);
                    }
                    _ => self.end(key),
                }
            }
        }
    }

    fn await_no_more(&mut self, slot: u32, chunk: u64, key: Key) {
        if let Some(waiting) = self.awaiting.get_mut(&(slot, chunk)) {
            waiting.retain(|&other| other != key);
            if waiting.is_empty() {
                self.awaiting.remove(&(slot, chunk));
            }
        }
    }

    /// The request went to another slot after all, whose index has none of `awaited` yet.
    pub fn move_to(&mut self, key: Key, slot: u32, awaited: Vec<u64>) {
        if self.claims.get(&key).is_none_or(|claim| claim.slot == slot) {
            return;
        }
        if let Some(mut claim) = self.release(key) {
            claim.slot = slot;
            claim.awaited = awaited;
            self.acquire(key, claim);
        }
    }

    pub fn end(&mut self, key: Key) {
        if let Some(claim) = self.release(key) {
            self.by_age.remove(&claim.order);
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
        for key in self.of_slot.get(&slot).cloned().unwrap_or_default() {
            self.end(key);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }

    /// For each slot of `wanted` (used up) what is claimed of `chain` beyond `shallowest`: the deepest chunk by the table,
    /// and by each loose claim. A chunk implies all before it; of what is found for one slot the deepest counts.
    pub fn deepest(&self, chain: &[u64], shallowest: usize, wanted: &mut [u64], mut found: impl FnMut(u32, Hit)) {
        for loose in &self.loose {
            let start = loose.start as usize;
            if chain.get(start) != Some(&loose.head)
                || wanted.get(loose.slot as usize / 64).is_none_or(|w| w >> (loose.slot % 64) & 1 == 0)
            {
                continue;
            }
            let Some(claim) = self.claims.get(&loose.key) else { continue };
            let run = common_run(&claim.chunks, &chain[start..]);
            if let Origins::Runs(runs) = &claim.origins
                && start + run > shallowest
            {
                let tokens = runs[0].tokens.at(start + run - 1);
                found(loose.slot, Hit { tokens, chunks: (start + run) as u32 });
            }
        }
        self.shared.deepest(chain, shallowest, wanted, found);
    }

    fn acquire(&mut self, key: Key, mut claim: Claim) {
        self.chunk_count += claim.chunks.len();
        for &chunk in &claim.awaited {
            self.awaiting.entry((claim.slot, chunk)).or_default().push(key);
        }
        let meeting = self.meeting(&claim);
        let stays_loose = match &claim.origins {
            Origins::Runs(runs) if runs.len() == 1 && meeting.is_empty() && self.loose.len() < LOOSE_MAX => {
                u32::try_from(runs[0].start).ok()
            }
            _ => None,
        };
        if let Some(start) = stays_loose {
            claim.loose_at = Some(self.loose.len());
            self.loose.push(Loose { head: claim.chunks[0], start, slot: claim.slot, key });
        } else {
            for other in meeting {
                self.write_down(other);
            }
            self.add(&claim);
        }
        self.of_slot.entry(claim.slot).or_default().push(key);
        self.claims.insert(key, claim);
    }

    fn release(&mut self, key: Key) -> Option<Claim> {
        let mut claim = self.claims.remove(&key)?;
        self.chunk_count -= claim.chunks.len();
        for &chunk in &claim.awaited {
            self.await_no_more(claim.slot, chunk, key);
        }
        if let Some(keys) = self.of_slot.get_mut(&claim.slot) {
            keys.retain(|&other| other != key);
            if keys.is_empty() {
                self.of_slot.remove(&claim.slot);
            }
        }
        match claim.loose_at.take() {
            Some(at) => self.drop_loose(at),
            None => self.subtract(&claim),
        }
        Some(claim)
    }

    /// Claims on the same slot that have one of its chunks.
    fn meeting(&self, claim: &Claim) -> Vec<Key> {
        let others = self.of_slot.get(&claim.slot).into_iter().flatten();
        let others = others.filter_map(|&key| self.claims.get(&key).map(|other| (key, other)));
        match &claim.origins {
            Origins::Runs(_) => {
                let (mut met, mut has_samples) = (Vec::new(), None);
                for (key, other) in others {
                    match other.origins {
                        Origins::Samples(_) => has_samples = Some(key),
                        Origins::Runs(_) if claim.meets(other) => met.push(key),
                        Origins::Runs(_) => {}
                    }
                }
                if let Some(key) = has_samples
                    && met.is_empty()
                    && self.is_written(claim)
                {
                    met.push(key);
                }
                met
            }
            Origins::Samples(_) => {
                let samples = Samples::of(&claim.chunks);
                others.filter(|(_, o)| o.loose_at.is_some() && samples.are_in(&o.chunks)).map(|(k, _)| k).collect()
            }
        }
    }

    /// Whether one of its chunks is written down for its slot.
    fn is_written(&self, claim: &Claim) -> bool {
        claim.chunks.iter().enumerate().any(|(k, &chunk)| {
            self.shared.prefetch(&claim.chunks, k + 8);
            self.shared.tokens_of(claim.slot, chunk).is_some()
        })
    }

    /// A loose claim becomes a written one; others stay as they are.
    fn write_down(&mut self, key: Key) {
        let Some(mut claim) = self.claims.remove(&key) else { return };
        if let Some(at) = claim.loose_at.take() {
            self.drop_loose(at);
            self.add(&claim);
        }
        self.claims.insert(key, claim);
    }

    fn drop_loose(&mut self, at: usize) {
        self.loose.swap_remove(at);
        if let Some(moved) = self.loose.get(at)
            && let Some(claim) = self.claims.get_mut(&moved.key)
        {
            claim.loose_at = Some(at);
        }
    }

    fn add(&mut self, claim: &Claim) {
        for (k, (&chunk, count)) in claim.chunks.iter().zip(claim.tokens()).enumerate() {
            self.shared.prefetch(&claim.chunks, k + 8);
            if self.shared.add_smaller(claim.slot, chunk, count) {
                *self.more.entry((chunk, claim.slot)).or_insert(0) += 1;
            }
        }
    }

    fn subtract(&mut self, claim: &Claim) {
        for (k, &chunk) in claim.chunks.iter().enumerate() {
            self.shared.prefetch(&claim.chunks, k + 8);
            if !self.more.is_empty()
                && let Some(others) = self.more.get_mut(&(chunk, claim.slot))
            {
                *others -= 1;
                if *others == 0 {
                    self.more.remove(&(chunk, claim.slot));
                }
                continue;
            }
            self.shared.remove(claim.slot, chunk);
        }
    }

    /// Chunks claimed, each as often as it is.
    pub fn chunk_count(&self) -> usize {
        self.chunk_count
    }

    /// What is wrong with the state, if anything. Costs as much as all of it: for tests.
    pub fn check(&self) -> Result<(), String> {
        self.shared.check()?;
        let mut counts: BTreeMap<(u64, u32), u32> = BTreeMap::new();
        let mut loose: BTreeMap<(u64, u32), u32> = BTreeMap::new();
        for (key, claim) in &self.claims {
            let of_kind = if claim.loose_at.is_some() { &mut loose } else { &mut counts };
            for &chunk in &claim.chunks {
                *of_kind.entry((chunk, claim.slot)).or_insert(0) += 1;
            }
            if claim.loose_at.is_some_and(|at| self.loose.get(at).is_none_or(|entry| entry.key != *key)) {
                return Err("a loose claim is not where it says".into());
            }
            if self.of_slot.get(&claim.slot).is_none_or(|keys| !keys.contains(key)) {
                return Err("a claim is not among those of its slot".into());
            }
        }
        let awaited = self.claims.values().map(|claim| claim.awaited.len()).sum::<usize>();
        if awaited != self.awaiting.values().map(Vec::len).sum::<usize>()
            || self.awaiting.iter().any(|(&(slot, chunk), keys)| {
                let waits = |claim: &Claim| claim.slot == slot && claim.awaited.contains(&chunk);
                keys.is_empty() || keys.iter().any(|key| !self.claims.get(key).is_some_and(waits))
            })
        {
            return Err("other chunks are awaited than claims wait for".into());
        }
        let number = |of: &BTreeMap<(u64, u32), u32>| of.values().map(|&n| n as usize).sum::<usize>();
        if number(&counts) + number(&loose) != self.chunk_count {
            return Err("claimed chunks are miscounted".into());
        }
        if loose.values().any(|&n| n > 1) || loose.keys().any(|pair| counts.contains_key(pair)) {
            return Err("a loose claim shares a chunk".into());
        }
        if counts.len() as u64 != self.shared.pairs() {
            return Err("other pairs are written down than are claimed".into());
        }
        for (&(chunk, slot), &n) in &counts {
            if self.shared.tokens_of(slot, chunk).is_none() {
                return Err(format!("chunk {chunk} of slot {slot} is claimed, not held"));
            }
            if self.more.get(&(chunk, slot)).copied().unwrap_or(0) != n - 1 {
                return Err("claims on one chunk are miscounted".into());
            }
        }
        let on_slots = self.of_slot.values().map(Vec::len).sum::<usize>();
        if self.claims.len() != self.by_age.len() || self.claims.len() != on_slots {
            return Err("claims and their lists differ".into());
        }
        if self.loose.len() != self.claims.values().filter(|claim| claim.loose_at.is_some()).count() {
            return Err("loose claims are miscounted".into());
        }
        Ok(())
    }
}

/// How many chunks two runs of chains have in common, the first of which is equal.
fn common_run(one: &[u64], other: &[u64]) -> usize {
    let (mut equal, mut unequal) = (1, one.len().min(other.len()) + 1);
    if one[unequal - 2] == other[unequal - 2] {
        return unequal - 1;
    }
    while equal + 1 < unequal {
        let middle = equal.midpoint(unequal);
        if one[middle - 1] == other[middle - 1] {
            equal = middle;
        } else {
            unequal = middle;
        }
    }
    equal
}

/// A set of a few chunks, to scan many for.
struct Samples {
    bits: [u64; 64],
    sorted: Vec<u64>,
}

impl Samples {
    fn of(chunks: &[u64]) -> Self {
        let mut samples = Self { bits: [0; 64], sorted: chunks.to_vec() };
        samples.sorted.sort_unstable();
        for &chunk in chunks {
            samples.bits[(chunk >> 6 & 63) as usize] |= 1 << (chunk & 63);
        }
        samples
    }

    fn are_in(&self, chunks: &[u64]) -> bool {
        chunks.iter().any(|&chunk| {
            self.bits[(chunk >> 6 & 63) as usize] >> (chunk & 63) & 1 == 1 && self.sorted.binary_search(&chunk).is_ok()
        })
    }
}
