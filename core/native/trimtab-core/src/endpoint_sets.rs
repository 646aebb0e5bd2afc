//! Interned sets of endpoints: equal sets have equal numbers, so that comparing two is comparing one `u32`.
//!
//! A chunk names the set of slots that hold it. Real indexes know few distinct sets beside many chunks, and a walk
//! along a prompt meets the same set for long stretches. Sets are counted by reference and their numbers reused.
//! Number 0 is the empty set and always there.
//!
//! A set that only one chunk names changes in place, and `clear_slot` changes all sets in place. So after a clear two
//! numbers may stand for equal sets (which costs a comparison and nothing else), and a number other than 0 may stand for
//! none: the chunks that name such a one are *ghosts*, held by nobody, until the table drops them.

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

#[derive(Clone, Copy, Default)]
struct Entry {
    /// Exclusive or of the members' `mark`s: what a set with one slot more or less hashes to is one operation away.
    hash: u64,
    references: u64,
    /// Members.
    len: u32,
}

/// The last step taken, as the chunks of a batch nearly all take the same. `from` EMPTY with `target` EMPTY: none.
#[derive(Clone, Copy, Default)]
struct Step {
    from: u32,
    slot: u32,
    target: u32,
}

pub struct EndpointSets {
    entries: Vec<Entry>,
    /// `width` words for each set, a bitmap of its members.
    words: Vec<u64>,
    width: usize,
    free: Vec<u32>,
    /// Sets by hash. Where two have the same hash, or are equal after a clear, one of them is not in it.
    by_hash: FoldMap<u64, u32>,
    last: Step,
    ghosts: u64,
}

impl Default for EndpointSets {
    fn default() -> Self {
        Self::new()
    }
}

