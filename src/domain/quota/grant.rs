//! One call's grants: all limits of a want at once, or none of them.
//!
//! The line is served first in, first out. A want that a limit on everything refuses ends it; one that its own account or
//! reference refuses is passed over, and so are calls of one kind behind one that a limit on that kind refuses. Refuses
//! to book further ahead than the horizon, and to book for a subject at all.

use super::counter::{Availability, Counter};
use super::counters::{Counters, InFlightCost};
use super::subjects::{self, SubjectCounters};
use crate::domain::limit::AppliesTo;
use crate::domain::permit_protocol::{
    CallKind, LimiterRefusal, PermitGrant, PermitRequest, RefusalReason, Shortage, SkippedRequest, SlotInstant,
};

/// How often the limits of a want may push its start on before it is refused: only fixed windows can disagree.
const ROUNDS: usize = 4;

/// What the wants of a call come to.
#[derive(Debug, Default)]
pub(super) struct Grants {
    pub grants: Vec<PermitGrant>,
    pub skipped: Vec<SkippedRequest>,
    pub refused: Option<LimiterRefusal>,
    pub granted: InFlightCost,
    pub latest_us: u64,
    /// Wants of a kind behind one that a limit on this kind alone refused.
    skipped_kinds: Vec<(CallKind, SkippedRequest)>,
}

/// Where all limits on everything have room for a want.
struct CommonStart {
    start_us: u64,
    origins: Vec<SlotInstant>,
    permits: u64,
}

/// Why a want has no place: the cell whose room comes last, or whose past is not known for longest.
struct NoStart {
    /// Among the provider's cells; of a subject's, which limit of the spec.
    position: usize,
    wait_us: u64,
    exact: bool,
    shortage: Shortage,
}

/// The tallies that count one call.
pub(super) struct CallCounters<'a> {
    pub provider: &'a mut Counters,
    pub subjects: &'a mut [SubjectCounters],
}

impl CallCounters<'_> {
    fn matching(&self, of: &[usize], kind: CallKind, shadow: bool) -> Vec<&Counter> {
        let owns = of.iter().filter_map(|position| self.subjects.get(*position)).map(|own| &own.counters);
        let cells = std::iter::once(&*self.provider).chain(owns).flat_map(|tally| &tally.per_limit);
        cells.filter(|cell| cell.spec.shadow == shadow && cell.spec.applies(kind)).collect()
    }

    fn matching_mut(&mut self, of: &[usize], kind: CallKind, shadow: bool) -> Vec<&mut Counter> {
        let owns = subjects::select_mut(self.subjects, of).map(|own| &mut own.counters);
        let cells = std::iter::once(&mut *self.provider).chain(owns).flat_map(|tally| &mut tally.per_limit);
        cells.filter(|cell| cell.spec.shadow == shadow && cell.spec.applies(kind)).collect()
    }
}

/// What a want is decided against.
pub(super) struct GrantContext<'a> {
    pub now_us: u64,
    pub horizon_us: u64,
    /// How long after its grant a permit may begin.
    pub start_delay_max_us: u64,
    /// The spec indices of the provider's cells.
    pub indices: &'a [usize],
}

impl Grants {
    /// Nothing yet.
    pub fn starting_at(now_us: u64) -> Self {
        Self { latest_us: now_us, ..Self::default() }
    }

    /// Serves one want, whose subjects are at these positions; false: the line ends here.
    pub fn serve(
        &mut self,
        terms: &GrantContext<'_>,
        tallies: &mut CallCounters<'_>,
        of: &[usize],
        index: usize,
        want: &PermitRequest,
    ) -> bool {
        if let Some((_, front)) = self.skipped_kinds.iter().find(|(kind, _)| *kind == want.kind) {
            self.skipped.push(SkippedRequest { request_index: index, ..*front });
            return true;
        }
        let cost = u64::from(want.cost.max(1));
        let mut left = u64::from(want.permits);
        while left > 0 {
            let place = match find_start(terms, tallies.provider, cost, want.kind) {
                Ok(place) => place,
                Err(no_place) => return self.refuse(terms, tallies.provider, index, want.kind, &no_place),
            };
            let permits = match subject_room(terms, tallies.subjects, of, (cost, want.kind), place.start_us) {
                Ok(permits) => permits.min(place.permits).min(left),
                Err(NoStart { position: limit, wait_us, exact, shortage: why }) => {
                    self.skipped.push(SkippedRequest { request_index: index, limit, wait_us, exact, shortage: why });
                    return true;
                }
            };
            let permits = count_in_shadow(terms, tallies, of, (cost, want.kind), permits, place.start_us);
            consume(tallies, of, (cost * permits, want.kind), place.start_us);
            left -= permits;
            self.record(terms, (index, want.kind), cost * permits, permits, place);
        }
        true
    }

