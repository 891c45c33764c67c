//! Private redis-servers for tests: a single one, and a cluster of three masters without replicas.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use sluicegate::limiter::redis::library::Library;

use super::process::{Host, Server, free_port, private_dir};

/// How a redis-server is started.
#[derive(Clone, Default)]
pub struct RedisOptions {
    /// Loses its data when it is killed.
    pub is_forgetful: bool,
    /// More arguments of the command line.
    pub arguments: Vec<String>,
    pub environment: Vec<(&'static str, String)>,
    pub host: Host,
    /// User and password of the tests, as `user:password@`; empty: none is needed.
    pub credentials: String,
}

/// One redis-server, on its own port and in its own directory; with append-only persistence unless it is forgetful.
pub struct Redis {
    pub port: u16,
    dir: PathBuf,
    options: RedisOptions,
    /// Lives as long as the test binary, which drops no statics: its warden removes the directory.
    is_shared: bool,
    server: Mutex<Option<Server>>,
}

impl Redis {
    /// Loads a library that may exist already.
    pub fn load(library: &Library, connection: &mut redis::Connection) {
        match library.load().exec(connection) {
            Err(error) if Library::is_present(&error) => {}
            loaded => loaded.unwrap(),
        }
    }

    pub fn start() -> Self {
        Self::start_with(RedisOptions::default())
    }

    pub fn start_with(options: RedisOptions) -> Self {
        Self::begin(private_dir("redis"), options, false)
    }

    /// Starts a server in an existing directory.
    pub fn start_in(dir: &Path, options: RedisOptions) -> Self {
        Self::begin(dir.to_owned(), options, false)
    }

    fn begin(dir: PathBuf, options: RedisOptions, is_shared: bool) -> Self {
        let redis = Self { port: free_port(), dir, options, is_shared, server: Mutex::new(None) };
        redis.restart();
        redis
    }

    /// The server that the tests of one binary share, each under its own key prefix.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Redis> = OnceLock::new();
        SHARED.get_or_init(|| Self::begin(private_dir("redis"), RedisOptions::default(), true))
    }

    pub fn url(&self) -> String {
        let RedisOptions { credentials, host, .. } = &self.options;
        format!("redis://{credentials}{}:{}", host.address, self.port)
    }

    /// Kills it with SIGKILL; data and port stay for a restart.
    pub fn kill(&self) {
        if let Some(server) = self.slot().take() {
            server.kill();
        }
    }

