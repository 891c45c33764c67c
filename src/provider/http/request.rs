//! Plan of a provider row's charges: method, key header, content type and body, as a job's first attempt freezes them.
//!
//! It sees no secret: header values are references until a request is sent (`docs/decisions/0033-frozen-requests.md`).
//! As an HTML form, nested members become `a[b]=c` and array elements `a[0]=c`, as for Stripe and PHP. Numbers keep
//! their digits, and `null` is left out. A value that nests too deep stays JSON text.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use reqwest::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use serde::Serialize;
use serde_json::value::RawValue;
use url::form_urlencoded::byte_serialize;

use super::secrets::is_reserved;
use super::template::Template;
use crate::domain::expansion::{BoundedBuffer, REQUEST_BODY_BYTES_MAX, RequestBuildError, RequestPart, TooLarge};
use crate::domain::job::Job;
use crate::domain::provider::RequestShape;
use crate::domain::sum::SentSum;
use crate::provider::FreezeError;

/// Longest content type, and longest name of the idempotency key's header, in characters.
const CLIENT_HEADER_CHARS_MAX: usize = 255;
const JSON: &str = "application/json";
const FORM: &str = "application/x-www-form-urlencoded";
pub(super) const KEY_HEADER: &str = "idempotency-key";

/// Form of one provider's charges.
#[derive(Clone, Debug)]
pub struct RequestPlan {
    pub(super) method: Arc<str>,
    pub(super) key_header: HeaderName,
    pub(super) content_type: Arc<str>,
    /// The same, as it is sent.
    pub(super) content_type_header: HeaderValue,
    form_encoded: bool,
    template: Option<Template>,
}

impl RequestPlan {
    /// Checks the row's `request`. `content_type` is the one in the row's `headers`, if any.
    ///
    /// # Errors
    /// [`FreezeError`] naming the invalid field of `request`.
    pub fn parse(shape: &RequestShape, content_type: Option<&str>) -> Result<Self, FreezeError> {
        let method = shape.method.as_deref().unwrap_or("POST");
        if !matches!(method, "POST" | "PUT" | "PATCH") {
            return Err(FreezeError::Template(format!("method `{method}`: use POST, PUT or PATCH")));
        }
        let key_header = shape.key_header.as_deref().unwrap_or(KEY_HEADER);
        let refused =
            |problem: &str| FreezeError::Header { header: key_header.to_owned(), problem: problem.to_owned() };
        let name = HeaderName::try_from(key_header).map_err(|_| refused("key_header is not a header name"))?;
        if is_reserved(&name) || name == CONTENT_TYPE {
            return Err(refused("is set by the client; name another `key_header`"));
        }
        if key_header.len() > CLIENT_HEADER_CHARS_MAX {
            return Err(refused("key_header has more than 255 characters"));
        }
        let content_type = content_type.unwrap_or(if shape.form_encoded { FORM } else { JSON });
        let is_short = !content_type.contains("${") && content_type.len() <= CLIENT_HEADER_CHARS_MAX;
        let Some(content_type_header) = HeaderValue::from_str(content_type).ok().filter(|_| is_short) else {
            let problem = "must be plain text of at most 255 characters: it is frozen with the request".to_owned();
            return Err(FreezeError::Header { header: "content-type".to_owned(), problem });
        };
        let template = shape.template.as_deref().map(Template::parse).transpose().map_err(FreezeError::Template)?;
        Ok(Self {
            method: method.into(),
            key_header: name,
            content_type: content_type.into(),
            content_type_header,
            form_encoded: shape.form_encoded,
            template,
        })
    }

    /// Whether a body may be longer than its job's message: a template may repeat the payload, and a form repeats paths.
    pub fn can_expand(&self) -> bool {
        self.form_encoded || self.template.is_some()
    }

    /// The body for this job and its sum.
    ///
    /// # Errors
    /// [`FreezeError::Job`] when it would be too large; [`FreezeError::Template`] when the job's payload is not valid
    /// JSON.
    pub fn body(&self, job: &Job, sum: SentSum) -> Result<Vec<u8>, FreezeError> {
        let body = match self.json(job, sum) {
            Ok(json) if self.form_encoded => encode_form(&json),
            json => json,
        };
        body.map_err(|error| match error {
            BodyError::TooLarge => FreezeError::Job(RequestBuildError::TooLarge(TooLarge::new(RequestPart::Body, job))),
            BodyError::Malformed(problem) => FreezeError::Template(problem),
        })
    }

