//! A deployment for fault tests: real backends, recording providers, worker processes, and a network path between each
//! worker and each peer.
//!
//! Every method takes `&self`, so that faults can overlap. A fault that kills or freezes a backend locks it.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use crate::broker::Client;
use crate::connection_owner;
use crate::provider::{Provider, ProviderOptions};
use crate::proxy::{Asking, Question, Road, Whose, listen};
use crate::readout_oracle::WorkerTruth;
use crate::support::clock::redis_with_false_clock;
use crate::support::postgres::Postgres;
use crate::support::process::{Server, free_port, private_dir};
use crate::support::rabbitmq::RabbitNode;
use crate::support::redis::Redis;

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");
const VHOST: &str = "faults";
pub const DATABASE: &str = "faults";
/// Queue of the subscribers' events.
pub const OUTCOMES: &str = "test.outcomes";

/// Redis' key of a provider's limiter state (`lua/quota.lua`).
pub fn quota_key(provider: &str) -> String {
    format!("sluicegate:{{{provider}}}")
}

/// Options of a stand.
#[derive(Clone, Default)]
pub struct StandOptions {
    /// Additional lines of `rabbitmq.conf`.
    pub broker_settings: String,
    /// Additional variables of every worker.
    pub environment: Vec<(String, String)>,
}

pub struct Stand {
    // Dropped in this order: workers first, and the runtime of proxies and providers after the backends.
    workers: Vec<Mutex<WorkerSlot>>,
    pub postgres: Postgres,
    pub redis: Redis,
    redis_clock: PathBuf,
    pub rabbit: RabbitNode,
    /// Held by a fault that affects the whole backend.
    pub redis_lock: Mutex<()>,
    pub rabbit_lock: Mutex<()>,
    pub postgres_lock: Mutex<()>,
    /// PostgreSQL refuses or holds writes.
    pub writes_are_refused: AtomicBool,
    /// RabbitMQ has an alarm.
    pub publishers_are_blocked: AtomicBool,
    pub client: Client,
    pub providers: BTreeMap<String, PlacedProvider>,
    pub dir: PathBuf,
    options: StandOptions,
    broker_url: String,
    /// Process ids of the workers, for the providers' proxies.
    pids: Arc<Mutex<Vec<u32>>>,
    questions: mpsc::UnboundedSender<Question>,
    pub runtime: Runtime,
    /// Last, so that the servers have ended before the next stand begins.
    _alone: MutexGuard<'static, ()>,
}

/// A provider and the network paths that lead to it.
pub struct PlacedProvider {
    pub provider: Provider,
    /// Address of its proxy, as its row names it.
    url: String,
    roads: Arc<Mutex<Vec<Arc<Road>>>>,
}

/// A worker's slot: its network paths stay when its process ends.
struct WorkerSlot {
    process: Option<Server>,
    frozen: bool,
    /// Number of processes started so far.
    starts: usize,
    ops_port: u16,
    urls: Vec<(&'static str, String)>,
    redis: Arc<Road>,
    rabbit: Arc<Road>,
    postgres: Arc<Road>,
}

/// A stand keeps both cores busy. Beside another one, servers start late and what is shown is old for that reason alone.
static ONE_STAND: Mutex<()> = Mutex::new(());

impl Stand {
    /// Starts the backends and migrates the database, when no other stand is in use.
    pub fn start(options: StandOptions) -> Self {
        let alone = ONE_STAND.lock().unwrap_or_else(PoisonError::into_inner);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let postgres = Postgres::start();
        let (redis, redis_clock) = redis_with_false_clock();
        let rabbit = RabbitNode::start_with_vhost(VHOST, &options.broker_settings);
        let broker_url = rabbit.url(VHOST);
        postgres.create_database(DATABASE);
        let pids: Arc<Mutex<Vec<u32>>> = Arc::default();
        let client = Client::new(broker_url.clone());
        let stand = Self {
            workers: Vec::new(),
            postgres,
            redis,
            redis_clock,
            rabbit,
            redis_lock: Mutex::default(),
            rabbit_lock: Mutex::default(),
            postgres_lock: Mutex::default(),
            writes_are_refused: AtomicBool::default(),
            publishers_are_blocked: AtomicBool::default(),
            client,
            providers: BTreeMap::new(),
            dir: private_dir("faults"),
            options,
            broker_url,
            questions: connection_owner::serve(Arc::clone(&pids)),
            pids,
            runtime,
            _alone: alone,
        };
        stand.sluicegate(&["migrate"]);
        stand
    }

    /// Starts a provider; rows write its address as `{url:NAME}`. All providers start before the first worker.
    pub fn add_provider(&mut self, name: &str, options: ProviderOptions) {
        assert!(self.workers.is_empty(), "providers must be added before workers");
        let provider = self.runtime.block_on(Provider::start(options));
        let roads: Arc<Mutex<Vec<Arc<Road>>>> = Arc::default();
        let asking = Asking { questions: self.questions.clone(), roads: Arc::clone(&roads) };
        let port = self.runtime.block_on(listen(provider.port, Whose::Asked(asking)));
        let url = format!("http://127.0.0.1:{port}/charges");
        self.providers.insert(name.to_owned(), PlacedProvider { provider, url, roads });
    }

