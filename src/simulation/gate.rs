//! The gate of one process in virtual time: the line, and at most one call to the limiter in flight.
//!
//! The rules are those of `limiter::gate`, with its constants. Refuses to grant: the limiter's own state machine does.
//! Clocks agree here, so that comparing them costs nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use super::event::JobIndex;
use crate::domain::decision::{
    BATCH_MAX, ByKind, Call, CallKind, Fate, PERMITS_MAX, PassedOver, Rebuild, Refusal, Reply, Settlement, SlotInstant,
    Subject, Want,
};
use crate::domain::limit::Scope;
use crate::domain::provider::BOOKING_HORIZON;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::settlement::{self, Ended};
use crate::domain::time::{Micros, micros_up};
use crate::limiter::gate::{ASK_AHEAD, ASK_PAUSE, SETTLE_AFTER};

/// What one account's calls are counted by: the subjects, and the largest cost that they can ever admit.
#[derive(Clone, Debug)]
pub(super) struct OfAccount {
    pub subjects: Vec<Subject>,
    pub cost_max: u32,
}

/// Place in line: higher priority first, then first come.
type Place = (u8, u64);

/// Somebody who wants a permit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    pub job: JobIndex,
    pub cost: u16,
    pub priority: u8,
    pub account: Option<u32>,
    pub wait_until_us: u64,
}

#[derive(Debug)]
struct Waiter {
    wish: Wish,
    aside_until_us: Option<u64>,
}

/// A permit, as it was granted.
#[derive(Clone, Debug)]
pub(super) struct Granted {
    pub start_us: u64,
    pub use_before_us: u64,
    pub call: u64,
    pub origins: Rc<[SlotInstant]>,
}

/// What a wish came to.
#[derive(Debug)]
pub(super) enum Verdict {
    Granted(JobIndex, Granted),
    Refused {
        job: JobIndex,
        wait_us: u64,
        of_its_own: bool,
    },
    /// No window can ever admit its cost.
    TooCostly(JobIndex),
}

/// Why the line stands, and whose wait it is.
#[derive(Clone, Copy, Debug)]
struct Standing {
    until_us: u64,
    first: Option<Place>,
}

/// What a permit came to.
#[derive(Debug)]
pub(super) struct Settled {
    pub call: u64,
    pub cost: u16,
    pub account: Option<u32>,
    pub fate: SettledFate,
}

#[derive(Debug)]
pub(super) enum SettledFate {
    Answered { at_us: u64 },
    NotSent { origins: Rc<[SlotInstant]> },
}

#[derive(Debug)]
struct Outgoing {
    call: Call,
    departed_us: u64,
    /// The places of each want.
    places: Vec<Vec<Place>>,
    reply: Option<Reply>,
}

#[derive(Debug)]
pub(super) struct Gate {
    incarnation: u64,
    pub calls: u64,
    come: u64,
    line: BTreeMap<Place, Waiter>,
    ready: BTreeSet<Place>,
    /// By the instant at which they may be asked for again.
    aside: BTreeSet<(u64, Place)>,
    by_patience: BTreeSet<(u64, Place)>,
    settled: Vec<Settled>,
    settle_at_us: Option<u64>,
    standing: Option<Standing>,
    ask_at_us: u64,
    replied_at_us: u64,
    outgoing: Option<Outgoing>,
    /// Since when the limiter has been known to have no memory.
    cold_since_us: Option<u64>,
    /// What the ledger knows of a past that there was not.
    rebuild: Option<Rebuild>,
    /// For when its next wake-up is on the agenda.
    pub woken_at_us: Option<u64>,
}

impl Gate {
    pub fn new(incarnation: u64, now_us: u64) -> Self {
        Self {
            incarnation,
            calls: 0,
            come: 0,
            line: BTreeMap::new(),
            ready: BTreeSet::new(),
            aside: BTreeSet::new(),
            by_patience: BTreeSet::new(),
            settled: Vec::new(),
            settle_at_us: None,
            standing: None,
            ask_at_us: now_us,
            replied_at_us: now_us,
            outgoing: None,
            cold_since_us: None,
            rebuild: None,
            woken_at_us: None,
        }
    }

