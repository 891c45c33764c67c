use super::*;
use crate::domain::limit::{LimitOverride, Rate};
use crate::domain::provider::StoreDown;

const HOUR: Duration = Duration::from_secs(3_600);

/// A spec with two limits per account, one per reference, and one for all.
fn spec(rules: &[(&str, Option<&str>, Rule)]) -> QuotaSpec {
    let limit =
        |name: &str, max_requests, scope| LimitSpec { scope, ..LimitSpec::sliding_log(name, max_requests, HOUR) };
    QuotaSpec {
        quota: ProviderName::new("acme").unwrap(),
        version: 1,
        limits: vec![
            limit("account-a", 10, Scope::Account),
            limit("account-b", 20, Scope::Account),
            limit("all", 100, Scope::Provider),
            limit("reference", 5, Scope::Reference),
        ],
        account_rules: rules
            .iter()
            .map(|(account, limit, rule)| AccountRule {
                account: (*account).to_owned(),
                limit: limit.map(str::to_owned),
                rule: *rule,
            })
            .collect(),
        pacing: None,
        grant_jitter: None,
        hold_max: Duration::from_secs(10),
        send_budget: Duration::from_millis(500),
        store_down: StoreDown::Wait,
        members: Vec::new(),
        resumed_at: 0,
        handover: Duration::ZERO,
    }
}

fn own(rate: &str) -> Rule {
    Rule::Limit(rate.parse::<Rate>().unwrap().into())
}

type Rules<'a> = &'a [(&'a str, Option<&'a str>, Rule)];
/// Index in the spec, requests, seconds; `None`: the account is blocked.
type Counted = Option<Vec<(usize, u32, u64)>>;

#[test]
fn account_rules_select_and_override_limits() {
    let usual = Some(vec![(0, 10, 3_600), (1, 20, 3_600)]);
    let table: [(Rules<'_>, Counted); 13] = [
        (&[], usual.clone()),
        (&[("other", None, Rule::Blocked), ("other", None, Rule::Exempt)], usual),
        (&[("me", None, Rule::Exempt)], Some(vec![])),
        (&[("me", Some("account-a"), Rule::Exempt)], Some(vec![(1, 20, 3_600)])),
        (&[("me", None, own("3/1m"))], Some(vec![(0, 3, 60), (1, 3, 60)])),
        (&[("me", Some("account-b"), own("3/1m"))], Some(vec![(0, 10, 3_600), (1, 3, 60)])),
        // A rule that names a limit takes precedence, at any position.
        (&[("me", None, own("3/1m")), ("me", Some("account-a"), Rule::Exempt)], Some(vec![(1, 3, 60)])),
        (&[("me", Some("account-a"), own("7/1d")), ("me", None, Rule::Exempt)], Some(vec![(0, 7, 86_400)])),
        (&[("me", None, own("0/1m"))], Some(vec![(0, 0, 60), (1, 0, 60)])),
        (&[("me", None, Rule::Blocked)], None),
        // Look-ups of a refused account count as usual.
        (&[("me", None, Rule::Refuse)], Some(vec![(0, 10, 3_600), (1, 20, 3_600)])),
        (&[("me", None, Rule::Refuse), ("me", Some("account-a"), Rule::Exempt)], Some(vec![(1, 20, 3_600)])),
        (&[("me", None, own("3/1m")), ("me", Some("account-b"), Rule::Blocked)], None),
    ];
    for (rules, expected) in table {
        let counted = spec(rules).subjects(Some("me"), None).ok().map(|subjects| {
            assert!(subjects.len() <= 1);
            let limits = subjects.into_iter().flat_map(|subject| {
                assert_eq!(subject.key, "account:me");
                subject.limits.into_iter().filter(|limit| !limit.exempt)
            });
            limits.map(|limit| (limit.index, limit.max_requests, limit.window.as_secs())).collect()
        });
        assert_eq!(counted, expected, "{rules:?}");
    }
}

#[test]
fn references_are_counted_without_account_rules() {
    let keys = |rules: Rules<'_>, account, reference| {
        let subjects = spec(rules).subjects(account, reference).unwrap();
        subjects.into_iter().map(|subject| (subject.key, subject.limits.len())).collect::<Vec<_>>()
    };
    let (account, reference) = (("account:me".to_owned(), 2), ("reference:r".to_owned(), 1));
    assert_eq!(keys(&[], Some("me"), Some("r")), [account.clone(), reference.clone()]);
    assert_eq!(keys(&[], None, Some("r")), std::slice::from_ref(&reference));
    assert_eq!(
        keys(&[("me", None, Rule::Exempt)], Some("me"), Some("r")),
        [account, reference],
        "counted all the same"
    );
    assert_eq!(keys(&[("r", None, Rule::Blocked)], None, Some("r")).len(), 1, "rules are of accounts");
    assert_eq!(keys(&[], None, None), []);
}

#[test]
fn largest_admissible_cost_is_computed() {
    let mut spec = spec(&[("me", None, own("3/1m"))]);
    let cost_max = |spec: &QuotaSpec, account, kind| spec.cost_max(kind, &spec.subjects(account, None).unwrap());
    assert_eq!(cost_max(&spec, None, CallKind::Charge), 100);
    assert_eq!(cost_max(&spec, Some("you"), CallKind::Charge), 10);
    assert_eq!(cost_max(&spec, Some("me"), CallKind::Charge), 3);
    spec.pacing = Some(Pacing::Even);
    assert_eq!(cost_max(&spec, None, CallKind::Charge), 100, "pacing admits any cost");
    spec.limits[0].shadow = true;
    assert_eq!(cost_max(&spec, Some("you"), CallKind::Charge), 20);
    spec.limits[1].applies_to = AppliesTo::Lookup;
    assert_eq!(cost_max(&spec, Some("you"), CallKind::Charge), 100);
    assert_eq!(cost_max(&spec, Some("you"), CallKind::Lookup), 20);
}

