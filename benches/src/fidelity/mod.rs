//! The benchmark `fidelity`: the use of a strict provider's limit, the lateness of starts, and the breaches that it
//! counts.
//!
//! Rate, hold and breaches are the provider's figures, on its own clock. Only the lateness is ours, against the start
//! time of each permit.

use std::time::Duration;

use clap::ValueEnum;
use tokio::time::{Instant, interval};

use super::conditions::Conditions;
use super::interruption::Interruption;
use super::progress::Phase;
use super::stage::{BenchEnvironment, BenchProvider};
use super::{BenchError, require_one_limiter, seconds};
use sluicegate::app::Services;
use sluicegate::cli::{CommandError, Console, Exit};
use sluicegate::config::{Config, LimiterUrl};
use sluicegate::domain::limit::Rate;
use sluicegate::domain::time::{format_duration, millis_up, parse_duration};
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::provider::simulated::FakeOptions;

mod limit_cycles;
mod report;

use report::{FidelityReport, Measurements, RunTerms};

const POLL_INTERVAL: Duration = Duration::from_millis(20);
const FIRST_ARRIVAL_MAX: Duration = Duration::from_secs(60);
const PUBLISHING_MAX: Duration = Duration::from_secs(600);
/// Factor of spare jobs, so that the lane always has waiting jobs.
const JOBS_MARGIN: f64 = 1.2;
/// How far permits are booked ahead; each uses a worker slot meanwhile.
const BOOKED_AHEAD: Duration = Duration::from_millis(250);
const BUCKET: i64 = 256;

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The provider's limit, counted over every sliding window.
    #[arg(long, value_name = "N/DURATION", default_value = "100/1s")]
    limit: Rate,
    /// When a slot is free again: a window after the response (proven), or after the grant plus `--jitter`.
    #[arg(long, value_enum, default_value = "response")]
    slot_release: SlotReleaseArg,
    /// Allowance for transit, with `--slot-release grant`.
    #[arg(long, value_name = "DURATION", default_value = "50ms", value_parser = parse_duration)]
    jitter: Duration,
    /// Shortest time from request to response.
    #[arg(long, value_name = "DURATION", default_value = "20ms", value_parser = parse_duration)]
    latency_min: Duration,
    /// Longest time from request to response.
    #[arg(long, value_name = "DURATION", default_value = "80ms", value_parser = parse_duration)]
    latency_max: Duration,
    /// Workers in this process, each with its own gates. Default: 2, and 1 with an embedded limiter.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    workers: Option<u16>,
    /// Concurrent requests of each worker. Default: as many as the limit can need.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..=10_000))]
    in_flight: Option<i64>,
    /// Seconds from the first request.
    #[arg(long, value_name = "N", default_value = "30", value_parser = seconds)]
    seconds: f64,
    /// Use an embedded deployment in a temporary directory instead of the configured backends.
    #[arg(long)]
    embedded: bool,
    /// Print the figures as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SlotReleaseArg {
    Response,
    Grant,
}

impl SlotReleaseArg {
    fn name(self) -> &'static str {
        match self {
            Self::Response => "response",
            Self::Grant => "grant",
        }
    }
}

/// Runs the command.
///
/// # Errors
/// When something could not be measured, or a backend is unreachable. A breach is a figure, not an error.
pub async fn run(
    args: &Args,
    config: &Config,
    services: &Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    if args.limit.max_requests() == 0 || args.latency_min > args.latency_max {
        let text = "--limit must be above 0, and --latency-min must not exceed --latency-max";
        return Err(CommandError::Configuration(text.to_owned()));
    }
    let mut interruption = Interruption::catch()?;
    let mut stage = BenchEnvironment::prepare(args.embedded, config, services).await?;
    let workers = args.workers.unwrap_or(match stage.config.limiter.url {
        LimiterUrl::Embedded => 1,
        _ => 2,
    });
    let ended = async {
        require_one_limiter(workers, &stage.config)?;
        tokio::select! {
            measured = measure(args, workers, &mut stage, console) => measured,
            () = interruption.wait() => Err(BenchError::Interrupted.into()),
        }
    };
    let ended = ended.await;
    let torn_down = stage.tear_down().await;
    let report = ended?;
    torn_down?;
    if args.json {
        console.json(&report)?
    } else {
        report.print(console)?
    }
    Ok(Exit::Success)
}

