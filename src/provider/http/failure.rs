//! Exchanges that went wrong: the meaning of a request without a response, and the log of unexpected responses.
//!
//! A request without a response was not sent, met a fault of this process, or has an unknown outcome. The HTTP client's
//! own error texts are not used, because they quote URLs. A cause is a text of this project, the kind of an I/O error,
//! or a TLS error.
//!
//! An unexpected response is bytes that answer no request, or another one. A gateway that sends responses twice does so
//! with every payment, so the log has one line per provider and minute. No byte of a response is logged.

use std::error::Error;
use std::io;
use std::iter::successors;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::connection::EarlyResponse;
use super::resolver::{AddressRefused, NameUnresolved};
use super::socket::Socket;
use crate::domain::local_fault::LocalFault;
use crate::domain::outcome::LookupResult;
use crate::domain::outcome::{Outcome, UnknownCause};
use crate::domain::provider::ProviderName;
use crate::tls;

/// Result of a request without a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestFailure {
    /// No byte of the request left.
    NotSent(String),
    /// No byte of the request left, because of a fault of this process.
    Local(LocalFault),
    /// The request may have reached the provider.
    Unknown(UnknownCause),
}

impl RequestFailure {
    pub fn into_outcome(self) -> Outcome {
        match self {
            Self::NotSent(cause) => Outcome::NotSent { cause },
            Self::Local(fault) => Outcome::LocalFault(fault),
            Self::Unknown(cause) => Outcome::Unknown { cause, retry_after: None },
        }
    }

    pub fn into_lookup_result(self) -> LookupResult {
        match self {
            Self::NotSent(cause) => LookupResult::NotSent { cause },
            Self::Local(fault) => LookupResult::LocalFault(fault),
            Self::Unknown(cause) => LookupResult::Unknown { cause, retry_after: None },
        }
    }

    /// Cause of a failure after the response's head, when "not sent" is impossible.
    pub fn into_unknown_cause(self) -> UnknownCause {
        match self {
            Self::Unknown(cause) => cause,
            Self::NotSent(_) | Self::Local(_) => UnknownCause::ConnectionLost,
        }
    }
}

