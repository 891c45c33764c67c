//! Grants of one call: a request acquires from all limits at once, or from none.
//!
//! The wait queue is served first in, first out. A request that a limit on all calls refuses ends it. A request that
//! its own account or reference refuses is skipped. If a limit on one kind of call refuses, later requests of that kind
//! are skipped too. A start is booked no further ahead than the horizon, and never for a subject. See
//! `docs/decisions/0016-one-batched-call-per-quota.md`.

use super::counter::{Availability, Counter};
use super::counters::{Counters, InFlightCost, SubjectCounters, select_subjects};
use crate::domain::limit::AppliesTo;
use crate::domain::permit_protocol::{
    CallKind, LimiterRefusal, PermitGrant, PermitRequest, RefusalReason, Shortage, SkippedRequest, SlotInstant,
};

/// Number of times that limits may move a request's start before it is refused: only fixed windows can disagree.
const ROUNDS: usize = 4;

/// Result of a call's requests.
#[derive(Debug, Default)]
pub(super) struct Grants {
    pub grants: Vec<PermitGrant>,
    pub skipped: Vec<SkippedRequest>,
    pub refused: Option<LimiterRefusal>,
    pub granted: InFlightCost,
    pub latest_us: u64,
    /// Kinds of call that are skipped, because a limit on that kind alone refused.
    skipped_kinds: Vec<(CallKind, SkippedRequest)>,
}

/// Start at which all limits on all calls have capacity for a request.
struct CommonStart {
    start_us: u64,
    origins: Vec<SlotInstant>,
    permits: u64,
}

/// Reason why a request has no start: the counter with the latest capacity, or the longest unknown past.
struct NoStart {
    /// Index among the provider's counters; for a subject, the index of the limit in the spec.
    position: usize,
    wait_us: u64,
    exact: bool,
    shortage: Shortage,
}

/// What one permit of a request uses.
#[derive(Clone, Copy)]
struct PermitUse {
    kind: CallKind,
    cost: u64,
}

/// Counters that count one call.
pub(super) struct CallCounters<'a> {
    pub provider: &'a mut Counters,
    pub subjects: &'a mut [SubjectCounters],
}

impl CallCounters<'_> {
    fn matching(&self, positions: &[usize], kind: CallKind, shadow: bool) -> Vec<&Counter> {
        let subjects =
            positions.iter().filter_map(|position| self.subjects.get(*position)).map(|subject| &subject.counters);
        let all = std::iter::once(&*self.provider).chain(subjects).flat_map(|counters| &counters.per_limit);
        all.filter(|counter| counter.spec.shadow == shadow && counter.spec.applies(kind)).collect()
    }

    fn matching_mut(&mut self, positions: &[usize], kind: CallKind, shadow: bool) -> Vec<&mut Counter> {
        let subjects = select_subjects(self.subjects, positions).map(|subject| &mut subject.counters);
        let all = std::iter::once(&mut *self.provider).chain(subjects).flat_map(|counters| &mut counters.per_limit);
        all.filter(|counter| counter.spec.shadow == shadow && counter.spec.applies(kind)).collect()
    }
}

/// Conditions of a decision.
pub(super) struct GrantContext<'a> {
    pub now_us: u64,
    /// Latest start that is booked.
    pub horizon_us: u64,
    /// Longest time from its grant to the start of a permit.
    pub start_delay_max_us: u64,
    /// Spec indices of the provider's counters.
    pub indices: &'a [usize],
}

impl Grants {
    /// Starts without grants.
    pub fn starting_at(now_us: u64) -> Self {
        Self { latest_us: now_us, ..Self::default() }
    }

    /// Serves one request, whose subjects are at these positions; false: the wait queue ends here.
    pub fn serve(
        &mut self,
        context: &GrantContext<'_>,
        counters: &mut CallCounters<'_>,
        positions: &[usize],
        index: usize,
        request: &PermitRequest,
    ) -> bool {
        if let Some((_, front)) = self.skipped_kinds.iter().find(|(kind, _)| *kind == request.kind) {
            self.skipped.push(SkippedRequest { request_index: index, ..*front });
            return true;
        }
        let permit = PermitUse { kind: request.kind, cost: u64::from(request.cost.max(1)) };
        let mut left = u64::from(request.permits);
        while left > 0 {
            let start = match find_start(context, counters.provider, permit) {
                Ok(start) => start,
                Err(no_start) => return self.refuse(context, counters.provider, index, request.kind, &no_start),
            };
            let permits = match subject_room(context, counters.subjects, positions, permit, start.start_us) {
                Ok(permits) => permits.min(start.permits).min(left),
                Err(NoStart { position: limit, wait_us, exact, shortage }) => {
                    self.skipped.push(SkippedRequest { request_index: index, limit, wait_us, exact, shortage });
                    return true;
                }
            };
            let permits = count_in_shadow(context, counters, positions, permit, permits, start.start_us);
            consume(counters, positions, permit.kind, permit.cost * permits, start.start_us);
            left -= permits;
            self.record(context, index, permit, permits, start);
        }
        true
    }

