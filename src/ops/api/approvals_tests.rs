//! Tests of actions that need two people over HTTP: every change is gated or listed here, and a second person decides.

use std::sync::Arc;

use reqwest::RequestBuilder;
use serde_json::{Value, json};

use super::tests::TestApi;
use crate::config::approvals::ApprovalsConfig;
use crate::config::people::{PeopleConfig, TokenRole, UserEntry};
use crate::domain::approval::{ApprovalRule, ApprovalRules, GatedAction, Threshold};
use crate::domain::person::Role;
use crate::ops::guard::{People, hash_of};
use crate::ops::openapi_tests::example_address;
use crate::ops::roles::CHANGES;
use crate::provider::secret_grants::SecretReference;

const PASSWORD: &str = "correct horse";
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// Changes that pass without a second person, each with the reason.
const UNGATED: [(&str, &str); 9] = [
    ("/api/v1/jobs/{id}/assignment", "a note"),
    ("/api/v1/jobs/{id}/comments", "a note"),
    ("/api/v1/batches/preview", "changes nothing"),
    ("/api/v1/batches/{id}/stop", "stops decisions"),
    ("/api/v1/rejected/{id}/republish", "a message that is no payment yet; it goes through the same checks again"),
    ("/api/v1/rejected/{id}/discard", "a message that is no payment"),
    ("/api/v1/approvals/{id}/approve", "the second person itself"),
    ("/api/v1/approvals/{id}/refuse", "changes nothing else"),
    ("/api/v1/approvals/{id}/withdraw", "changes nothing else"),
];

fn rules(rules: &[(GatedAction, Threshold)]) -> ApprovalsConfig {
    let rule =
        |(action, threshold): &(GatedAction, Threshold)| ApprovalRule { action: *action, threshold: threshold.clone() };
    ApprovalsConfig {
        rules: ApprovalRules(rules.iter().map(rule).collect()),
        expire_after: std::time::Duration::from_secs(86_400),
    }
}

/// A server with operators alice and bob, admins carol and dave, viewer eve, and a token of role admin.
async fn stand(configured: ApprovalsConfig) -> TestApi {
    let user = |name: &str, role| UserEntry {
        name: name.to_owned(),
        role,
        reference: SecretReference::Env("HASH".to_owned()),
    };
    let users = vec![
        user("alice", Role::Operator),
        user("bob", Role::Operator),
        user("carol", Role::Admin),
        user("dave", Role::Admin),
        user("eve", Role::Viewer),
    ];
    let people = PeopleConfig { users, proxy: None, token_role: TokenRole(Role::Admin) };
    let stand = TestApi::with_state(Some(TOKEN), |state| {
        state.people = Arc::new(People::load(&people, |_| Some(hash_of(PASSWORD))).unwrap());
        state.approvals = Arc::new(configured);
    })
    .await;
    for (id, state) in
        [("r1", "review"), ("r2", "review"), ("r3", "review"), ("d1", "dead"), ("d2", "dead"), ("w1", "waiting")]
    {
        stand.add_job(id, "x", state).await;
    }
    stand
}

fn always() -> ApprovalsConfig {
    rules(&GatedAction::ALL.map(|action| (action, Threshold::Always)))
}

fn by(user: &str) -> impl FnOnce(RequestBuilder) -> RequestBuilder {
    let user = user.to_owned();
    move |request| if user == "token" { request.bearer_auth(TOKEN) } else { request.basic_auth(user, Some(PASSWORD)) }
}

async fn post(stand: &TestApi, user: &str, path: &str, body: Value) -> (u16, Value) {
    stand.post_by(path, body, by(user)).await
}

async fn get(stand: &TestApi, user: &str, path: &str) -> Value {
    let (status, body) = stand.get_by(path, by(user)).await;
    assert_eq!(status, 200, "{path}: {body}");
    body
}

async fn batch_body(stand: &TestApi, decision: &str, ids: &[&str]) -> Value {
    let selection = json!({"ids": ids});
    let (status, seen) =
        post(stand, "alice", "/api/v1/batches/preview", json!({"decision": decision, "selection": selection})).await;
    assert_eq!(status, 200, "{seen}");
    let (digest, jobs) = (&seen["digest"], &seen["jobs"]);
    json!({"decision": decision, "selection": selection, "digest": digest, "because": "ticket 4711", "confirm_jobs": jobs})
}

