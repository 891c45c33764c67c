//! Template of a provider's request body: JSON with `${…}` placeholders for a job's fields; and the parser of such
//! placeholders, which header values share.
//!
//! It has no conditions and no loops, and no escape, because no provider needs a literal `${`. Values of the payload are
//! copied as the producer wrote them, digit for digit; they are never parsed into a number and printed again.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::domain::amount::Decimal;
use crate::domain::expansion::{BoundedBuffer, REQUEST_BODY_BYTES_MAX};
use crate::domain::job::Job;
use crate::domain::sum::SentSum;

/// Decimal digits that a number with fraction or exponent keeps in a row, whose numbers are read as binary floats.
const EXACT_DIGITS: usize = 15;

/// Field of a job that a placeholder names.
#[derive(Clone, Debug, PartialEq, Eq)]
enum TemplateField {
    Id,
    /// The sum in the provider's minor units.
    Amount,
    /// The sum in units of the currency, as text with all decimals of the provider.
    AmountDecimal,
    Currency,
    Account,
    Reference,
    IdempotencyKey,
    /// Path into the payload, empty for all of it; array elements by their index.
    Payload(Vec<String>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TextPiece {
    Text(String),
    Field(TemplateField),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TemplateNode {
    /// JSON text that never changes.
    Fixed(String),
    /// One placeholder alone: it keeps the value's type, and its member is left out when the value is absent.
    Field(TemplateField),
    /// Text with placeholders; an absent value is empty.
    Text(Vec<TextPiece>),
    List(Vec<TemplateNode>),
    Object(Vec<(String, TemplateNode)>),
}

/// A validated template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template(TemplateNode);

impl Template {
    /// Parses a template.
    ///
    /// # Errors
    /// When the text is not a JSON object, or has an unknown placeholder.
    pub fn parse(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
        if !value.is_object() {
            return Err("must be a JSON object".to_owned());
        }
        compile(value).map(Self)
    }

    /// Writes the body for this job and its sum, as JSON text.
    pub fn render(&self, job: &Job, sum: SentSum, out: &mut BoundedBuffer) -> io::Result<()> {
        render(&self.0, Payment { job, sum }, out)
    }
}

fn compile(value: Value) -> Result<TemplateNode, String> {
    Ok(match value {
        Value::Object(members) => TemplateNode::Object(
            members.into_iter().map(|(name, value)| Ok((name, compile(value)?))).collect::<Result<_, String>>()?,
        ),
        Value::Array(items) => TemplateNode::List(items.into_iter().map(compile).collect::<Result<_, _>>()?),
        Value::String(text) => {
            let mut pieces = split_placeholders(&text)?.into_iter().map(parse_piece).collect::<Result<Vec<_>, _>>()?;
            match (pieces.pop(), pieces.is_empty()) {
                (Some(TextPiece::Field(field)), true) => TemplateNode::Field(field),
                (last, _) => {
                    pieces.extend(last);
                    TemplateNode::Text(pieces)
                }
            }
        }
        Value::Number(number) if number.is_f64() && significant_digits(&number.to_string()) > EXACT_DIGITS => {
            return Err(format!(
                "a number has more than {EXACT_DIGITS} digits and would be rounded: write it as a string"
            ));
        }
        other => TemplateNode::Fixed(other.to_string()),
    })
}

/// Number of digits from the first to the last that is not zero.
fn significant_digits(number: &str) -> usize {
    Decimal::new(number).map_or(0, |decimal| decimal.digits.len())
}

fn parse_piece(part: TemplatePart) -> Result<TextPiece, String> {
    let name = match part {
        TemplatePart::Text(text) => return Ok(TextPiece::Text(text)),
        TemplatePart::Placeholder(name) => name,
    };
    Ok(TextPiece::Field(match name.as_str() {
        "id" => TemplateField::Id,
        "amount" => TemplateField::Amount,
        "amount_decimal" => TemplateField::AmountDecimal,
        "currency" => TemplateField::Currency,
        "account" => TemplateField::Account,
        "reference" => TemplateField::Reference,
        "idempotency_key" => TemplateField::IdempotencyKey,
        "payload" => TemplateField::Payload(Vec::new()),
        other => match other.strip_prefix("payload.") {
            Some(path) if path.split('.').all(|step| !step.is_empty()) => {
                TemplateField::Payload(path.split('.').map(str::to_owned).collect())
            }
            _ => {
                return Err(format!(
                    "`${{{other}}}` is not a placeholder: use id, amount, amount_decimal, currency, account, \
                     reference, idempotency_key or payload.x.y"
                ));
            }
        },
    }))
}

/// Source of a request's values.
#[derive(Clone, Copy)]
struct Payment<'a> {
    job: &'a Job,
    sum: SentSum,
}

/// Value that replaces a placeholder.
enum JobValue<'a> {
    Text(Cow<'a, str>),
    Json(Cow<'a, str>),
}

impl<'a> JobValue<'a> {
    fn text(text: &'a str) -> Self {
        Self::Text(text.into())
    }

    fn write(&self, out: &mut BoundedBuffer) -> io::Result<()> {
        match self {
            Self::Text(text) => write_quoted(text, out),
            Self::Json(json) => out.push(json),
        }
    }

    /// The value within text: strings without quotes, `null` as nothing.
    fn into_text(self) -> Cow<'a, str> {
        match self {
            Self::Text(text) => text,
            Self::Json(json) if json == "null" => Cow::Borrowed(""),
            Self::Json(json) => serde_json::from_str::<String>(&json).map_or(json, Cow::Owned),
        }
    }
}

fn render(node: &TemplateNode, payment: Payment<'_>, out: &mut BoundedBuffer) -> io::Result<()> {
    match node {
        TemplateNode::Fixed(text) => out.push(text),
        TemplateNode::Field(field) => job_value(field, payment).map_or(Ok(()), |value| value.write(out)),
        TemplateNode::Text(pieces) => {
            // Bounded like the body, which it is a part of.
            let mut text = BoundedBuffer::new(REQUEST_BODY_BYTES_MAX);
            for piece in pieces {
                match piece {
                    TextPiece::Text(piece) => text.push(piece)?,
                    // An absent value is empty.
                    TextPiece::Field(field) => {
                        text.push(&job_value(field, payment).map_or(Cow::Borrowed(""), JobValue::into_text))?;
                    }
                }
            }
            write_quoted(str::from_utf8(&text.into_bytes()).unwrap_or_default(), out)
        }
        TemplateNode::List(items) => {
            out.push("[")?;
            render_all(items.iter().map(|item| (None, item)), payment, out)?;
            out.push("]")
        }
        TemplateNode::Object(members) => {
            out.push("{")?;
            render_all(members.iter().map(|(name, node)| (Some(name.as_str()), node)), payment, out)?;
            out.push("}")
        }
    }
}

/// Writes the members of an object, or the elements of a list, which have no name. A lone placeholder without a value in
/// this job is left out.
fn render_all<'a>(
    nodes: impl Iterator<Item = (Option<&'a str>, &'a TemplateNode)>,
    payment: Payment<'_>,
    out: &mut BoundedBuffer,
) -> io::Result<()> {
    let mut separator = "";
    for (name, node) in nodes {
        let lone = match node {
            TemplateNode::Field(field) => match job_value(field, payment) {
                None => continue,
                value => value,
            },
            _ => None,
        };
        out.push(separator)?;
        separator = ",";
        if let Some(name) = name {
            write_quoted(name, out)?;
            out.push(":")?;
        }
        match lone {
            Some(value) => value.write(out)?,
            None => render(node, payment, out)?,
        }
    }
    Ok(())
}

/// Value of a field; `None` when this job has none.
fn job_value<'a>(field: &TemplateField, Payment { job, sum }: Payment<'a>) -> Option<JobValue<'a>> {
    Some(match field {
        TemplateField::Id => JobValue::text(job.id.as_str()),
        TemplateField::Amount => JobValue::Json(sum.units.to_string().into()),
        TemplateField::AmountDecimal => JobValue::Text(sum.decimal().into()),
        TemplateField::Currency => JobValue::text(&job.currency),
        TemplateField::Account => JobValue::text(job.account.as_ref()?.as_str()),
        TemplateField::Reference => JobValue::text(job.reference.as_deref()?),
        TemplateField::IdempotencyKey => JobValue::text(job.effective_key().as_str()),
        TemplateField::Payload(path) => JobValue::Json(json_at_path(job.payload.as_deref()?, path)?.into()),
    })
}

