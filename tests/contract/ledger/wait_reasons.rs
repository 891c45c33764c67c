//! Why a job waits is a code: the sentence made of it is for people, and rewording it changes nothing.

use std::collections::BTreeSet;
use std::path::Path;

use sluicegate::domain::disposition::Resend;
use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::operator::{Actor, JobResolution};
use sluicegate::ledger::upkeep::{WaitCause, WakeFilter};
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState};
use sqlx::migrate::Migrator;

use super::*;

on_every_database!(
    every_wait_reason_is_stored,
    each_step_replaces_the_wait,
    jobs_are_woken_by_code_not_text,
    sentences_of_earlier_builds_become_codes,
);

const HOUR: Duration = Duration::from_secs(3_600);

/// Code, limit and text of each job's wait, and the job's reason, as the table has them.
const ROWS: &str = "SELECT id || '|' || COALESCE(wait_reason, '-') || '|' || COALESCE(wait_limit, '-') || '|' \
     || COALESCE(wait_detail, '-') || '|' || COALESCE(reason, '-') FROM jobs ORDER BY id";

impl Fixture {
    async fn wait_rows(&self) -> Vec<String> {
        self.column(ROWS).await.into_iter().flatten().collect()
    }

    /// Reason, code and limit, as operators see them.
    async fn shown(&self, id: &str) -> (Option<String>, Option<String>, Option<String>) {
        let id = Identifier::new(id).unwrap();
        let line = self.database.operator().show(&id).await.unwrap().unwrap().line;
        (line.reason, line.wait_reason, line.wait_limit)
    }
}

fn some(text: &str) -> Option<String> {
    Some(text.to_owned())
}

async fn every_wait_reason_is_stored(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (nth, reason) in WaitReason::all().into_iter().enumerate() {
        let reason = match reason {
            WaitReason::Limit(_) => WaitReason::Limit("per-minute".to_owned()),
            WaitReason::CostExceedsLimit(_) => WaitReason::CostExceedsLimit("per-minute".to_owned()),
            other => other,
        };
        let id = format!("p{nth}");
        let lease = fixture.take(&job(&id)).await.lease;
        let wait = Wait::with_detail(reason.clone(), "as it is");
        let next = JobState::Waiting { wait: HOUR, reason: wait.clone() };
        assert_eq!(fixture.ledger().transition(&lease, &next).await.unwrap(), FencedWrite::Applied);
        let shown = (some(&wait.to_string()), some(reason.code()), reason.limit().map(str::to_owned));
        assert_eq!(fixture.shown(&id).await, shown);
        assert_eq!(WaitReason::from_columns(shown.1.as_deref().unwrap(), shown.2), Some(reason));
    }
    // The database knows no other.
    let error = fixture.sql("UPDATE jobs SET wait_reason = 'patience', wait_limit = NULL").await.unwrap_err();
    assert!(error.contains("wait_reason_is_known"), "{error}");
    for change in ["wait_reason = 'limit', wait_limit = NULL", "wait_reason = 'retry', wait_limit = 'all'"] {
        let error = fixture.sql(&format!("UPDATE jobs SET {change}")).await.unwrap_err();
        assert!(error.contains("wait_limit_is_named_by_its_reason"), "{error}");
    }
}

