//! Outcomes of requests and their dispositions: state, counted attempts, event, and repeated request, as in the
//! decision table.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use sluicegate::domain::outcome::{Outcome, UnknownCause};
use sluicegate::ledger::provider_row::ProviderRow;
use sluicegate::provider::FrozenRequest;

use super::bench::{Bench, row};
use super::script::{Act, accepted, busy, not_sent, rejected, throttled, timeout};

struct Case {
    id: &'static str,
    provider: &'static str,
    acts: Vec<Act>,
    state: &'static str,
    /// Outcomes of all attempts; each of them counts.
    attempts: &'static str,
    charges: u32,
}

fn answers(outcomes: impl IntoIterator<Item = Outcome>) -> Vec<Act> {
    outcomes.into_iter().map(Act::Answer).collect()
}

fn server_error() -> Outcome {
    Outcome::Unknown { cause: UnknownCause::ServerError(500), retry_after: None }
}

fn declined() -> Outcome {
    Outcome::Declined { reason: "provider answered 402".to_owned() }
}

/// `acme` deduplicates, `bolt` does not; both allow three attempts.
fn cases() -> Vec<Case> {
    let case = |id, provider, acts, state, attempts, charges| Case { id, provider, acts, state, attempts, charges };
    let lost_then = |outcome: Outcome| vec![Act::ChargeAndLose, Act::Answer(outcome)];
    let progress = || Outcome::InProgress { retry_after: None };
    // The order keeps every lane's breaker closed.
    vec![
        case("lost", "acme", lost_then(accepted()), "succeeded", "unknown accepted", 1),
        case("declined", "acme", answers([declined()]), "declined", "declined", 0),
        case(
            "failing",
            "acme",
            answers([server_error(), server_error(), server_error()]),
            "review",
            "unknown unknown unknown",
            0,
        ),
        case("accepted", "acme", vec![], "succeeded", "accepted", 1),
        case("lost-declined", "acme", lost_then(declined()), "declined", "unknown declined", 1),
        case("in-progress", "acme", answers([progress(), accepted()]), "succeeded", "in_progress accepted", 1),
        case(
            "lost-then-unreachable",
            "acme",
            vec![Act::ChargeAndLose, Act::Answer(not_sent()), Act::Answer(not_sent())],
            "review",
            "unknown not_sent not_sent",
            1,
        ),
        case(
            "always-in-progress",
            "acme",
            answers([progress(), progress(), progress()]),
            "review",
            "in_progress in_progress in_progress",
            0,
        ),
        case("rejected", "acme", answers([rejected()]), "review", "rejected", 0),
        case("forgetful-accepted", "bolt", vec![], "succeeded", "accepted", 1),
        case("forgetful-lost", "bolt", lost_then(accepted()), "review", "unknown", 1),
        case("forgetful-timeout", "bolt", answers([timeout()]), "review", "unknown", 0),
        case("forgetful-in-progress", "bolt", answers([progress()]), "review", "in_progress", 0),
        case(
            "unreachable",
            "bolt",
            answers([not_sent(), not_sent(), not_sent()]),
            "dead",
            "not_sent not_sent not_sent",
            0,
        ),
        case("forgetful-unreachable", "bolt", answers([not_sent(), accepted()]), "succeeded", "not_sent accepted", 1),
    ]
}

#[tokio::test]
async fn every_outcome_reaches_its_documented_state() {
    let forgetful = ProviderRow { idempotency_retention_s: None, ..row("bolt") };
    let bench = Bench::open(&[row("acme"), forgetful]).await;
    for case in cases() {
        bench.script.plan(case.id, case.acts);
        bench.pay(case.provider, case.id).await;
    }
    for case in cases() {
        let job = bench.until_state(case.id, case.state).await;
        let id = case.id;
        let attempts = bench.attempts(id).await;
        let words: Vec<&str> = attempts.iter().map(|(outcome, _)| outcome.as_str()).collect();
        assert_eq!(words.join(" "), case.attempts, "{id}");
        assert!(attempts.iter().all(|(_, counts)| *counts), "{id}: {attempts:?}");
        assert_eq!(job.attempts, attempts.len() as i64, "{id}");
        assert_eq!(job.reference, (case.state == "succeeded").then(|| format!("ch_{id}")), "{id}");
        let sent = bench.script.sent_for(id);
        assert_eq!(sent.len(), attempts.len(), "{id}: one request per attempt");
        assert!(
            sent.iter().all(|sent| sent.request == sent_first(&bench, id)),
            "{id}: a later request differs from the first"
        );
        assert_eq!(bench.script.charges(case.provider, id), case.charges, "{id}");
    }
    let all = cases().len();
    bench.until("every job has its event", async || bench.events().await.len() >= all).await;
    for case in cases() {
        let events = bench.events_of(case.id).await;
        assert_eq!(events.len(), 1, "{}: {events:?}", case.id);
        let job = bench.job(case.id).await.unwrap();
        let (body, properties) = (&events[0].body, &events[0].properties);
        assert_eq!(body["state"], case.state);
        assert_eq!(body["attempts"], job.attempts);
        assert_eq!(body["reason"], job.reason.as_str());
        assert_eq!(body["provider_reference"].as_str(), job.reference.as_deref());
        assert_eq!(properties["message_id"], body["event_id"]);
    }
    assert_eq!(bench.queued("acme") + bench.queued("bolt"), 0, "a message is not acknowledged");
}

