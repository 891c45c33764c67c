//! Pairs of rows of which one makes the other invalid, changed by SQL in each order. Every command then names the problem
//! and what is in force.

use std::process::{Command, Output};

use sluicegate::worker::settings_sync;

use super::*;

on_every_database!(order_of_changes_makes_no_difference);

const ROWS: &str = r#"
[[provider]]
name = "acme"
url = "http://127.0.0.1:9/charges"
[[provider.limit]]
name = "all"
max_requests = 100
window_ms = 1000
[[provider.limit]]
name = "own"
scope = "account"
algorithm = "fixed_window"
max_requests = 50
window_ms = 60000
[[provider]]
name = "bolt"
url = "http://127.0.0.1:9/charges"
[[provider.limit]]
name = "all"
max_requests = 100
window_ms = 1000
[[provider]]
name = "dash"
url = "http://127.0.0.1:9/charges"
[[provider.limit]]
name = "all"
max_requests = 100
window_ms = 1000
"#;

/// A change of one row, a change of another, and the problem of provider `acme` afterwards.
const PAIRS: [(&str, &str, &str); 9] = [
    (
        "INSERT INTO account_overrides (provider, account, rule) VALUES ('acme', 'a', 'exempt')",
        "DELETE FROM provider_limits WHERE provider = 'acme' AND name = 'own'",
        "rule `exempt` changes nothing",
    ),
    (
        "INSERT INTO account_overrides (provider, account, limit_name, rule, max_requests, window_ms) \
         VALUES ('acme', 'a', 'own', 'limit', 5, 1000)",
        "UPDATE provider_limits SET scope = 'provider' WHERE provider = 'acme' AND name = 'own'",
        "limit_name `own` has scope `provider`",
    ),
    (
        "INSERT INTO account_overrides (provider, account, rule, max_requests, window_ms) \
         VALUES ('acme', 'a', 'limit', 5, 20000)",
        "UPDATE provider_limits SET offset_ms = 30000 WHERE provider = 'acme' AND name = 'own'",
        "offset_ms is 30000",
    ),
    (
        "INSERT INTO account_overrides (provider, account, rule, max_requests, window_ms) \
         VALUES ('acme', 'a', 'limit', 5, 1000)",
        "UPDATE provider_limits SET algorithm = 'concurrency', window_ms = NULL WHERE provider = 'acme' AND name = 'own'",
        "window_ms is not supported by `concurrency`",
    ),
    (
        "INSERT INTO account_overrides (provider, account, rule, max_requests, window_ms) \
         VALUES ('acme', 'a', 'limit', 10001, 1000)",
        "DELETE FROM provider_limits WHERE provider = 'acme' AND name = 'own'",
        "keeps one log for each account",
    ),
    (
        "UPDATE providers SET reserve_percent = 90 WHERE name = 'acme'",
        "UPDATE provider_limits SET max_requests = 5 WHERE provider = 'acme' AND name = 'own'",
        "reserve_percent is 90: of limit `own`",
    ),
    (
        "INSERT INTO account_overrides (provider, account, rule, max_requests, window_ms) \
         VALUES ('acme', 'a', 'limit', 5, 1000)",
        "UPDATE providers SET reserve_percent = 90 WHERE name = 'acme'",
        "account `a`: reserve_percent is 90",
    ),
    (
        "UPDATE provider_limits SET enabled = false WHERE provider = 'acme' AND name = 'all'",
        "UPDATE provider_limits SET enabled = false WHERE provider = 'acme' AND name = 'own'",
        "a provider without an enabled limit is closed",
    ),
    // Two providers with one quota.
    (
        "UPDATE providers SET quota = 'shared' WHERE name IN ('acme', 'bolt')",
        "UPDATE provider_limits SET enabled = false WHERE provider = 'bolt'",
        "a provider without an enabled limit is closed",
    ),
];

