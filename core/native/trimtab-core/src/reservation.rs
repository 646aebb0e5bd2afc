//! A reservation: one request's place on a slot, from the choice to the end of its exchange.

/// Whose reservation it is. This replica's own incarnation is not named: it may change while requests run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Origin {
    Own,
    /// Another replica, by its incarnation.
    Peer(u64),
}

/// Whose it is, and its id there.
pub type Key = (Origin, u64);

/// The slot of a detached reservation.
pub const NOWHERE: u32 = u32::MAX;

#[derive(Clone, Debug)]
pub struct Reservation {
    pub key: Key,
    pub slot: u32,
    pub p_tokens: i64,
    pub batch: i64,
    /// Weight of each of its engine requests, in thousandths of an ordinary one.
    pub weight_milli: i64,
    /// Its first token has not been seen, nor taken for granted.
    pub is_queued: bool,
    pub queued_since_s: f64,
    /// Once its prefill should have been over by the model: when.
    pub served_s: Option<f64>,
    /// Chunks whose appearance on the slot shows that all prompts are prefilled.
    pub watched: Vec<u64>,
    pub expects_signal: bool,
    pub is_approximate: bool,
    pub sample_hashes: Vec<u64>,
    pub sample_tokens: Vec<u32>,
}

impl Reservation {
    pub fn is_own(&self) -> bool {
        self.key.0 == Origin::Own
    }
}
