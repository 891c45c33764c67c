//! The sequence of the limiter's measurements, and their sizes.
//!
//! Each round measures all contenders in turn, so that disturbances of the machine affect all of them.

use std::time::Duration;

use tokio::time::Instant;

use super::contender::Contender;
use super::limiter::{LimiterArgs, command_line};
use super::measure::CallerGroup;
use super::meter::RedisMeter;
use super::reference::{CallerClock, Reference, ReferenceContender};
use super::report::{LimiterReport, Section, SubjectRow};
use super::{BenchError, crowd, full_log, machine, ours, report, targets};
use sluicegate::cli::Console;
use sluicegate::domain::format::count;

const PERMITS: [u32; 4] = [1, 10, 100, 1_000];
/// A few windows of the crowd's limit, because permits come in one burst per window.
const CROWD_MIN: Duration = Duration::from_millis(2_500);
/// Load average above which other processes use the cores too.
const BUSY: f64 = 0.5;

/// The sizes of the measurements.
struct Plan {
    figure: Duration,
    rounds: usize,
    crowd: Duration,
    /// Calls after which a full log's slots are used again.
    turn_calls: u32,
    full_log: full_log::Extent,
}

impl Plan {
    fn from_args(args: &LimiterArgs) -> Self {
        let (seconds, rounds) = if args.quick { (0.05, 1) } else { (1.0, 3) };
        let figure = Duration::from_secs_f64(args.seconds.unwrap_or(seconds));
        let rounds = args.rounds.map_or(rounds, usize::from);
        let (turn_calls, calls, refusals) = if args.quick { (2_000, 20_000, 50) } else { (10_000, 1_000_000, 1_000) };
        Self {
            figure,
            rounds,
            crowd: (figure * 10).max(CROWD_MIN),
            turn_calls,
            full_log: full_log::Extent { calls, rounds, refusals },
        }
    }
}

/// Measures everything on one server. The caller names the server in the report and cleans up after a failure.
pub async fn measure(
    meter: &RedisMeter,
    args: &LimiterArgs,
    url: &str,
    prefix: &str,
    console: &mut Console,
) -> Result<LimiterReport, BenchError> {
    let plan = Plan::from_args(args);
    if cfg!(debug_assertions) {
        console.message("this is a debug build: its figures are not meaningful")?;
    }
    let load = machine::load();
    if let Some(load) = load.filter(|load| *load > BUSY) {
        console.message(&format!("this machine is busy (load average {load}): its figures are less reliable"))?;
    }
    let began_us = meter.time_us().await?;
    let clock = CallerClock { began_us, began: Instant::now() };
    let mut rows = throughput(meter, &plan, clock, prefix, console).await?;
    rows.extend(full_logs(meter, &plan, clock, prefix, console).await?);
    console.message(&format!("{} tasks waiting at one gate, for {} s", crowd::TASKS, plan.crowd.as_secs_f64()))?;
    let median = crowd::measure(meter, url, &format!("{prefix}:crowd"), plan.crowd).await?;
    let figures = median.figures();
    rows.push(SubjectRow { section: Section::Crowd, subject: "sliding_log", ours: true, permits_per_call: 1, figures });
    meter.remove(prefix).await?;
    let name = |reference| ReferenceContender { reference, clock }.name();
    report::set_ratios(&mut rows, name(Reference::EmptyScript), name(Reference::CorrectZset));
    targets::judge(&mut rows, plan.full_log.calls);
    Ok(LimiterReport {
        command: command_line(args),
        date: machine::date(began_us),
        machine: machine::describe(),
        load,
        sluicegate: machine::build(),
        redis: meter.version.clone(),
        server: None,
        seconds_per_figure: plan.figure.as_secs_f64(),
        rounds: plan.rounds,
        log_calls: plan.full_log.calls,
        crowd_seconds: plan.crowd.as_secs_f64(),
        rows,
    })
}

/// Measures the throughput of all contenders. Each round includes all of them, so that disturbances affect all.
async fn throughput(
    meter: &RedisMeter,
    plan: &Plan,
    clock: CallerClock,
    prefix: &str,
    console: &mut Console,
) -> Result<Vec<SubjectRow>, BenchError> {
    let references = Reference::ALL.map(|reference| ReferenceContender { reference, clock });
    let ours = ours::available();
    let mut contenders: Vec<(&dyn Contender, u32, bool)> = Vec::new();
    contenders.extend(references.iter().map(|contender| (contender as &dyn Contender, 1, false)));
    contenders.extend(ours.iter().map(|contender| (contender as &dyn Contender, 1, true)));
    for permits in PERMITS.into_iter().skip(1) {
        let zset = references.iter().filter(|contender| contender.reference == Reference::CorrectZset);
        contenders.extend(zset.map(|contender| (contender as &dyn Contender, permits, false)));
        contenders.extend(ours.iter().map(|contender| (contender as &dyn Contender, permits, true)));
    }
    console.message(&format!("filling logs for {}", count(contenders.len() as u64, "figure")))?;
    let mut groups = Vec::new();
    for (number, (contender, permits, ours)) in contenders.into_iter().enumerate() {
        let group_prefix = format!("{prefix}:{number}");
        groups.push((CallerGroup::prepare(meter, contender, permits, plan.turn_calls, &group_prefix).await?, ours));
    }
    for round in 1..=plan.rounds {
        console.message(&format!("calls as fast as possible: round {round} of {}", plan.rounds))?;
        for (group, _) in &mut groups {
            group.round(meter, plan.figure).await?;
        }
    }
    meter.remove(prefix).await?;
    let row = |(group, ours): &(CallerGroup, bool)| SubjectRow {
        section: if group.permits == 1 { Section::OnePermit } else { Section::ManyPermits },
        subject: group.name,
        ours: *ours,
        permits_per_call: group.permits,
        figures: group.figures(),
    };
    Ok(groups.iter().map(row).collect())
}

async fn full_logs(
    meter: &RedisMeter,
    plan: &Plan,
    clock: CallerClock,
    prefix: &str,
    console: &mut Console,
) -> Result<Vec<SubjectRow>, BenchError> {
    let zset = ReferenceContender { reference: Reference::CorrectZset, clock };
    let ours = ours::available();
    let contenders = std::iter::once((&zset as &dyn Contender, false));
    let contenders = contenders.chain(ours.iter().map(|contender| (contender as &dyn Contender, true)));
    let threshold_us = meter.slow_log_threshold().await?;
    meter.log_slower_than("0").await?;
    let mut rows = Vec::new();
    for (contender, ours) in contenders {
        let subject = contender.name();
        console.message(&format!("a full log of {} calls: {subject}", plan.full_log.calls))?;
        let log_prefix = format!("{prefix}:log");
        let median = full_log::measure(meter, contender, plan.full_log, &log_prefix).await?;
        rows.push(SubjectRow {
            section: Section::FullLog,
            subject,
            ours,
            permits_per_call: 1,
            figures: median.figures(),
        });
    }
    meter.log_slower_than(&threshold_us).await?;
    Ok(rows)
}
