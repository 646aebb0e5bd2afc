//! The token table: the bytes that each token id of a model stands for.
//!
//! The bytes of a run of tokens are those of its tokens, joined. An id that is out of range or has no bytes makes the
//! whole run unreadable.

pub struct TokenTable {
    /// Token i is `data[offsets[i]..offsets[i + 1]]`; one more than there are ids, never falling.
    offsets: Vec<u32>,
    data: Vec<u8>,
    /// A bitmap of the ids that have no bytes.
    invalid: Vec<u64>,
}

impl TokenTable {
    /// `None` where the parts contradict each other.
    pub fn new(offsets: Vec<u32>, data: Vec<u8>, invalid: &[u32]) -> Option<Self> {
        let is_whole = offsets.first() == Some(&0) && offsets.last().copied() == u32::try_from(data.len()).ok();
        if !is_whole || offsets.windows(2).any(|pair| pair[1] < pair[0]) {
            return None;
        }
        let mut bitmap = vec![0u64; offsets.len().div_ceil(64)];
        for &id in invalid {
            if id as usize + 1 >= offsets.len() {
                return None;
            }
            bitmap[id as usize / 64] |= 1 << (id % 64);
        }
        Some(Self { offsets, data, invalid: bitmap })
    }

    /// Appends the text of a run of tokens. False: some id has no bytes, and `text` is as it was.
    pub fn append(&self, ids: &[u32], text: &mut Vec<u8>) -> bool {
        let before = text.len();
        for &id in ids {
            let at = id as usize;
            if at + 1 >= self.offsets.len() || self.invalid[at / 64] >> (id % 64) & 1 == 1 {
                text.truncate(before);
                return false;
            }
            text.extend_from_slice(&self.data[self.offsets[at] as usize..self.offsets[at + 1] as usize]);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::TokenTable;

    #[test]
    fn a_run_is_its_tokens_joined_and_an_id_without_bytes_spoils_it() {
        let table = TokenTable::new(vec![0, 2, 2, 5], b"abcde".to_vec(), &[]).expect("whole");
        let mut text = b">".to_vec();
        assert!(table.append(&[2, 1, 0], &mut text));
        assert_eq!(text, b">cdeab");
        assert!(!table.append(&[0, 3], &mut text));
        assert_eq!(text, b">cdeab");
        let table = TokenTable::new(vec![0, 2, 2, 5], b"abcde".to_vec(), &[1]).expect("whole");
        assert!(!table.append(&[0, 1], &mut text));
    }

    #[test]
    fn parts_that_contradict_each_other_are_refused() {
        assert!(TokenTable::new(vec![], vec![], &[]).is_none());
        assert!(TokenTable::new(vec![0, 3, 2], b"ab".to_vec(), &[]).is_none());
        assert!(TokenTable::new(vec![0, 3], b"ab".to_vec(), &[]).is_none());
        assert!(TokenTable::new(vec![0, 2], b"ab".to_vec(), &[1]).is_none());
    }
}
