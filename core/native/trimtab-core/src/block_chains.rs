//! Block chains: what an engine's KV blocks hold, turned into the chunks of text that they complete.
//!
//! The published chunks are exactly those that some held block completes, each with the smallest token count among the
//! held blocks that complete it. A chunk belongs to the block that holds its last byte; it counts the block's end for
//! the last chunk that ends in the block, the block's start for the earlier ones.

use std::cmp::Reverse;

use crate::chunks::{CHUNK_BYTES, extend_chain};
use crate::endpoint_sets::FoldMap;
use crate::token_table::TokenTable;

/// Most blocks known at once, far beyond what an engine holds. At the bound new blocks are dropped and counted.
pub const BLOCKS_MAX: usize = 8_000_000;

/// Where a reference is held: the number of a (medium, KV cache group).
pub type Place = u32;

/// The open chunk's bytes, fewer than 64.
#[derive(Clone, Copy)]
struct Tail {
    bytes: [u8; CHUNK_BYTES - 1],
    size: u8,
}

impl Tail {
    const NONE: Self = Self { bytes: [0; CHUNK_BYTES - 1], size: 0 };

    fn of(text: &[u8]) -> Self {
        let mut tail = Self::NONE;
        tail.bytes[..text.len()].copy_from_slice(text);
        tail.size = text.len() as u8;
        tail
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.size as usize]
    }
}

struct Block {
    parent: Option<u64>,
    /// Hash of the last chunk completed up to the block's end (the root where none is).
    chain: u64,
    tail: Tail,
    /// Tokens from the start of the prompt to the block's start and end.
    start: u32,
    end: u32,
    /// Chunks that end in the block, but for the last one, which is `chain`.
    earlier: Box<[u64]>,
    completes: bool,
    is_published: bool,
    /// In the order in which they came.
    references: Vec<(Place, u32)>,
    /// Where it was referred to before a gap: this no longer holds the block, but says that it may still be there.
    set_aside: Vec<Place>,
    /// Since which gap nothing but what was set aside keeps it; `None` while it is held.
    unconfirmed: Option<u64>,
    /// When it became known, among blocks.
    order: u64,
}

impl Block {
    fn chunks(&self) -> impl Iterator<Item = (u64, u32)> {
        let last = self.completes.then_some((self.chain, self.end));
        self.earlier.iter().map(|&chunk| (chunk, self.start)).chain(last)
    }

    fn count_at(&mut self, place: Place) -> Option<&mut u32> {
        self.references.iter_mut().find(|(of, _)| *of == place).map(|(_, count)| count)
    }

    fn refer(&mut self, place: Place) {
        match self.count_at(place) {
            Some(count) => *count += 1,
            None => {
                self.references.reserve_exact(1);
                self.references.push((place, 1));
            }
        }
        self.set_aside.retain(|&other| other != place);
    }
}

/// Token counts of one chunk, one for each published block that completes it. Nearly always one.
enum Counts {
    One(u32),
    More(Vec<u32>),
}

impl Counts {
    fn least(&self) -> u32 {
        match self {
            Self::One(tokens) => *tokens,
            Self::More(all) => all.iter().copied().min().unwrap_or(u32::MAX),
        }
    }
}

/// Net changes since the last drain. Apply `cleared`, then `removed`, then `added`.
#[derive(Default, Debug, PartialEq, Eq)]
pub struct ChunkChanges {
    pub cleared: bool,
    pub added: Vec<u64>,
    pub tokens: Vec<u32>,
    pub removed: Vec<u64>,
}

#[derive(Default, Clone, Copy)]
pub struct Counters {
    pub bytes_seen: u64,
    pub tokens_seen: u64,
    pub dropped_unknown_parent: u64,
    pub dropped_unknown_token: u64,
    pub dropped_malformed: u64,
    pub dropped_full: u64,
}

