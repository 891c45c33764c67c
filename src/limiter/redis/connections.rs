//! The connections to one Redis or to the masters of a cluster, each bound to the run id of its server.
//!
//! A failed connection is dropped, and so is the slot map. A redirection is not followed within a call, because the
//! other server does not know the call.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_ok;
use parking_lot::Mutex;
use rand::seq::SliceRandom as _;
use redis::aio::MultiplexedConnection;
use redis::{Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, RedisError, TlsCertificates, Value};
use tokio::time::{Instant, timeout};

use super::error::{RedisTopology, ends_connection, to_limiter_error};
use super::slots::{NodeAddress, SlotMap, hash_slot};
use crate::domain::provider::ProviderName;
use crate::limiter::{LimiterError, StoreConnection};
use crate::tls::{Authorities, is_plaintext_allowed};

/// Longest wait for one response; far above a round trip. It uses up part of the send budget. Of the default of 500 ms
/// the latest response leaves a fifth. With a smaller budget than this, the permits of such a response expire unused.
const ANSWER_TIME_MAX: Duration = Duration::from_millis(400);
/// Longest wait for a new connection with its handshake.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(2);

/// A connection and the server that it leads to.
#[derive(Clone)]
pub(super) struct RedisConnection {
    connection: MultiplexedConnection,
    pub store: StoreConnection,
    /// The server's version, if it says so.
    pub version: Option<String>,
}

/// A server's address, with credentials.
#[derive(Clone)]
pub(super) struct RedisNode {
    /// Host and port.
    pub address: String,
    info: ConnectionInfo,
}

/// The servers that may keep keys, and the number of hash slots of a cluster that none of them keeps.
pub(super) struct Masters {
    pub nodes: Vec<RedisNode>,
    pub orphan_slots: u16,
    pub unnamed_slots: u16,
}

/// Message about a node that answers `?` as its host.
pub const UNNAMED_MASTER: &str = "has no name that could be connected to (CLUSTER SLOTS says \"?\")";
pub const UNNAMED_MASTER_FIX: &str =
    "set cluster-announce-hostname on every node, or cluster-preferred-endpoint-type ip";

/// At most one connection; the first task that locks it connects for all.
type ConnectionSlot = Arc<tokio::sync::Mutex<Option<RedisConnection>>>;

pub(super) struct RedisConnections {
    seeds: Vec<RedisNode>,
    /// Hosts where a node may be that a cluster on this machine names and that is called without TLS.
    plaintext_hosts: Vec<String>,
    topology: RedisTopology,
    /// By host and port.
    slots: Mutex<HashMap<String, ConnectionSlot>>,
    slot_map: Mutex<Option<Arc<SlotMap>>>,
    /// Held by the task that queries the slot map.
    slot_map_query: tokio::sync::Mutex<()>,
}

impl RedisNode {
    /// A call is one small packet, and the next one waits for its response. So it must be sent at once, without Nagle's
    /// algorithm.
    fn new(info: ConnectionInfo) -> Self {
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let info = info.set_tcp_settings(tcp);
        Self { address: info.addr().to_string(), info }
    }

    fn parse(url: &str) -> Result<Self, LimiterError> {
        // The driver's error may quote the URL with its password.
        let bad = |_| LimiterError::Refused("limiter.url is not a Redis URL".to_owned());
        url.into_connection_info().map(Self::new).map_err(bad)
    }

    /// Another node of the same cluster, with the same credentials and TLS settings.
    fn sibling(&self, endpoint: &NodeAddress) -> Self {
        let mut addr = self.info.addr().clone();
        match &mut addr {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                host.clone_from(&endpoint.host);
                *port = endpoint.port;
            }
            _ => {}
        }
        Self::new(self.info.clone().set_addr(addr))
    }

    /// Adds the server's address to an error.
    fn with_address(&self, error: LimiterError) -> LimiterError {
        let address = &self.address;
        match error {
            LimiterError::Unavailable(text) => LimiterError::Unavailable(format!("{address}: {text}")),
            LimiterError::Refused(text) => LimiterError::Refused(format!("{address}: {text}")),
        }
    }

    fn host(&self) -> &str {
        match self.info.addr() {
            ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host,
            _ => "",
        }
    }
}

