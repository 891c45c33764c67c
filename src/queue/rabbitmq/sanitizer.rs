//! A filter that keeps bytes of a producer's message away from lapin that its parser would not survive.
//!
//! The parser (amq-protocol-types 10.6.3, `parsing.rs`) calls itself for each array and table within another. One
//! message with headers of 26,000 levels (five bytes each, in a frame of 128 KiB) would overflow the stack and end
//! every worker that gets it. The parser also takes a short string that is not UTF-8 for the end of the whole
//! connection. The broker passes such strings on, so that one message would be the first again on the next connection.
//!
//! Beyond [`DEPTH_MAX`] an array or a table is renamed to a byte array, which is laid out alike. A short string is made
//! UTF-8 ([`super::utf8`]). Every other byte passes as it came.

use super::utf8::Utf8Repair;

/// Deepest nesting of arrays and tables that passes as such; rabbitmq-c draws the line at 100, our own JSON at 128.
pub const DEPTH_MAX: usize = 64;

/// `x`: length and bytes, like an array (`A`) and a table (`F`).
const BYTE_ARRAY: u8 = b'x';
/// Frame types: method, content header, body, heartbeat. <https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf>, 4.2.3
const FRAME_TYPES: [u8; 4] = [METHOD, CONTENT_HEADER, 3, 8];
const METHOD: u8 = 1;
const CONTENT_HEADER: u8 = 2;
/// Type, channel and size of a frame.
const FRAME_HEAD_BYTES: u64 = 7;
/// Class, weight, size of the body and property flags.
const CONTENT_HEAD_BYTES: u64 = 14;
/// Class and number of a method.
const METHOD_HEAD_BYTES: u64 = 4;
/// More flags follow. No client writes them, and lapin knows none.
const MORE_FLAGS: u64 = 1;

/// A part of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Text,
    Table,
    Bytes(u64),
}

/// Properties, each there if its flag is, from the highest bit down.
/// <https://www.rabbitmq.com/resources/specs/amqp0-9-1.extended.xml>, class basic
const PROPERTIES: [Part; 14] = {
    use Part::{Bytes, Table, Text};
    // Content type and encoding, headers, delivery mode, priority, correlation id, reply to, expiration, message id,
    // timestamp, type, user id, app id, cluster id.
    [Text, Text, Table, Bytes(1), Bytes(1), Text, Text, Text, Text, Bytes(8), Text, Text, Text, Text]
};

/// What a method that comes with a message begins with.
fn parts_of(method: u64) -> &'static [Part] {
    use Part::{Bytes, Text};
    match (method >> 16, method & 0xffff) {
        // Return: code, text, exchange, routing key.
        (60, 50) => &[Bytes(2), Text, Text, Text],
        // Deliver: consumer tag, delivery tag and whether redelivered, exchange, routing key.
        (60, 60) => &[Text, Bytes(9), Text, Text],
        // Get-ok: the same without a consumer.
        (60, 71) => &[Bytes(9), Text, Text],
        _ => &[],
    }
}

/// What the number that is being read is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    FrameHead,
    MethodHead,
    ContentHead,
    /// Of a short string outside of a table.
    StringLength,
    KeyLength,
    Type,
    /// Of an array or a table.
    Length {
        of_table: bool,
    },
    /// Of a long string or of bytes.
    BytesLength,
}

/// An array or a table that has begun.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// Bytes of the frame that are left when it ends.
    ends: u64,
    is_table: bool,
}

/// Reads what the broker sends, in pieces of any size.
#[derive(Debug)]
pub struct Sanitizer {
    reading: Number,
    /// The number so far, and its bytes to come.
    number: u64,
    missing: u64,
    /// Bytes of a short string that come first.
    text: u64,
    utf8: Utf8Repair,
    /// Bytes that pass unread behind them.
    skip: u64,
    /// Bytes of this frame to come, its end mark among them.
    left: u64,
    /// Parts of this frame that have not begun, the next one last.
    parts: Vec<Part>,
    open: Vec<Open>,
    /// What comes is not AMQP: lapin will say so.
    is_blind: bool,
}

impl Default for Sanitizer {
    fn default() -> Self {
        let reading = Number::FrameHead;
        let (number, missing, text, skip, left) = (0, FRAME_HEAD_BYTES, 0, 0, 0);
        let (utf8, parts, open) = (Utf8Repair::default(), Vec::new(), Vec::new());
        Self { reading, number, missing, text, utf8, skip, left, parts, open, is_blind: false }
    }
}