    fn refuse(
        &mut self,
        context: &GrantContext<'_>,
        provider: &Counters,
        request_index: usize,
        kind: CallKind,
        no_start: &NoStart,
    ) -> bool {
        let NoStart { position, wait_us, exact, shortage } = *no_start;
        let limit = context.indices.get(position).copied().unwrap_or(0);
        let on_all = provider.per_limit.get(position).is_none_or(|counter| counter.spec.applies_to == AppliesTo::All);
        if on_all {
            let reason = match shortage {
                Shortage::NoSlot => RefusalReason::Limit { index: limit },
                Shortage::NeedsHistory { readable_in_us } => {
                    RefusalReason::NeedsHistory { index: limit, readable_in_us }
                }
            };
            self.refused = Some(LimiterRefusal { reason, wait_us, exact });
            return false;
        }
        let skipped = SkippedRequest { request_index, limit, wait_us, exact, shortage };
        self.skipped.push(skipped);
        self.skipped_kinds.push((kind, skipped));
        true
    }

    fn record(
        &mut self,
        context: &GrantContext<'_>,
        request_index: usize,
        permit: PermitUse,
        permits: u64,
        start: CommonStart,
    ) {
        *self.granted.of_kind_mut(permit.kind) += permit.cost * permits;
        self.latest_us = self.latest_us.max(start.start_us);
        let wait_us = start.start_us - context.now_us;
        let permits = u32::try_from(permits).unwrap_or(u32::MAX);
        match self.grants.last_mut() {
            Some(grant)
                if grant.request_index == request_index
                    && grant.wait_us == wait_us
                    && grant.origins == start.origins =>
            {
                grant.permits += permits;
            }
            _ => self.grants.push(PermitGrant { request_index, permits, wait_us, origins: start.origins }),
        }
    }
}

/// Earliest start at which every enforced limit on all calls has capacity.
fn find_start(
    context: &GrantContext<'_>,
    provider: &Counters,
    PermitUse { kind, cost }: PermitUse,
) -> Result<CommonStart, NoStart> {
    let enforced = |counter: &&Counter| !counter.spec.shadow && counter.spec.applies(kind);
    let counting = provider.per_limit.iter().enumerate().filter(|(_, counter)| enforced(counter));
    if let Some(no_start) = missing_history(context, counting) {
        return Err(no_start);
    }
    let mut start_us = context.now_us;
    for _ in 0..ROUNDS {
        let find = |counter: &Counter| {
            let found = counter.find(cost, start_us)?;
            Some(counter.spread(found, cost, context.now_us))
        };
        let found: Vec<Option<Availability>> = provider
            .per_limit
            .iter()
            .map(|counter| if enforced(&counter) { find(counter) } else { Some(Availability::unconstrained(start_us)) })
            .collect();
        if let Some(no_start) = blocking_limit(context, provider, &found) {
            return Err(no_start);
        }
        let latest_us = found.iter().flatten().map(|found| found.start_us).max().unwrap_or(start_us);
        // A later start suits a log and a bucket as well; a fixed window may be another one by then.
        if latest_us == start_us || !provider.per_limit.iter().any(Counter::is_window) {
            let origins = found.iter().flatten().map(|found| found.origin_ms).collect();
            let permits = found.iter().flatten().map(|found| found.permits).min().unwrap_or(0);
            return Ok(CommonStart { start_us: latest_us, origins, permits });
        }
        start_us = latest_us;
    }
    Err(NoStart { position: 0, wait_us: start_us - context.now_us, exact: false, shortage: Shortage::NoSlot })
}

/// The first counter with the longest unknown past, with its position.
fn missing_history<'a>(
    context: &GrantContext<'_>,
    counters: impl Iterator<Item = (usize, &'a Counter)>,
) -> Option<NoStart> {
    let blocked = counters
        .filter_map(|(position, counter)| Some((position, counter, counter.needs_history(context.horizon_us)?)));
    let (position, counter, until_us) = blocked.min_by_key(|(_, _, until_us)| std::cmp::Reverse(*until_us))?;
    let readable_in_us = counter.readable_at_us(context.start_delay_max_us).saturating_sub(context.now_us);
    let shortage = Shortage::NeedsHistory { readable_in_us };
    Some(NoStart { position, wait_us: until_us - context.now_us, exact: true, shortage })
}

