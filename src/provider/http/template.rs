//! A provider's own request body: JSON with `${…}` places that a job's fields fill.
//!
//! Refuses logic: no conditions, no loops. Values of the payload go in as the producer wrote them, digit for digit;
//! they are never parsed into a number and printed again.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;

use iso_currency::Currency;
use serde_json::Value;
use serde_json::value::RawValue;

use super::placeholder::{Part, split};
use crate::domain::decimal::Decimal;
use crate::domain::expansion::Bounded;
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

    /// Writes the body for this job, as JSON text.
    ///
    /// # Errors
    /// When it does not fit.
    pub(super) fn render(&self, job: &Job, out: &mut Bounded) -> io::Result<()> {
        render(&self.0, job, out)
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

/// What stands in a place.
enum Filling<'a> {
    Text(Cow<'a, str>),
    Json(Cow<'a, str>),
}

impl<'a> Filling<'a> {
    fn text(text: &'a str) -> Self {
        Self::Text(text.into())
    }

    fn write(&self, out: &mut Bounded) -> io::Result<()> {
        match self {
            Self::Text(text) => quote(text, out),
            Self::Json(json) => out.push(json),
        }
    }

    /// Within running text: strings without quotes, `null` as nothing.
    fn into_text(self) -> Cow<'a, str> {
        match self {
            Self::Text(text) => text,
            Self::Json(json) if json == "null" => Cow::Borrowed(""),
            Self::Json(json) => serde_json::from_str::<String>(&json).map_or(json, Cow::Owned),
        }
    }
}

/// What is written for a node.
enum Written<'a> {
    Filling(Filling<'a>),
    Node(&'a Node),
}

impl<'a> Written<'a> {
    /// `None` for a place alone that this job leaves empty.
    fn of(node: &'a Node, job: &'a Job) -> Option<Self> {
        match node {
            Node::Whole(place) => filling(place, job).map(Self::Filling),
            _ => Some(Self::Node(node)),
        }
    }

    fn write(&self, job: &Job, out: &mut Bounded) -> io::Result<()> {
        match self {
            Self::Filling(filling) => filling.write(out),
            Self::Node(node) => render(node, job, out),
        }
    }
}

fn render(node: &Node, job: &Job, out: &mut Bounded) -> io::Result<()> {
    match node {
        Node::Fixed(text) => out.push(text),
        Node::Whole(place) => filling(place, job).map_or(Ok(()), |value| value.write(out)),
        Node::Mixed(pieces) => {
            out.push("\"")?;
            for piece in pieces {
                match piece {
                    Piece::Text(text) => escape(text, out)?,
                    Piece::Place(place) => escape(&text_of(place, job), out)?,
                }
            }
            out.push("\"")
        }
        Node::List(items) => {
            out.push("[")?;
            for (index, item) in items.iter().filter_map(|item| Written::of(item, job)).enumerate() {
                out.push(if index > 0 { "," } else { "" })?;
                item.write(job, out)?;
            }
            out.push("]")
        }
        Node::Object(members) => {
            out.push("{")?;
            let members = members.iter().filter_map(|(name, node)| Some((name, Written::of(node, job)?)));
            for (index, (name, value)) in members.enumerate() {
                out.push(if index > 0 { "," } else { "" })?;
                quote(name, out)?;
                out.push(":")?;
                value.write(job, out)?;
            }
            out.push("}")
        }
    }
}

/// `None` when this job leaves the place empty.
fn filling<'a>(place: &Place, job: &'a Job) -> Option<Filling<'a>> {
    Some(match place {
        Place::Id => Filling::text(job.id.as_str()),
        Place::Amount => Filling::Json(job.amount.to_string().into()),
        Place::AmountDecimal => Filling::Text(in_units(job.amount, &job.currency).into()),
        Place::Currency => Filling::text(&job.currency),
        Place::Account => Filling::text(job.account.as_ref()?.as_str()),
        Place::Reference => Filling::text(job.reference.as_deref()?),
        Place::IdempotencyKey => Filling::text(job.effective_key().as_str()),
        Place::Payload(path) => Filling::Json(pick(job.payload.as_deref()?, path)?.into()),
    })
}

/// What stands in running text; an absent value is empty.
fn text_of<'a>(place: &Place, job: &'a Job) -> Cow<'a, str> {
    filling(place, job).map_or(Cow::Borrowed(""), Filling::into_text)
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

/// Follows the path through raw JSON without touching the value at its end.
fn pick<'a>(mut json: &'a str, path: &[String]) -> Option<&'a str> {
    for step in path {
        let value: &'a RawValue = match json.trim_start().bytes().next()? {
            b'{' => serde_json::from_str::<BTreeMap<String, _>>(json).ok()?.remove(step)?,
            b'[' => serde_json::from_str::<Vec<_>>(json).ok()?.get(step.parse::<usize>().ok()?).copied()?,
            _ => return None,
        };
        json = value.get();
    }
    Some(json.trim())
}

fn quote(text: &str, out: &mut Bounded) -> io::Result<()> {
    out.push("\"")?;
    escape(text, out)?;
    out.push("\"")
}

/// As serde_json writes a string, without its quotes. <https://www.rfc-editor.org/rfc/rfc8259#section-7>
fn escape(text: &str, out: &mut Bounded) -> io::Result<()> {
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| matches!(c, '"' | '\\' | '\0'..='\x1f')) {
        out.push(&rest[..at])?;
        match rest.as_bytes()[at] {
            b'"' => out.push("\\\"")?,
            b'\\' => out.push("\\\\")?,
            b'\x08' => out.push("\\b")?,
            b'\t' => out.push("\\t")?,
            b'\n' => out.push("\\n")?,
            b'\x0c' => out.push("\\f")?,
            b'\r' => out.push("\\r")?,
            other => out.push(&format!("\\u{other:04x}"))?,
        }
        rest = &rest[at + 1..];
    }
    out.push(rest)
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;

    fn render(template: &str, job: &Job) -> String {
        let mut out = Bounded::new(4_096);
        Template::parse(template).unwrap().render(job, &mut out).unwrap();
        String::from_utf8(out.into_bytes()).unwrap()
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
    fn strings_are_escaped_as_serde_json_does() {
        let all: String = (0..=0x2ff).filter_map(char::from_u32).chain("\u{fffd}\u{1f600}".chars()).collect();
        let mut out = Bounded::new(4_096);
        quote(&all, &mut out).unwrap();
        assert_eq!(out.into_bytes(), serde_json::to_vec(&all).unwrap());
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
