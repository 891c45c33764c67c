//! Look-ups that are due while their messages lie in the lane's queue: which jobs need one, and that a claim adds no
//! message.

use sluicegate::domain::backoff::{LookupPolicy, RetryPolicy};
use sluicegate::domain::disposition::{AttemptHistory, PreSend, Refusals, Resend, before_request};
use sluicegate::ledger::LookupEnd;
use sluicegate::ledger::copies::{DeliveredCopy, ReturnPlan};
use sluicegate::ledger::operator::Actor;

use super::super::timestamps::beyond;
use super::*;

on_every_database!(
    due_lookups_follow_the_lookup_rule,
    due_lookups_exclude_leased_and_delayed_jobs,
    unreadable_lookups_do_not_hold_up_others,
    job_claimed_without_message_adds_none,
    message_counts_regardless_of_lookup_result,
    finished_jobs_message_counts_until_taken,
    erased_jobs_message_counts_until_scrubbed,
);

const HOUR: Duration = Duration::from_secs(3_600);
const DEDUPLICATES: RetryPolicy = RetryPolicy {
    max_attempts: 3,
    max_age: HOUR,
    backoff: sluicegate::domain::backoff::BackoffPolicy { base: SECOND, max: MINUTE },
    idempotency_retention: Some(HOUR),
    lookup: Some(LookupPolicy { give_up_after: HOUR, resend_if_not_found: true }),
};
const FORGETS: RetryPolicy = RetryPolicy { idempotency_retention: None, ..DEDUPLICATES };

fn unknown(wait: Duration) -> JobState {
    JobState::Unknown { wait, reason: Wait::with_detail(WaitReason::Retry, "no answer") }
}

impl Fixture {
    /// Records a job that may have been charged, and whose newest message copy, number 1, is back in the lane's queue.
    async fn is_unknown(&self, id: &str) {
        let hold = self.take(&job(id)).await.lease;
        assert_eq!(self.database.begin_attempt(&hold, &request(id)).await.unwrap(), BeginResult::Attempt(1));
        let end = AttemptEnd { number: 1, outcome: "unknown", status: None, detail: String::new(), counts: true };
        let next = unknown(SECOND);
        assert_eq!(self.database.finish_attempt(&hold, &end, &next).await.unwrap(), FencedWrite::Applied);
        for column in ["wake_at", "delayed_until", "updated_at"] {
            self.move_back(id, column, 10).await;
        }
        self.move_back(id, "created_at", 20).await;
    }

    async fn due_lookups(&self, policy: &RetryPolicy) -> Vec<JobToRepublish> {
        self.database.due_lookups(&name("stripe"), policy, 100).await.unwrap()
    }

    async fn is_taken(&self, id: &str, arrived: DeliveredCopy) -> Claimed {
        let Claim::Claimed(claimed) = self.arrives(id, arrived).await else { panic!("{arrived:?} is not claimed") };
        *claimed
    }

    /// Runs a look-up that finds nothing.
    async fn asked_in_vain(&self, claimed: &Claimed) -> Option<ReturnPlan> {
        let BeginResult::Attempt(number) = self.database.begin_lookup(&claimed.lease).await.unwrap() else {
            panic!("the lease is stale")
        };
        let detail = String::new();
        let end = LookupEnd { number, outcome: "in_progress", status: Some(200), detail, grants_resend: false };
        let (written, _, back) = self.database.finish_lookup(&claimed.lease, &end, &unknown(MINUTE)).await.unwrap();
        assert_eq!(written, FencedWrite::Applied);
        back
    }

    async fn messages(&self) -> (u64, u64) {
        let account = self.account(CheckScope::All).await;
        (account.messages_min, account.messages_max)
    }
}

