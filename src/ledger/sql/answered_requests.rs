//! The last requests that a provider answered, for a judgement of its limit by its 429s.
//!
//! It reads a bounded number of attempts by index, the youngest first. A request without a response is left out: whether
//! the provider counted it is unknown.

use super::dialect::Template;
use super::engine::args;
use super::result::{FromRow, SqlRow, from_row};
use super::throttled::IS_THROTTLED;
use crate::domain::observed_limit::AnsweredRequest;
use crate::domain::provider::ProviderName;
use crate::domain::time::EpochMs;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

/// How far back requests are read: twice the longest common window, so that one of them is known as a whole.
const LOOKBACK_MS: i64 = 2 * 3_600_000;
/// Most requests that are read.
const REQUESTS_MAX: u32 = 20_000;

static ANSWERED: Template = Template::made(|_| {
    format!(
        "SELECT {{ms:began_at}} AS began_at_ms, {IS_THROTTLED} AS throttled FROM attempts \
         WHERE provider = $1 AND ended_at >= {{at:$2}} AND status IS NOT NULL ORDER BY ended_at DESC LIMIT $3"
    )
});

/// The answered requests of a provider, the oldest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnsweredRequests {
    pub requests: Vec<AnsweredRequest>,
    /// Before that, nothing is known.
    pub from: EpochMs,
    /// The database's clock.
    pub now: EpochMs,
}

struct Answered {
    began_at: EpochMs,
    throttled: bool,
}

from_row!(row => Answered { began_at, throttled });

impl Database {
    /// The requests that a provider answered within the last two hours, at most 20,000.
    pub async fn answered_requests(&self, provider: &ProviderName) -> Result<AnsweredRequests, LedgerError> {
        let now = self.clock().await?;
        let from_ms = now.0.saturating_sub(LOOKBACK_MS);
        let rows: Vec<SqlRow> = self.query_by_index(&ANSWERED, args![provider, from_ms, REQUESTS_MAX]).await?;
        let answered = rows.iter().map(Answered::from_row).collect::<Result<Vec<_>, _>>()?;
        let mut requests: Vec<AnsweredRequest> = answered
            .into_iter()
            .map(|Answered { began_at, throttled }| AnsweredRequest { at: began_at, is_throttled: throttled })
            .collect();
        requests.sort_by_key(|request| request.at);
        let is_cut = u32::try_from(requests.len()).is_ok_and(|read| read >= REQUESTS_MAX);
        let oldest = requests.first().map(|request| request.at).filter(|_| is_cut);
        Ok(AnsweredRequests { requests, from: oldest.unwrap_or(EpochMs(from_ms)), now })
    }
}