    /// Applies provider rows, and subscribes to the outcomes.
    pub fn apply(&self, rows: &str) {
        let mut rows = rows.to_owned();
        for (name, placed) in &self.providers {
            rows = rows.replace(&format!("{{url:{name}}}"), &placed.url);
        }
        let path = self.dir.join("providers.toml");
        std::fs::write(&path, rows).unwrap();
        self.sluicegate(&["provider", "apply", path.to_str().unwrap()]);
        self.runtime.block_on(self.client.subscribe(OUTCOMES, "payments.outcomes"));
    }

    /// Runs a command over network paths of its own; expects success.
    pub fn sluicegate(&self, args: &[&str]) -> String {
        let environment = [
            ("SLUICEGATE_DATABASE__URL", self.postgres.url(DATABASE)),
            ("SLUICEGATE_QUEUE__URL", self.broker_url.clone()),
            ("SLUICEGATE_LIMITER__URL", self.redis.url()),
        ];
        let output = Command::new(PROGRAM).args(args).envs(environment).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Output of a command that reads a worker's ops server; `None`: it has failed.
    pub fn asked(&self, ops_port: u16, args: &[&str]) -> Option<String> {
        let environment = [
            ("SLUICEGATE_DATABASE__URL", self.postgres.url(DATABASE)),
            ("SLUICEGATE_QUEUE__URL", self.broker_url.clone()),
            ("SLUICEGATE_LIMITER__URL", self.redis.url()),
            ("SLUICEGATE_OPS__LISTEN", format!("127.0.0.1:{ops_port}")),
        ];
        let output = Command::new(PROGRAM).args(args).envs(environment).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }

    /// Starts one more worker, waits until it is ready, and returns its number.
    pub fn add_worker(&mut self) -> usize {
        let (redis, rabbit, postgres) = (Road::new(), Road::new(), Road::new());
        let through = |url: &str, road: &Arc<Road>| {
            let mut url = url::Url::parse(url).unwrap();
            let port = self.runtime.block_on(listen(url.port().unwrap(), Whose::Known(Arc::clone(road))));
            url.set_port(Some(port)).unwrap();
            url.to_string()
        };
        let urls = vec![
            ("SLUICEGATE_DATABASE__URL", through(&self.postgres.url(DATABASE), &postgres)),
            ("SLUICEGATE_QUEUE__URL", through(&self.broker_url, &rabbit)),
            ("SLUICEGATE_LIMITER__URL", through(&self.redis.url(), &redis)),
        ];
        for placed in self.providers.values() {
            placed.roads.lock().unwrap().push(Road::new());
        }
        self.pids.lock().unwrap().push(0);
        let slot = WorkerSlot { process: None, frozen: false, starts: 0, ops_port: 0, urls, redis, rabbit, postgres };
        self.workers.push(Mutex::new(slot));
        let worker = self.workers.len() - 1;
        self.start_worker(worker, &[]);
        self.await_ready(worker);
        worker
    }

    /// Number of processes that a worker has had.
    pub fn starts(&self, worker: usize) -> usize {
        self.slot(worker).starts
    }

    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Starts a worker's process without waiting until it is ready.
    pub fn start_worker(&self, worker: usize, environment: &[(&str, String)]) {
        let mut slot = self.slot(worker);
        assert!(slot.process.is_none(), "worker {worker} runs");
        self.start_in(&mut slot, worker, environment);
    }

    /// Starts a new process for a worker; kills a running one.
    pub fn replace_worker(&self, worker: usize, environment: &[(&str, String)]) {
        let mut slot = self.slot(worker);
        if let Some(process) = slot.process.take() {
            process.kill();
        }
        self.start_in(&mut slot, worker, environment);
    }

    fn start_in(&self, slot: &mut WorkerSlot, worker: usize, environment: &[(&str, String)]) {
        slot.frozen = false;
        slot.ops_port = free_port();
        slot.starts += 1;
        let ours = [
            ("SLUICEGATE_OPS__LISTEN", format!("127.0.0.1:{}", slot.ops_port)),
            // Trace level logs the deliveries, so that redeliveries can be counted.
            ("SLUICEGATE_LOG__LEVEL", "trace".to_owned()),
        ];
        let given = self.options.environment.iter().map(|(name, value)| (name.as_str(), value));
        let all = slot.urls.iter().chain(&ours).chain(environment).map(|(name, value)| (*name, value)).chain(given);
        // Set for the program alone, not for the shell that supervises it.
        let mut command = vec!["env".to_owned()];
        command.extend(all.map(|(name, value)| format!("{name}={value}")));
        command.extend([PROGRAM.to_owned(), "run".to_owned()]);
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let log = self.log(worker, slot.starts);
        let process = Server::start(&command, &[], &log, None, "");
        self.pids.lock().unwrap()[worker] = process.pid;
        slot.process = Some(process);
    }

    /// Waits until a worker reports that it is ready.
    pub fn await_ready(&self, worker: usize) {
        let port = self.slot(worker).ops_port;
        let ready = || {
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { return false };
            let mut answer = String::new();
            let asked = stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n\r\n");
            asked.and_then(|()| stream.read_to_string(&mut answer)).is_ok() && answer.starts_with("HTTP/1.1 200")
        };
        self.await_that(&format!("worker {worker} is ready"), Duration::from_secs(60), ready);
    }

    /// Sends SIGKILL; the worker's network paths stay.
    pub fn kill_worker(&self, worker: usize) {
        let mut slot = self.slot(worker);
        slot.frozen = false;
        if let Some(process) = slot.process.take() {
            process.kill();
        }
    }

    /// Sends SIGSTOP or SIGCONT. A worker that does not run is ignored.
    pub fn freeze_worker(&self, worker: usize, frozen: bool) {
        let mut slot = self.slot(worker);
        if let Some(process) = slot.process.as_ref().filter(|process| !process.has_ended()) {
            process.signal(if frozen { "STOP" } else { "CONT" });
            slot.frozen = frozen;
        }
    }

    /// Sends SIGTERM, waits for the end, and returns the log.
    pub fn stop_worker(&self, worker: usize) -> String {
        let mut slot = self.slot(worker);
        let process = slot.process.take().expect("the worker runs");
        process.signal("TERM");
        self.await_that("the worker stops", Duration::from_secs(60), || process.has_ended());
        process.log_text()
    }

    /// Restarts workers that have ended by themselves, as a process supervisor would. Returns their numbers.
    pub fn revive_workers(&self) -> Vec<usize> {
        let ended = |worker: &usize| self.slot(*worker).process.as_ref().is_some_and(Server::has_ended);
        let ended: Vec<usize> = (0..self.workers.len()).filter(ended).collect();
        ended.iter().for_each(|worker| self.replace_worker(*worker, &[]));
        ended
    }

    pub fn road_to_redis(&self, worker: usize) -> Arc<Road> {
        Arc::clone(&self.slot(worker).redis)
    }

    pub fn road_to_rabbit(&self, worker: usize) -> Arc<Road> {
        Arc::clone(&self.slot(worker).rabbit)
    }

    pub fn road_to_postgres(&self, worker: usize) -> Arc<Road> {
        Arc::clone(&self.slot(worker).postgres)
    }

    pub fn road_to_provider(&self, worker: usize, provider: &str) -> Arc<Road> {
        Arc::clone(&self.providers[provider].roads.lock().unwrap()[worker])
    }

    /// Workers whose process runs, for the readout oracle.
    pub fn worker_truths(&self) -> Vec<WorkerTruth> {
        let truth = |worker: usize| {
            let slot = self.slot(worker);
            let process = slot.process.as_ref().filter(|process| !process.has_ended())?;
            let unhindered = [&slot.redis, &slot.rabbit, &slot.postgres].into_iter().all(|road| road.passes());
            let healthy = unhindered && !slot.frozen;
            Some(WorkerTruth { worker, pid: process.pid, ops_port: slot.ops_port, healthy })
        };
        (0..self.workers.len()).filter_map(truth).collect()
    }

    /// Connections of a worker that a rule other than `Pass` affected.
    pub fn troubled(&self, worker: usize) -> u64 {
        let engines = [self.road_to_redis(worker), self.road_to_rabbit(worker), self.road_to_postgres(worker)];
        let providers = self.providers.keys().map(|name| self.road_to_provider(worker, name));
        engines.into_iter().chain(providers).map(|road| road.troubled()).sum()
    }

    /// Sets Redis' wall clock ahead by this many milliseconds.
    pub fn set_redis_clock(&self, millis: i64) {
        crate::support::clock::move_clock(&self.redis_clock, millis);
    }

    pub fn provider(&self, name: &str) -> &Provider {
        &self.providers[name].provider
    }

    /// Logs of all processes of all workers, one at a time, because their total may be gigabytes.
    pub fn logs(&self) -> impl Iterator<Item = (PathBuf, String)> {
        let of = move |worker: usize| (1..=self.slot(worker).starts).map(move |start| self.log(worker, start));
        let logs = (0..self.workers.len()).flat_map(of);
        logs.map(|path| (path.clone(), std::fs::read_to_string(path).unwrap_or_default()))
    }

    fn log(&self, worker: usize, start: usize) -> PathBuf {
        self.dir.join(format!("worker-{worker}-{start}.log"))
    }

    /// Polls until the condition holds.
    pub fn await_that(&self, what: &str, within: Duration, mut condition: impl FnMut() -> bool) {
        let deadline = Instant::now() + within;
        while !condition() {
            assert!(Instant::now() < deadline, "not so within {within:?}: {what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn slot(&self, worker: usize) -> MutexGuard<'_, WorkerSlot> {
        self.workers[worker].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        self.workers.clear();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
