//! The scheduler: index, speculation, load and policy in one. It chooses a slot and reserves it in one step.
//!
//! Synchronous and single-threaded; `now_s` does not fall from call to call. Everything here must equal
//! `trimtab_core.scheduler`, the specification, to the last bit; the tests run both on the same histories.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::chunks::CHUNK_BYTES;
use crate::endpoint_sets::FoldMap;
use crate::extra_terms::{ExtraTerms, weighted};
use crate::fleet_load::{FleetLoad, Reservations};
use crate::hotspot::{HotspotDetector, HotspotSettings};
use crate::learned_index::LearnedIndex;
use crate::policies::{How, Policy, Rounds, TieBreak};
use crate::prefix_index::PrefixIndex;
pub use crate::prompt_match::Prompt;
use crate::prompt_match::{Audience, Match, Matcher, Sources};
use crate::reservation::{Key, NOWHERE, Origin, Reservation};
use crate::settings::Settings;
use crate::slot_bits;
use crate::speculation::{Origins, Run, Speculation};
use crate::terms::{Scoring, Terms, p_tokens};

const SAMPLE_STEP: usize = 16;
const SAMPLE_STEP_SHORT: usize = 4;
const SHORT_BYTES: usize = 4096;
const ENDED_REMEMBERED: usize = 8192;
const REPLICAS_MAX: usize = 1024;
/// How many slots are ranked: the best and its alternatives.
const RANKED: usize = 3;

/// One request to be placed. Arrays may be shorter than the number of slots.
pub struct Request<'a> {
    /// `prompts[p][v]`: prompt p as variant v renders it.
    pub prompts: Vec<Vec<Prompt<'a>>>,
    pub variant_of_slot: &'a [i8],
    pub exact: &'a [bool],
    pub candidates: &'a [bool],
    pub tokens_per_byte: f64,
    pub batch: i64,
    pub cache_reads: bool,
    pub policy: Policy,
    pub batch_max: Option<i64>,
    /// Of its class, in thousandths of an ordinary request.
    pub weight_milli: i64,
    pub extra: ExtraTerms<'a>,
    /// It was placed a moment ago, and its reservation ended: the hotspot detector counts it once.
    pub is_again: bool,
}

#[derive(Debug)]
pub struct Placement {
    pub reservation_id: u64,
    pub slot: u32,
    pub alternatives: Vec<u32>,
    pub prompt_tokens: i64,
    pub terms: Terms,
    pub p_own_tokens: i64,
    pub policy: Policy,
    pub how: How,
    pub sample_hashes: Vec<u64>,
    pub sample_tokens: Vec<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    NoEndpoints,
    TooManyOpen,
    EndpointsFull,
}

#[derive(Debug, PartialEq, Eq)]
pub struct UnknownSlot(pub i64);

/// Open reservations of one replica in the order they came, and the ids that ended last.
#[derive(Default)]
struct Ledger {
    open: BTreeMap<u64, u64>,
    order_of: FoldMap<u64, u64>,
    next_order: u64,
    ended: FoldMap<u64, ()>,
    ended_order: VecDeque<u64>,
}

impl Ledger {
    fn len(&self) -> usize {
        self.open.len()
    }
    fn is_open(&self, id: u64) -> bool {
        self.order_of.contains_key(&id)
    }
    fn is_new(&self, id: u64) -> bool {
        !self.is_open(id) && !self.ended.contains_key(&id)
    }
    fn add(&mut self, id: u64) {
        self.open.insert(self.next_order, id);
        self.order_of.insert(id, self.next_order);
        self.next_order += 1;
    }
    /// Whether it was open. Ids that never were are remembered as ended too.
    fn end(&mut self, id: u64) -> bool {
        if self.ended.insert(id, ()).is_none() {
            self.ended_order.push_back(id);
            if self.ended_order.len() > ENDED_REMEMBERED
                && let Some(oldest) = self.ended_order.pop_front()
            {
                self.ended.remove(&oldest);
            }
        }
        match self.order_of.remove(&id) {
            Some(order) => self.open.remove(&order).is_some(),
            None => false,
        }
    }
}

