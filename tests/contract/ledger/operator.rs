//! The operator's interface to the ledger: every resolution in every state, resends, reloads, job lists and job
//! details.

use sluicegate::domain::job::JobId;
use sluicegate::domain::outcome::{FinalState, PartialCharge};
use sluicegate::ledger::operator::{Actor, Charge, JobDetails, JobFilter, JobResolution, ResolutionRefusal};
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState};

use super::*;

mod audit;
mod decision_batches;
mod erasure;
mod history;
mod queue_position;
mod races;
mod search;
mod waits;

on_every_database!(
    one_charge_pays_one_payment,
    resend_drops_another_payments_reference,
    another_sum_is_kept_with_the_payment,
    every_resolution_on_every_state,
    resend_keeps_request_and_resets_attempts,
    expired_or_erased_jobs_are_not_resent,
    job_is_reloaded_as_recorded,
    pages_omit_no_job,
    job_details_hide_only_secrets,
);

fn verdicts() -> [JobResolution; 6] {
    [
        JobResolution::Succeeded(Charge { reference: Some("ch_9".to_owned()), amount: None }),
        JobResolution::Declined,
        JobResolution::Resend,
        JobResolution::Cancel,
        JobResolution::Replay,
        JobResolution::Discard,
    ]
}

fn by() -> Actor {
    Actor { os_user: "alice@desk".to_owned(), program: None, reason: Some("asked the provider".to_owned()) }
}

fn id(text: &str) -> JobId {
    Identifier::new(text).unwrap()
}

fn finished(state: FinalState) -> JobState {
    JobState::Final { state, reason: "settled".to_owned(), reference: None }
}

impl Fixture {
    async fn decide(&self, text: &str, verdict: &JobResolution) -> Result<(), ResolutionRefusal> {
        settled(self.database.resolve_job(&id(text), verdict, None, &by()).await)
    }

    pub async fn details(&self, text: &str) -> JobDetails {
        self.database.job_details(&id(text)).await.unwrap().unwrap()
    }

    /// Runs one whole attempt of a new job, with this outcome and this next state.
    async fn attempted(&self, text: &str, outcome: &'static str, next: &JobState) -> LeaseToken {
        let hold = self.take(&job(text)).await.lease;
        let BeginResult::Attempt(number) = self.database.begin_attempt(&hold, &request(text), AT_ONCE).await.unwrap()
        else {
            panic!("the lease is stale")
        };
        let end = AttemptEnd { number, outcome, status: None, detail: "said so".to_owned(), counts: true };
        assert_eq!(self.database.finish_attempt(&hold, &end, next).await.unwrap(), FencedWrite::Applied);
        hold
    }

    /// Brings a new job into a situation; its id is the situation's name.
    async fn bring(&self, situation: &'static str) {
        let (ledger, wait) = (self.database.clone(), Duration::ZERO);
        match situation {
            "waiting-in-hand" => drop(self.take(&job(situation)).await),
            "waiting" => {
                let hold = self.take(&job(situation)).await.lease;
                assert_eq!(ledger.release(&hold).await.unwrap(), FencedWrite::Applied);
            }
            "waiting-throttled" => {
                let next = JobState::Waiting { wait, reason: WaitReason::Throttled.into() };
                self.attempted(situation, "throttled", &next).await;
            }
            "sending" | "sending-lost" => {
                let hold = self.take(&job(situation)).await.lease;
                let result = ledger.begin_attempt(&hold, &request(situation), AT_ONCE).await.unwrap();
                assert_eq!(result, BeginResult::Attempt(1));
            }
            "unknown" => {
                let next = JobState::Unknown { wait, reason: Wait::with_detail(WaitReason::Retry, "no answer") };
                self.attempted(situation, "unknown", &next).await;
            }
            "review-unknown" => drop(self.attempted(situation, "unknown", &finished(FinalState::Review)).await),
            "review-rejected" => drop(self.attempted(situation, "rejected", &finished(FinalState::Review)).await),
            "cancelled" => {
                self.take(&job(situation)).await;
                self.decide(situation, &JobResolution::Cancel).await.unwrap();
            }
            other => {
                let state = FinalState::from_name(other).unwrap();
                self.attempted(situation, "not_sent", &finished(state)).await;
            }
        }
    }

