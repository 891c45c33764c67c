//! Prepared batches: a preview of each selection, a set that has changed since, and batches that run, end and are refused.

use std::sync::{Arc, Mutex};

use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::canned::{EARLIER, HOSTILE, NOW};

/// The reason that makes the first confirmation come too late.
pub const TOO_LATE: &str = "too late";
/// Payments that match any filter.
pub const MATCHING: u64 = 24;

#[derive(Default)]
struct Posted {
    bodies: Vec<(String, Value)>,
    stopped: bool,
}

/// The requests that changed or previewed something.
#[derive(Clone, Default)]
pub struct Batches {
    posted: Arc<Mutex<Posted>>,
}

impl Batches {
    /// The last body that was posted to a path below `/api/v1/batches`.
    pub fn last(&self, path: &str) -> Value {
        let posted = self.posted.lock().unwrap();
        posted.bodies.iter().rev().find(|(to, _)| to == path).map_or(Value::Null, |(_, body)| body.clone())
    }

    fn count(&self, path: &str) -> usize {
        self.posted.lock().unwrap().bodies.iter().filter(|(to, _)| to == path).count()
    }

    /// The answer to a request below `/api/v1/batches`.
    pub fn answer(&self, method: &Method, parts: &[&str], body: &[u8]) -> Response {
        let path = parts.join("/");
        if method == Method::POST {
            let body = serde_json::from_slice(body).unwrap();
            self.posted.lock().unwrap().bodies.push((path.clone(), body));
        }
        let answer = match (method.as_str(), parts) {
            ("POST", ["preview"]) => self.preview(),
            ("POST", []) if self.comes_too_late() => {
                let error = json!({"error": "the selected payments have changed since the preview: 1 more"});
                return (StatusCode::CONFLICT, axum::Json(error)).into_response();
            }
            ("POST", []) => return (StatusCode::CREATED, axum::Json(self.batch("running"))).into_response(),
            ("POST", ["running", "stop"]) => {
                self.posted.lock().unwrap().stopped = true;
                self.batch("running")
            }
            ("GET", []) => json!({"batches": [self.batch("running"), self.batch("finished")], "next": null}),
            ("GET", [id @ ("running" | "finished")]) => self.batch(id),
            ("GET", [_, "jobs"]) => json!({"jobs": refused(), "next": null}),
            _ => return (StatusCode::NOT_FOUND, axum::Json(json!({"error": "no such batch"}))).into_response(),
        };
        axum::Json(answer).into_response()
    }

    fn comes_too_late(&self) -> bool {
        self.last("")["because"] == TOO_LATE && self.count("") == 1
    }

    /// A set that has changed has one payment more.
    fn preview(&self) -> Value {
        let asked = self.last("preview");
        let ticked = asked["selection"]["ids"].as_array().map(|ids| ids.len() as u64);
        let jobs = ticked.unwrap_or(MATCHING) + u64::from(self.count("") == 1);
        let left_out = json!([{"refusal": "attempt_in_progress", "text": HOSTILE, "jobs": 2, "example": "pay-7"}]);
        json!({
            "decision": asked["decision"], "jobs": jobs, "digest": format!("digest-of-{jobs}"), "at_most": true,
            "sums": [{"currency": "EUR", "jobs": jobs, "amount": 31_176}, {"currency": "KWD", "jobs": 1, "amount": 1_250}],
            "not_applicable": left_out,
        })
    }

    fn batch(&self, id: &str) -> Value {
        let stopped = self.posted.lock().unwrap().stopped;
        let (state, applied, remaining) = match (id, stopped) {
            ("finished", _) => ("finished", 22, 0),
            (_, true) => ("stopped", 10, 12),
            _ => ("running", 10, 12),
        };
        json!({
            "id": id, "decision": "declined", "state": state, "jobs": MATCHING, "applied": applied, "remaining": remaining,
            "refused": [{"refusal": "changed", "text": HOSTILE, "jobs": 2, "example": "pay-9"}],
            "rate": "50/1s", "created_at": EARLIER, "person": HOSTILE, "database_user": "sluicegate_worker", "because": HOSTILE,
            "finished_at": if state == "running" { Value::Null } else { json!(NOW) },
            "sums": [{"currency": "EUR", "jobs": MATCHING, "amount": 31_176}], "worker": "w-1",
            "stopped_database_user": if state == "stopped" { json!("sluicegate_worker") } else { Value::Null },
            "stopped_by": if state == "stopped" { json!("bob@desk") } else { Value::Null },
        })
    }
}

fn refused() -> Value {
    let job = |number: u32| json!({"number": number, "id": format!("pay-{number}"), "outcome": "refused", "refusal": "changed", "text": HOSTILE, "at": NOW});
    json!([job(9), job(11)])
}
