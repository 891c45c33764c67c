//! Answers of a provider that the ledger has not accepted: which one is written next, and whether the lane may begin
//! requests meanwhile.
//!
//! An answer that is dropped leaves a charged payment in review. So each one is kept and written again, whatever the
//! error. While the ledger accepts none, the lane begins no request, because each would leave one more. The kept answers
//! are the first probe, then one payment. A payment is also the probe if all kept answers are refused for long: one row
//! that the ledger never accepts must not stop the lane.

use std::collections::BTreeMap;
use std::time::Duration;

use super::backoff::BackoffPolicy;

/// Refusals of one answer, between which others were accepted, until its payment is written as `review`.
pub const REFUSALS_MAX: u32 = 3;
/// Refusals in a row, of any answers, after which the lane begins no request. A single row that is refused among others
/// does not hold them up.
const STALLED_FROM: u32 = 2;
const RETRIES: BackoffPolicy = BackoffPolicy { base: Duration::from_millis(100), max: Duration::from_secs(1) };
/// Share of the step that each retry waits; lanes are few, so theirs need not be spread.
const RETRY_FRACTION: f64 = 0.5;
/// Wait for a payment as the probe: at first and at most.
const PAYMENT_WAIT: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(15 * 60));
/// A lane with one worker slot needs a probe beside its one kept answer.
const KEPT_MAX_MIN: usize = 2;
/// Time between two writes of an answer that is set aside.
const ASIDE_WAIT: Duration = Duration::from_secs(30);

/// Number of a kept answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// How a kept answer is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptWrite {
    /// As it is.
    Answer,
    /// As `review`, with the answer in the reason.
    Review,
}

/// The next step of a kept answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptStep {
    Write(KeptWrite),
    /// Wait until then, or for a change.
    Wait(Option<Duration>),
}

/// Where a kept answer stands after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptStage {
    /// Written again as it is.
    Retried,
    /// Others were accepted: the payment is written as `review`.
    Review,
    /// `review` was refused as well: the answer stays in memory, and the lane goes on.
    Aside(KeptWrite),
}

/// Whether a request may begin now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Free,
    /// As the one probe, with its number.
    Probe(u64),
    Refused,
}