/// A random-looking number for a slot (splitmix64).
#[inline]
fn mark(slot: u32) -> u64 {
    let mut z = (slot as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl EndpointSets {
    pub fn new() -> Self {
        let mut by_hash = FoldMap::default();
        by_hash.insert(0, EMPTY);
        Self {
            entries: vec![Entry::default()],
            words: vec![0],
            width: 1,
            free: Vec::new(),
            by_hash,
            last: Step::default(),
            ghosts: 0,
        }
    }

    /// The members as a bitmap; words beyond are zero.
    #[inline]
    pub fn words(&self, set: u32) -> &[u64] {
        let start = set as usize * self.width;
        &self.words[start..start + self.width]
    }

    #[inline]
    pub fn contains(&self, set: u32, slot: u32) -> bool {
        let word = slot as usize / 64;
        word < self.width && self.words[set as usize * self.width + word] >> (slot % 64) & 1 == 1
    }

    #[inline]
    pub fn len(&self, set: u32) -> u32 {
        self.entries[set as usize].len
    }

    #[inline]
    pub fn is_empty(&self, set: u32) -> bool {
        self.len(set) == 0
    }

    /// By number, whether a set has `slot`: a small table for a pass over many chunks.
    pub fn with(&self, slot: u32) -> Vec<bool> {
        (0..self.entries.len() as u32).map(|set| self.contains(set, slot)).collect()
    }

    /// Chunks that name the set (of the empty one: always none).
    pub fn references(&self, set: u32) -> u64 {
        self.entries[set as usize].references
    }

    /// Live sets, the empty one included.
    pub fn count(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Chunks that name a set which lost its last member in place.
    #[inline]
    pub fn ghosts(&self) -> u64 {
        self.ghosts
    }

    pub fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
            + self.words.capacity() * 8
            + self.by_hash.capacity() * 14
            + self.free.capacity() * 4
    }

    /// Moves one reference from `set` to the set that has `slot` too (or no longer); returns that set.
    #[inline]
    pub fn toggle(&mut self, set: u32, slot: u32) -> u32 {
        let Step { from, slot: of, target } = self.last;
        if from == set && of == slot && target != from {
            self.hold(target);
            self.release(set);
            return target;
        }
        self.toggle_slowly(set, slot)
    }

    fn toggle_slowly(&mut self, set: u32, slot: u32) -> u32 {
        self.widen(slot);
        let hash = self.entries[set as usize].hash ^ mark(slot);
        let same_hash = self.by_hash.get(&hash).copied();
        if let Some(target) = same_hash
            && self.differ_by(set, target, slot)
        {
            self.hold(target);
            self.last = Step { from: set, slot, target };
            self.release(set);
            return target;
        }
        if set != EMPTY && self.entries[set as usize].references == 1 {
            self.ghosts -= u64::from(self.is_empty(set));
            self.flip(set, slot, hash);
            return set;
        }
        let target = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry::default());
            self.words.resize(self.entries.len() * self.width, 0);
            (self.entries.len() - 1) as u32
        });
        let start = set as usize * self.width;
        self.words.copy_within(start..start + self.width, target as usize * self.width);
        self.words[target as usize * self.width + slot as usize / 64] ^= 1 << (slot % 64);
        let is_member = self.contains(target, slot);
        let len = self.entries[set as usize].len;
        let len = if is_member { len + 1 } else { len - 1 };
        self.entries[target as usize] = Entry { hash, references: 1, len };
        self.by_hash.entry(hash).or_insert(target);
        self.last = Step { from: set, slot, target };
        self.release(set);
        target
    }

    /// No set has `slot` any more. One pass over the sets; the chunks that name them are not touched.
    pub fn clear_slot(&mut self, slot: u32) {
        if slot as usize / 64 >= self.width {
            return;
        }
        for set in 1..self.entries.len() as u32 {
            if self.entries[set as usize].references > 0 && self.contains(set, slot) {
                self.flip(set, slot, self.entries[set as usize].hash ^ mark(slot));
                if self.is_empty(set) {
                    self.ghosts += self.entries[set as usize].references;
                }
            }
        }
        self.last = Step::default();
    }

    /// The set changes in place; all that name it see it.
    fn flip(&mut self, set: u32, slot: u32, hash: u64) {
        self.unregister(set);
        self.words[set as usize * self.width + slot as usize / 64] ^= 1 << (slot % 64);
        let is_member = self.contains(set, slot);
        let entry = &mut self.entries[set as usize];
        entry.len = if is_member { entry.len + 1 } else { entry.len - 1 };
        entry.hash = hash;
        self.by_hash.entry(hash).or_insert(set);
        self.last = Step::default();
    }

    fn unregister(&mut self, set: u32) {
        let hash = self.entries[set as usize].hash;
        if let std::collections::hash_map::Entry::Occupied(known) = self.by_hash.entry(hash)
            && *known.get() == set
        {
            known.remove();
        }
    }

    fn differ_by(&self, one: u32, other: u32, slot: u32) -> bool {
        let (word, bit) = (slot as usize / 64, 1u64 << (slot % 64));
        let pairs = self.words(one).iter().zip(self.words(other)).enumerate();
        pairs.fold(0, |left, (w, (a, b))| left | (a ^ b ^ if w == word { bit } else { 0 })) == 0
    }

    /// Room for `slot` in every set.
    fn widen(&mut self, slot: u32) {
        let needed = slot as usize / 64 + 1;
        if needed <= self.width {
            return;
        }
        let mut wider = vec![0; self.entries.len() * needed];
        for (old, new) in self.words.chunks_exact(self.width).zip(wider.chunks_exact_mut(needed)) {
            new[..self.width].copy_from_slice(old);
        }
        (self.words, self.width) = (wider, needed);
    }

    #[inline]
    fn hold(&mut self, set: u32) {
        if set != EMPTY {
            self.entries[set as usize].references += 1;
        }
    }

    /// A chunk does not name the set any more.
    #[inline]
    pub fn release(&mut self, set: u32) {
        if set == EMPTY {
            return;
        }
        let entry = &mut self.entries[set as usize];
        entry.references -= 1;
        self.ghosts -= u64::from(entry.len == 0);
        if entry.references == 0 {
            self.forget(set);
        }
    }

    #[cold]
    fn forget(&mut self, set: u32) {
        self.unregister(set);
        self.entries[set as usize] = Entry::default();
        let start = set as usize * self.width;
        self.words[start..start + self.width].fill(0);
        self.free.push(set);
        if self.last.from == set || self.last.target == set {
            self.last = Step::default();
        }
    }

    /// What is wrong with the state, if anything.
    pub fn check(&self) -> Result<(), String> {
        let mut ghosts = 0;
        for (number, entry) in self.entries.iter().enumerate() {
            let set = number as u32;
            let members = self.words(set).iter().map(|word| word.count_ones()).sum::<u32>();
            let hash = (0..self.width as u32 * 64).filter(|&s| self.contains(set, s)).fold(0, |h, s| h ^ mark(s));
            if members != entry.len || hash != entry.hash {
                return Err(format!("set {set}: its members are not those counted or hashed"));
            }
            if set != EMPTY && entry.references > 0 && entry.len == 0 {
                ghosts += entry.references;
            }
        }
        for (&hash, &set) in &self.by_hash {
            let entry = &self.entries[set as usize];
            if entry.hash != hash || (set != EMPTY && entry.references == 0) {
                return Err(format!("set {set}: registered for what it is not"));
            }
        }
        let live = self.entries.iter().filter(|entry| entry.references > 0).count();
        if ghosts != self.ghosts || live + 1 != self.count() {
            return Err("sets or ghosts are miscounted".into());
        }
        Ok(())
    }
}
