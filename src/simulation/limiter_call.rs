//! Parts of a limiter call in the simulation: its subjects, its releases, and the first call of a warm limiter.

use std::rc::Rc;
use std::time::Duration;

use crate::domain::permit_protocol::{
    CallKind, CostByKind, LimiterCall, PermitRelease, RebuildData, ReleaseKind, SlotInstant, Subject,
};
use crate::domain::permit_release::{self, EndedPermit};
use crate::domain::time::Micros;

/// Subjects that count one account's calls, and the largest cost that they can ever admit.
#[derive(Clone, Debug)]
pub(super) struct AccountSubjects {
    pub subjects: Vec<Subject>,
    pub cost_max: u32,
}

/// An ended permit.
#[derive(Debug)]
pub(super) struct ReleasedPermit {
    pub call: u64,
    pub cost: u16,
    pub account: Option<u32>,
    pub release: SimulatedRelease,
}

#[derive(Debug)]
pub(super) enum SimulatedRelease {
    Answered { at_us: u64 },
    NotSent { origins: Rc<[SlotInstant]> },
}

/// First call, which tells the limiter that nothing was used before.
pub(super) fn warm_up_call(now_us: u64) -> LimiterCall {
    LimiterCall {
        incarnation: u64::from(u32::MAX),
        number: 1,
        requests: Vec::new(),
        releases: Vec::new(),
        pause: None,
        rebuild: Some(unused(Micros(now_us))),
        seeds: None,
        invalidate_epoch: None,
        run_id: "simulated".to_owned(),
    }
}

pub(super) fn unused(state_epoch: Micros) -> RebuildData {
    RebuildData { state_epoch, ended: Vec::new(), in_flight: CostByKind::default() }
}

pub(super) fn subjects(account: Option<u32>, account_subjects: &[Option<AccountSubjects>]) -> Vec<Subject> {
    let index = account.and_then(|account| usize::try_from(account).ok());
    index.and_then(|index| account_subjects.get(index)?.as_ref()).map_or_else(Vec::new, |found| found.subjects.clone())
}

pub(super) fn releases(
    released: &[ReleasedPermit],
    now_us: u64,
    account_subjects: &[Option<AccountSubjects>],
) -> Vec<PermitRelease> {
    let ended = released.iter().map(|permit| {
        let release_kind = match &permit.release {
            SimulatedRelease::Answered { at_us } => {
                ReleaseKind::Used { age: Duration::from_micros(now_us.saturating_sub(*at_us)) }
            }
            SimulatedRelease::NotSent { origins } => ReleaseKind::Unused { origins: origins.to_vec() },
        };
        EndedPermit { call: permit.call, holder: permit.account, cost: u32::from(permit.cost), release_kind }
    });
    permit_release::group_releases(ended, |account| (CallKind::Charge, subjects(*account, account_subjects)))
}
