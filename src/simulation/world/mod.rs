//! Simulated deployment: one lane's queue, the worker processes, the limiter and the provider, advanced from event to
//! event.
//!
//! The order of a job's steps is that of `worker::execute`. A run ends when nothing can happen any more. That is
//! [`STALL`] beyond the longest window without a request or an outcome; the remaining jobs stay unfinished.

use std::collections::VecDeque;
use std::time::Duration;

use rand::rngs::StdRng;

use super::event::{Event, EventQueue, JobIndex, ProcessIndex};
use super::gate::{GateDecision, SimulatedPermit};
use super::limiter_call::{AccountSubjects, warm_up_call};
use super::process::SimulatedProcess;
use super::windows::ProviderUse;
use super::{JobArrivals, Model};
use crate::domain::disposition::{OVERSIZED_WAIT, RetryPolicy, Transition};
use crate::domain::outcome::FinalState;
use crate::domain::permit_protocol::CallKind;
use crate::domain::quota::Quota;
use crate::domain::time::{Micros, micros_up};
use crate::queue::{DELAY_STEPS, delay_step};
use crate::worker::lane::max_local_wait;

mod intake;
mod request;

/// Time without progress, beyond the longest window, after which a run ends.
const STALL: Duration = Duration::from_secs(3_600);

/// Progress of one job.
#[derive(Clone, Debug, Default)]
pub(super) struct SimulatedJob {
    pub first_start_us: Option<u64>,
    pub end: Option<(u64, JobEnd)>,
    pub late_for_deadline: bool,
    process: ProcessIndex,
    has_worker_slot: bool,
    /// The job sent nothing with its worker slot, so the egress rate is refunded.
    is_unsent: bool,
    deliveries: u32,
    delivered_us: u64,
    wake_us: u64,
    attempts: u32,
    requests: u32,
    unknown_us: Option<u64>,
    first_sent_us: Option<u64>,
    /// Instant at which the ledger recorded the job.
    recorded_us: Option<u64>,
    granted: Option<Box<SimulatedPermit>>,
    answer: Option<SimulatedAnswer>,
    next: Option<JobStep>,
}

/// The provider's response to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SimulatedAnswer {
    Accepted,
    Failed,
    None,
}

/// Recorded step of a job: a [`Transition`] without its texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JobStep {
    Retry { wait_us: u64 },
    Finalize(JobEnd),
}

impl From<Transition> for JobStep {
    fn from(next: Transition) -> Self {
        match next {
            Transition::Retry { after, .. } => Self::Retry { wait_us: micros_up(after) },
            Transition::Finalize { state, .. } => Self::Finalize(JobEnd::Final(state)),
        }
    }
}

/// End of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobEnd {
    Final(FinalState),
    /// An account rule of the provider blocks its account.
    Blocked,
}

/// Record of a run.
#[derive(Debug, Default)]
pub(super) struct RunRecord {
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

pub(super) struct Simulation<'a> {
    model: &'a Model,
    arrivals: &'a JobArrivals,
    rng: &'a mut StdRng,
    policy: RetryPolicy,
    quota: Quota,
    agenda: EventQueue,
    queue: VecDeque<JobIndex>,
    processes: Vec<SimulatedProcess>,
    next_process: usize,
    arrived: usize,
    account_subjects: Vec<Option<AccountSubjects>>,
    cost_max: u32,
    commit_us: u64,
    max_hold_us: u64,
    decisions: Vec<GateDecision>,
    progress_us: u64,
    record: RunRecord,
}

/// An index in events, as an index into vectors.
pub(super) fn as_index(index: u32) -> usize {
    index as usize
}

