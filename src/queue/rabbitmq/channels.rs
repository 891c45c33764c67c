//! Channels of a connection and calls on them: the bounds of both, and the meaning of the broker's and lapin's errors.
//!
//! Every call has a time limit, because lapin's calls hang while a connection is blocked or its peer is silent.
//!
//! A broker closes the whole connection of a user who opens more channels than the user may have (NOT_ALLOWED). So a
//! limit that was met once is kept for the connections that follow. Whether the broker allows more by now is tried on a
//! separate connection, which carries nothing.
//!
//! lapin 4 never forgets what ended a channel: the next channel with the same number fails for the same reason. So such
//! a number is skipped, and as soon as numbers repeat, another connection is made for new channels. The old one is
//! closed explicitly when nothing uses it: a channel that could not be opened keeps its connection from closing itself.

use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};
use lapin::{Channel, ChannelState, Connection, ErrorKind};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::connect::{BrokerConnection, RabbitSettings, connect};
use crate::queue::QueueError;
use crate::tls;

/// Least time between two trials of whether the broker allows more.
const TRIAL_EVERY: Duration = Duration::from_secs(10);
/// Channels that a trial opens: one is left for declarations and looks, which every lane needs too.
const TRIAL_CHANNELS: usize = 2;

const FEWER_LANES: &str = "or run fewer lanes in a worker";

/// The limit that the broker has told of, over all connections for one purpose.
#[derive(Clone, Default)]
pub struct ChannelLimit(Arc<Mutex<Option<ReachedLimit>>>);

struct ReachedLimit {
    most: usize,
    /// The broker's own, with the fix.
    words: String,
    tried_at: Option<Instant>,
}

impl ChannelLimit {
    /// The broker refused one more channel beside so many.
    fn record(&self, open: usize, words: String) {
        *self.0.lock() =
            Some(ReachedLimit { most: open.saturating_sub(1).max(1), words, tried_at: Some(Instant::now()) });
    }

    /// `None` if one more than so many channels may be opened; else the broker's words, and whether a trial of whether the
    /// broker allows more by now is due.
    fn refusal(&self, open: usize) -> Option<(String, bool)> {
        let mut limit = self.0.lock();
        let met = limit.as_mut().filter(|met| open >= met.most)?;
        let is_trial_due = met.tried_at.is_none_or(|at| at.elapsed() >= TRIAL_EVERY);
        if is_trial_due {
            met.tried_at = Some(Instant::now());
        }
        Some((met.words.clone(), is_trial_due))
    }

    /// A trial has shown that the broker allows more.
    fn raise(&self) {
        if let Some(met) = self.0.lock().as_mut() {
            met.most += 1;
            met.tried_at = None;
        }
    }
}

/// A channel, counted until it is dropped.
pub struct OpenChannel {
    channel: Channel,
    open: watch::Sender<usize>,
}

impl Deref for OpenChannel {
    type Target = Channel;

    fn deref(&self) -> &Channel {
        &self.channel
    }
}

impl Drop for OpenChannel {
    fn drop(&mut self) {
        self.open.send_modify(|open| *open -= 1);
    }
}

/// The channels of one connection.
pub struct Channels {
    /// Now.
    open: watch::Sender<usize>,
    limit: ChannelLimit,
    /// For trials.
    settings: RabbitSettings,
    /// Cancelled when new channels need another connection. Those that are open are as good as before.
    pub worn_out: CancellationToken,
}

impl Channels {
    pub fn new(settings: RabbitSettings, limit: ChannelLimit) -> Self {
        Self { open: watch::Sender::default(), limit, settings, worn_out: CancellationToken::new() }
    }

    /// Waits until none has been open for as long as one may take to open.
    pub async fn unused(&self) {
        let mut open = self.open.subscribe();
        loop {
            // The sender is this value's own.
            let _ = open.wait_for(|open| *open == 0).await;
            if tokio::time::timeout(CALL_LIMIT, open.wait_for(|open| *open > 0)).await.is_err() {
                return;
            }
        }
    }