    pub fn settle(&mut self, now_us: u64, settled: Settled) {
        self.settled.push(settled);
        self.settle_at_us.get_or_insert(now_us + micros_up(SETTLE_AFTER));
    }

    pub fn join(
        &mut self,
        now_us: u64,
        wish: Wish,
        of: Option<&OfAccount>,
        cost_max: u32,
        verdicts: &mut Vec<Verdict>,
    ) {
        let cost_max = of.map_or(cost_max, |of| of.cost_max);
        // A quota that is closed for now is waited for.
        if cost_max > 0 && u32::from(wish.cost) > cost_max {
            return verdicts.push(Verdict::TooCostly(wish.job));
        }
        self.come += 1;
        let place = (u8::MAX - wish.priority, self.come);
        let elder_us = self.elder_aside(place, wish.account);
        self.line.insert(place, Waiter { wish, aside_until_us: None });
        self.ready.insert(place);
        self.by_patience.insert((wish.wait_until_us, place));
        if let Some(until_us) = elder_us {
            self.step_aside(now_us, place, until_us, verdicts);
        } else if self.standing.is_some_and(|standing| standing.first.is_some_and(|first| place < first)) {
            self.standing = None;
            self.ask_at_us = now_us.max(self.replied_at_us + micros_up(ASK_PAUSE));
        }
        self.refuse_impatient(now_us, verdicts);
    }

    /// When the next call is worth making; `None`: not before something happens.
    pub fn next_call_at(&self) -> Option<u64> {
        if self.outgoing.is_some() {
            return None;
        }
        let ready_us = if self.ready.is_empty() { self.aside.first().map(|(until_us, _)| *until_us) } else { Some(0) };
        let wants = ready_us.map(|ready_us| ready_us.max(self.ask_at_us));
        [wants, self.settle_at_us].into_iter().flatten().min()
    }

    /// Packs the next call.
    pub fn depart(&mut self, now_us: u64, of_account: &[Option<OfAccount>]) {
        self.calls += 1;
        while let Some((until_us, place)) = self.aside.first().copied().filter(|(until_us, _)| *until_us <= now_us) {
            self.aside.remove(&(until_us, place));
            self.ready.insert(place);
            if let Some(waiter) = self.line.get_mut(&place) {
                waiter.aside_until_us = None;
            }
        }
        let rest = self.settled.split_off(self.settled.len().min(BATCH_MAX));
        let settled = std::mem::replace(&mut self.settled, rest);
        self.settle_at_us = (!self.settled.is_empty()).then_some(now_us);
        let (wants, places) = self.head(of_account);
        let call = Call {
            incarnation: self.incarnation,
            number: self.calls,
            wants,
            settlements: settlements(&settled, now_us, of_account),
            pause: None,
            rebuild: self.rebuild.take(),
            seeds: None,
            distrust: None,
            run_id: "simulated".to_owned(),
        };
        self.outgoing = Some(Outgoing { call, departed_us: now_us, places, reply: None });
    }

