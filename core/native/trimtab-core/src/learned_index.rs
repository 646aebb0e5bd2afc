//! The learned index: what slots in approximate mode hold, guessed from what was sent there.
//!
//! A slot never remembers more tokens than its KV cache can hold; the prompt longest unused goes first, and of a prompt
//! its end goes before its head.

use std::collections::VecDeque;

use crate::endpoint_sets::FoldMap;
use crate::prefix_index::PrefixIndex;

#[derive(Default)]
struct Memory {
    /// chunk -> (tokens that it adds, stamp of its last use).
    costs: FoldMap<u64, (i64, u64)>,
    /// (stamp, chunk) in order of use; entries whose stamp is no longer the chunk's are stale.
    order: VecDeque<(u64, u64)>,
    next_stamp: u64,
    tokens: i64,
}

#[derive(Default)]
pub struct LearnedIndex {
    pub index: PrefixIndex,
    slots: FoldMap<u32, Memory>,
}

impl LearnedIndex {
    /// `slot` has prefilled prompts with these chunks, prompt by prompt, head first.
    pub fn learn(&mut self, slot: u32, chunks: &[u64], tokens: &[u32], capacity_tokens: i64) {
        let memory = self.slots.entry(slot).or_default();
        for at in (0..chunks.len()).rev() {
            let (chunk, end) = (chunks[at], tokens[at] as i64);
            let before = if at > 0 { tokens[at - 1] as i64 } else { 0 };
            let mut cost = (if end >= before { end - before } else { end }).max(1);
            match memory.costs.get(&chunk) {
                None => self.index.add(slot, chunk, tokens[at]),
                Some(&(known, _)) => {
                    cost = cost.min(known);
                    memory.tokens -= known;
                }
            }
            memory.costs.insert(chunk, (cost, memory.next_stamp));
            memory.order.push_back((memory.next_stamp, chunk));
            memory.next_stamp += 1;
            memory.tokens += cost;
        }
        while memory.tokens > capacity_tokens {
            let Some((stamp, chunk)) = memory.order.pop_front() else { break };
            if memory.costs.get(&chunk).is_some_and(|&(_, last)| last == stamp)
                && let Some((cost, _)) = memory.costs.remove(&chunk)
            {
                self.index.remove(slot, chunk);
                memory.tokens -= cost;
            }
        }
        if memory.order.len() > 2 * memory.costs.len() + 1024 {
            memory.order.retain(|&(stamp, chunk)| memory.costs.get(&chunk).is_some_and(|&(_, last)| last == stamp));
        }
    }

    pub fn clear(&mut self, slot: u32) {
        if self.slots.remove(&slot).is_some() {
            self.index.clear(slot);
        }
    }

    /// Chunks of `slot` with the tokens that each adds, the next to forget first.
    pub fn export(&self, slot: u32) -> Vec<(u64, i64)> {
        let Some(memory) = self.slots.get(&slot) else { return Vec::new() };
        memory
            .order
            .iter()
            .filter_map(|&(stamp, chunk)| {
                memory.costs.get(&chunk).filter(|&&(_, last)| last == stamp).map(|&(cost, _)| (chunk, cost))
            })
            .collect()
    }

    /// What is wrong with the state, if anything. Costs as much as all of it: for tests.
    pub fn check(&self) -> Result<(), String> {
        self.index.check()?;
        for (&slot, memory) in &self.slots {
            let remembered = self.export(slot);
            if remembered.len() != memory.costs.len() || self.index.held(slot) != memory.costs.len() as u64 {
                return Err(format!("slot {slot}: other chunks are remembered than indexed"));
            }
            if remembered.iter().map(|&(_, cost)| cost).sum::<i64>() != memory.tokens {
                return Err(format!("slot {slot}: tokens are miscounted"));
            }
            if remembered.iter().any(|&(_, cost)| cost < 1) {
                return Err(format!("slot {slot}: a chunk that costs nothing"));
            }
        }
        Ok(())
    }
}