fn sent_first(bench: &Bench, id: &str) -> FrozenRequest {
    bench.script.sent_for(id)[0].request.clone()
}

/// Two rows share a quota. A 429 at one of them pauses both and uses no job's attempt.
#[tokio::test]
async fn throttling_pauses_the_quota_without_an_attempt() {
    let shared = |name: &str| ProviderRow { quota: Some("shared".into()), ..row(name) };
    let bench = Bench::open(&[shared("acme"), shared("bolt")]).await;
    let wait = Duration::from_millis(900);
    bench.script.plan("first", [Act::Answer(throttled(wait))]);
    bench.pay("acme", "first").await;
    let delayed = bench.until_delayed("first", "throttled").await;
    assert_eq!((delayed.state.as_str(), delayed.attempts), ("waiting", 0));
    for id in ["second", "third"] {
        bench.pay("acme", id).await;
    }
    bench.pay("bolt", "fourth").await;
    for id in ["first", "second", "third", "fourth"] {
        let job = bench.until_state(id, "succeeded").await;
        assert_eq!(job.attempts, 1, "{id}: waiting counted as an attempt");
    }
    let words = [("throttled".to_owned(), false), ("accepted".to_owned(), true)];
    assert_eq!(bench.attempts("first").await, words);
    let resumes = bench.script.sent_for("first")[0].at + wait;
    for sent in bench.script.sent().iter().skip(1) {
        assert!(sent.at >= resumes, "{} was sent {:?} before the pause ended", sent.id, resumes - sent.at);
    }
}

/// However often the provider responds with 429, the job waits and is never dead for it.
#[tokio::test]
async fn throttling_uses_no_attempts() {
    let bench = Bench::open(&[row("acme")]).await;
    bench.script.plan("job", std::iter::repeat_n(Act::Answer(throttled(Duration::from_millis(20))), 5));
    bench.pay("acme", "job").await;
    let job = bench.until_state("job", "succeeded").await;
    assert_eq!((job.attempts, bench.script.sent_for("job").len()), (1, 6));
}

/// A provider that names no wait and keeps refusing gets fewer and fewer requests, until it accepts one.
#[tokio::test]
async fn throttling_without_retry_after_backs_off() {
    const BASE: Duration = Duration::from_millis(100);
    let bench = Bench::open(&[ProviderRow { backoff_base_ms: 100, backoff_max_ms: 1_000, ..row("acme") }]).await;
    let nameless = || Act::Answer(Outcome::Throttled { retry_after: None });
    bench.script.plan("first", std::iter::repeat_n(nameless(), 3));
    bench.pay("acme", "first").await;
    let job = bench.until_state("first", "succeeded").await;
    let sent = bench.script.sent_for("first");
    assert_eq!((job.attempts, sent.len()), (1, 4));
    let waits: Vec<Duration> = sent.windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    for (wait, least) in waits.iter().zip([BASE, BASE * 2, BASE * 4]) {
        assert!(*wait >= least, "{waits:?}");
    }
    assert_eq!(
        bench.last_decision("acme", "throttled"),
        "the provider throttled requests that the limits allowed; nothing is sent for 0.4 s"
    );
    bench.script.plan("second", [nameless()]);
    bench.pay("acme", "second").await;
    bench.until_state("second", "succeeded").await;
    assert_eq!(
        bench.last_decision("acme", "throttled"),
        "the provider throttled requests that the limits allowed; nothing is sent for 0.1 s"
    );
}

