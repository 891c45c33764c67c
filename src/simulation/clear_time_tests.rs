//! Tests of the estimate in [`crate::domain::clear_time`]: it agrees with the simulated lane within a tenth.

use super::tests::{START_US, limit, model, row, run};
use super::*;
use crate::domain::clear_time::{ClearTime, ClearTimeInput, SendingState, UsedCount, WaitingJobs};
use crate::domain::time::EpochMs;
use crate::ledger::provider_row::{LimitRow, ProviderRow};

/// A lane and its backlog.
struct Scenario {
    row: ProviderRow,
    jobs: u64,
    hold_ms: u64,
    lanes: u32,
}

fn scenario(limits: Vec<LimitRow>, jobs: u64, hold_ms: u64, change: fn(&mut ProviderRow)) -> Scenario {
    let mut row = row(limits);
    row.workers = 500;
    change(&mut row);
    Scenario { row, jobs, hold_ms, lanes: 1 }
}

fn scenarios() -> Vec<Scenario> {
    let by = |algorithm: &str, max, ms| vec![LimitRow { algorithm: algorithm.to_owned(), ..limit("all", max, ms) }];
    let nothing: fn(&mut ProviderRow) = |_| ();
    let fast: fn(&mut ProviderRow) = |row| row.leak_per_second = Some(5_000.0);
    vec![
        scenario(vec![limit("all", 100, 1_000)], 5_000, 200, nothing),
        scenario(vec![limit("all", 100, 1_000)], 5_000, 200, fast),
        scenario(vec![limit("all", 20, 1_000)], 300, 900, nothing),
        scenario(vec![limit("all", 10, 1_000)], 35, 300, nothing),
        // A minute's requests start within a second or two.
        scenario(vec![limit("all", 600, 60_000)], 3_000, 150, nothing),
        Scenario { lanes: 2, ..scenario(vec![limit("all", 600, 60_000)], 3_000, 150, nothing) },
        scenario(vec![limit("all", 600, 60_000)], 1_500, 150, fast),
        scenario(vec![limit("second", 20, 1_000), limit("minute", 600, 60_000)], 4_000, 150, nothing),
        scenario(vec![limit("second", 20, 1_000), limit("minute", 600, 60_000)], 4_000, 150, fast),
        scenario(vec![limit("second", 5, 1_000), limit("minute", 600, 60_000)], 2_000, 150, nothing),
        // Two worker slots of half a second each.
        scenario(vec![limit("all", 100, 1_000)], 400, 500, |row| row.workers = 2),
        scenario(vec![limit("all", 50, 1_000)], 2_000, 100, |row| row.pacing = "even".to_owned()),
        scenario(vec![limit("all", 50, 1_000)], 2_000, 400, |row| row.slot_release = "grant".to_owned()),
        scenario(vec![limit("all", 50, 1_000)], 2_000, 200, |row| row.reserve_percent = 40),
        scenario(vec![limit("all", 50, 1_000)], 2_000, 200, |row| row.leak_per_second = Some(7.0)),
        scenario(by("fixed_window", 300, 60_000), 2_000, 100, fast),
        scenario(by("sliding_window", 100, 1_000), 3_000, 100, nothing),
        scenario(by("token_bucket", 30, 1_000), 1_000, 100, nothing),
        scenario(by("gcra", 30, 1_000), 1_000, 100, nothing),
    ]
}

fn estimate(scenario: &Scenario, model: &Model, now_us: u64, (jobs, used): (u64, &[UsedCount])) -> Duration {
    let conditions = ClearTimeInput {
        provider: &model.provider,
        now: EpochMs(i64::try_from(now_us / 1_000).unwrap()),
        sending: SendingState::StartsIn(Duration::ZERO),
        waiting: WaitingJobs { jobs, ..WaitingJobs::default() },
        used_counts: used,
        hold: Duration::from_millis(scenario.hold_ms),
        lanes: scenario.lanes,
        recent_rate: None,
    };
    match conditions.clear_time() {
        ClearTime::In(clears_in) => clears_in,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_estimate_agrees_with_the_simulated_lane() {
    for scenario in scenarios() {
        let latency = LatencyModel::Constant(scenario.hold_ms * 1_000);
        let model = Model { latency, processes: scenario.lanes, ..model(&scenario.row) };
        let figures = run(&model, &JobArrivals::burst(usize::try_from(scenario.jobs).unwrap()));
        let took = figures.clears_in_ms.unwrap();
        let estimated = estimate(&scenario, &model, START_US, (scenario.jobs, &[])).as_millis();
        let apart = u128::from(took).abs_diff(estimated);
        let name = format!("{:?} {} {}", scenario.row.limits, scenario.jobs, scenario.hold_ms);
        assert!(apart * 10 <= u128::from(took), "{name}: {estimated} ms, and it took {took} ms");
    }
}

/// While the backlog is processed, the rest is estimated from the usage.
#[test]
fn estimate_agrees_halfway_through() {
    for scenario in scenarios() {
        let latency = LatencyModel::Constant(scenario.hold_ms * 1_000);
        let model = Model { latency, processes: scenario.lanes, ..model(&scenario.row) };
        let figures = run(&model, &JobArrivals::burst(usize::try_from(scenario.jobs).unwrap()));
        let took = figures.clears_in_ms.unwrap();
        let half_us = took * 500;
        let sent = figures.arrivals_us.iter().filter(|at_us| **at_us <= half_us).count();
        let since = |window: Duration| {
            let from_us = half_us.saturating_sub(u64::try_from(window.as_micros()).unwrap());
            figures.arrivals_us.iter().filter(|at_us| (from_us..=half_us).contains(at_us)).count()
        };
        let cycle = |limit: &crate::domain::limit::Limit| limit.rate.window() + Duration::from_millis(scenario.hold_ms);
        let used = |limit: &crate::domain::limit::Limit| UsedCount {
            limit: limit.name.clone(),
            count: u64::try_from(since(cycle(limit))).unwrap(),
        };
        let used: Vec<UsedCount> = model.provider.limits.iter().map(used).collect();
        let left = scenario.jobs - u64::try_from(sent).unwrap();
        let estimated = estimate(&scenario, &model, START_US + half_us, (left, &used)).as_millis();
        // The position of the uses in their window is not known: an error of one cycle remains.
        let longest = model.provider.limits.iter().map(|limit| cycle(limit).as_millis()).max().unwrap();
        let left_ms = u128::from(took - half_us / 1_000);
        let name = format!("{:?} {} {}", scenario.row.limits, scenario.jobs, scenario.hold_ms);
        let apart = left_ms.abs_diff(estimated);
        assert!(apart <= longest + left_ms / 10, "{name}: {estimated} ms, and it took {left_ms} ms more");
    }
}
