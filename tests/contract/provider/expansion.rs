//! Requests from random messages and rows, up to the largest message: each part is within its bound, or the job is
//! rejected as too large.

use proptest::prelude::*;
use serde_json::{Value, json};
use sluicegate::domain::job::{Identifier, Job};
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::queue::message::encode;

use super::job;
use crate::corpus::properties::job_request::within_bounds;

/// A list or a text below nested names, small or as large as a message may be.
fn payload() -> impl Strategy<Value = String> {
    let name = prop_oneof![1_usize..40, 1_000_usize..33_000];
    let letter = prop_oneof![Just('k'), Just('é'), Just('"'), Just('\u{1}'), Just('\u{1f600}')];
    let leaves = prop_oneof![Just(1_usize), 1_usize..33_000];
    (name, letter, 1_usize..70, leaves, any::<bool>()).prop_map(|(name, letter, depth, leaves, list)| {
        let name: String = std::iter::repeat_n(letter, name / depth / letter.len_utf8() + 1).collect();
        let leaf = if list { json!(vec![1; leaves]) } else { json!("\u{1}".repeat(leaves / 6)) };
        let nested = (0..depth).fold(leaf, |inner, _| json!({ &name: inner }));
        json!({ "a": nested }).to_string()
    })
}

fn row() -> impl Strategy<Value = ProviderRow> {
    let place = prop_oneof![
        Just("${payload}"),
        Just("${payload.a}"),
        Just("x ${payload} y"),
        Just("${reference}"),
        Just("${id} ${payload.none}"),
    ];
    let template = prop::option::of((place, 1_usize..200));
    let times = || prop_oneof![Just(0_usize), 1_usize..100];
    (template, any::<bool>(), times(), times(), times()).prop_map(|(template, form, url, lookup, account)| {
        let mut request = json!({ "body": if form { "form" } else { "json" } });
        if let Some((place, times)) = template {
            request["template"] = json!({ "all": vec![place; times], "one": place.repeat(times) });
        }
        let address = |times: usize| format!("http://127.0.0.1/é?q={}", "${reference}".repeat(times));
        let lookup = (lookup > 0).then(|| json!({ "url": address(lookup) }));
        let object = |value: Value| value.as_object().cloned();
        ProviderRow {
            name: "acme".to_owned(),
            url: address(url),
            headers: object(json!({ "x-accounts": "${job:account}".repeat(account) })).unwrap_or_default(),
            request: object(request),
            lookup: lookup.and_then(object),
            limits: vec![LimitRow { name: "all".to_owned(), max_requests: 1, window_ms: 1, ..LimitRow::default() }],
            ..ProviderRow::default()
        }
    })
}

proptest! {
    #[test]
    fn every_request_is_within_bounds_or_rejected(
        payload in prop::option::of(payload()),
        reference in prop::option::of("\\PC{1,255}"),
        row in row(),
    ) {
        let (payload, reference) = (payload.map(Into::into), reference.map(Into::into));
        let job = Job { payload, reference, account: Identifier::new("a".repeat(64)).ok(), ..job("pay-1") };
        within_bounds(&row, &encode(&job));
    }
}
