use std::sync::Arc;

use proptest::prelude::*;
use rand::SeedableRng as _;

use super::*;
use crate::domain::provider::ProviderName;
use crate::ledger::provider_row::{AccountRow, LimitRow, ProviderRow};
use crate::worker::quotas::quota_spec;
use crate::worker::settings_sync::LoadedSettings;

/// 2027-01-15, on a whole second.
pub const START_US: u64 = 1_800_000_000_000_000;

pub fn limit(name: &str, max_requests: i64, window_ms: i64) -> LimitRow {
    LimitRow { name: name.to_owned(), max_requests, window_ms, ..LimitRow::default() }
}

pub fn row(limits: Vec<LimitRow>) -> ProviderRow {
    let url = "https://p.example.com/charges".to_owned();
    let retention = Some(86_400);
    ProviderRow { name: "p".to_owned(), url, limits, idempotency_retention_s: retention, ..ProviderRow::default() }
}

/// A model in which only the limiter takes time.
pub fn model(row: &ProviderRow) -> Model {
    let provider = row.validate(1).unwrap();
    let name = ProviderName::new("p").unwrap();
    let providers = [(name.clone(), Arc::new(provider.clone()))].into();
    let spec = quota_spec(&LoadedSettings { version: 1, providers, invalid_rows: Vec::new() }, &name).unwrap();
    Model {
        spec,
        provider,
        weights: row.accounts.iter().map(|own| (own.account.clone(), u32::try_from(own.weight).unwrap())).collect(),
        processes: 1,
        start_us: START_US,
        latency: LatencyModel::Constant(0),
        transit: LatencyModel::Constant(0),
        round_trip: Duration::ZERO,
        commit: Duration::ZERO,
        commit_of_last: None,
        faults: 0.0,
        cold: false,
    }
}

pub fn run(model: &Model, arrivals: &JobArrivals) -> SimulationResult {
    simulate(model, arrivals, &mut StdRng::seed_from_u64(1))
}

/// Instants at which requests reach the provider, in milliseconds.
fn starts_ms(figures: &SimulationResult) -> Vec<u64> {
    figures.arrivals_us.iter().map(|at_us| at_us / 1_000).collect()
}

/// A window as the limiter counts it, 2 ms and 0.05 % longer, in whole milliseconds.
const SECOND_MS: u64 = 1_002;

/// The log counts whole milliseconds, and a call waits up to two of them for responses.
fn near(starts_ms: &[u64], expected: &[u64], slack_ms: u64) -> bool {
    starts_ms.len() == expected.len()
        && starts_ms.iter().zip(expected).all(|(start, expected)| (*expected..=expected + slack_ms).contains(start))
}

#[test]
fn three_jobs_start_one_window_apart() {
    let figures = run(&model(&row(vec![limit("all", 1, 1_000)])), &JobArrivals::burst(3));
    let starts = starts_ms(&figures);
    assert!(near(&starts, &[0, SECOND_MS, 2 * SECOND_MS], 3), "{starts:?}");
    assert_eq!((figures.succeeded, figures.unfinished, figures.windows[0].largest), (3, 0, 1));
    // Rounded up, where starts are cut.
    assert!((starts[2]..=starts[2] + 1).contains(&figures.wait.max_ms.unwrap()), "{:?}", figures.wait);
    assert_eq!(figures.clears_in_ms, figures.wait.max_ms);
}

#[test]
fn slot_is_held_until_the_response() {
    let slow = Model { latency: LatencyModel::Constant(500_000), ..model(&row(vec![limit("all", 1, 1_000)])) };
    let starts = starts_ms(&run(&slow, &JobArrivals::burst(3)));
    assert!(near(&starts, &[0, 500 + SECOND_MS, 2 * (500 + SECOND_MS)], 3), "{starts:?}");
    let mut by_start = row(vec![limit("all", 1, 1_000)]);
    (by_start.slot_release, by_start.transit_jitter_ms) = ("grant".to_owned(), 100);
    let by_start = Model { latency: LatencyModel::Constant(500_000), ..model(&by_start) };
    let starts = starts_ms(&run(&by_start, &JobArrivals::burst(3)));
    assert!(near(&starts, &[0, 100 + SECOND_MS, 2 * (100 + SECOND_MS)], 3), "{starts:?}");
}

