//! Spelling of header names as they are sent: title case (`Idempotency-Key`), or the row's own (`PayPal-Request-Id`).
//!
//! HTTP compares names without regard to case, but some servers do not. hyper keeps names in small letters and can only
//! write them in title case: its map of other spellings is private. So the row's spelling is restored in the bytes of
//! the head. The length stays the same.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::domain::provider::Provider;

/// Names of a row that are not in title case, in the row's spelling.
#[derive(Debug, Default)]
pub struct HeaderNames {
    exact: Vec<String>,
}

impl HeaderNames {
    /// The names in `headers`, and the idempotency key's.
    pub fn from_provider(provider: &Provider) -> Self {
        let names = provider.headers.keys().chain(&provider.request.key_header);
        Self { exact: names.filter(|name| **name != title_case(name)).cloned().collect() }
    }

    /// Names that the row spells otherwise than in title case.
    pub fn exact(&self) -> &[String] {
        &self.exact
    }

    /// The bytes of a request with the row's spellings in its head. `None`: they stay as they are.
    fn respell(&self, request: &[u8]) -> Option<Vec<u8>> {
        if self.exact.is_empty() {
            return None;
        }
        let mut bytes = request.to_vec();
        let mut line = 0;
        while let Some(length) = bytes[line..].iter().position(|byte| *byte == b'\n') {
            let end = line + length;
            // The empty line ends the head.
            if bytes[line..end].trim_ascii().is_empty() {
                break;
            }
            if let Some(colon) = bytes[line..end].iter().position(|byte| *byte == b':') {
                let name = &mut bytes[line..line + colon];
                if let Some(exact) = self.exact.iter().find(|exact| exact.as_bytes().eq_ignore_ascii_case(name)) {
                    name.copy_from_slice(exact.as_bytes());
                }
            }
            line = end + 1;
        }
        Some(bytes)
    }
}

/// The name in title case, as hyper writes it.
pub fn title_case(name: &str) -> String {
    let mut previous = '-';
    let letters = name.chars().map(|letter| {
        let upper = previous == '-';
        previous = letter;
        if upper { letter.to_ascii_uppercase() } else { letter.to_ascii_lowercase() }
    });
    letters.collect()
}

/// A request's bytes on the way to their connection.
///
/// hyper hands over a whole head at once, and what the connection has not taken again. Only the bytes that follow
/// [`Self::begin`] are a head: a later part of a body may look like one.
#[derive(Debug, Default)]
pub struct HeadWriter {
    is_next: AtomicBool,
}

impl HeadWriter {
    /// Announces that the next bytes begin a request.
    pub fn begin(&self) {
        self.is_next.store(true, Ordering::Relaxed);
    }

    /// The respelled bytes, if `bytes` begin a request that needs it.
    pub fn respell(&self, bytes: &[u8], names: &HeaderNames) -> Option<Respelled> {
        let begins = self.is_next.swap(false, Ordering::Relaxed);
        let bytes = if begins { names.respell(bytes)? } else { return None };
        Some(Respelled { bytes, written: 0 })
    }
}

/// Respelled bytes, as far as they are not written.
#[derive(Debug)]
pub struct Respelled {
    bytes: Vec<u8>,
    written: usize,
}

impl Respelled {
    pub fn rest(&self) -> &[u8] {
        &self.bytes[self.written..]
    }

    /// Counts written bytes. Returns whether any are left.
    pub fn advance(&mut self, written: usize) -> bool {
        self.written += written;
        self.written < self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(exact: &[&str]) -> HeaderNames {
        HeaderNames { exact: exact.iter().map(|&name| name.to_owned()).collect() }
    }

    #[test]
    fn only_names_of_the_head_are_respelled() {
        let request = "POST /paypal-request-id:1 HTTP/1.1\r\nPaypal-Request-Id: paypal-request-id: 1\r\nX-Api-Key: k\r\n\
                       X-Api-Keys: k\r\nHost: a\r\n\r\nX-Api-Key: body\r\n";
        let wanted = "POST /paypal-request-id:1 HTTP/1.1\r\nPayPal-Request-Id: paypal-request-id: 1\r\nX-API-Key: k\r\n\
                      X-Api-Keys: k\r\nHost: a\r\n\r\nX-Api-Key: body\r\n";
        let respelled = names(&["PayPal-Request-Id", "X-API-Key"]).respell(request.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(respelled).unwrap(), wanted);
        assert!(names(&[]).respell(request.as_bytes()).is_none());
    }

    /// A body that is handed over in several parts may contain lines such as those of a head.
    #[test]
    fn only_the_first_bytes_of_a_request_are_a_head() {
        let (writer, names) = (HeadWriter::default(), names(&["x-key"]));
        let line = b"X-Key: 1\r\n\r\n";
        assert!(writer.respell(line, &names).is_none());
        writer.begin();
        let mut head = writer.respell(line, &names).unwrap();
        assert_eq!(head.rest(), b"x-key: 1\r\n\r\n");
        assert!(head.advance(5) && head.rest() == b": 1\r\n\r\n");
        assert!(!head.advance(7));
        assert!(writer.respell(line, &names).is_none());
    }

    #[test]
    fn title_case_is_that_of_http() {
        for (name, title) in [
            ("idempotency-key", "Idempotency-Key"),
            ("PayPal-Request-Id", "Paypal-Request-Id"),
            ("X-API-Key", "X-Api-Key"),
            ("x--y", "X--Y"),
            ("3ds-id", "3ds-Id"),
        ] {
            assert_eq!(title_case(name), title);
        }
    }
}
