//! Input of a command: a file, a pipe, or standard input (`-`), and numbers of jobs in its arguments.
//!
//! A pipe may be slow and endless, so readers limit what they keep. SIGINT and SIGTERM end the command meanwhile by
//! default. Folders and devices are rejected; a terminal is read only as standard input.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::net::unix::pipe;
use tokio::time::timeout;

use super::CommandError;
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

enum OpenedFile {
    File(File, u64),
    Pipe(File),
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
    Ok(match opened? {
        OpenedFile::File(file, bytes) => Input { reader: Box::new(tokio::fs::File::from_std(file)), size: Some(bytes) },
        // Waits for a writer without blocking a thread.
        OpenedFile::Pipe(file) => Input { reader: Box::new(pipe::Receiver::from_file(file)?), size: None },
    })
}

fn open_file_or_pipe(path: &Path) -> Result<OpenedFile, InputError> {
    if !path.metadata()?.file_type().is_fifo() {
        return match files::open_regular(path) {
            Ok((file, opened)) => Ok(OpenedFile::File(file, opened.len())),
            Err(FileReadError::NotRegular) => Err(InputError::NotFileOrPipe),
            Err(unread) => Err(unread.into()),
        };
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from)?);
    if file.metadata()?.file_type().is_fifo() { Ok(OpenedFile::Pipe(file)) } else { Err(InputError::NotFileOrPipe) }
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
pub(super) fn job_count(text: &str) -> Result<usize, String> {
    let times = [("k", 1_000), ("K", 1_000), ("M", 1_000_000)];
    let suffixed = times.iter().find_map(|(suffix, times)| Some((text.strip_suffix(suffix)?, *times)));
    let (digits, times) = suffixed.unwrap_or((text, 1));
    let grouped = digits.split('_').all(|group| !group.is_empty() && group.bytes().all(|byte| byte.is_ascii_digit()));
    let number = grouped.then(|| digits.replace('_', "").parse::<usize>().ok()?.checked_mul(times)).flatten();
    number.ok_or_else(|| format!("`{text}` is not a number of jobs: write 5000, 300_000 or 300k"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
