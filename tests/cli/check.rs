//! `check` with recorded backends: each risk, mistake and failed backend is a finding with its level and a fix.

use std::collections::BTreeMap;
use std::time::Duration;

use sluicegate::cli::Exit;
use sluicegate::domain::backoff::BackoffPolicy;
use sluicegate::domain::job::JobField;
use sluicegate::domain::limit::{Algorithm, AppliesTo, Limit, Scope};
use sluicegate::domain::provider::{
    JobOrder, Mode, Pacing, Provider, ProviderName, RequestShape, SlotRelease, StoreDown,
};
use sluicegate::ledger::settings::InvalidRow;
use sluicegate::queue::TopologyProblem;

use crate::fakes::Engine;

/// A provider without any finding.
pub fn provider() -> Provider {
    let name = ProviderName::new("acme").unwrap();
    Provider {
        quota: name.clone(),
        name,
        enabled: true,
        paused: false,
        url: "https://pay.example.com".to_owned(),
        mode: Mode::Blocking,
        slot_release: SlotRelease::Response,
        pacing: Pacing::Burst,
        reserve_percent: 0,
        store_down: StoreDown::Wait,
        timeout: Duration::from_secs(10),
        send_budget: Duration::from_millis(500),
        connection_max_age: Duration::from_secs(60),
        reuse_connections: None,
        workers: 32,
        bucket_capacity: 256,
        leak_per_second: None,
        max_wait: Duration::from_secs(5),
        max_attempts: 8,
        max_age: Duration::from_secs(259_200),
        backoff: BackoffPolicy { base: Duration::from_millis(500), max: Duration::from_secs(60) },
        idempotency_retention: Some(Duration::from_secs(86_400)),
        headers: BTreeMap::new(),
        request: RequestShape::default(),
        statuses: BTreeMap::new(),
        lookup: None,
        require: Default::default(),
        order: JobOrder::None,
        resumed_at: 0,
        version: 1,
        limits: vec![Limit {
            name: "second".to_owned(),
            algorithm: Algorithm::SlidingLog,
            rate: "100/1s".parse().unwrap(),
            offset: Duration::ZERO,
            burst: None,
            scope: Scope::Provider,
            applies_to: AppliesTo::All,
            shadow: false,
        }],
        account_rules: Vec::new(),
    }
}

