//! Fleet load: how many requests and how many uncached prompt tokens are on each slot.
//!
//! A slot's requests are the open reservations of all replicas plus what the engine reports beyond them; a reservation
//! adds its batch and its P once and takes exactly that away again. Where no first token can be seen, prefill is modelled:
//! first come, first served, at the rate that the slot's seen first tokens show.

use std::sync::Arc;

use crate::endpoint_sets::FoldMap;
use crate::extra_terms::ORDINARY_MILLI;
use crate::reservation::{Key, NOWHERE, Reservation};
use crate::settings::Settings;

const PREFILL_RATE_MIN: f64 = 50.0;
const PREFILL_RATE_MAX: f64 = 10_000_000.0;

pub type Reservations = FoldMap<Key, Reservation>;

#[derive(Default)]
pub struct FleetLoad {
    pub requests: Vec<i64>,
    pub external: Vec<i64>,
    /// Weights of the open reservations: of each its batch times the weight of its class, in thousandths.
    pub weight_milli: Vec<i64>,
    pub queued_tokens: Vec<f64>,
    pub block_tokens: Vec<i64>,
    /// What decisions compute with: `requests` and `external` together, and `block_tokens`, which seldom changes.
    pub present: Vec<f64>,
    /// The same with the weights of their classes, in thousandths.
    pub present_milli: Vec<f64>,
    pub floor: Arc<Vec<f64>>,
    pub kv_capacity_tokens: Vec<i64>,
    pub prefill_rate: Vec<f64>,
    requests_peak: Vec<i64>,
    requests_reported: Vec<i64>,
    rate_tokens: Vec<f64>,
    rate_s: Vec<f64>,
    free_s: Vec<f64>,
    open: Vec<FoldMap<Key, ()>>,
    queue: Vec<Vec<Key>>,
}

/// One step of a slot's modelled queue.
struct Turn {
    key: Key,
    start_s: f64,
    end_s: f64,
}

impl FleetLoad {
    pub fn len(&self) -> usize {
        self.open.len()
    }

    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// The slot begins (again), unreported and empty. Reservations still on it are detached.
    pub fn reset_slot(&mut self, slot: u32, settings: &Settings, reservations: &mut Reservations) {
        let s = slot as usize;
        if s == self.len() {
            for column in [
                &mut self.requests,
                &mut self.external,
                &mut self.weight_milli,
                &mut self.block_tokens,
                &mut self.kv_capacity_tokens,
                &mut self.requests_peak,
                &mut self.requests_reported,
            ] {
                column.push(0);
            }
            for column in [
                &mut self.queued_tokens,
                &mut self.present,
                &mut self.present_milli,
                Arc::make_mut(&mut self.floor),
                &mut self.prefill_rate,
                &mut self.rate_tokens,
                &mut self.rate_s,
                &mut self.free_s,
            ] {
                column.push(0.0);
            }
            self.open.push(FoldMap::default());
            self.queue.push(Vec::new());
        }
        for (key, ()) in self.open[s].drain() {
            if let Some(reservation) = reservations.get_mut(&key) {
                reservation.slot = NOWHERE;
            }
        }
        self.queue[s].clear();
        self.free_s[s] = 0.0;
        self.requests[s] = 0;
        self.external[s] = 0;
        self.weight_milli[s] = 0;
        self.requests_peak[s] = 0;
        self.requests_reported[s] = 0;
        self.queued_tokens[s] = 0.0;
        self.set_block_tokens(s, settings.block_tokens);
        self.count(s);
        self.kv_capacity_tokens[s] = settings.kv_capacity_tokens;
        self.prefill_rate[s] = settings.prefill_rate;
        self.rate_tokens[s] = settings.prefill_rate;
        self.rate_s[s] = 1.0;
    }

    pub fn report(
        &mut self,
        slot: u32,
        requests: i64,
        block_tokens: i64,
        kv_capacity_tokens: i64,
        settings: &Settings,
    ) {
        let s = slot as usize;
        self.external[s] = (requests - self.requests_peak[s]).max(0);
        self.requests_reported[s] = requests;
        self.requests_peak[s] = self.requests[s];
        self.count(s);
        self.set_block_tokens(s, if block_tokens > 0 { block_tokens } else { settings.block_tokens });
        self.kv_capacity_tokens[s] =
            if kv_capacity_tokens > 0 { kv_capacity_tokens } else { settings.kv_capacity_tokens };
    }

