//! The `demo` command: the whole path in memory against a strict provider that injects faults by seed, with a proof at
//! the end.
//!
//! It runs the worker of production on embedded backends. It uses no file and no port except two on loopback, and
//! leaves nothing behind. With `--serve` worker, provider and page stay until a stop signal.

use std::ops::RangeInclusive;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::enqueue::door::{self, Door, HandedOver, OpenDoor};
use super::input::job_count;
use super::os::Signals;
use super::{CommandError, Console, Exit};
use crate::app::Services;
use crate::config::{self, Config};
use crate::domain::format::count;
use crate::domain::limit::Rate;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::provider_row::{LimitRow, ProviderRow};
use crate::provider::simulated::{FakeHandle, FakeOptions, FakeProvider};
use crate::queue::message::CardNumbers;
use crate::worker::supervisor::{self, DrainReport, WorkerStatus};
use crate::worker::{self, WorkerOptions, settings_sync, sweeper};

mod report;
mod serve;

use report::{DemoProgress, Proof, ProviderRecord};

const PROVIDER: &str = "demo";
/// The worker's name in jobs and reports.
const OWNER: &str = "demo";
const JOBS: RangeInclusive<u64> = 1..=1_000_000;
/// Duration of a run with the default number of jobs.
const RUN_TIME: Duration = Duration::from_secs(13);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Every 50th job is enqueued twice.
const DUPLICATE_EVERY: u64 = 50;
/// Longest time for open connections of the page after a stop signal.
const PAGE_CLOSE_MAX: Duration = Duration::from_secs(2);
/// Without a finished job for this time, the run ends and the proof reports lost jobs.
const NO_PROGRESS_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Number of payments. Default: as many as the limit allows in about 13 seconds.
    #[arg(long, value_parser = parse_jobs)]
    jobs: Option<u64>,
    /// The provider's limit, counted over every sliding window.
    #[arg(long, value_name = "N/DURATION", default_value = "100/1s")]
    limit: Rate,
    /// What a job does when it must wait for the limit: wait in the worker, or be requeued until then.
    #[arg(long, value_parser = ["blocking", "requeue"], default_value = "blocking")]
    mode: String,
    /// Decides latencies and faults.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Show the run on the page, and keep it open on the demo's data until ctrl-c.
    #[arg(long)]
    serve: bool,
    /// Print the proof as JSON.
    #[arg(long)]
    json: bool,
}

fn parse_jobs(text: &str) -> Result<u64, String> {
    let jobs = job_count(text)? as u64;
    if JOBS.contains(&jobs) { Ok(jobs) } else { Err(format!("{jobs} is not in {JOBS:?}")) }
}