#[test]
fn account_bucket_is_kept_until_drained() {
    let slow = LimitOverride { rate: "1/1h".parse().unwrap(), burst: Some(100) };
    let mut spec = spec(&[("slow", Some("account-a"), Rule::Limit(slow))]);
    spec.limits[0].algorithm = Algorithm::TokenBucket;
    spec.limits[0].burst = Some(10);
    assert_eq!(spec.longest_window_us(), micros_up(HOUR * 100));
    let limits = [SubjectLimit { index: 0, max_requests: 1, window: HOUR * 24 * 31, burst: Some(100), exempt: false }];
    let slowest = spec.subject_counters(&Subject { key: "account:slowest".to_owned(), limits: limits.to_vec() });
    assert_eq!((slowest[0].max, slowest[0].window_us), (2, micros_up(HOUR * 24 * 62)), "no longer than is exact");
}

#[test]
fn lookback_counts_only_enforced_provider_limits() {
    let lag = Duration::from_millis(10_000 + 250);
    let month = HOUR * 24 * 31;
    let shadow = LimitSpec { shadow: true, ..LimitSpec::sliding_log("shadow", 9, month) };
    let mut spec = spec(&[]);
    let padded =
        |window: Duration| Duration::from_micros(LimitSpec::sliding_log("all", 1, window).counter_spec(true).window_us);
    assert_eq!(spec.lookback(), Lookback::all(padded(HOUR) + lag));
    spec.limits[0].window = month;
    spec.limits[2].window = HOUR / 2;
    assert_eq!(spec.lookback(), Lookback { count_within: padded(HOUR / 2) + lag, notice_within: padded(month) + lag });
    spec.limits.truncate(3);
    spec.limits[0] = shadow;
    assert_eq!(spec.lookback(), Lookback { count_within: padded(HOUR / 2) + lag, notice_within: padded(month) + lag });
    spec.limits[0].shadow = false;
    assert_eq!(spec.lookback(), Lookback::all(padded(month) + lag));
    assert_eq!(spec.lookback().notice_within, Duration::from_micros(spec.cold_start_us()));
}

#[test]
fn use_within_leaves_room_for_transit() {
    let ms = Duration::from_millis;
    for (grant_jitter, use_within) in [(None, 500), (Some(50), 40), (Some(10), 8), (Some(60_000), 500)] {
        let spec = QuotaSpec { grant_jitter: grant_jitter.map(ms), ..spec(&[]) };
        assert_eq!(spec.use_within(), ms(use_within), "{grant_jitter:?} ms");
    }
}

#[test]
fn windows_are_padded_for_clock_error() {
    for (window_ms, padded_us) in [(1, 3_001), (1_000, 1_002_500), (60_000, 60_032_000)] {
        let limit = LimitSpec::sliding_log("all", 1, Duration::from_millis(window_ms));
        assert_eq!(limit.padded_window_us(), padded_us);
    }
}

/// The bucket of an account with its own rate does not get the limit's burst.
#[test]
fn an_accounts_own_rate_has_its_own_burst() {
    let bucket = |algorithm, burst| {
        let mut spec = spec(&[]);
        spec.limits.truncate(1);
        spec.limits[0] = LimitSpec { algorithm, burst, ..spec.limits[0].clone() };
        spec
    };
    let rule = |rate: &str, burst| {
        let rule = Rule::Limit(LimitOverride { rate: rate.parse().unwrap(), burst });
        vec![AccountRule { account: "me".to_owned(), limit: None, rule }]
    };
    for (algorithm, burst, own, at_once) in [
        (Algorithm::TokenBucket, Some(500), ("1/1s", None), 1),
        (Algorithm::TokenBucket, Some(500), ("1/1s", Some(3)), 3),
        (Algorithm::TokenBucket, None, ("7/1s", None), 7),
        (Algorithm::Gcra, Some(500), ("1/1s", None), 1),
        (Algorithm::Gcra, Some(500), ("1/1s", Some(3)), 4),
        (Algorithm::SlidingLog, None, ("9/1s", Some(3)), 9),
    ] {
        let spec = QuotaSpec { account_rules: rule(own.0, own.1), ..bucket(algorithm, burst) };
        let subjects = spec.subjects(Some("me"), None).unwrap();
        let [counter] = &spec.subject_counters(&subjects[0])[..] else { panic!("{subjects:?}") };
        assert_eq!(counter.max, at_once, "{algorithm:?} {burst:?} {own:?}");
        let [counter] = &spec.subject_counters(&spec.subjects(Some("you"), None).unwrap()[0])[..] else { panic!() };
        assert_eq!(counter.max, spec.limits[0].cost_max(), "other accounts have the limit's own burst");
        // If the limit is divided among workers, its capacity is divided too.
        let shared = subjects[0].divided_by(&spec, 2);
        assert!(spec.divided_by(2).subject_counters(&shared)[0].max <= at_once / 2, "{shared:?}");
    }
}
