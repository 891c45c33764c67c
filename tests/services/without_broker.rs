//! Deployments without a broker: `enqueue` records payments in the database, and workers of other processes pay them.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sluicegate::ledger::database::Database;
use sluicegate::provider::simulated::{FakeHandle, FakeOptions, FakeProvider};
use sqlx::AssertSqlSafe;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::program::Program;
use crate::support::UNPUBLISHED;
use crate::support::postgres::Postgres;
use crate::support::redis::Redis;

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");
const PATIENCE: Duration = Duration::from_secs(90);
const ACCOUNTS: usize = 20;

/// A migrated database, the row of one strict provider, and the environment of all programs.
struct Deployment {
    dir: tempfile::TempDir,
    environment: Vec<(String, String)>,
    provider: FakeHandle,
    url: String,
    _serving: DropGuard,
}

impl Deployment {
    async fn with(settings: &[(&str, String)], limit: &str) -> Self {
        let provider =
            FakeProvider::new(FakeOptions { limits: vec![limit.parse().unwrap()], ..FakeOptions::default() });
        let (handle, stop) = (provider.handle(), CancellationToken::new());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(provider.serve(listener, stop.clone()));
        let own = [("OPS__LISTEN", "none".to_owned())];
        let all = settings.iter().chain(&own);
        let environment = all.map(|(name, value)| (format!("SLUICEGATE_{name}"), value.clone())).collect();
        let url = settings.iter().find(|(name, _)| *name == "DATABASE__URL").unwrap().1.clone();
        let dir = tempfile::tempdir().unwrap();
        let deployment = Self { dir, environment, provider: handle, url, _serving: stop.drop_guard() };
        deployment.succeed(&["migrate"]);
        let (max_requests, window) = limit.split_once('/').unwrap();
        assert_eq!(window, "1s");
        let row = format!(
            "[[provider]]\nname = \"acme\"\nurl = \"http://{address}/charges\"\nidempotency_retention_s = 86400\n\
             [[provider.limit]]\nname = \"all\"\nmax_requests = {max_requests}\nwindow_ms = 1000\n"
        );
        let file = deployment.write("providers.toml", &row);
        deployment.succeed(&["provider", "apply", &file]);
        deployment
    }

    /// PostgreSQL and Redis alone.
    async fn on_postgres(name: &str, limit: &str) -> Self {
        let settings = [
            ("DATABASE__URL", Postgres::shared().create_database(name)),
            ("QUEUE__URL", "database:".to_owned()),
            ("LIMITER__URL", Redis::shared().url()),
            ("LIMITER__PREFIX", name.to_owned()),
        ];
        Self::with(&settings, limit).await
    }

    /// One SQLite file.
    async fn embedded(dir: &Path, limit: &str) -> Self {
        let file = dir.join("ledger.db");
        Self::with(&[("DATABASE__URL", format!("sqlite://{}", file.display()))], limit).await
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn output(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let environment = self.environment.iter().map(|(name, value)| (name, value));
        let output = Command::new(PROGRAM).args(args).envs(environment).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    fn succeed(&self, args: &[&str]) -> String {
        let (code, out, err) = self.output(args);
        assert_eq!(code, Some(0), "{args:?}: {out}{err}");
        out
    }

    fn payments(&self, count: usize) -> String {
        let line = |n| {
            let account = format!("account-{}", n % ACCOUNTS);
            let payment = json!({ "id": format!("pay-{n}"), "amount": 1299, "currency": "EUR", "account": account });
            format!("{payment}\n")
        };
        self.write("payments.jsonl", &(0..count).map(line).collect::<String>())
    }

    fn enqueued(&self, file: &str) -> Value {
        let out = self.succeed(&["enqueue", "--provider", "acme", "--file", file, "--json"]);
        serde_json::from_str(&out).unwrap()
    }

    fn run(&self, log: &str) -> Program {
        let mut program = Program::start(&["run"], &self.environment, &self.dir.path().join(log));
        program.await_log("lane open, without a queue");
        program
    }

    async fn count(&self, sql: &str) -> i64 {
        // A connection of its own, as other processes have.
        let count = if self.url.starts_with("sqlite") {
            let database = Database::open(&self.url, 1).unwrap();
            let count =
                sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&database.sqlite_pool().unwrap()).await;
            database.close().await;
            count
        } else {
            use sqlx::Connection as _;
            let mut connection = sqlx::PgConnection::connect(&self.url).await.unwrap();
            sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&mut connection).await
        };
        count.unwrap()
    }

