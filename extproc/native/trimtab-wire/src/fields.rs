//! The fields of one protobuf message, in the order of its bytes.
//!
//! The one rule: numbers and byte strings only; a field of another kind, or one that breaks off, is `None` and the last.

/// What a field holds.
pub(crate) enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

pub(crate) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(crate) fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for (place, byte) in self.rest.iter().enumerate() {
            // Ten bytes hold 64 bits, and of the last only one.
            if place == 9 && *byte > 1 {
                return None;
            }
            number |= u64::from(byte & 0x7f) << (7 * place);
            if byte & 0x80 == 0 {
                self.rest = &self.rest[place + 1..];
                return Some(number);
            }
        }
        None
    }

    fn field(&mut self) -> Option<(u64, Value<'a>)> {
        let tag = self.number()?;
        match tag & 7 {
            0 => Some((tag >> 3, Value::Number(self.number()?))),
            2 => {
                let size = usize::try_from(self.number()?).ok()?;
                let (bytes, rest) = self.rest.split_at_checked(size)?;
                self.rest = rest;
                Some((tag >> 3, Value::Bytes(bytes)))
            }
            _ => None,
        }
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Option<(u64, Value<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.rest = &[];
        }
        Some(field)
    }
}
