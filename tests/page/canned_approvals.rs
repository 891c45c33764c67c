//! Prepared actions that two people decide: of each kind and state, with decisions that change them.

use std::sync::{Arc, Mutex};

use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::canned::{EARLIER, HOSTILE, NOW};

/// The reason with which each prepared action awaits a second person.
pub const NEEDS_TWO: &str = "needs two people";
/// The reason with which an approval comes too late.
pub const TOO_LATE: &str = "too late";
/// The approval of [`NEEDS_TWO`].
pub const PENDING_ID: &str = "0192f6c1a4b27c3d9e0f112233445566";

const EXPIRES: &str = "2026-03-02T12:00:00.000Z";
const IDS: [&str; 8] = [PENDING_ID, "own", "limit", "pause", "approved", "refused", "withdrawn", "expired"];

/// The decisions that were posted, by approval.
#[derive(Clone, Default)]
pub struct Approvals(Arc<Mutex<Vec<(String, String, Value)>>>);

/// The answer to an action that a second person must approve.
pub fn awaits() -> Response {
    let body = json!({"awaits_approval": PENDING_ID, "text": format!("awaits a second person: approval {PENDING_ID}"), "expires_at": EXPIRES});
    (StatusCode::ACCEPTED, axum::Json(body)).into_response()
}

/// The configured rules, as the caller's identity has them.
pub fn rules() -> Value {
    json!([
        {"action": "resend", "payments": 20, "amount": null, "currency": null},
        {"action": "resend", "payments": null, "amount": 100_000, "currency": "EUR"},
        {"action": "limit", "payments": null, "amount": null, "currency": null},
    ])
}

impl Approvals {
    /// The last decision: its verb and its body.
    pub fn last(&self) -> Option<(String, Value)> {
        self.0.lock().unwrap().last().map(|(_, verb, body)| (verb.clone(), body.clone()))
    }

    /// The answer to a request below `/api/v1/approvals`.
    pub fn answer(&self, method: &Method, parts: &[&str], query: &str, body: &[u8]) -> Response {
        let answer = match (method.as_str(), parts) {
            ("GET", []) => {
                let fits = |one: &Value| !query.contains("state=pending") || one["state"] == "pending";
                let all: Vec<Value> = IDS.iter().map(|id| self.approval(id)).filter(fits).collect();
                json!({"approvals": all, "next": null})
            }
            ("GET", [id]) if IDS.contains(id) => self.approval(id),
            ("POST", [id, verb]) if IDS.contains(id) => {
                let body: Value = serde_json::from_slice(body).unwrap();
                if body["because"] == TOO_LATE {
                    let error = json!({"error": "the payments have changed since: request it again"});
                    return (StatusCode::CONFLICT, axum::Json(error)).into_response();
                }
                self.0.lock().unwrap().push(((*id).to_owned(), (*verb).to_owned(), body));
                self.approval(id)
            }
            _ => return (StatusCode::NOT_FOUND, axum::Json(json!({"error": "no such approval"}))).into_response(),
        };
        axum::Json(answer).into_response()
    }

    fn approval(&self, id: &str) -> Value {
        let person = |name: &str, role: &str| json!({"name": name, "role": role, "path": "user"});
        let mut approval = json!({
            "id": id, "state": "pending", "action": "resend", "text": "send 120 payments again at 50/1s",
            "batch": {"digest": "ab".repeat(32), "rate": "50/1s"}, "job": null, "provider": null, "limit": null, "payments": 120,
            "sums": [{"currency": "EUR", "jobs": 119, "amount": 1_234_500}, {"currency": "KWD", "jobs": 1, "amount": 1_250}],
            "because": HOSTILE, "needed_role": "operator", "requested_by": person("bob", "operator"), "requested_at": EARLIER,
            "expires_at": EXPIRES, "decided_by": null, "decided_at": null, "decided_because": null, "result": null,
            "result_batch": null, "you": {"may_decide": true, "may_withdraw": false, "why_not": null},
        });
        let no_payments =
            json!({"batch": null, "payments": 0, "sums": [], "provider": "running", "needed_role": "admin"});
        let mut set = |more: Value| approval.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        match id {
            "own" => set(json!({
                "action": "cancel", "text": "cancel payment pay-1 of running", "job": "pay-1", "provider": "running", "batch": null, "payments": 1,
                "sums": [{"currency": "EUR", "jobs": 1, "amount": 1_299}], "requested_by": person("alice", "admin"),
                "you": {"may_decide": false, "may_withdraw": true, "why_not": "you requested it: another person decides"},
            })),
            "limit" => {
                set(no_payments);
                set(json!({
                    "action": "limit", "text": "change limit near of running from 100/1s to 200/1s",
                    "limit": {"name": "near", "from": "100/1s", "to": "200/1s", "until": EXPIRES},
                    "you": {"may_decide": false, "may_withdraw": false, "why_not": "needs role admin"},
                }));
            }
            "pause" => {
                set(no_payments);
                set(json!({"action": "pause", "text": "pause all providers", "provider": null}));
            }
            "approved" => set(json!({
                "state": "approved", "decided_by": person(HOSTILE, "admin"), "decided_at": NOW, "decided_because": HOSTILE,
                "result": "started batch running", "result_batch": "running",
            })),
            "refused" | "withdrawn" => {
                set(
                    json!({"state": id, "decided_by": person("carol", "operator"), "decided_at": NOW, "decided_because": "not today"}),
                );
            }
            "expired" => set(json!({"state": "expired", "expires_at": EARLIER})),
            _ => {}
        }
        let posted = self.0.lock().unwrap();
        if let Some((_, verb, body)) = posted.iter().rev().find(|(of, ..)| of == id) {
            let (state, result) = match verb.as_str() {
                "approve" => ("approved", json!("started batch running")),
                "refuse" => ("refused", Value::Null),
                _ => ("withdrawn", Value::Null),
            };
            set(json!({
                "state": state, "decided_by": person("alice", "admin"), "decided_at": NOW, "decided_because": body["because"],
                "result_batch": result.is_string().then_some("running"), "result": result,
            }));
        }
        approval
    }
}
