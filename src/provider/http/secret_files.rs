//! Reader of the files that hold secrets of one provider's headers, and the threads for a provider's blocking work.
//!
//! Only regular files of a bounded size are read, for each request, off the runtime and in bounded time. Error texts
//! name the file, never its content.
//!
//! A hanging mount or resolver may block a thread for ever. So each provider has a few threads of its own, apart from
//! the runtime and its shared blocking pool. No other provider waits for them.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretString;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use crate::domain::local_fault::LocalFault;
use crate::files;

/// Largest secret file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 16 * 1024;
/// Longest time that reading the files of one request may take.
const READ_MAX: Duration = Duration::from_secs(2);

/// Reason why a file was not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub enum SecretReadError {
    /// A fault of this process; the file may be right.
    Local(LocalFault),
    /// A problem of the file.
    Problem(String),
}

impl From<io::Error> for SecretReadError {
    fn from(error: io::Error) -> Self {
        LocalFault::from_io_error(&error).map_or_else(|| Self::Problem(error.kind().to_string()), Self::Local)
    }
}

impl From<files::FileReadError> for SecretReadError {
    fn from(unread: files::FileReadError) -> Self {
        match unread {
            files::FileReadError::Io(error) => error.into(),
            other => Self::Problem(other.to_string()),
        }
    }
}

/// Content of each file, or the reason why it was not read.
pub type FileContents = BTreeMap<PathBuf, Result<SecretString, SecretReadError>>;

/// Function that reads one file unless it is one of the others. It may block.
type ReadFile = fn(&Path, &[PathBuf]) -> Result<SecretString, SecretReadError>;

pub struct SecretFiles {
    threads: BlockingThreads,
    reader: ReadFile,
    /// Files of this program's own configuration.
    own_files: Arc<[PathBuf]>,
}

impl SecretFiles {
    pub fn new(own: &[PathBuf]) -> Self {
        Self { threads: BlockingThreads::new(READ_MAX), reader: read_file, own_files: own.into() }
    }

    /// Reader with another read function, for tests.
    #[cfg(test)]
    fn with_reader(reader: ReadFile, within: Duration) -> Self {
        Self { threads: BlockingThreads::new(within), reader, own_files: [].into() }
    }

    pub async fn read_all(&self, paths: Vec<PathBuf>) -> FileContents {
        if paths.is_empty() {
            return FileContents::new();
        }
        let (read, own, asked) = (self.reader, Arc::clone(&self.own_files), paths.clone());
        let contents = self.threads.run(move || {
            let contents = |path: PathBuf| {
                let content = read(&path, &own);
                (path, content)
            };
            asked.into_iter().map(contents).collect()
        });
        contents.await.unwrap_or_else(|error| {
            let within = self.threads.timeout;
            let unread: SecretReadError = match error.kind() {
                io::ErrorKind::TimedOut => files::FileReadError::TimedOut { within }.into(),
                _ => error.into(),
            };
            paths.into_iter().map(|path| (path, Err(unread.clone()))).collect()
        })
    }
}

/// Whether a key of this program's own configuration is read from this file, under any name. Otherwise an operator who
/// writes rows could have it sent to any address.
fn is_config_file(file: &Metadata, own: &[PathBuf]) -> bool {
    let same = |own: &Metadata| (own.dev(), own.ino()) == (file.dev(), file.ino());
    own.iter().filter_map(|path| path.metadata().ok()).any(|own| same(&own))
}

/// Whether the file is in `/proc`, where the environment and memory of processes are files too.
fn is_proc_file(file: &Metadata) -> bool {
    Path::new("/proc/self").metadata().is_ok_and(|process| process.dev() == file.dev())
}

/// Reads one secret. Line breaks at its end are cut off: most mounted secrets end in one that is not part of them.
fn read_file(path: &Path, own: &[PathBuf]) -> Result<SecretString, SecretReadError> {
    let unfit = |problem: &str| Err(SecretReadError::Problem(problem.to_owned()));
    let (file, opened) = files::open_regular(path)?;
    if is_proc_file(&opened) {
        return Err(files::FileReadError::NotRegular.into());
    }
    if is_config_file(&opened, own) {
        return unfit("holds a key of this program's own configuration");
    }
    files::reject_world_writable(opened.permissions().mode())?;
    let text = files::read_text(file, FILE_BYTES_MAX)?;
    let value = text.trim_end_matches(['\r', '\n']);
    if value.is_empty() { unfit("empty") } else { Ok(value.into()) }
}

/// Largest number of threads for one kind of work of one provider. Work that hangs keeps its thread.
const THREADS_MAX: usize = 4;

/// Runs at most [`THREADS_MAX`] pieces of work at a time; the rest waits for a thread.
#[derive(Clone, Debug)]
pub struct BlockingThreads {
    slots: Arc<Semaphore>,
    timeout: Duration,
}

impl BlockingThreads {
    /// `timeout` bounds a caller's wait for a thread and its result together.
    pub fn new(timeout: Duration) -> Self {
        Self { slots: Arc::new(Semaphore::new(THREADS_MAX)), timeout }
    }