/// Makes a gated call; returns the id of the approval that it awaits.
async fn awaited(stand: &TestApi, user: &str, path: &str, asked: Value) -> String {
    let (status, body) = post(stand, user, path, asked).await;
    assert_eq!(status, 202, "{body}");
    let id = body["awaits_approval"].as_str().unwrap_or_else(|| panic!("{body}")).to_owned();
    assert_eq!(body["text"], format!("awaits a second person: approval {id}"));
    id
}

async fn approve(stand: &TestApi, user: &str, id: &str) -> (u16, Value) {
    post(stand, user, &format!("/api/v1/approvals/{id}/approve"), json!({"because": "checked"})).await
}

async fn state_of(stand: &TestApi, id: &str) -> String {
    get(stand, "eve", &format!("/api/v1/jobs/{id}")).await["state"].as_str().unwrap().to_owned()
}

fn says(body: &Value, words: &str) {
    assert!(body["error"].as_str().is_some_and(|error| error.contains(words)), "{words}: {body}");
}

async fn content_but_approvals(stand: &TestApi) -> Vec<(String, String)> {
    let mut content = stand.database_content().await;
    content.retain(|(table, _)| table != "pending_approvals");
    content
}

/// The time of every pending request is over.
async fn end_approvals(stand: &TestApi) {
    let sql = "UPDATE pending_approvals SET expires_at = requested_at - 1 WHERE state = 'pending'";
    sqlx::query(sql).execute(&stand.database.sqlite_pool().unwrap()).await.unwrap();
}

/// A body with which a change would be made, for each route that is gated.
async fn gated_bodies(stand: &TestApi) -> Vec<(&'static str, &'static str, Value)> {
    vec![
        ("/api/v1/jobs/{id}/resolve", "r1", json!({"as": "resend", "confirm_id": "r1"})),
        ("/api/v1/jobs/{id}/cancel", "w1", json!({})),
        ("/api/v1/batches", "", batch_body(stand, "declined", &["r2", "r3"]).await),
        ("/api/v1/dlq/{id}/replay", "d1", json!({})),
        ("/api/v1/dlq/{id}/discard", "d2", json!({})),
        ("/api/v1/pause-all", "", json!({})),
        ("/api/v1/resume-all", "", json!({})),
        ("/api/v1/providers/{name}/pause", "", json!({})),
        ("/api/v1/providers/{name}/resume", "", json!({})),
        ("/api/v1/providers/{name}/limits/{limit}", "", json!({"rate": "50/1s"})),
    ]
}

#[tokio::test]
async fn every_change_is_gated_or_listed() {
    let stand = stand(always()).await;
    let actor = crate::ledger::operator::Actor { os_user: "zoe@desk".to_owned(), program: None, reason: None };
    stand.database.pause_all(&actor).await.unwrap();
    let gated = gated_bodies(&stand).await;
    let before = content_but_approvals(&stand).await;
    for route in &CHANGES {
        let found = gated.iter().find(|(path, ..)| *path == route.path);
        let listed = UNGATED.iter().any(|(path, _)| *path == route.path);
        assert!(found.is_some() != listed, "{}: gate it, or list it as ungated with the reason", route.path);
        let Some((path, id, body)) = found else { continue };
        let address = example_address(&path.replace("{id}", id));
        let (status, refused) = post(&stand, "token", &address, body.clone()).await;
        assert_eq!(status, 403, "{path}: {refused}");
        says(&refused, "names no person");
        let id = awaited(&stand, "carol", &address, body.clone()).await;
        let (status, again) = post(&stand, "dave", &address, body.clone()).await;
        assert_eq!(status, 409, "{path}: {again}");
        says(&again, &id);
    }
    assert_eq!(content_but_approvals(&stand).await, before, "a gated call changes nothing");
    assert_eq!(gated.len() + UNGATED.len(), CHANGES.len());
    let (status, shown) = stand
        .post_by("/api/v1/providers/acme/limits/second", json!({"rate": "50/1s", "dry_run": true}), by("carol"))
        .await;
    assert_eq!((status, &shown["changed"]), (200, &json!(false)), "a dry run is no change");
}

/// Without rules the same calls are made at once.
#[tokio::test]
async fn calls_pass_without_rules() {
    let stand = stand(ApprovalsConfig::default()).await;
    for (path, id, body) in gated_bodies(&stand).await {
        let (status, body) = post(&stand, "carol", &example_address(&path.replace("{id}", id)), body).await;
        assert!(matches!(status, 200 | 201) && body["awaits_approval"].is_null(), "{path}: {status} {body}");
    }
    assert_eq!(get(&stand, "eve", "/api/v1/approvals").await["approvals"], json!([]));
}

