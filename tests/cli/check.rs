//! `check` on embedded backends: each risk, mistake and failed backend is a finding with its level and a fix.

use sluicegate::cli::Exit;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::queue::TopologyProblem;

use crate::fakes::{Engine, provider_text, row, run_unmigrated, write_provider_file};

fn levels(json: &serde_json::Value, subject: &str) -> Vec<String> {
    let findings = json.as_array().unwrap().iter().filter(|finding| finding["subject"] == subject);
    findings.map(|finding| finding["level"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn check_without_findings_exits_with_0() {
    let engine = Engine::new().await;
    engine.set_rows(&[row("acme")]).await;
    let ran = engine.run(&["check"]).await;
    assert_eq!(ran.result.unwrap(), Exit::Success);
    assert!(ran.err.contains("errors: 0, warnings: 0"), "{}", ran.err);
    assert!(ran.out.contains("pace: up to 100/s (limit second); egress 100/s per process"), "{}", ran.out);
}

/// Rows of a quota share their limits, so the pace of one row follows from all of them.
#[tokio::test]
async fn check_says_the_pace_of_each_provider() {
    let engine = Engine::new().await;
    let second = row("acme").limits.remove(0);
    let day = LimitRow { name: "day".into(), max_requests: 100_000, window_ms: 86_400_000, ..second.clone() };
    let quota = Some("acme".to_owned());
    let other = ProviderRow { quota, leak_per_second: Some(20.0), limits: vec![second, day], ..row("other") };
    engine.set_rows(&[row("acme"), other]).await;
    let json = engine.run(&["check", "--json"]).await.json();
    let limits = "up to 100/s (limit second), 100000/1d over time (limit day)";
    for (subject, egress) in
        [("provider acme", "100/s per process"), ("provider other", "20/s per process (leak_per_second)")]
    {
        let found = finding(&json, subject);
        let what = format!("pace: {limits}; egress {egress}");
        assert_eq!((&found["level"], &found["what"]), (&"ok".into(), &what.into()));
    }
}

#[tokio::test]
async fn risky_settings_are_warnings_with_fixes() {
    let engine = Engine::new().await;
    let mut risky = row("acme");
    risky.idempotency_retention_s = None;
    risky.slot_release = "grant".to_owned();
    risky.transit_jitter_ms = 50;
    risky.store_down = "share".to_owned();
    risky.share_of = Some(2);
    risky.timeout_ms = 60_000;
    risky.limits.push(LimitRow { name: "shadow".into(), shadow: true, ..risky.limits[0].clone() });
    risky.limits[0].algorithm = "fixed_window".to_owned();
    risky.limits[0].max_requests = 0;
    risky.paused = true;
    engine.set_rows(&[risky]).await;
    let ran = engine.run(&["check", "--json", "--set", "worker.card_numbers=off", "--set", "ops.listen=none"]).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Success);
    // The last is the pace.
    assert_eq!(levels(&ran.json(), "provider acme"), [&["warning"; 7][..], &["ok"]].concat());
    assert_eq!(levels(&ran.json(), "configuration worker.card_numbers"), ["warning"]);
    assert_eq!(levels(&ran.json(), "configuration ops.listen"), ["warning"]);
    assert!(ran.json().as_array().unwrap().iter().all(|f| f["level"] == "ok" || f["fix"].is_string()));
}

#[tokio::test]
async fn bypassable_limit_warns_and_names_the_field() {
    let engine = Engine::new().await;
    for field in ["account", "reference"] {
        let mut counting = row("acme");
        let own = LimitRow { name: "own".into(), scope: field.into(), ..counting.limits[0].clone() };
        counting.limits.push(own);
        engine.set_rows(&[counting.clone()]).await;
        let found = finding(&engine.run(&["check", "--json"]).await.json(), "provider acme");
        let uncounted = format!("limit own counts by {field}: it does not count a message without {field}");
        assert_eq!((&found["level"], &found["what"]), (&"warning".into(), &uncounted.into()));
        assert!(found["fix"].as_str().unwrap().contains(&format!("require = [\"{field}\"]")), "{found}");

        let required = ProviderRow { require: vec![field.into()], ..counting.clone() };
        let mut shadow = ProviderRow { name: "bolt".to_owned(), ..counting };
        shadow.limits[1].shadow = true;
        engine.set_rows(&[required, shadow]).await;
        let json = engine.run(&["check", "--json"]).await.json();
        assert_eq!([levels(&json, "provider acme"), levels(&json, "provider bolt")], [["ok"], ["ok"]]);
    }
}

#[tokio::test]
async fn header_outside_title_case_is_named() {
    let engine = Engine::new().await;
    let headers = [("X-Tenant", "one"), ("X-API-Version", "2")].map(|(name, value)| (name.to_owned(), value.into()));
    engine.set_rows(&[ProviderRow { headers: headers.into_iter().collect(), ..row("acme") }]).await;
    let ran = engine.run(&["check"]).await;
    let spelled = "header `X-API-Version` is sent as the row spells it; title case would be `X-Api-Version`";
    assert!(ran.out.contains(spelled) && !ran.out.contains("X-Tenant"), "{}", ran.out);
    assert!(ran.err.contains("errors: 0, warnings: 0"), "{}", ran.err);
}

#[tokio::test]
async fn order_of_accounts_needs_accounts() {
    let engine = Engine::new().await;
    let ordered = ProviderRow { order: "account".to_owned(), ..row("acme") };
    engine.set_rows(std::slice::from_ref(&ordered)).await;
    let found = finding(&engine.run(&["check", "--json"]).await.json(), "provider acme");
    assert_eq!(
        (&found["level"], &found["what"]),
        (&"warning".into(), &"order = account keeps no order of messages without account".into())
    );
    engine.set_rows(&[ProviderRow { require: vec!["account".into()], ..ordered }]).await;
    assert_eq!(levels(&engine.run(&["check", "--json"]).await.json(), "provider acme"), ["ok"]);
}

#[tokio::test]
async fn guessable_token_is_a_warning() {
    let engine = Engine::new().await;
    for (listen, token, wanted) in [
        ("0.0.0.0:9464", "abababababababababababababababab", vec!["warning"]),
        ("0.0.0.0:9464", "0123456789abcdef0123456789abcdef", vec![]),
        ("127.0.0.1:9464", "tr0ub4dor", vec![]),
    ] {
        let variables = [("SLUICEGATE_OPS__LISTEN", listen), ("SLUICEGATE_OPS__TOKEN", token)];
        let ran = engine.run_with(&variables, &["check", "--json"]).await;
        assert_eq!(levels(&ran.json(), "configuration ops.token"), wanted, "{listen} {token}");
        assert!(!ran.out.contains(token));
    }
}

/// `run` and `check` both reject it and do not print it.
#[test]
fn a_short_token_off_loopback_stops_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let program = |command: &str, listen: &str, token: &str| {
        let mut program = std::process::Command::new(assert_cmd::cargo::cargo_bin("sluicegate"));
        program.env_clear().current_dir(dir.path()).env("SLUICEGATE_OPS__TOKEN", token);
        let output = program.args(["--set", listen, command]).output().unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    for command in ["run", "check"] {
        for (listen, token, length) in
            [("0.0.0.0:9464", "hunter2", 7), ("[::]:9464", "0123456789abcdef0123456789abcde", 31)]
        {
            let (code, output) = program(command, &format!("ops.listen={listen}"), token);
            assert_eq!(code, Some(78), "{command} {listen}: {output}");
            let problem = format!("has {length} characters, and {listen} is reachable from other machines");
            assert!(output.contains("ops.token") && output.contains(&problem), "{output}");
            assert!(output.contains("at least 32") && output.contains("openssl rand -hex 24"), "{output}");
            assert!(!output.contains(token), "{output}");
        }
    }
    let (code, output) = program("check", "ops.listen=127.0.0.1:9464", "hunter2");
    assert!(!output.contains("ops.token") && code != Some(78), "{code:?} {output}");
}

/// `run` and `check` name every problem at once, and no secret.
#[test]
fn unusable_named_tokens_stop_the_start() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let good = "0123456789abcdef0123456789abcdef";
    for (name, secret, mode) in
        [("short", "hunter2", 0o600), ("good", good, 0o600), ("same", good, 0o600), ("open", good, 0o666)]
    {
        let path = dir.path().join(name);
        std::fs::write(&path, secret).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let table = |name: &str| {
        let path = dir.path().join(name);
        format!("[[ops.tokens]]\nname = \"{name}\"\nrole = \"viewer\"\nsecret = \"file:{}\"\n", path.display())
    };
    let file = dir.path().join("sluicegate.toml");
    let run = |command: &str, tables: String| {
        std::fs::write(&file, tables).unwrap();
        let mut program = std::process::Command::new(assert_cmd::cargo::cargo_bin("sluicegate"));
        program.env_clear().current_dir(dir.path()).env("SLUICEGATE_CONFIG", &file);
        let output = program.args(["--set", "ops.listen=127.0.0.1:0", command]).output().unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    for command in ["run", "check"] {
        let (code, output) = run(command, ["short", "good", "same", "open", "missing"].map(table).concat());
        assert_eq!(code, Some(if command == "run" { 78 } else { 1 }), "{command}: {output}");
        // A table of `check` wraps its lines.
        let words = output.split_whitespace().collect::<Vec<_>>().join(" ");
        for problem in ["`short`", "has 7 characters", "`same`", "has the secret of `good`", "`open`", "`missing`"] {
            assert!(words.contains(problem), "{command} {problem}: {output}");
        }
        assert!(words.contains("ops.tokens") && !output.contains("hunter2") && !output.contains(good), "{output}");
        let (code, output) = run(command, format!("{}{}", table("good"), table("good")));
        assert_eq!(code, Some(78), "{command}: {output}");
        assert!(output.contains("the name `good` is there twice"), "{output}");
    }
}

/// A request that starts just before the drain must get its response before the drain ends.
#[tokio::test]
async fn a_drain_must_be_longer_than_any_request() {
    let engine = Engine::new().await;
    for (timeout_ms, drain_ms, wanted) in
        [(30_000, 30_000, vec!["warning", "ok"]), (29_500, 30_000, vec!["warning", "ok"]), (29_499, 30_000, vec!["ok"])]
    {
        engine.set_rows(&[ProviderRow { timeout_ms, ..row("acme") }]).await;
        let drain = format!("worker.drain_timeout_ms={drain_ms}");
        let ran = engine.run(&["check", "--json", "--set", &drain]).await;
        assert_eq!(levels(&ran.json(), "provider acme"), wanted, "{timeout_ms}");
    }
}

#[tokio::test]
async fn failing_backends_and_invalid_rows_are_errors() {
    let engine = Engine::new().await;
    engine.set_rows(&[row("bad")]).await;
    engine.sql("UPDATE providers SET url = ''").await;
    engine.state().broker_unavailable = true;
    let ran = engine.run(&["check", "--json"]).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Failed);
    assert_eq!(levels(&ran.json(), "provider bad"), ["error"]);
    assert_eq!(levels(&ran.json(), "queue embedded:"), ["error"]);

    let ran = run_unmigrated(&["check"]).await;
    assert!(ran.out.contains("run `sluicegate migrate`"), "{}", ran.out);
    let offline = run_unmigrated(&["check", "--no-connect"]).await;
    assert_eq!(offline.result.unwrap(), Exit::Success);
}

#[tokio::test]
async fn unreadable_secret_is_an_error_or_warning() {
    let engine = Engine::new().await;
    let mut sending = row("acme");
    sending.headers.insert("X".to_owned(), "${env:ACME_API_KEY}".into());
    engine.set_rows(std::slice::from_ref(&sending)).await;
    let grant = ["--set", "outbound.secrets=env:ACME_API_KEY@pay.example.com"];
    let ran = engine.run(&[&grant[..], &["check", "--json"]].concat()).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Failed);
    let json = ran.json();
    let found = json.as_array().unwrap().iter().find(|found| found["level"] == "error").unwrap();
    assert_eq!(found["subject"], "provider acme");
    assert_eq!(found["what"], "not readable here: header `x`: environment variable `ACME_API_KEY` is not set");
    assert!(found["fix"].as_str().unwrap().contains("as the worker's user"), "{found}");

    // A file can be checked before deployment, on a machine without the workers' secrets.
    let dir = tempfile::tempdir().unwrap();
    let headers = "\n[provider.headers]\nX = \"${env:ACME_API_KEY}\"\n";
    let file = write_provider_file(
        &dir,
        &provider_text(&["acme"]).replacen("\n[[provider.limit]]", &format!("{headers}\n[[provider.limit]]"), 1),
    );
    let line = ["check", "--no-connect", "--providers", &file, "--json"];
    let ran = engine.run(&[&grant[..], &line].concat()).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Success);
    assert_eq!(levels(&ran.json(), "provider acme"), ["ok", "warning"]);

    engine.set_rows(&[ProviderRow { enabled: false, ..sending }]).await;
    assert_eq!(engine.run(&[&grant[..], &["check"]].concat()).await.result.unwrap(), Exit::Success);
}

