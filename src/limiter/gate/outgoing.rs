//! One call on its way: what it asks for, what it settles, and what must be kept of it if it is not heard.
//!
//! Refuses to ask for permits before the store's clock can be compared: a first call takes nothing.

use std::sync::Arc;

use tokio::time::Instant;

use super::line::Group;
use super::permit::Settled;
use super::settle::settlements;
use crate::domain::decision::{Call, Rebuild};
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;

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
}
