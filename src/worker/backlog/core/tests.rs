//! Property tests of the dispatcher's core: random events against the order in memory, in virtual time.
//!
//! Two processes share a lane's backlog. After every event each does its steps until it waits, as a worker does.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::domain::fair_order::{FairOrder, FairReturn, WaitingJob};

const BOUNDS: AheadBounds = AheadBounds { all: 12, of_one_flow: 4, release_waiters: 0 };
const FACTS: LaneFacts = LaneFacts {
    bounds: BOUNDS,
    paused_until: None,
    sends_lookups: false,
    can_start: false,
    order: JobOrder::None,
    cost_bound: None,
};
const FLOW: Flow<u8> = Flow { class: FlowClass::LAST, account: None };
const PROCESSES: usize = 2;
const ACCOUNTS: u8 = 4;
const PRIORITIES: [u8; 3] = [0, 5, 9];
/// The longest block, pause and hold of these tests.
const LONGEST: Duration = Duration::from_secs(20);

/// What happens; processes and jobs are chosen by these numbers, modulo how many there are.
#[derive(Clone, Debug)]
enum Happening {
    Record { process: usize, account: u8, priority: usize },
    Grant { job: usize },
    Return { job: usize, blocked_for: Option<Duration> },
    Pause { process: usize, time: Duration },
    Hold { process: usize, time: Duration },
    EndBlocks,
    LedgerFails(bool),
    LaneIsBusy { process: usize },
    Pass(Duration),
}

fn time() -> impl Strategy<Value = Duration> {
    (0..u64::try_from(LONGEST.as_millis()).unwrap()).prop_map(Duration::from_millis)
}

fn happening() -> impl Strategy<Value = Happening> {
    let short = (0..200_u64).prop_map(Duration::from_millis);
    prop_oneof![
        12 => (0..PROCESSES, 0..ACCOUNTS, 0..PRIORITIES.len())
            .prop_map(|(process, account, priority)| Happening::Record { process, account, priority }),
        6 => any::<usize>().prop_map(|job| Happening::Grant { job }),
        3 => (any::<usize>(), prop::option::of(time())).prop_map(|(job, blocked_for)| Happening::Return { job, blocked_for }),
        1 => (0..PROCESSES, time()).prop_map(|(process, time)| Happening::Pause { process, time }),
        1 => (0..PROCESSES, time()).prop_map(|(process, time)| Happening::Hold { process, time }),
        1 => Just(Happening::EndBlocks),
        1 => any::<bool>().prop_map(Happening::LedgerFails),
        1 => (0..PROCESSES).prop_map(|process| Happening::LaneIsBusy { process }),
        4 => short.prop_map(Happening::Pass),
        1 => time().prop_map(Happening::Pass),
    ]
}

struct Process {
    core: DispatchCore<u8, u64>,
    paused_until: Option<Instant>,
    lane_is_busy: bool,
    wakes_at: Instant,
}

#[derive(Clone, Copy)]
struct AheadJob {
    process: usize,
    flow: Flow<u8>,
}

struct Rig {
    bounds: AheadBounds,
    can_start: bool,
    origin: Instant,
    now: Instant,
    ledger: FairOrder<u8, u64>,
    ledger_fails: bool,
    processes: Vec<Process>,
    /// Claimed jobs that wait for their permits.
    ahead: BTreeMap<u64, AheadJob>,
    recorded: u64,
    granted: u64,
    /// All steps but waits.
    steps: u64,
}

impl Rig {
    fn new() -> Self {
        let now = Instant::now();
        let process =
            || Process { core: DispatchCore::new(now), paused_until: None, lane_is_busy: false, wakes_at: now };
        Self {
            bounds: BOUNDS,
            can_start: false,
            origin: now,
            now,
            ledger: FairOrder::default(),
            ledger_fails: false,
            processes: (0..PROCESSES).map(|_| process()).collect(),
            ahead: BTreeMap::new(),
            recorded: 0,
            granted: 0,
            steps: 0,
        }
    }

    fn apply(&mut self, happening: &Happening) {
        match *happening {
            Happening::Record { process, account, priority } => {
                let flow = Flow { class: FlowClass::of_priority(PRIORITIES[priority]), account: Some(account) };
                self.record(process, flow);
            }
            Happening::Grant { job } => drop(self.take_ahead(job).inspect(|_| self.granted += 1)),
            Happening::Return { job, blocked_for } => self.give_back(job, blocked_for),
            Happening::Pause { process, time } => self.processes[process].paused_until = Some(self.now + time),
            Happening::Hold { process, time } => self.processes[process].core.hold_until(self.now + time),
            // A row that has changed reaches all processes.
            Happening::EndBlocks => self.processes.iter_mut().for_each(|process| process.core.end_blocks()),
            Happening::LedgerFails(fails) => self.ledger_fails = fails,
            Happening::LaneIsBusy { process } => self.processes[process].lane_is_busy = true,
            Happening::Pass(time) => self.pass(time),
        }
        self.settle();
    }

