//! The line before the gate: who waits, in which order, and who has waited long enough.
//!
//! Refuses to overtake: a want that cannot be granted holds those behind it, so that a costly job is not starved by them, as
//! long as it waits. Other processes have lines of their own, and can overtake it while they take what comes free. One whose
//! own account or reference refuses steps aside until that is over, and holds nobody.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use self::waiters::Waiters;
use super::standing::{Kinds, Standing};
use super::{Concerns, GateRefusal, Grant, LinePlace, RefusedBy};
use crate::domain::decision::{BATCH_MAX, CallKind, Subject, Want};
use crate::domain::job::JobId;
use crate::domain::limit::{AppliesTo, Scope};
use crate::domain::quota_spec::{Blocked, CellSpec, QuotaSpec};

mod waiters;

/// How long a job of a blocked account is sent away before it is looked at again.
const BLOCKED_WAIT: Duration = Duration::from_secs(60);

/// Whose calls a permit is counted with, apart from everybody's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Of {
    pub kind: Option<CallKind>,
    pub account: Option<String>,
    /// A digest; references are long and not ours to keep.
    pub reference: Option<String>,
}

impl Of {
    pub fn kind(&self) -> CallKind {
        self.kind.unwrap_or(CallKind::Charge)
    }

    /// The subjects that count a new permit.
    ///
    /// # Errors
    /// [`Blocked`] by a rule on the account: there must be none.
    pub fn subjects(&self, spec: &QuotaSpec) -> Result<Vec<Subject>, Blocked> {
        spec.subjects(self.account.as_deref(), self.reference.as_deref())
    }

    /// The subjects that count what was granted before; an account that was blocked meanwhile is counted nowhere any more.
    pub fn subjects_to_settle(&self, spec: &QuotaSpec) -> Vec<Subject> {
        self.subjects(spec).unwrap_or_default()
    }
}

/// Somebody who wants a permit.
#[derive(Debug)]
pub(super) struct Waiter {
    /// Whose place may be asked for.
    pub job: Option<JobId>,
    pub cost: u32,
    pub priority: u8,
    pub of: Of,
    /// As the job has it, for the ledger.
    pub reference: Option<String>,
    /// Will not wait in hand beyond this.
    pub wait_until: Instant,
    pub reply: oneshot::Sender<Grant>,
    /// Refused by a limit of its own until then.
    pub aside: Option<Aside>,
}

/// Why a waiter steps aside, and until when.
#[derive(Clone, Debug)]
pub(super) struct Aside {
    pub until: Instant,
    pub by: RefusedBy,
    pub exact: bool,
    /// What the limit counts together; those who come later of the same stay behind.
    pub counts: Option<(Scope, AppliesTo)>,
}

impl Waiter {
    /// Whether it stands aside for a limit that counts the other one with it.
    fn holds(&self, later: &Of) -> bool {
        let Some((scope, applies_to)) = self.aside.as_ref().and_then(|aside| aside.counts) else { return false };
        let of_one = match scope {
            Scope::Provider => false,
            Scope::Account => self.of.account == later.account,
            Scope::Reference => self.of.reference == later.reference,
        };
        of_one && (applies_to == AppliesTo::All || self.of.kind() == later.kind())
    }

    /// When it is worth asking for; `None`: now.
    fn ready_at(&self, kinds: &Kinds) -> Option<Instant> {
        let of_kind = kinds.get(&self.of.kind()).map(|standing| standing.ask_at);
        self.aside.as_ref().map(|aside| aside.until).max(of_kind)
    }
}

/// Place in line: higher priority first, then first come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    priority_reversed: u8,
    arrival: u64,
}

/// Neighbours in line who want the same.
#[derive(Debug)]
pub(super) struct Group {
    pub want: Want,
    pub of: Of,
    /// As the first job has it.
    pub reference: Option<String>,
    /// What holds slots of its own account or reference.
    pub own_cells: Vec<CellSpec>,
    pub places: Vec<Place>,
}

#[derive(Debug, Default)]
pub(super) struct Line {
    waiters: Waiters,
    arrivals: u64,
}

impl Line {
    /// Joins, unless the spec can never admit it; returns its place if it need not step aside.
    pub fn join(&mut self, waiter: Waiter, spec: &QuotaSpec, now: Instant) -> Option<Place> {
        let waiter = admissible(waiter, spec)?;
        self.arrivals += 1;
        let place = Place { priority_reversed: u8::MAX - waiter.priority, arrival: self.arrivals };
        let held_by = self.elder_aside(place, &waiter.of).cloned();
        self.waiters.insert(place, waiter);
        match held_by {
            Some(aside) => {
                self.step_aside(place, &aside, now);
                None
            }
            None => Some(place),
        }
    }