/// A lock or a limit on one object concerns one job: it waits for the named time, and the others continue.
#[tokio::test]
async fn busy_job_delays_only_itself() {
    let bench = Bench::open(&[row("acme")]).await;
    let wait = Duration::from_secs(600);
    bench.script.plan("locked", [Act::Answer(busy(Some(wait)))]);
    bench.pay("acme", "locked").await;
    let delayed = bench.until_delayed("locked", "busy with this payment's object").await;
    assert_eq!((delayed.state.as_str(), delayed.attempts), ("waiting", 0));
    assert_eq!(bench.attempts("locked").await, [("busy".to_owned(), false)]);
    let wait_ms = bench.count("SELECT wake_at - updated_at FROM jobs WHERE id = 'locked'").await;
    assert!((599_000..=600_100).contains(&wait_ms), "{wait_ms} ms");
    for number in 0..10 {
        bench.pay("acme", &format!("other-{number}")).await;
    }
    for number in 0..10 {
        bench.until_state(&format!("other-{number}"), "succeeded").await;
    }
    assert_eq!(bench.script.sent_for("locked").len(), 1, "the locked job did not wait");
    // A 429 of the provider's own limit stops all jobs.
    bench.script.plan("throttled", [Act::Answer(throttled(wait))]);
    bench.pay("acme", "throttled").await;
    bench.until_delayed("throttled", "throttled").await;
    for number in 0..3 {
        bench.pay("acme", &format!("held-{number}")).await;
    }
    let recorded = "SELECT count(*) FROM jobs WHERE id LIKE 'held-%' AND backlog AND fence = 0";
    bench.until("the others are recorded", async || bench.count(recorded).await == 3).await;
    assert_eq!(bench.script.sent().len(), 12, "requests: one locked, ten others, one throttled");
}

/// However often the object is busy, its job never ends for it, and is sent again under the same key.
#[tokio::test]
async fn busy_responses_use_no_attempts() {
    let forgetful = ProviderRow { idempotency_retention_s: None, ..row("bolt") };
    let bench = Bench::open(&[row("acme"), forgetful]).await;
    for (provider, id) in [("acme", "locked"), ("bolt", "forgotten")] {
        bench.script.plan(id, std::iter::repeat_n(Act::Answer(busy(None)), 5));
        bench.pay(provider, id).await;
        let job = bench.until_state(id, "succeeded").await;
        let sent = bench.script.sent_for(id);
        assert_eq!((job.attempts, sent.len(), bench.script.charges(provider, id)), (1, 6, 1), "{id}");
        assert!(
            sent.iter().all(|attempt| attempt.request == sent[0].request),
            "{id}: a later request differs from the first"
        );
    }
}

/// No attempt counts, but the wait grows with each request, so that a persistent lock gets few requests.
#[tokio::test]
async fn persistently_busy_object_backs_off() {
    let patient = ProviderRow { backoff_base_ms: 10_000, backoff_max_ms: 80_000, ..row("acme") };
    let bench = Bench::open(&[patient]).await;
    let short = Act::Answer(busy(Some(Duration::from_millis(20))));
    bench.script.plan("locked", [short.clone(), short.clone(), short, Act::Answer(busy(None))]);
    bench.pay("acme", "locked").await;
    bench.until_sent("acme", 4).await;
    let wait_of_the_fourth = async || {
        let sql = "SELECT coalesce(max(wake_at - updated_at), 0) FROM jobs WHERE holder IS NULL AND last_attempt = 4";
        bench.count(sql).await
    };
    bench.until("the job is delayed for the fourth time", async || wait_of_the_fourth().await > 0).await;
    let wait_ms = wait_of_the_fourth().await;
    assert!(
        (39_900..=80_100).contains(&wait_ms),
        "{wait_ms} ms: the fourth step is 80 s, with jitter in its upper half"
    );
}

/// 401 for each payment: the worker's credentials are wrong, so the lane pauses before it declines a whole billing day.
#[tokio::test]
async fn unauthorized_pauses_the_lane_until_fixed() {
    let bench = Bench::open(&[row("acme"), row("bolt")]).await;
    let first = ["first-0", "first-1", "first-2", "first-3", "first-4"];
    for id in first {
        bench.script.plan(id, [Act::Answer(Outcome::Misconfigured { status: 401 })]);
        bench.pay("acme", id).await;
        let job = bench.until_delayed(id, "401").await;
        assert_eq!((job.state.as_str(), job.attempts), ("waiting", 0));
        assert_eq!(bench.attempts(id).await, [("misconfigured".to_owned(), false)]);
    }
    bench.pay("acme", "second").await;
    bench.pay("bolt", "other").await;
    bench.until_state("other", "succeeded").await;
    assert_eq!(bench.script.order(), [&first[..], &["other"]].concat(), "a paused lane sent a request");
    let mended = serde_json::Map::from_iter([("authorization".to_owned(), "new".into())]);
    bench.apply(&[ProviderRow { headers: mended, ..row("acme") }]).await;
    bench.until_state("second", "succeeded").await;
    assert_eq!(&*bench.script.sent_for("second")[0].request.credential_fingerprint, "h-new");
}

