//! Failed and delayed starts of `run`: one clear error or none, the right exit code, and no panic.

use std::net::TcpListener;
use std::path::Path;

use crate::program::Program;
use crate::support::postgres::Postgres;
use crate::support::process::free_port;
use crate::support::rabbitmq::RabbitNode;

/// Expected end of the start.
enum End {
    /// Exits with this code and one error that contains this text.
    Fails(i32, &'static str),
    /// Keeps running, logs this text, and drains at SIGTERM.
    Waits(&'static str),
}

use End::{Fails, Waits};

fn outcome(dir: &Path, environment: &[(String, String)], end: &End) -> (Option<i32>, String) {
    let mut program = Program::start(&["run"], environment, &dir.join("run.log"));
    if let Waits(text) = end {
        program.await_log(text);
        program.signal("TERM");
    }
    program.ended()
}

#[test]
fn failed_start_reports_its_cause_once() {
    let (postgres, broker) = (Postgres::shared(), RabbitNode::shared());
    let queue = broker.create_vhost("start_failures");
    let forbidden = queue.replace("guest:guest", "guest:wrong");
    let empty = postgres.create_database("start_failures");
    let dir = tempfile::tempdir().unwrap();
    let sqlite = format!("sqlite://{}", dir.path().join("ledger.db").display());
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let unused_url = |scheme: &str| format!("{scheme}://127.0.0.1:{}", free_port());
    let (no_database, no_queue, no_limiter) = (unused_url("postgres"), unused_url("amqp"), unused_url("redis"));
    let bad = "postgres://127.0.0.1:port/ledger".to_owned();
    let cases = [
        ("port taken", &sqlite, &queue, &taken, Fails(78, "ops.listen")),
        ("bad URL", &bad, &queue, &taken, Fails(78, "database.url")),
        ("schema missing", &empty, &queue, &"none".to_owned(), Fails(1, "run `sluicegate migrate`")),
        ("database unreachable", &no_database, &queue, &"none".to_owned(), Waits("Connection refused")),
        ("queue unreachable", &sqlite, &no_queue, &"none".to_owned(), Waits("broker cannot be reached, retrying")),
        ("queue forbidden", &sqlite, &forbidden, &"none".to_owned(), Waits("ACCESS_REFUSED")),
        ("limiter unreachable", &sqlite, &queue, &"none".to_owned(), Waits("broker connected")),
    ];
    for (case, database, queue, listen, end) in cases {
        let environment = [
            ("DATABASE__URL", database),
            ("QUEUE__URL", queue),
            ("LIMITER__URL", &no_limiter),
            ("OPS__LISTEN", listen),
        ];
        let environment = environment.map(|(name, value)| (format!("SLUICEGATE_{name}"), value.clone()));
        let (code, log) = outcome(dir.path(), &environment, &end);
        assert!(!log.contains("panicked at"), "{case}: {log}");
        let errors = log.lines().filter(|line| line.starts_with("error: ")).count();
        match end {
            Fails(wanted, text) => {
                assert_eq!(code, Some(wanted), "{case}: {log}");
                assert!(errors == 1 && log.contains(text), "{case}: {log}");
            }
            Waits(_) => assert_eq!((code, errors), (Some(0), 0), "{case}: {log}"),
        }
    }
}
