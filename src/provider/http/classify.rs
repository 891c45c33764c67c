//! Meaning of an HTTP response: status, headers and body in, [`Outcome`] out, by the default table and a row's
//! overrides.
//!
//! It is a pure function. An outcome has the status, a bounded reference and at most one short token, never the body.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use reqwest::header::{CONTENT_TYPE, HeaderMap};

use super::response_json::{AmbiguousValue, FieldValue, ResponseJson};
use super::waits::{read_wait_field, retry_after};
use crate::domain::outcome::{Outcome, UnknownCause};
use crate::domain::provider::Provider;
use crate::domain::response::{CodeCondition, HeaderCondition, ResponseLocation, StatusCase, StatusMeaning, WaitField};
use crate::domain::sensitive::secret::looks_secret;

/// Default JSON pointer to the provider's reference.
const REFERENCE_POINTER: &str = "/id";
/// Longest provider reference that is kept, in characters.
const REFERENCE_CHARS_MAX: usize = 255;
/// Longest error token that is kept, in characters.
const TOKEN_CHARS_MAX: usize = 48;
/// Most digits in a token that is kept. More could be a card or account number.
const TOKEN_DIGITS_MAX: usize = 6;

/// Usual JSON pointers to an error code, tried in this order.
const CODE_POINTERS: [&str; 5] = ["/code", "/error/code", "/error", "/type", "/error/type"];

/// Response body, as far as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResponseBody {
    /// Decoded.
    Whole(Vec<u8>),
    /// It is longer than the client reads, as sent or decoded.
    TooLarge,
    /// The head has more headers than the client reads, or is too long, so not even the headers are known.
    HeadTooLarge,
    /// It has a content coding that is not read, or contradicts its coding.
    Undecodable,
    /// It ended early, for this reason.
    Incomplete(UnknownCause),
    /// It is unclear which bytes are the response, for one of two reasons. The head may have a length and a transfer
    /// coding: by one of them another response begins within the body
    /// (<https://www.rfc-editor.org/rfc/rfc9112#section-6.3>). Or more bytes follow on a connection that was used
    /// before: one response may be a second one to an earlier request.
    Ambiguous,
}

/// Response of a provider, as far as it was read.
#[derive(Clone, Debug)]
pub struct ProviderResponse {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: ResponseBody,
}

impl ProviderResponse {
    /// The body, if it is JSON.
    pub(super) fn json(&self) -> Option<ResponseJson<'_>> {
        let content_type = self.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        match &self.body {
            ResponseBody::Whole(bytes) => ResponseJson::parse(bytes, content_type),
            _ => None,
        }
    }

    /// Why the response was not read to its end; `None`: it was. Part of a JSON text proves nothing.
    pub(super) fn unread_cause(&self) -> Option<UnknownCause> {
        match self.body {
            ResponseBody::Whole(_) => None,
            ResponseBody::TooLarge | ResponseBody::HeadTooLarge => Some(UnknownCause::ResponseTooLarge(self.status)),
            ResponseBody::Incomplete(cause) => Some(cause),
            ResponseBody::Undecodable | ResponseBody::Ambiguous => Some(UnknownCause::UnreadableResponse(self.status)),
        }
    }
}

/// Rules of one provider row for the meaning of responses, besides the default table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseRules {
    /// Cases per status; the first that fits applies. If none fits, the default table does.
    pub statuses: BTreeMap<u16, Vec<StatusCase>>,
    /// JSON pointer to the provider's reference. <https://www.rfc-editor.org/rfc/rfc6901>
    pub reference_pointer: String,
    /// Place of a wait besides `Retry-After`.
    pub wait_field: Option<WaitField>,
}

impl ResponseRules {
    pub fn from_provider(provider: &Provider) -> Self {
        let pointer = provider.request.reference_pointer.as_deref().unwrap_or(REFERENCE_POINTER);
        Self {
            statuses: provider.statuses.clone(),
            reference_pointer: pointer.to_owned(),
            wait_field: provider.request.wait.clone(),
        }
    }

    /// The wait in `Retry-After`, in the row's unit if it names one. `now` as for [`classify`].
    fn retry_after(&self, reading: &ProviderResponse, now: SystemTime) -> Option<Duration> {
        match &self.wait_field {
            Some(wait) if wait.location.is_retry_after() => read_wait_field(reading, wait, now),
            _ => retry_after(&reading.headers, now),
        }
    }

    /// The wait after a throttled request: the one about this response, or else the row's own header, which may be in
    /// every response because it says when a quota is renewed.
    pub(super) fn throttle_wait(&self, reading: &ProviderResponse, now: SystemTime) -> Option<Duration> {
        let own = self.own_wait(reading, now);
        let of_quota = || self.wait_field.as_ref().and_then(|wait| read_wait_field(reading, wait, now));
        own.filter(|wait| !wait.is_zero()).or_else(of_quota).or(own)
    }

    /// The wait that is about this response: `Retry-After`, or the row's field in the body. The longer one counts.
    pub(super) fn own_wait(&self, reading: &ProviderResponse, now: SystemTime) -> Option<Duration> {
        let from_body = match &self.wait_field {
            Some(wait) if matches!(wait.location, ResponseLocation::Body(_)) => read_wait_field(reading, wait, now),
            _ => None,
        };
        self.retry_after(reading, now).max(from_body)
    }
}

