//! A worker whose SQLite file lies on a full disk: it is alive but not ready, says why, and loses and doubles nothing
//! once there is space again.
//!
//! The disk is a small file system in memory, in a mount namespace of the worker alone. Other processes reach it by the
//! worker's entry in `/proc`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use sluicegate::provider::simulated::{FakeHandle, FakeOptions, FakeProvider};
use tokio_util::sync::CancellationToken;

use crate::support::process::{Server, free_port, private_dir};

const PROGRAM: &str = env!("CARGO_BIN_EXE_sluicegate");
const PATIENCE: Duration = Duration::from_secs(120);
const PAYMENTS: usize = 600;

struct SmallDisk {
    worker: Server,
    /// The disk, as other processes see it.
    disk: PathBuf,
    dir: PathBuf,
    port: u16,
    url: String,
}

impl SmallDisk {
    /// Starts a worker with its database on a disk of this size.
    fn start(size: &str) -> Self {
        let (dir, port) = (private_dir("full-disk"), free_port());
        let mount = format!("mkdir -p $0 && mount -t tmpfs -o size={size} none $0 && exec \"$@\"");
        let inside = dir.join("disk").display().to_string();
        let own = if is_root() { "-m" } else { "-rm" };
        let command = ["unshare", own, "sh", "-c", &mount, &inside, PROGRAM, "run"];
        let (url, listen) = (format!("sqlite://{inside}/ledger.db"), format!("127.0.0.1:{port}"));
        let worker = Server::start(&command, &environment(&url, &listen), &dir.join("worker.log"), Some(&dir), "");
        worker.await_open(port);
        let disk = PathBuf::from(format!("/proc/{}/root{inside}", worker.pid));
        Self { worker, disk, dir, port, url }
    }

    /// Runs a command in the worker's namespaces, where its database is.
    fn command(&self, args: &[&str]) {
        let mut enter = Command::new("nsenter");
        enter.args(["--target", &self.worker.pid.to_string(), "--mount"]);
        if !is_root() {
            enter.args(["--user", "--preserve-credentials"]);
        }
        let output = enter.arg("--").arg(PROGRAM).args(args).envs(environment(&self.url, "none")).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.dir.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    async fn probe(&self, path: &str) -> (u16, String) {
        let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).build().unwrap();
        let answer = client.get(format!("http://127.0.0.1:{}/{path}", self.port)).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    async fn await_probe(&self, status: u16) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (now, text) = self.probe("readyz").await;
            if now == status {
                return text;
            }
            assert!(Instant::now() < deadline, "readyz is {now}: {text}\n{}", self.worker.log_text());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Payments that the worker has finished as `succeeded`.
    async fn succeeded(&self) -> usize {
        let metrics = self.probe("metrics").await.1;
        let is_it = |line: &&str| line.starts_with("sluicegate_jobs_total{") && line.contains("\"succeeded\"");
        metrics.lines().find(is_it).and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0)
    }
}

fn environment<'a>(url: &'a str, listen: &'a str) -> [(&'static str, &'a str); 3] {
    [("SLUICEGATE_DATABASE__URL", url), ("SLUICEGATE_OPS__LISTEN", listen), ("SLUICEGATE_OUTBOUND__ALLOW", "loopback")]
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().unwrap().stdout == b"0\n"
}

async fn provider() -> (FakeHandle, String, CancellationToken) {
    let latency = (Duration::from_millis(200), Duration::from_millis(400));
    let fake = FakeProvider::new(FakeOptions { latency, ..FakeOptions::default() });
    let (handle, stop) = (fake.handle(), CancellationToken::new());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/charges", listener.local_addr().unwrap());
    tokio::spawn(fake.serve(listener, stop.clone()));
    (handle, url, stop)
}

/// Writes until the disk has no free byte.
fn fill(disk: &Path) -> PathBuf {
    let path = disk.join("filler");
    let mut filler = std::fs::File::create(&path).unwrap();
    for size in [65_536, 4_096, 1] {
        while filler.write_all(&vec![0; size]).is_ok() {}
    }
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_is_reported_and_loses_no_payment() {
    rustls::crypto::ring::default_provider().install_default().ok();
    let (provider, url, stop) = provider().await;
    let stand = SmallDisk::start("24m");
    let row = format!(
        "[[provider]]\nname = \"acme\"\nurl = \"{url}\"\nworkers = 16\n\
         [[provider.limit]]\nname = \"rate\"\nmax_requests = 40\nwindow_ms = 1000\n"
    );
    stand.command(&["provider", "apply", &stand.file("acme.toml", &row)]);
    let lines: String =
        (0..PAYMENTS).map(|n| format!("{{\"id\":\"p{n}\",\"amount\":100,\"currency\":\"EUR\"}}\n")).collect();
    stand.command(&["enqueue", "--provider", "acme", "--file", &stand.file("jobs.jsonl", &lines)]);
    let deadline = Instant::now() + PATIENCE;
    while provider.effects().len() < 20 {
        assert!(Instant::now() < deadline, "{}", stand.worker.log_text());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let filler = fill(&stand.disk);
    let cause = stand.await_probe(503).await;
    assert!(cause.starts_with("no write was committed for 1"), "{cause}");
    assert!(cause.contains("disk is full") || cause.contains("disk I/O error"), "{cause}");
    let sentence = cause.trim_end().split_once("s: ").unwrap().1;
    let overview = stand.probe("api/v1/overview").await.1;
    assert!(overview.contains(sentence) && overview.contains("backend_unavailable"), "{sentence}: {overview}");
    assert_eq!(stand.probe("livez").await.0, 200);
    std::fs::remove_file(filler).unwrap();
    stand.await_probe(200).await;
    let deadline = Instant::now() + PATIENCE;
    while stand.succeeded().await < PAYMENTS {
        assert!(Instant::now() < deadline, "{}\n{}", stand.succeeded().await, stand.worker.log_text());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let effects = provider.effects();
    assert_eq!((effects.len(), effects.iter().all(|effect| effect.count == 1)), (PAYMENTS, true));
    stop.cancel();
}
