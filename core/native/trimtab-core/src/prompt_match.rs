//! A prompt match: how much of one engine prompt each slot holds, and how long the prompt is.
//!
//! What counts as held: for exact slots the chunks of the prefix index, walked exactly; for approximate slots the learned
//! ones; for both, speculation where it reaches deeper. Only slots with a hit cost anything here.

use crate::chunks::CHUNK_BYTES;
use crate::learned_index::LearnedIndex;
use crate::prefix_index::{Hit, PrefixIndex};
use crate::slot_bits;
use crate::speculation::{Speculation, TokenModel};

/// One rendering of one engine prompt.
pub struct Prompt<'a> {
    pub chain: &'a [u64],
    pub size_bytes: i64,
    pub tokens: Option<i64>,
}

/// The slots that a rendering is for, by what is known of them.
#[derive(Default, Clone)]
pub struct Audience {
    pub exact: Vec<u64>,
    pub approximate: Vec<u64>,
}

/// `held`: what the slot has of the prompt; `engine_chunks`: what its engine is known to have.
#[derive(Clone, Copy, Debug)]
pub struct SlotHit {
    pub slot: u32,
    pub held: Hit,
    pub engine_chunks: u32,
}

/// What is known of one prompt on all slots. Slots that hold nothing are not in `hits`, and none is in it twice.
pub struct Match {
    pub prompt_tokens: i64,
    pub hits: Vec<SlotHit>,
    pub deepest_bytes: i64,
    pub deepest_tokens: i64,
}

impl Match {
    pub fn engine_chunks(&self, slot: u32) -> usize {
        self.hits.iter().find(|hit| hit.slot == slot).map_or(0, |hit| hit.engine_chunks as usize)
    }

    pub fn token_model(&self, size_bytes: i64, block_tokens: i64) -> TokenModel {
        TokenModel {
            size_bytes,
            prompt_tokens: self.prompt_tokens,
            deepest_bytes: self.deepest_bytes,
            deepest_tokens: self.deepest_tokens,
            block_tokens,
        }
    }

    /// Position of the last chunk that a whole block of this prompt surely completes; -1 where there is none.
    pub fn last_whole_chunk(&self, size_bytes: i64, chunk_count: usize, block_tokens: i64) -> i64 {
        let rest_tokens = self.prompt_tokens - self.deepest_tokens;
        let rest_bytes = size_bytes - self.deepest_bytes;
        if rest_tokens <= 0 || rest_bytes <= 0 {
            return -1;
        }
        let whole_bytes = (size_bytes * rest_tokens - block_tokens * rest_bytes).div_euclid(rest_tokens);
        whole_bytes.div_euclid(CHUNK_BYTES as i64).min(chunk_count as i64) - 1
    }
}

/// Where hits come from, and room to put them together in. Between calls no slot has a place or a claim in it.
#[derive(Default)]
pub struct Matcher {
    /// By slot: one more than its place among the hits; 0 where it has none.
    places: Vec<u32>,
    claimed: Vec<Hit>,
    claiming: Vec<u32>,
    words: Vec<u64>,
}

pub struct Sources<'a> {
    pub index: &'a PrefixIndex,
    pub learned: &'a LearnedIndex,
    pub speculation: &'a Speculation,
}

