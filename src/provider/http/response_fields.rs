//! Fields of a response that repeat its payment.
//!
//! The row's `echo` names the fields that repeat the payment. A field with another value makes the outcome unknown: the
//! response is about another payment. A missing field does so only if the response would finish the payment, because
//! most refusals repeat no field.

use super::classify::ProviderResponse;
use super::response_json::{AmbiguousValue, FieldValue, ResponseJson};
use super::sums::minor_units;
use crate::domain::outcome::UnknownCause;
use crate::domain::response::{Echo, EchoField, EchoedField, PaymentIdentity, ResponseLocation};

/// Result of a comparison, from best to worst. The worst of several fields counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum EchoComparison {
    Same,
    Missing,
    /// The response repeats another amount, and all other fields as far as it has them.
    OtherAmount,
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
        Ok(EchoComparison::Missing | EchoComparison::OtherAmount | EchoComparison::Differs) => {
            Some(UnknownCause::NotEchoed(reading.status))
        }
        Err(AmbiguousValue) => Some(UnknownCause::UnreadableResponse(reading.status)),
    }
}

/// Whether a response repeats this payment with another amount than was sent.
pub fn has_other_amount(reading: &ProviderResponse, echo: &Echo, payment: &PaymentIdentity) -> bool {
    matches!(compare(reading, echo, payment), Ok(EchoComparison::OtherAmount))
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
    body: Option<&ResponseJson<'_>>,
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
                // Text that is no amount says nothing about a sum.
                let is_amount = echoed.field == EchoField::Amount && minor_units(value).is_some();
                return Ok(if is_amount { EchoComparison::OtherAmount } else { EchoComparison::Differs });
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
        EchoField::Id => payment.id.as_str(),
        EchoField::IdempotencyKey => payment.idempotency_key.as_str(),
        EchoField::Reference => match &payment.reference {
            Some(reference) => reference,
            None => return false,
        },
        EchoField::Amount => return minor_units(value) == Some(payment.sum.units),
    };
    // A number is compared by its digits: `1e3` is not the id 1000.
    matches!(value, FieldValue::Text(text) | FieldValue::Number(text) if text == expected)
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderMap;

    use super::super::classify::ResponseBody;
    use super::*;
    use crate::domain::job::Job;
    use crate::domain::job::tests::job;
    use crate::domain::sum::SentSum;

    const SUM: SentSum = SentSum { units: 1_299, decimals: 2 };

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
        let job = Job { reference: Some("no. 7".into()), ..job("pay-1") };
        compare(&reading(200, headers, body), echo, &PaymentIdentity::new(&job, SUM)).unwrap()
    }

    #[test]
    fn each_field_must_match_the_payment() {
        use EchoComparison::{Differs, Missing, OtherAmount, Same};
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
        for (field, right, wrong, result) in [
            (EchoField::IdempotencyKey, r#""pay-1""#, r#""pay-2""#, Differs),
            (EchoField::Reference, r#""no. 7""#, r#""no. 8""#, Differs),
            (EchoField::Amount, "1299", "1300", OtherAmount),
            (EchoField::Amount, "1299.00", "12.99", Differs),
            (EchoField::Amount, r#""1299""#, r#""12.99""#, Differs),
        ] {
            let echo = echo(&[(field, &["/x"])]);
            assert_eq!(compare_with(&echo, &[], &format!(r#"{{"x":{right}}}"#)), Same, "{field:?} {right}");
            assert_eq!(compare_with(&echo, &[], &format!(r#"{{"x":{wrong}}}"#)), result, "{field:?} {wrong}");
        }
        let both = echo(&[(EchoField::Id, &["/id"]), (EchoField::Amount, &["/amount"])]);
        assert_eq!(compare_with(&both, &[], r#"{"id":"pay-1","amount":1299}"#), Same);
        assert_eq!(compare_with(&both, &[], r#"{"id":"pay-1"}"#), Missing);
        assert_eq!(compare_with(&both, &[], r#"{"id":"pay-1","amount":1}"#), OtherAmount);
        assert_eq!(compare_with(&both, &[], r#"{"amount":1}"#), OtherAmount);
        assert_eq!(compare_with(&both, &[], r#"{"id":"pay-2","amount":1}"#), Differs, "another payment");
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
        let (echo, payment) = (echo(&[(EchoField::Id, &["/id"])]), PaymentIdentity::new(&job("pay-1"), SUM));
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
        let (echo, payment) = (echo(&[(EchoField::Reference, &["/r"])]), PaymentIdentity::new(&job("pay-1"), SUM));
        for body in ["{}", r#"{"r":null}"#, r#"{"r":""}"#, r#"{"r":"no. 7"}"#] {
            assert!(check_echo(&reading(200, &[], body), &echo, &payment, true).is_some(), "{body}");
        }
    }
}
