//! The bucket table: chunk hash -> number of a set of slots, and tokens. What a set means it does not know.
//!
//! 64-byte buckets of four entries, spread over shards. A chunk's bucket is its hash times the number of buckets: buckets
//! lie in the order of the hashes, whatever their number, and a full one overflows into the next.
//!
//! A shard grows by a quarter, in place and in steps: each insertion moves the entries of a few buckets to where the
//! larger table wants them, the last bucket first, so that what has moved lies behind what has not. A hash's old bucket
//! says which of the two it is. The shards are at different points of their growth, so the table as a whole is always
//! about equally full: entries in use are 48 to 60 % of a shard, 54 % of the table.

use std::marker::PhantomData;

use crate::endpoint_sets::{EMPTY, EndpointSets};
use crate::segments::{Segmented, Segments, Zeroable};

const SHARD_BITS: u32 = 4;
const SHARDS: usize = 1 << SHARD_BITS;
pub const PER_BUCKET: usize = 4;
pub const TOKENS_MASK: u32 = 0x00FF_FFFF;
const LOAD_MAX_PERCENT: u64 = 58;
const GROWTH: f64 = 1.25;
const BUCKETS_MIN: f64 = 8.0;
/// While a shard grows, so many buckets are moved each time that its entries have become so many more: one run of memory
/// rather than many. A growth has to be over before the next one is due, which half a bucket an entry is enough for.
const MOVED_AT_ONCE: u64 = 16;
const ENTRIES_PER_MOVE: u64 = 4;
/// Buckets that an insertion or a tick looks through for entries that nobody holds, while there are any.
const SWEPT_PER_CHANGE: usize = 8;
pub const PREFETCH_AHEAD: usize = 16;

/// Entry i: `keys[i]` is held by the set `sets[i]` (EMPTY: the entry is free) with `tokens[i] & TOKENS_MASK` tokens.
/// The high byte of `tokens[0]` counts the entries that belong here and went further (255: for ever).
#[repr(C, align(64))]
#[derive(Clone, Copy, Default)]
pub struct Bucket {
    keys: [u64; PER_BUCKET],
    sets: [u32; PER_BUCKET],
    tokens: [u32; PER_BUCKET],
}

// SAFETY: arrays of integers.
unsafe impl Zeroable for Bucket {}

static NOTHING: Bucket = Bucket { keys: [0; PER_BUCKET], sets: [EMPTY; PER_BUCKET], tokens: [0; PER_BUCKET] };

impl Bucket {
    /// Bit i: entry i is it. Without branches: which entry it is cannot be foreseen, and a wrong guess costs more than
    /// four comparisons.
    #[inline(always)]
    fn find_mask(&self, key: u64) -> u32 {
        (0..PER_BUCKET).fold(0, |found, i| found | u32::from((self.keys[i] == key) & (self.sets[i] != EMPTY)) << i)
    }
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx2")]
    fn find_mask_avx2(&self, key: u64) -> u32 {
        use std::arch::x86_64::*;
        // SAFETY: the arrays are as long as what is loaded.
        let (keys, sets) = unsafe {
            (_mm256_load_si256((&raw const self.keys).cast()), _mm_load_si128((&raw const self.sets).cast()))
        };
        let equal = _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(keys, _mm256_set1_epi64x(key as i64))));
        let empty = _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(sets, _mm_setzero_si128())));
        (equal & !empty) as u32
    }
    #[inline(always)]
    fn find(&self, key: u64) -> Option<usize> {
        let found = self.find_mask(key);
        if found == 0 { None } else { Some(found.trailing_zeros() as usize & (PER_BUCKET - 1)) }
    }
    #[inline(always)]
    fn vacancy(&self) -> Option<usize> {
        let free = (0..PER_BUCKET).fold(0, |free, i| free | u32::from(self.sets[i] == EMPTY) << i);
        if free == 0 { None } else { Some(free.trailing_zeros() as usize & (PER_BUCKET - 1)) }
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
    #[inline(always)]
    fn fill(&mut self, i: usize, entry: Entry) {
        self.keys[i] = entry.key;
        self.sets[i] = entry.set;
        self.set_tokens(i, entry.tokens);
    }
    #[inline(always)]
    fn empty(&mut self, i: usize) {
        self.sets[i] = EMPTY;
        self.set_tokens(i, 0);
    }
    #[inline(always)]
    fn entry(&self, i: usize) -> Entry {
        Entry { key: self.keys[i], set: self.sets[i], tokens: self.tokens[i] & TOKENS_MASK }
    }
}

