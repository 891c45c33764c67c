//! Reading of small files that settings name: regular files only, with a bound on size and time.
//!
//! Opening or reading a FIFO, a terminal or a hanging mount may block for ever, and an endless device fills the memory.
//! Errors say why a file was not read, and never quote its content.

use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};

/// Longest time that reading one file may take.
pub const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest file with certificates, in bytes. All public authorities together need a fifth of it.
pub const CERTIFICATES_BYTES_MAX: u64 = 1024 * 1024;

/// Permission bits of all users of the machine. A group is given access on purpose, as by `fsGroup` of Kubernetes.
const WORLD_WRITE_BIT: u32 = 0o002;
const WORLD_READ_BIT: u32 = 0o004;

/// Why a file was not read.
#[derive(Debug, thiserror::Error)]
pub enum FileReadError {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A directory, FIFO, socket or device.
    #[error("not a regular file")]
    NotRegular,
    #[error("longer than {bytes_max} bytes")]
    TooLong { bytes_max: u64 },
    #[error("not text in UTF-8")]
    NotUtf8,
    #[error(
        "every user of this machine may write it (its mode is {mode:03o}): `chmod o-w` it; if its mount gives every file \
         this mode, copy it to another file system or change the mount's file mode"
    )]
    WritableByOthers { mode: u32 },
    #[error("not read within {} s: its mount may hang", within.as_secs_f64())]
    TimedOut { within: Duration },
}

impl FileReadError {
    /// What to do; `None` when the path may be wrong, which the caller knows better.
    pub fn fix(&self) -> Option<&'static str> {
        match self {
            Self::Io(_) | Self::NotRegular => None,
            Self::TooLong { .. } => Some("Shorten the file"),
            Self::NotUtf8 => Some("Save the file as UTF-8"),
            Self::WritableByOthers { .. } => Some("Let only its owner write it"),
            Self::TimedOut { .. } => Some("Check the mount of the file"),
        }
    }
}

/// A file's text and permissions.
#[derive(Debug)]
pub struct SmallFile {
    pub text: String,
    /// The permission bits, as `chmod` takes them.
    pub mode: u32,
}

/// Opens a regular file; may block if its mount hangs.
///
/// # Errors
/// [`FileReadError::NotRegular`], without opening the file.
pub fn open_regular(path: &Path) -> Result<(File, Metadata), FileReadError> {
    // Checked before it is opened: for some devices, opening is an action.
    if !path.metadata()?.is_file() {
        return Err(FileReadError::NotRegular);
    }
    // The path may lead to another file by now: these flags neither wait for a writer nor take a terminal.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from)?);
    let opened = file.metadata()?;
    if opened.is_file() { Ok((file, opened)) } else { Err(FileReadError::NotRegular) }
}

/// Reads the text of an open file; may block.
///
/// # Errors
/// When it cannot be read, is longer than `bytes_max`, or is not UTF-8.
pub fn read_text(file: impl io::Read, bytes_max: u64) -> Result<String, FileReadError> {
    let mut bytes = Vec::new();
    let read = file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if read as u64 > bytes_max {
        return Err(FileReadError::TooLong { bytes_max });
    }
    String::from_utf8(bytes).map_err(|_| FileReadError::NotUtf8)
}

/// Reads a file on its own thread, and waits at most [`READ_TIMEOUT`] for it.
pub fn read(path: &Path, bytes_max: u64) -> Result<SmallFile, FileReadError> {
    let path = path.to_owned();
    let read = move || {
        let (file, opened) = open_regular(&path)?;
        Ok(SmallFile { text: read_text(file, bytes_max)?, mode: opened.permissions().mode() & 0o777 })
    };
    run_with_timeout(READ_TIMEOUT, read).flatten()
}

/// Reads a file that this process trusts: a configuration, a secret, the certificates of authorities. A file that every
/// user of the machine may write is not trusted.
pub fn read_trusted(path: &Path, bytes_max: u64) -> Result<SmallFile, FileReadError> {
    let file = read(path, bytes_max)?;
    reject_world_writable(file.mode)?;
    Ok(file)
}

