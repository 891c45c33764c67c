//! Why a lane rests, and until when: what an answer asked for, what an engine refused, a provider that is down.
//!
//! Refuses to judge: the decision table and the circuit breaker (`domain::breaker`) do. This keeps what they said where
//! intake, jobs in hand and status can see it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;

use crate::domain::breaker::{Breaker, BreakerTransition, HealthSample};
use crate::domain::deadline_misses::{DEADLINE_MISS_PAUSE, MissStreak};
use crate::domain::disposition::MISCONFIGURED_PAUSE;
use crate::domain::job::JobId;
use crate::domain::outcome::Outcome;
use crate::domain::permit_protocol::CallKind;
use crate::domain::provider::ProviderName;
use crate::domain::throttle_streak::ThrottleStreak;
use crate::fleet::report::PauseCause;

/// So many answers in a row that need a person say that the set-up is wrong, not the jobs.
const CONSECUTIVE_REJECTIONS_MAX: u32 = 5;

/// Why a lane rests, until when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LanePause {
    pub until: Instant,
    pub cause: PauseCause,
    pub reason: String,
}

/// What a lane does now, in a word and with its cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LaneStatus {
    Running,
    /// Takes no more; jobs in hand go on.
    IntakePaused(LanePause),
    /// Neither takes nor sends; without its queue it sends what it has in hand.
    Stopped(LanePause),
    /// The provider was down, because of this: one job at a time is sent, to see whether it still is.
    Probing {
        reason: String,
    },
}

/// The ways in which a lane rests: taking no charges, taking no more at all, and sending no more either.
#[derive(Debug)]
pub struct LaneControl {
    /// Whose lane it is, for the log.
    provider: String,
    intake: watch::Sender<Option<LanePause>>,
    /// Look-ups may be taken.
    charges: watch::Sender<Option<LanePause>>,
    sending: watch::Sender<Option<LanePause>>,
    /// Why the broker will not let the lane have its queue, until it does.
    queue_refusal: Mutex<Option<LanePause>>,
    consecutive_rejections: AtomicU32,
    /// Of charges and of look-ups: a provider may count them apart.
    throttle_streaks: [Mutex<ThrottleStreak>; 2],
    deadline_misses: Mutex<MissStreak>,
    breaker: Mutex<Breaker>,
    /// Why the breaker is open: one place, until it closes.
    probing: watch::Sender<Option<String>>,
    /// Whose turn it is to find out.
    probe: Arc<Semaphore>,
    /// Until when nothing flowed, because the provider was down or wrongly set up; the last time.
    unhealthy_until: Mutex<Option<Instant>>,
    origin: Instant,
}

/// The right to send now, while it is held.
#[derive(Debug)]
pub struct SendPermission(Option<OwnedSemaphorePermit>);

impl SendPermission {
    /// Whether this request is to find out if the provider is up again.
    #[must_use]
    pub fn is_probe(&self) -> bool {
        self.0.is_some()
    }
}

impl Default for LaneControl {
    fn default() -> Self {
        Self {
            provider: String::new(),
            intake: watch::Sender::new(None),
            charges: watch::Sender::new(None),
            sending: watch::Sender::new(None),
            queue_refusal: Mutex::default(),
            consecutive_rejections: AtomicU32::new(0),
            throttle_streaks: Default::default(),
            deadline_misses: Mutex::default(),
            breaker: Mutex::default(),
            probing: watch::Sender::new(None),
            probe: Arc::new(Semaphore::new(1)),
            unhealthy_until: Mutex::default(),
            origin: Instant::now(),
        }
    }
}

impl LaneControl {
    /// Of this provider's lane.
    #[must_use]
    pub fn for_provider(provider: &ProviderName) -> Self {
        Self { provider: provider.to_string(), ..Self::default() }
    }

    /// Takes no more for this long; jobs in hand go on.
    pub fn pause_intake(&self, wait: Duration, by: PauseCause, cause: &str) {
        extend(&self.intake, wait, by, cause);
    }

    /// Takes no charges for this long: a limit on them alone is used up.
    pub fn pause_charges(&self, wait: Duration, by: PauseCause, cause: &str) {
        extend(&self.charges, wait, by, cause);
    }

    /// Whether no charges are taken because of a limit on them alone.
    #[must_use]
    pub fn are_charges_paused(&self) -> bool {
        active_pause(&self.charges).is_some()
    }

    /// Whether look-ups may be taken, even if no charges may.
    #[must_use]
    pub fn accepts_lookups(&self) -> bool {
        active_pause(&self.intake).is_none() && active_pause(&self.sending).is_none()
    }

    /// Neither takes nor sends for this long; jobs in hand are parked.
    pub fn pause_sending(&self, wait: Duration, by: PauseCause, cause: &str) {
        if matches!(by, PauseCause::Breaker | PauseCause::Setup) {
            let mut ebb_until = self.unhealthy_until();
            *ebb_until = (*ebb_until).max(Some(Instant::now() + wait));
        }
        extend(&self.sending, wait, by, cause);
        extend(&self.intake, wait, by, cause);
    }