impl RedisConnections {
    pub fn single(url: &str) -> Result<Self, LimiterError> {
        Ok(Self::new(vec![RedisNode::parse(url)?], RedisTopology::Single))
    }

    /// `urls`: nodes that name the others; one of them must respond.
    pub fn cluster<'a>(urls: impl IntoIterator<Item = &'a str>) -> Result<Self, LimiterError> {
        let seeds = urls.into_iter().map(RedisNode::parse).collect::<Result<_, _>>()?;
        Ok(Self::new(seeds, RedisTopology::Cluster))
    }

    fn new(seeds: Vec<RedisNode>, topology: RedisTopology) -> Self {
        Self {
            seeds,
            plaintext_hosts: Vec::new(),
            topology,
            slots: Mutex::default(),
            slot_map: Mutex::default(),
            slot_map_query: tokio::sync::Mutex::default(),
        }
    }

    /// Permits connections without TLS to these hosts.
    pub fn with_plaintext_hosts(self, plaintext_hosts: &[String]) -> Self {
        Self { plaintext_hosts: plaintext_hosts.to_vec(), ..self }
    }

    /// Rejects a node without TLS that the configuration does not permit. It permits the seeds. If a seed without TLS
    /// is on another machine, its network is permitted too, because a cluster names its nodes mostly by address. If all
    /// seeds are on this machine, the password would leave it.
    fn check_plaintext(&self, node: &RedisNode) -> Result<(), LimiterError> {
        let is_tcp = matches!(node.info.addr(), ConnectionAddr::Tcp(..));
        let is_network_permitted = self.seeds.iter().any(|seed| !is_plaintext_allowed(seed.host(), &[]));
        if !is_tcp || is_network_permitted || is_plaintext_allowed(node.host(), &self.plaintext_hosts) {
            return Ok(());
        }
        Err(LimiterError::Refused(
            "the cluster names this node, and the connection to it would be plain text: use rediss+cluster://, or add \
             its host to tls.plaintext_hosts at your own risk"
                .to_owned(),
        ))
    }

    /// Trusts these authorities, and for `rediss` no others.
    pub fn with_authorities(mut self, authorities: &Authorities) -> Result<Self, LimiterError> {
        let Some(pem) = authorities.pem() else { return Ok(self) };
        let is_tls = |node: &&mut RedisNode| matches!(node.info.addr(), ConnectionAddr::TcpTls { .. });
        for node in self.seeds.iter_mut().filter(is_tls) {
            let certificates = TlsCertificates { client_tls: None, root_cert: Some(pem.as_bytes().to_vec()) };
            let client = Client::build_with_tls(node.info.clone(), certificates)
                .map_err(|error| LimiterError::Refused(format!("tls.ca_file: {error}")))?;
            node.info = client.get_connection_info().clone();
        }
        Ok(self)
    }

    /// The server that keeps a quota's keys.
    pub async fn node_of(&self, quota: &ProviderName) -> Result<RedisNode, LimiterError> {
        if self.topology == RedisTopology::Single {
            return self.seed().cloned();
        }
        // The keys' hash tag is the quota's name alone (module `keys`).
        let slot = hash_slot(quota.as_str());
        let map = self.load_slot_map().await?;
        let Some(endpoint) = map.master(slot) else {
            self.clear_slot_map();
            if map.is_unnamed(slot) {
                return Err(LimiterError::Refused(format!(
                    "the master of slot {slot} {UNNAMED_MASTER}; {UNNAMED_MASTER_FIX}"
                )));
            }
            let text = format!("slot {slot} of the cluster has no master; check CLUSTER INFO");
            return Err(LimiterError::Unavailable(text));
        };
        Ok(self.seed()?.sibling(endpoint))
    }

    /// Every server that may keep keys, and how many hash slots of a cluster have none.
    pub async fn masters(&self) -> Result<Masters, LimiterError> {
        if self.topology == RedisTopology::Single {
            return Ok(Masters { nodes: self.seeds.clone(), orphan_slots: 0, unnamed_slots: 0 });
        }
        self.clear_slot_map();
        let (map, seed) = (self.load_slot_map().await?, self.seed()?);
        let nodes = map.masters().into_iter().map(|endpoint| seed.sibling(endpoint)).collect();
        Ok(Masters { nodes, orphan_slots: map.orphans(), unnamed_slots: map.unnamed() })
    }

    /// The connection to a server; connects if there is none.
    pub async fn connection(&self, node: &RedisNode) -> Result<RedisConnection, LimiterError> {
        let slot = self.connection_slot(&node.address);
        let mut connection = slot.lock().await;
        if let Some(connection) = connection.as_ref() {
            return Ok(connection.clone());
        }
        let fresh = timeout(CONNECT_TIME_MAX, self.connect(node))
            .await
            .map_err(|_| LimiterError::Unavailable("no connection in time".to_owned()));
        match fresh.flatten() {
            Ok(fresh) => Ok(connection.insert(fresh).clone()),
            Err(error) => {
                self.clear_slot_map();
                Err(node.with_address(error))
            }
        }
    }

    /// Runs one command with a time limit. A fault ends the connection, unless a new one would meet the same fault.
    pub async fn run<T>(
        &self,
        node: &RedisNode,
        run_id: Option<&str>,
        command: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<T, RedisError>,
    ) -> Result<T, LimiterError> {
        let mut current = self.connection(node).await?;
        if run_id.is_some_and(|run_id| run_id != current.store.run_id) {
            return Err(node.with_address(LimiterError::Unavailable("the server's process has changed".to_owned())));
        }
        let (error, ends) = match timeout(ANSWER_TIME_MAX, command(&mut current.connection)).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => (to_limiter_error(&error, self.topology), ends_connection(&error)),
            Err(_) => (LimiterError::Unavailable("no answer in time".to_owned()), true),
        };
        if ends {
            self.disconnect(node, &current.store).await;
        }
        Err(node.with_address(error))
    }

    /// Drops the connection to a server if it is still this one. A failure on a connection that was replaced meanwhile
    /// does not concern the new one.
    pub async fn disconnect(&self, node: &RedisNode, connection: &StoreConnection) {
        self.connection_slot(&node.address).lock().await.take_if(|current| current.store == *connection);
        self.clear_slot_map();
    }

    async fn connect(&self, node: &RedisNode) -> Result<RedisConnection, LimiterError> {
        self.check_plaintext(node)?;
        let fault = |error: RedisError| to_limiter_error(&error, self.topology);
        // Our own time limits apply. With the library's as well, it would be unclear which one fired.
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        // Taken before the host name is resolved, so that the connection is never younger than the resolution.
        let connected_at = Instant::now();
        let client = Client::open(node.info.clone()).map_err(fault)?;
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await.map_err(fault)?;
        let info: String = redis::cmd("INFO").arg("server").query_async(&mut connection).await.map_err(fault)?;
        let field = |name: &str| info.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()));
        let run_id = field("run_id:").ok_or_else(|| LimiterError::Refused("INFO server names no run_id".to_owned()))?;
        let version = field("redis_version:");
        Ok(RedisConnection { connection, store: StoreConnection { run_id, connected_at }, version })
    }

    async fn load_slot_map(&self) -> Result<Arc<SlotMap>, LimiterError> {
        let cached = || self.slot_map.lock().clone();
        if let Some(map) = cached() {
            return Ok(map);
        }
        let _query = self.slot_map_query.lock().await;
        if let Some(map) = cached() {
            return Ok(map);
        }
        let map = Arc::new(self.fetch_slot_map().await?);
        *self.slot_map.lock() = Some(Arc::clone(&map));
        self.drop_departed_nodes(&map);
        Ok(map)
    }

    /// Queries connected nodes first: they respond at once, while a seed that is gone would delay every caller.
    async fn fetch_slot_map(&self) -> Result<SlotMap, LimiterError> {
        // In random order, so that a node that has left the cluster is not always queried first.
        let mut connected = self.connected_nodes();
        connected.shuffle(&mut rand::rng());
        for node in connected {
            if let Ok(map) = self.fetch_slot_map_from(&node).await {
                return Ok(map);
            }
        }
        let seeds = self.seeds.iter().map(|seed| Box::pin(self.fetch_slot_map_from(seed)));
        match select_ok(seeds).await {
            Ok((map, _slower)) => Ok(map),
            Err(LimiterError::Unavailable(last)) => {
                Err(LimiterError::Unavailable(format!("no node of the cluster responds: {last}")))
            }
            Err(error) => Err(error),
        }
    }

    async fn fetch_slot_map_from(&self, node: &RedisNode) -> Result<SlotMap, LimiterError> {
        let answer: Value = self
            .run(node, None, async |connection| redis::cmd("CLUSTER").arg("SLOTS").query_async(connection).await)
            .await?;
        SlotMap::parse(&answer, node.host()).map_err(LimiterError::Refused)
    }

    /// Nodes with a connection that no task is replacing now.
    fn connected_nodes(&self) -> Vec<RedisNode> {
        let Ok(seed) = self.seed() else { return Vec::new() };
        let slots = self.slots.lock();
        let connected = slots.iter().filter(|(_, slot)| slot.try_lock().is_ok_and(|connection| connection.is_some()));
        let endpoint = |address: &str| {
            let (host, port) = address.rsplit_once(':')?;
            Some(NodeAddress { host: host.to_owned(), port: port.parse().ok()? })
        };
        connected.filter_map(|(address, _)| endpoint(address)).map(|endpoint| seed.sibling(&endpoint)).collect()
    }

    fn connection_slot(&self, address: &str) -> ConnectionSlot {
        Arc::clone(self.slots.lock().entry(address.to_owned()).or_default())
    }

    /// Drops the connections of nodes that have left the cluster.
    fn drop_departed_nodes(&self, map: &SlotMap) {
        let Ok(seed) = self.seed() else { return };
        let masters: Vec<String> = map.masters().into_iter().map(|endpoint| seed.sibling(endpoint).address).collect();
        let is_named =
            |address: &String| masters.contains(address) || self.seeds.iter().any(|seed| seed.address == *address);
        self.slots.lock().retain(|address, _| is_named(address));
    }

    fn clear_slot_map(&self) {
        *self.slot_map.lock() = None;
    }

    fn seed(&self) -> Result<&RedisNode, LimiterError> {
        self.seeds.first().ok_or_else(|| LimiterError::Refused("limiter.url names no node".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_node_is_plaintext_only_if_permitted() {
        let listed = ["10.0.0.7".to_owned()];
        for (seed, host, permitted) in [
            ("redis://127.0.0.1:7000", "127.0.0.1", true),
            ("redis://127.0.0.1:7000", "10.0.0.7", true),
            ("redis://127.0.0.1:7000", "10.0.0.8", false),
            ("redis://10.0.0.9:7000", "10.0.0.9", true),
            // The configuration has the name, and the cluster the address.
            ("redis://redis-1:7000", "172.18.0.3", true),
            ("rediss://127.0.0.1:7000", "10.0.0.8", true),
        ] {
            let connections = RedisConnections::cluster([seed]).unwrap().with_plaintext_hosts(&listed);
            let node = connections.seed().unwrap().sibling(&NodeAddress { host: host.to_owned(), port: 7001 });
            assert_eq!(connections.check_plaintext(&node).is_ok(), permitted, "{seed} names {host}");
        }
    }

    #[test]
    fn nagle_is_off_for_every_node() {
        for url in ["redis://localhost", "rediss://user:word@localhost:7/0"] {
            let seed = RedisNode::parse(url).unwrap();
            let sibling = seed.sibling(&NodeAddress { host: "other".to_owned(), port: 1 });
            for node in [seed, sibling] {
                assert!(node.info.tcp_settings().nodelay(), "{}", node.address);
            }
        }
    }
}
