//! Prepared payments for the page: of every state, with hostile and with the longest texts.

use serde_json::{Value, json};

use crate::canned::{EARLIER, HOSTILE, JOB_STATES, NOW, long_name};

/// The payment whose id is its state.
fn job(state: &str) -> Value {
    json!({
        "id": state, "provider": "running", "state": state, "amount": 1_250, "currency": "KWD", "account": HOSTILE,
        "reference": HOSTILE, "attempts": 2, "wake_at": NOW, "reason": HOSTILE, "wait_reason": null, "wait_limit": null, "provider_reference": "ch_1", "created_at": EARLIER, "updated_at": EARLIER,
    })
}

pub fn jobs(empty: bool, query: &str) -> Value {
    if query.contains("provider=fresh") {
        let mut fresh = [job("waiting"), job("waiting")];
        fresh[0]["attempts"] = json!(0);
        (fresh[1]["id"], fresh[1]["attempts"]) =
            (json!("tried"), json!(if query.contains("account=tried") { 3 } else { 0 }));
        return json!({"jobs": fresh, "unreadable": [], "next": null, "searched_back_to": null});
    }
    let fits = |state: &str| !query.contains("state=") || query.contains(&format!("state={state}"));
    if query.contains("provider=torn") {
        let unreadable = json!([{"id": "torn-1", "problem": "column `wake_at` is no instant"}]);
        return json!({"jobs": [], "unreadable": unreadable, "next": "torn-1", "searched_back_to": null});
    }
    let jobs: Vec<Value> = JOB_STATES.iter().filter(|state| fits(state)).map(|state| job(state)).collect();
    let unreadable = json!([{"id": HOSTILE, "problem": HOSTILE}]);
    json!({"jobs": if empty { Vec::new() } else { jobs }, "unreadable": if empty { json!([]) } else { unreadable }, "next": null, "searched_back_to": null})
}

pub fn job_totals(empty: bool) -> Value {
    let sum = |currency: &str, jobs: u64| json!({"currency": currency, "jobs": jobs, "amount": 1_234_567_890_i64});
    match empty {
        true => json!({"at_least": false, "jobs": 0, "currencies": []}),
        false => json!({"at_least": true, "jobs": 100_000, "currencies": [sum("EUR", 99_000), sum("KWD", 1_000)]}),
    }
}

/// Payments with the longest ids, accounts and reasons.
pub fn fifty_jobs(query: &str) -> Value {
    let state = JOB_STATES.into_iter().find(|state| query.contains(&format!("state={state}"))).unwrap_or("unknown");
    let jobs = (0..50).map(|number| {
        let mut job = job(state);
        job["id"] = json!(format!("{:i<60}-{number:02}", "payment-"));
        job["provider"] = json!(long_name(number));
        job["account"] = json!("a".repeat(64));
        job["reason"] = json!("the provider answered with a text of its own, which is long ".repeat(4));
        job
    });
    json!({"jobs": jobs.collect::<Vec<_>>(), "unreadable": [], "next": "more", "searched_back_to": null})
}

pub fn details(state: &str) -> Value {
    if !JOB_STATES.contains(&state) {
        return Value::Null;
    }
    let mut details = job(state);
    let more = json!({
        "idempotency_key": "k", "cost": 1, "priority": 0, "maybe_charged": true,
        "request": {"method": "POST", "url": HOSTILE, "content_type": "a", "body": {"bytes": 1_024, "sha256": "ab"}},
        "requests": [{"number": 1, "began_at": EARLIER, "ended_at": NOW, "outcome": "unknown", "status": 503, "detail": HOSTILE, "counted": false}],
        "events": [{"state": state, "at": NOW, "published": false}],
        "audit": [{"at": NOW, "who": HOSTILE, "os_user": null, "program": null, "old_state": "dead", "new_state": "waiting", "cleared_maybe_charged": true, "because": HOSTILE}],
    });
    details.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let more = match state {
        // Received, delayed, sent, answered and finished, all within the millisecond of the response.
        "succeeded" => json!({
            "maybe_charged": false, "audit": [],
            "waited": {"reason": "waits for limit per-account", "past_reason": "waited for limit per-account", "wait_reason": "limit", "wait_limit": "per-account", "wait_detail": null, "since": "2026-03-01T11:57:55.100Z", "until": "2026-03-01T11:59:00.000Z", "request": 1},
            "requests": [{"number": 1, "began_at": "2026-03-01T11:59:59.100Z", "ended_at": NOW, "outcome": "accepted", "status": 200, "detail": "accepted", "counted": true}],
        }),
        "dead" => {
            json!({"requests": [{"number": 1, "began_at": EARLIER, "ended_at": NOW, "outcome": "not_sent", "status": null, "detail": "connection refused", "counted": true}]})
        }
        _ => json!({}),
    };
    details.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    details
}

pub fn explained(state: &str) -> Value {
    json!({
        "id": state, "state": state, "provider": "running", "summary": HOSTILE,
        "checks": [{"name": "recorded", "passed": true, "at": EARLIER, "text": HOSTILE}, {"name": "limit", "passed": false, "at": null, "text": HOSTILE}, {"name": "outcome", "passed": false, "at": null, "text": null}],
        "blocked_at": {"check": "limit", "limit": "per-minute", "allows": "600/1m", "used": 600, "starts_at": "2026-03-01T12:00:12.400Z", "starts_in_ms": 12_400, "jobs_ahead": 37, "exact": false},
        "backlog": {"account": HOSTILE, "priority": 0, "position": 17, "waiting": 1_230, "blocked": {"reason": "limit", "limit": "per-account", "text": HOSTILE, "until": NOW, "left_ms": 0}},
    })
}

/// Messages that could be no payment. The older one's beginning is not recorded, and one row is unreadable.
pub fn rejected(empty: bool) -> Value {
    let message = |id: u32, reason: &str, head: Option<&str>| {
        json!({
            "id": id, "at": EARLIER, "provider": "running", "job_id": null, "reason": reason, "detail": HOSTILE, "head": head,
            "body_bytes": 1_234, "body_sha256": "ab", "masked": false, "decision": null, "decided_at": null, "decided_by": null, "os_user": null,
            "program": null, "because": null,
        })
    };
    let messages = json!([message(2, "malformed", Some(HOSTILE)), message(1, "bad_amount", None)]);
    let unreadable = json!([{"id": "3", "problem": HOSTILE}]);
    json!({"messages": if empty { json!([]) } else { messages }, "unreadable": if empty { json!([]) } else { unreadable }, "next": null})
}
