//! The program as a process: exit codes, output streams and help, with files and databases that exist, are missing or
//! are unusable.

use assert_cmd::Command;
use clap::CommandFactory as _;

use crate::support::process::free_port;

fn sluicegate() -> Command {
    let mut command = Command::cargo_bin("sluicegate").unwrap();
    command.env_clear().env("PATH", "/usr/bin:/bin");
    command
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn the_definition_of_the_command_line_is_consistent() {
    sluicegate::cli::Cli::command().debug_assert();
}

#[test]
fn usage_errors_and_help_have_exit_codes() {
    for line in [
        vec!["frobnicate"],
        vec!["enqueue"],
        vec!["enqueue", "--file", "x", "--amount", "1"],
        vec!["limits", "set", "acme", "second", "100"],
        vec!["provider"],
        vec!["jobs", "cancel"],
        vec!["jobs", "cancel", "p1", "--file", "ids"],
        vec!["jobs", "show", "no/id"],
        vec!["jobs", "list", "--state", "done"],
        vec!["jobs", "list", "--limit", "0"],
        vec!["jobs", "resolve", "p1"],
        vec!["jobs", "resolve", "p1", "--as", "dead"],
        vec!["dlq", "discard", "p1"],
        vec!["dlq", "replay", "--rate", "0"],
        vec!["limits", "peek", "acme", "--account", "a b"],
        vec!["demo", "--limit", "0/1s"],
        vec!["--config=a", "migrate", "--config", "b"],
    ] {
        let output = sluicegate().args(&line).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(2), true), "{line:?}");
    }
    let output = sluicegate().arg("--help").output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("78 bad configuration"));
}

#[test]
fn flags_before_and_after_commands_combine() {
    let words = ["sluicegate", "--set", "a.b=1", "provider", "--set=c.d=2", "show", "--set", "e.f=3", "--", "--set"];
    let cli = sluicegate::cli::Cli::from_arguments(words.map(Into::into)).unwrap();
    assert_eq!(cli.set, ["a.b=1", "c.d=2", "e.f=3"]);
    let output = sluicegate()
        .args(["--set", "log.level=loud", "check", "--no-connect", "--json", "--set", "log.format=verse"])
        .output()
        .unwrap();
    let stdout = text(&output.stdout);
    assert!(stdout.contains("log.level") && stdout.contains("log.format"), "{stdout}");
}

#[test]
fn one_shot_commands_log_only_errors() {
    use sluicegate::config::{LogConfig, LogFormat};
    use tracing::Level;
    let command = sluicegate::cli::Cli::from_arguments(["sluicegate", "migrate"].map(Into::into)).unwrap().command;
    for (configured, used) in [(Level::WARN, Level::ERROR), (Level::INFO, Level::ERROR), (Level::DEBUG, Level::DEBUG)] {
        assert_eq!(command.log(LogConfig { level: configured, format: LogFormat::Text }).level, used);
    }
}

#[test]
fn invalid_configuration_exits_with_78() {
    for line in [["provider", "list"].as_slice(), &["check", "--no-connect"]] {
        let output = sluicegate()
            .args(line)
            .env("SLUICEGATE_QUEUE__URL", "amqp://app:hunter2@mq.example.com")
            .env("SLUICEGATE_OPS__LISTEN", "nowhere")
            .output()
            .unwrap();
        let all = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(78), "{all}");
        assert!(all.contains("ops.listen") && all.contains("queue.url") && !all.contains("hunter2"), "{all}");
    }
    let output = sluicegate().args(["--set", "queue.url=amqp://a:hunter2@mq.example.com", "status"]).output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    assert!(text(&output.stderr).contains("queue.url (--set): the connection to mq.example.com would be plain text"));
    assert!(output.stdout.is_empty() && !text(&output.stderr).contains("hunter2"));
}