    /// Everything that a refused resolution must leave as it is.
    async fn picture(&self, text: &str) -> String {
        let job = format!(
            "SELECT state || fence || attempts || maybe_charged || wake_at || updated_at || coalesce(reason, wait_detail, '') || \
                 coalesce(holder, '') || coalesce(provider_reference, '') FROM jobs WHERE id = '{text}'"
        );
        let beside = format!(
            "SELECT (SELECT count(*) FROM events WHERE job_id = '{text}') || '|' || \
                 (SELECT count(*) FROM job_audit WHERE job_id = '{text}')"
        );
        format!("{} {}", self.one(&job).await, self.one(&beside).await)
    }
}

const SITUATIONS: [&str; 12] = [
    "waiting",
    "waiting-in-hand",
    "waiting-throttled",
    "sending",
    "unknown",
    "review-unknown",
    "review-rejected",
    "dead",
    "succeeded",
    "declined",
    "expired",
    "cancelled",
];

/// State after the resolution; `None`: the resolution is refused.
fn becomes(situation: &str, verdict: &JobResolution) -> Option<&'static str> {
    match (situation, verdict) {
        ("review-unknown" | "review-rejected", JobResolution::Succeeded(_)) => Some("succeeded"),
        ("review-unknown" | "review-rejected", JobResolution::Declined) => Some("declined"),
        ("review-unknown" | "review-rejected", JobResolution::Resend) => Some("waiting"),
        ("waiting" | "waiting-in-hand" | "waiting-throttled", JobResolution::Cancel) => Some("cancelled"),
        ("dead", JobResolution::Replay) => Some("waiting"),
        ("dead", JobResolution::Discard) => Some("cancelled"),
        _ => None,
    }
}

/// Gives each situation its own charge, because no two payments share one.
fn charged_as(situation: &str, verdict: &JobResolution) -> JobResolution {
    match verdict {
        JobResolution::Succeeded(_) => {
            JobResolution::Succeeded(Charge { reference: Some(format!("ch_{situation}")), amount: None })
        }
        other => other.clone(),
    }
}

async fn one_charge_pays_one_payment(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let verdict = charged_as("one", &JobResolution::Succeeded(Charge::default()));
    for situation in ["review-unknown", "review-rejected"] {
        fixture.bring(situation).await;
    }
    assert_eq!(fixture.decide("review-unknown", &verdict).await, Ok(()));
    let picture = fixture.picture("review-rejected").await;
    let taken = ResolutionRefusal::ReferenceTaken { by: "review-unknown".to_owned() };
    assert_eq!(fixture.decide("review-rejected", &verdict).await, Err(taken));
    assert_eq!(fixture.picture("review-rejected").await, picture);
    let other = charged_as("other", &verdict);
    assert_eq!(fixture.decide("review-rejected", &other).await, Ok(()));
}

async fn resend_drops_another_payments_reference(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let accepted = |reference: Option<&str>| JobState::Final {
        state: FinalState::Succeeded,
        reason: "accepted".to_owned(),
        reference: reference.map(str::to_owned),
    };
    let stands = async |text: &str| {
        let line = fixture.details(text).await.line;
        (line.state, line.provider_reference)
    };
    let (succeeded, review, ch_1) = ("succeeded".to_owned(), "review".to_owned(), Some("ch_1".to_owned()));
    fixture.attempted("b", "accepted", &accepted(Some("ch_1"))).await;
    fixture.attempted("a", "accepted", &accepted(Some("ch_1"))).await;
    assert_eq!(stands("a").await, (review.clone(), ch_1.clone()));
    fixture.decide("a", &JobResolution::Resend).await.unwrap();
    assert_eq!(stands("a").await, ("waiting".to_owned(), None));
    fixture.attempted("a", "accepted", &accepted(None)).await;
    assert_eq!(stands("a").await, (succeeded, None));
    // If the response names no reference, the reference that the row already has decides.
    fixture.bring("waiting").await;
    fixture.sql("UPDATE jobs SET provider_reference = 'ch_1' WHERE id = 'waiting'").await.unwrap();
    fixture.attempted("waiting", "accepted", &accepted(None)).await;
    assert_eq!(stands("waiting").await, (review, ch_1));
    let reason = fixture.details("waiting").await.line.reason.unwrap();
    assert!(reason.starts_with("the provider's reference is that of payment b too: "), "{reason}");
}

