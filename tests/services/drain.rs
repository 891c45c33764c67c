//! Shutdown and refused start of `run`: exit codes and remaining jobs, as an operator's scripts see them.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use sluicegate::ledger::database::Database;
use sqlx::{AssertSqlSafe, SqlitePool};

use crate::program::Program;
use crate::support::postgres::Postgres;
use crate::support::process::free_port;

/// A provider that reads requests and holds its responses until it is released.
struct Slow {
    url: String,
    requests: Arc<AtomicUsize>,
    answering: Arc<(Mutex<bool>, Condvar)>,
}

impl Slow {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/charges", listener.local_addr().unwrap());
        let slow = Self { url, requests: Arc::default(), answering: Arc::default() };
        let (requests, answering) = (Arc::clone(&slow.requests), Arc::clone(&slow.answering));
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let (requests, answering) = (Arc::clone(&requests), Arc::clone(&answering));
                std::thread::spawn(move || serve(connection.unwrap(), &requests, &answering));
            }
        });
        slow
    }

    fn answer(&self) {
        *self.answering.0.lock().unwrap() = true;
        self.answering.1.notify_all();
    }
}

fn serve(mut connection: TcpStream, requests: &AtomicUsize, answering: &(Mutex<bool>, Condvar)) {
    let mut buffer = [0; 4_096];
    // The client closes a connection that it abandons; that is no request.
    if connection.read(&mut buffer).unwrap_or(0) == 0 {
        return;
    }
    let number = requests.fetch_add(1, Ordering::SeqCst);
    let waiting = answering.1.wait_while(answering.0.lock().unwrap(), |go| !*go);
    drop(waiting.unwrap());
    let body = format!(r#"{{"id":"ch_{number}"}}"#);
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close";
    // A client that has closed the connection needs no response.
    let _ = write!(connection, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
}

/// An embedded deployment in a temporary directory.
struct Deployment {
    dir: tempfile::TempDir,
    environment: Vec<(String, String)>,
    database: Database,
    pool: SqlitePool,
}

impl Deployment {
    /// The limit allows three requests at a time; further jobs are leased and wait.
    async fn new(slow: &Slow, drain_timeout_ms: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", dir.path().join("ledger.db").display());
        let settings = [
            ("DATABASE__URL", url.clone()),
            ("OPS__LISTEN", "none".to_owned()),
            ("WORKER__DRAIN_TIMEOUT_MS", drain_timeout_ms.to_string()),
        ];
        let environment = settings.map(|(name, value)| (format!("SLUICEGATE_{name}"), value)).to_vec();
        let database = Database::open(&url, 1).unwrap();
        database.migrate().await.unwrap();
        let pool = database.sqlite_pool().unwrap();
        let deployment = Self { dir, environment, database, pool };
        let row = format!(
            "[[provider]]\nname = \"acme\"\nurl = \"{}\"\nmax_wait_ms = 60000\nleak_per_second = 1000.0\n\
             idempotency_retention_s = 86400\n\
             [[provider.limit]]\nname = \"all\"\nmax_requests = 3\nwindow_ms = 40000\n",
            slow.url
        );
        let file = deployment.write("providers.toml", &row);
        deployment.succeed(&["provider", "apply", &file]);
        deployment
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn succeed(&self, args: &[&str]) {
        let environment = self.environment.iter().map(|(name, value)| (name, value));
        let output = Command::new(env!("CARGO_BIN_EXE_sluicegate")).args(args).envs(environment).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn log(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn run(&self, name: &str) -> Program {
        Program::start(&["run"], &self.environment, &self.log(name))
    }

    /// A worker with three requests in flight and two leased jobs that wait.
    async fn busy(&self, slow: &Slow) -> Program {
        let lines: String = (0..5)
            .map(|n| format!("{{\"id\":\"job-{n}\",\"provider\":\"acme\",\"amount\":1,\"currency\":\"EUR\"}}\n"))
            .collect();
        let file = self.write("jobs.jsonl", &lines);
        self.succeed(&["enqueue", "--file", &file]);
        let program = self.run("run.log");
        self.until(&program, "three requests are in flight and two jobs wait", async || {
            slow.requests.load(Ordering::SeqCst) == 3 && self.count(IN_HAND).await == 2
        })
        .await;
        program
    }

    async fn count(&self, sql: &str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&self.pool).await.unwrap()
    }

    async fn until(&self, program: &Program, what: &str, condition: impl AsyncFn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !condition().await {
            assert!(Instant::now() < deadline, "not so: {what}\n{}", program.log_text());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

const IN_HAND: &str = "SELECT count(*) FROM jobs WHERE holder IS NOT NULL AND state = 'waiting'";
const FREE: &str = "SELECT count(*) FROM jobs WHERE holder IS NULL AND state = 'waiting'";
const SUCCEEDED: &str = "SELECT count(*) FROM jobs WHERE state = 'succeeded'";
const IN_BACKLOG: &str = "SELECT count(*) FROM jobs WHERE backlog";

#[tokio::test]
async fn clean_drain_exits_with_0() {
    for signal in ["TERM", "HUP"] {
        let slow = Slow::start();
        let deployment = Deployment::new(&slow, 30_000).await;
        let mut program = deployment.busy(&slow).await;
        program.signal(signal);
        let free = async || deployment.count(FREE).await == 2;
        deployment.until(&program, "the waiting jobs are released while requests are in flight", free).await;
        assert!(program.running(), "the worker ended with three requests in flight");
        slow.answer();
        let (code, log) = program.ended();
        assert_eq!(code, Some(0), "SIG{signal}: {log}");
        assert!(log.contains("all requests finished, unsent jobs returned to the backlog"), "{log}");
        assert_eq!((deployment.count(SUCCEEDED).await, deployment.count(FREE).await), (3, 2));
        assert_eq!(deployment.count(IN_BACKLOG).await, 2);
        assert_eq!(slow.requests.load(Ordering::SeqCst), 3, "a request was begun after the signal");
        deployment.database.close().await;
    }
}

#[tokio::test]
async fn abandoned_request_exits_with_1() {
    let slow = Slow::start();
    let deployment = Deployment::new(&slow, 200).await;
    let program = deployment.busy(&slow).await;
    program.signal("TERM");
    let (code, log) = program.ended();
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("3 jobs still active, 3 of them with a request in flight"), "{log}");
    let sending = "SELECT count(*) FROM jobs WHERE state = 'sending'";
    assert_eq!(
        (deployment.count(sending).await, deployment.count(FREE).await),
        (3, 2),
        "three jobs of unknown outcome"
    );
    // The ledger has all five, and the next run goes on with them.
    assert_eq!(deployment.count(IN_BACKLOG).await, 2);
    deployment.database.close().await;
}

/// Each outcome that the database refuses until the end is logged with all that is known of it.
#[tokio::test]
async fn refused_outcomes_are_logged_at_the_end() {
    let slow = Slow::start();
    let deployment = Deployment::new(&slow, 1_000).await;
    let program = deployment.busy(&slow).await;
    let refuse = "CREATE TRIGGER refuse BEFORE UPDATE ON attempts BEGIN SELECT RAISE(ABORT, 'corrupted'); END";
    sqlx::raw_sql(refuse).execute(&deployment.pool).await.unwrap();
    slow.answer();
    program.signal("TERM");
    let (code, log) = program.ended();
    assert_eq!(code, Some(1), "{log}");
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("ERROR") && line.contains("job-")).collect();
    assert_eq!(lines.len(), 3, "{log}");
    for part in ["outcome=\"accepted\"", "status=200", "reference=\"ch_", "corrupted"] {
        assert!(lines.iter().all(|line| line.contains(part)), "{part}: {lines:?}");
    }
    assert!(log.contains("the database did not accept 3 outcomes"), "{log}");
    deployment.database.close().await;
}

#[tokio::test]
async fn second_embedded_run_is_refused() {
    let slow = Slow::start();
    let deployment = Deployment::new(&slow, 1_000).await;
    let mut first = deployment.run("first.log");
    first.await_log("lane open");
    let (code, log) = deployment.run("second.log").ended();
    assert_eq!(code, Some(78), "{log}");
    assert!(log.contains("another `sluicegate run`"), "{log}");
    // The first worker is not affected, and once it has ended the next may run.
    assert!(first.running());
    first.signal("KILL");
    assert_eq!(first.ended().0, None);
    let mut third = deployment.run("third.log");
    third.await_log("lane open");
    third.signal("TERM");
    assert_eq!(third.ended().0, Some(0));
    deployment.database.close().await;
}

#[tokio::test]
async fn a_taken_ops_port_is_named() {
    let slow = Slow::start();
    let mut deployment = Deployment::new(&slow, 1_000).await;
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    deployment.environment.push(("SLUICEGATE_OPS__LISTEN".to_owned(), address.clone()));
    let (code, log) = deployment.run("run.log").ended();
    assert_eq!(code, Some(78), "{log}");
    assert!(log.contains("ops.listen") && log.contains(&address), "{log}");
    deployment.database.close().await;
}

#[test]
fn unmigrated_database_makes_run_name_migrate() {
    let postgres = Postgres::shared();
    let unused_url = |scheme: &str| format!("{scheme}://127.0.0.1:{}", free_port());
    let environment = [
        ("SLUICEGATE_DATABASE__URL", postgres.create_database("not_migrated")),
        ("SLUICEGATE_QUEUE__URL", unused_url("amqp")),
        ("SLUICEGATE_LIMITER__URL", unused_url("redis")),
        ("SLUICEGATE_OPS__LISTEN", "none".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value));
    let dir = tempfile::tempdir().unwrap();
    let log = |name: &str| dir.path().join(name);
    let (code, output) = Program::start(&["run"], &environment, Path::new(&log("run.log"))).ended();
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("`sluicegate migrate`"), "{output}");
    let (code, output) = Program::start(&["migrate"], &environment, &log("migrate.log")).ended();
    assert_eq!(code, Some(0), "{output}");
    // After the migration, it starts and waits for the unavailable backends.
    let mut program = Program::start(&["run"], &environment, &log("again.log"));
    program.await_log("broker unavailable");
    program.signal("TERM");
    assert_eq!(program.ended().0, Some(0));
}
