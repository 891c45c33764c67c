//! The probes of `check`: settings of PostgreSQL and Redis that would break a guarantee or slow workers down.
//!
//! They change nothing.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;

use crate::cli::check::Finding;
use crate::cli::connect::Probe;
use crate::config::{Config, DatabaseUrl, LimiterUrl};
use crate::domain::format::count;
use crate::ledger::LedgerError;
use crate::ledger::database::{ConnectionLimits, Database};
use crate::limiter::LimiterError;
use crate::limiter::redis::client::{RedisLimiter, StoreFacts, StoreReport, UNNAMED_MASTER, UNNAMED_MASTER_FIX};

/// A larger clock skew makes waits in logs and pages misleading; limits do not depend on it.
const CLOCK_SKEW_MAX: Duration = Duration::from_secs(5);

pub fn all_probes(config: &Config) -> Vec<Box<dyn Probe>> {
    let mut probes: Vec<Box<dyn Probe>> = Vec::new();
    if let DatabaseUrl::Postgres(url) = &config.database.url {
        probes.push(Box::new(ConnectionsProbe {
            address: url.to_string(),
            max_connections: config.database.max_connections,
            database: super::open_database(config),
        }));
    }
    match &config.limiter.url {
        LimiterUrl::Embedded => {}
        url => probes.push(Box::new(RedisProbe { address: url.to_string(), limiter: super::redis_limiter(config) })),
    }
    probes
}

/// Compares the connections that workers open with those that the server allows.
struct ConnectionsProbe {
    address: String,
    max_connections: u32,
    database: Result<Database, LedgerError>,
}

#[async_trait]
impl Probe for ConnectionsProbe {
    fn subject(&self) -> String {
        format!("database {}", self.address)
    }

    /// An unreachable database already has a finding.
    async fn run(&self) -> Vec<Finding> {
        let Ok(database) = &self.database else { return Vec::new() };
        let limits = database.connection_limits().await;
        database.close().await;
        match limits {
            Ok(Some(limits)) => check_connections(&self.subject(), self.max_connections, limits).into_iter().collect(),
            Ok(None) | Err(_) => Vec::new(),
        }
    }
}

/// A worker has one connection beside its pool, for notifications of changed settings. A rolling restart needs two
/// workers.
fn check_connections(subject: &str, max_connections: u32, limits: ConnectionLimits) -> Option<Finding> {
    let known = [(limits.role, "its role"), (limits.database, "the database"), (Some(limits.server), "the server")];
    let known = known.into_iter().filter_map(|(limit, owner)| Some((limit?, owner)));
    let (allowed, owner) = known.min_by_key(|(limit, _)| *limit)?;
    let wanted = max_connections + 1;
    let workers = allowed / wanted;
    let fix = format!(
        "Raise the limit, or lower database.max_connections ({max_connections}): all workers and commands together may have \
         no more than {allowed}"
    );
    let what = format!("a worker opens up to {wanted} connections, and {owner} allows {allowed}");
    match workers {
        0 => Some(Finding::warning(subject, format!("{what}: it works with fewer, but slowly"), fix)),
        1 => Some(Finding::warning(subject, format!("{what}: enough for one worker, not for two"), fix)),
        _ => None,
    }
}

struct RedisProbe {
    address: String,
    limiter: Result<RedisLimiter, LimiterError>,
}

#[async_trait]
impl Probe for RedisProbe {
    fn subject(&self) -> String {
        format!("limiter {}", self.address)
    }

