//! Steps of a simulated job: from the queue to the gate, from the gate's decision to a permit, and from the permit to the
//! result.
//!
//! The gate's decisions are those of the core of production ([`crate::limiter::gate::core`]), and what follows from a
//! result is that of its decision table ([`crate::domain::disposition`]).

use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;

use super::{Event, JobEnd, JobIndex, JobStep, ProcessIndex, ProviderUse, SimulatedPermit, Simulation};
use crate::domain::disposition::{
    AttemptHistory, OVERSIZED_WAIT, PreSend, SendObstacle, Transition, after_outcome, before_request,
};
use crate::domain::outcome::{Outcome, Transmission, UnknownCause};
use crate::domain::permit_protocol::CallKind;
use crate::domain::persist_window::DEADLINE_MISS_PAUSE;
use crate::domain::time::{Micros, micros_up};
use crate::limiter::gate::core::{Decision, GrantedPermit};
use crate::limiter::gate::{
    AcquireRequest, AcquireResult, BlockReason, EgressRequest, EgressRule, GateRefusal, GrantedSlots, PendingRelease,
    PermitWaiter, RefusalScope,
};
use crate::worker::job::acquire::{ACCOUNT_WAIT, REQUEUE_WAIT};
use crate::worker::job::{EGRESS_DELAY, UNSENT_DELAY};