impl Sanitizer {
    /// Looks at the next bytes, and changes those that would nest too deep or are no text.
    pub fn pass(&mut self, mut bytes: &mut [u8]) {
        while !self.is_blind && !bytes.is_empty() {
            let is_text = self.text > 0;
            let ahead = if is_text { &mut self.text } else { &mut self.skip };
            let unread = usize::try_from(*ahead).unwrap_or(usize::MAX).min(bytes.len());
            if unread > 0 {
                *ahead -= unread as u64;
                if is_text {
                    self.utf8.repair(&mut bytes[..unread], self.text);
                }
                self.left = self.left.saturating_sub(unread as u64);
                bytes = &mut std::mem::take(&mut bytes)[unread..];
                continue;
            }
            let Some((byte, rest)) = std::mem::take(&mut bytes).split_first_mut() else { return };
            self.number = self.number << 8 | u64::from(*byte);
            self.missing -= 1;
            self.left = self.left.saturating_sub(1);
            if self.missing == 0 && self.has_read() {
                *byte = BYTE_ARRAY;
            }
            bytes = rest;
        }
    }

    /// Goes on after a number; whether its last byte, the type of a value, has to be that of bytes.
    fn has_read(&mut self) -> bool {
        let number = std::mem::take(&mut self.number);
        match self.reading {
            Number::FrameHead => self.frame(number),
            Number::MethodHead => {
                self.parts.extend(parts_of(number).iter().rev());
                self.next_part();
            }
            Number::ContentHead => {
                let flags = number & 0xffff;
                if flags & MORE_FLAGS == 0 {
                    let there = |place: &usize| flags & (1 << (15 - place)) != 0;
                    self.parts.extend((0..PROPERTIES.len()).rev().filter(there).map(|place| PROPERTIES[place]));
                }
                self.next_part();
            }
            Number::StringLength => {
                self.text(number);
                self.next_part();
            }
            Number::KeyLength => {
                self.text(number);
                self.read(Number::Type, 1);
            }
            Number::Type => return self.value(number.to_le_bytes()[0]),
            Number::Length { of_table } => {
                let length = number & 0xffff_ffff;
                match self.left.checked_sub(length) {
                    Some(ends) => {
                        self.open.push(Open { ends, is_table: of_table });
                        self.next_value();
                    }
                    None => self.end_frame(),
                }
            }
            Number::BytesLength => {
                self.skip = number & 0xffff_ffff;
                self.next_value();
            }
        }
        false
    }

    /// Of this frame; one that ends before is left to lapin.
    fn read(&mut self, number: Number, bytes: u64) {
        if self.text + self.skip + bytes > self.left {
            return self.end_frame();
        }
        (self.reading, self.missing) = (number, bytes);
    }

    fn frame(&mut self, head: u64) {
        let [_, kind, ..] = head.to_be_bytes();
        self.is_blind = !FRAME_TYPES.contains(&kind);
        // The end mark follows on the payload.
        self.left = (head & 0xffff_ffff) + 1;
        match kind {
            METHOD if self.left > METHOD_HEAD_BYTES => self.read(Number::MethodHead, METHOD_HEAD_BYTES),
            CONTENT_HEADER if self.left > CONTENT_HEAD_BYTES => self.read(Number::ContentHead, CONTENT_HEAD_BYTES),
            _ => self.end_frame(),
        }
    }

    /// Nothing more of this frame matters.
    fn end_frame(&mut self) {
        self.open.clear();
        self.parts.clear();
        self.text = if self.text <= self.left { self.text } else { 0 };
        self.skip = self.left - self.text;
        (self.reading, self.missing) = (Number::FrameHead, FRAME_HEAD_BYTES);
    }

    fn text(&mut self, bytes: u64) {
        (self.text, self.utf8) = (bytes, Utf8Repair::default());
    }

    fn next_part(&mut self) {
        while let Some(Part::Bytes(bytes)) = self.parts.pop_if(|part| matches!(part, Part::Bytes(_))) {
            self.skip += bytes;
        }
        match self.parts.pop() {
            Some(Part::Text) => self.read(Number::StringLength, 1),
            Some(Part::Table) => self.read(Number::Length { of_table: true }, 4),
            Some(Part::Bytes(_)) | None => self.end_frame(),
        }
    }

    /// What lies behind the value that ends where `skip` does.
    fn next_value(&mut self) {
        let Some(left) = self.left.checked_sub(self.skip) else { return self.end_frame() };
        while self.open.pop_if(|open| left <= open.ends).is_some() {}
        match self.open.last() {
            Some(Open { is_table: true, .. }) => self.read(Number::KeyLength, 1),
            Some(Open { is_table: false, .. }) => self.read(Number::Type, 1),
            None => self.next_part(),
        }
    }

    /// Sizes are those of amq-protocol's parser, which has to see the same structure.
    fn value(&mut self, kind: u8) -> bool {
        let too_deep = matches!(kind, b'A' | b'F') && self.open.len() >= DEPTH_MAX;
        match kind {
            b'A' | b'F' if !too_deep => self.read(Number::Length { of_table: kind == b'F' }, 4),
            b'A' | b'F' | b'S' | BYTE_ARRAY => self.read(Number::BytesLength, 4),
            b'V' => self.fixed(0),
            b't' | b'b' | b'B' => self.fixed(1),
            b's' | b'U' | b'u' => self.fixed(2),
            b'I' | b'i' | b'f' => self.fixed(4),
            b'D' => self.fixed(5),
            b'L' | b'l' | b'd' | b'T' => self.fixed(8),
            _ => self.end_frame(),
        }
        too_deep
    }

