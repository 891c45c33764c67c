//! The requests that providers refused with 429, by the ledger's own attempts: the one count that every view shows.

use std::collections::BTreeMap;
use std::time::Duration;

/// Time over which the refused requests are counted. It is the default range of the recorded history, too.
pub const COUNTED_WITHIN: Duration = Duration::from_secs(3_600);

/// Providers that refused requests within [`COUNTED_WITHIN`].
pub type ThrottlingByProvider = BTreeMap<String, Throttling>;

/// The refused requests of one provider.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Throttling {
    /// 429s within [`COUNTED_WITHIN`].
    pub requests: u64,
    /// When the first and the last of them were recorded, in milliseconds since the Unix epoch.
    pub first_at_ms: i64,
    pub last_at_ms: i64,
    /// Others are expected.
    pub keep_coming: bool,
    /// Requests were refused again after a pause.
    pub is_repeated: bool,
    /// Charges per second that got through lately. `None`: the 429s began too recently, or ended.
    pub passed_per_s: Option<f64>,
}
