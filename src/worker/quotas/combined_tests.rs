//! Quotas whose rows differ.

use super::*;
use std::sync::Arc;

use crate::ledger::provider_row::{AccountRow, LimitRow, ProviderRow};
use crate::ledger::settings::InvalidRow;

#[test]
fn fallback_share_needs_all_rows() {
    let of = |share_of: Option<i64>| ProviderRow {
        store_down: if share_of.is_some() { "share" } else { "wait" }.to_owned(),
        share_of,
        quota: Some("one".to_owned()),
        url: "https://acme.test/".to_owned(),
        limits: vec![LimitRow { name: "all".to_owned(), max_requests: 9, window_ms: 1_000, ..LimitRow::default() }],
        ..ProviderRow::default()
    };
    let share = |of| StoreDown::Share { workers: of };
    let table = [
        (vec![of(None)], StoreDown::Wait),
        (vec![of(Some(3))], share(3)),
        (vec![of(Some(3)), of(Some(5)), of(Some(4))], share(5)),
        (vec![of(Some(3)), of(None)], StoreDown::Wait),
        (vec![of(Some(3)), ProviderRow { enabled: false, ..of(None) }], share(3)),
    ];
    for (rows, expected) in table {
        let named = rows.into_iter().enumerate().map(|(n, row)| ProviderRow { name: format!("acme-{n}"), ..row });
        let meant = named.map(|row| row.validate(1).unwrap());
        let providers = meant.map(|row| (row.name.clone(), Arc::new(row))).collect();
        let known = LoadedSettings { version: 1, providers, invalid_rows: Vec::new() };
        let spec = quota_spec(&known, &ProviderName::new("one").unwrap()).unwrap();
        assert_eq!(spec.store_down, expected);
        // A worker that has not noticed yet acts on the row for three polls.
        assert!(spec.handover >= 3 * POLL_INTERVAL);
    }
}

/// What two rows, one per list of limits and overrides, allow together.
fn combined_spec(rows: [(LimitRow, Vec<AccountRow>); 2]) -> QuotaSpec {
    let row = |(n, (limit, accounts)): (usize, (LimitRow, Vec<AccountRow>))| ProviderRow {
        name: format!("acme-{n}"),
        quota: Some("one".to_owned()),
        url: "https://acme.test/".to_owned(),
        limits: vec![
            LimitRow { name: "everything".to_owned(), max_requests: 10_000, window_ms: 1_000, ..LimitRow::default() },
            limit,
        ],
        accounts,
        ..ProviderRow::default()
    };
    let meant = rows.into_iter().enumerate().map(row).map(|row| row.validate(1).unwrap());
    let providers = meant.map(|row| (row.name.clone(), Arc::new(row))).collect();
    let known = LoadedSettings { version: 1, providers, invalid_rows: Vec::new() };
    quota_spec(&known, &ProviderName::new("one").unwrap()).unwrap()
}

#[test]
fn one_row_that_waits_for_responses_holds_the_slots() {
    let grant = |jitter_ms| ProviderRow {
        slot_release: "grant".to_owned(),
        transit_jitter_ms: jitter_ms,
        ..ProviderRow::default()
    };
    let response = ProviderRow::default;
    let table = [([response(), response()], None), ([response(), grant(50)], None), ([grant(40), grant(70)], Some(70))];
    for (rows, jitter_ms) in table {
        let named = rows.into_iter().enumerate().map(|(n, row)| ProviderRow {
            name: format!("acme-{n}"),
            quota: Some("one".to_owned()),
            url: "https://acme.test/".to_owned(),
            limits: vec![LimitRow { name: "all".to_owned(), max_requests: 9, window_ms: 1_000, ..LimitRow::default() }],
            ..row
        });
        let providers = named.map(|row| row.validate(1).unwrap()).map(|row| (row.name.clone(), Arc::new(row)));
        let known = LoadedSettings { version: 1, providers: providers.collect(), invalid_rows: Vec::new() };
        let spec = quota_spec(&known, &ProviderName::new("one").unwrap()).unwrap();
        assert_eq!(spec.grant_jitter, jitter_ms.map(Duration::from_millis));
    }
}

