//! Every command once: its output fits the terminal, is complete in a pipe and is JSON on request. Its exit code is
//! exact.

use std::collections::BTreeSet;
use std::process::Command as Process;

use clap::{Command, CommandFactory as _};
use sluicegate::cli::console::TableShape;
use sluicegate::cli::{Cli, Exit};

use crate::jobs::{Desk, exit};

/// Half of a laptop's screen.
const WIDTH: u16 = 60;

/// Commands without data, and commands that other tests run, with the reason.
const NOT_WALKED: [(&str, &str); 7] = [
    ("completions", "its own test, below"),
    ("man", "its own test, below"),
    ("run", "prints messages alone; tests/services runs it"),
    ("demo", "takes seconds; tests/services and its own tests run it"),
    ("init", "writes a file; its own tests run it"),
    ("fake-provider", "serves until it is stopped"),
    ("simulate", "tests of its own walk it"),
];
/// Commands without data, which need no JSON output.
const NO_DATA: [&str; 5] = ["run", "init", "fake-provider", "completions", "man"];

/// A batch that runs.
const BATCH: &str = "01937f2c5b0e7c3a9d4e5f60718293a4";

/// Command lines in an order in which each finds its data. `FILE`: a provider file.
pub const WALK: [(&[&str], Exit); 55] = [
    (&["migrate"], Exit::Success),
    (&["check"], Exit::Success),
    // The row was made by SQL, and the file has another address.
    (&["provider", "apply", "FILE"], Exit::Failed),
    (&["provider", "apply", "FILE", "--reset", "--dry-run"], Exit::Success),
    (&["provider", "apply", "FILE", "--reset", "--because", "new"], Exit::Success),
    (&["provider", "apply", "/nowhere"], Exit::BadConfiguration),
    (&["provider", "list"], Exit::Success),
    (&["provider", "show", "acme"], Exit::Success),
    (&["provider", "show", "nobody"], Exit::Failed),
    (&["provider", "flows", "acme"], Exit::Success),
    (&["provider", "flows", "nobody"], Exit::Failed),
    (&["provider", "pause", "acme", "--because", "they are down"], Exit::Success),
    (&["provider", "resume", "acme"], Exit::Success),
    (&["provider", "resume", "nobody"], Exit::Failed),
    (&["provider", "pause", "--all", "--because", "incident 12"], Exit::Success),
    (&["provider", "resume", "--all"], Exit::Success),
    (&["limits", "list"], Exit::Success),
    (&["limits", "set", "acme", "per-second", "200/s", "--dry-run"], Exit::Success),
    (&["limits", "set", "acme", "per-second", "50/s", "--because", "billing day"], Exit::Success),
    (&["limits", "set", "acme", "per-year", "50/1s"], Exit::Failed),
    (&["limits", "history", "acme"], Exit::Success),
    (&["limits", "history"], Exit::Success),
    (&["limits", "history", "nobody"], Exit::Failed),
    (&["accounts", "set", "acme", "shop-7", "blocked", "--because", "fraud, ticket 12"], Exit::Success),
    (&["accounts", "set", "acme", "shop-7", "5/1s", "--until", "06:00", "--because", "they flood us"], Exit::Success),
    (&["accounts", "set", "acme", "shop-7", "exempt", "--because", "they asked"], Exit::Failed),
    (&["accounts", "list", "acme"], Exit::Success),
    (&["accounts", "list", "nobody"], Exit::Failed),
    (&["accounts", "unset", "acme", "shop-7", "--because", "cleared"], Exit::Success),
    (&["accounts", "unset", "acme", "shop-7", "--because", "cleared"], Exit::Failed),
    // The embedded limiter exists only in the running process, and `ops.listen` is `none` here.
    (&["limits", "peek", "acme"], Exit::BadConfiguration),
    (&["enqueue", "--provider", "acme", "--amount", "1299", "--currency", "EUR", "--id", "new"], Exit::Success),
    (&["status"], Exit::Success),
    (&["jobs", "list"], Exit::Success),
    (&["jobs", "show", "in-review"], Exit::Success),
    (&["jobs", "show", "nobody"], Exit::Failed),
    (&["jobs", "explain", "in-review"], Exit::Success),
    (&["jobs", "resolve", "in-review", "--as", "declined", "--because", "seen at acme"], Exit::Success),
    (&["jobs", "resolve", "in-review", "--as", "declined"], Exit::Failed),
    (&["jobs", "cancel", "waits"], Exit::Success),
    (&["jobs", "cancel", "waits"], Exit::Failed),
    (&["jobs", "erase", "--account", "nobody", "--because", "ticket 4711"], Exit::Success),
    (&["dlq", "list"], Exit::Success),
    (&["dlq", "show", "dead-1"], Exit::Success),
    (&["dlq", "replay", "dead-1"], Exit::Success),
    (&["dlq", "discard", "dead-2", "--yes"], Exit::Success),
    (&["rejected", "list"], Exit::Success),
    (&["rejected", "show", "1"], Exit::Success),
    (&["rejected", "republish", "1"], Exit::Failed),
    (&["rejected", "discard", "1", "--yes"], Exit::Success),
    (&["rejected", "show", "2"], Exit::Failed),
    (&["batches", "list"], Exit::Success),
    (&["batches", "show", BATCH], Exit::Success),
    (&["batches", "stop", BATCH], Exit::Success),
    (&["batches", "stop", BATCH], Exit::Failed),
];