/// The sum that was charged, where it is another one than the payment's: from the provider, or from an operator.
async fn another_sum_is_kept_with_the_payment(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let part = PartialCharge { reference: Some("ch_1".to_owned()), amount: 500 };
    fixture.attempted("part", "accepted", &JobState::SucceededInPart(part)).await;
    let line = fixture.details("part").await.line;
    assert_eq!(
        (line.state.as_str(), line.charged_amount, line.reason.as_deref()),
        ("succeeded", Some(500), Some("accepted in part"))
    );
    for text in ["told", "full", "again"] {
        fixture.attempted(text, "differs", &finished(FinalState::Review)).await;
        let details = fixture.details(text).await;
        assert_eq!((details.maybe_charged, details.line.charged_amount), (true, None), "{text}");
    }
    let charge =
        |reference: &str, amount| JobResolution::Succeeded(Charge { reference: Some(reference.to_owned()), amount });
    fixture.decide("told", &charge("ch_2", Some(700))).await.unwrap();
    fixture.decide("full", &charge("ch_3", None)).await.unwrap();
    fixture.decide("again", &JobResolution::Resend).await.unwrap();
    for (text, charged) in [("told", Some(700)), ("full", None), ("again", None)] {
        let details = fixture.details(text).await;
        assert_eq!(details.line.charged_amount, charged, "{text}");
        assert_eq!(details.audit.last().unwrap().charged_amount, charged, "{text}");
    }
    // The line of a list, and the events.
    let listed = fixture.database.list_jobs(&JobFilter::default(), None, 10).await.unwrap().jobs;
    assert_eq!(listed.iter().find(|line| line.id == "told").unwrap().charged_amount, Some(700));
    let events = fixture.ordered_events().await;
    let last = |text: &str| events.iter().rev().find(|event| event.id == text).map(|event| event.charged_amount);
    assert_eq!((last("told"), last("full")), (Some(Some(700)), Some(None)));
    let sums = fixture.column("SELECT CAST(charged_amount AS text) FROM events WHERE job_id = 'part'").await;
    assert_eq!(sums, [Some("500".to_owned())]);
    assert!(fixture.sql("UPDATE jobs SET charged_amount = 0 WHERE id = 'part'").await.is_err());
}

async fn every_resolution_on_every_state(kind: Kind) {
    for verdict in verdicts() {
        let fixture = Fixture::migrated(kind).await;
        for situation in SITUATIONS {
            fixture.bring(situation).await;
            let verdict = charged_as(situation, &verdict);
            let before = fixture.details(situation).await;
            let picture = fixture.picture(situation).await;
            let decided = fixture.decide(situation, &verdict).await;
            let after = fixture.details(situation).await;
            let Some(state) = becomes(situation, &verdict) else {
                let refusal = decided.expect_err(situation);
                let named = ResolutionRefusal::WrongState {
                    state: before.line.state.clone(),
                    wanted: verdict.required_state(),
                    done: verdict.past_participle(),
                };
                assert_eq!(refusal, named, "{situation} {verdict:?}");
                assert!(refusal.to_string().contains(&format!("`{}`", before.line.state)), "{refusal}");
                assert_eq!(fixture.picture(situation).await, picture, "{situation} {verdict:?}");
                continue;
            };
            assert_eq!(decided, Ok(()), "{situation} {verdict:?}");
            assert_eq!(after.line.state, state);
            let reason = after.line.reason.as_deref().unwrap();
            assert!(reason.ends_with("by an operator: asked the provider"), "{reason}");
            assert_eq!((after.holder, after.response_by), (None, None));
            let [audit] = &after.audit[before.audit.len()..] else { panic!("{:?}", after.audit) };
            assert_eq!((audit.old_state.as_str(), audit.new_state.as_deref()), (verdict.required_state(), Some(state)));
            assert_eq!(audit.os_user.as_deref(), Some("alice@desk"));
            assert_eq!(audit.because.as_deref(), Some("asked the provider"));
            assert_eq!(audit.cleared_maybe_charged, situation == "review-unknown" && verdict == JobResolution::Resend);
            let events: Vec<&str> = after.events[before.events.len()..].iter().map(|e| e.state.as_str()).collect();
            assert_eq!(events, if state == "waiting" { vec![] } else { vec![state] }, "{situation} {verdict:?}");
            let reference = (state == "succeeded").then(|| format!("ch_{situation}"));
            assert_eq!(after.line.provider_reference, reference);
        }
        assert_eq!(fixture.decide("nobody", &verdict).await, Err(ResolutionRefusal::NoSuchJob));
        // A resolved job is in another state, so a second resolution is refused and changes nothing.
        let fence = "SELECT sum(fence) FROM jobs";
        let before = fixture.one(fence).await;
        for situation in SITUATIONS.iter().filter(|s| becomes(s, &verdict).is_some()) {
            assert!(matches!(fixture.decide(situation, &verdict).await, Err(ResolutionRefusal::WrongState { .. })));
        }
        assert_eq!(fixture.one(fence).await, before);
    }
}