    /// Starts it on its port and its data, and waits until it has read them.
    pub fn restart(&self) {
        self.restart_with(&[]);
        let deadline = Instant::now() + Duration::from_secs(60);
        let is_loading = || {
            let outcome = redis::cmd("PING").query::<String>(&mut self.connection());
            outcome.is_err_and(|error| error.code() == Some("LOADING"))
        };
        while is_loading() {
            assert!(Instant::now() < deadline, "the server still reads its data");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts it with more arguments this time, and waits until it accepts connections.
    pub fn restart_with(&self, arguments: &[&str]) {
        let (port, dir) = (self.port.to_string(), self.dir.display().to_string());
        let append_only = if self.options.is_forgetful { "no" } else { "yes" };
        // Set for the server alone, not for its warden.
        let environment: Vec<String> =
            self.options.environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let host = &self.options.host;
        let enter = host.command(&["env"]);
        let mut command: Vec<&str> = enter.iter().map(String::as_str).collect();
        command.extend(environment.iter().map(String::as_str));
        command.extend(["redis-server", "--port", &port, "--bind", &host.address, "--dir", &dir, "--save", ""]);
        command.extend(["--appendonly", append_only, "--appendfsync", "everysec"]);
        command.extend(["--maxmemory-policy", "noeviction", "--daemonize", "no"]);
        command.extend(self.options.arguments.iter().map(String::as_str).chain(arguments.iter().copied()));
        let owned_dir = self.is_shared.then_some(self.dir.as_path());
        let server = Server::start(&command, &[], &self.dir.join("log"), owned_dir, "");
        server.await_port_on(host, self.port);
        *self.slot() = Some(server);
    }

    pub fn connection(&self) -> redis::Connection {
        redis::Client::open(self.url()).unwrap().get_connection().unwrap()
    }

    /// Runs one command with words separated by single spaces.
    pub fn command<T: redis::FromRedisValue>(&self, line: &str) -> T {
        let mut words = line.split(' ');
        let mut command = redis::cmd(words.next().unwrap());
        words.for_each(|word| {
            command.arg(word);
        });
        command.query(&mut self.connection()).unwrap_or_else(|error| panic!("{line}: {error}"))
    }

    pub fn signal(&self, name: &str) {
        self.slot().as_ref().unwrap().signal(name);
    }

    fn slot(&self) -> std::sync::MutexGuard<'_, Option<Server>> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Slots of a cluster.
const SLOTS: u32 = 16_384;

/// Three masters with a third of the slots each, and no replicas. When one is lost, the others continue.
pub struct RedisCluster {
    pub nodes: Vec<Redis>,
}

impl RedisCluster {
    /// The cluster that the tests of one binary share, each under its own key prefix.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<RedisCluster> = OnceLock::new();
        SHARED.get_or_init(|| Self::begin(true))
    }

    /// A separate cluster, for tests that change it.
    pub fn start() -> Self {
        Self::begin(false)
    }

    fn begin(is_shared: bool) -> Self {
        let nodes: Vec<Redis> = (0..3).map(|_| Self::start_node(is_shared)).collect();
        for (number, node) in (0..).zip(&nodes) {
            let (first, last) = (SLOTS * number / 3, SLOTS * (number + 1) / 3 - 1);
            node.command::<()>(&format!("CLUSTER ADDSLOTSRANGE {first} {last}"));
            node.command::<()>(&format!("CLUSTER SET-CONFIG-EPOCH {}", number + 1));
        }
        let cluster = Self { nodes };
        let (first, others) = cluster.nodes.split_first().unwrap();
        for other in others {
            let bus: Vec<String> = other.command("CONFIG GET cluster-port");
            first.command::<()>(&format!("CLUSTER MEET 127.0.0.1 {} {}", other.port, bus[1]));
        }
        cluster.await_agreement();
        cluster
    }

    /// Adds a node as the replica of a master; returns when it has caught up.
    pub fn add_replica(&self, master: usize) -> Redis {
        let replica = Self::start_node(false);
        let bus: Vec<String> = replica.command("CONFIG GET cluster-port");
        let master = &self.nodes[master];
        master.command::<()>(&format!("CLUSTER MEET 127.0.0.1 {} {}", replica.port, bus[1]));
        let id: String = master.command("CLUSTER MYID");
        let deadline = Instant::now() + Duration::from_secs(60);
        let await_that = |what: &dyn Fn() -> bool| {
            while !what() {
                assert!(Instant::now() < deadline, "no replica: {}", replica.command::<String>("CLUSTER NODES"));
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        await_that(&|| replica.command::<String>("CLUSTER NODES").contains(&id));
        replica.command::<()>(&format!("CLUSTER REPLICATE {id}"));
        await_that(&|| replica.command::<String>("INFO replication").contains("master_link_status:up"));
        let known = |node: &Redis| node.command::<String>("CLUSTER NODES").lines().any(|line| line.contains("slave"));
        await_that(&|| self.nodes.iter().all(known));
        replica
    }

    fn start_node(is_shared: bool) -> Redis {
        let bus = free_port().to_string();
        let arguments = ["--cluster-enabled", "yes", "--cluster-port", &bus, "--cluster-node-timeout", "1000"];
        let tolerant = ["--cluster-require-full-coverage", "no"];
        let arguments = arguments.into_iter().chain(tolerant).map(str::to_owned).collect();
        Redis::begin(private_dir("redis"), RedisOptions { arguments, ..RedisOptions::default() }, is_shared)
    }

    /// One URL per node.
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Redis::url).collect()
    }

    /// Waits until every node knows three masters and the owner of every slot.
    pub fn await_agreement(&self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let agrees = |node: &Redis| {
            let info: String = node.command("CLUSTER INFO");
            let has_line = |line: &str| info.lines().any(|entry| entry.trim() == line);
            let failed = info.lines().any(|line| line.starts_with("cluster_slots_ok:") && !line.ends_with("16384"));
            has_line("cluster_state:ok")
                && has_line("cluster_size:3")
                && has_line("cluster_slots_assigned:16384")
                && !failed
        };
        while !self.nodes.iter().all(agrees) {
            assert!(Instant::now() < deadline, "{}", self.nodes[0].command::<String>("CLUSTER INFO"));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn slot(&self, key: &str) -> u16 {
        self.nodes[0].command(&format!("CLUSTER KEYSLOT {key}"))
    }

    /// The node that serves a key.
    pub fn owner(&self, key: &str) -> usize {
        let owns = |node: &Redis| {
            let outcome = redis::cmd("EXISTS").arg(key).query::<u64>(&mut node.connection());
            outcome.is_ok()
        };
        self.nodes.iter().position(owns).unwrap_or_else(|| panic!("no node owns the slot of {key}"))
    }

    /// Moves a slot with its keys from its owner to another node, key by key; `between` runs after each step. See
    /// <https://redis.io/docs/latest/commands/cluster-setslot/>.
    pub fn migrate(&self, slot: u16, from: usize, to: usize, mut between: impl FnMut()) {
        let id = |node: usize| self.nodes[node].command::<String>("CLUSTER MYID");
        let (from_id, to_id) = (id(from), id(to));
        self.nodes[to].command::<()>(&format!("CLUSTER SETSLOT {slot} IMPORTING {from_id}"));
        self.nodes[from].command::<()>(&format!("CLUSTER SETSLOT {slot} MIGRATING {to_id}"));
        between();
        loop {
            let keys: Vec<String> = self.nodes[from].command(&format!("CLUSTER GETKEYSINSLOT {slot} 1"));
            let Some(key) = keys.first() else { break };
            let port = self.nodes[to].port;
            self.nodes[from].command::<String>(&format!("MIGRATE 127.0.0.1 {port} {key} 0 5000 REPLACE"));
            between();
        }
        for node in [to, from, 3 - to - from] {
            self.nodes[node].command::<()>(&format!("CLUSTER SETSLOT {slot} NODE {to_id}"));
        }
    }
}
