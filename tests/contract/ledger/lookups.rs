//! Look-ups: rows of their own, which leave their job unknown until one finds the outcome. One charge belongs to one
//! payment.

use sluicegate::domain::disposition::Resend;
use sluicegate::domain::outcome::{FinalState, PartialCharge};
use sluicegate::domain::permit_protocol::CostByKind;
use sluicegate::domain::quota_spec::Lookback;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState, LedgerError, LookupEnd};

use super::*;

on_every_database!(
    a_lookup_is_a_row_and_no_attempt,
    one_lookup_runs_per_unknown_job,
    a_lost_workers_lookup_changes_nothing,
    one_more_request_is_granted_and_used,
    unknown_age_counts_from_last_unknown_charge,
    a_charge_belongs_to_one_payment,
    a_lookup_finds_a_smaller_sum,
    concurrent_payments_cannot_share_a_charge,
    lookups_count_as_one_permit_each,
);

fn unknown(reason: &str) -> JobState {
    JobState::Unknown { wait: Duration::ZERO, reason: Wait::with_detail(WaitReason::Retry, reason) }
}

fn succeeded(reference: &str) -> JobState {
    let reference = Some(reference.to_owned());
    JobState::Final { state: FinalState::Succeeded, reason: "accepted".to_owned(), reference }
}

fn found(number: u32, outcome: &'static str) -> LookupEnd {
    LookupEnd { number, outcome, status: Some(200), detail: format!("{outcome} detail"), grants_resend: false }
}

fn charged(number: u32, outcome: &'static str) -> AttemptEnd {
    AttemptEnd { number, outcome, status: None, detail: String::new(), counts: true }
}

impl Fixture {
    async fn begin_charge(&self, hold: &LeaseToken) -> u32 {
        match self.database.begin_attempt(hold, &request(hold.id.as_str()), AT_ONCE).await.unwrap() {
            BeginResult::Attempt(number) => number,
            BeginResult::Stale => panic!("the lease is stale"),
        }
    }

    async fn begin_lookup(&self, hold: &LeaseToken) -> u32 {
        match self.database.begin_lookup(hold, A_MINUTE).await.unwrap() {
            BeginResult::Attempt(number) => number,
            BeginResult::Stale => panic!("the lease is stale"),
        }
    }

    /// Claims a job whose one charge has an unknown outcome.
    async fn claim_unknown(&self, job: &Job) -> Claimed {
        let hold = self.take(job).await.lease;
        let number = self.begin_charge(&hold).await;
        let kept = self.database.finish_attempt(&hold, &charged(number, "unknown"), &unknown("no answer")).await;
        assert_eq!(kept.unwrap(), FencedWrite::Applied);
        self.take(job).await
    }

    async fn rows(&self, select: &str) -> Vec<String> {
        self.column(select).await.into_iter().flatten().collect()
    }
}

async fn a_lookup_finds_a_smaller_sum(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let hold = fixture.claim_unknown(&job("p1")).await.lease;
    let number = fixture.begin_lookup(&hold).await;
    let part = JobState::SucceededInPart(PartialCharge { reference: Some("ch_1".to_owned()), amount: 500 });
    let written = fixture.database.finish_lookup(&hold, &found(number, "accepted"), &part).await.unwrap();
    assert_eq!((written.0, written.1), (FencedWrite::Applied, Some(FinalState::Succeeded)));
    let kept = "SELECT state || ' ' || charged_amount || ' ' || provider_reference FROM";
    assert_eq!(fixture.rows(&format!("{kept} jobs")).await, ["succeeded 500 ch_1"]);
    assert_eq!(fixture.rows(&format!("{kept} events")).await, ["succeeded 500 ch_1"]);
}

const ATTEMPTS: &str = "SELECT number || '|' || kind || '|' || coalesce(outcome, 'open') || '|' || \
     CASE WHEN counted THEN 'counted' ELSE 'not' END FROM attempts ORDER BY job_id, number";

