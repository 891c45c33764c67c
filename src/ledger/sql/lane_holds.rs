//! The SQL of lane holds: written once by the worker that proves a loss, read each second, deleted by an operator.

use super::dialect::Template;
use super::engine::args;
use super::result::from_row;
use super::storable;
use crate::domain::commit_memory::HoldCause;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::lane_holds::{HoldsAndHeartbeat, LaneHold};
use crate::ledger::operator::{Actor, DatabaseTime};
use crate::ledger::sql::result::FromRow as _;

/// One row at least: it has the heartbeat.
static READ: Template = Template::new(
    "SELECT beat.reported_at_ms, held.provider, held.cause, {ms:held.since} AS since_ms, held.evidence \
     FROM (SELECT (SELECT {ms:reported_at} FROM worker_reports WHERE id = $1) AS reported_at_ms) AS beat \
     LEFT JOIN lane_holds AS held ON 1 = 1 ORDER BY held.provider",
);

/// A lane that is held already keeps its first cause.
static HOLD: Template = Template::new(
    "INSERT INTO lane_holds (provider, cause, evidence) VALUES ($1, $2, $3) \
     ON CONFLICT (provider) DO NOTHING RETURNING provider",
);

static RELEASE: Template = Template::new("DELETE FROM lane_holds WHERE provider = $1 RETURNING provider");

from_row!(row => LaneHold { provider, cause, since, evidence });

impl Database {
    /// All holds, and when this worker's report was last written.
    pub async fn holds_and_heartbeat(&self, worker: &str) -> Result<HoldsAndHeartbeat, LedgerError> {
        let rows = self.query_urgent(&READ, args![worker]).await?;
        let mut read = HoldsAndHeartbeat::default();
        for row in rows {
            read.reported_at = row.get::<Option<DatabaseTime>>("reported_at")?;
            if row.get::<Option<String>>("provider")?.is_some() {
                let hold = LaneHold::from_row(&row)?;
                read.holds.insert(hold.provider.clone(), hold);
            }
        }
        Ok(read)
    }

    /// The hold of one lane.
    pub async fn lane_hold(&self, provider: &ProviderName) -> Result<Option<LaneHold>, LedgerError> {
        Ok(self.holds_and_heartbeat("").await?.holds.remove(provider))
    }

    /// Holds these lanes, all in one transaction. A lane that is held already stays as it is.
    pub async fn hold_lanes(
        &self,
        lanes: &[ProviderName],
        cause: HoldCause,
        evidence: &str,
    ) -> Result<(), LedgerError> {
        let hold = |lane: &ProviderName| self.step(&HOLD, args![lane, cause.name(), storable(evidence)]);
        self.engine.atomically(lanes.iter().map(hold).collect()).await.map(drop)
    }

    /// Releases a lane; false if it is not held. The audit names the author and the reason.
    pub async fn release_lane(&self, provider: &ProviderName, by: &Actor) -> Result<bool, LedgerError> {
        let steps = vec![self.must_affect(&RELEASE, args![provider])];
        Ok(self.atomically_by(steps, Some(by)).await?.is_some())
    }
}