#[test]
fn smaller_burst_applies_and_missing_is_default() {
    let limit = |algorithm: &str, max_requests, burst| LimitRow {
        name: "bucket".to_owned(),
        algorithm: algorithm.to_owned(),
        max_requests,
        window_ms: 1_000,
        burst,
        ..LimitRow::default()
    };
    let table = [
        ("token_bucket", (100, None), (100, Some(700)), 100),
        ("token_bucket", (100, Some(700)), (200, None), 200),
        ("token_bucket", (100, Some(30)), (100, None), 30),
        ("token_bucket", (100, None), (50, None), 50),
        ("gcra", (100, None), (100, Some(7)), 1),
        ("gcra", (100, Some(9)), (100, Some(7)), 8),
    ];
    for (algorithm, one, other, at_once) in table {
        for (one, other) in [(one, other), (other, one)] {
            let row = |(max_requests, burst)| (limit(algorithm, max_requests, burst), Vec::new());
            let spec = combined_spec([row(one), row(other)]);
            assert_eq!(spec.limits[0].cost_max(), at_once, "{algorithm} {one:?} {other:?}");
        }
    }
}

#[test]
fn row_cannot_lift_another_rows_account_rule() {
    let limit = |max_requests| LimitRow {
        name: "own".to_owned(),
        scope: "account".to_owned(),
        max_requests,
        window_ms: 1_000,
        ..LimitRow::default()
    };
    let rule = |effect: &str, max_requests: Option<i64>| AccountRow {
        account: "alice".to_owned(),
        rule: Some(effect.to_owned()),
        max_requests,
        window_ms: max_requests.map(|_| 1_000),
        ..AccountRow::default()
    };
    let exempt = || vec![rule("exempt", None)];
    let rate = |max_requests| vec![rule("limit", Some(max_requests))];
    let table = [
        ((10, exempt()), (10, vec![]), Some(10)),
        ((10, exempt()), (10, exempt()), None),
        ((10, rate(50)), (10, vec![]), Some(10)),
        ((10, rate(50)), (10, exempt()), Some(50)),
        ((10, rate(50)), (10, rate(40)), Some(40)),
        ((10, rate(3)), (5, vec![]), Some(3)),
        ((10, vec![]), (5, vec![]), Some(5)),
    ];
    for (one, other, expected) in table {
        for (one, other) in [(one.clone(), other.clone()), (other, one)] {
            let row = |(max_requests, rules): (i64, Vec<AccountRow>)| (limit(max_requests), rules);
            let spec = combined_spec([row(one.clone()), row(other.clone())]);
            let subjects = spec.subjects(Some("alice"), None).unwrap();
            let own = subjects.first().map(|subject| subject.limits[0]);
            let found = own.filter(|own| !own.exempt).map(|own| own.max_requests);
            assert_eq!(found, expected, "{one:?} {other:?}");
        }
    }
}

#[test]
fn one_row_refuses_an_account_for_all() {
    let limit = LimitRow { name: "own".to_owned(), scope: "account".to_owned(), ..LimitRow::default() };
    let limit = LimitRow { max_requests: 10, window_ms: 1_000, ..limit };
    let rule = |effect: &str| {
        vec![AccountRow { account: "alice".to_owned(), rule: Some(effect.to_owned()), ..AccountRow::default() }]
    };
    // Rules of two rows; whether charges are refused, and what its look-ups count against (`None`: all are blocked).
    let table = [
        (rule("refuse"), vec![], true, Some(true)),
        (rule("refuse"), rule("exempt"), true, Some(true)),
        (rule("refuse"), rule("blocked"), false, None),
        (rule("exempt"), rule("exempt"), false, Some(false)),
    ];
    for (one, other, refused, counted) in table {
        for (one, other) in [(one.clone(), other.clone()), (other, one)] {
            let spec = combined_spec([(limit.clone(), one.clone()), (limit.clone(), other.clone())]);
            let subjects = spec.subjects(Some("alice"), None).ok();
            let found = subjects.map(|subjects| !subjects[0].limits[0].exempt);
            let refuses = ["alice", "bob"].map(|account| spec.refuses_charges_of(Some(account)));
            assert_eq!((refuses, found), ([refused, false], counted), "{one:?} {other:?}");
        }
    }
}