#[test]
fn cold_limiter_waits_out_older_permits() {
    let cold = Model { cold: true, ..model(&row(vec![limit("all", 1, 1_000)])) };
    let starts = starts_ms(&run(&cold, &JobArrivals::burst(2)));
    // 250 ms of booking and 500 ms of send budget; then the ledger reports no uses.
    assert!(near(&starts, &[750, 750 + SECOND_MS], 10), "{starts:?}");
}

#[test]
fn tighter_of_two_limits_decides() {
    let mut both = row(vec![limit("minute", 3, 60_000), limit("second", 2, 1_000)]);
    both.leak_per_second = Some(1_000.0);
    let starts = starts_ms(&run(&model(&both), &JobArrivals::burst(5)));
    // Two at once, the third a second later, and the others when the first two have left the minute: 60.032 s.
    assert!(near(&starts[..3], &[0, 0, SECOND_MS], 5), "{starts:?}");
    assert!(near(&starts[3..], &[60_032, 60_032], 50), "{starts:?}");
}

#[test]
fn refused_job_waits_and_is_retried() {
    for mode in ["blocking", "requeue"] {
        let mut strict = row(vec![limit("all", 1, 20_000)]);
        (strict.mode, strict.leak_per_second) = (mode.to_owned(), Some(10.0));
        let figures = run(&model(&strict), &JobArrivals::burst(3));
        let starts = starts_ms(&figures);
        assert!(near(&starts, &[0, 20_012, 40_024], 600), "{mode}: {starts:?}");
        // It waits in the backlog, and not asleep.
        assert_eq!(figures.delayed, 0, "{mode}");
    }
}

#[test]
fn even_pacing_leaves_the_same_gap_everywhere() {
    let mut even = row(vec![limit("all", 10, 1_000)]);
    (even.pacing, even.leak_per_second) = ("even".to_owned(), Some(1_000.0));
    let two = Model { processes: 2, ..model(&even) };
    let starts = starts_ms(&run(&two, &JobArrivals::burst(30)));
    assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 99), "{starts:?}");
    assert!(starts[29] <= 3_100, "{starts:?}");
}

/// Limits of different windows, in one process and in two: the long one decides only once it is used up.
#[test]
fn long_limit_does_not_slow_a_lane() {
    let both = row(vec![limit("second", 100, 1_000), limit("day", 100_000, 86_400_000)]);
    for processes in [1, 2] {
        let figures = run(&Model { processes, ..model(&both) }, &JobArrivals::burst(800));
        let starts = starts_ms(&figures);
        let within = |from_ms| starts.iter().filter(|start| (from_ms..from_ms + 1_000).contains(*start)).count();
        let seconds: Vec<usize> = (0..7).map(|second| within(second * 1_000)).collect();
        assert!(figures.holds() && seconds.iter().all(|second| (95..=100).contains(second)), "{seconds:?}");
    }
}

/// Jobs that are held when the limit is used up go behind the backlog; those of a minute are kept instead.
#[test]
fn used_up_limit_delays_few_jobs() {
    for (max, window_ms, delayed_max) in [(100, 300_000, 52), (100, 60_000, 0), (100, 10_000, 0)] {
        let figures = run(&model(&row(vec![limit("all", max, window_ms)])), &JobArrivals::burst(300));
        assert!(
            figures.unfinished == 0 && figures.delayed <= delayed_max,
            "{window_ms} ms: {} delayed",
            figures.delayed
        );
    }
}

