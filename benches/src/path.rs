//! The benchmark `path`: jobs per second through the whole path without an effective limit, and the latency of an
//! idle lane.
//!
//! It runs the worker of production with its ledger, its permits and one HTTP request per job, on a full queue of fifty
//! accounts. The provider answers at once. The time runs from the first request to the last finished job.

use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, interval};

use super::broker::{self, BareLoop};
use super::conditions::Conditions;
use super::idle::{self, IdleLatency};
use super::interruption::Interruption;
use super::print::number;
use super::progress::Phase;
use super::stage::{BenchEnvironment, BenchProvider};
use super::{BenchError, require_one_limiter, seconds};
use sluicegate::app::Services;
use sluicegate::cli::{CommandError, Console, Exit};
use sluicegate::config::{Config, QueueUrl};
use sluicegate::domain::limit::MAX_REQUESTS;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::provider::simulated::FakeOptions;

const POLL_INTERVAL: Duration = Duration::from_millis(10);
const BUCKET: i64 = 256;

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Jobs to send.
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    jobs: u64,
    /// Longest time for publishing, and the same again for sending, in seconds.
    #[arg(long, value_name = "N", default_value = "60", value_parser = seconds)]
    seconds: f64,
    /// Workers in this process; more than one needs a limiter in Redis.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    workers: u16,
    /// Concurrent requests of each worker, as `workers` in a provider's row.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    in_flight: i64,
    /// Jobs to send one by one through an idle lane, to measure its latency; 0 skips that.
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u64).range(0..=100_000))]
    idle_jobs: u64,
    /// Use an embedded deployment in a temporary directory instead of the configured backends.
    #[arg(long)]
    embedded: bool,
    /// Print the figures as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Debug, Serialize)]
struct PathReport {
    conditions: Conditions,
    workers: u16,
    in_flight: i64,
    published: u64,
    published_per_second: f64,
    /// Finished jobs; fewer than published if the time ran out.
    finished: u64,
    seconds: f64,
    jobs_per_second: f64,
    /// Counted by the provider.
    requests: u64,
    charged_twice: u64,
    refused_429: u64,
    /// From publish to request in flight.
    idle: Option<IdleLatency>,
    /// Only with RabbitMQ.
    bare_loop: Option<BareLoop>,
    /// Jobs per second divided by the bare loop's messages per second.
    ratio_to_bare_loop: Option<f64>,
}