async fn resend_keeps_request_and_resets_attempts(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (situation, verdict) in [("review-unknown", JobResolution::Resend), ("dead", JobResolution::Replay)] {
        fixture.bring(situation).await;
        // The job is nine days old, as reviews often are.
        let old = if kind == Kind::Postgres { "created_at - interval '9 days'" } else { "created_at - 777600000" };
        fixture.sql(&format!("UPDATE jobs SET created_at = {old} WHERE id = '{situation}'")).await.unwrap();
        fixture.decide(situation, &verdict).await.unwrap();
        let details = fixture.details(situation).await;
        assert_eq!((details.line.attempts, details.maybe_charged), (0, false), "{situation}");
        assert!(details.revived_at.is_some());
        let claimed = fixture.take(&job(situation)).await;
        assert_eq!((claimed.attempts, claimed.maybe_charged), (0, false), "{situation}");
        assert!(claimed.age < Duration::from_secs(60), "{situation} is {:?} old", claimed.age);
        // The provider may still know the key, so the request stays the same. The ledger also keeps since when the
        // provider may know it.
        let (frozen, _) = claimed.frozen_request.unwrap();
        assert_eq!(frozen, request(situation));
        assert_eq!(details.first_sent_at.is_some(), situation == "review-unknown");
        assert_eq!(
            fixture.database.begin_attempt(&claimed.lease, &frozen, AT_ONCE).await.unwrap(),
            BeginResult::Attempt(2)
        );
    }
    // A dead job is confirmed not charged: a constraint of the database rules out any other.
    fixture.bring("expired").await;
    let error = fixture
        .without_constraints("UPDATE jobs SET state = 'dead', maybe_charged = (1 = 1) WHERE id = 'expired'")
        .await;
    assert!(error.unwrap_err().contains("maybe_charged_is_never"));
}

async fn expired_or_erased_jobs_are_not_resent(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (situation, verdict) in [("review-unknown", JobResolution::Resend), ("dead", JobResolution::Replay)] {
        fixture.bring(situation).await;
        let past = if kind == Kind::Postgres { "now() - interval '1 second'" } else { "unixepoch() * 1000 - 1000" };
        for (change, refusal) in [
            (format!("expires_at = {past}"), ResolutionRefusal::Expired),
            ("expires_at = NULL, frozen_body = ''".to_owned(), ResolutionRefusal::Scrubbed),
        ] {
            let change = if kind == Kind::Postgres { change } else { change.replace("''", "x''") };
            fixture.without_constraints(&format!("UPDATE jobs SET {change} WHERE id = '{situation}'")).await.unwrap();
            let picture = fixture.picture(situation).await;
            assert_eq!(fixture.decide(situation, &verdict).await, Err(refusal.clone()), "{situation}");
            let recalled = settled(fixture.database.reload_job(&id(situation), &verdict).await);
            assert_eq!(recalled, Err(refusal));
            assert_eq!(fixture.picture(situation).await, picture);
        }
    }
    // Resolutions that send nothing are still accepted.
    assert_eq!(fixture.decide("review-unknown", &JobResolution::Declined).await, Ok(()));
    assert_eq!(fixture.decide("dead", &JobResolution::Discard).await, Ok(()));
}

async fn job_is_reloaded_as_recorded(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let whole = Job {
        idempotency_key: Some(Identifier::new("key-7").unwrap()),
        cost: 3,
        priority: 9,
        not_before: Some(sluicegate::domain::time::EpochMs(1_700_000_000_123)),
        expires_at: Some(sluicegate::domain::time::EpochMs(4_100_000_000_987)),
        ..job("whole")
    };
    let bare = Job { account: None, reference: None, payload: None, ..job("bare") };
    for job in [whole, bare] {
        let hold = fixture.take(&job).await.lease;
        assert_eq!(
            fixture.database.transition(&hold, &finished(FinalState::Dead)).await.unwrap(),
            FencedWrite::Applied
        );
        let recalled = fixture.database.reload_job(&job.id, &JobResolution::Replay).await.unwrap();
        assert_eq!((recalled.job, recalled.hash, recalled.fence), (job.clone(), hash(1), hold.fence));
        // A resolution is refused if the job changed since the operator saw it.
        let stale = Some(recalled.fence - 1);
        let decided = settled(fixture.database.resolve_job(&job.id, &JobResolution::Replay, stale, &by()).await);
        assert_eq!(decided, Err(ResolutionRefusal::Changed));
        assert_eq!(fixture.state(job.id.as_str()).await, "dead");
    }
}

