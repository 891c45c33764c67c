//! Prepared histories: the last minutes of a card, and a recorded hour with a hole, a 429 and marks.

use serde_json::{Value, json};

use crate::canned::{HOSTILE, NOW};

pub fn history() -> Value {
    let point = |minute: u32| json!({"at": format!("2026-03-01T11:{minute}:00.000Z"), "rate_per_s": f64::from(minute), "limit_per_s": 100.0, "waiting": 60 - minute, "throttled": minute == 53});
    json!({"step_ms": 60_000, "points": (50..60).map(point).collect::<Vec<_>>()})
}

/// An hour with unknown times, a 429 and marks. `cold` was added eight minutes ago, and `closed` was unknown for an hour.
pub fn recorded(empty: bool, query: &str) -> Value {
    let field = |name: &str| {
        let mut fields = url::form_urlencoded::parse(query.as_bytes());
        fields.find(|(given, _)| given == name).map(|(_, value)| value.into_owned()).unwrap_or_default()
    };
    let (provider, from) = (field("provider"), field("from"));
    let first = if provider == "cold" { 52 } else { 0 };
    let empty = empty || (provider == "closed" && from.as_str() > "2026-03-01T10:30");
    // A point has the instant of its end.
    let begin = (0..60).find(|minute| format!("2026-03-01T11:{minute:02}:00.000Z") > from).unwrap_or(0);
    let point = |minute: u32| {
        let known = !(20..25).contains(&minute) && minute >= first && !empty;
        let figure = |value: Value| if known { value } else { Value::Null };
        json!({
            "at": format!("2026-03-01T11:{minute:02}:00.000Z"), "started": figure(json!(minute * 60)),
            "started_per_s": figure(json!(f64::from(minute))), "finished": figure(json!(minute * 59)),
            "finished_per_s": figure(json!(f64::from(minute) - 0.5)), "throttled": figure(json!(u32::from(minute == 53))),
            "waiting": figure(json!(60 - minute)), "review": figure(json!(2)), "limit_per_s": figure(json!(100.0)),
        })
    };
    let mark = |minute: u32, kind: &str| json!({"at": format!("2026-03-01T11:{minute:02}:30.000Z"), "kind": kind, "text": HOSTILE});
    let marks = [mark(10, "limit"), mark(19, "worker_started"), mark(40, "breaker_opened")];
    json!({
        "provider": provider, "from": format!("2026-03-01T11:{begin:02}:00.000Z"), "to": NOW, "step_ms": 60_000, "recorded_until": NOW,
        "points": (begin..60).map(point).collect::<Vec<_>>(), "marks": if empty { json!([]) } else { json!(marks) },
    })
}
