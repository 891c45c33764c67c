//! Request templates: for any payment, the body is a JSON object that has only members of the template.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use sluicegate::domain::job::{Identifier, Job};
use sluicegate::domain::provider::RequestShape;
use sluicegate::domain::sum::SentSum;
use sluicegate::provider::http::request::RequestPlan;
use sluicegate::queue::message::{CardNumbers, decode};

use super::{Bytes, lane};

const SUM: SentSum = SentSum { units: 1_299, decimals: 2 };

type Members<'a> = BTreeMap<String, &'a RawValue>;

/// Input: template, payload and reference, separated by form feeds.
pub fn holds(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let [template, payload, reference] = [bytes.until(b'\x0c'), bytes.until(b'\x0c'), bytes.0].map(str::from_utf8);
    let (Ok(template), Ok(payload), Ok(reference)) = (template, payload, reference) else { return };
    let shape =
        |form_encoded| RequestShape { template: Some(template.to_owned()), form_encoded, ..RequestShape::default() };
    let (Ok(json), Ok(form)) = (RequestPlan::parse(&shape(false), None), RequestPlan::parse(&shape(true), None)) else {
        return;
    };
    let message = format!(r#"{{"id":"p-1","amount":1299,"currency":"EUR","payload":{payload}}}"#);
    // Only a payload that the decoder accepts gets this far.
    let decoded = decode(message.as_bytes(), &lane(), CardNumbers::Off).ok();
    let job = decoded.map_or_else(job, |decoded| decoded.job);
    let job = Job { reference: (!reference.is_empty()).then(|| reference.into()), ..job };
    let body = String::from_utf8(json.body(&job, SUM).unwrap()).unwrap();
    let wanted: Members<'_> = serde_json::from_str(template).unwrap();
    let sent: Members<'_> = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"));
    assert!(sent.keys().all(|name| wanted.contains_key(name)), "{body}");
    // Text without a placeholder is sent as it is in the template.
    for (name, value) in wanted.iter().filter(|(_, value)| value.get().starts_with('"') && !value.get().contains('$')) {
        let text = |json: &str| serde_json::from_str::<String>(json).unwrap();
        if !text(value.get()).contains("${") {
            assert_eq!(text(sent[name].get()), text(value.get()));
        }
    }
    let form = String::from_utf8(form.body(&job, SUM).unwrap()).unwrap();
    let safe = |byte: u8| byte.is_ascii_alphanumeric() || b"*-._+%&=".contains(&byte);
    assert!(form.bytes().all(safe), "{form}");
}

fn job() -> Job {
    Job {
        id: Identifier::new("p-1").unwrap(),
        provider: lane(),
        amount: 1_299,
        currency: "EUR".into(),
        account: None,
        reference: None,
        idempotency_key: None,
        cost: 1,
        priority: 0,
        not_before: None,
        expires_at: None,
        payload: None,
    }
}
