//! The decision path of Trimtab. No Python, no I/O, no clock: time and chance come in as arguments.
//!
//! The Python package `trimtab_core` is the specification; everything here must equal it, and its property
//! tests are run against both.

pub mod block_chains;
pub mod bucket_table;
pub mod chunks;
pub mod endpoint_sets;
pub mod extra_terms;
pub mod fleet_load;
pub mod hotspot;
pub mod hotspot_arrivals;
pub mod learned_index;
pub mod policies;
pub mod prefix_index;
pub mod prompt_match;
pub mod reservation;
pub mod scheduler;
pub mod segments;
pub mod settings;
pub mod slot_bits;
pub mod speculation;
pub mod terms;
pub mod token_table;