    fn refuse(
        &mut self,
        terms: &GrantContext<'_>,
        provider: &Counters,
        want: usize,
        kind: CallKind,
        no_place: &NoStart,
    ) -> bool {
        let NoStart { position, wait_us, exact, shortage: why } = *no_place;
        let limit = terms.indices.get(position).copied().unwrap_or(0);
        let on_all = provider.per_limit.get(position).is_none_or(|cell| cell.spec.applies_to == AppliesTo::All);
        if on_all {
            let by = match why {
                Shortage::NoSlot => RefusalReason::Limit { index: limit },
                Shortage::NeedsHistory { readable_in_us } => {
                    RefusalReason::NeedsHistory { index: limit, readable_in_us }
                }
            };
            self.refused = Some(LimiterRefusal { reason: by, wait_us, exact });
            return false;
        }
        let passed_over = SkippedRequest { request_index: want, limit, wait_us, exact, shortage: why };
        self.skipped.push(passed_over);
        self.skipped_kinds.push((kind, passed_over));
        true
    }

    fn record(
        &mut self,
        terms: &GrantContext<'_>,
        (want, kind): (usize, CallKind),
        uses: u64,
        permits: u64,
        place: CommonStart,
    ) {
        *self.granted.of_kind_mut(kind) += uses;
        self.latest_us = self.latest_us.max(place.start_us);
        let wait_us = place.start_us - terms.now_us;
        let permits = u32::try_from(permits).unwrap_or(u32::MAX);
        match self.grants.last_mut() {
            Some(run) if run.request_index == want && run.wait_us == wait_us && run.origins == place.origins => {
                run.permits += permits;
            }
            _ => self.grants.push(PermitGrant { request_index: want, permits, wait_us, origins: place.origins }),
        }
    }
}

/// Where every enforced limit on everything has room.
fn find_start(
    terms: &GrantContext<'_>,
    provider: &Counters,
    cost: u64,
    kind: CallKind,
) -> Result<CommonStart, NoStart> {
    let enforced = |cell: &&Counter| !cell.spec.shadow && cell.spec.applies(kind);
    let counting = provider.per_limit.iter().enumerate().filter(|(_, cell)| enforced(cell));
    if let Some(no_place) = missing_history(terms, counting) {
        return Err(no_place);
    }
    let mut start_us = terms.now_us;
    for _ in 0..ROUNDS {
        let find = |cell: &Counter| {
            let found = cell.find(cost, start_us)?;
            Some(cell.spread(found, cost, terms.now_us))
        };
        let found: Vec<Option<Availability>> = provider
            .per_limit
            .iter()
            .map(|cell| if enforced(&cell) { find(cell) } else { Some(Availability::unconstrained(start_us)) })
            .collect();
        if let Some(no_place) = blocking_limit(terms, provider, &found) {
            return Err(no_place);
        }
        let latest_us = found.iter().flatten().map(|found| found.start_us).max().unwrap_or(start_us);
        // Later than found suits a log and a bucket as well; a fixed window may be another one by then.
        if latest_us == start_us || !provider.per_limit.iter().any(Counter::is_window) {
            let origins = found.iter().flatten().map(|found| found.origin_ms).collect();
            let permits = found.iter().flatten().map(|found| found.permits).min().unwrap_or(0);
            return Ok(CommonStart { start_us: latest_us, origins, permits });
        }
        start_us = latest_us;
    }
    Err(NoStart { position: 0, wait_us: start_us - terms.now_us, exact: false, shortage: Shortage::NoSlot })
}

/// The first of those whose past is not known for longest, with its position.
fn missing_history<'a>(terms: &GrantContext<'_>, cells: impl Iterator<Item = (usize, &'a Counter)>) -> Option<NoStart> {
    let held = cells.filter_map(|(position, cell)| Some((position, cell, cell.needs_history(terms.horizon_us)?)));
    let (position, cell, until_us) = held.min_by_key(|(_, _, until_us)| std::cmp::Reverse(*until_us))?;
    let readable_in_us = cell.readable_at_us(terms.start_delay_max_us).saturating_sub(terms.now_us);
    let why = Shortage::NeedsHistory { readable_in_us };
    Some(NoStart { position, wait_us: until_us - terms.now_us, exact: true, shortage: why })
}