    /// Runs the work on a thread and waits for its result.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when the work has not ended in time. It goes on, and its result is dropped.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let result = async {
            let slot = Arc::clone(&self.slots).acquire_owned().await.map_err(io::Error::other)?;
            let (sender, receiver) = oneshot::channel();
            let work = move || {
                let result = work();
                drop(slot);
                // If the caller waits no longer, the result is dropped.
                drop(sender.send(result));
            };
            std::thread::Builder::new().name("blocking-io".to_owned()).spawn(work).map_err(spawn_error)?;
            receiver.await.map_err(|_| io::Error::other("the thread ended early"))
        };
        timeout(self.timeout, result).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Error of a thread that could not start. The system reports a limit on threads as [`io::ErrorKind::WouldBlock`].
fn spawn_error(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::other(LocalFault::Threads),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use futures_util::future::join_all;
    use secrecy::ExposeSecret as _;

    use super::*;

    /// An operator who writes rows must not have the worker's own secrets sent anywhere, under any name.
    #[test]
    fn own_configuration_is_rejected_as_secret() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let (own, other) = (at("token"), at("acme"));
        for path in [&own, &other] {
            std::fs::write(path, "hunter2").unwrap();
        }
        std::os::unix::fs::symlink(&own, at("link")).unwrap();
        std::fs::hard_link(&own, at("hard")).unwrap();
        let file = std::fs::File::open(&own).unwrap();
        let by_descriptor = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let by_root = PathBuf::from(format!("/proc/self/root{}", own.display()));
        let names = [own.clone(), at("link"), at("hard"), by_descriptor.into(), by_root];
        let missing = at("missing");
        for name in names {
            let refused = SecretReadError::Problem("holds a key of this program's own configuration".to_owned());
            let read = read_file(&name, &[missing.clone(), own.clone()]);
            assert_eq!(read.unwrap_err(), refused, "{}", name.display());
        }
        read_file(&other, &[missing, own]).unwrap();
        let environment = read_file(Path::new("/proc/self/environ"), &[]).unwrap_err();
        assert_eq!(environment, SecretReadError::Problem("not a regular file".to_owned()));
    }

    #[test]
    fn only_regular_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (file, fifo, link) = (dir.path().join("file"), dir.path().join("fifo"), dir.path().join("link"));
        std::fs::write(&file, "hunter2\n").unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!([&file, &link].map(|path| read_file(path, &[]).unwrap().expose_secret().to_owned()), ["hunter2"; 2]);
        for path in [fifo.as_path(), dir.path(), Path::new("/dev/null")] {
            let unfit = SecretReadError::Problem("not a regular file".to_owned());
            assert_eq!(read_file(path, &[]).unwrap_err(), unfit, "{}", path.display());
        }
    }

    #[test]
    fn world_writable_file_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "hunter2").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        let SecretReadError::Problem(problem) = read_file(&path, &[]).unwrap_err() else {
            panic!("no problem of the file")
        };
        assert!(problem.contains("its mode is 666"), "{problem}");
    }

    fn hangs_for_one(path: &Path, _: &[PathBuf]) -> Result<SecretString, SecretReadError> {
        while path.ends_with("hangs") {
            std::thread::park();
        }
        Ok("hunter2".into())
    }

    #[tokio::test]
    async fn hanging_read_times_out() {
        let files = SecretFiles::with_reader(hangs_for_one, Duration::from_millis(50));
        let (good, hangs) = (PathBuf::from("/good"), PathBuf::from("/hangs"));
        for _ in 0..6 {
            let contents = files.read_all(vec![hangs.clone()]).await;
            let hung = SecretReadError::Problem("not read within 0.05 s: its mount may hang".to_owned());
            assert_eq!(contents[&hangs].as_ref().unwrap_err(), &hung);
        }
        // Another provider's.
        let others = SecretFiles::with_reader(hangs_for_one, Duration::MAX);
        assert_eq!(others.read_all(vec![good.clone()]).await[&good].as_ref().unwrap().expose_secret(), "hunter2");
    }

    #[tokio::test]
    async fn hanging_work_blocks_few_threads_and_no_caller() {
        let (hanging, others) = (BlockingThreads::new(Duration::from_millis(50)), BlockingThreads::new(Duration::MAX));
        let started = Arc::new(AtomicUsize::new(0));
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(std::sync::Mutex::new(held));
        let hang = || {
            let (started, held) = (Arc::clone(&started), Arc::clone(&held));
            hanging.run(move || {
                started.fetch_add(1, Ordering::SeqCst);
                let _ = held.lock().unwrap().recv();
            })
        };
        let hung = join_all((0..20).map(|_| hang())).await;
        assert!(hung.iter().all(|end| end.as_ref().unwrap_err().kind() == io::ErrorKind::TimedOut), "{hung:?}");
        assert_eq!(started.load(Ordering::SeqCst), THREADS_MAX);
        assert_eq!(others.run(|| 7).await.unwrap(), 7);
        drop(release);
        // The threads that were held serve again.
        while hanging.run(|| ()).await.is_err() {}
    }

    #[tokio::test]
    async fn work_that_panics_is_an_error() {
        let threads = BlockingThreads::new(Duration::MAX);
        for _ in 0..2 * THREADS_MAX {
            threads.run(|| panic!("the test says so")).await.unwrap_err();
        }
        assert_eq!(threads.run(|| 7).await.unwrap(), 7);
    }
}
