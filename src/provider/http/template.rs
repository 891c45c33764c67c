//! A provider's own request body: JSON with `${…}` places that a job's fields fill.
//!
//! Refuses logic: no conditions, no loops. Values of the payload go in as the producer wrote them, digit for digit;
//! they are never parsed into a number and printed again.

use std::collections::BTreeMap;

use iso_currency::Currency;
use serde_json::Value;
use serde_json::value::RawValue;

use super::placeholder::{Part, split};
use crate::domain::decimal::Decimal;
use crate::domain::job::Job;

/// Decimal digits that a number with fraction or exponent surely keeps in a row, which is read as binary floats.
const EXACT_DIGITS: usize = 15;

/// A field of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Id,
    Amount,
    /// In units of the currency, as text with all of its decimals.
    AmountDecimal,
    Currency,
    Account,
    Reference,
    IdempotencyKey,
    /// Path into the payload, empty for all of it; array elements by their index.
    Payload(Vec<String>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Place(Place),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    /// JSON text that never changes.
    Fixed(String),
    /// Exactly one place: keeps its type, and drops its member when absent.
    Whole(Place),
    /// Text with places in it; an absent one is empty.
    Mixed(Vec<Piece>),
    List(Vec<Node>),
    Object(Vec<(String, Node)>),
}

/// A template, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template(Node);

impl Template {
    /// # Errors
    /// When the text is not a JSON object or names a place that does not exist.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
        if !value.is_object() {
            return Err("must be a JSON object".to_owned());
        }
        compile(value).map(Self)
    }

    /// The body for this job, as JSON text.
    pub(super) fn render(&self, job: &Job) -> String {
        render(&self.0, job).unwrap_or_default()
    }
}

fn compile(value: Value) -> Result<Node, String> {
    Ok(match value {
        Value::Object(members) => Node::Object(
            members.into_iter().map(|(name, value)| Ok((name, compile(value)?))).collect::<Result<_, String>>()?,
        ),
        Value::Array(items) => Node::List(items.into_iter().map(compile).collect::<Result<_, _>>()?),
        Value::String(text) => {
            let mut pieces = split(&text)?.into_iter().map(piece).collect::<Result<Vec<_>, _>>()?;
            match (pieces.pop(), pieces.is_empty()) {
                (Some(Piece::Place(place)), true) => Node::Whole(place),
                (last, _) => {
                    pieces.extend(last);
                    Node::Mixed(pieces)
                }
            }
        }
        Value::Number(number) if number.is_f64() && significant_digits(&number.to_string()) > EXACT_DIGITS => {
            return Err(format!("a number has more than {EXACT_DIGITS} digits and was rounded: write it as text"));
        }
        other => Node::Fixed(other.to_string()),
    })
}

/// Digits between the first and the last that is not zero.
fn significant_digits(number: &str) -> usize {
    Decimal::new(number).map_or(0, |decimal| decimal.digits.len())
}

fn piece(part: Part) -> Result<Piece, String> {
    let name = match part {
        Part::Text(text) => return Ok(Piece::Text(text)),
        Part::Place(name) => name,
    };
    Ok(Piece::Place(match name.as_str() {
        "id" => Place::Id,
        "amount" => Place::Amount,
        "amount_decimal" => Place::AmountDecimal,
        "currency" => Place::Currency,
        "account" => Place::Account,
        "reference" => Place::Reference,
        "idempotency_key" => Place::IdempotencyKey,
        "payload" => Place::Payload(Vec::new()),
        other => match other.strip_prefix("payload.") {
            Some(path) if path.split('.').all(|step| !step.is_empty()) => {
                Place::Payload(path.split('.').map(str::to_owned).collect())
            }
            _ => {
                return Err(format!(
                    "`${{{other}}}` is not a place: use id, amount, amount_decimal, currency, account, reference, \
                     idempotency_key or payload.x.y"
                ));
            }
        },
    }))
}

/// JSON text, or nothing when the node is a place that this job leaves empty.
fn render(node: &Node, job: &Job) -> Option<String> {
    Some(match node {
        Node::Fixed(text) => text.clone(),
        Node::Whole(place) => return value_of(place, job),
        Node::Mixed(pieces) => quoted(&pieces.iter().map(|piece| text_of(piece, job)).collect::<String>()),
        Node::List(items) => {
            let items: Vec<String> = items.iter().filter_map(|item| render(item, job)).collect();
            format!("[{}]", items.join(","))
        }
        Node::Object(members) => {
            let members: Vec<String> = members
                .iter()
                .filter_map(|(name, node)| Some(format!("{}:{}", quoted(name), render(node, job)?)))
                .collect();
            format!("{{{}}}", members.join(","))
        }
    })
}

/// The place's value as JSON text.
fn value_of(place: &Place, job: &Job) -> Option<String> {
    match place {
        Place::Id => Some(quoted(job.id.as_str())),
        Place::Amount => Some(job.amount.to_string()),
        Place::AmountDecimal => Some(quoted(&in_units(job.amount, &job.currency))),
        Place::Currency => Some(quoted(&job.currency)),
        Place::Account => job.account.as_ref().map(|account| quoted(account.as_str())),
        Place::Reference => job.reference.as_deref().map(quoted),
        Place::IdempotencyKey => Some(quoted(job.effective_key().as_str())),
        Place::Payload(path) => pick(job.payload.as_deref()?, path),
    }
}

/// 1299 EUR cents are `12.99`, 1299 JPY `1299`. What has no decimals of its own in ISO 4217 has none here.
fn in_units(minor: i64, currency: &str) -> String {
    let decimals = Currency::from_code(currency).and_then(Currency::exponent).map_or(0, usize::from);
    let digits = format!("{minor:0>width$}", width = decimals + 1);
    match digits.split_at(digits.len() - decimals) {
        (units, "") => units.to_owned(),
        (units, rest) => format!("{units}.{rest}"),
    }
}

