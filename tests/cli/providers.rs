//! `provider`, `limits` and `migrate` on embedded backends: listed rows, applied files, pauses, usage and schema.

use sluicegate::cli::Exit;
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};

use crate::fakes::{Engine, provider_text, row, run_unmigrated, write_provider_file};

#[tokio::test]
async fn apply_prints_what_changed_and_declares_the_lanes() {
    let engine = Engine::with_providers(&["old"]).await;
    let dir = tempfile::tempdir().unwrap();
    let file = write_provider_file(&dir, &provider_text(&["acme", "other"]));
    let dry = engine.run(&["provider", "apply", &file, "--dry-run"]).await;
    let created = "acme: created\nacme: limit second added 100/1s\nother: created\nother: limit second added 100/1s\n";
    assert_eq!((dry.out.as_str(), engine.rows().await.len()), (created, 1));
    assert!(dry.err.contains("nothing was applied") && engine.state().declared.is_empty(), "{}", dry.err);

    let ran = engine.run(&["provider", "apply", &file]).await;
    assert_eq!((ran.result.unwrap(), ran.out.as_str()), (Exit::Success, created));
    let declared: Vec<String> = engine.state().declared.iter().map(ProviderName::to_string).collect();
    assert_eq!(declared, ["acme", "old", "other"]);

    let again = engine.run(&["provider", "apply", &file, "--json"]).await;
    assert_eq!(again.json(), serde_json::json!({ "dry_run": false, "changes": [], "kept": [] }));
}

#[tokio::test]
async fn invalid_row_rejects_the_file_with_78() {
    let engine = Engine::new().await;
    let dir = tempfile::tempdir().unwrap();
    for (text, part) in [
        (provider_text(&["good", "broken"]) + "[[provider]]\nname = \"bad\"\n", "provider `bad`: url"),
        ("[[provider]]\nbad line".to_owned(), "line 2: "),
        (provider_text(&["twice", "twice"]), "provider `twice`: is listed twice"),
        (String::new(), "has no provider"),
    ] {
        let ran = engine.run(&["provider", "apply", &write_provider_file(&dir, &text)]).await;
        let (error, exit) = ran.failure();
        assert!(error.contains(part) && error.contains("nothing was applied"), "{text}: {error}");
        assert_eq!((exit, engine.rows().await.len()), (Exit::BadConfiguration, 0), "{text}");
    }
}

#[tokio::test]
async fn apply_reports_undeclared_lanes() {
    let engine = Engine::new().await;
    engine.state().broker_unavailable = true;
    let dir = tempfile::tempdir().unwrap();
    let (error, exit) =
        engine.run(&["provider", "apply", &write_provider_file(&dir, &provider_text(&["acme"]))]).await.failure();
    assert!(error.contains("the rows are applied") && error.contains("broker unavailable"), "{error}");
    assert_eq!((exit, engine.rows().await.len()), (Exit::Failed, 1));
}

#[tokio::test]
async fn list_and_show_print_rows() {
    let engine = Engine::with_providers(&["acme", "other"]).await;
    let list = engine.run(&["provider", "list"]).await;
    let lines: Vec<Vec<&str>> = list.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0][..2], ["provider", "state"]);
    assert_eq!(lines[2][..2], ["other", "enabled"]);
    assert_eq!(engine.run(&["provider", "list", "--json"]).await.json()[1]["name"], "other");

    let show = engine.run(&["provider", "show", "acme"]).await.out;
    let pace = "# pace: up to 100/s (limit second); egress 100/s per process\n";
    assert!(show.starts_with(&format!("{pace}[[provider]]\nname = \"acme\"\n")), "{show}");
    assert_eq!(engine.run(&["provider", "show", "acme", "--json"]).await.json()["name"], "acme");
    let (error, exit) = engine.run(&["provider", "show", "nobody"]).await.failure();
    assert!(error.contains("no provider `nobody`") && exit == Exit::Failed, "{error}");

    let none = Engine::new().await.run(&["provider", "list"]).await;
    assert!(none.out.is_empty() && none.err.contains("provider apply"), "{}", none.err);
}

#[tokio::test]
async fn pause_and_resume_reach_the_database() {
    let engine = Engine::with_providers(&["acme"]).await;
    assert!(engine.run(&["provider", "pause", "acme"]).await.err.contains("acme is paused"));
    let json = engine.run(&["provider", "pause", "acme", "--json"]).await.json();
    assert_eq!(json, serde_json::json!({ "provider": "acme", "paused": true, "changed": false }));
    assert!(engine.run(&["provider", "resume", "acme"]).await.err.contains("acme is resumed"));
    let changes = engine.database.settings_audit(None, 2).await.unwrap();
    let changes: Vec<&str> = changes.iter().rev().map(|change| change.what.split(',').next().unwrap()).collect();
    assert_eq!(changes, ["paused false → true", "paused true → false"]);
    assert!(!engine.rows().await[0].paused);
    let (error, _) = engine.run(&["provider", "pause", "nobody"]).await.failure();
    assert!(error.contains("no provider `nobody`"), "{error}");
}

