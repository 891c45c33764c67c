//! The pauses and the circuit breaker of a lane: why it is paused, and until when.
//!
//! It does not decide: the decision tables and `domain::breaker` do. It keeps their decisions where intake, active jobs
//! and `status` read them. See `docs/decisions/0035-circuit-breaker-per-lane.md`.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;

use crate::domain::account_faults::{AccountFaults, FaultScope, Requester, SetupSign};
use crate::domain::backoff::ThrottleStreak;
use crate::domain::breaker::{Breaker, BreakerTransition, HealthSample};
use crate::domain::disposition::MISCONFIGURED_PAUSE;
use crate::domain::job::{Identifier, Job, JobId};
use crate::domain::outcome::Outcome;
use crate::domain::permit_protocol::CallKind;
use crate::domain::persist_window::{DEADLINE_MISS_PAUSE, MissStreak};
use crate::domain::provider::ProviderName;
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::fleet::report::{LaneState, LaneStatus, PauseCause, ReportedPause};
use crate::worker::backlog::cost_waits::CostWaits;
use crate::worker::outcome_writes::{OutcomePermission, OutcomeWrites};

mod hold;
mod pause;
mod waits_aside;

pub use self::pause::LanePause;
use self::pause::{active_pause, end_pause_by, extend};
use self::waits_aside::RefusedPayment;

/// A pause of one account: its end, and what the provider refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccountPause {
    pub until: Instant,
    pub sign: SetupSign,
}

/// The pauses of a lane: no messages are consumed, no jobs are claimed, no charges are sent, or nothing is sent.
#[derive(Debug)]
pub struct LaneControl {
    /// The lane's provider, for the log.
    provider: String,
    /// Pauses consuming and claims: the ledger cannot record.
    intake: watch::Sender<Option<LanePause>>,
    /// Why the lane consumes no more messages: it has as many open jobs as it may have.
    full: watch::Sender<Option<String>>,
    /// Pauses claims; new jobs are recorded.
    claims: watch::Sender<Option<LanePause>>,
    /// Pauses charges alone; look-ups are claimed.
    charges: watch::Sender<Option<LanePause>>,
    sending: watch::Sender<Option<LanePause>>,
    /// Why the lane starts no charge until an operator releases it. It goes on recording and looking up.
    hold: Mutex<Option<Wait>>,
    /// Costs for which a limit has too few free slots. Cheaper jobs go on, so this is no pause.
    cost_waits: Mutex<CostWaits>,
    /// Why the broker refuses the lane its queue, until it grants it.
    queue_refusal: Mutex<Option<LanePause>>,
    account_faults: Mutex<AccountFaults>,
    refused_payment: Mutex<Option<RefusedPayment>>,
    /// One for charges and one for look-ups: a provider may count them apart.
    throttle_streaks: [Mutex<ThrottleStreak>; 2],
    deadline_misses: Mutex<MissStreak>,
    /// The answers that the ledger has not accepted.
    pub outcomes: Arc<OutcomeWrites>,
    breaker: Mutex<Breaker>,
    /// Why the breaker is open; the prefetch is 1 until it closes.
    probing: watch::Sender<Option<String>>,
    /// The permission to send the probe.
    probe: Arc<Semaphore>,
    /// End of the last time in which nothing was sent because the provider was down or misconfigured.
    unhealthy_until: Mutex<Option<Instant>>,
    origin: Instant,
}

/// The permission to send, while it is held.
#[derive(Debug)]
pub struct SendPermission {
    probe: Option<OwnedSemaphorePermit>,
    /// Its answer may be the test whether the ledger accepts answers again.
    _outcome: OutcomePermission,
}

impl SendPermission {
    /// Whether this request tests if the provider is up again.
    pub fn is_probe(&self) -> bool {
        self.probe.is_some()
    }
}

impl Default for LaneControl {
    fn default() -> Self {
        Self {
            provider: String::new(),
            intake: watch::Sender::new(None),
            full: watch::Sender::new(None),
            claims: watch::Sender::new(None),
            charges: watch::Sender::new(None),
            sending: watch::Sender::new(None),
            hold: Mutex::default(),
            cost_waits: Mutex::default(),
            queue_refusal: Mutex::default(),
            account_faults: Mutex::default(),
            refused_payment: Mutex::default(),
            throttle_streaks: Default::default(),
            deadline_misses: Mutex::default(),
            outcomes: Arc::default(),
            breaker: Mutex::default(),
            probing: watch::Sender::new(None),
            probe: Arc::new(Semaphore::new(1)),
            unhealthy_until: Mutex::default(),
            origin: Instant::now(),
        }
    }
}

