//! Fault injection: crash points at which the process can die, and known bugs that can be switched on.
//!
//! With them the fault harness (tests/faults) shows that it notices faults. Without the cargo feature `faults`, which
//! is off by default, every call here is an empty constant function. Then the program contains no name of a fault
//! (`tests/cli/no_fault_injection.rs` checks that).

#[cfg(feature = "faults")]
pub use armed::{acknowledged_early, bug, crash, on_the_wire, patched, unread};
#[cfg(not(feature = "faults"))]
pub use unarmed::{acknowledged_early, bug, crash, on_the_wire, patched, unread};

/// A point at which the process dies when it is passed for the n-th time, by `SLUICEGATE_CRASH_AT=name:n`. The names
/// are the variants in snake case.
#[derive(Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "faults", derive(serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum CrashPoint {
    /// A message is delivered and nothing is recorded.
    AfterDelivery,
    /// The job is recorded and claimed.
    AfterClaim,
    /// A new job is recorded in the backlog, and its message is not acknowledged.
    AfterBacklogRecord,
    /// A job has returned to the backlog, and its message is not acknowledged.
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
    /// The copy in a delay queue is confirmed, and the original is not acknowledged.
    AfterDelayCopy,
    /// The acknowledgement has been written.
    AfterAck,
    /// An outcome event is confirmed, and not marked as published.
    AfterEvent,
    /// The sweeper has republished a job and not recorded that.
    SweeperAfterPublish,
}

/// A bug that `SLUICEGATE_BUG=name` switches on. The names are the variants in snake case.
#[derive(Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "faults", derive(serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Bug {
    /// The message is acknowledged when it arrives.
    AckBeforeCommit,
    /// Each request has a new idempotency key.
    NewKeyPerAttempt,
    /// A slot is used for one window from its grant, however long the request takes.
    SlotFreedAtGrant,
    /// A limiter that lost its state grants at once.
    NoColdStart,
    /// Permits granted together are counted as one.
    PermitsCountedAsOne,
    /// Copies for delay queues are published without `mandatory`.
    DelayNotMandatory,
    /// A publish counts as done once it is written.
    AckWithoutConfirm,
    /// A new job of the backlog is not counted in its flow.
    FlowNotCounted,
    /// The tag of a flow stays where it is when its jobs are claimed.
    TagNotMoved,
    /// The block of a flow does not end at its instant.
    FlowNotWoken,
}

#[cfg(not(feature = "faults"))]
mod unarmed {
    use std::borrow::Cow;

    use super::{Bug, CrashPoint};
    use crate::provider::FrozenRequest;
    use crate::queue::Receipt;

    /// Dies here if this point is armed.
    #[inline(always)]
    pub const fn crash(_: CrashPoint) {}

    /// Whether this bug is switched on.
    #[inline(always)]
    pub const fn bug(_: Bug) -> bool {
        false
    }

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

    /// The receipt, already acknowledged if the bug is switched on.
    #[inline(always)]
    pub fn acknowledged_early(receipt: Box<dyn Receipt>) -> std::future::Ready<Box<dyn Receipt>> {
        std::future::ready(receipt)
    }

    /// The limiter's Lua functions, with the bugs that are switched on.
    #[inline(always)]
    pub const fn patched(source: &str) -> Cow<'_, str> {
        Cow::Borrowed(source)
    }
}

/// The armed crash point and the bug that is switched on, from the environment. An unknown name makes the process die at
/// the first crash point, so that a typo does not look like a survived fault.
#[cfg(feature = "faults")]
mod armed {
    use std::borrow::Cow;
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use async_trait::async_trait;
    use serde::Deserialize;
    use serde::de::value::{BorrowedStrDeserializer, Error as ValueError};
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpStream;
    use tokio::time::sleep;

    use super::{Bug, CrashPoint};
    use crate::provider::FrozenRequest;
    use crate::queue::{QueueError, Receipt};

    const CRASH_VARIABLE: &str = "SLUICEGATE_CRASH_AT";
    const BUG_VARIABLE: &str = "SLUICEGATE_BUG";

    /// Time for written bytes to reach the other side.
    const ARRIVAL_WAIT: Duration = Duration::from_millis(20);
    /// Time for a statement to be sent. Whether it is committed by then stays unknown, as with a cut cable.
    const SEND_WAIT: Duration = Duration::from_millis(1);

    /// The limiter's bugs in Lua: a text that occurs once, and its replacement.
    const PATCHES: [(Bug, &str, &str); 2] = [
        (Bug::NoColdStart, "clock, clock + provider.cold, clock, version", "clock, clock, clock, version"),
        (
            Bug::PermitsCountedAsOne,
            "local function take_all(tally, uses, kind, start)",
            "local function take_all(tally, uses, kind, start)\n  uses = 1",
        ),
    ];

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
            Some(ArmedCrash { point: named(name)?, name: name.to_owned(), passes_left: AtomicU32::new(left) })
        });
        Some(armed.unwrap_or_else(|| die(&format!("{CRASH_VARIABLE}={setting} names no place"))))
    });

    static BUG: LazyLock<Option<Bug>> = LazyLock::new(|| {
        let setting = std::env::var(BUG_VARIABLE).ok()?;
        Some(named(&setting).unwrap_or_else(|| die(&format!("{BUG_VARIABLE}={setting} names no bug"))))
    });

    fn named<'a, T: Deserialize<'a>>(name: &'a str) -> Option<T> {
        T::deserialize(BorrowedStrDeserializer::<ValueError>::new(name)).ok()
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

    /// Whether this bug is switched on.
    pub fn bug(bug: Bug) -> bool {
        *BUG == Some(bug)
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

    /// The receipt, already acknowledged if the bug is switched on.
    pub async fn acknowledged_early(receipt: Box<dyn Receipt>) -> Box<dyn Receipt> {
        if !bug(Bug::AckBeforeCommit) {
            return receipt;
        }
        if let Err(error) = receipt.ack().await {
            die(&format!("not acknowledged early: {error}"));
        }
        sleep(ARRIVAL_WAIT).await;
        Box::new(AcknowledgedReceipt)
    }

    struct AcknowledgedReceipt;

    #[async_trait]
    impl Receipt for AcknowledgedReceipt {
        async fn ack(self: Box<Self>) -> Result<(), QueueError> {
            Ok(())
        }

        async fn requeue(self: Box<Self>) -> Result<(), QueueError> {
            Ok(())
        }
    }

    /// The limiter's Lua functions, with the bugs that are switched on.
    pub fn patched(source: &str) -> Cow<'_, str> {
        let mut source = source.to_owned();
        for (_, from, to) in PATCHES.iter().filter(|(patched_bug, ..)| bug(*patched_bug)) {
            if source.matches(from).count() != 1 {
                die(&format!("`{from}` is not once in the limiter's functions"));
            }
            source = source.replace(from, to);
        }
        Cow::Owned(source)
    }
}
