//! The work of workers, sweepers and operators on a ledger, through its interfaces, one duty after the other.

use futures_util::future::join_all;
use sluicegate::domain::clock_comparison::{ClockAttestation, ClockOffset, QuotaAttestation};
use sluicegate::domain::limit::Scope;
use sluicegate::domain::outcome::FinalState;
use sluicegate::domain::quota_spec::{Lookback, SubjectQuery};
use sluicegate::domain::time::Micros;
use sluicegate::ledger::backlog::BacklogRecord;
use sluicegate::ledger::fleet::WorkerReport;
use sluicegate::ledger::rejected::{RejectedMessage, StoredMessage};
use sluicegate::ledger::upkeep::{CheckScope, ScrubScope, WaitCause, WakeFilter};
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState, LookupEnd, NewJobAttempt, RequestTiming};

use super::super::*;
use super::filling::LANES;
use super::{Access, Explained};

/// Duties that must reach a large table by an index.
pub const ON_THE_WAY: [&str; 20] = [
    "a job comes back",
    "a job is refused",
    "a request is begun",
    "a request is refused",
    "an attempt ends in a wait",
    "an attempt settles its job",
    "a look-up is begun",
    "a look-up ends in a wait",
    "a look-up settles its job",
    "a job is put down",
    "a job is given back",
    "a quota is rebuilt",
    "an account's usage is read",
    "due jobs return",
    "lanes with returns are read",
    "jobs that a limit refused are woken",
    "waiting jobs expire",
    "an account's jobs are listed",
    "an erasure is counted",
    "a job's history is read",
];

/// Duties whose statements name the job.
pub const IN_HAND: [&str; 8] = [
    "a job comes back",
    "a request is begun",
    "an attempt ends in a wait",
    "an attempt settles its job",
    "a look-up is begun",
    "a look-up ends in a wait",
    "a look-up settles its job",
    "a job is put down",
];

/// Queries about one provider, which are answered by an index that begins with the provider.
pub const OF_A_PROVIDER: [&str; 1] = ["a provider's arrivals are read"];

/// Jobs that are active at the same time.
pub const CROWD: u32 = 40;
const MINUTE: Duration = Duration::from_secs(60);
/// The work, on jobs whose ids begin with `run`.
pub struct Working<'a, E> {
    pub fixture: &'a Fixture,
    pub explained: &'a mut E,
    pub run: &'static str,
    pub accesses: Vec<Access>,
}

pub fn lane(number: u32) -> String {
    format!("lane-{}", number % LANES)
}

pub fn account(number: u32) -> Identifier {
    Identifier::new(format!("acct_{}", number % 500)).unwrap()
}

fn end(number: u32, outcome: &'static str) -> AttemptEnd {
    AttemptEnd { number, outcome, status: Some(200), detail: "said so".to_owned(), counts: true }
}

fn done(reference: Option<String>) -> JobState {
    JobState::Final { state: FinalState::Succeeded, reason: "accepted".to_owned(), reference }
}

fn wait() -> JobState {
    JobState::Waiting { wait: MINUTE, reason: WaitReason::Throttled.into() }
}

fn unknown() -> JobState {
    JobState::Unknown { wait: MINUTE, reason: Wait::with_detail(WaitReason::Retry, "no answer") }
}

