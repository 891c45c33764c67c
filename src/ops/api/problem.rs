//! The error response of the API: an HTTP status and `{"error": text}`.
//!
//! It shows no more than the commands do: no SQL statement, no address, no value of a header.

use axum::body::to_bytes;
use axum::extract::Request;
use axum::extract::rejection::QueryRejection;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::ledger::LedgerError;
use crate::ledger::operator::ResolutionRefusal;
use crate::ops::change::SettingsChangeError;
use crate::ops::json::JsonResponse;
use crate::queue::QueueError;
use crate::worker::resend::ResendError;

/// The body of every error response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ErrorBody {
    /// What is wrong, and how to fix it.
    pub error: String,
}

/// An error with its HTTP status.
#[derive(Debug)]
pub struct ApiError(pub StatusCode, pub String);

impl ApiError {
    /// A field or parameter is invalid.
    pub fn bad_request(words: impl Into<String>) -> Self {
        Self(StatusCode::BAD_REQUEST, words.into())
    }

    pub fn not_found(words: impl Into<String>) -> Self {
        Self(StatusCode::NOT_FOUND, words.into())
    }

    fn conflict(words: impl Into<String>) -> Self {
        Self(StatusCode::CONFLICT, words.into())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.0, JsonResponse(ErrorBody { error: self.1 })).into_response()
    }
}

impl From<LedgerError> for ApiError {
    fn from(error: LedgerError) -> Self {
        let status = match &error {
            LedgerError::StatementFailed(_) => StatusCode::CONFLICT,
            LedgerError::Corrupt(_) => StatusCode::INTERNAL_SERVER_ERROR,
            LedgerError::Unavailable(_) | LedgerError::NotMigrated => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self(status, error.to_string())
    }
}

impl From<QueueError> for ApiError {
    fn from(error: QueueError) -> Self {
        Self(StatusCode::SERVICE_UNAVAILABLE, format!("nothing was changed: {error}"))
    }
}

impl From<ResolutionRefusal> for ApiError {
    fn from(refusal: ResolutionRefusal) -> Self {
        match refusal {
            ResolutionRefusal::NoSuchJob => Self::not_found(refusal.to_string()),
            refusal => Self::conflict(refusal.to_string()),
        }
    }
}

impl From<ResendError> for ApiError {
    fn from(error: ResendError) -> Self {
        match error {
            ResendError::Refused(refusal) => refusal.into(),
            ResendError::Ledger(error) => error.into(),
            ResendError::Unpublished(_) => Self(StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
            ResendError::NoProvider(_) | ResendError::Unreadable(_) => Self::conflict(error.to_string()),
        }
    }
}

impl From<SettingsChangeError> for ApiError {
    fn from(error: SettingsChangeError) -> Self {
        match error {
            SettingsChangeError::NoProvider(_) | SettingsChangeError::NoLimit { .. } => {
                Self::not_found(error.to_string())
            }
            SettingsChangeError::InvalidRow(_) => Self::conflict(error.to_string()),
            SettingsChangeError::Ledger(error) => error.into(),
        }
    }
}

impl From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> Self {
        Self::bad_request(rejection.body_text())
    }
}

/// Longest error text, in bytes; ours are shorter.
const BYTES_MAX: usize = 16 * 1024;

/// Turns every error response of the API into JSON: those that no handler made, and those before the start. Responses
/// that are JSON already stay unchanged.
pub async fn with_json_errors(request: Request, next: Next) -> Response {
    let is_asked_of_api = request.uri().path().starts_with("/api/");
    let answer = next.run(request).await;
    let (status, kind) = (answer.status(), answer.headers().get(header::CONTENT_TYPE));
    let is_refused = status.is_client_error() || status.is_server_error();
    if !is_asked_of_api || !is_refused || kind.is_some_and(|kind| *kind == HeaderValue::from_static("application/json"))
    {
        return answer;
    }
    let (mut parts, body) = answer.into_parts();
    let words = match status {
        StatusCode::NOT_FOUND => "there is no such path: see /api/v1/openapi.json".to_owned(),
        StatusCode::METHOD_NOT_ALLOWED => "this path does not allow the method: see /api/v1/openapi.json".to_owned(),
        _ => {
            let text = to_bytes(body, BYTES_MAX).await.unwrap_or_default();
            String::from_utf8_lossy(&text).trim().to_owned()
        }
    };
    let mut refusal = ApiError(status, words).into_response();
    refusal.headers_mut().extend(parts.headers.remove(header::ALLOW).map(|allow| (header::ALLOW, allow)));
    refusal
}
