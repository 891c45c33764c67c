//! The gate's one task: gathers wants and settlements, makes the next call when it is worth making, hands out permits.
//!
//! Refuses to make two calls at once, and refuses to make a new one while an earlier one has no answer: it repeats it
//! under the same number, so that a lost reply neither takes nor settles twice. Refuses grants of a store whose clock has
//! made a step.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::call_order::CallOrder;
use super::hands::Hands;
use super::history::Histories;
use super::line::{Line, Waiter};
use super::outgoing::{Load, Outgoing};
use super::permit::Settled;
use super::stall::{LongStall, Stall};
use super::standing::{ASK_PAUSE, Kinds, Standing};
use super::trust::Trust;
use super::warm::Cold;
use super::{GateParts, GateView, Message, RefusedBy};
use crate::domain::clock_comparison::ClockComparison;
use crate::domain::decision::BATCH_MAX;
use crate::domain::time::Micros;
use crate::faults::{self, Point};
use crate::limiter::LimiterError;

mod reply;

/// Longest time between two exchanges with the store: the comparison of the clocks wears off.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// How long settlements wait for company.
pub const SETTLE_AFTER: Duration = Duration::from_millis(10);
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
    hands: Arc<Hands>,
    settled: Vec<Settled>,
    settle_at: Option<Instant>,
    pause_until: Option<Instant>,
    /// The last pause that has been sent: it must outlive the state that was told of it.
    paused_until: Option<Instant>,
    /// As of the settings that are followed.
    resumed_at: u64,
    /// Of the state that replied last.
    born: Option<Micros>,
    calls: u64,
    unanswered: Option<Outgoing>,
    failures: u32,
    standing: Option<Standing>,
    /// Of the kinds of calls that have a limit of their own.
    kinds: Kinds,
    ask_at: Instant,
    replied_at: Instant,
    cold: Option<Cold>,
    histories: Histories,
    /// Our settings are older than the store's; said once.
    stale: bool,
    /// The store's state is to be begun anew, and it need not hear of that at once.
    is_patient: bool,
    /// The store that the comparison is with.
    run_id: String,
    origin: Instant,
    clock: ClockComparison,
    trust: Trust,
    order: CallOrder,
    distrust: Option<Micros>,
    stall: Stall,
}

impl GateTask {
    pub fn new(
        parts: GateParts,
        inbox: mpsc::UnboundedReceiver<Message>,
        outbox: mpsc::WeakUnboundedSender<Message>,
        view: watch::Sender<GateView>,
    ) -> Self {
        let now = Instant::now();
        let hands = Hands::new(parts.spec.borrow().use_within());
        let resumed_at = parts.spec.borrow().resumed_at;
        Self {
            parts,
            inbox,
            outbox,
            view,
            line: Line::default(),
            hands,
            settled: Vec::new(),
            settle_at: None,
            pause_until: None,
            paused_until: None,
            resumed_at,
            born: None,
            calls: 0,
            unanswered: None,
            failures: 0,
            standing: None,
            kinds: Kinds::default(),
            ask_at: now,
            replied_at: now,
            cold: None,
            histories: Histories::default(),
            stale: false,
            is_patient: false,
            run_id: String::new(),
            origin: now,
            clock: ClockComparison::default(),
            trust: Trust::default(),
            order: CallOrder::default(),
            distrust: None,
            stall: Stall::default(),
        }
    }

