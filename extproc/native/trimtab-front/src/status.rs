//! gRPC statuses and the headers that carry them.

use std::fmt::Write;

use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use http::{Response, StatusCode};

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// Of a message that is sent; longer ones are cut.
const MESSAGE_BYTES_MAX: usize = 1024;

/// A status code, by gRPC's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub u8);

impl Code {
    pub const OK: Self = Self(0);
    pub const RESOURCE_EXHAUSTED: Self = Self(8);
    pub const UNIMPLEMENTED: Self = Self(12);
    pub const INTERNAL: Self = Self(13);
}

/// How a stream ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub code: Code,
    pub message: String,
}

impl Status {
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// The trailers that say so.
    pub(crate) fn trailers(&self) -> HeaderMap {
        let mut headers = HeaderMap::with_capacity(3);
        headers.insert(GRPC_STATUS, HeaderValue::from(u16::from(self.code.0)));
        if !self.message.is_empty()
            && let Ok(text) = HeaderValue::from_str(&percent_encoded(&self.message))
        {
            headers.insert(GRPC_MESSAGE, text);
        }
        headers
    }

    /// The same where nothing was sent before: one response that is headers alone.
    pub(crate) fn trailers_only(&self) -> Response<()> {
        let mut response = response_head();
        response.headers_mut().extend(self.trailers());
        response
    }
}

/// The head of a response that messages follow.
pub(crate) fn response_head() -> Response<()> {
    let mut response = Response::new(());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

/// The response to a request that is no gRPC at all.
pub(crate) fn not_grpc(status: StatusCode) -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = status;
    response
}

fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for &byte in text.as_bytes().iter().take(MESSAGE_BYTES_MAX) {
        if (0x20..=0x7e).contains(&byte) && byte != b'%' {
            encoded.push(char::from(byte));
        } else {
            // Writing into a string does not fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_any_text_becomes_a_header() {
        let trailers = Status::new(Code::INTERNAL, "50 % grün\n").trailers();
        assert_eq!(trailers[GRPC_STATUS], "13");
        assert_eq!(trailers[GRPC_MESSAGE], "50 %25 gr%C3%BCn%0A");
    }
}