#[tokio::test]
async fn pause_of_all_says_what_it_did_and_did_not() {
    let engine = Engine::with_providers(&["acme", "bolt", "corp"]).await;
    engine.run(&["provider", "pause", "bolt"]).await;
    let said = engine.run(&["provider", "pause", "--all", "--because", "incident 12"]).await.err;
    assert!(said.contains("pause 1 of all providers: paused acme, corp;"), "{said}");
    assert!(said.contains("paused before: bolt; `sluicegate provider resume --all` leaves them paused"), "{said}");
    let json = engine.run(&["provider", "pause", "--all", "--json"]).await.json();
    let held = serde_json::json!({ "id": 1, "paused": [], "held": ["acme", "corp"], "paused_before": ["bolt"] });
    assert_eq!(json, held);
    let again = engine.run(&["provider", "pause", "--all"]).await.err;
    assert!(again.contains("pause 1 of all providers is in force already"), "{again}");
    assert!(engine.run(&["provider", "resume", "acme"]).await.err.contains("acme is resumed"));
    let said = engine.run(&["provider", "resume", "--all"]).await.err;
    for part in ["is over: resumed corp;", "resumed before: acme", "still paused, by another pause: bolt"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let said = engine.run(&["provider", "resume", "--all"]).await.err;
    assert!(said.contains("nothing is resumed: no pause of all providers is in force"), "{said}");
    let none = Engine::new().await.run(&["provider", "pause", "--all"]).await.err;
    assert!(none.contains("nothing to pause"), "{none}");
}

#[tokio::test]
async fn limits_set_prints_old_and_new() {
    let engine = Engine::with_providers(&["acme"]).await;
    let ran = engine.run(&["limits", "set", "acme", "second", "200/1s"]).await;
    assert_eq!(ran.out, "acme second: 100/1s → 200/1s\n");
    let json = engine.run(&["limits", "set", "acme", "second", "5/1m", "--json"]).await.json();
    assert_eq!((&json["from"], &json["to"]), (&"200/1s".into(), &"5/1m".into()));
    let (error, _) = engine.run(&["limits", "set", "acme", "minute", "1/1s"]).await.failure();
    assert!(error.contains("has no limit `minute`"), "{error}");
    let (error, _) = engine.run(&["limits", "set", "nobody", "minute", "1/1s"]).await.failure();
    assert!(error.contains("no provider `nobody`"), "{error}");
}

#[tokio::test]
async fn limits_list_shows_non_default_values() {
    let engine = Engine::new().await;
    let limit = |name: &str| LimitRow { name: name.into(), max_requests: 100, window_ms: 1_000, ..LimitRow::default() };
    let bucket = LimitRow { algorithm: "token_bucket".into(), burst: Some(7), ..limit("bucket") };
    let daily = LimitRow { algorithm: "fixed_window".into(), offset_ms: 500, shadow: true, ..limit("daily") };
    let each = LimitRow { scope: "account".into(), applies_to: "charge".into(), ..limit("each") };
    let limits = vec![limit("all"), bucket, daily, each];
    engine.set_rows(&[ProviderRow { limits, ..row("acme") }]).await;
    let list = engine.run(&["limits", "list"]).await.out;
    let lines: Vec<String> = list.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(
        lines,
        [
            "provider limit rate algorithm burst offset scope applies to state until then",
            "acme all 100/1s sliding_log provider all enabled",
            "acme bucket 100/1s token_bucket 7 provider all enabled",
            "acme daily 100/1s fixed_window 500ms provider all shadow",
            "acme each 100/1s sliding_log account charge enabled",
        ]
    );
    let json = engine.run(&["limits", "list", "--json"]).await.json();
    assert_eq!(
        (&json[1]["burst"], &json[3]["scope"], &json[3]["applies_to"]),
        (&7.into(), &"account".into(), &"charge".into())
    );
    assert_eq!((&json[0]["max_requests"], &json[0]["window_ms"]), (&100.into(), &1_000.into()));
    assert_eq!((&json[0]["burst"], &json[0]["offset"]), (&serde_json::Value::Null, &serde_json::Value::Null));
    let providers = engine.run(&["provider", "list"]).await.out;
    let limits = "100/1s; 100/1s, token_bucket with burst 7; 100/1s, fixed_window from 500ms, shadow; \
                  100/1s per account for charges";
    assert!(providers.contains(limits), "{providers}");
    let show = engine.run(&["provider", "show", "acme"]).await.out;
    assert!(show.contains("burst = 7\n") && show.contains("offset_ms = 500\n"), "{show}");
}

#[tokio::test]
async fn peek_reads_the_shared_store() {
    let engine = Engine::new().await;
    let mut scoped = row("scoped");
    scoped.limits.push(LimitRow { name: "each".into(), scope: "account".into(), ..scoped.limits[0].clone() });
    engine.set_rows(&[row("acme"), scoped, ProviderRow { enabled: false, ..row("off") }]).await;
    let peek = async |rest: &[&str]| {
        let line = [&["--set", "limiter.url=redis://localhost:6379", "limits", "peek"], rest].concat();
        engine.run(&line).await
    };
    let one = peek(&["acme", "--json"]).await.json()[0].take();
    assert_eq!((&one["allows"], &one["used"], &one["remaining"]), (&"100/1s".into(), &0.into(), &100.into()));
    // The limiter has had no call: its first call reads past usage from the ledger.
    assert!(one["retry_after_ms"].as_u64() > Some(1_000) && one["retry_after_ms"] == one["reset_after_ms"], "{one}");
    let table = peek(&["acme"]).await.out;
    assert!(["remaining", "retry after", "reset after"].iter().all(|column| table.contains(column)), "{table}");
    let scoped = peek(&["scoped", "--account", "a", "--json"]).await.json();
    assert_eq!(scoped.as_array().unwrap().len(), 2, "{scoped}");
    // Payments of an account wait also where no limit counts it.
    for provider in ["scoped", "acme"] {
        let text = peek(&[provider, "--account", "a"]).await.out;
        let waits = format!("\nno payment of account a waits in the backlog of {provider}\n");
        assert!(text.ends_with(&waits), "{text}");
    }
    for (rest, words) in
        [(&["nobody"][..], "there is no provider `nobody`"), (&["off"], "off is disabled: its limits are not counted")]
    {
        let (error, exit) = peek(rest).await.failure();
        assert!(error.contains(words) && exit == Exit::Failed, "{rest:?}: {error}");
    }
}

#[tokio::test]
async fn migrate_reports_whether_it_changed_anything() {
    let engine = Engine::new().await;
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}/ledger.db", dir.path().display());
    let set = format!("database.url={url}");
    let migrate = async |rest: &[&str]| engine.run(&[&["--set", &set, "migrate"], rest].concat()).await;
    let first = migrate(&[]).await;
    assert_eq!((first.out.as_str(), first.err), ("", format!("{url} is up to date now\n")));
    assert_eq!(migrate(&[]).await.err, format!("{url} was already up to date\n"));
    assert_eq!(migrate(&["--json"]).await.json(), serde_json::json!({ "database": url, "changed": false }));
}