/// References of a block, and the places where it is set aside.
pub type Holding = (Vec<(Place, u32)>, Vec<Place>);

/// One block as a checkpoint has it.
pub struct BlockRecord<'a> {
    pub name: u64,
    pub parent: Option<u64>,
    pub chain: u64,
    pub tokens: u32,
    pub tail: &'a [u8],
    pub chunks: Vec<(u64, u32)>,
    pub holding: Holding,
    /// The gap since which it is unconfirmed; `None` where it is not.
    pub unconfirmed_since: Option<u64>,
}

/// The map of one engine. References are counted by place; any of them holds.
pub struct BlockChains {
    table: TokenTable,
    seed: u64,
    pub counters: Counters,
    blocks: FoldMap<u64, Box<Block>>,
    unconfirmed_count: usize,
    gaps: u64,
    held_max: usize,
    chunks: FoldMap<u64, Counts>,
    /// Chunks touched since the last drain -> tokens at that drain.
    before: FoldMap<u64, Option<u32>>,
    is_cleared: bool,
    places: Vec<(String, i64)>,
    order: u64,
    text: Vec<u8>,
    hashes: Vec<u64>,
}

impl BlockChains {
    pub fn new(table: TokenTable, seed: u64) -> Self {
        Self {
            table,
            seed,
            counters: Counters::default(),
            blocks: FoldMap::default(),
            unconfirmed_count: 0,
            gaps: 0,
            held_max: 0,
            chunks: FoldMap::default(),
            before: FoldMap::default(),
            is_cleared: false,
            places: Vec::new(),
            order: 0,
            text: Vec::new(),
            hashes: Vec::new(),
        }
    }

    pub fn block_count(&self) -> usize {
        self.blocks.len() - self.unconfirmed_count
    }

    pub fn unconfirmed_count(&self) -> usize {
        self.unconfirmed_count
    }

    pub fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    pub fn held_max(&self) -> usize {
        self.held_max
    }

    pub fn gaps(&self) -> u64 {
        self.gaps
    }

    /// The number of a place, which it keeps.
    pub fn place(&mut self, medium: &str, group: i64) -> Place {
        let known = self.places.iter().position(|(of, number)| of == medium && *number == group);
        known.unwrap_or_else(|| {
            self.places.push((medium.to_owned(), group));
            self.places.len() - 1
        }) as Place
    }

    pub fn place_name(&self, place: Place) -> (&str, i64) {
        let (medium, group) = &self.places[place as usize];
        (medium, *group)
    }

    /// One event: `blocks` follow each other, `tokens` are theirs in a row. No tokens: a reference to known blocks.
    pub fn store(
        &mut self,
        parent: Option<u64>,
        blocks: &[u64],
        tokens: &[u32],
        block_tokens: i64,
        root: u64,
        place: Place,
    ) {
        let (names, size) = (blocks.len() as i64, tokens.len() as i64);
        let has_tokens = size > 0;
        let fits =
            names.saturating_sub(1).saturating_mul(block_tokens) < size && size <= names.saturating_mul(block_tokens);
        if has_tokens && !fits {
            self.counters.dropped_malformed += names as u64;
            return;
        }
        if let (true, true, Some(parent)) = (has_tokens, names > 0, parent) {
            self.confirm(parent, place);
        }
        let mut runs = tokens.chunks((block_tokens.max(1)) as usize);
        let mut before = parent;
        for &name in blocks {
            let run = runs.next().unwrap_or_default();
            let is_known = self.blocks.contains_key(&name)
                || (has_tokens && self.new_block(before, run, root).is_some_and(|block| self.know(name, block)));
            if is_known {
                self.refer(name, place);
            }
            before = Some(name);
        }
        self.held_max = self.held_max.max(self.block_count());
    }