    pub async fn run(mut self) {
        let stop = self.parts.stop.clone();
        while !stop.is_cancelled() {
            while let Ok(message) = self.inbox.try_recv() {
                self.take(message);
            }
            if let Some(answer) = self.histories.ready() {
                self.hear_history(answer);
            }
            // What was refused by settings of before refuses nobody now.
            if self.parts.spec.has_changed().unwrap_or(false) {
                self.follow_settings();
            }
            self.tidy_line();
            let next = self.next_call_at();
            if next.is_some_and(|at| at <= Instant::now()) {
                self.call().await;
                continue;
            }
            // One whose time is over and whom nothing refuses waits for room, which is near.
            let deadline = self.line.next_deadline().filter(|at| *at > Instant::now());
            let wake = [next, deadline].into_iter().flatten().min();
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
                answer = self.histories.answer() => self.hear_history(answer),
                () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
            }
        }
        self.settle_last().await;
    }

    /// Whoever waits is judged by the settings as they are now.
    fn follow_settings(&mut self) {
        let spec = self.parts.spec.borrow_and_update().clone();
        self.line.respec(&spec);
        self.histories.forget();
        self.ask_at = Instant::now();
        self.standing = None;
        self.kinds.clear();
        if spec.resumed_at != self.resumed_at {
            tracing::info!(quota = %spec.quota, "an operator has lifted the wait that the provider named");
            self.resumed_at = spec.resumed_at;
            (self.pause_until, self.paused_until) = (None, None);
        }
    }

    /// A pause that may not have arrived is told again, unless an operator has lifted it since.
    fn pause_again(&mut self, outgoing: &Outgoing) {
        if outgoing.spec.resumed_at == self.resumed_at {
            self.pause_until = self.pause_until.max(outgoing.pause_until);
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Want(waiter) => self.join(waiter),
            Message::Where { job, reply } => {
                // Whoever asked and has gone away needs no answer.
                let _ = reply.send(self.line.place_of(&job, self.standing.as_ref(), &self.kinds));
            }
            Message::Settled(settled) => {
                self.settled.push(settled);
                self.settle_at.get_or_insert_with(|| Instant::now() + SETTLE_AFTER);
            }
            // Looked at before the next call.
            Message::Room => {}
            Message::Pause { until } => self.pause_until = self.pause_until.max(Some(until)),
        }
    }

    /// One who is more urgent than the first who was refused is asked for before that one's wait is over.
    fn join(&mut self, waiter: Waiter) {
        let (now, kind) = (Instant::now(), waiter.of.kind());
        let Some(place) = self.line.join(waiter, &self.parts.spec.borrow(), now) else { return };
        if self.kinds.get(&kind).is_some_and(|standing| standing.is_overtaken_by(place)) {
            self.kinds.remove(&kind);
        }
        if self.standing.take_if(|standing| standing.is_overtaken_by(place)).is_some() {
            self.ask_at = now.max(self.replied_at + ASK_PAUSE);
        }
    }

    /// Sends away whoever will not wait as long as the line stands.
    fn tidy_line(&mut self) {
        let now = Instant::now();
        self.line.sweep();
        self.standing.take_if(|standing| standing.until <= now);
        self.kinds.retain(|_, standing| standing.until > now);
        let of_kinds = self.kinds.iter().map(|(kind, standing)| (Some(*kind), standing));
        for (kind, standing) in self.standing.iter().map(|standing| (None, standing)).chain(of_kinds) {
            self.line.refuse_waiting_for(standing, kind, now);
        }
        let first_of_kinds = || self.kinds.values().min_by_key(|standing| standing.until);
        let standing =
            self.standing.as_ref().or_else(first_of_kinds).map(|standing| (standing.by.clone(), standing.until));
        let view = GateView { waiting: self.line.len(), standing };
        self.tell_stall(&view, now);
        self.view.send_replace(view);
    }

    fn tell_stall(&mut self, view: &GateView, now: Instant) {
        let is_asking = view.waiting > 0 || self.unanswered.is_some() || self.failures > 0 || self.cold.is_some();
        let Some((by, until)) = &view.standing else {
            if !is_asking {
                self.stall.ends();
            }
            return;
        };
        let Some(LongStall { cause, lasted, wait, is_usual }) = self.stall.stands(by, *until, now) else { return };
        let (quota, waiting) = (self.parts.spec.borrow().quota.clone(), view.waiting);
        if is_usual {
            tracing::info!(%quota, cause, ?lasted, ?wait, waiting, "no permits");
        } else {
            tracing::warn!(%quota, cause, ?lasted, ?wait, waiting, "no permits");
        }
    }

    /// When the next call is worth making; `None`: never.
    fn next_call_at(&self) -> Option<Instant> {
        // A gate that has not been heard yet, or finds the store cold, asks without being asked: its first job must not
        // be the one that waits for it.
        if !self.trust.is_given()
            || self.calls < 2
            || self.cold.is_some()
            || self.histories.has_told()
            || self.unanswered.is_some()
            || self.failures > 0
        {
            return Some(self.ask_at);
        }
        let ready_at = self.line.ready_at(&self.kinds).map_or(self.ask_at, |ready_at| ready_at.max(self.ask_at));
        let wants = (!self.line.is_empty() && self.hands.room() > 0).then_some(ready_at);
        // Older settings than the store's achieve nothing, however urgent the call is.
        let urgent_at = if self.stale || self.is_patient { self.ask_at } else { Instant::now() };
        let pause = self.pause_until.map(|_| urgent_at);
        let distrust = self.distrust.map(|_| urgent_at);
        let idle = Some(self.replied_at + IDLE_MAX);
        [wants, self.settle_at, pause, distrust, idle].into_iter().flatten().min()
    }

    async fn call(&mut self) {
        let outgoing = match self.outgoing().await {
            Ok(outgoing) => outgoing,
            Err(error) => return self.failed(&error),
        };
        match self.parts.limiter.call(&outgoing.spec, &outgoing.call).await {
            Ok(reply) => {
                if !outgoing.settled.is_empty() {
                    faults::crash(Point::AfterSettle);
                }
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
            (self.clock, self.trust) = (ClockComparison::default(), Trust::default());
            self.order.forget();
            if let Some(unheard) = unanswered {
                self.pause_again(&unheard);
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
        let compared = self.trust.is_given() && self.distrust.is_none();
        self.paused_until = self.paused_until.max(self.pause_until);
        let load = Load {
            groups: if compared {
                self.line.head(&spec, &self.kinds, self.hands.room(), Instant::now())
            } else {
                Vec::new()
            },
            spec,
            settled,
            pause_until: self.pause_until.take(),
            rebuild: self.cold.as_mut().and_then(|cold| cold.rebuild.take()),
            seeds: self.histories.next_seeds(),
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
        self.standing = Some(Standing::new(by, now + AWAY_WAIT, false, now));
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
