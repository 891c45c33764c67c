//! The strict provider by hand-written cases, its draws, and its charges and windows against naive recounts.

use proptest::prelude::*;

use super::super::AccountStatus;
use super::*;
use crate::domain::limit::Rate;
use crate::domain::observed_limit::{AnsweredRequest, observe};
use crate::domain::time::EpochMs;

fn request(payment: &str, key: Option<&str>, amount: i64) -> ChargeRequest {
    let body = format!(r#"{{"id":"{payment}","amount":{amount},"currency":"EUR"}}"#);
    ChargeRequest::parse(key, false, body.as_bytes()).unwrap()
}

fn ask(provider: &mut StrictProvider, now_us: u64, request: &ChargeRequest) -> Reply {
    let arrival = provider.record_arrival(now_us);
    assert_eq!(arrival.refused_for, None);
    provider.process(arrival, request)
}

#[test]
fn repeated_key_charges_once_and_replays() {
    let mut provider = StrictProvider::new(FakeOptions::default());
    let first = ask(&mut provider, 0, &request("p1", Some("k1"), 5));
    let again = ask(&mut provider, 10, &request("p1", Some("k1"), 5));
    assert_eq!((first.status, &first.body, first.replayed), (200, &again.body, false));
    assert!(again.replayed);
    assert_eq!(ask(&mut provider, 20, &request("p1", Some("k1"), 6)).status, 422);
    let report = provider.report();
    assert_eq!((report.charges, report.doubles, report.replays, report.requests), (1, 0, 1, 3));
}

#[test]
fn second_key_for_a_payment_is_a_double() {
    let mut provider = StrictProvider::new(FakeOptions::default());
    for (now, key) in [(0, "k1"), (1, "k2")] {
        assert_eq!(ask(&mut provider, now, &request("p1", Some(key), 5)).status, 200);
    }
    let report = provider.report();
    assert_eq!((report.doubles, report.double_ids, report.several_keys), (1, vec!["p1".to_owned()], 1));
}

#[test]
fn without_deduplication_or_a_key_every_request_charges() {
    let mut careless = StrictProvider::new(FakeOptions { deduplicate: false, ..FakeOptions::default() });
    let mut keyless = StrictProvider::new(FakeOptions::default());
    for now in 0..3 {
        assert_eq!(ask(&mut careless, now, &request("p1", Some("k1"), 5)).status, 200);
        assert_eq!(ask(&mut keyless, now, &request("p1", None, 5)).status, 200);
    }
    for provider in [careless, keyless] {
        assert_eq!((provider.effects()[0].count, provider.report().doubles), (3, 1));
    }
}

#[test]
fn concurrent_repeat_gets_in_progress() {
    let latency = Duration::from_millis(10);
    let mut provider = StrictProvider::new(FakeOptions { latency: (latency, latency), ..FakeOptions::default() });
    assert_eq!(ask(&mut provider, 0, &request("p1", Some("k1"), 5)).due_us, 10_000);
    assert_eq!(ask(&mut provider, 9_999, &request("p1", Some("k1"), 5)).status, 409);
    assert_eq!(ask(&mut provider, 10_000, &request("p1", Some("k1"), 5)).status, 200);
}

/// Only that account's charges fail, and they leave no effect; the others' effects say when they arrived.
#[test]
fn account_gets_its_status() {
    let statuses = vec![AccountStatus { account: "shop-1".to_owned(), status: 403 }];
    let mut provider = StrictProvider::new(FakeOptions { account_statuses: statuses, ..FakeOptions::default() });
    let mut charge = |now_us: u64, payment: &str, account: &str| {
        let body = format!(r#"{{"id":"{payment}","amount":5,"currency":"EUR","account":"{account}"}}"#);
        ask(&mut provider, now_us, &ChargeRequest::parse(Some(payment), false, body.as_bytes()).unwrap()).status
    };
    assert_eq!((charge(5, "p1", "shop-1"), charge(9, "p2", "shop-2"), charge(9, "p3", "shop-1")), (403, 200, 403));
    let effects = provider.effects();
    assert_eq!((effects.len(), effects[0].id.as_str(), effects[0].first_us), (1, "p2", 9));
}

/// A look-up returns the state of the payment, also while its charge is in progress, and counts in the windows.
#[test]
fn a_payment_can_be_looked_up() {
    let latency = Duration::from_millis(10);
    let mut provider = StrictProvider::new(FakeOptions { latency: (latency, latency), ..FakeOptions::default() });
    let look_up = |provider: &mut StrictProvider, now_us: u64, payment: &str| {
        let arrival = provider.record_arrival(now_us);
        let reply = provider.look_up(arrival, payment);
        (reply.status, serde_json::from_str::<serde_json::Value>(&reply.body).unwrap()["state"].clone())
    };
    assert_eq!(look_up(&mut provider, 0, "p1").0, 404);
    let charged = ask(&mut provider, 1, &request("p1", Some("k1"), 5));
    assert_eq!(look_up(&mut provider, 10_000, "p1"), (200, "processing".into()));
    let arrival = provider.record_arrival(10_001);
    let found: serde_json::Value = serde_json::from_str(&provider.look_up(arrival, "p1").body).unwrap();
    let reference = serde_json::from_str::<serde_json::Value>(&charged.body).unwrap()["id"].clone();
    assert_eq!(found, serde_json::json!({"id": reference, "state": "succeeded", "amount": 5, "currency": "EUR"}));
    assert_eq!(look_up(&mut provider, 10_002, "k1").0, 404, "by payment, not by key");
    let report = provider.report();
    assert_eq!((report.requests, report.lookups, report.charges), (5, 4, 1));
    let declining = FakeOptions { decline_rate: 1.0, ..FakeOptions::default() };
    let mut provider = StrictProvider::new(declining);
    assert_eq!(ask(&mut provider, 0, &request("p1", Some("k1"), 5)).status, 402);
    assert_eq!(look_up(&mut provider, 1, "p1"), (200, "declined".into()));
    let mut failing = StrictProvider::new(FakeOptions { error_rate: 1.0, ..FakeOptions::default() });
    let arrival = failing.record_arrival(0);
    assert!(matches!(failing.look_up(arrival, "p1").status, 500 | 503));
}

#[test]
fn a_forgotten_key_charges_again() {
    let retention = Some(Duration::from_millis(1));
    let mut provider = StrictProvider::new(FakeOptions { retention, ..FakeOptions::default() });
    for (now, count) in [(0, 1), (999, 1), (1_000, 2), (1_999, 2)] {
        assert_eq!(ask(&mut provider, now, &request("p1", Some("k1"), 5)).status, 200);
        assert_eq!(provider.effects()[0].count, count, "{now}");
    }
}

#[test]
fn faults_follow_their_rates() {
    let with = |options: FakeOptions| {
        let mut provider = StrictProvider::new(options);
        let reply = ask(&mut provider, 0, &request("p1", Some("k1"), 5));
        (reply, provider.report())
    };
    let (reply, report) = with(FakeOptions { error_rate: 1.0, ..FakeOptions::default() });
    assert!(matches!(reply.status, 500 | 503) && report.charges == 0);
    let (reply, report) = with(FakeOptions { lost_answer_rate: 1.0, ..FakeOptions::default() });
    assert!(reply.lost && report.charges == 1 && report.lost_answers == 1);
    let (reply, report) = with(FakeOptions { decline_rate: 1.0, ..FakeOptions::default() });
    assert_eq!((reply.status, report.charges, report.declines), (402, 0, 1));
    let (reply, report) = with(FakeOptions { partial_rate: 1.0, ..FakeOptions::default() });
    assert!(reply.status == 200 && reply.body.contains(r#""amount":2"#), "{}", reply.body);
    assert_eq!((report.charges, report.partials), (1, 1));
    let (reply, report) = with(FakeOptions { busy_rate: 1.0, ..FakeOptions::default() });
    assert!(reply.status == 429 && reply.body.contains("lock_timeout"), "{}", reply.body);
    assert_eq!((report.charges, report.refused_429), (0, 0), "its limits had nothing to do with it");
}

#[test]
fn excess_requests_are_refused_or_counted() {
    let limits = vec!["2/1s".parse().unwrap(), "3/10s".parse().unwrap()];
    let waits = |on_limit| {
        let options = FakeOptions { limits: limits.clone(), on_limit, ..FakeOptions::default() };
        let mut provider = StrictProvider::new(options);
        let waits: Vec<_> = (0..5).map(|n| provider.record_arrival(n * 100_000).refused_for).collect();
        (waits, provider.report())
    };
    let (refused, report) = waits(OnLimit::Refuse);
    let ms = |ms| Some(Duration::from_millis(ms));
    assert_eq!(refused, [None, None, ms(9_800), ms(9_800), ms(9_800)]);
    assert_eq!(report.refused_429, 3);
    let (counted, same) = waits(OnLimit::Count);
    assert!(counted.iter().all(Option::is_none) && same.refused_429 == 0);
    for report in [report, same] {
        let limits: Vec<_> = report.limits.iter().map(|l| (l.limit.as_str(), l.largest, l.breaches)).collect();
        assert_eq!(limits, [("2/1s", 5, 3), ("3/10s", 5, 2)]);
    }
}

#[test]
fn report_has_times_and_round_trips_json() {
    let mut provider = StrictProvider::new(FakeOptions::default());
    assert_eq!((provider.report().answer_ms, provider.report().rate_per_second), (None, 0.0));
    for n in 0..11 {
        let arrival = provider.record_arrival(n * 100_000);
        provider.record_response(arrival, arrival.at_us + 2_000, 200);
    }
    let report = provider.report();
    assert_eq!((report.rate_per_second, report.statuses[&200]), (10.0, 11));
    assert_eq!(report.answer_ms.as_ref().unwrap().mean, 2.0);
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<FakeProviderReport>(&text).unwrap(), report);
    provider.reset();
    assert_eq!(provider.report(), StrictProvider::new(FakeOptions::default()).report());
}

#[test]
fn clock_never_steps_back() {
    let mut provider = StrictProvider::new(FakeOptions::default());
    assert_eq!(provider.record_arrival(5).at_us, 5);
    assert_eq!(provider.record_arrival(3).at_us, 5);
    assert_eq!(provider.arrivals(), [5, 5]);
}

proptest! {
    /// Charges, doubles and answers against a list that is searched from end to end.
    #[test]
    fn charges_agree_with_a_recount(
        requests in prop::collection::vec((0..4_u8, 0..4_u8, 1..3_i64, 0..400_u64), 1..60),
        retention_us in prop_oneof![Just(None), (1..1_000_u64).prop_map(Some)],
    ) {
        let retention = retention_us.map(Duration::from_micros);
        let mut provider = StrictProvider::new(FakeOptions { retention, ..FakeOptions::default() });
        // (instant, key, body) of every charge.
        let mut charged: Vec<(u64, u8, (u8, i64))> = Vec::new();
        let mut now = 0;
        for (payment, key, amount, gap) in requests {
            now += gap;
            let alive = |at: u64| retention_us.is_none_or(|retention| now - at < retention);
            let known = charged.iter().rev().find(|(at, k, _)| *k == key && alive(*at));
            let wanted = match known {
                Some((_, _, body)) if *body != (payment, amount) => 422,
                _ => 200,
            };
            if known.is_none() {
                charged.push((now, key, (payment, amount)));
            }
            let asked = request(&format!("p{payment}"), Some(&format!("k{key}")), amount);
            prop_assert_eq!(ask(&mut provider, now, &asked).status, wanted);
        }
        for payment in 0..4 {
            let wanted = charged.iter().filter(|(_, _, body)| body.0 == payment).count() as u64;
            let id = format!("p{payment}");
            let got = provider.effects().iter().find(|effect| effect.id == id).map_or(0, |effect| effect.count);
            prop_assert_eq!(got, wanted);
        }
        let report = provider.report();
        let doubled: Vec<_> = provider.effects().iter().filter(|effect| effect.count > 1).collect();
        prop_assert_eq!(report.charges, provider.effects().iter().filter(|effect| effect.count > 0).count() as u64);
        prop_assert_eq!((report.doubles, report.double_ids.len()), (doubled.len() as u64, doubled.len()));
        let several_keys = provider.effects().iter().filter(|effect| effect.several_keys).count();
        prop_assert_eq!(report.several_keys, several_keys as u64);
    }
}

#[test]
fn json_and_form_are_read_invalid_ones_rejected() {
    let json = br#"{"id":"p1","amount":5,"currency":"EUR","payload":{"x":1}}"#;
    let read = ChargeRequest::parse(Some("k1"), false, json).unwrap();
    assert_eq!((read.payment.as_str(), read.amount, read.currency.as_str()), ("p1", 5, "EUR"));
    let form = ChargeRequest::parse(Some("k1"), true, b"amount=5&currency=EUR&account=a%201").unwrap();
    assert_eq!((form.payment.as_str(), form.account.as_deref()), ("k1", Some("a 1")));
    for (body, code) in [
        (r#"{"amount":5,"currency":"EUR"}"#, "missing_id"),
        (r#"{"id":"p1","currency":"EUR"}"#, "bad_amount"),
        (r#"{"id":"p1","amount":-5,"currency":"EUR"}"#, "bad_amount"),
        (r#"{"id":"p1","amount":5}"#, "missing_currency"),
        (r#"{"id":"p1","amount":1.5,"currency":"EUR"}"#, "bad_body"),
        ("", "bad_body"),
    ] {
        assert_eq!(ChargeRequest::parse(None, false, body.as_bytes()), Err(code), "{body}");
    }
}

#[test]
fn draws_repeat_and_keep_their_rates() {
    let options = FakeOptions {
        latency: (Duration::from_millis(20), Duration::from_millis(80)),
        error_rate: 0.1,
        lost_answer_rate: 0.2,
        decline_rate: 0.5,
        busy_rate: 0.3,
        seed: 7,
        ..FakeOptions::default()
    };
    let draws: Vec<FaultDraw> = (0..4_000).map(|n| draw(&options, &format!("pay-{n}"), 1)).collect();
    assert_eq!(draws[17], draw(&options, "pay-17", 1));
    assert_ne!(draws[17], draw(&options, "pay-17", 2));
    assert_ne!(draws[17], draw(&FakeOptions { seed: 8, ..options.clone() }, "pay-17", 1));
    let count = |what: fn(&FaultDraw) -> bool| draws.iter().filter(|draw| what(draw)).count();
    assert!((300..500).contains(&count(|draw| draw.error_status.is_some())));
    assert!((650..950).contains(&count(|draw| draw.loses_response)));
    assert!((1_850..2_150).contains(&count(|draw| draw.declines)));
    assert!((1_050..1_350).contains(&count(|draw| draw.is_busy)));
    assert!(draws.iter().all(|draw| (20..=80).contains(&draw.latency.as_millis())));
    let statuses: std::collections::BTreeSet<_> = draws.iter().filter_map(|draw| draw.error_status).collect();
    assert_eq!(statuses, [500, 503].into());
}

#[test]
fn rate_zero_never_fails_rate_one_always() {
    let calm = draw(&FakeOptions::default(), "x", 1);
    assert_eq!(
        calm,
        FaultDraw {
            latency: Duration::ZERO,
            error_status: None,
            loses_response: false,
            declines: false,
            is_busy: false,
            is_partial: false
        }
    );
    let all = FakeOptions { lost_answer_rate: 1.0, ..FakeOptions::default() };
    assert!((0..100).all(|attempt| draw(&all, "x", attempt).loses_response));
}

#[test]
fn percentiles_are_by_nearest_rank() {
    let times = ResponseTimes::from_durations((1..=200).rev().map(|ms| ms * 1_000).collect()).unwrap();
    assert_eq!(times, ResponseTimes { mean: 100.5, p50: 100.0, p99: 198.0, max: 200.0 });
    assert_eq!(ResponseTimes::from_durations(vec![]), None);
    assert_eq!(ResponseTimes::from_durations(vec![7_000]).unwrap().p99, 7.0);
}

/// Breaches and the largest count, by looking at all arrivals for each arrival.
fn recount(arrivals: &[u64], allowed: u64, window_us: u64) -> (u64, u64) {
    let in_window =
        |end: usize| arrivals[..=end].iter().filter(|arrival| arrivals[end] - **arrival < window_us).count() as u64;
    let counts = (0..arrivals.len()).map(in_window);
    counts.fold((0, 0), |(breaches, largest), count| (breaches + u64::from(count > allowed), largest.max(count)))
}

fn breaches(arrivals: &[u64], rates: &[Rate]) -> u64 {
    rates.iter().map(|rate| recount(arrivals, rate.max_requests().into(), micros_up(rate.window())).0).sum()
}

proptest! {
    #[test]
    fn the_books_agree_with_a_recount(
        gaps in prop::collection::vec(prop_oneof![Just(0_u64), Just(1_000), 0..3_000_u64], 1..120),
        limits in prop::collection::vec((0..6_u32, 1..8_u64), 1..4),
    ) {
        let rates: Vec<Rate> =
            limits.iter().map(|(n, ms)| Rate::new(*n, Duration::from_millis(*ms)).unwrap()).collect();
        let closed = rates.iter().any(|rate| rate.max_requests() == 0);
        let mut windows = ArrivalWindows::new(&rates);
        let mut now = 0;
        for gap in gaps {
            now += gap;
            let before = breaches(&windows.arrivals, &rates);
            let wait = windows.record_arrival(now);
            let after = breaches(&windows.arrivals, &rates);
            prop_assert_eq!(wait.is_some(), after > before);
            // After the named wait one more fits, unless a limit is closed; a microsecond sooner it would not.
            let fits = |at: u64| breaches(&[&windows.arrivals[..], &[at]].concat(), &rates) == after;
            if let Some(wait) = wait {
                prop_assert!(closed || fits(now + micros_up(wait)));
                prop_assert!(!fits(now + micros_up(wait) - 1));
            }
        }
        for count in &windows.counts {
            let wanted =
                recount(&windows.arrivals, count.limit.max_requests().into(), micros_up(count.limit.window()));
            prop_assert_eq!((count.breaches, count.largest), wanted);
        }
    }
}

#[test]
fn a_window_is_half_open() {
    let mut windows = ArrivalWindows::new(&["2/1s".parse().unwrap()]);
    for (at_us, wait_us) in [(0, None), (400_000, None), (999_999, Some(400_001)), (1_400_000, None), (1_999_999, None)]
    {
        assert_eq!(windows.record_arrival(at_us), wait_us.map(Duration::from_micros), "{at_us}");
    }
    assert_eq!((windows.counts[0].breaches, windows.counts[0].largest), (1, 3));
}

/// The requests of a client that backs off for the named wait after a 429, with the provider's own judgement.
fn throttled_client(limit: Rate, gap_us: u64, windows: u64) -> Vec<AnsweredRequest> {
    let mut provider = StrictProvider::new(FakeOptions { limits: vec![limit], ..FakeOptions::default() });
    let (start_us, window_us) = (10_000_000_000, micros_up(limit.window()));
    let (mut now_us, mut sent) = (start_us, Vec::new());
    while now_us < start_us + windows * window_us {
        let refused_for = provider.record_arrival(now_us).refused_for;
        let at = EpochMs(i64::try_from(now_us / 1_000).unwrap());
        sent.push(AnsweredRequest { at, is_throttled: refused_for.is_some() });
        now_us += refused_for.map_or(gap_us, micros_up);
    }
    sent
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The limit that is suggested after 429s is the one by which this provider judges.
    #[test]
    fn throttled_client_finds_the_limit(
        max_requests in 20..200_u32, window_s in prop::sample::select(vec![1_u64, 10, 60]), load in 1.3..20.0_f64,
    ) {
        let limit = Rate::new(max_requests, Duration::from_secs(window_s)).unwrap();
        let gap_us = (limit.window().as_micros() as f64 / f64::from(max_requests) / load) as u64;
        let sent = throttled_client(limit, gap_us.max(1), 12);
        let (from, now) = (EpochMs(0), sent.last().unwrap().at);
        let rate = observe(&sent, from, now, &[limit.window()]).and_then(|observed| observed.rate);
        let rate = rate.ok_or_else(|| TestCaseError::fail(format!("{limit}: nothing explains it")))?;
        let per_second = |rate: Rate| f64::from(rate.max_requests()) / rate.window().as_secs_f64();
        let ratio = per_second(rate) / per_second(limit);
        prop_assert!((0.95..=1.0).contains(&ratio), "{limit}: {rate}, {ratio}");
    }
}
