use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::domain::permit_protocol::{
    CallKind, CostByKind, LimiterCall, PermitRelease, PermitRequest, RebuildData, ReleaseKind,
};
use crate::domain::provider::{BOOKING_HORIZON, ProviderName, StoreDown};
use crate::domain::quota::Quota;
use crate::domain::quota_limits::QuotaLimits;
use crate::domain::quota_spec::LimitSpec;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;
use crate::ledger::provider_row::{LimitRow, ProviderRow};

const START_US: u64 = 1_800_000_000_000_000;
const STEP_US: u64 = 5_000;

fn limit(algorithm: Algorithm, max_requests: i64, window_ms: i64) -> LimitRow {
    let algorithm = algorithm.name().to_owned();
    LimitRow { name: "all".to_owned(), algorithm, max_requests, window_ms, ..LimitRow::default() }
}

fn log(name: &str, max_requests: i64, window_ms: i64) -> LimitRow {
    LimitRow { name: name.to_owned(), ..limit(Algorithm::SlidingLog, max_requests, window_ms) }
}

fn row(limits: Vec<LimitRow>) -> ProviderRow {
    let url = "https://acme.example/".to_owned();
    ProviderRow { name: "acme".to_owned(), url, limits, ..ProviderRow::default() }
}

fn provider(limits: Vec<LimitRow>, change: impl FnOnce(&mut ProviderRow)) -> Provider {
    let mut row = row(limits);
    change(&mut row);
    row.validate(1).unwrap()
}

fn plain(limits: Vec<LimitRow>) -> Provider {
    provider(limits, |_| ())
}

#[test]
fn concurrency_limit_says_no_rate() {
    let slots = |max_requests| {
        let window_ms = LimitRow::default().window_ms;
        LimitRow { name: "slots".to_owned(), ..limit(Algorithm::Concurrency, max_requests, window_ms) }
    };
    let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
    // A timeout of 10 s, and a send budget of half a second.
    let slowest = 5.0 / 10.5;
    for (limits, egress, startable, least) in [
        (vec![slots(5)], 1_000_000.0, 10.0, slowest),
        (vec![slots(5), log("second", 100, 1_000)], 100.0, 10.0, slowest),
        (vec![slots(500), log("second", 3, 1_000)], 3.0, 3.0, 3.0),
        (vec![slots(0)], 0.0, 0.0, 0.0),
    ] {
        let row = plain(limits);
        assert_eq!((row.egress_per_second(), row.startable_within(second, minute)), (egress, startable));
        assert!((row.least_per_second() - least).abs() < 1e-9, "{}", row.least_per_second());
        assert!(row.tightest_rate().is_none_or(|rate| !rate.is_at_once()));
    }
    let even = provider(vec![slots(5)], |row| row.pacing = "even".to_owned());
    assert_eq!((even.egress_per_second(), even.burst_window(), even.is_paced()), (1_000_000.0, None, false));
}

#[test]
fn default_rate_is_a_seconds_allowance() {
    use Algorithm::{FixedWindow, Gcra, SlidingLog, SlidingWindow, TokenBucket};
    let burst = |algorithm, burst| vec![LimitRow { burst: Some(burst), ..limit(algorithm, 100, 1_000) }];
    for (limits, per_second) in [
        (vec![log("second", 100, 1_000), log("day", 100_000, 86_400_000)], 100),
        (vec![limit(SlidingLog, 100, 1_000)], 100),
        (vec![limit(SlidingWindow, 100, 1_000)], 100),
        // The end of one window and the beginning of the next.
        (vec![limit(FixedWindow, 100, 1_000)], 200),
        (vec![limit(FixedWindow, 600, 60_000)], 1_200),
        (vec![limit(FixedWindow, 20, 250)], 100),
        // A full bucket, and 99 more before the second is over.
        (vec![limit(TokenBucket, 100, 1_000)], 199),
        (burst(TokenBucket, 500), 599),
        (burst(TokenBucket, 1), 100),
        (vec![limit(TokenBucket, 5, 3_600_000)], 5),
        (vec![limit(Gcra, 100, 1_000)], 100),
        (burst(Gcra, 49), 149),
        (vec![limit(Gcra, 1, 3_600_000)], 1),
        // Windows below a second begin again within it, and the last one counts whole.
        (vec![limit(SlidingLog, 20, 250)], 80),
        (vec![limit(SlidingLog, 20, 300)], 80),
        (vec![limit(SlidingLog, 1, 1)], 1_000),
        (vec![limit(SlidingLog, 1_000_000, 1)], 1_000_000_000),
        (vec![limit(SlidingLog, 600, 60_000)], 600),
        (vec![limit(SlidingLog, 1, 2_678_400_000)], 1),
        (vec![limit(SlidingLog, 0, 1_000)], 0),
        (vec![limit(TokenBucket, 0, 1_000)], 0),
        (vec![limit(FixedWindow, 0, 1_000), log("open", 9, 1_000)], 0),
    ] {
        let provider = plain(limits);
        assert_eq!(provider.egress_per_second(), f64::from(per_second), "{:?}", provider.limits);
    }
}

