//! Refusals that no handler made: of addresses and methods that are none, of addresses that cannot be read, before the start.
//!
//! Refuses to touch what is JSON already, and whatever is not asked of the API.

use axum::body::to_bytes;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::problem::ApiError;

/// Longest words of a refusal; ours are shorter.
const BYTES_MAX: usize = 16 * 1024;

/// Says every refusal as a program reads it.
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
        StatusCode::NOT_FOUND => "there is no such address: see /api/v1/openapi.json".to_owned(),
        StatusCode::METHOD_NOT_ALLOWED => "this address has no such method: see /api/v1/openapi.json".to_owned(),
        _ => {
            let said = to_bytes(body, BYTES_MAX).await.unwrap_or_default();
            String::from_utf8_lossy(&said).trim().to_owned()
        }
    };
    let mut refusal = ApiError(status, words).into_response();
    refusal.headers_mut().extend(parts.headers.remove(header::ALLOW).map(|allow| (header::ALLOW, allow)));
    refusal
}
