//! The hotspot detector: prefix classes that bring more load than the endpoints which hold their prefix can carry.
//!
//! What counts, and why, is said in `trimtab_core.hotspot`, the specification, which this must equal to the last bit.

use crate::hotspot_arrivals::Arrivals;
use crate::slot_bits;

const ALARMS_MAX: usize = 64;
const IN_CLASS_MIN: usize = 20;
const DEVIATIONS: f64 = 4.0;
const IN_CLASS_LEFT_MIN: usize = 10;
const PARTING_SHARE: usize = 8;
const COMMON_SHARE: usize = 50;
const SEEN_COUNT: u32 = 32;
const OTHERS_MIN: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HotspotSettings {
    pub window_s: f64,
    pub acts: bool,
}

/// A class with an alarm, for those who look.
#[derive(Clone, Copy, Debug)]
pub struct Hotspot {
    pub prefix_class: u64,
    pub since_s: f64,
    pub came_s: f64,
    pub is_acted_on: bool,
    pub holders: usize,
    pub others: usize,
    pub in_class: usize,
    pub arrivals: usize,
}

/// Holders that a request was kept from, rising, and their class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    pub prefix_class: u64,
    pub slots: Vec<u32>,
}

struct Alarm {
    prefix_class: u64,
    depth_chunks: usize,
    since_s: f64,
    came_s: f64,
    /// M, or what the product had left of it.
    holders: Vec<u64>,
    /// M and M'.
    candidates: Vec<u64>,
    /// Where its last requests could have gone, and how many those are.
    seen: Vec<u64>,
    seen_count: u32,
    in_a_row: usize,
    is_acted_on: bool,
}

impl Alarm {
    /// |M| and |M'|.
    fn counts(&self) -> (usize, usize) {
        let held = slot_bits::count(&self.holders);
        (held, slot_bits::count(&self.candidates) - held)
    }

    /// All are as long as there were slots, which are never fewer.
    fn grow(&mut self, words: usize) {
        for slots in [&mut self.holders, &mut self.candidates, &mut self.seen] {
            slots.resize(words, 0);
        }
    }

    /// One more request; where none of the last could go is forgotten.
    fn saw(&mut self, candidates: &[u64]) {
        self.seen.iter_mut().zip(candidates).for_each(|(word, seen)| *word |= seen);
        self.seen_count += 1;
        if self.seen_count == SEEN_COUNT {
            self.candidates = std::mem::replace(&mut self.seen, vec![0; candidates.len()]);
            self.seen_count = 0;
            self.holders.iter_mut().zip(&self.candidates).for_each(|(word, seen)| *word &= seen);
        }
    }
}

/// Off until it is set.
#[derive(Default)]
pub struct HotspotDetector {
    settings: Option<HotspotSettings>,
    arrivals: Arrivals,
    /// In the order in which they were raised.
    alarms: Vec<Alarm>,
    raised: u64,
    acted: u64,
}

impl HotspotDetector {
    pub fn set(&mut self, settings: Option<HotspotSettings>) {
        self.settings = settings;
        match settings {
            None => {
                self.arrivals.clear();
                self.alarms.clear();
            }
            Some(settings) if !settings.acts => self.alarms.iter_mut().for_each(|alarm| alarm.is_acted_on = false),
            Some(_) => {}
        }
    }

    pub fn slot_reset(&mut self, slot: usize) {
        for alarm in &mut self.alarms {
            let all = [&mut alarm.holders, &mut alarm.candidates, &mut alarm.seen];
            for word in all.into_iter().filter_map(|slots| slots.get_mut(slot / 64)) {
                *word &= !(1 << (slot % 64));
            }
        }
    }

    pub fn advance(&mut self, now_s: f64) {
        let Some(settings) = self.settings else { return };
        self.arrivals.forget_before(now_s - settings.window_s);
        let arrivals = &self.arrivals;
        self.alarms.retain(|alarm| is_above(arrivals, alarm));
    }