    /// The call as it reaches the limiter; `answer` makes its reply.
    pub fn reach(&mut self, answer: impl FnOnce(&Call) -> Reply) {
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.reply = Some(answer(&outgoing.call));
        }
    }

    /// The reply has arrived.
    pub fn replied(&mut self, now_us: u64, spec: &QuotaSpec, verdicts: &mut Vec<Verdict>) {
        let Some(Outgoing { call, departed_us, places, reply: Some(reply) }) = self.outgoing.take() else { return };
        self.standing = None;
        (self.ask_at_us, self.replied_at_us) = (now_us, now_us);
        let mut places: Vec<_> = places.into_iter().map(IntoIterator::into_iter).collect();
        let budget = spec.use_within();
        for run in &reply.granted {
            let granted = Granted {
                start_us: now_us + run.wait_us,
                use_before_us: departed_us + run.wait_us + micros_up(budget),
                call: call.number,
                origins: run.origins.as_slice().into(),
            };
            let permits = usize::try_from(run.permits).unwrap_or(usize::MAX);
            for place in places.get_mut(run.want).into_iter().flatten().take(permits) {
                if let Some(waiter) = self.leave(place) {
                    verdicts.push(Verdict::Granted(waiter.wish.job, granted.clone()));
                }
            }
        }
        for passed in &reply.passed_over {
            if let Some(places) = places.get_mut(passed.want) {
                self.pass_over(now_us, spec, passed, places, verdicts);
            }
        }
        if let Some(refused) = reply.refused.filter(|refused| refused.by == Refusal::Cold) {
            self.stand_cold(now_us, spec, refused.wait_us, reply.born);
        } else if let Some(refused) = reply.refused {
            let limited = matches!(refused.by, Refusal::Limit { .. });
            let first = self.ready.first().copied().filter(|_| limited);
            if !self.has_sent_away(now_us, refused.wait_us, first, verdicts) {
                self.stand(now_us, refused.wait_us, refused.exact, first);
            }
        }
        self.refuse_impatient(now_us, verdicts);
    }

    fn stand(&mut self, now_us: u64, wait_us: u64, exact: bool, first: Option<Place>) {
        let until_us = now_us + wait_us;
        // Only an exact start can be booked.
        let ahead = if exact { ASK_AHEAD } else { Duration::ZERO };
        self.ask_at_us = until_us.saturating_sub(micros_up(ahead)).max(now_us + micros_up(ASK_PAUSE));
        self.standing = Some(Standing { until_us, first });
    }

    /// Whether the first wants more than somebody behind it, more than there is, and will not wait for it: it goes, with all who
    /// want as much and are no more patient, and those behind are asked for at once.
    fn has_sent_away(&mut self, now_us: u64, wait_us: u64, first: Option<Place>, verdicts: &mut Vec<Verdict>) -> bool {
        let until_us = now_us + wait_us;
        let first = first.and_then(|first| self.line.get(&first)).map(|waiter| waiter.wish);
        let Some(Wish { cost, .. }) = first.filter(|it| it.cost > 1 && it.wait_until_us < until_us) else {
            return false;
        };
        if !self.line.values().any(|other| other.wish.cost < cost && other.aside_until_us.is_none()) {
            return false;
        }
        let impatient = self.by_patience.iter().take_while(|(patience_us, _)| *patience_us < until_us);
        let as_much = |place: &Place| self.line.get(place).is_some_and(|waiter| waiter.wish.cost >= cost);
        let places: Vec<Place> = impatient.map(|(_, place)| *place).filter(as_much).collect();
        for place in places {
            verdicts.extend(self.leave(place).map(|waiter| refused(waiter.wish.job, wait_us, true)));
        }
        self.ask_at_us = now_us + micros_up(ASK_PAUSE);
        true
    }

    /// Until no permit of a lost state can be in hands any more; then the ledger is asked.
    fn stand_cold(&mut self, now_us: u64, spec: &QuotaSpec, wait_us: u64, born: Micros) {
        let since_us = *self.cold_since_us.get_or_insert(now_us);
        let asked_us = since_us + micros_up(BOOKING_HORIZON + spec.send_budget);
        if now_us >= asked_us {
            self.rebuild = Some(unused(born));
        }
        self.stand(now_us, wait_us.min(asked_us.saturating_sub(now_us)), false, None);
    }

    fn pass_over(
        &mut self,
        now_us: u64,
        spec: &QuotaSpec,
        passed: &PassedOver,
        mut places: impl Iterator<Item = Place>,
        verdicts: &mut Vec<Verdict>,
    ) {
        match spec.limits.get(passed.limit) {
            Some(limit) if limit.scope != Scope::Provider => {
                let until_us = now_us + passed.wait_us.max(micros_up(ASK_PAUSE));
                places.for_each(|place| self.step_aside(now_us, place, until_us, verdicts));
            }
            // All calls here are charges: a limit on charges alone holds the line like one on everything.
            _ if self.standing.is_none() => self.stand(now_us, passed.wait_us, passed.exact, places.next()),
            _ => {}
        }
    }

    /// Not asked for before those of its account who came earlier; refused if that takes too long.
    fn step_aside(&mut self, now_us: u64, place: Place, until_us: u64, verdicts: &mut Vec<Verdict>) {
        let Some(Wish { account, wait_until_us, .. }) = self.line.get(&place).map(|waiter| waiter.wish) else { return };
        let until_us = until_us.max(self.elder_aside(place, account).unwrap_or(0));
        if wait_until_us < until_us {
            if let Some(waiter) = self.leave(place) {
                verdicts.push(refused(waiter.wish.job, until_us - now_us, true));
            }
            return;
        }
        self.ready.remove(&place);
        self.aside.insert((until_us, place));
        if let Some(waiter) = self.line.get_mut(&place) {
            waiter.aside_until_us = Some(until_us);
        }
    }

    fn elder_aside(&self, place: Place, account: Option<u32>) -> Option<u64> {
        let elder = |(_, other): &&(u64, Place)| {
            *other < place && self.line.get(other).is_some_and(|it| it.wish.account == account)
        };
        account.and_then(|_| self.aside.iter().rev().find(elder)).map(|(until_us, _)| *until_us)
    }

    fn leave(&mut self, place: Place) -> Option<Waiter> {
        let waiter = self.line.remove(&place)?;
        self.ready.remove(&place);
        self.by_patience.remove(&(waiter.wish.wait_until_us, place));
        if let Some(until_us) = waiter.aside_until_us {
            self.aside.remove(&(until_us, place));
        }
        Some(waiter)
    }

    /// Sends away whoever will not wait as long as the line stands.
    fn refuse_impatient(&mut self, now_us: u64, verdicts: &mut Vec<Verdict>) {
        self.standing.take_if(|standing| standing.until_us <= now_us);
        let Some(Standing { until_us, .. }) = self.standing else { return };
        while let Some((_, place)) =
            self.by_patience.first().copied().filter(|(patience_us, _)| *patience_us < until_us)
        {
            let Some(waiter) = self.leave(place) else { break };
            verdicts.push(refused(waiter.wish.job, until_us - now_us, false));
        }
    }

    /// The first in line, neighbours who want the same together.
    fn head(&self, of_account: &[Option<OfAccount>]) -> (Vec<Want>, Vec<Vec<Place>>) {
        let (mut wants, mut places): (Vec<Want>, Vec<Vec<Place>>) = (Vec::new(), Vec::new());
        let mut last = None;
        for place in self.ready.iter().take(BATCH_MAX) {
            let Some(Waiter { wish, .. }) = self.line.get(place) else { continue };
            match (wants.last_mut(), places.last_mut()) {
                (Some(want), Some(places)) if last == Some((wish.account, wish.cost)) && want.permits < PERMITS_MAX => {
                    want.permits += 1;
                    places.push(*place);
                }
                _ => {
                    let subjects = subjects(wish.account, of_account);
                    wants.push(Want { subjects, ..Want::charges(1, u32::from(wish.cost)) });
                    places.push(vec![*place]);
                }
            }
            last = Some((wish.account, wish.cost));
        }
        (wants, places)
    }
}