async fn due_lookups_follow_the_lookup_rule(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    // Counted attempts, the grant of a look-up, and how long ago the job was first sent and recorded.
    let mut number = 0;
    for attempts in [1, 2, 3] {
        for resend in ["NULL", "'granted'", "'used'"] {
            for (sent_s, recorded_s) in [(60, 70), (1_700, 1_710), (1_900, 1_910), (60, 3_700)] {
                number += 1;
                let id = format!("p{number:02}");
                fixture.is_unknown(&id).await;
                let set = format!("UPDATE jobs SET attempts = {attempts}, resend = {resend} WHERE id = '{id}'");
                fixture.sql(&set).await.unwrap();
                fixture.move_back(&id, "first_sent_at", sent_s).await;
                fixture.move_back(&id, "created_at", recorded_s).await;
            }
        }
    }
    let due = async |policy: &RetryPolicy| ids(&fixture.due_lookups(policy).await);
    let (by_sql, by_sql_if_forgotten) = (due(&DEDUPLICATES).await, due(&FORGETS).await);
    let mut by_rule = Vec::new();
    for number in 1..=number {
        let id = format!("p{number:02}");
        let claimed = fixture.take(&job(&id)).await;
        let history = AttemptHistory {
            attempts: claimed.attempts,
            requests: claimed.last_attempt,
            lookups: claimed.lookups,
            resend: claimed.resend,
            unknown: claimed.maybe_charged,
            age: claimed.age,
            first_sent_age: claimed.frozen_request.map(|(_, age)| age),
            unknown_age: claimed.unknown_age,
            lost_holders: claimed.lost_holders,
            throttle_generation: 1,
            probe: false,
            refusals: Refusals::default(),
        };
        match before_request(&history, &DEDUPLICATES, None) {
            PreSend::LookUp => by_rule.push(id),
            PreSend::Charge => assert!(history.resend != Resend::Used || history.attempts < 3),
            PreSend::Transition(next) => panic!("{next:?}"),
        }
    }
    assert_eq!(by_sql, by_rule);
    assert!(by_rule.len() > 10 && by_rule.len() < number, "{by_rule:?}");
    assert_eq!(by_sql_if_forgotten.len(), number);
}

async fn due_lookups_exclude_leased_and_delayed_jobs(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for id in ["due", "due-first", "early", "in-hand", "lost", "delayed"] {
        fixture.is_unknown(id).await;
    }
    fixture.waiting(&job("waits"), Duration::ZERO).await;
    fixture.move_back("waits", "wake_at", 10).await;
    fixture.move_back("due-first", "wake_at", 10).await;
    fixture.move_back("early", "wake_at", -60).await;
    fixture.move_back("delayed", "delayed_until", -60).await;
    fixture.take(&job("in-hand")).await;
    let lost = fixture.take(&job("lost")).await;
    fixture.expire_lease(&lost.lease).await;
    let due = fixture.due_lookups(&FORGETS).await;
    assert_eq!(ids(&due), ["due", "due-first", "lost"]);
    assert_eq!((due[0].job.id.as_str(), due[0].copy), ("due-first", 1));
    assert_eq!(fixture.database.due_lookups(&name("stripe"), &FORGETS, 1).await.unwrap().len(), 1);
    assert_eq!(fixture.database.due_lookups(&name("adyen"), &FORGETS, 9).await.unwrap(), []);
}

/// This holds however long the unreadable ones have been due.
async fn unreadable_lookups_do_not_hold_up_others(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let [early, .., late] = beyond(kind);
    let unreadable = ["wake_at", "created_at", "first_sent_at", "not_before", "expires_at"];
    for id in unreadable.into_iter().chain(["good"]) {
        fixture.is_unknown(id).await;
    }
    fixture.without_rules().await;
    for column in unreadable {
        fixture.move_back(column, "wake_at", 20).await;
        let instant = if column == "expires_at" { late } else { early };
        let set = format!("UPDATE jobs SET {column} = {instant} WHERE id = '{column}'");
        fixture.without_constraints(&set).await.unwrap();
    }
    let due = fixture.database.due_lookups(&name("stripe"), &FORGETS, 1).await.unwrap();
    assert_eq!(ids(&due), ["good"]);
    assert_eq!(ids(&fixture.due_lookups(&FORGETS).await), ["good"]);
}