/// A delay, a request that fails, a worker that is lost, an operator that sends again, and the end.
async fn each_step_replaces_the_wait(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (ledger, id) = (fixture.ledger(), "p1");
    let lease = fixture.take(&job(id)).await.lease;
    assert_eq!(fixture.shown(id).await, (None, None, None), "it was never delayed");
    let delayed = JobState::Waiting { wait: Duration::ZERO, reason: Wait::for_limit("all") };
    assert_eq!(ledger.transition(&lease, &delayed).await.unwrap(), FencedWrite::Applied);
    assert_eq!(fixture.shown(id).await, (some("waits for limit all"), some("limit"), some("all")));

    let lease = fixture.take(&job(id)).await.lease;
    assert_eq!(ledger.begin_attempt(&lease, &request(id)).await.unwrap(), BeginResult::Attempt(1));
    assert_eq!(fixture.shown(id).await, (None, None, None), "its request is in flight");
    let end = AttemptEnd { number: 1, outcome: "not_sent", status: None, detail: String::new(), counts: true };
    let refused = Wait::with_detail(WaitReason::Retry, "connection refused");
    let next = JobState::Waiting { wait: Duration::ZERO, reason: refused };
    assert_eq!(ledger.finish_attempt(&lease, &end, &next).await.unwrap(), FencedWrite::Applied);
    assert_eq!(fixture.shown(id).await, (some("connection refused"), some("retry"), None));

    let lease = fixture.take(&job(id)).await.lease;
    assert_eq!(ledger.begin_attempt(&lease, &request(id)).await.unwrap(), BeginResult::Attempt(2));
    fixture.expire_lease(&lease).await;
    let lease = fixture.take(&job(id)).await.lease;
    let lost = WaitReason::WorkerLost;
    assert_eq!(fixture.shown(id).await, (some(&Wait::from(lost.clone()).to_string()), some(lost.code()), None));
    assert_eq!(fixture.wait_rows().await, ["p1|worker_lost|-|-|-"]);

    let review = JobState::Final { state: FinalState::Review, reason: "why".to_owned(), reference: None };
    assert_eq!(ledger.transition(&lease, &review).await.unwrap(), FencedWrite::Applied);
    assert_eq!(fixture.shown(id).await, (some("why"), None, None));
    let by = Actor { os_user: "alice@desk".to_owned(), program: None, reason: None };
    let operator = fixture.database.operator();
    operator.resolve(&job(id).id, &JobResolution::Resend, None, &by).await.unwrap().unwrap();
    let rows = fixture.wait_rows().await;
    assert!(rows[0].starts_with("p1|-|-|-|sent again by an operator"), "{rows:?}");
    assert_eq!(fixture.take(&job(id)).await.resend, Resend::Never);
}

async fn jobs_are_woken_by_code_not_text(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (id, wait) in [
        ("limit", Wait::with_detail(WaitReason::Limit("all".to_owned()), "in words that were never used before")),
        ("costly", Wait::with_detail(WaitReason::CostExceedsLimit("all".to_owned()), "so it is")),
        ("named", Wait::with_detail(WaitReason::ProviderPaused, "provider answered 503")),
        ("alike", Wait::with_detail(WaitReason::Retry, "waits for limit all")),
        ("alike-too", Wait::with_detail(WaitReason::Retry, "throttled by the provider")),
    ] {
        let lease = fixture.take(&job(id)).await.lease;
        let next = JobState::Waiting { wait: HOUR, reason: wait };
        assert_eq!(fixture.ledger().transition(&lease, &next).await.unwrap(), FencedWrite::Applied);
    }
    tokio::time::sleep(Duration::from_millis(5)).await;
    fixture.sql("INSERT INTO providers (name, url) VALUES ('stripe', 'https://x.example/')").await.unwrap();
    let mut woken = Vec::new();
    for cause in [WaitCause::Limit, WaitCause::RetryAfter] {
        let which =
            WakeFilter { changed_ago: None, cause, propagation_time: Duration::ZERO, due_within: SECOND, at_most: 10 };
        woken.push(fixture.database.upkeep().wake_waiting(&name("stripe"), &which).await.unwrap());
    }
    let due = "SELECT id FROM jobs WHERE wake_at = updated_at AND unqueued ORDER BY id";
    let due: Vec<String> = fixture.column(due).await.into_iter().flatten().collect();
    assert_eq!((woken, due), (vec![2, 1], ["costly", "limit", "named"].map(str::to_owned).to_vec()));
}