impl LaneControl {
    /// The control of this provider's lane.
    pub fn for_provider(provider: &ProviderName) -> Self {
        Self { provider: provider.to_string(), ..Self::default() }
    }

    /// Consumes and claims nothing for this long; active jobs continue.
    pub fn pause_intake(&self, wait: Duration, by: PauseCause, cause: Wait) {
        extend(&self.intake, wait, by, cause);
    }

    /// Says why the lane consumes no more messages; `None`: it has room for more open jobs.
    pub fn set_full(&self, why: Option<String>) {
        self.full.send_if_modified(|full| std::mem::replace(full, why) != *full);
    }

    /// Claims nothing for this long; active jobs continue, and new ones are recorded.
    pub fn pause_claims(&self, wait: Duration, by: PauseCause, cause: Wait) {
        extend(&self.claims, wait, by, cause);
    }

    /// Pauses charges for this long: a limit on charges alone is used up.
    pub fn pause_charges(&self, wait: Duration, by: PauseCause, cause: Wait) {
        extend(&self.charges, wait, by, cause);
    }

    /// Whether look-ups may be sent, even if charges are paused.
    pub fn accepts_lookups(&self) -> bool {
        self.claims_pause().is_none() && self.sending_pause().is_none()
    }

    fn claims_pause(&self) -> Option<LanePause> {
        let pauses = [&self.intake, &self.claims].map(active_pause);
        pauses.into_iter().flatten().max_by_key(|pause| pause.until)
    }

    /// The end of the pauses during which no charge is claimed.
    pub fn charges_paused_until(&self) -> Option<Instant> {
        let pauses = [self.claims_pause(), active_pause(&self.charges), self.sending_pause()];
        pauses.into_iter().flatten().map(|pause| pause.until).max()
    }

    /// Claims and sends nothing for this long; active jobs are delayed.
    pub fn pause_sending(&self, wait: Duration, by: PauseCause, cause: Wait) {
        if matches!(by, PauseCause::Breaker | PauseCause::Setup) {
            let mut unhealthy_until = self.unhealthy_until.lock();
            *unhealthy_until = (*unhealthy_until).max(Some(Instant::now() + wait));
        }
        extend(&self.sending, wait, by, cause);
    }

    /// Records that a request was recorded in time for its permit.
    pub fn record_on_time(&self) {
        self.deadline_misses.lock().record_on_time();
    }

    /// Records that a request was recorded too late for its permit. If the ledger is too slow for several, intake is
    /// paused.
    pub fn record_deadline_miss(&self) {
        let is_too_slow = self.deadline_misses.lock().record_miss(self.since_origin(Instant::now()));
        if is_too_slow {
            let slow = "the ledger does not commit within the send budget";
            let cause = Wait::with_detail(WaitReason::LedgerUnavailable, slow);
            self.pause_intake(DEADLINE_MISS_PAUSE, PauseCause::Backend, cause);
        }
    }

    /// The generation of consecutive throttled responses that a request which began then would belong to; see
    /// [`ThrottleStreak`].
    pub fn throttle_generation(&self, kind: CallKind, began: Instant) -> u32 {
        self.throttle_streak(kind).generation(self.since_origin(began))
    }

    /// Records a throttled response of this generation; nothing is sent for this long.
    pub fn record_throttle(&self, kind: CallKind, round: u32, wait: Duration) {
        self.throttle_streak(kind).record_throttled(round, self.since_origin(Instant::now()) + wait);
    }

    /// Records that the provider's limit let a request through that began then.
    pub fn record_passed(&self, kind: CallKind, began: Instant) {
        self.throttle_streak(kind).record_passed(self.since_origin(began));
    }

    /// The pause of sending, if there is one now.
    pub fn sending_pause(&self) -> Option<LanePause> {
        let pauses = [active_pause(&self.sending), self.outcomes.pause()];
        pauses.into_iter().flatten().max_by_key(|pause| pause.until)
    }

    pub fn watch_sending(&self) -> watch::Receiver<Option<LanePause>> {
        self.sending.subscribe()
    }

    pub fn watch_intake(&self) -> watch::Receiver<Option<LanePause>> {
        self.intake.subscribe()
    }

    pub fn watch_full(&self) -> watch::Receiver<Option<String>> {
        self.full.subscribe()
    }