/// A quota allows the same whether its spec is computed alone or with all; one with an invalid row allows nothing.
#[test]
fn quota_specs_match_single_quota_specs() {
    let row = |name: &str, quota: Option<&str>, max_requests| ProviderRow {
        name: name.to_owned(),
        quota: quota.map(str::to_owned),
        url: "https://acme.test/".to_owned(),
        limits: vec![LimitRow { name: "all".to_owned(), max_requests, window_ms: 1_000, ..LimitRow::default() }],
        ..ProviderRow::default()
    };
    let rows = [
        row("acme", Some("shared"), 9),
        row("bolt", None, 5),
        row("crate", Some("shared"), 7),
        ProviderRow { enabled: false, ..row("dusk", None, 3) },
        row("echo", Some("doubtful"), 2),
    ];
    let meant = rows.map(|row| row.validate(1).unwrap()).map(|row| (row.name.clone(), Arc::new(row)));
    let bad = |provider: &str, quota: &str| InvalidRow {
        provider: provider.to_owned(),
        quota: quota.to_owned(),
        enabled: true,
        paused: false,
        problems: vec!["timeout_ms is 0".to_owned()],
    };
    // One row has a last valid version, so its limits are known; one is disabled, so it has none.
    let disabled = InvalidRow { enabled: false, ..bad("golf", "shared") };
    let bad = vec![bad("bolt", "bolt"), bad("foxtrot", "doubtful"), disabled];
    let known = LoadedSettings { version: 4, providers: meant.into(), invalid_rows: bad };
    let all = quota_specs(&known);
    let found: Vec<(&str, usize, Option<u32>)> = all
        .iter()
        .map(|quota| {
            let most = quota.spec.as_ref().map(|spec| spec.limits[0].max_requests);
            (quota.quota.as_str(), quota.rows.len(), most)
        })
        .collect();
    assert_eq!(found, [("bolt", 1, Some(5)), ("doubtful", 1, None), ("shared", 2, Some(7))]);
    for QuotaRows { quota, spec, .. } in all {
        assert_eq!(spec, quota_spec(&known, quota), "{quota}");
    }
}

/// Others that use the same provider account use its merchants' limits as well.
#[test]
fn reserve_applies_to_account_rules() {
    let limit = LimitRow {
        name: "own".to_owned(),
        scope: "account".to_owned(),
        algorithm: "token_bucket".to_owned(),
        max_requests: 100,
        window_ms: 1_000,
        burst: Some(40),
        ..LimitRow::default()
    };
    let rule = AccountRow {
        account: "alice".to_owned(),
        rule: Some("limit".to_owned()),
        max_requests: Some(10),
        window_ms: Some(1_000),
        burst: Some(8),
        ..AccountRow::default()
    };
    let all = LimitRow { name: "all".to_owned(), max_requests: 1_000, window_ms: 1_000, ..LimitRow::default() };
    let row = ProviderRow {
        name: "acme".to_owned(),
        url: "https://acme.test/".to_owned(),
        reserve_percent: 25,
        limits: vec![all, limit],
        accounts: vec![rule.clone()],
        ..ProviderRow::default()
    };
    let meant = row.validate(1).unwrap();
    let known = LoadedSettings {
        version: 1,
        providers: [(meant.name.clone(), Arc::new(meant))].into(),
        invalid_rows: Vec::new(),
    };
    let spec = quota_spec(&known, &ProviderName::new("acme").unwrap()).unwrap();
    let own = |account| spec.subjects(Some(account), None).unwrap()[0].limits[0];
    assert_eq!((own("alice").max_requests, own("alice").burst), (7, Some(6)));
    assert_eq!((own("bob").max_requests, own("bob").burst), (75, Some(30)));
    // A rule of which the reserve leaves nothing is a mistake, not a closed limit.
    let small = AccountRow { max_requests: Some(1), burst: None, ..rule };
    let problems = ProviderRow { accounts: vec![small], ..row }.validate(1).unwrap_err().problems;
    assert!(
        problems[0].starts_with("account `alice`: reserve_percent is 25: of its own max_requests 1"),
        "{problems:?}"
    );
}

#[test]
fn the_smaller_burst_of_two_rules_counts() {
    let limit = LimitRow {
        name: "own".to_owned(),
        scope: "account".to_owned(),
        algorithm: "token_bucket".to_owned(),
        max_requests: 100,
        window_ms: 1_000,
        burst: Some(400),
        ..LimitRow::default()
    };
    let rule = |burst| AccountRow {
        account: "alice".to_owned(),
        rule: Some("limit".to_owned()),
        max_requests: Some(10),
        window_ms: Some(1_000),
        burst,
        ..AccountRow::default()
    };
    for (one, other, at_once) in [
        (vec![rule(Some(8))], vec![rule(None)], 8),
        (vec![rule(Some(8))], vec![rule(Some(30))], 8),
        (vec![rule(Some(8))], vec![], 8),
        (vec![rule(None)], vec![], 10),
    ] {
        let spec = combined_spec([(limit.clone(), one), (limit.clone(), other)]);
        let subject = spec.subjects(Some("alice"), None).unwrap().remove(0);
        assert_eq!(spec.subject_counters(&subject)[0].max, at_once, "{spec:?}");
    }
}