/// A first call, by which a limiter knows that nothing was used before.
pub(super) fn warming(now_us: u64) -> Call {
    Call {
        incarnation: u64::from(u32::MAX),
        number: 1,
        wants: Vec::new(),
        settlements: Vec::new(),
        pause: None,
        rebuild: Some(unused(Micros(now_us))),
        seeds: None,
        distrust: None,
        run_id: "simulated".to_owned(),
    }
}

fn unused(born: Micros) -> Rebuild {
    Rebuild { born, ended: Vec::new(), open: ByKind::default() }
}

fn refused(job: JobIndex, wait_us: u64, of_its_own: bool) -> Verdict {
    Verdict::Refused { job, wait_us: wait_us.max(1_000), of_its_own }
}

fn subjects(account: Option<u32>, of_account: &[Option<OfAccount>]) -> Vec<Subject> {
    let index = account.and_then(|account| usize::try_from(account).ok());
    index.and_then(|index| of_account.get(index)?.as_ref()).map_or_else(Vec::new, |of| of.subjects.clone())
}

fn settlements(settled: &[Settled], now_us: u64, of_account: &[Option<OfAccount>]) -> Vec<Settlement> {
    let ended = settled.iter().map(|one| {
        let fate = match &one.fate {
            SettledFate::Answered { at_us } => Fate::Used { age: Duration::from_micros(now_us.saturating_sub(*at_us)) },
            SettledFate::NotSent { origins } => Fate::NotSent { origins: origins.to_vec() },
        };
        Ended { call: one.call, of: one.account, cost: u32::from(one.cost), fate }
    });
    settlement::settlements(ended, |account| (CallKind::Charge, subjects(*account, of_account)))
}
