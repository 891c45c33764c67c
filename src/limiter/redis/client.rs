//! The limiter in Redis: calls to the one server, or to the node of a cluster that keeps the quota's keys.
//!
//! [`super::encode`] writes the calls and [`super::decode`] reads the replies. All gates of the process share the
//! connections.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use tokio::time::Instant;

use super::connections::{Masters, RedisConnection, RedisConnections, RedisNode};
pub use super::connections::{UNNAMED_MASTER, UNNAMED_MASTER_FIX};
use super::decode::decode_checked_reply;
use super::encode::{encode_call, scope_code};
use super::keys::{call_keys, provider_keys, state_key, subject_key};
use super::library::LIBRARY;
use crate::domain::limit::Scope;
use crate::domain::limit_usage::LimitUsage;
use crate::domain::permit_protocol::{LimiterCall, LimiterReply, Subject};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::{CounterSpec, QuotaSpec};
use crate::domain::time::Micros;
use crate::limiter::{
    LimitStatus, Limiter, LimiterError, RemoteLimiter, StoreConnection, StoreEviction, limit_statuses,
};
use crate::tls::Authorities;

/// A cluster that takes longer to name a quota's node counts as unresponsive.
const UNRESPONSIVE_AFTER: Duration = Duration::from_millis(400);

pub struct RedisLimiter {
    connections: RedisConnections,
    prefix: String,
}

/// Facts of one server that `check` and the probes report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreFacts {
    pub eviction: StoreEviction,
    pub now: Micros,
}

/// One server that keeps keys of quotas.
#[derive(Debug)]
pub struct StoreNode {
    /// Host and port.
    pub address: String,
    pub facts: Result<StoreFacts, LimiterError>,
}

/// The servers behind a limiter.
#[derive(Debug)]
pub struct StoreReport {
    pub nodes: Vec<StoreNode>,
    /// Number of hash slots of a cluster without a master: quotas in them get no permits.
    pub orphan_slots: u16,
    /// Number of hash slots whose master has no name to connect to.
    pub unnamed_slots: u16,
}

impl RedisLimiter {
    /// Prepares a limiter on one server; connects on first use.
    pub fn new(url: &str, prefix: &str) -> Result<Self, LimiterError> {
        Ok(Self::with_connections(RedisConnections::single(url)?, prefix))
    }

    /// Prepares a limiter on a cluster; connects on first use. These nodes name the others. The credentials of the
    /// first one are used for every node.
    pub fn cluster<'a>(urls: impl IntoIterator<Item = &'a str>, prefix: &str) -> Result<Self, LimiterError> {
        Ok(Self::with_connections(RedisConnections::cluster(urls)?, prefix))
    }

    /// Trusts these TLS authorities; without any, those of the system.
    pub fn with_authorities(self, authorities: &Authorities) -> Result<Self, LimiterError> {
        Ok(Self { connections: self.connections.with_authorities(authorities)?, prefix: self.prefix })
    }

    /// Permits connections without TLS to nodes that a cluster names, on these hosts and on this machine.
    pub fn with_plaintext_hosts(self, plaintext_hosts: &[String]) -> Self {
        Self { connections: self.connections.with_plaintext_hosts(plaintext_hosts), ..self }
    }

    fn with_connections(connections: RedisConnections, prefix: &str) -> Self {
        Self { connections, prefix: prefix.to_owned() }
    }

    /// Reads the settings of every server, and loads the function library into each.
    pub async fn report(&self) -> Result<StoreReport, LimiterError> {
        let Masters { nodes: masters, orphan_slots, unnamed_slots } = self.connections.masters().await?;
        let read = async |node: RedisNode| StoreNode { facts: self.read_facts(&node).await, address: node.address };
        // All at once, so that a server that does not respond does not use up the time of the others.
        let nodes = join_all(masters.into_iter().map(read)).await;
        Ok(StoreReport { nodes, orphan_slots, unnamed_slots })
    }

    async fn ping_node(&self, node: &RedisNode) -> Result<RedisConnection, LimiterError> {
        let connection = self.connections.connection(node).await?;
        let ping = async |connection: &mut _| redis::cmd("PING").query_async::<()>(connection).await;
        self.connections.run(node, Some(&connection.store.run_id), ping).await?;
        Ok(connection)
    }

    /// Reads how a server drops keys. It is asked by `INFO`, because a right to `CONFIG` is a right to change it.
    async fn read_eviction(&self, node: &RedisNode) -> Result<StoreEviction, LimiterError> {
        let run_id = self.connections.connection(node).await?.store.run_id;
        let info = async |connection: &mut _| {
            redis::cmd("INFO").arg("memory").arg("stats").query_async::<String>(connection).await
        };
        let info = self.connections.run(node, Some(&run_id), info).await?;
        let field = |name: &str| info.lines().find_map(|line| Some(line.strip_prefix(name)?.trim()));
        Ok(StoreEviction {
            address: node.address.clone(),
            policy: field("maxmemory_policy:").unwrap_or("unknown").to_owned(),
            evicted_keys: field("evicted_keys:").and_then(|keys| keys.parse().ok()).unwrap_or(0),
            run_id,
        })
    }

    async fn read_facts(&self, node: &RedisNode) -> Result<StoreFacts, LimiterError> {
        let eviction = self.read_eviction(node).await?;
        let load = async |connection: &mut _| LIBRARY.ensure_loaded(connection).await;
        self.connections.run(node, None, load).await?;
        let time = async |connection: &mut _| redis::cmd("TIME").query_async(connection).await;
        let (seconds, micros): (u64, u64) = self.connections.run(node, None, time).await?;
        Ok(StoreFacts { eviction, now: Micros(seconds.saturating_mul(1_000_000).saturating_add(micros)) })
    }
}

