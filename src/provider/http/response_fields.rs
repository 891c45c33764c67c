//! What a response says of itself: the payment that it is about, and the wait that it names.
//!
//! The row's `echo` names the fields that repeat the payment. A field with another value makes the outcome unknown: the
//! response is about another payment. A missing field does so only if the response would finish the payment, because
//! most refusals repeat no field.
//!
//! `Retry-After` is seconds, or an HTTP date, which is compared with the response's own `Date`. The row's field for the
//! wait is a number in a header or in the body. The row gives its unit; it is never guessed from the size of the number.
//! A malformed value is ignored (<https://www.rfc-editor.org/rfc/rfc9110#section-10.2.3>).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use reqwest::header::{DATE, HeaderMap, HeaderValue, RETRY_AFTER};

use super::classify::ProviderResponse;
use super::response_json::{AmbiguousValue, FieldValue, ResponseJson};
use crate::amount::Decimal;
use crate::domain::outcome::UnknownCause;
use crate::domain::response::{Echo, EchoField, EchoedField, PaymentIdentity, ResponseLocation, WaitField, WaitUnit};

/// Result of a comparison, from best to worst. The worst of several fields counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum EchoComparison {
    Same,
    Missing,
    Differs,
}

/// Reason why a response does not count for this payment. `is_final`: the response would finish the payment.
pub fn check_echo(
    reading: &ProviderResponse,
    echo: &Echo,
    payment: &PaymentIdentity,
    is_final: bool,
) -> Option<UnknownCause> {
    let needed = is_final && !echo.exempt_statuses.contains(&reading.status);
    match compare(reading, echo, payment) {
        Ok(EchoComparison::Same) => None,
        Ok(EchoComparison::Missing) if !needed => None,
        Ok(EchoComparison::Missing | EchoComparison::Differs) => Some(UnknownCause::NotEchoed(reading.status)),
        Err(AmbiguousValue) => Some(UnknownCause::UnreadableResponse(reading.status)),
    }
}

/// Whether an answer repeats every field that the row's `echo` names, and there is one.
pub fn is_confirmed(reading: &ProviderResponse, echo: &Echo, payment: &PaymentIdentity) -> bool {
    !echo.fields.is_empty() && matches!(compare(reading, echo, payment), Ok(EchoComparison::Same))
}

fn compare(
    reading: &ProviderResponse,
    echo: &Echo,
    payment: &PaymentIdentity,
) -> Result<EchoComparison, AmbiguousValue> {
    let places = echo.fields.iter().flat_map(|field| &field.locations);
    let needs_body = places.into_iter().any(|place| matches!(place, ResponseLocation::Body(_)));
    let body = needs_body.then(|| reading.json()).flatten();
    let mut worst = EchoComparison::Same;
    for field in &echo.fields {
        worst = worst.max(compare_field(reading, body.as_ref(), field, payment)?);
    }
    Ok(worst)
}

/// Compares one field. It is the same if at least one place has the value, and no place has another.
fn compare_field(
    reading: &ProviderResponse,
    body: Option<&ResponseJson>,
    echoed: &EchoedField,
    payment: &PaymentIdentity,
) -> Result<EchoComparison, AmbiguousValue> {
    let mut found = EchoComparison::Missing;
    for place in &echoed.locations {
        let values = match place {
            ResponseLocation::Header(name) => header_values(reading, name),
            ResponseLocation::Body(pointer) => {
                body.map(|body| body.field(pointer)).transpose()?.flatten().into_iter().collect()
            }
        };
        for value in values.iter().filter(|value| **value != FieldValue::Null) {
            if !matches_payment(value, echoed.field, payment) {
                return Ok(EchoComparison::Differs);
            }
            found = EchoComparison::Same;
        }
    }
    Ok(found)
}

fn header_values(reading: &ProviderResponse, name: &str) -> Vec<FieldValue> {
    let values = reading.headers.get_all(name).iter();
    values.map(|value| FieldValue::Text(String::from_utf8_lossy(value.as_bytes()).trim().to_owned())).collect()
}

