//! Speculation against a literal one: a map of (chunk, slot) to a count and the smallest token count since it was zero.

use std::collections::BTreeMap;

use proptest::prelude::*;
use trimtab_core::chunks::step;
use trimtab_core::prefix_index::Hit;
use trimtab_core::reservation::{Key, Origin};
use trimtab_core::speculation::{Origins, Run, Speculation, TokenModel};

const SLOTS: u32 = 3;

#[derive(Default)]
struct Literal {
    claims: BTreeMap<Key, (u32, Vec<(u64, u32)>)>,
    standing: BTreeMap<(u64, u32), (u32, u32)>,
}

impl Literal {
    fn claim(&mut self, key: Key, slot: u32, chunks: Vec<(u64, u32)>) {
        if chunks.is_empty() || self.claims.contains_key(&key) {
            return;
        }
        for &(chunk, tokens) in &chunks {
            let (count, least) = self.standing.entry((chunk, slot)).or_insert((0, u32::MAX));
            *count += 1;
            *least = tokens.min(*least);
        }
        self.claims.insert(key, (slot, chunks));
    }

    fn end(&mut self, key: Key) -> Option<Vec<(u64, u32)>> {
        let (slot, chunks) = self.claims.remove(&key)?;
        for &(chunk, _) in &chunks {
            if let Some((count, _)) = self.standing.get_mut(&(chunk, slot)) {
                *count -= 1;
                if *count == 0 {
                    self.standing.remove(&(chunk, slot));
                }
            }
        }
        Some(chunks)
    }

    fn deepest(&self, chain: &[u64], slot: u32) -> Hit {
        (0..chain.len())
            .rev()
            .find_map(|k| self.standing.get(&(chain[k], slot)).map(|&(_, tokens)| (k, tokens)))
            .map_or(Hit::default(), |(k, tokens)| Hit { tokens, chunks: k as u32 + 1 })
    }
}

/// Conversations that share their first chunks in pairs.
fn chain(talk: u8, length: usize) -> Vec<u64> {
    let mut h = u64::from(talk) / 4;
    (0..length)
        .map(|depth| {
            let letter = if depth < 5 {
                0
            } else if depth < 11 {
                talk / 2 % 2 + 1
            } else {
                talk % 2 + 7
            };
            h = step(h, u64::from(letter) * 1_000 + depth as u64 + 1);
            h
        })
        .collect()
}

#[derive(Clone, Debug)]
enum Event {
    Own { id: u64, slot: u32, talk: u8, start: usize, length: usize, tokens: i64 },
    Peer { id: u64, slot: u32, talk: u8, length: usize, step: usize, tokens: u32 },
    Move { own: bool, id: u64, slot: u32 },
    End { own: bool, id: u64 },
    Confirm { slot: u32, talk: u8, length: usize },
}

fn event() -> impl Strategy<Value = Event> {
    let (id, slot, talk) = (0..8u64, 0..SLOTS, 0..8u8);
    prop_oneof![
        6 => (id.clone(), slot.clone(), talk.clone(), 0..12usize, 0..24usize, 100..400i64)
            .prop_map(|(id, slot, talk, start, length, tokens)| Event::Own { id, slot, talk, start, length, tokens }),
        3 => (id.clone(), slot.clone(), talk, 1..24usize, 1..5usize, 1..30u32)
            .prop_map(|(id, slot, talk, length, step, tokens)| Event::Peer { id, slot, talk, length, step, tokens }),
        1 => (any::<bool>(), id.clone(), slot).prop_map(|(own, id, slot)| Event::Move { own, id, slot }),
        1 => (0..SLOTS, 0..8u8, 0..24usize).prop_map(|(slot, talk, length)| Event::Confirm { slot, talk, length }),
        4 => (any::<bool>(), id).prop_map(|(own, id)| Event::End { own, id }),
    ]
}

fn key(own: bool, id: u64) -> Key {
    (if own { Origin::Own } else { Origin::Peer(5) }, id)
}

proptest! {
    #[test]
    fn equals_the_literal_one(events in prop::collection::vec(event(), 1..60)) {
        let (mut real, mut literal) = (Speculation::new(usize::MAX), Literal::default());
        for event in events {
            match event {
                Event::Own { id, slot, talk, start, length, tokens } => {
                    let chunks = chain(talk, start + length)[start..].to_vec();
                    let model = TokenModel {
                        size_bytes: 64 * 36,
                        prompt_tokens: tokens,
                        deepest_bytes: 0,
                        deepest_tokens: 0,
                        block_tokens: 1,
                    };
                    let counts = (start..start + length).map(|k| model.at(k));
                    let awaited: Vec<u64> = chunks.last().copied().into_iter().collect();
                    literal.claim(key(true, id), slot, chunks.iter().copied().zip(counts).collect());
                    real.claim(key(true, id), slot, chunks, Origins::Runs(vec![Run { start, at: 0, tokens: model }]), awaited);
                }
                Event::Peer { id, slot, talk, length, step, tokens } => {
                    let chunks: Vec<u64> = chain(talk, length).into_iter().skip(step - 1).step_by(step).collect();
                    let counts: Vec<u32> = (1..=chunks.len() as u32).map(|k| k * tokens).collect();
                    literal.claim(key(false, id), slot, chunks.iter().copied().zip(counts.iter().copied()).collect());
                    let awaited = chunks.last().copied().into_iter().collect();
                    real.claim(key(false, id), slot, chunks, Origins::Samples(counts), awaited);
                }
                Event::Move { own, id, slot } => {
                    if literal.claims.get(&key(own, id)).is_some_and(|&(other, _)| other != slot)
                        && let Some(chunks) = literal.end(key(own, id))
                    {
                        literal.claim(key(own, id), slot, chunks);
                    }
                    let awaited = real.claim_of(key(own, id)).map(|claim| claim.awaited.clone()).unwrap_or_default();
                    real.move_to(key(own, id), slot, awaited);
                }
                Event::End { own, id } => {
                    literal.end(key(own, id));
                    real.end(key(own, id));
                }
                Event::Confirm { slot, talk, length } => {
                    let chunks = chain(talk, length);
                    let mut over: Vec<Key> = Vec::new();
                    for (&key, (of, claimed)) in &literal.claims {
                        if *of == slot && claimed.last().is_some_and(|(chunk, _)| chunks.contains(chunk)) {
                            over.push(key);
                        }
                    }
                    over.into_iter().for_each(|key| {
                        literal.end(key);
                    });
                    real.confirm(slot, &chunks);
                }
            }
            prop_assert_eq!(real.check(), Ok(()));
            for talk in 0..8 {
                let chain = chain(talk, 30);
                let mut hits = vec![Hit::default(); 64];
                real.deepest(&chain, 0, &mut [(1 << SLOTS) - 1], |slot, hit| {
                    if hit.chunks > hits[slot as usize].chunks {
                        hits[slot as usize] = hit;
                    }
                });
                for slot in 0..SLOTS {
                    prop_assert_eq!(hits[slot as usize], literal.deepest(&chain, slot));
                }
            }
        }
    }
}
