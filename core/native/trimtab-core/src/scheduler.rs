//! The scheduler: index, speculation, load and policy in one. It chooses a slot and reserves it in one step.
//!
//! Synchronous and single-threaded; `now_s` does not fall from call to call. Everything here must equal
//! `trimtab_core.scheduler`, the specification, to the last bit; the tests run both on the same histories.

use std::collections::{BTreeMap, VecDeque};

use crate::chunks::CHUNK_BYTES;
use crate::endpoint_sets::FoldMap;
use crate::fleet_load::{FleetLoad, Reservations};
use crate::learned_index::LearnedIndex;
use crate::policies::{How, Policy, Rounds, TieBreak};
use crate::prefix_index::{Hit, PrefixIndex};
use crate::reservation::{Key, NOWHERE, Origin, Reservation};
use crate::settings::Settings;
use crate::speculation::{Origins, Run, Speculation, TokenModel};

const SAMPLE_STEP: usize = 16;
const SAMPLE_STEP_SHORT: usize = 4;
const SHORT_BYTES: usize = 4096;
const ENDED_REMEMBERED: usize = 8192;
const REPLICAS_MAX: usize = 1024;

/// One rendering of one engine prompt.
pub struct Prompt<'a> {
    pub chain: &'a [u64],
    pub size_bytes: i64,
    pub tokens: Option<i64>,
}

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
}

#[derive(Debug)]
pub struct Placement {
    pub reservation_id: u64,
    pub slot: u32,
    pub alternatives: Vec<u32>,
    pub prompt_tokens: i64,
    pub hit_tokens: Vec<i64>,
    pub queued_tokens: Vec<f64>,
    pub p_tokens: Vec<f64>,
    pub batch: Vec<i64>,
    pub score: Vec<f64>,
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

/// What is known of one prompt on all slots.
struct Match {
    prompt_tokens: i64,
    hit_tokens: Vec<u32>,
    engine_depth: Vec<u32>,
    deepest_bytes: i64,
    deepest_tokens: i64,
}

impl Match {
    fn token_model(&self, size_bytes: i64, block_tokens: i64) -> TokenModel {
        TokenModel {
            size_bytes,
            prompt_tokens: self.prompt_tokens,
            deepest_bytes: self.deepest_bytes,
            deepest_tokens: self.deepest_tokens,
            block_tokens,
        }
    }

    /// Position of the last chunk that a whole block of this prompt surely completes; -1 where there is none.
    fn last_whole_chunk(&self, size_bytes: i64, chunk_count: usize, block_tokens: i64) -> i64 {
        let rest_tokens = self.prompt_tokens - self.deepest_tokens;
        let rest_bytes = size_bytes - self.deepest_bytes;
        if rest_tokens <= 0 || rest_bytes <= 0 {
            return -1;
        }
        let whole_bytes = (size_bytes * rest_tokens - block_tokens * rest_bytes).div_euclid(rest_tokens);
        whole_bytes.div_euclid(CHUNK_BYTES as i64).min(chunk_count as i64) - 1
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
    hits: Vec<Hit>,
    claimed: Vec<Hit>,
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
            ties: TieBreak(rng_seed),
            next_id: 1,
            watch: FoldMap::default(),
            is_approximate: Vec::new(),
            hits: Vec::new(),
            claimed: Vec::new(),
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
        let mut candidates = vec![false; slots];
        for (slot, candidate) in candidates.iter_mut().enumerate().take(request.candidates.len()) {
            *candidate = self.live[slot] && request.candidates[slot];
        }
        if !candidates.contains(&true) {
            return Err(Refusal::NoEndpoints);
        }
        let mut batch: Vec<i64> =
            (0..slots).map(|s| self.load.requests[s] + self.load.external[s] + request.batch).collect();
        if let Some(most) = request.batch_max {
            for s in 0..slots {
                candidates[s] &= batch[s] <= most || batch[s] == request.batch;
            }
            if !candidates.contains(&true) {
                return Err(Refusal::EndpointsFull);
            }
        }
        let matches = self.matches(request, &candidates);
        let mut prompt_tokens = 0;
        let mut hit_tokens = vec![0i64; slots];
        for found in matches.iter().flatten() {
            prompt_tokens += found.prompt_tokens;
            if request.cache_reads {
                let all_but_last = (found.prompt_tokens - 1).max(0);
                let hits = hit_tokens.iter_mut().zip(&found.hit_tokens).zip(&self.load.block_tokens);
                for ((of_slot, &hit), &block_tokens) in hits.filter(|((_, hit), _)| **hit > 0) {
                    *of_slot += (hit as i64).min(all_but_last / block_tokens * block_tokens);
                }
            }
        }
        let mut p_tokens: Vec<f64> = (0..slots)
            .map(|s| {
                let uncached = (prompt_tokens - hit_tokens[s]) as f64;
                (self.load.queued_tokens[s] + uncached).max(self.load.block_tokens[s] as f64)
            })
            .collect();
        let score: Vec<f64> = (0..slots)
            .map(|s| match request.policy {
                _ if !candidates[s] => f64::INFINITY,
                Policy::Product => p_tokens[s] * batch[s] as f64,
                Policy::LeastRequest => batch[s] as f64,
                Policy::RoundRobin => self.rounds.score(s),
            })
            .collect();
        let (ranked, how) = self.ties.best(&score, &batch, 3);
        let (Some(&slot), Some(how)) = (ranked.first(), how) else { return Err(Refusal::NoEndpoints) };
        if request.policy == Policy::RoundRobin {
            self.rounds.picked(slot as usize);
        }
        let own_tokens = prompt_tokens - hit_tokens[slot as usize];
        let mut queued_tokens = self.load.queued_tokens.clone();
        for s in (0..slots).filter(|&s| !candidates[s]) {
            hit_tokens[s] = 0;
            queued_tokens[s] = 0.0;
            p_tokens[s] = 0.0;
            batch[s] = 0;
        }
        let key = (Origin::Own, self.next_id);
        self.next_id += 1;
        let mut reservation = Reservation {
            key,
            slot,
            p_tokens: own_tokens,
            batch: request.batch,
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
            hit_tokens,
            queued_tokens,
            p_tokens,
            batch,
            score,
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
        let faded = self.load.advance(&mut self.reservations, now_s, &self.settings);
        for &key in &faded {
            self.settle(key, now_s);
        }
        self.speculation.expire(now_s);
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
                self.speculation.claim(key, slot, hashes.to_vec(), Origins::Samples(tokens.to_vec()));
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
                self.ended((Origin::Peer(incarnation), id), now_s);
            }
        }
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

