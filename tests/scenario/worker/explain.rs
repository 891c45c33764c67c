//! `explain` on a running worker: its forecast for waiting jobs matches what happens to them.

use std::time::Duration;

use serde_json::json;
use sluicegate::domain::explain::{ClaimState, Facts, explain};
use sluicegate::domain::job::Identifier;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::ops::explain::{ExplainResponse, FactSources, explain_job, gather_facts};
use tokio::time::Instant;

use super::bench::{Bench, limit, name, row};
use super::script::Act;

/// Explains a job as the ops server does.
async fn ask(bench: &Bench, id: &str) -> ExplainResponse {
    let progress = bench.settings_known().await;
    let queue = bench.queue();
    let sources = FactSources {
        ledger: &bench.database,
        settings: &progress.settings,
        queue: Some(queue.as_ref()),
        limiter_facts: None,
        process: Some(&progress),
        collector: None,
    };
    explain_job(&sources, &Identifier::new(id).unwrap()).await.unwrap()
}

async fn facts_of(bench: &Bench, id: &str) -> Facts {
    let progress = bench.settings_known().await;
    let queue = bench.queue();
    let sources = FactSources {
        ledger: &bench.database,
        settings: &progress.settings,
        queue: Some(queue.as_ref()),
        limiter_facts: None,
        process: Some(&progress),
        collector: None,
    };
    gather_facts(&sources, &Identifier::new(id).unwrap()).await.unwrap()
}

/// Long enough to explain all jobs before the queue moves.
const WINDOW: Duration = Duration::from_secs(8);

/// Four requests per window; no other limit or pause applies.
fn four() -> ProviderRow {
    let limits = vec![limit(4, 8_000)];
    ProviderRow { limits, leak_per_second: Some(1_000.0), workers: 50, max_wait_ms: 60_000, ..row("acme") }
}

/// Twelve jobs queue for four slots per window, and each is explained once while it waits at the gate. Jobs of the next
/// window start within half a window of their forecast. They never start earlier than it by more than the booking
/// horizon. The forecasts of later jobs are a window later.
#[tokio::test]
async fn forecast_start_matches_the_actual_start() {
    let bench = Bench::open(&[four()]).await;
    let ids: Vec<String> = (0..12).map(|nth| format!("job-{nth:02}")).collect();
    for id in &ids {
        bench.pay("acme", id).await;
    }
    bench.until_sent("acme", 4).await;
    bench.until("the other jobs are leased", async || bench.active().await == 8).await;
    let mut explained = Vec::new();
    for id in &ids {
        let asked_at = Instant::now();
        let facts = facts_of(&bench, id).await;
        let ClaimState::AskedWorker { position: Some(place), .. } = &facts.claim else { continue };
        let blocked_at = explain(&facts).blocked_at.unwrap();
        assert_eq!((blocked_at.check, blocked_at.limit.as_deref()), ("limit", Some("all")), "{id}");
        assert!(blocked_at.exact && blocked_at.jobs_ahead == Some(place.before), "{id}: {blocked_at:?}");
        explained.push((id.clone(), place.before, asked_at + blocked_at.starts_in.unwrap()));
    }
    assert_eq!(explained.len(), 8, "{explained:?}");
    // The queue is first come, first served, so each job has one more job ahead than the one before it.
    let places: Vec<u64> = explained.iter().map(|(_, before, _)| *before).collect();
    assert!(places.windows(2).all(|two| two[1] == two[0] + 1), "{places:?}");
    let (next, later) = explained.split_at(4);
    for ((_, _, turn), (id, _, after)) in next.iter().zip(later) {
        let apart = after.saturating_duration_since(*turn);
        assert!(apart > WINDOW / 2 && apart < WINDOW * 2, "{id}: {apart:?} after the job four places ahead");
    }
    for (id, _, _) in next {
        bench.until_state(id, "succeeded").await;
    }
    for (id, before, turn) in next {
        let sent = bench.script.sent_to("acme").into_iter().find(|sent| sent.id == *id).unwrap();
        let (late, early) = (sent.at.saturating_duration_since(*turn), turn.saturating_duration_since(sent.at));
        assert!(
            late < WINDOW / 2 && early < WINDOW / 16,
            "{id} with {before} before it: {late:?} late, {early:?} early"
        );
    }
}

