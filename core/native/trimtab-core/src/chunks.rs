//! The chunk chain: 64 bytes of text, one keyed 64-bit hash that stands for all the text up to its end.

use xxhash_rust::xxh3::xxh3_64_with_seed;

pub const CHUNK_BYTES: usize = 64;
const MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;

/// `h_k` from `h_{k-1}` and the local hash of chunk k.
#[inline(always)]
pub fn step(previous: u64, local: u64) -> u64 {
    let x = (previous ^ local).wrapping_mul(MULTIPLIER);
    x ^ (x >> 32)
}

/// Appends the hashes of the whole chunks of `text` to `chain`; the last `text.len() % 64` bytes are no chunk yet.
///
/// The local hashes do not depend on one another, so the processor overlaps them; only `step` is a chain.
pub fn extend_chain(previous: u64, text: &[u8], seed: u64, chain: &mut Vec<u64>) {
    let mut h = previous;
    chain.reserve(text.len() / CHUNK_BYTES);
    for chunk in text.chunks_exact(CHUNK_BYTES) {
        h = step(h, xxh3_64_with_seed(chunk, seed));
        chain.push(h);
    }
}

/// `h_{-1}`: the seed mixed with LoRA name and cache_salt, each tagged and length-prefixed.
pub fn root_hash(seed: u64, lora_name: Option<&[u8]>, cache_salt: Option<&[u8]>) -> u64 {
    let mut material = Vec::new();
    for (tag, part) in [(b'L', lora_name), (b'S', cache_salt)] {
        if let Some(part) = part {
            material.push(tag);
            material.extend_from_slice(&(part.len() as u32).to_le_bytes());
            material.extend_from_slice(part);
        }
    }
    xxh3_64_with_seed(&material, seed)
}
