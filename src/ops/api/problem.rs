//! Why a request was not done, as its status and `{"error": words}`.
//!
//! Refuses to say more than the commands would: no statement, no address, no value of a header.

use axum::extract::rejection::QueryRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::ledger::LedgerError;
use crate::ledger::operator::Refusal;
use crate::ops::change::NotChanged;
use crate::ops::json::Json;
use crate::queue::QueueError;
use crate::worker::send_again::NotSent;

/// What every refusal says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ErrorBody {
    /// In words, with the mend.
    pub error: String,
}

/// A refusal on its way out.
#[derive(Debug)]
pub struct Problem(pub StatusCode, pub String);

impl Problem {
    /// A field or parameter that cannot be meant.
    pub fn bad(words: impl Into<String>) -> Self {
        Self(StatusCode::BAD_REQUEST, words.into())
    }

    pub fn unknown(words: impl Into<String>) -> Self {
        Self(StatusCode::NOT_FOUND, words.into())
    }

    fn conflict(words: impl Into<String>) -> Self {
        Self(StatusCode::CONFLICT, words.into())
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        (self.0, Json(ErrorBody { error: self.1 })).into_response()
    }
}

impl From<LedgerError> for Problem {
    fn from(error: LedgerError) -> Self {
        let status = match &error {
            LedgerError::Refused(_) => StatusCode::CONFLICT,
            LedgerError::Corrupt(_) => StatusCode::INTERNAL_SERVER_ERROR,
            LedgerError::Away(_) | LedgerError::NotMigrated => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self(status, error.to_string())
    }
}

impl From<QueueError> for Problem {
    fn from(error: QueueError) -> Self {
        Self(StatusCode::SERVICE_UNAVAILABLE, format!("nothing was changed: {error}"))
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::NoSuchJob => Self::unknown(refusal.to_string()),
            refusal => Self::conflict(refusal.to_string()),
        }
    }
}

impl From<NotSent> for Problem {
    fn from(error: NotSent) -> Self {
        match error {
            NotSent::Refused(refusal) => refusal.into(),
            NotSent::Ledger(error) => error.into(),
            NotSent::Unpublished(_) => Self(StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
            NotSent::NoProvider(_) | NotSent::Unreadable(_) => Self::conflict(error.to_string()),
        }
    }
}

impl From<NotChanged> for Problem {
    fn from(error: NotChanged) -> Self {
        match error {
            NotChanged::NoProvider(_) | NotChanged::NoLimit { .. } => Self::unknown(error.to_string()),
            NotChanged::Unusable(_) => Self::conflict(error.to_string()),
            NotChanged::Ledger(error) => error.into(),
        }
    }
}

impl From<QueryRejection> for Problem {
    fn from(rejection: QueryRejection) -> Self {
        Self::bad(rejection.body_text())
    }
}
