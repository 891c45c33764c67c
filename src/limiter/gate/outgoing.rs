//! One call on its way: what it asks for, what it settles, and what must be kept of it if it is not heard.
//!
//! Refuses to ask for permits before the store's clock can be compared: a first call takes nothing.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::line::Group;
use super::permit::Settled;
use super::settle::settlements;
use crate::domain::decision::{Call, Rebuild, Reply};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;

/// So many permits and settlements at once are a crowd.
const CROWD: usize = 4;
/// How long the next of a crowd gather: a call costs the store as much as that of many, and no limit holds anybody back.
const GATHER: Duration = Duration::from_millis(2);

/// A call whose reply has not arrived.
pub(super) struct Outgoing {
    pub call: Call,
    pub spec: Arc<QuotaSpec>,
    pub departed: Instant,
    pub groups: Vec<Group>,
    /// As it was before it was packed: other settings may want it packed otherwise.
    pub settled: Vec<Settled>,
    pub pause_until: Option<Instant>,
}

/// What a new call is made of.
pub(super) struct Load {
    pub spec: Arc<QuotaSpec>,
    pub groups: Vec<Group>,
    pub settled: Vec<Settled>,
    pub pause_until: Option<Instant>,
    pub rebuild: Option<Rebuild>,
    pub distrust: Option<Micros>,
}

impl Outgoing {
    pub fn new(load: Load, incarnation: u64, number: u64, run_id: String) -> Self {
        let departed = Instant::now();
        let Load { spec, groups, settled, pause_until, rebuild, distrust } = load;
        let call = Call {
            incarnation,
            number,
            wants: groups.iter().map(|group| group.want.clone()).collect(),
            settlements: settlements(&settled, &spec, departed),
            pause: pause_until.map(|until| until.saturating_duration_since(departed)),
            rebuild,
            distrust,
            run_id,
        };
        Self { call, spec, departed, groups, settled, pause_until }
    }

    /// When the next call is worth making, as far as this one says: at once, unless a crowd passes without a limit.
    pub fn next_worth_at(&self, reply: &Reply) -> Instant {
        let granted: u32 = reply.granted.iter().map(|run| run.permits).sum();
        let crowd = granted as usize + self.settled.len() >= CROWD;
        if crowd && granted > 0 && reply.refused.is_none() { self.departed + GATHER } else { self.departed }
    }
}
