//! Simulated deployment: one lane's queue, the worker processes, the limiter and the provider, advanced from event to
//! event.
//!
//! The order of a job's steps is that of `worker::job`. A run ends when nothing can happen any more. That is
//! [`STALL`] beyond the longest window without a request or an outcome; the remaining jobs stay unfinished.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use tokio::time::Instant;

use super::driver::{GateDriver, JobIndex, ProcessIndex, SimulatedProcess, VirtualClock, first_call};
use super::{JobArrivals, Model};
use crate::domain::backoff::RetryPolicy;
use crate::domain::disposition::Transition;
use crate::domain::fair_order::FairOrder;
use crate::domain::outcome::{FinalState, Outcome};
use crate::domain::permit_protocol::CallKind;
use crate::domain::quota::Quota;
use crate::domain::time::{Micros, micros_up};
use crate::limiter::gate::{CountingScope, GrantedSlots, WindowSlot};
use crate::worker::backlog::permit_waits::OngoingWait;
use crate::worker::lane::max_local_wait;

mod backlog;
mod job;

/// Time without progress, beyond the longest window, after which a run ends.
const STALL: Duration = Duration::from_secs(3_600);

/// Progress of one job.
#[derive(Debug, Default)]
pub struct SimulatedJob {
    pub first_start_us: Option<u64>,
    pub end: Option<(u64, JobEnd)>,
    pub late_for_deadline: bool,
    process: ProcessIndex,
    has_worker_slot: bool,
    /// The job sent nothing with its worker slot, so the egress rate is refunded.
    is_unsent: bool,
    delivered_us: u64,
    /// Claimed from the backlog; it has no message.
    is_claimed: bool,
    /// It counts among the claimed jobs that wait for their permits.
    is_ahead: bool,
    /// Its wait at the gate, and since when.
    wait: Option<OngoingWait>,
    attempts: u32,
    requests: u32,
    unknown_us: Option<u64>,
    first_sent_us: Option<u64>,
    /// Instant at which the ledger recorded the job.
    recorded_us: Option<u64>,
    granted: Option<Box<SimulatedPermit>>,
    answer: Option<Outcome>,
    next: Option<JobStep>,
}

/// A granted permit, until it is released.
#[derive(Debug)]
struct SimulatedPermit {
    use_before: Instant,
    /// Until the attempt is recorded.
    window_slot: Option<WindowSlot>,
    slots: GrantedSlots,
}

/// Recorded step of a job: a [`Transition`] without its texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JobStep {
    Retry {
        wait_us: u64,
    },
    /// Waits in the backlog; its flow may be blocked until then.
    Backlog {
        blocked_until_us: Option<u64>,
    },
    Finalize(JobEnd),
}

impl From<Transition> for JobStep {
    fn from(next: Transition) -> Self {
        match next {
            Transition::Retry { after, .. } => Self::Retry { wait_us: micros_up(after) },
            Transition::Finalize { state, .. } => Self::Finalize(JobEnd::Final(state)),
            Transition::SucceedInPart(_) => Self::Finalize(JobEnd::Final(FinalState::Succeeded)),
        }
    }
}

/// End of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobEnd {
    Final(FinalState),
    /// An account rule of the provider blocks its account.
    Blocked,
}

/// One request as the provider counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderUse {
    pub at_us: u64,
    /// When the provider has finished it.
    pub ended_us: u64,
    pub cost: u16,
    pub account: Option<u32>,
}

/// Record of a run.
#[derive(Debug, Default)]
pub struct RunRecord {
    pub jobs: Vec<SimulatedJob>,
    /// Sorted by their starts, not by their arrival at the provider.
    pub uses: Vec<ProviderUse>,
    pub limiter_calls: u64,
    pub delayed: u64,
    pub timeouts: u64,
    pub faults: u64,
    pub late_permits: u64,
    /// Sum of the holds of all requests with a response.
    pub held_us: u64,
    pub answers: u64,
}

