//! Data that a command reads from where a person says: a file, a pipe, or standard input (`-`).
//!
//! A pipe may be slow and without end, so readers bound what they keep, and the process's default reaction to SIGINT and
//! SIGTERM ends the command meanwhile. Folders and devices are refused: a terminal is read as standard input alone.

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
use crate::files::{self, READ_MAX, Unread};

/// Largest file with provider rows, in bytes.
pub const ROWS_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// What a command reads, piece by piece.
pub struct Input {
    pub reader: Box<dyn AsyncRead + Send + Unpin>,
    /// The size of a file, for progress.
    pub bytes: Option<u64>,
}

/// Why a command cannot read its input.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    #[error(transparent)]
    Unread(#[from] Unread),
    #[error("neither a file nor a pipe; write `-` for standard input")]
    NotReadable,
}

impl From<io::Error> for Unusable {
    fn from(error: io::Error) -> Self {
        Self::Unread(error.into())
    }
}

enum Opened {
    File(File, u64),
    Pipe(File),
}

/// Opens a file, a pipe or standard input.
///
/// # Errors
/// When it cannot be opened, or is none of these.
pub async fn open(path: &Path) -> Result<Input, Unusable> {
    if path == Path::new("-") {
        // Not reopened by its path, which fails for sockets.
        let stdin = tokio::fs::File::from_std(File::from(io::stdin().as_fd().try_clone_to_owned()?));
        return Ok(Input { reader: Box::new(stdin), bytes: None });
    }
    let path = path.to_owned();
    let opening = tokio::task::spawn_blocking(move || open_file_or_pipe(&path));
    let late = |_| Unusable::Unread(Unread::Late { within: READ_MAX });
    let opened = timeout(READ_MAX, opening).await.map_err(late)?.map_err(io::Error::other)?;
    Ok(match opened? {
        Opened::File(file, bytes) => Input { reader: Box::new(tokio::fs::File::from_std(file)), bytes: Some(bytes) },
        // Waits for a writer without holding a thread.
        Opened::Pipe(file) => Input { reader: Box::new(pipe::Receiver::from_file(file)?), bytes: None },
    })
}

fn open_file_or_pipe(path: &Path) -> Result<Opened, Unusable> {
    if !path.metadata()?.file_type().is_fifo() {
        return match files::open_regular(path) {
            Ok((file, opened)) => Ok(Opened::File(file, opened.len())),
            Err(Unread::NotRegular) => Err(Unusable::NotReadable),
            Err(unread) => Err(unread.into()),
        };
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from)?);
    if file.metadata()?.file_type().is_fifo() { Ok(Opened::Pipe(file)) } else { Err(Unusable::NotReadable) }
}

/// Reads a text of at most so many bytes to its end.
///
/// # Errors
/// As a bad configuration, naming the file: it cannot be read, is longer, or is not UTF-8.
pub async fn text(path: &Path, bytes_max: u64) -> Result<String, CommandError> {
    let read = async {
        let input = open(path).await?;
        let mut bytes = Vec::new();
        input.reader.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes).await?;
        Ok::<_, Unusable>(files::read_text(bytes.as_slice(), bytes_max)?)
    };
    read.await.map_err(|error| CommandError::Configuration(format!("{}: {error}", path.display())))
}
