//! The connections to one Redis or to the masters of a cluster: each bound to the run id of the server that it leads to.
//!
//! Refuses to repair and to follow: a link that failed is dropped, and so is the map of the slots. A redirection is not
//! followed within a call, because behind it stands another server, which knows nothing of the call.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::select_ok;
use rand::seq::SliceRandom as _;
use redis::aio::MultiplexedConnection;
use redis::{Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, RedisError, TlsCertificates, Value};
use tokio::time::{Instant, timeout};

use super::error::{RedisTopology, ends_connection, to_limiter_error};
use super::slots::{NodeAddress, SlotMap, hash_slot};
use crate::domain::provider::ProviderName;
use crate::limiter::{LimiterError, StoreConnection};
use crate::tls::{Authorities, is_plaintext_allowed};

/// Longest wait for one answer. Far above a round trip. It eats into the send budget: of the default of 500 ms an answer
/// that comes last of all leaves a fifth, and a row with a budget below this loses the permits of such an answer unused.
const ANSWER_TIME_MAX: Duration = Duration::from_millis(400);
/// Longest wait for a new connection with its handshake.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(2);

/// A connection and the server that it leads to.
#[derive(Clone)]
pub(super) struct RedisConnection {
    connection: MultiplexedConnection,
    pub store: StoreConnection,
    /// Of the server, if it tells it.
    pub version: Option<String>,
}

/// A server to be reached, with the credentials that it asks for.
#[derive(Clone)]
pub(super) struct RedisNode {
    /// Host and port.
    pub address: String,
    info: ConnectionInfo,
}

/// The servers that may keep keys, and the slots of a cluster that none of them keeps.
pub(super) struct Masters {
    pub nodes: Vec<RedisNode>,
    pub orphan_slots: u16,
    pub unnamed_slots: u16,
}

/// A node that answers `?` as its host.
pub const UNNAMED_MASTER: &str = "has no name that could be connected to (CLUSTER SLOTS says \"?\")";
pub const UNNAMED_MASTER_FIX: &str =
    "set cluster-announce-hostname on every node, or cluster-preferred-endpoint-type ip";

/// Holds at most one link; whoever locks it first connects for all.
type ConnectionSlot = Arc<tokio::sync::Mutex<Option<RedisConnection>>>;

pub(super) struct RedisConnections {
    seeds: Vec<RedisNode>,
    /// Where a node may be that a cluster on this machine names and that is spoken to without TLS.
    plaintext_hosts: Vec<String>,
    topology: RedisTopology,
    /// By host and port.
    slots: Mutex<HashMap<String, ConnectionSlot>>,
    slot_map: Mutex<Option<Arc<SlotMap>>>,
    /// Held by the one who asks for the map.
    slot_map_query: tokio::sync::Mutex<()>,
}

impl RedisNode {
    /// A call is one small packet and the next one waits for its answer: held back for company it would only come late.
    fn new(info: ConnectionInfo) -> Self {
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let info = info.set_tcp_settings(tcp);
        Self { address: info.addr().to_string(), info }
    }

    fn parse(url: &str) -> Result<Self, LimiterError> {
        // The error of a bad URL may quote it, password and all.
        let bad = |_| LimiterError::Refused("limiter.url is not a Redis URL".to_owned());
        url.into_connection_info().map(Self::new).map_err(bad)
    }

    /// Another node of the same cluster: the same credentials and the same way to encrypt.
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

