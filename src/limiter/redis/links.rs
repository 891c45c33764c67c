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

use super::fault::{Topology, ends_link, fault};
use super::slots::{Endpoint, SlotMap, slot_of};
use crate::domain::provider::ProviderName;
use crate::limiter::{LimiterError, Linked};
use crate::tls::{Authorities, may_be_plain};

/// Longest wait for one answer. Far above a round trip. It eats into the send budget: of the default of 500 ms an answer
/// that comes last of all leaves a fifth, and a row with a budget below this loses the permits of such an answer unused.
const ANSWER_TIME_MAX: Duration = Duration::from_millis(400);
/// Longest wait for a new connection with its handshake.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(2);

/// A connection and the server that it leads to.
#[derive(Clone)]
pub(super) struct Link {
    connection: MultiplexedConnection,
    pub to: Linked,
    /// Of the server, if it tells it.
    pub version: Option<String>,
}

/// A server to be reached, with the credentials that it asks for.
#[derive(Clone)]
pub(super) struct Node {
    /// Host and port.
    pub shown: String,
    info: ConnectionInfo,
}

/// The servers that may keep keys, and the slots of a cluster that none of them keeps.
pub(super) struct Masters {
    pub nodes: Vec<Node>,
    pub orphan_slots: u16,
    pub unnamed_slots: u16,
}

/// A node that answers `?` as its host.
pub const NO_NAME: &str = "has no name that could be connected to (CLUSTER SLOTS says \"?\")";
pub const NAME_IT: &str = "set cluster-announce-hostname on every node, or cluster-preferred-endpoint-type ip";

/// Holds at most one link; whoever locks it first connects for all.
type Place = Arc<tokio::sync::Mutex<Option<Link>>>;

pub(super) struct Links {
    seeds: Vec<Node>,
    /// Where a node may be that a cluster on this machine names and that is spoken to without TLS.
    plaintext_hosts: Vec<String>,
    topology: Topology,
    /// By host and port.
    places: Mutex<HashMap<String, Place>>,
    map: Mutex<Option<Arc<SlotMap>>>,
    /// Held by the one who asks for the map.
    asking: tokio::sync::Mutex<()>,
}

impl Node {
    /// A call is one small packet and the next one waits for its answer: held back for company it would only come late.
    fn new(info: ConnectionInfo) -> Self {
        let tcp = info.tcp_settings().clone().set_nodelay(true);
        let info = info.set_tcp_settings(tcp);
        Self { shown: info.addr().to_string(), info }
    }

    fn parse(url: &str) -> Result<Self, LimiterError> {
        // The error of a bad URL may quote it, password and all.
        let bad = |_| LimiterError::Refused("limiter.url is not a Redis URL".to_owned());
        url.into_connection_info().map(Self::new).map_err(bad)
    }