#[tokio::test]
async fn each_state_is_explained_from_live_data() {
    let nearly_closed = ProviderRow { limits: vec![limit(1, 30_000)], ..four() };
    let bench = Bench::open(&[nearly_closed, row("bolt")]).await;
    assert!(ask(&bench, "nobody").await.summary.contains("the ledger has no job nobody"));

    bench.pay("acme", "first").await;
    bench.until_state("first", "succeeded").await;
    let first = ask(&bench, "first").await;
    assert!(first.summary.starts_with("charged") && first.blocked_at.is_none(), "{}", first.summary);
    assert!(first.checks.iter().all(|check| check.passed));

    bench.pay("acme", "second").await;
    bench.until("the job is leased and waits", async || bench.active().await == 1).await;
    let second = ask(&bench, "second").await;
    let at = second.blocked_at.clone().unwrap();
    assert_eq!((at.check.as_str(), at.allows.as_deref(), at.used), ("limit", Some("1/30s"), Some(1)), "{second:?}");
    assert!(
        second.summary.starts_with("waits for limit all of acme (1 per 30 s): 1 used, estimated start"),
        "{second:?}"
    );
    assert!((20_000..31_000).contains(&at.starts_in_ms.unwrap()), "{at:?}");

    bench.database.set_paused(&name("acme"), true).await.unwrap();
    bench.until_delayed("second", "paused").await;
    let paused = ask(&bench, "second").await;
    assert!(paused.summary.contains("acme is paused"), "{}", paused.summary);

    bench.script.plan("held", [Act::Hold]);
    bench.pay("bolt", "held").await;
    bench.until_sent("bolt", 1).await;
    let held = ask(&bench, "held").await;
    assert!(held.summary.contains("request 1 is in flight since") && held.state == "sending", "{}", held.summary);
    bench.script.release_all();
    bench.until_state("held", "succeeded").await;

    bench.publish("bolt", &json!({ "id": "odd", "amount": 0, "currency": "EUR" }).to_string()).await;
    bench.until("it is put aside", async || bench.count("SELECT count(*) FROM rejected_messages").await == 1).await;
    let odd = ask(&bench, "odd").await;
    assert!(odd.summary.contains("can never be a job (bad_amount:"), "{}", odd.summary);
}

/// A refused job is explained by the limit that refused it, and by the ledger while no worker holds its lease.
#[tokio::test]
async fn refused_job_names_its_limit() {
    let parks = ProviderRow { mode: "requeue".to_owned(), limits: vec![limit(1, 30_000)], ..four() };
    let bench = Bench::open(&[parks]).await;
    bench.pay("acme", "first").await;
    bench.until_state("first", "succeeded").await;
    bench.pay("acme", "second").await;
    bench.until_delayed("second", "waits for limit all").await;
    let second = ask(&bench, "second").await;
    let at = second.blocked_at.clone().unwrap();
    assert_eq!((at.check.as_str(), at.limit.as_deref(), at.exact), ("limit", Some("all"), false), "{second:?}");
    let time_check = second.checks.iter().find(|check| check.name == "time").unwrap();
    assert!(time_check.passed && time_check.text.starts_with("due since"), "{time_check:?}");
    assert!((1..=31_000).contains(&at.starts_in_ms.unwrap()), "{at:?}");
}

/// With an egress rate of 30 a minute, the bucket holds the active jobs. All others wait in the backlog. Each one gets its
/// position and its start by the egress rate, and as many are ahead of it as its place among the waiting ones says.
#[tokio::test]
async fn waiting_payment_gets_a_start_forecast() {
    let plain = ProviderRow {
        name: "acme".to_owned(),
        url: row("acme").url,
        limits: vec![limit(30, 60_000)],
        leak_per_second: Some(0.5),
        ..ProviderRow::default()
    };
    let bench = Bench::prepared(&[plain]).await;
    let ids: Vec<String> = (0..100).map(|nth| format!("job-{nth:03}")).collect();
    for id in &ids {
        bench.pay("acme", id).await;
    }
    let mut bench = bench;
    bench.run();
    bench.until_sent("acme", 2).await;
    bench.until("the last one is recorded", async || bench.job("job-099").await.is_some()).await;
    let explained = loop {
        let sent = bench.script.sent_to("acme").len();
        let explained = ask(&bench, "job-099").await;
        if bench.script.sent_to("acme").len() == sent {
            break explained;
        }
    };
    let at = explained.blocked_at.clone().unwrap();
    assert_eq!((explained.state.as_str(), at.exact), ("waiting", false), "{explained:?}");
    let before = at.jobs_ahead.unwrap();
    let place = explained.backlog.clone().unwrap();
    assert_eq!((place.position, place.waiting), (before + 1, before + 1), "{explained:?}");
    assert!((90..=98).contains(&before), "{explained:?}");
    let turn_ms = at.starts_in_ms.unwrap();
    assert!(turn_ms.abs_diff(before * 2_000) < 10_000, "{explained:?}");
    let mut in_bucket = 0;
    for id in &ids[2..6] {
        let explained = ask(&bench, id).await;
        let Some(at) = explained.blocked_at.clone().filter(|at| at.exact) else { continue };
        in_bucket += 1;
        assert!(at.check == "queue" && explained.summary.contains("leaky bucket (0.5 per second)"), "{explained:?}");
        assert!(at.jobs_ahead.unwrap() <= 3 && at.starts_in_ms.unwrap() <= 8_000, "{explained:?}");
    }
    assert!(in_bucket > 0);
}