impl<'a> Simulation<'a> {
    pub fn new(model: &'a Model, arrivals: &'a JobArrivals, rng: &'a mut StdRng) -> Self {
        let account_subjects = arrivals.accounts().iter().map(|account| {
            // The simulation makes no look-ups.
            let subjects = model.spec.subjects(Some(account), None).ok();
            let subjects = subjects.filter(|_| !model.spec.refuses_charges_of(Some(account)))?;
            let cost_max = model.spec.cost_max(CallKind::Charge, &subjects);
            Some(AccountSubjects { subjects, cost_max })
        });
        let process = |index| SimulatedProcess::new(&model.provider, u64::from(index) + 1, model.start_us);
        let mut quota = Quota::default();
        if !model.cold {
            quota.call(Micros(model.start_us), &model.spec, &warm_up_call(model.start_us));
        }
        Self {
            policy: model.retry_policy(),
            quota,
            agenda: EventQueue::default(),
            queue: VecDeque::new(),
            processes: (0..model.processes).map(process).collect(),
            next_process: 0,
            arrived: 0,
            account_subjects: account_subjects.collect(),
            cost_max: model.spec.cost_max(CallKind::Charge, &[]),
            commit_us: micros_up(model.commit),
            max_hold_us: micros_up(max_local_wait(&model.provider)),
            decisions: Vec::new(),
            progress_us: model.start_us,
            record: RunRecord { jobs: vec![SimulatedJob::default(); arrivals.jobs().len()], ..RunRecord::default() },
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
            if all_arrived && now_us > self.progress_us + stall_us {
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
                let job = JobIndex::try_from(self.arrived - 1).unwrap_or(JobIndex::MAX);
                self.queue.push_back(job);
                self.progress_us = now_us;
                self.arrive_next();
                self.deliver(now_us);
            }
            Event::Return(job) => {
                self.queue.push_back(job);
                self.deliver(now_us);
            }
            Event::ResumeIntake(_) => self.deliver(now_us),
            Event::Claimed(job) => self.claimed(now_us, job),
            Event::WaitOver(job) => self.enter(now_us, job),
            Event::EgressTimeout(job, delivery) => self.egress_timeout(now_us, job, delivery),
            Event::GateWake(process) => self.gate_woken(now_us, process),
            Event::LimiterCall(process) => {
                let (quota, spec) = (&mut self.quota, &self.model.spec);
                self.processes[as_index(process)].gate.reach(|call| quota.call(Micros(now_us), spec, call));
                let round_trip_us = micros_up(self.model.round_trip);
                self.agenda.at(now_us + round_trip_us / 2, Event::LimiterReply(process));
            }
            Event::LimiterReply(process) => {
                let spec = &self.model.spec;
                self.processes[as_index(process)].gate.replied(now_us, spec, &mut self.decisions);
                self.apply_decisions(now_us, process);
            }
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

    /// Applies the gate's decisions, and schedules its next wake-up.
    fn apply_decisions(&mut self, now_us: u64, process: ProcessIndex) {
        for decision in std::mem::take(&mut self.decisions) {
            match decision {
                GateDecision::Granted(job, granted) => self.granted(now_us, job, granted),
                GateDecision::Refused { job, wait_us, of_its_own } => {
                    if !of_its_own {
                        self.pause_intake(now_us, process, wait_us);
                    }
                    self.commit(now_us, job, JobStep::Retry { wait_us });
                }
                GateDecision::Oversized(job) => {
                    self.commit(now_us, job, JobStep::Retry { wait_us: micros_up(OVERSIZED_WAIT) })
                }
            }
        }
        let gate = &mut self.processes[as_index(process)].gate;
        if let Some(next_us) = gate.next_call_at(now_us).map(|next_us| next_us.max(now_us))
            && gate.woken_at_us.is_none_or(|woken_us| next_us < woken_us)
        {
            gate.woken_at_us = Some(next_us);
            self.agenda.at(next_us, Event::GateWake(process));
        }
    }

    fn gate_woken(&mut self, now_us: u64, process: ProcessIndex) {
        let gate = &mut self.processes[as_index(process)].gate;
        gate.woken_at_us.take_if(|woken_us| *woken_us <= now_us);
        if gate.next_call_at(now_us).is_some_and(|next_us| next_us <= now_us) {
            gate.depart(now_us, &self.account_subjects);
            let there_us = micros_up(self.model.round_trip).div_ceil(2);
            self.agenda.at(now_us + there_us, Event::LimiterCall(process));
        } else {
            self.apply_decisions(now_us, process);
        }
    }

    fn commit(&mut self, now_us: u64, job: JobIndex, next: JobStep) {
        self.record.jobs[as_index(job)].next = Some(next);
        self.agenda.at(now_us + self.commit_us, Event::Committed(job));
    }

    fn committed(&mut self, now_us: u64, job: JobIndex) {
        let state = &mut self.record.jobs[as_index(job)];
        match state.next.take() {
            Some(JobStep::Retry { wait_us }) => {
                self.record.delayed += 1;
                state.wake_us = now_us + wait_us;
                let step = delay_step(Duration::from_micros(wait_us)).unwrap_or(DELAY_STEPS[0]);
                self.agenda.at(now_us + micros_up(step), Event::Return(job));
            }
            Some(JobStep::Finalize(end)) => {
                state.end = Some((now_us, end));
                self.progress_us = now_us;
            }
            None => {}
        }
        self.deactivate(now_us, job);
    }

    /// Releases the job from its process, so that its worker slot and prefetch serve the next job.
    fn deactivate(&mut self, now_us: u64, job: JobIndex) {
        let process = self.record.jobs[as_index(job)].process;
        let state = &mut self.record.jobs[as_index(job)];
        let (has_slot, is_unsent) = (std::mem::take(&mut state.has_worker_slot), std::mem::take(&mut state.is_unsent));
        if has_slot {
            self.processes[as_index(process)].gate.egress.release(now_us, is_unsent);
        }
        self.processes[as_index(process)].free_prefetch += 1;
        self.apply_decisions(now_us, process);
        self.deliver(now_us);
    }
}
