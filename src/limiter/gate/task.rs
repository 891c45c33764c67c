//! The gate's one task: gathers wants and settlements, makes the next call when it is worth making, hands out permits.
//!
//! Refuses to make two calls at once, and refuses to make a new one while an earlier one has no answer: it repeats it
//! under the same number, so that a lost reply neither takes nor settles twice. Refuses grants of a store whose clock has
//! made a step.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::line::{Aside, Line};
use super::outgoing::{Load, Outgoing};
use super::permit::{Permit, Settled, Slots};
use super::warm::Cold;
use super::{GateParts, GateView, Grant, Message, RefusedBy};
use crate::domain::clock_comparison::{ClockComparison, Comparison};
use crate::domain::decision::{BATCH_MAX, Refusal, Refused, Reply, Run};
use crate::domain::quota_spec::QuotaSpec;
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
/// Most calls that a gate makes before it leaves: ten thousand settlements.
const LAST_CALLS_MAX: u32 = 10;
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
    /// The last pause that has been sent: it must outlive the state that was told of it.
    paused_until: Option<Instant>,
    /// Of the state that replied last.
    born: Option<Micros>,
    calls: u64,
    unanswered: Option<Outgoing>,
    failures: u32,
    standing: Option<Standing>,
    ask_at: Instant,
    cold: Option<Cold>,
    /// Our settings are older than the store's; said once.
    stale: bool,
    /// The store that the comparison is with.
    run_id: String,
    origin: Instant,
    clock: ClockComparison,
    distrust: Option<Micros>,
}

/// Why nobody passes, until when at the earliest.
#[derive(Clone)]
struct Standing {
    by: RefusedBy,
    until: Instant,
    exact: bool,
}