#[test]
fn only_charge_limits_set_the_default_rate() {
    let second = || log("second", 100, 1_000);
    let other = |change: fn(&mut LimitRow)| {
        let mut other = log("other", 3, 1_000);
        change(&mut other);
        plain(vec![second(), other])
    };
    let alone = [
        other(|limit| limit.scope = "account".to_owned()),
        other(|limit| limit.scope = "reference".to_owned()),
        other(|limit| limit.applies_to = "lookup".to_owned()),
        other(|limit| limit.shadow = true),
        other(|limit| limit.enabled = false),
    ];
    for provider in alone {
        assert_eq!((provider.egress_per_second(), provider.egress_counts_lookups()), (100.0, true));
    }
    let charges = other(|limit| limit.applies_to = "charge".to_owned());
    assert_eq!((charges.egress_per_second(), charges.egress_counts_lookups()), (3.0, false));
    // The slower limit decides with even pacing alone.
    let long = |pacing: &str| {
        let charges = LimitRow { applies_to: "charge".to_owned(), ..log("minute", 120, 60_000) };
        provider(vec![second(), charges], |row| row.pacing = pacing.to_owned())
    };
    assert_eq!((long("burst").egress_per_second(), long("burst").egress_counts_lookups()), (100.0, true));
    assert_eq!((long("even").egress_per_second(), long("even").egress_counts_lookups()), (2.0, false));
}

#[test]
fn settings_of_the_row_change_the_rate() {
    let both = || vec![log("second", 100, 1_000), log("minute", 600, 60_000)];
    let reserve = provider(both(), |row| row.reserve_percent = 25);
    assert_eq!((reserve.egress_per_second(), reserve.mean_per_second()), (75.0, 7.5));
    let bucket = LimitRow { burst: Some(3), ..limit(Algorithm::TokenBucket, 100, 1_000) };
    // A burst is never reserved away.
    assert_eq!(provider(vec![bucket], |row| row.reserve_percent = 90).egress_per_second(), 10.0);
    let even = provider(both(), |row| row.pacing = "even".to_owned());
    assert_eq!((even.egress_per_second(), even.mean_per_second()), (10.0, 10.0));
    for (leak, mean) in [(4.0, 4.0), (1_000.0, 10.0)] {
        for pacing in ["burst", "even"] {
            let own = provider(both(), |row| (row.leak_per_second, row.pacing) = (Some(leak), pacing.to_owned()));
            assert_eq!(
                (own.egress_per_second(), own.mean_per_second(), own.egress_counts_lookups()),
                (leak, mean, true)
            );
        }
    }
}

#[test]
fn startable_jobs_follow_limits_and_egress_rate() {
    let seconds = Duration::from_secs;
    let both = || vec![log("second", 100, 1_000), log("minute", 600, 60_000)];
    let own = |leak| provider(both(), |row| row.leak_per_second = Some(leak));
    for (provider, within, jobs) in [
        (plain(both()), seconds(1), 100.0),
        (plain(both()), seconds(4), 400.0),
        (plain(both()), seconds(12), 600.0),
        (plain(both()), Duration::from_millis(80), 8.0),
        (plain(both()), Duration::ZERO, 0.0),
        (own(1_000.0), seconds(12), 12_000.0),
        (own(2.0), seconds(12), 24.0),
        (provider(both(), |row| row.pacing = "even".to_owned()), seconds(12), 120.0),
        (plain(vec![log("closed", 0, 1_000)]), seconds(12), 0.0),
        // Windows above a minute.
        (plain(vec![log("hour", 100, 3_600_000)]), seconds(12), 25.0),
        (plain(vec![log("hour", 1, 3_600_000)]), seconds(12), 1.0),
        (plain(vec![log("second", 9, 1_000), log("day", 100_000, 86_400_000)]), seconds(2), 18.0),
    ] {
        assert_eq!(provider.startable_within(within, seconds(60)), jobs, "{within:?}");
    }
}