/// `tokens` are cut to what a bucket has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: u64,
    pub set: u32,
    pub tokens: u32,
}

/// Where an entry is, until the next insertion.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Place {
    shard: usize,
    at: usize,
    i: usize,
}

#[derive(Default)]
struct Shard {
    buckets: Segmented<Bucket>,
    /// Buckets before the growth in progress, and after it. The hashes whose old bucket is below `unmoved` lie as before.
    count: u64,
    next: u64,
    unmoved: u64,
    used: u64,
    growths: i32,
}

impl Shard {
    #[inline(always)]
    fn new_home(&self, key: u64) -> u64 {
        (((key << SHARD_BITS) as u128 * self.next as u128) >> 64) as u64
    }

    #[inline(always)]
    fn old_home(&self, key: u64) -> u64 {
        (((key << SHARD_BITS) as u128 * self.count as u128) >> 64) as u64
    }

    /// The bucket that `key` belongs to, and the number of buckets after which it goes on at the first.
    #[inline(always)]
    fn home(&self, key: u64) -> (u64, u64) {
        let old = self.old_home(key);
        let new = self.new_home(key);
        if old < self.unmoved { (old, self.count) } else { (new, self.next) }
    }

    #[inline(always)]
    fn find(&self, key: u64) -> Option<(usize, usize)> {
        if self.buckets.is_empty() {
            return None;
        }
        let (home, end) = self.home(key);
        let bucket = &self.buckets[home as usize];
        if let Some(i) = bucket.find(key) {
            return Some((home as usize, i));
        }
        if bucket.overflow() == 0 { None } else { self.find_behind(key, home, end) }
    }

    #[cold]
    fn find_behind(&self, key: u64, home: u64, end: u64) -> Option<(usize, usize)> {
        let mut at = behind(home, end);
        while at != home {
            let bucket = &self.buckets[at as usize];
            if let Some(i) = bucket.find(key) {
                return Some((at as usize, i));
            }
            if bucket.overflow() == 0 {
                break;
            }
            at = behind(at, end);
        }
        None
    }

    #[inline(always)]
    fn put(&mut self, entry: Entry) {
        let (at, end) = self.home(entry.key);
        self.put_from(at, end, entry);
    }

    #[inline(always)]
    fn put_from(&mut self, mut at: u64, end: u64, entry: Entry) {
        loop {
            let bucket = &mut self.buckets[at as usize];
            if let Some(i) = bucket.vacancy() {
                bucket.fill(i, entry);
                return;
            }
            bucket.overflow_add(1);
            at = behind(at, end);
        }
    }

    fn free(&mut self, at: usize, i: usize) {
        self.used -= 1;
        let (mut passed, end) = self.home(self.buckets[at].keys[i]);
        self.buckets[at].empty(i);
        while passed != at as u64 {
            self.buckets[passed as usize].overflow_add(-1);
            passed = behind(passed, end);
        }
    }

    #[cold]
    fn begin_growth(&mut self, number: usize, segments: &mut Segments, sets: &mut EndpointSets) {
        while self.unmoved > 0 {
            self.move_bucket(sets);
        }
        let phase = number as f64 / SHARDS as f64;
        let next = BUCKETS_MIN * GROWTH.powf(self.growths as f64 + phase);
        self.growths += 1;
        self.next = (next as u64).max(self.count + 1);
        self.buckets.extend_to(self.next as usize, segments);
        self.unmoved = self.count;
        if self.count == 0 {
            self.count = self.next;
        }
    }

