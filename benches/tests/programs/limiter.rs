//! `limiter`: it measures every limiter operation and leaves no server, key or setting behind.

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;
use sluicegate::domain::limit::Algorithm;

use crate::support::redis::Redis;

/// The kernel interrupts it when the test's thread ends for any reason. A killed process would leave its server behind.
fn benchmark() -> std::process::Command {
    let mut command = std::process::Command::new("/usr/bin/setpriv");
    command.args(["--pdeathsig", "INT"]).arg(env!("CARGO_BIN_EXE_sluicegate-bench"));
    command.env_clear().env("PATH", "/usr/bin:/bin").stdin(Stdio::null());
    command
}

/// Section, subject and permits per call of every row.
fn rows(report: &Value) -> Vec<(String, String, u64)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let rows = report["rows"].as_array().unwrap().iter();
    rows.map(|row| (text(&row["section"]), text(&row["subject"]), row["permits_per_call"].as_u64().unwrap())).collect()
}

fn figures(report: &Value, section: &str) -> Vec<(String, f64)> {
    let rows = report["rows"].as_array().unwrap().iter().filter(|row| row["section"] == section);
    let figures = rows.flat_map(|row| row["figures"].as_array().unwrap());
    figures.map(|figure| (figure["name"].as_str().unwrap().to_owned(), figure["value"].as_f64().unwrap())).collect()
}

#[test]
fn quick_bench_measures_all_and_cleans_up() {
    let output = benchmark().args(["limiter", "--quick", "--json"]).output().unwrap();
    let messages = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{messages}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();

    let rows = rows(&report);
    let has = |section: &str, subject: &str, permits: u64| {
        assert!(rows.contains(&(section.to_owned(), subject.to_owned(), permits)), "{section} {subject} {permits}");
    };
    let trivial = ["PING", "SET", "empty script", "script with TIME only", "script with three trivial commands"];
    trivial.iter().for_each(|subject| has("one_permit", subject, 1));
    has("one_permit", "ZSET script as printed", 1);
    for subject in Algorithm::WITH_WINDOW.map(Algorithm::name).into_iter().chain(["ZSET script made correct"]) {
        has("one_permit", subject, 1);
        [10, 100, 1_000].iter().for_each(|permits| has("many_permits", subject, *permits));
        has("full_log", subject, 1);
    }
    has("crowd", "sliding_log", 1);

    for (section, names) in [("one_permit", 5), ("many_permits", 4), ("full_log", 6), ("crowd", 2)] {
        let figures = figures(&report, section);
        let subjects = rows.iter().filter(|row| row.0 == section).count();
        assert_eq!(figures.len(), subjects * names, "{section}: {figures:?}");
        for (name, value) in &figures {
            assert!(value.is_finite() && *value > 0.0, "{section} {name}: {value}");
        }
    }

    let server = &report["server"];
    let port = u16::try_from(server["port"].as_u64().unwrap()).unwrap();
    let directory = server["directory"].as_str().unwrap();
    assert!(messages.contains(&format!("127.0.0.1:{port}")) && messages.contains(directory), "{messages}");
    assert_gone(port, directory);
}

fn assert_gone(port: u16, directory: &str) {
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "a server is still listening on {port}");
    assert!(directory.contains("sluicegate-bench-") && !Path::new(directory).exists(), "{directory} still exists");
}

#[test]
fn an_interrupted_run_ends_its_server() {
    let mut bench = benchmark().args(["limiter", "--quick"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(bench.stderr.take().unwrap()).lines();
    let started = lines.next().unwrap().unwrap();
    let after = |mark: &str| started.split_once(mark).unwrap().1;
    let port = after("127.0.0.1:").split_once(',').unwrap().0.parse().unwrap();
    let directory = after(", in ").to_owned();
    assert!(TcpStream::connect(("127.0.0.1", port)).is_ok() && Path::new(&directory).exists());
    let status = std::process::Command::new("kill").args(["-INT", &bench.id().to_string()]).status().unwrap();
    assert!(status.success());
    assert_eq!(bench.wait().unwrap().code(), Some(1));
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(rest.last().unwrap().contains("interrupted"), "{rest:?}");
    assert_gone(port, &directory);
}

#[test]
fn missing_redis_server_error_names_the_package() {
    let empty = tempfile::tempdir().unwrap();
    let output = benchmark().env("PATH", empty.path()).args(["limiter", "--quick"]).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(1), true), "{message}");
    assert!(message.contains("redis-server is not on the PATH") && message.contains("apt-get install"), "{message}");
}

/// An operator's server keeps its keys, its slow-log threshold and its statistics, even if the run is interrupted.
#[test]
fn bench_leaves_a_named_server_unchanged() {
    let redis = Redis::start();
    let mut connection = redis.connection();
    let threshold = |connection: &mut redis::Connection| -> (String, String) {
        redis::cmd("CONFIG").arg("GET").arg("slowlog-log-slower-than").query(connection).unwrap()
    };
    redis::cmd("SET").arg("theirs").arg(1).exec(&mut connection).unwrap();
    redis::cmd("CONFIG").arg("SET").arg("slowlog-log-slower-than").arg(4_711).exec(&mut connection).unwrap();
    let mut command = benchmark();
    command.args(["limiter", "--quick", "--redis", &redis.url()]);
    let mut bench = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(bench.stderr.take().unwrap()).lines();
    // From here on the slow log is enabled, and keys exist.
    lines.by_ref().map(Result::unwrap).find(|line| line.starts_with("a full log")).unwrap();
    let status = std::process::Command::new("kill").args(["-TERM", &bench.id().to_string()]).status().unwrap();
    assert!(status.success());
    assert_eq!(bench.wait().unwrap().code(), Some(1));
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut connection).unwrap();
    assert_eq!(keys, ["theirs"]);
    assert_eq!(threshold(&mut connection).1, "4711");
}
