//! `path` and `fidelity` on embedded and on real backends: their reports are complete, and no queue, key or
//! file is left.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use sluicegate::ledger::database::Database;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};

use crate::support::postgres::Postgres;
use crate::support::rabbitmq::RabbitNode;
use crate::support::redis::Redis;

/// Runs in a directory of its own, for all files that it makes. The kernel interrupts it when the test's thread ends
/// for any reason.
fn benchmark(directory: &Path, args: &[&str]) -> Command {
    let mut command = Command::new("/usr/bin/setpriv");
    command.args(["--pdeathsig", "INT"]).arg(env!("CARGO_BIN_EXE_sluicegate-bench"));
    command.env_clear().env("PATH", "/usr/bin:/bin").env("TMPDIR", directory).current_dir(directory);
    command.stdin(Stdio::null()).args(args);
    command
}

fn report(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn is_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory).unwrap().next().is_none()
}

fn positive(report: &Value, names: &[&str]) {
    for name in names {
        let value = name.split('.').fold(report, |value, key| &value[key]).as_f64();
        assert!(value.is_some_and(|value| value.is_finite() && value > 0.0), "{name}: {report}");
    }
}

/// Checks every report of `path`, whatever the speed.
fn whole_path(report: &Value, jobs: u64, idle_jobs: u64) {
    for name in ["published", "finished", "requests"] {
        assert_eq!(report[name], jobs, "{name}: {report}");
    }
    assert_eq!((&report["charged_twice"], &report["refused_429"]), (&0.into(), &0.into()), "{report}");
    assert_eq!(report["idle"]["jobs"], idle_jobs, "{report}");
    positive(report, &["jobs_per_second", "published_per_second", "seconds", "idle.p50_ms", "idle.p99_ms"]);
    let rate = report["finished"].as_f64().unwrap() / report["seconds"].as_f64().unwrap();
    assert!((rate / report["jobs_per_second"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{report}");
    for name in ["command", "date", "machine", "sluicegate"] {
        assert!(!report["conditions"][name].as_str().unwrap().is_empty(), "{name}: {report}");
    }
}

/// Checks every report of `fidelity`, however busy the machine was.
fn fidelity(report: &Value, allowed: u64, hold_min_ms: f64) {
    let number = |name: &str| report[name].as_f64().unwrap_or_else(|| panic!("{name}: {report}"));
    positive(report, &["rate_per_second", "possible_per_second", "lateness.p50_ms", "lateness.p99_ms"]);
    assert!(number("requests") > allowed as f64, "only the first slots were used: {report}");
    // Proven for `response`, whatever the load.
    assert_eq!(
        (&report["breaches"], &report["refused_429"], &report["charged_twice"]),
        (&0.into(), &0.into(), &0.into())
    );
    assert!(number("largest_in_any_window") <= allowed as f64 && number("hold_ms") >= hold_min_ms, "{report}");
    assert!(number("utilisation") <= 1.05 && number("utilisation_over_span") <= 1.0, "{report}");
    let share = report["lateness"]["share_within_3_ms"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&share) && share >= report["lateness"]["share_within_600_us"].as_f64().unwrap());
    let starts = |of: &str| report[of]["starts"].as_u64().unwrap_or_else(|| panic!("{of}: {report}"));
    assert_eq!(starts("lateness_booked") + starts("lateness_at_once"), starts("lateness"), "{report}");
    assert!(starts("lateness_at_once") > 0, "no request used the free slots at the start: {report}");
    assert!(report["permits_late"].as_u64().unwrap() <= report["permits_returned"].as_u64().unwrap(), "{report}");
    let perfect = number("perfect_over_span");
    assert!(perfect > 0.5 && perfect <= 1.05, "{report}");
    assert!((number("utilisation_over_span") / perfect / number("of_perfect_over_span") - 1.0).abs() < 1e-9);
}

#[test]
fn path_bench_runs_on_embedded_backends() {
    let directory = tempfile::tempdir().unwrap();
    let args = ["path", "--embedded", "--jobs", "200", "--idle-jobs", "3", "--json"];
    let report = report(&benchmark(directory.path(), &args).output().unwrap());
    whole_path(&report, 200, 3);
    assert_eq!((&report["bare_loop"], &report["ratio_to_bare_loop"]), (&Value::Null, &Value::Null));
    assert!(is_empty(directory.path()), "a file is left behind");
}

#[test]
fn fidelity_bench_runs_on_embedded_backends() {
    let directory = tempfile::tempdir().unwrap();
    let args = ["fidelity", "--embedded", "--limit", "20/200ms", "--seconds", "2", "--json"];
    let report = report(&benchmark(directory.path(), &args).output().unwrap());
    fidelity(&report, 20, 20.0);
    assert_eq!((&report["slot_release"], &report["workers"]), (&"response".into(), &1.into()));
    let possible = 20.0 / (0.2 + report["hold_ms"].as_f64().unwrap() / 1_000.0);
    assert!((possible - report["possible_per_second"].as_f64().unwrap()).abs() < 1e-6);
    assert!(is_empty(directory.path()), "a file is left behind");
}

/// The backends of production: afterwards broker and limiter hold no data of the run.
#[test]
fn benches_clean_up_real_backends() {
    let directory = tempfile::tempdir().unwrap();
    let (postgres, redis, rabbit) = (Postgres::shared(), Redis::start(), RabbitNode::shared());
    let environment = [
        ("SLUICEGATE_DATABASE__URL", postgres.create_database("bench")),
        ("SLUICEGATE_QUEUE__URL", rabbit.create_vhost("bench")),
        ("SLUICEGATE_LIMITER__URL", redis.url()),
    ];
    let run = |args: &[&str]| {
        let mut command = benchmark(directory.path(), args);
        command.envs(environment.iter().map(|(name, value)| (name, value))).output().unwrap()
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let database = runtime.block_on(migrated(&environment[0].1));

    let path = ["path", "--jobs", "300", "--idle-jobs", "2", "--workers", "2", "--json"];
    let measured = report(&run(&path));
    whole_path(&measured, 300, 2);
    positive(&measured, &["bare_loop.messages_per_second", "ratio_to_bare_loop"]);
    assert_eq!(measured["bare_loop"]["messages"], 300);
    assert!(measured["conditions"]["limiter"].as_str().unwrap().starts_with("Redis 7"), "{measured}");
    assert!(measured["conditions"]["database"].as_str().unwrap().starts_with("PostgreSQL 1"), "{measured}");

    let args = ["fidelity", "--limit", "20/200ms", "--seconds", "2", "--json"];
    let measured = report(&run(&args));
    fidelity(&measured, 20, 20.0);
    assert_eq!(measured["workers"], 2, "two workers with a shared limiter");

    assert_eq!(redis.command::<Vec<String>>("KEYS *"), Vec::<String>::new());
    let left =
        rabbit.ctl(&["list_queues", "-p", "bench", "name"]) + &rabbit.ctl(&["list_exchanges", "-p", "bench", "name"]);
    assert!(!left.contains("sluicegate-bench"), "{left}");
    let rows = runtime.block_on(database.readable_rows(None)).unwrap();
    assert!(rows.len() == 3 && rows.iter().all(|row| !row.enabled), "{rows:?}");
}

/// The bench runs a worker, which would send the jobs of a database that is in use.
async fn migrated(url: &str) -> Database {
    let database = Database::open(url, 1).unwrap();
    database.migrate().await.unwrap();
    database
}

async fn apply_a_provider(file: &Path) {
    let limit = LimitRow { name: "per-second".to_owned(), max_requests: 100, window_ms: 1_000, ..LimitRow::default() };
    let url = "https://pay.example.com/charges".to_owned();
    let row = ProviderRow { name: "acme".to_owned(), url, limits: vec![limit], ..ProviderRow::default() };
    let database = migrated(&format!("sqlite://{}", file.display())).await;
    database.apply_settings(&[row], false).await.unwrap();
    database.close().await;
}

#[test]
fn bench_rejects_a_database_with_providers() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(apply_a_provider(&directory.path().join("sluicegate.db")));
    for bench in ["path", "fidelity"] {
        let refused = benchmark(directory.path(), &[bench]).output().unwrap();
        let message = String::from_utf8(refused.stderr).unwrap();
        assert_eq!((refused.status.code(), refused.stdout.is_empty()), (Some(78), true), "{message}");
        assert!(message.contains("`acme`") && message.contains("--embedded"), "{message}");
    }
}

#[test]
fn embedded_limiter_rejects_several_workers() {
    let directory = tempfile::tempdir().unwrap();
    for bench in ["path", "fidelity"] {
        let args = [bench, "--embedded", "--workers", "2"];
        let refused = benchmark(directory.path(), &args).output().unwrap();
        let message = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(78), "{message}");
        assert!(message.contains("--workers"), "{message}");
    }
    assert!(is_empty(directory.path()), "a file is left behind");
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let args = ["fidelity", "--embedded", "--limit", "5/200ms", "--seconds", "600"];
    let mut bench = benchmark(directory.path(), &args).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(bench.stderr.take().unwrap()).lines();
    lines.by_ref().map(Result::unwrap).find(|line| line.contains("seconds measured")).unwrap();
    assert!(!is_empty(directory.path()), "the bench has made no database");
    let status = Command::new("kill").args(["-INT", &bench.id().to_string()]).status().unwrap();
    assert!(status.success());
    assert_eq!(bench.wait().unwrap().code(), Some(1));
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(rest.last().unwrap().contains("interrupted"), "{rest:?}");
    assert!(is_empty(directory.path()), "a file is left behind");
}