/// Runs the command.
///
/// # Errors
/// When something could not be measured, or a backend is unreachable.
pub async fn run(
    args: &Args,
    config: &Config,
    services: &Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let mut interruption = Interruption::catch()?;
    let mut stage = BenchEnvironment::prepare(args.embedded, config, services).await?;
    let ended = async {
        require_one_limiter(args.workers, &stage.config)?;
        tokio::select! {
            measured = measure(args, &mut stage, console) => measured,
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
        print(&report, console)?
    }
    Ok(Exit::Success)
}

async fn measure(
    args: &Args,
    stage: &mut BenchEnvironment<'_>,
    console: &mut Console,
) -> Result<PathReport, CommandError> {
    let conditions = Conditions::collect(command_line(args), &stage.config, console).await?;
    let within = Duration::from_secs_f64(args.seconds);
    let idle = if args.idle_jobs == 0 {
        None
    } else {
        let lane = stage.add("-idle", FakeOptions::default(), unrestrictive_row(args)).await?;
        let workers = stage.start(args.workers).await?;
        let idle = idle::measure(stage, &lane, workers, args.idle_jobs, within, console).await?;
        Some(idle)
    };
    let lane = stage.add("", FakeOptions::default(), unrestrictive_row(args)).await?;
    let began = Instant::now();
    let published = stage.publish(&lane, args.jobs, within, console).await?;
    let published_per_second = rate(published, began.elapsed());
    let (finished, took) = process_jobs(args, stage, &lane, published, console).await?;
    let seen = lane.fake.report();
    let bare_loop = match &stage.config.queue.url {
        QueueUrl::Embedded | QueueUrl::Database => None,
        QueueUrl::Amqp(url) => {
            console.message("the bare consume and acknowledge loop on the same broker")?;
            Some(broker::bare_loop(url.expose(), &stage.config.queue.prefix, published).await?)
        }
    };
    let jobs_per_second = rate(finished, took);
    Ok(PathReport {
        conditions,
        workers: args.workers,
        in_flight: lane.in_flight(),
        published,
        published_per_second,
        finished,
        seconds: took.as_secs_f64(),
        jobs_per_second,
        requests: seen.requests,
        charged_twice: seen.doubles,
        refused_429: seen.refused_429,
        idle,
        ratio_to_bare_loop: bare_loop.as_ref().map(|bare| jobs_per_second / bare.messages_per_second),
        bare_loop,
    })
}

/// A row whose limit never delays a job.
fn unrestrictive_row(args: &Args) -> ProviderRow {
    let limit = LimitRow {
        name: "limit".to_owned(),
        max_requests: i64::from(MAX_REQUESTS),
        window_ms: 1_000,
        ..LimitRow::default()
    };
    ProviderRow { workers: args.in_flight, bucket_capacity: BUCKET, limits: vec![limit], ..ProviderRow::default() }
}

/// Lets workers send the published jobs. Returns the number of finished jobs and the time.
async fn process_jobs(
    args: &Args,
    stage: &BenchEnvironment<'_>,
    lane: &BenchProvider,
    published: u64,
    console: &mut Console,
) -> Result<(u64, Duration), CommandError> {
    let mut workers = stage.start(args.workers).await?;
    let mut phase = Phase::begin("jobs finished", published, console)?;
    let (began, mut tick) = (Instant::now(), interval(POLL_INTERVAL));
    let (mut finished, mut finished_at_us) = (0, 0);
    while finished < published && began.elapsed().as_secs_f64() < args.seconds {
        tick.tick().await;
        workers.require_running()?;
        let now = workers.finished(&lane.name);
        if now > finished {
            (finished, finished_at_us) = (now, lane.fake.now_us());
        }
        phase.show(finished, console)?;
    }
    drop(phase);
    workers.stop().await?;
    let first_us = lane.fake.report().first_arrival_us;
    match first_us {
        Some(first_us) if finished_at_us > first_us => Ok((finished, Duration::from_micros(finished_at_us - first_us))),
        _ => Err(BenchError::InvalidMeasurement(format!("no job was finished within {} s", args.seconds)).into()),
    }
}

#[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
fn rate(count: u64, took: Duration) -> f64 {
    count as f64 / took.as_secs_f64().max(f64::MIN_POSITIVE)
}

fn command_line(args: &Args) -> String {
    let Args { jobs, seconds, workers, in_flight, idle_jobs, .. } = args;
    let embedded = if args.embedded { " --embedded" } else { "" };
    format!(
        "sluicegate-bench path --jobs {jobs} --seconds {seconds} --workers {workers} --in-flight {in_flight} \
         --idle-jobs {idle_jobs}{embedded}"
    )
}

#[allow(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
fn print(report: &PathReport, console: &mut Console) -> std::io::Result<()> {
    for line in report.conditions.lines() {
        console.line(&line)?;
    }
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let unfinished = if report.finished < report.published { ", the time ran out" } else { "" };
    let mut rows = vec![
        row("jobs per second, whole path", number(report.jobs_per_second)),
        row(
            "jobs finished",
            format!(
                "{} of {}, in {:.2} s{unfinished}",
                number(report.finished as f64),
                number(report.published as f64),
                report.seconds
            ),
        ),
        row("published or recorded per second", number(report.published_per_second)),
        row("workers × concurrent requests", format!("{} × {}", report.workers, report.in_flight)),
        row("requests, charged twice, 429", {
            format!("{}, {}, {}", number(report.requests as f64), report.charged_twice, report.refused_429)
        }),
    ];
    if let Some(bare) = &report.bare_loop {
        rows.push(row("bare loop, messages per second", number(bare.messages_per_second)));
    }
    rows.extend(report.ratio_to_bare_loop.map(|ratio| row("ratio to the bare loop", format!("{ratio:.3}"))));
    if let Some(idle) = &report.idle {
        rows.push(row(
            "idle lane, publish to request",
            format!("p50 {:.2} ms, p99 {:.2} ms, of {}", idle.p50_ms, idle.p99_ms, idle.jobs),
        ));
    }
    console.table(&["figure", "value"], &rows)
}
