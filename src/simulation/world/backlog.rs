//! Backlog of the simulated lane: which jobs wait there, how they return, and their claims in fair order.
//!
//! The order is [`crate::domain::fair_order`], which the ledger's SQL is held against. The dispatcher is that of a worker
//! ([`crate::worker::backlog::core`]).

use std::time::Duration;

use super::{Event, JobIndex, JobStep, ProcessIndex, Simulation};
use crate::domain::fair_order::{FairReturn, WaitingJob};
use crate::domain::job::{Flow, FlowClass};
use crate::domain::provider::JobOrder;
use crate::domain::time::micros_up;
use crate::limiter::gate::{BlockReason, GateRefusal, RefusalScope};
use crate::worker::backlog::core::{DispatchStep, KNOWN_FLOWS_MAX, SeenFlow};
use crate::worker::job::LANE_PAUSED_DELAY;
use crate::worker::job::backlog::{LIMIT_BLOCK_MIN, WAKE_AHEAD};

impl Simulation<'_> {
    fn flow_of(&self, job: JobIndex) -> Flow<u32> {
        let arrival = &self.arrivals.jobs()[job];
        let is_unknown = self.record.jobs[job].unknown_us.is_some();
        let class = if is_unknown { FlowClass::UNKNOWN } else { FlowClass::of_priority(arrival.priority) };
        Flow { class, account: arrival.account }
    }

    fn weight_of(&self, flow: Flow<u32>) -> u32 {
        let name = flow.account.and_then(|account| self.accounts[account as usize].as_deref());
        name.and_then(|name| self.model.weights.get(name)).copied().unwrap_or(1)
    }

    /// Among the jobs of its flow, those that arrived first go first.
    fn waiting_job(&self, job: JobIndex) -> WaitingJob<JobIndex> {
        WaitingJob { seq: job as u64, cost: u32::from(self.arrivals.jobs()[job].cost), job }
    }

    fn keeps_order_of(&self, flow: Flow<u32>) -> bool {
        self.model.provider.order == JobOrder::Account && flow.account.is_some()
    }

    /// A job is done with: where the order of accounts is kept, the next one of its account may be claimed.
    pub fn end_in_order(&mut self, job: JobIndex) {
        let flow = self.flow_of(job);
        if self.keeps_order_of(flow) {
            self.backlog.end(flow.account.as_ref());
            let process = self.record.jobs[job].process;
            self.processes[process].dispatcher.allow_claim();
        }
    }

    /// Whether a new job is recorded in the backlog and not taken to the gate.
    pub fn must_wait(&self, now_us: u64, process: usize, job: JobIndex) -> bool {
        let (flow, process) = (self.flow_of(job), &self.processes[process]);
        self.keeps_order_of(flow)
            || process.dispatcher.knows(&flow)
            || process.is_limited(now_us, u32::from(self.arrivals.jobs()[job].cost))
    }

    /// The record of a new job in the backlog is committed, and its message acknowledged.
    pub fn recorded(&mut self, now_us: u64, job: JobIndex) {
        let flow = self.flow_of(job);
        let weight = self.weight_of(flow);
        self.backlog.add(flow, weight, self.waiting_job(job));
        let state = &mut self.record.jobs[job];
        state.recorded_us.get_or_insert(now_us);
        let index = state.process;
        let process = &mut self.processes[index];
        process.end_message();
        if process.dispatcher.record_new(&flow, self.clock.instant(now_us)) {
            self.dispatch(now_us, index);
        }
        self.deliver(now_us);
    }

    /// A job is in the backlog again.
    pub fn put_back(&mut self, now_us: u64, job: JobIndex, blocked_until_us: Option<u64>) {
        let (flow, state) = (self.flow_of(job), &self.record.jobs[job]);
        let blocked_until = blocked_until_us.map(Duration::from_micros);
        let how = FairReturn { was_claimed: state.is_claimed, blocked_until };
        let process = &mut self.processes[state.process];
        let blocked_until = blocked_until_us.map(|until_us| self.clock.instant(until_us));
        process.dispatcher.record_return(flow, blocked_until, self.clock.instant(now_us));
        let weight = self.weight_of(flow);
        self.backlog.put_back(flow, weight, self.waiting_job(job), how);
    }

    /// Where a job waits that the gate has refused; `None`: asleep.
    pub(super) fn backlog_step(&mut self, now_us: u64, job: JobIndex, refusal: &GateRefusal) -> Option<JobStep> {
        let state = &self.record.jobs[job];
        let process = state.process;
        if state.unknown_us.is_some() {
            return None;
        }
        let is_limit = matches!(refusal.reason, BlockReason::Limit(_));
        match refusal.scope {
            RefusalScope::Account if is_limit => {
                let wait = refusal.retry_after.saturating_sub(WAKE_AHEAD).max(LIMIT_BLOCK_MIN);
                Some(JobStep::Backlog { blocked_until_us: Some(now_us + micros_up(wait)) })
            }
            RefusalScope::Cost if is_limit => {
                let cost = u32::from(self.arrivals.jobs()[job].cost);
                self.processes[process].record_cost_wait(now_us, cost, refusal);
                Some(JobStep::Backlog { blocked_until_us: None })
            }
            RefusalScope::Charges | RefusalScope::All if is_limit => {
                self.processes[process].pause_claims(now_us + micros_up(refusal.retry_after));
                Some(JobStep::Backlog { blocked_until_us: None })
            }
            RefusalScope::Charges | RefusalScope::All => Some(self.hold_back(now_us, process, refusal.retry_after)),
            _ => None,
        }
    }

    /// The lane cannot send: a claimed job returns, and nothing is claimed for a while.
    pub(super) fn hold_back(&mut self, now_us: u64, process: usize, wait: Duration) -> JobStep {
        let until = self.clock.instant(now_us) + wait.min(LANE_PAUSED_DELAY);
        self.processes[process].dispatcher.hold_until(until);
        JobStep::Backlog { blocked_until_us: None }
    }

    /// A job begins to wait at the gate.
    pub fn begin_wait(&mut self, now_us: u64, job: JobIndex) {
        let state = &mut self.record.jobs[job];
        let waits = &mut self.processes[state.process].dispatcher.waits;
        state.wait = Some(waits.begin(&job, self.clock.instant(now_us)));
    }

    /// A job's wait at the gate has ended; a claimed one leaves room for the next.
    pub fn end_wait(&mut self, job: JobIndex, granted_at_us: Option<u64>) {
        let flow = self.flow_of(job);
        let state = &mut self.record.jobs[job];
        let process = &mut self.processes[state.process];
        if let Some(wait) = state.wait.take() {
            if let Some(granted_at_us) = granted_at_us {
                let granted_at = self.clock.instant(granted_at_us);
                process.dispatcher.waits.record_grant(wait, &process.gate.view(), granted_at);
            }
            process.dispatcher.waits.end(wait);
        }
        if std::mem::take(&mut state.is_ahead) {
            process.dispatcher.release_ahead(&flow);
        }
    }

    /// Does the steps of a process's dispatcher until it waits.
    pub fn dispatch(&mut self, now_us: u64, process: ProcessIndex) {
        let now = self.clock.instant(now_us);
        loop {
            match self.processes[process].next_dispatch_step(now_us) {
                // Nothing here ends blocks before their time.
                DispatchStep::EndBlocks => {}
                DispatchStep::Look => {
                    let flows = self.seen_flows(now_us);
                    self.processes[process].dispatcher.looked(now, flows, now);
                }
                DispatchStep::Claim(claim) => {
                    let jobs = self.backlog.claim(Duration::from_micros(now_us), &claim);
                    let wake_at = self.backlog.next_wake().map(|wake| self.clock.instant(micros_up(wake)));
                    let flows = jobs.iter().map(|(flow, _)| *flow);
                    self.processes[process].dispatcher.claimed(&claim, flows, wake_at, now);
                    for (_, WaitingJob { job, .. }) in jobs {
                        let state = &mut self.record.jobs[job];
                        (state.process, state.delivered_us) = (process, now_us);
                        (state.is_claimed, state.is_ahead) = (true, true);
                        self.agenda.at(now_us + self.commit_us(process), Event::Claimed(job));
                    }
                }
                DispatchStep::Wait(until) => {
                    let at_us = self.clock.micros(until);
                    if self.processes[process].schedules_step(at_us) {
                        self.agenda.at(at_us, Event::Dispatch(process));
                    }
                    return;
                }
            }
        }
    }

    /// The flows with jobs, as a look at the ledger finds them.
    fn seen_flows(&self, now_us: u64) -> Vec<SeenFlow<u32>> {
        let now = Duration::from_micros(now_us);
        let flows = self.backlog.waiting_flows().take(KNOWN_FLOWS_MAX as usize);
        flows
            .map(|(flow, until)| SeenFlow { flow, blocked_for: until.map(|until| until.saturating_sub(now)) })
            .collect()
    }

    pub fn dispatcher_woken(&mut self, now_us: u64, process: ProcessIndex) {
        self.processes[process].step_is_due(now_us);
        self.dispatch(now_us, process);
    }
}