/// Which limit refuses, and for how long: the one whose room comes last.
fn blocking_limit(terms: &GrantContext<'_>, provider: &Counters, found: &[Option<Availability>]) -> Option<NoStart> {
    let mut worst: Option<(usize, u64)> = None;
    for (position, (cell, found)) in provider.per_limit.iter().zip(found).enumerate() {
        let at_us = found.map_or_else(|| earliest_us(terms.now_us, cell), |found| found.start_us);
        let refuses = found.is_none_or(|found| found.start_us > terms.horizon_us || found.permits == 0);
        if refuses && worst.is_none_or(|(_, worst_us)| at_us > worst_us) {
            worst = Some((position, at_us));
        }
    }
    let exact = found.iter().all(Option::is_some);
    worst.map(|(position, at_us)| NoStart {
        position,
        wait_us: at_us - terms.now_us,
        exact,
        shortage: Shortage::NoSlot,
    })
}

/// The earliest instant at which a slot now in flight can be used again: answered at once.
fn earliest_us(now_us: u64, cell: &Counter) -> u64 {
    now_us + cell.spec.window_us
}

/// How many permits the want's own account and reference have room for at its start.
fn subject_room(
    terms: &GrantContext<'_>,
    owns: &[SubjectCounters],
    of: &[usize],
    (cost, kind): (u64, CallKind),
    start_us: u64,
) -> Result<u64, NoStart> {
    let of_want = || of.iter().filter_map(|position| owns.get(*position));
    let cells = of_want().flat_map(|own| own.indices.iter().copied().zip(&own.counters.per_limit));
    let counting = cells.filter(|(_, cell)| !cell.spec.shadow && cell.spec.applies(kind));
    if let Some(no_place) = missing_history(terms, counting) {
        return Err(no_place);
    }
    let mut permits = u64::MAX;
    let mut worst: Option<(usize, u64)> = None;
    let mut exact = true;
    for own in of_want() {
        for (cell, limit) in own.counters.per_limit.iter().zip(&own.indices) {
            if cell.spec.shadow || !cell.spec.applies(kind) {
                continue;
            }
            // Given back, a held slot is as if it had never been taken: so it must be over by now, not only by the start.
            let from_us = if cell.spec.is_held() { terms.now_us } else { start_us };
            let found = cell.find(cost, from_us);
            exact &= found.is_some();
            let at_us = found.map_or_else(|| earliest_us(terms.now_us, cell), |found| found.start_us);
            match found {
                Some(found) if found.start_us == from_us && found.permits > 0 => permits = permits.min(found.permits),
                _ if worst.is_none_or(|(_, worst_us)| at_us > worst_us) => worst = Some((*limit, at_us)),
                _ => {}
            }
        }
    }
    worst.map_or(Ok(permits), |(position, at_us)| {
        Err(NoStart { position, wait_us: at_us - terms.now_us, exact, shortage: Shortage::NoSlot })
    })
}

/// Lets the shadow limits count what they would have done; says how many permits share one fate under all of them.
fn count_in_shadow(
    terms: &GrantContext<'_>,
    tallies: &mut CallCounters<'_>,
    of: &[usize],
    (cost, kind): (u64, CallKind),
    permits: u64,
    start_us: u64,
) -> u64 {
    let room = |cell: &Counter| {
        cell.find(cost, start_us).filter(|found| found.start_us <= terms.horizon_us && found.permits > 0)
    };
    let rooms = tallies.matching(of, kind, true).into_iter().filter_map(room);
    let permits = rooms.map(|found| found.permits).min().map_or(permits, |least| least.min(permits));
    for cell in tallies.matching_mut(of, kind, true) {
        match room(cell) {
            Some(found) => {
                cell.would_have_waited += if found.start_us > start_us { permits } else { 0 };
                cell.consume(cost * permits, found.start_us);
            }
            None => cell.would_have_refused += permits,
        }
    }
    permits
}

fn consume(tallies: &mut CallCounters<'_>, of: &[usize], (uses, kind): (u64, CallKind), start_us: u64) {
    for own in of {
        if let Some(own) = tallies.subjects.get_mut(*own) {
            *own.granted.of_kind_mut(kind) += uses;
            own.latest_us = own.latest_us.max(start_us);
        }
    }
    tallies.matching_mut(of, kind, false).into_iter().for_each(|cell| cell.consume(uses, start_us));
}