/// Whether the peer's TLS refuses this connection for want of a client certificate. With TLS 1.3 its alert comes after the
/// handshake of this side, with the first read.
pub fn demands_certificate(error: &(dyn Error + 'static)) -> bool {
    let is_alert = |tls: &rustls::Error| {
        matches!(tls, rustls::Error::AlertReceived(rustls::AlertDescription::CertificateRequired))
    };
    // `source()` of an I/O error skips the error that it wraps.
    let wrapped = |io: &io::Error| io.get_ref().is_some_and(|inner| demands_certificate(inner));
    successors(Some(error), |&link| link.source())
        .any(|link| link.downcast_ref().is_some_and(is_alert) || link.downcast_ref().is_some_and(wrapped))
}

/// Meaning of an error on an open connection: "not sent" only if the kernel took no byte of the request.
pub fn failure_after_connect(error: &(dyn Error + 'static), socket: &Socket) -> RequestFailure {
    if socket.wrote_nothing() {
        failure_before_send(error)
    } else if is_timeout(error) {
        RequestFailure::Unknown(UnknownCause::Timeout)
    } else {
        RequestFailure::Unknown(UnknownCause::ConnectionLost)
    }
}

/// Whether the kernel gave up bytes that it could not deliver in time.
fn is_timeout(error: &(dyn Error + 'static)) -> bool {
    let timed_out = |io: &io::Error| io.kind() == io::ErrorKind::TimedOut;
    successors(Some(error), |&link| link.source()).any(|link| link.downcast_ref().is_some_and(timed_out))
}

/// Whether the connection ended because bytes arrived while the request was being written.
pub fn is_early_response(error: &(dyn Error + 'static)) -> bool {
    let early = |io: &io::Error| io.get_ref().is_some_and(|inner| inner.is::<EarlyResponse>());
    successors(Some(error), |&link| link.source()).any(|link| link.downcast_ref().is_some_and(early))
}

/// Meaning of an error before any byte of the request left. A cause is a short text without URL, header or body.
pub fn failure_before_send(error: &(dyn Error + 'static)) -> RequestFailure {
    if demands_certificate(error) {
        return RequestFailure::Local(LocalFault::ClientCertificate);
    }
    let chain = || successors(Some(error), |&link| link.source());
    // A name may be unresolved because this process could open no socket for the DNS query.
    if let Some(fault) = chain().find_map(|link| link.downcast_ref().and_then(LocalFault::from_io_error)) {
        return RequestFailure::Local(fault);
    }
    let known = chain().find_map(describe_cause);
    RequestFailure::NotSent(known.unwrap_or_else(|| "no connection could be made".to_owned()))
}

fn describe_cause(error: &(dyn Error + 'static)) -> Option<String> {
    if error.is::<AddressRefused>() || error.is::<NameUnresolved>() {
        return Some(error.to_string());
    }
    if let Some(text) = tls::explain_tls_error(error) {
        return Some(text);
    }
    let io = error.downcast_ref::<io::Error>()?;
    // `source()` of an I/O error skips the error that it wraps.
    if let Some(wrapped) = io.get_ref().and_then(|inner| describe_cause(inner)) {
        return Some(wrapped);
    }
    let descriptive_kinds = [
        io::ErrorKind::ConnectionRefused,
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::HostUnreachable,
        io::ErrorKind::NetworkUnreachable,
        io::ErrorKind::PermissionDenied,
        io::ErrorKind::TimedOut,
        io::ErrorKind::UnexpectedEof,
    ];
    descriptive_kinds.contains(&io.kind()).then(|| io.kind().to_string())
}

/// Shortest time between two lines of one provider.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Kind of an unexpected response. Each kind closes the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnexpectedResponse {
    BeforeRequest,
    WhileWriting,
    AfterResponse,
    NotEchoed,
}

impl UnexpectedResponse {
    fn describe(self) -> &'static str {
        match self {
            Self::BeforeRequest => {
                "bytes arrived before the request was written; the request went on another connection"
            }
            Self::WhileWriting => "the response began before its request was fully written; the outcome is unknown",
            Self::AfterResponse => "more bytes followed a response",
            Self::NotEchoed => "the response does not repeat the fields of `echo`; the outcome is unknown",
        }
    }
}

/// Unexpected responses of one provider.
#[derive(Debug)]
pub struct UnexpectedResponseLog {
    provider: ProviderName,
    state: Mutex<LogState>,
}

#[derive(Debug, Default)]
struct LogState {
    logged_at: Option<Instant>,
    /// Number since the last line.
    unlogged: u64,
}

impl UnexpectedResponseLog {
    pub fn new(provider: ProviderName) -> Self {
        Self { provider, state: Mutex::default() }
    }

    pub fn record(&self, response: UnexpectedResponse) {
        if let Some(strays) = self.state.lock().count(Instant::now()) {
            let (provider, what) = (&self.provider, response.describe());
            tracing::warn!(%provider, strays, what, "provider sent an unexpected response; connection closed");
        }
    }
}

impl LogState {
    /// The number to log, if a line is due.
    fn count(&mut self, now: Instant) -> Option<u64> {
        self.unlogged += 1;
        if self.logged_at.is_some_and(|logged| now.saturating_duration_since(logged) < LOG_INTERVAL) {
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_log_line_per_minute_counts_all() {
        let (mut state, started) = (LogState::default(), Instant::now());
        let mut lines = Vec::new();
        for seconds in [0, 0, 1, 59, 60, 61, 119, 121] {
            lines.extend(state.count(started + Duration::from_secs(seconds)).map(|strays| (seconds, strays)));
        }
        assert_eq!(lines, [(0, 1), (60, 4), (121, 3)]);
    }
}
