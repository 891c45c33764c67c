//! The program as a process: exit codes, streams, help.

use assert_cmd::Command;
use clap::CommandFactory as _;

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
fn usage_errors_exit_with_2_and_help_with_0() {
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
        vec!["dlq", "replay", "p1", "--provider", "acme"],
        vec!["dlq", "replay", "--rate", "0"],
        vec!["--set", "log.level=warn", "migrate", "--set", "log.format=json"],
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
fn one_shot_commands_log_errors_alone_unless_asked_for_detail() {
    use sluicegate::config::{Log, LogFormat};
    use tracing::Level;
    let command = sluicegate::cli::Cli::from_arguments(["sluicegate", "migrate"].map(Into::into)).unwrap().command;
    for (configured, used) in [(Level::WARN, Level::ERROR), (Level::INFO, Level::ERROR), (Level::DEBUG, Level::DEBUG)] {
        assert_eq!(command.log(Log { level: configured, format: LogFormat::Text }).level, used);
    }
}

#[test]
fn a_bad_configuration_exits_with_78_and_names_every_problem() {
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
    let output = sluicegate().args(["--set", "queue.url=amqp://a:hunter2@mq.example.com", "migrate"]).output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    assert!(text(&output.stderr).contains("queue.url (--set): the connection to mq.example.com would be plain text"));
    assert!(output.stdout.is_empty() && !text(&output.stderr).contains("hunter2"));
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
fn a_reader_that_has_seen_enough_is_no_failure() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let program = assert_cmd::cargo::cargo_bin("sluicegate");
    let output = std::process::Command::new(program).args(["completions", "zsh"]).stdout(writer).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
}
