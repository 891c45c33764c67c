//! A cut-off on real traffic: the payments that metric and `status` say will miss it are those that missed it.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;

use crate::rig::{Rig, jobs};

/// At 20 a second, two minutes: longer than until the cut-off.
const BACKLOG: u32 = 2_400;
const PER_SECOND: u64 = 20;
/// A cut-off is at a full minute; this one is at least so far ahead.
const AHEAD_MIN_S: i64 = 45;
/// The first reports of the worker say nothing about its rate.
const SETTLED_AFTER: Duration = Duration::from_secs(12);
/// Readouts are a few seconds old.
const SLACK: u64 = PER_SECOND * 4;

struct Shown {
    at: Timestamp,
    status: u64,
    metric: u64,
}

fn acme(rig: &Rig) -> Value {
    let status: Value = serde_json::from_str(&rig.sluicegate(&["status", "--json"])).unwrap();
    status["providers"].as_array().unwrap().iter().find(|provider| provider["name"] == "acme").unwrap().clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forecast_of_missed_payments_comes_true() {
    let mut rig = Rig::prepare().await;
    rig.publish(jobs("acme", BACKLOG)).await;
    let minute = (Timestamp::now().as_second() + AHEAD_MIN_S) / 60 + 1;
    let cutoff = Timestamp::from_second(minute * 60).unwrap();
    let rule = cutoff.strftime("%H:%M UTC").to_string();
    let (before, after) = rig.rows.split_once("cutoff = \"").unwrap();
    let (_, after) = after.split_once('"').unwrap();
    let rows = format!("{before}cutoff = \"{rule}\"{after}");
    rig.apply(&rows);
    rig.run();
    let started = Timestamp::now();
    let mut shown = Vec::new();
    let mut text = String::new();
    while cutoff.duration_since(Timestamp::now()) > jiff::SignedDuration::from_secs(2) {
        let at = Timestamp::now();
        // Before its first reports, the worker shows no forecast.
        if at.duration_since(started).unsigned_abs() > SETTLED_AFTER {
            let (provider, scrape) = (acme(&rig), rig.scrape().await);
            let metric = scrape.value("sluicegate_cutoff_missed_payments", &[("provider", "acme")]);
            let forecast = &provider["cutoff"]["forecast"];
            assert_eq!(
                (&provider["cutoff"]["rule"], &forecast["kind"]),
                (&Value::from(rule.as_str()), &"missed".into())
            );
            let status = forecast["payments"].as_u64().unwrap();
            shown.push(Shown { at, status, metric: metric.to_string().parse().unwrap() });
            if text.is_empty() {
                text = rig.sluicegate(&["status"]);
            }
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert!(text.contains("clears at ") && text.contains("payments miss the cut-off at "), "{text}");
    let left = cutoff.duration_since(Timestamp::now()).unsigned_abs();
    tokio::time::sleep(left).await;
    let came = u64::from(BACKLOG) - rig.report("acme").charges;
    assert!(came > 200 && shown.len() > 5, "{came} missed it, {} readouts", shown.len());
    for Shown { at, status, metric } in &shown {
        let tolerated = SLACK.max(came / 10);
        assert!(status.abs_diff(came) <= tolerated, "{at}: status says {status}, and {came} missed it");
        assert!(status.abs_diff(*metric) <= SLACK, "{at}: status says {status}, the metric {metric}");
    }
    // From now on the cut-off of tomorrow counts, and every payment is in time for it.
    let mut next = acme(&rig)["cutoff"].clone();
    while next["at"].as_str().unwrap().parse::<Timestamp>().unwrap() <= cutoff {
        tokio::time::sleep(Duration::from_millis(200)).await;
        next = acme(&rig)["cutoff"].clone();
    }
    assert_eq!(next["forecast"]["kind"], "on_time", "{next}");
}