    /// # Errors
    /// [`QueueError::Refused`] in the broker's words, with the fix, where there are as many as it allows.
    pub async fn open(&self, connection: &Connection) -> Result<OpenChannel, QueueError> {
        let before = *self.open.borrow();
        if let Some((words, is_trial_due)) = self.limit.refusal(before) {
            if !is_trial_due || !allows_more(&self.settings).await {
                return Err(QueueError::Refused(words));
            }
            self.limit.raise();
        }
        let failure = match self.create(connection).await {
            Ok(channel) => {
                self.open.send_modify(|open| *open += 1);
                return Ok(OpenChannel { channel, open: self.open.clone() });
            }
            Err(failure) => failure,
        };
        if failure.is_connections_channel_limit() {
            let most = connection.configuration().channel_max();
            return Err(QueueError::Refused(format!(
                "open a channel: the broker allows {most} channels on a connection, and all are in use: raise channel_max in \
                 rabbitmq.conf (and in queue.url, if it is there), {FEWER_LANES}"
            )));
        }
        if failure.is_users_channel_limit() {
            let words = format!(
                "{}: raise the user's limit max-channels (rabbitmqctl set_user_limits), {FEWER_LANES}",
                failure.describe("open a channel")
            );
            // Those that were opened meanwhile count too, though some may be dropped already.
            self.limit.record(before.max(*self.open.borrow()), words.clone());
            return Err(QueueError::Refused(words));
        }
        Err(failure.into_error("open a channel"))
    }

    /// Creates a channel under the next number that none had which the broker ended.
    async fn create(&self, connection: &Connection) -> Result<Channel, CallFailure> {
        let mut numbers_left = connection.configuration().channel_max();
        loop {
            match with_call_limit(connection.create_channel()).await {
                Err(failure) if failure.is_of_an_earlier_channel() && numbers_left > 0 => {
                    numbers_left -= 1;
                    self.worn_out.cancel();
                }
                created => return created,
            }
        }
    }
}

/// Whether the broker allows its user some more channels; asked where a refusal ends nothing that is in use.
async fn allows_more(settings: &RabbitSettings) -> bool {
    let trial = async {
        let BrokerConnection { connection, .. } = connect(settings, "sluicegate trial", None).await?;
        let mut open = Vec::new();
        while open.len() < TRIAL_CHANNELS {
            open.push(with_call_limit(connection.create_channel()).await?);
        }
        Ok::<_, CallFailure>(())
    };
    matches!(tokio::time::timeout(CALL_LIMIT, trial).await, Ok(Ok(())))
}

/// Longest time that one call to the broker may take.
pub const CALL_LIMIT: Duration = Duration::from_secs(5);

/// How the broker begins to say that something exists with other arguments.
const INEQUIVALENT: &str = "inequivalent arg";

const PERMIT: &str = "give the user of queue.url the rights that docs/topology.md names";

/// Slowest pace at which a broker that works takes a body and writes it to the disks of its nodes.
const BODY_BYTES_PER_S: usize = 1024 * 1024;

/// Why a call came to nothing.
#[derive(Debug)]
pub enum CallFailure {
    TimedOut,
    Broker(lapin::Error),
}

/// Waits for a call to the broker for at most [`CALL_LIMIT`].
pub async fn with_call_limit<T>(call: impl Future<Output = lapin::Result<T>>) -> Result<T, CallFailure> {
    match tokio::time::timeout(CALL_LIMIT, call).await {
        Ok(answer) => answer.map_err(CallFailure::Broker),
        Err(_) => Err(CallFailure::TimedOut),
    }
}

/// Longest time that a call takes which carries bodies of so many bytes. One that is cut off too early may have arrived
/// all the same, and would be published again and again.
pub fn body_limit(bytes: usize) -> Duration {
    CALL_LIMIT + Duration::from_secs((bytes / BODY_BYTES_PER_S) as u64)
}