    /// Whether the provider was down and is not known to be up: one job at a time is sent, and its failure counts no
    /// attempt.
    pub fn is_probing(&self) -> bool {
        self.probing.borrow().is_some()
    }

    /// The permission to send, in a lane with this many worker slots. `None` while another job tests whether the
    /// provider is up again, or whether the ledger accepts answers.
    pub fn try_send(&self, workers: u32) -> Option<SendPermission> {
        let probe = match self.is_probing() {
            true => Some(Arc::clone(&self.probe).try_acquire_owned().ok()?),
            false => None,
        };
        Some(SendPermission { probe, _outcome: self.outcomes.admit(workers)? })
    }

    /// Why [`Self::try_send`] refuses.
    pub fn probing_reason(&self) -> Wait {
        if self.is_probing() { WaitReason::CircuitProbing.into() } else { OutcomeWrites::refused() }
    }

    /// What the lane does now, and why.
    pub fn status(&self) -> LaneStatus {
        let refused = self.queue_refusal.lock().clone();
        let rests = || [self.claims_pause(), active_pause(&self.charges)].into_iter().flatten();
        let (does, pause) = if let Some(hold) = self.reported_hold() {
            (LaneState::Held, Some(hold))
        } else if let Some(pause) = refused.or_else(|| self.sending_pause()) {
            (LaneState::Stopped, Some(pause.into()))
        } else if let Some(pause) = rests().max_by_key(|pause| pause.until) {
            (LaneState::Resting, Some(pause.into()))
        } else if let Some(words) = self.probing.borrow().clone() {
            (LaneState::Probing, Some(ReportedPause { by: PauseCause::Breaker, words, ..ReportedPause::default() }))
        } else if let Some(words) = self.full.borrow().clone() {
            (LaneState::Full, Some(ReportedPause { words, ..ReportedPause::default() }))
        } else {
            (LaneState::Running, None)
        };
        LaneStatus { does, pause }
    }

    /// Records the outcome of a request that began then, and returns what the breaker did. A provider that is down
    /// pauses the lane. An outcome that says nothing about the provider changes nothing. `fraction` is a random number in 0..1.
    pub fn observe(&self, job: &JobId, outcome: &Outcome, began: Instant, fraction: f64) -> Option<BreakerTransition> {
        let sample = HealthSample::from_outcome(outcome)?;
        // The lock is kept until the change is applied, so that the later of two changes is the one that stays.
        let mut breaker = self.breaker.lock();
        let change =
            breaker.observe(job, sample, self.since_origin(began), self.since_origin(Instant::now()), fraction);
        match change {
            Some(BreakerTransition::Opens { open_for }) => {
                let wait = Wait::with_detail(WaitReason::CircuitOpen, failure_text(outcome));
                let cause = wait.to_string();
                let provider = &self.provider;
                tracing::error!(
                    provider,
                    open_for_ms = open_for.as_millis(),
                    cause,
                    "circuit breaker opens: nothing is sent to the provider"
                );
                self.pause_sending(open_for, PauseCause::Breaker, wait);
                self.probing.send_replace(Some(cause));
            }
            Some(BreakerTransition::Closes) => {
                tracing::info!(provider = self.provider, "circuit breaker closes: the provider answers again");
                *self.unhealthy_until.lock() = Some(Instant::now());
                self.probing.send_replace(None);
            }
            None => {}
        }
        change
    }

    /// Judges whose trouble a refused request is that began then. An account pauses here; so does a lane whose payments are
    /// rejected, because only an operator can judge them. `None`: it is no refusal, or pauses nothing yet.
    pub fn judge_refusal(&self, job: &Job, outcome: &Outcome, began: Instant) -> Option<FaultScope> {
        let sign = SetupSign::from_outcome(outcome)?;
        let (began, now) = (self.since_origin(began), self.since_origin(Instant::now()));
        let of = Requester { account: job.account.as_ref().map(Identifier::as_str), job: &job.id };
        let scope = self.account_faults.lock().record(of, sign, began, now);
        match (scope, sign) {
            (Some(FaultScope::Account { until }), _) => {
                let wait_ms = until.saturating_sub(now).as_millis();
                let (provider, code) = (&self.provider, outcome.code());
                tracing::warn!(provider, code, wait_ms, "requests of one account are refused; its payments wait");
            }
            (Some(FaultScope::Lane), SetupSign::Rejected) => {
                self.pause_sending(MISCONFIGURED_PAUSE, PauseCause::Setup, WaitReason::RejectedStreak.into());
            }
            (Some(FaultScope::Payment), _) => {
                let (provider, job, code) = (&self.provider, &job.id, outcome.code());
                tracing::warn!(provider, %job, code, "one payment is refused; it waits alone");
            }
            // The outcome's own disposition pauses the lane.
            (Some(FaultScope::Lane) | None, _) => {}
        }
        if sign == SetupSign::Passed {
            self.refused_payment.lock().take_if(|refused| refused.job == job.id);
        }
        scope
    }

