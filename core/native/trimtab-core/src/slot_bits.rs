//! Sets of slots as bitmaps: words of 64, slot 64 w + b is bit b of word w.

/// The bitmap of the flags, which may be shorter than `words` has room for.
pub fn pack(flags: &[bool], words: &mut [u64]) {
    words.fill(0);
    for (word, flags) in words.iter_mut().zip(flags.chunks(64)) {
        let (eights, rest) = flags.as_chunks::<8>();
        for (n, eight) in eights.iter().enumerate() {
            let bytes = u64::from_le_bytes(eight.map(u8::from));
            // Byte k is 0 or 1; the product brings it to bit 56 + k.
            *word |= (bytes.wrapping_mul(0x0102_0408_1020_4080) >> 56) << (8 * n);
        }
        for (n, &flag) in rest.iter().enumerate() {
            *word |= u64::from(flag) << (8 * eights.len() + n);
        }
    }
}

/// Calls `visit` for every slot of a bitmap, rising.
pub fn each(words: &[u64], mut visit: impl FnMut(usize)) {
    for (w, &word) in words.iter().enumerate() {
        let mut left = word;
        while left != 0 {
            visit(w * 64 + left.trailing_zeros() as usize);
            left &= left - 1;
        }
    }
}

pub fn is_empty(words: &[u64]) -> bool {
    words.iter().all(|&word| word == 0)
}

pub fn count(words: &[u64]) -> usize {
    words.iter().map(|word| word.count_ones() as usize).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_keeps_every_flag_in_its_place() {
        for length in [0, 1, 7, 8, 9, 63, 64, 65, 130, 512] {
            let flags: Vec<bool> = (0..length).map(|n| n % 3 == 0 || n % 7 == 2).collect();
            let mut words = vec![u64::MAX; 9];
            pack(&flags, &mut words);
            let mut back = Vec::new();
            each(&words, |slot| back.push(slot));
            assert_eq!(back, (0..length).filter(|&n| flags[n]).collect::<Vec<_>>());
            assert_eq!(count(&words), back.len());
        }
    }
}
