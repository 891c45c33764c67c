//! The 429s of each provider in SQL: their number, and the pace that gets through while they come.
//!
//! They are read by the partial index `attempts_throttled`, so they cost as much as there are 429s, whatever the ledger
//! holds. The charges that got through are counted only while 429s come.

use super::dialect::Template;
use super::engine::args;
use super::history::is_one_of;
use super::result::{FromRow, SqlRow, from_row};
use super::texts;
use crate::domain::throttled_pace::{MeasuredSpan, ThrottledRequest, ThrottledRequests};
use crate::domain::time::EpochMs;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::throttled::{COUNTED_WITHIN, Throttling, ThrottlingByProvider};

/// The condition of index `attempts_throttled`. A 429 that may answer an earlier request of its connection leaves its
/// payment's outcome unknown, and it is a 429 all the same.
pub(super) const IS_THROTTLED: &str = "(outcome = 'throttled' OR (outcome = 'unknown' AND status = 429))";

/// Most refused requests that are read for the pace of one provider: the last ones.
const REQUESTS_MAX: u32 = 5_000;

static COUNT: Template = Template::made(|dialect| {
    format!(
        "SELECT provider, count(*) AS requests, {{ms:min(ended_at)}} AS first_at_ms, {{ms:max(ended_at)}} AS last_at_ms \
         FROM attempts WHERE {IS_THROTTLED} AND provider {} AND ended_at >= {{after:(0 - $2)}} GROUP BY provider",
        is_one_of(dialect)
    )
});

static LAST: Template = Template::made(|_| {
    format!(
        "SELECT {{ms:began_at}} AS began_at_ms, {{ms:ended_at}} AS ended_at_ms FROM attempts \
         WHERE {IS_THROTTLED} AND provider = $1 ORDER BY ended_at DESC LIMIT $2"
    )
});

/// Charges that ended their payment, or its way to a review.
static PASSED: Template = Template::new(
    "SELECT count(*) AS requests FROM attempts WHERE provider = $1 AND ended_at >= {at:$2} \
         AND began_at >= {at:$2} AND began_at < {at:$3} AND kind = 'charge' \
         AND outcome IN ('accepted', 'declined', 'rejected', 'differs')",
);

struct Counted {
    provider: String,
    requests: u64,
    first_at: EpochMs,
    last_at: EpochMs,
}

from_row!(row => Counted { provider, requests, first_at, last_at });
from_row!(row => ThrottledRequest { began_at, ended_at });

impl Database {
    /// The 429s of these providers; those without any within [`COUNTED_WITHIN`] are left out.
    pub async fn throttling(&self, providers: &[&str]) -> Result<ThrottlingByProvider, LedgerError> {
        let names = texts(providers.iter().copied());
        let rows: Vec<SqlRow> = self.query_by_index(&COUNT, args![names, COUNTED_WITHIN]).await?;
        if rows.is_empty() {
            return Ok(ThrottlingByProvider::new());
        }
        let now = self.clock().await?;
        let mut by_provider = ThrottlingByProvider::new();
        for row in &rows {
            let counted = Counted::from_row(row)?;
            by_provider.insert(counted.provider.clone(), self.throttling_of(&counted, now).await?);
        }
        Ok(by_provider)
    }

    async fn throttling_of(&self, counted: &Counted, now: EpochMs) -> Result<Throttling, LedgerError> {
        let Counted { provider, requests, first_at, last_at } = counted;
        let rows = self.query_by_index(&LAST, args![provider, REQUESTS_MAX]).await?;
        let refused = rows.iter().map(ThrottledRequest::from_row).collect::<Result<Vec<_>, _>>()?;
        let refused = ThrottledRequests::new(refused);
        let keep_coming = refused.keep_coming(now);
        let passed_per_s = match refused.measured_span().filter(|_| keep_coming) {
            Some(span) => Some(self.passed_per_s(provider, span).await?),
            None => None,
        };
        Ok(Throttling {
            requests: *requests,
            first_at_ms: first_at.0,
            last_at_ms: last_at.0,
            keep_coming,
            is_repeated: refused.are_repeated(),
            passed_per_s,
        })
    }

    async fn passed_per_s(&self, provider: &str, span: MeasuredSpan) -> Result<f64, LedgerError> {
        let MeasuredSpan { from, to } = span;
        let row = self.query_by_index(&PASSED, args![provider, from.0, to.0]).await?;
        let passed = row.first().map(|row| row.get("requests")).transpose()?;
        Ok(span.per_second(passed.unwrap_or(0)))
    }
}
