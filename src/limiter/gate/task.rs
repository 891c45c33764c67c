//! The gate's one task: gathers wants and settlements, makes the next call when it is worth making, hands out permits.
//!
//! Refuses to make two calls at once, and refuses to make a new one while an earlier one has no answer: it repeats it
//! under the same number, so that a lost reply neither takes nor settles twice.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::line::{Line, Place};
use super::permit::{Permit, Settled, SettledFate, Slots};
use super::{GateParts, GateView, Grant, Message, RefusedBy};
use crate::domain::decision::{BATCH_MAX, Call, Fate, QuotaSpec, Refusal, Refused, Reply, Settlement};
use crate::domain::provider::BOOKING_HORIZON;
use crate::domain::time::Micros;
use crate::limiter::LimiterError;

/// How long before the announced instant the gate asks again: within the booking horizon, so that the permit comes with
/// its exact start and the attempt can be committed meanwhile.
const ASK_AHEAD: Duration = Duration::from_millis(100);
/// Shortest time between a refusal and the next call that only asks again.
const ASK_PAUSE: Duration = Duration::from_millis(5);
/// How long a gate with old settings waits for the new ones before it asks again.
const STALE_PAUSE: Duration = Duration::from_millis(100);
/// How long settlements wait for company.
const SETTLE_AFTER: Duration = Duration::from_millis(10);
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(1);
/// How long those are sent away who will not wait in hand while the store is away.
const AWAY_WAIT: Duration = Duration::from_secs(1);

pub(super) struct GateTask {
    parts: GateParts,
    inbox: mpsc::UnboundedReceiver<Message>,
    outbox: mpsc::WeakUnboundedSender<Message>,
    view: watch::Sender<GateView>,
    line: Line,
    settled: Vec<Settled>,
    settle_at: Option<Instant>,
    pause_until: Option<Instant>,
    calls: u64,
    unanswered: Option<Unanswered>,
    failures: u32,
    standing: Option<Standing>,
    ask_at: Instant,
    cold: Option<Cold>,
    /// Our settings are older than the store's; said once.
    stale: bool,
}

/// A call whose reply has not arrived.
struct Unanswered {
    call: Call,
    spec: Arc<QuotaSpec>,
    departed: Instant,
    places: Vec<(Place, u32)>,
}

/// Why nobody passes, until when at the earliest.
#[derive(Clone)]
struct Standing {
    by: RefusedBy,
    until: Instant,
    exact: bool,
}

/// A limiter without its past.
struct Cold {
    born: Micros,
    since: Instant,
    vouched: bool,
}

impl GateTask {
    pub fn new(
        parts: GateParts,
        inbox: mpsc::UnboundedReceiver<Message>,
        outbox: mpsc::WeakUnboundedSender<Message>,
        view: watch::Sender<GateView>,
    ) -> Self {
        Self {
            parts,
            inbox,
            outbox,
            view,
            line: Line::default(),
            settled: Vec::new(),
            settle_at: None,
            pause_until: None,
            calls: 0,
            unanswered: None,
            failures: 0,
            standing: None,
            ask_at: Instant::now(),
            cold: None,
            stale: false,
        }
    }

