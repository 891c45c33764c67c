//! Backlog of the simulated lane: which jobs wait there, how they return, and their claims in fair order.
//!
//! The order is [`crate::domain::fair_order`], which the ledger's SQL is held against. All processes see a change at
//! once. A real process learns of flows that others have filled within a second.

use std::time::Duration;

use super::{JobStep, Simulation, as_index};
use crate::domain::fair_order::{FairReturn, WaitingJob};
use crate::domain::time::micros_up;
use crate::ledger::backlog::FlowClass;
use crate::limiter::gate::{BlockReason, GateRefusal, RefusalScope};
use crate::simulation::dispatch::{DispatchStep, Flow};
use crate::simulation::event::{Event, JobIndex, ProcessIndex};
use crate::simulation::process::SimulatedProcess;
use crate::worker::job::LANE_PAUSED_DELAY;
use crate::worker::job::backlog::{LIMIT_BLOCK_MIN, WAKE_AHEAD};

impl Simulation<'_> {
    fn flow_of(&self, job: JobIndex) -> Flow {
        let arrival = &self.arrivals.jobs()[as_index(job)];
        Flow { class: FlowClass::of_priority(arrival.priority).number(), account: arrival.account }
    }

    fn weight_of(&self, flow: Flow) -> u32 {
        let name = flow.account.and_then(|account| self.accounts[as_index(account)].as_ref());
        name.and_then(|name| self.model.weights.get(name)).copied().unwrap_or(1)
    }

    /// Among the jobs of its flow, those that arrived first go first.
    fn waiting_job(&self, job: JobIndex) -> WaitingJob<JobIndex> {
        WaitingJob { seq: u64::from(job), cost: u32::from(self.arrivals.jobs()[as_index(job)].cost), job }
    }

    /// Whether a new job is recorded in the backlog and not taken to the gate.
    pub(super) fn must_wait(&self, now_us: u64, process: usize, job: JobIndex) -> bool {
        if self.record.jobs[as_index(job)].recorded_us.is_some() {
            return false;
        }
        let SimulatedProcess { gate, dispatcher, .. } = &self.processes[process];
        self.backlog.has_waiting(&self.flow_of(job))
            || (self.model.is_blocking() && dispatcher.is_limited(now_us, || gate.is_blocked_by_limit()))
    }

    /// The record of a new job in the backlog is committed, and its message acknowledged.
    pub(super) fn recorded(&mut self, now_us: u64, job: JobIndex) {
        let flow = self.flow_of(job);
        let weight = self.weight_of(flow);
        self.backlog.add(flow, weight, self.waiting_job(job));
        let state = &mut self.record.jobs[as_index(job)];
        state.recorded_us.get_or_insert(now_us);
        let process = state.process;
        self.processes[as_index(process)].free_prefetch += 1;
        self.dispatch_all(now_us);
        self.deliver(now_us);
    }

    /// A job is in the backlog again.
    pub(super) fn put_back(&mut self, job: JobIndex, blocked_until_us: Option<u64>) {
        let flow = self.flow_of(job);
        let blocked_until = blocked_until_us.map(Duration::from_micros);
        let how = FairReturn { was_claimed: self.record.jobs[as_index(job)].is_claimed, blocked_until };
        let weight = self.weight_of(flow);
        self.backlog.put_back(flow, weight, self.waiting_job(job), how);
    }

    /// Where a job waits that the gate has refused; `None`: in a delay queue.
    pub(super) fn backlog_step(&mut self, now_us: u64, job: JobIndex, refusal: &GateRefusal) -> Option<JobStep> {
        let state = &self.record.jobs[as_index(job)];
        let (process, is_claimed) = (as_index(state.process), state.is_claimed);
        if state.unknown_us.is_some() {
            return None;
        }
        let is_limit = matches!(refusal.reason, BlockReason::Limit(_));
        match refusal.scope {
            RefusalScope::Account if is_limit => {
                let wait = refusal.retry_after.saturating_sub(WAKE_AHEAD).max(LIMIT_BLOCK_MIN);
                Some(JobStep::Backlog { blocked_until_us: Some(now_us + micros_up(wait)) })
            }
            RefusalScope::Charges | RefusalScope::All if is_limit && self.model.is_blocking() => {
                self.processes[process].dispatcher.pause_for_limit(now_us + micros_up(refusal.retry_after));
                Some(JobStep::Backlog { blocked_until_us: None })
            }
            RefusalScope::Charges | RefusalScope::All if is_claimed => {
                Some(self.hold_back(now_us, process, refusal.retry_after))
            }
            _ => None,
        }
    }

    /// The lane cannot send: a claimed job returns, and nothing is claimed for a while.
    pub(super) fn hold_back(&mut self, now_us: u64, process: usize, wait: Duration) -> JobStep {
        self.processes[process].dispatcher.hold_until(now_us + micros_up(wait.min(LANE_PAUSED_DELAY)));
        JobStep::Backlog { blocked_until_us: None }
    }

    /// A job begins to wait at the gate.
    pub(super) fn begin_wait(&mut self, now_us: u64, job: JobIndex) {
        self.leave_admission(job);
        let state = &mut self.record.jobs[as_index(job)];
        state.waits_since_us = Some(now_us);
        self.processes[as_index(state.process)].dispatcher.begin_wait(now_us, job);
    }

    pub(super) fn leave_admission(&mut self, job: JobIndex) {
        let state = &mut self.record.jobs[as_index(job)];
        if std::mem::take(&mut state.is_admitted) {
            self.processes[as_index(state.process)].dispatcher.admitted -= 1;
        }
    }

    /// A job's wait at the gate has ended; a claimed one leaves room for the next.
    pub(super) fn end_wait(&mut self, job: JobIndex, granted_at_us: Option<u64>) {
        let flow = self.flow_of(job);
        let state = &mut self.record.jobs[as_index(job)];
        let dispatcher = &mut self.processes[as_index(state.process)].dispatcher;
        if let Some(began_us) = state.waits_since_us.take() {
            dispatcher.end_wait(began_us, job, granted_at_us);
        }
        if std::mem::take(&mut state.is_ahead) {
            dispatcher.release_ahead(flow);
        }
    }

    pub(super) fn dispatch_all(&mut self, now_us: u64) {
        for process in 0..self.model.processes {
            self.dispatch(now_us, process);
        }
    }

    /// Claims jobs for the room that a process has, or schedules the next look.
    pub(super) fn dispatch(&mut self, now_us: u64, process: ProcessIndex) {
        while !self.backlog.is_empty() {
            let now = Duration::from_micros(now_us);
            let wake = self.backlog.next_wake();
            // A flow whose block has ended is woken by a claim.
            let is_due = wake.is_some_and(|wake| wake <= now);
            let Some(class) = self.backlog.first_class().or_else(|| is_due.then(|| FlowClass::LAST.number())) else {
                return wake.into_iter().for_each(|wake| self.look_at(process, micros_up(wake)));
            };
            let parts = &self.processes[as_index(process)];
            let claim = match parts.dispatcher.next_step(now_us, class, parts.paused_until_us()) {
                DispatchStep::Claim(claim) => claim,
                DispatchStep::WaitUntil(at_us) => return self.look_at(process, at_us),
                DispatchStep::WaitForRoom => return,
            };
            let jobs = self.backlog.claim(now, &claim);
            let dispatcher = &mut self.processes[as_index(process)].dispatcher;
            dispatcher.claimed(now_us, &claim, jobs.iter().map(|(flow, _)| *flow));
            for (_, WaitingJob { job, .. }) in jobs {
                let state = &mut self.record.jobs[as_index(job)];
                (state.process, state.delivered_us) = (process, now_us);
                (state.is_claimed, state.is_ahead) = (true, true);
                self.agenda.at(now_us + self.commit_us, Event::Claimed(job));
            }
        }
    }

    fn look_at(&mut self, process: ProcessIndex, at_us: u64) {
        if self.processes[as_index(process)].dispatcher.schedule(at_us) {
            self.agenda.at(at_us, Event::Dispatch(process));
        }
    }

    pub(super) fn dispatcher_woken(&mut self, now_us: u64, process: ProcessIndex) {
        self.processes[as_index(process)].dispatcher.woken(now_us);
        self.dispatch(now_us, process);
    }
}