pub struct Simulation<'a> {
    model: &'a Model,
    arrivals: &'a JobArrivals,
    rng: &'a mut StdRng,
    policy: RetryPolicy,
    quota: Quota,
    agenda: EventQueue,
    queue: VecDeque<JobIndex>,
    /// Jobs that wait in the ledger alone.
    backlog: FairOrder<u32, JobIndex>,
    processes: Vec<SimulatedProcess>,
    next_process: usize,
    arrived: usize,
    ended: usize,
    clock: VirtualClock,
    /// Names of the accounts, as permits are counted for; `None`: a rule blocks the account.
    accounts: Vec<Option<Arc<str>>>,
    commit_us: u64,
    commit_of_last_us: u64,
    max_hold_us: u64,
    progress_us: u64,
    record: RunRecord,
}

impl<'a> Simulation<'a> {
    pub fn new(model: &'a Model, arrivals: &'a JobArrivals, rng: &'a mut StdRng) -> Self {
        let (clock, spec) = (VirtualClock::new(model.start_us), Arc::new(model.spec.clone()));
        let mut quota = Quota::default();
        if !model.cold {
            quota.call(Micros(model.start_us), &model.spec, &first_call(model.start_us));
        }
        let mut process = |index| {
            let incarnation = u64::from(index) + 1;
            let mut gate = GateDriver::new(clock, incarnation, &spec, &model.provider, model.start_us);
            if !model.cold {
                gate.warm_up(&mut quota, model.start_us);
            }
            SimulatedProcess::new(clock, &model.provider, gate, model.start_us)
        };
        // The simulation makes no look-ups.
        let may_charge = |account: &Arc<str>| {
            let scope = CountingScope { kind: CallKind::Charge, account: Some(Arc::clone(account)), reference: None };
            scope.subjects(&model.spec).is_ok()
        };
        let accounts = arrivals.accounts().iter().map(|account| Some(Arc::from(account.as_str())).filter(may_charge));
        Self {
            policy: model.retry_policy(),
            processes: (0..model.processes).map(&mut process).collect(),
            accounts: accounts.collect(),
            quota,
            agenda: EventQueue::default(),
            queue: VecDeque::new(),
            backlog: FairOrder::default(),
            next_process: 0,
            arrived: 0,
            ended: 0,
            clock,
            commit_us: micros_up(model.commit),
            commit_of_last_us: micros_up(model.commit_of_last.unwrap_or(model.commit)),
            max_hold_us: micros_up(max_local_wait(&model.provider)),
            progress_us: model.start_us,
            record: RunRecord {
                jobs: std::iter::repeat_with(SimulatedJob::default).take(arrivals.jobs().len()).collect(),
                ..RunRecord::default()
            },
            model,
            arrivals,
            rng,
        }
    }

    pub fn run(mut self) -> RunRecord {
        let stall_us = micros_up(STALL) + self.model.spec.longest_window_us();
        self.arrive_next();
        while let Some((now_us, event)) = self.agenda.next() {
            let all_arrived = self.arrived > self.arrivals.jobs().len();
            if all_arrived && (now_us > self.progress_us + stall_us || self.ended == self.arrivals.jobs().len()) {
                break;
            }
            self.handle(now_us, event);
        }
        self.record.limiter_calls = self.processes.iter().map(|process| process.gate.calls).sum();
        self.record
    }

    fn handle(&mut self, now_us: u64, event: Event) {
        match event {
            Event::Arrive => {
                self.queue.push_back(self.arrived - 1);
                self.progress_us = now_us;
                self.arrive_next();
                self.deliver(now_us);
            }
            Event::Wake(job) => {
                self.put_back(now_us, job, None);
                self.dispatch(now_us, self.record.jobs[job].process);
            }
            Event::ResumeIntake(_) => self.deliver(now_us),
            Event::Recorded(job) => self.recorded(now_us, job),
            Event::Dispatch(process) => self.dispatcher_woken(now_us, process),
            Event::Claimed(job) => self.claimed(now_us, job),
            Event::GateWake(process) => self.gate_woken(now_us, process),
            Event::LimiterCall(process) => self.limiter_called(now_us, process),
            Event::LimiterReply(process) => self.limiter_replied(now_us, process),
            Event::Persisted(job) => self.persisted(now_us, job),
            Event::Begin(job) => self.begin(now_us, job),
            Event::Answer(job) => self.answer(now_us, job),
            Event::Committed(job) => self.committed(now_us, job),
        }
    }

