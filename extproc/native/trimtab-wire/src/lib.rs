//! The ext_proc messages of an exchange, as gateways usually send them.
//!
//! The one rule: what is read here is exactly what the full reader (`wire.py`, over the protobuf library) makes of the
//! same bytes; whatever is out of the usual (fields that are not listed here or come twice, text that is no UTF-8,
//! metadata, anything broken) is `None` and left to it. Nothing is copied but header names that are not in lower case.

mod fields;

use std::borrow::Cow;

use fields::{Fields, Value};

/// A constant of gateways that tell of a response only where it is not the usual one.
const USUAL_UNTOLD: &str = "'trimtab.usual-response-untold'";
/// What gateways can tell in place of the headers, besides each header by its name.
const HEADER_OF_ATTRIBUTE: [(&str, &str); 3] =
    [("request.method", ":method"), ("request.path", ":path"), ("request.id", "x-request-id")];
const HEADER_ATTRIBUTE: (&str, &str) = ("request.headers['", "']");

/// Names and values in the order that they came in; of equal names the last counts.
pub type Headers<'a> = Vec<(Cow<'a, str>, Cow<'a, str>)>;

/// A message, as far as the picker needs it.
#[derive(Debug, PartialEq, Eq)]
pub enum Message<'a> {
    RequestHeaders {
        headers: Headers<'a>,
        end_of_stream: bool,
        modes: Option<(u64, u64)>,
        is_usual_untold: bool,
    },
    RequestBody {
        body: &'a [u8],
        end_of_stream: bool,
        /// What is told of the headers together with the body, if anything.
        head: Option<Headers<'a>>,
        modes: Option<(u64, u64)>,
        is_usual_untold: bool,
    },
    /// Without attributes.
    ResponseHeaders {
        headers: Headers<'a>,
        end_of_stream: bool,
        modes: Option<(u64, u64)>,
    },
    ResponseBody {
        body: &'a [u8],
        end_of_stream: bool,
    },
}

/// Of a response's headers those that the picker looks at.
const RESPONSE_HEADERS: [&str; 3] = [":status", "content-type", "content-encoding"];

/// The message, or `None`: the full reader has to look at it.
#[must_use]
pub fn read(data: &[u8]) -> Option<Message<'_>> {
    let (mut part, mut metadata, mut attributes, mut config) = (None, None, None, None);
    for field in Fields::new(data) {
        match field? {
            (number @ 2..=5, Value::Bytes(content)) => once(&mut part, (number, content))?,
            (8, Value::Bytes([])) => once(&mut metadata, ())?,
            (9, Value::Bytes(content)) => once(&mut attributes, content)?,
            (11, Value::Bytes(content)) => once(&mut config, content)?,
            _ => return None,
        }
    }
    let modes = match config {
        Some(part) => Some(read_modes(part)?),
        None => None,
    };
    let told = match attributes {
        Some(part) => Some(read_attributes(part)?),
        None => None,
    };
    let is_usual_untold = told.as_ref().is_some_and(|(_, is_usual_untold)| *is_usual_untold);
    match part? {
        (2, content) => {
            let (headers, end_of_stream) = read_headers(content)?;
            Some(Message::RequestHeaders { headers, end_of_stream, modes, is_usual_untold })
        }
        (4, content) => {
            let (body, end_of_stream) = read_body(content)?;
            let head = told.map(|(headers, _)| headers);
            Some(Message::RequestBody { body, end_of_stream, head, modes, is_usual_untold })
        }
        (3, content) if told.is_none() => {
            let (mut headers, end_of_stream) = read_headers(content)?;
            headers.retain(|(name, _)| RESPONSE_HEADERS.contains(&&**name));
            Some(Message::ResponseHeaders { headers, end_of_stream, modes })
        }
        (5, content) => {
            let (body, end_of_stream) = read_body(content)?;
            Some(Message::ResponseBody { body, end_of_stream })
        }
        _ => None,
    }
}

fn once<T>(place: &mut Option<T>, value: T) -> Option<()> {
    if place.is_some() {
        return None;
    }
    *place = Some(value);
    Some(())
}

fn text(bytes: &[u8]) -> Option<&str> {
    str::from_utf8(bytes).ok()
}

