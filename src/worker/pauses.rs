//! Why a lane rests, and until when: what an answer asked for, what an engine refused, a provider that is down.
//!
//! Refuses to judge: the decision table and the circuit breaker (`domain::breaker`) do. This keeps what they said where
//! intake, jobs in hand and status can see it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;

use crate::domain::breaker::{Breaker, Change, Sign};
use crate::domain::decision::CallKind;
use crate::domain::disposition::MISCONFIGURED_PAUSE;
use crate::domain::job::JobId;
use crate::domain::late_row::{LATE_REST, LateRow};
use crate::domain::outcome::Outcome;
use crate::domain::provider::ProviderName;
use crate::domain::refusals::Refusals;
use crate::fleet::report::By;

/// So many answers in a row that need a person say that the set-up is wrong, not the jobs.
const REJECTED_IN_A_ROW_MAX: u32 = 5;

/// Why a lane rests, until when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pause {
    pub until: Instant,
    pub by: By,
    pub cause: String,
}

/// What a lane does now, in a word and with its cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LaneState {
    Running,
    /// Takes no more; jobs in hand go on.
    Resting(Pause),
    /// Neither takes nor sends; without its queue it sends what it has in hand.
    Stopped(Pause),
    /// The provider was down, because of this: one job at a time is sent, to see whether it still is.
    Probing {
        cause: String,
    },
}

/// The ways in which a lane rests: taking no charges, taking no more at all, and sending no more either.
#[derive(Debug)]
pub struct Pauses {
    /// Whose lane it is, for the log.
    provider: String,
    intake: watch::Sender<Option<Pause>>,
    /// Look-ups may be taken.
    charges: watch::Sender<Option<Pause>>,
    sending: watch::Sender<Option<Pause>>,
    /// Why the broker will not let the lane have its queue, until it does.
    closed: Mutex<Option<Pause>>,
    rejected_in_a_row: AtomicU32,
    /// Of charges and of look-ups: a provider may count them apart.
    refusals: [Mutex<Refusals>; 2],
    late: Mutex<LateRow>,
    breaker: Mutex<Breaker>,
    /// Why the breaker is open: one place, until it closes.
    probing: watch::Sender<Option<String>>,
    /// Whose turn it is to find out.
    probe: Arc<Semaphore>,
    /// Until when nothing flowed, because the provider was down or wrongly set up; the last time.
    ebb_until: Mutex<Option<Instant>>,
    origin: Instant,
}

/// The right to send now, while it is held.
#[derive(Debug)]
pub struct Turn(Option<OwnedSemaphorePermit>);

impl Turn {
    /// Whether this request is to find out if the provider is up again.
    #[must_use]
    pub fn is_probe(&self) -> bool {
        self.0.is_some()
    }
}

impl Default for Pauses {
    fn default() -> Self {
        Self {
            provider: String::new(),
            intake: watch::Sender::new(None),
            charges: watch::Sender::new(None),
            sending: watch::Sender::new(None),
            closed: Mutex::default(),
            rejected_in_a_row: AtomicU32::new(0),
            refusals: Default::default(),
            late: Mutex::default(),
            breaker: Mutex::default(),
            probing: watch::Sender::new(None),
            probe: Arc::new(Semaphore::new(1)),
            ebb_until: Mutex::default(),
            origin: Instant::now(),
        }
    }
}

impl Pauses {
    /// Of this provider's lane.
    #[must_use]
    pub fn of(provider: &ProviderName) -> Self {
        Self { provider: provider.to_string(), ..Self::default() }
    }

    /// Takes no more for this long; jobs in hand go on.
    pub fn stop_taking(&self, wait: Duration, by: By, cause: &str) {
        prolong(&self.intake, wait, by, cause);
    }

    /// Takes no charges for this long: a limit on them alone is used up.
    pub fn stop_taking_charges(&self, wait: Duration, by: By, cause: &str) {
        prolong(&self.charges, wait, by, cause);
    }

    /// Whether no charges are taken because of a limit on them alone.
    #[must_use]
    pub fn rests_for_charges(&self) -> bool {
        running(&self.charges).is_some()
    }

    /// Whether look-ups may be taken, even if no charges may.
    #[must_use]
    pub fn takes_lookups(&self) -> bool {
        running(&self.intake).is_none() && running(&self.sending).is_none()
    }