/// A sentence of the earlier build; its code, its limit and its text, or `-`.
const SENTENCES: [(&str, &str, &str, &str); 36] = [
    ("waits for its time", "not_before", "-", "-"),
    ("waits for a worker slot at the egress rate", "egress", "-", "-"),
    ("waits for limit per-minute", "limit", "per-minute", "-"),
    ("waits for limit even pacing", "limit", "even pacing", "-"),
    (
        "waits for limit all: cost 5 exceeds the 3 that it admits at once",
        "cost_exceeds_limit",
        "all",
        "cost 5 exceeds the 3 that it admits at once",
    ),
    ("account shop is blocked by a rule of this provider", "account_blocked", "-", "-"),
    ("the provider asked for a pause", "provider_paused", "-", "-"),
    ("throttled by the provider", "throttled", "-", "-"),
    ("the limiter has lost its state and waits", "limiter_cold", "-", "-"),
    ("usage of a limit is being read from the ledger", "needs_history", "-", "-"),
    ("the limiter store is unavailable", "limiter_unavailable", "-", "-"),
    ("newer settings are being loaded", "stale_settings", "-", "-"),
    ("the provider is down: connection refused", "circuit_open", "-", "connection refused"),
    ("another job tests whether the provider is up again", "circuit_probing", "-", "-"),
    ("the provider is paused", "operator_paused", "-", "-"),
    ("the quota is not open in this worker", "quota_closed", "-", "-"),
    ("provider answered 401: check url, credentials and method", "misconfigured", "-", SAME),
    ("provider answered a look-up with 403: check the credentials in headers", "misconfigured", "-", SAME),
    ("the provider rejected several payments in a row", "rejected_streak", "-", "-"),
    ("the request cannot be built yet: header a: no secret", "unbuildable", "-", "header a: no secret"),
    ("this worker has used up its file descriptors: raise LimitNOFILE", "local_fault", "-", SAME),
    ("this worker may start no more threads: raise TasksMax", "local_fault", "-", SAME),
    ("this worker's machine has no memory for another connection: give it more", "local_fault", "-", SAME),
    ("the provider is busy with this payment's object", "object_busy", "-", "-"),
    ("the provider is still working on this payment", "in_progress", "-", "-"),
    ("the provider does not know this payment", "lookup", "-", SAME),
    ("waited too long to be sent again: the provider is asked", "lookup", "-", SAME),
    ("the provider does not know this payment: it is sent once more", "resend", "-", "-"),
    ("connection refused", "retry", "-", SAME),
    ("a sentence with 100 % of an unknown kind", "retry", "-", SAME),
    ("", "retry", "-", ""),
    ("recorded too late for its permit, nothing was sent", "permit_missed", "-", "-"),
    ("the ledger was unavailable, nothing was sent", "ledger_unavailable", "-", SAME),
    ("disk full, nothing was sent", "ledger_refused", "-", SAME),
    ("a worker was lost while the request was in flight", "worker_lost", "-", "-"),
    // An operator's decision is no wait. Delivered before its time, the job waits for that.
    ("sent again by an operator: they asked", "not_before", "-", SAME),
];
const SAME: &str = "the whole sentence";

