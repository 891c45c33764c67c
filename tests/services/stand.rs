//! A stand: a whole deployment on loopback, with backends, fake providers, worker processes and a pika producer.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;
use sluicegate::provider::simulated::{Effect, FakeHandle, FakeOptions, FakeProvider, FakeProviderReport};
use tokio_util::sync::CancellationToken;

use crate::program::Program;
use crate::support::UNPUBLISHED;
use crate::support::postgres::Postgres;
use crate::support::process::{Server, free_port, private_dir};
use crate::support::rabbitmq::{Broker, RabbitNode};
use crate::support::redis::{Redis, RedisOptions};
use crate::support::roles::{self, DATABASE};

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");
/// Debian's own interpreter, which finds Debian's python3-pika.
const PYTHON: &str = "/usr/bin/python3";

/// Stands that share the machine; [`ALONE`] while a test that measures time has it to itself.
static STANDS: Mutex<i64> = Mutex::new(0);
static ONE_WENT: Condvar = Condvar::new();
const ALONE: i64 = -1;

/// A stand's share of the machine, released on drop.
struct Share(i64);

impl Share {
    fn take(share: i64) -> Self {
        let stands = STANDS.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |stands: &mut i64| if share == ALONE { *stands != 0 } else { *stands == ALONE };
        *ONE_WENT.wait_while(stands, full).unwrap_or_else(PoisonError::into_inner) += share;
        Self(share)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        *STANDS.lock().unwrap_or_else(PoisonError::into_inner) -= self.0;
        ONE_WENT.notify_all();
    }
}

pub struct Stand {
    pub postgres: Postgres,
    pub redis: Redis,
    pub rabbit: Broker,
    vhost: String,
    broker_url: String,
    dir: PathBuf,
    pub providers: BTreeMap<&'static str, Fake>,
    workers: Vec<Option<Worker>>,
    /// Removes the directory, even if the stand is never dropped.
    _keeper: Server,
    /// Last field: it is dropped when all processes have ended.
    _share: Share,
}

pub struct Fake {
    handle: FakeHandle,
    url: String,
    _serving: tokio_util::sync::DropGuard,
}

struct Worker {
    server: Server,
    ops_port: u16,
}

/// A message that was read from the broker.
#[derive(Debug, Deserialize)]
pub struct Message {
    pub body: String,
    pub key: String,
    pub id: Option<String>,
}

impl Fake {
    pub fn report(&self) -> FakeProviderReport {
        self.handle.report()
    }

    pub fn effects(&self) -> Vec<Effect> {
        self.handle.effects()
    }

    pub fn arrivals_us(&self) -> Vec<u64> {
        self.handle.arrivals_us()
    }

    pub fn now_us(&self) -> u64 {
        self.handle.now_us()
    }
}

impl Stand {
    /// Starts the backends and migrates the database. Other stands use the same broker.
    pub fn start() -> Self {
        let share = Share::take(1);
        static VHOSTS: AtomicU32 = AtomicU32::new(0);
        let vhost = format!("billing-{}", VHOSTS.fetch_add(1, Ordering::Relaxed));
        RabbitNode::shared().create_vhost(&vhost);
        Self::on(share, Broker::Shared(RabbitNode::shared()), vhost)
    }

    /// The same with a broker of its own, for a test that kills it, limits it or fills it.
    pub fn start_with_broker() -> Self {
        Self::with_broker(Share::take(1))
    }

    /// Starts a stand once no other test of this target has one.
    pub fn start_alone() -> Self {
        Self::with_broker(Share::take(ALONE))
    }

    fn with_broker(share: Share) -> Self {
        let vhost = "billing".to_owned();
        Self::on(share, Broker::Own(RabbitNode::start_with_vhost(&vhost, "")), vhost)
    }

    fn on(share: Share, rabbit: Broker, vhost: String) -> Self {
        let broker_url = rabbit.node().url(&vhost);
        let dir = private_dir("billing");
        let keeper = Server::start(&["sleep", "infinity"], &[], &dir.join("keeper.log"), Some(&dir), "");
        let redis_dir = dir.join("redis");
        std::fs::create_dir(&redis_dir).unwrap();
        let postgres = Postgres::start();
        let redis = Redis::start_in(&redis_dir, RedisOptions::default());
        roles::create(&postgres);
        let stand = Self {
            postgres,
            redis,
            rabbit,
            vhost,
            broker_url,
            dir,
            providers: BTreeMap::new(),
            workers: Vec::new(),
            _keeper: keeper,
            _share: share,
        };
        stand.sluicegate(&["migrate"]);
        roles::grant(&stand.postgres);
        stand
    }

    /// Starts a strict provider; rows write its address as `{url:NAME}`.
    pub async fn add_provider(&mut self, name: &'static str, options: FakeOptions) {
        let fake = FakeProvider::new(options);
        let handle = fake.handle();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/charges", listener.local_addr().unwrap());
        let stop = CancellationToken::new();
        tokio::spawn(fake.serve(listener, stop.clone()));
        self.providers.insert(name, Fake { handle, url, _serving: stop.drop_guard() });
    }

