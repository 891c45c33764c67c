//! The readout oracle: it compares the readouts of a running deployment with the truth every second.
//!
//! A test of a formatter says nothing about a readout under real traffic. While a test loads and breaks a deployment,
//! [`watch`] reads every readout of its workers each second. It also reads the truth from its source: the ledger by
//! SQL, the queues from the broker, the requests from the provider's own records. Afterwards [`judge`] compares both.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

pub mod ask;
pub mod comparison;
mod comparison_tests;
pub mod finish_times;
mod hindered;
pub mod judge;
mod judge_tests;
pub mod prometheus;

use ask::Shown;

/// 429s within this time mean that the provider still refuses requests.
pub const LATELY: Duration = Duration::from_secs(20);
/// Interval of the samples.
const EVERY: Duration = Duration::from_secs(1);

/// A deployment under test, read without its workers.
pub trait Deployment: Sync {
    /// Workers that should be running.
    fn workers(&self) -> Vec<WorkerTruth>;
    /// Jobs in the ledger by provider and state; `None`: the database does not answer.
    fn ledger(&self) -> Option<BTreeMap<String, BTreeMap<String, u64>>>;
    /// Messages ready by provider; `None`: the broker does not answer.
    fn ready(&self) -> Option<BTreeMap<String, u64>>;
    /// Whether the Redis server of the previous sample still runs and has its data; `None`: it does not answer.
    fn limiter_kept(&self) -> Option<bool>;
    /// Messages published so far, by provider.
    fn published(&self) -> BTreeMap<String, Published>;
    /// Requests that a provider received between two instants.
    fn received(&self, provider: &str, from: Instant, to: Instant) -> u64;
    /// Requests that a provider answered with 429: within this last time, or ever; `None`: it is not known.
    fn throttled(&self, _provider: &str, _within: Option<Duration>) -> Option<u64> {
        None
    }
    /// PostgreSQL answers reads, and refuses or holds every write of a payment.
    fn writes_are_refused(&self) -> bool {
        false
    }
    /// RabbitMQ blocks everyone who publishes.
    fn publishers_are_blocked(&self) -> bool {
        false
    }
    /// The output of `status --json` with this worker's ops server; `None`: it is not read, or the command fails.
    fn status(&self, _ops_port: u16) -> Option<serde_json::Value> {
        None
    }
    /// State of one job in the ledger; `None`: the database does not answer, or has no such job.
    fn state_of(&self, job: &str) -> Option<String>;
}

/// One worker process, as the test knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerTruth {
    pub worker: usize,
    pub pid: u32,
    pub ops_port: u16,
    /// It is neither frozen nor killed, and its connections to the backends are undisturbed.
    pub healthy: bool,
}

/// Messages that producers sent to one provider.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// Distinct jobs that the broker has confirmed.
    pub confirmed: u64,
    /// Distinct jobs that were sent, confirmed or not.
    pub sent: u64,
    /// Second copies of jobs; a queue cannot tell them from new jobs.
    pub copies: u64,
}

/// 429s of one provider, by its own record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttled {
    pub ever: u64,
    /// Within [`LATELY`].
    pub lately: u64,
}

/// The truth, read between two instants since the start of the watch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Truth {
    pub from: Duration,
    pub to: Duration,
    pub ledger: Option<BTreeMap<String, BTreeMap<String, u64>>>,
    pub ready: Option<BTreeMap<String, u64>>,
    pub limiter_kept: Option<bool>,
    pub published: BTreeMap<String, Published>,
    /// Of the providers whose record has it.
    pub throttled: BTreeMap<String, Throttled>,
    pub writes_are_refused: bool,
    pub publishers_are_blocked: bool,
    pub workers: Vec<WorkerTruth>,
}

/// Readouts of one worker, requested and received between two instants since the start of the watch.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    pub asked: Duration,
    pub answered: Duration,
    pub worker: usize,
    pub shown: Shown,
}