    /// A request was written down in time for its permit.
    pub fn record_on_time(&self) {
        self.deadline_misses().record_on_time();
    }

    /// A permit came too late to be used. A ledger that writes nothing down in time is left alone for a while.
    pub fn record_deadline_miss(&self) {
        let stands_still = self.deadline_misses().record_miss(self.since_origin(Instant::now()));
        if stands_still {
            self.pause_intake(
                DEADLINE_MISS_PAUSE,
                PauseCause::Engine,
                "the ledger writes nothing down within the send budget",
            );
        }
    }

    /// Which round of refusals for the rate in a row it would be if a request that began then were refused; see [`Refusals`].
    #[must_use]
    pub fn throttle_generation(&self, kind: CallKind, began: Instant) -> u32 {
        self.throttle_streak(kind).generation(self.since_origin(began))
    }

    /// The provider refused for the rate, in this round of a row; nothing is sent for so long.
    pub fn record_throttle(&self, kind: CallKind, round: u32, wait: Duration) {
        self.throttle_streak(kind).record_throttled(round, self.since_origin(Instant::now()) + wait);
    }

    /// The provider's limit let a request through that began then.
    pub fn record_passed(&self, kind: CallKind, began: Instant) {
        self.throttle_streak(kind).record_passed(self.since_origin(began));
    }

    /// The pause that keeps jobs from being sent now, if there is one.
    #[must_use]
    pub fn sending_pause(&self) -> Option<LanePause> {
        active_pause(&self.sending)
    }

    #[must_use]
    pub fn watch_sending(&self) -> watch::Receiver<Option<LanePause>> {
        self.sending.subscribe()
    }

    #[must_use]
    pub fn watch_intake(&self) -> watch::Receiver<Option<LanePause>> {
        self.intake.subscribe()
    }

    #[must_use]
    pub fn watch_charges(&self) -> watch::Receiver<Option<LanePause>> {
        self.charges.subscribe()
    }

    /// Whether the provider was found down and not yet found well: one job at a time, whose failure counts no attempt.
    #[must_use]
    pub fn is_probing(&self) -> bool {
        self.probing.borrow().is_some()
    }

    /// The right to send; `None` while another job finds out whether the provider is up again.
    #[must_use]
    pub fn try_send(&self) -> Option<SendPermission> {
        if !self.is_probing() {
            return Some(SendPermission(None));
        }
        Arc::clone(&self.probe).try_acquire_owned().ok().map(|probe| SendPermission(Some(probe)))
    }

    #[must_use]
    pub fn watch_probing(&self) -> watch::Receiver<Option<String>> {
        self.probing.subscribe()
    }

    #[must_use]
    pub fn state(&self) -> LaneStatus {
        if let Some(closed) = self.queue_refusal().clone() {
            return LaneStatus::Stopped(closed);
        }
        if let Some(pause) = self.sending_pause() {
            return LaneStatus::Stopped(pause);
        }
        let rests = [active_pause(&self.intake), active_pause(&self.charges)].into_iter().flatten();
        if let Some(pause) = rests.max_by_key(|pause| pause.until) {
            return LaneStatus::IntakePaused(pause);
        }
        let down = self.probing.borrow().clone();
        down.map_or(LaneStatus::Running, |cause| LaneStatus::Probing { reason: cause })
    }

    /// Takes note of what a request came to that began then: a provider that is down is left alone, and so is one that
    /// rejects one payment after the other. What says nothing of the provider leaves everything as it is. `fraction` is a
    /// random number in 0..1. Returns what the breaker did.
    pub fn observe(&self, job: &JobId, outcome: &Outcome, began: Instant, fraction: f64) -> Option<BreakerTransition> {
        let sign = HealthSample::from_outcome(outcome)?;
        self.count_rejections(matches!(outcome, Outcome::Rejected { .. }));
        // Held until it is followed, so that of two changes the later one is the one that stays.
        let mut breaker = self.breaker();
        let change =
            breaker.observe(job, sign, (self.since_origin(began), self.since_origin(Instant::now())), fraction);
        match change {
            Some(BreakerTransition::Opens { open_for: rest }) => {
                let cause = format!("the provider is down: {}", failure_text(outcome));
                let provider = &self.provider;
                tracing::error!(provider, rest_ms = rest.as_millis(), cause, "the lane's circuit breaker opens");
                self.pause_sending(rest, PauseCause::Breaker, &cause);
                self.probing.send_replace(Some(cause));
            }
            Some(BreakerTransition::Closes) => {
                tracing::info!(
                    provider = self.provider,
                    "the provider answers again; the lane's circuit breaker closes"
                );
                *self.unhealthy_until() = Some(Instant::now());
                self.probing.send_replace(None);
            }
            None => {}
        }
        change
    }

