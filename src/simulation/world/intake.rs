//! Intake of the simulation, from the queue to the gate: prefetch, claims, and the wait for a worker slot.
//!
//! What follows from a permit is in [`super::request`].

use std::sync::Arc;
use std::time::Duration;

use super::{Event, JobEnd, JobIndex, JobStep, ProcessIndex, Simulation, as_index};
use crate::domain::permit_protocol::CallKind;
use crate::domain::time::micros_up;
use crate::limiter::gate::{CountingScope, EgressRequest, EgressRule, PermitWaiter};
use crate::queue::DELAY_STEPS;
use crate::worker::job::acquire::ACCOUNT_WAIT;

impl Simulation<'_> {
    /// Delivers the queue's jobs to the processes that accept them, in round-robin order.
    pub(super) fn deliver(&mut self, now_us: u64) {
        let processes = self.processes.len();
        while !self.queue.is_empty() {
            let next = (0..processes).map(|step| (self.next_process + step) % processes);
            let Some(process) = next.into_iter().find(|index| self.processes[*index].accepts_jobs(now_us)) else {
                return;
            };
            let Some(job) = self.queue.pop_front() else { return };
            self.next_process = process + 1;
            self.processes[process].free_prefetch -= 1;
            let state = &mut self.record.jobs[as_index(job)];
            state.process = ProcessIndex::try_from(process).unwrap_or(0);
            state.delivered_us = now_us;
            if self.must_wait(now_us, process, job) {
                self.agenda.at(now_us + self.commit_us, Event::Recorded(job));
                continue;
            }
            if self.record.jobs[as_index(job)].recorded_us.is_none() {
                self.processes[process].dispatcher.waits.admit(job);
            }
            self.agenda.at(now_us + self.commit_us, Event::Claimed(job));
        }
    }

    pub(super) fn claimed(&mut self, now_us: u64, job: JobIndex) {
        self.record.jobs[as_index(job)].recorded_us.get_or_insert(now_us);
        let state = &self.record.jobs[as_index(job)];
        let expires_us = self.expires_us(job).filter(|_| state.unknown_us.is_none()).unwrap_or(u64::MAX);
        let ready_us = state.wake_us.min(expires_us);
        let wait_us = ready_us.saturating_sub(now_us);
        if wait_us == 0 {
            self.enter(now_us, job);
        } else if wait_us < micros_up(DELAY_STEPS[0]) {
            self.agenda.at(ready_us, Event::WaitOver(job));
        } else {
            self.commit(now_us, job, JobStep::Retry { wait_us });
        }
    }

    /// Requests a permit for a job, unless nothing must be sent any more.
    pub(super) fn enter(&mut self, now_us: u64, job: JobIndex) {
        if let Some(next) = self.transition_instead(now_us, job) {
            return self.commit(now_us, job, next.into());
        }
        let arrival = &self.arrivals.jobs()[as_index(job)];
        let account = arrival.account.map(|account| &self.accounts[as_index(account)]);
        if account == Some(&None) {
            return self.commit(now_us, job, JobStep::Finalize(JobEnd::Blocked));
        }
        let (cost, priority, account) = (u32::from(arrival.cost), arrival.priority, account.cloned().flatten());
        let state = &self.record.jobs[as_index(job)];
        let (process, egress_until_us) = (state.process, state.delivered_us + self.max_hold_us);
        let (wait_until_us, accepted_wait) = if self.model.is_blocking() {
            (egress_until_us, Duration::ZERO)
        } else {
            (now_us + micros_up(DELAY_STEPS[0]), DELAY_STEPS[0])
        };
        let is_for_backlog = state.unknown_us.is_none();
        let account_wait_until = is_for_backlog.then(|| self.clock.instant(now_us) + ACCOUNT_WAIT);
        self.begin_wait(now_us, job);
        let gate = &mut self.processes[as_index(process)].gate;
        let egress = EgressRequest {
            lane: Arc::clone(gate.egress()),
            rule: EgressRule::Paced,
            wait_until: self.clock.instant(egress_until_us),
        };
        gate.join(PermitWaiter {
            job: None,
            cost,
            priority,
            scope: CountingScope { kind: Some(CallKind::Charge), account, reference: None },
            reference: None,
            wait_until: self.clock.instant(wait_until_us),
            accepted_wait,
            account_wait_until,
            egress: Some(egress),
            ticket: job,
            deferral: None,
            counted: Arc::default(),
        });
        self.advance_gate(now_us, process);
    }

    /// Pauses the lane's intake until shortly before this wait is over.
    pub(super) fn pause_intake(&mut self, now_us: u64, process: ProcessIndex, wait_us: u64) {
        if let Some(until_us) = self.processes[as_index(process)].pause_intake(now_us, wait_us) {
            self.agenda.at(until_us, Event::ResumeIntake(process));
        }
    }
}
