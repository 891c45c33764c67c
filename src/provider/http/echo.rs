//! Comparison of an answer with the payment that it should be about, by the fields that the row's `echo` names.
//!
//! A field with another value makes the outcome unknown, whatever the answer says: it is about another payment. A field that
//! is missing does so only where the answer would settle the payment, because most refusals repeat nothing.

use super::answer_json::{Ambiguous, AnswerJson, Field};
use super::classify::Reading;
use crate::domain::decimal::Decimal;
use crate::domain::echo::{Echo, EchoField, EchoedField, PaymentIdentity};
use crate::domain::outcome::UnknownCause;
use crate::domain::provider::AnswerPlace;

/// From the best to the worst: the worst of several counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Comparison {
    Same,
    Missing,
    Differs,
}

/// Why an answer does not count for this payment; `settles`: the payment would be finished by it.
pub(super) fn doubt(reading: &Reading, echo: &Echo, payment: &PaymentIdentity, settles: bool) -> Option<UnknownCause> {
    let needed = settles && !echo.except.contains(&reading.status);
    match compare(reading, echo, payment) {
        Ok(Comparison::Same) => None,
        Ok(Comparison::Missing) if !needed => None,
        Ok(Comparison::Missing | Comparison::Differs) => Some(UnknownCause::NotEchoed(reading.status)),
        Err(Ambiguous) => Some(UnknownCause::UnreadableAnswer(reading.status)),
    }
}

fn compare(reading: &Reading, echo: &Echo, payment: &PaymentIdentity) -> Result<Comparison, Ambiguous> {
    let places = echo.fields.iter().flat_map(|field| &field.places);
    let needs_body = places.into_iter().any(|place| matches!(place, AnswerPlace::Body(_)));
    let body = needs_body.then(|| reading.json()).flatten();
    let mut worst = Comparison::Same;
    for field in &echo.fields {
        worst = worst.max(compare_field(reading, body.as_ref(), field, payment)?);
    }
    Ok(worst)
}

/// The same value at one place at least, and another one nowhere.
fn compare_field(
    reading: &Reading,
    body: Option<&AnswerJson>,
    echoed: &EchoedField,
    payment: &PaymentIdentity,
) -> Result<Comparison, Ambiguous> {
    let mut found = Comparison::Missing;
    for place in &echoed.places {
        let values = match place {
            AnswerPlace::Header(name) => in_headers(reading, name),
            AnswerPlace::Body(pointer) => {
                body.map(|body| body.field(pointer)).transpose()?.flatten().into_iter().collect()
            }
        };
        for value in values.iter().filter(|value| **value != Field::Null) {
            if !is_same(value, echoed.field, payment) {
                return Ok(Comparison::Differs);
            }
            found = Comparison::Same;
        }
    }
    Ok(found)
}

fn in_headers(reading: &Reading, name: &str) -> Vec<Field> {
    let values = reading.headers.get_all(name).iter();
    values.map(|value| Field::Text(String::from_utf8_lossy(value.as_bytes()).trim().to_owned())).collect()
}

fn is_same(value: &Field, field: EchoField, payment: &PaymentIdentity) -> bool {
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
    matches!(value, Field::Text(text) | Field::Number(text) if text == expected)
}

