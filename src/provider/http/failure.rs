//! What it means when a request ends without an answer: surely not sent, or nobody knows.
//!
//! Refuses the client's own error texts: they quote URLs. Causes are words of ours, an I/O error's kind or a TLS error.

use std::error::Error;
use std::io;

use super::resolver::AddressRefused;
use crate::domain::lookup::Finding;
use crate::domain::outcome::{Outcome, UnknownCause};
use crate::tls;

/// The end of a request that got no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// No connection was made, so no byte of the request left.
    NotSent(String),
    Unknown(UnknownCause),
}

impl Failure {
    pub(super) fn outcome(self) -> Outcome {
        match self {
            Self::NotSent(cause) => Outcome::NotSent { cause },
            Self::Unknown(cause) => Outcome::Unknown { cause, retry_after: None },
        }
    }

    pub(super) fn finding(self) -> Finding {
        match self {
            Self::NotSent(cause) => Finding::NotSent { cause },
            Self::Unknown(cause) => Finding::Unknown { cause, retry_after: None },
        }
    }

    /// For a failure after the answer's head: it cannot mean "not sent" any more.
    pub(super) fn unknown_cause(self) -> UnknownCause {
        match self {
            Self::Unknown(cause) => cause,
            Self::NotSent(_) => UnknownCause::ConnectionLost,
        }
    }
}

/// Only what happened before there was a connection (resolving, connecting, the TLS handshake) is "not sent"; a total
/// timeout is not, even if it struck while connecting, because the client does not say.
pub(super) fn failure_of(error: &reqwest::Error) -> Failure {
    if error.is_builder() || error.is_connect() {
        Failure::NotSent(cause_of(error))
    } else if error.is_timeout() {
        Failure::Unknown(UnknownCause::Timeout)
    } else {
        Failure::Unknown(UnknownCause::ConnectionLost)
    }
}

/// A short text without URL, header or body.
pub(super) fn cause_of(error: &reqwest::Error) -> String {
    let mut link = error.source();
    while let Some(inner) = link {
        if let Some(cause) = known_cause(inner) {
            return cause;
        }
        link = inner.source();
    }
    let known = if error.is_dns() {
        "the host's name cannot be resolved"
    } else if error.is_timeout() {
        "no connection in time"
    } else {
        "no connection could be made"
    };
    known.to_owned()
}

fn known_cause(error: &(dyn Error + 'static)) -> Option<String> {
    if error.is::<AddressRefused>() {
        return Some(error.to_string());
    }
    if let Some(text) = tls::explain(error) {
        return Some(text);
    }
    let io = error.downcast_ref::<io::Error>()?;
    // An I/O error does not list what it wraps among its sources.
    if let Some(wrapped) = io.get_ref().and_then(|inner| known_cause(inner)) {
        return Some(wrapped);
    }
    let tells = [
        io::ErrorKind::ConnectionRefused,
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::HostUnreachable,
        io::ErrorKind::NetworkUnreachable,
        io::ErrorKind::AddrNotAvailable,
        io::ErrorKind::PermissionDenied,
        io::ErrorKind::TimedOut,
        io::ErrorKind::UnexpectedEof,
    ];
    tells.contains(&io.kind()).then(|| io.kind().to_string())
}