async fn measure(
    args: &Args,
    workers: u16,
    stage: &mut BenchEnvironment<'_>,
    console: &mut Console,
) -> Result<FidelityReport, CommandError> {
    let conditions = Conditions::collect(command_line(args, workers), &stage.config, console).await?;
    let options = FakeOptions {
        limits: vec![args.limit],
        latency: (args.latency_min, args.latency_max),
        ..FakeOptions::default()
    };
    let lane = stage.add("", options, row(args, workers)).await?;
    stage.publish(&lane, jobs(args), PUBLISHING_MAX, console).await?;
    let mut started = stage.start(workers).await?;
    await_first(&lane, || started.require_running()).await?;
    let (began, mut tick) = (Instant::now(), interval(POLL_INTERVAL));
    let span = Duration::from_secs_f64(args.seconds);
    let span_s = span.as_secs();
    let mut phase = Phase::begin("seconds measured", span_s, console)?;
    while began.elapsed() < span {
        tick.tick().await;
        started.require_running()?;
        phase.show(began.elapsed().as_secs().min(span_s), console)?;
    }
    // Arrivals after the stop no longer come from a saturated lane.
    let arrivals_us = lane.fake.arrivals_us();
    let ((lateness, ahead), returned) = (started.lateness(&lane.name), started.returned(&lane.name));
    drop(phase);
    started.stop().await?;
    let seen = Measurements { arrivals_us, provider: lane.fake.report(), lateness, ahead, returned };
    let jitter = (args.slot_release == SlotReleaseArg::Grant).then_some(args.jitter);
    let terms = RunTerms { limit: args.limit, jitter, latency_spread: args.latency_max - args.latency_min };
    Ok(FidelityReport::new(conditions, &terms, workers, lane.in_flight(), seen))
}

async fn await_first(
    lane: &BenchProvider,
    mut check: impl FnMut() -> Result<(), CommandError>,
) -> Result<(), CommandError> {
    let began = Instant::now();
    let mut tick = interval(Duration::from_millis(1));
    while lane.fake.report().first_arrival_us.is_none() {
        tick.tick().await;
        check()?;
        if began.elapsed() > FIRST_ARRIVAL_MAX {
            let text = format!("no request within {} s", FIRST_ARRIVAL_MAX.as_secs());
            return Err(BenchError::InvalidMeasurement(text).into());
        }
    }
    Ok(())
}

#[allow(clippy::cast_possible_truncation, reason = "clamped to the range of the column")]
/// The provider's row. By default a worker has worker slots for its share of all slots at once, and for booked permits.
fn row(args: &Args, workers: u16) -> ProviderRow {
    let limit = LimitRow {
        name: "limit".to_owned(),
        max_requests: i64::from(args.limit.max_requests()),
        window_ms: i64::try_from(millis_up(args.limit.window())).unwrap_or(i64::MAX),
        ..LimitRow::default()
    };
    let steady = args.limit.per_second() * (args.latency_max + BOOKED_AHEAD).as_secs_f64();
    let at_once = f64::from(args.limit.max_requests()) / f64::from(workers);
    ProviderRow {
        workers: args.in_flight.unwrap_or(steady.max(at_once).clamp(32.0, 2_000.0) as i64),
        bucket_capacity: BUCKET,
        slot_release: args.slot_release.name().to_owned(),
        transit_jitter_ms: i64::try_from(millis_up(args.jitter)).unwrap_or(i64::MAX),
        limits: vec![limit],
        ..ProviderRow::default()
    }
}

/// Number of jobs: all slots at once, and the rate afterwards.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of jobs, not negative")]
fn jobs(args: &Args) -> u64 {
    let steady = args.limit.per_second() * args.seconds * JOBS_MARGIN;
    u64::from(args.limit.max_requests()) * 2 + steady.ceil() as u64
}

fn command_line(args: &Args, workers: u16) -> String {
    let Args { limit, seconds, .. } = args;
    let jitter = match args.slot_release {
        SlotReleaseArg::Response => String::new(),
        SlotReleaseArg::Grant => format!(" --jitter {}", format_duration(args.jitter)),
    };
    let (least, most) = (format_duration(args.latency_min), format_duration(args.latency_max));
    let in_flight = args.in_flight.map(|number| format!(" --in-flight {number}")).unwrap_or_default();
    let embedded = if args.embedded { " --embedded" } else { "" };
    format!(
        "sluicegate-bench fidelity --limit {limit} --slot-release {}{jitter} --latency-min {least} --latency-max {most} \
         --workers {workers} --seconds {seconds}{in_flight}{embedded}",
        args.slot_release.name()
    )
}