/// Runs the command.
///
/// # Errors
/// When a part cannot start. A broken guarantee is no error, but gives exit code 1.
pub async fn run(args: &Args, services: &Services, console: &mut Console) -> Result<Exit, CommandError> {
    if args.limit.max_requests() == 0 {
        return Err(CommandError::Usage("--limit 0/… is closed: no request would ever be sent".to_owned()));
    }
    let config = in_memory_config()?;
    let (worker, _lock) = services.worker_backends(&config).await?;
    let fake = FakeProvider::new(FakeOptions {
        limits: vec![args.limit],
        latency: (Duration::from_millis(20), Duration::from_millis(80)),
        error_rate: 0.005,
        lost_answer_rate: 0.003,
        decline_rate: 0.01,
        seed: args.seed,
        ..FakeOptions::default()
    });
    let provider = fake.handle();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/charges", listener.local_addr()?);
    let stop_provider = CancellationToken::new();
    let serving = tokio::spawn(fake.serve(listener, stop_provider.clone()));

    let row = row(args, url);
    worker.ledger.apply_settings(std::slice::from_ref(&row), false).await?;
    let name = ProviderName::new(PROVIDER).map_err(|problem| CommandError::Failed(problem.to_string()))?;
    let jobs = args.jobs.unwrap_or_else(|| default_jobs(args.limit));
    let names = std::slice::from_ref(&name);
    let OpenDoor { door, .. } = door::open(&config, services, names, names).await?;
    let known = enqueue(&door, &name, jobs).await?;
    console.message(&format!(
        "{} ({known} of them enqueued twice), provider allows {}, answers in 20 to 80 ms, loses 0.3 % of its responses and \
         fails 0.5 %",
        count(jobs, "payment"),
        args.limit
    ))?;
    let demo = DemoWorker::start(&worker);
    let mut page = if args.serve { Some(Page::open(&config, &worker, &demo, console).await?) } else { None };
    let watched = await_jobs(Watched { args, backends: &worker, provider: &provider, jobs, demo: &demo }, console);
    match &mut page {
        None => watched.await?,
        Some(page) => page.unless_stopped(watched).await?,
    }
    let demo = if page.is_some() { Some(demo) } else { demo.stop().await.map(|()| None)? };
    let counts = worker.ledger.state_counts().await?;
    let record = ProviderRecord {
        report: provider.report(),
        effects: provider.effects(),
        arrivals_us: provider.arrivals_us(),
        lost_hold: row.validate(0).map(|provider| provider.hold_max()).unwrap_or_default(),
    };
    let proof = Proof::from_counts(jobs, args.limit, &counts, &record);
    proof.print(args.json, console)?;
    if let Some((page, demo)) = page.zip(demo) {
        page.wait(console).await?;
        demo.stop().await?;
    }
    stop_provider.cancel();
    serving.await.map_err(|error| CommandError::Failed(error.to_string()))??;
    Ok(if proof.holds() { Exit::Success } else { Exit::Failed })
}

fn row(args: &Args, url: String) -> ProviderRow {
    let mut limit = LimitRow { name: "limit".to_owned(), ..LimitRow::default() };
    limit.set_rate(args.limit);
    ProviderRow {
        name: PROVIDER.to_owned(),
        url,
        mode: args.mode.clone(),
        timeout_ms: 2_000,
        idempotency_retention_s: Some(86_400),
        limits: vec![limit],
        ..ProviderRow::default()
    }
}

