//! Tests of the forecast at a cut-off: tables of backlogs, and properties that hold for any limits.

use proptest::prelude::*;

use super::super::tests::{any_provider, conditions, limit, provider};
use super::super::{MissingInput, SendingState};
use super::*;
use crate::domain::provider::Provider;
use crate::ledger::provider_row::LimitRow;

fn after(conditions: &ClearTimeInput<'_>, left_ms: i64) -> EpochMs {
    EpochMs(conditions.now.0 + left_ms)
}

/// A hundred a second, without a burst ahead of it.
fn hundred_per_second() -> Provider {
    provider(vec![limit("second", 100, 1_000)], |row| row.leak_per_second = Some(100_000.0))
}

#[test]
fn backlog_is_compared_with_the_time_left() {
    let provider = hundred_per_second();
    let paused = SendingState::Paused;
    let starts = |after_s| SendingState::StartsIn(Duration::from_secs(after_s));
    // Backlog, sending, milliseconds left; then late jobs, or seconds to spare.
    for (jobs, sending, left_ms, wanted) in [
        (0, starts(0), 60_500, Ok(60)),
        (6_000, starts(0), 60_500, Ok(1)),
        (6_100, starts(0), 60_500, Ok(0)),
        (6_101, starts(0), 60_500, Err(1)),
        (12_000, starts(0), 60_500, Err(5_900)),
        (12_000, starts(0), 500, Err(11_900)),
        // A limiter that starts cold loses its time.
        (12_000, starts(20), 60_500, Err(7_900)),
        (50, starts(90), 60_500, Err(50)),
        // As things are, nothing is sent before the cut-off.
        (12_000, paused, 60_500, Err(12_000)),
        (0, paused, 60_500, Ok(60)),
        (7, SendingState::Disabled, 60_500, Err(7)),
        (7, SendingState::BreakerOpen, 60_500, Err(7)),
    ] {
        let input = ClearTimeInput { sending, ..conditions(&provider, jobs) };
        let found = match input.at_cutoff(after(&input, left_ms)) {
            CutoffForecast::OnTime { spare } => Ok(spare.as_secs()),
            CutoffForecast::Missed(missed) => {
                assert!((missed.of, missed.is_at_least) == (jobs, false), "{missed:?}");
                Err(missed.jobs)
            }
            CutoffForecast::Unknown => panic!("{jobs} jobs, {left_ms} ms left"),
        };
        assert_eq!(found, wanted, "{jobs} jobs, {sending:?}, {left_ms} ms left");
    }
}

#[test]
fn forecast_without_an_estimate_is_unknown() {
    let provider = hundred_per_second();
    let each = LimitRow { scope: "account".to_owned(), ..limit("each", 1, 60_000) };
    let by_account = super::super::tests::provider(vec![limit("second", 10, 1_000), each], |_| ());
    let input = conditions(&provider, 12_000);
    let lost = ClearTimeInput { sending: SendingState::Unknown(MissingInput::Worker), ..input };
    assert_eq!(lost.at_cutoff(after(&lost, 60_000)), CutoffForecast::Unknown);
    let missing = Some(MissingInput::Queue);
    let unseen = ClearTimeInput { waiting: WaitingJobs { missing, ..input.waiting }, ..input };
    assert_eq!(unseen.at_cutoff(after(&unseen, 60_000)), CutoffForecast::Unknown);
    // A stopped lane misses it with all jobs that are known, and more may wait in the queue.
    let stopped = |jobs| {
        let input = ClearTimeInput { sending: SendingState::Paused, ..conditions(&provider, jobs) };
        let input = ClearTimeInput { waiting: WaitingJobs { missing, ..input.waiting }, ..input };
        input.at_cutoff(after(&input, 60_000))
    };
    assert_eq!(stopped(0), CutoffForecast::Unknown);
    assert!(matches!(stopped(7), CutoffForecast::Missed(MissedCutoff { jobs: 7, is_at_least: true, .. })));
    // Ten a second at most: 60 seconds are enough for 300 payments only if their accounts are.
    let input = conditions(&by_account, 300);
    assert_eq!(input.at_cutoff(after(&input, 60_000)), CutoffForecast::Unknown);
    let missed = |input: &ClearTimeInput<'_>, left_ms| match input.at_cutoff(after(input, left_ms)) {
        CutoffForecast::Missed(missed) => (missed.jobs, missed.is_at_least),
        other => panic!("{other:?}"),
    };
    assert_eq!(missed(&input, 10_500), (194, true), "ten a second for all accounts together");
    let recent = ClearTimeInput { recent_rate: Some(2.0), ..input };
    assert_eq!(missed(&recent, 60_000), (180, false));
    assert!(matches!(recent.at_cutoff(after(&recent, 200_000)), CutoffForecast::OnTime { .. }));
}

