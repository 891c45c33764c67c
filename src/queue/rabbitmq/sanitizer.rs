//! A filter that keeps bytes of a message away from lapin that its parser would not survive.
//!
//! The parser (amq-protocol-types 10.6.3, `parsing.rs`) calls itself for each array and table within another. One
//! message with headers of 26,000 levels (five bytes each, in a frame of 128 KiB) would overflow the stack and end
//! every worker that gets it. The parser also takes a short string that is not UTF-8 for the end of the whole
//! connection. The broker passes such strings on, so that one message would be the first again on the next connection.
//!
//! Beyond [`DEPTH_MAX`] an array or a table is renamed to a byte array, which is laid out alike. In a short string,
//! question marks replace what is not UTF-8. Every other byte passes as it came, one whole frame at a time.

use std::io;
use std::sync::{Arc, OnceLock};

use lapin::protocol::{AMQPClass, connection::AMQPMethod, parse_class};

/// Deepest nesting of arrays and tables that passes as such; rabbitmq-c draws the line at 100, our own JSON at 128.
const DEPTH_MAX: usize = 64;
/// Largest frame that is read; the broker's default is 128 KiB, and lapin ends the connection after a larger one.
const FRAME_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Frame types. <https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf>, 4.2.3
const METHOD: u8 = 1;
const CONTENT_HEADER: u8 = 2;
const BODY: u8 = 3;
const HEARTBEAT: u8 = 8;
/// Type, channel and size of a frame; and its end mark.
const FRAME_HEAD_BYTES: usize = 7;
const FRAME_END_BYTES: usize = 1;
/// `x`: length and bytes, like an array (`A`) and a table (`F`).
const BYTE_ARRAY: u8 = b'x';
const REPLACEMENT: u8 = b'?';

/// Class and number of `Connection.Start`, the broker's greeting.
const START: usize = 10 << 16 | 10;

/// A part of a method or of a content header.
#[derive(Clone, Copy)]
enum Part {
    Text,
    Table,
    Bytes(usize),
}

impl Part {
    /// Takes itself off the front of `rest`; `None` where that is malformed.
    fn sanitize(self, rest: &mut &mut [u8]) -> Option<()> {
        match self {
            Self::Text => sanitize_text(rest),
            Self::Table => sanitize_values(rest, b'F', 1),
            Self::Bytes(bytes) => rest.split_off_mut(..bytes).map(|_| ()),
        }
    }
}

/// Properties, each there if its flag is, from the highest bit down.
/// <https://www.rabbitmq.com/resources/specs/amqp0-9-1.extended.xml>, class basic
const PROPERTIES: [Part; 14] = {
    use Part::{Bytes, Table, Text};
    // Content type and encoding, headers, delivery mode, priority, correlation id, reply to, expiration, message id,
    // timestamp, type, user id, app id, cluster id.
    [Text, Text, Table, Bytes(1), Bytes(1), Text, Text, Text, Text, Bytes(8), Text, Text, Text, Text]
};

/// What a method begins with that comes with a message, or greets.
fn parts_of(method: usize) -> &'static [Part] {
    use Part::{Bytes, Table, Text};
    match (method >> 16, method & 0xffff) {
        // Start: version of the protocol, properties of the server.
        (10, 10) => &[Bytes(2), Table],
        // Return: code, text, exchange, routing key.
        (60, 50) => &[Bytes(2), Text, Text, Text],
        // Deliver: consumer tag, delivery tag and whether redelivered, exchange, routing key.
        (60, 60) => &[Text, Bytes(9), Text, Text],
        // Get-ok: the same without a consumer.
        (60, 71) => &[Bytes(9), Text, Text],
        _ => &[],
    }
}

/// Bytes from the broker, until they are handed on.
#[derive(Debug, Default)]
pub struct Sanitizer {
    bytes: Vec<u8>,
    /// So many of them are frames that were looked at.
    passed: usize,
    /// What comes is not AMQP: lapin will say so.
    is_foreign: bool,
    /// The broker's version from its greeting, of which lapin keeps nothing.
    version: Arc<OnceLock<String>>,
}

impl Sanitizer {
    /// `version` is set from the broker's greeting.
    pub fn with_version(version: Arc<OnceLock<String>>) -> Self {
        Self { version, ..Self::default() }
    }