    fn set_block_tokens(&mut self, s: usize, block_tokens: i64) {
        self.block_tokens[s] = block_tokens;
        if self.floor[s] != block_tokens as f64 {
            Arc::make_mut(&mut self.floor)[s] = block_tokens as f64;
        }
    }

    /// After a change of any count.
    fn count(&mut self, s: usize) {
        self.present[s] = (self.requests[s] + self.external[s]) as f64;
        self.present_milli[s] = (self.weight_milli[s] + self.external[s] * ORDINARY_MILLI) as f64;
    }

    pub fn open(&mut self, reservation: &mut Reservation, now_s: f64) {
        if reservation.slot == NOWHERE {
            return;
        }
        let s = reservation.slot as usize;
        reservation.queued_since_s = now_s;
        reservation.served_s = None;
        self.open[s].insert(reservation.key, ());
        self.requests[s] += reservation.batch;
        self.weight_milli[s] += reservation.batch * reservation.weight_milli;
        self.count(s);
        self.requests_peak[s] = self.requests_peak[s].max(self.requests[s]);
        if reservation.is_queued {
            self.queue[s].push(reservation.key);
            self.queued_tokens[s] += reservation.p_tokens as f64;
        }
    }

    /// The load of `key` goes from its slot. If it was being prefilled, that stops now.
    pub fn close(&mut self, key: Key, reservations: &mut Reservations, now_s: f64) {
        let Some(reservation) = reservations.get(&key) else { return };
        let (slot, is_queued, batch, p_tokens) =
            (reservation.slot, reservation.is_queued, reservation.batch, reservation.p_tokens);
        let weight_milli = batch * reservation.weight_milli;
        if slot == NOWHERE {
            return;
        }
        let s = slot as usize;
        if is_queued {
            if let Some(turn) = self.timeline(slot, reservations).into_iter().find(|turn| turn.key == key)
                && turn.start_s < now_s
            {
                self.free_s[s] = self.free_s[s].max(now_s.min(turn.end_s));
            }
            self.leave_queue(slot, key, p_tokens);
        }
        self.open[s].remove(&key);
        self.requests[s] -= batch;
        self.weight_milli[s] -= weight_milli;
        self.count(s);
        if let Some(reservation) = reservations.get_mut(&key) {
            reservation.slot = NOWHERE;
        }
    }

    /// As `close`, where it is its replica that ended: the request may go on in the engine, and as far as the last
    /// report had room for it, it is external now.
    pub fn close_of_gone(&mut self, key: Key, reservations: &mut Reservations, now_s: f64) {
        let Some(reservation) = reservations.get(&key) else { return };
        let (slot, batch) = (reservation.slot, reservation.batch);
        self.close(key, reservations, now_s);
        if slot != NOWHERE {
            let s = slot as usize;
            self.requests_peak[s] -= batch;
            let beyond_ours = self.requests_reported[s] - self.requests[s];
            self.external[s] = self.external[s].max((self.external[s] + batch).min(beyond_ours));
            self.count(s);
        }
    }

    /// Its first token is there, so its P goes. `teaches`: seen at this very time, so it tells the slot's rate.
    pub fn first_token(&mut self, reservation: &mut Reservation, now_s: f64, teaches: bool, settings: &Settings) {
        if reservation.slot != NOWHERE && reservation.is_queued {
            let s = reservation.slot as usize;
            if teaches {
                self.observe_rate(reservation, now_s, settings);
            }
            if reservation.p_tokens != 0 {
                self.free_s[s] = self.free_s[s].max(now_s);
            }
            self.leave_queue(reservation.slot, reservation.key, reservation.p_tokens);
        }
        reservation.is_queued = false;
    }

