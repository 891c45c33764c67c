//! A directory of the bench's own, for an embedded database on a real file.
//!
//! Refuses to outlive the bench: it is removed however the bench ends, short of SIGKILL.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;

pub struct Scratch {
    pub directory: PathBuf,
}

impl Scratch {
    /// Makes one below the system's temporary directory, for this user alone.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn make() -> std::io::Result<Self> {
        let directory = std::env::temp_dir().join(format!("sluicegate-bench-{}", uuid::Uuid::now_v7()));
        DirBuilder::new().mode(0o700).create(&directory)?;
        Ok(Self { directory })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.directory)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::error!(%error, directory = %self.directory.display(), "directory not removed");
        }
    }
}
