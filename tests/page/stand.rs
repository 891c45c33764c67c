//! The program as operators start it, with all backends embedded, and strict providers. All tests share it, and each
//! flow has a provider of its own.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::process::{Server, free_port, private_dir};
use crate::webdriver::PATIENCE;

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");

/// Payments of `steady`, which all finish soon.
pub const STEADY: usize = 12;
/// Payments of `minute`, whose limit a test changes: the first is sent, the others wait for their minutes.
pub const MINUTE: usize = 6;
/// Payments of `hourly`, whose limit no test changes: the first is sent, the others wait as long as any test runs.
pub const HOURLY: usize = 3;
/// Payments of `lossy`, whose responses are lost: all in review. Like those of `away`, they are too few to open a
/// breaker.
pub const LOSSY: usize = 3;
/// Payments of `away`, where no server listens: all dead.
pub const AWAY: usize = 4;

/// Accounts of `crowd`, each with one payment sent and others that wait for a limit of the account as long as any test
/// runs.
pub const CROWD: usize = 22;
/// Payments of the last one of them, whose name is as long as it may be.
pub const FLOOD: usize = 31;

pub struct Stand {
    pub origin: String,
    dir: PathBuf,
    ops: String,
    away_port: u16,
    /// The processes end when this is dropped.
    _servers: Vec<Server>,
}

