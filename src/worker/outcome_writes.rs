//! The kept answers of a lane with the clock: wakes the tasks that write them, and pauses the lane meanwhile.
//!
//! The rules are those of [`KeptAnswers`].

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::lane_control::LanePause;
use crate::domain::kept_answers::{Admission, KeptAnswers, KeptStage, KeptStep, KeptWrite, LaneGate, Ticket};
use crate::domain::wait_reason::{Wait, WaitReason};
use crate::fleet::report::PauseCause;

/// Why a lane sends nothing while the ledger accepts no answer.
const REFUSED: &str = "the database accepts no outcome: nothing is sent until it does";
/// Most kept answers of a lane that has sent nothing yet.
const KEPT_MAX_FIRST: usize = 1;

/// The kept answers of a lane.
#[derive(Debug)]
pub struct OutcomeWrites {
    kept: Mutex<KeptAnswers>,
    /// The lane's worker slots.
    kept_max: AtomicUsize,
    /// Requests that were admitted, and whose answers are not written.
    requests: AtomicUsize,
    /// Changes with each result.
    changed: watch::Sender<()>,
    pause: watch::Sender<Option<LanePause>>,
    origin: Instant,
}

/// The right to begin one request, until its answer is written.
#[derive(Debug)]
pub struct OutcomePermission {
    /// Its number if it is the probe.
    probe: Option<u64>,
    writes: Arc<OutcomeWrites>,
}

/// An answer that the ledger has not accepted; forgotten when this is dropped.
#[derive(Debug)]
pub struct KeptAnswer {
    ticket: Ticket,
    writes: Arc<OutcomeWrites>,
}

impl Default for OutcomeWrites {
    fn default() -> Self {
        Self {
            kept: Mutex::default(),
            kept_max: AtomicUsize::new(KEPT_MAX_FIRST),
            requests: AtomicUsize::new(0),
            changed: watch::Sender::new(()),
            pause: watch::Sender::new(None),
            origin: Instant::now(),
        }
    }
}

impl OutcomeWrites {
    /// Admits a request of a lane with this many worker slots, perhaps as the probe; `None` while none may begin.
    pub fn admit(self: &Arc<Self>, workers: u32) -> Option<OutcomePermission> {
        self.kept_max.store(usize::try_from(workers).unwrap_or(usize::MAX), Ordering::Relaxed);
        let now = self.now();
        let mut kept = self.kept.lock();
        let probe = match kept.admit(self.kept_max(), self.requests.load(Ordering::Relaxed), now) {
            Admission::Free => None,
            Admission::Probe(number) => Some(number),
            Admission::Refused => return None,
        };
        // The lock is held, so that two requests do not take the last place.
        self.requests.fetch_add(1, Ordering::Relaxed);
        Some(OutcomePermission { probe, writes: Arc::clone(self) })
    }

    /// Records an answer that the ledger accepted at the first write.
    pub fn record_accepted(&self) {
        self.change(|kept, now| kept.accept(None, now));
    }

    /// Keeps an answer whose first write was refused.
    pub fn keep(self: &Arc<Self>) -> KeptAnswer {
        KeptAnswer { ticket: self.change(KeptAnswers::keep), writes: Arc::clone(self) }
    }

    /// The pause of the lane while no answer is accepted.
    pub fn pause(&self) -> Option<LanePause> {
        self.pause.borrow().clone().filter(|pause| pause.until > Instant::now())
    }

    pub fn watch_pause(&self) -> watch::Receiver<Option<LanePause>> {
        self.pause.subscribe()
    }

    /// Why the lane sends nothing.
    pub fn refused() -> Wait {
        Wait::with_detail(WaitReason::LedgerRefused, REFUSED)
    }

    fn change<T>(&self, change: impl FnOnce(&mut KeptAnswers, Duration) -> T) -> T {
        let mut kept = self.kept.lock();
        let now = self.now();
        let was_open = kept.count() == 0 && kept.gate(self.kept_max(), now) == LaneGate::Open;
        let result = change(&mut kept, now);
        let gate = kept.gate(self.kept_max(), now);
        // The lock is held, so that the later of two changes is the one that stays.
        if !was_open || kept.count() > 0 {
            self.set_pause(gate);
            self.changed.send_replace(());
        }
        result
    }

    fn set_pause(&self, gate: LaneGate) {
        let pause = match gate {
            LaneGate::Closed(until) => {
                Some(LanePause { until: self.origin + until, cause: PauseCause::Backend, reason: Self::refused() })
            }
            LaneGate::Open | LaneGate::Probing => None,
        };
        self.pause.send_if_modified(|current| {
            let is_new = *current != pause;
            *current = pause;
            is_new
        });
    }

    fn kept_max(&self) -> usize {
        self.kept_max.load(Ordering::Relaxed)
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }
}

impl KeptAnswer {
    /// Waits until the answer is to be written, and says how. It must be followed by the result.
    pub async fn next_write(&self) -> KeptWrite {
        let mut changed = self.writes.changed.subscribe();
        loop {
            let now = self.writes.now();
            let step = self.writes.kept.lock().next(self.ticket, now);
            let until = match step {
                KeptStep::Write(write) => return write,
                KeptStep::Wait(until) => until.map(|until| self.writes.origin + until),
            };
            // The sender lives as long as this answer.
            tokio::select! {
                _ = changed.changed() => {}
                () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {}
            }
        }
    }

    /// Records that it was refused again.
    pub fn record_refused(&self) -> KeptStage {
        self.writes.change(|kept, now| kept.refuse(self.ticket, now))
    }

    /// Records that the ledger has it.
    pub fn record_accepted(&self) {
        self.writes.change(|kept, now| kept.accept(Some(self.ticket), now));
    }
}

impl Drop for KeptAnswer {
    fn drop(&mut self) {
        self.writes.change(|kept, now| kept.forget(self.ticket, now));
    }
}

impl Drop for OutcomePermission {
    fn drop(&mut self) {
        self.writes.requests.fetch_sub(1, Ordering::Relaxed);
        if let Some(probe) = self.probe {
            self.writes.change(|kept, _| kept.end_probe(probe));
        }
    }
}