fn flag(value: u64) -> Option<bool> {
    match value {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

fn read_modes(data: &[u8]) -> Option<(u64, u64)> {
    let (mut request, mut response) = (None, None);
    for field in Fields::new(data) {
        match field? {
            (1, Value::Number(mode)) => once(&mut request, mode)?,
            (2, Value::Number(mode)) => once(&mut response, mode)?,
            // Whether bodies wait for the answer to the headers: nothing changes for us.
            (3, Value::Number(0 | 1)) => {}
            _ => return None,
        }
    }
    Some((request.unwrap_or(0), response.unwrap_or(0)))
}

fn read_body(data: &[u8]) -> Option<(&[u8], bool)> {
    let (mut body, mut end, mut end_alone) = (None, None, None);
    for field in Fields::new(data) {
        match field? {
            (1, Value::Bytes(bytes)) => once(&mut body, bytes)?,
            (2, Value::Number(value)) => once(&mut end, flag(value)?)?,
            (3, Value::Number(value)) => once(&mut end_alone, flag(value)?)?,
            _ => return None,
        }
    }
    Some((body.unwrap_or_default(), end.unwrap_or(false) || end_alone.unwrap_or(false)))
}

fn read_headers(data: &[u8]) -> Option<(Headers<'_>, bool)> {
    let (mut map, mut end) = (None, None);
    for field in Fields::new(data) {
        match field? {
            (1, Value::Bytes(part)) => once(&mut map, part)?,
            (3, Value::Number(value)) => once(&mut end, flag(value)?)?,
            _ => return None,
        }
    }
    let mut headers = Headers::new();
    for field in Fields::new(map.unwrap_or_default()) {
        let (1, Value::Bytes(part)) = field? else { return None };
        headers.push(read_header(part)?);
    }
    Some((headers, end.unwrap_or(false)))
}

fn read_header(data: &[u8]) -> Option<(Cow<'_, str>, Cow<'_, str>)> {
    let (mut key, mut value, mut raw) = (None, None, None);
    for field in Fields::new(data) {
        match field? {
            (1, Value::Bytes(bytes)) => once(&mut key, text(bytes)?)?,
            (2, Value::Bytes(bytes)) => once(&mut value, text(bytes)?)?,
            (3, Value::Bytes(bytes)) => once(&mut raw, text(bytes)?)?,
            _ => return None,
        }
    }
    let key = key.unwrap_or_default();
    if !key.is_ascii() {
        return None;
    }
    let key = if key.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Cow::Owned(key.to_ascii_lowercase())
    } else {
        Cow::Borrowed(key)
    };
    let raw = raw.unwrap_or_default();
    Some((key, Cow::Borrowed(if raw.is_empty() { value.unwrap_or_default() } else { raw })))
}

/// The headers among the attributes of the one filter that sends them, and whether it tells no usual responses.
fn read_attributes(data: &[u8]) -> Option<(Headers<'_>, bool)> {
    let (_, members) = read_entry(data)?;
    let (mut headers, mut is_usual_untold) = (Headers::new(), false);
    for field in Fields::new(members) {
        let (1, Value::Bytes(member)) = field? else { return None };
        let (attribute, value) = read_entry(member)?;
        let value = read_value(value)?;
        is_usual_untold |= attribute == USUAL_UNTOLD;
        if let Some(name) = header_of(attribute) {
            // Of equal names the last counts, also if it says nothing.
            headers.retain(|(known, _)| known != name);
            if !value.is_empty() {
                headers.push((Cow::Borrowed(name), Cow::Borrowed(value)));
            }
        }
    }
    Some((headers, is_usual_untold))
}

fn header_of(attribute: &str) -> Option<&str> {
    if let Some((_, name)) = HEADER_OF_ATTRIBUTE.iter().find(|(known, _)| *known == attribute) {
        return Some(name);
    }
    attribute.strip_prefix(HEADER_ATTRIBUTE.0)?.strip_suffix(HEADER_ATTRIBUTE.1)
}

/// An entry of a map from texts to messages.
fn read_entry(data: &[u8]) -> Option<(&str, &[u8])> {
    let (mut key, mut value) = (None, None);
    for field in Fields::new(data) {
        match field? {
            (1, Value::Bytes(bytes)) => once(&mut key, text(bytes)?)?,
            (2, Value::Bytes(bytes)) => once(&mut value, bytes)?,
            _ => return None,
        }
    }
    Some((key.unwrap_or_default(), value.unwrap_or_default()))
}

/// A `google.protobuf.Value` that is a text; empty for none at all.
fn read_value(data: &[u8]) -> Option<&str> {
    let mut found = None;
    for field in Fields::new(data) {
        let (3, Value::Bytes(bytes)) = field? else { return None };
        once(&mut found, text(bytes)?)?;
    }
    Some(found.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::{Message, read};

    fn bytes(number: u8, content: &[u8]) -> Vec<u8> {
        let mut field = vec![number << 3 | 2, u8::try_from(content.len()).expect("short")];
        field.extend_from_slice(content);
        field
    }

    #[test]
    fn a_whole_request_is_its_body_and_what_is_told_of_its_headers() {
        let value = [bytes(1, b"request.path"), bytes(2, &bytes(3, b"/v1/x"))].concat();
        let flag = [bytes(1, b"'trimtab.usual-response-untold'"), bytes(2, &bytes(3, b"x"))].concat();
        let filter = [bytes(1, b"filter"), bytes(2, &[bytes(1, &value), bytes(1, &flag)].concat())].concat();
        let body = [bytes(1, b"{}"), vec![2 << 3, 1]].concat();
        let message = [bytes(4, &body), bytes(9, &filter), bytes(11, &[1 << 3, 2]), bytes(8, b"")].concat();
        let expected = Message::RequestBody {
            body: b"{}",
            end_of_stream: true,
            head: Some(vec![(":path".into(), "/v1/x".into())]),
            modes: Some((2, 0)),
            is_usual_untold: true,
        };
        assert_eq!(read(&message), Some(expected));
        for end in 0..message.len() {
            let _ = read(&message[..end]);
        }
    }

    #[test]
    fn headers_come_in_lower_case_from_either_field() {
        let one = bytes(1, &[bytes(1, b"X-One"), bytes(3, b"1")].concat());
        let two = bytes(1, &[bytes(1, b"two"), bytes(2, b"2")].concat());
        let message = bytes(2, &[bytes(1, &[one, two].concat()), vec![3 << 3, 1]].concat());
        let headers = vec![("x-one".into(), "1".into()), ("two".into(), "2".into())];
        let expected = Message::RequestHeaders { headers, end_of_stream: true, modes: None, is_usual_untold: false };
        assert_eq!(read(&message), Some(expected));
    }

    #[test]
    fn what_is_out_of_the_usual_is_left_to_the_full_reader() {
        let body = bytes(4, &bytes(1, b"{}"));
        assert!(read(&body).is_some());
        for more in [body.clone(), bytes(2, b""), bytes(8, b"x"), bytes(12, b""), vec![10 << 3, 1], vec![0xff]] {
            assert_eq!(read(&[body.clone(), more].concat()), None);
        }
        let not_text = bytes(2, &bytes(1, &bytes(1, &[bytes(1, b"a"), bytes(3, b"\xff")].concat())));
        assert_eq!(read(&not_text), None);
    }
}