pub struct Scheduler {
    pub settings: Settings,
    live: Vec<bool>,
    index: PrefixIndex,
    learned: LearnedIndex,
    speculation: Speculation,
    load: FleetLoad,
    reservations: Reservations,
    own: Ledger,
    peers: FoldMap<u64, Ledger>,
    rounds: Rounds,
    ties: TieBreak,
    next_id: u64,
    /// (slot, chunk) -> own reservations that wait for it, in order.
    watch: FoldMap<(u32, u64), Vec<Key>>,
    is_approximate: Vec<bool>,
    hotspots: HotspotDetector,
    matcher: Matcher,
    /// Room for the scores and hits of a decision. Between decisions no slot has a hit in it.
    scores: Vec<f64>,
    hit_tokens: Vec<f64>,
}

impl Scheduler {
    pub fn new(rng_seed: u64, settings: Settings) -> Self {
        Self {
            speculation: Speculation::new(settings.speculative_chunks_max),
            settings,
            live: Vec::new(),
            index: PrefixIndex::new(),
            learned: LearnedIndex::default(),
            load: FleetLoad::default(),
            reservations: Reservations::default(),
            own: Ledger::default(),
            peers: FoldMap::default(),
            rounds: Rounds::default(),
            ties: TieBreak::new(rng_seed),
            next_id: 1,
            watch: FoldMap::default(),
            is_approximate: Vec::new(),
            hotspots: HotspotDetector::default(),
            matcher: Matcher::default(),
            scores: Vec::new(),
            hit_tokens: Vec::new(),
        }
    }

    pub fn slot_count(&self) -> usize {
        self.live.len()
    }

    pub fn add_slot(&mut self) -> u32 {
        let slot = self.live.iter().position(|live| !live).unwrap_or(self.live.len());
        if slot == self.live.len() {
            self.live.push(true);
            self.is_approximate.push(false);
        }
        self.live[slot] = true;
        self.reset(slot as u32);
        slot as u32
    }

    pub fn remove_slot(&mut self, slot: i64) -> Result<(), UnknownSlot> {
        let slot = self.checked(slot)?;
        self.live[slot as usize] = false;
        self.reset(slot);
        Ok(())
    }

    fn reset(&mut self, slot: u32) {
        self.index.clear(slot);
        self.learned.clear(slot);
        self.speculation.drop_slot(slot);
        let waiting: Vec<Key> =
            self.watch.iter().filter(|((s, _), _)| *s == slot).flat_map(|(_, k)| k.clone()).collect();
        for key in waiting {
            if let Some(reservation) = self.reservations.get_mut(&key) {
                reservation.watched.clear();
                reservation.expects_signal = false;
            }
        }
        self.watch.retain(|(s, _), _| *s != slot);
        self.is_approximate[slot as usize] = false;
        self.load.reset_slot(slot, &self.settings, &mut self.reservations);
        self.rounds.slot_reset(slot as usize);
        self.hotspots.slot_reset(slot as usize);
    }

    pub fn kv_apply(
        &mut self,
        slot: i64,
        added: &[u64],
        tokens: &[u32],
        removed: &[u64],
        now_s: f64,
    ) -> Result<Vec<u64>, UnknownSlot> {
        let slot = self.checked(slot)?;
        self.index.apply(slot, added, tokens, removed);
        Ok(self.appeared(slot, added, now_s))
    }

    pub fn kv_replace(
        &mut self,
        slot: i64,
        hashes: &[u64],
        tokens: &[u32],
        now_s: f64,
    ) -> Result<Vec<u64>, UnknownSlot> {
        let slot = self.checked(slot)?;
        self.index.clear(slot);
        self.index.apply(slot, hashes, tokens, &[]);
        Ok(self.appeared(slot, hashes, now_s))
    }

    pub fn kv_clear(&mut self, slot: i64) -> Result<(), UnknownSlot> {
        let slot = self.checked(slot)?;
        self.index.clear(slot);
        self.learned.clear(slot);
        Ok(())
    }

    pub fn kv_export(&self, slot: i64) -> Result<Vec<(u64, u32)>, UnknownSlot> {
        Ok(self.index.export(self.checked(slot)?))
    }

    pub fn report(&mut self, slot: i64, requests: i64, block: i64, capacity: i64) -> Result<(), UnknownSlot> {
        let slot = self.checked(slot)?;
        self.load.report(slot, requests, block, capacity, &self.settings);
        Ok(())
    }

