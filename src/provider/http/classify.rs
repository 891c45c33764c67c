//! What an HTTP answer means: status, headers and body in, [`Outcome`] out. The contract's table and a row's overrides.
//!
//! Refuses I/O and refuses to keep a body: what leaves here is a status, a bounded reference, at most one short token.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, TRANSFER_ENCODING};

use super::response_json::{AmbiguousValue, FieldValue, ResponseJson};
use super::retry_after::retry_after;
use super::wait_field::read_wait_field;
use crate::domain::outcome::{Outcome, UnknownCause};
use crate::domain::provider::{
    CodeCondition, HeaderCondition, Provider, ResponseLocation, StatusCase, StatusMeaning, WaitField,
};
use crate::domain::sensitive::secret::looks_secret;

/// Where the provider's reference stands unless the row names another place.
const REFERENCE_POINTER: &str = "/id";
/// Longest provider reference that is kept, in characters.
const REFERENCE_CHARS_MAX: usize = 255;
/// Longest error token that is kept, in characters.
const TOKEN_CHARS_MAX: usize = 48;
/// Digits alone are a code up to here; a longer run could be a card or account number.
const TOKEN_DIGITS_MAX: usize = 6;

/// Where error codes usually stand; tried in this order for a short token.
const CODE_POINTERS: [&str; 5] = ["/code", "/error/code", "/error", "/type", "/error/type"];

/// Codings that browsers know and that no request of ours asks for. A body that is labelled so and is JSON all the same is not
/// what it says. Browsers pass other labels by, such as `utf-8`.
const CONTENT_CODINGS: [&str; 7] = ["gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress"];

/// How much of a body could be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResponseBody {
    Whole(Vec<u8>),
    /// Longer than we read.
    TooLarge,
    /// It ended before it was whole.
    Incomplete(UnknownCause),
    /// It cannot be told which bytes are the answer. Either the head names a length and a transfer coding: by one of them
    /// another answer begins within the body (<https://www.rfc-editor.org/rfc/rfc9112#section-6.3>). Or another answer follows
    /// on a connection that was used before: one of the two may be a second answer to an earlier request.
    Ambiguous,
}

/// An answer as far as it could be read.
#[derive(Clone, Debug)]
pub struct ProviderResponse {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: ResponseBody,
}

impl ProviderResponse {
    /// The body, if it is JSON.
    pub(super) fn json(&self) -> Option<ResponseJson> {
        let content_type = self.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        match &self.body {
            ResponseBody::Whole(bytes) if !self.is_encoded() => ResponseJson::parse(bytes, content_type),
            ResponseBody::Whole(_) | ResponseBody::TooLarge | ResponseBody::Incomplete(_) | ResponseBody::Ambiguous => {
                None
            }
        }
    }

    /// Whether a header says that the body is compressed.
    fn is_encoded(&self) -> bool {
        let values = [CONTENT_ENCODING, TRANSFER_ENCODING].map(|name| self.headers.get_all(name));
        let values = values.iter().flatten().filter_map(|value| value.to_str().ok());
        let is_coding = |coding: &str| CONTENT_CODINGS.iter().any(|known| coding.trim().eq_ignore_ascii_case(known));
        values.flat_map(|value| value.split(',')).any(is_coding)
    }
}

/// What one provider's answers mean beyond the default table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseRules {
    /// Per status, cases in their order; where none fits, the default table holds.
    pub statuses: BTreeMap<u16, Vec<StatusCase>>,
    /// JSON pointer to the provider's reference. <https://www.rfc-editor.org/rfc/rfc6901>
    pub reference_pointer: String,
    /// Where a wait is named besides `Retry-After`.
    pub wait_field: Option<WaitField>,
}

impl ResponseRules {
    #[must_use]
    pub fn from_provider(provider: &Provider) -> Self {
        let pointer = provider.request.reference_pointer.as_deref().unwrap_or(REFERENCE_POINTER);
        Self {
            statuses: provider.statuses.clone(),
            reference_pointer: pointer.to_owned(),
            wait_field: provider.request.wait.clone(),
        }
    }

    /// What `Retry-After` says, in the unit that the row gives it, if it gives one. `now` as for [`classify`].
    pub(super) fn retry_after(&self, reading: &ProviderResponse, now: SystemTime) -> Option<Duration> {
        match &self.wait_field {
            Some(wait) if wait.location.is_retry_after() => read_wait_field(reading, wait, now),
            _ => retry_after(&reading.headers, now),
        }
    }