    fn record(&mut self, process: usize, flow: Flow<u8>) {
        let number = self.recorded;
        self.recorded += 1;
        self.ledger.add(flow, 1, WaitingJob { seq: number, cost: 1, job: number });
        self.processes[process].core.record_new(&flow, self.now);
    }

    fn take_ahead(&mut self, index: usize) -> Option<(u64, AheadJob)> {
        let number = *self.ahead.keys().nth(index % self.ahead.len().max(1))?;
        let job = self.ahead.remove(&number)?;
        self.processes[job.process].core.release_ahead(&job.flow);
        Some((number, job))
    }

    fn give_back(&mut self, index: usize, blocked_for: Option<Duration>) {
        let Some((number, AheadJob { process, flow })) = self.take_ahead(index) else { return };
        let blocked_until = blocked_for.map(|time| self.now - self.origin + time);
        let how = FairReturn { was_claimed: true, blocked_until };
        self.ledger.put_back(flow, 1, WaitingJob { seq: number, cost: 1, job: number }, how);
        let blocked_until = blocked_until.map(|until| self.origin + until);
        self.processes[process].core.record_return(flow, blocked_until, self.now);
    }

    /// Every process does what is due at this instant. It ends after few steps, each of which has a cause.
    fn settle(&mut self) {
        for process in 0..PROCESSES {
            let (before, claimed) = (self.steps, self.ahead.len());
            loop {
                let (now, bounds, can_start) = (self.now, self.bounds, self.can_start);
                let paused_until = self.processes[process].paused_until;
                let facts = || LaneFacts { bounds, paused_until, can_start, ..FACTS };
                let step = self.processes[process].core.next_step(now, facts);
                if let DispatchStep::Wait(until) = step {
                    assert!(until > now, "a wait ends later");
                    self.processes[process].wakes_at = until;
                    break;
                }
                self.steps += 1;
                self.perform(process, &step);
                let taken = (self.ahead.len() - claimed) as u64;
                assert!(self.steps - before <= 4 + taken, "{step:?} again and again");
            }
        }
    }

    fn perform(&mut self, process: usize, step: &DispatchStep<u8>) {
        let now = self.now;
        if self.ledger_fails {
            return self.processes[process].core.failed(step, now);
        }
        let since = now - self.origin;
        match step {
            DispatchStep::EndBlocks => self.ledger.wake(Duration::MAX),
            DispatchStep::Look => {
                let left = |until: Option<Duration>| until.map(|until| until.saturating_sub(since));
                let flows = self.ledger.waiting_flows();
                let flows = flows.map(|(flow, until)| SeenFlow { flow, blocked_for: left(until) }).collect();
                self.processes[process].core.looked(now, flows, now);
            }
            DispatchStep::Claim(_) if std::mem::take(&mut self.processes[process].lane_is_busy) => {
                self.processes[process].core.lane_was_busy(0.5, now);
            }
            DispatchStep::Claim(claim) => {
                assert!(self.processes[process].paused_until.is_none_or(|until| until <= now), "a paused lane claims");
                let jobs = self.ledger.claim(since, claim);
                let wake_at = self.ledger.next_wake().map(|wake| self.origin + wake);
                let flows = jobs.iter().map(|(flow, _)| *flow);
                self.processes[process].core.claimed(claim, flows, wake_at, now);
                self.ahead.extend(jobs.into_iter().map(|(flow, job)| (job.job, AheadJob { process, flow })));
                self.check_claim(process, claim);
            }
            DispatchStep::Wait(_) => {}
        }
    }

    fn check_claim(&self, process: usize, claim: &FairClaim<u8>) {
        let ahead = || self.ahead.values().filter(|job| job.process == process).map(|job| job.flow);
        assert_eq!(ahead().count(), self.processes[process].core.ahead.len() as usize);
        let until = ahead().filter(|flow| flow.class <= claim.class_max).count();
        assert!(until <= self.bounds.all as usize, "more jobs ahead than the lane starts soon");
        for flow in ahead() {
            let of_flow = ahead().filter(|other| *other == flow).count();
            assert!(of_flow < 2 * self.bounds.of_one_flow as usize, "{flow:?} takes the lane's places");
        }
    }