/// The next permit starts in an hour: after one provider's cut-off, and before the other's.
#[tokio::test]
async fn payment_that_starts_after_the_cutoff_misses_it() {
    let hourly = |name: &str, cutoff_in_s: u64| {
        let cutoff = jiff::Timestamp::now() + Duration::from_secs(cutoff_in_s);
        let cutoff = Some(cutoff.strftime("%H:%M UTC").to_string());
        ProviderRow { limits: vec![limit(1, 3_600_000)], cutoff, ..row(name) }
    };
    let bench = Bench::open(&[hourly("acme", 1_800), hourly("bolt", 21_600)]).await;
    for (provider, is_missed) in [("acme", true), ("bolt", false)] {
        let [first, second] = ["first", "second"].map(|nth| format!("{provider}-{nth}"));
        bench.pay(provider, &first).await;
        bench.until_state(&first, "succeeded").await;
        assert_eq!(ask(&bench, &first).await.cutoff, None, "it does not wait");
        bench.pay(provider, &second).await;
        bench.until("its start is known", async || ask(&bench, &second).await.cutoff.is_some()).await;
        let explained = ask(&bench, &second).await;
        let cutoff = explained.cutoff.unwrap();
        assert_eq!(cutoff.is_missed, is_missed, "{}", explained.summary);
        let says_so = explained.summary.ends_with(&format!("; it misses the cut-off at {}", cutoff.rule));
        assert_eq!(says_so, is_missed, "{}", explained.summary);
    }
}

async fn pay_of(bench: &Bench, account: &str, jobs: usize) {
    for number in 0..jobs {
        let body =
            json!({ "id": format!("{account}-{number:02}"), "account": account, "amount": 1299, "currency": "EUR" });
        bench.publish("acme", &body.to_string()).await;
    }
}

/// The place that a payment of the backlog is said to have is the one that SQL counts, as many payments are said to be
/// ahead of it, and it starts about when it is said to: at the limit of its account, whatever the lane allows.
#[tokio::test]
async fn payment_of_a_blocked_account_gets_place_and_start() {
    let own = LimitRow { name: "own".to_owned(), scope: "account".to_owned(), ..limit(4, 4_000) };
    let strict = ProviderRow { limits: vec![limit(1_000, 100), own], ..four() };
    let bench = Bench::open(&[strict]).await;
    pay_of(&bench, "flood", 24).await;
    pay_of(&bench, "other", 2).await;
    let blocked = "SELECT count(*) FROM flows WHERE account = 'flood' AND waiting >= 8 AND blocked_until > 0";
    bench.until("most of the flood is blocked", async || bench.count(blocked).await == 1).await;
    for id in ["other-00", "other-01"] {
        bench.until_state(id, "succeeded").await;
    }
    let mut in_flow = 0;
    let mut starts = Vec::new();
    for number in 0..24 {
        let id = format!("flood-{number:02}");
        // The flow may move while it is asked: then it is asked again.
        let (explained, asked_at, truth) = loop {
            // Those that the worker has claimed and not sent wait, too.
            let active =
                "SELECT count(*) FROM jobs WHERE account = 'flood' AND state = 'waiting' AND holder IS NOT NULL";
            let count = format!(
                "SELECT 1000 * (SELECT count(*) FROM jobs AS o WHERE o.backlog AND o.account = 'flood' AND o.seq <= me.seq) \
                     + (SELECT count(*) FROM jobs WHERE backlog AND account = 'flood') + 1001 * ({active}) \
                 FROM jobs AS me WHERE id = '{id}' AND backlog UNION ALL SELECT 0 LIMIT 1"
            );
            let (before, asked_at) = (bench.count(&count).await, Instant::now());
            let explained = ask(&bench, &id).await;
            if before == bench.count(&count).await {
                break (explained, asked_at, u64::try_from(before).unwrap());
            }
        };
        let Some(place) = &explained.backlog else {
            assert_eq!(truth, 0, "{explained:?}");
            continue;
        };
        in_flow += 1;
        assert_eq!((place.position, place.waiting), (truth / 1_000, truth % 1_000), "{explained:?}");
        assert_eq!((place.account.as_deref(), place.priority), (Some("flood"), Some(0)));
        let at = explained.blocked_at.clone().unwrap();
        assert_eq!(at.jobs_ahead, Some(place.position - 1), "{explained:?}");
        let waits_for_account = (at.check.as_str(), at.limit.as_deref()) == ("account", Some("own"));
        assert!(waits_for_account || at.starts_in_ms < Some(20), "{explained:?}");
        let words = format!("of {} waiting payments of account flood with priority 0", place.waiting);
        assert!(explained.summary.contains(&words), "{}", explained.summary);
        starts.push((id, asked_at + Duration::from_millis(at.starts_in_ms.unwrap())));
    }
    assert!(in_flow >= 8, "{in_flow}");
    for (id, start) in starts {
        bench.until_state(&id, "succeeded").await;
        let sent = bench.script.sent_to("acme").into_iter().find(|sent| sent.id == id).unwrap().at;
        let (late, early) = (sent.saturating_duration_since(start), start.saturating_duration_since(sent));
        assert!(late.max(early) < Duration::from_secs(4), "{id}: {late:?} late, {early:?} early");
    }
}