#[tokio::test]
async fn check_lists_secret_grants_and_unused_ones() {
    let engine = Engine::new().await;
    let sending = |name: &str| {
        let mut sending = row(name);
        sending.headers.insert("authorization".to_owned(), "${env:KEY}".into());
        sending
    };
    engine.set_rows(&[sending("bolt"), sending("acme"), row("plain")]).await;
    let set = "outbound.secrets=env:KEY@pay.example.com,env:OLD@pay.example.com,env:KEY@*.example.org";
    let line = ["check", "--json", "--set", set];
    let json = engine.run(&line).await.json();
    let found = finding(&json, "secret env:KEY@pay.example.com");
    assert_eq!((&found["level"], &found["what"]), (&"ok".into(), &"sent by acme, bolt".into()));
    for unused in ["secret env:OLD@pay.example.com", "secret env:KEY@*.example.org"] {
        let found = finding(&json, unused);
        assert_eq!((&found["level"], &found["what"]), (&"warning".into(), &"no provider's row sends it".into()));
        assert!(found["fix"].as_str().unwrap().contains("outbound.secrets"), "{found}");
    }
    // A grant is not reported as unused before all rows are known.
    let json = run_unmigrated(&line).await.json();
    assert_eq!(levels(&json, "secret env:OLD@pay.example.com"), ["ok"]);
}

