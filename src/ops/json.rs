//! The JSON response type of the server. It escapes hidden characters in texts, so that no client shows them by
//! mistake.
//!
//! Every handler uses this type, because axum's own leaves direction marks and invisible characters unescaped.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::domain::printable::printable_json;

/// A body of `application/json`.
#[derive(Debug)]
pub struct JsonResponse<T>(pub T);

impl<T: Serialize> IntoResponse for JsonResponse<T> {
    fn into_response(self) -> Response {
        match serde_json::to_string(&self.0) {
            Ok(text) => {
                let json = HeaderValue::from_static("application/json");
                ([(header::CONTENT_TYPE, json)], printable_json(&text).into_owned()).into_response()
            }
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        }
    }
}