impl Matcher {
    /// Match one prompt, in all its renderings; `audiences` are theirs. None where no text is known.
    pub fn find(
        &mut self,
        renderings: &[Prompt],
        audiences: &[Audience],
        slots: usize,
        tokens_per_byte: f64,
        from: &Sources,
    ) -> Option<Match> {
        let first = renderings.first()?;
        self.places.resize(slots.max(self.places.len()), 0);
        self.claimed.resize(slots.max(self.claimed.len()), Hit::default());
        let length = |prompt: &Prompt, depth: u32, tokens: u32| {
            tokens as f64 + (prompt.size_bytes - depth as i64 * CHUNK_BYTES as i64).max(0) as f64 * tokens_per_byte
        };
        let mut hits: Vec<SlotHit> = Vec::new();
        let mut deepest: Option<(&Prompt, Hit)> = None;
        let mut exact_tokens = None;
        let mut lead = None;
        for (prompt, audience) in renderings.iter().zip(audiences) {
            let everybody = slot_bits::count(&audience.exact) + slot_bits::count(&audience.approximate);
            if everybody == 0 {
                continue;
            }
            lead = lead.or(Some(prompt));
            exact_tokens = exact_tokens.or(prompt.tokens);
            let before = hits.len();
            self.words.clone_from(&audience.exact);
            from.index.walk(prompt.chain, &mut self.words, |slot, held| {
                hits.push(SlotHit { slot, held, engine_chunks: held.chunks });
            });
            if !slot_bits::is_empty(&audience.approximate) {
                self.words.clone_from(&audience.approximate);
                from.learned.index.deepest(prompt.chain, 0, &mut self.words, |slot, held| {
                    hits.push(SlotHit { slot, held, engine_chunks: 0 });
                });
            }
            if !from.speculation.is_empty() {
                let all_hold = hits.len() - before == everybody;
                let shallowest = hits[before..].iter().map(|hit| hit.held.chunks).min();
                let shallowest = shallowest.filter(|_| all_hold).unwrap_or(0);
                self.add_claims(prompt, audience, shallowest as usize, before, &mut hits, from.speculation);
            }
            // In one rendering, the deepest with the fewest tokens is the one that leaves the prompt shortest.
            let of_variant = hits[before..].iter().map(|hit| hit.held);
            let Some(best) = of_variant.min_by_key(|held| (u32::MAX - held.chunks, held.tokens)) else { continue };
            let is_better = deepest.as_ref().is_none_or(|&(other, hit)| {
                best.chunks > hit.chunks
                    || (best.chunks == hit.chunks
                        && length(prompt, best.chunks, best.tokens) < length(other, hit.chunks, hit.tokens))
            });
            if is_better {
                deepest = Some((prompt, best));
            }
        }
        if lead.is_none() {
            exact_tokens = first.tokens;
        }
        let (prompt, Hit { chunks, tokens }) = deepest.unwrap_or((lead.unwrap_or(first), Hit::default()));
        let prompt_tokens = exact_tokens.unwrap_or_else(|| length(prompt, chunks, tokens).ceil() as i64);
        Some(Match {
            prompt_tokens,
            hits,
            deepest_bytes: chunks as i64 * CHUNK_BYTES as i64,
            deepest_tokens: (tokens as i64).min(prompt_tokens),
        })
    }

    /// What is claimed beyond `hits[before..]`, into there: the deeper of the two, and where that is the claim, never
    /// fewer tokens than before.
    fn add_claims(
        &mut self,
        prompt: &Prompt,
        audience: &Audience,
        shallowest: usize,
        before: usize,
        hits: &mut Vec<SlotHit>,
        speculation: &Speculation,
    ) {
        self.words.clone_from(&audience.exact);
        self.words.iter_mut().zip(&audience.approximate).for_each(|(word, more)| *word |= more);
        let (claimed, claiming) = (&mut self.claimed, &mut self.claiming);
        speculation.deepest(prompt.chain, shallowest, &mut self.words, |slot, hit| {
            let of_slot = &mut claimed[slot as usize];
            if of_slot.chunks == 0 {
                claiming.push(slot);
            }
            if hit.chunks > of_slot.chunks {
                *of_slot = hit;
            }
        });
        if self.claiming.is_empty() {
            return;
        }
        for (place, hit) in hits.iter().enumerate().skip(before) {
            self.places[hit.slot as usize] = place as u32 + 1;
        }
        for slot in self.claiming.drain(..) {
            let claim = std::mem::take(&mut self.claimed[slot as usize]);
            match self.places[slot as usize] {
                0 => hits.push(SlotHit { slot, held: claim, engine_chunks: 0 }),
                place => {
                    let known = &mut hits[place as usize - 1].held;
                    if claim.chunks > known.chunks {
                        *known = Hit { tokens: claim.tokens.max(known.tokens), chunks: claim.chunks };
                    }
                }
            }
        }
        hits[before..].iter().for_each(|hit| self.places[hit.slot as usize] = 0);
    }
}