fn matches_payment(value: &FieldValue, field: EchoField, payment: &PaymentIdentity) -> bool {
    let expected = match field {
        EchoField::Id => &payment.id,
        EchoField::IdempotencyKey => &payment.idempotency_key,
        EchoField::Reference => match &payment.reference {
            Some(reference) => reference,
            None => return false,
        },
        EchoField::Amount => return minor_units(value) == Some(payment.amount),
    };
    // A number is compared by its digits: `1e3` is not the id 1000.
    matches!(value, FieldValue::Text(text) | FieldValue::Number(text) if text == expected)
}

/// Amount in minor units: a whole number in any notation, or digits as text. In text, a decimal point would rather mean
/// units of the currency, so it is not accepted.
pub fn minor_units(field: &FieldValue) -> Option<i64> {
    match field {
        FieldValue::Number(digits) => Decimal::new(digits)?.to_i64(),
        FieldValue::Text(text) => text.parse().ok(),
        _ => None,
    }
}

/// Longest wait that is returned. It keeps instants that are computed from it far from overflow; a policy may cap
/// lower.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(86_400);

/// The wait that a response names, from the time of the response. The longest of several counts; a past date is zero.
///
/// `now` replaces a missing `Date`. The provider's own clock is better for its own dates.
pub fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let response_time = response_date(headers, now);
    headers.get_all(RETRY_AFTER).iter().filter_map(|value| parse_wait(value, response_time)).max()
}

/// Time of the response by the provider's clock; `now` if it has no `Date`.
fn response_date(headers: &HeaderMap, now: SystemTime) -> SystemTime {
    headers.get(DATE).and_then(parse_date).unwrap_or(now)
}

fn parse_wait(value: &HeaderValue, response_time: SystemTime) -> Option<Duration> {
    let text = value.to_str().ok()?.trim();
    let seconds = text.strip_prefix('-').unwrap_or(text);
    if !seconds.is_empty() && seconds.bytes().all(|b| b.is_ascii_digit()) {
        if seconds.len() < text.len() {
            return Some(Duration::ZERO);
        }
        // More digits than fit still mean a very long wait.
        return Some(seconds.parse().map_or(RETRY_AFTER_MAX, Duration::from_secs).min(RETRY_AFTER_MAX));
    }
    let until = parse_date(value)?;
    Some(until.duration_since(response_time).unwrap_or_default().min(RETRY_AFTER_MAX))
}

fn parse_date(value: &HeaderValue) -> Option<SystemTime> {
    httpdate::parse_http_date(value.to_str().ok()?.trim()).ok()
}

/// The wait from the time of the response, at most [`RETRY_AFTER_MAX`]. The longest of several headers counts; a past
/// end is zero.
///
/// `now` replaces a missing `Date`. The provider's own clock is better for its own instants.
pub fn read_wait_field(reading: &ProviderResponse, wait: &WaitField, now: SystemTime) -> Option<Duration> {
    let number = match &wait.location {
        ResponseLocation::Header(name) => {
            let values = reading.headers.get_all(name.as_str());
            values.iter().filter_map(|value| parse_number(value.to_str().ok()?)).reduce(f64::max)
        }
        ResponseLocation::Body(pointer) => match reading.json()?.field(pointer) {
            Ok(Some(FieldValue::Number(digits))) => digits.parse().ok(),
            Ok(Some(FieldValue::Text(text))) => parse_number(&text),
            _ => None,
        },
    };
    let response_time_s =
        response_date(&reading.headers, now).duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let wait_s = number.map(|number| match wait.unit {
        WaitUnit::Seconds => number,
        WaitUnit::Milliseconds => number / 1_000.0,
        WaitUnit::EpochSeconds => number - response_time_s,
        WaitUnit::EpochMilliseconds => number / 1_000.0 - response_time_s,
    })?;
    Some(Duration::from_secs_f64(wait_s.clamp(0.0, RETRY_AFTER_MAX.as_secs_f64())))
}

