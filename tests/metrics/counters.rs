//! Counters compared with the provider's records. The count of 429s stays zero unless the provider allows less than the
//! row.

use crate::rig::{Rig, jobs};
use crate::scrape::Scrape;

const JOBS: u32 = 30;

/// A counter of a provider, as an integer.
fn count(scrape: &Scrape, name: &str, provider: &str, label: Option<(&str, &str)>) -> u64 {
    let labels: Vec<(&str, &str)> = [("provider", provider)].into_iter().chain(label).collect();
    let value = scrape.value(&format!("sluicegate_{name}"), &labels);
    assert!(value.fract() == 0.0 && value >= 0.0, "{name} {provider}: {value}");
    format!("{value:.0}").parse().unwrap()
}

/// A paused lane records what is published, and sends nothing of it: an alert must see the payments that wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payments_of_a_paused_lane_are_shown() {
    let mut rig = Rig::prepare().await;
    rig.sluicegate(&["provider", "pause", "crate"]);
    rig.publish(jobs("crate", 8)).await;
    rig.publish(jobs("acme", 2)).await;
    rig.run();
    rig.await_succeeded(2).await;
    let all_recorded = |scrape: &Scrape| count(scrape, "queue_ready_messages", "crate", None) == 0;
    let mut scrape = rig.scrape().await;
    for _ in 0..20 {
        if all_recorded(&scrape) {
            break;
        }
        scrape = rig.scrape().await;
    }
    assert!(all_recorded(&scrape), "{}", scrape.text);
    // Each of the eight counts once.
    assert_eq!((count(&scrape, "waiting_jobs", "crate", None), count(&scrape, "waiting_jobs", "acme", None)), (8, 0));
    assert_eq!(rig.report("crate").requests, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_match_the_provider() {
    let mut rig = Rig::prepare().await;
    rig.publish(jobs("acme", JOBS)).await;
    rig.publish(jobs("bolt", 12)).await;
    rig.publish(jobs("acme", 1)).await; // A duplicate message is the same payment.
    rig.run();
    rig.await_succeeded(u64::from(JOBS) + 12).await;
    let scrape = rig.scrape().await;
    let of = |name: &str, provider: &str| count(&scrape, name, provider, None);
    let with = |name: &str, provider: &str, label| count(&scrape, name, provider, Some(label));

    let acme = rig.report("acme");
    assert_eq!((acme.requests, acme.refused_429), (u64::from(JOBS), 0), "{acme:?}");
    assert_eq!(of("provider_throttled_total", "acme"), 0);
    assert_eq!(with("jobs_total", "acme", ("outcome", "succeeded")), acme.charges);
    assert_eq!(of("jobs_total", "acme"), acme.charges);
    assert_eq!(with("provider_requests_total", "acme", ("status_class", "2xx")), acme.requests);

    // Our limit is ten times the provider's. It refuses requests, and every refusal is counted.
    let bolt = rig.report("bolt");
    assert!(bolt.refused_429 > 0, "{bolt:?}");
    assert_eq!(of("provider_throttled_total", "bolt"), bolt.refused_429);
    assert_eq!(with("provider_requests_total", "bolt", ("status_class", "4xx")), bolt.refused_429);
    // A 429 on a connection that carried a response before may be a copy of an earlier one: that outcome is unknown.
    let requeued = |reason| {
        let labels = [("provider", "bolt"), ("reason", reason)];
        if scrape.has("sluicegate_requeues_total", &labels) { with("requeues_total", "bolt", labels[1]) } else { 0 }
    };
    assert_eq!(requeued("throttled") + requeued("unknown"), bolt.refused_429);

    for (provider, report) in [("acme", &acme), ("bolt", &bolt)] {
        let unused = of("permit_returned_total", provider);
        assert_eq!(of("permits_granted_total", provider), report.requests + unused, "{provider}");
        for distribution in ["start_lateness_seconds", "hold_seconds", "provider_request_duration_seconds"] {
            assert_eq!(of(&format!("{distribution}_count"), provider), report.requests, "{provider} {distribution}");
        }
        assert_eq!(of("permit_wait_seconds_count", provider), of("permits_granted_total", provider));
        assert_eq!(with("ledger_jobs", provider, ("state", "succeeded")), report.charges);
        let quiet = ["in_flight_requests", "active_jobs", "gate_waiting_jobs", "reconciliation_faults", "invalid_rows"];
        for quiet in quiet.into_iter().chain(["reviews_waiting", "jobs_past_deadline", "breaker_state"]) {
            assert_eq!(of(quiet, provider), 0, "{provider} {quiet}");
        }
    }
    assert_eq!(with("limit_requests", "acme", ("limit", "per-second")), 20);
    assert_eq!(with("limit_requests", "acme", ("shadow", "true")), 1);
    assert_eq!(with("limit_requests", "acme", ("applies_to", "lookup")), 1);
    assert_eq!(with("lane_state", "acme", ("state", "running")), 1);
    for dependency in ["database", "queue", "limiter"] {
        let labels = [("dependency", dependency)];
        assert!(scrape.value("sluicegate_dependency_up", &labels) > 0.5, "{dependency}");
        assert!(scrape.value("sluicegate_dependency_rtt_seconds", &labels) < 2.0, "{dependency}");
    }
    assert!(scrape.value("sluicegate_config_reloads_total", &[("result", "success")]) >= 1.0);
}