    /// How long a provider that refuses for its limit is left alone: by `Retry-After`, which is said of this answer, or
    /// else by what stands where the row says.
    pub(super) fn throttle_wait(&self, reading: &ProviderResponse, now: SystemTime) -> Option<Duration> {
        let said = self.retry_after(reading, now);
        let elsewhere = || self.wait_field.as_ref().and_then(|wait| read_wait_field(reading, wait, now));
        said.filter(|wait| !wait.is_zero()).or_else(elsewhere).or(said)
    }

    /// How long one payment waits that the provider is busy with. A header that tells when a quota is renewed stands in
    /// every answer and says nothing of a lock; what the body says is said of this answer.
    pub(super) fn busy_wait(&self, reading: &ProviderResponse, now: SystemTime) -> Option<Duration> {
        match self.wait_field.as_ref().map(|wait| &wait.location) {
            Some(ResponseLocation::Body(_)) => self.throttle_wait(reading, now),
            _ => self.retry_after(reading, now),
        }
    }
}

/// Says what the answer means. `now` serves dates in an answer without a `Date` of its own. An answer that says two things
/// where one is needed has an unknown outcome.
#[must_use]
pub fn classify(reading: &ProviderResponse, meanings: &ResponseRules, now: SystemTime) -> Outcome {
    let unreadable = UnknownCause::UnreadableResponse(reading.status);
    try_classify(reading, meanings, now).unwrap_or(Outcome::Unknown { cause: unreadable, retry_after: None })
}

fn try_classify(
    reading: &ProviderResponse,
    meanings: &ResponseRules,
    now: SystemTime,
) -> Result<Outcome, AmbiguousValue> {
    let status = reading.status;
    let said_by_row = row_meaning(reading, &meanings.statuses)?;
    Ok(match said_by_row.unwrap_or_else(|| default_meaning(status)) {
        // A row that calls a status accepted says so for the status alone: a 204 has no body to read.
        StatusMeaning::Accepted if said_by_row.is_some() => Outcome::Accepted {
            reference: match reading.json() {
                Some(body) => reference(&body, &meanings.reference_pointer)?,
                None => None,
            },
        },
        StatusMeaning::Accepted => accepted(reading, meanings)?,
        StatusMeaning::Declined => Outcome::Declined { reason: reason(reading) },
        StatusMeaning::Misconfigured => Outcome::Misconfigured { status },
        StatusMeaning::Unknown => server_error(status, None),
        StatusMeaning::InProgress => Outcome::InProgress,
        StatusMeaning::Throttled => Outcome::Throttled { retry_after: meanings.throttle_wait(reading, now) },
        StatusMeaning::Busy => Outcome::Busy { retry_after: meanings.busy_wait(reading, now) },
        // An hour's quota tells of its end in every answer: a provider that is down is asked again before.
        StatusMeaning::Unavailable => server_error(status, meanings.retry_after(reading, now)),
        StatusMeaning::Review => Outcome::Rejected { reason: reason(reading) },
    })
}

/// The first case of the row that fits the answer.
///
/// # Errors
/// [`Ambiguous`] when it can't be told whether a case fits, or where the answer ends.
pub(super) fn row_meaning(
    reading: &ProviderResponse,
    statuses: &BTreeMap<u16, Vec<StatusCase>>,
) -> Result<Option<StatusMeaning>, AmbiguousValue> {
    if reading.body == ResponseBody::Ambiguous {
        return Err(AmbiguousValue);
    }
    let Some(cases) = statuses.get(&reading.status) else { return Ok(None) };
    let body = cases.iter().any(|case| case.code.is_some()).then(|| reading.json()).flatten();
    for case in cases {
        if has_header(&reading.headers, case.header.as_ref())? && has_code(body.as_ref(), case.code.as_ref())? {
            return Ok(Some(case.means));
        }
    }
    Ok(None)
}

