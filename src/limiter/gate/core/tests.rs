//! Property tests of the core: random events against the limiter's own state machine, in virtual time.
//!
//! After every event the rig drives the core until nothing is due, as its drivers do, and checks what must always hold.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use proptest::prelude::*;

use self::events::{ACCOUNTS, Ask, Step, millis, step};
use super::*;
use crate::domain::clock_comparison::AttestationCheck;
use crate::domain::job::JobId;
use crate::domain::limit::{AccountRule, Rule, Scope};
use crate::domain::permit_protocol::{CallKind, CostByKind, LimiterReply, RebuildData};
use crate::domain::provider::{ProviderName, StoreDown};
use crate::domain::quota::Quota;
use crate::domain::quota_spec::LimitSpec;
use crate::limiter::gate::AcquireRequest;
use crate::limiter::gate::egress::{EgressRule, LaneEgress};

mod events;

const START_US: u64 = 1_800_000_000_000_000;
const WORKERS: u32 = 6;
const RUN_ID: &str = "rig";
/// Calls at one instant beside those that bring a decision or a release: the first ones, a clock or a history, and one
/// that defers the waiters of each account.
const CALLS_AT_ONCE_MAX: u64 = 6;
const LONG: Duration = Duration::from_secs(24 * 3_600);

#[derive(Debug)]
struct RigTicket {
    id: u32,
    is_cancelled: Rc<Cell<bool>>,
}

impl Ticket for RigTicket {
    fn is_cancelled(&self) -> bool {
        self.is_cancelled.get()
    }
}

struct Waiting {
    ask: Ask,
    is_cancelled: Rc<Cell<bool>>,
}

struct Running {
    permit: GrantedPermit,
    lane: usize,
}

struct Flight {
    outgoing: PendingCall,
    reply: LimiterReply,
    arrives: Duration,
}

struct Rig {
    core: GateCore<RigTicket>,
    quota: Quota,
    origin: Instant,
    elapsed: Duration,
    lanes: Vec<Arc<LaneEgress>>,
    waiting: BTreeMap<u32, Waiting>,
    asks: BTreeMap<u32, Ask>,
    running: Vec<Running>,
    flight: Option<Flight>,
    joined: u32,
    round_trip: Duration,
    loses_replies: bool,
    /// Permits of each call that were not handed out yet.
    granted: BTreeMap<u64, u32>,
    /// The requests that could be in each call.
    ready: BTreeMap<u64, BTreeSet<u32>>,
    /// A reply came so late that its permits could not be used: their waiters wait on alone.
    had_late_permits: bool,
    /// The requests that were in each call.
    requested: BTreeMap<u64, BTreeSet<u32>>,
    /// Decisions, releases and settings: what a call at the same instant may follow.
    progress: u64,
}

fn spec(version: i64, max: u32, blocked: Option<usize>) -> Arc<QuotaSpec> {
    let second = Duration::from_secs(1);
    let account = LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("each", 3, second) };
    let in_flight = LimitSpec { scope: Scope::Account, ..LimitSpec::concurrency("in-flight", 3) };
    let rule = |index: usize| AccountRule { account: ACCOUNTS[index].to_owned(), limit: None, rule: Rule::Blocked };
    Arc::new(QuotaSpec {
        quota: ProviderName::new("q").unwrap(),
        version,
        limits: vec![LimitSpec::sliding_log("all", max, second), account, in_flight],
        account_rules: blocked.map(rule).into_iter().collect(),
        pacing: None,
        grant_jitter: None,
        hold_max: Duration::from_secs(2),
        send_budget: Duration::from_secs(1),
        store_down: StoreDown::Wait,
        members: Vec::new(),
        resumed_at: 0,
        handover: Duration::ZERO,
    })
}

impl Rig {
    fn new() -> Self {
        let origin = Instant::now();
        let lane = || LaneEgress::starting_at(WORKERS, 1_000.0, origin);
        Self {
            core: GateCore::new(1, spec(1, 8, None), origin),
            quota: Quota::default(),
            origin,
            elapsed: Duration::ZERO,
            lanes: vec![lane(), lane()],
            waiting: BTreeMap::new(),
            asks: BTreeMap::new(),
            running: Vec::new(),
            flight: None,
            joined: 0,
            round_trip: Duration::from_millis(1),
            loses_replies: false,
            granted: BTreeMap::new(),
            ready: BTreeMap::new(),
            requested: BTreeMap::new(),
            had_late_permits: false,
            progress: 0,
        }
    }