async fn a_lookup_is_a_row_and_no_attempt(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (ledger, job) = (fixture.database.clone(), job("p1"));
    let hold = fixture.claim_unknown(&job).await.lease;
    assert_eq!(fixture.begin_lookup(&hold).await, 2);
    assert_eq!(fixture.state("p1").await, "unknown");
    let next = unknown("the provider does not know this payment");
    assert_eq!(ledger.finish_lookup(&hold, &found(2, "not_found"), &next).await.unwrap().0, FencedWrite::Applied);
    let claimed = fixture.take(&job).await;
    assert_eq!((claimed.attempts, claimed.last_attempt, claimed.lookups), (1, 2, 1));
    assert_eq!((claimed.maybe_charged, claimed.resend), (true, Resend::Never));
    let number = fixture.begin_lookup(&claimed.lease).await;
    // The job stays unknown, whatever next state the caller gives.
    let waiting = JobState::Waiting { wait: Duration::ZERO, reason: Wait::with_detail(WaitReason::Retry, "x") };
    let end = LookupEnd { status: None, ..found(number, "unknown") };
    assert_eq!(ledger.finish_lookup(&claimed.lease, &end, &waiting).await.unwrap().0, FencedWrite::Applied);
    assert_eq!(fixture.state("p1").await, "unknown");
    let last = fixture.take(&job).await.lease;
    let number = fixture.begin_lookup(&last).await;
    let dead = JobState::Final { state: FinalState::Dead, reason: "x".to_owned(), reference: None };
    let error = ledger.finish_lookup(&last, &found(number, "not_found"), &dead).await.unwrap_err();
    assert!(matches!(error, LedgerError::StatementFailed(_)), "{error}");
    assert_eq!(
        ledger.finish_lookup(&last, &found(number, "accepted"), &succeeded("ch_1")).await.unwrap().0,
        FencedWrite::Applied
    );
    let rows = fixture.rows(ATTEMPTS).await;
    let wanted =
        ["1|charge|unknown|counted", "2|lookup|not_found|not", "3|lookup|unknown|not", "4|lookup|accepted|not"];
    assert_eq!(rows, wanted);
    let job = "SELECT state || '|' || attempts || '|' || lookups || '|' || provider_reference FROM jobs";
    assert_eq!(fixture.one(job).await, "succeeded|1|3|ch_1");
    assert_eq!(fixture.rows("SELECT state || '|' || attempts FROM events").await, ["succeeded|1"]);
    let status = "SELECT number || '|' || status || '|' || detail FROM attempts WHERE number = 2";
    assert_eq!(fixture.one(status).await, "2|200|not_found detail");
}

async fn one_lookup_runs_per_unknown_job(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    let fresh = fixture.take(&job("p1")).await.lease;
    assert_eq!(ledger.begin_lookup(&fresh, A_MINUTE).await.unwrap(), BeginResult::Stale, "nothing was sent");
    fixture.begin_charge(&fresh).await;
    assert_eq!(ledger.begin_lookup(&fresh, A_MINUTE).await.unwrap(), BeginResult::Stale, "it is being sent");
    let hold = fixture.claim_unknown(&job("p2")).await.lease;
    let number = fixture.begin_lookup(&hold).await;
    assert_eq!(ledger.begin_lookup(&hold, A_MINUTE).await.unwrap(), BeginResult::Stale, "one is in flight");
    let next = unknown("x");
    assert_eq!(ledger.finish_lookup(&hold, &found(number - 1, "accepted"), &next).await.unwrap().0, FencedWrite::Stale);
    assert_eq!(ledger.finish_lookup(&hold, &found(number, "not_found"), &next).await.unwrap().0, FencedWrite::Applied);
    assert_eq!(ledger.finish_lookup(&hold, &found(number, "not_found"), &next).await.unwrap().0, FencedWrite::Stale);
    assert_eq!(ledger.begin_lookup(&hold, A_MINUTE).await.unwrap(), BeginResult::Stale, "the lease was released");
}

