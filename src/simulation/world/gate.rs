//! Gates of the simulation: their wake-ups, their calls to the limiter, and what follows from their decisions.
//!
//! The decisions are those of the core of production ([`crate::limiter::gate::core`]).

use super::{Event, JobIndex, JobStep, ProcessIndex, Simulation, as_index};
use crate::domain::disposition::OVERSIZED_WAIT;
use crate::domain::time::{Micros, micros_up};
use crate::limiter::gate::core::Decision;
use crate::limiter::gate::{BlockReason, GateRefusal, RefusalScope};
use crate::worker::job::EGRESS_DELAY;

impl Simulation<'_> {
    /// Tells the gate what has happened, applies its decisions, and schedules its next wake-up.
    pub(super) fn advance_gate(&mut self, now_us: u64, process: ProcessIndex) {
        self.apply_decisions(now_us, process);
        self.schedule_wake(now_us, process);
    }

    fn apply_decisions(&mut self, now_us: u64, process: ProcessIndex) {
        for decision in self.processes[as_index(process)].gate.advance(now_us) {
            match decision {
                Decision::Granted { ticket: job, permit } => self.granted(now_us, job, permit),
                Decision::Refused { ticket: job, refusal } => self.refused(now_us, job, &refusal),
                Decision::NoWorkerSlot { ticket: job } => self.refused_worker_slot(now_us, job),
            }
        }
        self.dispatch(now_us, process);
    }

    fn schedule_wake(&mut self, now_us: u64, process: ProcessIndex) {
        if let Some(wake_us) = self.processes[as_index(process)].gate.next_wake(now_us) {
            self.agenda.at(wake_us, Event::GateWake(process));
        }
    }

    fn refused_worker_slot(&mut self, now_us: u64, job: JobIndex) {
        self.end_wait(job, None);
        let state = &self.record.jobs[as_index(job)];
        let next = if state.is_claimed && state.unknown_us.is_none() {
            self.hold_back(now_us, as_index(state.process), EGRESS_DELAY)
        } else {
            JobStep::Retry { wait_us: micros_up(EGRESS_DELAY) }
        };
        self.commit(now_us, job, next);
    }

    fn refused(&mut self, now_us: u64, job: JobIndex, refusal: &GateRefusal) {
        self.end_wait(job, None);
        if let Some(next) = self.backlog_step(now_us, job, refusal) {
            return self.commit(now_us, job, next);
        }
        let wait_us = match refusal.reason {
            BlockReason::Oversized { .. } => micros_up(OVERSIZED_WAIT),
            _ => micros_up(refusal.retry_after),
        };
        match refusal.scope {
            RefusalScope::Job | RefusalScope::Account => {}
            RefusalScope::Charges | RefusalScope::All => {
                let process = self.record.jobs[as_index(job)].process;
                self.pause_intake(now_us, process, wait_us);
            }
        }
        self.commit(now_us, job, JobStep::Retry { wait_us });
    }

    pub(super) fn gate_woken(&mut self, now_us: u64, process: ProcessIndex) {
        self.processes[as_index(process)].gate.woken(now_us);
        self.apply_decisions(now_us, process);
        if self.processes[as_index(process)].gate.depart(now_us) {
            let there_us = micros_up(self.model.round_trip).div_ceil(2);
            return self.agenda.at(now_us + there_us, Event::LimiterCall(process));
        }
        self.schedule_wake(now_us, process);
    }

    pub(super) fn limiter_called(&mut self, now_us: u64, process: ProcessIndex) {
        let (quota, spec) = (&mut self.quota, &self.model.spec);
        self.processes[as_index(process)].gate.reach(|call| quota.call(Micros(now_us), spec, call));
        let back_us = micros_up(self.model.round_trip) / 2;
        self.agenda.at(now_us + back_us, Event::LimiterReply(process));
    }

    pub(super) fn limiter_replied(&mut self, now_us: u64, process: ProcessIndex) {
        self.processes[as_index(process)].gate.replied(now_us);
        self.advance_gate(now_us, process);
    }
}