/// Each kind of database has its own door without a broker, and the error names the one that fits.
#[test]
fn door_of_the_other_database_exits_with_78() {
    let postgres = "database.url=postgres://app@localhost/pay";
    let sqlite = "database.url=sqlite://pay.db";
    for (sets, fix) in [
        ([postgres, "queue.url=embedded:"], "Set queue.url to database:"),
        ([sqlite, "queue.url=database:"], "Set queue.url to embedded:"),
    ] {
        for command in [["run"].as_slice(), &["enqueue", "--provider", "acme", "--amount", "1", "--currency", "EUR"]] {
            let set = sets.iter().flat_map(|set| ["--set", *set]);
            let output = sluicegate().args(set).args(command).output().unwrap();
            let err = text(&output.stderr);
            assert!(output.status.code() == Some(78) && err.contains(fix), "{command:?}: {err}");
        }
    }
}

#[test]
fn check_reports_on_stdout_as_json_too() {
    let output = sluicegate().args(["check", "--no-connect", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(findings[0]["level"], "ok");
    let output = sluicegate().args(["check", "--json", "--set", "log.level=loud"]).output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(findings[0]["subject"], "configuration log.level");
}

#[test]
fn other_commands_create_no_database() {
    let dir = tempfile::tempdir().unwrap();
    let database = dir.path().join("sluicegate.db");
    for line in [
        vec!["status"],
        vec!["jobs", "list"],
        vec!["jobs", "cancel", "p1"],
        vec!["dlq", "replay", "p1"],
        vec!["limits", "list"],
        vec!["provider", "list"],
        vec!["simulate", "--burst", "5"],
        vec!["enqueue", "--provider", "acme", "--amount", "1", "--currency", "EUR"],
    ] {
        let set = ["--set", "ops.listen=none"];
        let output = sluicegate().current_dir(dir.path()).args(set).args(&line).output().unwrap();
        let all = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{line:?}: {all}");
        assert!(all.contains("there is no database sluicegate.db (database.url)"), "{line:?}: {all}");
        assert!(!database.exists(), "{line:?}");
    }
    // A directory in which `run` has never been started is no error.
    let output = sluicegate().current_dir(dir.path()).args(["check", "--json"]).output().unwrap();
    let findings: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    let database_is = |finding: &&serde_json::Value| finding["what"] == "sluicegate.db does not exist yet";
    let levels: Vec<&str> =
        findings.iter().filter(database_is).map(|finding| finding["level"].as_str().unwrap()).collect();
    assert_eq!((output.status.code(), levels, database.exists()), (Some(0), vec!["warning"], false), "{findings:?}");
    let output = sluicegate().current_dir(dir.path()).arg("migrate").output().unwrap();
    assert!(output.status.success() && database.exists(), "{}", text(&output.stderr));
    assert!(sluicegate().current_dir(dir.path()).args(["jobs", "list"]).output().unwrap().status.success());
}

/// A row for commands that do not migrate the database: reading, and changing a row.
const ACME: &str = "[[provider]]\nname = \"acme\"\nurl = \"https://x.example/\"\n\
                    [[provider.limit]]\nname = \"all\"\nmax_requests = 5\nwindow_ms = 1000\n";

#[test]
fn enqueued_payment_can_be_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("acme.toml"), ACME).unwrap();
    let run = |line: &str| {
        let output = sluicegate().current_dir(dir.path()).args(line.split(' ')).output().unwrap();
        (output.status.code().unwrap(), format!("{}{}", text(&output.stdout), text(&output.stderr)))
    };
    assert_eq!(run("provider apply acme.toml").0, 0);
    assert_eq!(run("enqueue --provider acme --id p1 --amount 1 --currency EUR").0, 0);
    let (code, output) = run("jobs cancel p2");
    assert!(code == 1 && output.contains("add --provider NAME"), "{code}: {output}");
    let (code, output) = run("jobs cancel p1");
    assert_eq!(code, 0, "{output}");
    assert!(run("jobs show p1").1.contains("cancelled"), "{}", run("jobs show p1").1);
}