/// The key under which each sample leaves the server's run id. It vanishes when Redis loses its data.
const SENTINEL: &str = "readouts:sentinel";

/// [`Deployment::limiter_kept`] of the Redis server at this address. A server that was restarted in between has another
/// run id, even if it was down for less than the time between two samples.
pub fn is_redis_kept(url: &str) -> Option<bool> {
    let patience = Duration::from_secs(1);
    let mut connection = redis::Client::open(url).unwrap().get_connection_with_timeout(patience).ok()?;
    connection.set_read_timeout(Some(patience)).ok()?;
    let server: redis::InfoDict = redis::cmd("INFO").arg("server").query(&mut connection).ok()?;
    let run_id: String = server.get("run_id")?;
    let before = redis::cmd("SET").arg(SENTINEL).arg(&run_id).arg("GET").query::<Option<String>>(&mut connection);
    Some(before.ok()? == Some(run_id))
}

/// All samples, in the order of time.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Start of the watch.
    pub started: Option<Instant>,
    pub truths: Vec<Truth>,
    pub samples: Vec<Sample>,
}

/// Samples the truth and the readouts each second until `over`, one worker after another. The truth is read beside the
/// readouts: those wait for a backend that is down, so an outage could begin and end between two of them.
pub fn watch(
    deployment: &dyn Deployment,
    jobs: &[String],
    prometheus: Option<&prometheus::Prometheus>,
    over: &AtomicBool,
) -> History {
    let started = Instant::now();
    let truths = Mutex::new(vec![truth(deployment, started)]);
    let samples = std::thread::scope(|scope| {
        scope.spawn(|| {
            each_second(over, |_| {
                let truth = truth(deployment, started);
                truths.lock().unwrap().push(truth);
            });
        });
        let mut samples = Vec::new();
        each_second(over, |turn| {
            let last = truths.lock().unwrap().last().cloned().unwrap_or_default();
            // While a backend is down, the readouts that need it cannot be judged, and each request waits for it.
            let is_whole = last.ledger.is_some() && last.ready.is_some() && last.limiter_kept.is_some();
            let Some(worker) = last.workers.get(turn % last.workers.len().max(1)) else { return };
            let asked = started.elapsed();
            let shown = match is_whole {
                true => ask::everything(deployment, worker.ops_port, jobs, prometheus),
                false => ask::counts(worker.ops_port),
            };
            samples.push(Sample { asked, answered: started.elapsed(), worker: worker.worker, shown });
        });
        samples
    });
    let mut truths = truths.into_inner().unwrap();
    truths.push(truth(deployment, started));
    History { started: Some(started), truths, samples }
}

/// Does something each second until `over`, with the number of the time.
fn each_second(over: &AtomicBool, mut act: impl FnMut(usize)) {
    let mut number = 0;
    while !over.load(Ordering::Relaxed) {
        let next = Instant::now() + EVERY;
        act(number);
        number += 1;
        sleep(next.saturating_duration_since(Instant::now()));
    }
}

fn truth(deployment: &dyn Deployment, started: Instant) -> Truth {
    let from = started.elapsed();
    // The published jobs are read before the ledger, so that no job seems to have finished before it was sent.
    let published = deployment.published();
    let (ledger, ready) = (deployment.ledger(), deployment.ready());
    let (limiter_kept, workers) = (deployment.limiter_kept(), deployment.workers());
    let throttled = published.keys().filter_map(|name| {
        let throttled = |within| deployment.throttled(name, within);
        Some((name.clone(), Throttled { ever: throttled(None)?, lately: throttled(Some(LATELY))? }))
    });
    let throttled = throttled.collect();
    let (writes_are_refused, publishers_are_blocked) =
        (deployment.writes_are_refused(), deployment.publishers_are_blocked());
    Truth {
        from,
        to: started.elapsed(),
        ledger,
        ready,
        limiter_kept,
        published,
        throttled,
        writes_are_refused,
        publishers_are_blocked,
        workers,
    }
}