    fn now(&self) -> Instant {
        self.origin + self.elapsed
    }

    fn store_now(&self) -> Micros {
        Micros(START_US + u64::try_from(self.elapsed.as_micros()).unwrap())
    }

    fn apply(&mut self, step: &Step) {
        let now = self.now();
        match step {
            Step::Join(ask) => drop(self.join(ask)),
            Step::Cancel(index) => {
                if let Some(id) = self.waiting.keys().nth(*index % self.waiting.len().max(1)).copied() {
                    self.waiting.remove(&id).unwrap().is_cancelled.set(true);
                }
            }
            Step::Finish { index, is_used } => self.finish(*index, *is_used),
            Step::Pass(time) => self.pass(*time),
            Step::Pause(wait) => self.core.pause(now + *wait),
            Step::Settings { max, blocked } => {
                self.progress += 1;
                let version = self.core.spec().version + 1;
                self.core.apply_spec(spec(version, *max, *blocked), now);
            }
            Step::LoseReplies(loses) => self.loses_replies = *loses,
            Step::RoundTrip(time) => self.round_trip = *time,
        }
        self.settle();
    }

    fn join(&mut self, ask: &Ask) -> u32 {
        self.joined += 1;
        let (id, now, is_cancelled) = (self.joined, self.now(), Rc::new(Cell::new(false)));
        let wait_until = now + ask.patience;
        let egress = EgressRequest { lane: Arc::clone(&self.lanes[ask.lane]), rule: EgressRule::Paced, wait_until };
        let request = AcquireRequest {
            job: Some(job(id)),
            priority: ask.priority,
            account: ask.account.map(Into::into),
            egress: Some(egress),
            ..AcquireRequest::new(ask.cost, ask.kind, wait_until)
        };
        let ticket = RigTicket { id, is_cancelled: Rc::clone(&is_cancelled) };
        let waiter = PermitWaiter::new(request, ticket, now);
        self.asks.insert(id, ask.clone());
        self.waiting.insert(id, Waiting { ask: ask.clone(), is_cancelled });
        self.core.join(waiter, now);
        id
    }

    fn finish(&mut self, index: usize, is_used: bool) {
        if self.running.is_empty() {
            return;
        }
        let Running { permit, lane } = self.running.swap_remove(index % self.running.len());
        self.end(permit, lane, is_used);
    }

    fn end(&mut self, permit: GrantedPermit, lane: usize, is_used: bool) {
        let now = self.now();
        self.progress += 1;
        let release = if is_used {
            permit.window_slot.persisted(None, now);
            permit.slots.used(now)
        } else {
            permit.window_slot.discarded(now);
            permit.slots.unused()
        };
        self.lanes[lane].vacate(!is_used, now);
        self.core.release(release, now);
    }

    /// Lets time pass, from one due instant to the next.
    fn pass(&mut self, time: Duration) {
        let end = self.elapsed + time;
        loop {
            self.settle();
            let now = self.now();
            let deadline = self.core.next_deadline(now);
            let due = match &self.flight {
                Some(flight) => self.origin + flight.arrives,
                None => self.core.next_call_at(now).min(deadline.unwrap_or(now + LONG)),
            };
            assert!(due > now, "nothing is due any more at this instant");
            // Clocks count microseconds.
            let due_us = due.saturating_duration_since(self.origin).as_nanos().div_ceil(1_000);
            self.elapsed = Duration::from_micros(u64::try_from(due_us).unwrap()).min(end);
            if self.elapsed >= end {
                return self.settle();
            }
        }
    }

