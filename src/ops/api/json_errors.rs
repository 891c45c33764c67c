//! The JSON form of errors that no handler made: unknown paths and methods, unreadable paths, and errors before the
//! start.
//!
//! Responses that are JSON already, and all paths outside `/api/`, stay unchanged.

use axum::body::to_bytes;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::problem::ApiError;

/// Longest error text, in bytes; ours are shorter.
const BYTES_MAX: usize = 16 * 1024;

/// Turns every error response of the API into JSON.
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
