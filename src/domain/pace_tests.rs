use super::*;
use crate::ledger::provider_row::{LimitRow, ProviderRow};

fn limit(name: &str, max_requests: i64, window_ms: i64) -> LimitRow {
    LimitRow { name: name.to_owned(), max_requests, window_ms, ..LimitRow::default() }
}

fn provider(limits: Vec<LimitRow>, change: impl FnOnce(&mut ProviderRow)) -> Provider {
    let url = "https://acme.example/".to_owned();
    let mut row = ProviderRow { name: "acme".to_owned(), url, limits, ..ProviderRow::default() };
    change(&mut row);
    row.validate(1).unwrap()
}

fn text(row: &Provider, rows: &[&Provider]) -> String {
    Pace::new(row, rows.iter().copied()).unwrap().to_string()
}

#[test]
fn pace_names_limits_and_egress_rate() {
    let second = || vec![limit("per-second", 100, 1_000)];
    let both = || vec![limit("per-second", 100, 1_000), limit("per-day", 100_000, 86_400_000)];
    let bucket = LimitRow { algorithm: "token_bucket".to_owned(), burst: Some(500), ..limit("bucket", 100, 1_000) };
    let leak = |leak| move |row: &mut ProviderRow| row.leak_per_second = Some(leak);
    let even = |row: &mut ProviderRow| row.pacing = "even".to_owned();
    let reserve = |row: &mut ProviderRow| row.reserve_percent = 50;
    let slots = |max_requests| LimitRow {
        name: "slots".to_owned(),
        algorithm: "concurrency".to_owned(),
        max_requests,
        ..LimitRow::default()
    };
    for (provider, is_plain, expected) in [
        (provider(second(), |_| ()), true, "up to 100/s (limit per-second); egress 100/s per process"),
        (
            provider(both(), |_| ()),
            false,
            "up to 100/s (limit per-second), 100000/1d over time (limit per-day); egress 100/s per process",
        ),
        (
            provider(both(), reserve),
            false,
            "up to 50/s (limit per-second), 50000/1d over time (limit per-day); egress 50/s per process",
        ),
        (
            provider(vec![bucket], |_| ()),
            true,
            "up to 599/s, 100/1s over time (limit bucket); egress 599/s per process",
        ),
        (
            provider(vec![limit("all", 600, 60_000)], |_| ()),
            true,
            "up to 600/s, 600/1m over time (limit all); egress 600/s per process",
        ),
        (
            provider(second(), leak(2.5)),
            false,
            "up to 100/s (limit per-second); egress 2.5/s per process (leak_per_second)",
        ),
        (
            provider(second(), leak(0.05)),
            false,
            "up to 100/s (limit per-second); egress 3/m per process (leak_per_second)",
        ),
        (provider(both(), even), false, "100000/1d, evenly spaced (limit per-day); egress 1.16/s per process"),
        (
            provider(vec![limit("all", 3, 86_400_000)], even),
            false,
            "3/1d, evenly spaced (limit all); egress 3/d per process",
        ),
        (provider(vec![limit("all", 0, 1_000)], |_| ()), true, "nothing: limit all is closed"),
        (provider(vec![slots(5)], |_| ()), true, "up to 5 at once (limit slots); egress is not paced"),
        (
            provider(vec![limit("all", 100, 1_000), slots(5)], |_| ()),
            false,
            "up to 100/s (limit all), 5 at once (limit slots); egress 100/s per process",
        ),
        (provider(vec![limit("all", 100, 1_000), slots(0)], |_| ()), false, "nothing: limit slots is closed"),
        (
            provider(vec![slots(5)], leak(2.5)),
            false,
            "up to 5 at once (limit slots); egress 2.5/s per process (leak_per_second)",
        ),
    ] {
        assert_eq!(text(&provider, &[]), expected);
        assert_eq!(Pace::new(&provider, []).unwrap().is_plain(), is_plain, "{expected}");
    }
}

#[test]
fn pace_counts_all_enabled_rows_of_the_quota() {
    let named = |name: &str, max: i64, change: fn(&mut ProviderRow)| {
        provider(vec![limit("all", max, 1_000)], |row| {
            (row.name, row.quota) = (name.to_owned(), Some("shared".to_owned()));
            change(row);
        })
    };
    let row = named("acme", 100, |_| ());
    let other = named("other", 40, |_| ());
    let disabled = named("disabled", 7, |row| row.enabled = false);
    let apart = named("apart", 7, |row| row.quota = None);
    let even = named("even", 500, |row| row.pacing = "even".to_owned());
    let rows = [&row, &disabled, &apart];
    assert_eq!(text(&row, &rows), "up to 100/s (limit all); egress 100/s per process");
    assert_eq!(text(&row, &[&row, &other]), "up to 40/s (limit all); egress 100/s per process");
    assert_eq!(text(&row, &[&even, &row]), "100/1s, evenly spaced (limit all); egress 100/s per process");
    let spec = QuotaSpec {
        quota: row.quota.clone(),
        version: 1,
        limits: QuotaLimits::of_rows([&row, &other]).into_specs().unwrap(),
        account_rules: Vec::new(),
        pacing: None,
        grant_jitter: None,
        hold_max: Duration::ZERO,
        send_budget: Duration::ZERO,
        store_down: crate::domain::provider::StoreDown::Wait,
        members: Vec::new(),
        resumed_at: 0,
        handover: Duration::ZERO,
    };
    assert_eq!(Pace::under(&row, &spec), Pace::new(&row, [&other]));
}
