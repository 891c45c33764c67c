//! Tests of the clear time: tables of estimates, and properties that hold for any limits.

use proptest::prelude::*;

use super::*;
use crate::ledger::provider_row::{LimitRow, ProviderRow};

const EACH: &str = "each";

pub fn limit(name: &str, max_requests: i64, window_ms: i64) -> LimitRow {
    LimitRow { name: name.to_owned(), max_requests, window_ms, ..LimitRow::default() }
}

pub fn provider(limits: Vec<LimitRow>, change: impl Fn(&mut ProviderRow)) -> Provider {
    let url = "https://acme.example/".to_owned();
    let mut row = ProviderRow { name: "acme".to_owned(), url, limits, ..ProviderRow::default() };
    change(&mut row);
    row.validate(1).unwrap()
}

/// Sets an egress rate that does not limit anything.
fn fast(row: &mut ProviderRow) {
    row.leak_per_second = Some(100_000.0);
}

pub fn conditions(provider: &Provider, jobs: u64) -> ClearTimeInput<'_> {
    ClearTimeInput {
        provider,
        now: EpochMs(1_800_000_000_000),
        sending: SendingState::StartsIn(Duration::ZERO),
        waiting: WaitingJobs { jobs, ..WaitingJobs::default() },
        used_counts: &[],
        sent_before: &[],
        kept_part: 1.0,
        hold: Duration::ZERO,
        lanes: 1,
        recent_rate: None,
        cost_per_job: 1.0,
    }
}

fn clears_in_ms(conditions: &ClearTimeInput<'_>) -> u128 {
    match conditions.clear_time() {
        ClearTime::In(clears_in) => clears_in.as_millis(),
        other => panic!("{other:?}"),
    }
}

/// As many as there are slots go at once, then as many per response.
#[test]
fn clear_time_under_concurrency_follows_the_hold() {
    let slots = LimitRow { algorithm: "concurrency".to_owned(), ..limit("slots", 5, LimitRow::default().window_ms) };
    // Worker slots that limit nothing.
    let provider = provider(vec![slots], |row| row.workers = 10_000);
    let hold = Duration::from_millis(200);
    let input = |jobs, hold| ClearTimeInput { hold, ..conditions(&provider, jobs) };
    for (jobs, wanted_ms) in [(5, 200..205), (6, 400..420), (100, 3_950..4_010)] {
        let clears_in = clears_in_ms(&input(jobs, hold));
        assert!(wanted_ms.contains(&clears_in), "{jobs}: {clears_in}");
    }
    assert_eq!(input(5, Duration::ZERO).clear_time(), ClearTime::Unknown(MissingInput::ResponseTime));
    assert_eq!(input(0, Duration::ZERO).clear_time(), ClearTime::In(Duration::ZERO));
}

