//! The simulated deployment: one lane's queue, the worker processes, the limiter and the provider, moved from event to event.
//!
//! The order of a job's steps is that of `worker::execute`. Refuses to run on where nothing can happen any more: after
//! [`STALL`] beyond the longest window without a request or an outcome, what is left stays unfinished.

use std::collections::VecDeque;
use std::time::Duration;

use rand::rngs::StdRng;

use super::event::{Agenda, Event, JobIndex, ProcessIndex};
use super::gate::{self, Granted, OfAccount, Verdict};
use super::process::Process;
use super::windows::Use;
use super::{Arrivals, Model};
use crate::domain::decision::CallKind;
use crate::domain::disposition::{COST_WAIT, Next, RetryPolicy};
use crate::domain::outcome::FinalState;
use crate::domain::quota::Quota;
use crate::domain::time::{Micros, micros_up};
use crate::queue::{DELAY_STEPS, delay_step};
use crate::worker::lane::patience;

mod intake;
mod request;

/// How long nothing may happen beyond the longest window.
const STALL: Duration = Duration::from_secs(3_600);

/// One job, as far as it has come.
#[derive(Clone, Debug, Default)]
pub(super) struct Job {
    pub first_start_us: Option<u64>,
    pub end: Option<(u64, End)>,
    pub late_for_deadline: bool,
    process: ProcessIndex,
    has_turn: bool,
    /// Its turn came to nothing.
    is_refused: bool,
    deliveries: u32,
    delivered_us: u64,
    wake_us: u64,
    attempts: u32,
    requests: u32,
    unknown_us: Option<u64>,
    first_sent_us: Option<u64>,
    /// Since when the ledger knows it.
    recorded_us: Option<u64>,
    granted: Option<Box<Granted>>,
    answer: Option<Answer>,
    next: Option<Put>,
}

/// What a request comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Accepted,
    Failed,
    None,
}

/// What is written down of a job: [`Next`] without its words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Put {
    Again { wait_us: u64 },
    End(End),
}

impl From<Next> for Put {
    fn from(next: Next) -> Self {
        match next {
            Next::Again { after, .. } => Self::Again { wait_us: micros_up(after) },
            Next::Settle { state, .. } => Self::End(End::Final(state)),
        }
    }
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Final(FinalState),
    /// A rule of the row stops its account.
    Blocked,
}

/// What happened.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub jobs: Vec<Job>,
    /// In the order of their starts, not of their arrival at the provider.
    pub uses: Vec<Use>,
    pub limiter_calls: u64,
    pub parked: u64,
    pub timeouts: u64,
    pub faults: u64,
    pub late_permits: u64,
    /// Sum over requests that were answered, from start to answer.
    pub held_us: u64,
    pub answers: u64,
}

pub(super) struct World<'a> {
    model: &'a Model,
    arrivals: &'a Arrivals,
    rng: &'a mut StdRng,
    policy: RetryPolicy,
    quota: Quota,
    agenda: Agenda,
    queue: VecDeque<JobIndex>,
    processes: Vec<Process>,
    turn_to_take: usize,
    come: usize,
    of_account: Vec<Option<OfAccount>>,
    cost_max: u32,
    commit_us: u64,
    patience_us: u64,
    verdicts: Vec<Verdict>,
    moved_us: u64,
    record: Record,
}

/// An index as the agenda carries it.
pub(super) fn at(index: u32) -> usize {
    index as usize
}

impl<'a> World<'a> {
    pub fn new(model: &'a Model, arrivals: &'a Arrivals, rng: &'a mut StdRng) -> Self {
        let of_account = arrivals.accounts().iter().map(|account| {
            let subjects = model.spec.subjects(Some(account), None).ok()?;
            let cost_max = model.spec.cost_max(CallKind::Charge, &subjects);
            Some(OfAccount { subjects, cost_max })
        });
        let process = |index| Process::new(&model.provider, u64::from(index) + 1, model.start_us);
        let mut quota = Quota::default();
        if !model.cold {
            quota.call(Micros(model.start_us), &model.spec, &gate::warming(model.start_us));
        }
        Self {
            policy: model.retry_policy(),
            quota,
            agenda: Agenda::default(),
            queue: VecDeque::new(),
            processes: (0..model.processes).map(process).collect(),
            turn_to_take: 0,
            come: 0,
            of_account: of_account.collect(),
            cost_max: model.spec.cost_max(CallKind::Charge, &[]),
            commit_us: micros_up(model.commit),
            patience_us: micros_up(patience(&model.provider)),
            verdicts: Vec::new(),
            moved_us: model.start_us,
            record: Record { jobs: vec![Job::default(); arrivals.jobs().len()], ..Record::default() },
            model,
            arrivals,
            rng,
        }
    }

    pub fn run(mut self) -> Record {
        let stall_us = micros_up(STALL) + self.model.spec.longest_us();
        self.arrive_next();
        while let Some((now_us, event)) = self.agenda.next() {
            let all_have_come = self.come > self.arrivals.jobs().len();
            if all_have_come && now_us > self.moved_us + stall_us {
                break;
            }
            self.happen(now_us, event);
        }
        self.record.limiter_calls = self.processes.iter().map(|process| process.gate.calls).sum();
        self.record
    }

