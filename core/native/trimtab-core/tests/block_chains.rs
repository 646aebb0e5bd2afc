//! Block chains against a literal map: every known block keeps its whole text, and all is worked out afresh.

use std::collections::BTreeMap;

use proptest::prelude::*;
use trimtab_core::block_chains::BlockChains;
use trimtab_core::chunks::{CHUNK_BYTES, extend_chain};
use trimtab_core::token_table::TokenTable;

const SEED: u64 = 9;
const BLOCK_TOKENS: usize = 3;
const PIECES: [&[u8]; 4] = [&[b'a'; 16], &[b'a'; 32], &[b'b'; 48], &[b'c'; 200]];

fn table() -> TokenTable {
    let mut offsets = vec![0];
    offsets.extend(PIECES.iter().scan(0, |at, piece| {
        *at += piece.len() as u32;
        Some(*at)
    }));
    TokenTable::new(offsets, PIECES.concat(), &[]).expect("whole")
}

struct Known {
    before: Vec<u32>,
    own: Vec<u32>,
    held: BTreeMap<u32, u32>,
}

#[derive(Default)]
struct Literal {
    blocks: BTreeMap<u64, Known>,
}

fn text(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|&token| PIECES[token as usize]).copied().collect()
}

impl Literal {
    fn store(&mut self, parent: Option<u64>, name: u64, tokens: &[u32], place: u32) {
        if !self.blocks.contains_key(&name) {
            let before = match parent {
                None => Vec::new(),
                Some(parent) => match self.blocks.get(&parent) {
                    None => return,
                    Some(block) => [&block.before[..], &block.own[..]].concat(),
                },
            };
            self.blocks.insert(name, Known { before, own: tokens.to_vec(), held: BTreeMap::new() });
        }
        if let Some(block) = self.blocks.get_mut(&name) {
            *block.held.entry(place).or_insert(0) += 1;
        }
    }

    fn remove(&mut self, name: u64, place: u32) {
        let Some(block) = self.blocks.get_mut(&name) else { return };
        if let Some(count) = block.held.get_mut(&place) {
            *count -= 1;
            if *count == 0 {
                block.held.remove(&place);
            }
        }
        if block.held.is_empty() {
            self.blocks.remove(&name);
        }
    }

    fn published(&self) -> BTreeMap<u64, u32> {
        let mut published = BTreeMap::new();
        for block in self.blocks.values() {
            let start = text(&block.before).len();
            let whole = text(&[&block.before[..], &block.own[..]].concat());
            let mut chain = Vec::new();
            extend_chain(7, &whole, SEED, &mut chain);
            let inside: Vec<usize> = (0..chain.len()).filter(|k| CHUNK_BYTES * (k + 1) > start).collect();
            for &k in &inside {
                let own = if Some(&k) == inside.last() { block.own.len() } else { 0 };
                let tokens = (block.before.len() + own) as u32;
                published.entry(chain[k]).and_modify(|known: &mut u32| *known = tokens.min(*known)).or_insert(tokens);
            }
        }
        published
    }
}

/// A name stands for parent and tokens, as an engine's does.
fn name(parent: Option<u64>, tokens: &[u32]) -> u64 {
    tokens.iter().fold(parent.unwrap_or(1), |sum, &token| sum.wrapping_mul(31).wrapping_add(u64::from(token) + 1))
}

#[derive(Clone, Debug)]
enum Event {
    Store { parent: usize, tokens: Vec<u32>, place: u32 },
    Remove { which: usize, place: u32 },
    Clear,
}

fn event() -> impl Strategy<Value = Event> {
    let tokens = prop::collection::vec(0..PIECES.len() as u32, 1..=BLOCK_TOKENS);
    prop_oneof![
        8 => (0..9usize, tokens, 0..2u32).prop_map(|(parent, tokens, place)| Event::Store { parent, tokens, place }),
        4 => (0..9usize, 0..2u32).prop_map(|(which, place)| Event::Remove { which, place }),
        1 => Just(Event::Clear),
    ]
}

proptest! {
    #[test]
    fn equal_the_literal_map(events in prop::collection::vec(event(), 1..80)) {
        let (mut chains, mut literal) = (BlockChains::new(table(), SEED), Literal::default());
        let places = [chains.place("GPU", 0), chains.place("CPU", 0)];
        let mut names: Vec<u64> = Vec::new();
        let mut told: BTreeMap<u64, u32> = BTreeMap::new();
        for event in events {
            match event {
                Event::Store { parent, tokens, place } => {
                    let parent = names.len().checked_sub(parent + 1).map(|at| names[at]);
                    let name = name(parent, &tokens);
                    let size = tokens.len() as i64;
                    chains.store(parent, &[name], &tokens, size, 7, places[place as usize]);
                    literal.store(parent, name, &tokens, place);
                    names.push(name);
                }
                Event::Remove { which, place } => {
                    if let Some(at) = names.len().checked_sub(which + 1) {
                        chains.remove(&[names[at]], places[place as usize]);
                        literal.remove(names[at], place);
                    }
                }
                Event::Clear => {
                    chains.clear();
                    literal.blocks.clear();
                }
            }
            prop_assert_eq!(chains.check(), Ok(()));
            let published = literal.published();
            let (hashes, tokens) = chains.chunks();
            prop_assert_eq!(&hashes.into_iter().zip(tokens).collect::<BTreeMap<_, _>>(), &published);
            let changes = chains.drain();
            if changes.cleared {
                told.clear();
            }
            for chunk in changes.removed {
                prop_assert!(told.remove(&chunk).is_some());
            }
            told.extend(changes.added.into_iter().zip(changes.tokens));
            prop_assert_eq!(&told, &published);
            prop_assert_eq!(chains.block_count(), literal.blocks.len());
        }
    }
}
