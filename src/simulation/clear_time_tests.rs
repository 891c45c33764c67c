//! Tests of the estimate in [`crate::domain::clear_time`]: it agrees with the simulated lane within a tenth.

use super::tests::{START_US, limit, model, row, run};
use super::*;
use crate::domain::clear_time::{
    ClearTime, ClearTimeInput, CutoffForecast, SendingState, SlotReturns, UsedCount, WaitingJobs,
};
use crate::domain::limit::{Algorithm, Limit};
use crate::domain::limit_usage::STILL_USED_STEPS;
use crate::domain::provider::SlotRelease;
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

/// What is left to send, and the slots that are used already.
#[derive(Clone, Copy)]
struct Left<'a> {
    jobs: u64,
    used: &'a [UsedCount],
}

fn conditions<'a>(
    scenario: &Scenario,
    model: &'a Model,
    now_us: u64,
    Left { jobs, used }: Left<'a>,
) -> ClearTimeInput<'a> {
    ClearTimeInput {
        provider: &model.provider,
        now: EpochMs(i64::try_from(now_us / 1_000).unwrap()),
        sending: SendingState::StartsIn(Duration::ZERO),
        waiting: WaitingJobs { jobs, ..WaitingJobs::default() },
        used_counts: used,
        sent_before: &[],
        kept_part: 1.0,
        hold: Duration::from_millis(scenario.hold_ms),
        lanes: scenario.lanes,
        recent_rate: None,
        cost_per_job: 1.0,
    }
}

fn estimate(scenario: &Scenario, model: &Model, now_us: u64, left: Left<'_>) -> Duration {
    match conditions(scenario, model, now_us, left).clear_time() {
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
        let estimated = estimate(&scenario, &model, START_US, Left { jobs: scenario.jobs, used: &[] }).as_millis();
        let apart = u128::from(took).abs_diff(estimated);
        let name = format!("{:?} {} {}", scenario.row.limits, scenario.jobs, scenario.hold_ms);
        assert!(apart * 10 <= u128::from(took), "{name}: {estimated} ms, and it took {took} ms");
    }
}

/// Limits count costs, so a backlog of costly jobs takes longer. Costs may differ where a limit holds many of the jobs: what
/// is left over when the next one does not fit is then little.
#[test]
fn costs_are_part_of_the_estimate() {
    for scenario in scenarios() {
        let at_once = model(&scenario.row).provider.limits.iter().map(Limit::capacity).min().unwrap();
        let fits = |[one, other]: &[u16; 2]| u32::from(*other) <= at_once && (one == other || at_once >= 50);
        for costs in [[3, 3], [7, 7], [1, 5]].into_iter().filter(fits) {
            let latency = LatencyModel::Constant(scenario.hold_ms * 1_000);
            let model = Model { latency, processes: scenario.lanes, ..model(&scenario.row) };
            let jobs = scenario.jobs / 4;
            let arrivals = (0..usize::try_from(jobs).unwrap())
                .map(|number| JobArrival { cost: costs[number % costs.len()], ..JobArrival::at(0) });
            let took = run(&model, &JobArrivals::new(arrivals.collect())).clears_in_ms.unwrap();
            let cost_per_job = f64::from(costs[0] + costs[1]) / 2.0;
            let input = conditions(&scenario, &model, START_US, Left { jobs, used: &[] });
            let ClearTime::In(clears_in) = (ClearTimeInput { cost_per_job, ..input }).clear_time() else { panic!() };
            let (estimated, apart) = (clears_in.as_millis(), u128::from(took).abs_diff(clears_in.as_millis()));
            let name = format!("{:?} {jobs} of {costs:?} {}", scenario.row.limits, scenario.hold_ms);
            assert!(apart * 10 <= u128::from(took), "{name}: {estimated} ms, and it took {took} ms");
        }
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
            returns: None,
        };
        let used: Vec<UsedCount> = model.provider.limits.iter().map(used).collect();
        let left = scenario.jobs - u64::try_from(sent).unwrap();
        let estimated = estimate(&scenario, &model, START_US + half_us, Left { jobs: left, used: &used }).as_millis();
        // The position of the uses in their window is not known: an error of one cycle remains.
        let longest = model.provider.limits.iter().map(|limit| cycle(limit).as_millis()).max().unwrap();
        let left_ms = u128::from(took - half_us / 1_000);
        let name = format!("{:?} {} {}", scenario.row.limits, scenario.jobs, scenario.hold_ms);
        let apart = left_ms.abs_diff(estimated);
        assert!(apart <= longest + left_ms / 10, "{name}: {estimated} ms, and it took {left_ms} ms more");
    }
}

/// State of a lane at an instant of its run.
struct LaneAt {
    jobs: u64,
    /// As the limiter tells it.
    used: Vec<UsedCount>,
    /// The longest step of the instants at which the limiter tells how many slots are still used.
    step: Duration,
}