impl Simulation<'_> {
    /// Delivers the queue's jobs to the processes that accept them, in round-robin order.
    pub fn deliver(&mut self, now_us: u64) {
        let processes = self.processes.len();
        while !self.queue.is_empty() {
            let next = (0..processes).map(|step| (self.next_process + step) % processes);
            let Some(process) = next.into_iter().find(|index| self.processes[*index].accepts_jobs(now_us)) else {
                return;
            };
            let Some(job) = self.queue.pop_front() else { return };
            self.next_process = process + 1;
            self.processes[process].take_message();
            let state = &mut self.record.jobs[job];
            state.process = process;
            state.delivered_us = now_us;
            if self.must_wait(now_us, process, job) {
                self.agenda.at(now_us + self.commit_us(process), Event::Recorded(job));
                continue;
            }
            self.processes[process].dispatcher.waits.admit(job);
            self.agenda.at(now_us + self.commit_us(process), Event::Claimed(job));
        }
    }

    pub fn claimed(&mut self, now_us: u64, job: JobIndex) {
        self.record.jobs[job].recorded_us.get_or_insert(now_us);
        self.enter(now_us, job);
    }

    /// Requests a permit for a job, unless nothing must be sent any more.
    pub fn enter(&mut self, now_us: u64, job: JobIndex) {
        if let Some(next) = self.transition_instead(now_us, job) {
            return self.commit(now_us, job, next.into());
        }
        let arrival = &self.arrivals.jobs()[job];
        let account = arrival.account.map(|account| &self.accounts[account as usize]);
        if account == Some(&None) {
            return self.commit(now_us, job, JobStep::Finalize(JobEnd::Blocked));
        }
        let (cost, priority, account) = (u32::from(arrival.cost), arrival.priority, account.cloned().flatten());
        let state = &self.record.jobs[job];
        let (process, egress_until_us) = (state.process, state.delivered_us + self.max_hold_us);
        let (wait_until_us, accepted_wait) = if self.model.is_blocking() {
            (egress_until_us, Duration::ZERO)
        } else {
            (now_us + micros_up(REQUEUE_WAIT), REQUEUE_WAIT)
        };
        let account_wait = if state.unknown_us.is_none() { ACCOUNT_WAIT } else { Duration::MAX };
        self.begin_wait(now_us, job);
        let gate = &mut self.processes[process].gate;
        let egress = EgressRequest {
            lane: Arc::clone(gate.egress()),
            rule: EgressRule::Paced,
            wait_until: self.clock.instant(egress_until_us),
        };
        let request = AcquireRequest {
            priority,
            account,
            accepted_wait,
            account_wait,
            egress: Some(egress),
            ..AcquireRequest::new(cost, CallKind::Charge, self.clock.instant(wait_until_us))
        };
        gate.join(PermitWaiter::new(request, job, self.clock.instant(now_us)));
        self.advance_gate(now_us, process);
    }

    /// Pauses the lane's intake until shortly before this wait is over.
    fn pause_intake(&mut self, now_us: u64, process: ProcessIndex, wait_us: u64) {
        if let Some(until_us) = self.processes[process].pause_intake(now_us, wait_us) {
            self.agenda.at(until_us, Event::ResumeIntake(process));
        }
    }

    /// Tells the gate what has happened, applies its decisions, and schedules its next wake-up.
    pub fn advance_gate(&mut self, now_us: u64, process: ProcessIndex) {
        self.apply_decisions(now_us, process);
        self.schedule_wake(now_us, process);
    }

    fn apply_decisions(&mut self, now_us: u64, process: ProcessIndex) {
        for Decision { ticket: job, result } in self.processes[process].gate.advance(now_us) {
            match result {
                AcquireResult::Granted(permit) => self.granted(now_us, job, permit),
                AcquireResult::Refused(refusal) => self.refused(now_us, job, &refusal),
                AcquireResult::NoWorkerSlot => self.refused_worker_slot(now_us, job),
            }
        }
        self.dispatch(now_us, process);
    }

    fn schedule_wake(&mut self, now_us: u64, process: ProcessIndex) {
        if let Some(wake_us) = self.processes[process].gate.next_wake(now_us) {
            self.agenda.at(wake_us, Event::GateWake(process));
        }
    }

    fn refused_worker_slot(&mut self, now_us: u64, job: JobIndex) {
        self.end_wait(job, None);
        let state = &self.record.jobs[job];
        let next = if state.unknown_us.is_none() {
            let until = self.clock.instant(now_us) + EGRESS_DELAY;
            self.processes[state.process].dispatcher.await_slot(until);
            JobStep::Backlog { blocked_until_us: None }
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
            RefusalScope::Job | RefusalScope::Account | RefusalScope::Cost => {}
            RefusalScope::Charges | RefusalScope::All => {
                let process = self.record.jobs[job].process;
                match refusal.reason {
                    BlockReason::Cold | BlockReason::NeedsHistory => self.pause_intake(now_us, process, wait_us),
                    _ => self.processes[process].pause_claims(now_us + wait_us),
                }
            }
        }
        self.commit(now_us, job, JobStep::Retry { wait_us });
    }

    pub fn gate_woken(&mut self, now_us: u64, process: ProcessIndex) {
        self.processes[process].gate.woken(now_us);
        self.apply_decisions(now_us, process);
        if self.processes[process].gate.depart(now_us) {
            let there_us = micros_up(self.model.round_trip).div_ceil(2);
            return self.agenda.at(now_us + there_us, Event::LimiterCall(process));
        }
        self.schedule_wake(now_us, process);
    }

    pub fn limiter_called(&mut self, now_us: u64, process: ProcessIndex) {
        let (quota, spec) = (&mut self.quota, &self.model.spec);
        self.processes[process].gate.reach(|call| quota.call(Micros(now_us), spec, call));
        let back_us = micros_up(self.model.round_trip) / 2;
        self.agenda.at(now_us + back_us, Event::LimiterReply(process));
    }

    pub fn limiter_replied(&mut self, now_us: u64, process: ProcessIndex) {
        self.processes[process].gate.replied(now_us);
        self.advance_gate(now_us, process);
    }

    pub fn granted(&mut self, now_us: u64, job: JobIndex, granted: GrantedPermit) {
        // A wait for the own account says nothing of the lane.
        self.end_wait(job, (!granted.waited_for_account).then_some(now_us));
        let GrantedPermit { start_at, use_before, slots, window_slot, .. } = granted;
        let permit = SimulatedPermit { use_before, window_slot: Some(window_slot), slots };
        let next = self.transition_instead(now_us, job);
        let state = &mut self.record.jobs[job];
        (state.has_worker_slot, state.is_unsent) = (true, next.is_some());
        state.granted = Some(Box::new(permit));
        if let Some(next) = next {
            self.release_unused(now_us, job);
            return self.commit(now_us, job, next.into());
        }
        let process = self.record.jobs[job].process;
        let (persisted_us, start_us) = (now_us + self.commit_us(process), self.clock.micros(start_at));
        if persisted_us < start_us {
            self.agenda.at(persisted_us, Event::Persisted(job));
        }
        self.agenda.at(start_us.max(persisted_us), Event::Begin(job));
    }

    /// The attempt is recorded: the next job may get a permit.
    pub fn persisted(&mut self, now_us: u64, job: JobIndex) {
        let (now, state) = (self.clock.instant(now_us), &mut self.record.jobs[job]);
        let slot = state.granted.as_mut().and_then(|granted| granted.window_slot.take());
        if slot.is_some_and(|slot| slot.persisted(None, now)) {
            let process = state.process;
            self.advance_gate(now_us, process);
        }
    }

    pub fn begin(&mut self, now_us: u64, job: JobIndex) {
        self.persisted(now_us, job);
        let Some(granted) = &self.record.jobs[job].granted else { return };
        if self.clock.instant(now_us) > granted.use_before {
            self.record.late_permits += 1;
            self.release_unused(now_us, job);
            let process = self.record.jobs[job].process;
            if self.processes[process].deadline_misses.record_miss(Duration::from_micros(now_us)) {
                self.pause_intake(now_us, process, micros_up(DEADLINE_MISS_PAUSE));
            }
            return self.commit(now_us, job, JobStep::Retry { wait_us: micros_up(UNSENT_DELAY) });
        }
        let process = self.record.jobs[job].process;
        self.processes[process].deadline_misses.record_on_time();
        let (model, arrival) = (self.model, &self.arrivals.jobs()[job]);
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
        let unknown = |cause| Outcome::Unknown { cause, retry_after: None };
        let answer = if took_us > timeout_us {
            self.record.timeouts += 1;
            unknown(UnknownCause::Timeout)
        } else {
            self.record.held_us += took_us;
            self.record.answers += 1;
            self.record.faults += u64::from(failed);
            if failed { unknown(UnknownCause::ServerError(500)) } else { Outcome::Accepted { reference: None } }
        };
        let past_deadline = self.expires_us(job).is_some_and(|expires_us| now_us >= expires_us);
        let state = &mut self.record.jobs[job];
        state.first_start_us.get_or_insert(now_us);
        state.late_for_deadline |= past_deadline;
        state.requests += 1;
        if answer.may_have_charged() {
            state.first_sent_us.get_or_insert(now_us);
            state.unknown_us = Some(now_us);
        }
        state.answer = Some(answer);
        self.progress_us = now_us;
        self.agenda.at(now_us + took_us.min(timeout_us), Event::Answer(job));
    }

    pub fn answer(&mut self, now_us: u64, job: JobIndex) {
        let state = &mut self.record.jobs[job];
        let Some(outcome) = state.answer.take() else { return };
        if outcome.transmission() == Transmission::Responded {
            let at = self.clock.instant(now_us);
            self.release_permit(job, |slots| slots.used(at));
        }
        self.record.jobs[job].granted = None;
        let history = self.history(now_us, job);
        let disposition = after_outcome(&outcome, &history, &self.policy, self.rng.random());
        self.record.jobs[job].attempts += u32::from(disposition.counts_attempt);
        self.commit(now_us, job, disposition.transition.into());
        let process = self.record.jobs[job].process;
        self.advance_gate(now_us, process);
    }

    fn release_unused(&mut self, now_us: u64, job: JobIndex) {
        let granted = self.record.jobs[job].granted.as_mut();
        if let Some(slot) = granted.and_then(|granted| granted.window_slot.take()) {
            slot.discarded(self.clock.instant(now_us));
        }
        self.release_permit(job, GrantedSlots::unused);
    }

    fn release_permit(&mut self, job: JobIndex, release: impl FnOnce(GrantedSlots) -> PendingRelease) {
        let state = &mut self.record.jobs[job];
        if let Some(permit) = state.granted.take() {
            self.processes[state.process].gate.release(release(permit.slots));
        }
    }

    /// Transition of a job that must not be sent; `None`: it may be sent.
    fn transition_instead(&self, now_us: u64, job: JobIndex) -> Option<Transition> {
        let expired = self.expires_us(job).is_some_and(|expires_us| now_us >= expires_us);
        let obstacle = expired.then_some(SendObstacle::Expired);
        match before_request(&self.history(now_us, job), &self.policy, obstacle) {
            PreSend::Transition(next) => Some(next),
            PreSend::Charge | PreSend::LookUp => None,
        }
    }

    fn expires_us(&self, job: JobIndex) -> Option<u64> {
        self.arrivals.jobs()[job].expires_us.map(|expires_us| self.model.start_us + expires_us)
    }

    fn history(&self, now_us: u64, job: JobIndex) -> AttemptHistory {
        let state = &self.record.jobs[job];
        let since = |at_us: u64| Duration::from_micros(now_us.saturating_sub(at_us));
        AttemptHistory {
            attempts: state.attempts,
            requests: state.requests,
            unknown: state.unknown_us.is_some(),
            age: state.recorded_us.map(since).unwrap_or_default(),
            first_sent_age: state.first_sent_us.map(since),
            unknown_age: state.unknown_us.map(since),
            ..AttemptHistory::default()
        }
    }
}