    fn json(&self, job: &Job, sum: SentSum) -> Result<Vec<u8>, BodyError> {
        let mut json = BoundedBuffer::new(REQUEST_BODY_BYTES_MAX);
        match &self.template {
            Some(template) => template.render(job, sum, &mut json)?,
            None => write_default_body(job, sum, &mut json)?,
        }
        Ok(json.into_bytes())
    }
}

/// Reason why a body was not written.
#[derive(Debug)]
enum BodyError {
    TooLarge,
    Malformed(String),
}

/// For errors of a [`BoundedBuffer`], whose only error is a full buffer.
impl From<io::Error> for BodyError {
    fn from(_: io::Error) -> Self {
        Self::TooLarge
    }
}

impl From<serde_json::Error> for BodyError {
    fn from(error: serde_json::Error) -> Self {
        if error.is_io() { Self::TooLarge } else { Self::Malformed(format!("payload: {error}")) }
    }
}

/// Default body. Absent fields are left out; the payload is the producer's own text.
#[derive(Serialize)]
struct DefaultBody<'a> {
    id: &'a str,
    amount: i64,
    currency: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    account: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a RawValue>,
}

fn write_default_body(job: &Job, sum: SentSum, out: &mut BoundedBuffer) -> Result<(), BodyError> {
    let body = DefaultBody {
        id: job.id.as_str(),
        amount: sum.units,
        currency: &job.currency,
        account: job.account.as_ref().map(|account| account.as_str()),
        reference: job.reference.as_deref(),
        payload: job.payload.as_deref().map(serde_json::from_str).transpose()?,
    };
    Ok(serde_json::to_writer(out, &body)?)
}

/// Largest nesting depth that is encoded. It bounds the recursion for every payload.
const DEPTH_MAX: usize = 64;

/// Encodes the members of a JSON object. <https://url.spec.whatwg.org/#application/x-www-form-urlencoded>
///
/// # Errors
/// When `json` is not a JSON object, or its form does not fit.
fn encode_form(json: &[u8]) -> Result<Vec<u8>, BodyError> {
    let mut form = BoundedBuffer::new(REQUEST_BODY_BYTES_MAX);
    let members: BTreeMap<String, &RawValue> =
        serde_json::from_slice(json).map_err(|_| BodyError::Malformed("a form needs a JSON object".to_owned()))?;
    for (mut name, value) in members {
        append_value(&mut form, &mut name, value.get(), DEPTH_MAX)?;
    }
    Ok(form.into_bytes())
}

/// Appends one value. `path` is its name, and is the same afterwards.
fn append_value(out: &mut BoundedBuffer, path: &mut String, json: &str, depth_left: usize) -> Result<(), BodyError> {
    match json.bytes().next() {
        Some(b'{') if depth_left > 0 => {
            let members: BTreeMap<String, &RawValue> = serde_json::from_str(json).unwrap_or_default();
            members.into_iter().try_for_each(|(inner, value)| append_nested(out, path, &inner, value, depth_left))
        }
        Some(b'[') if depth_left > 0 => {
            let items: Vec<&RawValue> = serde_json::from_str(json).unwrap_or_default();
            let mut items = items.into_iter().enumerate();
            items.try_for_each(|(index, value)| append_nested(out, path, &index.to_string(), value, depth_left))
        }
        Some(b'n') => Ok(()),
        _ => {
            let text = serde_json::from_str::<String>(json).unwrap_or_else(|_| json.to_owned());
            push_pair(out, path, &text)
        }
    }
}

fn append_nested(
    out: &mut BoundedBuffer,
    path: &mut String,
    step: &str,
    value: &RawValue,
    depth_left: usize,
) -> Result<(), BodyError> {
    let above = path.len();
    path.extend(["[", step, "]"]);
    let appended = append_value(out, path, value.get(), depth_left - 1);
    path.truncate(above);
    appended
}