/// 503 with a wait: this lane pauses, and the quota's other row continues.
#[tokio::test]
async fn unavailable_with_retry_after_pauses_one_lane() {
    let shared = |name: &str| ProviderRow { quota: Some("shared".into()), ..row(name) };
    let bench = Bench::open(&[shared("acme"), shared("bolt")]).await;
    let busy = Outcome::Unknown { cause: UnknownCause::ServerError(503), retry_after: Some(Duration::from_secs(600)) };
    bench.script.plan("first", [Act::Answer(busy)]);
    bench.pay("acme", "first").await;
    let first = bench.until_delayed("first", "503").await;
    assert_eq!((first.state.as_str(), first.attempts), ("unknown", 1));
    bench.pay("acme", "second").await;
    bench.pay("bolt", "other").await;
    bench.until_state("other", "succeeded").await;
    assert_eq!(bench.script.order(), ["first", "other"]);
}

/// Several consecutive payments that need a manual review: their common setup is wrong, not the payments.
#[tokio::test]
async fn five_consecutive_rejections_pause_the_lane() {
    let one_by_one = ProviderRow { workers: 1, ..row("acme") };
    let bench = Bench::open(std::slice::from_ref(&one_by_one)).await;
    bench.script.always("acme", Act::Answer(rejected()));
    // A success in between resets the count.
    bench.script.plan("job-2", [Act::Answer(accepted())]);
    for number in 0..12 {
        bench.pay("acme", &format!("job-{number}")).await;
        if number < 3 {
            bench.until_sent("acme", number + 1).await;
        }
    }
    let resting = async || bench.count("SELECT count(*) FROM jobs WHERE wait_reason = 'rejected_streak'").await > 0;
    bench.until("the lane pauses", resting).await;
    let sent = bench.script.sent().len();
    assert_eq!(sent, 8, "requests: two rejected, one accepted, five rejected");
    bench.script.always("acme", Act::Answer(accepted()));
    bench.apply(&[ProviderRow { workers: 2, ..one_by_one }]).await;
    let done = async || bench.count("SELECT count(*) FROM jobs WHERE state = 'succeeded'").await == 5;
    bench.until("the remaining jobs succeed once the row is fixed", done).await;
    assert_eq!(bench.count("SELECT count(*) FROM jobs WHERE state = 'review'").await, 7);
}

/// A repeat after an unknown outcome uses the first request's credential; otherwise the job goes to manual review.
#[tokio::test]
async fn unknown_job_is_not_resent_with_another_credential() {
    let slow = ProviderRow { backoff_base_ms: 2_000, backoff_max_ms: 2_000, ..row("acme") };
    let bench = Bench::open(std::slice::from_ref(&slow)).await;
    bench.script.plan("job", [Act::ChargeAndLose]);
    bench.pay("acme", "job").await;
    bench.until_state("job", "unknown").await;
    let other = serde_json::Map::from_iter([("authorization".to_owned(), "other".into())]);
    bench.apply(&[ProviderRow { headers: other, ..slow }]).await;
    let job = bench.until_state("job", "review").await;
    assert!(job.reason.contains("credential"), "{job:?}");
    assert_eq!(bench.script.sent().len(), 1);
}

/// The credential of the request that may have been charged counts, not that of the first request.
#[tokio::test]
async fn restored_credential_does_not_allow_a_resend() {
    let slow = ProviderRow { backoff_base_ms: 2_000, backoff_max_ms: 2_000, ..row("acme") };
    let with = |credential: &str| {
        let headers = serde_json::Map::from_iter([("authorization".to_owned(), credential.into())]);
        ProviderRow { headers, ..slow.clone() }
    };
    let bench = Bench::open(&[with("a")]).await;
    bench.script.plan("job", [Act::Answer(Outcome::Misconfigured { status: 401 }), Act::ChargeAndLose]);
    bench.pay("acme", "job").await;
    bench.until_delayed("job", "401").await;
    bench.apply(&[with("b")]).await;
    bench.until_state("job", "unknown").await;
    bench.apply(&[with("a")]).await;
    let job = bench.until_state("job", "review").await;
    assert!(job.reason.contains("credential"), "{job:?}");
    let sent: Vec<_> = bench.script.sent().into_iter().map(|attempt| attempt.request.credential_fingerprint).collect();
    assert_eq!(sent, ["h-a", "h-b"].map(Arc::from));
    assert_eq!(bench.script.charges("acme", "job"), 1);
}