/// What the lane may do, for its status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneGate {
    Open,
    /// One payment at a time.
    Probing,
    /// No request until then, unless an answer is accepted.
    Closed(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// No answer was accepted since the last refusal: the answers are written one at a time.
    Stalled {
        tries: u32,
        retry_at: Duration,
        writing: Option<Ticket>,
    },
    /// A kept answer was accepted: one payment is the next probe.
    Probing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kept {
    tries: u32,
    refusals: u32,
    /// Answers that were accepted until its last refusal.
    accepted_before: u64,
    retry_at: Duration,
    stage: KeptStage,
}

/// The kept answers of one lane. Instants are times since any fixed origin.
#[derive(Clone, Debug)]
pub struct KeptAnswers {
    kept: BTreeMap<Ticket, Kept>,
    next: u64,
    accepted: u64,
    /// Refusals since an answer was accepted.
    refused_in_a_row: u32,
    phase: Phase,
    probe: Option<u64>,
    payment_at: Duration,
    payment_wait: Duration,
}

impl Default for KeptAnswers {
    fn default() -> Self {
        Self {
            kept: BTreeMap::new(),
            next: 0,
            accepted: 0,
            refused_in_a_row: 0,
            phase: Phase::Open,
            probe: None,
            payment_at: Duration::ZERO,
            payment_wait: PAYMENT_WAIT.0,
        }
    }
}

impl KeptAnswers {
    /// Number of kept answers.
    pub fn count(&self) -> usize {
        self.kept.len()
    }

    /// Keeps an answer whose first write was refused.
    pub fn keep(&mut self, now: Duration) -> Ticket {
        let ticket = Ticket(self.number());
        let accepted_before = self.accepted;
        let retry_at = now + RETRIES.delay(1, RETRY_FRACTION);
        let stage = KeptStage::Retried;
        self.kept.insert(ticket, Kept { tries: 1, refusals: 1, accepted_before, retry_at, stage });
        if self.probe.take().is_some() {
            self.payment_wait = (self.payment_wait * 2).min(PAYMENT_WAIT.1);
            self.payment_at = now + self.payment_wait;
            self.refused_in_a_row = STALLED_FROM;
        }
        self.note_refusal(now);
        ticket
    }

    /// Records that a kept answer was refused again.
    pub fn refuse(&mut self, ticket: Ticket, now: Duration) -> KeptStage {
        let accepted = self.accepted;
        let Some(kept) = self.kept.get_mut(&ticket) else { return KeptStage::Retried };
        let others_passed = accepted > kept.accepted_before;
        kept.accepted_before = accepted;
        kept.tries += 1;
        kept.refusals += u32::from(others_passed);
        let wait = RETRIES.delay(kept.tries, RETRY_FRACTION);
        let (stage, wait) = match kept.stage {
            KeptStage::Retried if kept.refusals >= REFUSALS_MAX => (KeptStage::Review, Duration::ZERO),
            KeptStage::Retried => (KeptStage::Retried, wait),
            KeptStage::Review | KeptStage::Aside(KeptWrite::Review) => {
                (KeptStage::Aside(KeptWrite::Answer), ASIDE_WAIT)
            }
            KeptStage::Aside(KeptWrite::Answer) => (KeptStage::Aside(KeptWrite::Review), ASIDE_WAIT),
        };
        (kept.stage, kept.retry_at) = (stage, now + wait);
        if stage == KeptStage::Retried {
            self.note_refusal(now);
        }
        self.end_write(ticket, now);
        stage
    }

    /// Records that the ledger has accepted an answer: a kept one, or the first write of another.
    pub fn accept(&mut self, ticket: Option<Ticket>, now: Duration) {
        self.accepted += 1;
        self.refused_in_a_row = 0;
        match (ticket, self.phase) {
            (Some(ticket), phase) => {
                self.kept.remove(&ticket);
                if matches!(phase, Phase::Stalled { .. }) {
                    self.probe_by_payment(now);
                }
            }
            (None, Phase::Open) => {}
            (None, _) => {
                (self.phase, self.probe, self.payment_wait) = (Phase::Open, None, PAYMENT_WAIT.0);
                self.retry_all(now);
            }
        }
    }

    /// Forgets an answer that is no longer this worker's to write.
    pub fn forget(&mut self, ticket: Ticket, now: Duration) {
        if self.kept.remove(&ticket).is_none() {
            return;
        }
        self.end_write(ticket, now);
        if matches!(self.phase, Phase::Stalled { .. }) && self.retried().next().is_none() {
            self.probe_by_payment(now);
        }
    }

    /// The next step of a kept answer. A write that this returns must be followed by its result.
    pub fn next(&mut self, ticket: Ticket, now: Duration) -> KeptStep {
        let Some(kept) = self.kept.get(&ticket).copied() else { return KeptStep::Wait(None) };
        let due = |at: Duration, write| if at <= now { KeptStep::Write(write) } else { KeptStep::Wait(Some(at)) };
        let first = self.first_retried();
        match (kept.stage, &mut self.phase) {
            (KeptStage::Aside(write), _) => due(kept.retry_at, write),
            (KeptStage::Review, _) => due(kept.retry_at, KeptWrite::Review),
            (KeptStage::Retried, Phase::Open | Phase::Probing) => due(kept.retry_at, KeptWrite::Answer),
            (KeptStage::Retried, Phase::Stalled { retry_at, writing, .. }) => {
                if writing.is_some() || first != Some(ticket) {
                    return KeptStep::Wait(None);
                }
                let step = due(*retry_at, KeptWrite::Answer);
                *writing = matches!(step, KeptStep::Write(_)).then_some(ticket);
                step
            }
        }
    }

    /// Asks whether a request may begin beside `in_flight` others, each of which may leave one more answer: at most
    /// `kept_max` are kept.
    pub fn admit(&mut self, kept_max: usize, in_flight: usize, now: Duration) -> Admission {
        if !self.kept.is_empty() && self.kept.len() + in_flight >= kept_max.max(KEPT_MAX_MIN) {
            return Admission::Refused;
        }
        match self.gate(kept_max, now) {
            LaneGate::Open => Admission::Free,
            LaneGate::Probing if self.probe.is_none() => {
                let number = self.number();
                self.probe = Some(number);
                Admission::Probe(number)
            }
            LaneGate::Probing | LaneGate::Closed(_) => Admission::Refused,
        }
    }

    /// Ends a probe without a result.
    pub fn end_probe(&mut self, number: u64) {
        self.probe.take_if(|probe| *probe == number);
    }

    /// Whether requests may begin, while at most `kept_max` answers are kept.
    pub fn gate(&self, kept_max: usize, now: Duration) -> LaneGate {
        match self.phase {
            _ if self.kept.len() >= kept_max.max(KEPT_MAX_MIN) => LaneGate::Closed(now + PAYMENT_WAIT.1),
            Phase::Open => LaneGate::Open,
            Phase::Stalled { .. } if now < self.payment_at => LaneGate::Closed(self.payment_at),
            Phase::Stalled { .. } | Phase::Probing => LaneGate::Probing,
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn retried(&self) -> impl Iterator<Item = (&Ticket, &Kept)> {
        self.kept.iter().filter(|(_, kept)| kept.stage == KeptStage::Retried)
    }

    /// The answer that was tried least.
    fn first_retried(&self) -> Option<Ticket> {
        self.retried().min_by_key(|(ticket, kept)| (kept.tries, **ticket)).map(|(ticket, _)| *ticket)
    }

    fn note_refusal(&mut self, now: Duration) {
        self.refused_in_a_row = self.refused_in_a_row.saturating_add(1);
        if self.refused_in_a_row >= STALLED_FROM && !matches!(self.phase, Phase::Stalled { .. }) {
            self.phase = Phase::Stalled { tries: 1, retry_at: now + RETRIES.delay(1, RETRY_FRACTION), writing: None };
            self.payment_at = now + self.payment_wait;
        }
    }

    /// The next answer is written after a pause that grows with each refusal.
    fn end_write(&mut self, ticket: Ticket, now: Duration) {
        if let Phase::Stalled { tries, retry_at, writing } = &mut self.phase
            && *writing == Some(ticket)
        {
            (*tries, *writing) = (*tries + 1, None);
            *retry_at = now + RETRIES.delay(*tries, RETRY_FRACTION);
        }
    }

    fn probe_by_payment(&mut self, now: Duration) {
        (self.phase, self.probe) = (Phase::Probing, None);
        self.retry_all(now);
    }

    fn retry_all(&mut self, now: Duration) {
        let retried = self.kept.values_mut().filter(|kept| kept.stage == KeptStage::Retried);
        retried.for_each(|kept| kept.retry_at = kept.retry_at.min(now));
    }
}

#[cfg(test)]
#[path = "kept_answers_tests.rs"]
mod tests;