    async fn until(&self, what: &str, sql: &str, wanted: i64) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.count(sql).await;
            if found == wanted {
                return;
            }
            assert!(Instant::now() < deadline, "not so: {what}; {found} instead of {wanted}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

const SUCCEEDED: &str = "SELECT count(*) FROM jobs WHERE state = 'succeeded'";
const RECORDED: &str = "SELECT count(*) FROM jobs";

/// Two workers share the limit through Redis and the payments through PostgreSQL. Nothing else is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workers_pay_recorded_payments_once_each() {
    let deployment = Deployment::on_postgres("without_broker", "200/1s").await;
    let workers = [deployment.run("one.log"), deployment.run("two.log")];
    let file = deployment.payments(1_000);
    let first = deployment.enqueued(&file);
    assert_eq!((&first["recorded"], &first["known"]), (&1_000.into(), &0.into()), "{first}");
    let again = deployment.enqueued(&file);
    assert_eq!((&again["recorded"], &again["known"]), (&0.into(), &1_000.into()), "{again}");
    let other = ["enqueue", "--provider", "acme", "--id", "pay-7", "--amount", "1", "--currency", "EUR"];
    let (code, _, err) = deployment.output(&other);
    assert!(code == Some(1) && err.contains("conflict"), "{code:?} {err}");
    deployment.until("all are paid", SUCCEEDED, 1_000).await;
    let report = deployment.provider.report();
    assert_eq!((report.charges, report.doubles, report.refused_429), (1_000, 0, 0), "{report:?}");
    // Nothing is published, and no event waits for a broker: the one order has them all.
    deployment.until("no event waits", UNPUBLISHED_EVENTS, 0).await;
    assert_eq!(deployment.count("SELECT CAST(sum(cardinality(events)) AS bigint) FROM event_batches").await, 1_000);
    let both = "SELECT count(*) FROM worker_reports WHERE \
                (report -> 'lanes' -> 'acme' ->> 'sent_total')::bigint > 0";
    deployment.until("both workers have sent some", both, 2).await;
    for worker in workers {
        worker.signal("TERM");
        assert_eq!(worker.ended().0, Some(0));
    }
}

/// The number of events that the cursor has not passed.
const UNPUBLISHED_EVENTS: &str = "SELECT (SELECT COALESCE(max(position), 0) FROM event_batches) \
     - (SELECT position FROM event_cursors) + (SELECT count(*) FROM event_retries) \
     + 1000 - (SELECT count(*) FROM events)";

/// One file, one worker, and `enqueue` as another process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embedded_worker_pays_what_another_process_records() {
    let dir = tempfile::tempdir().unwrap();
    let deployment = Deployment::embedded(dir.path(), "200/1s").await;
    let worker = deployment.run("run.log");
    let file = deployment.payments(300);
    assert_eq!(deployment.enqueued(&file)["recorded"], 300);
    assert_eq!(deployment.enqueued(&file)["known"], 300);
    deployment.until("all are paid", SUCCEEDED, 300).await;
    let report = deployment.provider.report();
    assert_eq!((report.charges, report.doubles, report.refused_429), (300, 0, 0), "{report:?}");
    deployment.until("no event waits", UNPUBLISHED, 0).await;
    worker.signal("TERM");
    assert_eq!(worker.ended().0, Some(0));
}

/// A killed `enqueue` has recorded some lines, whole ones. The next one finds them known, and records the rest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_enqueue_loses_no_recorded_payment() {
    const LINES: usize = 30_000;
    let dir = tempfile::tempdir().unwrap();
    let each =
        [Deployment::on_postgres("killed_enqueue", "200/1s").await, Deployment::embedded(dir.path(), "200/1s").await];
    for deployment in each {
        let file = deployment.payments(LINES);
        let log = deployment.dir.path().join("enqueue.log");
        let args = ["enqueue", "--provider", "acme", "--file", &file];
        let mut enqueue = Program::start(&args, &deployment.environment, &log);
        let deadline = Instant::now() + PATIENCE;
        while deployment.count(RECORDED).await == 0 {
            assert!(enqueue.running() && Instant::now() < deadline, "{}", enqueue.log_text());
        }
        enqueue.signal("KILL");
        assert_eq!(enqueue.ended().0, None);
        let recorded = u64::try_from(deployment.count(RECORDED).await).unwrap();
        assert!(recorded > 0 && recorded < LINES as u64, "{recorded} at the kill");
        let again = deployment.enqueued(&file);
        assert_eq!(
            (again["known"].as_u64(), again["recorded"].as_u64()),
            (Some(recorded), Some(LINES as u64 - recorded))
        );
        assert_eq!(deployment.count("SELECT CAST(sum(waiting) AS bigint) FROM flows").await, LINES as i64);
    }
}
