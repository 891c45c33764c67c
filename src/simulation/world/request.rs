//! From a permit to what became of its request, and when a job is not sent any more.
//!
//! Refuses to decide what follows: the decision table of production does ([`crate::domain::disposition`]).

use std::time::Duration;

use rand::Rng as _;

use super::{Answer, Put, World, at};
use crate::domain::disposition::{History, Next, Resend, Step, after_outcome, before_request};
use crate::domain::late_row::LATE_REST;
use crate::domain::outcome::{Outcome, UnknownCause, Way};
use crate::domain::time::micros_up;
use crate::queue::DELAY_STEPS;
use crate::simulation::event::{Event, JobIndex};
use crate::simulation::gate::{Granted, Settled, SettledFate};
use crate::simulation::windows::Use;

impl World<'_> {
    pub(super) fn granted(&mut self, now_us: u64, job: JobIndex, granted: Granted) {
        if let Some(next) = self.no_longer(now_us, job) {
            self.give_back(now_us, job, &granted);
            return self.put_down(now_us, job, next.into());
        }
        let begin_us = granted.start_us.max(now_us + self.commit_us);
        self.record.jobs[at(job)].granted = Some(Box::new(granted));
        self.agenda.at(begin_us, Event::Begin(job));
    }

    pub(super) fn begin(&mut self, now_us: u64, job: JobIndex) {
        let Some(granted) = self.record.jobs[at(job)].granted.clone() else { return };
        if now_us > granted.use_before_us {
            self.record.late_permits += 1;
            self.give_back(now_us, job, &granted);
            let process = self.record.jobs[at(job)].process;
            if self.processes[at(process)].late.late(Duration::from_micros(now_us)) {
                self.rest(now_us, process, micros_up(LATE_REST));
            }
            return self.put_down(now_us, job, Put::Again { wait_us: micros_up(DELAY_STEPS[0]) });
        }
        let process = self.record.jobs[at(job)].process;
        self.processes[at(process)].late.in_time();
        let (model, arrival) = (self.model, &self.arrivals.jobs()[at(job)]);
        // Always all of them in this order, so that one setting moves none of the other draws.
        let there_us = model.transit.draw(self.rng);
        let took_us = there_us + model.latency.draw(self.rng) + model.transit.draw(self.rng);
        let failed = self.rng.random::<f64>() < model.faults;
        let timeout_us = micros_up(model.provider.timeout);
        self.record.uses.push(Use {
            at_us: now_us + there_us.min(timeout_us),
            cost: arrival.cost,
            account: arrival.account,
        });
        let answer = if took_us > timeout_us {
            self.record.timeouts += 1;
            Answer::None
        } else {
            self.record.held_us += took_us;
            self.record.answers += 1;
            self.record.faults += u64::from(failed);
            if failed { Answer::Failed } else { Answer::Accepted }
        };
        let past_deadline = self.expires_us(job).is_some_and(|expires_us| now_us >= expires_us);
        let state = &mut self.record.jobs[at(job)];
        state.first_start_us.get_or_insert(now_us);
        state.late_for_deadline |= past_deadline;
        state.requests += 1;
        if answer != Answer::Accepted {
            state.first_sent_us.get_or_insert(now_us);
            state.unknown_us = Some(now_us);
        }
        state.answer = Some(answer);
        self.moved_us = now_us;
        self.agenda.at(now_us + took_us.min(timeout_us), Event::Answer(job));
    }

    pub(super) fn answer(&mut self, now_us: u64, job: JobIndex) {
        let state = &mut self.record.jobs[at(job)];
        let Some((granted, answer)) = state.granted.take().zip(state.answer.take()) else { return };
        let unknown = |cause| Outcome::Unknown { cause, retry_after: None };
        let outcome = match answer {
            Answer::Accepted => Outcome::Accepted { reference: None },
            Answer::Failed => unknown(UnknownCause::ServerError(500)),
            Answer::None => unknown(UnknownCause::Timeout),
        };
        if outcome.way() == Way::Answered {
            self.settle_permit(now_us, job, granted.call, SettledFate::Answered { at_us: now_us });
        }
        let history = self.history(now_us, job);
        let disposition = after_outcome(&outcome, &history, &self.policy, self.rng.random());
        self.record.jobs[at(job)].attempts += u32::from(disposition.counts_attempt);
        self.put_down(now_us, job, disposition.next.into());
        let process = self.record.jobs[at(job)].process;
        self.judge(now_us, process);
    }

    fn give_back(&mut self, now_us: u64, job: JobIndex, granted: &Granted) {
        let fate = SettledFate::NotSent { origins: granted.origins.clone() };
        self.settle_permit(now_us, job, granted.call, fate);
    }

    fn settle_permit(&mut self, now_us: u64, job: JobIndex, call: u64, fate: SettledFate) {
        let (arrival, process) = (&self.arrivals.jobs()[at(job)], self.record.jobs[at(job)].process);
        let settled = Settled { call, cost: arrival.cost, account: arrival.account, fate };
        self.processes[at(process)].gate.settle(now_us, settled);
    }

    /// What is done with a job that must not be sent as things stand.
    pub(super) fn no_longer(&self, now_us: u64, job: JobIndex) -> Option<Next> {
        let expired = self.expires_us(job).is_some_and(|expires_us| now_us >= expires_us);
        match before_request(&self.history(now_us, job), &self.policy, expired) {
            Step::Put(next) => Some(next),
            Step::Charge | Step::Ask => None,
        }
    }

    pub(super) fn expires_us(&self, job: JobIndex) -> Option<u64> {
        self.arrivals.jobs()[at(job)].expires_us.map(|expires_us| self.model.start_us + expires_us)
    }

    fn history(&self, now_us: u64, job: JobIndex) -> History {
        let state = &self.record.jobs[at(job)];
        let since = |at_us: u64| Duration::from_micros(now_us.saturating_sub(at_us));
        History {
            attempts: state.attempts,
            requests: state.requests,
            lookups: 0,
            resend: Resend::Never,
            unknown: state.unknown_us.is_some(),
            age: state.recorded_us.map(since).unwrap_or_default(),
            first_sent_age: state.first_sent_us.map(since),
            unknown_age: state.unknown_us.map(since),
            refusal_round: 1,
            lost_holders: 0,
            probe: false,
        }
    }
}