#[test]
fn bucket_burst_is_used_within_a_second() {
    for (algorithm, burst, wanted) in
        [("token_bucket", Some(50), 59), ("token_bucket", None, 19), ("gcra", Some(49), 59)]
    {
        let bucket = LimitRow { algorithm: algorithm.to_owned(), burst, ..limit("all", 10, 1_000) };
        let starts = starts_ms(&run(&model(&row(vec![bucket])), &JobArrivals::burst(100)));
        let first = starts.iter().filter(|start| **start < 1_000).count();
        assert!((wanted - 2..=wanted).contains(&first), "{algorithm} {burst:?}: {first} in the first second");
    }
}

#[test]
fn even_pacing_follows_the_slowest_limit() {
    let mut even = row(vec![limit("second", 100, 1_000), limit("long", 20, 5_000)]);
    even.pacing = "even".to_owned();
    let starts = starts_ms(&run(&Model { processes: 2, ..model(&even) }, &JobArrivals::burst(20)));
    assert!(starts.windows(2).all(|pair| (249..=260).contains(&(pair[1] - pair[0]))), "{starts:?}");
}

#[test]
fn account_at_its_limit_holds_no_other() {
    let mut rows =
        row(vec![limit("all", 100, 1_000), LimitRow { scope: "account".to_owned(), ..limit("each", 1, 60_000) }]);
    rows.accounts = vec![
        AccountRow { account: "free".to_owned(), rule: Some("exempt".to_owned()), ..AccountRow::default() },
        AccountRow { account: "shut".to_owned(), rule: Some("blocked".to_owned()), ..AccountRow::default() },
    ];
    let mut arrivals = JobArrivals::default();
    let jobs: Vec<JobArrival> = ["busy", "busy", "free", "free", "other", "shut"]
        .map(|name| JobArrival { account: Some(arrivals.account(name)), ..JobArrival::at(0) })
        .into();
    arrivals.add(jobs);
    let figures = run(&model(&rows), &arrivals);
    assert_eq!((figures.succeeded, figures.blocked, figures.unfinished), (5, 1, 0));
    let starts = starts_ms(&figures);
    assert!(starts[3] < 200, "all but the second of `busy`: {starts:?}");
    assert!((60_032..60_700).contains(&starts[4]), "{starts:?}");
    let each = figures.windows.iter().find(|window| window.limit == "each").unwrap();
    assert_eq!((each.largest, each.most), (1, 1));
}

#[test]
fn job_past_its_deadline_is_not_sent() {
    let mut arrivals = JobArrivals::default();
    arrivals.add((0..3).map(|_| JobArrival { expires_us: Some(1_500_000), ..JobArrival::at(0) }));
    let figures = run(&model(&row(vec![limit("all", 1, 1_000)])), &arrivals);
    assert_eq!((figures.succeeded, figures.deadlines_missed, figures.requests), (2, 1, 2));
}

#[test]
fn higher_priority_starts_first() {
    let mut arrivals = JobArrivals::default();
    arrivals.add((0..3).map(JobArrival::at));
    // Arrives when the others wait, and starts in time only if it goes before both that are left.
    arrivals.add([JobArrival { priority: 9, expires_us: Some(1_500_000), ..JobArrival::at(500_000) }]);
    let mut fast = row(vec![limit("all", 1, 1_000)]);
    fast.leak_per_second = Some(1_000.0);
    let figures = run(&model(&fast), &arrivals);
    assert_eq!((figures.succeeded, figures.deadlines_missed), (4, 0));
}

#[test]
fn transit_beyond_the_jitter_breaks_the_limit() {
    let mut by_start = row(vec![limit("all", 20, 1_000)]);
    (by_start.slot_release, by_start.transit_jitter_ms) = ("grant".to_owned(), 10);
    let result_of = |row: &ProviderRow| {
        run(&Model { transit: "0ms..400ms".parse().unwrap(), ..model(row) }, &JobArrivals::burst(400))
    };
    let broken = result_of(&by_start);
    assert!(!broken.holds() && broken.windows[0].largest > 20, "{:?}", broken.windows);
    by_start.slot_release = "response".to_owned();
    assert!(result_of(&by_start).holds(), "{:?}", result_of(&by_start).windows);
}

