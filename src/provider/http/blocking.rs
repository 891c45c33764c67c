//! Threads for the blocking work of one provider: reading secret files and resolving names.
//!
//! A hanging mount or resolver may block a thread for ever. So each provider has a few threads of its own, apart from
//! the runtime and its shared blocking pool. No other provider waits for them.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use crate::domain::local_fault::LocalFault;

/// Largest number of threads for one kind of work of one provider. Work that hangs keeps its thread.
const THREADS_MAX: usize = 4;

/// Runs at most [`THREADS_MAX`] pieces of work at a time; the rest waits for a thread.
#[derive(Clone, Debug)]
pub(super) struct BlockingThreads {
    slots: Arc<Semaphore>,
    timeout: Duration,
}

impl BlockingThreads {
    /// `timeout` bounds a caller's wait for a thread and its result together.
    pub(super) fn new(timeout: Duration) -> Self {
        Self { slots: Arc::new(Semaphore::new(THREADS_MAX)), timeout }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Runs the work on a thread and waits for its result.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when the work has not ended in time. It goes on, and its result is dropped.
    pub(super) async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
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

    use super::*;

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
