//! The sum in a response against the sum that was sent, both as the provider counts.
//!
//! Another sum is never a success in full and never sent again: the provider may have charged it. If the row says
//! `partial = "accept"`, a smaller sum is a success in part. An amount that is missing or cannot be read decides nothing.

use super::response_json::{AmbiguousValue, FieldValue, ResponseJson};
use crate::domain::amount::{Decimal, decimal_text, iso_decimals, rescale};
use crate::domain::outcome::AMOUNT_DIFFERS;
use crate::domain::response::{AmountUnit, PaymentIdentity, SumFields};

/// Result of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SumComparison {
    /// As sent, or nothing is compared.
    Same,
    /// A smaller sum, which the row accepts, in ISO 4217 minor units.
    Part(i64),
    /// Another sum: the reason for an operator.
    Differs(String),
    /// The field that is missing or cannot be read.
    Unreadable(&'static str),
}

/// Compares the sum at the row's places with the payment's.
pub fn compare_sum(
    body: Option<&ResponseJson<'_>>,
    fields: &SumFields,
    payment: &PaymentIdentity,
) -> Result<SumComparison, AmbiguousValue> {
    let at = |pointer: &String| body.map(|body| body.field(pointer)).transpose().map(Option::flatten);
    let ours = payment.sum.units;
    let amount = match &fields.amount {
        None => ours,
        Some(pointer) => match at(pointer)?.and_then(|field| units(&field, fields.unit, payment.sum.decimals)) {
            Some(amount) => amount,
            None => return Ok(SumComparison::Unreadable(unit_words(fields.unit))),
        },
    };
    let currency = match &fields.currency {
        None => payment.currency.clone(),
        Some(pointer) => match at(pointer)? {
            Some(FieldValue::Text(code)) if code.len() == 3 && code.is_ascii() => code.to_uppercase().into(),
            _ => return Ok(SumComparison::Unreadable("currency")),
        },
    };
    let is_ours = currency == payment.currency;
    if is_ours && amount == ours {
        return Ok(SumComparison::Same);
    }
    let is_part = fields.accepts_partial && is_ours && (1..ours).contains(&amount);
    let part = is_part.then(|| rescale(amount, payment.sum.decimals, iso_decimals(&currency))).flatten();
    Ok(part.map_or_else(|| SumComparison::Differs(difference(amount, &currency, payment)), SumComparison::Part))
}

fn unit_words(unit: AmountUnit) -> &'static str {
    match unit {
        AmountUnit::Minor => "amount in minor units",
        AmountUnit::Decimal => "amount in units of its currency",
    }
}

/// Reason of a payment that the provider has with another sum.
fn difference(amount: i64, currency: &str, payment: &PaymentIdentity) -> String {
    let text = |units| decimal_text(units, payment.sum.decimals);
    format!(
        "{AMOUNT_DIFFERS}: the provider has {} {currency} for this payment, and {} {} were sent: check the payment at the \
         provider",
        text(amount),
        text(payment.sum.units),
        payment.currency
    )
}

/// Reason of a payment whose `echo` repeats another amount.
pub fn other_echo() -> String {
    format!("{AMOUNT_DIFFERS}: the response repeats another amount than was sent: check the payment at the provider")
}

fn units(field: &FieldValue, unit: AmountUnit, decimals: u8) -> Option<i64> {
    match (unit, field) {
        (AmountUnit::Minor, field) => minor_units(field),
        (AmountUnit::Decimal, FieldValue::Number(text) | FieldValue::Text(text)) => {
            Decimal::new(text.trim())?.units(decimals)
        }
        (AmountUnit::Decimal, _) => None,
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::job::Job;
    use crate::domain::job::tests::job;
    use crate::domain::sum::SentSum;

    fn compared(fields: &SumFields, currency: &str, sum: SentSum, body: &str) -> SumComparison {
        let payment = PaymentIdentity::new(&Job { currency: currency.into(), ..job("pay-1") }, sum);
        let body = ResponseJson::parse(body.as_bytes(), None);
        compare_sum(body.as_ref(), fields, &payment).unwrap()
    }

    fn fields(unit: AmountUnit, accepts_partial: bool) -> SumFields {
        let pointer = |text: &str| Some(text.to_owned());
        SumFields { amount: pointer("/a"), currency: pointer("/c"), unit, accepts_partial }
    }

    const EURO: SentSum = SentSum { units: 1_299, decimals: 2 };

    #[test]
    fn other_sum_differs_unless_a_part_is_accepted() {
        let differs = |theirs: &str| {
            SumComparison::Differs(format!(
                "amount_differs: the provider has {theirs} for this payment, and 12.99 EUR were sent: check the payment \
                 at the provider"
            ))
        };
        let minor = |accepts| fields(AmountUnit::Minor, accepts);
        for (body, accepts, expected) in [
            (r#"{"a":1299,"c":"eur"}"#, false, SumComparison::Same),
            (r#"{"a":500,"c":"EUR"}"#, false, differs("5.00 EUR")),
            (r#"{"a":500,"c":"EUR"}"#, true, SumComparison::Part(500)),
            (r#"{"a":0,"c":"EUR"}"#, true, differs("0.00 EUR")),
            (r#"{"a":1300,"c":"EUR"}"#, true, differs("13.00 EUR")),
            (r#"{"a":-1,"c":"EUR"}"#, true, differs("-0.01 EUR")),
            (r#"{"a":500,"c":"USD"}"#, true, differs("5.00 USD")),
            (r#"{"a":12.99,"c":"EUR"}"#, true, SumComparison::Unreadable("amount in minor units")),
            (r#"{"a":1299}"#, true, SumComparison::Unreadable("currency")),
            ("{}", true, SumComparison::Unreadable("amount in minor units")),
            ("<html>", true, SumComparison::Unreadable("amount in minor units")),
        ] {
            assert_eq!(compared(&minor(accepts), "EUR", EURO, body), expected, "{body} {accepts}");
        }
        assert_eq!(compared(&SumFields::default(), "EUR", EURO, "<html>"), SumComparison::Same);
    }

    #[test]
    fn decimal_amounts_have_the_providers_decimals() {
        let decimal = fields(AmountUnit::Decimal, true);
        for body in [r#"{"a":"12.99","c":"EUR"}"#, r#"{"a":12.990,"c":"EUR"}"#, r#"{"a":1.299e1,"c":"EUR"}"#] {
            assert_eq!(compared(&decimal, "EUR", EURO, body), SumComparison::Same, "{body}");
        }
        let unreadable = SumComparison::Unreadable("amount in units of its currency");
        for body in [r#"{"a":"12,99","c":"EUR"}"#, r#"{"a":12.999,"c":"EUR"}"#, r#"{"a":null,"c":"EUR"}"#] {
            assert_eq!(compared(&decimal, "EUR", EURO, body), unreadable, "{body}");
        }
        // 500 ISK are 50000 at this provider: a part is told in ISO 4217 units, and half a krona in none.
        let isk = SentSum { units: 50_000, decimals: 2 };
        assert_eq!(compared(&decimal, "ISK", isk, r#"{"a":"300.00","c":"ISK"}"#), SumComparison::Part(300));
        let half = compared(&decimal, "ISK", isk, r#"{"a":"300.50","c":"ISK"}"#);
        assert!(matches!(&half, SumComparison::Differs(reason) if reason.contains("300.50 ISK")), "{half:?}");
    }
}