/// Everything embedded, in memory, and no ops server.
fn in_memory_config() -> Result<Config, CommandError> {
    let sets = ["database.url=sqlite::memory:", "ops.listen=none"].map(str::to_owned);
    config::load(None, [], &sets).map_err(|problems| CommandError::Failed(problems.to_string()))
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped and positive")]
fn default_jobs(limit: Rate) -> u64 {
    (limit.per_second() * RUN_TIME.as_secs_f64()).clamp(20.0, 20_000.0) as u64
}

/// Enqueues all jobs, some of them twice; returns how many were known already.
async fn enqueue(door: &Door, provider: &ProviderName, jobs: u64) -> Result<u64, CommandError> {
    let numbers = (1..=jobs).flat_map(|number| {
        let copies = if number.is_multiple_of(DUPLICATE_EVERY) { 2 } else { 1 };
        std::iter::repeat_n(number, copies)
    });
    let enqueued = stream::iter(numbers).map(|number| async move {
        let id = format!("demo-{number:06}");
        let job = json!({ "v": 1, "id": id, "provider": PROVIDER, "amount": 100 + number % 900, "currency": "EUR" });
        let payment = door.check(job.to_string().as_bytes(), provider, CardNumbers::Refuse).await;
        let payment = payment.map_err(|error| CommandError::Failed(error.to_string()))?;
        Ok::<_, CommandError>(matches!(door.hand_over(payment).await?, HandedOver::Known))
    });
    enqueued.buffer_unordered(64).try_fold(0, |known, is_known| async move { Ok(known + u64::from(is_known)) }).await
}

/// The worker of the demo.
struct DemoWorker {
    stop: CancellationToken,
    running: JoinHandle<Result<DrainReport, LedgerError>>,
    status: watch::Receiver<WorkerStatus>,
}

impl DemoWorker {
    fn start(backends: &worker::Backends) -> Self {
        let stop = CancellationToken::new();
        let options = WorkerOptions {
            owner: OWNER.to_owned(),
            card_numbers: CardNumbers::Refuse,
            drain_timeout: Duration::from_secs(30),
            max_open_jobs: u32::MAX,
            settings_poll: settings_sync::POLL_INTERVAL,
            sweep_every: sweeper::SWEEP_INTERVAL,
            // The demo ends long before that.
            scrub_after: Duration::from_secs(86_400),
            scrub_review_after: None,
        };
        let (progress, status) = watch::channel(WorkerStatus::default());
        let running = tokio::spawn(supervisor::run(backends.clone(), options, stop.clone(), progress));
        Self { stop, running, status }
    }

    async fn stop(self) -> Result<(), CommandError> {
        self.stop.cancel();
        self.running.await.map_err(|error| CommandError::Failed(error.to_string()))??;
        Ok(())
    }
}

/// The page of `--serve`.
struct Page {
    signals: Signals,
    stop: CancellationToken,
    serving: JoinHandle<Result<(), CommandError>>,
}

impl Page {
    async fn open(
        config: &Config,
        backends: &worker::Backends,
        demo: &DemoWorker,
        console: &mut Console,
    ) -> Result<Self, CommandError> {
        let signals = Signals::watch()?;
        let (listener, stop) = (serve::bind(console).await?, CancellationToken::new());
        let (config, backends, status) = (config.clone(), backends.clone(), demo.status.clone());
        let end = stop.clone();
        let serving = tokio::spawn(async move { serve::run(listener, &config, &backends, status, end).await });
        Ok(Self { signals, stop, serving })
    }

    /// A stop signal ends the run before its proof.
    async fn unless_stopped(
        &mut self,
        run: impl Future<Output = Result<(), CommandError>>,
    ) -> Result<(), CommandError> {
        tokio::select! {
            ended = run => ended,
            signal = self.signals.wait_for_stop() => Err(CommandError::Failed(format!("stopped by {signal}"))),
        }
    }

    /// Keeps the page until a stop signal.
    async fn wait(mut self, console: &mut Console) -> Result<(), CommandError> {
        console.message("the page stays open: ctrl-c ends it")?;
        console.flush()?;
        let ended = tokio::select! {
            _ = self.signals.wait_for_stop() => None,
            ended = &mut self.serving => Some(ended),
        };
        self.stop.cancel();
        let ended = match ended {
            Some(ended) => ended,
            // A browser that keeps its connection open must not delay the end.
            None => match timeout(PAGE_CLOSE_MAX, self.serving).await {
                Ok(ended) => ended,
                Err(_) => return Ok(()),
            },
        };
        ended.map_err(|error| CommandError::Failed(error.to_string()))?
    }
}

/// A run whose progress is shown.
struct Watched<'a> {
    args: &'a Args,
    backends: &'a worker::Backends,
    provider: &'a FakeHandle,
    jobs: u64,
    demo: &'a DemoWorker,
}

/// Waits until every job is finished, and shows the progress.
async fn await_jobs(watched: Watched<'_>, console: &mut Console) -> Result<(), CommandError> {
    let Watched { args, backends, provider, jobs, demo } = watched;
    let mut display = DemoProgress::new(jobs, args.limit, console.draws_progress);
    let mut tick = interval(POLL_INTERVAL);
    let mut finished = 0;
    let mut last_progress = Instant::now();
    while finished < jobs && last_progress.elapsed() < NO_PROGRESS_TIMEOUT && !demo.running.is_finished() {
        tick.tick().await;
        let counts = backends.ledger.state_counts().await?;
        let now_finished = report::count_finished(&counts);
        if now_finished > finished {
            (finished, last_progress) = (now_finished, Instant::now());
        }
        display.show(finished, &counts, &provider.arrivals_us(), console)?;
    }
    display.end();
    Ok(())
}