#[test]
fn clear_time_follows_the_limits() {
    let second = || vec![limit("second", 100, 1_000)];
    let both = || vec![limit("second", 100, 1_000), limit("minute", 600, 60_000)];
    let with = |algorithm: &str, max, ms| vec![LimitRow { algorithm: algorithm.to_owned(), ..limit("all", max, ms) }];
    let plain = |limits: Vec<LimitRow>| provider(limits, fast);
    let grant = provider(second(), |row| {
        fast(row);
        row.slot_release = "grant".to_owned();
    });
    let even = provider(second(), |row| (row.pacing, row.leak_per_second) = ("even".to_owned(), Some(1_000.0)));
    let reserve = provider(second(), |row| (row.reserve_percent, row.leak_per_second) = (50, Some(100_000.0)));
    let day = plain(with("fixed_window", 1_000, 86_400_000));
    for (provider, jobs, used, hold_ms, wanted_ms) in [
        (&plain(second()), 0, 0, 0, 0),
        (&plain(second()), 100, 0, 0, 0),
        (&plain(second()), 101, 0, 0, 1_000),
        (&plain(second()), 12_000, 0, 0, 119_000),
        // All slots are used: they come back over a window.
        (&plain(second()), 100, 100, 0, 1_000),
        (&plain(second()), 50, 100, 0, 500),
        (&plain(second()), 60, 80, 0, 500),
        // The usage is above a lowered limit.
        (&plain(second()), 50, 500, 0, 500),
        // Each slot is held until the response, and the last response counts too.
        (
            &provider(second(), |row| (row.workers, row.leak_per_second) = (1_000, Some(100_000.0))),
            12_000,
            0,
            200,
            143_000,
        ),
        (&grant, 12_000, 0, 0, 124_950),
        (&even, 12_000, 0, 0, 119_990),
        (&reserve, 101, 0, 0, 2_000),
        (&plain(both()), 6_000, 0, 0, 9 * 60_000 + 5_000),
        (&plain(both()), 601, 0, 0, 60_000),
        (&plain(with("token_bucket", 10, 1_000)), 110, 0, 0, 10_000),
        (&plain(with("token_bucket", 10, 1_000)), 110, 10, 0, 11_000),
        (&plain(with("gcra", 10, 1_000)), 111, 0, 0, 11_000),
        // 08:00 UTC: sixteen hours are left of the window.
        (&day, 1_000, 0, 0, 0),
        (&day, 1_500, 0, 0, 16 * 3_600_000),
        (&day, 500, 1_000, 0, 16 * 3_600_000),
        (&day, 2_500, 0, 0, 40 * 3_600_000),
    ] {
        let name = provider.limits[0].name.clone();
        let used = [UsedCount { limit: name, count: used, returns: None }];
        let hold = Duration::from_millis(hold_ms);
        let clears_ms = clears_in_ms(&ClearTimeInput { used_counts: &used, hold, ..conditions(provider, jobs) });
        // The egress rate of these providers takes 10 us a job, and their worker slots 200.
        assert!(
            clears_ms.abs_diff(wanted_ms) <= 25,
            "{provider:?} {jobs} {used:?} {hold_ms}: {clears_ms}, not {wanted_ms}"
        );
    }
}

/// A minute's slots were used within two seconds: they are free again within two seconds, too.
#[test]
fn used_slots_return_as_they_were_used() {
    let provider = provider(vec![limit("minute", 600, 60_000)], fast);
    let clears_ms = |jobs, count, returns: Option<(u64, u64)>| {
        let returns = returns.map(|(first_s, last_s)| SlotReturns {
            first_in: Duration::from_secs(first_s),
            last_in: Duration::from_secs(last_s),
            ..SlotReturns::default()
        });
        let used = [UsedCount { limit: "minute".to_owned(), count, returns }];
        clears_in_ms(&ClearTimeInput { used_counts: &used, ..conditions(&provider, jobs) })
    };
    for (jobs, count, returns, wanted_ms) in [
        (300, 600, None, 30_000),
        (300, 600, Some((40, 42)), 41_000),
        (600, 600, Some((40, 42)), 42_000),
        (900, 600, Some((40, 42)), 101_000),
        (300, 300, Some((40, 42)), 0),
        (450, 300, Some((40, 42)), 41_000),
        // A limit that is not used up, with its last use just now.
        (450, 300, Some((0, 60)), 30_000),
        // Never longer than the cycle.
        (600, 600, Some((40, 400)), 60_000),
    ] {
        let found = clears_ms(jobs, count, returns);
        assert!(found.abs_diff(wanted_ms) <= 150, "{jobs} jobs, {count} used, {returns:?}: {found}, not {wanted_ms}");
    }
}

/// 20 a second have used half of a minute's slots in fifteen seconds, and none returns before the minute is over.
#[test]
fn long_window_returns_as_the_short_one_has_used_it() {
    let both = provider(vec![limit("second", 20, 1_000), limit("minute", 600, 60_000)], fast);
    let clears_s = |jobs, still_used: &[u64]| {
        let (step, still_used) = (Duration::from_secs(10), still_used.to_vec());
        let returns = Some(SlotReturns { first_in: Duration::ZERO, last_in: step * 6, still_used, step });
        let used = [UsedCount { limit: "minute".to_owned(), count: 300, returns }];
        clears_in_ms(&ClearTimeInput { used_counts: &used, ..conditions(&both, jobs) }) / 1_000
    };
    let still_used = [300, 300, 300, 300, 200, 0];
    assert_eq!(clears_s(300, &still_used), 14);
    assert!((51..=54).contains(&clears_s(450, &still_used)), "{}", clears_s(450, &still_used));
    assert!((110..=113).contains(&clears_s(1_050, &still_used)), "{}", clears_s(1_050, &still_used));
    assert_eq!(clears_s(450, &[]), 30, "where the limiter does not know it, evenly");
}

