//! The JSON of the ops server: its responses and errors, and the bodies of requests.
//!
//! Every handler responds with [`JsonResponse`], because axum's own leaves direction marks and invisible characters
//! unescaped. An error is an HTTP status and `{"error": text}`; it shows no more than the commands do: no SQL statement,
//! no address, no value of a header. The body of a request is one object in which every field is known and occurs once.

use std::fmt;

use axum::body::{Bytes, to_bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde::de::value::{MapAccessDeserializer, StringDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error as _, IntoDeserializer as _, MapAccess, Visitor,
};
use serde_json::Value;
use utoipa::ToSchema;

use super::change::SettingsChangeError;
use crate::domain::printable::printable_json;
use crate::ledger::operator::ResolutionRefusal;
use crate::ledger::rejected::RejectedRefusal;
use crate::ledger::{LedgerError, decision_input};
use crate::queue::QueueError;
use crate::worker::rejected::RejectedError;
use crate::worker::resend::ResendError;

/// Largest body of a request and longest error text, in bytes; ours are shorter.
const BYTES_MAX: usize = 16 * 1024;
/// Largest body with a list of ids, in bytes: 10,000 ids of 64 characters.
pub const LARGE_BYTES_MAX: usize = 768 * 1024;

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

    /// As [`Self::bad_request`], with the field and why it is invalid.
    pub fn bad_field(field: &str, why: impl fmt::Display) -> Self {
        Self::bad_request(format!("`{field}`: {why}"))
    }

    pub fn not_found(words: impl Into<String>) -> Self {
        Self(StatusCode::NOT_FOUND, words.into())
    }

    pub fn unavailable(problem: impl fmt::Display) -> Self {
        Self(StatusCode::SERVICE_UNAVAILABLE, problem.to_string())
    }

    pub fn conflict(words: impl Into<String>) -> Self {
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
            LedgerError::Unavailable(_) | LedgerError::CannotWrite(_) | LedgerError::NotMigrated => {
                StatusCode::SERVICE_UNAVAILABLE
            }
        };
        Self(status, error.to_string())
    }
}

impl From<QueueError> for ApiError {
    fn from(error: QueueError) -> Self {
        Self::unavailable(format_args!("nothing was changed: {error}"))
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
            ResendError::NoProvider(_) | ResendError::Unreadable => Self::conflict(error.to_string()),
        }
    }
}

impl From<RejectedError> for ApiError {
    fn from(error: RejectedError) -> Self {
        match error {
            RejectedError::Refused(RejectedRefusal::NoSuchMessage(_)) => Self::not_found(error.to_string()),
            RejectedError::Refused(_)
            | RejectedError::NoProvider(_)
            | RejectedError::NoBroker
            | RejectedError::NotKept
            | RejectedError::Masked
            | RejectedError::PublishedThough(_) => Self::conflict(error.to_string()),
            RejectedError::Queue(_) | RejectedError::NotRecorded(_) => Self::unavailable(error),
            RejectedError::Ledger(error) => error.into(),
        }
    }
}

impl From<SettingsChangeError> for ApiError {
    fn from(error: SettingsChangeError) -> Self {
        match error {
            SettingsChangeError::NoProvider(_)
            | SettingsChangeError::NoLimit { .. }
            | SettingsChangeError::NoRule { .. } => Self::not_found(error.to_string()),
            SettingsChangeError::NoReasonForRelease => Self::bad_field("because", error),
            SettingsChangeError::NotHeld(_)
            | SettingsChangeError::InvalidRow(_)
            | SettingsChangeError::Unusable(_)
            | SettingsChangeError::SameRuleAfterwards { .. }
            | SettingsChangeError::NothingToReturn { .. } => Self::conflict(error.to_string()),
            SettingsChangeError::Ledger(error) => error.into(),
        }
    }
}

impl From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> Self {
        Self::bad_request(rejection.body_text())
    }
}

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

/// A parsed and validated body.
pub struct ApiBody<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for ApiBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        parse_body(&read_body(request, BYTES_MAX).await?).map(Self)
    }
}

/// A parsed body that may hold a list of ids. Its type names the fields, so a repeated one is an error at every depth.
pub struct LargeBody<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for LargeBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let bytes = read_body(request, LARGE_BYTES_MAX).await?;
        serde_json::from_slice(&bytes).map(Self).map_err(|error| ApiError::bad_request(error.to_string()))
    }
}

async fn read_body(request: Request, at_most: usize) -> Result<Bytes, ApiError> {
    let body = to_bytes(request.into_body(), at_most).await.map_err(|_| {
        let words = format!("the body is longer than {at_most} bytes, or could not be read");
        ApiError(StatusCode::PAYLOAD_TOO_LARGE, words)
    })?;
    match has_nul(&body) {
        true => Err(ApiError::bad_request("a text of the body has the character U+0000: remove it")),
        false => Ok(body),
    }
}

