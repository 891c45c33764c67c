//! Expected values of each expression of the dashboard and of the alerts, for the deployment of [`crate::readouts`].
//!
//! An expression without an expected value is an error, so a new panel needs one here.

use serde_json::Value;

use crate::alerts::{folder, values};
use crate::dashboard::{expressions, filled};
use crate::prometheus::Prometheus;

/// Figures from SQL, the broker and the provider.
pub struct Truth {
    /// Payments of `shut` that wait; it is paused.
    pub unmoving: u64,
    /// Payments of `busy` that were not sent.
    pub unsent: u64,
    /// Rate of `busy`, and the tolerance for readouts that are a few seconds old.
    pub per_second: u64,
    pub slack: u64,
    pub workers: u64,
    /// Messages of `shut` in the broker's queue.
    pub queued: u64,
    /// Payments of `mute` whose outcome is unknown, and the age in seconds of the oldest, by SQL.
    pub unknown: u64,
    pub oldest_unknown_s: f64,
    /// Clear time of `busy` from `status`, in seconds.
    pub drain_s: f64,
}

/// All samples whose labels contain these words lie in the range, and there are at least this many.
struct Expected {
    words: &'static str,
    least: f64,
    most: f64,
    samples: usize,
}

fn within(words: &'static str, least: f64, most: f64) -> Expected {
    Expected { words, least, most, samples: 1 }
}

fn exactly(words: &'static str, value: f64) -> Expected {
    within(words, value, value)
}

/// The sample may be missing.
fn if_any(words: &'static str, least: f64, most: f64) -> Expected {
    Expected { samples: 0, ..within(words, least, most) }
}

#[allow(clippy::cast_precision_loss, reason = "small counts")]
fn expected(title: &str, expression: &str, truth: &Truth) -> Option<Vec<Expected>> {
    let rate = truth.per_second as f64;
    let flow = |words| within(words, rate * 0.6, rate * 1.2);
    let (unsent, slack) = (truth.unsent as f64, truth.slack as f64);
    let has = |words: &str| expression.contains(words);
    Some(match title {
        "Limits in use" if has("shadow=\"true\"") => vec![within("rehearsed", 0.0, 30.0)],
        "Limits in use" => vec![exactly("per-hour", 1.0), within("per-second", 0.2, 1.1)],
        "Requests started against the limit" if has("lateness") => vec![flow("busy"), within("shut", 0.0, 0.3)],
        "Requests started against the limit" => {
            vec![exactly("busy", rate), within("shut", 2.0 / 3_601.0, 2.0 / 3_599.0)]
        }
        "429s by provider" | "Circuit breaker" | "Reconciliation" | "Review and dead" => vec![exactly("", 0.0)],
        "Lanes" => vec![exactly("paused shut", truth.workers as f64), within("busy", 1.0, truth.workers as f64)],
        "Waiting" => vec![exactly("shut", truth.unmoving as f64), within("busy", unsent - slack, unsent + slack)],
        // All jobs were recorded since this deployment started.
        "Oldest" => vec![within("shut", 5.0, 90.0), within("busy", 0.0, 90.0)],
        // The broker's own count: the other payments that wait are in the ledger.
        "Queue" => {
            vec![exactly("shut", truth.queued as f64), exactly("mute", 0.0), within("busy", 0.0, unsent + slack)]
        }
        "Unknown by age" if has("ledger_jobs") => {
            vec![exactly("mute", truth.unknown as f64), exactly("shut", 0.0), exactly("busy", 0.0)]
        }
        // The jobs are counted every 15 s at least, and scraped some seconds later.
        "Unknown by age" => {
            let age_s = truth.oldest_unknown_s;
            vec![within("mute", (age_s - 25.0).max(0.1), age_s + 3.0), exactly("shut", 0.0), exactly("busy", 0.0)]
        }
        // Compared with `status`; at the earliest the time that the limit allows.
        "Clears in" => {
            let least = (unsent - slack) / rate;
            let (status, none) = (truth.drain_s, Expected { samples: 0, ..exactly("shut", f64::NAN) });
            vec![within("busy", least.max(status * 0.8 - 6.0), status * 1.2 + 6.0), none]
        }
        "Permits granted and refused" if has("granted") => vec![flow("busy")],
        "Permits granted and refused" if has("refused") => vec![if_any("", 0.0, 200.0)],
        "Permits granted and refused" => vec![if_any("", 0.0, 2.0)],
        "Wait for a permit" => vec![within("busy", 0.0, 10.0)],
        "Lateness of starts" => vec![within("busy", 0.0, 1.0)],
        "Response times" => vec![within("busy", 0.001, 2.0)],
        "Active" => vec![exactly("shut", 0.0), within("busy", 0.0, 400.0)],
        "Outcomes" => vec![flow("busy succeeded"), if_any("busy dead", 0.0, 0.0), if_any("busy review", 0.0, 0.0)],
        "Responses by class" => vec![flow("busy 2xx"), if_any("busy 4xx", 0.0, 0.0), if_any("busy 5xx", 0.0, 0.0)],
        "Delayed and requeued" => vec![if_any("", 0.0, 200.0)],
        "Rejected messages" => vec![if_any("", 0.0, 0.0)],
        "Backends" => vec![exactly("database", 1.0), exactly("queue", 1.0), exactly("limiter", 1.0)],
        "Round trips" => vec![Expected { samples: 3, ..within("", 0.0, 2.0) }],
        "Settings" if has("settings_version") => vec![Expected { samples: 2, ..within("", 2.0, 1_000.0) }],
        "Settings" => vec![exactly("", 0.0)],
        "Workers" if has("build_info") => vec![Expected { samples: 2, ..exactly("", 1.0) }],
        "Workers" => vec![Expected { samples: 2, ..within("", 0.0, 200.0) }],
        "variable \"provider\"" => vec![Expected { samples: 2, ..within("", 0.0, 1.0) }],
        _ => return None,
    })
}

