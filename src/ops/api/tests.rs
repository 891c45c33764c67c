//! Tests of the API over HTTP, with the real handlers on SQLite; each exchange is checked against the description.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::domain::commit_memory::HoldCause;
use crate::domain::job::tests::job;
use crate::domain::job::{Identifier, Job};
use crate::domain::outcome::FinalState;
use crate::domain::provider::ProviderName;
use crate::domain::sum::SentSum;
use crate::ledger::database::Database;
use crate::ledger::provider_row::{LimitRow, ProviderRow};
use crate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState, LeaseToken, RequestTiming};
use crate::ops::openapi_tests::{PublishedApi, example_address, routes};
use crate::ops::tests::{client, spawn_server, state};
use crate::provider::FrozenRequest;
use crate::queue::message::{decode, encode};
use crate::queue::{DeadLetter, LaneConsumer, OutgoingMessage, QueueError};

pub struct TestApi {
    pub address: String,
    pub database: Database,
    pub queue: Arc<AcceptingQueue>,
    published: PublishedApi,
    stop: CancellationToken,
}

/// A broker that accepts messages, and gives none out.
#[derive(Default)]
pub struct AcceptingQueue(AtomicU64);

#[async_trait]
impl Queue for AcceptingQueue {
    async fn declare(&self, _: &[ProviderName]) -> Result<(), QueueError> {
        Ok(())
    }

    async fn open_lane(&self, _: &ProviderName, _: u16) -> Result<Box<dyn LaneConsumer>, QueueError> {
        Err(QueueError::Refused("no lanes in these tests".to_owned()))
    }

    async fn publish(&self, _: OutgoingMessage) -> Result<(), QueueError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    async fn take_dead_letter(&self) -> Result<Option<DeadLetter>, QueueError> {
        Ok(None)
    }

    async fn depth(&self, _: &ProviderName) -> Result<Option<u64>, QueueError> {
        Ok(Some(self.0.load(Ordering::Relaxed)))
    }

    async fn ping(&self) -> Result<Option<String>, QueueError> {
        Ok(None)
    }
}

impl Drop for TestApi {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl TestApi {
    /// A server with provider `acme`, limits 100/1s and 600/1m.
    pub async fn new() -> Self {
        let (mut state, _progress, database) = state(None).await;
        let limit = |name: &str, max_requests, window_ms| LimitRow {
            name: name.to_owned(),
            max_requests,
            window_ms,
            ..LimitRow::default()
        };
        let row = ProviderRow {
            name: "acme".to_owned(),
            url: "https://pay.example/".to_owned(),
            limits: vec![limit("second", 100, 1_000), limit("minute", 600, 60_000)],
            ..ProviderRow::default()
        };
        database.apply_settings(&[row], false).await.unwrap();
        let queue = Arc::new(AcceptingQueue::default());
        state.operator_context.queue = Some(queue.clone());
        let (address, stop) = spawn_server(state).await;
        Self { address, database, queue, published: PublishedApi::current(), stop }
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        self.exchange("get", path, client().get(format!("{}{path}", self.address))).await
    }

    pub async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        let request = client().post(format!("{}{path}", self.address)).json(&body);
        let (status, answer) = self.exchange("post", path, request).await;
        if status < 300 {
            assert_eq!(self.published.request_faults("post", path, &body), Vec::<String>::new());
        }
        (status, answer)
    }

    async fn exchange(&self, method: &str, path: &str, request: reqwest::RequestBuilder) -> (u16, Value) {
        let request = request.basic_auth("alice", Some("any")).header("user-agent", "curl/8.5.0");
        let answer = request.send().await.unwrap();
        let status = answer.status().as_u16();
        let body: Value = answer.json().await.unwrap();
        assert_eq!(self.published.response_faults(method, path, status, &body), Vec::<String>::new());
        (status, body)
    }