    async fn run(&self) -> Vec<Finding> {
        let report = match &self.limiter {
            Ok(limiter) => limiter.report().await.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match report {
            Err(error) => vec![unreachable(self.subject(), error)],
            Ok(report) => self.check_report(&report, SystemTime::now()),
        }
    }
}

impl RedisProbe {
    fn check_report(&self, report: &StoreReport, now: SystemTime) -> Vec<Finding> {
        let mut findings = Vec::new();
        if report.orphan_slots > 0 {
            let slots = count(report.orphan_slots.into(), "slot");
            let what = format!("{slots} of the cluster have no master: their quotas get no permits");
            findings.push(Finding::error(
                self.subject(),
                what,
                "Check CLUSTER INFO, then run `redis-cli --cluster fix`",
            ));
        }
        if report.unnamed_slots > 0 {
            let slots = count(report.unnamed_slots.into(), "slot");
            let what = format!("the masters of {slots} {UNNAMED_MASTER}: their quotas get no permits");
            findings.push(Finding::error(self.subject(), what, format!("On the nodes: {UNNAMED_MASTER_FIX}")));
        }
        for node in &report.nodes {
            let is_alone = report.nodes.len() == 1;
            let subject = if is_alone { self.subject() } else { format!("limiter {}", node.address) };
            match &node.facts {
                Ok(facts) => findings.extend(check_facts(&subject, facts, now)),
                Err(error) => findings.push(unreachable(subject, error.to_string())),
            }
        }
        findings
    }
}

fn unreachable(subject: String, error: String) -> Finding {
    Finding::error(subject, error, "Do what the finding says, or correct `limiter.url`")
}

fn check_facts(subject: &str, facts: &StoreFacts, now: SystemTime) -> Vec<Finding> {
    let mut findings = vec![Finding::ok(subject, "answers; this user may load and call functions".to_owned())];
    if facts.eviction_policy != "noeviction" {
        let what = format!("evicts keys when memory is short (maxmemory-policy {})", facts.eviction_policy);
        let fix = "Run CONFIG SET maxmemory-policy noeviction: an evicted limit means a cold start";
        findings.push(Finding::error(subject, what, fix));
    }
    let ours = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let skew = ours.abs_diff(Duration::from_micros(facts.now.0));
    if skew > CLOCK_SKEW_MAX {
        let what = format!("its clock and this machine's are {} s apart", skew.as_secs());
        findings.push(Finding::warning(subject, what, "Run NTP on both machines"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::check::FindingLevel;
    use crate::domain::time::Micros;
    use crate::limiter::redis::client::StoreNode;

    #[test]
    fn connections_are_judged_by_the_lowest_limit() {
        let what = |role: Option<u32>, server: u32| {
            let limits = ConnectionLimits { role, database: None, server };
            check_connections("database", 16, limits).map(|finding| finding.what)
        };
        assert_eq!(what(None, 97), None);
        assert_eq!(what(Some(34), 97), None);
        assert!(what(Some(33), 97).unwrap().contains("its role allows 33: enough for one worker"));
        assert!(what(Some(4), 97).unwrap().contains("its role allows 4: it works with fewer"));
        assert!(what(Some(97), 16).unwrap().contains("the server allows 16"));
    }

    fn node(address: &str, policy: &str, seconds: u64) -> StoreNode {
        let facts = StoreFacts { eviction_policy: policy.to_owned(), now: Micros(seconds * 1_000_000) };
        StoreNode { address: address.to_owned(), facts: Ok(facts) }
    }

    fn findings(nodes: Vec<StoreNode>, orphan_slots: u16) -> Vec<Finding> {
        let shown = "redis://127.0.0.1/".to_owned();
        let probe = RedisProbe { limiter: RedisLimiter::new(&shown, "sluicegate"), address: shown };
        let now = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        probe.check_report(&StoreReport { nodes, orphan_slots, unnamed_slots: 0 }, now)
    }

    #[test]
    fn eviction_is_an_error_clock_skew_a_warning() {
        let levels = |policy: &str, seconds: u64| -> Vec<FindingLevel> {
            findings(vec![node("a:1", policy, seconds)], 0).into_iter().map(|finding| finding.level).collect()
        };
        assert_eq!(levels("noeviction", 1_800_000_000), [FindingLevel::Ok]);
        assert_eq!(levels("allkeys-lru", 1_800_000_000), [FindingLevel::Ok, FindingLevel::Error]);
        assert_eq!(levels("noeviction", 1_800_000_100), [FindingLevel::Ok, FindingLevel::Warning]);
    }

    #[test]
    fn each_cluster_master_is_checked() {
        let unreachable =
            StoreNode { address: "c:3".to_owned(), facts: Err(LimiterError::Unavailable("gone".to_owned())) };
        let nodes =
            vec![node("a:1", "noeviction", 1_800_000_000), node("b:2", "allkeys-lru", 1_800_000_000), unreachable];
        let found = findings(nodes, 5_461);
        let seen: Vec<(&str, FindingLevel)> =
            found.iter().map(|finding| (finding.subject.as_str(), finding.level)).collect();
        let expected = [
            ("limiter redis://127.0.0.1/", FindingLevel::Error),
            ("limiter a:1", FindingLevel::Ok),
            ("limiter b:2", FindingLevel::Ok),
            ("limiter b:2", FindingLevel::Error),
            ("limiter c:3", FindingLevel::Error),
        ];
        assert_eq!(seen, expected);
    }
}
