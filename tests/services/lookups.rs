//! Look-ups on real backends while a limit on charges is used up. Payments that may have been charged are looked up,
//! and every waiting job is reported.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sluicegate::provider::simulated::FakeOptions;

use crate::stand::Stand;

const JOBS: u64 = 60;
/// Charges that each provider allows for longer than the test lasts.
const CHARGES: u64 = 4;
const PATIENCE: Duration = Duration::from_secs(60);

fn row(name: &str) -> String {
    format!(
        "[[provider]]\nname = \"{name}\"\nurl = \"{{url:{name}}}\"\nleak_per_second = 1000\nmax_wait_ms = 1000\n\
         backoff_base_ms = 100\nbackoff_max_ms = 500\n\
         [provider.lookup]\nurl = \"{{url:{name}}}?id=${{job:id}}\"\namount = \"/amount\"\ncurrency = \"/currency\"\n\
         [[provider.limit]]\nname = \"all\"\nmax_requests = 1000\nwindow_ms = 1000\n\
         [[provider.limit]]\nname = \"charges\"\nmax_requests = {CHARGES}\nwindow_ms = 3600000\napplies_to = \"charge\"\n"
    )
}

fn waiting(stand: &Stand, worker: usize) -> Vec<Option<u64>> {
    let status: Value = serde_json::from_str(&stand.status_of(worker, &["status", "--json"])).unwrap();
    status["providers"].as_array().unwrap().iter().map(|provider| provider["waiting"].as_u64()).collect()
}

/// One provider loses some responses, the other all of them, so that its jobs are looked up again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookups_continue_while_charges_are_exhausted() {
    let mut stand = Stand::start();
    let latency = (Duration::from_millis(100), Duration::from_millis(400));
    for (name, lost_answer_rate, seed) in [("acme", 0.5, 3), ("bolt", 1.0, 0)] {
        let options = FakeOptions { lost_answer_rate, latency, seed, deduplicate: false, ..FakeOptions::default() };
        stand.add_provider(name, options).await;
    }
    stand.apply(&[row("acme"), row("bolt")].concat());
    let workers = [stand.add_worker(), stand.add_worker()];
    let job = |n: u64, key: &str| json!({ "id": format!("{key}-{n}"), "amount": 100, "currency": "EUR" }).to_string();
    let jobs: Vec<Value> =
        (0..JOBS).flat_map(|n| ["acme", "bolt"].map(|key| json!({ "key": key, "body": job(n, key) }))).collect();
    assert_eq!(stand.publish(&jobs), jobs.len());
    let succeeded = "SELECT count(*) FROM jobs WHERE provider = 'acme' AND state = 'succeeded'";
    stand.await_count(succeeded, CHARGES);
    let unknown = "SELECT count(*) FROM jobs WHERE provider = 'bolt' AND state = 'unknown'";
    stand.await_count(unknown, CHARGES);
    let (acme, bolt) = (JOBS - CHARGES, JOBS);
    let expected = [Some(acme), Some(bolt)];
    let until = Instant::now() + PATIENCE;
    for worker in workers {
        while waiting(&stand, worker) != expected {
            assert!(Instant::now() < until, "{expected:?}: {}", stand.status_of(worker, &["status", "--json"]));
        }
    }
    // The job is leased and delayed again for many look-ups.
    let before = stand.providers["bolt"].report().lookups;
    let until = Instant::now() + PATIENCE;
    while stand.providers["bolt"].report().lookups < before + 5 * CHARGES {
        for worker in workers {
            assert_eq!(waiting(&stand, worker), expected);
        }
        assert!(Instant::now() < until, "{:?}", stand.providers["bolt"].report());
    }
    for (name, charges) in [("acme", CHARGES), ("bolt", CHARGES)] {
        let report = stand.providers[name].report();
        assert_eq!((report.charges, report.doubles), (charges, 0), "{name}");
    }
    // No recorded job has a message.
    let messages = || -> u64 {
        let is_ours = |name: &str| ["payments.acme", "payments.bolt"].contains(&name);
        stand.queues().iter().filter(|(name, _)| is_ours(name)).map(|(_, messages)| messages).sum()
    };
    let in_backlog = "SELECT count(*) FROM jobs WHERE backlog";
    stand.await_that(PATIENCE, || stand.count(in_backlog) == 2 * (JOBS - CHARGES) && messages() == 0);
}
