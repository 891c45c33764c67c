//! The watch over keys that the limiter's store drops when its memory is short.
//!
//! An account or a reference whose key was dropped counts as unused, so its limit can be exceeded. The state is not reset
//! for that: another user of the same store would stop the whole fleet by it. Operators are told.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use super::WorkerContext;
use crate::domain::format::count;
use crate::limiter::StoreEviction;

/// Time between two looks.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// How long `status` shows that keys were dropped.
const SHOWN: Duration = Duration::from_secs(3_600);

/// What the last look found.
#[derive(Clone, Debug, Default)]
pub struct EvictionStatus {
    /// The servers that may drop keys.
    pub evicting: Vec<StoreEviction>,
    /// Keys that were dropped since this process first looked, and when it saw that last.
    dropped: u64,
    dropped_at: Option<Instant>,
}

impl EvictionStatus {
    /// The warnings for `status`, one line each.
    pub fn warnings(&self) -> impl Iterator<Item = String> {
        let policies = self.evicting.iter().map(|StoreEviction { address, policy, .. }| {
            format!(
                "limiter: {address} drops keys when its memory is short (maxmemory-policy {policy}): set noeviction"
            )
        });
        let is_shown = self.dropped_at.is_some_and(|at| at.elapsed() < SHOWN);
        let dropped = is_shown.then(|| {
            let keys = count(self.dropped, "key");
            format!("limiter: dropped {keys} for lack of memory: limits of accounts and references may be exceeded")
        });
        policies.chain(dropped)
    }
}

/// The servers as they were at the last look, by address.
#[derive(Debug, Default)]
struct SeenServers(BTreeMap<String, StoreEviction>);

impl SeenServers {
    /// Keys that this server has dropped since the last look. What it dropped before the first look is not counted.
    fn dropped_since(&mut self, server: &StoreEviction) -> u64 {
        let Some(before) = self.0.insert(server.address.clone(), server.clone()) else { return 0 };
        let since = server.evicted_keys.checked_sub(before.evicted_keys).filter(|_| before.run_id == server.run_id);
        // A server that was restarted, or whose statistics were reset, counts from 0.
        since.unwrap_or(server.evicted_keys)
    }
}

/// Looks at the store's servers until the worker stops.
pub async fn run(worker: WorkerContext) {
    let mut tick = interval(POLL_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seen = SeenServers::default();
    let mut status = EvictionStatus::default();
    loop {
        let look = async {
            tick.tick().await;
            worker.backends.limiter.evictions().await
        };
        let servers = tokio::select! {
            servers = look => servers,
            () = worker.stop.cancelled() => return,
        };
        for server in &servers {
            let dropped = seen.dropped_since(server);
            worker.meter.count_evicted_keys(dropped);
            if dropped > 0 {
                status.dropped += dropped;
                status.dropped_at = Some(Instant::now());
            }
            log(&worker, server, dropped);
        }
        status.evicting = servers.into_iter().filter(StoreEviction::may_evict).collect();
        worker.meter.set_evictions(status.clone());
    }
}

/// Logs each of the two faults of a server once a minute.
fn log(worker: &WorkerContext, server: &StoreEviction, dropped: u64) {
    let StoreEviction { address, policy, .. } = server;
    let is_due = |fault: &str| worker.local_faults.is_due(&format!("{address} {fault}"));
    if dropped > 0 && is_due("dropped") {
        tracing::error!(
            server = address,
            policy,
            keys = dropped,
            "the limiter's store dropped keys for lack of memory: limits of accounts and references may be exceeded. Set \
             maxmemory-policy noeviction, and raise maxmemory"
        );
    } else if server.may_evict() && is_due("policy") {
        tracing::warn!(
            server = address,
            policy,
            "the limiter's store drops keys when its memory is short, and limits of accounts and references are then \
             exceeded. Set maxmemory-policy noeviction"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_keys_dropped_since_the_first_look_count() {
        let server = |address: &str, run_id: &str, evicted_keys| StoreEviction {
            address: address.to_owned(),
            run_id: run_id.to_owned(),
            policy: "allkeys-lru".to_owned(),
            evicted_keys,
        };
        let mut seen = SeenServers::default();
        let mut dropped = |address: &str, run_id: &str, keys| seen.dropped_since(&server(address, run_id, keys));
        let looks = [
            dropped("a:1", "one", 70),
            dropped("a:1", "one", 70),
            dropped("a:1", "one", 73),
            dropped("b:2", "two", 9),
            // Restarted.
            dropped("a:1", "three", 80),
            // CONFIG RESETSTAT.
            dropped("a:1", "three", 2),
            dropped("b:2", "two", 10),
        ];
        assert_eq!(looks, [0, 0, 3, 0, 80, 2, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn status_names_the_policy_and_recent_losses() {
        let server = StoreEviction {
            address: "a:1".to_owned(),
            run_id: "one".to_owned(),
            policy: "allkeys-lru".to_owned(),
            evicted_keys: 3,
        };
        let mut status = EvictionStatus { evicting: vec![server], dropped: 3, dropped_at: Some(Instant::now()) };
        let shown = |status: &EvictionStatus| status.warnings().collect::<Vec<_>>();
        assert!(shown(&status)[0].contains("a:1 drops keys when its memory is short (maxmemory-policy allkeys-lru)"));
        assert!(shown(&status)[1].contains("dropped 3 keys"));
        tokio::time::advance(SHOWN).await;
        status.evicting.clear();
        assert_eq!(shown(&status), Vec::<String>::new());
    }
}