    /// Lets time pass, from one due instant to the next.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            self.settle();
            let wakes_at = self.processes.iter().map(|process| process.wakes_at).min().unwrap_or(end);
            if wakes_at >= end {
                self.now = end;
                return self.settle();
            }
            self.now = wakes_at;
        }
    }

    /// Grants every claimed job, until none is left or this time has passed.
    fn drain(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end && self.granted < self.recorded {
            while !self.ahead.is_empty() {
                self.apply(&Happening::Grant { job: 0 });
            }
            self.pass(Duration::from_millis(5));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Few steps for each event, jobs within their bounds; and whatever happened, each job is claimed in the end, after
    /// which a dispatcher only looks from time to time, and remembers nothing.
    #[test]
    fn random_events_keep_the_dispatcher_sound(happenings in prop::collection::vec(happening(), 1..200)) {
        let mut rig = Rig::new();
        for happening in &happenings {
            rig.apply(happening);
        }
        rig.apply(&Happening::LedgerFails(false));
        // Claims of few jobs are 50 ms apart; a flow that another process has filled is seen within 5 s.
        rig.drain(LONGEST + Duration::from_secs(8) + Duration::from_millis(50) * u32::try_from(rig.recorded).unwrap());
        prop_assert_eq!((rig.granted, rig.ledger.len()), (rig.recorded, 0));

        rig.pass(IDLE_INTERVAL * 2);
        let before = rig.steps;
        rig.pass(IDLE_INTERVAL * 20);
        prop_assert!(rig.steps - before <= 21 * PROCESSES as u64, "{} steps of an idle lane", rig.steps - before);
        for process in &rig.processes {
            prop_assert_eq!((process.core.ahead.len(), process.core.flows.is_empty()), (0, true));
        }
    }

    /// An urgent job that a process has recorded is claimed within two claims of few jobs, however full its lane is.
    #[test]
    fn urgent_job_is_claimed_soon(happenings in prop::collection::vec(happening(), 1..100)) {
        let mut rig = Rig::new();
        for happening in &happenings {
            // Neither pauses nor faults, and no urgent jobs before this one.
            match happening {
                Happening::Record { process, account, .. } => {
                    rig.apply(&Happening::Record { process: *process, account: *account, priority: 0 });
                }
                Happening::Grant { .. } | Happening::Return { .. } | Happening::Pass(_) => rig.apply(happening),
                _ => {}
            }
        }
        let urgent = rig.recorded;
        rig.apply(&Happening::Record { process: 0, account: 0, priority: 2 });
        rig.pass(SMALL_CLAIM_PAUSE + CLAIM_PAUSE);
        prop_assert!(rig.ahead.contains_key(&urgent));
    }
}

#[test]
fn lane_with_more_jobs_than_room_is_limited() {
    let now = Instant::now();
    let mut rig = Rig::new();
    // Each flow takes its part of the room.
    (0..BOUNDS.all).for_each(|_| rig.record(0, FLOW));
    rig.settle();
    let is_limited = |rig: &Rig| rig.processes[0].core.is_limited(now, || 100, &GateView::default(), || true);
    assert!(!is_limited(&rig), "the claim took as many as one flow may have");
    (0..ACCOUNTS).for_each(|account| (0..4).for_each(|_| rig.record(0, Flow { account: Some(account), ..FLOW })));
    rig.pass(SMALL_CLAIM_PAUSE);
    assert!(is_limited(&rig));
    rig.drain(Duration::from_secs(5));
    rig.pass(IDLE_INTERVAL);
    assert!(!is_limited(&rig) && rig.ledger.is_empty());
}

#[test]
fn one_claim_follows_the_other_while_there_is_room() {
    let jobs = 2 * CLAIM_MAX + 50;
    let mut rig = Rig { bounds: AheadBounds { all: jobs, of_one_flow: jobs, release_waiters: 0 }, ..Rig::new() };
    (0..jobs).for_each(|_| rig.record(0, FLOW));
    rig.settle();
    assert_eq!(rig.ahead.len(), jobs as usize, "at the same instant");
}

/// A job that got no worker slot is not claimed again at once: that would be done over and over.
#[test]
fn free_slot_ends_the_wait_for_one() {
    for ends in ["released", "seen", "over"] {
        let mut rig = Rig::new();
        rig.pass(Duration::from_secs(1));
        let until = rig.now + LONGEST;
        rig.processes.iter_mut().for_each(|process| process.core.await_slot(until));
        rig.record(0, FLOW);
        rig.pass(LONGEST / 2);
        assert!(rig.ahead.is_empty());
        match ends {
            "released" => assert!(rig.processes[0].core.slot_is_free() && !rig.processes[0].core.slot_is_free()),
            "seen" => rig.can_start = true,
            _ => rig.pass(LONGEST),
        }
        rig.settle();
        assert_eq!(rig.ahead.len(), 1);
    }
}

/// Where slots are short, a lane claims a quarter of its room ahead, and at least a few.
#[test]
fn few_jobs_are_claimed_ahead_while_slots_are_short() {
    for (room, claimed) in [(12, 12), (40, AHEAD_MIN), (100, 25)] {
        let mut rig = Rig { bounds: AheadBounds { all: room, of_one_flow: room, release_waiters: 0 }, ..Rig::new() };
        rig.pass(Duration::from_secs(1));
        let now = rig.now;
        rig.processes[0].core.await_slot(now);
        rig.processes[1].core.await_slot(now + SLOTS_SHORT / 2);
        (0..room).for_each(|_| rig.record(0, FLOW));
        rig.pass(Duration::from_millis(50));
        assert_eq!(rig.ahead.len(), claimed as usize, "of room for {room}");
        rig.pass(SLOTS_SHORT);
        assert_eq!(rig.ahead.len(), room as usize, "of room for {room}, later");
    }
}

#[test]
fn other_process_claims_what_a_paused_one_has_recorded() {
    let mut rig = Rig::new();
    rig.pass(Duration::from_secs(1));
    rig.apply(&Happening::Pause { process: 0, time: LONGEST });
    rig.record(0, FLOW);
    rig.pass(IDLE_INTERVAL);
    assert_eq!(rig.ahead.values().map(|job| job.process).collect::<Vec<_>>(), [1]);
}

#[test]
fn failed_claim_is_repeated_after_a_pause() {
    let mut rig = Rig::new();
    rig.pass(Duration::from_millis(100));
    rig.ledger_fails = true;
    rig.record(0, FLOW);
    rig.pass(Duration::from_millis(100));
    rig.ledger_fails = false;
    rig.pass(PAUSED_INTERVAL);
    assert_eq!(rig.ahead.len(), 1, "long before the next look");
}

#[test]
fn messages_do_not_repeat_a_failed_claim() {
    let mut rig = Rig::new();
    rig.pass(Duration::from_millis(100));
    rig.ledger_fails = true;
    rig.record(0, FLOW);
    rig.settle();
    let before = rig.steps;
    for _ in 0..9 {
        rig.record(0, FLOW);
        rig.pass(Duration::from_millis(100));
    }
    assert_eq!(rig.steps, before);
}

const HOUR: Duration = Duration::from_secs(3_600);

fn flow(account: u32) -> Flow<u32> {
    Flow { class: FlowClass::LAST, account: Some(account) }
}

fn seen(account: u32, blocked_for: Option<Duration>) -> SeenFlow<u32> {
    SeenFlow { flow: flow(account), blocked_for }
}

#[test]
fn refresh_keeps_what_came_later() {
    let (mut flows, began) = (KnownFlows::default(), Instant::now());
    let [old, new, stored] = [1, 2, 3].map(flow);
    flows.record_return(old, None, began);
    let read_at = began + Duration::from_millis(1);
    flows.record_return(new, None, read_at);
    flows.refresh(read_at, vec![seen(3, None)]);
    assert_eq!([old, new, stored].map(|flow| flows.contains(&flow)), [false, true, true]);
    flows.refresh(read_at + Duration::from_millis(1), Vec::new());
    assert!(flows.is_empty());
}

#[test]
fn blocked_flow_needs_no_claim() {
    let (mut flows, now) = (KnownFlows::default(), Instant::now());
    let [blocked, free] = [1, 2].map(flow);
    flows.refresh(now, vec![seen(1, Some(HOUR)), seen(2, None)]);
    assert_eq!([blocked, free].map(|flow| flows.record_new(&flow, now)), [false, true]);
    flows.record_return(free, Some(now + HOUR), now);
    assert!(!flows.record_new(&free, now));
    assert!(flows.record_new(&free, now + HOUR) && flows.record_new(&blocked, now + HOUR));
}

#[test]
fn first_class_is_that_of_a_free_flow() {
    let (mut flows, now) = (KnownFlows::<u32>::default(), Instant::now());
    assert_eq!(flows.first_class(now), None);
    let of_priority = |priority| Flow { class: FlowClass::of_priority(priority), account: None };
    flows.record_new(&of_priority(0), now);
    assert_eq!(flows.first_class(now), Some(FlowClass::LAST));
    flows.record_return(of_priority(9), Some(now + HOUR), now);
    flows.record_new(&of_priority(5), now);
    assert_eq!(flows.first_class(now), Some(FlowClass::of_priority(5)), "a blocked flow has no turn");
    assert_eq!(flows.first_class(now + HOUR), Some(FlowClass::of_priority(9)));
}

#[test]
fn known_flows_are_bounded() {
    let (mut flows, now) = (KnownFlows::default(), Instant::now());
    for number in 0..=KNOWN_FLOWS_MAX {
        flows.record_return(flow(number), None, now);
    }
    assert_eq!(flows.0.len(), KNOWN_FLOWS_MAX as usize);
    flows.record_return(flow(0), None, now);
    assert!(flows.contains(&flow(0)) && !flows.contains(&flow(KNOWN_FLOWS_MAX)));
}