    /// Neither takes nor sends for this long; jobs in hand are parked.
    pub fn stop_sending(&self, wait: Duration, by: By, cause: &str) {
        if matches!(by, By::Breaker | By::Setup) {
            let mut ebb_until = self.ebb_until();
            *ebb_until = (*ebb_until).max(Some(Instant::now() + wait));
        }
        prolong(&self.sending, wait, by, cause);
        prolong(&self.intake, wait, by, cause);
    }

    /// A request was written down in time for its permit.
    pub fn permit_in_time(&self) {
        self.late().in_time();
    }

    /// A permit came too late to be used. A ledger that writes nothing down in time is left alone for a while.
    pub fn permit_late(&self) {
        let stands_still = self.late().late(self.since_origin(Instant::now()));
        if stands_still {
            self.stop_taking(LATE_REST, By::Engine, "the ledger writes nothing down within the send budget");
        }
    }

    /// Which round of refusals for the rate in a row it would be if a request that began then were refused; see [`Refusals`].
    #[must_use]
    pub fn refusal_round(&self, kind: CallKind, began: Instant) -> u32 {
        self.refusals(kind).round(self.since_origin(began))
    }

    /// The provider refused for the rate, in this round of a row; nothing is sent for so long.
    pub fn refused(&self, kind: CallKind, round: u32, wait: Duration) {
        self.refusals(kind).refused(round, self.since_origin(Instant::now()) + wait);
    }

    /// The provider's limit let a request through that began then.
    pub fn let_through(&self, kind: CallKind, began: Instant) {
        self.refusals(kind).let_through(self.since_origin(began));
    }

    /// The pause that keeps jobs from being sent now, if there is one.
    #[must_use]
    pub fn sending_paused(&self) -> Option<Pause> {
        running(&self.sending)
    }

    #[must_use]
    pub fn watch_sending(&self) -> watch::Receiver<Option<Pause>> {
        self.sending.subscribe()
    }

    #[must_use]
    pub fn watch_intake(&self) -> watch::Receiver<Option<Pause>> {
        self.intake.subscribe()
    }

    #[must_use]
    pub fn watch_charges(&self) -> watch::Receiver<Option<Pause>> {
        self.charges.subscribe()
    }

    /// Whether the provider was found down and not yet found well: one job at a time, whose failure counts no attempt.
    #[must_use]
    pub fn is_probing(&self) -> bool {
        self.probing.borrow().is_some()
    }

    /// The right to send; `None` while another job finds out whether the provider is up again.
    #[must_use]
    pub fn turn(&self) -> Option<Turn> {
        if !self.is_probing() {
            return Some(Turn(None));
        }
        Arc::clone(&self.probe).try_acquire_owned().ok().map(|probe| Turn(Some(probe)))
    }

    #[must_use]
    pub fn watch_probing(&self) -> watch::Receiver<Option<String>> {
        self.probing.subscribe()
    }

    #[must_use]
    pub fn state(&self) -> LaneState {
        if let Some(closed) = self.closed().clone() {
            return LaneState::Stopped(closed);
        }
        if let Some(pause) = self.sending_paused() {
            return LaneState::Stopped(pause);
        }
        let rests = [running(&self.intake), running(&self.charges)].into_iter().flatten();
        if let Some(pause) = rests.max_by_key(|pause| pause.until) {
            return LaneState::Resting(pause);
        }
        let down = self.probing.borrow().clone();
        down.map_or(LaneState::Running, |cause| LaneState::Probing { cause })
    }

    /// Takes note of what a request came to that began then: a provider that is down is left alone, and so is one that
    /// rejects one payment after the other. What says nothing of the provider leaves everything as it is. `fraction` is a
    /// random number in 0..1. Returns what the breaker did.
    pub fn observe(&self, job: &JobId, outcome: &Outcome, began: Instant, fraction: f64) -> Option<Change> {
        let sign = Sign::of(outcome)?;
        self.count_rejected(matches!(outcome, Outcome::Rejected { .. }));
        // Held until it is followed, so that of two changes the later one is the one that stays.
        let mut breaker = self.breaker();
        let change =
            breaker.observe(job, sign, (self.since_origin(began), self.since_origin(Instant::now())), fraction);
        match change {
            Some(Change::Opens { rest }) => {
                let cause = format!("the provider is down: {}", failure(outcome));
                let provider = &self.provider;
                tracing::error!(provider, rest_ms = rest.as_millis(), cause, "the lane's circuit breaker opens");
                self.stop_sending(rest, By::Breaker, &cause);
                self.probing.send_replace(Some(cause));
            }
            Some(Change::Closes) => {
                tracing::info!(
                    provider = self.provider,
                    "the provider answers again; the lane's circuit breaker closes"
                );
                *self.ebb_until() = Some(Instant::now());
                self.probing.send_replace(None);
            }
            None => {}
        }
        change
    }