/// The limit that refuses, and for how long: the one with the latest capacity.
fn blocking_limit(context: &GrantContext<'_>, provider: &Counters, found: &[Option<Availability>]) -> Option<NoStart> {
    let mut worst: Option<(usize, u64)> = None;
    for (position, (counter, found)) in provider.per_limit.iter().zip(found).enumerate() {
        let at_us = found.map_or_else(|| earliest_us(context.now_us, counter), |found| found.start_us);
        let refuses = found.is_none_or(|found| found.start_us > context.horizon_us || found.permits == 0);
        if refuses && worst.is_none_or(|(_, worst_us)| at_us > worst_us) {
            worst = Some((position, at_us));
        }
    }
    let exact = found.iter().all(Option::is_some);
    worst.map(|(position, at_us)| NoStart {
        position,
        wait_us: at_us - context.now_us,
        exact,
        shortage: Shortage::NoSlot,
    })
}

/// Earliest instant at which a slot in flight can be used again: as if answered now.
fn earliest_us(now_us: u64, counter: &Counter) -> u64 {
    now_us + counter.spec.window_us
}

/// Number of permits for which the request's own account and reference have capacity at its start.
fn subject_room(
    context: &GrantContext<'_>,
    subjects: &[SubjectCounters],
    positions: &[usize],
    PermitUse { kind, cost }: PermitUse,
    start_us: u64,
) -> Result<u64, NoStart> {
    let request_subjects = || positions.iter().filter_map(|position| subjects.get(*position));
    let counters =
        request_subjects().flat_map(|subject| subject.indices.iter().copied().zip(&subject.counters.per_limit));
    let counting = counters.filter(|(_, counter)| !counter.spec.shadow && counter.spec.applies(kind));
    if let Some(no_start) = missing_history(context, counting) {
        return Err(no_start);
    }
    let mut permits = u64::MAX;
    let mut worst: Option<(usize, u64)> = None;
    let mut exact = true;
    for subject in request_subjects() {
        for (counter, limit) in subject.counters.per_limit.iter().zip(&subject.indices) {
            if counter.spec.shadow || !counter.spec.applies(kind) {
                continue;
            }
            // A released slot counts as never acquired. So its old use must be over by now, not only by the start.
            let from_us = if counter.spec.is_held() { context.now_us } else { start_us };
            let found = counter.find(cost, from_us);
            exact &= found.is_some();
            let at_us = found.map_or_else(|| earliest_us(context.now_us, counter), |found| found.start_us);
            match found {
                Some(found) if found.start_us == from_us && found.permits > 0 => permits = permits.min(found.permits),
                _ if worst.is_none_or(|(_, worst_us)| at_us > worst_us) => worst = Some((*limit, at_us)),
                _ => {}
            }
        }
    }
    worst.map_or(Ok(permits), |(position, at_us)| {
        Err(NoStart { position, wait_us: at_us - context.now_us, exact, shortage: Shortage::NoSlot })
    })
}

/// Lets the shadow limits count what they would have done; returns the number of permits with the same result under all
/// of them.
fn count_in_shadow(
    context: &GrantContext<'_>,
    counters: &mut CallCounters<'_>,
    positions: &[usize],
    PermitUse { kind, cost }: PermitUse,
    permits: u64,
    start_us: u64,
) -> u64 {
    let availability = |counter: &Counter| {
        counter.find(cost, start_us).filter(|found| found.start_us <= context.horizon_us && found.permits > 0)
    };
    let available = counters.matching(positions, kind, true).into_iter().filter_map(availability);
    let permits = available.map(|found| found.permits).min().map_or(permits, |least| least.min(permits));
    for counter in counters.matching_mut(positions, kind, true) {
        match availability(counter) {
            Some(found) => {
                counter.would_have_waited += if found.start_us > start_us { permits } else { 0 };
                counter.consume(cost * permits, found.start_us);
            }
            None => counter.would_have_refused += permits,
        }
    }
    permits
}

fn consume(counters: &mut CallCounters<'_>, positions: &[usize], kind: CallKind, uses: u64, start_us: u64) {
    for position in positions {
        if let Some(subject) = counters.subjects.get_mut(*position) {
            *subject.granted.of_kind_mut(kind) += uses;
            subject.latest_us = subject.latest_us.max(start_us);
        }
    }
    counters.matching_mut(positions, kind, false).into_iter().for_each(|counter| counter.consume(uses, start_us));
}