    pub fn place(&mut self, request: &Request, now_s: f64) -> Result<Placement, Refusal> {
        self.speculation.expire(now_s);
        if self.own.len() >= self.settings.reservations_max {
            return Err(Refusal::TooManyOpen);
        }
        let slots = self.slot_count();
        let mut candidates = vec![0u64; slots.div_ceil(64)];
        self.candidates(request, &mut candidates);
        if slot_bits::is_empty(&candidates) {
            return Err(Refusal::NoEndpoints);
        }
        if let Some(most) = request.batch_max {
            let present = &self.load.present;
            let mut fitting = candidates.clone();
            slot_bits::each(&candidates, |slot| {
                if present[slot] > 0.0 && present[slot] as i64 + request.batch > most {
                    fitting[slot / 64] &= !(1 << (slot % 64));
                }
            });
            candidates = fitting;
            if slot_bits::is_empty(&candidates) {
                return Err(Refusal::EndpointsFull);
            }
        }
        let matches = self.matches(request, &candidates);
        let prompt_tokens = matches.iter().flatten().map(|found| found.prompt_tokens).sum();
        let hits = if request.cache_reads { self.whole_block_hits(&matches) } else { Vec::new() };
        let alarm = self.hotspot_alarm(request, &matches, &candidates, now_s);
        if let Some(alarm) = alarm.filter(|_| request.policy != Policy::Product) {
            self.route_in_the_shadow(alarm, request, &candidates, prompt_tokens, &hits);
        }
        let scoring = self.score(request, &candidates, prompt_tokens, &hits);
        let left_out = alarm
            .filter(|_| request.policy == Policy::Product)
            .and_then(|alarm| self.hotspots.routed(alarm, &candidates, &self.scores, true, request.is_again));
        for &slot in left_out.iter().flat_map(|left_out| &left_out.slots) {
            self.scores[slot as usize] = f64::INFINITY;
        }
        let (ranked, how) = self.ties.best(&mut self.scores, &self.load.present, RANKED);
        let (Some(&slot), Some(how)) = (ranked.first(), how) else { return Err(Refusal::NoEndpoints) };
        if request.policy == Policy::RoundRobin {
            self.rounds.picked(slot as usize);
        }
        let hit = hits.iter().find(|&&(of, _)| of == slot).map_or(0, |&(_, tokens)| tokens);
        let own_tokens = prompt_tokens - hit;
        let terms = Terms {
            candidates,
            prompt_tokens,
            hits,
            queued_tokens: self.load.queued_tokens.clone(),
            present: self.load.present.clone(),
            present_milli: self.load.present_milli.clone(),
            batch: request.batch,
            expert_factor: request.extra.expert_factor.to_vec(),
            network_tokens: self.network_tokens(request),
            log_above_tokens: request.extra.log_above_tokens,
            floor: Arc::clone(&self.load.floor),
            scoring,
            left_out,
        };
        let key = (Origin::Own, self.next_id);
        self.next_id += 1;
        let mut reservation = Reservation {
            key,
            slot,
            p_tokens: own_tokens,
            batch: request.batch,
            weight_milli: request.weight_milli,
            is_queued: true,
            queued_since_s: now_s,
            served_s: None,
            watched: Vec::new(),
            expects_signal: false,
            is_approximate: false,
            sample_hashes: Vec::new(),
            sample_tokens: Vec::new(),
        };
        self.claim(&mut reservation, request, &matches);
        self.own.add(key.1);
        self.load.open(&mut reservation, now_s);
        let placement = Placement {
            reservation_id: key.1,
            slot,
            alternatives: ranked[1..].to_vec(),
            prompt_tokens,
            terms,
            p_own_tokens: own_tokens,
            policy: request.policy,
            how,
            sample_hashes: reservation.sample_hashes.clone(),
            sample_tokens: reservation.sample_tokens.clone(),
        };
        self.reservations.insert(key, reservation);
        Ok(placement)
    }

    pub fn first_token(&mut self, id: u64, now_s: f64) -> bool {
        let key = (Origin::Own, id);
        if !self.own.is_open(id) || !self.reservations.get(&key).is_some_and(|r| r.is_queued) {
            return false;
        }
        self.prefilled(key, now_s, true);
        true
    }

    pub fn move_to(&mut self, id: u64, slot: i64, now_s: f64) -> bool {
        if !self.own.is_open(id) {
            return false;
        }
        self.relocate((Origin::Own, id), slot, now_s);
        true
    }

    pub fn finish(&mut self, id: u64, now_s: f64) -> bool {
        if !self.own.end(id) {
            return false;
        }
        self.ended((Origin::Own, id), now_s);
        true
    }