#[test]
fn clear_time_respects_egress_rate_and_worker_slots() {
    // 1,500 at once by the limit, 5 a second by the egress rate.
    let slow = provider(vec![limit("all", 1_500, 300_000)], |row| row.leak_per_second = Some(5.0));
    let by = |lanes, jobs| clears_in_ms(&ClearTimeInput { lanes, ..conditions(&slow, jobs) });
    assert_eq!((by(1, 236), by(2, 236), by(0, 236)), (47_000, 23_500, 47_000));
    // The second 1,500 are sent as slowly as the first, from the end of the window on.
    assert_eq!((by(2, 3_000), by(1, 3_000)), (300_000 + 149_900, 599_800));
    let two = provider(vec![limit("all", 1_000, 1_000)], |row| row.workers = 2);
    let held = ClearTimeInput { hold: Duration::from_millis(500), ..conditions(&two, 101) };
    assert_eq!(clears_in_ms(&held), 25_500, "two at a time, half a second each");
}

#[test]
fn full_stops_have_their_own_answer() {
    let open = provider(vec![limit("second", 10, 1_000)], |_| ());
    let shut = provider(vec![limit("second", 10, 1_000), limit("shut", 0, 1_000)], |_| ());
    let each = LimitRow { scope: "account".to_owned(), ..limit(EACH, 1, 60_000) };
    let by_account = provider(vec![limit("second", 10, 1_000), each], |_| ());
    let clear_time_of = |provider: &Provider, sending, missing| {
        let waiting = WaitingJobs { jobs: 31, missing, ..WaitingJobs::default() };
        ClearTimeInput { sending, waiting, ..conditions(provider, 0) }.clear_time()
    };
    let sends = SendingState::StartsIn(Duration::ZERO);
    let least =
        |about| ClearTime::DependsOnAccounts { at_least: Duration::from_secs(3), limits: vec![EACH.to_owned()], about };
    for (actual, wanted) in [
        (clear_time_of(&open, sends, None), ClearTime::In(Duration::from_secs(3))),
        (
            clear_time_of(&open, SendingState::StartsIn(Duration::from_secs(7)), None),
            ClearTime::In(Duration::from_secs(10)),
        ),
        (clear_time_of(&open, SendingState::Paused, None), ClearTime::NotWhilePaused),
        (clear_time_of(&open, SendingState::Disabled, Some(MissingInput::Queue)), ClearTime::NotWhileDisabled),
        (clear_time_of(&open, SendingState::BreakerOpen, None), ClearTime::NotWhileBreakerOpen),
        (
            clear_time_of(&open, SendingState::Unknown(MissingInput::Worker), None),
            ClearTime::Unknown(MissingInput::Worker),
        ),
        (clear_time_of(&open, sends, Some(MissingInput::Queue)), ClearTime::Unknown(MissingInput::Queue)),
        (clear_time_of(&shut, sends, Some(MissingInput::Queue)), ClearTime::Never { limit: Some("shut".to_owned()) }),
        (clear_time_of(&shut, SendingState::Paused, None), ClearTime::NotWhilePaused),
        (clear_time_of(&by_account, sends, None), least(None)),
    ] {
        assert_eq!(actual, wanted);
    }
    let recent = |rate| ClearTimeInput { recent_rate: Some(rate), ..conditions(&by_account, 31) }.clear_time();
    assert_eq!(recent(0.1), least(Some(Duration::from_secs(310))));
    assert_eq!((recent(100.0), recent(0.0)), (least(Some(Duration::from_secs(3))), least(None)));
    // No job waits, so there is nothing to clear, whatever blocks.
    assert_eq!(
        ClearTimeInput { sending: SendingState::Paused, ..conditions(&shut, 0) }.clear_time(),
        ClearTime::In(Duration::ZERO)
    );
    let waiting = WaitingJobs { jobs: 1, last_due_in: Duration::from_secs(2_820), ..WaitingJobs::default() };
    assert_eq!(clears_in_ms(&ClearTimeInput { waiting, ..conditions(&open, 1) }), 2_820_000, "not before it is due");
    let waiting = WaitingJobs { jobs: 1, blocked: true, ..WaitingJobs::default() };
    assert_eq!(ClearTimeInput { waiting, ..conditions(&open, 1) }.clear_time(), ClearTime::NotWhileBlocked);
}

