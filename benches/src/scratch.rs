//! A temporary directory of the benchmark, for an embedded database in a real file.
//!
//! It is removed at the end of the benchmark, also after an error; only SIGKILL leaves it behind.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;

pub struct Scratch {
    pub directory: PathBuf,
}

impl Scratch {
    /// Creates one in the system's temporary directory, for this user only.
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