fn push_pair(out: &mut BoundedBuffer, name: &str, text: &str) -> Result<(), BodyError> {
    if !out.is_empty() {
        out.push("&")?;
    }
    for piece in byte_serialize(name.as_bytes()).chain(["="]).chain(byte_serialize(text.as_bytes())) {
        out.push(piece)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::job::Identifier;
    use crate::domain::job::tests::job;
    use crate::domain::sum::AmountRules;

    fn body(shape: &RequestShape, job: &Job) -> String {
        let sum = AmountRules::default().sum_of(job).unwrap();
        String::from_utf8(RequestPlan::parse(shape, None).unwrap().body(job, sum).unwrap()).unwrap()
    }

    #[test]
    fn default_body_omits_absent_fields_and_keeps_payload() {
        let default = RequestShape::default();
        assert_eq!(body(&default, &job("pay-1")), r#"{"id":"pay-1","amount":1299,"currency":"EUR"}"#);
        let full = Job {
            account: Some(Identifier::new("a1").unwrap()),
            reference: Some("r\"1".into()),
            payload: Some("{ \"b\":1.50,\n \"a\" : 1e3 }".into()),
            ..job("pay-1")
        };
        let wanted = "{\"id\":\"pay-1\",\"amount\":1299,\"currency\":\"EUR\",\"account\":\"a1\",\
                      \"reference\":\"r\\\"1\",\"payload\":{ \"b\":1.50,\n \"a\" : 1e3 }}";
        assert_eq!(body(&default, &full), wanted);
        let broken = Job { payload: Some("{".into()), ..job("pay-1") };
        let sum = SentSum { units: 50_000, decimals: 2 };
        let plan = RequestPlan::parse(&default, None).unwrap();
        assert!(plan.body(&broken, sum).is_err());
        assert_eq!(plan.body(&job("pay-1"), sum).unwrap(), br#"{"id":"pay-1","amount":50000,"currency":"EUR"}"#);
    }

    #[test]
    fn forms_come_from_default_body_and_templates() {
        let job = Job { payload: Some(r#"{"card":"tok_1"}"#.into()), ..job("pay-1") };
        let plain = RequestShape { form_encoded: true, ..RequestShape::default() };
        assert_eq!(body(&plain, &job), "amount=1299&currency=EUR&id=pay-1&payload%5Bcard%5D=tok_1");
        let template = Some(r#"{"amount":"${amount}","metadata":{"job":"${id}"}}"#.to_owned());
        let shaped = RequestShape { template, ..plain };
        assert_eq!(body(&shaped, &job), "amount=1299&metadata%5Bjob%5D=pay-1");
    }

    #[test]
    fn invalid_request_shape_is_rejected() {
        let shape = RequestShape::default;
        let bad = [
            RequestShape { method: Some("GET".to_owned()), ..shape() },
            RequestShape { method: Some("post".to_owned()), ..shape() },
            RequestShape { key_header: Some("bad header".to_owned()), ..shape() },
            RequestShape { key_header: Some("Host".to_owned()), ..shape() },
            RequestShape { key_header: Some("Content-Length".to_owned()), ..shape() },
            RequestShape { key_header: Some("Content-Type".to_owned()), ..shape() },
            RequestShape { template: Some("{\"x\":\"${y}\"}".to_owned()), ..shape() },
        ];
        for shape in bad {
            assert!(RequestPlan::parse(&shape, None).is_err(), "{shape:?}");
        }
        assert!(RequestPlan::parse(&shape(), Some("text/${env:X}")).is_err());
        let plan = RequestPlan::parse(&shape(), Some("application/vnd.api+json")).unwrap();
        assert_eq!((&*plan.content_type, plan.key_header.as_str()), ("application/vnd.api+json", KEY_HEADER));
    }

    fn encode(json: &str) -> Result<String, BodyError> {
        encode_form(json.as_bytes()).map(|form| String::from_utf8(form).unwrap())
    }

    #[test]
    fn nesting_becomes_brackets() {
        let table = [
            (r#"{"amount":1299,"ok":true,"none":null}"#, "amount=1299&ok=true"),
            (r#"{"a":{"b":{"c":"x y"}}}"#, "a%5Bb%5D%5Bc%5D=x+y"),
            (r#"{"a":[1,"b&c=d"]}"#, "a%5B0%5D=1&a%5B1%5D=b%26c%3Dd"),
            (r#"{"n":12345678901234567890.10,"s":"\u00e9\"\n"}"#, "n=12345678901234567890.10&s=%C3%A9%22%0A"),
            ("{}", ""),
        ];
        for (json, form) in table {
            assert_eq!(encode(json).unwrap(), form, "{json}");
        }
        assert!(encode("[1]").is_err());
    }

    #[test]
    fn nesting_depth_is_bounded() {
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(20_000), "]".repeat(20_000));
        let form = encode(&deep).unwrap();
        assert!(form.starts_with("a%5B0%5D"), "{}", &form[..40]);
    }

    /// A message of 64 KiB would become a form of 3.5 GB.
    #[test]
    fn form_size_is_bounded() {
        let json = format!("{{\"{}\":[{}]}}", "é".repeat(16_000), ["1"; 16_500].join(","));
        assert!(json.len() < 65_536 + 100 && matches!(encode(&json), Err(BodyError::TooLarge)), "{}", json.len());
    }
}