    fn fixed(&mut self, bytes: u64) {
        self.skip = bytes;
        self.next_value();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sized(bytes: &[u8]) -> Vec<u8> {
        [&u32::try_from(bytes.len()).unwrap().to_be_bytes()[..], bytes].concat()
    }

    /// So many arrays, one in the other, with a number in the innermost.
    fn arrays(levels: usize) -> Vec<u8> {
        (0..levels).fold(b"I\0\0\0\x07".to_vec(), |inner, _| [b"A", &sized(&inner)[..]].concat())
    }

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        [&[kind, 0, 1][..], &sized(payload), &[0xce]].concat()
    }

    /// A content header with a content type and these headers.
    fn header(entries: &[u8]) -> Vec<u8> {
        let head = [0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0xa0, 0];
        frame(CONTENT_HEADER, &[&head[..], b"\x04text", &sized(entries), b"\x02"].concat())
    }

    fn passed(stream: &[u8], piece: usize) -> Vec<u8> {
        let mut flattener = Sanitizer::default();
        let mut bytes = stream.to_vec();
        bytes.chunks_mut(piece).for_each(|chunk| flattener.pass(chunk));
        bytes
    }

    #[test]
    fn permitted_nesting_passes_unchanged() {
        let every_type = b"\x01tt\x01\x01bb\x01\x01BB\x01\x01ss\0\x01\x01UU\0\x01\x01uu\0\x01\x01II\0\0\0\x01\x01ii\0\0\0\x01\
                           \x01ff\0\0\0\x01\x01DD\x02\0\0\0\x01\x01LL\0\0\0\0\0\0\0\x01\x01ll\0\0\0\0\0\0\0\x01\x01dd\0\0\0\0\0\0\0\x01\
                           \x01TT\0\0\0\0\0\0\0\x01\x01VV\x01SS\0\0\0\x02AA\x01xx\0\0\0\x02FF\x01FF\0\0\0\0\x01AA\0\0\0\0";
        // The table itself is the first level.
        let deepest = [b"\x01a", &arrays(DEPTH_MAX - 1)[..], every_type].concat();
        let stream = [header(&deepest), frame(3, b"A\0\0\0\x05body!"), header(every_type), frame(8, b"")].concat();
        for piece in [1, 2, 7, 4_096] {
            assert_eq!(passed(&stream, piece), stream, "in pieces of {piece}");
        }
    }

    #[test]
    fn deep_nesting_becomes_bytes() {
        let behind = [b"\x01b", &arrays(3)[..]].concat();
        let stream = [header(&[b"\x01a", &arrays(20_000)[..], &behind].concat()), header(&behind)].concat();
        for piece in [1, 5, 131_072] {
            let passed = passed(&stream, piece);
            let changed: Vec<usize> = (0..stream.len()).filter(|at| passed[*at] != stream[*at]).collect();
            // Frame, content head, content type, table, key, and the levels above: each is a letter and a length.
            let at = 7 + 14 + 5 + 4 + 2 + 5 * (DEPTH_MAX - 1);
            assert_eq!((changed, stream[at], passed[at]), (vec![at], b'A', BYTE_ARRAY));
        }
    }

    fn short(text: &[u8]) -> Vec<u8> {
        [&[u8::try_from(text.len()).unwrap()][..], text].concat()
    }

    /// A delivery with this text wherever a short string can be, and these bytes wherever none is.
    fn delivery(text: &[u8], other: &[u8; 8]) -> Vec<u8> {
        let (text, kind, number) = (short(text), b"S", sized(other));
        let deliver = [&[0, 60, 0, 60][..], &text, other, &other[..1], &text, &text].concat();
        let head = [&[0, 60, 0, 0][..], other, &[0xff, 0xfc]].concat();
        let headers = sized(&[&text[..], kind, &number].concat());
        let behind = [&other[..2], &text, &text, &text, &text, other, &text, &text, &text, &text].concat();
        let content = [&head[..], &text, &text, &headers, &behind].concat();
        [frame(METHOD, &deliver), frame(CONTENT_HEADER, &content), frame(3, other)].concat()
    }

    #[test]
    fn only_invalid_short_strings_are_rewritten() {
        let other = b"\xff\xc3\x28\x80\xe9\xce\xff\xff";
        for (text, instead) in
            [(&b"\xff\xfe"[..], &b"??"[..]), (b"caf\xe9", b"caf?"), ("caf\u{e9}".as_bytes(), "caf\u{e9}".as_bytes())]
        {
            let stream = [delivery(text, other), delivery(text, other)].concat();
            let expected = [delivery(instead, other), delivery(instead, other)].concat();
            for piece in [1, 3, 4_096] {
                assert_eq!(passed(&stream, piece), expected, "in pieces of {piece}");
            }
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
            assert_eq!(passed(stream, 1), stream);
        }
    }
}