/// Id, state, reason, text of the last wait; and the row that they become.
type Other = (&'static str, &'static str, Option<&'static str>, Option<&'static str>, &'static str);

const OTHERS: [Other; 11] = [
    ("u1", "unknown", Some("no answer in time"), None, "u1|outcome_unknown|-|no answer in time|-"),
    ("u2", "unknown", Some("provider answered 503"), None, "u2|outcome_unknown|-|provider answered 503|-"),
    ("u3", "unknown", Some("look-up failed: no answer"), None, "u3|lookup|-|look-up failed: no answer|-"),
    ("v1", "waiting", Some("provider answered 503"), None, "v1|provider_paused|-|provider answered 503|-"),
    ("v2", "waiting", Some("look-up failed: it is"), None, "v2|provider_paused|-|look-up failed: it is|-"),
    ("v3", "waiting", Some("connection refused"), Some("waits for its time"), "v3|retry|-|connection refused|-"),
    ("v4", "waiting", Some("replayed by x"), Some("waits for limit all"), "v4|-|-|-|replayed by x"),
    ("v5", "waiting", None, None, "v5|-|-|-|-"),
    ("v6", "waiting", None, Some("waits for limit all"), "v6|limit|all|-|-"),
    ("w1", "review", Some("why"), Some("provider answered 503"), "w1|retry|-|provider answered 503|why"),
    ("w2", "declined", Some("no funds"), None, "w2|-|-|-|no funds"),
];

/// A ledger of the build before the codes.
async fn earlier_ledger(kind: Kind) -> Fixture {
    let fixture = Fixture::empty(kind);
    let (folder, before) = if kind == Kind::Postgres { ("migrations/postgres", 48) } else { ("migrations/sqlite", 40) };
    let migrator = Migrator::new(Path::new(folder)).await.unwrap();
    match &fixture.postgres {
        Some(pool) => migrator.run_to(before, pool).await.unwrap(),
        None => migrator.run_to(before, &fixture.database.sqlite_pool().unwrap()).await.unwrap(),
    }
    fixture
}

impl Fixture {
    /// A job as the earlier build left it.
    async fn earlier_row(&self, kind: Kind, id: &str, state: &str, texts: [Option<&str>; 2]) {
        let (at, hash) = match kind {
            Kind::Postgres => ("now()", "decode(repeat('01', 32), 'hex')"),
            _ => ("1700000000000", "zeroblob(32)"),
        };
        let unknown = if state == "unknown" { "1 = 1" } else { "1 = 0" };
        let [reason, wait_reason] =
            texts.map(|text| text.map_or("NULL".to_owned(), |text| format!("'{}'", text.replace('\'', "''"))));
        let row = format!(
            "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, cost, \
                 priority, state, maybe_charged, wake_at, fence, created_at, updated_at, first_sent_at, \
                 first_sent_number, frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, \
                 frozen_fingerprint, reason, wait_reason, wait_since, wait_until, wait_request) \
             VALUES ('{id}', 'stripe', '{id}', 1 = 0, {hash}, 1, 'EUR', 1, 0, '{state}', {unknown}, {at}, 1, {at}, \
                 {at}, {at}, 1, 'POST', 'https://x.example/', '{id}', 'a/b', {hash}, 'f', \
                 {reason}, {wait_reason}, {at}, {at}, 1)"
        );
        self.sql(&row).await.unwrap_or_else(|error| panic!("{id}: {error}"));
    }
}

async fn sentences_of_earlier_builds_become_codes(kind: Kind) {
    let fixture = earlier_ledger(kind).await;
    let mut wanted = Vec::new();
    for (nth, (sentence, code, limit, detail)) in SENTENCES.into_iter().enumerate() {
        let detail = if detail == SAME { sentence } else { detail };
        let (waiting, finished) = (format!("a{nth:02}"), format!("f{nth:02}"));
        fixture.earlier_row(kind, &waiting, "waiting", [Some(sentence), Some(sentence)]).await;
        fixture.earlier_row(kind, &finished, "declined", [Some("no funds"), Some(sentence)]).await;
        wanted.push(match sentence.starts_with("sent again") {
            true => format!("{waiting}|{code}|-|-|{sentence}"),
            false => format!("{waiting}|{code}|{limit}|{detail}|-"),
        });
        wanted.push(format!("{finished}|{code}|{limit}|{detail}|no funds"));
    }
    for (id, state, reason, last, becomes) in OTHERS {
        fixture.earlier_row(kind, id, state, [reason, last]).await;
        wanted.push(becomes.to_owned());
    }
    fixture.database.migrate().await.unwrap();
    wanted.sort();
    assert_eq!(fixture.wait_rows().await, wanted);

    // Operators read what they read before, and no text is lost.
    for (nth, (sentence, ..)) in SENTENCES.into_iter().enumerate() {
        for id in [format!("a{nth:02}"), format!("f{nth:02}")] {
            let details = fixture.database.operator().show(&Identifier::new(&id).unwrap()).await.unwrap().unwrap();
            let waited = details.waited.unwrap_or_else(|| panic!("{id}: its last wait is lost"));
            let text = format!("{} {}", waited.reason, details.line.reason.unwrap_or_default());
            let sentence = sentence.replace("account shop is", "its account is");
            assert!(text.contains(&sentence), "{id}: {sentence}: {text}");
        }
    }
    // The start belongs to the last wait, and is kept where the text described that wait.
    let kept = "SELECT id FROM jobs WHERE wait_since IS NOT NULL AND id > 'g' ORDER BY id";
    let kept: Vec<String> = fixture.column(kept).await.into_iter().flatten().collect();
    assert_eq!(kept, ["v5", "v6", "w1", "w2"]);
    let left: BTreeSet<&str> = WaitReason::all().iter().map(WaitReason::code).collect();
    let seen: BTreeSet<&str> = SENTENCES.iter().map(|(_, code, ..)| *code).chain(["outcome_unknown"]).collect();
    assert_eq!(seen, left, "each code has a sentence of the earlier build");
}