#[tokio::test]
async fn second_person_approves_a_payment_once() {
    let stand = stand(always()).await;
    let asked = json!({"as": "succeeded", "reference": "ch_9", "because": "ticket 4711"});
    let id = awaited(&stand, "alice", "/api/v1/jobs/r1/resolve", asked).await;
    assert_eq!(state_of(&stand, "r1").await, "review");
    let shown = get(&stand, "alice", &format!("/api/v1/approvals/{id}")).await;
    assert_eq!(shown["text"], "resolve payment r1 of acme as succeeded, reference ch_9");
    assert_eq!((&shown["state"], &shown["because"]), (&json!("pending"), &json!("ticket 4711")));
    assert_eq!(shown["requested_by"], json!({"name": "alice", "role": "operator", "path": "user"}));
    assert_eq!((&shown["you"]["may_decide"], &shown["you"]["may_withdraw"]), (&json!(false), &json!(true)));
    assert_eq!(shown["sums"], json!([{"currency": "EUR", "jobs": 1, "amount": 1299}]));
    let for_bob = get(&stand, "bob", &format!("/api/v1/approvals/{id}")).await;
    assert_eq!(for_bob["you"], json!({"may_decide": true, "may_withdraw": false, "why_not": null}));
    for (user, words) in [("alice", "a second person decides"), ("eve", "role"), ("token", "names no person")] {
        let (status, refused) = approve(&stand, user, &id).await;
        assert_eq!(status, 403, "{user}: {refused}");
        says(&refused, words);
    }
    assert_eq!(state_of(&stand, "r1").await, "review");
    let (status, done) = approve(&stand, "bob", &id).await;
    assert_eq!((status, &done["state"]), (200, &json!("approved")), "{done}");
    assert_eq!(done["decided_by"], json!({"name": "bob", "role": "operator", "path": "user"}));
    let job = get(&stand, "eve", "/api/v1/jobs/r1").await;
    assert_eq!((&job["state"], &job["provider_reference"]), (&json!("succeeded"), &json!("ch_9")));
    let audit = &job["audit"][0];
    let both = "alice@curl/8.5.0 (operator, user), approved by bob@curl/8.5.0 (operator, user)";
    assert_eq!((&audit["os_user"], &audit["because"]), (&json!(both), &json!(format!("ticket 4711 (approval {id})"))));
    let (status, again) = approve(&stand, "carol", &id).await;
    assert_eq!(status, 409);
    says(&again, "is approved already");
}

#[tokio::test]
async fn approved_payments_are_sent_again() {
    let stand = stand(always()).await;
    let id = awaited(&stand, "alice", "/api/v1/jobs/r1/resolve", json!({"as": "resend", "confirm_id": "r1"})).await;
    assert_eq!(approve(&stand, "bob", &id).await.0, 200);
    assert_eq!(state_of(&stand, "r1").await, "waiting");
    let id = awaited(&stand, "alice", "/api/v1/dlq/d1/replay", json!({})).await;
    assert_eq!(approve(&stand, "carol", &id).await.0, 200);
    assert_eq!(state_of(&stand, "d1").await, "waiting");
    let id = awaited(&stand, "alice", "/api/v1/jobs/w1/cancel", json!({})).await;
    assert_eq!(approve(&stand, "bob", &id).await.0, 200);
    assert_eq!(state_of(&stand, "w1").await, "cancelled");
}

#[tokio::test]
async fn changed_payment_refuses_its_approval() {
    let stand = stand(rules(&[(GatedAction::Succeeded, Threshold::Always)])).await;
    let id = awaited(&stand, "alice", "/api/v1/jobs/r1/resolve", json!({"as": "succeeded"})).await;
    let (status, _) = post(&stand, "carol", "/api/v1/jobs/r1/resolve", json!({"as": "declined"})).await;
    assert_eq!(status, 200, "no rule is about this decision");
    let (status, refused) = approve(&stand, "bob", &id).await;
    assert_eq!(status, 409);
    says(&refused, "is refused: the job is `declined`");
    let shown = get(&stand, "eve", &format!("/api/v1/approvals/{id}")).await;
    assert_eq!((&shown["state"], &shown["decided_by"]["name"]), (&json!("refused"), &json!("bob")));
}