    /// Each block loses one reference at `place`; with its last one it is forgotten, end state and all.
    pub fn remove(&mut self, blocks: &[u64], place: Place) {
        for &name in blocks {
            let Some(block) = self.blocks.get_mut(&name) else { continue };
            match block.references.iter().position(|(of, _)| *of == place) {
                Some(at) if block.references[at].1 > 1 => block.references[at].1 -= 1,
                Some(at) => drop(block.references.remove(at)),
                None => block.set_aside.retain(|&other| other != place),
            }
            self.settle(name);
        }
    }

    /// The engine's cache is empty: nothing is known any more.
    pub fn clear(&mut self) {
        self.blocks = FoldMap::default();
        self.unconfirmed_count = 0;
        self.held_max = 0;
        self.forget_chunks();
    }

    /// Events were lost: no chunk can be vouched for, but the end states stay, to build on and to be confirmed.
    ///
    /// No more are kept than the engine held at its fullest; those of the oldest gap go first, of one gap the deepest.
    pub fn unpublish(&mut self) {
        self.forget_chunks();
        self.gaps += 1;
        for block in self.blocks.values_mut() {
            block.is_published = false;
            if !block.references.is_empty() {
                for (place, _) in block.references.drain(..) {
                    if !block.set_aside.contains(&place) {
                        block.set_aside.push(place);
                    }
                }
                block.unconfirmed = Some(self.gaps);
                self.unconfirmed_count += 1;
            }
        }
        let excess = self.unconfirmed_count.saturating_sub(self.held_max);
        if excess > 0 {
            let mut by_age: Vec<(u64, Reverse<u32>, u64)> = self
                .blocks
                .iter()
                .filter_map(|(&name, block)| block.unconfirmed.map(|since| (since, Reverse(block.end), name)))
                .collect();
            by_age.sort_unstable();
            for (_, _, name) in by_age.into_iter().take(excess) {
                self.forget(name);
            }
        }
    }

    pub fn drain(&mut self) -> ChunkChanges {
        let mut changes = ChunkChanges { cleared: std::mem::take(&mut self.is_cleared), ..ChunkChanges::default() };
        for (chunk, before) in std::mem::take(&mut self.before) {
            match (self.chunks.get(&chunk).map(Counts::least), before) {
                (None, Some(_)) => changes.removed.push(chunk),
                (Some(now), before) if before != Some(now) => {
                    changes.added.push(chunk);
                    changes.tokens.push(now);
                }
                _ => {}
            }
        }
        changes
    }

    /// All that is published, in no order.
    pub fn chunks(&self) -> (Vec<u64>, Vec<u32>) {
        self.chunks.iter().map(|(&chunk, counts)| (chunk, counts.least())).unzip()
    }