/// Shares of the limits while Redis is down, and the limits of a quota with other rows, are never above a row's own.
#[test]
fn shares_and_shared_quotas_allow_no_more() {
    let allowance = |limit: &LimitSpec| limit.allowance().unwrap().most_within(EGRESS_SPAN);
    for algorithm in Algorithm::WITH_WINDOW {
        let own = plain(vec![limit(algorithm, 100, 1_500)]);
        let others = [(50, 1_500), (100, 1_000), (100, 9_000), (300, 1_000)];
        for (max_requests, window_ms) in others {
            let other = provider(vec![limit(algorithm, max_requests, window_ms)], |row| row.name = "other".to_owned());
            let shared = QuotaLimits::of_rows([&own, &other]).into_specs().unwrap();
            assert_eq!(shared.len(), 1);
            assert!(f64::from(allowance(&shared[0])) <= own.egress_per_second(), "{algorithm:?}");
            for of in [1, 3, 200] {
                assert!(allowance(&shared[0].divided_by(of)) <= allowance(&shared[0]), "{algorithm:?} / {of}");
            }
        }
    }
}

/// Most requests within a span by counting, instant by instant, as a provider with this algorithm would.
fn counted(allowance: &Allowance, span: u64) -> u64 {
    let (max, at_once) = (u64::from(allowance.max_requests), u64::from(allowance.at_once));
    let window = u64::try_from(allowance.window.as_millis()).unwrap();
    match allowance.algorithm {
        Algorithm::SlidingLog | Algorithm::SlidingWindow => {
            let mut starts: Vec<u64> = Vec::new();
            for now in 0..span {
                let counts = |starts: &[u64]| starts.iter().filter(|start| *start + window > now).count() as u64;
                let free = max - counts(&starts);
                starts.extend((0..free).map(|_| now));
            }
            starts.len() as u64
        }
        Algorithm::FixedWindow => {
            // Instants are microseconds. The span touches most windows when it begins with the last one of a window.
            let (span_us, window_us) = (span * 1_000, window * 1_000);
            let phase_us = window_us - 1;
            ((phase_us + span_us - 1) / window_us + 1) * max
        }
        Algorithm::TokenBucket | Algorithm::Gcra => {
            at_once + (1..).take_while(|back| back * window < span * max).count() as u64
        }
        Algorithm::Concurrency => unreachable!("it says no rate"),
    }
}

/// A lane with unlimited demand behind its own limits, in virtual time.
struct Lane {
    quota: Quota,
    spec: QuotaSpec,
    calls: u64,
    /// Granted permits that have not started: start, call and number.
    booked: VecDeque<(u64, u64, u32)>,
    starts_us: Vec<u64>,
}

impl Lane {
    fn new(provider: &Provider) -> Self {
        let spec = QuotaSpec {
            quota: ProviderName::new("acme").unwrap(),
            version: 1,
            limits: QuotaLimits::of_rows([provider]).into_specs().unwrap(),
            account_rules: Vec::new(),
            pacing: None,
            grant_jitter: None,
            hold_max: Duration::from_secs(1),
            send_budget: Duration::from_millis(500),
            store_down: StoreDown::Wait,
            members: Vec::new(),
            resumed_at: 0,
            handover: Duration::ZERO,
        };
        Self { quota: Quota::default(), spec, calls: 0, booked: VecDeque::new(), starts_us: Vec::new() }
    }

    /// Asks for permits and releases those that have started; returns the number of granted permits.
    fn request(&mut self, now_us: u64, permits: u32) -> u32 {
        self.calls += 1;
        let due = self.booked.iter().take_while(|(start_us, ..)| *start_us <= now_us).count();
        let release = |(_, call, cost): (u64, u64, u32)| PermitRelease {
            call,
            cost,
            kind: CallKind::Charge,
            subjects: Vec::new(),
            release_kind: ReleaseKind::Used { age: Duration::ZERO },
        };
        let state_epoch = Micros(START_US);
        let call = LimiterCall {
            incarnation: 1,
            number: self.calls,
            requests: if permits > 0 { vec![PermitRequest::charges(permits, 1)] } else { Vec::new() },
            releases: self.booked.drain(..due).map(release).collect(),
            pause: None,
            rebuild: Some(RebuildData { state_epoch, ended: Vec::new(), in_flight: CostByKind::default() }),
            seeds: None,
            invalidate_epoch: None,
            look_ahead: BOOKING_HORIZON,
            run_id: "run".into(),
        };
        let reply = self.quota.call(Micros(START_US + now_us), &self.spec, &call);
        for grant in &reply.grants {
            let start_us = now_us + grant.wait_us;
            self.booked.push_back((start_us, self.calls, grant.permits));
            self.starts_us.extend((0..grant.permits).map(|_| start_us));
        }
        self.booked.make_contiguous().sort_unstable();
        u32::try_from(reply.permits()).unwrap()
    }