    /// Adds a job in a state.
    pub async fn add_job(&self, id: &str, account: &str, state: &str) {
        let ledger = self.database.clone();
        let job = Job {
            account: Some(Identifier::new(account).unwrap()),
            payload: Some(r#"{"token":"tok_1"}"#.into()),
            ..job(id)
        };
        let hash = decode(&encode(&job), &acme(), CardNumbers::Refuse).unwrap().hash;
        ledger.record_backlog(&job, hash, Duration::ZERO).await.unwrap();
        let above = LeaseToken { id: job.id.clone(), fence: 0 };
        let claim = ledger.claim_for_repair(&above, "worker-a", None).await.unwrap();
        let hold = claim.unwrap().claimed.lease;
        match state {
            "waiting" => assert_eq!(ledger.release(&hold).await.unwrap(), FencedWrite::Applied),
            "sending" => drop(self.begin_attempt(&hold, id).await),
            state => {
                let number = self.begin_attempt(&hold, id).await;
                let outcome = if state == "review" { "unknown" } else { "not_sent" };
                let end = AttemptEnd { number, outcome, status: None, detail: "said so".to_owned(), counts: true };
                let state = FinalState::from_name(state).unwrap();
                let next = JobState::Final { state, reason: "so it is".to_owned(), reference: None };
                assert_eq!(ledger.finish_attempt(&hold, &end, &next).await.unwrap(), FencedWrite::Applied);
            }
        }
    }

    async fn begin_attempt(&self, hold: &LeaseToken, id: &str) -> u32 {
        let request = FrozenRequest {
            method: "POST".into(),
            url: "https://pay.example/charges".into(),
            idempotency_key: id.into(),
            content_type: "application/json".into(),
            body: "{}".into(),
            account: None,
            sum: SentSum { units: 1_299, decimals: 2 },
            credential_fingerprint: "0123456789abcdef".into(),
        };
        match self.database.begin_attempt(hold, &request, RequestTiming::immediate(Duration::ZERO)).await.unwrap() {
            BeginResult::Attempt(number) => number,
            BeginResult::Stale => panic!("lost"),
        }
    }

    /// The content of the database without [`BACKGROUND_TABLES`].
    pub async fn database_content(&self) -> Vec<(String, String)> {
        let pool = self.database.sqlite_pool().unwrap();
        let columns = "SELECT tables.name, group_concat('quote(\"' || columns.name || '\")', '||') \
            FROM sqlite_master AS tables JOIN pragma_table_info(tables.name) AS columns \
            WHERE tables.type = 'table' GROUP BY tables.name ORDER BY tables.name";
        let tables: Vec<(String, String)> = sqlx::query_as(columns).fetch_all(&pool).await.unwrap();
        let mut written = Vec::new();
        let is_background = |table: &str| BACKGROUND_TABLES.iter().any(|begin| table.starts_with(begin));
        for (table, columns) in tables.into_iter().filter(|(table, _)| !is_background(table)) {
            let rows = format!("SELECT coalesce(group_concat({columns}), '') FROM \"{table}\"");
            written.push((table, sqlx::query_scalar(AssertSqlSafe(rows)).fetch_one(&pool).await.unwrap()));
        }
        written
    }

    pub async fn query_one<T>(&self, sql: &'static str) -> T
    where
        T: Send + Unpin + sqlx::Type<sqlx::Sqlite> + for<'r> sqlx::Decode<'r, sqlx::Sqlite>,
    {
        sqlx::query_scalar(sql).fetch_one(&self.database.sqlite_pool().unwrap()).await.unwrap()
    }
}

/// Beginnings of the names of tables that change in the background: those of reconciliation and history.
const BACKGROUND_TABLES: [&str; 3] = ["finished_", "history_", "upkeep_turns"];

pub fn acme() -> ProviderName {
    ProviderName::new("acme").unwrap()
}

fn ids(page: &Value) -> Vec<&str> {
    page["jobs"].as_array().unwrap().iter().map(|job| job["id"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn jobs_are_found_by_each_filter() {
    let stand = TestApi::new().await;
    for (id, account, state) in [("a", "x", "dead"), ("b", "y", "review"), ("c", "x", "review"), ("d", "x", "dead")] {
        stand.add_job(id, account, state).await;
    }
    for (query, found, next) in [
        ("", vec!["d", "c", "b", "a"], None),
        ("?state=dead", vec!["d", "a"], None),
        ("?account=x", vec!["d", "c", "a"], None),
        ("?account=x&state=dead&provider=acme", vec!["d", "a"], None),
        ("?account=x&limit=2", vec!["d", "c"], Some("c")),
        ("?account=x&limit=2&after=c", vec!["a"], None),
        ("?id=c", vec!["c"], None),
        ("?id=c&state=dead", vec![], None),
        ("?id=c&account=y", vec![], None),
        ("?id=c&after=c", vec![], None),
        ("?id=missing", vec![], None),
        ("?provider=other", vec![], None),
    ] {
        let (status, page) = stand.get(&format!("/api/v1/jobs{query}")).await;
        assert_eq!((status, ids(&page), page["next"].as_str()), (200, found, next), "{query}");
    }
    for (query, words) in [
        ("?state=lost", "`state`: must be one or more of waiting,sending"),
        ("?account=a%20b", "`account`: must be 1 to 64 characters"),
        ("?id=", "`id`: must be 1 to 64 characters"),
        ("?limit=0", "`limit` must be 1 to 1000, got 0"),
        ("?limit=1001", "`limit` must be 1 to 1000, got 1001"),
        ("?limit=many", "limit: invalid digit"),
        ("?provider=A", "`provider`: `A` is not a name"),
        ("?acount=x", "unknown field `acount`"),
    ] {
        let (status, answer) = stand.get(&format!("/api/v1/jobs{query}")).await;
        assert!(status == 400 && answer["error"].as_str().unwrap().contains(words), "{query}: {status} {answer}");
    }
    for (query, found, next) in [
        ("", vec!["d", "a"], None),
        ("?account=x&provider=acme&limit=1", vec!["d"], Some("d")),
        ("?limit=1&after=d", vec!["a"], Some("a")),
        ("?provider=other", vec![], None),
    ] {
        let (status, page) = stand.get(&format!("/api/v1/dlq{query}")).await;
        assert_eq!((status, ids(&page), page["next"].as_str()), (200, found, next), "{query}");
    }
    let (status, answer) = stand.get("/api/v1/dlq?state=review").await;
    assert!(status == 400 && answer["error"].as_str().unwrap().contains("unknown field `state`"), "{answer}");
    assert_eq!(stand.get("/api/v1/dlq/d").await, stand.get("/api/v1/jobs/d").await);
    assert_eq!(stand.get("/api/v1/dlq/c").await, (404, json!({"error": "the payment is `review`, not `dead`"})));
    assert_eq!(stand.get("/api/v1/dlq/missing").await.0, 404);
    let (status, details) = stand.get("/api/v1/jobs/c").await;
    assert_eq!(
        (status, &details["requests"][0]["outcome"], &details["payload"]["bytes"]),
        (200, &"unknown".into(), &17.into())
    );
    for id in ["missing", "a%20b"] {
        let (status, answer) = stand.get(&format!("/api/v1/jobs/{id}")).await;
        assert_eq!((status, answer), (404, json!({"error": "the ledger has no such job"})));
    }
}

#[tokio::test]
async fn resolutions_are_audited_and_applied_once() {
    let stand = TestApi::new().await;
    for (from, path, body, to, done) in [
        (
            "review",
            "jobs/{}/resolve",
            json!({"as": "succeeded", "reference": "ch_1", "because": "seen"}),
            "succeeded",
            "resolved",
        ),
        ("review", "jobs/{}/resolve", json!({"as": "declined", "because": "seen"}), "declined", "resolved"),
        (
            "review",
            "jobs/{}/resolve",
            json!({"as": "resend", "because": "seen", "confirm_id": "review-sent_again-waiting"}),
            "waiting",
            "sent again",
        ),
        ("waiting", "jobs/{}/cancel", json!({"because": "seen"}), "cancelled", "cancelled"),
        ("dead", "dlq/{}/replay", json!({"because": "seen"}), "waiting", "replayed"),
        ("dead", "dlq/{}/discard", json!({"because": "seen"}), "cancelled", "discarded"),
    ] {
        let id = format!("{from}-{done}-{to}").replace(' ', "_");
        stand.add_job(&id, "x", from).await;
        let path = format!("/api/v1/{}", path.replace("{}", &id));
        let answer = stand.post(&path, body.clone()).await;
        assert_eq!(answer, (200, json!({"id": id, "state": to, "done": done})), "{path}");
        let details = stand.get(&format!("/api/v1/jobs/{id}")).await.1;
        let audit = &details["audit"][0];
        assert_eq!((details["state"].as_str(), details["audit"].as_array().unwrap().len()), (Some(to), 1));
        assert_eq!(
            (&audit["os_user"], &audit["program"], &audit["because"], &audit["old_state"]),
            (&"alice@curl/8.5.0".into(), &"sluicegate ops".into(), &"seen".into(), &from.into())
        );
        // A second time it is rejected.
        let (status, refused) = stand.post(&path, body).await;
        let words = format!("the job is `{to}`; only a job that is `{from}` can be {done}");
        assert_eq!((status, refused), (409, json!({"error": words})));
    }
    let succeeded = stand.get("/api/v1/jobs/review-resolved-succeeded").await.1;
    assert_eq!(succeeded["provider_reference"], "ch_1");
    // One charge pays one payment; a request in flight is not cancelled.
    stand.add_job("twice", "x", "review").await;
    let resolved = stand.post("/api/v1/jobs/twice/resolve", json!({"as": "succeeded", "reference": "ch_1"})).await;
    assert!(resolved.0 == 409 && resolved.1["error"].as_str().unwrap().contains("one charge pays one payment"));
    stand.add_job("wire", "x", "sending").await;
    assert_eq!(stand.post("/api/v1/jobs/wire/cancel", json!({})).await.0, 409);
    // Without a row no worker consumes the lane.
    stand.add_job("orphan", "x", "dead").await;
    let deleted = "DELETE FROM providers";
    sqlx::raw_sql("DELETE FROM provider_limits").execute(&stand.database.sqlite_pool().unwrap()).await.unwrap();
    sqlx::raw_sql(deleted).execute(&stand.database.sqlite_pool().unwrap()).await.unwrap();
    let (status, answer) = stand.post("/api/v1/dlq/orphan/replay", json!({})).await;
    assert!(status == 409 && answer["error"].as_str().unwrap().contains("no worker takes its jobs"), "{answer}");
    assert_eq!(stand.get("/api/v1/jobs/orphan").await.1["state"], "dead");
}

#[tokio::test]
async fn invalid_requests_change_nothing() {
    let stand = TestApi::new().await;
    stand.add_job("pay-1", "x", "review").await;
    let long = "x".repeat(501);
    let before = stand.database_content().await;
    for (path, body, status, words) in [
        ("jobs/missing/cancel", json!({}), 404, "the ledger has no such job"),
        ("jobs/a%20b/cancel", json!({}), 404, "the ledger has no such job"),
        ("dlq/missing/replay", json!({}), 404, "the ledger has no such job"),
        ("jobs/pay-1/resolve", json!({}), 400, "missing field `as`"),
        ("jobs/pay-1/resolve", json!({"as": "charged"}), 400, "`as`: unknown variant `charged`, expected one of"),
        ("jobs/pay-1/resolve", json!({"as": "declined", "reference": "ch_1"}), 400, "`reference`: only a payment"),
        ("jobs/pay-1/resolve", json!({"as": "succeeded", "reference": " "}), 400, "`reference`: is empty"),
        ("jobs/pay-1/resolve", json!({"as": "declined", "becuase": "x"}), 400, "unknown field `becuase`"),
        ("jobs/pay-1/resolve", json!({"as": "declined", "because": 5}), 400, "`because`: invalid type: integer"),
        ("jobs/pay-1/resolve", json!({"as": "declined", "because": long}), 400, "`because`: has 501 characters"),
        ("jobs/pay-1/resolve", json!({"as": "declined", "because": "a\0b"}), 400, "U+0000"),
        ("batches/preview", json!({"decision": "declined", "selection": {"ids": ["a\0b"]}}), 400, "U+0000"),
        ("jobs/pay-1/resolve", json!(["declined"]), 400, "must be one JSON object"),
        ("providers/missing/pause", json!({}), 404, "there is no provider `missing`"),
        ("providers/MISSING/resume", json!({}), 404, "there is no provider `MISSING`"),
        ("providers/acme/limits/hour", json!({"rate": "1/1s"}), 404, "it has: minute, second"),
        ("providers/missing/limits/hour", json!({"rate": "1/1s"}), 404, "there is no provider `missing`"),
        ("providers/acme/limits/second", json!({}), 400, "missing field `rate`"),
        (
            "providers/acme/limits/second",
            json!({"rate": "unlimited"}),
            400,
            "`rate`: `unlimited` is not a limit: write N/",
        ),
        ("providers/acme/limits/second", json!({"rate": "-1/1s"}), 400, "`rate`: `-1` is not a number of requests"),
        ("providers/acme/limits/second", json!({"rate": "9999999/1s"}), 400, "at most 1000000 can be counted"),
        ("providers/acme/limits/second", json!({"rate": null}), 400, "missing field `rate`"),
        ("providers/acme/limits/second", json!({"rate": "5/1s", "dry_run": 1}), 400, "`dry_run`: invalid type"),
        ("providers/acme/limits/second", json!({"rate": "5/1s", "dryrun": true}), 400, "unknown field `dryrun`"),
    ] {
        let (answered, answer) = stand.post(&format!("/api/v1/{path}"), body).await;
        let names_problem = answer["error"].as_str().unwrap().contains(words);
        assert!(answered == status && names_problem, "{path}: {answered} {answer}");
    }
    let huge = client().post(format!("{}/api/v1/jobs/pay-1/cancel", stand.address));
    let huge =
        huge.header("content-type", "application/json").body(format!(r#"{{"because": "{}"}}"#, "x".repeat(20_000)));
    assert_eq!(huge.send().await.unwrap().status(), 413);
    assert_eq!(stand.database_content().await, before);
}

#[tokio::test]
async fn limits_are_listed_as_stored() {
    let stand = TestApi::new().await;
    let (status, all) = stand.get("/api/v1/limits").await;
    let written = |limit: &str, rate: &str, max_requests: i64, window_ms: i64| {
        json!({"provider": "acme", "limit": limit, "rate": rate, "algorithm": "sliding_log", "burst": null, "offset": null,
               "scope": "provider", "applies_to": "all", "state": "enabled", "max_requests": max_requests,
               "window_ms": window_ms, "until": null, "then": null})
    };
    let limits = [written("minute", "600/1m", 600, 60_000), written("second", "100/1s", 100, 1_000)];
    assert_eq!((status, all), (200, json!({"limits": limits, "left_out": []})));
    let unreadable = r#"UPDATE providers SET statuses = '{"402": 1e999}'"#;
    sqlx::raw_sql(unreadable).execute(&stand.database.sqlite_pool().unwrap()).await.unwrap();
    let (status, all) = stand.get("/api/v1/limits").await;
    assert_eq!((status, &all["limits"], &all["left_out"][0]["provider"]), (200, &json!([]), &"acme".into()));
    let problem = all["left_out"][0]["problems"][0].as_str().unwrap();
    assert!(problem.contains("statuses"), "{problem}");
}

#[tokio::test]
async fn pause_and_resume_report_changes() {
    let stand = TestApi::new().await;
    // A resume also lifts waits that the provider asked for, which are not in the row.
    for (action, changed) in [("pause", true), ("pause", false), ("resume", true), ("resume", true)] {
        let path = format!("/api/v1/providers/acme/{action}");
        let result = match action {
            "pause" => json!({"changed": changed}),
            _ => json!({"changed": changed, "held": null}),
        };
        assert_eq!(stand.post(&path, json!({"because": "calm"})).await, (200, result));
        let paused = stand.database.readable_rows(Some(&acme())).await.unwrap()[0].paused;
        assert_eq!(paused, action == "pause");
    }
    let signed = "SELECT count(*) FROM settings_audit WHERE table_name = 'providers' AND program = 'sluicegate ops' \
                  AND because = 'calm'";
    assert_eq!(stand.query_one::<i64>(signed).await, 3, "a call without a change is not in the audit");
}

/// On every route.
#[tokio::test]
async fn a_get_changes_nothing() {
    let stand = TestApi::new().await;
    for (id, state) in [("pay-1", "review"), ("pay-2", "dead"), ("pay-3", "waiting")] {
        stand.add_job(id, "x", state).await;
    }
    let changes = async || stand.database_content().await;
    let before = changes().await;
    for path in routes().await {
        let path = example_address(&path);
        for query in ["", "?limit=5", "?state=dead", "?because=x&as=declined"] {
            let answer = client().get(format!("{}{path}{query}", stand.address)).send().await.unwrap();
            assert!(!answer.status().is_redirection(), "{path}");
            let status = client().head(format!("{}{path}", stand.address)).send().await.unwrap().status();
            assert!(!status.is_server_error() || path == "/readyz", "{path}: {status}");
        }
    }
    assert_eq!(changes().await, before);
    // The comparison sees a change.
    assert_eq!(stand.post("/api/v1/dlq/pay-2/discard", json!({})).await.0, 200);
    assert_ne!(changes().await, before);
}

#[tokio::test]
async fn held_lane_is_released_with_a_reason() {
    let stand = TestApi::new().await;
    let path = "/api/v1/providers/acme/resume";
    let (status, refused) = stand.post(path, json!({"release_hold": true, "because": "compared"})).await;
    assert_eq!((status, refused["error"].as_str()), (409, Some("the lane of provider `acme` is not held")));
    stand.database.hold_lanes(&[acme()], HoldCause::DatabaseWentBack, "3 payments").await.unwrap();
    let (status, resumed) = stand.post(path, json!({})).await;
    let held = resumed["held"].as_str().unwrap();
    assert!(status == 200 && held.contains("database_went_back") && held.contains("3 payments"), "{held}");
    let (status, refused) = stand.post(path, json!({"release_hold": true})).await;
    assert!(status == 400 && refused["error"].as_str().unwrap().contains("needs a reason"), "{refused}");
    let released = stand.post(path, json!({"release_hold": true, "because": "compared"})).await;
    assert_eq!(released, (200, json!({"changed": true, "held": null})));
    assert!(stand.database.lane_hold(&acme()).await.unwrap().is_none());
}