    /// For how long jobs have flowed since the provider was last down or wrongly set up; `None`: they do not.
    #[must_use]
    pub fn flows_for(&self) -> Option<Duration> {
        let Some(until) = *self.ebb_until() else { return Some(Duration::MAX) };
        if self.is_probing() { None } else { Instant::now().checked_duration_since(until) }
    }

    /// The broker will not let the lane have its queue, and is asked again after so long: neither a message nor a job
    /// reaches it until [`Self::opened`].
    pub fn closed_by_broker(&self, wait: Duration, cause: &str) {
        *self.closed() = Some(Pause { until: Instant::now() + wait, by: By::Setup, cause: cause.to_owned() });
    }

    /// The lane has its queue.
    pub fn opened(&self) {
        *self.closed() = None;
    }

    /// Whether a message would not reach the lane, because the broker will not let it have its queue.
    #[must_use]
    pub fn is_closed_by_broker(&self) -> bool {
        self.closed().is_some()
    }

    /// A changed row may have mended what the lane rests for.
    pub fn lift(&self) {
        let mut ebb_until = self.ebb_until();
        *ebb_until = ebb_until.map(|until| until.min(Instant::now()));
        drop(ebb_until);
        self.breaker().probe_from(self.since_origin(Instant::now()));
        for kind in [CallKind::Charge, CallKind::Lookup] {
            *self.refusals(kind) = Refusals::default();
        }
        for paused in [&self.intake, &self.charges, &self.sending] {
            paused.send_replace(None);
        }
    }

    /// An operator has lifted the waits that the provider named to this or to another lane of its quota.
    pub fn named_wait_lifted(&self) {
        for kind in [CallKind::Charge, CallKind::Lookup] {
            *self.refusals(kind) = Refusals::default();
        }
        for paused in [&self.intake, &self.sending] {
            paused.send_if_modified(|pause| pause.take_if(|pause| pause.by == By::Provider).is_some());
        }
    }

    /// What the lane takes no more for may be allowed by now, whichever row of its quota says so. While nothing is sent
    /// for another reason, it takes nothing either.
    pub fn limits_changed(&self) {
        let sending = running(&self.sending);
        self.intake.send_if_modified(|pause| {
            let ends = pause.as_ref().is_some_and(|pause| pause.by == By::Limit);
            if ends {
                *pause = sending;
            }
            ends
        });
        self.charges.send_if_modified(|pause| pause.take_if(|pause| pause.by == By::Limit).is_some());
    }

    /// Several answers in a row that only a person can judge pause the lane.
    fn count_rejected(&self, rejected: bool) {
        if !rejected {
            self.rejected_in_a_row.store(0, Ordering::Relaxed);
        } else if self.rejected_in_a_row.fetch_add(1, Ordering::Relaxed) + 1 >= REJECTED_IN_A_ROW_MAX {
            self.rejected_in_a_row.store(0, Ordering::Relaxed);
            self.stop_sending(MISCONFIGURED_PAUSE, By::Setup, "the provider rejected several payments in a row");
        }
    }

    fn since_origin(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.origin)
    }

    fn refusals(&self, kind: CallKind) -> MutexGuard<'_, Refusals> {
        self.refusals[kind as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn late(&self) -> MutexGuard<'_, LateRow> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closed(&self) -> MutexGuard<'_, Option<Pause>> {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ebb_until(&self) -> MutexGuard<'_, Option<Instant>> {
        self.ebb_until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn breaker(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Words for a failure, from our own code alone.
fn failure(outcome: &Outcome) -> String {
    match outcome {
        Outcome::NotSent { cause } => cause.clone(),
        Outcome::Unknown { cause, .. } => cause.describe(),
        _ => "no answer".to_owned(),
    }
}

fn running(pause: &watch::Sender<Option<Pause>>) -> Option<Pause> {
    pause.borrow().clone().filter(|pause| pause.until > Instant::now())
}

fn prolong(pause: &watch::Sender<Option<Pause>>, wait: Duration, by: By, cause: &str) {
    let until = Instant::now() + wait;
    pause.send_if_modified(|current| {
        let longer = current.as_ref().is_none_or(|current| current.until < until);
        if longer {
            *current = Some(Pause { until, by, cause: cause.to_owned() });
        }
        longer
    });
}

#[cfg(test)]
#[path = "pauses_tests.rs"]
mod tests;
