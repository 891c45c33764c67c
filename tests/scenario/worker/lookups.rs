//! Payments of unknown outcome: resent under the same key while the provider remembers it, then looked up, then
//! reviewed by an operator. None is charged twice.

use std::time::Duration;

use serde_json::{Value, json};
use sluicegate::domain::outcome::{LookupResult, Outcome, UnknownCause};
use sluicegate::fleet::report::LaneState;
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::ledger::upkeep::CheckScope;

use super::bench::{Bench, limit, name, row};
use super::script::{Act, timeout};

/// `acme` deduplicates, `bolt` does not. Both answer look-ups, which end after `give_up_after_s`.
fn asked(name: &str, change: Value) -> ProviderRow {
    let mut lookup = json!({"url": format!("https://{name}.test/charges?id=${{job:id}}")});
    lookup.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    let retention = (name == "acme").then_some(86_400);
    ProviderRow { idempotency_retention_s: retention, lookup: lookup.as_object().cloned(), ..row(name) }
}

fn silence() -> LookupResult {
    LookupResult::Unknown { cause: UnknownCause::Timeout, retry_after: None }
}

struct Case {
    id: &'static str,
    provider: &'static str,
    acts: Vec<Act>,
    findings: Vec<LookupResult>,
    state: &'static str,
    /// Outcomes of all requests, in order.
    rows: &'static str,
    /// Charge requests that were sent.
    sent: usize,
    charges: u32,
}

fn cases() -> Vec<Case> {
    let lost = || vec![Act::ChargeAndLose];
    let timeouts = || vec![Act::Answer(timeout()); 3];
    let case = |id, provider, acts, findings, (state, rows, sent, charges)| Case {
        id,
        provider,
        acts,
        findings,
        state,
        rows,
        sent,
        charges,
    };
    let declined = LookupResult::Declined { reason: "declined, as the provider says when asked".to_owned() };
    let differs =
        LookupResult::Differs { reason: "the provider has 1 EUR for this payment, we have 1299 EUR".to_owned() };
    let unclear = LookupResult::Unclear { reason: "no word".to_owned() };
    vec![
        case("charged", "bolt", lost(), vec![], ("succeeded", "unknown accepted", 1, 1)),
        case(
            "late",
            "bolt",
            lost(),
            vec![LookupResult::NotFound, LookupResult::InProgress { retry_after: None }, silence(), unclear],
            ("succeeded", "unknown not_found in_progress unknown unclear accepted", 1, 1),
        ),
        case("refused", "bolt", timeouts(), vec![declined], ("declined", "unknown declined", 1, 0)),
        case("other-amount", "bolt", lost(), vec![differs], ("review", "unknown differs", 1, 1)),
        case(
            "in-progress",
            "bolt",
            vec![Act::Answer(Outcome::InProgress { retry_after: None })],
            vec![LookupResult::Accepted { reference: None }],
            ("succeeded", "in_progress accepted", 1, 0),
        ),
        // A repeat under the same key comes before a look-up.
        case("again", "acme", lost(), vec![], ("succeeded", "unknown accepted", 2, 1)),
        case(
            "failing-for-ever",
            "acme",
            timeouts(),
            vec![LookupResult::InProgress { retry_after: None }, LookupResult::Accepted { reference: None }],
            ("succeeded", "unknown unknown unknown in_progress accepted", 3, 0),
        ),
    ]
}

#[tokio::test]
async fn unknown_job_is_looked_up() {
    let bench = Bench::open(&[asked("acme", json!({})), asked("bolt", json!({}))]).await;
    for case in cases() {
        bench.script.plan(case.id, case.acts);
        bench.script.plan_lookups(case.id, case.findings);
        bench.pay(case.provider, case.id).await;
    }
    for case in cases() {
        let id = case.id;
        bench.until_state(id, case.state).await;
        let rows = bench.attempts(id).await;
        let words: Vec<&str> = rows.iter().map(|(outcome, _)| outcome.as_str()).collect();
        assert_eq!(words.join(" "), case.rows, "{id}");
        let sent = bench.script.sent_for(id);
        let counted = rows.iter().filter(|(_, counted)| *counted).count();
        assert_eq!((sent.len(), counted), (case.sent, case.sent), "{id}: look-ups counted as attempts");
        assert_eq!(bench.script.asked_for(id).len(), rows.len() - case.sent, "{id}");
        assert!(
            sent.iter().all(|attempt| attempt.request == sent[0].request),
            "{id}: a later request differs from the first"
        );
        assert_eq!(bench.script.charges(case.provider, id), case.charges, "{id}");
    }
    let reason = bench.job("other-amount").await.unwrap().reason;
    assert!(reason.contains("1 EUR") && reason.contains("1299 EUR"), "{reason}");
    assert_eq!(bench.job("charged").await.unwrap().reference.as_deref(), Some("ch_charged"));
}