/// Rejects a file that every user of the machine may write.
pub fn reject_world_writable(mode: u32) -> Result<(), FileReadError> {
    if mode & WORLD_WRITE_BIT == 0 { Ok(()) } else { Err(FileReadError::WritableByOthers { mode: mode & 0o777 }) }
}

/// Whether every user of the machine may read a file of this mode.
pub fn is_world_readable(mode: u32) -> bool {
    mode & WORLD_READ_BIT != 0
}

/// The permission bits of a regular file; `None` for anything else. May block: its mount can hang.
pub fn mode_of(path: &Path) -> Option<u32> {
    let found = path.metadata().ok()?;
    found.is_file().then(|| found.permissions().mode() & 0o777)
}

/// Runs work that may block for ever on its own thread. Late work continues and its result is dropped; it does not hold
/// up the end of the process.
///
/// # Errors
/// [`FileReadError::TimedOut`], or the system has no thread for it.
pub fn run_with_timeout<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, FileReadError> {
    let (reply, answer) = channel();
    // The caller may have stopped waiting.
    let work = move || drop(reply.send(work()));
    std::thread::Builder::new().name("file-reader".to_owned()).spawn(work)?;
    answer.recv_timeout(limit).map_err(|error| match error {
        RecvTimeoutError::Timeout => FileReadError::TimedOut { within: limit },
        RecvTimeoutError::Disconnected => io::Error::other("the thread ended early").into(),
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;

    fn fifo(dir: &tempfile::TempDir) -> PathBuf {
        let path = dir.path().join("fifo");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        path
    }

    #[test]
    fn only_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        std::fs::write(&file, "text").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for path in [&file, &link] {
            assert_eq!(read(path, 4).unwrap().text, "text");
        }
        let fifo = fifo(&dir);
        for path in [fifo.as_path(), dir.path(), Path::new("/dev/zero"), Path::new("/dev/ptmx")] {
            assert!(matches!(read(path, 4), Err(FileReadError::NotRegular)), "{}", path.display());
        }
    }

    /// A FIFO that replaces a file after the first check.
    #[test]
    fn opening_never_waits_for_a_writer() {
        let dir = tempfile::tempdir().unwrap();
        let (fifo, name) = (fifo(&dir), dir.path().join("name"));
        std::fs::write(&name, "text").unwrap();
        let (stop, stopped) = channel::<()>();
        let swapped = name.clone();
        let (file, other) = (dir.path().join("file"), dir.path().join("other"));
        std::fs::write(&file, "text").unwrap();
        let swapper = std::thread::spawn(move || {
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                for from in [&fifo, &file] {
                    let _ = std::fs::remove_file(&other);
                    std::fs::hard_link(from, &other).unwrap();
                    std::fs::rename(&other, &swapped).unwrap();
                }
            }
        });
        for _ in 0..2_000 {
            match read(&name, 4) {
                Ok(file) => assert_eq!(file.text, "text"),
                Err(error) => assert!(matches!(error, FileReadError::NotRegular), "{error}"),
            }
        }
        drop(stop);
        swapper.join().unwrap();
    }

    #[test]
    fn size_and_coding_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read(&path, 4).unwrap_err().to_string(), "longer than 4 bytes");
        assert!(matches!(read_text(io::repeat(0), 1_000), Err(FileReadError::TooLong { bytes_max: 1_000 })));
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(read(&path, 4).unwrap_err().to_string(), "not text in UTF-8");
    }

    #[test]
    fn world_writable_file_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "text").unwrap();
        for (mode, trusted) in
            [(0o400, true), (0o440, true), (0o644, true), (0o660, true), (0o666, false), (0o602, false)]
        {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(read_trusted(&path, 4).is_ok(), trusted, "{mode:o}");
        }
        assert_eq!(
            read_trusted(&path, 4).unwrap_err().to_string(),
            "every user of this machine may write it (its mode is 602): `chmod o-w` it; if its mount gives every file \
             this mode, copy it to another file system or change the mount's file mode"
        );
    }

    #[test]
    fn hanging_work_times_out() {
        let (release, held) = channel::<()>();
        let late = run_with_timeout(Duration::from_millis(20), move || held.recv().is_ok()).unwrap_err();
        assert_eq!(late.to_string(), "not read within 0.02 s: its mount may hang");
        drop(release);
    }
}
