//! Intake of the simulation, from the queue to the gate: prefetch, claims, and the wait for a worker slot.
//!
//! What follows from a permit is in [`super::request`].

use super::{JobEnd, JobStep, Simulation, as_index};
use crate::domain::time::micros_up;
use crate::queue::DELAY_STEPS;
use crate::simulation::event::{Event, JobIndex, ProcessIndex};
use crate::simulation::gate::SimulatedRequest;
use crate::worker::job::EGRESS_DELAY;

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
            state.deliveries += 1;
            state.delivered_us = now_us;
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
        let subjects = arrival.account.and_then(|account| self.account_subjects.get(as_index(account)));
        if let Some(None) = subjects {
            return self.commit(now_us, job, JobStep::Finalize(JobEnd::Blocked));
        }
        let state = &self.record.jobs[as_index(job)];
        let (process, delivery, egress_until_us) =
            (state.process, state.deliveries, state.delivered_us + self.max_hold_us);
        let step_us = micros_up(DELAY_STEPS[0]);
        let (wait_until_us, accepted_wait_us) =
            if self.model.is_blocking() { (egress_until_us, 0) } else { (now_us + step_us, step_us) };
        let request = SimulatedRequest {
            job,
            cost: arrival.cost,
            priority: arrival.priority,
            account: arrival.account,
            wait_until_us,
            accepted_wait_us,
            egress_until_us,
        };
        let subjects = subjects.and_then(Option::as_ref);
        let gate = &mut self.processes[as_index(process)].gate;
        gate.join(now_us, request, subjects, self.cost_max, &mut self.decisions);
        self.agenda.at(egress_until_us.max(now_us), Event::EgressTimeout(job, delivery));
        self.apply_decisions(now_us, process);
    }

    /// Delays a job that got no worker slot in time.
    pub(super) fn egress_timeout(&mut self, now_us: u64, job: JobIndex, delivery: u32) {
        let state = &self.record.jobs[as_index(job)];
        let (process, is_same) = (state.process, state.deliveries == delivery);
        let gate = &mut self.processes[as_index(process)].gate;
        if is_same && gate.waits_for_egress(now_us, job) {
            gate.abandon(now_us, job);
            self.commit(now_us, job, JobStep::Retry { wait_us: micros_up(EGRESS_DELAY) });
        }
    }

    /// Pauses the lane's intake until shortly before this wait is over.
    pub(super) fn pause_intake(&mut self, now_us: u64, process: ProcessIndex, wait_us: u64) {
        if let Some(until_us) = self.processes[as_index(process)].pause_intake(now_us, wait_us) {
            self.agenda.at(until_us, Event::ResumeIntake(process));
        }
    }
}