const BROKER: &str = "queue.url=amqps://broker.example.com";

fn finding(json: &serde_json::Value, subject: &str) -> serde_json::Value {
    json.as_array().unwrap().iter().find(|finding| finding["subject"] == subject).unwrap().clone()
}

#[tokio::test]
async fn missing_lane_queue_is_an_error_with_fix() {
    let engine = Engine::new().await;
    engine.set_rows(&["there", "missing", "secret"].map(row)).await;
    engine.state().lanes_missing = vec!["missing".to_owned()];
    engine.state().lanes_refused = vec!["secret".to_owned()];
    let ran = engine.run(&["check", "--json", "--set", BROKER]).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Failed);
    let json = ran.json();
    assert_eq!(levels(&json, "lane there"), Vec::<String>::new());
    for (subject, what, fix) in [
        ("lane missing", "no queue", "sluicegate provider apply FILE"),
        ("lane secret", "ACCESS_REFUSED", "Give the user of queue.url the rights"),
    ] {
        let found = finding(&json, subject);
        assert_eq!(found["level"], "error");
        assert!(found["what"].as_str().unwrap().contains(what), "{found}");
        assert!(found["fix"].as_str().unwrap().contains(fix), "{found}");
    }
}

#[tokio::test]
async fn unfit_topology_is_an_error() {
    let engine = Engine::new().await;
    engine.set_rows(&[row("acme")]).await;
    engine.state().unfit = vec![TopologyProblem::Missing("queue `payments.dead` is not there".to_owned())];
    let ran = engine.run(&["check", "--json", "--set", BROKER]).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Failed);
    let found = finding(&ran.json(), "queues and exchanges");
    assert_eq!((&found["level"], &found["what"]), (&"error".into(), &"queue `payments.dead` is not there".into()));
}