/// Follows the path through raw JSON without touching the value at its end.
fn json_at_path<'a>(mut json: &'a str, path: &[String]) -> Option<&'a str> {
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

fn write_quoted(text: &str, out: &mut BoundedBuffer) -> io::Result<()> {
    Ok(serde_json::to_writer(out, text)?)
}

/// Literal text, or the name inside one `${…}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplatePart {
    Text(String),
    Placeholder(String),
}

/// Splits `text` into its parts; no part is empty.
///
/// # Errors
/// When a `${` is never closed, or has no name.
pub fn split_placeholders(text: &str) -> Result<Vec<TemplatePart>, String> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some((before, opened)) = rest.split_once("${") {
        let (name, after) = opened.split_once('}').ok_or("a `${` is never closed by `}`")?;
        if name.is_empty() {
            return Err("`${}` has no name".to_owned());
        }
        if !before.is_empty() {
            parts.push(TemplatePart::Text(before.to_owned()));
        }
        parts.push(TemplatePart::Placeholder(name.to_owned()));
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(TemplatePart::Text(rest.to_owned()));
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::job::tests::job;
    use crate::domain::sum::AmountRules;

    fn render(template: &str, job: &Job) -> String {
        let mut out = BoundedBuffer::new(4_096);
        let sum = AmountRules::default().sum_of(job).unwrap();
        Template::parse(template).unwrap().render(job, sum, &mut out).unwrap();
        String::from_utf8(out.into_bytes()).unwrap()
    }

    #[test]
    fn lone_placeholder_keeps_its_type() {
        let full = Job {
            account: Some(crate::domain::job::Identifier::new("acct_1").unwrap()),
            reference: Some("say \"hi\"\n".into()),
            payload: Some(
                r#"{ "card":{"token":"tok_1","year":2031,"big":12345678901234567890.10, "no":null},"list":[1,"b"]}"#
                    .into(),
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
    fn decimal_amount_has_all_currency_decimals() {
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
            let job = Job { amount, currency: currency.into(), ..job("pay-1") };
            assert_eq!(render(r#"{"x":"${amount_decimal}"}"#, &job), format!(r#"{{"x":"{units}"}}"#));
        }
    }

    #[test]
    fn amounts_are_the_sum_as_sent() {
        let job = Job { amount: 500, currency: "ISK".into(), ..job("pay-1") };
        let sum = SentSum { units: 50_000, decimals: 2 };
        let mut out = BoundedBuffer::new(4_096);
        let template = Template::parse(r#"{"a":"${amount}","b":"${amount_decimal}","c":"${amount} ISK"}"#).unwrap();
        template.render(&job, sum, &mut out).unwrap();
        assert_eq!(String::from_utf8(out.into_bytes()).unwrap(), r#"{"a":50000,"b":"500.00","c":"50000 ISK"}"#);
    }

    #[test]
    fn values_cannot_escape_their_placeholder() {
        let sly = Job { reference: Some(r#"","amount":1,"x":"${id}"#.into()), ..job("pay-1") };
        let body: Value =
            serde_json::from_str(&render(r#"{"r":"ref ${reference}","s":"${reference}"}"#, &sly)).unwrap();
        assert_eq!(body["s"], *sly.reference.clone().unwrap());
        assert_eq!(body["r"], format!("ref {}", sly.reference.unwrap()));
        assert_eq!(body.as_object().unwrap().len(), 2);
    }

    #[test]
    fn strings_are_escaped_as_serde_json_does() {
        let all: String = (0..=0x2ff).filter_map(char::from_u32).chain("\u{fffd}\u{1f600}".chars()).collect();
        let mut out = BoundedBuffer::new(4_096);
        write_quoted(&all, &mut out).unwrap();
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

    #[test]
    fn text_is_split_at_its_placeholders() {
        let text = |t: &str| TemplatePart::Text(t.to_owned());
        let place = |t: &str| TemplatePart::Placeholder(t.to_owned());
        for (written, parts) in [
            ("", vec![]),
            ("plain $5 {x}", vec![text("plain $5 {x}")]),
            ("${id}", vec![place("id")]),
            ("Bearer ${env:KEY}!", vec![text("Bearer "), place("env:KEY"), text("!")]),
            ("${a}${b}", vec![place("a"), place("b")]),
        ] {
            assert_eq!(split_placeholders(written).unwrap(), parts, "{written}");
        }
        for bad in ["${", "x ${env:KEY", "${}"] {
            assert!(split_placeholders(bad).is_err(), "{bad}");
        }
    }
}