    /// Own open reservations that weigh on a slot, in the order they came; each with whether its claim stands.
    pub fn open_reservations(&self) -> impl Iterator<Item = (&Reservation, bool)> {
        self.own
            .open
            .values()
            .filter_map(|&id| self.reservations.get(&(Origin::Own, id)))
            .filter(|r| r.slot != NOWHERE)
            .map(|r| (r, self.speculation.claim_of(r.key).is_some()))
    }

    pub fn advance(&mut self, now_s: f64) -> Vec<u64> {
        self.hotspots.advance(now_s);
        let faded = self.load.advance(&mut self.reservations, now_s, &self.settings);
        for &key in &faded {
            self.settle(key, now_s);
        }
        self.speculation.expire(now_s);
        self.index.tidy();
        self.learned.index.tidy();
        faded.into_iter().map(|key| key.1).collect()
    }

    #[allow(clippy::too_many_arguments)] // the fields of one entry of the load log
    pub fn peer_reserve(
        &mut self,
        incarnation: u64,
        id: u64,
        slot: i64,
        p_tokens: i64,
        batch: i64,
        hashes: &[u64],
        tokens: &[u32],
        now_s: f64,
        weight_milli: i64,
    ) {
        if !self.peers.contains_key(&incarnation) && self.peers.len() >= REPLICAS_MAX {
            return;
        }
        let key = (Origin::Peer(incarnation), id);
        let ledger = self.peers.entry(incarnation).or_default();
        if !ledger.is_open(id) {
            if !ledger.is_new(id) || ledger.len() >= self.settings.reservations_max {
                return;
            }
            ledger.add(id);
            let slot = self.known(slot).unwrap_or(NOWHERE);
            let mut reservation = Reservation {
                key,
                slot,
                p_tokens,
                batch,
                weight_milli,
                is_queued: true,
                queued_since_s: now_s,
                served_s: None,
                watched: Vec::new(),
                expects_signal: false,
                is_approximate: false,
                sample_hashes: Vec::new(),
                sample_tokens: Vec::new(),
            };
            // A replica that was dropped and came back may use an id again whose claim is still in its grace.
            self.speculation.end(key);
            if slot != NOWHERE {
                let is_approximate = self.is_approximate[slot as usize];
                let last = if is_approximate { None } else { self.last_missing(slot, hashes) };
                // Else events were faster than this word of what they tell of: there is nothing left to claim.
                if is_approximate || last.is_some() {
                    let samples = Origins::Samples(tokens.to_vec());
                    self.speculation.claim(key, slot, hashes.to_vec(), samples, last.into_iter().collect());
                }
            }
            self.load.open(&mut reservation, now_s);
            self.reservations.insert(key, reservation);
        }
        if p_tokens == 0 && self.reservations.get(&key).is_some_and(|r| r.is_queued) {
            self.prefilled(key, now_s, false);
        }
    }

    pub fn peer_first_token(&mut self, incarnation: u64, id: u64, now_s: f64) {
        if self.is_peer_open(incarnation, id)
            && self.reservations.get(&(Origin::Peer(incarnation), id)).is_some_and(|r| r.is_queued)
        {
            self.prefilled((Origin::Peer(incarnation), id), now_s, false);
        }
    }

    pub fn peer_move(&mut self, incarnation: u64, id: u64, slot: i64, now_s: f64) {
        if self.is_peer_open(incarnation, id) {
            self.relocate((Origin::Peer(incarnation), id), slot, now_s);
        }
    }

    pub fn peer_finish(&mut self, incarnation: u64, id: u64, now_s: f64) {
        if self.peers.get_mut(&incarnation).is_some_and(|ledger| ledger.end(id)) {
            self.ended((Origin::Peer(incarnation), id), now_s);
        }
    }

    pub fn peer_drop(&mut self, incarnation: u64, now_s: f64) {
        if let Some(ledger) = self.peers.remove(&incarnation) {
            for id in ledger.open.into_values() {
                let key = (Origin::Peer(incarnation), id);
                self.unwatch(key);
                self.load.close_of_gone(key, &mut self.reservations, now_s);
                self.forget(key);
            }
        }
    }

    pub fn hotspots(&self) -> &HotspotDetector {
        &self.hotspots
    }

    pub fn watch_hotspots(&mut self, settings: Option<HotspotSettings>) {
        self.hotspots.set(settings);
    }