#[tokio::test]
async fn delivery_timeout_is_checked_against_message_time() {
    let engine = Engine::new().await;
    engine.set_rows(&[row("acme"), ProviderRow { timeout_ms: 90_000, ..row("slow") }]).await;
    let line = ["check", "--json", "--set", BROKER, "--set", "worker.drain_timeout_ms=2000000"];
    let ran = engine.run(&line).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Success);
    let found = finding(&ran.json(), "broker's delivery timeout");
    assert_eq!(found["level"], "ok");
    let what = found["what"].as_str().unwrap();
    // 90 s, 5 s and 0.5 s make 95.5 s.
    assert!(what.contains("AMQP cannot read it") && what.contains("above 2 minutes"), "{what}");

    let embedded = engine.run(&["check", "--json"]).await.json();
    assert_eq!(levels(&embedded, "broker's delivery timeout"), Vec::<String>::new());
}

#[tokio::test]
async fn provider_file_is_checked_without_a_database() {
    let dir = tempfile::tempdir().unwrap();
    let file = write_provider_file(&dir, &provider_text(&["acme"]));
    let line = ["check", "--no-connect", "--providers", &file, "--json"];
    let ran = run_unmigrated(&line).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Success);
    assert_eq!(levels(&ran.json(), "provider acme"), ["ok"]);
    write_provider_file(&dir, "bad line");
    assert_eq!(run_unmigrated(&line).await.result.unwrap(), Exit::BadConfiguration);
}