/// Digits with an optional sign and fraction: no exponent, no `inf`, nothing after the number.
fn parse_number(text: &str) -> Option<f64> {
    let text = text.trim();
    let plain = text.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'-'));
    if plain { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::super::classify::ResponseBody;
    use super::*;
    use crate::domain::job::Job;
    use crate::domain::job::tests::job;

    fn echo(fields: &[(EchoField, &[&str])]) -> Echo {
        let place = |place: &&str| match place.starts_with('/') {
            true => ResponseLocation::Body((*place).to_owned()),
            false => ResponseLocation::Header((*place).to_owned()),
        };
        let field = |&(field, places): &(EchoField, &[&str])| EchoedField {
            field,
            locations: places.iter().map(place).collect(),
        };
        Echo { fields: fields.iter().map(field).collect(), exempt_statuses: [422].into() }
    }

    fn reading(status: u16, headers: &[(&'static str, &str)], body: &str) -> ProviderResponse {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        ProviderResponse { status, headers: map, body: ResponseBody::Whole(body.as_bytes().to_vec()) }
    }

    fn compare_with(echo: &Echo, headers: &[(&'static str, &str)], body: &str) -> EchoComparison {
        let job = Job { reference: Some("no. 7".to_owned()), ..job("pay-1") };
        compare(&reading(200, headers, body), echo, &PaymentIdentity::from(&job)).unwrap()
    }

    #[test]
    fn each_field_must_match_the_payment() {
        use EchoComparison::{Differs, Missing, Same};
        let id = echo(&[(EchoField::Id, &["/a/id", "/b/id"])]);
        for (body, wanted) in [
            (r#"{"a":{"id":"pay-1"}}"#, Same),
            (r#"{"b":{"id":"pay-1"}}"#, Same),
            (r#"{"a":{"id":"pay-1"},"b":{"id":null}}"#, Same),
            (r#"{"a":{"id":"pay-1"},"b":{"id":"pay-2"}}"#, Differs),
            (r#"{"a":{"id":"PAY-1"}}"#, Differs),
            (r#"{"a":{"id":["pay-1"]}}"#, Differs),
            (r#"{"a":{"id":""}}"#, Differs),
            (r#"{"a":{"id":null}}"#, Missing),
            (r#"{"id":"pay-1"}"#, Missing),
            ("<html>", Missing),
            ("", Missing),
        ] {
            assert_eq!(compare_with(&id, &[], body), wanted, "{body}");
        }
        for (field, right, wrong) in [
            (EchoField::IdempotencyKey, r#""pay-1""#, r#""pay-2""#),
            (EchoField::Reference, r#""no. 7""#, r#""no. 8""#),
            (EchoField::Amount, "1299", "1300"),
            (EchoField::Amount, "1299.00", "12.99"),
            (EchoField::Amount, r#""1299""#, r#""12.99""#),
        ] {
            let echo = echo(&[(field, &["/x"])]);
            assert_eq!(compare_with(&echo, &[], &format!(r#"{{"x":{right}}}"#)), Same, "{field:?} {right}");
            assert_eq!(compare_with(&echo, &[], &format!(r#"{{"x":{wrong}}}"#)), Differs, "{field:?} {wrong}");
        }
        let both = echo(&[(EchoField::Id, &["/id"]), (EchoField::Amount, &["/amount"])]);
        assert_eq!(compare_with(&both, &[], r#"{"id":"pay-1","amount":1299}"#), Same);
        assert_eq!(compare_with(&both, &[], r#"{"id":"pay-1"}"#), Missing);
        assert_eq!(compare_with(&both, &[], r#"{"id":"pay-1","amount":1}"#), Differs);
        assert_eq!(compare_with(&Echo::default(), &[], "<html>"), Same);
    }

    #[test]
    fn a_header_may_repeat_it() {
        let key = echo(&[(EchoField::IdempotencyKey, &["X-Key"])]);
        assert_eq!(compare_with(&key, &[("x-key", " pay-1")], ""), EchoComparison::Same);
        assert_eq!(compare_with(&key, &[("x-key", "pay-2")], ""), EchoComparison::Differs);
        assert_eq!(compare_with(&key, &[("x-key", "pay-1"), ("x-key", "pay-2")], ""), EchoComparison::Differs);
        assert_eq!(compare_with(&key, &[("x-other", "pay-1")], ""), EchoComparison::Missing);
        let amount = echo(&[(EchoField::Amount, &["X-Amount"])]);
        assert_eq!(compare_with(&amount, &[("x-amount", "1299")], ""), EchoComparison::Same);
    }

    #[test]
    fn missing_field_blocks_only_final_outcomes() {
        let (echo, payment) = (echo(&[(EchoField::Id, &["/id"])]), PaymentIdentity::from(&job("pay-1")));
        let doubt = |status, body: &str, is_final| check_echo(&reading(status, &[], body), &echo, &payment, is_final);
        let not_echoed = |status| Some(UnknownCause::NotEchoed(status));
        assert_eq!(doubt(200, r#"{"id":"pay-1"}"#, true), None);
        assert_eq!(doubt(200, "{}", true), not_echoed(200));
        assert_eq!(doubt(422, "{}", true), None, "the row says that this status repeats nothing");
        assert_eq!(doubt(429, "{}", false), None);
        for (status, is_final) in [(200, true), (422, true), (429, false)] {
            assert_eq!(doubt(status, r#"{"id":"pay-2"}"#, is_final), not_echoed(status));
            let twice = r#"{"id":"pay-1","id":"pay-2"}"#;
            assert_eq!(doubt(status, twice, is_final), Some(UnknownCause::UnreadableResponse(status)));
        }
    }

    /// A row that compares references should require them.
    #[test]
    fn missing_reference_never_matches() {
        let (echo, payment) = (echo(&[(EchoField::Reference, &["/r"])]), PaymentIdentity::from(&job("pay-1")));
        for body in ["{}", r#"{"r":null}"#, r#"{"r":""}"#, r#"{"r":"no. 7"}"#] {
            assert!(check_echo(&reading(200, &[], body), &echo, &payment, true).is_some(), "{body}");
        }
    }

    const DATE_TEXT: &str = "Sun, 06 Nov 1994 08:49:37 GMT";

    fn read(date: Option<&str>, values: &[&str]) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        if let Some(date) = date {
            headers.insert(DATE, date.parse().unwrap());
        }
        for value in values {
            headers.append(RETRY_AFTER, value.parse().unwrap());
        }
        retry_after(&headers, httpdate::parse_http_date(DATE_TEXT).unwrap() + Duration::from_secs(7))
    }

    #[test]
    fn both_forms_are_read_invalid_ones_ignored() {
        let seconds = |s| Some(Duration::from_secs(s));
        let table: [(Option<&str>, &[&str], Option<Duration>); 15] = [
            (None, &[], None),
            (None, &["0"], seconds(0)),
            (None, &[" 12 "], seconds(12)),
            (None, &["-5"], seconds(0)),
            (None, &["9999999999"], Some(RETRY_AFTER_MAX)),
            (None, &["99999999999999999999999"], Some(RETRY_AFTER_MAX)),
            (None, &["1.5"], None),
            (None, &["soon"], None),
            (None, &[""], None),
            (Some(DATE_TEXT), &["Sun, 06 Nov 1994 08:49:57 GMT"], seconds(20)),
            (None, &["Sun, 06 Nov 1994 08:49:57 GMT"], seconds(13)),
            (Some("garbage"), &["Sun, 06 Nov 1994 08:49:57 GMT"], seconds(13)),
            (Some(DATE_TEXT), &["Sun, 06 Nov 1994 08:49:00 GMT"], seconds(0)),
            (Some(DATE_TEXT), &["Sun, 06 Nov 2044 08:49:00 GMT"], Some(RETRY_AFTER_MAX)),
            (Some(DATE_TEXT), &["3", "soon", "Sun, 06 Nov 1994 08:49:57 GMT", "4"], seconds(20)),
        ];
        for (date, values, wait) in table {
            assert_eq!(read(date, values), wait, "{date:?} {values:?}");
        }
    }

    /// 1994-11-06 08:49:37.
    const MADE_AT_S: u64 = 784_111_777;

    fn read_field(
        date: Option<&'static str>,
        headers: &[&'static str],
        body: &str,
        place: ResponseLocation,
        unit: WaitUnit,
    ) -> Option<Duration> {
        let mut map = HeaderMap::new();
        if let Some(date) = date {
            map.insert(DATE, date.parse().unwrap());
        }
        for value in headers {
            map.append("X-Reset", value.parse().unwrap());
        }
        let reading =
            ProviderResponse { status: 429, headers: map, body: ResponseBody::Whole(body.as_bytes().to_vec()) };
        read_wait_field(&reading, &WaitField { location: place, unit }, UNIX_EPOCH + Duration::from_secs(MADE_AT_S - 7))
    }

    #[test]
    fn headers_are_read_in_the_configured_unit() {
        let ms = |ms| Some(Duration::from_millis(ms));
        let table: [(&[&'static str], WaitUnit, Option<Duration>); 17] = [
            (&["12"], WaitUnit::Seconds, ms(12_000)),
            (&[" 0.65 "], WaitUnit::Seconds, ms(650)),
            (&["3", "soon", "4"], WaitUnit::Seconds, ms(4_000)),
            (&["0"], WaitUnit::Seconds, ms(0)),
            (&["-5"], WaitUnit::Seconds, ms(0)),
            (&["1700000000"], WaitUnit::Seconds, Some(RETRY_AFTER_MAX)),
            (&["99999999999999999999999999"], WaitUnit::Milliseconds, Some(RETRY_AFTER_MAX)),
            (&["1500"], WaitUnit::Milliseconds, ms(1_500)),
            (&["784111807"], WaitUnit::EpochSeconds, ms(30_000)),
            (&["784111700"], WaitUnit::EpochSeconds, ms(0)),
            (&["784111777500"], WaitUnit::EpochMilliseconds, ms(500)),
            (&[], WaitUnit::Seconds, None),
            (&[""], WaitUnit::Seconds, None),
            (&["12;w=60"], WaitUnit::Seconds, None),
            (&["1e3"], WaitUnit::Seconds, None),
            (&["inf"], WaitUnit::Seconds, None),
            (&["1-2"], WaitUnit::Seconds, None),
        ];
        for (headers, unit, wait) in table {
            let read = read_field(Some(DATE_TEXT), headers, "", ResponseLocation::Header("x-reset".to_owned()), unit);
            assert_eq!(read, wait, "{headers:?} {unit:?}");
        }
        let place = ResponseLocation::Header("x-reset".to_owned());
        assert_eq!(read_field(None, &["784111777"], "", place, WaitUnit::EpochSeconds), ms(7_000), "by our own clock");
    }

    #[test]
    fn bodies_are_read_at_the_configured_pointer() {
        let ms = |ms| Some(Duration::from_millis(ms));
        let table = [
            (r#"{"error":{"retry_in":1500}}"#, ms(1_500)),
            (r#"{"error":{"retry_in":"1500"}}"#, ms(1_500)),
            (r#"{"error":{"retry_in":1500.5}}"#, Some(Duration::from_micros(1_500_500))),
            (r#"{"error":{"retry_in":-1}}"#, ms(0)),
            (r#"{"error":{"retry_in":1e300}}"#, Some(RETRY_AFTER_MAX)),
            (r#"{"error":{"retry_in":null}}"#, None),
            (r#"{"error":{"retry_in":{"ms":5}}}"#, None),
            (r#"{"retry_in":1500}"#, None),
            ("slow down", None),
            ("", None),
        ];
        for (body, wait) in table {
            let place = ResponseLocation::Body("/error/retry_in".to_owned());
            assert_eq!(read_field(None, &[], body, place, WaitUnit::Milliseconds), wait, "{body}");
        }
    }
}
