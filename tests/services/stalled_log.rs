//! A stalled log: no reader empties the pipe of the worker's log. Its payments, probes and shutdown do not wait for the
//! reader.

use std::io::{PipeReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use sluicegate::ledger::database::Database;
use sluicegate::provider::simulated::{FakeOptions, FakeProvider};
use tokio_util::sync::CancellationToken;

use crate::program::Program;
use crate::support::process::free_port;

const PATIENCE: Duration = Duration::from_secs(60);
const PAYMENTS: i64 = 100;
/// Default size of a pipe, in bytes. <https://man7.org/linux/man-pages/man7/pipe.7.html>
const PIPE: usize = 65_536;

/// A full pipe with its reader.
fn full_pipe() -> (PipeReader, std::io::PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(&[b'.'; PIPE]).unwrap();
    (reader, writer)
}

fn get(port: u16, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_log_blocks_nothing() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/charges", listener.local_addr().unwrap());
    let stop_provider = CancellationToken::new();
    let provider =
        FakeProvider::new(FakeOptions { latency: (Duration::ZERO, Duration::ZERO), ..FakeOptions::default() });
    let serving = tokio::spawn(provider.serve(listener, stop_provider.clone()));

    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (database_url, port) = (format!("sqlite://{}", path("ledger.db")), free_port());
    let settings = [
        ("DATABASE__URL", database_url.clone()),
        ("OPS__LISTEN", format!("127.0.0.1:{port}")),
        ("LOG__LEVEL", "trace".to_owned()),
    ];
    let environment = settings.map(|(name, value)| (format!("SLUICEGATE_{name}"), value)).to_vec();
    let row = format!(
        "[[provider]]\nname = \"acme\"\nurl = \"{url}\"\nidempotency_retention_s = 86400\n\
         [[provider.limit]]\nname = \"all\"\nmax_requests = 1000\nwindow_ms = 1000\n"
    );
    std::fs::write(path("row.toml"), row).unwrap();
    let job = |n: i64| format!("{{\"id\":\"job-{n}\",\"provider\":\"acme\",\"amount\":1,\"currency\":\"EUR\"}}\n");
    std::fs::write(path("jobs.jsonl"), (0..PAYMENTS).map(job).collect::<String>()).unwrap();
    for args in [["provider", "apply", &path("row.toml")], ["enqueue", "--file", &path("jobs.jsonl")]] {
        let (code, output) = Program::start(&args, &environment, &dir.path().join("command.log")).ended();
        assert_eq!(code, Some(0), "{args:?}: {output}");
    }

    let (reader, full) = full_pipe();
    let mut worker = Program::start_with_stderr(&["run"], &environment, full);
    let database = Database::open(&database_url, 1).unwrap();
    let pool = database.sqlite_pool().unwrap();
    let deadline = Instant::now() + PATIENCE;
    loop {
        let sql = "SELECT count(*) FROM jobs WHERE state = 'succeeded'";
        let succeeded: i64 = sqlx::query_scalar(sql).fetch_one(&pool).await.unwrap();
        if succeeded == PAYMENTS {
            break;
        }
        assert!(worker.running() && Instant::now() < deadline, "{succeeded} of {PAYMENTS} succeeded");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(get(port, "/livez").unwrap().starts_with("HTTP/1.1 200"));
    assert!(
        get(port, "/metrics").unwrap().contains("\nsluicegate_log_lines_dropped_total 0\n"),
        "the log's buffer was full"
    );
    worker.signal("TERM");
    assert_eq!(worker.ended().0, Some(0), "it drains");
    drop(reader);
    stop_provider.cancel();
    serving.await.unwrap().unwrap();
    database.close().await;
}