    /// Says which server it was.
    fn with_address(&self, error: LimiterError) -> LimiterError {
        let shown = &self.address;
        match error {
            LimiterError::Unavailable(text) => LimiterError::Unavailable(format!("{shown}: {text}")),
            LimiterError::Refused(text) => LimiterError::Refused(format!("{shown}: {text}")),
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

    /// `urls`: nodes to ask for the others, of which one must be there.
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

    /// These hosts may be spoken to without TLS.
    pub fn with_plaintext_hosts(self, plaintext_hosts: &[String]) -> Self {
        Self { plaintext_hosts: plaintext_hosts.to_vec(), ..self }
    }

    /// The configuration permits the seeds. A cluster names its nodes as it likes, mostly by address: where a seed is on
    /// another machine already, its network is the one that was permitted. From this machine the password would leave it.
    fn check_plaintext(&self, node: &RedisNode) -> Result<(), LimiterError> {
        let is_tcp = matches!(node.info.addr(), ConnectionAddr::Tcp(..));
        let leaves_anyhow = self.seeds.iter().any(|seed| !is_plaintext_allowed(seed.host(), &[]));
        if !is_tcp || leaves_anyhow || is_plaintext_allowed(node.host(), &self.plaintext_hosts) {
            return Ok(());
        }
        Err(LimiterError::Refused(
            "the cluster names this node, and the connection to it would be plain text: use rediss+cluster://, or add its \
             host to tls.plaintext_hosts at your own risk"
                .to_owned(),
        ))
    }

    /// Trusts these authorities, and for `rediss` no others.
    ///
    /// # Errors
    /// When the driver cannot read them.
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
        // The keys' hash tag is the quota's name alone (`keys`).
        let slot = hash_slot(quota.as_str());
        let map = self.load_slot_map().await?;
        let Some(endpoint) = map.master(slot) else {
            self.clear_slot_map();
            if map.is_unnamed(slot) {
                return Err(LimiterError::Refused(format!(
                    "the master of slot {slot} {UNNAMED_MASTER}; {UNNAMED_MASTER_FIX}"
                )));
            }
            let what = format!("slot {slot} of the cluster has no master; look at CLUSTER INFO");
            return Err(LimiterError::Unavailable(what));
        };
        Ok(self.seed()?.sibling(endpoint))
    }

    /// Every server that may keep keys, and how many slots of a cluster have none.
    pub async fn masters(&self) -> Result<Masters, LimiterError> {
        if self.topology == RedisTopology::Single {
            return Ok(Masters { nodes: self.seeds.clone(), orphan_slots: 0, unnamed_slots: 0 });
        }
        self.clear_slot_map();
        let (map, seed) = (self.load_slot_map().await?, self.seed()?);
        let nodes = map.masters().into_iter().map(|endpoint| seed.sibling(endpoint)).collect();
        Ok(Masters { nodes, orphan_slots: map.orphans(), unnamed_slots: map.unnamed() })
    }

    /// The link to a server; connects when there is none.
    pub async fn connection(&self, node: &RedisNode) -> Result<RedisConnection, LimiterError> {
        let place = self.connection_slot(&node.address);
        let mut link = place.lock().await;
        if let Some(link) = link.as_ref() {
            return Ok(link.clone());
        }
        let fresh = timeout(CONNECT_TIME_MAX, self.connect(node))
            .await
            .map_err(|_| LimiterError::Unavailable("no connection in time".to_owned()));
        match fresh.flatten() {
            Ok(fresh) => Ok(link.insert(fresh).clone()),
            Err(error) => {
                self.clear_slot_map();
                Err(node.with_address(error))
            }
        }
    }

    /// Runs one command with a time limit. A fault ends the link, unless another would meet the same.
    pub async fn run<T>(
        &self,
        node: &RedisNode,
        run_id: Option<&str>,
        command: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<T, RedisError>,
    ) -> Result<T, LimiterError> {
        let mut link = self.connection(node).await?;
        if run_id.is_some_and(|run_id| run_id != link.store.run_id) {
            return Err(node.with_address(LimiterError::Unavailable("the store's process has changed".to_owned())));
        }
        let (error, ends) = match timeout(ANSWER_TIME_MAX, command(&mut link.connection)).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => (to_limiter_error(&error, self.topology), ends_connection(&error)),
            Err(_) => (LimiterError::Unavailable("no answer in time".to_owned()), true),
        };
        if ends {
            self.disconnect(node, &link.store).await;
        }
        Err(node.with_address(error))
    }

    /// Drops the link to a server if it is this one. Whoever waited for an answer on a link that was replaced meanwhile says
    /// nothing of the new one.
    pub async fn disconnect(&self, node: &RedisNode, link: &StoreConnection) {
        self.connection_slot(&node.address).lock().await.take_if(|current| current.store == *link);
        self.clear_slot_map();
    }

