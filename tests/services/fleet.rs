//! Two workers on real backends, as any of them reports both: the overview accounts for all payments. A killed worker
//! is reported as lost, and a drained one is no longer listed. `status` shows the same.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const PATIENCE: Duration = Duration::from_secs(60);

const ROWS: &str = r#"
[[provider]]
name = "acme"
url = "{url:acme}"
timeout_ms = 2000
idempotency_retention_s = 86400
[[provider.limit]]
name = "per-second"
max_requests = 40
window_ms = 1000

[[provider]]
name = "shut"
url = "{url:acme}"
paused = true
[[provider.limit]]
name = "per-minute"
max_requests = 60
window_ms = 60000
"#;

async fn ask(stand: &Stand, number: usize, path: &str) -> Value {
    let url = format!("{}{path}", stand.ops_url(number));
    let answer =
        reqwest::Client::builder().no_proxy().tls_certs_only([]).build().unwrap().get(url).send().await.unwrap();
    answer.json().await.unwrap()
}

async fn until<T>(what: &str, condition: impl AsyncFn() -> Result<T, Value>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let seen = match condition().await {
            Ok(found) => return found,
            Err(seen) => seen,
        };
        assert!(Instant::now() < deadline, "{what}: {seen:#}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn states(workers: &Value) -> BTreeSet<String> {
    let lines = workers["workers"].as_array().unwrap().iter();
    lines.map(|worker| worker["state"].as_str().unwrap().to_owned()).collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a number"))
}

/// Payments of a provider in all places of the overview: each is in exactly one.
fn in_sight(provider: &Value) -> u64 {
    let places = ["waiting", "in_flight", "succeeded", "declined", "review", "dead", "expired", "cancelled"];
    places.iter().map(|place| number(&provider[place])).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_worker_reports_the_whole_fleet() {
    rustls::crypto::ring::default_provider().install_default().ok();
    let mut stand = Stand::start();
    let limits = vec!["40/1s".parse().unwrap()];
    stand.add_provider("acme", FakeOptions { limits, ..FakeOptions::default() }).await;
    stand.apply(ROWS);
    let (one, two) = (stand.add_worker(), stand.add_worker());
    until("both workers are ready, with their lanes open", async || {
        let workers = ask(&stand, one, "/api/v1/workers").await;
        let both = workers["workers"].as_array().unwrap();
        // A worker reports before its lanes are open.
        let open = both.len() == 2 && both.iter().all(|worker| worker["lanes"] == json!(2));
        let ready = states(&workers) == BTreeSet::from(["ready".to_owned()]);
        if open && ready { Ok(()) } else { Err(workers) }
    })
    .await;
    let workers = ask(&stand, two, "/api/v1/workers").await;
    for worker in workers["workers"].as_array().unwrap() {
        let engines = &worker["backends"];
        let kinds = ["database", "queue", "limiter"].map(|name| engines[name]["kind"].as_str().unwrap());
        assert_eq!(kinds, ["postgres", "rabbitmq", "redis"]);
        for name in ["database", "queue", "limiter"] {
            let version =
                engines[name]["version"].as_str().unwrap_or_else(|| panic!("{name} has no version: {engines}"));
            let numbers = version.split('.').filter(|part| part.parse::<u32>().is_ok()).count();
            assert!(numbers >= 2, "{name} is {version:?}");
        }
        assert!(["database", "queue", "limiter"].iter().all(|name| engines[name]["ok"] == json!(true)), "{engines}");
        assert_eq!(worker["warnings"], json!([]));
    }

    let jobs: Vec<Value> = (0..600)
        .map(|n| json!({"key": "acme", "body": json!({"id": format!("a-{n}"), "amount": 100, "currency": "EUR"}).to_string()}))
        .chain((0..5).map(|n| json!({"key": "shut", "body": json!({"id": format!("s-{n}"), "amount": 100, "currency": "EUR"}).to_string()})))
        .collect();
    // Published while the lane is paused: a slow producer leaves it as much to do.
    stand.sluicegate(&["provider", "pause", "acme"]);
    assert_eq!(stand.publish(&jobs), 605);
    stand.sluicegate(&["provider", "resume", "acme"]);
    both_report_the_same_work(&stand, one, two).await;
    // Queue depths are read at intervals.
    let overview = until("the payments of the paused lane are counted", async || {
        let overview = ask(&stand, one, "/api/v1/overview").await;
        if overview["providers"][1]["waiting"] == json!(5) { Ok(overview) } else { Err(overview) }
    })
    .await;
    let shut = &overview["providers"][1];
    assert_eq!((&shut["state"], &shut["clears"]["kind"]), (&json!("paused"), &json!("not_while_paused")));
    assert_eq!(overview["warnings"], json!([]), "{overview:#}");

    the_terminal_tells_it_too(&stand, two).await;
    a_killed_worker_is_lost(&mut stand, one, two).await;
    a_provider_has_its_page(&stand, one).await;

    // A drained worker deletes its row; then the command reads the database alone.
    let fallback = stand.sluicegate(&["status", "--json"]);
    let fallback: Value = serde_json::from_str(&fallback).unwrap();
    assert_eq!(fallback["providers"][0]["succeeded"], json!(600));
    stand.stop_worker(one);
    let left = stand.count("SELECT count(*) FROM worker_reports");
    assert_eq!(left, 1, "the killed worker's row stays for a day");
    let without_workers: Value = serde_json::from_str(&stand.sluicegate(&["status", "--json"])).unwrap();
    assert_eq!(without_workers["providers"][0]["state"], json!("no_worker"));
}

/// The requests of both are one rate, below one limit.
async fn both_report_the_same_work(stand: &Stand, one: usize, two: usize) {
    let both = until("both work", async || {
        let mut both = Vec::new();
        for number_of in [one, two] {
            let overview = ask(stand, number_of, "/api/v1/overview").await;
            let acme = overview["providers"][0].clone();
            let busy = acme["state"] == "running" && acme["rate_per_s"].as_f64().unwrap() > 10.0;
            let waits = acme["clears"]["ms"].as_u64().is_some_and(|ms| ms > 0);
            if !(busy && waits && number(&acme["succeeded"]) > 0) {
                return Err(overview);
            }
            both.push(acme);
        }
        Ok(both)
    })
    .await;
    for acme in both {
        assert!(acme["rate_per_s"].as_f64().unwrap() <= 44.0, "{acme}");
        assert_eq!((&acme["limit_per_s"], &acme["refused_by_provider"]), (&json!(40.0), &json!(0)));
        assert!(number(&acme["limits"][0]["used"]) + number(&acme["limits"][0]["remaining"]) >= 40, "{acme}");
    }
}

async fn the_terminal_tells_it_too(stand: &Stand, worker: usize) {
    let table = stand.status_of(worker, &["status"]);
    assert!(table.contains(" accounted for") && table.contains("40/1s"), "{table}");
    let paused = table.lines().find(|line| line.contains(" paused it at ")).unwrap_or_default();
    assert!(paused.contains("└ ") && paused.ends_with(": its payments are recorded and wait"), "{table}");

    // In a pipe: one table every two seconds, until the command is interrupted.
    let watching = stand.program_of(worker, &["status", "--watch"]);
    until("two tables", async || {
        let log = watching.log_text();
        if log.matches(" accounted for").count() >= 2 { Ok(()) } else { Err(json!(log)) }
    })
    .await;
    watching.signal("INT");
    let (code, log) = watching.ended();
    assert_eq!((code, log.contains('\u{1b}')), (Some(0), false), "{log}");
}

async fn a_killed_worker_is_lost(stand: &mut Stand, one: usize, two: usize) {
    // A killed worker is reported as lost, and the other worker finishes all jobs.
    stand.kill_worker(two);
    until("the killed worker is reported as lost", async || {
        let workers = ask(stand, one, "/api/v1/workers").await;
        if states(&workers).contains("lost") { Ok(()) } else { Err(workers) }
    })
    .await;
    until("all payments are accounted for in the end", async || {
        let overview = ask(stand, one, "/api/v1/overview").await;
        let acme = &overview["providers"][0];
        let done = number(&acme["succeeded"]) == 600 && in_sight(acme) == 600 && acme["state"] == "idle";
        let reconciles =
            overview["reconciliation"].as_array().unwrap().iter().all(|entry| entry["faults"] == json!([]));
        if done && reconciles { Ok(()) } else { Err(overview) }
    })
    .await;
    let lost = ask(stand, one, "/api/v1/overview").await["warnings"].to_string();
    assert!(lost.contains("is lost: it has not reported for"), "{lost}");
}

async fn a_provider_has_its_page(stand: &Stand, one: usize) {
    let page = ask(stand, one, "/api/v1/providers/acme").await;
    assert_eq!((&page["overview"]["name"], &page["row"]["name"]), (&json!("acme"), &json!("acme")));
    assert!(page["waits"]["counts"].as_array().unwrap().iter().map(number).sum::<u64>() > 0, "{page}");
    assert!(page["decisions"].as_array().is_some_and(|lines| !lines.is_empty()), "{page}");
    let history = ask(stand, one, "/api/v1/providers/acme/history?seconds=900").await;
    let points = history["points"].as_array().unwrap();
    assert!(points.len() > 3 && points.iter().any(|point| point["rate_per_s"].as_f64().unwrap() > 0.0), "{history}");
    assert!(points.windows(2).all(|pair| pair[0]["at"].as_str() < pair[1]["at"].as_str()), "{history}");
    assert!(ask(stand, one, "/api/v1/providers/nobody").await["error"].as_str().is_some());
    assert!(ask(stand, one, "/api/v1/providers/acme/history?seconds=0").await["error"].as_str().is_some());
}
