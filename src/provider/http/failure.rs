//! What it means when a request ends without an answer: surely not sent, for whose fault, or nobody knows.
//!
//! Refuses the client's own error texts: they quote URLs. Causes are words of ours, an I/O error's kind or a TLS error.

use std::error::Error;
use std::io;
use std::iter::successors;

use super::half_duplex::EarlyResponse;
use super::resolver::{AddressRefused, NameUnresolved};
use super::socket::Socket;
use crate::domain::local_fault::LocalFault;
use crate::domain::lookup::LookupResult;
use crate::domain::outcome::{Outcome, UnknownCause};
use crate::tls;

/// The end of a request that got no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RequestFailure {
    /// No byte of the request left.
    NotSent(String),
    /// The same, and the provider has no part in it.
    Local(LocalFault),
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

    /// For a failure after the answer's head: it cannot mean "not sent" any more.
    pub(super) fn into_unknown_cause(self) -> UnknownCause {
        match self {
            Self::Unknown(cause) => cause,
            Self::NotSent(_) | Self::Local(_) => UnknownCause::ConnectionLost,
        }
    }
}

/// The meaning of an error on a connection that was made: "not sent" only if the kernel took no byte of the request.
pub(super) fn failure_after_connect(error: &(dyn Error + 'static), socket: &Socket) -> RequestFailure {
    if socket.wrote_nothing() {
        failure_before_send(error)
    } else if is_timeout(error) {
        RequestFailure::Unknown(UnknownCause::Timeout)
    } else {
        RequestFailure::Unknown(UnknownCause::ConnectionLost)
    }
}

/// The kernel gave up what it could not deliver in time.
fn is_timeout(error: &(dyn Error + 'static)) -> bool {
    let timed_out = |io: &io::Error| io.kind() == io::ErrorKind::TimedOut;
    successors(Some(error), |&link| link.source()).any(|link| link.downcast_ref().is_some_and(timed_out))
}

/// Whether the connection was ended because bytes came while the request was being written.
pub(super) fn is_early_response(error: &(dyn Error + 'static)) -> bool {
    let early = |io: &io::Error| io.get_ref().is_some_and(|inner| inner.is::<EarlyResponse>());
    successors(Some(error), |&link| link.source()).any(|link| link.downcast_ref().is_some_and(early))
}

/// The meaning of an error before any byte of the request left. A cause is a short text without URL, header or body.
pub(super) fn failure_before_send(error: &(dyn Error + 'static)) -> RequestFailure {
    let chain = || successors(Some(error), |&link| link.source());
    // A name that cannot be resolved may hide that this process could open no socket for the question.
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
    // An I/O error does not list what it wraps among its sources.
    if let Some(wrapped) = io.get_ref().and_then(|inner| describe_cause(inner)) {
        return Some(wrapped);
    }
    let tells = [
        io::ErrorKind::ConnectionRefused,
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::HostUnreachable,
        io::ErrorKind::NetworkUnreachable,
        io::ErrorKind::PermissionDenied,
        io::ErrorKind::TimedOut,
        io::ErrorKind::UnexpectedEof,
    ];
    tells.contains(&io.kind()).then(|| io.kind().to_string())
}
