//! The program with all backends embedded: one SQLite file and one process, as in the README.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::process::{Server, free_port, private_dir};

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");
/// Longest time for all jobs of a test; a busy machine takes several times as long as an idle one.
const PATIENCE: Duration = Duration::from_secs(300);

pub struct Embedded {
    pub dir: PathBuf,
    environment: Vec<(String, String)>,
    worker: Option<Server>,
    /// Port of the worker's ops server.
    port: u16,
}

impl Embedded {
    /// A migrated database without a worker. The worker also gets `environment`.
    pub fn new(environment: &[(&str, &str)]) -> Self {
        let dir = private_dir("foreign");
        let mut environment: Vec<(String, String)> =
            environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let url = format!("sqlite://{}", dir.join("sluicegate.db").display());
        environment.push(("SLUICEGATE_DATABASE__URL".to_owned(), url));
        let embedded = Self { dir, environment, worker: None, port: free_port() };
        embedded.run(&["migrate"]);
        embedded
    }

    /// Lets rows send the content of these files to this machine.
    pub fn grant(&mut self, files: &[&Path]) {
        let entries: Vec<String> = files.iter().map(|file| format!("file:{}@127.0.0.1", file.display())).collect();
        self.environment.push(("SLUICEGATE_OUTBOUND__SECRETS".to_owned(), entries.join(",")));
    }

    /// Runs a command to its end and expects success.
    pub fn run(&self, args: &[&str]) -> String {
        let output = Command::new(PROGRAM)
            .args(args)
            .envs(self.environment.iter().cloned())
            .env("SLUICEGATE_OPS__LISTEN", "none")
            .output()
            .unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{args:?}: {out}{err}");
        out.into_owned()
    }

    pub fn write(&self, name: &str, text: &str) -> String {
        let path = self.dir.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Applies a provider file.
    pub fn apply(&self, rows: &str) {
        self.run(&["provider", "apply", &self.write("providers.toml", rows)]);
    }

    /// Publishes job messages, one per line.
    pub fn enqueue(&self, provider: &str, messages: &[Value]) {
        let lines: String = messages.iter().map(|message| format!("{message}\n")).collect();
        self.run(&["enqueue", "--provider", provider, "--file", &self.write("jobs.jsonl", &lines)]);
    }

    pub fn start(&mut self) {
        let listen = format!("127.0.0.1:{}", self.port);
        let mut environment: Vec<(&str, &str)> =
            self.environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        environment.push(("SLUICEGATE_OPS__LISTEN", &listen));
        let server = Server::start(&[PROGRAM, "run"], &environment, &self.log(), None, "");
        server.await_port(self.port);
        self.worker = Some(server);
    }

    pub fn ops_url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}/{path}", self.port)
    }

    fn log(&self) -> PathBuf {
        self.dir.join("worker.log")
    }

    pub fn log_text(&self) -> String {
        std::fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// Sends SIGTERM and waits until the worker has ended.
    pub fn stop(&mut self) {
        let worker = self.worker.take().unwrap();
        worker.signal("TERM");
        let deadline = Instant::now() + PATIENCE;
        while !worker.has_ended() {
            assert!(Instant::now() < deadline, "the worker does not stop:\n{}", tail(&self.log()));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until this many jobs are `succeeded`, `declined`, `expired` or in `review`. Returns the number of each.
    pub async fn await_finished(&self, jobs: u64) -> BTreeMap<String, u64> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let states: Vec<(String, i64)> = self.rows("SELECT state, count(*) FROM jobs GROUP BY state").await;
            let states: BTreeMap<String, u64> =
                states.into_iter().map(|(state, count)| (state, count.unsigned_abs())).collect();
            let ended = ["succeeded", "declined", "expired", "review"];
            let finished: u64 = ended.iter().filter_map(|state| states.get(*state)).sum();
            if finished >= jobs {
                return states;
            }
            assert!(Instant::now() < deadline, "{states:?} after {PATIENCE:?}\n{}", tail(&self.log()));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Rows of an operator's own SQL query.
    pub async fn rows<T>(&self, select: &'static str) -> Vec<T>
    where
        T: Send + Unpin + for<'r> sqlx::FromRow<'r, sqlx::sqlite::SqliteRow>,
    {
        let options = sqlx::sqlite::SqliteConnectOptions::new()
            .filename(self.dir.join("sluicegate.db"))
            .read_only(true)
            .busy_timeout(Duration::from_secs(30));
        let mut connection = <sqlx::SqliteConnection as sqlx::Connection>::connect_with(&options).await.unwrap();
        let rows = sqlx::query_as(select).fetch_all(&mut connection).await.unwrap();
        sqlx::Connection::close(connection).await.unwrap();
        rows
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        drop(self.worker.take());
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}