    /// Own reservations whose prefill is over by the model; they are out of the queue.
    pub fn advance(&mut self, reservations: &mut Reservations, now_s: f64, settings: &Settings) -> Vec<Key> {
        let mut faded = Vec::new();
        for slot in 0..self.queue.len() as u32 {
            if self.queue[slot as usize].is_empty() {
                continue;
            }
            let mut over = Vec::new();
            for Turn { key, end_s, .. } in self.timeline(slot, reservations) {
                if end_s > now_s {
                    break;
                }
                let Some(reservation) = reservations.get_mut(&key) else { continue };
                reservation.served_s = Some(end_s);
                let mut deadline_s = end_s;
                if reservation.expects_signal {
                    let wait_s = end_s - reservation.queued_since_s;
                    deadline_s = reservation.queued_since_s + settings.late_signal_factor * wait_s;
                    deadline_s += settings.late_signal_s;
                }
                if reservation.is_own() && deadline_s <= now_s {
                    over.push((key, end_s));
                }
            }
            for (key, end_s) in over {
                self.free_s[slot as usize] = self.free_s[slot as usize].max(end_s);
                if let Some(reservation) = reservations.get_mut(&key) {
                    self.leave_queue(slot, key, reservation.p_tokens);
                    reservation.is_queued = false;
                }
                faded.push(key);
            }
        }
        faded
    }

    fn timeline(&self, slot: u32, reservations: &Reservations) -> Vec<Turn> {
        let s = slot as usize;
        let (mut clock_s, rate) = (self.free_s[s], self.prefill_rate[s]);
        self.queue[s]
            .iter()
            .filter_map(|key| reservations.get(key))
            .map(|reservation| {
                let start_s = clock_s.max(reservation.queued_since_s);
                let end_s = reservation.served_s.unwrap_or(start_s + reservation.p_tokens as f64 / rate);
                clock_s = clock_s.max(end_s);
                Turn { key: reservation.key, start_s, end_s }
            })
            .collect()
    }

    fn leave_queue(&mut self, slot: u32, key: Key, p_tokens: i64) {
        let queue = &mut self.queue[slot as usize];
        if let Some(at) = queue.iter().position(|&other| other == key) {
            queue.remove(at);
            self.queued_tokens[slot as usize] -= p_tokens as f64;
        }
    }

    fn observe_rate(&mut self, reservation: &Reservation, now_s: f64, settings: &Settings) {
        let s = reservation.slot as usize;
        if reservation.p_tokens < self.block_tokens[s] {
            return;
        }
        let busy_s = (now_s - self.free_s[s].max(reservation.queued_since_s)).max(0.0);
        let keep = (-busy_s / settings.prefill_rate_memory_s).exp();
        let seconds = keep * self.rate_s[s] + busy_s;
        let tokens = keep * self.rate_tokens[s] + reservation.p_tokens as f64;
        let rate = (tokens / seconds.max(1e-9)).clamp(PREFILL_RATE_MIN, PREFILL_RATE_MAX);
        self.prefill_rate[s] = rate;
        self.rate_s[s] = seconds;
        self.rate_tokens[s] = rate * seconds;
    }

    pub fn is_on(&self, slot: u32, key: Key) -> bool {
        self.open[slot as usize].contains_key(&key)
    }

    pub fn check(&self, reservations: &Reservations) -> Result<(), String> {
        for slot in 0..self.len() {
            let mut requests = 0;
            let mut weight_milli = 0;
            let mut queued = 0.0;
            let mut queue_length = 0;
            for key in self.open[slot].keys() {
                let Some(reservation) = reservations.get(key) else { return Err(format!("slot {slot}: a leak")) };
                if reservation.slot != slot as u32 {
                    return Err(format!("slot {slot}: a reservation is elsewhere"));
                }
                requests += reservation.batch;
                weight_milli += reservation.batch * reservation.weight_milli;
                if reservation.is_queued {
                    queued += reservation.p_tokens as f64;
                    queue_length += 1;
                }
            }
            let (present, floor) = (self.requests[slot] + self.external[slot], self.block_tokens[slot]);
            if self.present[slot] != present as f64 || self.floor[slot] != floor as f64 {
                return Err(format!("slot {slot}: decisions compute with something else"));
            }
            let present_milli = self.weight_milli[slot] + self.external[slot] * ORDINARY_MILLI;
            if weight_milli != self.weight_milli[slot] || self.present_milli[slot] != present_milli as f64 {
                return Err(format!("slot {slot}: weights miscounted"));
            }
            if requests != self.requests[slot] {
                return Err(format!("slot {slot}: requests miscounted"));
            }
            if queued != self.queued_tokens[slot] || queue_length != self.queue[slot].len() {
                return Err(format!("slot {slot}: queue miscounted"));
            }
            if self.requests_peak[slot] < self.requests[slot] || self.external[slot] < 0 {
                return Err(format!("slot {slot}: peak or external requests out of bounds"));
            }
        }
        Ok(())
    }
}
