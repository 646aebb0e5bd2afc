//! The index against a literal one: a map of maps, walked chunk by chunk and slot by slot.

use std::collections::BTreeMap;

use proptest::prelude::*;
use trimtab_core::chunks::step;
use trimtab_core::prefix_index::{Hit, PrefixIndex};

#[derive(Default)]
struct Literal(BTreeMap<u32, BTreeMap<u64, u32>>);

impl Literal {
    fn hit(&self, slot: u32, chain: &[u64]) -> Hit {
        let mut hit = Hit::default();
        for key in chain {
            match self.0.get(&slot).and_then(|chunks| chunks.get(key)) {
                Some(&tokens) => hit = Hit { tokens, chunks: hit.chunks + 1 },
                None => break,
            }
        }
        hit
    }
}

#[derive(Clone, Debug)]
enum Change {
    Apply { slot: u32, added: Vec<(u8, u8, u32)>, removed: Vec<(u8, u8)> },
    Clear { slot: u32 },
}

const SLOTS: u32 = 130;

/// Chunk `depth` of conversation `talk`: conversations share their first chunks in pairs.
fn key(talk: u8, depth: u8) -> u64 {
    let origin = if depth < 3 { talk / 2 } else { talk };
    (0..=depth).fold(origin as u64, |h, d| step(h, d as u64 + 1))
}

fn slot() -> impl Strategy<Value = u32> {
    prop_oneof![0..3u32, 62..66u32, Just(SLOTS - 1)]
}

fn change() -> impl Strategy<Value = Change> {
    let place = (0..6u8, 0..12u8);
    prop_oneof![
        8 => (slot(), prop::collection::vec((0..6u8, 0..12u8, 1..4u32), 0..20), prop::collection::vec(place, 0..10))
            .prop_map(|(slot, added, removed)| Change::Apply { slot, added, removed }),
        1 => slot().prop_map(|slot| Change::Clear { slot }),
    ]
}

proptest! {
    #[test]
    fn equals_the_literal_index(changes in prop::collection::vec(change(), 1..60)) {
        let (mut index, mut literal) = (PrefixIndex::new(), Literal::default());
        for change in changes {
            match change {
                Change::Apply { slot, added, removed } => {
                    let removed: Vec<u64> = removed.iter().map(|&(t, d)| key(t, d)).collect();
                    let keys: Vec<u64> = added.iter().map(|&(t, d, _)| key(t, d)).collect();
                    let tokens: Vec<u32> = added.iter().map(|&(_, d, extra)| d as u32 * 4 + extra).collect();
                    index.apply(slot, &keys, &tokens, &removed);
                    let chunks = literal.0.entry(slot).or_default();
                    removed.iter().for_each(|k| { chunks.remove(k); });
                    keys.iter().zip(&tokens).for_each(|(&k, &t)| { chunks.insert(k, t); });
                }
                Change::Clear { slot } => {
                    index.clear(slot);
                    literal.0.remove(&slot);
                }
            }
            for talk in 0..6 {
                let chain: Vec<u64> = (0..12).map(|d| key(talk, d)).collect();
                let mut alive = vec![u64::MAX; (SLOTS as usize).div_ceil(64)];
                let mut hits = vec![Hit::default(); alive.len() * 64];
                index.walk(&chain, &mut alive, |slot, hit| hits[slot as usize] = hit);
                for slot in 0..SLOTS {
                    prop_assert_eq!(hits[slot as usize], literal.hit(slot, &chain));
                }
            }
            for slot in [0, 1, 2, 62, 63, 64, 65, SLOTS - 1] {
                let expected: Vec<(u64, u32)> =
                    literal.0.get(&slot).map(|m| m.iter().map(|(&k, &t)| (k, t)).collect()).unwrap_or_default();
                prop_assert_eq!(index.held(slot), expected.len() as u64);
                prop_assert_eq!(index.export(slot), expected);
            }
            let chunks = literal.0.values().flat_map(|m| m.keys()).collect::<std::collections::BTreeSet<_>>();
            prop_assert_eq!(index.chunks(), chunks.len());
            prop_assert_eq!(index.check(), Ok(()));
        }
    }
}