#[test]
fn closed_limit_leaves_jobs_unfinished() {
    let figures = run(&model(&row(vec![limit("all", 0, 1_000)])), &JobArrivals::burst(10));
    assert_eq!((figures.requests, figures.unfinished, figures.clears_in_ms), (0, 10, None));
}

#[test]
fn retries_count_against_the_same_limit() {
    let faulty =
        Model { faults: 0.3, latency: "20ms..80ms".parse().unwrap(), ..model(&row(vec![limit("all", 50, 1_000)])) };
    let figures = run(&faulty, &JobArrivals::burst(500));
    assert_eq!((figures.succeeded + figures.review, figures.unfinished), (500, 0));
    assert!(figures.succeeded >= 498 && figures.requests > 600, "{} {}", figures.succeeded, figures.requests);
    assert!(figures.holds(), "{:?}", figures.windows);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let vague = Model {
        latency: "p50=80ms,p95=300ms".parse().unwrap(),
        transit: "1ms..3ms".parse().unwrap(),
        round_trip: Duration::from_millis(1),
        commit: Duration::from_millis(2),
        faults: 0.01,
        processes: 3,
        ..model(&row(vec![limit("all", 50, 1_000)]))
    };
    let result_of = |seed| simulate(&vague, &JobArrivals::burst(2_000), &mut StdRng::seed_from_u64(seed));
    assert_eq!(result_of(7), result_of(7));
    assert_ne!(result_of(7).arrivals_us, result_of(8).arrivals_us);
    let figures = result_of(7);
    let utilisation = figures.utilisation.unwrap();
    assert!(figures.holds() && (0.99..=1.01).contains(&utilisation), "{utilisation}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn no_window_exceeds_its_limit(
        limits in prop::collection::vec((1..40_i64, prop_oneof![1..200_i64, Just(1_000), Just(10_000)]), 1..4),
        (workers, bucket, processes) in (1..80_i64, 1..300_i64, 1..4_u32),
        latency_ms in (0..400_u64, 0..3_000_u64),
        transit_ms in (0..20_u64, 0..200_u64),
        (round_trip_ms, commit_ms) in (0..40_u64, 0..40_u64),
        faults in prop_oneof![Just(0.0), 0.0..0.4_f64],
        (requeue, even, cold, seed) in (any::<bool>(), any::<bool>(), any::<bool>(), any::<u64>()),
        arrivals in prop::collection::vec((0..20_000_u64, 1..4_u16, 0..10_u8, 0..3_u32), 1..120),
    ) {
        let numbered = limits.into_iter().enumerate();
        let mut limits: Vec<LimitRow> =
            numbered.map(|(index, (max, ms))| limit(&format!("l{index}"), max.max(3), ms)).collect();
        limits.push(LimitRow { scope: "account".to_owned(), ..limit("each", 5, 2_000) });
        let mut any = row(limits);
        (any.workers, any.bucket_capacity, any.timeout_ms) = (workers, bucket, 2_000);
        any.mode = if requeue { "requeue" } else { "blocking" }.to_owned();
        any.pacing = if even { "even" } else { "burst" }.to_owned();
        let uniform = |(least, more): (u64, u64)| {
            LatencyModel::Uniform { least_us: least * 1_000, most_us: (least + more) * 1_000 }
        };
        let model = Model {
            processes,
            latency: uniform(latency_ms),
            transit: uniform(transit_ms),
            round_trip: Duration::from_millis(round_trip_ms),
            commit: Duration::from_millis(commit_ms),
            faults,
            cold,
            ..model(&any)
        };
        let mut all = JobArrivals::default();
        let jobs: Vec<JobArrival> = arrivals.into_iter().map(|(at_ms, cost, priority, account)| {
            let account = Some(all.account(&format!("a{account}")));
            JobArrival { account, cost, priority, ..JobArrival::at(at_ms * 1_000) }
        }).collect();
        all.add(jobs);
        let figures = simulate(&model, &all, &mut StdRng::seed_from_u64(seed));
        prop_assert!(figures.holds(), "{:?}", figures.windows);
        prop_assert_eq!(figures.unfinished, 0);
    }
}