#[async_trait]
impl Limiter for RedisLimiter {
    async fn run_id(&self, quota: &ProviderName) -> Result<String, LimiterError> {
        let node = self.connections.node_of(quota).await?;
        Ok(self.connections.connection(&node).await?.store.run_id)
    }

    async fn call(&self, spec: &QuotaSpec, call: &LimiterCall) -> Result<LimiterReply, LimiterError> {
        let invocation = LIBRARY.call(&call_keys(&self.prefix, spec, call), &encode_call(spec, call));
        let node = self.connections.node_of(&spec.quota).await?;
        let run = async |connection: &mut _| LIBRARY.run(&invocation, connection).await;
        // The term follows a slash; the server knows only its own run id.
        let run_id = call.run_id.split('/').next();
        let answer: Vec<u8> = self.connections.run(&node, run_id, run).await?;
        decode_checked_reply(&call.requests, &answer, spec.limits.len(), spec.provider_limits().len())
            .map_err(|problem| LimiterError::Refused(format!("invalid reply: {problem}")))
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitStatus>, LimiterError> {
        let node = self.connections.node_of(&spec.quota).await?;
        let mut usages = Vec::new();
        for subject in [None, subject].into_iter().take(1 + usize::from(subject.is_some())) {
            let (keys, names) = encode_peek(&self.prefix, spec, subject);
            let invocation = LIBRARY.peek(&keys, &names);
            let run = async |connection: &mut _| LIBRARY.run(&invocation, connection).await;
            let found: Vec<PeekRow> = self.connections.run(&node, None, run).await?;
            usages.extend(decode_peek(spec, subject, &found));
        }
        Ok(limit_statuses(spec, subject, &usages))
    }

    async fn evictions(&self) -> Vec<StoreEviction> {
        let Ok(masters) = self.connections.masters().await else { return Vec::new() };
        let read = join_all(masters.nodes.iter().map(|node| self.read_eviction(node))).await;
        read.into_iter().flatten().collect()
    }

    /// In a cluster one master that responds is enough. Each quota's own master is probed apart.
    async fn ping(&self) -> Result<Option<String>, LimiterError> {
        let mut last = LimiterError::Unavailable("the cluster has no master".to_owned());
        for master in self.connections.masters().await?.nodes {
            match self.ping_node(&master).await {
                Ok(connection) => return Ok(connection.version),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

#[async_trait]
impl RemoteLimiter for RedisLimiter {
    /// Probes each server once, all at the same time, because quotas share connections.
    async fn probe(&self, quotas: &[ProviderName]) -> Vec<(ProviderName, Result<StoreConnection, LimiterError>)> {
        let mut nodes: Vec<(RedisNode, Vec<&ProviderName>)> = Vec::new();
        let mut found = Vec::new();
        let mut unresponsive: Option<LimiterError> = None;
        for quota in quotas {
            let started_at = Instant::now();
            let node = match &unresponsive {
                Some(error) => Err(error.clone()),
                None => self.connections.node_of(quota).await,
            };
            match node {
                Ok(node) => match nodes.iter_mut().find(|(known, _)| known.address == node.address) {
                    Some((_, quotas)) => quotas.push(quota),
                    None => nodes.push((node, vec![quota])),
                },
                Err(error) => {
                    // A cluster that makes one quota wait would make all of them wait, one after the other.
                    unresponsive = (started_at.elapsed() > UNRESPONSIVE_AFTER).then(|| error.clone()).or(unresponsive);
                    found.push((quota.clone(), Err(error)));
                }
            }
        }
        let answers = join_all(nodes.iter().map(|(node, _)| self.ping_node(node))).await;
        for ((_, quotas), answer) in nodes.into_iter().zip(answers) {
            let answer = answer.map(|connection| connection.store);
            found.extend(quotas.into_iter().map(|quota| (quota.clone(), answer.clone())));
        }
        found
    }

    async fn disconnect(&self, quota: &ProviderName, connection: &StoreConnection) {
        if let Ok(node) = self.connections.node_of(quota).await {
            self.connections.disconnect(&node, connection).await;
        }
    }
}

/// One row of the store's reply: name, uses, permits that a shadow limit would have refused, permits that it would have
/// delayed, microseconds until the next permit may start, microseconds until all is free, uses that still count after
/// each part of the window.
pub type PeekRow = (String, u64, u64, u64, u64, u64, Vec<u64>);

/// The keys and the argument of a peek at the provider's limits, or at those of one subject.
pub fn encode_peek(prefix: &str, spec: &QuotaSpec, subject: Option<&Subject>) -> (Vec<String>, Vec<u8>) {
    let (scope, keys, cells) = match subject {
        None => (Scope::Provider, provider_keys(prefix, spec), spec.provider_counters()),
        Some(subject) => {
            let keys = vec![state_key(prefix, spec), subject_key(prefix, spec, subject)];
            (spec.scope_of(subject), keys, spec.subject_counters(subject))
        }
    };
    let mut argument = format!("{}|{}", scope_code(scope), spec.resumed_at);
    for CounterSpec { name, window_us, shadow, .. } in cells {
        let window_us = if shadow { 0 } else { window_us };
        argument.push_str(&format!("|{name}|{window_us}"));
    }
    (keys, argument.into_bytes())
}

/// The usage of each limit of the spec. A limit that the store does not know yet is unused, and waits as long as a new
/// limit.
pub fn decode_peek(spec: &QuotaSpec, subject: Option<&Subject>, found: &[PeekRow]) -> Vec<LimitUsage> {
    let (indices, cells): (Vec<usize>, Vec<CounterSpec>) = match subject {
        None => (spec.provider_limits(), spec.provider_counters()),
        Some(subject) => (subject.limits.iter().map(|limit| limit.index).collect(), spec.subject_counters(subject)),
    };
    let row = |name: &str| found.iter().find(|(found, ..)| found == name);
    // The state's row has an empty name. Without it, the next call begins a cold state.
    let state = row("").map(|(.., opens_in_us, _, _)| *opens_in_us);
    let usage = |(index, cell): (usize, CounterSpec)| match (row(&cell.name), state) {
        (Some((_, used, would_have_refused, would_have_waited, retry_us, reset_us, still_used)), _) => LimitUsage {
            index,
            used: *used,
            would_have_refused: *would_have_refused,
            would_have_waited: *would_have_waited,
            retry_us: *retry_us,
            reset_us: *reset_us,
            still_used: still_used.clone(),
        },
        (None, Some(opens_in_us)) => {
            let held_us = if cell.shadow { 0 } else { spec.count_delay_max_us() + cell.window_us };
            LimitUsage::unused(index, opens_in_us.max(held_us))
        }
        (None, None) => LimitUsage::unused(index, spec.cold_start_us()),
    };
    let counted = indices.into_iter().zip(cells).filter(|(index, _)| *index < spec.limits.len());
    counted.map(usage).collect()
}