#[test]
fn a_hole_in_the_middle_ends_the_hit() {
    let mut index = PrefixIndex::new();
    let chain: Vec<u64> = (0..50).map(|d| key(0, d)).collect();
    let tokens: Vec<u32> = (1..=50).map(|d| d * 16).collect();
    index.apply(7, &chain, &tokens, &[]);
    index.remove(7, chain[20]);
    let (mut alive, mut hits) = (vec![1 << 7], vec![Hit::default(); 64]);
    index.walk(&chain, &mut alive, |slot, hit| hits[slot as usize] = hit);
    assert_eq!(hits[7], Hit { tokens: 320, chunks: 20 });
}

/// Thousands of chunks, so that shards grow, are cleared and swept while they do; few enough hashes that some are equal
/// in all but their last bits, which is what makes buckets overflow.
#[derive(Clone, Debug)]
enum Bulk {
    Add { slot: u32, from: u32, count: u32 },
    Remove { slot: u32, from: u32, count: u32 },
    Clear { slot: u32 },
    Tidy,
}

fn bulk() -> impl Strategy<Value = Bulk> {
    let range = || (0..4u32, 0..9000u32, 0..3000u32);
    prop_oneof![
        6 => range().prop_map(|(slot, from, count)| Bulk::Add { slot: slot * 40, from, count }),
        3 => range().prop_map(|(slot, from, count)| Bulk::Remove { slot: slot * 40, from, count }),
        2 => (0..4u32).prop_map(|slot| Bulk::Clear { slot: slot * 40 }),
        1 => Just(Bulk::Tidy),
    ]
}

fn bulk_key(n: u32) -> u64 {
    if n.is_multiple_of(5) { (n as u64 % 16) << 60 | n as u64 } else { step(n as u64, 7) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn equals_the_literal_index_while_it_grows_and_is_cleared(changes in prop::collection::vec(bulk(), 1..40)) {
        let (mut index, mut literal) = (PrefixIndex::new(), Literal::default());
        for change in changes {
            match change {
                Bulk::Add { slot, from, count } => {
                    let keys: Vec<u64> = (from..from + count).map(bulk_key).collect();
                    let tokens: Vec<u32> = (from..from + count).map(|n| n * 4 + u32::from(n % 7 == 0) * slot).collect();
                    index.apply(slot, &keys, &tokens, &[]);
                    literal.0.entry(slot).or_default().extend(keys.iter().copied().zip(tokens.iter().copied()));
                }
                Bulk::Remove { slot, from, count } => {
                    let keys: Vec<u64> = (from..from + count).map(bulk_key).collect();
                    index.apply(slot, &[], &[], &keys);
                    let chunks = literal.0.entry(slot).or_default();
                    keys.iter().for_each(|key| { chunks.remove(key); });
                }
                Bulk::Clear { slot } => {
                    index.clear(slot);
                    literal.0.remove(&slot);
                }
                Bulk::Tidy => index.tidy(),
            }
            prop_assert_eq!(index.check(), Ok(()));
            let chunks = literal.0.values().flat_map(|m| m.keys()).collect::<std::collections::BTreeSet<_>>();
            prop_assert_eq!(index.chunks(), chunks.len());
            for slot in [0, 40, 80, 120] {
                let expected: Vec<(u64, u32)> =
                    literal.0.get(&slot).map(|m| m.iter().map(|(&k, &t)| (k, t)).collect()).unwrap_or_default();
                prop_assert_eq!(index.export(slot), expected);
            }
        }
        let chain: Vec<u64> = (0..4000).map(bulk_key).collect();
        for from in [0, 1, 31, 32, 33, 1000, 3000, 3967, 3968, 3999] {
            let mut alive = vec![u64::MAX; 2];
            let mut hits = vec![Hit::default(); 128];
            index.walk(&chain[from..], &mut alive, |slot, hit| hits[slot as usize] = hit);
            for slot in [0, 40, 80, 120] {
                prop_assert_eq!(hits[slot as usize], literal.hit(slot, &chain[from..]));
            }
        }
    }
}

#[test]
fn clearing_leaves_nothing_that_more_changes_do_not_tidy_up() {
    let mut index = PrefixIndex::new();
    let keys: Vec<u64> = (0..20_000).map(|n| step(n, 3)).collect();
    let tokens = vec![16; keys.len()];
    for slot in 0..4 {
        index.apply(slot, &keys[..10_000 + 2000 * slot as usize], &tokens, &[]);
    }
    (0..4).for_each(|slot| index.clear(slot));
    assert_eq!((index.chunks(), index.pairs()), (0, 0));
    (0..4000).for_each(|_| index.tidy());
    assert_eq!(index.check(), Ok(()));
    assert_eq!(index.entries(), 0);
}
