//! The evidence of a fault run: the providers' records, the published messages, and the ledger's final states.
//!
//! This module only collects; `oracle` judges.

use std::collections::BTreeMap;

/// One request as a provider saw it. Instants are microseconds since the provider started, on a monotonic clock.
#[derive(Clone, Debug, Default)]
pub struct Call {
    pub is_look_up: bool,
    /// `None`: the request could not be read to its end.
    pub payment: Option<String>,
    pub key: Option<String>,
    pub body: Vec<u8>,
    pub amount: i64,
    pub currency: String,
    pub account: Option<String>,
    /// Instant of its first byte.
    pub first_byte_us: u64,
    /// Instant of its last byte.
    pub received_us: Option<u64>,
    /// Its receipt by the wall clock, since the Unix epoch.
    pub received_wall_us: u64,
    /// Instant of its charge; `None`: it charged nothing.
    pub effect_us: Option<u64>,
    /// The sum that its charge approved, if that is less than was asked for.
    pub approved_part: Option<i64>,
    /// Instant at which the response was written to the socket.
    pub answered_us: Option<u64>,
    pub status: Option<u16>,
    /// The response was repeated for a known key.
    pub replayed: bool,
}

/// One provider's records and limits.
#[derive(Clone, Debug, Default)]
pub struct ProviderRecord {
    pub calls: Vec<Call>,
    /// Requests per window; the window in microseconds.
    pub limits: Vec<(usize, u64)>,
    /// A request that is repeated under its key charges nothing more.
    pub deduplicates: bool,
    /// Slots are released after the grant, not after the response: its windows are reported, not judged.
    pub by_grant: bool,
}

impl ProviderRecord {
    /// Windows in which more requests were received than the limit allows.
    pub fn broken_windows(&self, allowed: usize, window_us: u64) -> usize {
        let mut received: Vec<u64> = self.calls.iter().filter_map(|call| call.received_us).collect();
        received.sort_unstable();
        received.windows(allowed + 1).filter(|w| w[allowed] - w[0] < window_us).count()
    }

    /// Most requests received within one window.
    pub fn largest_window(&self, window_us: u64) -> usize {
        let mut received: Vec<u64> = self.calls.iter().filter_map(|call| call.received_us).collect();
        received.sort_unstable();
        let before = |at: u64| received.partition_point(|other| *other + window_us <= at);
        received.iter().enumerate().map(|(place, at)| place + 1 - before(*at)).max().unwrap_or(0)
    }
}

/// A message as its producer wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    pub provider: String,
    pub amount: i64,
    pub currency: String,
    pub account: Option<String>,
    /// The broker has confirmed it at least once.
    pub confirmed: bool,
}

/// A row of the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub provider: String,
    pub state: String,
    pub reason: String,
    pub amount: i64,
    pub currency: String,
    pub account: Option<String>,
    /// When its first final state was written, microseconds since the Unix epoch, by the database's clock.
    pub finished_wall_us: Option<u64>,
    /// Requests that were begun until then.
    pub requests_until_finished: usize,
}

/// An event that subscribers received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub id: String,
    pub provider: String,
    pub state: String,
}

/// All records that the oracles judge.
#[derive(Clone, Debug, Default)]
pub struct Records {
    pub providers: BTreeMap<String, ProviderRecord>,
    pub published: BTreeMap<String, Published>,
    pub ledger: BTreeMap<String, Row>,
    pub events: Vec<Event>,
    /// When requests were begun, by payment: microseconds since the Unix epoch, ascending.
    pub started_wall_us: BTreeMap<String, Vec<u64>>,
}

impl Records {
    /// Longest time from the begin of a request to its receipt. If it exceeds the longest hold (send budget plus
    /// timeout), the limiter's assumption about the network fails, and a breach proves nothing.
    pub fn longest_way_ms(&self) -> u64 {
        let calls = self.providers.values().flat_map(|record| &record.calls);
        let ways = calls.filter_map(|call| {
            let starts = self.started_wall_us.get(call.payment.as_deref()?)?;
            let last = starts.iter().rfind(|start| **start <= call.received_wall_us)?;
            Some((call.received_wall_us - last) / 1_000)
        });
        ways.max().unwrap_or(0)
    }

    /// Every requested charge, with its provider.
    pub fn charges(&self) -> impl Iterator<Item = (&str, &Call)> {
        let calls = self.providers.iter().flat_map(|(name, record)| record.calls.iter().map(move |call| (name, call)));
        calls.filter(|(_, call)| !call.is_look_up).map(|(name, call)| (name.as_str(), call))
    }

    /// Successful charges, by payment.
    pub fn effects(&self) -> BTreeMap<&str, Vec<(&str, &Call)>> {
        let mut effects: BTreeMap<&str, Vec<(&str, &Call)>> = BTreeMap::new();
        for (provider, call) in self.charges().filter(|(_, call)| call.effect_us.is_some()) {
            effects.entry(call.payment.as_deref().unwrap_or("")).or_default().push((provider, call));
        }
        effects
    }
}

/// Final states of a job.
pub const FINAL: [&str; 6] = ["succeeded", "declined", "dead", "expired", "review", "cancelled"];