#[test]
fn dry_run_creates_no_database() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("acme.toml"), ACME).unwrap();
    let output =
        sluicegate().current_dir(dir.path()).args(["provider", "apply", "acme.toml", "--dry-run"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("acme: limit all added 5/1s"), "{}", text(&output.stdout));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "a file besides the provider file");
}

#[test]
fn other_commands_require_a_migrated_database() {
    let dir = tempfile::tempdir().unwrap();
    let database = dir.path().join("sluicegate.db");
    std::fs::write(&database, "").unwrap();
    for line in [
        vec!["check"],
        vec!["status"],
        vec!["jobs", "list"],
        vec!["dlq", "replay", "p1"],
        vec!["provider", "list"],
        vec!["enqueue", "--provider", "acme", "--amount", "1", "--currency", "EUR"],
    ] {
        let set = ["--set", "ops.listen=none"];
        let output = sluicegate().current_dir(dir.path()).args(set).args(&line).output().unwrap();
        let all = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{line:?}: {all}");
        assert!(all.contains("schema missing or outdated: run `sluicegate migrate`"), "{line:?}: {all}");
    }
    // An in-memory database needs no migration.
    let memory = ["--set", "database.url=sqlite::memory:", "--set", "ops.listen=none", "provider", "list"];
    assert!(sluicegate().args(memory).output().unwrap().status.success());
    assert!(sluicegate().current_dir(dir.path()).arg("migrate").output().unwrap().status.success());
    assert!(sluicegate().current_dir(dir.path()).args(["jobs", "list"]).output().unwrap().status.success());
}

/// A script reads stdout and must find one JSON object there, even after an error.
#[test]
fn failing_json_command_prints_a_json_error() {
    let dir = tempfile::tempdir().unwrap();
    let empty = tempfile::tempdir().unwrap();
    assert!(sluicegate().current_dir(dir.path()).arg("migrate").output().unwrap().status.success());
    for (place, code, line, words) in [
        (&dir, 1, "jobs show p1", "p1: the ledger has no such job"),
        (&dir, 1, "provider show acme", "there is no provider `acme`"),
        (&empty, 1, "status", "there is no database sluicegate.db"),
        (&dir, 78, "provider apply missing.toml", "missing.toml: No such file"),
        (&dir, 78, "--set x provider list", "Write --set section.key=value"),
        (&dir, 2, "provider show Acme", "use 1 to 63 of a-z 0-9 _ -"),
        (&dir, 2, "jobs list --state done", "invalid value 'done' for '--state <STATE>'"),
        (&dir, 2, "enqueue", "--currency <CURRENCY>"),
        (&dir, 2, "limits set acme second 100", "write N/DURATION, like 100/1s"),
        (&dir, 2, "provider frob", "'frob'"),
    ] {
        let line = format!("--set ops.listen=none {line}");
        let plain = sluicegate().current_dir(place.path()).args(line.split(' ')).output().unwrap();
        assert_eq!((plain.status.code(), text(&plain.stdout)), (Some(code), ""), "{line}");
        let output = sluicegate().current_dir(place.path()).args(line.split(' ')).arg("--json").output().unwrap();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "{line}: {out}{err}");
        let object: serde_json::Map<String, serde_json::Value> = serde_json::from_str(out).unwrap();
        let message = object["error"].as_str().unwrap();
        assert!(message.contains(words) && !message.contains("--help") && object.len() == 1, "{line}: {out}");
        assert!(err.contains(words), "{line}: {err}");
    }
    // A command with a JSON object of its own for failures prints that one.
    let line = ["jobs", "cancel", "p1", "--json"];
    let output = sluicegate().current_dir(dir.path()).args(line).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &report["refused"][0]["id"]), (Some(1), &"p1".into()), "{report}");
}