    /// Adds the next bytes, in pieces of any size.
    ///
    /// # Errors
    /// When a frame is too large to wait for its end.
    pub fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes.extend_from_slice(bytes);
        while let Some(&kind) = self.bytes.get(self.passed) {
            if self.is_foreign || ![METHOD, CONTENT_HEADER, BODY, HEARTBEAT].contains(&kind) {
                self.is_foreign = true;
                self.passed = self.bytes.len();
                break;
            }
            let frame = &mut self.bytes[self.passed..];
            let Some(&[_, _, _, a, b, c, d]) = frame.first_chunk::<FRAME_HEAD_BYTES>() else { break };
            let size = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
            if size > FRAME_BYTES_MAX {
                let problem = format!("the broker sent a frame of {size} bytes");
                return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
            }
            let end = FRAME_HEAD_BYTES + size;
            if frame.len() < end + FRAME_END_BYTES {
                break;
            }
            self.passed += end + FRAME_END_BYTES;
            let payload = &mut frame[FRAME_HEAD_BYTES..end];
            // What is malformed is left to lapin, which reads no further than this either.
            let _ = match kind {
                METHOD => sanitize_method(payload, &self.version),
                CONTENT_HEADER => sanitize_content_header(payload),
                _ => None,
            };
        }
        Ok(())
    }

    /// Hands on bytes that have passed; how many they are.
    pub fn take(&mut self, into: &mut [u8]) -> usize {
        let count = self.passed.min(into.len());
        into[..count].copy_from_slice(&self.bytes[..count]);
        self.bytes.drain(..count);
        self.passed -= count;
        count
    }
}

fn sanitize_method(payload: &mut [u8], version: &OnceLock<String>) -> Option<()> {
    let mut rest = &mut *payload;
    let method = number(&mut rest, 4)?;
    parts_of(method).iter().try_for_each(|part| part.sanitize(&mut rest))?;
    if method == START
        && let Some(announced) = version_of(payload)
    {
        // There is one greeting on a connection.
        let _ = version.set(announced);
    }
    Some(())
}

fn sanitize_content_header(mut rest: &mut [u8]) -> Option<()> {
    // Class, weight and size of the body.
    rest.split_off_mut(..12)?;
    let flags = number(&mut rest, 2)?;
    let present = PROPERTIES.iter().zip(0..).filter(|(_, place)| flags & (1 << (15 - place)) != 0);
    present.map(|(part, _)| part).try_for_each(|part| part.sanitize(&mut rest))
}

/// Reads length and values of an array or a table. Sizes are those of amq-protocol's parser, which has to see the same
/// structure.
fn sanitize_values(rest: &mut &mut [u8], of: u8, depth: usize) -> Option<()> {
    let length = number(rest, 4)?;
    let mut values = rest.split_off_mut(..length)?;
    while !values.is_empty() {
        if of == b'F' {
            sanitize_text(&mut values)?;
        }
        let kind = values.split_off_first_mut()?;
        let bytes = match *kind {
            nested @ (b'A' | b'F') if depth < DEPTH_MAX => {
                sanitize_values(&mut values, nested, depth + 1)?;
                0
            }
            b'S' => number(&mut values, 4)?,
            b'A' | b'F' | BYTE_ARRAY => {
                *kind = BYTE_ARRAY;
                number(&mut values, 4)?
            }
            b'V' => 0,
            b't' | b'b' | b'B' => 1,
            b's' | b'U' | b'u' => 2,
            b'I' | b'i' | b'f' => 4,
            b'D' => 5,
            b'L' | b'l' | b'd' | b'T' => 8,
            _ => return None,
        };
        values.split_off_mut(..bytes)?;
    }
    Some(())
}

fn sanitize_text(rest: &mut &mut [u8]) -> Option<()> {
    let length = number(rest, 1)?;
    let text = rest.split_off_mut(..length)?;
    while let Err(invalid) = str::from_utf8(text) {
        text[invalid.valid_up_to()] = REPLACEMENT;
    }
    Some(())
}

fn number(rest: &mut &mut [u8], bytes: usize) -> Option<usize> {
    let digits = rest.split_off_mut(..bytes)?;
    Some(digits.iter().fold(0, |number, byte| number << 8 | usize::from(*byte)))
}

fn version_of(greeting: &[u8]) -> Option<String> {
    let (_, AMQPClass::Connection(AMQPMethod::Start(start))) = parse_class(greeting).ok()? else { return None };
    let text = start.server_properties.inner().get("version")?.as_long_string()?;
    let text = str::from_utf8(text.as_bytes()).ok()?;
    Some(text.chars().filter(char::is_ascii_graphic).take(32).collect())
}

#[cfg(test)]
mod tests {
    use std::str::Utf8Chunk;

    use proptest::prelude::*;

    use super::*;