    /// All blocks, as they became known.
    pub fn records(&self) -> Vec<BlockRecord<'_>> {
        let mut known: Vec<(u64, &Block)> = self.blocks.iter().map(|(&name, block)| (name, &**block)).collect();
        known.sort_unstable_by_key(|(_, block)| block.order);
        known
            .into_iter()
            .map(|(name, block)| BlockRecord {
                name,
                parent: block.parent,
                chain: block.chain,
                tokens: block.end,
                tail: block.tail.bytes(),
                chunks: block.chunks().collect(),
                holding: (block.references.clone(), block.set_aside.clone()),
                unconfirmed_since: block.unconfirmed,
            })
            .collect()
    }

    /// Takes up a block of a checkpoint; false where it is none that `records` could have told.
    pub fn restore(&mut self, record: BlockRecord<'_>) -> bool {
        let is_sound = record.tail.len() < CHUNK_BYTES
            && record.chunks.last().is_none_or(|&(chunk, end)| chunk == record.chain && end == record.tokens)
            && !self.blocks.contains_key(&record.name);
        if !is_sound {
            return false;
        }
        let earlier = record.chunks.len().saturating_sub(1);
        let order = self.next_order();
        self.blocks.insert(
            record.name,
            Box::new(Block {
                parent: record.parent,
                chain: record.chain,
                tail: Tail::of(record.tail),
                start: if earlier > 0 { record.chunks[0].1 } else { record.tokens },
                end: record.tokens,
                earlier: record.chunks[..earlier].iter().map(|&(chunk, _)| chunk).collect(),
                completes: !record.chunks.is_empty(),
                is_published: false,
                references: record.holding.0,
                set_aside: record.holding.1,
                unconfirmed: record.unconfirmed_since,
                order,
            }),
        );
        self.unconfirmed_count += record.unconfirmed_since.is_some() as usize;
        self.settle(record.name);
        true
    }

    /// Before `restore`: the most blocks ever held, and the gaps so far.
    pub fn restore_history(&mut self, held_max: usize, gaps: u64) {
        (self.held_max, self.gaps) = (held_max, gaps);
    }

    fn next_order(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    fn know(&mut self, name: u64, block: Box<Block>) -> bool {
        self.blocks.insert(name, block);
        true
    }

    fn new_block(&mut self, parent: Option<u64>, tokens: &[u32], root: u64) -> Option<Box<Block>> {
        let (chain, tail, start) = match parent {
            None => (root, Tail::NONE, 0),
            Some(name) => match self.blocks.get(&name) {
                Some(before) => (before.chain, before.tail, before.end),
                None => {
                    self.counters.dropped_unknown_parent += 1;
                    return None;
                }
            },
        };
        if self.blocks.len() >= BLOCKS_MAX {
            self.counters.dropped_full += 1;
            return None;
        }
        self.text.clear();
        self.text.extend_from_slice(tail.bytes());
        if !self.table.append(tokens, &mut self.text) {
            self.counters.dropped_unknown_token += 1;
            return None;
        }
        self.counters.bytes_seen += (self.text.len() - tail.bytes().len()) as u64;
        self.counters.tokens_seen += tokens.len() as u64;
        self.hashes.clear();
        extend_chain(chain, &self.text, self.seed, &mut self.hashes);
        let order = self.next_order();
        Some(Box::new(Block {
            parent,
            chain: self.hashes.last().copied().unwrap_or(chain),
            tail: Tail::of(&self.text[self.hashes.len() * CHUNK_BYTES..]),
            start,
            end: start.saturating_add(tokens.len() as u32),
            earlier: self.hashes[..self.hashes.len().saturating_sub(1)].into(),
            completes: !self.hashes.is_empty(),
            is_published: false,
            references: Vec::new(),
            set_aside: Vec::new(),
            unconfirmed: None,
            order,
        }))
    }

    fn refer(&mut self, name: u64, place: Place) {
        if let Some(block) = self.blocks.get_mut(&name) {
            block.refer(place);
            self.settle(name);
        }
    }

    /// Gives the block, and its ancestors, the reference that a gap may have hidden.
    fn confirm(&mut self, name: u64, place: Place) {
        let mut next = Some(name);
        while let Some(name) = next {
            let Some(block) = self.blocks.get_mut(&name) else { return };
            if block.set_aside.is_empty() || block.count_at(place).is_some() {
                return;
            }
            next = block.parent;
            self.refer(name, place);
        }
    }

    /// After its references changed: publish or withdraw the block's chunks, forget it if nothing keeps it.
    fn settle(&mut self, name: u64) {
        let Some(block) = self.blocks.get_mut(&name) else { return };
        let is_held = !block.references.is_empty();
        let is_kept = is_held || !block.set_aside.is_empty();
        let has_changed = is_held != block.is_published;
        block.is_published = is_held;
        if has_changed && let Some(block) = self.blocks.get(&name) {
            for (chunk, tokens) in block.chunks() {
                if is_held {
                    publish(&mut self.chunks, &mut self.before, chunk, tokens);
                } else {
                    withdraw(&mut self.chunks, &mut self.before, chunk, tokens);
                }
            }
        }
        let Some(block) = self.blocks.get_mut(&name) else { return };
        if is_held {
            self.unconfirmed_count -= block.unconfirmed.take().is_some() as usize;
        } else if is_kept && (block.unconfirmed.is_some() || self.unconfirmed_count < self.held_max) {
            self.unconfirmed_count += block.unconfirmed.is_none() as usize;
            block.unconfirmed.get_or_insert(self.gaps);
        } else {
            self.forget(name);
        }
    }

    fn forget(&mut self, name: u64) {
        if let Some(block) = self.blocks.remove(&name) {
            self.unconfirmed_count -= block.unconfirmed.is_some() as usize;
        }
    }

    fn forget_chunks(&mut self) {
        self.chunks = FoldMap::default();
        self.before = FoldMap::default();
        self.is_cleared = true;
    }

    /// What is wrong with the state, if anything. Costs as much as the whole map: for tests.
    pub fn check(&self) -> Result<(), String> {
        let mut published: FoldMap<u64, Vec<u32>> = FoldMap::default();
        for (name, block) in &self.blocks {
            let is_held = !block.references.is_empty();
            if block.is_published != is_held {
                return Err(format!("block {name}: published is not held"));
            }
            if !is_held && block.set_aside.is_empty() {
                return Err(format!("block {name}: kept by nothing"));
            }
            if block.unconfirmed.is_some() == is_held {
                return Err(format!("block {name}: wrongly (un)confirmed"));
            }
            if block.references.iter().any(|&(_, count)| count == 0) {
                return Err(format!("block {name}: reference count below one"));
            }
            for (chunk, tokens) in block.chunks().filter(|_| block.is_published) {
                published.entry(chunk).or_default().push(tokens);
            }
        }
        if self.unconfirmed_count != self.blocks.values().filter(|block| block.unconfirmed.is_some()).count() {
            return Err("unconfirmed blocks are miscounted".into());
        }
        if self.unconfirmed_count > self.held_max {
            return Err("more unconfirmed blocks than the engine ever held".into());
        }
        if published.len() != self.chunks.len() {
            return Err("published chunks are not those of the held blocks".into());
        }
        for (chunk, counts) in &self.chunks {
            let mut kept = match counts {
                Counts::One(tokens) => vec![*tokens],
                Counts::More(all) => all.clone(),
            };
            let mut expected = published.get(chunk).cloned().unwrap_or_default();
            kept.sort_unstable();
            expected.sort_unstable();
            if kept != expected {
                return Err(format!("chunk {chunk}: token counts differ from its blocks'"));
            }
        }
        Ok(())
    }
}