/// The program run by a user without rights, because root may do everything.
fn as_nobody(dir: &std::path::Path) -> std::process::Command {
    use std::os::unix::fs::MetadataExt as _;
    use std::os::unix::process::CommandExt as _;
    let copy = dir.join("sluicegate");
    // Copied by another process. A file that this process writes cannot be executed while another test's child has
    // inherited its handle.
    let copied = std::process::Command::new("cp").arg(assert_cmd::cargo::cargo_bin("sluicegate")).arg(&copy).status();
    assert!(copied.unwrap().success());
    let mut command = std::process::Command::new(&copy);
    if std::fs::metadata(&copy).unwrap().uid() == 0 {
        command.uid(65_534).gid(65_534);
    }
    command.env_clear();
    command
}

#[test]
fn check_reports_an_uncreatable_database() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let locked = dir.path().join("locked");
    std::fs::create_dir(&locked).unwrap();
    std::fs::write(dir.path().join("file"), "").unwrap();
    let allow = |place: &str, mode| {
        std::fs::set_permissions(dir.path().join(place), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let read_only = dir.path().join("read-only");
    std::fs::create_dir(&read_only).unwrap();
    for place in [&locked, &read_only] {
        assert!(sluicegate().current_dir(place).arg("migrate").output().unwrap().status.success());
    }
    let modes = [("locked", 0o555), ("read-only", 0o777), ("read-only/sluicegate.db", 0o444)];
    modes.into_iter().for_each(|(place, mode)| allow(place, mode));
    for (place, words) in [
        ("missing/new.db", "missing does not exist"),
        ("file/new.db", "file is not a folder"),
        ("locked/new.db", "this user may not create files in its folder"),
        ("locked/sluicegate.db", "the file that"),
        ("read-only/sluicegate.db", "this user may not write"),
    ] {
        let path = dir.path().join(place);
        let set = format!("database.url=sqlite://{}", path.display());
        let line = ["--set", &set, "--set", "ops.listen=none", "check", "--json"];
        let output = as_nobody(dir.path()).args(line).output().unwrap();
        let findings: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
        let subject = format!("database sqlite://{}", path.display());
        let is_it = |finding: &&serde_json::Value| finding["subject"] == subject && finding["level"] == "error";
        let found = findings.iter().find(is_it).unwrap_or_else(|| panic!("{place}: {findings:?}"));
        assert_eq!(output.status.code(), Some(1), "{place}: {findings:?}");
        assert!(found["what"].as_str().unwrap().contains(words) && found["fix"].is_string(), "{place}: {found}");
    }
    assert!(!dir.path().join("missing").exists(), "a directory was made");
    allow("locked", 0o755);
}

#[test]
fn non_database_file_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let run = |url: &str, line: &str| {
        let set = format!("database.url=sqlite://{url}");
        let output = sluicegate().current_dir(dir.path()).args(["--set", &set]).args(line.split(' ')).output().unwrap();
        (output.status.code(), format!("{}{}", text(&output.stdout), text(&output.stderr)))
    };
    assert_eq!(run("damaged.db", "migrate").0, Some(0));
    let mut bytes = std::fs::read(dir.path().join("damaged.db")).unwrap();
    bytes[4_096..].fill(0xa5);
    std::fs::write(dir.path().join("damaged.db"), bytes).unwrap();
    for (url, line, words) in [
        ("/etc/passwd", "jobs list", "is not a SQLite database"),
        ("/etc/passwd", "check", "is not a SQLite database"),
        ("/etc/passwd", "migrate", "is not a SQLite database"),
        ("damaged.db", "jobs list", "is damaged"),
        ("/etc", "jobs list", "must be one that this user can read and write"),
        ("missing/new.db", "migrate", "in a folder that exists"),
    ] {
        let (code, output) = run(url, line);
        assert_eq!(code, Some(1), "{url} {line}: {output}");
        assert!(output.contains(words) && !output.contains("unreadable row"), "{url} {line}: {output}");
    }
}