    pub fn load(&self) -> &FleetLoad {
        &self.load
    }

    pub fn index_size(&self) -> (usize, u64) {
        (self.index.chunks(), self.index.pairs())
    }

    /// What is learned of a slot: chunks with the tokens that each adds, the next to forget first.
    pub fn learned_export(&self, slot: i64) -> Result<Vec<(u64, i64)>, UnknownSlot> {
        Ok(self.learned.export(self.checked(slot)?))
    }

    pub fn speculative_chunks(&self) -> usize {
        self.speculation.chunk_count()
    }

    /// Incarnations of the other replicas that are counted.
    pub fn replicas(&self) -> impl Iterator<Item = u64> {
        self.peers.keys().copied()
    }

    pub fn index_bytes(&self) -> usize {
        self.index.bytes()
    }

    fn is_peer_open(&self, incarnation: u64, id: u64) -> bool {
        self.peers.get(&incarnation).is_some_and(|ledger| ledger.is_open(id))
    }

    fn known(&self, slot: i64) -> Option<u32> {
        (0..self.live.len() as i64).contains(&slot).then_some(slot as u32).filter(|&s| self.live[s as usize])
    }

    fn checked(&self, slot: i64) -> Result<u32, UnknownSlot> {
        self.known(slot).ok_or(UnknownSlot(slot))
    }

    fn candidates(&self, request: &Request, candidates: &mut [u64]) {
        let mut flags = [false; 64];
        let pairs = self.live.chunks(64).zip(request.candidates.chunks(64));
        for (word, (live, wanted)) in candidates.iter_mut().zip(pairs) {
            let both = live.iter().zip(wanted);
            flags.iter_mut().zip(both).for_each(|(flag, (&live, &wanted))| *flag = live & wanted);
            slot_bits::pack(&flags[..live.len().min(wanted.len())], std::slice::from_mut(word));
        }
    }

    /// One match for each prompt of which some text is known; `None` for the others, so that positions agree.
    fn matches(&mut self, request: &Request, candidates: &[u64]) -> Vec<Option<Match>> {
        let variants = request.prompts.iter().map(Vec::len).max().unwrap_or(0);
        let mut exact = vec![0; candidates.len()];
        slot_bits::pack(request.exact, &mut exact);
        let audiences: Vec<Audience> = (0..variants)
            .map(|variant| {
                let mut of_variant = vec![0; candidates.len()];
                let mut flags = [false; 64];
                for (word, numbers) in of_variant.iter_mut().zip(request.variant_of_slot.chunks(64)) {
                    flags
                        .iter_mut()
                        .zip(numbers)
                        .for_each(|(flag, &number)| *flag = number as isize == variant as isize);
                    slot_bits::pack(&flags[..numbers.len()], std::slice::from_mut(word));
                }
                of_variant.iter_mut().zip(candidates).for_each(|(word, candidates)| *word &= candidates);
                Audience {
                    approximate: of_variant.iter().zip(&exact).map(|(word, exact)| word & !exact).collect(),
                    exact: of_variant.iter().zip(&exact).map(|(word, exact)| word & exact).collect(),
                }
            })
            .collect();
        let (slots, tokens_per_byte) = (self.slot_count(), request.tokens_per_byte);
        let from = Sources { index: &self.index, learned: &self.learned, speculation: &self.speculation };
        let of_prompt =
            |renderings: &Vec<Prompt>| self.matcher.find(renderings, &audiences, slots, tokens_per_byte, &from);
        request.prompts.iter().map(of_prompt).collect()
    }

    /// Hits of all prompts together: of each at most the whole blocks of all its tokens but the last, which an engine
    /// always computes.
    fn whole_block_hits(&mut self, matches: &[Option<Match>]) -> Vec<(u32, i64)> {
        let mut hits: Vec<(u32, i64)> =
            Vec::with_capacity(matches.iter().flatten().map(|found| found.hits.len()).sum());
        for found in matches.iter().flatten() {
            let all_but_last = (found.prompt_tokens - 1).max(0);
            let (mut block_tokens, mut most) = (1, all_but_last);
            for hit in &found.hits {
                if self.load.block_tokens[hit.slot as usize] != block_tokens {
                    block_tokens = self.load.block_tokens[hit.slot as usize];
                    most = all_but_last / block_tokens * block_tokens;
                }
                let tokens = (hit.held.tokens as i64).min(most);
                if tokens > 0 {
                    hits.push((hit.slot, tokens));
                }
            }
        }
        if matches.len() > 1 {
            hits.sort_unstable_by_key(|&(slot, _)| slot);
            hits.dedup_by(|next, sum| {
                next.0 == sum.0 && {
                    sum.1 += next.1;
                    true
                }
            });
        }
        hits
    }