/// "Not found" is final only after `give_up_after_s`. Then an operator reviews the job, or it is sent once more where
/// that is safe.
#[tokio::test]
async fn not_found_lookup_leads_to_review_or_resend() {
    let soon = |not_found| json!({"give_up_after_s": 2, "not_found": not_found});
    let rows = [asked("acme", soon("resend")), asked("bolt", soon("review"))];
    let bench = Bench::open(&rows).await;
    for (provider, id) in [("acme", "resent"), ("acme", "resent-in-vain"), ("bolt", "reviewed")] {
        // In-progress responses, so that the breaker stays closed.
        let times = if id == "resent" { 3 } else { 9 };
        bench.script.plan(id, vec![Act::Answer(Outcome::InProgress { retry_after: None }); times]);
        bench.pay(provider, id).await;
    }
    bench.until_state("resent", "succeeded").await;
    assert_eq!((bench.script.sent_for("resent").len(), bench.script.charges("acme", "resent")), (4, 1));
    let vain = bench.until_state("resent-in-vain", "review").await;
    assert!(vain.reason.contains("does not know this payment; asked until give_up_after_s"), "{}", vain.reason);
    assert_eq!(bench.script.sent_for("resent-in-vain").len(), 4, "sent more than once after the look-ups");
    let reviewed = bench.until_state("reviewed", "review").await;
    assert!(reviewed.reason.contains("asked until give_up_after_s"), "{}", reviewed.reason);
    let (sent, asked) = (bench.script.sent_for("reviewed"), bench.script.asked_for("reviewed"));
    assert_eq!(sent.len(), 1);
    let last = asked.last().unwrap().duration_since(sent[0].at);
    assert!(
        asked.len() > 2 && last >= Duration::from_secs(2),
        "looked up {} times, the last after {last:?}",
        asked.len()
    );
}

/// A limit on look-ups alone delays look-ups, at one permit each whatever the charge costs. It delays no charge.
#[tokio::test]
async fn lookups_respect_their_own_limit() {
    let window = Duration::from_millis(600);
    let of_lookups = LimitRow { name: "questions".to_owned(), applies_to: "lookup".to_owned(), ..limit(1, 600) };
    let limits = vec![limit(1_000, 100), of_lookups];
    let bench = Bench::open(&[ProviderRow { limits, ..asked("bolt", json!({})) }]).await;
    let ids = ["one", "two", "three"];
    for id in ids {
        bench.script.plan(id, [Act::ChargeAndLose]);
        let job = json!({ "id": id, "amount": 1299, "currency": "EUR", "cost": 20 }).to_string();
        bench.publish("bolt", &job).await;
    }
    for id in ids {
        bench.until_state(id, "succeeded").await;
        assert_eq!(bench.script.sent_for(id).len(), 1);
    }
    let asked = bench.script.asked();
    assert_eq!(asked.len(), ids.len(), "{asked:?}");
    for pair in asked.windows(2) {
        let apart = pair[1].1.duration_since(pair[0].1);
        assert!(apart >= window, "{apart:?} apart");
    }
}

/// A limit on look-ups alone that stays used up: the look-up is delayed, and charges continue.
#[tokio::test]
async fn limited_lookup_does_not_pause_the_lane() {
    let of_lookups = LimitRow { name: "questions".to_owned(), applies_to: "lookup".to_owned(), ..limit(1, 60_000) };
    let limits = vec![limit(1_000, 100), of_lookups];
    let bench = Bench::open(&[ProviderRow { limits, ..asked("bolt", json!({})) }]).await;
    for id in ["one", "two"] {
        bench.script.plan(id, [Act::ChargeAndLose]);
        bench.pay("bolt", id).await;
    }
    let refused = "SELECT count(*) FROM jobs WHERE state = 'unknown' AND wait_limit = 'questions'";
    bench.until("a look-up is delayed", async || bench.count(refused).await == 1).await;
    bench.pay("bolt", "next").await;
    bench.until_state("next", "succeeded").await;
    let lanes = bench.settings_known().await.lanes;
    assert_eq!(lanes[&name("bolt")].status().does, LaneState::Running);
}

