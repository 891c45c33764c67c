//! Input of a command: a file, a pipe, or standard input (`-`), line by line or as a text, and numbers of jobs in its
//! arguments.
//!
//! A pipe may be slow and endless, so readers limit what they keep: a line in memory is never longer than a job message
//! may be. SIGINT and SIGTERM end the command meanwhile by default. Folders and devices are rejected; a terminal is read
//! only as standard input.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _};
use tokio::net::unix::pipe;
use tokio::time::timeout;

use crate::cli::CommandError;
use crate::files::{self, FileReadError, READ_TIMEOUT};

/// Largest file with provider rows, in bytes.
pub const PROVIDER_FILE_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// A stream of input.
pub struct Input {
    pub reader: Box<dyn AsyncRead + Send + Unpin>,
    /// Size of a file in bytes, for progress.
    pub size: Option<u64>,
}

/// Why a command cannot read its input.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    #[error(transparent)]
    Read(#[from] FileReadError),
    #[error("neither a file nor a pipe; write `-` for standard input")]
    NotFileOrPipe,
}

impl From<io::Error> for InputError {
    fn from(error: io::Error) -> Self {
        Self::Read(error.into())
    }
}

/// Opens a file, a pipe or standard input.
///
/// # Errors
/// When it cannot be opened, or is none of these.
pub async fn open(path: &Path) -> Result<Input, InputError> {
    if path == Path::new("-") {
        // Not reopened by its path: that fails for sockets.
        let stdin = tokio::fs::File::from_std(File::from(io::stdin().as_fd().try_clone_to_owned()?));
        return Ok(Input { reader: Box::new(stdin), size: None });
    }
    let path = path.to_owned();
    let opening = tokio::task::spawn_blocking(move || open_file_or_pipe(&path));
    let late = |_| InputError::Read(FileReadError::TimedOut { within: READ_TIMEOUT });
    let opened = timeout(READ_TIMEOUT, opening).await.map_err(late)?.map_err(io::Error::other)?;
    let (file, size) = opened?;
    if size.is_some() {
        return Ok(Input { reader: Box::new(tokio::fs::File::from_std(file)), size });
    }
    // Waits for a writer without blocking a thread.
    Ok(Input { reader: Box::new(pipe::Receiver::from_file(file)?), size })
}

/// A file with its size, or a pipe without one.
fn open_file_or_pipe(path: &Path) -> Result<(File, Option<u64>), InputError> {
    if !path.metadata()?.file_type().is_fifo() {
        return match files::open_regular(path) {
            Ok((file, opened)) => Ok((file, Some(opened.len()))),
            Err(FileReadError::NotRegular) => Err(InputError::NotFileOrPipe),
            Err(unread) => Err(unread.into()),
        };
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from)?);
    if file.metadata()?.file_type().is_fifo() { Ok((file, None)) } else { Err(InputError::NotFileOrPipe) }
}

/// Reads a text of at most `bytes_max` bytes.
///
/// # Errors
/// Exit code 78, with the name of the file: it cannot be read, is longer, or is not UTF-8.
pub async fn read_text(path: &Path, bytes_max: u64) -> Result<String, CommandError> {
    let read = async {
        let input = open(path).await?;
        let mut bytes = Vec::new();
        input.reader.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes).await?;
        Ok::<_, InputError>(files::read_text(bytes.as_slice(), bytes_max)?)
    };
    read.await.map_err(|error| CommandError::Configuration(format!("{}: {error}", path.display())))
}

/// Reads a number of jobs: `5000`, `300_000` or `300k`. Fractions, signs and numbers beyond `usize` are errors.
pub fn job_count(text: &str) -> Result<usize, String> {
    let times = [("k", 1_000), ("K", 1_000), ("M", 1_000_000)];
    let suffixed = times.iter().find_map(|(suffix, times)| Some((text.strip_suffix(suffix)?, *times)));
    let (digits, times) = suffixed.unwrap_or((text, 1));
    let grouped = digits.split('_').all(|group| !group.is_empty() && group.bytes().all(|byte| byte.is_ascii_digit()));
    let number = grouped.then(|| digits.replace('_', "").parse::<usize>().ok()?.checked_mul(times)).flatten();
    number.ok_or_else(|| format!("`{text}` is not a number of jobs: write 5000, 300_000 or 300k"))
}

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
    use super::*;
    use tokio::io::BufReader;

    #[test]
    fn job_counts_accept_separators_and_suffixes() {
        for (text, jobs) in [
            ("0", 0),
            ("5000", 5_000),
            ("300_000", 300_000),
            ("300k", 300_000),
            ("300K", 300_000),
            ("2M", 2_000_000),
            ("1_000k", 1_000_000),
        ] {
            assert_eq!(job_count(text).unwrap(), jobs, "{text}");
        }
        for bad in
            ["", "k", "_", "_5", "5_", "5__0", "-5", "+5", "1.5k", "300,000", "5 k", "5kk", "18446744073709551615k"]
        {
            let problem = job_count(bad).unwrap_err();
            assert_eq!(problem, format!("`{bad}` is not a number of jobs: write 5000, 300_000 or 300k"));
        }
    }

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