impl GateTask {
    pub fn new(
        parts: GateParts,
        inbox: mpsc::UnboundedReceiver<Message>,
        outbox: mpsc::WeakUnboundedSender<Message>,
        view: watch::Sender<GateView>,
    ) -> Self {
        let now = Instant::now();
        Self {
            parts,
            inbox,
            outbox,
            view,
            line: Line::default(),
            settled: Vec::new(),
            settle_at: None,
            pause_until: None,
            paused_until: None,
            born: None,
            calls: 0,
            unanswered: None,
            failures: 0,
            standing: None,
            ask_at: now,
            cold: None,
            stale: false,
            run_id: String::new(),
            origin: now,
            clock: ClockComparison::default(),
            distrust: None,
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
                    self.follow_settings();
                }
                () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
            }
        }
        self.settle_last().await;
    }

    /// Whoever waits is judged by the settings as they are now.
    fn follow_settings(&mut self) {
        let spec = self.parts.spec.borrow_and_update().clone();
        self.line.respec(&spec);
        self.ask_at = Instant::now();
        self.standing = None;
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Want(waiter) => self.line.join(waiter, &self.parts.spec.borrow()),
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
        if self.calls < 2 || self.cold.is_some() || self.unanswered.is_some() || self.failures > 0 {
            return Some(self.ask_at);
        }
        let ready_at = self.line.ready_at().map_or(self.ask_at, |ready_at| ready_at.max(self.ask_at));
        let wants = (!self.line.is_empty()).then_some(ready_at);
        // Older settings than the store's achieve nothing, however urgent the call is.
        let urgent_at = if self.stale { self.ask_at } else { Instant::now() };
        let pause = self.pause_until.map(|_| urgent_at);
        let distrust = self.distrust.map(|_| urgent_at);
        [wants, self.settle_at, pause, distrust].into_iter().flatten().min()
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
    async fn outgoing(&mut self) -> Result<Outgoing, LimiterError> {
        let quota = self.parts.spec.borrow().quota.clone();
        let run_id = self.parts.limiter.run_id(&quota).await?;
        let unanswered = self.unanswered.take();
        if run_id != self.run_id {
            if !self.run_id.is_empty() {
                tracing::warn!(%quota, "limiter store has become another; its state is not trusted");
            }
            self.run_id.clone_from(&run_id);
            self.clock = ClockComparison::default();
            if let Some(unheard) = unanswered {
                self.pause_until = self.pause_until.max(unheard.pause_until);
            }
        } else if let Some(unanswered) = unanswered {
            return Ok(unanswered);
        }
        // A change that came while this task made a call.
        if self.parts.spec.has_changed().unwrap_or(false) {
            self.follow_settings();
        }
        let spec = self.parts.spec.borrow().clone();
        self.calls += 1;
        let rest = self.settled.split_off(self.settled.len().min(BATCH_MAX));
        let settled = std::mem::replace(&mut self.settled, rest);
        self.settle_at = (!self.settled.is_empty()).then(Instant::now);
        let compared = self.clock.is_known() && self.distrust.is_none();
        self.paused_until = self.paused_until.max(self.pause_until);
        let load = Load {
            groups: if compared { self.line.head(&spec, Instant::now()) } else { Vec::new() },
            spec,
            settled,
            pause_until: self.pause_until.take(),
            rebuild: self.cold.as_mut().and_then(|cold| cold.rebuild.take()),
            distrust: self.distrust,
        };
        Ok(Outgoing::new(load, self.parts.incarnation, self.calls, run_id))
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

    async fn answered(&mut self, outgoing: Outgoing, reply: &Reply) {
        let arrived = Instant::now();
        self.standing = None;
        self.ask_at = arrived;
        if self.born.replace(reply.born).is_some_and(|before| before != reply.born) {
            let paused_until = self.paused_until.filter(|until| *until > arrived);
            self.pause_until = self.pause_until.max(paused_until);
        }
        if self.stepped(&outgoing, reply, arrived) {
            return;
        }
        self.hand_out(&outgoing, reply, arrived);
        let Some(refused) = reply.refused else {
            self.cold = None;
            self.stale = false;
            return;
        };
        if refused.by == Refusal::StaleVersion {
            self.pause_until = self.pause_until.max(outgoing.pause_until);
            // Nothing was settled: the newer settings may hold limits that these settlements must reach.
            self.settled.extend(outgoing.settled);
            if !self.stale {
                let (ours, theirs) = (outgoing.spec.version, reply.version);
                tracing::warn!(quota = %outgoing.spec.quota, ours, theirs, "no permits: the limiter knows newer settings");
            }
            self.settle_at = (!self.settled.is_empty()).then(|| arrived + STALE_PAUSE);
            (self.parts.newer)(reply.version);
        }
        self.stale = refused.by == Refusal::StaleVersion;
        self.stand(&outgoing.spec, refused, reply, arrived).await;
    }

    /// Compares the clocks before anything of the reply is used. After a step nothing that the store has counted says when
    /// it was; the state is begun anew, and what this call was granted is forgotten with it.
    fn stepped(&mut self, outgoing: &Outgoing, reply: &Reply, arrived: Instant) -> bool {
        self.distrust.take_if(|born| outgoing.call.distrust == Some(*born));
        let [departed, arrived] = [outgoing.departed, arrived].map(|at| at.saturating_duration_since(self.origin));
        let (by, direction) = match self.clock.observe(departed, arrived, reply.now) {
            Comparison::First | Comparison::Agrees { .. } => return false,
            Comparison::SteppedForward { by } => (by, "forward"),
            Comparison::SteppedBack { by } => (by, "back"),
        };
        let quota = &outgoing.spec.quota;
        tracing::error!(%quota, ?by, direction, "the limiter store's clock made a step; its state is begun anew");
        self.distrust = Some(reply.born);
        self.pause_until = self.pause_until.max(outgoing.pause_until);
        true
    }

    fn hand_out(&mut self, outgoing: &Outgoing, reply: &Reply, arrived: Instant) {
        let mut places: Vec<_> = outgoing.groups.iter().map(|group| group.places.iter()).collect();
        for run in &reply.granted {
            let (Some(group), Some(places)) = (outgoing.groups.get(run.want), places.get_mut(run.want)) else {
                continue;
            };
            let permits = usize::try_from(run.permits).unwrap_or(usize::MAX);
            for place in places.by_ref().take(permits) {
                let permit = self.permit(outgoing, run, reply.now, arrived);
                if let Some(waiter) = self.line.leave(*place) {
                    debug_assert_eq!(waiter.cost, group.want.cost);
                    // Sent to somebody who has gone away, the permit drops and gives its slots back.
                    let _ = waiter.reply.send(Grant::Granted(permit));
                }
            }
        }
        for passed in &reply.passed_over {
            let by = RefusedBy::Limit(outgoing.spec.limit_name(passed.limit).to_owned());
            let until = arrived + Duration::from_micros(passed.wait_us).max(ASK_PAUSE);
            let aside = Aside { until, by, exact: passed.exact };
            for place in places.get_mut(passed.want).into_iter().flatten() {
                self.line.step_aside(*place, &aside, arrived);
            }
        }
    }

    fn permit(&self, outgoing: &Outgoing, run: &Run, now: Micros, arrived: Instant) -> Permit {
        let Outgoing { spec, departed, call, groups, .. } = outgoing;
        // Within the allowance for jitter the way to the provider must not hide a late start.
        let budget = spec.grant_jitter.map_or(spec.send_budget, |jitter| jitter.min(spec.send_budget));
        let wait = Duration::from_micros(run.wait_us);
        let start_at = self.start_at(spec, run, now, arrived);
        let names = spec.provider_limits().into_iter().map(|index| spec.limit_name(index).to_owned());
        let slots = Slots {
            call: call.number,
            cost: groups.get(run.want).map_or(0, |group| group.want.cost),
            of: groups.get(run.want).map(|group| group.of.clone()).unwrap_or_default(),
            origins: names.zip(run.origins.iter().copied()).collect(),
            gate: self.outbox.clone(),
        };
        Permit::new(start_at, *departed + wait + budget, *departed + wait + spec.hold_max, slots)
    }

    /// From the arrival of the reply on; and not before each slot's window is over by the store's clock as it went while
    /// that window ran, in case it made a step since that nobody can see.
    fn start_at(&self, spec: &QuotaSpec, run: &Run, now: Micros, arrived: Instant) -> Instant {
        let since = arrived.saturating_duration_since(self.origin);
        let mut start = since + Duration::from_micros(run.wait_us);
        for (cell, origin_ms) in spec.provider_cells().iter().zip(&run.origins).filter(|(_, origin_ms)| **origin_ms > 0)
        {
            let due = Micros((origin_ms * 1_000 + cell.window_us).min(now.0 + run.wait_us));
            start = start.max(self.clock.not_before(since, due, Duration::from_micros(cell.window_us)));
        }
        self.origin + start
    }

    async fn stand(&mut self, spec: &QuotaSpec, refused: Refused, reply: &Reply, arrived: Instant) {
        let until = arrived + Duration::from_micros(refused.wait_us);
        let (by, until) = match refused.by {
            Refusal::Limit { index } => {
                self.cold = None;
                (RefusedBy::Limit(spec.limit_name(index).to_owned()), until)
            }
            Refusal::Paused => {
                self.cold = None;
                (RefusedBy::Paused, until)
            }
            Refusal::Cold => {
                let mut cold = Cold::known_or_new(self.cold.take(), reply.born);
                let until = cold.warm_up(spec, &self.parts, until).await;
                self.cold = Some(cold);
                (RefusedBy::Cold, until)
            }
            Refusal::StaleVersion => (RefusedBy::StaleSettings, arrived + STALE_PAUSE),
            Refusal::StaleCall => (RefusedBy::StoreAway("call overtaken".to_owned()), arrived + RETRY_FIRST),
        };
        // Only an exact start can be booked; asking early for anything else would hear the same again.
        let ahead = if refused.exact { ASK_AHEAD } else { Duration::ZERO };
        self.ask_at = until.checked_sub(ahead).unwrap_or(until).max(arrived + ASK_PAUSE);
        self.standing = Some(Standing { by, until, exact: refused.exact });
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
        for _ in 0..LAST_CALLS_MAX {
            if self.settled.is_empty() && self.unanswered.is_none() {
                return;
            }
            let Err(error) = self.last_call().await else { continue };
            tracing::debug!(%error, "last settlements not delivered; their leases run out");
            return;
        }
        tracing::debug!(left = self.settled.len(), "too many last settlements; their leases run out");
    }

    async fn last_call(&mut self) -> Result<(), LimiterError> {
        let outgoing = self.outgoing().await?;
        self.parts.limiter.call(&outgoing.spec, &outgoing.call).await.map(drop)
    }
}