    /// The longest wait of those before this place who stand aside for what counts its bearer as well.
    fn elder_aside(&self, place: Place, of: &Of) -> Option<&Aside> {
        let elders = self.waiters.aside_before(..place).filter(|elder| !elder.reply.is_closed() && elder.holds(of));
        elders.filter_map(|elder| elder.aside.as_ref()).max_by_key(|aside| aside.until)
    }

    /// Under another spec: what stood aside may pass now, and what waited may never.
    pub fn respec(&mut self, spec: &QuotaSpec) {
        for (place, mut waiter) in std::mem::take(&mut self.waiters) {
            waiter.aside = None;
            if let Some(waiter) = admissible(waiter, spec) {
                self.waiters.insert(place, waiter);
            }
        }
    }

    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets those who have gone away, now and then; nobody asks for them meanwhile.
    pub fn sweep(&mut self) {
        self.waiters.sweep();
    }

    /// The first in line who do not stand aside, as many as there is room for, for one call.
    pub fn head(&mut self, spec: &QuotaSpec, kinds: &Kinds, room: u32, now: Instant) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        self.waiters.return_from_aside(|aside| aside.until <= now);
        let present = self.waiters.iter().filter(|(_, waiter)| !waiter.reply.is_closed());
        let ready = present.filter(|(_, waiter)| waiter.ready_at(kinds) <= Some(now));
        for (place, waiter) in ready.take(BATCH_MAX.min(usize::try_from(room).unwrap_or(BATCH_MAX))) {
            match groups.last_mut() {
                Some(group) if group.of == waiter.of && group.want.cost == waiter.cost => {
                    group.want.permits += 1;
                    group.places.push(*place);
                }
                _ => {
                    // One who is blocked by now is told so when the settings are followed.
                    let Ok(subjects) = waiter.of.subjects(spec) else { continue };
                    let (of, cost, kind) = (waiter.of.clone(), waiter.cost, waiter.of.kind());
                    let own_cells = subjects.iter().flat_map(|subject| spec.subject_cells(subject));
                    let own_cells = own_cells.filter(|cell| cell.held() && cell.applies(kind)).collect();
                    let want = Want { permits: 1, cost, kind, subjects };
                    let reference = waiter.reference.clone();
                    groups.push(Group { want, of, reference, own_cells, places: vec![*place] });
                }
            }
        }
        if groups.is_empty() {
            self.waiters.sweep_all();
        }
        groups
    }

    /// When somebody who must wait may be asked for again; `None`: somebody may be now, or nobody is there.
    pub fn ready_at(&self, kinds: &Kinds) -> Option<Instant> {
        let mut earliest = None;
        for (_, waiter) in self.waiters.iter() {
            let at = waiter.ready_at(kinds)?;
            earliest = Some(earliest.map_or(at, |known: Instant| known.min(at)));
        }
        earliest
    }

    /// The first of those who may be asked for.
    pub fn first_ready(&self, kinds: &Kinds, now: Instant) -> Option<Place> {
        self.waiters.iter().find(|(_, waiter)| waiter.ready_at(kinds) <= Some(now)).map(|(place, _)| *place)
    }

    pub fn leave(&mut self, place: Place) -> Option<Waiter> {
        self.waiters.remove(place)
    }

    /// Steps aside, or is refused if that takes too long; not asked for before those who came earlier.
    pub fn step_aside(&mut self, place: Place, aside: &Aside, now: Instant) {
        let Some(waiter) = self.waiters.of(place) else { return };
        let aside =
            self.elder_aside(place, &waiter.of).filter(|elder| elder.until > aside.until).unwrap_or(aside).clone();
        if waiter.wait_until >= aside.until {
            self.waiters.set_aside(place, aside);
        } else if let Some(waiter) = self.waiters.remove(place) {
            refuse(waiter, aside.until.saturating_duration_since(now), aside.exact, &aside.by, Concerns::Itself);
        }
    }

    /// Those who stood aside for a history stand in line again.
    pub fn return_from_history(&mut self) {
        self.waiters.return_from_aside(|aside| aside.by == RefusedBy::NeedsHistory);
    }

    /// Stays in line, but is not asked for before this.
    pub fn put_off(&mut self, place: Place, until: Instant) {
        let by = RefusedBy::StoreAway("its clock was not compared for too long".to_owned());
        self.waiters.set_aside(place, Aside { until, by, exact: false, counts: None });
    }

    /// Where a job stands, and what it waits for: something of its own, its kind's standing, or everybody's.
    pub fn place_of(&self, job: &JobId, standing: Option<&Standing>, kinds: &Kinds) -> Option<LinePlace> {
        let (place, waiter) = self.waiters.iter().find(|(_, waiter)| waiter.job.as_ref() == Some(job))?;
        let goes_first = |elder: &&Waiter| {
            let has_gone = elder.reply.is_closed();
            !has_gone && (elder.aside.is_none() || elder.holds(&waiter.of))
        };
        let (mut before, mut cost_before) = (0, 0);
        for elder in self.waiters.before(..*place).filter(goes_first) {
            before += 1;
            cost_before += u64::from(elder.cost);
        }
        let aside = waiter.aside.as_ref().map(|aside| (aside.by.clone(), aside.until, aside.exact));
        let of_its_own = aside.is_some();
        let line = standing.or_else(|| kinds.get(&waiter.of.kind())).map(|it| (it.by.clone(), it.until, it.exact));
        Some(LinePlace { before, cost_before, refused: aside.or(line), of_its_own })
    }

    /// When the next of them will have waited long enough.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.waiters.first_time()
    }

    /// Whether the first in line wants more than somebody behind it, more than there is, and will not wait for it. Then it goes,
    /// with all who want as much and are no more patient, and those behind may have what there is. Their lane need not rest for
    /// that.
    pub fn send_costly_away(&mut self, first: Place, standing: &Standing, now: Instant) -> bool {
        let Standing { by, until, exact, .. } = standing;
        let goes = |waiter: &&Waiter| waiter.cost > 1 && waiter.wait_until < *until;
        let Some(cost) = self.waiters.of(first).filter(goes).map(|waiter| waiter.cost) else { return false };
        if !self.waiters.iter().any(|(_, other)| other.cost < cost && other.aside.is_none()) {
            return false;
        }
        for place in self.waiters.impatient(*until) {
            if self.waiters.of(place).is_some_and(|waiter| waiter.cost >= cost)
                && let Some(waiter) = self.waiters.remove(place)
            {
                refuse(waiter, until.saturating_duration_since(now), *exact, by, Concerns::Itself);
            }
        }
        true
    }

    /// Refuses everybody, or everybody of a kind, who would have to wait beyond their time. What refuses look-ups alone says
    /// nothing of the charges, which are what a lane takes.
    pub fn refuse_waiting_for(&mut self, standing: &Standing, kind: Option<CallKind>, now: Instant) {
        let Standing { by, until, exact, .. } = standing;
        let concerns = match kind {
            None => Concerns::All,
            Some(CallKind::Charge) => Concerns::Charges,
            Some(CallKind::Lookup) => Concerns::Itself,
        };
        for place in self.waiters.impatient(*until) {
            let concerned = |waiter: &Waiter| kind.is_none_or(|kind| kind == waiter.of.kind());
            if self.waiters.of(place).is_some_and(concerned)
                && let Some(waiter) = self.waiters.remove(place)
            {
                refuse(waiter, until.saturating_duration_since(now), *exact, by, concerns);
            }
        }
    }
}