#[tokio::test]
async fn unmigrated_database_error_names_migrate() {
    let (error, exit) = run_unmigrated(&["provider", "list"]).await.failure();
    assert!(error.contains("run `sluicegate migrate`") && exit == Exit::Failed, "{error}");
}

/// An unreadable row does not prevent operators from listing the others, or from paying with them.
#[tokio::test]
async fn unreadable_row_is_listed_beside_others() {
    let engine = Engine::with_providers(&["acme", "bolt"]).await;
    engine.sql("UPDATE providers SET statuses = '7' WHERE name = 'bolt'").await;
    for line in [["provider", "list"], ["limits", "list"]] {
        let ran = engine.run(&line).await;
        assert_eq!(ran.result.as_ref().unwrap(), &Exit::Failed, "{line:?}");
        let (problem, nothing) =
            ("column `statuses` is not a JSON object", "In force: nothing, because no worker runs");
        assert_eq!(ran.err, format!("the row of bolt cannot be used: {problem}. {nothing}\n"), "{line:?}");
    }
    let list = engine.run(&["provider", "list", "--json"]).await.json();
    assert_eq!((list.as_array().unwrap().len(), &list[0]["name"]), (1, &"acme".into()));
    let (error, _) = engine.run(&["provider", "show", "bolt"]).await.failure();
    assert!(
        error.contains("bolt cannot be used: column `statuses` is not a JSON object. In force: nothing"),
        "{error}"
    );
    let line = "enqueue --provider acme --amount 1 --currency EUR";
    assert_eq!(engine.run(&line.split(' ').collect::<Vec<_>>()).await.result.unwrap(), Exit::Success);
}
