//! An API with prepared data: each state, each tone, amounts of every kind, and text that looks like markup. The page
//! itself is served by the real program.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::canned_batches::Batches;
use crate::canned_history::{history, recorded};
use crate::canned_jobs::{details, explained, fifty_jobs, job_totals, jobs, rejected};
use crate::stand::Stand;
use crate::webdriver::PATIENCE;

/// Hostile text, as it may be in a reason, an id or a row.
pub const HOSTILE: &str = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\n\r\t\u{1b}[2J\u{9b}\u{85}\u{202e}\u{2066}\u{200b}\u{feff}\u{ad}\u{2028}\u{7f}\u{e0041}";
/// The current instant of the prepared data.
pub const NOW: &str = "2026-03-01T12:00:00.000Z";
pub const EARLIER: &str = "2026-03-01T11:57:55.000Z";

pub const STATES: [&str; 17] = [
    "running",
    "idle",
    "waiting_for_limit",
    "cold",
    "probing",
    "paused",
    "closed",
    "disabled",
    "paused_by_provider",
    "throttled",
    "blocked",
    "held",
    "breaker_open",
    "misconfigured",
    "backend_unavailable",
    "no_worker",
    "draining",
];
pub const JOB_STATES: [&str; 9] =
    ["waiting", "sending", "unknown", "review", "dead", "succeeded", "declined", "expired", "cancelled"];

/// What the API has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Data {
    /// A provider in each state.
    States,
    Empty,
    /// So few providers that each has a card.
    Few,
    /// Redis is unavailable for all workers, and that stops all providers but a paused one.
    Incident,
    /// An operator has paused all providers; one was resumed since.
    Paused,
    /// Few providers with the longest names and most limits.
    Long,
    /// Fifty of everything that is listed, with the longest texts.
    Full,
    /// Database and queue are unavailable: figures are missing, and reads of the database fail.
    Troubled,
}

#[derive(Clone)]
struct Server {
    page: String,
    data: Data,
    /// Paths of the API that were requested.
    asked: Arc<Mutex<Vec<String>>>,
    batches: Batches,
    client: reqwest::Client,
}

/// The server stops when this is dropped.
pub struct Canned {
    pub origin: String,
    pub batches: Batches,
    asked: Arc<Mutex<Vec<String>>>,
    _serving: DropGuard,
}

impl Canned {
    pub async fn start(empty: bool) -> Self {
        Self::start_with(if empty { Data::Empty } else { Data::States }).await
    }

    /// Starts with eight providers.
    pub async fn start_few() -> Self {
        Self::start_with(Data::Few).await
    }

    /// Starts while Redis is unavailable.
    pub async fn start_incident() -> Self {
        Self::start_with(Data::Incident).await
    }

    /// Starts while a pause of all is in force.
    pub async fn start_paused() -> Self {
        Self::start_with(Data::Paused).await
    }

    /// Starts with long names.
    pub async fn start_long() -> Self {
        Self::start_with(Data::Long).await
    }

    /// Starts with long lists.
    pub async fn start_full() -> Self {
        Self::start_with(Data::Full).await
    }

    /// Starts with unavailable backends.
    pub async fn start_troubled() -> Self {
        Self::start_with(Data::Troubled).await
    }

    async fn start_with(data: Data) -> Self {
        static PAGE: OnceLock<Stand> = OnceLock::new();
        let page = tokio::task::spawn_blocking(|| PAGE.get_or_init(Stand::start).origin.clone()).await.unwrap();
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let origin = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::default();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let batches = Batches::default();
        let state = Server { page, data, asked: Arc::clone(&asked), batches: batches.clone(), client };
        let stop = CancellationToken::new();
        let router = Router::new().fallback(answer).with_state(state);
        let serving = axum::serve(listener, router).with_graceful_shutdown(stop.clone().cancelled_owned());
        tokio::spawn(serving.into_future());
        Self { origin, batches, asked, _serving: stop.drop_guard() }
    }

    /// Number of API requests so far.
    pub fn asked(&self) -> usize {
        self.asked.lock().unwrap().len()
    }