    fn move_some(&mut self, sets: &mut EndpointSets) {
        let stop = self.unmoved.saturating_sub(MOVED_AT_ONCE);
        while self.unmoved > stop {
            self.move_bucket(sets);
        }
        // What the next time needs will be there then.
        let target = self.unmoved * self.next / self.count;
        for at in 1..=MOVED_AT_ONCE.min(self.unmoved) {
            fetch(self.buckets.place((self.unmoved - at) as usize));
            fetch(self.buckets.place((target - at) as usize));
        }
    }

    /// Moves the entries of the last bucket of the unmoved to where the larger table has them. Ghosts go for good.
    #[inline]
    fn move_bucket(&mut self, sets: &mut EndpointSets) {
        let home = self.unmoved - 1;
        if self.buckets[home as usize].overflow() == 0 && sets.ghosts() == 0 {
            for i in 0..PER_BUCKET {
                let entry = self.buckets[home as usize].entry(i);
                if entry.set != EMPTY && self.old_home(entry.key) == home {
                    self.buckets[home as usize].empty(i);
                    self.put_from(self.new_home(entry.key), self.next, entry);
                }
            }
        } else {
            self.move_overflowing(home, sets);
        }
        self.unmoved = home;
        if home == 0 {
            self.count = self.next;
        }
    }

    fn move_overflowing(&mut self, home: u64, sets: &mut EndpointSets) {
        let mut moving: Vec<Entry> = Vec::new();
        let mut at = home;
        loop {
            let overflow = self.buckets[at as usize].overflow();
            for i in 0..PER_BUCKET {
                let entry = self.buckets[at as usize].entry(i);
                if entry.set == EMPTY || self.old_home(entry.key) != home {
                    continue;
                }
                self.buckets[at as usize].empty(i);
                let mut passed = home;
                while passed != at {
                    self.buckets[passed as usize].overflow_add(-1);
                    passed = behind(passed, self.count);
                }
                if sets.is_empty(entry.set) {
                    sets.release(entry.set);
                    self.used -= 1;
                } else {
                    moving.push(entry);
                }
            }
            at = behind(at, self.count);
            if overflow == 0 || at == home {
                break;
            }
        }
        for entry in moving {
            self.put_from(self.new_home(entry.key), self.next, entry);
        }
    }
}

#[inline(always)]
fn behind(at: u64, end: u64) -> u64 {
    if at + 1 == end { 0 } else { at + 1 }
}

/// Chunks that are looked up together.
pub const BLOCK: usize = 32;

/// The buckets of a block of chunks, of a table that does not change meanwhile.
pub struct Ahead<'a> {
    homes: [*const Bucket; BLOCK],
    of: PhantomData<&'a BucketTable>,
}

/// What is known of a block of chunks: the set of each. Of some, by position, only after a look behind.
pub struct Found {
    pub sets: [u32; BLOCK],
    behind: [u8; BLOCK],
    behind_count: usize,
}

impl Default for Found {
    fn default() -> Self {
        Self { sets: [EMPTY; BLOCK], behind: [0; BLOCK], behind_count: 0 }
    }
}

pub struct BucketTable {
    shards: [Shard; SHARDS],
    segments: Segments,
    /// Shard and bucket where the search for ghosts goes on.
    swept: (usize, u64),
}

impl Default for BucketTable {
    fn default() -> Self {
        Self { shards: std::array::from_fn(|_| Shard::default()), segments: Segments::default(), swept: (0, 0) }
    }
}

impl BucketTable {
    #[inline(always)]
    fn shard_of(key: u64) -> usize {
        (key >> (64 - SHARD_BITS)) as usize
    }

