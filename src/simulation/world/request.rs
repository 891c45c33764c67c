//! Requests of the simulation: from a permit to the result, and the check whether a job may still be sent.
//!
//! The decision after a result is that of the decision table of production ([`crate::domain::disposition`]).

use std::time::Duration;

use rand::Rng as _;

use super::{JobStep, SimulatedAnswer, Simulation, as_index};
use crate::domain::deadline_misses::DEADLINE_MISS_PAUSE;
use crate::domain::disposition::{
    AttemptHistory, PreSend, Resend, SendObstacle, Transition, after_outcome, before_request,
};
use crate::domain::outcome::{Outcome, Transmission, UnknownCause};
use crate::domain::time::micros_up;
use crate::queue::DELAY_STEPS;
use crate::simulation::event::{Event, JobIndex};
use crate::simulation::gate::SimulatedPermit;
use crate::simulation::limiter_call::{ReleasedPermit, SimulatedRelease};
use crate::simulation::windows::ProviderUse;

impl Simulation<'_> {
    pub(super) fn granted(&mut self, now_us: u64, job: JobIndex, granted: SimulatedPermit) {
        self.record.jobs[as_index(job)].has_worker_slot = true;
        if let Some(next) = self.transition_instead(now_us, job) {
            self.record.jobs[as_index(job)].is_unsent = true;
            self.release_unused(now_us, job, &granted);
            return self.commit(now_us, job, next.into());
        }
        let begin_us = granted.start_us.max(now_us + self.commit_us);
        self.record.jobs[as_index(job)].granted = Some(Box::new(granted));
        self.agenda.at(begin_us, Event::Begin(job));
    }

    pub(super) fn begin(&mut self, now_us: u64, job: JobIndex) {
        let Some(granted) = self.record.jobs[as_index(job)].granted.clone() else { return };
        if now_us > granted.use_before_us {
            self.record.late_permits += 1;
            self.release_unused(now_us, job, &granted);
            let process = self.record.jobs[as_index(job)].process;
            if self.processes[as_index(process)].deadline_misses.record_miss(Duration::from_micros(now_us)) {
                self.pause_intake(now_us, process, micros_up(DEADLINE_MISS_PAUSE));
            }
            return self.commit(now_us, job, JobStep::Retry { wait_us: micros_up(DELAY_STEPS[0]) });
        }
        let process = self.record.jobs[as_index(job)].process;
        self.processes[as_index(process)].deadline_misses.record_on_time();
        let (model, arrival) = (self.model, &self.arrivals.jobs()[as_index(job)]);
        // Always draw all of them in this order, so that a change of one setting does not move the other draws.
        let there_us = model.transit.draw(self.rng);
        let ends_us = there_us + model.latency.draw(self.rng);
        let took_us = ends_us + model.transit.draw(self.rng);
        let failed = self.rng.random::<f64>() < model.faults;
        let timeout_us = micros_up(model.provider.timeout);
        self.record.uses.push(ProviderUse {
            at_us: now_us + there_us.min(timeout_us),
            ended_us: now_us + ends_us.min(timeout_us),
            cost: arrival.cost,
            account: arrival.account,
        });
        let answer = if took_us > timeout_us {
            self.record.timeouts += 1;
            SimulatedAnswer::None
        } else {
            self.record.held_us += took_us;
            self.record.answers += 1;
            self.record.faults += u64::from(failed);
            if failed { SimulatedAnswer::Failed } else { SimulatedAnswer::Accepted }
        };
        let past_deadline = self.expires_us(job).is_some_and(|expires_us| now_us >= expires_us);
        let state = &mut self.record.jobs[as_index(job)];
        state.first_start_us.get_or_insert(now_us);
        state.late_for_deadline |= past_deadline;
        state.requests += 1;
        if answer != SimulatedAnswer::Accepted {
            state.first_sent_us.get_or_insert(now_us);
            state.unknown_us = Some(now_us);
        }
        state.answer = Some(answer);
        self.progress_us = now_us;
        self.agenda.at(now_us + took_us.min(timeout_us), Event::Answer(job));
    }

    pub(super) fn answer(&mut self, now_us: u64, job: JobIndex) {
        let state = &mut self.record.jobs[as_index(job)];
        let Some((granted, answer)) = state.granted.take().zip(state.answer.take()) else { return };
        let unknown = |cause| Outcome::Unknown { cause, retry_after: None };
        let outcome = match answer {
            SimulatedAnswer::Accepted => Outcome::Accepted { reference: None },
            SimulatedAnswer::Failed => unknown(UnknownCause::ServerError(500)),
            SimulatedAnswer::None => unknown(UnknownCause::Timeout),
        };
        if outcome.transmission() == Transmission::Responded {
            self.release_permit(now_us, job, granted.call, SimulatedRelease::Answered { at_us: now_us });
        }
        let history = self.history(now_us, job);
        let disposition = after_outcome(&outcome, &history, &self.policy, self.rng.random());
        self.record.jobs[as_index(job)].attempts += u32::from(disposition.counts_attempt);
        self.commit(now_us, job, disposition.transition.into());
        let process = self.record.jobs[as_index(job)].process;
        self.apply_decisions(now_us, process);
    }

    fn release_unused(&mut self, now_us: u64, job: JobIndex, granted: &SimulatedPermit) {
        let release = SimulatedRelease::NotSent { origins: granted.origins.clone() };
        self.release_permit(now_us, job, granted.call, release);
    }

    fn release_permit(&mut self, now_us: u64, job: JobIndex, call: u64, release: SimulatedRelease) {
        let (arrival, process) = (&self.arrivals.jobs()[as_index(job)], self.record.jobs[as_index(job)].process);
        let released = ReleasedPermit { call, cost: arrival.cost, account: arrival.account, release };
        self.processes[as_index(process)].gate.release(now_us, &self.model.spec, released);
    }

    /// Transition of a job that must not be sent; `None`: it may be sent.
    pub(super) fn transition_instead(&self, now_us: u64, job: JobIndex) -> Option<Transition> {
        let expired = self.expires_us(job).is_some_and(|expires_us| now_us >= expires_us);
        let obstacle = expired.then_some(SendObstacle::Expired);
        match before_request(&self.history(now_us, job), &self.policy, obstacle) {
            PreSend::Transition(next) => Some(next),
            PreSend::Charge | PreSend::LookUp => None,
        }
    }

    pub(super) fn expires_us(&self, job: JobIndex) -> Option<u64> {
        self.arrivals.jobs()[as_index(job)].expires_us.map(|expires_us| self.model.start_us + expires_us)
    }

    fn history(&self, now_us: u64, job: JobIndex) -> AttemptHistory {
        let state = &self.record.jobs[as_index(job)];
        let since = |at_us: u64| Duration::from_micros(now_us.saturating_sub(at_us));
        AttemptHistory {
            attempts: state.attempts,
            requests: state.requests,
            lookups: 0,
            resend: Resend::Never,
            unknown: state.unknown_us.is_some(),
            age: state.recorded_us.map(since).unwrap_or_default(),
            first_sent_age: state.first_sent_us.map(since),
            unknown_age: state.unknown_us.map(since),
            throttle_generation: 1,
            lost_holders: 0,
            probe: false,
        }
    }
}