    /// Waits until the page has sent this many more API requests.
    pub async fn await_questions(&self, more: usize) {
        let (before, deadline) = (self.asked(), Instant::now() + PATIENCE);
        while self.asked() < before + more {
            assert!(Instant::now() < deadline, "the page sends no more requests: {} of {more}", self.asked() - before);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn answer(State(server): State<Server>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let Some(rest) = path.strip_prefix("/api/v1/") else { return page(&server, &path).await };
    server.asked.lock().unwrap().push(path.clone());
    let parts: Vec<&str> = rest.split('/').collect();
    if server.data == Data::Troubled {
        return troubled(&parts);
    }
    let (head, body) = request.into_parts();
    let sent = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let query = head.uri.query().unwrap_or_default();
    if let ["batches", below @ ..] = parts.as_slice() {
        return server.batches.answer(&head.method, below, &sent);
    }
    let body = match (&head.method, parts.as_slice()) {
        (&Method::GET, ["overview"]) => overview(server.data),
        (&Method::GET, ["providers", "cold", "history"]) => json!({"step_ms": 60_000, "points": []}),
        (&Method::GET, ["providers", _, "history"]) => history(),
        (&Method::GET, ["history"]) => recorded(server.data == Data::Empty, query),
        (&Method::GET, ["providers", name, "flows"]) => flows(name),
        (&Method::GET, ["providers", name, "throttling"]) => throttling(name),
        (&Method::GET, ["providers", name, "accounts"]) => account_rules(name),
        (&Method::GET, ["providers", name]) => {
            let providers = overview(Data::States)["providers"].as_array().unwrap().clone();
            let found = providers.into_iter().find(|provider| provider["name"] == *name);
            found.map_or(Value::Null, |provider| of_provider(&provider))
        }
        (&Method::GET, ["jobs"]) if server.data == Data::Full => fifty_jobs(query),
        (&Method::GET, ["jobs"]) => jobs(server.data == Data::Empty, query),
        (&Method::GET, ["job-totals"]) => job_totals(server.data == Data::Empty),
        (&Method::GET, ["jobs", state]) => details(state),
        (&Method::GET, ["jobs", state, "explain"]) => explained(state),
        (&Method::GET, ["rejected"]) => rejected(server.data == Data::Empty),
        (&Method::GET, ["whoami"]) => json!({"name": "alice", "role": "admin", "path": "proxy"}),
        (&Method::GET, ["workers"]) => workers(server.data == Data::Empty),
        (&Method::POST, ["pause-all"]) => {
            json!({"id": 7, "paused": ["corp"], "held": ["acme", "bolt"], "paused_before": []})
        }
        (&Method::POST, ["resume-all"]) => {
            json!({"id": 7, "resumed": ["acme", "bolt"], "resumed_before": ["corp"], "still_paused": []})
        }
        (&Method::POST, ["providers", _, "limits", limit]) => {
            let least = |at_least_ms| json!({"kind": "depends_on_accounts", "at_least_ms": at_least_ms, "limits": ["per-account"], "about_ms": null});
            let missed = |payments| json!({"rule": "18:00 UTC", "at": "2026-03-01T18:00:00.000Z", "in_ms": 21_600_000, "forecast": {"kind": "missed", "payments": payments, "is_at_least": false, "needed_per_s": 240.0}});
            json!({
                "limit": limit, "from": "100/1s", "to": "200/1s", "changed": false, "returns": null, "ended_return": null,
                "clears": {"from": least(120_000), "to": least(60_000)},
                "clears_at": {"from": "2026-03-01T12:02:00.000Z", "to": "2026-03-02T12:01:00.000Z"},
                "cutoff": {"from": missed(3_120), "to": missed(120)},
            })
        }
        _ => Value::Null,
    };
    if body.is_null() {
        return (StatusCode::NOT_FOUND, axum::Json(json!({"error": HOSTILE}))).into_response();
    }
    axum::Json(body).into_response()
}

fn throttling(provider: &str) -> Value {
    let hint = json!({
        "throttled": 34, "rate": "600/1m", "max_requests": 600, "window_ms": 60_000, "limit": "near",
        "text": "34 × 429 in the last hour; the largest window without one was 600/1m",
    });
    json!({"hint": if provider == "running" { hint } else { Value::Null }})
}

/// One provider, with figures from the limiter only.
fn troubled(parts: &[&str]) -> Response {
    if parts != ["overview"] {
        let unavailable = axum::Json(json!({"error": "the database does not answer"}));
        return (StatusCode::SERVICE_UNAVAILABLE, unavailable).into_response();
    }
    let mut acme = provider("acme", "backend_unavailable");
    let unknown = json!({
        "waiting": 1_332, "waiting_is_at_least": true, "queued": null, "unrecorded": null, "delayed": 1_332, "backlog": 0, "active": null,
        "in_flight": null, "clears": {"kind": "unknown", "missing": "queue"}, "review": null, "dead": null, "succeeded": null, "declined": null,
        "rate_per_s": null, "limit_per_s": null, "refused_by_provider": null,
    });
    acme.as_object_mut().unwrap().extend(unknown.as_object().unwrap().clone());
    let warnings = ["database: gone", "queue: gone"];
    axum::Json(json!({
        "at": NOW, "version": "0.1.0", "worker": "w-1", "providers": [acme], "reconciliation": [], "warnings": warnings,
        "missing": ["database", "queue"], "outages": [outage("database", "postgres"), outage("queue", "rabbitmq")],
    }))
    .into_response()
}

fn outage(backend: &str, kind: &str) -> Value {
    json!({"backend": backend, "kind": kind, "since": EARLIER, "problem": format!("{backend}: gone"), "workers": 2, "of_workers": 2, "everywhere": true})
}

/// The program's own file, with its headers.
async fn page(server: &Server, path: &str) -> Response {
    let answer = server.client.get(format!("{}{path}", server.page)).send().await.unwrap();
    let mut response = Response::builder().status(answer.status());
    for name in [header::CONTENT_TYPE, header::CONTENT_SECURITY_POLICY] {
        if let Some(value) = answer.headers().get(&name) {
            response = response.header(name, value);
        }
    }
    response.body(Body::from(answer.bytes().await.unwrap())).unwrap()
}

fn limit(name: &str, used: Option<u64>, more: Value) -> Value {
    let mut limit = json!({
        "name": name, "algorithm": "sliding_log", "max_requests": 100, "window_ms": 1_000, "scope": "provider",
        "applies_to": "all", "shadow": false, "enabled": true, "used": used, "remaining": used.map(|used| 100 - used),
    });
    limit.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    limit
}

/// Fields that only some of the providers have.
fn peculiar(state: &str) -> Value {
    match state {
        // The clear time depends on whose payments wait.
        "waiting_for_limit" => {
            json!({"clears": {"kind": "depends_on_accounts", "at_least_ms": 34_000, "limits": ["per-account"], "about_ms": 428_000}})
        }
        "running" => {
            json!({"clears": {"kind": "depends_on_accounts", "at_least_ms": 34_000, "limits": ["per-account"], "about_ms": null}})
        }
        // The limiter does not respond.
        "backend_unavailable" => {
            json!({"limits": [limit("all", None, json!({})), limit("off", None, json!({"enabled": false})), limit("each", None, json!({"scope": "reference"}))]})
        }
        "breaker_open" => json!({"clears": {"kind": "not_while_breaker_open"}}),
        "closed" => json!({"clears": {"kind": "never", "limit": "closed"}}),
        "throttled" => json!({
            "clears": {"kind": "not_while_throttled", "passed_per_s": 6.2}, "clears_at": null,
            "refused_by_provider": 248, "last_refused_at": NOW,
        }),
        "blocked" => json!({"clears": {"kind": "not_while_blocked"}, "clears_at": null}),
        "no_worker" => json!({"clears": {"kind": "unknown", "missing": "worker"}}),
        // Its last valid row applies.
        "probing" => json!({"problems": ["limit all: max_requests is out of range"]}),
        // No worker has consumed any of these.
        "paused" => json!({
            "queued": 80, "unrecorded": 80, "waiting": 80, "clears": {"kind": "not_while_paused"},
            "clears_if_resumed": {"kind": "clears_in", "ms": 90_000},
        }),
        "cold" => {
            json!({"rate_per_s": null, "limits": [limit("lookups", Some(0), json!({"applies_to": "lookup", "window_ms": 3_600_000})), limit("loose", Some(1), json!({})), limit("tight", Some(2), json!({"window_ms": 60_000})), limit("middling", Some(3), json!({"window_ms": 10_000}))]})
        }
        "misconfigured" => json!({"review": 2, "dead": 1, "refused_by_provider": 1}),
        "idle" => json!({"waiting": 0}),
        _ => json!({}),
    }
}

fn provider(name: &str, state: &str) -> Value {
    let mut provider = json!({
        "name": name, "quota": name, "enabled": true, "paused": state == "paused", "mode": "blocking", "version": 17, "has_valid_row": true,
        "state": state, "cause": HOSTILE, "ends_in_ms": 12_400, "problems": if state == "misconfigured" { json!([HOSTILE]) } else { json!([]) },
        "limits": [
            limit("free", Some(10), json!({})), limit("near", Some(80), json!({"until": "2026-03-02T06:00:00.000Z", "then": "50/1s"})), limit("full", Some(100), json!({})),
            limit("per-account", None, json!({"scope": "account"})),
            limit("closed", Some(0), json!({"max_requests": 0, "remaining": 0, "shadow": true})),
        ],
        "rate_per_s": 94.1, "limit_per_s": 100.0, "waiting": 12_000, "queued": null, "delayed": 300, "backlog": 40, "active": 128,
        "in_flight": 9, "oldest_waiting_at": EARLIER, "clears": {"kind": "clears_in", "ms": 120_000}, "review": 0, "dead": 0,
        "succeeded": 1_234_567, "declined": 3, "expired": 0, "cancelled": 0, "unknown": 0, "sending": 9,
        "refused_by_provider": 0,
    });
    provider.as_object_mut().unwrap().extend(peculiar(state).as_object().unwrap().clone());
    provider
}

/// A name as long as it may be; the number keeps it unique.
pub fn long_name(number: usize) -> String {
    format!("{:a<60}-{number:02}", "provider-with-the-longest-name-")
}

/// A provider with the longest name and eight limits.
fn long_provider(number: usize) -> Value {
    let state = ["running", "paused", "paused_by_provider", "breaker_open"][number % 4];
    let mut provider = provider(&long_name(number), state);
    let limits: Vec<Value> = (0..8).map(|nth| limit(&format!("{:b<30}{nth}", "limit-"), Some(99), json!({}))).collect();
    provider["limits"] = json!(limits);
    provider["review"] = json!(1_234);
    provider
}

/// Stopped by Redis, unless an operator paused it.
fn without_limiter(state: &str) -> Value {
    if state == "paused" {
        return provider(state, state);
    }
    let mut stopped = provider(state, "backend_unavailable");
    stopped["cause"] = json!("limiter: gone");
    stopped
}

fn overview(data: Data) -> Value {
    let names = |count: usize| STATES.iter().take(count);
    let providers: Vec<Value> = match data {
        Data::Empty => Vec::new(),
        Data::Few => names(8).map(|state| provider(&state.replace('_', "-"), state)).collect(),
        Data::Paused => [("acme", "paused"), ("bolt", "paused"), ("corp", "running")]
            .map(|(name, state)| provider(name, state))
            .to_vec(),
        Data::Incident => names(8).map(|state| without_limiter(state)).collect(),
        Data::Long => [8, 9, 10].map(long_provider).to_vec(),
        Data::Full => (0..50).map(long_provider).collect(),
        Data::States | Data::Troubled => {
            names(STATES.len()).map(|state| provider(&state.replace('_', "-"), state)).collect()
        }
    };
    let mut overview = json!({"at": NOW, "version": "0.1.0", "worker": "w-1", "providers": providers, "reconciliation": [], "warnings": [], "outages": []});
    if matches!(data, Data::Empty | Data::Full) {
        return overview;
    }
    overview["reconciliation"] = json!([{"provider": "running", "recorded": 5, "faults": [HOSTILE]}]);
    (overview["counted_at"], overview["warnings"]) = (json!(EARLIER), json!([HOSTILE]));
    if data == Data::Paused {
        overview["pause_of_all"] = json!({"id": 7, "since": EARLIER, "by": "alice@desk", "because": "incident 12", "providers": ["acme", "bolt"]});
    }
    if data == Data::Incident {
        overview["outages"] = json!([outage("limiter", "redis")]);
        overview["warnings"] = json!(["limiter: gone", "2 workers: limiter: gone"]);
        overview["reconciliation"] = json!([{"provider": "running", "recorded": 5, "faults": []}]);
    }
    overview
}

/// Accounts of every kind, and more than are listed; `idle` has no backlog.
fn account_rules(provider: &str) -> Value {
    let rule = |account: &str, rule: &str| {
        json!({
            "account": account, "limit": null, "rule": rule, "burst": null, "weight": 1, "until": null, "then": null,
            "who": "alice@desk (postgres)", "at": EARLIER, "program": "sluicegate", "because": "fraud, ticket 12",
        })
    };
    let mut hostile = rule("shop-9", "5/1s");
    hostile["because"] = json!(HOSTILE);
    hostile["until"] = json!("2026-03-01T18:00:00.000Z");
    hostile["then"] = json!("blocked");
    json!({ "rules": if provider == "idle" { vec![] } else { vec![rule("shop-7", "blocked"), hostile] } })
}

fn flows(name: &str) -> Value {
    if name == "idle" {
        return json!({"flows": [], "total_flows": 0, "total_waiting": 0});
    }
    let flow = |account: Value, waiting: u64, more: Value| {
        let mut flow = json!({"account": account, "priority": 0, "waiting": waiting, "weight": 1});
        flow.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        flow
    };
    let blocked = |reason: &str, text: &str| json!({"blocked": {"reason": reason, "limit": null, "text": text, "until": "2026-03-01T12:00:12.400Z", "left_ms": 12_400}});
    let mut flows = vec![
        flow(json!("m".repeat(64)), 1_234_567, blocked("limit", "waits for limit per-account")),
        flow(json!(null), 4_200, json!({"share": 0.25})),
        flow(json!(HOSTILE), 70, blocked("misconfigured", HOSTILE)),
        flow(json!("vip"), 9, json!({"priority": 9, "weight": 30, "share": 1.0})),
        flow(json!("lost"), 8, json!({"priority": null, "share": 1.0})),
    ];
    flows.extend((0..15).map(|number| flow(json!(format!("acct_{number}")), 7, json!({"share": 0.04}))));
    json!({"flows": flows, "total_flows": 10_020, "total_waiting": 2_000_000})
}

fn of_provider(overview: &Value) -> Value {
    let kinds = ["granted", "refused", "delayed", "throttled", "paused", "resumed", "breaker_opened", "breaker_closed"];
    let decisions =
        kinds.map(|kind| json!({"at": EARLIER, "worker": "w-1", "kind": kind, "reason": HOSTILE, "permits": 3}));
    json!({
        "overview": overview, "row": {"name": "running", "url": HOSTILE, "mode": "blocking"},
        "waits": {"bounds_ms": [1, 10, 100, 1_000], "counts": [50, 30, 15, 4, 1]}, "decisions": decisions,
        "audit": [{"at": EARLIER, "who": HOSTILE, "what": HOSTILE, "because": "ticket 4711"}],
    })
}

fn workers(empty: bool) -> Value {
    let backend = |ok| json!({"ok": ok, "rtt_ms": if ok { json!(0.0) } else { json!(null) }, "kind": "postgres", "version": HOSTILE, "problem": (!ok).then_some("no answer in time")});
    let worker = |id: &str, state: &str, ok| {
        json!({
            "id": id, "host": HOSTILE, "pid": 4_711, "version": id, "started_at": EARLIER, "seen_at": EARLIER, "state": state, "lanes": 12,
            "active": 128, "in_flight": 9, "backends": {"database": backend(true), "queue": backend(ok), "limiter": backend(false)}, "warnings": [HOSTILE],
        })
    };
    let all = json!([
        worker("w-1", "ready", true),
        worker("w-2", "starting", false),
        worker("w-3", "draining", true),
        worker("w-4", "lost", true)
    ]);
    json!({"workers": if empty { json!([]) } else { all }})
}
