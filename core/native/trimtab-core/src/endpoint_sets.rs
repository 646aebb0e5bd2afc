//! Interned sets of endpoints: equal sets have equal numbers, so that comparing two is comparing one `u32`.
//!
//! A chunk names the set of slots that hold it. Real indexes know few distinct sets beside many chunks, and a walk
//! along a prompt meets the same set for long stretches. Sets are counted by reference and their numbers reused.
//! Number 0 is the empty set and always there.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A hasher for keys that are hashes already, or small integers: one multiplication.
#[derive(Default, Clone)]
pub struct Fold(u64);

impl Hasher for Fold {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }
    fn write_u64(&mut self, word: u64) {
        let x = (self.0 ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = x ^ (x >> 32);
    }
    fn write_u32(&mut self, word: u32) {
        self.write_u64(word as u64);
    }
    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
}

pub type FoldMap<K, V> = HashMap<K, V, BuildHasherDefault<Fold>>;

pub const EMPTY: u32 = 0;

#[derive(Default)]
struct Entry {
    /// Members as words of a bitmap, without trailing zero words.
    words: Box<[u64]>,
    references: u64,
    /// Counts the sets that have had this number, so that what is remembered of an earlier one is seen to be stale.
    life: u32,
}

#[derive(Clone, Copy)]
struct Toggled {
    target: u32,
    from_life: u32,
    target_life: u32,
}

#[derive(Default)]
pub struct EndpointSets {
    entries: Vec<Entry>,
    free: Vec<u32>,
    by_words: FoldMap<Box<[u64]>, u32>,
    /// (set, slot) -> the set with that slot toggled, while both live; at most `TOGGLED_MAX` are remembered.
    toggled: FoldMap<u64, Toggled>,
}

const TOGGLED_MAX: usize = 1 << 16;

impl EndpointSets {
    pub fn new() -> Self {
        let mut sets = Self::default();
        sets.entries.push(Entry { words: Box::default(), references: 1, life: 0 });
        sets.by_words.insert(Box::default(), EMPTY);
        sets
    }

    #[inline]
    pub fn words(&self, set: u32) -> &[u64] {
        &self.entries[set as usize].words
    }

    #[inline]
    pub fn contains(&self, set: u32, slot: u32) -> bool {
        self.words(set).get(slot as usize / 64).is_some_and(|w| w >> (slot % 64) & 1 == 1)
    }

    pub fn len(&self, set: u32) -> u32 {
        self.words(set).iter().map(|w| w.count_ones()).sum()
    }

    pub fn is_empty(&self, set: u32) -> bool {
        set == EMPTY
    }

    /// By number, whether a set has `slot`: a small table for a pass over many chunks.
    pub fn with(&self, slot: u32) -> Vec<bool> {
        (0..self.entries.len() as u32).map(|set| self.contains(set, slot)).collect()
    }

    /// Chunks that name the set (of the empty one: meaningless).
    pub fn references(&self, set: u32) -> u64 {
        self.entries[set as usize].references
    }

    /// Live sets, the empty one included.
    pub fn count(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
            + self.by_words.capacity() * (size_of::<Box<[u64]>>() + 12)
            + self.entries.iter().map(|e| e.words.len() * 16).sum::<usize>()
            + self.toggled.capacity() * (8 + size_of::<Toggled>())
    }

    /// Moves one reference from `set` to the set that has `slot` too (or no longer); returns that set.
    #[inline]
    pub fn toggle(&mut self, set: u32, slot: u32) -> u32 {
        let key = (set as u64) << 32 | slot as u64;
        let target = match self.toggled.get(&key) {
            Some(t)
                if self.entries[set as usize].life == t.from_life
                    && self.entries[t.target as usize].life == t.target_life =>
            {
                t.target
            }
            _ => self.toggle_slowly(set, slot, key),
        };
        self.entries[target as usize].references += 1;
        self.release(set);
        target
    }

    fn toggle_slowly(&mut self, set: u32, slot: u32, key: u64) -> u32 {
        let mut words = self.words(set).to_vec();
        let word = slot as usize / 64;
        if words.len() <= word {
            words.resize(word + 1, 0);
        }
        words[word] ^= 1 << (slot % 64);
        while words.last() == Some(&0) {
            words.pop();
        }
        let words = words.into_boxed_slice();
        let target = match self.by_words.get(&words) {
            Some(&target) => target,
            None => {
                let target = self.free.pop().unwrap_or_else(|| {
                    self.entries.push(Entry::default());
                    (self.entries.len() - 1) as u32
                });
                self.entries[target as usize].words = words.clone();
                self.by_words.insert(words, target);
                target
            }
        };
        if self.toggled.len() >= TOGGLED_MAX {
            self.toggled.clear();
        }
        let (from_life, target_life) = (self.entries[set as usize].life, self.entries[target as usize].life);
        self.toggled.insert(key, Toggled { target, from_life, target_life });
        target
    }

    #[inline]
    fn release(&mut self, set: u32) {
        let entry = &mut self.entries[set as usize];
        entry.references -= 1;
        if entry.references == 0 {
            self.forget(set);
        }
    }

    #[cold]
    fn forget(&mut self, set: u32) {
        let entry = &mut self.entries[set as usize];
        entry.life = entry.life.wrapping_add(1);
        let words = std::mem::take(&mut entry.words);
        self.by_words.remove(&words);
        self.free.push(set);
    }

    /// Takes one more reference to the empty set (a new chunk starts there).
    #[inline]
    pub fn adopt_empty(&mut self) -> u32 {
        self.entries[EMPTY as usize].references += 1;
        EMPTY
    }

    /// Gives up the reference of a chunk that nobody holds any more.
    #[inline]
    pub fn drop_empty(&mut self) {
        self.entries[EMPTY as usize].references -= 1;
    }
}