    /// The pause of an account whose requests the provider refuses.
    pub fn account_pause(&self, account: Option<&Identifier>) -> Option<AccountPause> {
        let (until, sign) =
            self.account_faults.lock().pause_of(account?.as_str(), self.since_origin(Instant::now()))?;
        Some(AccountPause { until: self.origin + until, sign })
    }

    /// Admits a charge of the job, or returns the pause of its account. After a pause one job at a time is admitted.
    pub fn admit_charge(&self, job: &Job) -> Option<AccountPause> {
        let (account, now) = (job.account.as_ref()?, self.since_origin(Instant::now()));
        let (until, sign) = self.account_faults.lock().admit(account.as_str(), &job.id, now)?;
        Some(AccountPause { until: self.origin + until, sign })
    }

    /// Time for which jobs have been sent since the provider was last down or misconfigured; `None`: they are not sent.
    pub fn healthy_for(&self) -> Option<Duration> {
        let Some(until) = *self.unhealthy_until.lock() else { return Some(Duration::MAX) };
        if self.is_probing() { None } else { Instant::now().checked_duration_since(until) }
    }

    /// Records that the broker refuses the lane its queue. It is asked again after this long; until
    /// [`Self::record_queue_open`] neither a message nor a job reaches the lane.
    pub fn record_queue_refusal(&self, wait: Duration, cause: &str) {
        let reason = Wait::with_detail(WaitReason::Misconfigured, cause);
        *self.queue_refusal.lock() = Some(LanePause { until: Instant::now() + wait, cause: PauseCause::Setup, reason });
    }

    /// Records that the lane has its queue.
    pub fn record_queue_open(&self) {
        *self.queue_refusal.lock() = None;
    }

    /// Whether a message would not reach the lane, because the broker refuses it its queue.
    pub fn is_queue_refused(&self) -> bool {
        self.queue_refusal.lock().is_some()
    }

    /// Ends all pauses after a row changed: the change may have fixed their cause.
    pub fn clear(&self) {
        let mut unhealthy_until = self.unhealthy_until.lock();
        *unhealthy_until = unhealthy_until.map(|until| until.min(Instant::now()));
        drop(unhealthy_until);
        self.breaker.lock().probe_from(self.since_origin(Instant::now()));
        *self.account_faults.lock() = AccountFaults::default();
        *self.refused_payment.lock() = None;
        self.cost_waits.lock().clear();
        self.throttle_streaks.iter().for_each(|streak| *streak.lock() = ThrottleStreak::default());
        for paused in [&self.intake, &self.claims, &self.charges, &self.sending] {
            paused.send_replace(None);
        }
    }

    /// Ends the pauses that the provider asked of this or another lane of its quota: an operator lifted them.
    pub fn clear_provider_pause(&self) {
        self.throttle_streaks.iter().for_each(|streak| *streak.lock() = ThrottleStreak::default());
        for paused in [&self.claims, &self.sending] {
            end_pause_by(paused, PauseCause::Provider);
        }
    }

    /// Ends the pauses of a limit, because a row of the quota may allow more now.
    pub fn clear_limit_pause(&self) {
        self.cost_waits.lock().clear();
        for paused in [&self.claims, &self.charges] {
            end_pause_by(paused, PauseCause::Limit);
        }
    }

    fn since_origin(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.origin)
    }

    fn throttle_streak(&self, kind: CallKind) -> MutexGuard<'_, ThrottleStreak> {
        self.throttle_streaks[kind as usize].lock()
    }
}

/// Text for a failure; it holds nothing of the provider's response.
fn failure_text(outcome: &Outcome) -> String {
    match outcome {
        Outcome::NotSent { cause } => cause.clone(),
        Outcome::Unknown { cause, .. } => cause.describe(),
        _ => "no answer".to_owned(),
    }
}

#[cfg(test)]
#[path = "lane_control_tests.rs"]
mod tests;