async fn job_claimed_without_message_adds_none(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.is_unknown("p").await;
    assert_eq!(fixture.messages().await, (1, 1));
    for round in 0..3 {
        let due = fixture.due_lookups(&FORGETS).await;
        assert_eq!(due.iter().map(|due| due.copy).collect::<Vec<_>>(), [1], "{round}");
        let claimed = fixture.is_taken("p", DeliveredCopy::queued(1)).await;
        // Two workers saw the due look-up, and its message may be delivered meanwhile.
        for other in [DeliveredCopy::queued(1), DeliveredCopy::delivered(1, false), DeliveredCopy::delivered(1, true)] {
            assert!(matches!(fixture.arrives("p", other).await, Claim::LeasedElsewhere { .. }), "{other:?}");
        }
        assert_eq!(fixture.messages().await, (0, 1), "in the queue, unless it was delivered");
        let back = fixture.asked_in_vain(&claimed).await;
        assert_eq!(back.and_then(|back| back.copy_to_publish(claimed.copy)), None);
        assert_eq!(fixture.messages().await, (1, 1), "though its job waits");
        assert_eq!(fixture.due_lookups(&FORGETS).await, []);
        fixture.move_back("p", "wake_at", 90).await;
    }
    // The same holds if the job is delayed without a request.
    let claimed = fixture.is_taken("p", DeliveredCopy::queued(1)).await;
    let (written, back) = fixture.database.transition_with_copy(&claimed.lease, &unknown(MINUTE)).await.unwrap();
    assert_eq!((written, back), (FencedWrite::Applied, Some(ReturnPlan { copy: 1, unqueued: false })));
    let claimed = fixture.is_taken("p", DeliveredCopy::queued(1)).await;
    let (written, back) = fixture.database.release_waiting_with_copy(&claimed.lease, MINUTE).await.unwrap();
    assert_eq!((written, back), (FencedWrite::Applied, Some(ReturnPlan { copy: 1, unqueued: false })));
    // From its delivery on it is a message like any other.
    let claimed = fixture.is_taken("p", DeliveredCopy::delivered(1, false)).await;
    assert_eq!(fixture.messages().await, (0, 0));
    let back = fixture.asked_in_vain(&claimed).await;
    assert_eq!(back.and_then(|back| back.copy_to_publish(claimed.copy)), Some(2));
    assert_eq!(fixture.messages().await, (0, 0), "a delay queue has it");
    assert_eq!(fixture.arrives("p", DeliveredCopy::queued(1)).await, Claim::Superseded);
}

async fn message_counts_regardless_of_lookup_result(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (id, ends) in [("leaves", "its worker leaves"), ("dies", "its worker dies"), ("dies-asking", "while it asks")] {
        fixture.is_unknown(id).await;
        let claimed = fixture.is_taken(id, DeliveredCopy::queued(1)).await;
        match id {
            "leaves" => assert_eq!(fixture.database.release(&claimed.lease).await.unwrap(), FencedWrite::Applied),
            "dies" => fixture.expire_lease(&claimed.lease).await,
            _ => {
                assert_eq!(fixture.database.begin_lookup(&claimed.lease).await.unwrap(), BeginResult::Attempt(2));
                fixture.expire_lease(&claimed.lease).await;
            }
        }
        assert_eq!(ids(&fixture.due_lookups(&FORGETS).await).len(), 1, "{ends}");
        let claimed = fixture.is_taken(id, DeliveredCopy::delivered(1, false)).await;
        let back = fixture.asked_in_vain(&claimed).await;
        assert_eq!(back.and_then(|back| back.copy_to_publish(claimed.copy)), Some(2), "{ends}");
    }
}