    /// Does what is due at this instant. It ends after few calls, each of which has a cause.
    fn settle(&mut self) {
        let (mut calls, before) = (0, self.progress);
        loop {
            let now = self.now();
            if self.flight.as_ref().is_some_and(|flight| flight.arrives <= self.elapsed) {
                let flight = self.flight.take().unwrap();
                self.receive(flight);
                continue;
            }
            if self.flight.is_none() {
                self.core.advance(now);
                self.decide();
                if self.core.next_call_at(now) <= now {
                    calls += 1;
                    self.call();
                    assert!(calls <= CALLS_AT_ONCE_MAX + 2 * (self.progress - before), "{calls} calls at one instant");
                    continue;
                }
            }
            break;
        }
        self.decide();
        self.check();
    }

    fn call(&mut self) {
        let now = self.now();
        let is_repeat = self.core.repeats_call(RUN_ID);
        let outgoing = self.core.prepare_call(RUN_ID, now);
        let number = outgoing.call.number;
        assert_eq!(is_repeat, self.granted.contains_key(&number), "a lost call is repeated under its number");
        for request in &outgoing.call.requests {
            let is_blocked = |rule: &AccountRule| request.subjects.iter().any(|one| one.key.ends_with(&rule.account));
            assert!(!outgoing.spec.account_rules.iter().any(is_blocked), "a blocked account is requested");
        }
        let reply = self.quota.call(self.store_now(), &outgoing.spec, &outgoing.call);
        if !is_repeat {
            self.granted.insert(number, u32::try_from(reply.permits()).unwrap());
            self.ready.insert(number, self.core.queue.ready_tickets().map(|ticket| ticket.id).collect());
            self.check_account_order(&outgoing);
        }
        if self.loses_replies {
            return self.core.record_failure(Some(outgoing), "lost".to_owned(), now);
        }
        self.flight = Some(Flight { outgoing, reply, arrives: self.elapsed + self.round_trip });
    }

    fn receive(&mut self, flight: Flight) {
        let facts = StoreFacts {
            exceeds_share: &|_, _| false,
            attestation: &|_| AttestationCheck::Valid { since: Micros(0), undetected_step: Duration::ZERO },
        };
        let now = self.now();
        let effects = self.core.receive_reply(flight.outgoing, &flight.reply, &facts, now);
        self.decide();
        if let Some(query) = effects.cold {
            let (state_epoch, in_flight) = (query.state_epoch, CostByKind::default());
            let data = RebuildData { state_epoch, ended: Vec::new(), in_flight };
            self.core.resolve_cold(query, RebuildStep::Loaded { data, at: now }, now);
        }
        if let Some(request) = effects.history {
            self.core.receive_history(Ok(request.answer_without_uses()), now).unwrap();
        }
        let notices = self.core.take_notices();
        self.had_late_permits |= notices.contains(&Notice::LatePermits);
        assert!(notices.iter().all(|notice| *notice == Notice::LatePermits), "the store is sound: {notices:?}");
    }

    /// Takes the decisions, and checks that each follows from one request, in order.
    fn decide(&mut self) {
        for Decision { ticket, result } in self.core.take_decisions() {
            self.progress += 1;
            match result {
                AcquireResult::Granted(permit) => {
                    let left = self.granted.get_mut(&permit.slots.call).expect("the call was made");
                    *left = left.checked_sub(1).expect("no more permits than the limiter has granted");
                    let Some(Waiting { ask, .. }) = self.waiting.remove(&ticket.id) else {
                        assert!(ticket.is_cancelled(), "one decision for each request");
                        let lane = self.lane_of(&permit);
                        self.end(permit, lane, false);
                        continue;
                    };
                    let GrantedSlots { call, cost, scope, .. } = &permit.slots;
                    assert_eq!((*cost, scope.account.as_deref()), (ask.cost, ask.account));
                    self.check_order(ticket.id, &ask, *call);
                    self.running.push(Running { permit, lane: ask.lane });
                }
                AcquireResult::Refused(_) | AcquireResult::NoWorkerSlot => {
                    let asked = self.waiting.remove(&ticket.id);
                    assert!(asked.is_some() || ticket.is_cancelled(), "one decision for each request");
                }
            }
        }
    }

    fn lane_of(&self, permit: &GrantedPermit) -> usize {
        let egress = permit.egress.as_ref().expect("each request here needs a worker slot");
        self.lanes.iter().position(|lane| Arc::ptr_eq(lane, &egress.lane)).unwrap()
    }