/// While that credential is still in use, the payment is sent again, even if the first request used another one.
#[tokio::test]
async fn fixed_credential_is_used_for_the_resend() {
    let quick = ProviderRow { backoff_base_ms: 50, backoff_max_ms: 50, ..row("acme") };
    let bench = Bench::open(std::slice::from_ref(&quick)).await;
    bench.script.plan("job", [Act::Answer(Outcome::Misconfigured { status: 401 }), Act::ChargeAndLose]);
    bench.pay("acme", "job").await;
    bench.until_delayed("job", "401").await;
    let headers = serde_json::Map::from_iter([("authorization".to_owned(), "mended".into())]);
    bench.apply(&[ProviderRow { headers, ..quick }]).await;
    bench.until_state("job", "succeeded").await;
    assert_eq!((bench.script.sent().len(), bench.script.charges("acme", "job")), (3, 1));
}

/// The row may have changed meanwhile, but a repeat is identical to the first request.
#[tokio::test]
async fn resend_repeats_the_first_request_exactly() {
    let slow = ProviderRow { backoff_base_ms: 2_000, backoff_max_ms: 2_000, ..row("acme") };
    let bench = Bench::open(std::slice::from_ref(&slow)).await;
    bench.script.plan("job", [Act::ChargeAndLose]);
    bench.pay("acme", "job").await;
    bench.until_state("job", "unknown").await;
    bench.apply(&[ProviderRow { workers: 7, ..slow }]).await;
    bench.settings_known().await;
    bench.until_state("job", "succeeded").await;
    let sent = bench.script.sent_for("job");
    assert_eq!((sent.len(), sent[0].request == sent[1].request), (2, true), "{sent:?}");
    bench.pay("acme", "new").await;
    bench.until_state("new", "succeeded").await;
    assert_ne!(bench.script.sent_for("new")[0].request.content_type, sent[0].request.content_type);
}

/// A payment that raises an alert is not counted as a success.
#[tokio::test]
async fn duplicate_provider_reference_counts_as_review() {
    let bench = Bench::open(&[row("acme")]).await;
    bench.pay("acme", "first").await;
    bench.until_state("first", "succeeded").await;
    bench.sql("UPDATE jobs SET provider_reference = 'ch_second' WHERE id = 'first'").await;
    bench.pay("acme", "second").await;
    bench.until_state("second", "review").await;
    bench.until("both are counted", async || bench.finished("acme").values().sum::<u64>() == 2).await;
    assert_eq!(bench.finished("acme"), [("review", 1), ("succeeded", 1)].into());
}

/// Requests frozen for an address that the row no longer has are not sent there: they would only pause the fixed lane
/// again.
#[tokio::test]
async fn request_for_old_url_is_not_sent() {
    let slow = |name| ProviderRow { backoff_base_ms: 3_000, backoff_max_ms: 3_000, ..row(name) };
    let lookup = json!({"url": "https://bolt.test/charges?id=${job:id}"}).as_object().cloned();
    let rows = [slow("acme"), ProviderRow { lookup, ..slow("bolt") }];
    let bench = Bench::open(&rows).await;
    bench.script.plan("unsent", [Act::Answer(not_sent())]);
    for (provider, id) in [("acme", "unsent"), ("acme", "lost"), ("bolt", "asked")] {
        if id != "unsent" {
            bench.script.plan(id, [Act::ChargeAndLose]);
        }
        bench.pay(provider, id).await;
    }
    bench.until_delayed("unsent", "connection refused").await;
    bench.until_delayed("lost", "no answer in time").await;
    bench.until_delayed("asked", "no answer in time").await;
    // From now on, only the new address accepts requests.
    for provider in ["acme", "bolt"] {
        bench.script.always(provider, Act::Answer(Outcome::Misconfigured { status: 404 }));
    }
    bench.script.plan("new", [Act::Answer(accepted())]);
    bench.apply(&rows.map(|row| ProviderRow { url: "https://moved.test/".to_owned(), ..row })).await;
    for id in ["unsent", "lost"] {
        let job = bench.until_state(id, "review").await;
        assert!(job.reason.contains("frozen for an address that the row no longer has"), "{}", job.reason);
    }
    bench.until_state("asked", "succeeded").await;
    bench.pay("acme", "new").await;
    bench.until_state("new", "succeeded").await;
    assert_eq!(&*bench.script.sent_for("new")[0].request.url, "https://moved.test/");
    assert_eq!(bench.script.sent().len(), 4, "a frozen request was sent again");
}