    /// One match for each prompt of which some text is known; `None` for the others, so that positions agree.
    fn matches(&mut self, request: &Request, candidates: &[bool]) -> Vec<Option<Match>> {
        let words = candidates.len().div_ceil(64);
        let variants = request.prompts.iter().map(Vec::len).max().unwrap_or(0);
        let mut exact = vec![vec![0u64; words]; variants];
        let mut approximate = vec![vec![0u64; words]; variants];
        for (slot, _) in candidates.iter().enumerate().filter(|&(_, &candidate)| candidate) {
            let variant = request.variant_of_slot.get(slot).copied().unwrap_or(-1);
            if variant >= 0 && (variant as usize) < variants {
                let is_exact = request.exact.get(slot).copied().unwrap_or(false);
                let of_kind = if is_exact { &mut exact } else { &mut approximate };
                of_kind[variant as usize][slot / 64] |= 1 << (slot % 64);
            }
        }
        let mut matches = Vec::with_capacity(request.prompts.len());
        for renderings in &request.prompts {
            matches.push(self.match_prompt(
                renderings,
                &exact,
                &approximate,
                request.tokens_per_byte,
                candidates.len(),
            ));
        }
        matches
    }

    fn match_prompt(
        &mut self,
        renderings: &[Prompt],
        exact: &[Vec<u64>],
        approximate: &[Vec<u64>],
        tokens_per_byte: f64,
        slots: usize,
    ) -> Option<Match> {
        let first = renderings.first()?;
        let words = slots.div_ceil(64);
        let mut found = Match {
            prompt_tokens: 0,
            hit_tokens: vec![0; slots],
            engine_depth: vec![0; slots],
            deepest_bytes: 0,
            deepest_tokens: 0,
        };
        let length = |prompt: &Prompt, depth: u32, tokens: u32| {
            tokens as f64 + (prompt.size_bytes - depth as i64 * CHUNK_BYTES as i64).max(0) as f64 * tokens_per_byte
        };
        let mut deepest_depth = 0u32;
        let mut deepest_length = f64::INFINITY;
        let mut deepest: Option<(&Prompt, u32, u32)> = None;
        let mut exact_tokens = None;
        let mut is_any = false;
        self.hits.clear();
        self.hits.resize(words * 64, Hit::default());
        self.claimed.resize(words * 64, Hit::default());
        let mut lead = None;
        for (v, prompt) in renderings.iter().enumerate() {
            let all: Vec<u64> = (0..words).map(|w| exact[v][w] | approximate[v][w]).collect();
            if all.iter().all(|&w| w == 0) {
                continue;
            }
            is_any = true;
            lead = lead.or(Some(prompt));
            exact_tokens = exact_tokens.or(prompt.tokens);
            let mut alive = exact[v].clone();
            self.index.walk(prompt.chain, &mut alive, &mut self.hits);
            each(&exact[v], |slot| found.engine_depth[slot] = self.hits[slot].chunks);
            let hits = &mut self.hits;
            let mut wanted = approximate[v].clone();
            self.learned.index.deepest(prompt.chain, 0, &mut wanted, |slot, hit| hits[slot as usize] = hit);
            if !self.speculation.is_empty() {
                let mut shallowest = u32::MAX;
                each(&all, |slot| {
                    shallowest = shallowest.min(hits[slot].chunks);
                    self.claimed[slot] = Hit::default();
                });
                self.speculation.deepest(prompt.chain, shallowest as usize, &all, &mut self.claimed);
                each(&all, |slot| {
                    let (known, claimed) = (&mut hits[slot], self.claimed[slot]);
                    if claimed.chunks > known.chunks {
                        *known = Hit { tokens: claimed.tokens.max(known.tokens), chunks: claimed.chunks };
                    }
                });
            }
            each(&all, |slot| {
                let hit = hits[slot];
                if hit.chunks == 0 {
                    return;
                }
                found.hit_tokens[slot] = hit.tokens;
                let rank = length(prompt, hit.chunks, hit.tokens);
                if hit.chunks > deepest_depth || (hit.chunks == deepest_depth && rank < deepest_length) {
                    (deepest_depth, deepest_length) = (hit.chunks, rank);
                    deepest = Some((prompt, hit.chunks, hit.tokens));
                }
            });
        }
        if !is_any {
            exact_tokens = first.tokens;
        }
        let (prompt, depth, tokens) = deepest.unwrap_or((lead.unwrap_or(first), 0, 0));
        found.prompt_tokens = exact_tokens.unwrap_or_else(|| length(prompt, depth, tokens).ceil() as i64);
        found.deepest_bytes = depth as i64 * CHUNK_BYTES as i64;
        found.deepest_tokens = (tokens as i64).min(found.prompt_tokens);
        Some(found)
    }