impl Stand {
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Stand> = OnceLock::new();
        SHARED.get_or_init(|| {
            let stand = Self::start();
            stand.enqueue("steady", STEADY);
            stand.enqueue("minute", MINUTE);
            stand.enqueue("hourly", HOURLY);
            stand.enqueue("lossy", LOSSY);
            stand.enqueue("away", AWAY);
            stand.enqueue_lines("crowd", &crowd());
            stand.await_jobs("steady", "succeeded", STEADY);
            stand.await_jobs("hourly", "succeeded", 1);
            stand.await_jobs("lossy", "review", LOSSY);
            stand.await_jobs("away", "dead", AWAY);
            stand.await_jobs("crowd", "succeeded", CROWD);
            stand
        })
    }

    /// Starts program and providers, without jobs.
    pub fn start() -> Self {
        let dir = private_dir("page");
        let [steady, lossy, away_port, ops] = [free_port(), free_port(), free_port(), free_port()];
        let ops = format!("127.0.0.1:{ops}");
        let mut servers = vec![
            fake(&dir, steady, &["--latency", "20ms..60ms"], Some(&dir)),
            fake(&dir, lossy, &["--lost-answer-rate", "1", "--no-dedupe"], None),
        ];
        let stand = |servers| Self {
            origin: format!("http://{ops}"),
            dir: dir.clone(),
            ops: ops.clone(),
            away_port,
            _servers: servers,
        };
        let setting_up = stand(Vec::new());
        let file = dir.join("providers.toml");
        std::fs::write(&file, providers(steady, lossy, away_port)).unwrap();
        setting_up.sluicegate(&["provider", "apply", file.to_str().unwrap()]);
        let environment = setting_up.environment();
        let environment: Vec<(&str, &str)> =
            environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let worker = Server::start(&[PROGRAM, "run"], &environment, &dir.join("worker.log"), None, "");
        worker.await_open(ops.rsplit(':').next().unwrap().parse().unwrap());
        servers.push(worker);
        stand(servers)
    }

    fn environment(&self) -> Vec<(String, String)> {
        let database = format!("sqlite://{}", self.dir.join("ledger.db").display());
        [("SLUICEGATE_DATABASE__URL", database), ("SLUICEGATE_OPS__LISTEN", self.ops.clone())]
            .map(|(name, value)| (name.to_owned(), value))
            .to_vec()
    }

    /// Runs a command to its end and expects success.
    pub fn sluicegate(&self, args: &[&str]) -> String {
        let output = Command::new(PROGRAM).args(args).envs(self.environment()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Enqueues payments `NAME-1`, `NAME-2`, … of a provider.
    pub fn enqueue(&self, provider: &str, jobs: usize) {
        let lines = (1..=jobs).map(|n| {
            format!(r#"{{"id":"{provider}-{n}","provider":"{provider}","amount":{},"currency":"EUR"}}"#, 1_250 * n)
        });
        self.enqueue_lines(provider, &lines.collect::<Vec<_>>());
    }

    fn enqueue_lines(&self, name: &str, lines: &[String]) {
        let file = self.dir.join(format!("{name}.jsonl"));
        std::fs::write(&file, lines.join("\n")).unwrap();
        self.sluicegate(&["enqueue", "--file", file.to_str().unwrap()]);
    }

    /// Waits until this many payments of a provider are in a state.
    pub fn await_jobs(&self, provider: &str, state: &str, wanted: usize) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let listed = self.sluicegate(&["jobs", "list", "--provider", provider, "--state", state, "--json"]);
            let listed: Value = serde_json::from_str(&listed).unwrap();
            if listed["jobs"].as_array().unwrap().len() == wanted {
                return;
            }
            let log = std::fs::read_to_string(self.dir.join("worker.log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "{provider} does not have {wanted} {state} payments: {listed}\n{log}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Starts the missing server of provider `away` on its port.
    pub fn away_is_back(&self) -> Server {
        fake(&self.dir, self.away_port, &[], None)
    }

    /// One provider's row.
    pub fn row(&self, provider: &str) -> Value {
        serde_json::from_str(&self.sluicegate(&["provider", "show", provider, "--json"])).unwrap()
    }

    pub fn job(&self, id: &str) -> Value {
        serde_json::from_str(&self.sluicegate(&["jobs", "show", id, "--json"])).unwrap()
    }
}

/// The account with the longest name.
pub fn flood() -> String {
    "f".repeat(64)
}

fn crowd() -> Vec<String> {
    let pay = |account: &str, id: &str| {
        format!(
            r#"{{"id":"{id}","provider":"crowd","account":"{account}","amount":1250,"currency":"EUR","priority":{}}}"#,
            u8::from(account == "shop-0")
        )
    };
    let shops =
        (0..CROWD - 1).flat_map(|shop| (0..2).map(move |number| (format!("shop-{shop}"), format!("s{shop}-{number}"))));
    let floods = (0..FLOOD).map(|number| (flood(), format!("flood-{number}")));
    shops.chain(floods).map(|(account, id)| pay(&account, &id)).collect()
}

fn fake(dir: &std::path::Path, port: u16, options: &[&str], owned: Option<&std::path::Path>) -> Server {
    let listen = format!("127.0.0.1:{port}");
    let command = [&[PROGRAM, "fake-provider", "--listen", listen.as_str()], options].concat();
    let server = Server::start(&command, &[], &dir.join(format!("provider-{port}.log")), owned, "");
    server.await_port(port);
    server
}

fn providers(steady: u16, lossy: u16, away: u16) -> String {
    let row = |name: &str, port: u16, more: &str, requests: u32, window_ms: u32| {
        format!(
            "[[provider]]\nname = \"{name}\"\nurl = \"http://127.0.0.1:{port}/charges\"\n{more}\n\
             [[provider.limit]]\nname = \"all\"\nmax_requests = {requests}\nwindow_ms = {window_ms}\n"
        )
    };
    let deduplicates = "idempotency_retention_s = 86400";
    [
        row("away", away, "max_attempts = 1", 50, 1_000),
        row("crowd", steady, deduplicates, 50, 1_000),
        "[[provider.limit]]\nname = \"own\"\nscope = \"account\"\nmax_requests = 1\nwindow_ms = 3600000\n".to_owned(),
        row("hourly", steady, deduplicates, 1, 3_600_000),
        row("lossy", lossy, "", 50, 1_000),
        row("minute", steady, deduplicates, 1, 60_000),
        row("steady", steady, deduplicates, 20, 1_000),
        "[[provider.limit]]\nname = \"slots\"\nalgorithm = \"concurrency\"\nmax_requests = 9\n".to_owned(),
    ]
    .join("\n")
}
