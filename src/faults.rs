//! Crash points: places at which the fault tests let the process die.
//!
//! Without the cargo feature `faults`, which is off by default, every call here is an empty constant function. Then the
//! program contains no name of a crash point (`tests/released.rs` checks that).

#[cfg(feature = "faults")]
pub use armed::{crash, on_the_wire, unread};
#[cfg(not(feature = "faults"))]
pub use unarmed::{crash, on_the_wire, unread};

/// A point at which the process dies when it is passed for the n-th time, by `SLUICEGATE_CRASH_AT=name:n`. The names
/// are the variants in snake case.
#[derive(Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "faults", derive(serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum CrashPoint {
    /// A message is delivered and nothing is recorded.
    AfterDelivery,
    /// A new job is recorded in the backlog or asleep, and its message is not acknowledged.
    AfterBacklogRecord,
    /// A job has returned to the backlog.
    AfterBacklogReturn,
    /// Jobs of the backlog are claimed.
    AfterBacklogClaim,
    /// The limiter has granted a permit.
    AfterPermit,
    /// `sending` is committed, and nothing is sent.
    AfterSending,
    /// Half of the request is sent.
    RequestHalfWritten,
    /// The whole request is sent, and there is no response yet.
    RequestUnanswered,
    /// The response has been read.
    AfterAnswer,
    /// The response to a look-up has been read.
    AfterLookup,
    /// The permit is released.
    AfterSettle,
    /// The outcome has been sent to the database, and its reply is not read.
    OutcomeCommitUnacknowledged,
    /// The outcome is committed.
    AfterOutcome,
    /// The acknowledgement of a message has been written.
    AfterAck,
    /// An outcome event is confirmed, and not marked as published.
    AfterEvent,
    /// Sleeping jobs and jobs of lost workers have returned to the backlog.
    AfterWake,
}

#[cfg(not(feature = "faults"))]
mod unarmed {
    use super::CrashPoint;
    use crate::provider::FrozenRequest;

    /// Dies here if this point is armed.
    #[inline(always)]
    pub const fn crash(_: CrashPoint) {}

    /// Wraps the one request; dies when half of it is sent. Or it never returns the response: the process waits to be
    /// killed, because only the provider knows when a request has arrived.
    #[inline(always)]
    pub const fn on_the_wire<F: Future>(_: &FrozenRequest, send: F) -> F {
        send
    }

    /// Wraps a write to the ledger; dies before its reply is read.
    #[inline(always)]
    pub const fn unread<F: Future>(_: CrashPoint, write: F) -> F {
        write
    }
}

/// The armed crash point, from the environment. An unknown name makes the process die at the first crash point, so that a
/// typo does not look like a survived fault.
#[cfg(feature = "faults")]
mod armed {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use serde::Deserialize;
    use serde::de::value::{BorrowedStrDeserializer, Error as ValueError};
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpStream;
    use tokio::time::sleep;

    use super::CrashPoint;
    use crate::provider::FrozenRequest;

    const CRASH_VARIABLE: &str = "SLUICEGATE_CRASH_AT";

    /// Time for written bytes to reach the other side.
    const ARRIVAL_WAIT: Duration = Duration::from_millis(20);
    /// Time for a statement to be sent. Whether it is committed by then stays unknown, as with a cut cable.
    const SEND_WAIT: Duration = Duration::from_millis(1);

    struct ArmedCrash {
        point: CrashPoint,
        name: String,
        /// Passes until the crash.
        passes_left: AtomicU32,
    }

    static ARMED_CRASH: LazyLock<Option<ArmedCrash>> = LazyLock::new(|| {
        let setting = std::env::var(CRASH_VARIABLE).ok()?;
        let armed = setting.split_once(':').and_then(|(name, nth)| {
            let left = nth.parse().ok().filter(|nth| *nth > 0)?;
            Some(ArmedCrash { point: point_named(name)?, name: name.to_owned(), passes_left: AtomicU32::new(left) })
        });
        Some(armed.unwrap_or_else(|| die(&format!("{CRASH_VARIABLE}={setting} names no place"))))
    });

    fn point_named(name: &str) -> Option<CrashPoint> {
        CrashPoint::deserialize(BorrowedStrDeserializer::<ValueError>::new(name)).ok()
    }

    /// Ends the process at once: no destructor runs, nothing is flushed, no connection is closed.
    fn die(why: &str) -> ! {
        announce(&format!("dies on purpose: {why}"));
        std::process::abort()
    }

    /// Writes to stderr directly: the log's buffer is lost with the process.
    fn announce(message: &str) {
        let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{message}\n").as_bytes());
    }

    /// The name of the crash point if the process must die at this pass.
    fn due(point: CrashPoint) -> Option<&'static str> {
        let armed = ARMED_CRASH.as_ref().filter(|armed| armed.point == point)?;
        let passed = armed.passes_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        (passed == Ok(1)).then_some(armed.name.as_str())
    }

    /// Dies here if this point is armed.
    pub fn crash(point: CrashPoint) {
        if let Some(name) = due(point) {
            die(name);
        }
    }

    /// Wraps the one request; dies when half of it is sent, or before its response.
    pub async fn on_the_wire<F: Future>(request: &FrozenRequest, send: F) -> F::Output {
        if let Some(name) = due(CrashPoint::RequestHalfWritten) {
            write_half(request).await;
            die(name);
        }
        if let Some(name) = due(CrashPoint::RequestUnanswered) {
            announce(&format!("waits to be killed: {name}"));
            drop(send.await);
            return std::future::pending().await;
        }
        send.await
    }

    /// Sends all headers and half of the body on a new connection.
    async fn write_half(request: &FrozenRequest) {
        let written = async {
            let url = url::Url::parse(&request.url).map_err(std::io::Error::other)?;
            let address = url.socket_addrs(|| None)?;
            let mut connection = TcpStream::connect(&*address).await?;
            let head = format!(
                "{} {} HTTP/1.1\r\nHost: {}\r\nIdempotency-Key: {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n",
                request.method,
                url.path(),
                url.authority(),
                request.idempotency_key,
                request.content_type,
                request.body.len(),
            );
            connection.write_all(head.as_bytes()).await?;
            connection.write_all(&request.body[..request.body.len() / 2]).await?;
            connection.flush().await?;
            sleep(ARRIVAL_WAIT).await;
            std::io::Result::Ok(())
        };
        if let Err(error) = written.await {
            die(&format!("half a request could not be written: {error}"));
        }
    }

    /// Wraps a write to the ledger; dies before its reply is read.
    pub async fn unread<F: Future>(point: CrashPoint, write: F) -> F::Output {
        if let Some(name) = due(point) {
            tokio::select! {
                _ = write => die(name),
                () = sleep(SEND_WAIT) => die(name),
            }
        }
        write.await
    }
}
