//! From the queue to the gate: places, claims, the leaky bucket, and what waits too long for it.
//!
//! Refuses to send: a permit and what follows from it is [`super::request`]'s.

use std::time::Duration;

use super::{End, Put, World, at};
use crate::domain::time::micros_up;
use crate::queue::DELAY_STEPS;
use crate::simulation::event::{Event, JobIndex, ProcessIndex};
use crate::simulation::gate::Wish;
use crate::simulation::process::LetOut;
use crate::worker::execute::BUCKET_WAIT;

impl World<'_> {
    /// Hands out what the queue holds to those who take, in turn.
    pub(super) fn feed(&mut self, now_us: u64) {
        let processes = self.processes.len();
        while !self.queue.is_empty() {
            let next = (0..processes).map(|step| (self.turn_to_take + step) % processes);
            let Some(taker) = next.into_iter().find(|index| self.processes[*index].takes(now_us)) else { return };
            let Some(job) = self.queue.pop_front() else { return };
            self.turn_to_take = taker + 1;
            self.processes[taker].free_places -= 1;
            let state = &mut self.record.jobs[at(job)];
            state.process = ProcessIndex::try_from(taker).unwrap_or(0);
            state.deliveries += 1;
            state.delivered_us = now_us;
            self.agenda.at(now_us + self.commit_us, Event::Claimed(job));
        }
    }

    pub(super) fn claimed(&mut self, now_us: u64, job: JobIndex) {
        self.record.jobs[at(job)].recorded_us.get_or_insert(now_us);
        let state = &self.record.jobs[at(job)];
        let expires_us = self.expires_us(job).filter(|_| state.unknown_us.is_none()).unwrap_or(u64::MAX);
        let ready_us = state.wake_us.min(expires_us);
        let wait_us = ready_us.saturating_sub(now_us);
        if wait_us == 0 {
            self.enter(now_us, job);
        } else if wait_us < micros_up(DELAY_STEPS[0]) {
            self.agenda.at(ready_us, Event::Rested(job));
        } else {
            self.put_down(now_us, job, Put::Again { wait_us });
        }
    }

    /// To the leaky bucket, unless there is nothing to send any more.
    pub(super) fn enter(&mut self, now_us: u64, job: JobIndex) {
        if let Some(next) = self.no_longer(now_us, job) {
            return self.put_down(now_us, job, next.into());
        }
        let (priority, state) = (self.arrivals.jobs()[at(job)].priority, &self.record.jobs[at(job)]);
        let (process, delivery, patience_us) = (state.process, state.deliveries, state.delivered_us + self.patience_us);
        self.processes[at(process)].enter(job, priority);
        self.let_out(now_us, process);
        if self.processes[at(process)].waits(job) {
            self.agenda.at(patience_us.max(now_us), Event::TurnTimeout(job, delivery));
        }
    }

    pub(super) fn turn_timeout(&mut self, now_us: u64, job: JobIndex, delivery: u32) {
        let state = &self.record.jobs[at(job)];
        let (process, same) = (state.process, state.deliveries == delivery);
        if same && self.processes[at(process)].give_up(job) {
            self.put_down(now_us, job, Put::Again { wait_us: micros_up(BUCKET_WAIT) });
        }
    }

    pub(super) fn let_out(&mut self, now_us: u64, process: ProcessIndex) {
        let since_start = Duration::from_micros(now_us - self.model.start_us);
        loop {
            match self.processes[at(process)].let_out(now_us, since_start) {
                LetOut::Job(job) => self.ask(now_us, process, job),
                LetOut::WakeAt(at_us) => break self.agenda.at(at_us, Event::Outflow(process)),
                LetOut::Nobody => break,
            }
        }
        self.judge(now_us, process);
    }

    fn ask(&mut self, now_us: u64, process: ProcessIndex, job: JobIndex) {
        self.record.jobs[at(job)].has_turn = true;
        let arrival = &self.arrivals.jobs()[at(job)];
        let of = arrival.account.and_then(|account| self.of_account.get(at(account)));
        if let Some(None) = of {
            return self.put_down(now_us, job, Put::End(End::Blocked));
        }
        let patience_us = if self.model.blocks() {
            self.record.jobs[at(job)].delivered_us + self.patience_us
        } else {
            now_us + micros_up(DELAY_STEPS[0])
        };
        let wish = Wish {
            job,
            cost: arrival.cost,
            priority: arrival.priority,
            account: arrival.account,
            wait_until_us: patience_us,
        };
        let of = of.and_then(Option::as_ref);
        self.processes[at(process)].gate.join(now_us, wish, of, self.cost_max, &mut self.verdicts);
    }

    /// The lane takes no more until shortly before this wait is over.
    pub(super) fn rest(&mut self, now_us: u64, process: ProcessIndex, wait_us: u64) {
        if let Some(until_us) = self.processes[at(process)].stop_taking(now_us, wait_us) {
            self.agenda.at(until_us, Event::TakeAgain(process));
        }
    }
}