/// Names of all commands without subcommands: `provider list`, `limits set`, …
fn leaves(command: &Command, path: &str, found: &mut BTreeSet<String>) {
    let mut below = command.get_subcommands().filter(|sub| sub.get_name() != "help").peekable();
    if below.peek().is_none() {
        found.insert(path.trim().to_owned());
    }
    below.for_each(|sub| leaves(sub, &format!("{path} {}", sub.get_name()), found));
}

fn all() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    leaves(&Cli::command(), "", &mut found);
    found
}

/// The command of a command line.
pub fn leaf(line: &[&str]) -> String {
    let all = all();
    let two = line.iter().take(2).copied().collect::<Vec<_>>().join(" ");
    if all.contains(&two) { two } else { line[0].to_owned() }
}

pub fn has_json(path: &str) -> bool {
    let root = Cli::command();
    let found = path.split(' ').try_fold(&root, |command, name| command.find_subcommand(name));
    found.is_some_and(|command| command.get_arguments().any(|argument| argument.get_id() == "json"))
}

pub async fn desk() -> (Desk, String) {
    let desk = Desk::open().await;
    for (id, state) in [("in-review", "review"), ("waits", "waiting"), ("dead-1", "dead"), ("dead-2", "dead")] {
        desk.payment(id, "acme", state).await;
    }
    let long = "a-limit-with-a-name-that-is-rather-long-for-a-table";
    desk.sql(&format!(
        "INSERT INTO provider_limits (provider, name, max_requests, window_ms) VALUES ('bolt', '{long}', 7, 1000)"
    ))
    .await;
    desk.sql(
        "INSERT INTO rejected_messages (at, lane, job_id, reason, detail, body_sha256, body_bytes, head) \
         VALUES (1795000000000, 'acme', 'pay-1', 'bad_amount', 'amount: must be above 0', zeroblob(32), 9, '{\"id\":1}')",
    )
    .await;
    desk.sql(&format!(
        "INSERT INTO decision_batches \
             (id, decision, jobs, applied, refused, rate, digest, sums, created_at, person, because, next_at) \
         VALUES ('{BATCH}', 'resend', 24, 3, 1, '50/1s', '{0}{0}', json_array(json_object('currency', 'EUR', 'jobs', 24, \
             'amount', 31176)), 1795000000000, 'alice@a-host-with-a-long-name.example', 'the answers were lost', 1); \
         INSERT INTO decision_batch_refusals VALUES ('{BATCH}', 'changed', 1, 'pay-9', 'the job changed in the meantime')",
        "ab".repeat(16)
    ))
    .await;
    let file = desk.dir.path().join("providers.toml");
    let row = "[[provider]]\nname = \"acme\"\nurl = \"https://pay.example.com/a/long/path/to/charges/of/this/provider\"\n\
               idempotency_retention_s = 86400\n\
               [[provider.limit]]\nname = \"per-second\"\nmax_requests = 100\nwindow_ms = 1000\n";
    std::fs::write(&file, row).unwrap();
    (desk, file.to_str().unwrap().to_owned())
}

#[tokio::test]
async fn every_command_fits_the_terminal() {
    let (desk, file) = desk().await;
    let mut walked = BTreeSet::new();
    for (line, exact) in WALK {
        let args: Vec<&str> = line.iter().map(|word| if *word == "FILE" { file.as_str() } else { word }).collect();
        let args = [&["--set", "ops.listen=none"], &args[..]].concat();
        let ran = desk.run_in(TableShape::Terminal { width: Some(WIDTH) }, &args).await;
        assert_eq!(exit(&ran), exact, "{line:?}: {}{}{:?}", ran.out, ran.err, ran.result);
        // A row in the format of `apply`, and one sentence per change, are not tables: the terminal wraps them.
        let is_no_table = matches!(leaf(line).as_str(), "provider show" | "provider apply" | "accounts set");
        // The sentence above the table of checks is not a table either.
        let sentences = usize::from(leaf(line) == "jobs explain");
        let too_wide = ran.out.lines().skip(sentences).find(|text| text.chars().count() > usize::from(WIDTH));
        assert!(is_no_table || too_wide.is_none(), "{line:?}: {}", too_wide.unwrap_or_default());
        walked.insert(leaf(line));
    }
    let walked_elsewhere = NOT_WALKED.iter().map(|(name, _)| (*name).to_owned());
    let known: BTreeSet<String> = walked.into_iter().chain(walked_elsewhere).collect();
    let missing: Vec<String> = all().into_iter().filter(|command| !known.contains(command)).collect();
    assert!(missing.is_empty(), "add to WALK: {missing:?}");
}