    fn check(&self) {
        for lane in 0..self.lanes.len() {
            let busy = self.running.iter().filter(|running| running.lane == lane).count();
            assert!(busy <= WORKERS as usize, "a worker slot for each permit of the lane");
        }
        // Cancelled waiters are swept once in as many checks as there are waiters.
        let present = self.core.view().waiting;
        assert!(present >= self.waiting.len() && present <= self.joined as usize);
        assert!(self.core.queue.has_exact_indexes());
    }

    /// Ends each permit after 50 ms, while cheap jobs of each account keep coming behind, until these requests have ended.
    fn drain(&mut self, requests: &[u32], time: Duration) {
        let end = self.elapsed + time;
        self.apply(&Step::LoseReplies(false));
        while self.elapsed < end && requests.iter().any(|id| self.waiting.contains_key(id)) {
            for Running { permit, lane } in std::mem::take(&mut self.running) {
                self.end(permit, lane, true);
            }
            for account in ACCOUNTS {
                let (account, patience) = (Some(account), Duration::from_secs(1));
                for lane in 0..self.lanes.len() {
                    self.join(&Ask { account, priority: 0, cost: 1, kind: CallKind::Charge, lane, patience });
                }
            }
            self.pass(Duration::from_millis(50));
        }
    }
}

fn job(id: u32) -> JobId {
    JobId::new(id.to_string()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// No permit without a request, order and priority, worker slots, few calls at one instant, exact indexes.
    #[test]
    fn random_events_keep_the_core_sound(steps in prop::collection::vec(step(millis(0..3_000)), 1..160)) {
        let mut rig = Rig::new();
        for step in &steps {
            rig.apply(step);
        }
        // Nothing is left of what has ended.
        rig.apply(&Step::LoseReplies(false));
        while !rig.running.is_empty() {
            rig.finish(0, true);
        }
        rig.pass(Duration::from_secs(120));
        while !rig.running.is_empty() {
            rig.finish(0, true);
            rig.pass(Duration::from_secs(120));
        }
        prop_assert_eq!((rig.waiting.len(), rig.core.view().waiting), (0, 0));
        prop_assert!(!rig.core.has_unsent());
    }

    /// Who waits patiently is granted, though others keep coming behind.
    #[test]
    fn no_waiter_starves(steps in prop::collection::vec(step(Just(LONG)), 1..100)) {
        let mut rig = Rig::new();
        for step in &steps {
            rig.apply(step);
        }
        rig.apply(&Step::Settings { max: 8, blocked: None });
        let cost: u32 = rig.waiting.values().map(|waiting| waiting.ask.cost).sum();
        let present: Vec<u32> = rig.waiting.keys().copied().collect();
        // Three of an account each second, at worst all of one account, one after the other, behind the permits that
        // were never ended.
        rig.drain(&present, Duration::from_secs(u64::from(cost) * 2 + 20));
        let left: Vec<&u32> = present.iter().filter(|id| rig.waiting.contains_key(id)).collect();
        prop_assert!(left.is_empty(), "{:?}", left);
    }
}

/// After an outage of the store the clocks are not compared yet, so a permit of a limited account starts too late. No
/// waiter gets it, and it returns once, not once for each waiter.
#[test]
fn late_permit_is_requested_once() {
    let mut rig = Rig::new();
    let join = |account| Ask { account, priority: 0, cost: 1, kind: CallKind::Charge, lane: 0, patience: LONG };
    rig.apply(&Step::LoseReplies(true));
    rig.pass(Duration::from_millis(750));
    rig.apply(&Step::RoundTrip(Duration::ZERO));
    for number in 0..60 {
        rig.join(&join(Some(ACCOUNTS[number % ACCOUNTS.len()])));
    }
    rig.apply(&Step::LoseReplies(false));
    let before = rig.core.calls;
    rig.pass(Duration::from_millis(2_600));
    assert!(rig.had_late_permits && rig.core.calls - before <= 6, "{} calls", rig.core.calls - before);
    rig.drain(&[0], Duration::from_secs(10));
    assert!(!rig.waiting.contains_key(&0), "a deferral ends");
}