async fn with_rows(kind: Kind) -> Fixture {
    let fixture = Fixture::migrated(kind).await;
    fixture.apply(&file(ROWS)).await;
    fixture
}

/// Problems of `acme` as a worker that starts now knows them; a usable row has none. `dash` has a lane.
async fn problems(fixture: &Fixture) -> Vec<String> {
    let known = settings_sync::load(&fixture.database, &LoadedSettings::default()).await.unwrap();
    assert!(known.providers.contains_key(&name("dash")));
    match known.invalid_rows.iter().find(|bad| bad.provider == "acme") {
        Some(bad) => bad.problems.clone(),
        None => known.unknown_limits(&known.providers[&name("acme")].quota),
    }
}

/// An account's rule that the row cannot use is refused. A later change of the row makes it invalid.
async fn order_of_changes_makes_no_difference(kind: Kind) {
    for (one, other, problem) in PAIRS {
        for order in [[one, other], [other, one]] {
            let fixture = with_rows(kind).await;
            fixture.sql(order[0]).await.unwrap();
            let refused = fixture.sql(order[1]).await.err();
            let is_rule = order[1].starts_with("INSERT INTO account_overrides");
            assert_eq!(refused.is_some(), is_rule, "{order:?}: {refused:?}");
            assert!(refused.is_none_or(|error| error.contains("rule_")), "{order:?}");
            let found = problems(&fixture).await;
            let names_it = found.iter().any(|line| line.contains(problem));
            assert_eq!(names_it, !is_rule, "{order:?}: {found:?}");
        }
    }
}

fn run(fixture: &Fixture, args: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
    program.args(args).env("SLUICEGATE_DATABASE__URL", &fixture.url).env("SLUICEGATE_QUEUE__URL", "embedded:");
    program.env("SLUICEGATE_OPS__LISTEN", "none").output().unwrap()
}

/// On SQLite, where the commands need no broker. What they say follows from the loaded rows, whatever the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_command_names_an_invalid_row() {
    let dir = tempfile::tempdir().unwrap();
    for (one, other, problem) in PAIRS {
        let fixture = with_rows(Kind::SqliteFile).await;
        for sql in [one, other] {
            fixture.sql(sql).await.unwrap();
        }
        let shown = dir.path().join("acme.toml");
        let commands: [(&[&str], i32); 10] = [
            (&["provider", "show", "acme"], 1),
            (&["provider", "show", "acme", "--json"], 1),
            (&["provider", "list"], 1),
            (&["provider", "apply", shown.to_str().unwrap()], if problem.contains("without") { 1 } else { 78 }),
            (&["provider", "resume", "acme"], 1),
            (&["limits", "list"], 1),
            (&["limits", "peek", "acme"], 1),
            (&["limits", "set", "acme", "all", "70/1s"], 1),
            (&["check"], 1),
            (&["status"], 0),
        ];
        for (line, code) in commands {
            let output = run(&fixture, line);
            let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            // `provider show` prints a file that `apply` reads.
            if line == ["provider", "show", "acme"] {
                std::fs::write(&shown, &*out).unwrap();
            }
            let said = format!("{out}{err}");
            let is_file_error = output.status.code() == Some(78);
            let code = if is_file_error && line[1] == "apply" { 78 } else { code };
            assert_eq!(output.status.code(), Some(code), "{one}; {other}: {line:?}: {said}");
            assert!(said.contains(problem), "{one}; {other}: {line:?}: {said}");
            // `check` and `status` say it in words of their own.
            let names_force =
                is_file_error || said.contains("In force: nothing") || !matches!(line[0], "provider" | "limits");
            assert!(names_force, "{one}; {other}: {line:?}: {said}");
        }
        // Stopping always works.
        assert!(run(&fixture, &["provider", "pause", "acme"]).status.success(), "{one}; {other}");
        assert_eq!(fixture.one("SELECT max_requests FROM provider_limits WHERE provider = 'dash'").await, "100");
    }
}