    /// A request is about to be placed; the number of the alarm of its class, if there is one. `hits`: slots with the
    /// chunks that each holds of it, those included that are on their way there. `is_again`: it was counted.
    pub fn arrived(
        &mut self,
        chain: &[u64],
        hits: impl Iterator<Item = (u32, usize)> + Clone,
        candidates: &[u64],
        is_product: bool,
        is_again: bool,
        now_s: f64,
    ) -> Option<usize> {
        let settings = self.settings?;
        self.arrivals.forget_before(now_s - settings.window_s);
        if is_again {
            return self.refreshed(chain, hits, candidates, is_product);
        }
        self.arrivals.add(chain, now_s);
        let of_path = self.refreshed(chain, hits.clone(), candidates, is_product);
        let (total, slots) = (self.arrivals.len(), slot_bits::count(candidates));
        let is_enough = |count| is_clearly_above(count, total, 1, slots);
        let of_path_depth = of_path.map_or(0, |number| self.alarms[number].depth_chunks);
        let deeper = self.arrivals.deepest(is_enough, PARTING_SHARE).filter(|&(_, depth, _)| depth > of_path_depth);
        let Some((prefix_class, depth_chunks, in_class)) = deeper else {
            if let Some(number) = of_path {
                self.alarms[number].came_s = now_s;
            }
            return of_path;
        };
        let alarm = Alarm {
            prefix_class,
            depth_chunks,
            since_s: now_s,
            came_s: now_s,
            holders: holders(hits, depth_chunks, candidates.len()),
            candidates: candidates.to_vec(),
            seen: vec![0; candidates.len()],
            seen_count: 0,
            in_a_row: 0,
            is_acted_on: false,
        };
        self.raised_for(alarm, in_class)
    }

    /// The alarms of all prefixes of a request, seen anew; the number of the deepest that goes on. What a request cannot
    /// see stays as it was known.
    fn refreshed(
        &mut self,
        chain: &[u64],
        hits: impl Iterator<Item = (u32, usize)> + Clone,
        candidates: &[u64],
        is_product: bool,
    ) -> Option<usize> {
        let arrivals = &self.arrivals;
        self.alarms.retain_mut(|alarm| {
            if chain.get(alarm.depth_chunks - 1) != Some(&alarm.prefix_class) {
                return true;
            }
            alarm.grow(candidates.len());
            alarm.candidates.iter_mut().zip(candidates).for_each(|(word, seen)| *word |= seen);
            if is_product {
                alarm.holders.iter_mut().zip(candidates).for_each(|(word, seen)| *word &= !seen);
                let now = holders(hits.clone(), alarm.depth_chunks, candidates.len());
                alarm.holders.iter_mut().zip(now).for_each(|(word, now)| *word |= now);
            }
            alarm.saw(candidates);
            is_above(arrivals, alarm)
        });
        let of_path = self.alarms.iter().enumerate();
        let of_path = of_path.filter(|(_, alarm)| chain.get(alarm.depth_chunks - 1) == Some(&alarm.prefix_class));
        of_path.max_by_key(|(_, alarm)| alarm.depth_chunks).map(|(number, _)| number)
    }

    /// The slots that count as holders of an alarm's class.
    pub fn holders(&self, number: usize) -> &[u64] {
        &self.alarms[number].holders
    }

    /// The second stage: whether this request is kept from the holders. `score`: the product's, of every slot; in the
    /// shadow, as if nobody but the holders held the prefix.
    pub fn routed(
        &mut self,
        number: usize,
        candidates: &[u64],
        score: &[f64],
        is_product: bool,
        is_again: bool,
    ) -> Option<LeftOut> {
        let acts = self.settings.is_some_and(|settings| settings.acts);
        let alarm = &mut self.alarms[number];
        let pairs = || candidates.iter().zip(&alarm.holders);
        let held: Vec<u64> = pairs().map(|(candidates, holders)| candidates & holders).collect();
        let others: Vec<u64> = pairs().map(|(candidates, holders)| candidates & !holders).collect();
        if slot_bits::is_empty(&held) || slot_bits::is_empty(&others) {
            return None;
        }
        let (best, best_other) = (best(score, &held), best(score, &others));
        let is_drawn = best.1 <= best_other.1;
        if !is_again {
            alarm.in_a_row = if is_drawn { alarm.in_a_row + 1 } else { 0 };
        }
        if !is_product {
            if !is_drawn {
                alarm.holders[best_other.0 / 64] |= 1 << (best_other.0 % 64);
            }
            return None;
        }
        if acts && !alarm.is_acted_on && alarm.in_a_row >= 2 * alarm.counts().0 {
            alarm.is_acted_on = true;
            self.acted += 1;
        }
        (alarm.is_acted_on && is_drawn).then(|| {
            let mut slots = Vec::new();
            slot_bits::each(&held, |slot| slots.push(slot as u32));
            LeftOut { prefix_class: alarm.prefix_class, slots }
        })
    }

