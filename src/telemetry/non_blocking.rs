//! A non-blocking log writer: a bounded buffer and the thread that empties it.
//!
//! A worker must not wait for the reader of its log: a full pipe would block every thread that logs, and payments with
//! them. When the buffer is full, lines are dropped and counted. The count is a metric. When the reader continues, a
//! log line names the count.

use std::cell::Cell;
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Size of the buffer, in bytes: about 20,000 lines. The thread may be writing as much again.
const BUFFER_MAX: usize = 4 * 1_024 * 1_024;
/// Room above [`BUFFER_MAX`] for the line that reports dropped lines, in bytes.
const RESERVE: usize = 4 * 1_024;
/// Pause before a retry on a pipe that another process made non-blocking.
const RETRY: Duration = Duration::from_millis(10);

thread_local! {
    static IS_WRITER: Cell<bool> = const { Cell::new(false) };
}

/// A writer of whole lines that never waits. Clones share one buffer.
#[derive(Clone)]
pub struct NonBlocking(Arc<SharedLogBuffer>);

struct SharedLogBuffer {
    buffer: Mutex<Buffer>,
    changed: Condvar,
    /// Lines that were not written.
    dropped: AtomicU64,
    max: usize,
}

#[derive(Default)]
struct Buffer {
    pending: Vec<u8>,
    /// Whether the thread is writing.
    is_writing: bool,
}

impl NonBlocking {
    /// Starts the thread that writes to `out`.
    pub fn new(out: impl Write + Send + 'static) -> io::Result<Self> {
        let report = |lines| {
            tracing::warn!(
                lines,
                "log lines dropped because they are not read fast enough; the worker is not affected"
            );
        };
        Self::with_buffer(BUFFER_MAX, out, report)
    }

    /// `report` logs the number of dropped lines when lines are written again.
    fn with_buffer(
        max: usize,
        out: impl Write + Send + 'static,
        report: impl Fn(u64) + Send + 'static,
    ) -> io::Result<Self> {
        let shared =
            SharedLogBuffer { buffer: Mutex::default(), changed: Condvar::new(), dropped: AtomicU64::new(0), max };
        let shared = Arc::new(shared);
        let writer = Arc::clone(&shared);
        thread::Builder::new().name("log writer".to_owned()).spawn(move || writer.drain_into(out, report))?;
        Ok(Self(shared))
    }

    /// Number of lines that were dropped so far.
    pub fn dropped(&self) -> u64 {
        self.0.dropped.load(Ordering::Relaxed)
    }

    /// Waits until everything is written, but no longer than `at_most`. Returns whether everything was written.
    pub fn flush_within(&self, at_most: Duration) -> bool {
        let has_more = |buffer: &mut Buffer| buffer.is_writing || !buffer.pending.is_empty();
        let mut buffer = self.0.buffer.lock();
        self.0.changed.wait_while_for(&mut buffer, has_more, at_most);
        !has_more(&mut buffer)
    }
}