    async fn connect(&self, node: &RedisNode) -> Result<RedisConnection, LimiterError> {
        self.check_plaintext(node)?;
        let fault = |error: RedisError| to_limiter_error(&error, self.topology);
        // Our own time limits hold; the library's would only blur which one fired.
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        // A link is as old as the name is that it was made by.
        let made_at = Instant::now();
        let client = Client::open(node.info.clone()).map_err(fault)?;
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await.map_err(fault)?;
        let info: String = redis::cmd("INFO").arg("server").query_async(&mut connection).await.map_err(fault)?;
        let told = |name: &str| info.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()));
        let run_id = told("run_id:").ok_or_else(|| LimiterError::Refused("INFO server names no run_id".to_owned()))?;
        let version = told("redis_version:");
        Ok(RedisConnection { connection, store: StoreConnection { run_id, connected_at: made_at }, version })
    }

    async fn load_slot_map(&self) -> Result<Arc<SlotMap>, LimiterError> {
        if let Some(map) = self.cached_slot_map() {
            return Ok(map);
        }
        let _asking = self.slot_map_query.lock().await;
        if let Some(map) = self.cached_slot_map() {
            return Ok(map);
        }
        let map = Arc::new(self.fetch_slot_map().await?);
        *lock(&self.slot_map) = Some(Arc::clone(&map));
        self.drop_departed_nodes(&map);
        Ok(map)
    }

    /// Those that we are connected to first: they answer at once where a seed that is gone would hold everybody up.
    async fn fetch_slot_map(&self) -> Result<SlotMap, LimiterError> {
        // In any order, so that a node that the others have forgotten is not the one that is always asked.
        let mut linked = self.connected_nodes();
        linked.shuffle(&mut rand::rng());
        for node in linked {
            if let Ok(map) = self.fetch_slot_map_from(&node).await {
                return Ok(map);
            }
        }
        let seeds = self.seeds.iter().map(|seed| Box::pin(self.fetch_slot_map_from(seed)));
        match select_ok(seeds).await {
            Ok((map, _slower)) => Ok(map),
            Err(LimiterError::Unavailable(last)) => {
                Err(LimiterError::Unavailable(format!("no node of the cluster answers: {last}")))
            }
            Err(refused) => Err(refused),
        }
    }

    async fn fetch_slot_map_from(&self, node: &RedisNode) -> Result<SlotMap, LimiterError> {
        let answer: Value = self
            .run(node, None, async |connection| redis::cmd("CLUSTER").arg("SLOTS").query_async(connection).await)
            .await?;
        SlotMap::parse(&answer, node.host()).map_err(LimiterError::Refused)
    }

    /// Nodes with a link that nobody is about to replace.
    fn connected_nodes(&self) -> Vec<RedisNode> {
        let Ok(seed) = self.seed() else { return Vec::new() };
        let places = lock(&self.slots);
        let linked = places.iter().filter(|(_, place)| place.try_lock().is_ok_and(|link| link.is_some()));
        let endpoint = |shown: &str| {
            let (host, port) = shown.rsplit_once(':')?;
            Some(NodeAddress { host: host.to_owned(), port: port.parse().ok()? })
        };
        linked.filter_map(|(shown, _)| endpoint(shown)).map(|endpoint| seed.sibling(&endpoint)).collect()
    }

    fn connection_slot(&self, shown: &str) -> ConnectionSlot {
        Arc::clone(lock(&self.slots).entry(shown.to_owned()).or_default())
    }

    /// Nodes that have left the cluster take their links with them.
    fn drop_departed_nodes(&self, map: &SlotMap) {
        let Ok(seed) = self.seed() else { return };
        let masters: Vec<String> = map.masters().into_iter().map(|endpoint| seed.sibling(endpoint).address).collect();
        let named = |shown: &String| masters.contains(shown) || self.seeds.iter().any(|seed| seed.address == *shown);
        lock(&self.slots).retain(|shown, _| named(shown));
    }

    fn cached_slot_map(&self) -> Option<Arc<SlotMap>> {
        lock(&self.slot_map).clone()
    }

    fn clear_slot_map(&self) {
        *lock(&self.slot_map) = None;
    }

    fn seed(&self) -> Result<&RedisNode, LimiterError> {
        self.seeds.first().ok_or_else(|| LimiterError::Refused("limiter.url names no node".to_owned()))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind these locks is whole after every statement.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
            // By name in the configuration, and by address as the cluster has it.
            ("redis://redis-1:7000", "172.18.0.3", true),
            ("rediss://127.0.0.1:7000", "10.0.0.8", true),
        ] {
            let links = RedisConnections::cluster([seed]).unwrap().with_plaintext_hosts(&listed);
            let node = links.seed().unwrap().sibling(&NodeAddress { host: host.to_owned(), port: 7001 });
            assert_eq!(links.check_plaintext(&node).is_ok(), permitted, "{seed} names {host}");
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