fn has_header(headers: &HeaderMap, wanted: Option<&HeaderCondition>) -> Result<bool, AmbiguousValue> {
    let Some(wanted) = wanted else { return Ok(true) };
    let same = |value: &str| wanted.value.as_ref().is_none_or(|text| value.trim().eq_ignore_ascii_case(text));
    let values = headers.get_all(wanted.name.as_str()).iter();
    let mut same = values.map(|value| same(&String::from_utf8_lossy(value.as_bytes())));
    let Some(first) = same.next() else { return Ok(false) };
    if same.all(|other| other == first) { Ok(first) } else { Err(AmbiguousValue) }
}

fn has_code(body: Option<&ResponseJson>, wanted: Option<&CodeCondition>) -> Result<bool, AmbiguousValue> {
    let Some(wanted) = wanted else { return Ok(true) };
    let Some(body) = body else { return Ok(false) };
    let is_code = |field: &FieldValue| match field {
        FieldValue::Text(_) | FieldValue::Number(_) => field.matches(&wanted.code),
        FieldValue::Bool(_) | FieldValue::Null | FieldValue::List(_) | FieldValue::Object | FieldValue::Unreadable => {
            false
        }
    };
    let places = wanted.pointer.as_ref().map_or(CODE_POINTERS.to_vec(), |place| vec![place.as_str()]);
    for place in places {
        let holds_code = match body.field(place)? {
            Some(FieldValue::List(items)) => items.iter().any(is_code),
            Some(field) => is_code(&field),
            None => false,
        };
        if holds_code {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The contract's table, "Request to the provider".
fn default_meaning(status: u16) -> StatusMeaning {
    match status {
        200..=299 => StatusMeaning::Accepted,
        402 => StatusMeaning::Declined,
        401 | 403 | 404 | 405 | 407 => StatusMeaning::Misconfigured,
        408 => StatusMeaning::Unknown,
        409 => StatusMeaning::InProgress,
        429 => StatusMeaning::Throttled,
        503 => StatusMeaning::Unavailable,
        300..=499 => StatusMeaning::Review,
        // Every other 5xx, and numbers that no standard defines: the request may have been carried out.
        _ => StatusMeaning::Unknown,
    }
}

fn server_error(status: u16, retry_after: Option<Duration>) -> Outcome {
    Outcome::Unknown { cause: UnknownCause::ServerError(status), retry_after }
}

/// A success that cannot be read is no success: a gateway's HTML page answers 200 too.
fn accepted(reading: &ProviderResponse, meanings: &ResponseRules) -> Result<Outcome, AmbiguousValue> {
    if let ResponseBody::Incomplete(cause) = reading.body {
        return Ok(Outcome::Unknown { cause, retry_after: None });
    }
    Ok(match reading.json().filter(ResponseJson::is_object) {
        Some(body) => Outcome::Accepted { reference: reference(&body, &meanings.reference_pointer)? },
        None => Outcome::Unknown { cause: UnknownCause::UnreadableResponse(reading.status), retry_after: None },
    })
}

/// What stands at the pointer, if it can be a reference.
pub(super) fn reference(body: &ResponseJson, pointer: &str) -> Result<Option<String>, AmbiguousValue> {
    let Some(FieldValue::Text(text) | FieldValue::Number(text)) = body.field(pointer)? else { return Ok(None) };
    let fits = !text.is_empty() && text.chars().count() <= REFERENCE_CHARS_MAX;
    Ok((fits && !text.chars().any(char::is_control)).then_some(text))
}

fn reason(reading: &ProviderResponse) -> String {
    let status = reading.status;
    match reading.json().as_ref().and_then(error_token) {
        Some(token) => format!("provider answered {status}: {token}"),
        None => format!("provider answered {status}"),
    }
}

/// The first of `code`, `error`, `type` that is a short token, at the top or inside an `error` object.
fn error_token(body: &ResponseJson) -> Option<String> {
    let text = |place| match body.field(place) {
        Ok(Some(FieldValue::Text(text))) if is_token(&text) => Some(text),
        _ => None,
    };
    CODE_POINTERS.into_iter().find_map(text)
}

pub(super) fn is_token(text: &str) -> bool {
    let safe = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
    let digits = text.bytes().filter(u8::is_ascii_digit).count();
    (1..=TOKEN_CHARS_MAX).contains(&text.len())
        && text.bytes().all(safe)
        && digits <= TOKEN_DIGITS_MAX
        && !looks_secret(text)
}

#[cfg(test)]
#[path = "classify_tests.rs"]
mod tests;