/// Whether a text of a JSON document has the character U+0000, which PostgreSQL cannot store. JSON has it as an escape
/// alone, and a backslash only within texts.
fn has_nul(json: &[u8]) -> bool {
    let mut rest = json;
    while let Some(escape) = rest.iter().position(|byte| *byte == b'\\') {
        if rest[escape..].starts_with(b"\\u0000") {
            return true;
        }
        rest = rest.get(escape + 2..).unwrap_or_default();
    }
    false
}

fn parse_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let ApiBodyMembers(members) = serde_json::from_slice(body)
        .map_err(|_| ApiError::bad_request("the body must be one JSON object, like {\"because\": \"they said so\"}"))?;
    let mut names: Vec<&String> = members.iter().map(|(name, _)| name).collect();
    names.sort_unstable();
    // This program would use one of the two values, and a proxy before it may have checked the other.
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(ApiError::bad_request(format!("`{}` is given twice: write it once", pair[0])));
    }
    let fields = ApiBodyFields { rest: members.into_iter(), current: None };
    T::deserialize(MapAccessDeserializer::new(fields)).map_err(|error| ApiError::bad_request(error.to_string()))
}

/// The raw fields of an object, with repeated ones. No field of ours has an object as its value.
struct ApiBodyMembers(Vec<(String, Value)>);

impl<'de> serde::Deserialize<'de> for ApiBodyMembers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MembersVisitor;

        impl<'de> Visitor<'de> for MembersVisitor {
            type Value = ApiBodyMembers;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ApiBodyMembers, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(ApiBodyMembers(members))
            }
        }

        deserializer.deserialize_map(MembersVisitor)
    }
}

/// The fields of an object one by one, so that an error names the field of the invalid value.
struct ApiBodyFields {
    rest: std::vec::IntoIter<(String, Value)>,
    current: Option<(String, Value)>,
}

impl<'de> MapAccess<'de> for ApiBodyFields {
    type Error = serde_json::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Self::Error> {
        let Some((name, value)) = self.rest.next() else { return Ok(None) };
        let key: StringDeserializer<Self::Error> = name.clone().into_deserializer();
        self.current = Some((name, value));
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Self::Error> {
        let (name, value) = self.current.take().unwrap_or_default();
        seed.deserialize(value).map_err(|error| Self::Error::custom(format!("`{name}`: {error}")))
    }
}

/// Validates a reason for the audit; a blank reason counts as none.
pub fn validate_reason(given: Option<String>) -> Result<Option<String>, ApiError> {
    let Some(text) = given.filter(|text| !text.trim().is_empty()) else { return Ok(None) };
    decision_input::validate_reason(&text).map(Some).map_err(|why| ApiError::bad_field("because", why))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct TestBody {
        rate: String,
        #[serde(default)]
        dry_run: bool,
    }

    #[test]
    fn escaped_nul_is_found() {
        for (json, found) in [
            (r#"{"a": "b\u0000"}"#, true),
            (r#"{"a\u0000": [{"b": 1}]}"#, true),
            (r#"{"a": "\\\u0000"}"#, true),
            (r#"{"a": "\\u0000"}"#, false),
            (r#"{"a": "\u00001"}"#, true),
            (r#"{"a": "\u0001 u0000"}"#, false),
            (r"\", false),
            ("", false),
        ] {
            assert_eq!(has_nul(json.as_bytes()), found, "{json}");
        }
    }

    #[test]
    fn invalid_field_is_named() {
        let asked = |body: Value| parse_body::<TestBody>(body.to_string().as_bytes()).map_err(|problem| problem.1);
        let good = asked(json!({"rate": "1/1s", "dry_run": true})).unwrap();
        assert_eq!((good.rate.as_str(), good.dry_run), ("1/1s", true));
        for (body, words) in [
            (json!({"rate": 5}), "`rate`: invalid type: integer `5`, expected a string"),
            (json!({"rate": "1/1s", "dry_run": "yes"}), "`dry_run`: invalid type: string \"yes\", expected a boolean"),
            (json!({"rate": "1/1s", "dryrun": true}), "unknown field `dryrun`, expected `rate` or `dry_run`"),
            (json!({}), "missing field `rate`"),
        ] {
            assert_eq!(asked(body).unwrap_err(), words);
        }
        assert_eq!(validate_reason(Some("  ".to_owned())).unwrap(), None);
        assert!(validate_reason(Some("a".repeat(501))).unwrap_err().1.contains("`because`: has 501 characters"));
    }
}
