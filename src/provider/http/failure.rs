//! Meaning of a request that ends without a response: not sent, a fault of this process, or outcome unknown.
//!
//! The HTTP client's own error texts are not used, because they quote URLs. A cause is a text of this project, the kind
//! of an I/O error, or a TLS error.

use std::error::Error;
use std::io;
use std::iter::successors;

use super::half_duplex::EarlyResponse;
use super::resolver::{AddressRefused, NameUnresolved};
use super::socket::Socket;
use crate::domain::local_fault::LocalFault;
use crate::domain::outcome::{LookupResult, Outcome, UnknownCause};
use crate::tls;

/// Result of a request without a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RequestFailure {
    /// No byte of the request left.
    NotSent(String),
    /// No byte of the request left, because of a fault of this process.
    Local(LocalFault),
    /// The request may have reached the provider.
    Unknown(UnknownCause),
}

impl RequestFailure {
    pub(super) fn into_outcome(self) -> Outcome {
        match self {
            Self::NotSent(cause) => Outcome::NotSent { cause },
            Self::Local(fault) => Outcome::LocalFault(fault),
            Self::Unknown(cause) => Outcome::Unknown { cause, retry_after: None },
        }
    }

    pub(super) fn into_lookup_result(self) -> LookupResult {
        match self {
            Self::NotSent(cause) => LookupResult::NotSent { cause },
            Self::Local(fault) => LookupResult::LocalFault(fault),
            Self::Unknown(cause) => LookupResult::Unknown { cause, retry_after: None },
        }
    }

    /// Cause of a failure after the response's head, when "not sent" is impossible.
    pub(super) fn into_unknown_cause(self) -> UnknownCause {
        match self {
            Self::Unknown(cause) => cause,
            Self::NotSent(_) | Self::Local(_) => UnknownCause::ConnectionLost,
        }
    }
}

/// Meaning of an error on an open connection: "not sent" only if the kernel took no byte of the request.
pub(super) fn failure_after_connect(error: &(dyn Error + 'static), socket: &Socket) -> RequestFailure {
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
pub(super) fn is_early_response(error: &(dyn Error + 'static)) -> bool {
    let early = |io: &io::Error| io.get_ref().is_some_and(|inner| inner.is::<EarlyResponse>());
    successors(Some(error), |&link| link.source()).any(|link| link.downcast_ref().is_some_and(early))
}

/// Meaning of an error before any byte of the request left. A cause is a short text without URL, header or body.
pub(super) fn failure_before_send(error: &(dyn Error + 'static)) -> RequestFailure {
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
