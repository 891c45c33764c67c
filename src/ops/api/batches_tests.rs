//! Tests of decisions in bulk over HTTP: preview, confirmation, refusals, progress and stop; each exchange is checked
//! against the description.

use serde_json::{Value, json};

use super::tests::TestApi;
use crate::ledger::database::Database;
use crate::ledger::decision_batches::TurnAt;

const WORKER: &str = "worker-a";

/// A server with two payments in review, one dead and one waiting.
async fn stand() -> TestApi {
    let stand = TestApi::new().await;
    for (id, state) in [("r1", "review"), ("r2", "review"), ("d1", "dead"), ("w1", "waiting")] {
        stand.add_job(id, "x", state).await;
    }
    stand
}

async fn preview(stand: &TestApi, decision: &str, selection: Value) -> Value {
    let body = json!({"decision": decision, "selection": selection});
    let (status, answer) = stand.post("/api/v1/batches/preview", body).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

/// Decides about the next payment, as a worker does.
async fn apply_next(database: &Database) {
    let batches = database.lease_batches(WORKER).await.unwrap();
    let turn = database.next_turns(&batches[0].id, 1).await.unwrap().remove(0);
    let at = TurnAt { batch: &batches[0], turn: &turn, worker: WORKER };
    database.apply_turn(&at, turn.member.seen_fence).await.unwrap();
    database.release_batches(WORKER).await.unwrap();
}

#[tokio::test]
async fn preview_counts_and_changes_nothing() {
    let stand = stand().await;
    let before = stand.database_content().await;
    let by_filter = preview(&stand, "declined", json!({"filter": {"provider": "acme"}})).await;
    let by_ids = preview(&stand, "declined", json!({"ids": ["r2", "r1", "d1", "missing", "r1"]})).await;
    assert_eq!(by_filter["jobs"], 2);
    assert_eq!(by_filter["sums"], json!([{"currency": "EUR", "jobs": 2, "amount": 2598}]));
    assert_eq!((&by_filter["not_applicable"], &by_filter["at_most"]), (&json!([]), &json!(false)));
    assert_eq!(by_ids["digest"], by_filter["digest"], "the same payments in another order");
    let refusals: Vec<_> = by_ids["not_applicable"].as_array().unwrap().iter().collect();
    assert_eq!(refusals.len(), 2, "{refusals:?}");
    for (code, example) in [("no_such_job", "missing"), ("wrong_state", "d1")] {
        let found = refusals.iter().find(|refusal| refusal["refusal"] == code).unwrap();
        assert_eq!((&found["jobs"], &found["example"]), (&json!(1), &json!(example)));
    }
    let resend = preview(&stand, "resend", json!({"ids": ["r1", "r2"]})).await;
    assert!(resend["digest"] != by_filter["digest"] && resend["at_most"] == true, "{resend}");
    assert_eq!(stand.database_content().await, before);
}

#[tokio::test]
async fn batch_is_confirmed_applied_and_reported() {
    let stand = stand().await;
    let selection = json!({"filter": {"state": "review,dead"}});
    let seen = preview(&stand, "declined", selection.clone()).await;
    assert_eq!((&seen["jobs"], &seen["not_applicable"][0]["refusal"]), (&json!(2), &json!("wrong_state")));
    let body = json!({"decision": "declined", "selection": selection, "digest": seen["digest"],
                      "rate": "600/1m", "because": "ticket 4711"});
    let (status, batch) = stand.post("/api/v1/batches", body.clone()).await;
    assert_eq!((status, &batch["state"], &batch["remaining"]), (201, &json!("running"), &json!(2)), "{batch}");
    assert_eq!((&batch["rate"], &batch["person"]), (&json!("600/1m"), &json!("alice@curl/8.5.0")));
    let (status, again) = stand.post("/api/v1/batches", body).await;
    assert!(status == 409 && again["error"].as_str().unwrap().contains("already"), "{again}");
    let path = format!("/api/v1/batches/{}", batch["id"].as_str().unwrap());
    apply_next(&stand.database).await;
    // Another operator is faster.
    let resolve = json!({"as": "succeeded", "confirm_id": "r2"});
    assert_eq!(stand.post("/api/v1/jobs/r2/resolve", resolve).await.0, 200);
    apply_next(&stand.database).await;
    let (status, ended) = stand.get(&path).await;
    assert_eq!(
        (status, &ended["state"], &ended["applied"], &ended["remaining"]),
        (200, &json!("finished"), &json!(1), &json!(0))
    );
    assert_eq!(
        (&ended["refused"][0]["refusal"], &ended["refused"][0]["example"]),
        (&json!("wrong_state"), &json!("r2"))
    );
    let (_, jobs) = stand.get(&format!("{path}/jobs")).await;
    let outcomes: Vec<_> = jobs["jobs"].as_array().unwrap().iter().map(|job| (&job["id"], &job["outcome"])).collect();
    assert_eq!(outcomes, [(&json!("r1"), &json!("applied")), (&json!("r2"), &json!("refused"))]);
    let (_, refused) = stand.get(&format!("{path}/jobs?outcome=refused&limit=1")).await;
    assert_eq!((&refused["jobs"][0]["number"], &refused["next"]), (&json!(2), &json!(2)));
    let audit = stand.get("/api/v1/jobs/r1").await.1["audit"][0].clone();
    assert_eq!((&audit["os_user"], &audit["program"]), (&json!("alice@curl/8.5.0"), &json!("sluicegate batch")));
    let because = format!("ticket 4711 (batch {} of database file)", batch["id"].as_str().unwrap());
    assert_eq!(audit["because"], because);
    let (_, page) = stand.get("/api/v1/batches?limit=1").await;
    assert_eq!((&page["batches"][0]["id"], &page["next"]), (&batch["id"], &batch["id"]));
    let (_, rest) = stand.get(&format!("/api/v1/batches?after={}", batch["id"].as_str().unwrap())).await;
    assert_eq!(rest, json!({"batches": [], "next": null}));
    let (status, refusal) = stand.post(&format!("{path}/stop"), json!({})).await;
    assert!(status == 409 && refusal["error"].as_str().unwrap().contains("finished already"), "{refusal}");
}

#[tokio::test]
async fn changed_set_begins_nothing() {
    let stand = stand().await;
    let selection = json!({"filter": {"state": "review"}});
    let seen = preview(&stand, "resend", selection.clone()).await;
    stand.add_job("r3", "x", "review").await;
    let before = stand.database_content().await;
    let body = |changes: Value| {
        let mut body = json!({"decision": "resend", "selection": selection, "digest": seen["digest"],
                              "because": "seen", "confirm_jobs": 2});
        body.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        body
    };
    let ids = json!({"ids": ["r1", "r2"]});
    for (changes, status, words) in [
        (json!({}), 409, "have changed since the preview"),
        (json!({"digest": "0"}), 409, "have changed"),
        (json!({"selection": ids, "confirm_jobs": 3}), 400, "`confirm_jobs` must be the number of payments"),
        (json!({"selection": ids, "confirm_jobs": null}), 400, "sent again, 2"),
        (json!({"selection": ids, "because": "  "}), 400, "`because`: is empty"),
        (json!({"selection": ids, "rate": "0/1s"}), 400, "`rate`: is 0"),
        (json!({"selection": {}}), 400, "give either `filter` or `ids`"),
        (json!({"selection": {"filter": {"colour": "red"}}}), 400, "unknown field `colour`"),
        (json!({"selection": {"filter": {"state": "lost"}}}), 400, "`state`: must be"),
        (json!({"decision": "charge"}), 400, "unknown variant `charge`"),
    ] {
        let (given, answer) = stand.post("/api/v1/batches", body(changes.clone())).await;
        assert!(given == status && answer["error"].as_str().unwrap().contains(words), "{changes}: {given} {answer}");
    }
    assert_eq!(stand.database_content().await, before);
    let good = body(json!({"selection": ids}));
    assert_eq!(stand.post("/api/v1/batches", good).await.0, 201, "the set that was seen");
}

#[tokio::test]
async fn stop_leaves_the_rest() {
    let stand = stand().await;
    let selection = json!({"ids": ["r1", "r2"]});
    let seen = preview(&stand, "succeeded", selection.clone()).await;
    let body = json!({"decision": "succeeded", "selection": selection, "digest": seen["digest"], "because": "seen"});
    let id = stand.post("/api/v1/batches", body).await.1["id"].as_str().unwrap().to_owned();
    apply_next(&stand.database).await;
    let (status, stopped) = stand.post(&format!("/api/v1/batches/{id}/stop"), json!({})).await;
    assert_eq!((status, &stopped["state"], &stopped["remaining"]), (200, &json!("stopped"), &json!(1)), "{stopped}");
    assert_eq!(stopped["stopped_by"], "alice@curl/8.5.0");
    assert_eq!(stand.database.lease_batches(WORKER).await.unwrap(), []);
    assert_eq!(stand.get("/api/v1/jobs/r2").await.1["state"], "review");
    for path in ["/api/v1/batches/none", "/api/v1/batches/none/jobs"] {
        assert_eq!(stand.get(path).await.0, 404, "{path}");
    }
    assert_eq!(stand.post("/api/v1/batches/none/stop", json!({})).await.0, 404);
}

#[tokio::test]
async fn ten_thousand_ids_fit_a_request() {
    let stand = stand().await;
    let mut ids: Vec<String> = (0..9_999).map(|number| format!("{number:064}")).collect();
    ids.push("r1".to_owned());
    let seen = preview(&stand, "declined", json!({"ids": ids})).await;
    assert_eq!((&seen["jobs"], &seen["not_applicable"][0]["jobs"]), (&json!(1), &json!(9_999)));
    ids.push("r2".to_owned());
    let body = json!({"decision": "declined", "selection": {"ids": ids}});
    let (status, answer) = stand.post("/api/v1/batches/preview", body).await;
    assert!(status == 400 && answer["error"].as_str().unwrap().contains("got 10001"), "{answer}");
}

/// A payment that is sent again may be charged again, so its id is required twice.
#[tokio::test]
async fn resend_requires_the_id_again() {
    let stand = stand().await;
    for body in [
        json!({"as": "resend"}),
        json!({"as": "resend", "confirm_id": "r2"}),
        json!({"as": "declined", "confirm_id": "r2"}),
    ] {
        let (status, answer) = stand.post("/api/v1/jobs/r1/resolve", body).await;
        assert!(status == 400 && answer["error"].as_str().unwrap().starts_with("`confirm_id` must be"), "{answer}");
    }
    assert_eq!(stand.get("/api/v1/jobs/r1").await.1["state"], "review");
    assert_eq!(stand.post("/api/v1/jobs/r1/resolve", json!({"as": "resend", "confirm_id": "r1"})).await.0, 200);
}
