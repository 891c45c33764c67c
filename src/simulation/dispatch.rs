//! Dispatcher of a process in virtual time: the jobs that it has claimed from the backlog, and whether its lane is
//! limited.
//!
//! The rules and constants are those of `worker::backlog`.

use std::collections::{BTreeMap, BTreeSet};

use super::event::JobIndex;
use crate::domain::fair_order::{FairClaim, FairFlow};
use crate::domain::provider::Provider;
use crate::domain::time::micros_up;
use crate::ledger::backlog::FlowClass;
use crate::worker::backlog::claimed_ahead::{AHEAD_MIN, AheadBounds, startable_soon};
use crate::worker::backlog::permit_waits::LIMITED_AFTER;
use crate::worker::backlog::{CLAIM_MAX, CLAIM_PAUSE, QUANTUM, SMALL_CLAIM_PAUSE};
use crate::worker::lane::{RESUME_AHEAD, prefetch};

/// A flow by its class and the index of its account.
pub(super) type Flow = FairFlow<Option<u32>>;

#[derive(Debug)]
pub(super) struct Dispatcher {
    bounds: AheadBounds,
    startable_soon: u32,
    /// Claimed jobs that wait for their permits.
    ahead: BTreeMap<Flow, u32>,
    all_ahead: u32,
    /// New jobs on their way to the gate.
    pub admitted: u32,
    /// Jobs at the gate, by the instant at which they began to wait.
    waits: BTreeSet<(u64, JobIndex)>,
    last_granted_after_us: u64,
    /// The last claim left jobs behind for which the lane has no room yet.
    has_more: bool,
    claimed_at_us: u64,
    /// Nothing is claimed before.
    not_before_us: u64,
    /// A limit pauses the lane until then.
    limited_until_us: u64,
    /// Instant of the next scheduled look.
    scheduled_us: Option<u64>,
}

/// What a dispatcher does next.
#[derive(Debug)]
pub(super) enum DispatchStep {
    Claim(FairClaim<Option<u32>>),
    WaitUntil(u64),
    /// Until a claimed job has its permit.
    WaitForRoom,
}

impl Dispatcher {
    pub fn new(provider: &Provider) -> Self {
        Self {
            bounds: AheadBounds::of(provider, prefetch(provider)),
            startable_soon: startable_soon(provider),
            ahead: BTreeMap::new(),
            all_ahead: 0,
            admitted: 0,
            waits: BTreeSet::new(),
            last_granted_after_us: 0,
            has_more: false,
            claimed_at_us: 0,
            not_before_us: 0,
            limited_until_us: 0,
            scheduled_us: None,
        }
    }

    /// Whether new jobs wait in the backlog. `is_blocked`: the gate is, by a limit.
    pub fn is_limited(&self, now_us: u64, is_blocked: impl FnOnce() -> bool) -> bool {
        self.has_more || self.limited_until_us > now_us || self.has_long_waits(now_us, is_blocked)
    }

    fn has_long_waits(&self, now_us: u64, is_blocked: impl FnOnce() -> bool) -> bool {
        let pending = self.admitted.saturating_add(u32::try_from(self.waits.len()).unwrap_or(u32::MAX));
        if pending >= AHEAD_MIN && pending >= self.startable_soon {
            return true;
        }
        let limited_after_us = micros_up(LIMITED_AFTER);
        let is_long = self.waits.first().is_some_and(|(began_us, _)| now_us > began_us + limited_after_us);
        is_long && (self.last_granted_after_us > limited_after_us || is_blocked())
    }

    pub fn begin_wait(&mut self, now_us: u64, job: JobIndex) {
        self.waits.insert((now_us, job));
    }

    /// A job's wait at the gate has ended.
    pub fn end_wait(&mut self, began_us: u64, job: JobIndex, granted_at_us: Option<u64>) {
        self.waits.remove(&(began_us, job));
        if let Some(granted_at_us) = granted_at_us {
            self.last_granted_after_us = granted_at_us - began_us;
        }
    }

    /// A limit pauses the lane.
    pub fn pause_for_limit(&mut self, until_us: u64) {
        self.limited_until_us = self.limited_until_us.max(until_us);
    }

    /// Claims nothing until then.
    pub fn hold_until(&mut self, until_us: u64) {
        self.not_before_us = self.not_before_us.max(until_us);
    }

    /// The next step, while jobs of these classes may be claimed.
    pub fn next_step(&self, now_us: u64, first_class: u8, paused_until_us: u64) -> DispatchStep {
        let limited_until_us = self.limited_until_us.saturating_sub(micros_up(RESUME_AHEAD));
        let until_us = limited_until_us.max(paused_until_us).max(self.not_before_us);
        if until_us > now_us {
            return DispatchStep::WaitUntil(until_us);
        }
        let free = self.bounds.all.saturating_sub(self.all_ahead);
        let (jobs, class_max) = if free == 0 {
            let urgent: u32 =
                self.ahead.iter().filter(|(flow, _)| flow.class <= first_class).map(|(_, jobs)| jobs).sum();
            (self.bounds.all.saturating_sub(urgent), first_class)
        } else {
            (free, FlowClass::LAST.number())
        };
        let small_claim_at_us = self.claimed_at_us + micros_up(SMALL_CLAIM_PAUSE);
        if jobs == 0 {
            return DispatchStep::WaitForRoom;
        }
        if jobs < self.bounds.worth_a_claim() && small_claim_at_us > now_us {
            return DispatchStep::WaitUntil(small_claim_at_us);
        }
        let is_full = |(_, jobs): &(&Flow, &u32)| **jobs >= self.bounds.of_one_flow;
        DispatchStep::Claim(FairClaim {
            at_most: jobs.min(CLAIM_MAX) as usize,
            quantum: QUANTUM as usize,
            flow_max: self.bounds.of_one_flow as usize,
            except: self.ahead.iter().filter(is_full).map(|(flow, _)| *flow).collect(),
            class_max,
        })
    }

    /// A claim has taken these jobs.
    pub fn claimed(&mut self, now_us: u64, claim: &FairClaim<Option<u32>>, flows: impl ExactSizeIterator<Item = Flow>) {
        self.claimed_at_us = now_us;
        let has_more = flows.len() == claim.at_most;
        for flow in flows {
            *self.ahead.entry(flow).or_default() += 1;
            self.all_ahead += 1;
        }
        if claim.class_max == FlowClass::LAST.number() {
            self.has_more = has_more;
        }
        if !has_more {
            self.hold_until(now_us + micros_up(CLAIM_PAUSE));
        }
    }

    /// A claimed job waits for its permit no longer.
    pub fn release_ahead(&mut self, flow: Flow) {
        if let Some(jobs) = self.ahead.get_mut(&flow) {
            *jobs -= 1;
            self.all_ahead -= 1;
            if *jobs == 0 {
                self.ahead.remove(&flow);
            }
        }
    }

    /// Whether a look at this instant is to be scheduled: none is that early.
    pub fn schedule(&mut self, at_us: u64) -> bool {
        let is_earlier = self.scheduled_us.is_none_or(|known_us| at_us < known_us);
        if is_earlier {
            self.scheduled_us = Some(at_us);
        }
        is_earlier
    }

    /// A scheduled look has come.
    pub fn woken(&mut self, now_us: u64) {
        self.scheduled_us.take_if(|known_us| *known_us <= now_us);
    }
}