#[tokio::test]
async fn thresholds_count_payments_and_amounts() {
    let amount = Threshold::Amount { minor: 2_598, currency: "EUR".to_owned() };
    let configured = rules(&[
        (GatedAction::Declined, Threshold::Payments(3)),
        (GatedAction::Discard, amount),
        (GatedAction::Cancel, Threshold::Payments(2)),
    ]);
    let stand = stand(configured).await;
    let whoami = get(&stand, "eve", "/api/v1/whoami").await;
    let rule = json!({"action": "discard", "payments": null, "amount": 2598, "currency": "EUR"});
    assert_eq!((whoami["approvals"].as_array().unwrap().len(), &whoami["approvals"][1]), (3, &rule));
    assert_eq!(post(&stand, "alice", "/api/v1/jobs/w1/cancel", json!({})).await.0, 200);
    let three = batch_body(&stand, "declined", &["r1", "r2", "r3"]).await;
    let two = batch_body(&stand, "declined", &["r1", "r2"]).await;
    let dead = batch_body(&stand, "discard", &["d1", "d2"]).await;
    let id = awaited(&stand, "alice", "/api/v1/batches", three).await;
    awaited(&stand, "alice", "/api/v1/batches", dead).await;
    assert_eq!(post(&stand, "alice", "/api/v1/dlq/d1/discard", json!({})).await.0, 200, "one is below the sum");
    assert_eq!(post(&stand, "alice", "/api/v1/batches", two).await.0, 201);
    let shown = get(&stand, "bob", &format!("/api/v1/approvals/{id}")).await;
    assert_eq!((&shown["payments"], &shown["text"]), (&json!(3), &json!("resolve 3 payments as declined at 50/1s")));
}