    /// P times B of every slot, into `scores`, which are empty.
    fn product(&mut self, request: &Request, prompt_tokens: i64, hits: impl Iterator<Item = (u32, i64)> + Clone) {
        self.hit_tokens.resize(self.live.len(), 0.0);
        hits.clone().for_each(|(slot, tokens)| self.hit_tokens[slot as usize] = tokens as f64);
        let (prompt, batch) = (prompt_tokens as f64, request.batch as f64);
        let columns = self.load.queued_tokens.iter().zip(self.load.floor.iter());
        let columns = columns.zip(&self.hit_tokens);
        let of_slots = columns.map(|((&queued, &floor), &hit)| p_tokens(queued, prompt, hit, floor));
        let present_milli = &self.load.present_milli;
        if request.extra.act_on_p() {
            self.scores.extend(of_slots);
            request.extra.apply(&mut self.scores, &self.load.prefill_rate);
            self.scores.iter_mut().zip(present_milli).for_each(|(p, &milli)| *p *= weighted(milli, batch));
        } else {
            self.scores.extend(of_slots.zip(present_milli).map(|(p, &milli)| p * weighted(milli, batch)));
        }
        hits.for_each(|(slot, _)| self.hit_tokens[slot as usize] = 0.0);
    }

    /// The hotspot detector's alarm for the class of a request, which it knows by its first prompt as the first card
    /// renders it; requests without one it does not count.
    fn hotspot_alarm(
        &mut self,
        request: &Request,
        matches: &[Option<Match>],
        candidates: &[u64],
        now_s: f64,
    ) -> Option<usize> {
        let chain = request.prompts.first()?.first().map_or(&[][..], |prompt| prompt.chain);
        let found = matches.first().and_then(Option::as_ref);
        let hits = found.iter().flat_map(|found| &found.hits).map(|hit| (hit.slot, hit.held.chunks as usize));
        let is_product = request.policy == Policy::Product;
        self.hotspots.arrived(chain, hits, candidates, is_product, request.is_again, now_s)
    }

    /// What the product would say if nobody but the alarm's holders held the prefix. Another policy places.
    fn route_in_the_shadow(
        &mut self,
        alarm: usize,
        request: &Request,
        candidates: &[u64],
        prompt_tokens: i64,
        hits: &[(u32, i64)],
    ) {
        let holders = self.hotspots.holders(alarm).to_vec();
        let holds = |slot: u32| holders[slot as usize / 64] >> (slot % 64) & 1 == 1;
        self.scores.clear();
        self.product(request, prompt_tokens, hits.iter().copied().filter(|&(slot, _)| holds(slot)));
        self.hotspots.routed(alarm, candidates, &self.scores, false, request.is_again);
    }

    /// The score of every slot, into `scores`.
    fn score(&mut self, request: &Request, candidates: &[u64], prompt_tokens: i64, hits: &[(u32, i64)]) -> Scoring {
        let slots = self.live.len();
        let batch = request.batch as f64;
        self.scores.clear();
        let scoring = match request.policy {
            Policy::Product => {
                self.product(request, prompt_tokens, hits.iter().copied());
                Scoring::Product
            }
            Policy::LeastRequest => {
                self.scores.extend(self.load.present_milli.iter().map(|&milli| weighted(milli, batch)));
                Scoring::LeastRequest
            }
            Policy::RoundRobin => {
                self.scores.extend((0..slots).map(|slot| self.rounds.score(slot)));
                Scoring::Given(Vec::new())
            }
        };
        for (w, &word) in candidates.iter().enumerate() {
            let mut others = !word;
            if slots < (w + 1) * 64 {
                others &= (1u64 << (slots - w * 64)) - 1;
            }
            while others != 0 {
                self.scores[w * 64 + others.trailing_zeros() as usize] = f64::INFINITY;
                others &= others - 1;
            }
        }
        if matches!(scoring, Scoring::Given(_)) { Scoring::Given(self.scores.clone()) } else { scoring }
    }

