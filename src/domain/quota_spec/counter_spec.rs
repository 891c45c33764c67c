//! Specification of one counter: how it counts, what it counts, and how many uses it allows.
//!
//! Several algorithms share one kind of counter. [`super::LimitSpec`] makes the counter of a limit.

use crate::domain::limit::AppliesTo;
use crate::domain::permit_protocol::CallKind;

/// Counter of one limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterSpec {
    pub name: String,
    pub kind: CounterKind,
    pub applies_to: AppliesTo,
    pub shadow: bool,
    /// Uses that may count at once; for a bucket, its capacity.
    pub max: u32,
    /// Time for which a use counts; for a bucket, its time to drain; for requests in flight, [`super::CONCURRENCY_RETRY`].
    pub window_us: u64,
}

/// With debt, one part in so many of a bucket must be free for a start, so that not every start is decided by itself.
pub const DEBT_PARTS: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterKind {
    /// Uses by the instant at which their window begins, rounded up to whole granules. `held`: a slot is held until the
    /// response.
    Log { granule_ms: u64, held: bool },
    /// Uses of the current window and of the next.
    Window { offset_us: u64 },
    /// Requests in flight, and none that has ended. A slot is held until the response, however other limits count.
    InFlight,
    /// The instant at which all uses have drained. With debt, uses need one of [`DEBT_PARTS`] parts of the bucket, and
    /// one may cost more than there is.
    Bucket { interval: u64, debt: bool },
}

impl CounterSpec {
    pub fn applies(&self, kind: CallKind) -> bool {
        match self.applies_to {
            AppliesTo::All => true,
            AppliesTo::Charge => kind == CallKind::Charge,
            AppliesTo::Lookup => kind == CallKind::Lookup,
        }
    }

    /// Whether it spaces starts: no limit of a row.
    pub fn is_pacing(&self) -> bool {
        matches!(self.kind, CounterKind::Bucket { debt: true, .. })
    }

    /// Whether slots are held until the response.
    pub fn is_held(&self) -> bool {
        matches!(self.kind, CounterKind::Log { held: true, .. } | CounterKind::InFlight)
    }
}