    /// For how long jobs have flowed since the provider was last down or wrongly set up; `None`: they do not.
    #[must_use]
    pub fn healthy_for(&self) -> Option<Duration> {
        let Some(until) = *self.unhealthy_until() else { return Some(Duration::MAX) };
        if self.is_probing() { None } else { Instant::now().checked_duration_since(until) }
    }

    /// The broker will not let the lane have its queue, and is asked again after so long: neither a message nor a job
    /// reaches it until [`Self::opened`].
    pub fn record_queue_refusal(&self, wait: Duration, cause: &str) {
        *self.queue_refusal() =
            Some(LanePause { until: Instant::now() + wait, cause: PauseCause::Setup, reason: cause.to_owned() });
    }

    /// The lane has its queue.
    pub fn record_queue_open(&self) {
        *self.queue_refusal() = None;
    }

    /// Whether a message would not reach the lane, because the broker will not let it have its queue.
    #[must_use]
    pub fn is_queue_refused(&self) -> bool {
        self.queue_refusal().is_some()
    }

    /// A changed row may have mended what the lane rests for.
    pub fn clear(&self) {
        let mut ebb_until = self.unhealthy_until();
        *ebb_until = ebb_until.map(|until| until.min(Instant::now()));
        drop(ebb_until);
        self.breaker().probe_from(self.since_origin(Instant::now()));
        for kind in [CallKind::Charge, CallKind::Lookup] {
            *self.throttle_streak(kind) = ThrottleStreak::default();
        }
        for paused in [&self.intake, &self.charges, &self.sending] {
            paused.send_replace(None);
        }
    }

    /// An operator has lifted the waits that the provider named to this or to another lane of its quota.
    pub fn clear_provider_pause(&self) {
        for kind in [CallKind::Charge, CallKind::Lookup] {
            *self.throttle_streak(kind) = ThrottleStreak::default();
        }
        for paused in [&self.intake, &self.sending] {
            paused.send_if_modified(|pause| pause.take_if(|pause| pause.cause == PauseCause::Provider).is_some());
        }
    }

    /// What the lane takes no more for may be allowed by now, whichever row of its quota says so. While nothing is sent
    /// for another reason, it takes nothing either.
    pub fn clear_limit_pause(&self) {
        let sending = active_pause(&self.sending);
        self.intake.send_if_modified(|pause| {
            let ends = pause.as_ref().is_some_and(|pause| pause.cause == PauseCause::Limit);
            if ends {
                *pause = sending;
            }
            ends
        });
        self.charges.send_if_modified(|pause| pause.take_if(|pause| pause.cause == PauseCause::Limit).is_some());
    }

    /// Several answers in a row that only a person can judge pause the lane.
    fn count_rejections(&self, rejected: bool) {
        if !rejected {
            self.consecutive_rejections.store(0, Ordering::Relaxed);
        } else if self.consecutive_rejections.fetch_add(1, Ordering::Relaxed) + 1 >= CONSECUTIVE_REJECTIONS_MAX {
            self.consecutive_rejections.store(0, Ordering::Relaxed);
            self.pause_sending(
                MISCONFIGURED_PAUSE,
                PauseCause::Setup,
                "the provider rejected several payments in a row",
            );
        }
    }

    fn since_origin(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.origin)
    }

    fn throttle_streak(&self, kind: CallKind) -> MutexGuard<'_, ThrottleStreak> {
        self.throttle_streaks[kind as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deadline_misses(&self) -> MutexGuard<'_, MissStreak> {
        self.deadline_misses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue_refusal(&self) -> MutexGuard<'_, Option<LanePause>> {
        self.queue_refusal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unhealthy_until(&self) -> MutexGuard<'_, Option<Instant>> {
        self.unhealthy_until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn breaker(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Words for a failure, from our own code alone.
fn failure_text(outcome: &Outcome) -> String {
    match outcome {
        Outcome::NotSent { cause } => cause.clone(),
        Outcome::Unknown { cause, .. } => cause.describe(),
        _ => "no answer".to_owned(),
    }
}

fn active_pause(pause: &watch::Sender<Option<LanePause>>) -> Option<LanePause> {
    pause.borrow().clone().filter(|pause| pause.until > Instant::now())
}

fn extend(pause: &watch::Sender<Option<LanePause>>, wait: Duration, by: PauseCause, cause: &str) {
    let until = Instant::now() + wait;
    pause.send_if_modified(|current| {
        let longer = current.as_ref().is_none_or(|current| current.until < until);
        if longer {
            *current = Some(LanePause { until, cause: by, reason: cause.to_owned() });
        }
        longer
    });
}

#[cfg(test)]
#[path = "lane_control_tests.rs"]
mod tests;