fn levels(json: &serde_json::Value, subject: &str) -> Vec<String> {
    let findings = json.as_array().unwrap().iter().filter(|finding| finding["subject"] == subject);
    findings.map(|finding| finding["level"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn check_without_findings_exits_with_0() {
    let engine = Engine::default();
    engine.state().meant = vec![provider()];
    let ran = engine.run(&["check"]).await;
    assert_eq!(ran.result.unwrap(), Exit::Success);
    assert!(ran.err.contains("errors: 0, warnings: 0"), "{}", ran.err);
    assert!(ran.out.contains("pace: up to 100/s (limit second); egress 100/s per process"), "{}", ran.out);
}

/// Rows of a quota share their limits, so the pace of one row follows from all of them.
#[tokio::test]
async fn check_says_the_pace_of_each_provider() {
    let engine = Engine::default();
    let day = Limit { name: "day".to_owned(), rate: "100000/1d".parse().unwrap(), ..provider().limits[0].clone() };
    let other = Provider {
        name: ProviderName::new("other").unwrap(),
        leak_per_second: Some(20.0),
        limits: vec![provider().limits[0].clone(), day],
        ..provider()
    };
    engine.state().meant = vec![provider(), other];
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
    let engine = Engine::default();
    let mut risky = provider();
    risky.idempotency_retention = None;
    risky.slot_release = SlotRelease::Grant { transit_jitter: Duration::from_millis(50) };
    risky.store_down = StoreDown::Share { workers: 2 };
    risky.timeout = Duration::from_secs(60);
    risky.limits[0].algorithm = Algorithm::FixedWindow;
    risky.limits[0].shadow = true;
    risky.limits[0].rate = "0/1s".parse().unwrap();
    risky.paused = true;
    engine.state().meant = vec![risky];
    let ran = engine.run(&["check", "--json", "--set", "worker.card_numbers=off", "--set", "ops.listen=none"]).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Success);
    assert_eq!(levels(&ran.json(), "provider acme"), ["warning"; 8]);
    assert_eq!(levels(&ran.json(), "configuration worker.card_numbers"), ["warning"]);
    assert_eq!(levels(&ran.json(), "configuration ops.listen"), ["warning"]);
    assert!(ran.json().as_array().unwrap().iter().all(|f| f["level"] == "ok" || f["fix"].is_string()));
}

#[tokio::test]
async fn bypassable_limit_warns_and_names_the_field() {
    let engine = Engine::default();
    for (scope, field) in [(Scope::Account, "account"), (Scope::Reference, "reference")] {
        let mut counting = provider();
        let own = Limit { name: "own".to_owned(), scope, ..counting.limits[0].clone() };
        counting.limits.push(own);
        engine.state().meant = vec![counting.clone()];
        let found = finding(&engine.run(&["check", "--json"]).await.json(), "provider acme");
        let uncounted = format!("limit own counts by {field}: it does not count a message without {field}");
        assert_eq!((&found["level"], &found["what"]), (&"warning".into(), &uncounted.into()));
        assert!(found["fix"].as_str().unwrap().contains(&format!("require = [\"{field}\"]")), "{found}");

        let job_field =
            [JobField::Account, JobField::Reference].into_iter().find(|candidate| candidate.name() == field).unwrap();
        let required = Provider { require: [job_field].into(), ..counting.clone() };
        counting.limits[1].shadow = true;
        engine.state().meant = vec![required, counting];
        assert_eq!(levels(&engine.run(&["check", "--json"]).await.json(), "provider acme"), ["ok", "ok"]);
    }
}

#[tokio::test]
async fn order_of_accounts_needs_accounts() {
    let engine = Engine::default();
    let ordered = Provider { order: JobOrder::Account, ..provider() };
    engine.state().meant = vec![ordered.clone()];
    let found = finding(&engine.run(&["check", "--json"]).await.json(), "provider acme");
    assert_eq!(
        (&found["level"], &found["what"]),
        (&"warning".into(), &"order = account keeps no order of messages without account".into())
    );
    engine.state().meant = vec![Provider { require: [JobField::Account].into(), ..ordered }];
    assert_eq!(levels(&engine.run(&["check", "--json"]).await.json(), "provider acme"), ["ok"]);
}

#[tokio::test]
async fn guessable_token_is_a_warning() {
    let engine = Engine::default();
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

/// A request that starts just before the drain must get its response before the drain ends.
#[tokio::test]
async fn a_drain_must_be_longer_than_any_request() {
    let engine = Engine::default();
    for (timeout, drain_ms, wanted) in
        [(30_000, 30_000, vec!["warning", "ok"]), (29_500, 30_000, vec!["warning", "ok"]), (29_499, 30_000, vec!["ok"])]
    {
        engine.state().meant = vec![Provider { timeout: Duration::from_millis(timeout), ..provider() }];
        let drain = format!("worker.drain_timeout_ms={drain_ms}");
        let ran = engine.run(&["check", "--json", "--set", &drain]).await;
        assert_eq!(levels(&ran.json(), "provider acme"), wanted, "{timeout}");
    }
}

#[tokio::test]
async fn failing_backends_and_invalid_rows_are_errors() {
    let engine = Engine::default();
    engine.state().bad_rows = vec![InvalidRow {
        provider: "bad".to_owned(),
        quota: "bad".to_owned(),
        enabled: true,
        paused: false,
        problems: vec!["url: is empty".to_owned()],
    }];
    engine.state().broker_unavailable = true;
    let ran = engine.run(&["check", "--json"]).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Failed);
    assert_eq!(levels(&ran.json(), "provider bad"), ["error"]);
    assert_eq!(levels(&ran.json(), "queue embedded:"), ["error"]);

    engine.state().database_unavailable = true;
    let ran = engine.run(&["check"]).await;
    assert!(ran.out.contains("run `sluicegate migrate`"), "{}", ran.out);
    let offline = engine.run(&["check", "--no-connect"]).await;
    assert_eq!(offline.result.unwrap(), Exit::Success);
}

#[tokio::test]
async fn unreadable_secret_is_an_error_or_warning() {
    let engine = Engine::default();
    engine.state().meant = vec![provider()];
    engine.state().secrets_missing = vec!["ACME_API_KEY".to_owned()];
    let ran = engine.run(&["check", "--json"]).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Failed);
    let json = ran.json();
    let found = json.as_array().unwrap().iter().find(|found| found["level"] == "error").unwrap();
    assert_eq!(found["subject"], "provider acme");
    assert_eq!(found["what"], "not readable here: header `x`: `ACME_API_KEY` is not set");
    assert!(found["fix"].as_str().unwrap().contains("as the worker's user"), "{found}");

    // A file can be checked before deployment, on a machine without the workers' secrets.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("providers.toml");
    std::fs::write(&path, "acme").unwrap();
    let ran = engine.run(&["check", "--no-connect", "--providers", path.to_str().unwrap(), "--json"]).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Success);
    assert_eq!(levels(&ran.json(), "provider acme"), ["ok", "warning"]);

    engine.state().meant = vec![Provider { enabled: false, ..provider() }];
    assert_eq!(engine.run(&["check"]).await.result.unwrap(), Exit::Success);
}

