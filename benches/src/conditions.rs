//! The conditions of a run: command, date, machine, build, and the backends with their versions.
//!
//! An unknown version is left out. No password of a URL is printed.

use serde::Serialize;
use sqlx::Connection as _;

use super::{machine, meter::RedisMeter};
use sluicegate::cli::Console;
use sluicegate::config::{Config, DatabaseUrl, LimiterUrl, QueueUrl};
use sluicegate::domain::format::count;

/// Load average above which other processes use the cores too.
const BUSY: f64 = 0.5;

#[derive(Clone, Debug, Serialize)]
pub struct Conditions {
    /// The command that produces this report.
    pub command: String,
    pub date: String,
    pub machine: String,
    /// Load average before the run.
    pub load: Option<f64>,
    pub sluicegate: String,
    pub database: String,
    pub queue: String,
    pub limiter: String,
}

impl Conditions {
    /// Reads machine and backends, and warns about conditions that make figures unreliable.
    pub async fn collect(command: String, config: &Config, console: &mut Console) -> std::io::Result<Self> {
        if cfg!(debug_assertions) {
            console.message("this is a debug build: its figures are not meaningful")?;
        }
        let load = machine::load();
        if let Some(load) = load.filter(|load| *load > BUSY) {
            console.message(&format!("this machine is busy (load average {load}): its figures are less reliable"))?;
        }
        let database = match &config.database.url {
            DatabaseUrl::Sqlite { .. } => "SQLite, embedded".to_owned(),
            DatabaseUrl::Postgres(url) => versioned("PostgreSQL", postgres_version(url.expose()).await),
        };
        let queue = match &config.queue.url {
            QueueUrl::Embedded | QueueUrl::Database => "none, recorded in the database".to_owned(),
            QueueUrl::Amqp(_) => "RabbitMQ, quorum queues".to_owned(),
        };
        let limiter = match &config.limiter.url {
            LimiterUrl::Embedded => "embedded".to_owned(),
            LimiterUrl::Redis(url) => {
                versioned("Redis", RedisMeter::connect(url.expose()).await.ok().map(|meter| meter.version))
            }
            LimiterUrl::RedisCluster(nodes) => format!("Redis Cluster, {} named", count(nodes.len() as u64, "node")),
        };
        Ok(Self {
            command,
            date: jiff::Timestamp::now().strftime("%Y-%m-%d").to_string(),
            machine: machine::describe(),
            load,
            sluicegate: machine::build(),
            database,
            queue,
            limiter,
        })
    }

    /// Lines for people.
    pub fn lines(&self) -> [String; 3] {
        let load = self.load.map_or_else(String::new, |load| format!(" · load average before the run {load}"));
        [
            format!("{} · {}{load}", self.machine, self.date),
            format!("sluicegate {} · `{}`", self.sluicegate, self.command),
            format!("ledger {} · queue {} · limiter {}", self.database, self.queue, self.limiter),
        ]
    }
}

fn versioned(name: &str, version: Option<String>) -> String {
    version.map_or_else(|| name.to_owned(), |version| format!("{name} {version}"))
}

async fn postgres_version(url: &str) -> Option<String> {
    let mut connection = sqlx::PgConnection::connect(url).await.ok()?;
    let version: String = sqlx::query_scalar("SHOW server_version").fetch_one(&mut connection).await.ok()?;
    connection.close().await.ok()?;
    Some(version.split(' ').next().unwrap_or(&version).to_owned())
}