/// The slots are in use all the time, at about one call for each response, by one process and by two.
#[test]
fn requests_in_flight_stay_within_their_limit() {
    let slots = LimitRow { algorithm: "concurrency".to_owned(), ..limit("slots", 5, LimitRow::default().window_ms) };
    for processes in [1, 2] {
        let row = row(vec![slots.clone()]);
        let held = Model { processes, latency: LatencyModel::Constant(200_000), ..model(&row) };
        let figures = run(&held, &JobArrivals::burst(300));
        let count = &figures.windows[0];
        assert_eq!((count.allows.as_str(), count.largest, count.most), ("5 at once", 5, 5));
        assert_eq!((figures.succeeded, figures.unfinished), (300, 0));
        let took = figures.clears_in_ms.unwrap() as f64 / 1_000.0;
        assert!((12.0..14.0).contains(&took), "{took} s");
        assert!(figures.limiter_calls < 300 + 1_000 * processes as u64, "{} calls", figures.limiter_calls);
    }
}

/// Twelve accounts wait for slots in flight, with more jobs than the lane starts soon. Others have half a second.
#[test]
fn jobs_that_await_a_release_hold_no_other() {
    let own = LimitRow { algorithm: "concurrency".to_owned(), scope: "account".to_owned(), ..LimitRow::default() };
    let own = LimitRow { name: "own".to_owned(), max_requests: 1, ..own };
    let row = ProviderRow { workers: 16, ..row(vec![limit("all", 1_000, 1_000), own]) };
    let mut arrivals = JobArrivals::default();
    for number in 0..15 {
        let account = Some(arrivals.account(&format!("account-{number}")));
        let other = JobArrival { account, expires_us: Some(1_000_000), ..JobArrival::at(500_000) };
        let flood = [JobArrival { account, ..JobArrival::at(0) }; 8];
        arrivals.add(if number < 12 { flood.to_vec() } else { vec![other] });
    }
    let figures = run(&Model { latency: LatencyModel::Constant(5_000_000), ..model(&row) }, &arrivals);
    assert_eq!(figures.deadlines_missed, 0, "of 3");
}

/// Four jobs fit into the prefetch at a slow limit. Each would exceed `max_wait_ms` behind the others, and then go
/// behind the whole backlog.
#[test]
fn slow_limit_sends_in_arrival_order() {
    for (max, window_ms, jobs) in [(30, 60_000, 100), (10, 60_000, 30), (2, 60_000, 6)] {
        let slow =
            Model { latency: LatencyModel::Constant(200_000), ..model(&row(vec![limit("all", max, window_ms)])) };
        let figures = run(&slow, &JobArrivals::burst(jobs));
        let possible = max as f64 / (window_ms as f64 / 1_000.0 + 0.2);
        let took = figures.clears_in_ms.unwrap() as f64 / 1_000.0;
        assert_eq!(figures.delayed, 0, "{max}/{window_ms}ms: {took} s");
        assert!(took < jobs as f64 / possible * 1.01 + 1.0, "{max}/{window_ms}ms: {took} s");
    }
}

/// A lane of 10/s, and an account's flood of 300 jobs at the start.
fn flooded(accounts: Vec<AccountRow>, others: impl Fn(u32) -> Vec<JobArrival>) -> SimulationResult {
    let mut row = row(vec![limit("all", 10, 1_000)]);
    row.accounts = accounts;
    let mut arrivals = JobArrivals::default();
    let [flood, other] = ["flood", "other"].map(|name| Some(arrivals.account(name)));
    arrivals.add((0..300).map(|_| JobArrival { account: flood, ..JobArrival::at(0) }));
    let others = others(other.unwrap());
    arrivals.add(others);
    run(&Model { commit: Duration::from_millis(2), ..model(&row) }, &arrivals)
}