    /// Claim the chunks that the chosen slot's engine does not hold yet, and watch for the last whole one.
    fn claim(&mut self, reservation: &mut Reservation, request: &Request, matches: &[Option<Match>]) {
        let slot = reservation.slot as usize;
        let block_tokens = self.load.block_tokens[slot];
        let variant = request.variant_of_slot.get(slot).copied().unwrap_or(-1);
        let is_exact = request.exact.get(slot).copied().unwrap_or(false);
        let (mut chunks, mut runs) = (Vec::new(), Vec::new());
        let mut watched: Vec<u64> = Vec::new();
        for (renderings, found) in request.prompts.iter().zip(matches) {
            let (Some(found), Ok(variant)) = (found, usize::try_from(variant)) else { continue };
            let Some(prompt) = renderings.get(variant) else { continue };
            let chain = prompt.chain;
            let held = found.engine_depth[slot] as usize;
            if held == chain.len() {
                continue;
            }
            let tokens = found.token_model(prompt.size_bytes, block_tokens);
            let new_bytes = (chain.len() - held) * CHUNK_BYTES;
            let step = if new_bytes >= SHORT_BYTES { SAMPLE_STEP } else { SAMPLE_STEP_SHORT };
            let mut k = held + (step - (held + 1) % step) % step;
            while k < chain.len() {
                reservation.sample_hashes.push(chain[k]);
                reservation.sample_tokens.push(tokens.at(k));
                k += step;
            }
            runs.push(Run { start: held, at: chunks.len(), tokens });
            chunks.extend_from_slice(&chain[held..]);
            let last = found.last_whole_chunk(prompt.size_bytes, chain.len(), block_tokens);
            if is_exact
                && last >= held as i64
                && self.index.tokens_of(slot as u32, chain[last as usize]).is_none()
                && !watched.contains(&chain[last as usize])
            {
                watched.push(chain[last as usize]);
            }
        }
        reservation.is_approximate = !is_exact;
        if !is_exact {
            self.is_approximate[slot] = true;
        }
        self.speculation.claim(reservation.key, slot as u32, chunks, Origins::Runs(runs));
        Self::start_watch(&mut self.watch, reservation, watched);
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
        if self.watch.is_empty() {
            return Vec::new();
        }
        for &chunk in chunks {
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
        complete.into_iter().map(|key| key.1).collect()
    }

    /// Its prefill is over: by a signal at this very time (`teaches`), or by the word of a peer.
    fn prefilled(&mut self, key: Key, now_s: f64, teaches: bool) {
        if let Some(reservation) = self.reservations.get_mut(&key) {
            self.load.first_token(reservation, now_s, teaches, &self.settings);
            self.settle(key, now_s);
        }
    }

    /// After a prefill, seen or modelled: what was claimed is learned where that counts, and stays for the grace.
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
        self.speculation.expire_at(key, now_s + self.settings.grace_s);
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
        self.speculation.move_to(key, slot);
        watched.retain(|&chunk| self.index.tokens_of(slot, chunk).is_none());
        Self::start_watch(&mut self.watch, reservation, watched);
    }

    fn ended(&mut self, key: Key, now_s: f64) {
        self.unwatch(key);
        self.load.close(key, &mut self.reservations, now_s);
        if let Some(reservation) = self.reservations.remove(&key)
            && reservation.is_queued
        {
            self.speculation.end(key);
        }
    }

    /// What is wrong with the state, if anything. Costs as much as all of it: for tests.
    pub fn check(&self) -> Result<(), String> {
        self.index.check()?;
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

/// Calls `visit` for every slot of a bitmap, rising.
fn each(words: &[u64], mut visit: impl FnMut(usize)) {
    for (w, &word) in words.iter().enumerate() {
        let mut left = word;
        while left != 0 {
            visit(w * 64 + left.trailing_zeros() as usize);
            left &= left - 1;
        }
    }
}