fn publish(chunks: &mut FoldMap<u64, Counts>, before: &mut FoldMap<u64, Option<u32>>, chunk: u64, tokens: u32) {
    match chunks.entry(chunk) {
        std::collections::hash_map::Entry::Vacant(place) => {
            before.entry(chunk).or_insert(None);
            place.insert(Counts::One(tokens));
        }
        std::collections::hash_map::Entry::Occupied(mut place) => {
            let counts = place.get_mut();
            before.entry(chunk).or_insert(Some(counts.least()));
            match counts {
                Counts::One(other) => *counts = Counts::More(vec![*other, tokens]),
                Counts::More(all) => all.push(tokens),
            }
        }
    }
}

fn withdraw(chunks: &mut FoldMap<u64, Counts>, before: &mut FoldMap<u64, Option<u32>>, chunk: u64, tokens: u32) {
    let Some(counts) = chunks.get_mut(&chunk) else { return };
    before.entry(chunk).or_insert(Some(counts.least()));
    match counts {
        Counts::One(_) => drop(chunks.remove(&chunk)),
        Counts::More(all) => {
            if let Some(at) = all.iter().position(|&other| other == tokens) {
                all.swap_remove(at);
            }
            if let [only] = all[..] {
                *counts = Counts::One(only);
            }
        }
    }
}