async fn a_lost_workers_lookup_changes_nothing(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (ledger, job) = (fixture.database.clone(), job("p1"));
    let lost = fixture.claim_unknown(&job).await.lease;
    let number = fixture.begin_lookup(&lost).await;
    fixture.expire_lease(&lost).await;
    let claimed = fixture.take(&job).await;
    assert_eq!((claimed.attempts, claimed.lookups, claimed.maybe_charged), (1, 1, true));
    assert_eq!(fixture.state("p1").await, "unknown");
    let reason = fixture.one("SELECT wait_detail FROM jobs").await;
    assert_eq!(reason, "no answer", "the reason is the charge's");
    assert_eq!(fixture.rows(ATTEMPTS).await, ["1|charge|unknown|counted", "2|lookup|unknown|not"]);
    let late = ledger.finish_lookup(&lost, &found(number, "accepted"), &succeeded("ch_1")).await.unwrap().0;
    assert_eq!(late, FencedWrite::Stale);
    assert_eq!(fixture.begin_lookup(&claimed.lease).await, 3);
}

async fn one_more_request_is_granted_and_used(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    let grant = async |id: &str| {
        let hold = fixture.claim_unknown(&job(id)).await.lease;
        let number = fixture.begin_lookup(&hold).await;
        let end = LookupEnd { grants_resend: true, ..found(number, "not_found") };
        assert_eq!(ledger.finish_lookup(&hold, &end, &unknown("once more")).await.unwrap().0, FencedWrite::Applied);
        fixture.take(&job(id)).await
    };
    let mut claimed = grant("p1").await;
    assert_eq!((claimed.resend, claimed.maybe_charged), (Resend::Granted, true));
    // A request that is confirmed not charged keeps the grant. A request that may have been charged uses it up for
    // ever.
    for (outcome, resend) in [
        ("throttled", Resend::Granted),
        ("not_sent", Resend::Granted),
        ("unknown", Resend::Used),
        ("in_progress", Resend::Used),
    ] {
        let number = fixture.begin_charge(&claimed.lease).await;
        let end = charged(number, outcome);
        assert_eq!(ledger.finish_attempt(&claimed.lease, &end, &unknown("x")).await.unwrap(), FencedWrite::Applied);
        claimed = fixture.take(&job("p1")).await;
        assert_eq!(claimed.resend, resend, "{outcome}");
    }
    let lost = grant("p2").await.lease;
    fixture.begin_charge(&lost).await;
    fixture.expire_lease(&lost).await;
    assert_eq!(fixture.take(&job("p2")).await.resend, Resend::Used, "its worker was lost while it was in flight");
    let mut error = String::new();
    for word in ["'maybe'", "''"] {
        error = fixture.sql(&format!("UPDATE jobs SET resend = {word}")).await.unwrap_err();
    }
    assert!(error.contains("resend_is_granted_or_used"), "{error}");
}