/// A whole number in any notation, exactly; or its digits as text, where a point would rather mean units of the currency.
pub(super) fn minor_units(field: &Field) -> Option<i64> {
    match field {
        Field::Number(digits) => Decimal::new(digits)?.to_i64(),
        Field::Text(text) => text.parse().ok(),
        Field::Bool(_) | Field::Null | Field::List(_) | Field::Object | Field::Unreadable => None,
    }
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderMap;

    use super::super::classify::Body;
    use super::super::tests::job;
    use super::*;
    use crate::domain::job::Job;

    fn echo(fields: &[(EchoField, &[&str])]) -> Echo {
        let place = |place: &&str| match place.starts_with('/') {
            true => AnswerPlace::Body((*place).to_owned()),
            false => AnswerPlace::Header((*place).to_owned()),
        };
        let field =
            |&(field, places): &(EchoField, &[&str])| EchoedField { field, places: places.iter().map(place).collect() };
        Echo { fields: fields.iter().map(field).collect(), except: [422].into() }
    }

    fn reading(status: u16, headers: &[(&'static str, &str)], body: &str) -> Reading {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        Reading { status, headers: map, body: Body::Whole(body.as_bytes().to_vec()) }
    }

    fn compared(echo: &Echo, headers: &[(&'static str, &str)], body: &str) -> Comparison {
        let job = Job { reference: Some("no. 7".to_owned()), ..job("pay-1") };
        compare(&reading(200, headers, body), echo, &PaymentIdentity::from(&job)).unwrap()
    }

    #[test]
    fn each_field_must_be_the_payments_own() {
        use Comparison::{Differs, Missing, Same};
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
            assert_eq!(compared(&id, &[], body), wanted, "{body}");
        }
        for (field, right, wrong) in [
            (EchoField::IdempotencyKey, r#""pay-1""#, r#""pay-2""#),
            (EchoField::Reference, r#""no. 7""#, r#""no. 8""#),
            (EchoField::Amount, "1299", "1300"),
            (EchoField::Amount, "1299.00", "12.99"),
            (EchoField::Amount, r#""1299""#, r#""12.99""#),
        ] {
            let echo = echo(&[(field, &["/x"])]);
            assert_eq!(compared(&echo, &[], &format!(r#"{{"x":{right}}}"#)), Same, "{field:?} {right}");
            assert_eq!(compared(&echo, &[], &format!(r#"{{"x":{wrong}}}"#)), Differs, "{field:?} {wrong}");
        }
        let both = echo(&[(EchoField::Id, &["/id"]), (EchoField::Amount, &["/amount"])]);
        assert_eq!(compared(&both, &[], r#"{"id":"pay-1","amount":1299}"#), Same);
        assert_eq!(compared(&both, &[], r#"{"id":"pay-1"}"#), Missing);
        assert_eq!(compared(&both, &[], r#"{"id":"pay-1","amount":1}"#), Differs);
        assert_eq!(compared(&Echo::default(), &[], "<html>"), Same);
    }

    #[test]
    fn a_header_may_repeat_it() {
        let key = echo(&[(EchoField::IdempotencyKey, &["X-Key"])]);
        assert_eq!(compared(&key, &[("x-key", " pay-1")], ""), Comparison::Same);
        assert_eq!(compared(&key, &[("x-key", "pay-2")], ""), Comparison::Differs);
        assert_eq!(compared(&key, &[("x-key", "pay-1"), ("x-key", "pay-2")], ""), Comparison::Differs);
        assert_eq!(compared(&key, &[("x-other", "pay-1")], ""), Comparison::Missing);
        let amount = echo(&[(EchoField::Amount, &["X-Amount"])]);
        assert_eq!(compared(&amount, &[("x-amount", "1299")], ""), Comparison::Same);
    }

    #[test]
    fn what_is_missing_matters_to_what_settles_a_payment() {
        let (echo, payment) = (echo(&[(EchoField::Id, &["/id"])]), PaymentIdentity::from(&job("pay-1")));
        let doubt = |status, body: &str, settles| doubt(&reading(status, &[], body), &echo, &payment, settles);
        let not_echoed = |status| Some(UnknownCause::NotEchoed(status));
        assert_eq!(doubt(200, r#"{"id":"pay-1"}"#, true), None);
        assert_eq!(doubt(200, "{}", true), not_echoed(200));
        assert_eq!(doubt(422, "{}", true), None, "the row says that this status repeats nothing");
        assert_eq!(doubt(429, "{}", false), None);
        for (status, settles) in [(200, true), (422, true), (429, false)] {
            assert_eq!(doubt(status, r#"{"id":"pay-2"}"#, settles), not_echoed(status));
            let twice = r#"{"id":"pay-1","id":"pay-2"}"#;
            assert_eq!(doubt(status, twice, settles), Some(UnknownCause::UnreadableAnswer(status)));
        }
    }

    /// A row that compares references should require them.
    #[test]
    fn a_payment_without_a_reference_is_never_confirmed_by_it() {
        let (echo, payment) = (echo(&[(EchoField::Reference, &["/r"])]), PaymentIdentity::from(&job("pay-1")));
        for body in ["{}", r#"{"r":null}"#, r#"{"r":""}"#, r#"{"r":"no. 7"}"#] {
            assert!(doubt(&reading(200, &[], body), &echo, &payment, true).is_some(), "{body}");
        }
    }
}
