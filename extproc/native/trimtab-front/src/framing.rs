//! gRPC's length-prefixed messages.
//!
//! The one rule: a message is handed on whole, in the pieces that it came in, and is not copied here.
//! Bounds: a message of more than `message_bytes_max` ends its stream before it is gathered.

use std::collections::VecDeque;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::status::{Code, Status};

const PREFIX_BYTES: usize = 5;

/// One message; its bytes are those of the pieces in a row.
#[derive(Debug)]
pub struct Message {
    pieces: VecDeque<Bytes>,
    size_bytes: usize,
}

impl Message {
    /// How many bytes it has.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// Copies it into `target`, which has room for exactly all of it.
    pub fn copy_to(&self, mut target: &mut [u8]) {
        for piece in &self.pieces {
            let (part, rest) = target.split_at_mut(piece.len());
            part.copy_from_slice(piece);
            target = rest;
        }
    }
}

/// A message with its prefix, ready to be sent.
#[must_use]
pub fn frame(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(PREFIX_BYTES + message.len());
    framed.put_u8(0);
    // Nothing larger comes from a picker whose own bound is far below.
    framed.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    framed.put_slice(message);
    framed.freeze()
}

/// Puts messages together from the pieces of a stream's body.
pub(crate) struct Assembler {
    pieces: VecDeque<Bytes>,
    held_bytes: usize,
    /// The size of the message that is being gathered, once its prefix is here.
    wanted_bytes: Option<usize>,
    message_bytes_max: usize,
}

impl Assembler {
    pub(crate) fn new(message_bytes_max: usize) -> Self {
        Self { pieces: VecDeque::new(), held_bytes: 0, wanted_bytes: None, message_bytes_max }
    }

    pub(crate) fn push(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.held_bytes += piece.len();
            self.pieces.push_back(piece);
        }
    }

    /// Bytes of messages that are not complete.
    pub(crate) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// The next message if all of it is here.
    pub(crate) fn next(&mut self) -> Result<Option<Message>, Status> {
        let wanted = match self.wanted_bytes {
            Some(wanted) => wanted,
            None if self.held_bytes < PREFIX_BYTES => return Ok(None),
            None => {
                let mut prefix = [0_u8; PREFIX_BYTES];
                let head = self.take(PREFIX_BYTES);
                head.copy_to(&mut prefix);
                let mut fields = &prefix[..];
                if fields.get_u8() != 0 {
                    return Err(Status::new(Code::UNIMPLEMENTED, "compressed messages are not supported"));
                }
                let wanted = fields.get_u32() as usize;
                if wanted > self.message_bytes_max {
                    let text = format!("a message of {wanted} bytes, at most {}", self.message_bytes_max);
                    return Err(Status::new(Code::RESOURCE_EXHAUSTED, text));
                }
                self.wanted_bytes = Some(wanted);
                wanted
            }
        };
        if self.held_bytes < wanted {
            return Ok(None);
        }
        self.wanted_bytes = None;
        Ok(Some(self.take(wanted)))
    }

    /// Whether the stream may end here.
    pub(crate) fn is_between_messages(&self) -> bool {
        self.held_bytes == 0 && self.wanted_bytes.is_none()
    }

    fn take(&mut self, size_bytes: usize) -> Message {
        let mut pieces = VecDeque::new();
        let mut missing = size_bytes;
        while missing > 0 {
            let Some(mut piece) = self.pieces.pop_front() else { break };
            if piece.len() > missing {
                let rest = piece.split_off(missing);
                self.pieces.push_front(rest);
            }
            missing -= piece.len();
            pieces.push_back(piece);
        }
        self.held_bytes -= size_bytes;
        Message { pieces, size_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(message: &Message) -> Vec<u8> {
        let mut all = vec![0; message.size_bytes()];
        message.copy_to(&mut all);
        all
    }

    #[test]
    fn messages_come_whole_however_the_bytes_are_cut() {
        let texts: [&[u8]; 4] = [b"", b"a", b"hello", &[7; 300]];
        let sent: Vec<u8> = texts.iter().flat_map(|text| frame(text).to_vec()).collect();
        for step in [1, 2, 3, 5, 64, 1000] {
            let mut assembler = Assembler::new(1000);
            let mut received = Vec::new();
            for piece in sent.chunks(step) {
                assembler.push(Bytes::copy_from_slice(piece));
                while let Ok(Some(message)) = assembler.next() {
                    received.push(bytes_of(&message));
                }
            }
            assert_eq!(received, texts);
            assert!(assembler.is_between_messages());
        }
    }

    #[test]
    fn a_message_that_is_too_large_is_refused_by_its_prefix() {
        let mut assembler = Assembler::new(10);
        assembler.push(frame(&[0; 11]).slice(..5));
        assert_eq!(assembler.next().err().map(|status| status.code), Some(Code::RESOURCE_EXHAUSTED));
    }

    #[test]
    fn a_compressed_message_is_refused() {
        let mut assembler = Assembler::new(10);
        assembler.push(Bytes::from_static(&[1, 0, 0, 0, 0]));
        assert_eq!(assembler.next().err().map(|status| status.code), Some(Code::UNIMPLEMENTED));
    }
}
