//! The meaning of errors of the broker and of lapin, and the time limit of every call.
//!
//! Every call has one, because lapin's calls hang while a connection is blocked or its peer is silent.

use std::future::Future;
use std::time::Duration;

use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};
use lapin::{ChannelState, ErrorKind};

use crate::queue::QueueError;
use crate::tls;

/// Longest time that one call to the broker may take.
pub(super) const CALL_LIMIT: Duration = Duration::from_secs(5);

/// How the broker begins to say that something exists with other arguments.
const INEQUIVALENT: &str = "inequivalent arg";

const PERMIT: &str = "give the user of queue.url the rights that docs/topology.md names";

/// Slowest pace at which a broker that works takes a body and writes it to the disks of its nodes.
const BODY_BYTES_PER_S: usize = 1024 * 1024;

/// Why a call came to nothing.
#[derive(Debug)]
pub(super) enum CallFailure {
    TimedOut,
    Broker(lapin::Error),
}

/// Waits for a call to the broker for at most [`CALL_LIMIT`].
pub(super) async fn with_call_limit<T>(call: impl Future<Output = lapin::Result<T>>) -> Result<T, CallFailure> {
    with_body_limit(0, call).await
}

/// The same for a call that carries a body. One that is cut off too early may have arrived all the same, and would be
/// published again and again.
pub(super) async fn with_body_limit<T>(
    bytes: usize,
    call: impl Future<Output = lapin::Result<T>>,
) -> Result<T, CallFailure> {
    let transfer = Duration::from_secs((bytes / BODY_BYTES_PER_S) as u64);
    match tokio::time::timeout(CALL_LIMIT + transfer, call).await {
        Ok(answer) => answer.map_err(CallFailure::Broker),
        Err(_) => Err(CallFailure::TimedOut),
    }
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
