//! What the head of a request says: the method that is called, and until when.

use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::{Method, StatusCode, request};

/// The called method as a path, and the time that the caller gives it; the HTTP status where the request is no gRPC.
pub(crate) fn read(head: &request::Parts) -> Result<(String, Option<Duration>), StatusCode> {
    if head.method != Method::POST {
        return Err(StatusCode::METHOD_NOT_ALLOWED);
    }
    let content_type = head.headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    if !content_type.starts_with(b"application/grpc") {
        return Err(StatusCode::UNSUPPORTED_MEDIA_TYPE);
    }
    let timeout = head.headers.get("grpc-timeout").and_then(|value| timeout(value.as_bytes()));
    Ok((head.uri.path().to_owned(), timeout))
}

/// `100m`: at most eight digits and a unit. Anything else is no timeout.
fn timeout(text: &[u8]) -> Option<Duration> {
    let (unit, digits) = text.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let amount = digits.iter().fold(0_u64, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    match unit {
        b'H' => Some(Duration::from_secs(amount * 3600)),
        b'M' => Some(Duration::from_secs(amount * 60)),
        b'S' => Some(Duration::from_secs(amount)),
        b'm' => Some(Duration::from_millis(amount)),
        b'u' => Some(Duration::from_micros(amount)),
        b'n' => Some(Duration::from_nanos(amount)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_in_every_unit() {
        assert_eq!(timeout(b"10S"), Some(Duration::from_secs(10)));
        assert_eq!(timeout(b"250m"), Some(Duration::from_millis(250)));
        assert_eq!(timeout(b"99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        for bad in [&b""[..], b"S", b"10", b"-1S", b"123456789S", b"1x"] {
            assert_eq!(timeout(bad), None);
        }
    }
}