#[tokio::test]
async fn every_data_command_has_json_output() {
    let without: Vec<String> =
        all().into_iter().filter(|path| !has_json(path) && !NO_DATA.contains(&path.as_str())).collect();
    assert!(without.is_empty(), "no --json: {without:?}");
    let (desk, file) = desk().await;
    for (line, exact) in WALK {
        let args: Vec<&str> = line.iter().map(|word| if *word == "FILE" { file.as_str() } else { word }).collect();
        let json: &[&str] = if has_json(&leaf(line)) { &["--json"] } else { &[] };
        let ran = desk.run(&[&["--set", "ops.listen=none"], &args[..], json].concat()).await;
        assert_eq!(exit(&ran), exact, "{line:?}: {}{}{:?}", ran.out, ran.err, ran.result);
        if exact == Exit::Success && !json.is_empty() {
            serde_json::from_str::<serde_json::Value>(&ran.out)
                .unwrap_or_else(|error| panic!("{line:?}: {error}: {}", ran.out));
        }
    }
}

/// In a pipe, a row is one line, whatever its length.
#[tokio::test]
async fn piped_tables_are_not_truncated() {
    let (desk, file) = desk().await;
    desk.run(&["provider", "apply", "--reset", &file]).await;
    let list = desk.run(&["provider", "list"]).await.out;
    assert_eq!(list.lines().count(), 3, "{list}");
    assert!(list.contains("https://pay.example.com/a/long/path/to/charges/of/this/provider"), "{list}");
}

/// The width is that of the terminal, which `script` provides.
#[tokio::test]
async fn table_width_follows_the_terminal() {
    let (desk, file) = desk().await;
    desk.run(&["provider", "apply", "--reset", &file]).await;
    let program = env!("CARGO_BIN_EXE_sluicegate");
    let database = format!("sqlite://{}/ledger.db", desk.dir.path().display());
    for width in [50, 110] {
        let shell = format!("stty cols {width} rows 40; {program} --set database.url={database} provider list");
        let run = |no_color| {
            let mut script = Process::new("script");
            script.args(["--quiet", "--return", "--command", &shell, "/dev/null"]).env("TERM", "xterm");
            String::from_utf8(script.env("NO_COLOR", no_color).output().unwrap().stdout).unwrap()
        };
        let text = run("1");
        assert!(!text.contains('\u{1b}') && run("").contains("\u{1b}[1m"), "{text}");
        let widest = text.lines().map(|line| line.trim_end().chars().count()).max().unwrap();
        assert!(text.contains("acme") && widest <= width && widest > width / 2, "{width}: {widest}\n{text}");
    }
}

/// Completions and manual pages come from the one definition, so they include every command.
#[test]
fn completions_and_manual_cover_every_command() {
    let program = env!("CARGO_BIN_EXE_sluicegate");
    let leaves = all();
    for shell in ["bash", "zsh", "fish"] {
        let output = Process::new(program).args(["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        for word in leaves.iter().flat_map(|path| path.split(' ')) {
            assert!(script.contains(word), "{shell}: {word}");
        }
        assert!(script.contains("because") && script.contains("dry-run"), "{shell}: flags");
    }
    let dir = tempfile::tempdir().unwrap();
    assert!(Process::new(program).args(["man", "--out"]).arg(dir.path()).output().unwrap().status.success());
    for path in leaves {
        let page = dir.path().join(format!("sluicegate-{}.1", path.replace(' ', "-")));
        let text = std::fs::read_to_string(&page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
        assert!(text.contains(".SH DESCRIPTION"), "{path}");
    }
}

/// A row that no constraint rejects, written by SQL: `check` reports it with the fix.
#[tokio::test]
async fn check_reports_an_invalid_row() {
    let (desk, _) = desk().await;
    desk.sql("UPDATE provider_limits SET enabled = 0 WHERE provider = 'acme'").await;
    let ran = desk.run(&["check", "--json"]).await;
    assert_eq!(exit(&ran), Exit::Failed);
    let findings = ran.json();
    let bad = findings.as_array().unwrap().iter().find(|finding| finding["subject"] == "provider acme").unwrap();
    assert_eq!(bad["level"], "error");
    assert!(bad["fix"].as_str().unwrap().contains("last valid version"), "{bad}");
    // A valid row that this configuration may not call.
    desk.sql("UPDATE providers SET url = 'http://10.1.2.3/charges' WHERE name = 'bolt'").await;
    let findings = desk.run(&["check", "--json"]).await.json();
    let refused = |finding: &&serde_json::Value| finding["subject"] == "provider bolt" && finding["level"] == "error";
    let bad = findings.as_array().unwrap().iter().find(refused).unwrap();
    assert!(bad["what"].to_string().contains("10.1.2.3"), "{bad}");
}