/// Values of an instant vector, each with its labels.
async fn samples(prometheus: &Prometheus, expression: &str) -> Vec<(String, f64)> {
    let sample = |sample: &Value| {
        let labels = sample["metric"].as_object().unwrap().values();
        let mut words: Vec<&str> = labels.filter_map(Value::as_str).collect();
        words.sort_unstable();
        (words.join(" "), sample["value"][1].as_str().unwrap().parse().unwrap())
    };
    prometheus.query(expression).await.iter().map(sample).collect()
}

fn differs(expected: &Expected, samples: &[(String, f64)]) -> bool {
    let mine = |(labels, _): &&(String, f64)| expected.words.split(' ').all(|word| labels.contains(word));
    let mine: Vec<f64> = samples.iter().filter(mine).map(|(_, value)| *value).collect();
    // A quantile without observations is NaN.
    let wrong = |value: &&f64| !value.is_nan() && !(expected.least..=expected.most).contains(*value);
    mine.len() < expected.samples || mine.iter().find(wrong).is_some()
}

/// Differences from the expected values.
pub async fn judge(prometheus: &Prometheus, truth: &Truth) -> Vec<String> {
    let mut problems = Vec::new();
    for (title, expression) in expressions() {
        let Some(all) = expected(&title, &expression, truth) else {
            problems.push(format!("{title}: no expected value for {expression}"));
            continue;
        };
        let samples = samples(prometheus, &filled(&expression)).await;
        for expected in all.iter().filter(|expected| differs(expected, &samples)) {
            let Expected { words, least, most, .. } = expected;
            problems.push(format!("{title}: {words} not within {least} and {most}: {samples:?}: {expression}"));
        }
    }
    let rules = std::fs::read_to_string(folder().join("alerts.yml")).unwrap();
    for expression in values(&rules, "expr") {
        let fires = samples(prometheus, &expression).await;
        // Only two alerts are expected: the limits are used in full, and `shut` is paused.
        let earned = expression.contains("limit_in_use")
            || expression.contains("queue_ready_messages") && fires.iter().all(|(labels, _)| labels == "shut");
        if !fires.is_empty() && !earned {
            problems.push(format!("an unexpected alert: {expression}: {fires:?}"));
        }
    }
    problems
}
