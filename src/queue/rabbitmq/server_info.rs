//! The broker's version, from `Connection.Start`, of which lapin keeps nothing.
//!
//! Of a greeting that cannot be read no version is known, and every byte passes as it came.

use std::sync::{Arc, OnceLock};

/// Far longer than a greeting is.
const BYTES_MAX: usize = 16 * 1024;
/// Frame type, channel and size. <https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf>, 4.2.3
const FRAME_HEAD_BYTES: usize = 7;
/// A method frame of class 10 (connection), method 10 (start), behind its channel and size. The same, 1.4.2.1
const START: [u8; 4] = [0, 10, 0, 10];

/// Listens until the first frame is whole.
#[derive(Debug, Default)]
pub(super) struct ServerInfoReader {
    buffer: Vec<u8>,
    is_over: bool,
    version: Arc<OnceLock<String>>,
}

impl ServerInfoReader {
    /// `version` is set when the broker has told it.
    pub fn with_version(version: Arc<OnceLock<String>>) -> Self {
        Self { version, ..Self::default() }
    }

    pub fn read(&mut self, bytes: &[u8]) {
        if self.is_over {
            return;
        }
        self.buffer.extend_from_slice(bytes);
        let frame = Cursor(&self.buffer).frame();
        self.is_over = frame.is_some() || self.buffer.len() > BYTES_MAX;
        if let Some(version) = frame.and_then(version) {
            // There is one greeting on a connection.
            let _ = self.version.set(version);
        }
        if self.is_over {
            self.buffer = Vec::new();
        }
    }
}

/// Of a `Connection.Start`: the `version` among the server's properties.
fn version(frame: &[u8]) -> Option<String> {
    let mut start = Cursor(frame);
    if start.take(START.len())? != START {
        return None;
    }
    let _protocol = start.take(2)?;
    let mut properties = Cursor(start.long()?);
    loop {
        let name = properties.short()?;
        match properties.take(1)? {
            [b'S'] if name == b"version" => {
                let text = str::from_utf8(properties.long()?).ok()?;
                return Some(text.chars().filter(|c| c.is_ascii_graphic()).take(32).collect());
            }
            // Long strings, tables, arrays and bytes are laid out alike.
            [b'S' | b'F' | b'A' | b'x'] => drop(properties.long()?),
            [b't' | b'b' | b'B'] => drop(properties.take(1)?),
            _ => return None,
        }
    }
}

/// Reads from the front; `None` where something is missing.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn size(&mut self) -> Option<usize> {
        let size: [u8; 4] = self.take(4)?.try_into().ok()?;
        usize::try_from(u32::from_be_bytes(size)).ok()
    }

    fn long(&mut self) -> Option<&'a [u8]> {
        let size = self.size()?;
        self.take(size)
    }

    fn short(&mut self) -> Option<&'a [u8]> {
        let [size] = self.take(1)? else { return None };
        self.take(usize::from(*size))
    }

    /// What the first frame carries, once all of it has come.
    fn frame(&mut self) -> Option<&'a [u8]> {
        self.take(FRAME_HEAD_BYTES - 4)?;
        self.long()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(name: &str, kind: u8, value: &[u8]) -> Vec<u8> {
        let length = u32::try_from(value.len()).unwrap().to_be_bytes();
        let length = if kind == b't' { &[] } else { &length[..] };
        [&[u8::try_from(name.len()).unwrap()], name.as_bytes(), &[kind], length, value].concat()
    }

    fn start(fields: &[Vec<u8>]) -> Vec<u8> {
        let properties = fields.concat();
        let length = u32::try_from(properties.len()).unwrap().to_be_bytes();
        let method =
            [&START[..], &[0, 9], &length, &properties, &[0, 0, 0, 5], b"PLAIN", &[0, 0, 0, 5], b"en_US"].concat();
        let length = u32::try_from(method.len()).unwrap().to_be_bytes();
        [&[1, 0, 0], &length[..], &method, &[0xce]].concat()
    }

    fn heard(pieces: &[&[u8]]) -> Option<String> {
        let version = Arc::new(OnceLock::new());
        let mut greeting = ServerInfoReader::with_version(Arc::clone(&version));
        for piece in pieces {
            greeting.read(piece);
        }
        assert!(greeting.buffer.len() <= BYTES_MAX);
        version.get().cloned()
    }

    #[test]
    fn version_is_read_from_split_frames() {
        // A name that holds what the version begins with is not taken for it.
        let before = [
            field("capabilities", b'F', &field("version", b'S', b"nested")),
            field("cluster_name", b'S', b"\x07versionS\0\0\0\x03bad"),
            field("x", b't', &[1]),
        ];
        let bytes = start(&[&before[..], &[field("version", b'S', b"3.10.8")]].concat());
        assert_eq!(heard(&[&bytes]).as_deref(), Some("3.10.8"));
        for at in 0..bytes.len() {
            assert_eq!(heard(&[&bytes[..at], &bytes[at..]]).as_deref(), Some("3.10.8"), "cut at {at}");
        }
        assert_eq!(heard(&[&bytes, &start(&[field("version", b'S', b"4")])]).as_deref(), Some("3.10.8"));
    }

    #[test]
    fn unreadable_greeting_has_no_version() {
        let whole = start(&[field("version", b'S', b"3.10.8")]);
        assert_eq!(heard(&[&whole[..whole.len() - 20]]), None);
        assert_eq!(heard(&[&start(&[field("product", b'S', b"RabbitMQ")])]), None);
        assert_eq!(heard(&[&start(&[field("odd", b'Z', b"")]), &whole]), None);
        assert_eq!(heard(&[b"HTTP/1.1 400 Bad Request\r\n\r\n"]), None);
        assert_eq!(heard(&[&[1, 0, 0, 0xff, 0xff, 0xff, 0xff], &vec![0; 2 * BYTES_MAX]]), None);
    }
}