/// Look-ups, and requests that are confirmed not charged, leave the age as it is.
async fn unknown_age_counts_from_last_unknown_charge(kind: Kind) {
    const HOUR: Duration = Duration::from_secs(3_600);
    let fixture = Fixture::migrated(kind).await;
    let (ledger, job) = (fixture.database.clone(), job("p1"));
    let earlier = if kind == Kind::Postgres { "interval '1 hour'" } else { "3600000" };
    let expire_leases = "UPDATE jobs SET holder = 'lost' WHERE holder IS NOT NULL";
    let an_hour_passes = async || {
        fixture.sql(&format!("UPDATE attempts SET began_at = began_at - {earlier}")).await.unwrap();
        fixture.sql(expire_leases).await.unwrap();
        fixture.take_returned(&job).await
    };
    fixture.record(&job).await;
    let fresh = fixture.take_returned(&job).await;
    assert_eq!(fresh.unknown_age, None);
    let number = fixture.begin_charge(&fresh.lease).await;
    let waiting = JobState::Waiting { wait: Duration::ZERO, reason: Wait::with_detail(WaitReason::Retry, "x") };
    let kept = ledger.finish_attempt(&fresh.lease, &charged(number, "throttled"), &waiting).await.unwrap();
    assert_eq!((kept, an_hour_passes().await.unknown_age), (FencedWrite::Applied, None));
    fixture.sql(expire_leases).await.unwrap();
    let hold = fixture.take_returned(&job).await.lease;
    let number = fixture.begin_charge(&hold).await;
    let kept = ledger.finish_attempt(&hold, &charged(number, "unknown"), &unknown("no answer")).await.unwrap();
    assert_eq!(kept, FencedWrite::Applied);
    let mut claimed = an_hour_passes().await;
    for (outcome, moves) in [("throttled", false), ("not_sent", false), ("in_progress", true), ("unknown", true)] {
        assert!(claimed.unknown_age >= Some(HOUR), "{claimed:?}");
        let number = fixture.begin_lookup(&claimed.lease).await;
        let kept = ledger.finish_lookup(&claimed.lease, &found(number, "unknown"), &unknown("x")).await.unwrap().0;
        claimed = fixture.take_returned(&job).await;
        assert!(kept == FencedWrite::Applied && claimed.unknown_age >= Some(HOUR), "{claimed:?}");
        let number = fixture.begin_charge(&claimed.lease).await;
        let kept = ledger.finish_attempt(&claimed.lease, &charged(number, outcome), &unknown("x")).await.unwrap();
        claimed = fixture.take_returned(&job).await;
        assert_eq!((kept, claimed.unknown_age < Some(HOUR)), (FencedWrite::Applied, moves), "{outcome}");
        claimed = an_hour_passes().await;
    }
    fixture.begin_charge(&claimed.lease).await;
    fixture.expire_lease(&claimed.lease).await;
    claimed = fixture.take_returned(&job).await;
    assert!(claimed.unknown_age < Some(HOUR), "its worker was lost: {claimed:?}");
    assert!(claimed.maybe_charged && claimed.unknown_age.is_some());
}

async fn a_charge_belongs_to_one_payment(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    let charge = async |job: &Job, reference: &str| {
        let hold = fixture.take(job).await.lease;
        let number = fixture.begin_charge(&hold).await;
        let kept = ledger.finish_attempt(&hold, &charged(number, "accepted"), &succeeded(reference)).await.unwrap();
        assert_eq!(kept, FencedWrite::Applied);
    };
    charge(&job("p1"), "ch_1").await;
    charge(&job("p2"), "ch_2").await;
    charge(&job("p3"), "ch_1").await;
    charge(&Job { provider: name("adyen"), ..job("p4") }, "ch_1").await;
    let hold = fixture.claim_unknown(&job("p5")).await.lease;
    let number = fixture.begin_lookup(&hold).await;
    assert_eq!(
        ledger.finish_lookup(&hold, &found(number, "accepted"), &succeeded("ch_2")).await.unwrap(),
        (FencedWrite::Applied, Some(FinalState::Review))
    );
    let states = fixture.rows("SELECT id || '|' || state || '|' || provider_reference FROM jobs ORDER BY id").await;
    let wanted = ["p1|succeeded|ch_1", "p2|succeeded|ch_2", "p3|review|ch_1", "p4|succeeded|ch_1", "p5|review|ch_2"];
    assert_eq!(states, wanted);
    for (id, other) in [("p3", "p1"), ("p5", "p2")] {
        let reason = fixture.one(&format!("SELECT reason FROM jobs WHERE id = '{id}'")).await;
        let conflict = format!("the provider's reference is that of payment {other} too: ");
        assert!(reason.starts_with(&conflict) && reason.contains("request.reference (lookup.reference)"), "{reason}");
        // The reason does not name the charge: it belongs to another payment, which may be erased.
        assert!(!reason.contains("ch_"), "{reason}");
        let event = format!("SELECT state || '|' || reason FROM events WHERE job_id = '{id}'");
        assert_eq!(fixture.one(&event).await, format!("review|{reason}"));
    }
    // The rule holds for plain SQL, too.
    let error = fixture.sql("UPDATE jobs SET state = 'succeeded' WHERE id = 'p3'").await.unwrap_err();
    assert!(error.to_lowercase().contains("unique"), "{error}");
    // Payments without a provider reference have none in common.
    for id in ["p6", "p7"] {
        let hold = fixture.take(&job(id)).await.lease;
        let number = fixture.begin_charge(&hold).await;
        let none = JobState::Final { state: FinalState::Succeeded, reason: "accepted".to_owned(), reference: None };
        assert_eq!(
            ledger.finish_attempt(&hold, &charged(number, "accepted"), &none).await.unwrap(),
            FencedWrite::Applied
        );
        assert_eq!(fixture.state(id).await, "succeeded");
    }
}