    /// What each slot would prefill during its round trip.
    fn network_tokens(&self, request: &Request) -> Vec<f64> {
        request.extra.rtt_s.iter().zip(&self.load.prefill_rate).map(|(rtt, rate)| rtt * rate).collect()
    }

    /// Claim the chunks that the chosen slot's engine does not hold yet, and watch for the last whole one.
    fn claim(&mut self, reservation: &mut Reservation, request: &Request, matches: &[Option<Match>]) {
        let slot = reservation.slot as usize;
        let block_tokens = self.load.block_tokens[slot];
        let variant = request.variant_of_slot.get(slot).copied().unwrap_or(-1);
        let is_exact = request.exact.get(slot).copied().unwrap_or(false);
        let (mut chunks, mut runs) = (Vec::new(), Vec::new());
        let (mut watched, mut awaited): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
        for (renderings, found) in request.prompts.iter().zip(matches) {
            let (Some(found), Ok(variant)) = (found, usize::try_from(variant)) else { continue };
            let Some(prompt) = renderings.get(variant) else { continue };
            let chain = prompt.chain;
            let held = found.engine_chunks(slot as u32);
            if held == chain.len() {
                continue;
            }
            let tokens = found.token_model(prompt.size_bytes, block_tokens);
            let new_bytes = (chain.len() - held) * CHUNK_BYTES;
            let step = if new_bytes >= SHORT_BYTES { SAMPLE_STEP } else { SAMPLE_STEP_SHORT };
            // What whole blocks complete, and KV events can tell of.
            let whole = found.last_whole_chunk(prompt.size_bytes, chain.len(), block_tokens) + 1;
            let whole = usize::try_from(whole).unwrap_or(0).max(held);
            let mut k = held + (step - (held + 1) % step) % step;
            while k < if is_exact { whole } else { chain.len() } {
                reservation.sample_hashes.push(chain[k]);
                reservation.sample_tokens.push(tokens.at(k));
                k += step;
            }
            runs.push(Run { start: held, at: chunks.len(), tokens });
            chunks.extend_from_slice(&chain[held..]);
            let whole = &chain[held..whole];
            if is_exact && let Some(last) = self.last_missing(slot as u32, whole) {
                if !awaited.contains(&last) {
                    awaited.push(last);
                }
                if whole.last() == Some(&last) && !watched.contains(&last) {
                    watched.push(last);
                }
            }
        }
        reservation.is_approximate = !is_exact;
        if !is_exact {
            self.is_approximate[slot] = true;
        }
        self.speculation.claim(reservation.key, slot as u32, chunks, Origins::Runs(runs), awaited);
        Self::start_watch(&mut self.watch, reservation, watched);
    }

    /// The last of `chunks` that the slot's index does not have.
    fn last_missing(&self, slot: u32, chunks: &[u64]) -> Option<u64> {
        chunks.iter().rev().copied().find(|&chunk| self.index.tokens_of(slot, chunk).is_none())
    }

    fn start_watch(watch: &mut FoldMap<(u32, u64), Vec<Key>>, reservation: &mut Reservation, chunks: Vec<u64>) {
        reservation.expects_signal = !chunks.is_empty();
        for &chunk in &chunks {
            watch.entry((reservation.slot, chunk)).or_default().push(reservation.key);
        }
        reservation.watched = chunks;
    }

    /// Wait no more; the chunks that had not appeared.
    fn unwatch(&mut self, key: Key) -> Vec<u64> {
        let Some(reservation) = self.reservations.get_mut(&key) else { return Vec::new() };
        let chunks = std::mem::take(&mut reservation.watched);
        let slot = reservation.slot;
        for &chunk in &chunks {
            if let Some(waiting) = self.watch.get_mut(&(slot, chunk)) {
                waiting.retain(|&other| other != key);
                if waiting.is_empty() {
                    self.watch.remove(&(slot, chunk));
                }
            }
        }
        chunks
    }

    fn appeared(&mut self, slot: u32, chunks: &[u64], now_s: f64) -> Vec<u64> {
        let mut complete: Vec<Key> = Vec::new();
        for &chunk in chunks.iter().take(if self.watch.is_empty() { 0 } else { chunks.len() }) {
            for key in self.watch.remove(&(slot, chunk)).unwrap_or_default() {
                if let Some(reservation) = self.reservations.get_mut(&key) {
                    reservation.watched.retain(|&other| other != chunk);
                    if reservation.watched.is_empty() {
                        complete.push(key);
                    }
                }
            }
        }
        for &key in &complete {
            self.prefilled(key, now_s, true);
        }
        self.speculation.confirm(slot, chunks);
        complete.into_iter().map(|key| key.1).collect()
    }

