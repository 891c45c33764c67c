//! Requests of the simulation: from a permit to the result, and the check whether a job may still be sent.
//!
//! The decision after a result is that of the decision table of production ([`crate::domain::disposition`]).

use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;

use super::{Event, JobIndex, JobStep, SimulatedAnswer, SimulatedPermit, Simulation, as_index};
use crate::domain::deadline_misses::DEADLINE_MISS_PAUSE;
use crate::domain::disposition::{
    AttemptHistory, PreSend, Resend, SendObstacle, Transition, after_outcome, before_request,
};
use crate::domain::outcome::{Outcome, Transmission, UnknownCause};
use crate::domain::time::micros_up;
use crate::limiter::gate::core::GrantedPermit;
use crate::limiter::gate::{PendingRelease, PendingReleaseKind};
use crate::queue::DELAY_STEPS;
use crate::simulation::windows::ProviderUse;

impl Simulation<'_> {
    pub(super) fn granted(&mut self, now_us: u64, job: JobIndex, granted: GrantedPermit) {
        // A wait for the own account says nothing of the lane.
        self.end_wait(job, (!granted.waited_for_account).then_some(now_us));
        let GrantedPermit { start_at, use_before, origins, call, scope, window_slot, .. } = granted;
        let permit = SimulatedPermit { use_before, window_slot: Some(window_slot), origins, call, scope };
        let next = self.transition_instead(now_us, job);
        let state = &mut self.record.jobs[as_index(job)];
        (state.has_worker_slot, state.is_unsent) = (true, next.is_some());
        state.granted = Some(Box::new(permit));
        if let Some(next) = next {
            self.release_unused(now_us, job);
            return self.commit(now_us, job, next.into());
        }
        let (persisted_us, start_us) = (now_us + self.commit_us, self.clock.micros(start_at));
        if persisted_us < start_us {
            self.agenda.at(persisted_us, Event::Persisted(job));
        }
        self.agenda.at(start_us.max(persisted_us), Event::Begin(job));
    }

    /// The attempt is recorded: the next job may get a permit.
    pub(super) fn persisted(&mut self, now_us: u64, job: JobIndex) {
        let (now, state) = (self.clock.instant(now_us), &mut self.record.jobs[as_index(job)]);
        let slot = state.granted.as_mut().and_then(|granted| granted.window_slot.take());
        if slot.is_some_and(|slot| slot.persisted(None, now)) {
            let process = state.process;
            self.advance_gate(now_us, process);
        }
    }

    pub(super) fn begin(&mut self, now_us: u64, job: JobIndex) {
        self.persisted(now_us, job);
        let Some(granted) = &self.record.jobs[as_index(job)].granted else { return };
        if self.clock.instant(now_us) > granted.use_before {
            self.record.late_permits += 1;
            self.release_unused(now_us, job);
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
        let Some(answer) = state.answer.take() else { return };
        let unknown = |cause| Outcome::Unknown { cause, retry_after: None };
        let outcome = match answer {
            SimulatedAnswer::Accepted => Outcome::Accepted { reference: None },
            SimulatedAnswer::Failed => unknown(UnknownCause::ServerError(500)),
            SimulatedAnswer::None => unknown(UnknownCause::Timeout),
        };
        if outcome.transmission() == Transmission::Responded {
            let at = self.clock.instant(now_us);
            self.release_permit(job, |_| PendingReleaseKind::Used { at });
        }
        self.record.jobs[as_index(job)].granted = None;
        let history = self.history(now_us, job);
        let disposition = after_outcome(&outcome, &history, &self.policy, self.rng.random());
        self.record.jobs[as_index(job)].attempts += u32::from(disposition.counts_attempt);
        self.commit(now_us, job, disposition.transition.into());
        let process = self.record.jobs[as_index(job)].process;
        self.advance_gate(now_us, process);
    }

    fn release_unused(&mut self, now_us: u64, job: JobIndex) {
        let granted = self.record.jobs[as_index(job)].granted.as_mut();
        if let Some(slot) = granted.and_then(|granted| granted.window_slot.take()) {
            slot.discarded(self.clock.instant(now_us));
        }
        self.release_permit(job, |origins| PendingReleaseKind::Unused { origins });
    }

    fn release_permit(&mut self, job: JobIndex, kind: impl FnOnce(Arc<[(String, u64)]>) -> PendingReleaseKind) {
        let (arrival, state) = (&self.arrivals.jobs()[as_index(job)], &mut self.record.jobs[as_index(job)]);
        let (process, granted) = (state.process, state.granted.take());
        if let Some(SimulatedPermit { origins, call, scope, .. }) = granted.map(|granted| *granted) {
            let release = PendingRelease { call, cost: u32::from(arrival.cost), scope, kind: kind(origins) };
            self.processes[as_index(process)].gate.release(release);
        }
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