impl Write for NonBlocking {
    /// Buffers the whole line, or drops it.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(line);
        Ok(line.len())
    }

    /// Does not wait: see [`NonBlocking::flush_within`].
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl SharedLogBuffer {
    fn push(&self, line: &[u8]) {
        let max = if IS_WRITER.get() { self.max + RESERVE } else { self.max };
        let mut buffer = self.buffer.lock();
        if buffer.pending.len() + line.len() > max {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let was_empty = buffer.pending.is_empty();
        buffer.pending.extend_from_slice(line);
        drop(buffer);
        if was_empty {
            self.changed.notify_all();
        }
    }

    fn drain_into(&self, mut out: impl Write, report: impl Fn(u64)) {
        IS_WRITER.set(true);
        let (mut chunk, mut reported) = (Vec::new(), 0);
        loop {
            self.take(&mut chunk);
            let unwritten = write_all(&mut out, &chunk);
            chunk.clear();
            let dropped = self.dropped.fetch_add(unwritten, Ordering::Relaxed) + unwritten;
            if unwritten == 0 && dropped > reported {
                report(dropped - reported);
                reported = dropped;
            }
        }
    }

    /// Waits for lines and swaps them into the empty `chunk`.
    fn take(&self, chunk: &mut Vec<u8>) {
        let mut buffer = self.buffer.lock();
        buffer.is_writing = false;
        self.changed.notify_all();
        let is_idle = |buffer: &mut Buffer| buffer.pending.is_empty();
        self.changed.wait_while(&mut buffer, is_idle);
        std::mem::swap(&mut buffer.pending, chunk);
        buffer.is_writing = true;
    }
}

/// Returns the number of lines that could not be written.
fn write_all(out: &mut impl Write, mut bytes: &[u8]) -> u64 {
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => break,
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(RETRY),
            Err(_) => break,
        }
    }
    bytes.iter().map(|byte| u64::from(*byte == b'\n')).sum()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// A pipe whose reader allows one write at a time.
    struct SteppedPipe {
        allowed: Receiver<io::Result<usize>>,
        started: Sender<()>,
        written: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for SteppedPipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.started.send(()).unwrap_or_default();
            let taken = self.allowed.recv().map_err(|_| ErrorKind::BrokenPipe)??.min(bytes.len());
            self.written.lock().extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct PipeHandle {
        allow: Sender<io::Result<usize>>,
        started: Receiver<()>,
        written: Arc<Mutex<Vec<u8>>>,
        reported: Receiver<u64>,
        log: NonBlocking,
    }

    fn pipe(max: usize) -> PipeHandle {
        let (allow, allowed) = channel();
        let (starts, started) = channel();
        let written = Arc::new(Mutex::new(Vec::new()));
        let gate = SteppedPipe { allowed, started: starts, written: Arc::clone(&written) };
        let (reports, reported) = channel();
        let report = move |lines| reports.send(lines).unwrap();
        PipeHandle { allow, started, written, reported, log: NonBlocking::with_buffer(max, gate, report).unwrap() }
    }

    impl PipeHandle {
        fn line(&self, text: &str) {
            self.log.clone().write_all(text.as_bytes()).unwrap();
        }

        fn text(&self) -> String {
            String::from_utf8(self.written.lock().clone()).unwrap()
        }
    }

    #[test]
    fn lines_beyond_the_buffer_are_dropped_and_counted() {
        let pipe = pipe(10);
        pipe.line("first\n");
        pipe.started.recv_timeout(TIMEOUT).unwrap();
        // The thread has the first line; ten bytes fit behind it.
        for line in ["two\n", "three\n", "four\n", "5\n"] {
            pipe.line(line);
        }
        assert_eq!(pipe.log.dropped(), 2, "`four` and `5` do not fit");
        assert!(!pipe.log.flush_within(Duration::ZERO), "nothing is written yet");
        // A write may be short, interrupted, or not possible at the moment.
        for allowed in [Ok(2), Err(ErrorKind::Interrupted.into()), Err(ErrorKind::WouldBlock.into()), Ok(99), Ok(99)] {
            pipe.allow.send(allowed).unwrap();
        }
        assert!(pipe.log.flush_within(TIMEOUT));
        assert_eq!(pipe.text(), "first\ntwo\nthree\n");
        assert_eq!(pipe.reported.recv_timeout(TIMEOUT), Ok(2), "and says so once");
        pipe.line("next\n");
        pipe.allow.send(Ok(99)).unwrap();
        assert!(pipe.log.flush_within(TIMEOUT), "it goes on");
        assert!(pipe.text().ends_with("next\n"));
        assert!(pipe.reported.try_recv().is_err());
    }

    #[test]
    fn lines_of_a_closed_pipe_are_counted() {
        let pipe = pipe(100);
        pipe.allow.send(Err(ErrorKind::BrokenPipe.into())).unwrap();
        pipe.line("one\n");
        assert!(pipe.log.flush_within(TIMEOUT));
        assert_eq!((pipe.log.dropped(), pipe.text().as_str()), (1, ""));
    }
}
