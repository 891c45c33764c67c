//! Parser of a charge request, as JSON or as a form, for the simulated provider.
//!
//! It rejects what a payment provider would reject: a missing or negative amount, or a missing currency.

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

/// A request to charge, as received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChargeRequest {
    /// Id of the payment: the body's `id`, or the idempotency key if the body has none.
    pub payment: String,
    pub key: Option<String>,
    pub amount: i64,
    pub currency: String,
    pub account: Option<String>,
    /// SHA-256 of the body as received.
    pub body_hash: [u8; 32],
}

#[derive(Deserialize)]
struct ChargeFields {
    id: Option<String>,
    amount: Option<i64>,
    currency: Option<String>,
    account: Option<String>,
}

impl ChargeRequest {
    /// Parses a body; a form when `is_form`, else JSON.
    pub fn parse(key: Option<&str>, is_form: bool, body: &[u8]) -> Result<Self, &'static str> {
        let fields = if is_form { form_fields(body)? } else { serde_json::from_slice(body).map_err(|_| "bad_body")? };
        let payment = fields.id.or_else(|| key.map(str::to_owned)).ok_or("missing_id")?;
        Ok(Self {
            payment,
            key: key.map(str::to_owned),
            amount: fields.amount.filter(|amount| *amount > 0).ok_or("bad_amount")?,
            currency: fields.currency.ok_or("missing_currency")?,
            account: fields.account,
            body_hash: Sha256::digest(body).into(),
        })
    }
}

fn form_fields(body: &[u8]) -> Result<ChargeFields, &'static str> {
    let field = |wanted: &str| {
        url::form_urlencoded::parse(body).find(|(name, _)| name == wanted).map(|(_, value)| value.into_owned())
    };
    let amount = field("amount").map(|text| text.parse()).transpose().map_err(|_| "bad_amount")?;
    Ok(ChargeFields { id: field("id"), amount, currency: field("currency"), account: field("account") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_and_form_are_read_invalid_ones_rejected() {
        let json = br#"{"id":"p1","amount":5,"currency":"EUR","payload":{"x":1}}"#;
        let read = ChargeRequest::parse(Some("k1"), false, json).unwrap();
        assert_eq!((read.payment.as_str(), read.amount, read.currency.as_str()), ("p1", 5, "EUR"));
        let form = ChargeRequest::parse(Some("k1"), true, b"amount=5&currency=EUR&account=a%201").unwrap();
        assert_eq!((form.payment.as_str(), form.account.as_deref()), ("k1", Some("a 1")));
        for (body, code) in [
            (r#"{"amount":5,"currency":"EUR"}"#, "missing_id"),
            (r#"{"id":"p1","currency":"EUR"}"#, "bad_amount"),
            (r#"{"id":"p1","amount":-5,"currency":"EUR"}"#, "bad_amount"),
            (r#"{"id":"p1","amount":5}"#, "missing_currency"),
            (r#"{"id":"p1","amount":1.5,"currency":"EUR"}"#, "bad_body"),
            ("", "bad_body"),
        ] {
            assert_eq!(ChargeRequest::parse(None, false, body.as_bytes()), Err(code), "{body}");
        }
    }
}