/// Outcome of a response. `now` replaces the `Date` of a response that has none. A response with two values where one
/// is needed leaves the outcome unknown. So does one that was not read to its end, unless its status alone says that the
/// request as such was refused.
pub fn classify(reading: &ProviderResponse, rules: &ResponseRules, now: SystemTime) -> Outcome {
    try_classify(reading, rules, now).unwrap_or_else(|AmbiguousValue| {
        let cause = reading.unread_cause().unwrap_or(UnknownCause::UnreadableResponse(reading.status));
        Outcome::Unknown { cause, retry_after: None }
    })
}

fn try_classify(reading: &ProviderResponse, rules: &ResponseRules, now: SystemTime) -> Result<Outcome, AmbiguousValue> {
    let status = reading.status;
    let from_row = row_meaning(reading, &rules.statuses)?;
    let meaning = from_row.unwrap_or_else(|| default_meaning(status));
    if reading.unread_cause().is_some() && !stands_alone(meaning) {
        return Err(AmbiguousValue);
    }
    Ok(match meaning {
        // If the row itself accepts a status, no body is needed: a 204 has none.
        StatusMeaning::Accepted if from_row.is_some() => Outcome::Accepted {
            reference: match reading.json() {
                Some(body) => reference(&body, &rules.reference_pointer)?,
                None => None,
            },
        },
        StatusMeaning::Accepted => accepted(reading, rules)?,
        StatusMeaning::Declined => Outcome::Declined { reason: reason(reading) },
        StatusMeaning::Misconfigured => Outcome::Misconfigured { status },
        StatusMeaning::Unknown => server_error(status, None),
        StatusMeaning::InProgress => Outcome::InProgress { retry_after: rules.own_wait(reading, now) },
        StatusMeaning::Throttled => Outcome::Throttled { retry_after: rules.throttle_wait(reading, now) },
        StatusMeaning::Busy => Outcome::Busy { retry_after: rules.own_wait(reading, now) },
        // A provider that is down is tried again before the end of an hour's quota.
        StatusMeaning::Unavailable => server_error(status, rules.own_wait(reading, now)),
        StatusMeaning::Review => Outcome::Rejected { reason: reason(reading) },
    })
}

/// Whether a status with this meaning decides without the rest of the response: it ends no payment.
fn stands_alone(meaning: StatusMeaning) -> bool {
    match meaning {
        StatusMeaning::Misconfigured | StatusMeaning::Throttled | StatusMeaning::Busy => true,
        StatusMeaning::Unknown | StatusMeaning::Unavailable => true,
        StatusMeaning::Accepted | StatusMeaning::Declined | StatusMeaning::InProgress | StatusMeaning::Review => false,
    }
}

/// Meaning by the first case of the row that fits the response.
///
/// # Errors
/// [`AmbiguousValue`] when it is unclear whether a case fits, or where the response ends.
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
        let needs_head = case.header.is_some() && reading.body == ResponseBody::HeadTooLarge;
        if needs_head || (case.code.is_some() && reading.unread_cause().is_some()) {
            return Err(AmbiguousValue);
        }
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

fn has_code(body: Option<&ResponseJson<'_>>, wanted: Option<&CodeCondition>) -> Result<bool, AmbiguousValue> {
    let Some(wanted) = wanted else { return Ok(true) };
    let Some(body) = body else { return Ok(false) };
    let is_code = |field: &FieldValue| match field {
        FieldValue::Text(_) | FieldValue::Number(_) => field.matches(&wanted.code),
        _ => false,
    };
    let pointers = wanted.pointer.as_ref().map_or(CODE_POINTERS.to_vec(), |pointer| vec![pointer.as_str()]);
    for pointer in pointers {
        let holds_code = match body.field(pointer)? {
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

/// Default meaning of each status, as documented in `docs/providers.md`.
fn default_meaning(status: u16) -> StatusMeaning {
    match status {
        200 | 201 => StatusMeaning::Accepted,
        202 | 409 => StatusMeaning::InProgress,
        402 => StatusMeaning::Declined,
        401 | 403 | 404 | 405 | 407 => StatusMeaning::Misconfigured,
        408 => StatusMeaning::Unknown,
        429 => StatusMeaning::Throttled,
        503 => StatusMeaning::Unavailable,
        300..=499 => StatusMeaning::Review,
        // Every other 2xx and 5xx, and numbers that no standard defines: the provider may have charged.
        _ => StatusMeaning::Unknown,
    }
}

fn server_error(status: u16, retry_after: Option<Duration>) -> Outcome {
    Outcome::Unknown { cause: UnknownCause::ServerError(status), retry_after }
}

/// Outcome of a 200 or 201. If its body cannot be read, the outcome is unknown: a gateway's HTML page may come with
/// 200 too.
fn accepted(reading: &ProviderResponse, rules: &ResponseRules) -> Result<Outcome, AmbiguousValue> {
    Ok(match reading.json().filter(ResponseJson::is_object) {
        Some(body) => Outcome::Accepted { reference: reference(&body, &rules.reference_pointer)? },
        None => Outcome::Unknown { cause: UnknownCause::UnreadableResponse(reading.status), retry_after: None },
    })
}

/// The value at the pointer, if it can be a reference.
pub(super) fn reference(body: &ResponseJson<'_>, pointer: &str) -> Result<Option<String>, AmbiguousValue> {
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

/// The first value at [`CODE_POINTERS`] that is a short token.
fn error_token(body: &ResponseJson<'_>) -> Option<String> {
    let text = |pointer| match body.field(pointer) {
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
