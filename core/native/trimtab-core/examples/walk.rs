//! A quick look at the cost of hashing and walking: 64 or 512 endpoints x 60k chunks, half of them shared.
use std::time::Instant;
use trimtab_core::chunks::{extend_chain, step};
use trimtab_core::prefix_index::{Hit, PrefixIndex};

fn main() {
    let n: u32 = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(64);
    let mut index = PrefixIndex::new();
    let chain = |origin: u64, len: u64| {
        let mut h = origin;
        (0..len)
            .map(|d| {
                h = step(h, d.wrapping_mul(0x9E37_79B9_7F4A_7C15));
                h
            })
            .collect::<Vec<u64>>()
    };
    let tokens: Vec<u32> = (1..=2048).map(|d| d * 16).collect();
    let t = Instant::now();
    let mut total = 0u64;
    for s in 0..n {
        for c in 0..15u64 {
            index.apply(s, &chain(1_000_000 + c, 2048), &tokens, &[]);
            total += 2048;
        }
        for c in 0..15u64 {
            index.apply(s, &chain(2_000_000 + s as u64 * 100 + c, 2048), &tokens, &[]);
            total += 2048;
        }
    }
    println!(
        "ingest {:.1} M/s, {:.1} B/pair, chunks {}",
        total as f64 / t.elapsed().as_secs_f64() / 1e6,
        index.bytes() as f64 / index.pairs() as f64,
        index.chunks()
    );
    let text: Vec<u8> = (0..131072u32).map(|i| (i.wrapping_mul(2654435761) >> 13) as u8).collect();
    let mut out = Vec::new();
    let mut us = vec![];
    for _ in 0..500 {
        out.clear();
        let t = Instant::now();
        extend_chain(1, &text, 7, &mut out);
        us.push(t.elapsed().as_secs_f64() * 1e6);
    }
    us.sort_by(f64::total_cmp);
    println!("hash p50 {:.1} us p99 {:.1}", us[250], us[495]);
    let mut us = vec![];
    let mut hits = vec![Hit::default(); 512];
    for i in 0..4000u64 {
        let c = if i % 5 == 0 {
            chain(9_000_000 + i, 2048)
        } else if i % 2 == 0 {
            chain(1_000_000 + i % 15, 2048)
        } else {
            chain(2_000_000 + (i.wrapping_mul(7919) % n as u64) * 100 + i % 15, 2048)
        };
        let mut alive = vec![u64::MAX; 8];
        let t = Instant::now();
        index.walk(&c, &mut alive, |slot, hit| hits[slot as usize] = hit);
        us.push(t.elapsed().as_secs_f64() * 1e6);
    }
    us.sort_by(f64::total_cmp);
    println!("walk p50 {:.1} us p90 {:.1} p99 {:.1}", us[2000], us[3600], us[3960]);
    let c = chain(1_000_000, 2048);
    let mut us = vec![];
    for _ in 0..2000 {
        let mut alive = vec![u64::MAX; 8];
        let t = Instant::now();
        index.walk(&c, &mut alive, |slot, hit| hits[slot as usize] = hit);
        us.push(t.elapsed().as_secs_f64() * 1e6);
    }
    us.sort_by(f64::total_cmp);
    println!("the same again and again: p50 {:.1} us", us[1000]);
}