    pub fn apply(&self, file: &str) {
        let path = self.file("providers.toml", file);
        self.sluicegate(&["provider", "apply", &path]);
    }

    /// Writes a file for a command and returns its path; the providers' addresses are filled in.
    pub fn file(&self, name: &str, text: &str) -> String {
        let filled = self
            .providers
            .iter()
            .fold(text.to_owned(), |text, (name, provider)| text.replace(&format!("{{url:{name}}}"), &provider.url));
        let path = self.dir.join(name);
        std::fs::write(&path, filled).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Runs a command to its end and expects success.
    pub fn sluicegate(&self, args: &[&str]) -> String {
        let output = Command::new(PROGRAM).args(args).envs(self.environment(args[0], "none")).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a command to its end; returns the exit code and the whole output.
    pub fn attempt(&self, args: &[&str]) -> (Option<i32>, String) {
        let output = Command::new(PROGRAM).args(args).envs(self.environment(args[0], "none")).output().unwrap();
        (output.status.code(), text(&output))
    }

    /// Environment of this command, with its database role from docs/security.md.
    fn environment(&self, command: &str, ops: &str) -> Vec<(String, String)> {
        [
            ("SLUICEGATE_DATABASE__URL", roles::url_for(&self.postgres, command)),
            ("SLUICEGATE_QUEUE__URL", self.broker_url.clone()),
            ("SLUICEGATE_LIMITER__URL", self.redis.url()),
            ("SLUICEGATE_OPS__LISTEN", ops.to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }

    /// Starts one more worker, waits until its backends are connected, and returns its number.
    pub fn add_worker(&mut self) -> usize {
        let number = self.add_waiting_worker();
        let worker = self.workers[number].as_ref().unwrap();
        worker.server.await_open(worker.ops_port);
        number
    }

    /// Starts one more worker without waiting for its backends.
    pub fn add_waiting_worker(&mut self) -> usize {
        self.workers.push(None);
        let number = self.workers.len() - 1;
        self.start_worker(number);
        number
    }

    pub fn start_worker(&mut self, number: usize) {
        let ops_port = free_port();
        let environment = self.environment("run", &format!("127.0.0.1:{ops_port}"));
        let environment: Vec<(&str, &str)> =
            environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let log = self.dir.join(format!("worker-{number}-{ops_port}.log"));
        let server = Server::start(&[PROGRAM, "run"], &environment, &log, None, "");
        server.await_port(ops_port);
        self.workers[number] = Some(Worker { server, ops_port });
    }

    pub fn worker_pid(&self, number: usize) -> u32 {
        self.workers[number].as_ref().unwrap().server.pid
    }

    pub fn ops_port(&self, number: usize) -> u16 {
        self.workers[number].as_ref().unwrap().ops_port
    }

    pub fn ops_url(&self, number: usize) -> String {
        format!("http://127.0.0.1:{}", self.workers[number].as_ref().unwrap().ops_port)
    }

    /// Status of this worker's probe: `livez`, `readyz`.
    pub async fn probe(&self, number: usize, path: &str) -> u16 {
        rustls::crypto::ring::default_provider().install_default().ok();
        let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).build().unwrap();
        client.get(format!("{}/{path}", self.ops_url(number))).send().await.unwrap().status().as_u16()
    }

    /// Waits until the worker is ready.
    pub async fn await_ready(&self, number: usize) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.probe(number, "readyz").await != 200 {
            assert!(Instant::now() < deadline, "{}", self.worker_log(number));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Runs a command that reads this worker's ops server.
    pub fn status_of(&self, number: usize, args: &[&str]) -> String {
        let ops = format!("127.0.0.1:{}", self.workers[number].as_ref().unwrap().ops_port);
        let output = Command::new(PROGRAM).args(args).envs(self.environment(args[0], &ops)).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{args:?}: {}", text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts a command that reads this worker's ops server and keeps running.
    pub fn program_of(&self, number: usize, args: &[&str]) -> Program {
        let ops = format!("127.0.0.1:{}", self.workers[number].as_ref().unwrap().ops_port);
        Program::start(args, &self.environment(args[0], &ops), &self.dir.join("program.log"))
    }

    /// From now on, programs reach the broker as this user, at first with all rights.
    pub fn use_broker_as(&mut self, user: &str) {
        self.rabbit.node().create_user(user, &self.vhost, ".*");
        self.broker_url = self.broker_url.replace("guest:guest", &format!("{user}:{user}"));
    }

    /// Grants rights to configure, write and read the queues that match the expression.
    pub fn set_broker_rights(&self, user: &str, rights: &str) {
        self.rabbit.node().ctl(&["set_permissions", "-p", &self.vhost, user, rights, rights, rights]);
    }

    /// Every queue of the stand with all its messages, also those that are not acknowledged.
    pub fn queues(&self) -> BTreeMap<String, u64> {
        self.rabbit.node().queues(&self.vhost)
    }

    pub fn broker_url(&self) -> &str {
        &self.broker_url
    }

    pub fn kill_worker(&mut self, number: usize) {
        if let Some(worker) = self.workers[number].take() {
            worker.server.kill();
        }
    }

    /// Sends SIGTERM, waits for the end, and returns the worker's log.
    pub fn stop_worker(&mut self, number: usize) -> String {
        let worker = self.workers[number].take().unwrap();
        worker.server.signal("TERM");
        let deadline = Instant::now() + Duration::from_secs(40);
        while std::net::TcpStream::connect(("127.0.0.1", worker.ops_port)).is_ok() {
            assert!(Instant::now() < deadline, "worker {number} does not stop:\n{}", worker.server.log_text());
            std::thread::sleep(Duration::from_millis(50));
        }
        worker.server.log_text()
    }

    pub fn worker_log(&self, number: usize) -> String {
        self.workers[number].as_ref().map(|worker| worker.server.log_text()).unwrap_or_default()
    }

    fn python(&self, args: &[&str], input: &str) -> String {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/services/broker.py");
        let mut child = Command::new(PYTHON)
            .arg(script)
            .args([args[0], &self.broker_url])
            .args(&args[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_owned();
        let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap().unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Publishes with pika; returns the number of messages that the broker confirmed.
    pub fn publish(&self, lines: &[serde_json::Value]) -> usize {
        let input: String = lines.iter().map(|line| format!("{line}\n")).collect();
        self.python(&["publish"], &input).trim().parse().unwrap()
    }

    pub fn bind(&self, queue: &str, exchange: &str) {
        self.python(&["bind", queue, exchange, "#"], "");
    }

    /// Deletes queues with their messages; returns the number of ready messages in them.
    pub fn delete_queues(&self, queues: &[String]) -> u64 {
        let args: Vec<&str> = std::iter::once("delete").chain(queues.iter().map(String::as_str)).collect();
        self.python(&args, "").trim().parse().unwrap()
    }

    /// Ready messages of each of these queues.
    pub fn ready(&self, queues: &[String]) -> Vec<u64> {
        let args: Vec<&str> = std::iter::once("ready").chain(queues.iter().map(String::as_str)).collect();
        self.python(&args, "").lines().map(|line| line.parse().unwrap()).collect()
    }

    /// A `psql` command for the database, to be given a query.
    pub fn psql(&self) -> Command {
        self.postgres.psql(DATABASE)
    }

    /// Numbers of the running workers.
    pub fn running(&self) -> Vec<usize> {
        (0..self.workers.len()).filter(|number| self.workers[*number].is_some()).collect()
    }

    /// Waits until this count of the ledger has the value.
    pub fn await_count(&self, select: &str, count: u64) {
        self.await_that(Duration::from_secs(120), || self.count(select) == count);
    }

    pub fn count(&self, select: &str) -> u64 {
        self.column(select).first().and_then(|count| count.parse().ok()).unwrap_or(u64::MAX)
    }

    /// The only column of a query, a line each.
    pub fn column(&self, select: &str) -> Vec<String> {
        let output = self.postgres.psql(DATABASE).args(["-At", "-c", select]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    pub fn drain(&self, queue: &str) -> Vec<Message> {
        self.python(&["drain", queue], "").lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Jobs per state, from the ledger.
    pub fn states(&self) -> BTreeMap<String, u64> {
        let mut psql = self.postgres.psql(DATABASE);
        let output = psql.args(["-At", "-F", " ", "-c", "SELECT state, count(*) FROM jobs GROUP BY state"]).output();
        let output = output.unwrap();
        let lines = String::from_utf8(output.stdout).unwrap();
        let pair = |line: &str| line.split_once(' ').map(|(state, jobs)| (state.to_owned(), jobs.parse().unwrap()));
        lines.lines().filter_map(pair).collect()
    }

    /// Waits until this many jobs have finished and every outcome is published.
    pub fn await_finished(&self, jobs: u64, within: Duration) {
        self.await_that(within, || self.finished() >= jobs && self.unpublished() == 0);
    }

    /// Waits until this many jobs have finished.
    pub fn await_progress(&self, jobs: u64) {
        self.await_that(Duration::from_secs(120), || self.finished() >= jobs);
    }

    fn finished(&self) -> u64 {
        let states = self.states();
        let open: u64 = ["waiting", "sending", "unknown"].iter().filter_map(|state| states.get(*state)).sum();
        states.values().sum::<u64>() - open
    }

    pub fn await_that(&self, within: Duration, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + within;
        while !condition() {
            if Instant::now() > deadline {
                let logs: Vec<String> = (0..self.workers.len()).map(|number| tail(&self.worker_log(number))).collect();
                panic!("{:?} after {within:?}\n{}", self.states(), logs.join("\n---\n"));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn unpublished(&self) -> u64 {
        let mut psql = self.postgres.psql(DATABASE);
        let output = psql.args(["-At", "-c", UNPUBLISHED]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap_or(u64::MAX)
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        // Workers end before their backends.
        self.workers.clear();
    }
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}