    /// Another node of the same cluster: the same credentials and the same way to encrypt.
    fn sibling(&self, endpoint: &Endpoint) -> Self {
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
    fn names(&self, error: LimiterError) -> LimiterError {
        let shown = &self.shown;
        match error {
            LimiterError::Away(text) => LimiterError::Away(format!("{shown}: {text}")),
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

impl Links {
    pub fn single(url: &str) -> Result<Self, LimiterError> {
        Ok(Self::new(vec![Node::parse(url)?], Topology::Single))
    }

    /// `urls`: nodes to ask for the others, of which one must be there.
    pub fn cluster<'a>(urls: impl IntoIterator<Item = &'a str>) -> Result<Self, LimiterError> {
        let seeds = urls.into_iter().map(Node::parse).collect::<Result<_, _>>()?;
        Ok(Self::new(seeds, Topology::Cluster))
    }

    fn new(seeds: Vec<Node>, topology: Topology) -> Self {
        Self {
            seeds,
            plaintext_hosts: Vec::new(),
            topology,
            places: Mutex::default(),
            map: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
        }
    }

    /// These hosts may be spoken to without TLS.
    pub fn permitting(self, plaintext_hosts: &[String]) -> Self {
        Self { plaintext_hosts: plaintext_hosts.to_vec(), ..self }
    }

    /// The configuration permits the seeds. A cluster names its nodes as it likes, mostly by address: where a seed is on
    /// another machine already, its network is the one that was permitted. From this machine the password would leave it.
    fn permits(&self, node: &Node) -> Result<(), LimiterError> {
        let is_tcp = matches!(node.info.addr(), ConnectionAddr::Tcp(..));
        let leaves_anyhow = self.seeds.iter().any(|seed| !may_be_plain(seed.host(), &[]));
        if !is_tcp || leaves_anyhow || may_be_plain(node.host(), &self.plaintext_hosts) {
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
    pub fn trusting(mut self, authorities: &Authorities) -> Result<Self, LimiterError> {
        let Some(pem) = authorities.pem() else { return Ok(self) };
        let is_tls = |node: &&mut Node| matches!(node.info.addr(), ConnectionAddr::TcpTls { .. });
        for node in self.seeds.iter_mut().filter(is_tls) {
            let certificates = TlsCertificates { client_tls: None, root_cert: Some(pem.as_bytes().to_vec()) };
            let client = Client::build_with_tls(node.info.clone(), certificates)
                .map_err(|error| LimiterError::Refused(format!("tls.ca_file: {error}")))?;
            node.info = client.get_connection_info().clone();
        }
        Ok(self)
    }

    /// The server that keeps a quota's keys.
    pub async fn node_of(&self, quota: &ProviderName) -> Result<Node, LimiterError> {
        if self.topology == Topology::Single {
            return self.seed().cloned();
        }
        // The keys' hash tag is the quota's name alone (`keys`).
        let slot = slot_of(quota.as_str());
        let map = self.map().await?;
        let Some(endpoint) = map.master(slot) else {
            self.forget_map();
            if map.is_unnamed(slot) {
                return Err(LimiterError::Refused(format!("the master of slot {slot} {NO_NAME}; {NAME_IT}")));
            }
            let what = format!("slot {slot} of the cluster has no master; look at CLUSTER INFO");
            return Err(LimiterError::Away(what));
        };
        Ok(self.seed()?.sibling(endpoint))
    }

    /// Every server that may keep keys, and how many slots of a cluster have none.
    pub async fn masters(&self) -> Result<Masters, LimiterError> {
        if self.topology == Topology::Single {
            return Ok(Masters { nodes: self.seeds.clone(), orphan_slots: 0, unnamed_slots: 0 });
        }
        self.forget_map();
        let (map, seed) = (self.map().await?, self.seed()?);
        let nodes = map.masters().into_iter().map(|endpoint| seed.sibling(endpoint)).collect();
        Ok(Masters { nodes, orphan_slots: map.orphans(), unnamed_slots: map.unnamed() })
    }

    /// The link to a server; connects when there is none.
    pub async fn link(&self, node: &Node) -> Result<Link, LimiterError> {
        let place = self.place(&node.shown);
        let mut link = place.lock().await;
        if let Some(link) = link.as_ref() {
            return Ok(link.clone());
        }
        let fresh = timeout(CONNECT_TIME_MAX, self.connect(node))
            .await
            .map_err(|_| LimiterError::Away("no connection in time".to_owned()));
        match fresh.flatten() {
            Ok(fresh) => Ok(link.insert(fresh).clone()),
            Err(error) => {
                self.forget_map();
                Err(node.names(error))
            }
        }
    }

    /// Runs one command with a time limit. A fault ends the link, unless another would meet the same.
    pub async fn ask<T>(
        &self,
        node: &Node,
        run_id: Option<&str>,
        command: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<T, RedisError>,
    ) -> Result<T, LimiterError> {
        let mut link = self.link(node).await?;
        if run_id.is_some_and(|run_id| run_id != link.to.run_id) {
            return Err(node.names(LimiterError::Away("the store's process has changed".to_owned())));
        }
        let (error, ends) = match timeout(ANSWER_TIME_MAX, command(&mut link.connection)).await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => (fault(&error, self.topology), ends_link(&error)),
            Err(_) => (LimiterError::Away("no answer in time".to_owned()), true),
        };
        if ends {
            self.unlink(node, &link.to).await;
        }
        Err(node.names(error))
    }

    /// Drops the link to a server if it is this one. Whoever waited for an answer on a link that was replaced meanwhile says
    /// nothing of the new one.
    pub async fn unlink(&self, node: &Node, link: &Linked) {
        self.place(&node.shown).lock().await.take_if(|current| current.to == *link);
        self.forget_map();
    }

    async fn connect(&self, node: &Node) -> Result<Link, LimiterError> {
        self.permits(node)?;
        let fault = |error: RedisError| fault(&error, self.topology);
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
        Ok(Link { connection, to: Linked { run_id, made_at }, version })
    }

    async fn map(&self) -> Result<Arc<SlotMap>, LimiterError> {
        if let Some(map) = self.known_map() {
            return Ok(map);
        }
        let _asking = self.asking.lock().await;
        if let Some(map) = self.known_map() {
            return Ok(map);
        }
        let map = Arc::new(self.ask_for_map().await?);
        *lock(&self.map) = Some(Arc::clone(&map));
        self.keep_places(&map);
        Ok(map)
    }

    /// Those that we are connected to first: they answer at once where a seed that is gone would hold everybody up.
    async fn ask_for_map(&self) -> Result<SlotMap, LimiterError> {
        // In any order, so that a node that the others have forgotten is not the one that is always asked.
        let mut linked = self.linked();
        linked.shuffle(&mut rand::rng());
        for node in linked {
            if let Ok(map) = self.map_of(&node).await {
                return Ok(map);
            }
        }
        let seeds = self.seeds.iter().map(|seed| Box::pin(self.map_of(seed)));
        match select_ok(seeds).await {
            Ok((map, _slower)) => Ok(map),
            Err(LimiterError::Away(last)) => Err(LimiterError::Away(format!("no node of the cluster answers: {last}"))),
            Err(refused) => Err(refused),
        }
    }

    async fn map_of(&self, node: &Node) -> Result<SlotMap, LimiterError> {
        let answer: Value = self
            .ask(node, None, async |connection| redis::cmd("CLUSTER").arg("SLOTS").query_async(connection).await)
            .await?;
        SlotMap::read(&answer, node.host()).map_err(LimiterError::Refused)
    }

    /// Nodes with a link that nobody is about to replace.
    fn linked(&self) -> Vec<Node> {
        let Ok(seed) = self.seed() else { return Vec::new() };
        let places = lock(&self.places);
        let linked = places.iter().filter(|(_, place)| place.try_lock().is_ok_and(|link| link.is_some()));
        let endpoint = |shown: &str| {
            let (host, port) = shown.rsplit_once(':')?;
            Some(Endpoint { host: host.to_owned(), port: port.parse().ok()? })
        };
        linked.filter_map(|(shown, _)| endpoint(shown)).map(|endpoint| seed.sibling(&endpoint)).collect()
    }

    fn place(&self, shown: &str) -> Place {
        Arc::clone(lock(&self.places).entry(shown.to_owned()).or_default())
    }

    /// Nodes that have left the cluster take their links with them.
    fn keep_places(&self, map: &SlotMap) {
        let Ok(seed) = self.seed() else { return };
        let masters: Vec<String> = map.masters().into_iter().map(|endpoint| seed.sibling(endpoint).shown).collect();
        let named = |shown: &String| masters.contains(shown) || self.seeds.iter().any(|seed| seed.shown == *shown);
        lock(&self.places).retain(|shown, _| named(shown));
    }

    fn known_map(&self) -> Option<Arc<SlotMap>> {
        lock(&self.map).clone()
    }

    fn forget_map(&self) {
        *lock(&self.map) = None;
    }

    fn seed(&self) -> Result<&Node, LimiterError> {
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
    fn a_node_that_a_cluster_names_is_not_spoken_to_in_plain_text_unless_that_is_permitted() {
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
            let links = Links::cluster([seed]).unwrap().permitting(&listed);
            let node = links.seed().unwrap().sibling(&Endpoint { host: host.to_owned(), port: 7001 });
            assert_eq!(links.permits(&node).is_ok(), permitted, "{seed} names {host}");
        }
    }

    #[test]
    fn no_packet_is_held_back_for_company() {
        for url in ["redis://localhost", "rediss://user:word@localhost:7/0"] {
            let seed = Node::parse(url).unwrap();
            let sibling = seed.sibling(&Endpoint { host: "other".to_owned(), port: 1 });
            for node in [seed, sibling] {
                assert!(node.info.tcp_settings().nodelay(), "{}", node.shown);
            }
        }
    }
}