fn state_at(scenario: &Scenario, model: &Model, figures: &SimulationResult, at_us: u64) -> LaneAt {
    let (hold_us, mut step_max) = (scenario.hold_ms * 1_000, Duration::ZERO);
    let sent = figures.arrivals_us.partition_point(|arrived_us| *arrived_us <= at_us);
    let used_of = |limit: &Limit| {
        let beyond_us = match (limit.algorithm, model.provider.slot_release) {
            (Algorithm::SlidingLog, SlotRelease::Response) => hold_us,
            (Algorithm::SlidingLog, SlotRelease::Grant { transit_jitter }) => {
                u64::try_from(transit_jitter.as_micros()).unwrap()
            }
            _ => 0,
        };
        let cycle_us = u64::try_from(limit.rate.window().as_micros()).unwrap() + beyond_us;
        let first = figures.arrivals_us.partition_point(|arrived_us| arrived_us + cycle_us <= at_us);
        let uses = &figures.arrivals_us[first..sent];
        let is_full = uses.len() >= usize::try_from(model.provider.after_reserve(limit.rate.max_requests())).unwrap();
        let free_in =
            |use_us: Option<&u64>| Duration::from_micros(use_us.map_or(0, |use_us| use_us + cycle_us - at_us));
        let first_in = if is_full { free_in(uses.first()) } else { Duration::ZERO };
        let step = limit.rate.window() / STILL_USED_STEPS;
        let step_us = u64::try_from(step.as_micros()).unwrap();
        let still_used = |step| uses.iter().filter(|use_us| **use_us + cycle_us > at_us + step * step_us).count();
        let still_used =
            (1..=u64::from(STILL_USED_STEPS)).map(|step| u64::try_from(still_used(step)).unwrap()).collect();
        let returns = SlotReturns { first_in, last_in: free_in(uses.last()), still_used, step };
        step_max = step_max.max(step);
        UsedCount { limit: limit.name.clone(), count: u64::try_from(uses.len()).unwrap(), returns: Some(returns) }
    };
    let used = model.provider.limits.iter().map(used_of).collect();
    let jobs = scenario.jobs - u64::try_from(sent).unwrap();
    LaneAt { jobs, used, step: step_max }
}

/// Samples of a run, at equal distances.
const SAMPLES: u64 = 40;
/// A second is what readouts are old.
const READOUT_AGE_MS: u128 = 1_000;

/// During a steady drain the shown finish time does not jump: each is within a tenth of the remaining time, plus a step
/// of what the limiter tells of used slots.
#[test]
fn finish_time_is_steady_during_a_drain() {
    let mut wrong = Vec::new();
    for scenario in scenarios() {
        let latency = LatencyModel::Constant(scenario.hold_ms * 1_000);
        let model = Model { latency, processes: scenario.lanes, ..model(&scenario.row) };
        let figures = run(&model, &JobArrivals::burst(usize::try_from(scenario.jobs).unwrap()));
        let took_us = figures.clears_in_ms.unwrap() * 1_000;
        for sample in 1..SAMPLES {
            let at_us = took_us / SAMPLES * sample;
            let LaneAt { jobs: left, used, step } = state_at(&scenario, &model, &figures, at_us);
            let left_ms = u128::from((took_us - at_us) / 1_000);
            let estimated = estimate(&scenario, &model, START_US + at_us, Left { jobs: left, used: &used }).as_millis();
            let tolerated = (left_ms / 10).max(READOUT_AGE_MS + u128::from(scenario.hold_ms)) + step.as_millis();
            if left > 0 && left_ms.abs_diff(estimated) > tolerated {
                let name = format!("{:?} {} {}", scenario.row.limits, scenario.jobs, scenario.hold_ms);
                wrong.push(format!("{name}, sample {sample}: {estimated} ms, and it took {left_ms} ms more"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// At a cut-off halfway through, as many payments miss it as were forecast.
#[test]
fn forecast_at_a_cutoff_comes_true() {
    for scenario in scenarios() {
        let latency = LatencyModel::Constant(scenario.hold_ms * 1_000);
        let model = Model { latency, processes: scenario.lanes, ..model(&scenario.row) };
        let figures = run(&model, &JobArrivals::burst(usize::try_from(scenario.jobs).unwrap()));
        let took_ms = figures.clears_in_ms.unwrap();
        for tenths in [2, 5, 8] {
            let cutoff_ms = took_ms * tenths / 10;
            let answered_us = (cutoff_ms * 1_000).saturating_sub(scenario.hold_ms * 500);
            let came = figures.arrivals_us.partition_point(|arrived_us| *arrived_us <= answered_us);
            let input = conditions(&scenario, &model, START_US, Left { jobs: scenario.jobs, used: &[] });
            let in_time_at = |ms: u64| match input.at_cutoff(EpochMs(input.now.0 + i64::try_from(ms).unwrap())) {
                CutoffForecast::Missed(missed) => usize::try_from(scenario.jobs - missed.jobs).unwrap(),
                CutoffForecast::OnTime { .. } => usize::try_from(scenario.jobs).unwrap(),
                CutoffForecast::Unknown => panic!("{tenths} tenths of {took_ms} ms: {:?}", scenario.row.limits),
            };
            // Jobs leave in bursts: a cut-off a tenth of the time earlier or later may have one more or less before it.
            let [earlier, later] = [cutoff_ms - took_ms / 10, cutoff_ms + took_ms / 10].map(in_time_at);
            let name = format!("{:?} {} {}", scenario.row.limits, scenario.jobs, scenario.hold_ms);
            assert!((earlier..=later).contains(&came), "{name}: {earlier} to {later} in time, and {came} came");
            assert!(came < usize::try_from(scenario.jobs).unwrap(), "{name}: none misses it");
        }
    }
}