impl<E: Explained> Working<'_, E> {
    pub async fn did(&mut self, during: &'static str) {
        self.accesses.extend(self.explained.accesses(self.fixture, during).await);
    }

    pub fn job(&self, what: &str, number: u32) -> Job {
        let id = format!("{}-{what}-{number}", self.run);
        Job { provider: name(&lane(number)), account: Some(account(number)), ..job(&id) }
    }

    fn crowd(&self, what: &str, round: u32) -> Vec<Job> {
        (0..CROWD).map(|number| self.job(what, round * CROWD + number)).collect()
    }

    /// Records and claims so many jobs at once that the first is written alone and others in a batch.
    async fn take(&mut self, what: &str, round: u32) -> Vec<LeaseToken> {
        let jobs = self.crowd(what, round);
        self.take_all(&jobs).await
    }

    pub async fn take_all(&mut self, jobs: &[Job]) -> Vec<LeaseToken> {
        let ledger = &self.fixture.database;
        let recorded = jobs.iter().map(|job| ledger.record_backlog(job, hash(1), Duration::ZERO));
        for recorded in join_all(recorded).await {
            assert!(matches!(recorded, Ok(BacklogRecord::Recorded { .. })), "{recorded:?}");
        }
        self.did("a job is recorded").await;
        let holds = self.claims(jobs).await;
        self.did("a job in the backlog is claimed for its repair").await;
        holds
    }

    async fn claims(&self, jobs: &[Job]) -> Vec<LeaseToken> {
        let claims = jobs.iter().map(|job| async move {
            let above = LeaseToken { id: job.id.clone(), fence: 0 };
            let claim = self.fixture.database.claim_for_repair(&above, "worker-a", None).await.unwrap();
            claim.unwrap_or_else(|| panic!("{} is not free", job.id)).claimed.lease
        });
        join_all(claims).await
    }

    /// Claims jobs again that are out of the backlog.
    async fn come_back(&mut self, what: &str, round: u32) -> Vec<LeaseToken> {
        let holds = self.claims(&self.crowd(what, round)).await;
        self.did("a job comes back").await;
        holds
    }

    async fn begin_all(&self, holds: &[LeaseToken]) -> Vec<u32> {
        let ledger = &self.fixture.database;
        let beginning = holds.iter().map(|hold| async move {
            match ledger.begin_attempt(hold, &request(hold.id.as_str()), AT_ONCE).await.unwrap() {
                BeginResult::Attempt(number) => number,
                BeginResult::Stale => panic!("{hold:?} is stale"),
            }
        });
        join_all(beginning).await
    }

    /// Ends the attempts of these numbers.
    async fn ended(
        &self,
        holds: &[LeaseToken],
        numbers: &[u32],
        outcome: &'static str,
        next: impl Fn(&LeaseToken) -> JobState,
    ) {
        let ledger = &self.fixture.database;
        let ended = holds.iter().zip(numbers).map(|(hold, number)| {
            let next = next(hold);
            async move { ledger.finish_attempt(hold, &end(*number, outcome), &next).await.unwrap() }
        });
        assert!(join_all(ended).await.iter().all(|written| *written == FencedWrite::Applied), "{outcome}");
    }

    async fn transition_all(&self, holds: &[LeaseToken], next: &JobState) {
        let ledger = &self.fixture.database;
        let put = holds.iter().map(|hold| async move { ledger.transition(hold, next).await.unwrap() });
        assert!(join_all(put).await.iter().all(|written| *written == FencedWrite::Applied), "{next:?}");
    }

    /// Several rounds of each duty: from the sixth on PostgreSQL may use a generic plan.
    pub async fn way_of_a_job(&mut self) {
        for round in 0..8 {
            self.intake(round).await;
            self.sending(round).await;
            self.looking_up(round).await;
            self.leaving(round).await;
        }
    }

    pub async fn all(&mut self) {
        self.way_of_a_job().await;
        self.limiter().await;
        self.upkeep().await;
        self.people().await;
    }

    async fn recorded_with_requests(&self, round: u32) {
        let jobs: Vec<Job> = (0..CROWD).map(|number| self.job("first", round * CROWD + number)).collect();
        let ledger = &self.fixture.database;
        let recorded = jobs.iter().map(|job| async move {
            let hold = LeaseToken { id: job.id.clone(), fence: 7_000_000_000 };
            let request = request(job.id.as_str());
            let first = NewJobAttempt {
                job,
                hash: hash(1),
                lease: &hold,
                holder: "worker-a",
                timing: RequestTiming::immediate(A_MINUTE),
                request: &request,
            };
            ledger.record_and_begin(first).await.unwrap()
        });
        assert!(join_all(recorded).await.iter().all(|written| *written == FencedWrite::Applied));
    }

    async fn intake(&mut self, round: u32) {
        let ledger = self.fixture.database.clone();
        let holds = self.take("claimed", round).await;
        let claimed = self.job("claimed", round * CROWD);
        let held = ledger.claim(&claimed, hash(1), "worker-b").await.unwrap();
        assert_eq!(held, Claim::NotOpen);
        let same_key = Job { idempotency_key: Some(claimed.id.clone()), ..self.job("same-key", round * CROWD) };
        let conflict = ledger.claim(&same_key, hash(1), "worker-b").await.unwrap();
        assert!(matches!(conflict, Claim::Conflict(_)), "{conflict:?}");
        self.did("a job is refused").await;
        let released = holds.iter().map(|hold| ledger.release(hold));
        assert!(join_all(released).await.into_iter().all(|written| written.unwrap() == FencedWrite::Applied));
        self.did("a job is given back").await;
        self.claims(&self.crowd("claimed", round)).await;
        self.did("a job in the backlog is claimed for its repair").await;
        let delayed = self.take("parked", round).await;
        self.transition_all(&delayed, &wait()).await;
        self.did("a job is put down").await;
        let late = self.take("late", round).await;
        let expired = JobState::Final { state: FinalState::Expired, reason: "late".to_owned(), reference: None };
        self.transition_all(&late, &expired).await;
        self.did("a job is put down").await;
    }

    async fn sending(&mut self, round: u32) {
        self.recorded_with_requests(round).await;
        self.did("a job is recorded with its request").await;
        let holds = self.take("sent", round).await;
        let numbers = self.begin_all(&holds).await;
        self.did("a request is begun").await;
        let again =
            self.fixture.database.begin_attempt(&holds[0], &request(holds[0].id.as_str()), AT_ONCE).await.unwrap();
        assert_eq!(again, BeginResult::Stale);
        self.did("a request is refused").await;
        self.ended(&holds, &numbers, "throttled", |_| wait()).await;
        self.did("an attempt ends in a wait").await;
        let holds = self.come_back("sent", round).await;
        let numbers = self.begin_all(&holds).await;
        self.did("a request is begun").await;
        self.ended(&holds, &numbers, "accepted", |hold| done(Some(format!("charge-{}", hold.id)))).await;
        self.did("an attempt settles its job").await;
        // A worker that was lost with its requests in flight.
        let holds = self.take("lost", round).await;
        self.begin_all(&holds).await;
        for hold in &holds {
            self.fixture.expire_lease(hold).await;
        }
        self.did("the test's own").await;
        for number in 0..LANES {
            let ledger = &self.fixture.database;
            let mut lost = ledger.lost_jobs(&name(&lane(number)), None, 1_000).await.unwrap();
            lost.retain(|job| holds.iter().any(|hold| hold.id == job.id));
            ledger.take_away(&lost, None).await.unwrap();
        }
        self.did("due jobs return").await;
        self.claims(&self.crowd("lost", round)).await;
        self.did("a job in the backlog is claimed for its repair").await;
    }

    async fn looking_up(&mut self, round: u32) {
        let ledger = self.fixture.database.clone();
        let holds = self.take("asked", round).await;
        let numbers = self.begin_all(&holds).await;
        self.ended(&holds, &numbers, "unknown", |_| unknown()).await;
        self.did("an attempt ends in a wait").await;
        for (is_final, during) in [(false, "a look-up ends in a wait"), (true, "a look-up settles its job")] {
            let holds = self.come_back("asked", round).await;
            let lookups = join_all(holds.iter().map(|hold| ledger.begin_lookup(hold, A_MINUTE))).await;
            self.did("a look-up is begun").await;
            let ended = holds.iter().zip(lookups).map(|(hold, lookup)| {
                let BeginResult::Attempt(number) = lookup.unwrap() else { panic!("{hold:?} is stale") };
                let next = if is_final { done(Some(format!("found-{}", hold.id))) } else { unknown() };
                let (detail, ledger) = ("found".to_owned(), &ledger);
                async move {
                    let end =
                        LookupEnd { number, outcome: "accepted", status: Some(200), detail, grants_resend: false };
                    ledger.finish_lookup(hold, &end, &next).await.unwrap().0
                }
            });
            assert!(join_all(ended).await.iter().all(|written| *written == FencedWrite::Applied), "{during}");
            self.did(during).await;
        }
    }

    async fn leaving(&mut self, round: u32) {
        let ledger = self.fixture.database.clone();
        let message = RejectedMessage {
            lane: name(&lane(round)),
            job_id: Some(format!("bad-{round}")),
            reason: "schema",
            detail: "no amount".to_owned(),
            body_sha256: [1; 32],
            body_bytes: 2,
            head: String::new(),
            stored: StoredMessage::default(),
        };
        ledger.reject(&message).await.unwrap();
        self.did("a message is rejected").await;
        self.rejected(round).await;
        self.events().await;
    }

    async fn events(&mut self) {
        let ledger = self.fixture.database.clone();
        ledger.place_events(&mut None).await.unwrap();
        self.did("events are placed").await;
        let cursor = ledger.event_cursor().await.unwrap();
        let page = self.fixture.page_after(cursor.position).await;
        self.did("events are read").await;
        let rejected = page.events.iter().take(2).map(|event| event.sequence).collect();
        let results = PublishResults { rejected, ..PublishResults::default() };
        ledger.move_event_cursor(cursor.turn, page.upto, &results).await.unwrap().unwrap();
        self.did("events are published").await;
        ledger.events_to_retry(100).await.unwrap();
        self.did("rejected events are read").await;
        ledger.unpublished_events().await.unwrap();
        self.did("unpublished events are counted").await;
        ledger.forget_events(SECOND).await.unwrap();
        self.did("old events are deleted").await;
    }

    async fn limiter(&mut self) {
        let (ledger, quota) = (self.fixture.database.clone(), name("lane-0"));
        let row = "INSERT INTO providers (name, url) VALUES ('lane-0', 'https://x.example/')";
        self.fixture.sql(row).await.unwrap();
        for round in 0..8 {
            let held = ledger.take_leadership(&quota, None, &format!("redis:{}{round}", self.run)).await.unwrap();
            let offset = ClockOffset { least_us: 1, most_us: 2 };
            let attestation = ClockAttestation { offset, since: Micros(1_800_000_000_000_000) };
            let said = QuotaAttestation { quota: quota.clone(), term: held.term, attestation };
            ledger.record_clock_attestations(&[said]).await.unwrap();
            ledger.stored_leaders(std::slice::from_ref(&quota)).await.unwrap();
            self.did("authority is asked for").await;
            assert!(ledger.lanes_with_open_jobs().await.unwrap().contains(&quota));
            self.did("lanes with open jobs are read").await;
            ledger.recent_uses(&quota, Lookback::all(MINUTE)).await.unwrap();
            self.did("a quota is rebuilt").await;
            for (scope, name) in [(Scope::Account, "acct_1"), (Scope::Reference, "invoice 7")] {
                let asked = SubjectQuery { scope, names: vec![name.to_owned()], within: MINUTE };
                ledger.recent_subject_uses(&quota, &asked).await.unwrap();
            }
            self.did("an account's usage is read").await;
        }
    }

    async fn upkeep(&mut self) {
        let ledger = self.fixture.database.clone();
        for round in 0..8 {
            let lane = name(&lane(round));
            ledger.lease_duty("sweep", Duration::ZERO).await.unwrap();
            assert!(ledger.lanes_with_returns().await.unwrap().contains(&lane));
            self.did("lanes with returns are read").await;
            assert_eq!(ledger.wake_due(&lane, 10).await.unwrap().len(), 10);
            ledger.take_away(&ledger.lost_jobs(&lane, None, 10).await.unwrap(), None).await.unwrap();
            self.did("due jobs return").await;
            let kept = self.job("kept", round);
            let hold = self.take_all(std::slice::from_ref(&kept)).await.remove(0);
            let refused = JobState::Waiting { wait: 60 * MINUTE, reason: Wait::for_limit("all") };
            self.transition_all(std::slice::from_ref(&hold), &refused).await;
            self.did("a job is put down").await;
            for (changed_ago, by) in [None, Some(MINUTE)].into_iter().zip([WaitCause::Limit, WaitCause::RetryAfter]) {
                let [propagation_time, due_within] = [MINUTE; 2];
                let which = WakeFilter { changed_ago, cause: by, propagation_time, due_within, at_most: 10 };
                ledger.wake_waiting(&lane, &which).await.unwrap();
                self.did("jobs that a limit refused are woken").await;
            }
            let late = Job { expires_at: Some(sluicegate::domain::time::EpochMs(1)), ..self.job("expires", round) };
            let hold = self.take_all(std::slice::from_ref(&late)).await;
            self.transition_all(&hold, &wait()).await;
            self.did("a job is put down").await;
            assert_eq!(ledger.expire("too late", 10).await.unwrap(), 1);
            self.did("waiting jobs expire").await;
            assert_eq!(ledger.scrub(ScrubScope::Finished, MINUTE, 10).await.unwrap(), 10);
            self.did("old jobs are emptied").await;
            ledger.forget_references(10).await.unwrap();
            self.did("old references are forgotten").await;
            self.finished_jobs_are_summed_up(round).await;
            for scope in [CheckScope::CountsOnly, CheckScope::Since(MINUTE)] {
                ledger.reconcile(MINUTE, scope).await.unwrap();
                self.did("account of the last minutes").await;
            }
            self.fixture.database.state_counts().await.unwrap();
            self.did("states are counted").await;
            ledger.oldest_open(std::slice::from_ref(&lane)).await.unwrap();
            self.did("the oldest open job is looked for").await;
            self.history().await;
        }
        ledger.reconcile(MINUTE, CheckScope::All).await.unwrap();
        self.did("account of everything").await;
        let report = WorkerReport {
            id: format!("{}-worker", self.run),
            host: "here".to_owned(),
            pid: 1,
            version: "0".to_owned(),
            uptime: MINUTE,
            format: 1,
            body: "{}".to_owned(),
        };
        self.reports(&report).await;
    }

    async fn reports(&mut self, report: &WorkerReport) {
        let ledger = self.fixture.database.clone();
        ledger.write_report(report).await.unwrap();
        ledger.worker_reports().await.unwrap();
        ledger.remove_report(&report.id).await.unwrap();
        self.did("a worker reports").await;
    }

    /// The first round counts all finished jobs; later rounds add those that finished since.
    async fn finished_jobs_are_summed_up(&mut self, round: u32) {
        self.fixture.database.update_finished_totals().await.unwrap();
        self.did(if round == 0 { "finished jobs are recounted" } else { "finished jobs are added" }).await;
    }
}