    /// Entries, ghosts included.
    pub fn len(&self) -> u64 {
        self.shards.iter().map(|shard| shard.used).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.buckets.bytes()).sum()
    }

    /// The bucket that `key` belongs to.
    #[inline(always)]
    fn home(&self, key: u64) -> *const Bucket {
        let shard = &self.shards[Self::shard_of(key)];
        if shard.buckets.is_empty() { &NOTHING } else { shard.buckets.place(shard.home(key).0 as usize) }
    }

    /// Asks the processor for the place of `key`, ahead of its use.
    #[inline(always)]
    pub fn prefetch(&self, key: u64) {
        fetch(self.home(key));
    }

    #[inline(always)]
    pub fn find(&self, key: u64) -> Option<Place> {
        let shard = Self::shard_of(key);
        self.shards[shard].find(key).map(|(at, i)| Place { shard, at, i })
    }

    /// Set and tokens of `key`; the empty set where it is not there.
    #[inline(always)]
    pub fn get(&self, key: u64) -> (u32, u32) {
        match self.find(key) {
            Some(place) => self.entry(place),
            None => (EMPTY, 0),
        }
    }

    /// Ask for the buckets of `keys`, at most `BLOCK`, for `look_up`.
    pub fn look_ahead(&self, keys: &[u64]) -> Ahead<'_> {
        let mut ahead = Ahead { homes: [&NOTHING; BLOCK], of: PhantomData };
        for (home, &key) in ahead.homes.iter_mut().zip(keys) {
            *home = self.home(key);
            fetch(*home);
        }
        ahead
    }

    /// The sets of `keys`, which `ahead` was made for, and in the same breath `look_ahead` of `next`. Those that may be
    /// beyond their full buckets are answered later, by `look_behind`: their places are on their way then.
    #[inline]
    pub fn look_up(&self, keys: &[u64], next: &[u64], ahead: &mut Ahead, found: &mut Found) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("bmi2") {
            // SAFETY: the processor has them.
            return unsafe { self.look_up_avx2(keys, next, ahead, found) };
        }
        self.look_up_with(keys, next, ahead, found, Bucket::find_mask);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2")]
    fn look_up_avx2(&self, keys: &[u64], next: &[u64], ahead: &mut Ahead, found: &mut Found) {
        self.look_up_with(keys, next, ahead, found, |bucket, key| bucket.find_mask_avx2(key));
    }

    #[inline(always)]
    fn look_up_with(
        &self,
        keys: &[u64],
        next: &[u64],
        ahead: &mut Ahead,
        found: &mut Found,
        find_mask: impl Fn(&Bucket, u64) -> u32,
    ) {
        found.behind_count = 0;
        for (k, ((home, set), &key)) in ahead.homes.iter_mut().zip(&mut found.sets).zip(keys).enumerate() {
            // SAFETY: it points to a bucket of ours, or to the one that is empty for ever: `home` says where, and the
            // table is borrowed from `look_ahead` on, as `Ahead` says.
            let bucket = unsafe { &**home };
            let mask = find_mask(bucket, key);
            let of_entry = bucket.sets[mask.trailing_zeros() as usize & (PER_BUCKET - 1)];
            *set = if mask == 0 { EMPTY } else { of_entry };
            found.behind[found.behind_count & (BLOCK - 1)] = k as u8;
            found.behind_count += usize::from(mask == 0) & usize::from(bucket.overflow() != 0);
            if let Some(&key) = next.get(k) {
                *home = self.home(key);
                fetch(*home);
            }
        }
        for (home, &key) in ahead.homes.iter_mut().zip(next).skip(keys.len()) {
            *home = self.home(key);
            fetch(*home);
        }
        for &k in &found.behind[..found.behind_count] {
            let key = keys[k as usize];
            let shard = &self.shards[Self::shard_of(key)];
            let (home, end) = shard.home(key);
            let next = behind(home, end);
            fetch(shard.buckets.place(next as usize));
            fetch(shard.buckets.place(behind(next, end) as usize));
        }
    }

    /// Completes `found`, of the same `keys`.
    #[inline]
    pub fn look_behind(&self, keys: &[u64], found: &mut Found) {
        for &k in &found.behind[..found.behind_count] {
            found.sets[k as usize] = self.get(keys[k as usize]).0;
        }
    }

    #[inline(always)]
    pub fn entry(&self, place: Place) -> (u32, u32) {
        let bucket = &self.shards[place.shard].buckets[place.at];
        (bucket.sets[place.i], bucket.tokens[place.i] & TOKENS_MASK)
    }

    #[inline(always)]
    pub fn set(&mut self, place: Place, set: u32) {
        self.shards[place.shard].buckets[place.at].sets[place.i] = set;
    }

    #[inline(always)]
    pub fn set_tokens(&mut self, place: Place, tokens: u32) {
        self.shards[place.shard].buckets[place.at].set_tokens(place.i, tokens);
    }

    /// A key that is not there. Work that is due goes along: a few buckets of a growth, a few of a search for ghosts.
    #[inline]
    pub fn insert(&mut self, entry: Entry, sets: &mut EndpointSets) {
        let number = Self::shard_of(entry.key);
        let shard = &mut self.shards[number];
        if (shard.used + 1) * 100 > shard.next * PER_BUCKET as u64 * LOAD_MAX_PERCENT {
            shard.begin_growth(number, &mut self.segments, sets);
        }
        shard.used += 1;
        if shard.unmoved > 0 && shard.used.is_multiple_of(ENTRIES_PER_MOVE) {
            shard.move_some(sets);
        }
        shard.put(entry);
        if sets.ghosts() > 0 {
            self.sweep(sets);
        }
    }

    pub fn remove(&mut self, place: Place) {
        self.shards[place.shard].free(place.at, place.i);
    }

    /// Looks through a few buckets for entries that nobody holds any more.
    #[cold]
    pub fn sweep(&mut self, sets: &mut EndpointSets) {
        for _ in 0..SWEPT_PER_CHANGE {
            let (number, at) = self.swept;
            let shard = &mut self.shards[number];
            if at >= shard.next {
                self.swept = ((number + 1) % SHARDS, 0);
                continue;
            }
            for i in 0..PER_BUCKET {
                let set = shard.buckets[at as usize].sets[i];
                if set != EMPTY && sets.is_empty(set) {
                    sets.release(set);
                    shard.free(at as usize, i);
                }
            }
            self.swept.1 += 1;
        }
    }

    /// All entries, by shard, in about the order of their hashes.
    pub fn iter(&self) -> impl Iterator<Item = Entry> {
        self.shards.iter().flat_map(|shard| {
            (0..shard.next).flat_map(move |at| {
                let bucket = &shard.buckets[at as usize];
                (0..PER_BUCKET).filter(|&i| bucket.sets[i] != EMPTY).map(move |i| bucket.entry(i))
            })
        })
    }

    /// What is wrong with the state, if anything.
    pub fn check(&self) -> Result<(), String> {
        for (number, shard) in self.shards.iter().enumerate() {
            let mut used = 0;
            for at in 0..shard.next as usize {
                for i in (0..PER_BUCKET).filter(|&i| shard.buckets[at].sets[i] != EMPTY) {
                    used += 1;
                    let key = shard.buckets[at].keys[i];
                    if Self::shard_of(key) != number || shard.find(key) != Some((at, i)) {
                        return Err(format!("chunk {key}: not where it is looked for"));
                    }
                }
            }
            if used != shard.used {
                return Err(format!("shard {number}: entries are miscounted"));
            }
        }
        Ok(())
    }
}

/// Asks the processor for a bucket that will be looked at soon.
#[inline(always)]
fn fetch(bucket: *const Bucket) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch(bucket.cast::<i8>(), _MM_HINT_T0);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bucket;
}