#[test]
fn check_reports_invalid_outbound_targets() {
    for entry in ["bogus", "10.0.0.0/99", "https://x.example:443", "host:99999"] {
        let set = format!("outbound.allow=loopback,{entry}");
        let output = sluicegate().args(["check", "--no-connect", "--set", &set]).output().unwrap();
        let out = text(&output.stdout);
        assert_eq!(output.status.code(), Some(78), "{entry}: {out}");
        assert!(out.contains("outbound.allow") && out.contains(entry) && out.contains("--set"), "{entry}: {out}");
    }
}

#[test]
fn migration_needs_only_its_database() {
    let url = format!("postgres://owner@127.0.0.1:{}/billing", free_port());
    let output = sluicegate().arg("migrate").env("SLUICEGATE_DATABASE__URL", &url).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("database unavailable"), "{}", text(&output.stderr));
    let output = sluicegate().arg("status").env("SLUICEGATE_DATABASE__URL", &url).output().unwrap();
    assert_eq!(output.status.code(), Some(78));
}

/// A process that ends with its test.
struct Running(std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn is_ready(port: u16) -> bool {
    use std::io::{Read as _, Write as _};
    let asked = || {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port))?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok::<_, std::io::Error>(answer.starts_with("HTTP/1.1 200"))
    };
    asked().unwrap_or(false)
}

#[test]
fn second_run_names_the_first_process() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let listen = format!("ops.listen=127.0.0.1:{port}");
    let mut first = std::process::Command::new(assert_cmd::cargo::cargo_bin("sluicegate"));
    first.env_clear().current_dir(dir.path()).args(["--set", &listen, "run"]);
    let first = Running(first.stderr(std::process::Stdio::null()).spawn().unwrap());
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !is_ready(port) {
        assert!(std::time::Instant::now() < deadline, "the worker does not become ready");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let second = sluicegate().current_dir(dir.path()).args(["--set", &listen, "run"]).output().unwrap();
    assert_eq!(second.status.code(), Some(78));
    assert!(text(&second.stderr).contains("another `sluicegate run` uses this database"), "{}", text(&second.stderr));
    // The same database under other names: two workers with a limiter each would together use twice the limit.
    std::os::unix::fs::symlink(dir.path().join("sluicegate.db"), dir.path().join("link.db")).unwrap();
    for url in ["sqlite://link.db", "sqlite://sluice%67ate.db", "sqlite://./sluicegate.db"] {
        let url = format!("database.url={url}");
        let lines = ["--set", "ops.listen=none", "--set", &url, "run"];
        let again = sluicegate().current_dir(dir.path()).args(lines).output().unwrap();
        assert_eq!(again.status.code(), Some(78), "{url}");
        assert!(text(&again.stderr).contains("another `sluicegate run` uses this database"), "{}", text(&again.stderr));
    }
    drop(first);
    let taken = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let alone = sluicegate().current_dir(dir.path()).args(["--set", &listen, "run"]).output().unwrap();
    assert_eq!(alone.status.code(), Some(78));
    assert!(text(&alone.stderr).contains("ops.listen: 127.0.0.1:"), "{}", text(&alone.stderr));
    drop(taken);
}

#[test]
fn completions_and_manual_need_no_configuration() {
    for shell in ["bash", "zsh", "fish"] {
        let output = sluicegate().args(["completions", shell]).env("SLUICEGATE_LOG__LEVEL", "loud").output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output.stdout).contains("idempotency-key"), "{shell}");
    }
    let output = sluicegate().arg("man").output().unwrap();
    assert!(output.status.success() && text(&output.stdout).contains(".TH sluicegate 1"));
    let dir = tempfile::tempdir().unwrap();
    assert!(sluicegate().args(["man", "--out"]).arg(dir.path()).output().unwrap().status.success());
    assert!(dir.path().join("sluicegate-provider-apply.1").exists());
}

#[test]
fn closed_stdout_is_not_a_failure() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let program = assert_cmd::cargo::cargo_bin("sluicegate");
    let output = std::process::Command::new(program).args(["completions", "zsh"]).stdout(writer).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
}