    pub async fn run(mut self) {
        let stop = self.parts.stop.clone();
        while !stop.is_cancelled() {
            while let Ok(message) = self.inbox.try_recv() {
                self.take(message);
            }
            self.tidy_line();
            let next = self.next_call_at();
            if next.is_some_and(|at| at <= Instant::now()) {
                self.call().await;
                continue;
            }
            let wake = [next, self.line.next_deadline()].into_iter().flatten().min();
            tokio::select! {
                () = stop.cancelled() => {}
                message = self.inbox.recv() => match message {
                    Some(message) => self.take(message),
                    None => break,
                },
                changed = self.parts.spec.changed() => {
                    if changed.is_err() {
                        break;
                    }
                    self.ask_at = Instant::now();
                    self.standing = None;
                }
                () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
            }
        }
        self.settle_last().await;
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Want(waiter) => self.line.join(waiter),
            Message::Settled(settled) => {
                self.settled.push(settled);
                self.settle_at.get_or_insert_with(|| Instant::now() + SETTLE_AFTER);
            }
            Message::Pause { until } => self.pause_until = self.pause_until.max(Some(until)),
        }
    }

    /// Sends away whoever will not wait as long as the line stands.
    fn tidy_line(&mut self) {
        let now = Instant::now();
        let cost_max = self.parts.spec.borrow().cost_max();
        if cost_max > 0 {
            self.line.refuse_costly(cost_max);
        }
        self.line.sweep();
        self.standing.take_if(|standing| standing.until <= now);
        if let Some(standing) = &self.standing {
            self.line.refuse_waiting_for(standing.until, now, &standing.by, standing.exact);
        }
        let standing = self.standing.as_ref().map(|standing| (standing.by.clone(), standing.until));
        self.view.send_replace(GateView { waiting: self.line.len(), standing });
    }

    /// When the next call is worth making; `None`: nothing to ask and nothing to settle.
    fn next_call_at(&self) -> Option<Instant> {
        // A gate that has not been heard yet, or finds the store cold, asks without being asked: its first job must not
        // be the one that waits for it.
        if self.calls == 0 || self.cold.is_some() || self.unanswered.is_some() || self.failures > 0 {
            return Some(self.ask_at);
        }
        let wants = (!self.line.is_empty()).then_some(self.ask_at);
        let pause = self.pause_until.map(|_| Instant::now());
        [wants, self.settle_at, pause].into_iter().flatten().min()
    }

    async fn call(&mut self) {
        let outgoing = match self.outgoing().await {
            Ok(outgoing) => outgoing,
            Err(error) => return self.failed(&error),
        };
        match self.parts.limiter.call(&outgoing.spec, &outgoing.call).await {
            Ok(reply) => {
                self.failures = 0;
                self.answered(outgoing, &reply).await;
            }
            Err(error) => {
                self.unanswered = Some(outgoing);
                self.failed(&error);
            }
        }
    }

    /// The unanswered call again, or a new one. A store that has become another knows nothing of the old call.
    async fn outgoing(&mut self) -> Result<Unanswered, LimiterError> {
        let quota = self.parts.spec.borrow().quota.clone();
        let run_id = self.parts.limiter.run_id(&quota).await?;
        if let Some(unanswered) = self.unanswered.take() {
            if unanswered.call.run_id == run_id {
                return Ok(unanswered);
            }
            tracing::warn!(quota = %unanswered.spec.quota, "limiter store has become another; its state is not trusted");
            self.keep_pause(&unanswered);
        }
        let spec = self.parts.spec.borrow_and_update().clone();
        self.calls += 1;
        let departed = Instant::now();
        let rest = self.settled.split_off(self.settled.len().min(BATCH_MAX));
        let settled = std::mem::replace(&mut self.settled, rest);
        self.settle_at = (!self.settled.is_empty()).then_some(departed);
        let places = self.line.head();
        let call = Call {
            incarnation: self.parts.incarnation,
            number: self.calls,
            wants: places.iter().map(|(_, cost)| *cost).collect(),
            settlements: settled.into_iter().map(|settled| settlement(settled, &spec, departed)).collect(),
            pause: self.pause_until.take().map(|until| until.saturating_duration_since(departed)),
            warm: self.cold.as_ref().filter(|cold| cold.vouched).map(|cold| cold.born),
            run_id,
        };
        Ok(Unanswered { call, spec, departed, places })
    }

    /// A pause that the store has not heard, or may not remember, is told again.
    fn keep_pause(&mut self, unheard: &Unanswered) {
        self.pause_until = unheard.call.pause.map(|pause| unheard.departed + pause).max(self.pause_until);
    }

    fn failed(&mut self, error: &LimiterError) {
        let now = Instant::now();
        if self.failures == 0 {
            tracing::warn!(quota = %self.parts.spec.borrow().quota, %error, "no permits: the limiter cannot be asked");
        }
        self.ask_at = now + (RETRY_FIRST * 2_u32.saturating_pow(self.failures.min(10))).min(RETRY_MAX);
        self.failures = self.failures.saturating_add(1);
        let by = RefusedBy::StoreAway(error.to_string());
        self.standing = Some(Standing { by, until: now + AWAY_WAIT, exact: false });
    }

    async fn answered(&mut self, outgoing: Unanswered, reply: &Reply) {
        let arrived = Instant::now();
        self.standing = None;
        self.ask_at = arrived;
        self.hand_out(&outgoing, reply, arrived);
        let Some(refused) = reply.refused else {
            self.cold = None;
            return;
        };
        if refused.by == Refusal::StaleVersion {
            self.keep_pause(&outgoing);
            // Nothing was settled: the newer settings may hold limits that these settlements must reach.
            self.settled.extend(outgoing.call.settlements.into_iter().map(|settlement| {
                let origins = outgoing.spec.limits.iter().map(|limit| limit.name.clone());
                unsettle(settlement, origins, outgoing.departed)
            }));
            if !self.stale {
                let (ours, theirs) = (outgoing.spec.version, reply.version);
                tracing::warn!(quota = %outgoing.spec.quota, ours, theirs, "no permits: the limiter knows newer settings");
            }
            self.settle_at = (!self.settled.is_empty()).then(|| arrived + STALE_PAUSE);
        }
        self.stale = refused.by == Refusal::StaleVersion;
        self.stand(&outgoing.spec, refused, reply, arrived).await;
    }

    fn hand_out(&mut self, outgoing: &Unanswered, reply: &Reply, arrived: Instant) {
        // Within the allowance for jitter the way to the provider must not hide a late start.
        let budget = outgoing.spec.send_budget;
        let budget = outgoing.spec.grant_jitter.map_or(budget, |jitter| jitter.min(budget));
        let mut places = outgoing.places.iter();
        for run in &reply.granted {
            let wait = Duration::from_micros(run.wait_us);
            let names = outgoing.spec.limits.iter().map(|limit| limit.name.clone());
            let origins: Vec<(String, u64)> = names.zip(run.origins.iter().copied()).collect();
            for (place, cost) in places.by_ref().take(run.permits) {
                let slots = Slots {
                    call: outgoing.call.number,
                    cost: *cost,
                    origins: origins.clone(),
                    gate: self.outbox.clone(),
                };
                let departed = outgoing.departed;
                let answer_before = departed + wait + outgoing.spec.hold_max;
                let permit = Permit::new(arrived + wait, departed + wait + budget, answer_before, slots);
                if let Some(waiter) = self.line.leave(*place) {
                    // Sent to somebody who has gone away, the permit drops and gives its slots back.
                    let _ = waiter.reply.send(Grant::Granted(permit));
                }
            }
        }
    }

    async fn stand(&mut self, spec: &QuotaSpec, refused: Refused, reply: &Reply, arrived: Instant) {
        let until = arrived + Duration::from_micros(refused.wait_us);
        let (by, until) = match refused.by {
            Refusal::Limit { index } => {
                self.cold = None;
                let name = spec.limits.get(index).map(|limit| limit.name.clone()).unwrap_or_default();
                (RefusedBy::Limit(name), until)
            }
            Refusal::Paused => (RefusedBy::Paused, until),
            Refusal::Cold => (RefusedBy::Cold, self.warm_up(spec, reply.born, until).await),
            Refusal::StaleVersion => (RefusedBy::StaleSettings, arrived + STALE_PAUSE),
            Refusal::StaleCall => (RefusedBy::StoreAway("call overtaken".to_owned()), arrived + RETRY_FIRST),
        };
        // Only an exact start can be booked; asking early for anything else would hear the same again.
        let ahead = if refused.exact { ASK_AHEAD } else { Duration::ZERO };
        self.ask_at = until.checked_sub(ahead).unwrap_or(until).max(arrived + ASK_PAUSE);
        self.standing = Some(Standing { by, until, exact: refused.exact });
    }

    /// Asks the ledger whether anything from before the loss may still count; says when to ask the limiter again.
    ///
    /// First the booking horizon and the send budget must pass: until then permits of the lost state may be in hands,
    /// and only what has been begun is in the ledger.
    async fn warm_up(&mut self, spec: &QuotaSpec, born: Micros, at_latest: Instant) -> Instant {
        let fresh = Cold { born, since: Instant::now(), vouched: false };
        let cold = match self.cold.take() {
            Some(cold) if cold.born == born => self.cold.insert(cold),
            _ => self.cold.insert(fresh),
        };
        let in_hands_until = cold.since + BOOKING_HORIZON + spec.send_budget;
        if Instant::now() < in_hands_until {
            return in_hands_until.min(at_latest);
        }
        let within = Duration::from_micros(spec.cold_us());
        match self.parts.recent.youngest_age(&spec.quota, within).await {
            Ok(None) => {
                cold.vouched = true;
                Instant::now()
            }
            Ok(Some(age)) => (Instant::now() + within.saturating_sub(age)).min(at_latest),
            Err(cause) => {
                tracing::warn!(quota = %spec.quota, cause, "limiter is cold and the ledger cannot vouch");
                (Instant::now() + Duration::from_secs(1)).min(at_latest)
            }
        }
    }

    /// Before leaving: what is answered is settled, so that the slots serve other processes.
    async fn settle_last(&mut self) {
        self.inbox.close();
        while let Ok(message) = self.inbox.try_recv() {
            if let Message::Settled(settled) = message {
                self.settled.push(settled);
            }
        }
        self.line = Line::default();
        if (!self.settled.is_empty() || self.unanswered.is_some())
            && let Ok(outgoing) = self.outgoing().await
            && let Err(error) = self.parts.limiter.call(&outgoing.spec, &outgoing.call).await
        {
            tracing::debug!(%error, "last settlements not delivered; their leases run out");
        }
    }
}

fn settlement(settled: Settled, spec: &QuotaSpec, departed: Instant) -> Settlement {
    let fate = match settled.fate {
        SettledFate::Answered { at } => Fate::Used { age: departed.saturating_duration_since(at) },
        SettledFate::NotSent { origins } => {
            let of = |name: &str| origins.iter().find(|(known, _)| known == name).map_or(0, |(_, origin)| *origin);
            Fate::NotSent { origins: spec.limits.iter().map(|limit| of(&limit.name)).collect() }
        }
    };
    Settlement { call: settled.call, cost: settled.cost, fate }
}

fn unsettle(settlement: Settlement, names: impl Iterator<Item = String>, departed: Instant) -> Settled {
    let fate = match settlement.fate {
        Fate::Used { age } => SettledFate::Answered { at: departed.checked_sub(age).unwrap_or(departed) },
        Fate::NotSent { origins } => SettledFate::NotSent { origins: names.zip(origins).collect() },
    };
    Settled { call: settlement.call, cost: settlement.cost, fate }
}
