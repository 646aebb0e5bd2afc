//! What can be set about a scheduler; the fields mean what they mean in `trimtab_core.settings`.

#[derive(Clone, Debug)]
pub struct Settings {
    pub block_tokens: i64,
    pub kv_capacity_tokens: i64,
    pub prefill_rate: f64,
    pub prefill_rate_memory_s: f64,
    pub grace_s: f64,
    pub late_signal_factor: f64,
    pub late_signal_s: f64,
    pub speculative_chunks_max: usize,
    pub reservations_max: usize,
    pub retry_after_s: f64,
}