#[test]
fn binding_account_limits_are_named() {
    let named = |change: fn(&mut LimitRow)| {
        let mut each = limit(EACH, 6, 60_000);
        change(&mut each);
        limits_by_account(&provider(vec![limit("second", 100, 1_000), each], |_| ()))
    };
    let account: fn(&mut LimitRow) = |limit| limit.scope = "account".to_owned();
    let reference: fn(&mut LimitRow) = |limit| limit.scope = "reference".to_owned();
    assert_eq!((named(account), named(reference)), (vec![EACH.to_owned()], vec![EACH.to_owned()]));
    let nothing: [fn(&mut LimitRow); 4] = [
        |_| (),
        |limit| (limit.scope, limit.shadow) = ("account".to_owned(), true),
        |limit| (limit.scope, limit.enabled) = ("account".to_owned(), false),
        |limit| (limit.scope, limit.applies_to) = ("account".to_owned(), "lookup".to_owned()),
    ];
    for change in nothing {
        assert_eq!(named(change), Vec::<String>::new());
    }
}

prop_compose! {
    pub fn any_provider()(
        limits in prop::collection::vec((1..2_000_i64, 100..4_000_000_i64, 0..5_usize), 1..4),
        (even, grant, reserve) in (any::<bool>(), any::<bool>(), 0..90_i64),
        leak in prop::option::of(1.0..1_000.0_f64),
        workers in 1..64_i64,
    ) -> ProviderRow {
        let algorithms = ["sliding_log", "sliding_window", "fixed_window", "token_bucket", "gcra"];
        let row = |(index, (max, ms, algorithm)): (usize, &(i64, i64, usize))| LimitRow {
            algorithm: algorithms[*algorithm].to_owned(),
            ..limit(&format!("l{index}"), *max, *ms)
        };
        ProviderRow {
            name: "acme".to_owned(),
            url: "https://acme.example/".to_owned(),
            limits: limits.iter().enumerate().map(row).collect(),
            pacing: if even { "even" } else { "burst" }.to_owned(),
            slot_release: if grant { "grant" } else { "response" }.to_owned(),
            reserve_percent: reserve,
            leak_per_second: leak,
            workers,
            ..ProviderRow::default()
        }
    }
}

proptest! {
    #[test]
    fn estimates_are_monotone(
        row in any_provider(), jobs in 1..100_000_u64, more in 1..5_000_u64, used in 0..3_000_u64,
        raised in 1..3_000_i64, hold_ms in 0..3_000_u64, lanes in 1..4_u32,
        cost_per_job in prop_oneof![Just(1.0), 1.0..12.0_f64],
        returns in prop::option::of((0..100_000_u64, 0..100_000_u64, 1..20_000_u64)),
        returned in prop::collection::vec(prop_oneof![Just(0), 0..500_u64], 0..20),
    ) {
        let still_used = returned.iter().scan(used, |left, returned| {
            *left = left.saturating_sub(*returned);
            Some(*left)
        });
        let returns = returns.map(|(first_ms, more_ms, step_ms)| SlotReturns {
            first_in: Duration::from_millis(first_ms),
            last_in: Duration::from_millis(first_ms + more_ms),
            still_used: still_used.collect(),
            step: Duration::from_millis(step_ms),
        });
        let used = [UsedCount { limit: "l0".to_owned(), count: used, returns }];
        let hold = Duration::from_millis(hold_ms);
        let clears_in_of = |provider: &Provider, jobs| {
            let input = ClearTimeInput { used_counts: &used, hold, lanes, cost_per_job, ..conditions(provider, jobs) };
            match input.clear_time() {
                ClearTime::In(clears_in) => clears_in,
                ClearTime::Never { .. } => Duration::MAX,
                other => panic!("{other:?}"),
            }
        };
        // A reserve may take all of a small limit, and a sliding window rejects a short window.
        let provider = row.validate(1);
        prop_assume!(provider.is_ok());
        let provider = provider.unwrap();
        let clears_in = clears_in_of(&provider, jobs);
        prop_assert!(clears_in_of(&provider, jobs + more) >= clears_in, "a larger backlog clears sooner");
        let mut higher = row;
        // The egress rate follows the limits, unless the row sets it.
        for limit in &mut higher.limits {
            limit.max_requests += raised;
        }
        let provider = higher.validate(1).unwrap();
        let sooner = clears_in_of(&provider, jobs);
        prop_assert!(sooner <= clears_in + Duration::from_millis(1), "higher limits clear later: {sooner:?}");
    }
}