    fn happen(&mut self, now_us: u64, event: Event) {
        match event {
            Event::Arrive => {
                let come = JobIndex::try_from(self.come - 1).unwrap_or(JobIndex::MAX);
                self.queue.push_back(come);
                self.moved_us = now_us;
                self.arrive_next();
                self.feed(now_us);
            }
            Event::Return(job) => {
                self.queue.push_back(job);
                self.feed(now_us);
            }
            Event::TakeAgain(_) => self.feed(now_us),
            Event::Claimed(job) => self.claimed(now_us, job),
            Event::Rested(job) => self.enter(now_us, job),
            Event::TurnTimeout(job, delivery) => self.turn_timeout(now_us, job, delivery),
            Event::Outflow(process) => self.let_out(now_us, process),
            Event::GateWake(process) => self.gate_woken(now_us, process),
            Event::LimiterCall(process) => {
                let (quota, spec) = (&mut self.quota, &self.model.spec);
                self.processes[at(process)].gate.reach(|call| quota.call(Micros(now_us), spec, call));
                let round_trip_us = micros_up(self.model.round_trip);
                self.agenda.at(now_us + round_trip_us / 2, Event::LimiterReply(process));
            }
            Event::LimiterReply(process) => {
                let spec = &self.model.spec;
                self.processes[at(process)].gate.replied(now_us, spec, &mut self.verdicts);
                self.judge(now_us, process);
            }
            Event::Begin(job) => self.begin(now_us, job),
            Event::Answer(job) => self.answer(now_us, job),
            Event::Committed(job) => self.committed(now_us, job),
        }
    }

    fn arrive_next(&mut self) {
        if let Some(job) = self.arrivals.jobs().get(self.come) {
            self.agenda.at(self.model.start_us + job.at_us, Event::Arrive);
        }
        self.come += 1;
    }

    /// Carries out what the gate has decided, and sees to it that it wakes when it must.
    fn judge(&mut self, now_us: u64, process: ProcessIndex) {
        for verdict in std::mem::take(&mut self.verdicts) {
            match verdict {
                Verdict::Granted(job, granted) => self.granted(now_us, job, granted),
                Verdict::Refused { job, wait_us, of_its_own } => {
                    if !of_its_own {
                        self.rest(now_us, process, wait_us);
                    }
                    self.record.jobs[at(job)].is_refused = true;
                    self.put_down(now_us, job, Put::Again { wait_us });
                }
                Verdict::TooCostly(job) => self.put_down(now_us, job, Put::Again { wait_us: micros_up(COST_WAIT) }),
            }
        }
        let gate = &mut self.processes[at(process)].gate;
        if let Some(next_us) = gate.next_call_at().map(|next_us| next_us.max(now_us))
            && gate.woken_at_us.is_none_or(|woken_us| next_us < woken_us)
        {
            gate.woken_at_us = Some(next_us);
            self.agenda.at(next_us, Event::GateWake(process));
        }
    }

    fn gate_woken(&mut self, now_us: u64, process: ProcessIndex) {
        let gate = &mut self.processes[at(process)].gate;
        gate.woken_at_us.take_if(|woken_us| *woken_us <= now_us);
        if gate.next_call_at().is_some_and(|next_us| next_us <= now_us) {
            gate.depart(now_us, &self.of_account);
            let there_us = micros_up(self.model.round_trip).div_ceil(2);
            self.agenda.at(now_us + there_us, Event::LimiterCall(process));
        } else {
            self.judge(now_us, process);
        }
    }

    fn put_down(&mut self, now_us: u64, job: JobIndex, next: Put) {
        self.record.jobs[at(job)].next = Some(next);
        self.agenda.at(now_us + self.commit_us, Event::Committed(job));
    }

    fn committed(&mut self, now_us: u64, job: JobIndex) {
        let state = &mut self.record.jobs[at(job)];
        match state.next.take() {
            Some(Put::Again { wait_us }) => {
                self.record.parked += 1;
                state.wake_us = now_us + wait_us;
                let step = delay_step(Duration::from_micros(wait_us)).unwrap_or(DELAY_STEPS[0]);
                self.agenda.at(now_us + micros_up(step), Event::Return(job));
            }
            Some(Put::End(end)) => {
                state.end = Some((now_us, end));
                self.moved_us = now_us;
            }
            None => {}
        }
        self.leave(now_us, job);
    }

    /// Out of the process's hands: its turn and its place serve the next.
    fn leave(&mut self, now_us: u64, job: JobIndex) {
        let process = self.record.jobs[at(job)].process;
        let state = &mut self.record.jobs[at(job)];
        let (has_turn, is_unused) = (std::mem::take(&mut state.has_turn), std::mem::take(&mut state.is_refused));
        if has_turn {
            let since_start = Duration::from_micros(now_us - self.model.start_us);
            self.processes[at(process)].leave(is_unused.then_some(since_start));
        }
        self.processes[at(process)].free_places += 1;
        self.let_out(now_us, process);
        self.feed(now_us);
    }
}