    pub fn hotspots(&self) -> impl Iterator<Item = Hotspot> {
        self.alarms.iter().map(|alarm| {
            let (holders, others) = alarm.counts();
            Hotspot {
                prefix_class: alarm.prefix_class,
                since_s: alarm.since_s,
                came_s: alarm.came_s,
                is_acted_on: alarm.is_acted_on,
                holders,
                others,
                in_class: self.arrivals.count(alarm.prefix_class),
                arrivals: self.arrivals.len(),
            }
        })
    }

    pub fn arrivals(&self) -> &Arrivals {
        &self.arrivals
    }

    /// Alarms so far, and those that were acted on.
    pub fn counters(&self) -> (u64, u64) {
        (self.raised, self.acted)
    }

    /// The first stage, for a class without an alarm.
    fn raised_for(&mut self, alarm: Alarm, in_class: usize) -> Option<usize> {
        let total = self.arrivals.len();
        let (held, others) = alarm.counts();
        let is_hot = is_clearly_above(in_class, total, held, held + others) && is_told_apart(in_class, total);
        if !is_hot || self.alarms.len() >= ALARMS_MAX {
            return None;
        }
        self.alarms.push(alarm);
        self.raised += 1;
        Some(self.alarms.len() - 1)
    }

    /// What is wrong with the state, if anything.
    pub fn check(&self) -> Result<(), String> {
        self.arrivals.check()?;
        if self.alarms.len() > ALARMS_MAX {
            return Err("more alarms than there may be".into());
        }
        let is_beyond = |alarm: &Alarm| alarm.holders.iter().zip(&alarm.candidates).any(|(held, of)| held & !of != 0);
        if self.alarms.iter().any(is_beyond) {
            return Err("a holder that was never a candidate".into());
        }
        if self.settings.is_none() && !(self.alarms.is_empty() && self.arrivals.is_empty()) {
            return Err("off, and not empty".into());
        }
        Ok(())
    }
}

/// Whether x/x' > |M|/|M'| holds still.
fn is_above(arrivals: &Arrivals, alarm: &Alarm) -> bool {
    let (held, others) = alarm.counts();
    let (count, total) = (arrivals.count(alarm.prefix_class), arrivals.len());
    let is_seen = held > 0 && others > 0 && count >= IN_CLASS_LEFT_MIN;
    is_seen && is_told_apart(count, total) && count * others > (total - count) * held
}

/// Whether `count` of `total` arrivals are more than the share of `held` of the `slots`, beyond chance.
fn is_clearly_above(count: usize, total: usize, held: usize, slots: usize) -> bool {
    if count < IN_CLASS_MIN || held == 0 || held >= slots {
        return false;
    }
    let expected = (total * held) as f64 / slots as f64;
    count as f64 > expected + DEVIATIONS * (expected * (slots - held) as f64 / slots as f64).sqrt()
}

/// Whether there are other arrivals than those of the class.
fn is_told_apart(count: usize, total: usize) -> bool {
    let others = total - count;
    others >= OTHERS_MIN && others * COMMON_SHARE > total
}

/// Who holds so much.
fn holders(hits: impl Iterator<Item = (u32, usize)>, depth_chunks: usize, words: usize) -> Vec<u64> {
    let mut holders = vec![0u64; words];
    for (slot, _) in hits.filter(|&(_, chunks)| chunks >= depth_chunks) {
        holders[slot as usize / 64] |= 1 << (slot % 64);
    }
    holders
}

/// The slot with the least score, and that score; of equals the lowest.
fn best(score: &[f64], slots: &[u64]) -> (usize, f64) {
    let mut best = (0, f64::INFINITY);
    slot_bits::each(slots, |slot| {
        if score[slot] < best.1 {
            best = (slot, score[slot]);
        }
    });
    best
}