/// A payment that is scheduled for tomorrow is not late today.
#[test]
fn jobs_due_after_the_cutoff_are_left_out() {
    let provider = hundred_per_second();
    let forecast = |jobs, delayed, due_in_s| {
        let waiting =
            WaitingJobs { jobs, delayed, last_due_in: Duration::from_secs(due_in_s), ..WaitingJobs::default() };
        let input = ClearTimeInput { waiting, ..conditions(&provider, 0) };
        input.at_cutoff(after(&input, 60_500))
    };
    assert!(matches!(forecast(30_000, 29_000, 86_400), CutoffForecast::OnTime { .. }));
    let CutoffForecast::Missed(missed) = forecast(42_000, 30_000, 86_400) else { panic!("12,000 are due") };
    assert!(missed.jobs.abs_diff(5_900) <= 2 && missed.is_at_least && missed.of == 12_000, "{missed:?}");
    let CutoffForecast::Missed(missed) = forecast(42_000, 30_000, 30) else { panic!("all are due in time") };
    assert!(missed.jobs.abs_diff(35_900) <= 2 && !missed.is_at_least, "{missed:?}");
}

#[test]
fn rate_that_would_do_covers_the_time_for_starts() {
    let provider = hundred_per_second();
    let needed = |sending, hold_s, left_s: i64| {
        let hold = Duration::from_secs(hold_s);
        let input = ClearTimeInput { sending, hold, ..conditions(&provider, 12_000) };
        match input.at_cutoff(after(&input, left_s * 1_000)) {
            CutoffForecast::Missed(missed) => missed.rate_needed,
            other => panic!("{other:?}"),
        }
    };
    let starts = |after_s| SendingState::StartsIn(Duration::from_secs(after_s));
    assert_eq!(needed(starts(0), 0, 60), Some(200.0));
    assert_eq!(needed(starts(10), 2, 60), Some(250.0), "48 seconds are left for starts");
    assert_eq!(needed(SendingState::Paused, 0, 60), Some(200.0), "if it is resumed now");
    assert_eq!((needed(starts(60), 0, 60), needed(starts(90), 0, 60)), (None, None));
}

proptest! {
    #[test]
    fn missed_jobs_are_those_that_clear_later(
        row in any_provider(), jobs in 1..20_000_u64, left_s in 0..100_000_i64, hold_ms in 0..3_000_u64, lanes in 1..4_u32,
    ) {
        let provider = row.validate(1);
        prop_assume!(provider.is_ok());
        let provider = provider.unwrap();
        let input = |jobs| ClearTimeInput {
            hold: Duration::from_millis(hold_ms), lanes, ..conditions(&provider, jobs)
        };
        let left = Duration::from_secs(u64::try_from(left_s).unwrap());
        let clears_in = |jobs| match input(jobs).clear_time() {
            ClearTime::In(clears_in) => clears_in,
            _ => Duration::MAX,
        };
        let all = input(jobs);
        match all.at_cutoff(after(&all, left_s * 1_000)) {
            CutoffForecast::OnTime { spare } => prop_assert_eq!(clears_in(jobs) + spare, left),
            CutoffForecast::Missed(missed) => {
                prop_assert!(clears_in(jobs) > left && missed.jobs >= 1 && missed.jobs <= jobs, "{:?}", missed);
                let in_time = jobs - missed.jobs;
                prop_assert!(in_time == 0 || clears_in(in_time) <= left, "{in_time} are not cleared in time");
                prop_assert!(clears_in(in_time + 1) > left, "one more is cleared in time");
                let later = all.at_cutoff(after(&all, (left_s + 60) * 1_000));
                let late_then = if let CutoffForecast::Missed(then) = later { then.jobs } else { 0 };
                prop_assert!(late_then <= missed.jobs, "more miss a later cut-off");
            }
            CutoffForecast::Unknown => prop_assert!(false, "there is an estimate"),
        }
    }

    /// A provider that sends at that rate is on time.
    #[test]
    fn rate_that_would_do_does(jobs in 1..100_000_u64, left_s in 2..100_000_i64, hold_ms in 0..1_000_u64) {
        let hold = Duration::from_millis(hold_ms);
        let slow = provider(vec![limit("all", 1_000_000, 1_000)], |row| row.leak_per_second = Some(0.000_1));
        let input = ClearTimeInput { hold, ..conditions(&slow, jobs) };
        let CutoffForecast::Missed(missed) = input.at_cutoff(after(&input, left_s * 1_000)) else { return Ok(()) };
        let needed = missed.rate_needed.unwrap();
        prop_assume!(needed <= 1_000_000.0);
        let fast = provider(vec![limit("all", 1_000_000, 1_000)], |row| {
            (row.leak_per_second, row.workers) = (Some(needed), 10_000);
        });
        let input = ClearTimeInput { hold, ..conditions(&fast, jobs) };
        prop_assume!(10_000.0 >= needed * hold.as_secs_f64());
        let forecast = input.at_cutoff(after(&input, left_s * 1_000));
        prop_assert!(matches!(forecast, CutoffForecast::OnTime { .. }), "{needed} a second: {forecast:?}");
    }
}