async fn finished_jobs_message_counts_until_taken(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for id in ["p", "other"] {
        fixture.is_unknown(id).await;
        let claimed = fixture.is_taken(id, DeliveredCopy::queued(1)).await;
        let BeginResult::Attempt(number) = fixture.database.begin_lookup(&claimed.lease).await.unwrap() else {
            panic!("the lease is stale")
        };
        let (outcome, detail) = ("accepted", String::new());
        let end = LookupEnd { number, outcome, status: Some(200), detail, grants_resend: false };
        let reference = Some(format!("ch-{id}"));
        let next = JobState::Final { state: FinalState::Succeeded, reason: "accepted".to_owned(), reference };
        let (written, ..) = fixture.database.finish_lookup(&claimed.lease, &end, &next).await.unwrap();
        assert_eq!(written, FencedWrite::Applied);
    }
    assert_eq!(fixture.messages().await, (0, 2));
    for (arrived, left) in [
        (DeliveredCopy::delivered(0, false), 2),
        (DeliveredCopy::queued(1), 2),
        (DeliveredCopy::delivered(1, true), 1),
        (DeliveredCopy::delivered(1, false), 1),
    ] {
        assert_eq!(fixture.arrives("p", arrived).await, Claim::Finished);
        assert_eq!(fixture.messages().await, (0, left), "{arrived:?}");
    }
    // An operator may empty a queue.
    fixture.move_back("other", "updated_at", 10).await;
    assert_eq!(fixture.database.scrub(ScrubScope::Finished, SECOND, 10).await.unwrap(), 1);
    assert_eq!(fixture.messages().await, (0, 0));
}

/// It counts like that of any other payment: until its delivery, or at last until the scrub.
async fn erased_jobs_message_counts_until_scrubbed(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (id, state) in [("paid", FinalState::Succeeded), ("dead", FinalState::Dead)] {
        fixture.is_unknown(id).await;
        let claimed = fixture.is_taken(id, DeliveredCopy::queued(1)).await;
        let BeginResult::Attempt(number) = fixture.database.begin_lookup(&claimed.lease).await.unwrap() else {
            panic!("the lease is stale")
        };
        let detail = String::new();
        let end = LookupEnd { number, outcome: "accepted", status: Some(200), detail, grants_resend: false };
        let next = JobState::Final { state: FinalState::Succeeded, reason: "accepted".to_owned(), reference: None };
        let (written, ..) = fixture.database.finish_lookup(&claimed.lease, &end, &next).await.unwrap();
        assert_eq!(written, FencedWrite::Applied);
        let set = format!("UPDATE jobs SET state = '{}', maybe_charged = (1 = 0) WHERE id = '{id}'", state.name());
        fixture.without_constraints(&set).await.unwrap();
        fixture.move_back(id, "updated_at", 600).await;
    }
    fixture.sql("UPDATE outcome_events SET published_at = at").await.unwrap();
    fixture.database.update_finished_totals().await.unwrap();
    let account = Identifier::new("acct_1").unwrap();
    let by = Actor { os_user: "alice@desk".to_owned(), program: None, reason: None };
    assert_eq!(fixture.database.erase_account(&account, 10, &by).await.unwrap().jobs, 2);
    assert_eq!(fixture.one("SELECT count(*) FROM jobs WHERE scrubbed_at IS NOT NULL").await, "2");
    assert_eq!(fixture.database.scrub(ScrubScope::Finished, HOUR, 10).await.unwrap(), 0);
    let counted = async || fixture.one("SELECT count(*) FROM jobs WHERE delayed_until <= created_at").await;
    assert_eq!(counted().await, "2", "both are still in a queue");
    assert_eq!(fixture.database.scrub(ScrubScope::Finished, MINUTE, 10).await.unwrap(), 2);
    assert_eq!(counted().await, "0");
    assert_eq!(fixture.database.scrub(ScrubScope::Finished, MINUTE, 10).await.unwrap(), 0, "each once");
}