    /// Starts until an instant, with the limiter alone or behind a leaky bucket at this rate.
    fn run(mut self, until_us: u64, egress_per_second: Option<f64>) -> Vec<u64> {
        let mut bucket = egress_per_second.map(LeakyBucket::new);
        let mut waiting = 0;
        for now_us in (0..until_us).step_by(usize::try_from(STEP_US).unwrap()) {
            let now = Duration::from_micros(now_us);
            match &mut bucket {
                None => waiting = 1_000,
                Some(bucket) => {
                    while waiting < 1_000 && bucket.wait(now).is_zero() {
                        bucket.leak(now);
                        waiting += 1;
                    }
                }
            }
            waiting -= self.request(now_us, waiting);
        }
        self.starts_us.sort_unstable();
        self.starts_us
    }
}

prop_compose! {
    fn any_limit()(
        algorithm in prop::sample::select(Algorithm::WITH_WINDOW.to_vec()),
        max_requests in 1..60_i64,
        window_ms in 1_000..4_000_i64,
        part in 1..8_i64,
        burst in prop::option::of(1..90_i64),
    ) -> LimitRow {
        // A sliding window of less than a second is no valid row.
        let window_ms = if algorithm == Algorithm::SlidingWindow { window_ms } else { window_ms / part };
        let has_burst = matches!(algorithm, Algorithm::TokenBucket | Algorithm::Gcra);
        let is_aligned = algorithm == Algorithm::FixedWindow;
        // A calendar window begins with the run: what its last instants would have allowed is not used.
        let offset_ms = if is_aligned { i64::try_from(START_US / 1_000).unwrap() % window_ms } else { 0 };
        LimitRow { burst: burst.filter(|_| has_burst), offset_ms, ..limit(algorithm, max_requests, window_ms) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn allowance_matches_counting(
        algorithm in prop::sample::select(Algorithm::WITH_WINDOW.to_vec()),
        max_requests in 1..20_u32, window_ms in 1..1_500_u64, at_once in 1..30_u32, span_ms in 1..2_000_u64,
    ) {
        let window = Duration::from_millis(window_ms);
        let allowance = Allowance { algorithm, max_requests, at_once, window, counts_lookups: true };
        let most = allowance.most_within(Duration::from_millis(span_ms));
        prop_assert_eq!(u64::from(most), counted(&allowance, span_ms), "{:?}", allowance);
    }

    /// No second holds more than the default egress rate, and no start is more than a second later than by the limiter
    /// alone.
    #[test]
    fn limiter_alone_decides_behind_the_default_egress(limits in prop::collection::vec(any_limit(), 1..4)) {
        let named = |(nth, limit): (usize, LimitRow)| LimitRow { name: format!("l{nth}"), ..limit };
        let valid = row(limits.into_iter().enumerate().map(named).collect()).validate(1);
        prop_assume!(valid.is_ok());
        let provider = valid.unwrap();
        let per_second = provider.egress_per_second();
        let alone = Lane::new(&provider).run(4_000_000, None);
        for (first, start_us) in alone.iter().enumerate() {
            let within = alone[first..].iter().take_while(|other| **other < start_us + 1_000_000).count();
            prop_assert!(within as f64 <= per_second, "{within} in a second, and the egress rate is {per_second}");
        }
        let behind = Lane::new(&provider).run(6_000_000, Some(per_second));
        for (nth, start_us) in alone.iter().enumerate() {
            let later_us = behind.get(nth).map_or(u64::MAX, |behind| behind.saturating_sub(*start_us));
            prop_assert!(later_us <= 1_000_000 + 4 * STEP_US, "start {nth} at {start_us} us is {later_us} us later");
        }
    }
}