impl CallFailure {
    /// The broker says that what was named does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self.amqp(), Some(AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND)))
    }

    /// The broker has it already, with other arguments.
    pub fn is_mismatch(&self) -> bool {
        let failed = matches!(self.amqp(), Some(AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED)));
        // Limits and policies make it refuse by the same code.
        failed && self.message_contains(INEQUIVALENT)
    }

    /// This connection has as many channels as were agreed when it was made. Nothing was asked of the broker.
    pub fn is_connections_channel_limit(&self) -> bool {
        matches!(self, Self::Broker(error) if matches!(error.kind(), ErrorKind::ChannelsLimitReached))
    }

    /// The user has as many channels as it may have; the broker has closed the connection that asked for one more.
    pub fn is_users_channel_limit(&self) -> bool {
        matches!(self.amqp(), Some(AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED)))
            && self.message_contains("number of channels")
    }

    /// What ended another channel that had the same number, told to the one that is being opened. The broker itself refuses a
    /// channel by ending the connection, never by an error of the channel.
    pub fn is_of_an_earlier_channel(&self) -> bool {
        let closed = |error: &ErrorKind| matches!(error, ErrorKind::InvalidChannelState(ChannelState::Closing, _));
        matches!(self.amqp(), Some(AMQPErrorKind::Soft(_)))
            || matches!(self, Self::Broker(error) if closed(error.kind()))
    }

    /// The user has no right to what was named.
    fn is_access_refused(&self) -> bool {
        // A login is refused by the same code.
        matches!(self.amqp(), Some(AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED)))
            && self.message_contains("access to ")
    }

    fn message_contains(&self, words: &str) -> bool {
        matches!(self, Self::Broker(error) if error.to_string().contains(words))
    }

    /// A retry does not fix it.
    fn is_refusal(&self) -> bool {
        matches!(
            self.amqp(),
            Some(
                AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED | AMQPSoftError::PRECONDITIONFAILED)
                    | AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED)
            )
        )
    }

    fn amqp(&self) -> Option<&AMQPErrorKind> {
        match self {
            Self::Broker(error) => match error.kind() {
                ErrorKind::ProtocolError(error) => Some(error.kind()),
                _ => None,
            },
            Self::TimedOut => None,
        }
    }

    /// `doing` says what was tried, for people.
    pub fn into_error(self, doing: &str) -> QueueError {
        let text = self.describe(doing);
        if self.is_refusal() { QueueError::Refused(text) } else { QueueError::Unavailable(text) }
    }

    pub fn describe(&self, doing: &str) -> String {
        match self {
            Self::TimedOut => format!("{doing}: no answer within {} s", CALL_LIMIT.as_secs()),
            Self::Broker(error) => match tls::explain_tls_error(error) {
                Some(text) => format!("{doing}: {text}"),
                None if self.is_access_refused() => format!("{doing}: {error}: {PERMIT}"),
                None => format!("{doing}: {error}"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn channel_limit_is_retried_and_raised_by_one() {
        let limit = ChannelLimit::default();
        assert_eq!(limit.refusal(1_000), None);
        let words = || "NOT_ALLOWED".to_owned();
        limit.record(5, words());
        assert_eq!((limit.refusal(3), limit.refusal(4)), (None, Some((words(), false))));
        tokio::time::advance(TRIAL_EVERY).await;
        assert_eq!(limit.refusal(4), Some((words(), true)));
        assert_eq!(limit.refusal(4), Some((words(), false)), "one trial at a time");
        limit.raise();
        assert_eq!(limit.refusal(4), None);
        assert_eq!(limit.refusal(5), Some((words(), true)), "after a success the next at once");
        limit.record(0, words());
        assert_eq!(limit.refusal(0), None, "who has none may always ask");
    }
}
