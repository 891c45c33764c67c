//! Exhausted file descriptors: a worker that cannot open files or sockets reports a local fault, which uses no attempt
//! of a payment.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use sluicegate::ledger::database::Database;
use sluicegate::provider::simulated::{FakeOptions, FakeProvider};
use sqlx::{AssertSqlSafe, SqlitePool};
use tokio_util::sync::CancellationToken;

use crate::program::Program;

const PATIENCE: Duration = Duration::from_secs(90);
/// Reached by IP address, by name, and with a secret from a file.
const PROVIDERS: [&str; 3] = ["acme", "bolt", "crate"];
const PAYMENTS: usize = 12;
const CAUSE: &str = "this worker has used up its file descriptors";

struct Stand {
    dir: tempfile::TempDir,
    environment: Vec<(String, String)>,
    pool: SqlitePool,
}

impl Stand {
    fn new() -> (Self, Database) {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("ledger.db").display());
        let environment = [
            ("DATABASE__URL", url.clone()),
            ("OPS__LISTEN", "none".to_owned()),
            ("OUTBOUND__ALLOW", "loopback".to_owned()),
            ("OUTBOUND__SECRETS", format!("file:{}@127.0.0.1", dir.path().join("key").display())),
        ];
        let environment = environment.map(|(name, value)| (format!("SLUICEGATE_{name}"), value)).to_vec();
        let database = Database::open(&url, 1).unwrap();
        let pool = database.sqlite_pool().unwrap();
        (Self { dir, environment, pool }, database)
    }

    fn command(&self, args: &[&str]) -> String {
        let log = self.dir.path().join("command.log");
        let (code, output) = Program::start(args, &self.environment, &log).ended();
        assert_eq!(code, Some(0), "{args:?}: {output}");
        output
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Each charge uses a new connection, so each needs a descriptor.
    fn apply(&self, port: u16) {
        let secret = self.file("key", "hunter2");
        let row = |(name, host, headers): (&str, &str, String)| {
            format!(
                "[[provider]]\nname = \"{name}\"\nurl = \"http://{host}:{port}/charges\"\nmax_attempts = 2\n\
                 backoff_max_ms = 1000\nreuse_connections = false\nidempotency_retention_s = 86400\n{headers}\
                 [[provider.limit]]\nname = \"all\"\nmax_requests = 100\nwindow_ms = 1000\n"
            )
        };
        let headers = format!("headers = {{ authorization = \"${{file:{secret}}}\" }}\n");
        let rows = [
            ("acme", "127.0.0.1", String::new()),
            ("bolt", "localhost", String::new()),
            ("crate", "127.0.0.1", headers),
        ];
        self.command(&["provider", "apply", &self.file("rows.toml", &rows.map(row).concat())]);
    }

    fn pay(&self, series: &str, count: usize) {
        let job = |provider: &str, n: usize| {
            format!(
                "{{\"id\":\"{provider}-{series}-{n}\",\"provider\":\"{provider}\",\"amount\":1,\"currency\":\"EUR\"}}\n"
            )
        };
        let jobs: String = PROVIDERS.iter().flat_map(|provider| (0..count).map(|n| job(provider, n))).collect();
        self.command(&["enqueue", "--file", &self.file("jobs.jsonl", &jobs)]);
    }

    async fn count(&self, sql: &str) -> usize {
        let count: i64 = sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&self.pool).await.unwrap();
        usize::try_from(count).unwrap()
    }

    async fn until(&self, what: &str, worker: &mut Program, sql: &str, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.count(sql).await < count {
            let alive = worker.running() && Instant::now() < deadline;
            assert!(alive, "not so: {what}: {:?}\n{}", self.jobs().await, worker.log_text());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn jobs(&self) -> Vec<(String, String, i64)> {
        let sql = "SELECT state, coalesce(wait_detail, wait_reason, reason, ''), attempts FROM jobs GROUP BY 1, 2, 3";
        sqlx::query_as(sql).fetch_all(&self.pool).await.unwrap()
    }
}

/// Sets a process' descriptor limit: to the number that it has open, or back to 1,024.
fn limit_descriptors(pid: u32, exhausted: bool) {
    let numbers = std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd")).unwrap();
    let open: BTreeSet<u32> =
        numbers.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
    let first_free = (0..).find(|number| !open.contains(number)).unwrap();
    let soft = if exhausted { first_free } else { 1_024 };
    let arguments = [format!("--pid={pid}"), format!("--nofile={soft}:")];
    assert!(Command::new("prlimit").args(arguments).status().unwrap().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exhausted_descriptors_are_reported_as_local_fault() {
    // Listens on IPv4 and IPv6, because a name may resolve to either first.
    let listener = tokio::net::TcpListener::bind("[::]:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let stop = CancellationToken::new();
    let provider = FakeProvider::new(FakeOptions::default());
    let handle = provider.handle();
    let serving = tokio::spawn(provider.serve(listener, stop.clone()));
    let (stand, database) = Stand::new();
    stand.apply(port);
    stand.pay("before", 1);
    let mut worker = Program::start(&["run"], &stand.environment, &stand.dir.path().join("worker.log"));
    let succeeded = "SELECT count(*) FROM jobs WHERE state = 'succeeded'";
    stand.until("payments succeed", &mut worker, succeeded, PROVIDERS.len()).await;

    limit_descriptors(worker.pid(), true);
    stand.pay("meanwhile", PAYMENTS);
    for name in PROVIDERS {
        let named = format!("SELECT count(*) FROM jobs WHERE provider = '{name}' AND wait_detail LIKE '{CAUSE}%'");
        stand.until(&format!("the reason of a job of {name} names the cause"), &mut worker, &named, 1).await;
    }
    let tried = "SELECT max(requests) FROM (SELECT count(*) AS requests FROM attempts WHERE job_id LIKE 'acme-%' GROUP BY job_id)";
    stand.until("a job is tried more often than it has attempts", &mut worker, tried, 4).await;
    let lane = "SELECT count(*) FROM worker_reports WHERE report LIKE '%LimitNOFILE%'";
    stand.until("the lane reports the cause of its pause", &mut worker, lane, 1).await;
    assert_eq!(stand.count("SELECT sum(attempts) FROM jobs").await, PROVIDERS.len(), "{:?}", stand.jobs().await);
    let log = worker.log_text();
    assert!(!log.contains("circuit breaker"), "{log}");
    let lines = log.lines().filter(|line| line.contains(CAUSE)).count();
    assert!((1..=3).contains(&lines), "{lines} lines name the cause:\n{log}");

    limit_descriptors(worker.pid(), false);
    let all = PROVIDERS.len() * (PAYMENTS + 1);
    stand.until("all jobs have succeeded", &mut worker, succeeded, all).await;
    assert_eq!(stand.count("SELECT sum(attempts) FROM jobs").await, all, "one attempt each");
    assert_eq!(usize::try_from(handle.report().charges).unwrap(), all);
    worker.signal("TERM");
    assert_eq!(worker.ended().0, Some(0));
    stop.cancel();
    serving.await.unwrap().unwrap();
    database.close().await;
}