#[test]
fn accounts_share_a_limited_lane() {
    // Ten jobs, at half the rate: two seconds, and half a second of jobs that were ahead at the gate.
    let others = |account| {
        let job = JobArrival { account: Some(account), expires_us: Some(9_000_000), ..JobArrival::at(5_000_000) };
        vec![job; 10]
    };
    let figures = flooded(Vec::new(), others);
    assert_eq!((figures.succeeded, figures.deadlines_missed), (310, 0), "a flood of 30 s was before them");
}

/// One payment of each account at a time: 20 of two accounts take as long as 10 responses.
#[test]
fn order_of_accounts_is_one_payment_at_a_time() {
    let ordered = ProviderRow { order: "account".to_owned(), ..row(vec![limit("all", 100, 1_000)]) };
    let mut arrivals = JobArrivals::default();
    for name in ["one", "two"] {
        let account = Some(arrivals.account(name));
        arrivals.add((0..10).map(|_| JobArrival { account, ..JobArrival::at(0) }));
    }
    for processes in [1, 2] {
        let model = Model { processes, latency: LatencyModel::Constant(200_000), ..model(&ordered) };
        let figures = run(&model, &arrivals);
        assert_eq!((figures.succeeded, figures.unfinished), (20, 0));
        // Another process learns of an end within a second.
        let most_ms = if processes == 1 { 2_500 } else { 12_500 };
        assert!((2_000..most_ms).contains(&figures.clears_in_ms.unwrap()), "{:?} ms", figures.clears_in_ms);
    }
}

#[test]
fn weights_divide_a_limited_lane() {
    let heavy = AccountRow { account: "other".to_owned(), weight: 3, ..AccountRow::default() };
    let others = |account| {
        let job = JobArrival { account: Some(account), expires_us: Some(20_000_000), ..JobArrival::at(0) };
        vec![job; 300]
    };
    // 200 jobs start in 20 s. The first 16 were at the gate before the lane was known to be limited, and as many were
    // claimed before the others were recorded.
    let figures = flooded(vec![heavy], others);
    let of_heavy = 300 - figures.deadlines_missed;
    assert!((124..=140).contains(&of_heavy), "{of_heavy} of 200");
}

#[test]
fn urgent_job_passes_a_simulated_backlog() {
    let others = |account| {
        let urgent = JobArrival { priority: 9, expires_us: Some(6_500_000), ..JobArrival::at(5_000_000) };
        vec![JobArrival { account: Some(account), ..urgent }]
    };
    assert_eq!(flooded(Vec::new(), others).deadlines_missed, 0);
}

/// Starts are spaced in all processes together, and booked shortly before them. So an urgent job waits neither for the
/// next window nor for what is booked.
#[test]
fn urgent_jobs_wait_shortly_whatever_is_booked() {
    for (pacing, commit_of_last_ms) in [("burst", 4), ("even", 4), ("burst", 60), ("even", 60)] {
        let row = ProviderRow { pacing: pacing.to_owned(), ..row(vec![limit("all", 100, 1_000)]) };
        let model = Model {
            processes: 2,
            latency: LatencyModel::Constant(50_000),
            round_trip: Duration::from_millis(1),
            commit: Duration::from_millis(4),
            commit_of_last: Some(Duration::from_millis(commit_of_last_ms)),
            ..model(&row)
        };
        let (mut arrivals, urgent_at) = (JobArrivals::burst(3_000), (0..200).map(|number| 5_000_000 + number * 97_000));
        arrivals.add(urgent_at.map(|at_us| JobArrival {
            priority: 9,
            // A job's record, its claim and its request are committed one after another.
            expires_us: Some(at_us + 150_000 + 3 * 1_000 * (commit_of_last_ms - 4)),
            ..JobArrival::at(at_us)
        }));
        let (figures, case) = (run(&model, &arrivals), format!("{pacing}, {commit_of_last_ms} ms"));
        assert_eq!((figures.deadlines_missed, figures.unfinished), (0, 0), "{case}");
        assert!(figures.utilisation.unwrap() > 0.99, "{case}: {:?}", figures.utilisation);
    }
}
