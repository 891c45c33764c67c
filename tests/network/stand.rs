//! A deployment of separate hosts: PostgreSQL, Redis, RabbitMQ and workers; this process is the provider.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use crate::broker::Client;
use crate::hosts::Network;
use crate::provider::{Provider, ProviderOptions};
use crate::support::postgres::Postgres;
use crate::support::process::{Host, Server, private_dir};
use crate::support::rabbitmq::RabbitNode;
use crate::support::redis::{Redis, RedisOptions};

/// The program of this build, or another one to be tested.
fn program() -> String {
    std::env::var("NETWORK_PROGRAM").unwrap_or_else(|_| env!("CARGO_BIN_EXE_sluicegate").to_owned())
}

pub const DATABASE: &str = "network";
const VHOST: &str = "network";
pub const OUTCOMES: &str = "test.outcomes";
/// Workers, as numbers of their hosts.
pub const WORKERS: [usize; 2] = [3, 4];
const OPS_PORT: u16 = 9464;

/// A backend, as the number of its host.
#[derive(Clone, Copy, Debug)]
pub enum Backend {
    Postgres = 0,
    Redis = 1,
    Rabbit = 2,
}

pub struct Stand {
    // Dropped in this order: workers, backends, then the network.
    workers: [Mutex<Option<Server>>; 2],
    pub postgres: Postgres,
    redis: Redis,
    _rabbit: RabbitNode,
    broker_url: String,
    pub client: Client,
    pub providers: BTreeMap<String, Placed>,
    pub network: Network,
    pub dir: PathBuf,
    pub runtime: Runtime,
}

pub struct Placed {
    pub provider: Provider,
}

impl Stand {
    pub fn start() -> Self {
        let dir = private_dir("network");
        let network = Network::new(&dir, 5);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let host = |backend: Backend| network.host(backend as usize);
        let (postgres, redis, rabbit) = std::thread::scope(|scope| {
            let postgres = scope.spawn(|| Postgres::start_on(host(Backend::Postgres)));
            let arguments = ["--protected-mode", "no"].map(str::to_owned).to_vec();
            let options = RedisOptions { arguments, host: host(Backend::Redis), ..RedisOptions::default() };
            let redis = Redis::start_with(options);
            let rabbit = RabbitNode::start_on(host(Backend::Rabbit), VHOST, "loopback_users = none");
            (postgres.join().unwrap(), redis, rabbit)
        });
        let broker_url = rabbit.url(VHOST);
        postgres.create_database(DATABASE);
        let client = Client::new(broker_url.clone());
        let (workers, providers) = (Default::default(), BTreeMap::new());
        let stand =
            Self { workers, postgres, redis, _rabbit: rabbit, broker_url, client, providers, network, dir, runtime };
        stand.sluicegate(&["migrate"]);
        stand
    }

    /// Starts a provider on this host; rows write its address as `{url:NAME}`.
    pub fn add_provider(&mut self, name: &str, options: ProviderOptions) {
        let address: Ipv4Addr = self.network.here.address.parse().unwrap();
        let provider = self.runtime.block_on(Provider::start_at(address, options));
        self.providers.insert(name.to_owned(), Placed { provider });
    }

    pub fn provider(&self, name: &str) -> &Provider {
        &self.providers[name].provider
    }

    /// Applies provider rows, and subscribes to the outcomes.
    pub fn apply(&self, rows: &str) {
        let mut rows = rows.to_owned();
        for (name, placed) in &self.providers {
            let url = format!("http://{}:{}/charges", self.network.here.address, placed.provider.port);
            rows = rows.replace(&format!("{{url:{name}}}"), &url);
        }
        let path = self.dir.join("providers.toml");
        std::fs::write(&path, rows).unwrap();
        self.sluicegate(&["provider", "apply", path.to_str().unwrap()]);
        self.runtime.block_on(self.client.subscribe(OUTCOMES, "payments.outcomes"));
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        let backends = [Backend::Postgres, Backend::Redis, Backend::Rabbit];
        let plain: Vec<String> = backends.map(|backend| self.network.host(backend as usize).address).to_vec();
        let here = &self.network.here.address;
        let allow: Vec<String> =
            self.providers.values().map(|placed| format!("http://{here}:{}", placed.provider.port)).collect();
        vec![
            ("SLUICEGATE_DATABASE__URL", self.postgres.url(DATABASE)),
            ("SLUICEGATE_QUEUE__URL", self.broker_url.clone()),
            ("SLUICEGATE_LIMITER__URL", self.redis.url()),
            ("SLUICEGATE_TLS__PLAINTEXT_HOSTS", plain.join(",")),
            ("SLUICEGATE_OUTBOUND__ALLOW", allow.join(",")),
        ]
    }

    fn sluicegate(&self, args: &[&str]) {
        let output = Command::new(program()).args(args).envs(self.environment()).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Address of a worker's host.
    pub fn address(&self, worker: usize) -> String {
        self.network.host(WORKERS[worker]).address
    }

    /// Starts a worker's process without waiting until it is ready.
    pub fn start_worker(&self, worker: usize) {
        let host: Host = self.network.host(WORKERS[worker]);
        let ops = [
            ("SLUICEGATE_OPS__LISTEN", format!("{}:{OPS_PORT}", host.address)),
            ("SLUICEGATE_OPS__TOKEN", "for-this-test-alone-0123456789abcdef".to_owned()),
        ];
        let mut command = host.command(&["env"]);
        command.extend(self.environment().into_iter().chain(ops).map(|(name, value)| format!("{name}={value}")));
        command.extend([program(), "run".to_owned()]);
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let log = self.dir.join(format!("worker-{worker}.log"));
        *self.slot(worker) = Some(Server::start(&command, &[], &log, None, ""));
    }

    pub fn await_ready(&self, worker: usize) {
        let address = self.address(worker);
        let ready = || {
            let Ok(mut stream) = TcpStream::connect((address.as_str(), OPS_PORT)) else { return false };
            let mut answer = String::new();
            let request = format!("GET /readyz HTTP/1.1\r\nHost: {address}:{OPS_PORT}\r\nConnection: close\r\n\r\n");
            let asked = stream.write_all(request.as_bytes());
            asked.and_then(|()| stream.read_to_string(&mut answer)).is_ok() && answer.starts_with("HTTP/1.1 200")
        };
        let slot = self.slot(worker);
        slot.as_ref().unwrap().await_that("the worker isn't ready", ready);
    }

    /// Sends SIGKILL. The host stays, with the packets that its kernel holds.
    pub fn kill_worker(&self, worker: usize) {
        self.slot(worker).take().expect("the worker runs").kill();
    }

    fn slot(&self, worker: usize) -> MutexGuard<'_, Option<Server>> {
        self.workers[worker].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Polls until the condition holds.
pub fn await_that(what: &str, within: Duration, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + within;
    while !condition() {
        assert!(Instant::now() < deadline, "not so within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        for worker in 0..self.workers.len() {
            self.slot(worker).take();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