async fn pages_omit_no_job(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let operator = fixture.database.clone();
    assert_eq!(operator.list_jobs(&JobFilter::of_state("dead"), None, 5).await.unwrap().jobs, []);
    for number in 0..14 {
        let provider = ["adyen", "stripe", "wise"][number % 3];
        let account = Some(id(["acct_1", "acct_2"][number / 7]));
        let hold =
            fixture.take(&Job { provider: name(provider), account, ..job(&format!("p{number:02}")) }).await.lease;
        if number % 2 == 0 {
            assert_eq!(
                fixture.database.transition(&hold, &finished(FinalState::Dead)).await.unwrap(),
                FencedWrite::Applied
            );
        }
    }
    let all = async |filter: JobFilter, at_most: u32| {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = operator.list_jobs(&filter, after.as_ref(), at_most).await.unwrap().jobs;
            assert!(page.len() <= at_most as usize);
            let Some(last) = page.last() else { return found };
            after = Some(id(&last.id));
            found.extend(page.into_iter().map(|line| line.id));
        }
    };
    let numbers = |step: fn(&usize) -> bool| (0..14).rev().filter(step).map(|n| format!("p{n:02}")).collect::<Vec<_>>();
    let wise = Some(name("wise"));
    for at_most in [1, 3, 100] {
        assert_eq!(all(JobFilter::default(), at_most).await, numbers(|_| true));
        assert_eq!(all(JobFilter::of_state("dead"), at_most).await, numbers(|n| n % 2 == 0));
        assert_eq!(
            all(JobFilter { provider: wise.clone(), ..JobFilter::default() }, at_most).await,
            numbers(|n| n % 3 == 2)
        );
        let both = JobFilter { provider: wise.clone(), ..JobFilter::of_state("dead") };
        assert_eq!(all(both, at_most).await, numbers(|n| n % 3 == 2 && n % 2 == 0));
        let account = JobFilter { account: Some(id("acct_2")), ..JobFilter::default() };
        assert_eq!(all(account.clone(), at_most).await, numbers(|n| *n >= 7));
        let three = JobFilter { states: vec!["dead"], provider: wise.clone(), ..account };
        assert_eq!(all(three.clone(), at_most).await, numbers(|n| *n >= 7 && n % 3 == 2 && n % 2 == 0));
        assert_eq!(all(JobFilter { id: Some(id("p03")), ..JobFilter::default() }, at_most).await, ["p03"]);
        assert_eq!(all(JobFilter { id: Some(id("p03")), ..three }, at_most).await, [""; 0]);
    }
    let mut dead = operator.state_counts().await.unwrap();
    dead.retain(|count| count.state == "dead");
    dead.sort_by(|a, b| a.provider.cmp(&b.provider));
    let counts: Vec<_> = dead.iter().map(|count| (count.provider.as_str(), count.state.as_str(), count.jobs)).collect();
    assert_eq!(counts, [("adyen", "dead", 3), ("stripe", "dead", 2), ("wise", "dead", 2)]);
}

async fn job_details_hide_only_secrets(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.database.job_details(&id("nobody")).await.unwrap(), None);
    fixture.bring("review-unknown").await;
    let details = fixture.details("review-unknown").await;
    assert_eq!((details.line.amount, details.line.currency.as_str(), details.line.attempts), (1_299, "EUR", 1));
    let [attempt] = details.attempts.as_slice() else { panic!("{:?}", details.attempts) };
    assert_eq!((attempt.number, attempt.outcome.as_deref(), attempt.counted), (1, Some("unknown"), Some(true)));
    assert!(attempt.ended_at >= Some(attempt.began_at) && details.maybe_charged);
    let payload = details.payload.as_ref().unwrap();
    assert_eq!(payload.bytes, 18);
    // Computed with sha256sum.
    assert_eq!(payload.sha256, "88f19ee7db81ace1a300ed953bf662fd91eec7fce84bb315da79def77b0ebc18");
    let request = details.request.as_ref().unwrap();
    assert_eq!((request.method.as_str(), request.body.bytes), ("POST", 23));
    let json = serde_json::to_string(&details).unwrap();
    for secret in ["tok_1", r#"{\"id\""#, "0123456789abcdef"] {
        assert!(!json.contains(secret), "{secret} in {json}");
    }
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["state"], &json["requests"][0]["number"]), (&"review".into(), &1.into()));
    let at = json["created_at"].as_str().unwrap();
    assert!(at.len() == 24 && at.ends_with('Z'), "{at}");
}
