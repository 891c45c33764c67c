//! Why a job waits is a code: the sentence made of it is for people, and rewording it changes nothing.

use sluicegate::domain::disposition::Resend;
use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::operator::{Actor, JobResolution};
use sluicegate::ledger::upkeep::{WaitCause, WakeFilter};
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState};

use super::*;

on_every_database!(every_wait_reason_is_stored, each_step_replaces_the_wait, jobs_are_woken_by_code_not_text,);

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
        let line = self.database.job_details(&id).await.unwrap().unwrap().line;
        (line.reason, line.wait_reason, line.wait_limit)
    }
}

fn some(text: &str) -> Option<String> {
    Some(text.to_owned())
}

async fn every_wait_reason_is_stored(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (nth, reason) in WaitReason::ALL.into_iter().enumerate() {
        let reason = match reason {
            WaitReason::Limit(_) => WaitReason::Limit("per-minute".to_owned()),
            WaitReason::CostExceedsLimit(_) => WaitReason::CostExceedsLimit("per-minute".to_owned()),
            other => other,
        };
        let id = format!("p{nth}");
        let lease = fixture.take(&job(&id)).await.lease;
        let wait = Wait::with_detail(reason.clone(), "as it is");
        let next = JobState::Waiting { wait: HOUR, reason: wait.clone() };
        assert_eq!(fixture.database.transition(&lease, &next).await.unwrap(), FencedWrite::Applied);
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
    let (ledger, id) = (fixture.database.clone(), "p1");
    let lease = fixture.take(&job(id)).await.lease;
    assert_eq!(fixture.shown(id).await, (None, None, None), "it was never delayed");
    let delayed = JobState::Waiting { wait: Duration::ZERO, reason: Wait::for_limit("all") };
    assert_eq!(ledger.transition(&lease, &delayed).await.unwrap(), FencedWrite::Applied);
    assert_eq!(fixture.shown(id).await, (some("waits for limit all"), some("limit"), some("all")));

    let lease = fixture.take(&job(id)).await.lease;
    assert_eq!(ledger.begin_attempt(&lease, &request(id), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
    assert_eq!(fixture.shown(id).await, (None, None, None), "its request is in flight");
    let end = AttemptEnd { number: 1, outcome: "not_sent", status: None, detail: String::new(), counts: true };
    let refused = Wait::with_detail(WaitReason::Retry, "connection refused");
    let next = JobState::Waiting { wait: Duration::ZERO, reason: refused };
    assert_eq!(ledger.finish_attempt(&lease, &end, &next).await.unwrap(), FencedWrite::Applied);
    assert_eq!(fixture.shown(id).await, (some("connection refused"), some("retry"), None));

    let lease = fixture.take(&job(id)).await.lease;
    assert_eq!(ledger.begin_attempt(&lease, &request(id), AT_ONCE).await.unwrap(), BeginResult::Attempt(2));
    fixture.expire_lease(&lease).await;
    let lease = fixture.take(&job(id)).await.lease;
    let lost = WaitReason::WorkerLost;
    assert_eq!(fixture.shown(id).await, (some(&Wait::from(lost.clone()).to_string()), some(lost.code()), None));
    assert_eq!(fixture.wait_rows().await, ["p1|worker_lost|-|-|-"]);

    let review = JobState::Final { state: FinalState::Review, reason: "why".to_owned(), reference: None };
    assert_eq!(ledger.transition(&lease, &review).await.unwrap(), FencedWrite::Applied);
    assert_eq!(fixture.shown(id).await, (some("why"), None, None));
    let by = Actor { os_user: "alice@desk".to_owned(), program: None, reason: None };
    let operator = fixture.database.clone();
    operator.resolve_job(&job(id).id, &JobResolution::Resend, None, &by).await.unwrap();
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
        assert_eq!(fixture.database.transition(&lease, &next).await.unwrap(), FencedWrite::Applied);
    }
    tokio::time::sleep(Duration::from_millis(5)).await;
    fixture.sql("INSERT INTO providers (name, url) VALUES ('stripe', 'https://x.example/')").await.unwrap();
    let mut woken = Vec::new();
    for cause in [WaitCause::Limit, WaitCause::RetryAfter] {
        let which =
            WakeFilter { changed_ago: None, cause, propagation_time: Duration::ZERO, due_within: SECOND, at_most: 10 };
        woken.push(fixture.database.wake_waiting(&name("stripe"), &which).await.unwrap());
    }
    let due = "SELECT id FROM jobs WHERE wake_at = updated_at AND NOT backlog ORDER BY id";
    let due: Vec<String> = fixture.column(due).await.into_iter().flatten().collect();
    assert_eq!((woken, due), (vec![2, 1], ["costly", "limit", "named"].map(str::to_owned).to_vec()));
}
