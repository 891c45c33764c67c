//! The codes in the header: equal to those that the client writes and reads, and to the constants of the functions.

use std::collections::BTreeMap;
use std::time::Duration;

use sluicegate::domain::limit::{Algorithm, AppliesTo};
use sluicegate::domain::permit_protocol::{CallKind, PermitRelease, PermitRequest, RefusalReason, ReleaseKind};
use sluicegate::domain::quota_spec::{LimitSpec, QuotaSpec};
use sluicegate::limiter::redis::decode::decode_reply;
use sluicegate::limiter::redis::encode::encode_call;
use sluicegate::limiter::redis::library::SOURCE;

use super::header::Header;
use super::{QUOTA, call, read, spec};

/// The value of a field in an encoded argument.
fn sent(spec: &QuotaSpec, group: &str, field: &str, release: Option<PermitRelease>, want: PermitRequest) -> u64 {
    let lines = read(&encode_call(spec, &call(vec![want], release.into_iter().collect())), "run");
    let last = lines.iter().rfind(|line| line.starts_with(group)).unwrap();
    let (_, value) = last.split_once(&format!("{field} ")).unwrap();
    value.split(',').next().unwrap().parse().unwrap()
}

fn cell(spec: &QuotaSpec, field: &str) -> u64 {
    sent(spec, "cell: ", field, None, PermitRequest::charges(1, 1))
}

fn with(change: impl FnOnce(&mut LimitSpec)) -> QuotaSpec {
    let mut spec = spec();
    change(&mut spec.limits[0]);
    spec
}

fn named<'a>(pairs: impl IntoIterator<Item = (&'a str, u64)>) -> BTreeMap<String, u64> {
    pairs.into_iter().map(|(name, code)| (name.to_owned(), code)).collect()
}

#[test]
fn cells_have_the_codes_of_the_header() {
    let header = Header::of(QUOTA);
    let kinds = header.codes("CODES", "kind of a cell");
    for (algorithm, kind) in [
        (Algorithm::SlidingLog, "log"),
        (Algorithm::SlidingWindow, "log"),
        (Algorithm::FixedWindow, "window"),
        (Algorithm::TokenBucket, "bucket"),
        (Algorithm::Gcra, "bucket"),
        (Algorithm::Concurrency, "slots"),
    ] {
        assert_eq!(cell(&with(|limit| limit.algorithm = algorithm), "kind"), kinds[kind], "{algorithm:?}");
    }
    let by_start = QuotaSpec { grant_jitter: Some(Duration::ZERO), ..spec() };
    let even = QuotaSpec { pacing: Some(sluicegate::domain::provider::Pacing::Even), ..spec() };
    let modes = named([
        ("counts the start", cell(&by_start, "mode")),
        ("held until the answer", cell(&spec(), "mode")),
        ("shadow", cell(&with(|limit| limit.shadow = true), "mode")),
        ("pacing", cell(&even, "mode")),
    ]);
    assert_eq!(header.codes("CODES", "mode"), modes);
}

#[test]
fn calls_have_the_codes_of_the_header() {
    let header = Header::of(QUOTA);
    let applies = |applies_to| cell(&with(|limit| limit.applies_to = applies_to), "applies");
    let to = [("all", AppliesTo::All), ("charge", AppliesTo::Charge), ("lookup", AppliesTo::Lookup)];
    let kinds = header.codes("CODES", "applies and kind of a want");
    assert_eq!(kinds, named(to.map(|(name, to)| (name, applies(to)))));
    let release =
        |release_kind| PermitRelease { call: 1, cost: 1, kind: CallKind::Charge, subjects: Vec::new(), release_kind };
    let release_kinds =
        [("used", ReleaseKind::Used { age: Duration::ZERO }), ("unused", ReleaseKind::Unused { origins: vec![0] })];
    let sent_code = |kind: ReleaseKind| {
        sent(&spec(), "release: ", "release kind", Some(release(kind)), PermitRequest::charges(1, 1))
    };
    let codes = named(release_kinds.map(|(name, kind)| (name, sent_code(kind))));
    assert_eq!(header.codes("CODES", "release kind"), codes);
    for (name, kind) in [("charge", CallKind::Charge), ("lookup", CallKind::Lookup)] {
        let want = PermitRequest { kind, ..PermitRequest::charges(1, 1) };
        assert_eq!(sent(&spec(), "want: ", "kind", None, want), kinds[name]);
    }
}

#[test]
fn refusals_have_the_codes_of_the_header() {
    let header = Header::of(QUOTA);
    let group = header.groups("REPLY").into_iter().find(|group| group.name == "reply").unwrap();
    let codes = header.codes("CODES", "refusal");
    let meanings = [
        ("none", None),
        ("limit", Some(RefusalReason::Limit { index: 0 })),
        ("cold", Some(RefusalReason::Cold)),
        ("paused", Some(RefusalReason::Paused)),
        ("stale version", Some(RefusalReason::StaleVersion)),
        ("stale call", Some(RefusalReason::StaleCall)),
        ("needs history", Some(RefusalReason::NeedsHistory { index: 0, readable_in_us: 0 })),
    ];
    assert_eq!(codes.len(), meanings.len());
    for (name, meant) in meanings {
        let needs_history = u64::from(name == "needs history");
        let answer = group.write(|field| match field {
            "refusal" => codes[name],
            "readable" => needs_history,
            _ => 0,
        });
        assert_eq!(decode_reply(&answer, 1, 1, 1).unwrap().refused.map(|refused| refused.reason), meant, "{name}");
    }
    let unknown = group.write(|field| if field == "refusal" { 7 } else { 0 });
    assert!(decode_reply(&unknown, 1, 1, 1).is_err());
}

#[test]
fn function_constants_match_the_header_codes() {
    let header = Header::of(QUOTA);
    for what in ["refusal", "kind of a cell"] {
        let mut codes: Vec<(u64, String)> =
            header.codes("CODES", what).into_iter().map(|(name, n)| (n, name)).collect();
        codes.sort();
        let names: Vec<String> = codes.iter().map(|(_, name)| name.replace(' ', "_").to_uppercase()).collect();
        let numbers: Vec<String> = codes.iter().map(|(code, _)| code.to_string()).collect();
        let line = format!("local {} = {}\n", names.join(", "), numbers.join(", "));
        assert!(SOURCE.contains(&line), "{line}");
    }
    let modes = header.codes("CODES", "mode");
    let line = format!(
        "local STARTED, HELD, SHADOW, PACING = {}, {}, {}, {}\n",
        modes["counts the start"], modes["held until the answer"], modes["shadow"], modes["pacing"]
    );
    assert!(SOURCE.contains(&line), "{line}");
}