/// Those whose account is blocked, and those whose cost no window can ever admit, are told so.
fn admissible(waiter: Waiter, spec: &QuotaSpec) -> Option<Waiter> {
    let Ok(subjects) = waiter.of.subjects(spec) else {
        let account = waiter.of.account.clone().unwrap_or_default();
        refuse(waiter, BLOCKED_WAIT, false, &RefusedBy::Blocked { account }, Concerns::Itself);
        return None;
    };
    // A quota that is closed for now is waited for, and any other admits one.
    if waiter.cost > 1
        && let Some((limit, at_once)) = spec.narrowest(waiter.of.kind(), &subjects)
        && at_once > 0
        && waiter.cost > at_once
    {
        refuse(waiter, Duration::ZERO, true, &RefusedBy::TooCostly { limit, at_once }, Concerns::Itself);
        return None;
    }
    Some(waiter)
}

fn refuse(waiter: Waiter, wait: Duration, exact: bool, by: &RefusedBy, concerns: Concerns) {
    let never = matches!(by, RefusedBy::TooCostly { .. });
    let retry_after = if never { Duration::ZERO } else { wait.max(Duration::from_millis(1)) };
    // Whoever has gone away needs no answer.
    let _ = waiter.reply.send(Grant::Refused(GateRefusal { retry_after, exact, by: by.clone(), concerns }));
}