#[tokio::test]
async fn approved_batch_begins_with_the_seen_set() {
    let stand = stand(always()).await;
    let body = batch_body(&stand, "declined", &["r1", "r2"]).await;
    let id = awaited(&stand, "alice", "/api/v1/batches", body.clone()).await;
    let (status, done) = approve(&stand, "bob", &id).await;
    assert_eq!(status, 200, "{done}");
    let batch = get(&stand, "eve", &format!("/api/v1/batches/{}", done["result_batch"].as_str().unwrap())).await;
    assert_eq!((&batch["state"], &batch["jobs"], &batch["digest"]), (&json!("running"), &json!(2), &Value::Null));
    let both = "alice@curl/8.5.0 (operator, user), approved by bob@curl/8.5.0 (operator, user)";
    assert_eq!(batch["created_by"], both);
    // Another set: one of its payments is decided before the approval.
    let body = batch_body(&stand, "discard", &["d1", "d2"]).await;
    let id = awaited(&stand, "alice", "/api/v1/batches", body).await;
    let one = awaited(&stand, "alice", "/api/v1/dlq/d1/discard", json!({})).await;
    assert_eq!(approve(&stand, "bob", &one).await.0, 200);
    let (status, refused) = approve(&stand, "bob", &id).await;
    assert_eq!(status, 409);
    says(&refused, "is refused: the selected payments have changed");
    assert_eq!(get(&stand, "eve", "/api/v1/batches").await["batches"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn limit_needs_an_admin_and_its_old_value() {
    let stand = stand(always()).await;
    let path = "/api/v1/providers/acme/limits/second";
    let rate = async || {
        let limits = stand.database.readable_rows(None).await.unwrap().remove(0).limits;
        limits.iter().find(|limit| limit.name == "second").unwrap().max_requests
    };
    let before = rate().await;
    let id = awaited(&stand, "carol", path, json!({"rate": "50/1s"})).await;
    let (status, refused) = approve(&stand, "bob", &id).await;
    assert_eq!(status, 403);
    says(&refused, "`limit` needs role `admin`, and bob has role `operator`");
    assert_eq!(rate().await, before);
    let other = awaited(&stand, "carol", path, json!({"rate": "70/1s"})).await;
    assert_eq!(approve(&stand, "dave", &id).await.0, 200);
    assert_ne!(rate().await, before);
    let (status, refused) = approve(&stand, "dave", &other).await;
    assert_eq!(status, 409);
    says(&refused, "limit `second` has changed since the request: it is 50/1s now");
    let (_, same) = post(&stand, "carol", path, json!({"rate": "50/1s"})).await;
    assert_eq!(same["changed"], false, "the same rate is no change: {same}");
}

#[tokio::test]
async fn pauses_and_resumes_are_approved() {
    let stand = stand(always()).await;
    let paused = async || stand.database.readable_rows(None).await.unwrap()[0].paused;
    let id = awaited(&stand, "alice", "/api/v1/providers/acme/pause", json!({})).await;
    assert!(!paused().await);
    assert_eq!(approve(&stand, "bob", &id).await.0, 200);
    assert!(paused().await);
    let resume = awaited(&stand, "alice", "/api/v1/providers/acme/resume", json!({})).await;
    let limit = awaited(&stand, "carol", "/api/v1/providers/acme/limits/second", json!({"rate": "9/1s"})).await;
    assert_eq!(approve(&stand, "dave", &limit).await.0, 200);
    let (status, refused) = approve(&stand, "bob", &resume).await;
    assert_eq!(status, 409);
    says(&refused, "acme has changed since the request");
    let resume = awaited(&stand, "alice", "/api/v1/providers/acme/resume", json!({})).await;
    assert_eq!(approve(&stand, "bob", &resume).await.0, 200);
    assert!(!paused().await);
    let (status, nothing) = post(&stand, "alice", "/api/v1/resume-all", json!({})).await;
    assert_eq!(status, 409);
    says(&nothing, "no pause of all providers is in force");
    let all = awaited(&stand, "alice", "/api/v1/pause-all", json!({"because": "incident 12"})).await;
    assert_eq!(approve(&stand, "bob", &all).await.0, 200);
    let back = awaited(&stand, "alice", "/api/v1/resume-all", json!({})).await;
    assert!(paused().await);
    let (status, body) = approve(&stand, "bob", &back).await;
    assert_eq!((status, paused().await), (200, false), "{body}");
    // A second pause of all is another pause.
    let all = awaited(&stand, "alice", "/api/v1/pause-all", json!({})).await;
    assert_eq!(approve(&stand, "bob", &all).await.0, 200);
    let back = awaited(&stand, "alice", "/api/v1/resume-all", json!({})).await;
    let actor = crate::ledger::operator::Actor { os_user: "zoe@desk".to_owned(), program: None, reason: None };
    stand.database.resume_all(&actor).await.unwrap();
    stand.database.pause_all(&actor).await.unwrap();
    let (status, refused) = approve(&stand, "bob", &back).await;
    assert_eq!(status, 409);
    says(&refused, "the pause of all providers has changed");
}

#[tokio::test]
async fn requests_are_refused_withdrawn_and_expire() {
    let stand = stand(always()).await;
    let ask = async |job: &str| {
        awaited(&stand, "alice", &format!("/api/v1/jobs/{job}/resolve"), json!({"as": "declined"})).await
    };
    let decide = async |user: &str, id: &str, what: &str, body: Value| {
        post(&stand, user, &format!("/api/v1/approvals/{id}/{what}"), body).await
    };
    let id = ask("r1").await;
    says(&decide("bob", &id, "refuse", json!({})).await.1, "`because`: is missing");
    says(&decide("alice", &id, "refuse", json!({"because": "no"})).await.1, "a second person decides");
    says(&decide("bob", &id, "withdraw", json!({})).await.1, "only alice, who requested it");
    let (status, refused) = decide("bob", &id, "refuse", json!({"because": "wrong payment"})).await;
    assert_eq!(
        (status, &refused["state"], &refused["decided_because"]),
        (200, &json!("refused"), &json!("wrong payment"))
    );
    assert_eq!(approve(&stand, "carol", &id).await.0, 409);
    let id = ask("r1").await;
    assert_eq!(decide("alice", &id, "withdraw", json!({})).await.1["state"], "withdrawn");
    assert_eq!(approve(&stand, "bob", &id).await.0, 409);
    let id = ask("r1").await;
    end_approvals(&stand).await;
    let (status, late) = approve(&stand, "bob", &id).await;
    assert_eq!(status, 409);
    says(&late, "is expired already");
    assert_eq!(state_of(&stand, "r1").await, "review");
    assert_eq!(get(&stand, "eve", "/api/v1/approvals?state=pending").await["approvals"], json!([]));
    let all = get(&stand, "eve", "/api/v1/approvals?limit=2").await;
    assert_eq!((&all["approvals"][0]["state"], &all["next"]), (&json!("expired"), &all["approvals"][1]["id"]));
    // The same action can be requested again, though the sweeper has not come.
    ask("r1").await;
    assert_eq!(stand.get_by("/api/v1/approvals/none", by("eve")).await.0, 404);
}