    /// Its prefill is over: by a signal at this very time (`teaches`), or by the word of a peer.
    fn prefilled(&mut self, key: Key, now_s: f64, teaches: bool) {
        if let Some(reservation) = self.reservations.get_mut(&key) {
            self.load.first_token(reservation, now_s, teaches, &self.settings);
            self.settle(key, now_s);
        }
    }

    /// After a prefill, seen or modelled: what was claimed is learned where that counts, and stays until the events are in.
    fn settle(&mut self, key: Key, now_s: f64) {
        self.unwatch(key);
        let (Some(reservation), Some(claim)) = (self.reservations.get(&key), self.speculation.claim_of(key)) else {
            return;
        };
        let slot = claim.slot;
        if reservation.is_approximate || (!reservation.is_own() && self.is_approximate[slot as usize]) {
            let capacity = self.load.kv_capacity_tokens[slot as usize];
            self.learned.learn(slot, &claim.chunks, &claim.tokens(), capacity);
        }
        if claim.awaited.is_empty() {
            self.speculation.end(key);
        } else {
            self.speculation.expire_at(key, now_s + self.settings.grace_s);
        }
    }

    fn relocate(&mut self, key: Key, slot: i64, now_s: f64) {
        let slot = self.known(slot).unwrap_or(NOWHERE);
        if self.reservations.get(&key).is_none_or(|r| r.slot == slot) {
            return;
        }
        let mut watched = self.unwatch(key);
        self.load.close(key, &mut self.reservations, now_s);
        let Some(reservation) = self.reservations.get_mut(&key) else { return };
        reservation.slot = slot;
        self.load.open(reservation, now_s);
        if slot == NOWHERE {
            self.speculation.end(key);
            return;
        }
        if let Some(claim) = self.speculation.claim_of(key) {
            let mut awaited = claim.awaited.clone();
            awaited.retain(|&chunk| self.index.tokens_of(slot, chunk).is_none());
            if awaited.is_empty() && !claim.awaited.is_empty() {
                self.speculation.end(key);
            } else {
                self.speculation.move_to(key, slot, awaited);
            }
        }
        watched.retain(|&chunk| self.index.tokens_of(slot, chunk).is_none());
        Self::start_watch(&mut self.watch, reservation, watched);
    }

    fn ended(&mut self, key: Key, now_s: f64) {
        self.unwatch(key);
        self.load.close(key, &mut self.reservations, now_s);
        self.forget(key);
    }

    fn forget(&mut self, key: Key) {
        if let Some(reservation) = self.reservations.remove(&key)
            && reservation.is_queued
        {
            self.speculation.end(key);
        }
    }

    /// What is wrong with the state, if anything. Costs as much as all of it: for tests.
    pub fn check(&self) -> Result<(), String> {
        self.index.check()?;
        self.hotspots.check()?;
        self.learned.check()?;
        self.load.check(&self.reservations)?;
        self.speculation.check()?;
        for slot in (0..self.slot_count()).filter(|&slot| !self.live[slot]) {
            let number = slot as u32;
            if self.load.requests[slot] != 0 || self.index.held(number) != 0 || self.learned.index.held(number) != 0 {
                return Err(format!("slot {slot}: removed, and something is left of it"));
            }
        }
        for reservation in self.reservations.values() {
            if self.speculation.claim_of(reservation.key).is_some_and(|claim| claim.slot != reservation.slot) {
                return Err("a claim on another slot than its reservation's".into());
            }
        }
        let open = self.own.len() + self.peers.values().map(Ledger::len).sum::<usize>();
        if open != self.reservations.len() {
            return Err("reservations and ledgers differ".into());
        }
        for (&(slot, chunk), waiting) in &self.watch {
            for key in waiting {
                let Some(reservation) = self.reservations.get(key) else { return Err("a watch leaks".into()) };
                if reservation.slot != slot || !reservation.watched.contains(&chunk) || !reservation.is_queued {
                    return Err(format!("slot {slot}: a watch on chunk {chunk} is wrong"));
                }
            }
        }
        Ok(())
    }
}
