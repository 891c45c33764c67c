//! A reader of numbered lines from a stream; a line in memory is never longer than a job message may be.
//!
//! It does not interpret the lines.

use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt as _};

/// Longest line that is skipped, in bytes. A longer one is not a text of lines and may be endless.
const SKIPPED_LINE_MAX: u64 = 64 * 1024 * 1024;

/// One line without its end.
#[derive(Debug, PartialEq, Eq)]
pub enum InputLine {
    Text { number: u64, bytes: Vec<u8> },
    TooLong { number: u64 },
}

/// Reads lines of at most `max_bytes`.
pub struct LineReader<R> {
    reader: R,
    max_bytes: usize,
    number: u64,
    partial: Vec<u8>,
    is_too_long: bool,
    /// Bytes of the current line.
    line_bytes: u64,
    /// Bytes consumed so far, for progress.
    pub consumed: u64,
}

impl<R: AsyncBufRead + Unpin> LineReader<R> {
    pub fn new(reader: R, max_bytes: usize) -> Self {
        Self { reader, max_bytes, number: 0, partial: Vec::new(), is_too_long: false, line_bytes: 0, consumed: 0 }
    }

    /// The next line; `None` at the end. Cancel-safe: the bytes read so far are kept.
    ///
    /// # Errors
    /// When the stream cannot be read, or is no text of lines.
    pub async fn next(&mut self) -> io::Result<Option<InputLine>> {
        loop {
            let chunk = self.reader.fill_buf().await?;
            let at_end = chunk.is_empty();
            let end = chunk.iter().position(|byte| *byte == b'\n');
            let taken = &chunk[..end.unwrap_or(chunk.len())];
            if self.partial.len() + taken.len() > self.max_bytes {
                self.is_too_long = true;
                self.partial = Vec::new();
            } else if !self.is_too_long {
                self.partial.extend_from_slice(taken);
            }
            let used = taken.len() + usize::from(end.is_some());
            self.reader.consume(used);
            self.consumed += used as u64;
            self.line_bytes += used as u64;
            if self.line_bytes > SKIPPED_LINE_MAX {
                let problem = format!("line {} is longer than {SKIPPED_LINE_MAX} bytes", self.number + 1);
                return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
            }
            if end.is_none() && !at_end {
                continue;
            }
            if at_end && self.partial.is_empty() && !self.is_too_long {
                return Ok(None);
            }
            self.number += 1;
            let bytes = std::mem::take(&mut self.partial);
            let number = self.number;
            let line = if self.is_too_long { InputLine::TooLong { number } } else { InputLine::Text { number, bytes } };
            self.is_too_long = false;
            self.line_bytes = 0;
            return Ok(Some(line));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::BufReader;

    use super::*;

    #[tokio::test]
    async fn endless_line_is_an_error() {
        let endless = tokio::io::repeat(0);
        let error = LineReader::new(BufReader::with_capacity(1 << 20, endless), 8).next().await.unwrap_err();
        assert!(error.to_string().contains("line 1 is longer than"), "{error}");
    }

    #[tokio::test]
    async fn lines_are_numbered_and_long_ones_dropped() {
        let text = b"one\n\nlonger than eight\ntwo\r\nlast".as_slice();
        // A buffer smaller than the lines, so that they come in pieces.
        let mut lines = LineReader::new(BufReader::with_capacity(3, text), 8);
        let mut seen = Vec::new();
        while let Some(line) = lines.next().await.unwrap() {
            seen.push(line);
        }
        let text = |number, bytes: &[u8]| InputLine::Text { number, bytes: bytes.to_vec() };
        let expected =
            [text(1, b"one"), text(2, b""), InputLine::TooLong { number: 3 }, text(4, b"two\r"), text(5, b"last")];
        assert_eq!(seen, expected);
        assert_eq!(lines.consumed, 32);
    }
}