async fn concurrent_payments_cannot_share_a_charge(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    for round in 0..10 {
        let mut finishing = Vec::new();
        for n in 0..4 {
            let job = job(&format!("p{round}-{n}"));
            let hold = fixture.take(&job).await.lease;
            let number = fixture.begin_charge(&hold).await;
            let (ledger, reference) = (ledger.clone(), format!("ch_{round}"));
            finishing.push(tokio::spawn(async move {
                ledger.finish_attempt(&hold, &charged(number, "accepted"), &succeeded(&reference)).await
            }));
        }
        for finished in futures_util::future::join_all(finishing).await {
            assert_eq!(finished.unwrap().unwrap(), FencedWrite::Applied);
        }
        let count =
            |state| format!("SELECT count(*) FROM jobs WHERE provider_reference = 'ch_{round}' AND state = '{state}'");
        assert_eq!(fixture.one(&count("succeeded")).await, "1");
        assert_eq!(fixture.one(&count("review")).await, "3");
    }
    assert_eq!(fixture.one("SELECT count(*) FROM events").await, "40");
}

/// A limiter that is rebuilt from the ledger must count look-ups. A look-up costs one permit, whatever the job's charge
/// costs.
async fn lookups_count_as_one_permit_each(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (ledger, job) = (fixture.database.clone(), Job { cost: 7, ..job("p1") });
    fixture.sql("INSERT INTO providers (name, url) VALUES ('stripe', 'https://x.example/')").await.unwrap();
    let recent = async || {
        let uses = ledger.recent_uses(&name("stripe"), Lookback::all(Duration::from_secs(600))).await.unwrap();
        (uses.ended.iter().map(|(_, cost)| *cost).collect::<Vec<_>>(), uses.open)
    };
    let (charge, both) = (CostByKind::charges(7), CostByKind { charges: 7, lookups: 1 });
    let hold = fixture.claim_unknown(&job).await.lease;
    assert_eq!(recent().await, (vec![], charge), "its end is unknown");
    let number = fixture.begin_lookup(&hold).await;
    assert_eq!(recent().await, (vec![], both), "in flight");
    assert_eq!(
        ledger.finish_lookup(&hold, &found(number, "not_found"), &unknown("x")).await.unwrap().0,
        FencedWrite::Applied
    );
    let lookup = || vec![CostByKind { charges: 0, lookups: 1 }];
    assert_eq!(recent().await, (lookup(), charge));
    let hold = fixture.take(&job).await.lease;
    let number = fixture.begin_lookup(&hold).await;
    let silent = LookupEnd { status: None, ..found(number, "unknown") };
    assert_eq!(ledger.finish_lookup(&hold, &silent, &unknown("x")).await.unwrap().0, FencedWrite::Applied);
    assert_eq!(recent().await, (lookup(), both), "without a response, the provider may count it late");
    let hold = fixture.take(&job).await.lease;
    let number = fixture.begin_lookup(&hold).await;
    assert_eq!(
        ledger.finish_lookup(&hold, &found(number, "not_sent"), &unknown("x")).await.unwrap().0,
        FencedWrite::Applied
    );
    assert_eq!(recent().await, (lookup(), both));
}