/// What stands in running text: strings without quotes, `null` and absent values as nothing.
fn text_of(piece: &Piece, job: &Job) -> String {
    let place = match piece {
        Piece::Text(text) => return text.clone(),
        Piece::Place(place) => place,
    };
    let json = value_of(place, job).filter(|json| json != "null").unwrap_or_default();
    serde_json::from_str::<String>(&json).unwrap_or(json)
}

/// Follows the path through raw JSON without touching the value at its end.
fn pick(json: &str, path: &[String]) -> Option<String> {
    let mut json = json;
    for step in path {
        json = match json.trim_start().bytes().next()? {
            b'{' => serde_json::from_str::<BTreeMap<String, &RawValue>>(json).ok()?.get(step)?.get(),
            b'[' => serde_json::from_str::<Vec<&RawValue>>(json).ok()?.get(step.parse::<usize>().ok()?)?.get(),
            _ => return None,
        };
    }
    Some(json.trim().to_owned())
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;

    fn render(template: &str, job: &Job) -> String {
        Template::parse(template).unwrap().render(job)
    }

    #[test]
    fn a_lone_place_keeps_its_type_and_an_absent_one_drops_its_member() {
        let full = Job {
            account: Some(crate::domain::job::Token::new("acct_1").unwrap()),
            reference: Some("say \"hi\"\n".to_owned()),
            payload: Some(
                r#"{ "card":{"token":"tok_1","year":2031,"big":12345678901234567890.10, "no":null},"list":[1,"b"]}"#
                    .to_owned(),
            ),
            ..job("pay-1")
        };
        let table = [
            (r#"{"x":"${id}"}"#, r#"{"x":"pay-1"}"#),
            (r#"{"x":"${amount}"}"#, r#"{"x":1299}"#),
            (r#"{"x":"${currency}","y":"${idempotency_key}"}"#, r#"{"x":"EUR","y":"pay-1"}"#),
            (r#"{"x":"${reference}"}"#, r#"{"x":"say \"hi\"\n"}"#),
            (r#"{"x":"${payload.card.token}"}"#, r#"{"x":"tok_1"}"#),
            (r#"{"x":"${payload.card.big}"}"#, r#"{"x":12345678901234567890.10}"#),
            (r#"{"x":"${payload.card.no}"}"#, r#"{"x":null}"#),
            (r#"{"x":"${payload.list.1}"}"#, r#"{"x":"b"}"#),
            (r#"{"x":"${payload.list}"}"#, r#"{"x":[1,"b"]}"#),
            (r#"{"x":"${payload.card.none}","y":1}"#, r#"{"y":1}"#),
            (r#"{"x":["${payload.none}",true,"${account}"]}"#, r#"{"x":[true,"acct_1"]}"#),
            (r#"{"x":"${amount} ${currency} for ${reference}"}"#, r#"{"x":"1299 EUR for say \"hi\"\n"}"#),
            (r#"{"x":"y${payload.card.year}${payload.card.no}${payload.none}"}"#, r#"{"x":"y2031"}"#),
            (r#"{"x":"plain","n":1.50,"o":{}}"#, r#"{"n":1.5,"o":{},"x":"plain"}"#),
            (r#"{"x":""}"#, r#"{"x":""}"#),
        ];
        for (template, body) in table {
            assert_eq!(render(template, &full), body, "{template}");
        }
        let bare = job("pay-2");
        let all = r#"{"a":"${account}","r":"${reference}","p":"${payload}","q":"${payload.x}","i":"${id}"}"#;
        assert_eq!(render(all, &bare), r#"{"i":"pay-2"}"#);
    }

    #[test]
    fn an_amount_in_units_has_all_decimals_of_its_currency() {
        let table = [
            (1_299, "EUR", "12.99"),
            (5, "EUR", "0.05"),
            (100, "EUR", "1.00"),
            (1_299, "JPY", "1299"),
            (1, "JPY", "1"),
            (1_299, "KWD", "1.299"),
            (7, "KWD", "0.007"),
            (i64::MAX, "EUR", "92233720368547758.07"),
        ];
        for (amount, currency, units) in table {
            let job = Job { amount, currency: currency.to_owned(), ..job("pay-1") };
            assert_eq!(render(r#"{"x":"${amount_decimal}"}"#, &job), format!(r#"{{"x":"{units}"}}"#));
        }
    }

    #[test]
    fn values_cannot_break_out_of_their_place() {
        let sly = Job { reference: Some(r#"","amount":1,"x":"${id}"#.to_owned()), ..job("pay-1") };
        let body: Value =
            serde_json::from_str(&render(r#"{"r":"ref ${reference}","s":"${reference}"}"#, &sly)).unwrap();
        assert_eq!(body["s"], sly.reference.clone().unwrap());
        assert_eq!(body["r"], format!("ref {}", sly.reference.unwrap()));
        assert_eq!(body.as_object().unwrap().len(), 2);
    }

    #[test]
    fn bad_templates_are_refused() {
        let long = [r#"{"x":1.2345678901234567}"#, r#"{"x":20250416112233445566778801}"#];
        for bad in long.into_iter().chain([
            "",
            "[]",
            "\"${id}\"",
            "{",
            r#"{"x":"${nope}"}"#,
            r#"{"x":"${payload.}"}"#,
            r#"{"x":"${id"}"#,
        ]) {
            assert!(Template::parse(bad).is_err(), "{bad}");
        }
    }
}