#[tokio::test]
async fn check_lists_secret_grants_and_unused_ones() {
    let engine = Engine::default();
    let named = |name: &str| Provider {
        name: ProviderName::new(name).unwrap(),
        headers: [("authorization".to_owned(), "${env:KEY}".to_owned())].into(),
        ..provider()
    };
    engine.state().meant = vec![named("bolt"), named("acme"), provider()];
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
    engine.state().database_unavailable = true;
    let json = engine.run(&line).await.json();
    assert_eq!(levels(&json, "secret env:OLD@pay.example.com"), ["ok"]);
}

const BROKER: &str = "queue.url=amqps://broker.example.com";

fn finding(json: &serde_json::Value, subject: &str) -> serde_json::Value {
    json.as_array().unwrap().iter().find(|finding| finding["subject"] == subject).unwrap().clone()
}

#[tokio::test]
async fn missing_lane_queue_is_an_error_with_fix() {
    let engine = Engine::default();
    let named = |name: &str| Provider { name: ProviderName::new(name).unwrap(), ..provider() };
    engine.state().meant = vec![named("there"), named("missing"), named("secret")];
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
    let engine = Engine::default();
    engine.state().meant = vec![provider()];
    engine.state().unfit = vec![TopologyProblem::Missing("queue `payments.dead` is not there".to_owned())];
    let ran = engine.run(&["check", "--json", "--set", BROKER]).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Failed);
    let found = finding(&ran.json(), "queues and exchanges");
    assert_eq!((&found["level"], &found["what"]), (&"error".into(), &"queue `payments.dead` is not there".into()));
}

#[tokio::test]
async fn delivery_timeout_is_checked_against_message_time() {
    let engine = Engine::default();
    let slow = Provider { timeout: Duration::from_secs(90), ..provider() };
    engine.state().meant = vec![provider(), slow];
    let line = ["check", "--json", "--set", BROKER, "--set", "worker.drain_timeout_ms=2000000"];
    let ran = engine.run(&line).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Success);
    let found = finding(&ran.json(), "broker's delivery timeout");
    assert_eq!(found["level"], "ok");
    let what = found["what"].as_str().unwrap();
    // 90 s, 5 s and 0.5 s make 95.5 s.
    assert!(what.contains("AMQP cannot read it") && what.contains("above 2 minutes"), "{what}");

    let long = Duration::from_secs(899);
    engine.state().meant = vec![Provider { timeout: long, ..provider() }, provider()];
    let found = finding(&engine.run(&line).await.json(), "broker's delivery timeout");
    assert_eq!(found["level"], "warning");
    assert!(found["what"].as_str().unwrap().contains("provider acme") && found["fix"].is_string(), "{found}");

    let embedded = engine.run(&["check", "--json"]).await.json();
    assert_eq!(levels(&embedded, "broker's delivery timeout"), Vec::<String>::new());
}

#[tokio::test]
async fn provider_file_is_checked_without_a_database() {
    let engine = Engine::default();
    engine.state().database_unavailable = true;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("providers.toml");
    std::fs::write(&path, "acme").unwrap();
    let file = path.to_str().unwrap();
    let line = ["check", "--no-connect", "--providers", file, "--json"];
    let ran = engine.run(&line).await;
    assert_eq!(*ran.result.as_ref().unwrap(), Exit::Success);
    assert_eq!(levels(&ran.json(), "provider acme"), ["ok"]);
    std::fs::write(&path, "bad line").unwrap();
    assert_eq!(engine.run(&line).await.result.unwrap(), Exit::BadConfiguration);
}