    fn arrive_next(&mut self) {
        if let Some(job) = self.arrivals.jobs().get(self.arrived) {
            self.agenda.at(self.model.start_us + job.at_us, Event::Arrive);
        }
        self.arrived += 1;
    }

    /// One commit of a process.
    fn commit_us(&self, process: usize) -> u64 {
        if process + 1 == self.processes.len() { self.commit_of_last_us } else { self.commit_us }
    }

    fn commit(&mut self, now_us: u64, job: JobIndex, next: JobStep) {
        self.record.jobs[job].next = Some(next);
        let committed_us = now_us + self.commit_us(self.record.jobs[job].process);
        self.agenda.at(committed_us, Event::Committed(job));
    }

    fn committed(&mut self, now_us: u64, job: JobIndex) {
        let state = &mut self.record.jobs[job];
        match state.next.take() {
            Some(JobStep::Retry { wait_us }) => {
                self.record.delayed += 1;
                self.agenda.at(now_us + wait_us, Event::Wake(job));
            }
            Some(JobStep::Backlog { blocked_until_us }) => {
                self.put_back(now_us, job, blocked_until_us);
            }
            Some(JobStep::Finalize(end)) => {
                state.end = Some((now_us, end));
                self.ended += 1;
                self.progress_us = now_us;
                // One in review is undecided, and holds those behind it.
                if end != JobEnd::Final(FinalState::Review) {
                    self.end_in_order(job);
                }
            }
            None => {}
        }
        self.deactivate(now_us, job);
    }

    /// Releases the job from its process, so that its worker slot and prefetch serve the next job.
    fn deactivate(&mut self, now_us: u64, job: JobIndex) {
        self.end_wait(job, None);
        let process = self.record.jobs[job].process;
        self.processes[process].dispatcher.waits.leave(&job);
        let state = &mut self.record.jobs[job];
        let is_claimed = std::mem::take(&mut state.is_claimed);
        let (has_slot, is_unsent) = (std::mem::take(&mut state.has_worker_slot), std::mem::take(&mut state.is_unsent));
        if has_slot {
            let process = &mut self.processes[process];
            process.gate.egress().vacate(is_unsent, self.clock.instant(now_us));
            process.dispatcher.slot_is_free();
        }
        if !is_claimed {
            self.processes[process].end_message();
        }
        self.advance_gate(now_us, process);
        self.deliver(now_us);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The next job arrives.
    Arrive,
    /// A sleeping job returns to the backlog.
    Wake(JobIndex),
    /// A job that asks for its permit at once is recorded.
    Claimed(JobIndex),
    /// The lane's pause may be over.
    ResumeIntake(ProcessIndex),
    GateWake(ProcessIndex),
    /// A job is recorded in the backlog.
    Recorded(JobIndex),
    /// The dispatcher of a process looks at the backlog.
    Dispatch(ProcessIndex),
    /// A call reaches the limiter.
    LimiterCall(ProcessIndex),
    /// A reply reaches the gate.
    LimiterReply(ProcessIndex),
    /// The attempt is recorded, before its start.
    Persisted(JobIndex),
    /// The attempt is recorded and its start has come.
    Begin(JobIndex),
    /// The response was read, or its timeout is over.
    Answer(JobIndex),
    /// The result is recorded.
    Committed(JobIndex),
}

#[derive(Debug, Default)]
struct EventQueue {
    heap: BinaryHeap<Reverse<(u64, u64, Event)>>,
    made: u64,
}

impl EventQueue {
    pub fn at(&mut self, at_us: u64, event: Event) {
        self.made += 1;
        self.heap.push(Reverse((at_us, self.made, event)));
    }

    pub fn next(&mut self) -> Option<(u64, Event)> {
        self.heap.pop().map(|Reverse((at_us, _, event))| (at_us, event))
    }
}