    fn sized(bytes: &[u8]) -> Vec<u8> {
        [&u32::try_from(bytes.len()).unwrap().to_be_bytes()[..], bytes].concat()
    }

    fn short(text: &[u8]) -> Vec<u8> {
        [&[u8::try_from(text.len()).unwrap()][..], text].concat()
    }

    /// So many arrays, one in the other, with a number in the innermost.
    fn arrays(levels: usize) -> Vec<u8> {
        (0..levels).fold(b"I\0\0\0\x07".to_vec(), |inner, _| [b"A", &sized(&inner)[..]].concat())
    }

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        [&[kind, 0, 1][..], &sized(payload), &[0xce]].concat()
    }

    /// A content header with a content type and these headers; the flag for more flags is set, which lapin ignores.
    fn header(entries: &[u8]) -> Vec<u8> {
        let head = [0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0xa0, 1];
        frame(CONTENT_HEADER, &[&head[..], b"\x04text", &sized(entries), b"\x02"].concat())
    }

    /// `Connection.Start` with these properties of the server.
    fn greeting(properties: &[u8]) -> Vec<u8> {
        let behind = [&sized(b"PLAIN")[..], &sized(b"en_US")].concat();
        frame(METHOD, &[b"\0\x0a\0\x0a\0\x09", &sized(properties)[..], &behind].concat())
    }

    fn pass(stream: &[u8], piece: usize) -> (Vec<u8>, Option<String>) {
        let version = Arc::new(OnceLock::new());
        let mut sanitizer = Sanitizer::with_version(Arc::clone(&version));
        let (mut passed, mut room) = (Vec::new(), vec![0; piece + 3]);
        for chunk in stream.chunks(piece) {
            sanitizer.add(chunk).unwrap();
            loop {
                let count = sanitizer.take(&mut room);
                passed.extend_from_slice(&room[..count]);
                if count == 0 {
                    break;
                }
            }
        }
        (passed, version.get().cloned())
    }

    fn passed(stream: &[u8], piece: usize) -> Vec<u8> {
        pass(stream, piece).0
    }

    #[test]
    fn permitted_nesting_passes_unchanged() {
        let every_type = b"\x01tt\x01\x01bb\x01\x01BB\x01\x01ss\0\x01\x01UU\0\x01\x01uu\0\x01\x01II\0\0\0\x01\x01ii\0\0\0\x01\
                           \x01ff\0\0\0\x01\x01DD\x02\0\0\0\x01\x01LL\0\0\0\0\0\0\0\x01\x01ll\0\0\0\0\0\0\0\x01\x01dd\0\0\0\0\0\0\0\x01\
                           \x01TT\0\0\0\0\0\0\0\x01\x01VV\x01SS\0\0\0\x02AA\x01xx\0\0\0\x02FF\x01FF\0\0\0\0\x01AA\0\0\0\0";
        // The table itself is the first level.
        let deepest = [b"\x01a", &arrays(DEPTH_MAX - 1)[..], every_type].concat();
        let stream = [header(&deepest), frame(BODY, b"A\0\0\0\x05body!"), header(every_type), frame(HEARTBEAT, b"")];
        let stream = stream.concat();
        for piece in [1, 2, 7, 4_096] {
            assert_eq!(passed(&stream, piece), stream, "in pieces of {piece}");
        }
    }

    #[test]
    fn deep_nesting_becomes_bytes() {
        let behind = [b"\x01b", &arrays(3)[..]].concat();
        let deep = [b"\x01a", &arrays(20_000)[..], &behind].concat();
        // Behind each frame's head: content head and content type, or method and protocol. Then the table's length.
        for (first, head) in [(header(&deep), 14 + 5), (greeting(&deep), 6)] {
            let stream = [first, header(&behind)].concat();
            for piece in [1, 5, 131_072] {
                let passed = passed(&stream, piece);
                let changed: Vec<usize> = (0..stream.len()).filter(|at| passed[*at] != stream[*at]).collect();
                // The key, and the levels above: each is a letter and a length.
                let at = FRAME_HEAD_BYTES + head + 4 + 2 + 5 * (DEPTH_MAX - 1);
                assert_eq!((changed, stream[at], passed[at]), (vec![at], b'A', BYTE_ARRAY));
            }
        }
    }

    /// A delivery with this text wherever a short string can be, and these bytes wherever none is.
    fn delivery(text: &[u8], other: &[u8; 8]) -> Vec<u8> {
        let (text, kind, number) = (short(text), b"S", sized(other));
        let deliver = [&[0, 60, 0, 60][..], &text, other, &other[..1], &text, &text].concat();
        let head = [&[0, 60, 0, 0][..], other, &[0xff, 0xfc]].concat();
        let headers = sized(&[&text[..], kind, &number].concat());
        let behind = [&other[..2], &text, &text, &text, &text, other, &text, &text, &text, &text].concat();
        let content = [&head[..], &text, &text, &headers, &behind].concat();
        [frame(METHOD, &deliver), frame(CONTENT_HEADER, &content), frame(BODY, other)].concat()
    }

    #[test]
    fn only_invalid_short_strings_are_rewritten() {
        let other = b"\xff\xc3\x28\x80\xe9\xce\xff\xff";
        for (text, instead) in [
            (&b"\xff\xfe"[..], &b"??"[..]),
            (b"caf\xe9", b"caf?"),
            ("caf\u{e9}".as_bytes(), "caf\u{e9}".as_bytes()),
            (b"\x80\xbfa", b"??a"),
            (b"\xc3(", b"?("),
            (b"\xc3", b"?"),
            (b"\xc0\xaf", b"??"),
            // A surrogate, and one beyond the last character.
            (b"\xed\xa0\x80", b"???"),
            (b"\xf4\x90\x80\x80", b"????"),
        ] {
            let stream = [delivery(text, other), delivery(text, other)].concat();
            let expected = [delivery(instead, other), delivery(instead, other)].concat();
            for piece in [1, 3, 4_096] {
                assert_eq!(passed(&stream, piece), expected, "{text:x?} in pieces of {piece}");
            }
        }
    }

    proptest! {
        #[test]
        fn sanitizer_keeps_valid_text_and_replaces_invalid(
            text in ".{0,40}",
            bytes in prop::collection::vec(any::<u8>(), 0..60),
            piece in 1_usize..9,
        ) {
            let valid = delivery(text.as_bytes(), &[0xff; 8]);
            prop_assert_eq!(passed(&valid, piece), valid);
            let instead = |chunk: Utf8Chunk| chunk.valid().to_owned() + &"?".repeat(chunk.invalid().len());
            let expected: String = bytes.utf8_chunks().map(instead).collect();
            let expected = delivery(expected.as_bytes(), &[0xff; 8]);
            prop_assert_eq!(passed(&delivery(&bytes, &[0xff; 8]), piece), expected);
        }
    }

    #[test]
    fn wrong_lengths_end_with_their_frame() {
        let lies: [&[u8]; 6] = [
            b"\x01aA\xff\xff\xff\xff",
            b"\x01aS\xff\xff\xff\xffAA",
            b"\xffa",
            b"\x01a?A\0\0\0\0",
            b"\x01aA\0\0\0\x02F\0",
            b"\x01aI\0",
        ];
        for lie in lies {
            let deep = header(&[b"\x01a", &arrays(100)[..]].concat());
            let stream = [header(lie), deep.clone()].concat();
            let passed = passed(&stream, 3);
            let changed = passed.iter().zip(&stream).filter(|(now, before)| now != before).count();
            assert_eq!(changed, 1, "{lie:?}: the frame behind it is seen");
        }
    }

    #[test]
    fn non_amqp_bytes_pass_unchanged() {
        for stream in [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], b"AMQP\0\0\x09\x01\x02\0\0\xff\xff\xff\xffAAAA"] {
            assert_eq!(pass(stream, 1), (stream.to_vec(), None));
        }
        assert!(
            Sanitizer::default().add(&[1, 0, 0, 0xff, 0xff, 0xff, 0xff]).is_err(),
            "nothing is kept of such a frame"
        );
    }

    #[test]
    fn version_is_read_from_split_frames() {
        let field = |name: &[u8], value: &[u8]| [&short(name)[..], b"S", &sized(value)].concat();
        // A name that holds what the version begins with is not taken for it.
        let nested = [&short(b"capabilities")[..], b"F", &sized(&field(b"version", b"nested"))].concat();
        let before = [nested, field(b"cluster_name", b"\x07versionS\0\0\0\x03bad")].concat();
        let whole = greeting(&[&before[..], &field(b"version", b"3.10.8")].concat());
        for piece in [1, 2, 7, 4_096] {
            assert_eq!(pass(&whole, piece), (whole.clone(), Some("3.10.8".to_owned())));
        }
        for other in [&before[..], b"\x07versiont\x01", b"\x03oddZ", b""] {
            assert_eq!(pass(&greeting(other), 7).1, None);
        }
        assert_eq!(pass(&whole[..whole.len() - 20], 7), (Vec::new(), None));
    }
}
