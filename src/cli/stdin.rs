//! Standard input as an asynchronous file.
//!
//! Refuses to reopen it by path, which fails for sockets: it duplicates the descriptor.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;

/// Opens standard input for reading.
///
/// # Errors
/// When it is closed.
pub fn open() -> io::Result<tokio::fs::File> {
    Ok(tokio::fs::File::from_std(File::from(io::stdin().as_fd().try_clone_to_owned()?)))
}