/// A limit on charges that stays used up, so that the lane pauses. A payment that may have been charged is still looked
/// up, though its message is behind others.
#[tokio::test]
async fn exhausted_charge_limit_does_not_stop_lookups() {
    for (mode, window_ms, leak_per_second) in
        [("blocking", 3_600_000, None), ("requeue", 600_000, Some(1_000.0)), ("blocking", 600_000, Some(1_000.0))]
    {
        let case = format!("{mode}, {leak_per_second:?}");
        let of_charges =
            LimitRow { name: "charges".to_owned(), applies_to: "charge".to_owned(), ..limit(1, window_ms) };
        let limits = vec![limit(1_000, 100), of_charges];
        let slow = ProviderRow {
            mode: mode.to_owned(),
            max_wait_ms: 500,
            limits,
            leak_per_second,
            ..asked("bolt", json!({}))
        };
        let mut bench = Bench::prepared(std::slice::from_ref(&slow)).await;
        bench.keep_limiter();
        bench.run();
        // Two workers look for due jobs.
        let mut other = bench.beside();
        if leak_per_second.is_some() {
            other.run();
        }
        bench.script.plan("lost", [Act::ChargeAndLose]);
        bench.script.plan_lookups("lost", vec![LookupResult::InProgress { retry_after: None }; 200]);
        bench.pay("bolt", "lost").await;
        bench.until_state("lost", "unknown").await;
        bench.pay("bolt", "next").await;
        bench.until_delayed("next", "waits for limit charges").await;
        let known = bench.script.asked_for("lost").len();
        bench.until("three more look-ups", async || bench.script.asked_for("lost").len() >= known + 3).await;
        bench.script.plan_lookups("lost", []);
        bench.until_state("lost", "succeeded").await;
        assert_eq!((bench.script.sent_for("lost").len(), bench.script.sent_for("next").len()), (1, 0), "{case}");
        bench.apply(&[ProviderRow { limits: vec![limit(1_000, 100)], ..slow }]).await;
        bench.until_state("next", "succeeded").await;
        bench.until("its message is acknowledged", async || bench.unacknowledged("bolt") == 0).await;
        let account = bench.database.reconcile(Duration::from_secs(3_600), CheckScope::All).await.unwrap();
        assert!(account.iter().all(|account| account.discrepancies().is_empty()), "{case}: {account:?}");
    }
}

#[tokio::test]
async fn throttled_lookup_pauses_the_quota() {
    let bench = Bench::open(&[asked("acme", json!({})), asked("bolt", json!({}))]).await;
    let wait = Duration::from_millis(900);
    bench.script.plan("unknown", [Act::ChargeAndLose]);
    bench.script.plan_lookups("unknown", [LookupResult::Throttled { retry_after: Some(wait) }]);
    bench.pay("bolt", "unknown").await;
    bench.until_delayed("unknown", "throttled").await;
    let asked = bench.script.asked_for("unknown")[0];
    bench.pay("bolt", "next").await;
    bench.until_state("next", "succeeded").await;
    let waited = bench.script.sent_for("next")[0].at.duration_since(asked);
    assert!(waited >= wait, "sent {waited:?} after the 429");
    bench.until_state("unknown", "succeeded").await;
    bench.script.plan("locked-out", [Act::ChargeAndLose]);
    bench.script.plan_lookups("locked-out", [LookupResult::Misconfigured { status: 401 }]);
    bench.pay("bolt", "locked-out").await;
    bench.until_delayed("locked-out", "a look-up with 401").await;
    let lanes = bench.settings_known().await.lanes;
    assert_eq!(lanes[&name("bolt")].status().does, LaneState::Running);
    bench.pay("bolt", "charged-meanwhile").await;
    bench.until_state("charged-meanwhile", "succeeded").await;
    assert_eq!(bench.job("locked-out").await.unwrap().state, "unknown");
}

/// A repeat that would differ is looked up instead. A job that cannot be looked up goes to review.
#[tokio::test]
async fn changed_credential_leads_to_lookup_or_review() {
    let header = |value: &str| json!({"authorization": value}).as_object().unwrap().clone();
    let before = ProviderRow { headers: header("old"), ..asked("acme", json!({})) };
    let slow = ProviderRow { backoff_base_ms: 1_000, backoff_max_ms: 1_000, ..before };
    let bench = Bench::open(&[slow.clone(), asked("bolt", json!({}))]).await;
    bench.script.plan("rotated", [Act::ChargeAndLose]);
    bench.pay("acme", "rotated").await;
    bench.until_delayed("rotated", "no answer in time").await;
    bench.apply(&[ProviderRow { headers: header("new"), ..slow }]).await;
    bench.until_state("rotated", "succeeded").await;
    assert_eq!((bench.script.sent_for("rotated").len(), bench.script.asked_for("rotated").len()), (1, 1));
    bench.script.plan("odd", [Act::ChargeAndLose]);
    let job = json!({ "id": "odd", "amount": 1299, "currency": "EUR", "reference": "unaskable" }).to_string();
    bench.publish("bolt", &job).await;
    let odd = bench.until_state("odd", "review").await;
    assert!(odd.reason.contains("cannot be asked: the script says so"), "{}", odd.reason);
}
