//! The backends' part of `check`: whether the queue answers and could drop a message, and settings of PostgreSQL and
//! Redis that would break a guarantee or slow workers down.
//!
//! It changes nothing. The topology that it expects is in docs/topology.md.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::timeout;

use crate::app::{ServiceError, open_database, redis_limiter};
use crate::cli::check::{Finding, PROBE_TIMEOUT, probe};
use crate::cli::{CommandContext, CommandError};
use crate::config::{Config, DatabaseUrl, LimiterUrl};
use crate::domain::format::count;
use crate::domain::provider::{Provider, ProviderName};
use crate::ledger::LedgerError;
use crate::ledger::database::{ConnectionLimits, SequenceState};
use crate::limiter::LimiterError;
use crate::limiter::redis::client::{StoreFacts, StoreReport, UNNAMED_MASTER, UNNAMED_MASTER_FIX};
use crate::queue::{Queue, QueueError, TopologyProblem};

const FIX_NOT_RUNNING: &str = "Check that RabbitMQ runs and `queue.url` is right";
const FIX_NOT_DECLARED: &str = "Run `sluicegate provider apply FILE` or start `sluicegate run`: both declare it";
const FIX_DECLARED_OTHERWISE: &str = "Declaring it again fails while it exists. Delete it (empty a queue first), then run `sluicegate \
                      provider apply FILE`; or set another queue.prefix";
const FIX_QUEUE_LIMIT: &str =
    "Raise max-queues of the virtual host (rabbitmqctl set_vhost_limits), or delete unused queues";
const FIX_CHANNEL_LIMIT: &str = "Allow its user more channels, or stop other programs that use them";
const FIX_CONNECTION_LIMIT: &str = "Allow three connections for each worker (max-connections of the user or of the virtual host), or stop other programs that use them";
const FIX_SEQUENCE_RIGHTS: &str =
    "Run check as the operator of docs/security.md, \"Least rights\", which may read the sequences";
const FIX_USER_RIGHTS: &str = "Give the user of queue.url the rights that docs/topology.md names";

pub async fn check_queue(cx: &CommandContext<'_>, providers: &[&Provider]) -> Vec<Finding> {
    let subject = format!("queue {}", cx.config.queue.url);
    let reached = async {
        let Some(queue) = cx.queue().await? else { return Ok(None) };
        let answered = queue.ping().await;
        Ok::<_, CommandError>(Some((queue, answered)))
    };
    let (queue, answered) = match probe(&subject, reached).await {
        Err(silent) => return vec![silent],
        // Without a broker, payments are recorded in the database, which has its own finding.
        Ok(Ok(None)) => return Vec::new(),
        Ok(Err(error)) => return vec![Finding::error(subject, error.to_string(), FIX_NOT_RUNNING)],
        Ok(Ok(Some(reached))) => reached,
    };
    if let Err(error) = answered {
        return vec![Finding::error(subject, error.to_string(), fix_for_error(&error, FIX_NOT_RUNNING))];
    }
    let mut findings = vec![match timeout(PROBE_TIMEOUT, queue.publish_fault()).await.ok().flatten() {
        Some(fault) => Finding::error(subject, fault.to_string(), fault.fix()),
        None => Finding::ok(subject, "answers"),
    }];
    let mut declared = Vec::new();
    for provider in providers {
        match check_lane(queue.as_ref(), &provider.name).await {
            Some(finding) => findings.push(finding),
            None => declared.push(provider.name.clone()),
        }
    }
    if !declared.is_empty() {
        findings.extend(check_topology(queue.as_ref(), &declared).await);
    }
    findings
}

/// A finding if the lane could drop a message. Lanes of disabled providers count too: they keep collecting.
async fn check_lane(queue: &dyn Queue, provider: &ProviderName) -> Option<Finding> {
    let subject = format!("lane {provider}");
    let (what, fix) = match probe(&subject, queue.depth(provider)).await {
        Err(silent) => return Some(silent),
        Ok(Ok(Some(_))) => return None,
        Ok(Ok(None)) => {
            ("has no queue: messages for it are returned to their producer, or dropped".to_owned(), FIX_NOT_DECLARED)
        }
        Ok(Err(error)) => (format!("cannot be checked: {error}"), fix_for_error(&error, FIX_NOT_DECLARED)),
    };
    Some(Finding::error(subject, what, fix))
}

/// Checks the other queues and exchanges, and the lanes' arguments: a lane without dead-lettering drops messages.
async fn check_topology(queue: &dyn Queue, lanes: &[ProviderName]) -> Vec<Finding> {
    let subject = "queues and exchanges";
    match probe(subject, queue.topology_problems(lanes)).await {
        Err(silent) => vec![silent],
        Ok(Ok(problems)) => problems.iter().map(|problem| topology_finding(subject, problem)).collect(),
        Ok(Err(error)) => {
            let fix = fix_for_error(&error, FIX_NOT_DECLARED);
            vec![Finding::error(subject, format!("cannot be checked: {error}"), fix)]
        }
    }
}

fn topology_finding(subject: &str, problem: &TopologyProblem) -> Finding {
    let fix = match problem {
        TopologyProblem::Missing(_) => FIX_NOT_DECLARED,
        TopologyProblem::Mismatch(_) => FIX_DECLARED_OTHERWISE,
        TopologyProblem::Refused(text) => fix_for_text(text).unwrap_or(FIX_USER_RIGHTS),
    };
    Finding::error(subject, problem.to_string(), fix)
}

/// The fix for the broker's refusal, by its text; `otherwise` for another error.
fn fix_for_error(error: &QueueError, otherwise: &'static str) -> &'static str {
    let QueueError::Refused(text) = error else { return otherwise };
    fix_for_text(text).unwrap_or(otherwise)
}

fn fix_for_text(text: &str) -> Option<&'static str> {
    let known = [
        ("Login was refused", "Put the right user and password into queue.url"),
        ("queue limit", FIX_QUEUE_LIMIT),
        ("channel_max", FIX_CHANNEL_LIMIT),
        ("max-channels", FIX_CHANNEL_LIMIT),
        ("connection limit", FIX_CONNECTION_LIMIT),
        ("ACCESS_REFUSED", FIX_USER_RIGHTS),
        ("inequivalent arg", FIX_DECLARED_OTHERWISE),
        // Last: the broker names the virtual host in every refusal.
        ("vhost", "Create the virtual host that queue.url names, and give its user rights there"),
    ];
    known.iter().find(|(words, _)| text.contains(words)).map(|(_, fix)| *fix)
}

/// A larger clock skew makes waits in logs and pages misleading; limits do not depend on it.
const CLOCK_SKEW_MAX: Duration = Duration::from_secs(5);

/// Compares the connections that workers open with those that the server allows, and sequences with their tables. An
/// unreachable database already has a finding.
pub async fn check_postgres(config: &Config) -> Vec<Finding> {
    let DatabaseUrl::Postgres(url) = &config.database.url else { return Vec::new() };
    let subject = format!("database {url}");
    let found = async {
        let database = open_database(config).await?;
        let (limits, sequences) = (database.connection_limits().await, database.sequences().await);
        database.close().await;
        let limits = limits?.and_then(|limits| check_connections(&subject, config.database.max_connections, limits));
        Ok::<_, ServiceError>(limits.into_iter().chain(check_sequences(&subject, sequences)).collect())
    };
    match probe(&subject, found).await {
        Ok(found) => found.unwrap_or_default(),
        Err(silent) => vec![silent],
    }
}

fn check_sequences(subject: &str, sequences: Result<Vec<SequenceState>, LedgerError>) -> Vec<Finding> {
    let sequences = match sequences {
        Ok(sequences) => sequences,
        Err(error) => {
            let what = format!("its sequences cannot be compared with their tables: {error}");
            return vec![Finding::warning(subject, what, FIX_SEQUENCE_RIGHTS)];
        }
    };
    let unreadable = sequences.iter().any(|sequence| sequence.last.is_none());
    let unreadable = unreadable.then(|| {
        let what = "its sequences cannot be compared with their tables: this role may not read them";
        Finding::warning(subject, what, FIX_SEQUENCE_RIGHTS)
    });
    let behind = sequences.iter().filter(|sequence| sequence.is_behind()).map(|state| {
        let SequenceState { table, column, sequence, last, max } = state;
        let last = last.unwrap_or_default();
        let what =
            format!("sequence {sequence} is at {last} and {table}.{column} at {max}: inserts fail until it is set");
        let fix = format!("Run as the owner: SELECT setval('{sequence}', (SELECT max({column}) FROM {table}))");
        Finding::error(subject, what, fix)
    });
    behind.chain(unreadable).collect()
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

/// Checks the settings and the clock of each Redis node.
pub async fn check_redis(config: &Config) -> Vec<Finding> {
    if config.limiter.url == LimiterUrl::Embedded {
        return Vec::new();
    }
    let subject = format!("limiter {}", config.limiter.url);
    let report = async { redis_limiter(config)?.report().await };
    match probe(&subject, report).await {
        Ok(Ok(report)) => check_report(&subject, &report, SystemTime::now()),
        Ok(Err(error)) => vec![unreachable(&subject, &error)],
        Err(silent) => vec![silent],
    }
}

fn check_report(subject: &str, report: &StoreReport, now: SystemTime) -> Vec<Finding> {
    let mut findings = Vec::new();
    if report.orphan_slots > 0 {
        let slots = count(report.orphan_slots.into(), "slot");
        let what = format!("{slots} of the cluster have no master: their quotas get no permits");
        findings.push(Finding::error(subject, what, "Check CLUSTER INFO, then run `redis-cli --cluster fix`"));
    }
    if report.unnamed_slots > 0 {
        let slots = count(report.unnamed_slots.into(), "slot");
        let what = format!("the masters of {slots} {UNNAMED_MASTER}: their quotas get no permits");
        findings.push(Finding::error(subject, what, format!("On the nodes: {UNNAMED_MASTER_FIX}")));
    }
    for node in &report.nodes {
        let is_alone = report.nodes.len() == 1;
        let subject = if is_alone { subject.to_owned() } else { format!("limiter {}", node.address) };
        match &node.facts {
            Ok(facts) => findings.extend(check_facts(&subject, facts, now)),
            Err(error) => findings.push(unreachable(&subject, error)),
        }
    }
    findings
}

fn unreachable(subject: &str, error: &LimiterError) -> Finding {
    Finding::error(subject, error.to_string(), "Do what the finding says, or correct `limiter.url`")
}

fn check_facts(subject: &str, facts: &StoreFacts, now: SystemTime) -> Vec<Finding> {
    let mut findings = vec![Finding::ok(subject, "answers; this user may load and call functions")];
    if facts.eviction.may_evict() {
        let what = format!("drops keys when its memory is short (maxmemory-policy {})", facts.eviction.policy);
        let fix = "Set maxmemory-policy noeviction in redis.conf, and by CONFIG SET until its next start: an account whose key is dropped counts as unused";
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
    use crate::limiter::StoreEviction;
    use crate::limiter::redis::client::StoreNode;

    #[test]
    fn each_refusal_has_its_fix() {
        for (refusal, fix) in [
            ("connect to b:5672: ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN", "password"),
            ("connect to b:5672: NOT_ALLOWED - vhost nowhere not found", "virtual host"),
            (
                "look at queue `payments.acme`: ACCESS_REFUSED - access to queue 'payments.acme' in vhost 'x' refused for user 'y'",
                "rights",
            ),
            (
                "declare: PRECONDITION_FAILED - inequivalent arg 'type' for exchange 'payments' in vhost 'x': received 'direct'",
                "Delete it",
            ),
            (
                "connect to b:5672: NOT_ALLOWED - access to vhost 'x' refused for user 'y': connection limit (2) is reached",
                "three connections",
            ),
            (
                "declare queue `payments.acme`: PRECONDITION_FAILED - queue limit in vhost 'x' (1) is reached",
                "max-queues",
            ),
            ("open a channel: NOT_ALLOWED - ...: raise the user's limit max-channels", "more channels"),
            ("something new", "runs"),
        ] {
            let advised = fix_for_error(&QueueError::Refused(refusal.to_owned()), FIX_NOT_RUNNING);
            assert!(advised.contains(fix), "{refusal}: {advised}");
        }
        assert_eq!(
            fix_for_error(&QueueError::Unavailable("ACCESS_REFUSED".to_owned()), FIX_NOT_RUNNING),
            FIX_NOT_RUNNING
        );
        let different = topology_finding("exchange", &TopologyProblem::Mismatch("exists with another type".to_owned()));
        assert!(different.fix.as_deref().is_some_and(|fix| fix.contains("Delete it")), "{different:?}");
    }

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

    #[test]
    fn sequences_behind_their_table_are_errors() {
        let levels = |last, max| -> Vec<FindingLevel> {
            let [table, column, sequence] = ["t", "c", "s"].map(str::to_owned);
            let states = Ok(vec![SequenceState { table, column, sequence, last, max }]);
            check_sequences("database", states).into_iter().map(|finding| finding.level).collect()
        };
        for (last, max, expected) in [
            (Some(7), 7, vec![]),
            (Some(8), 7, vec![]),
            (Some(0), 0, vec![]),
            (Some(6), 7, vec![FindingLevel::Error]),
            (None, 7, vec![FindingLevel::Warning]),
        ] {
            assert_eq!(levels(last, max), expected, "{last:?} {max}");
        }
    }

    fn node(address: &str, policy: &str, seconds: u64) -> StoreNode {
        let eviction = StoreEviction {
            address: address.to_owned(),
            run_id: "run".to_owned(),
            policy: policy.to_owned(),
            evicted_keys: 0,
        };
        let facts = StoreFacts { eviction, now: Micros(seconds * 1_000_000) };
        StoreNode { address: address.to_owned(), facts: Ok(facts) }
    }

    fn findings(nodes: Vec<StoreNode>, orphan_slots: u16) -> Vec<Finding> {
        let now = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        check_report("limiter redis://127.0.0.1/", &StoreReport { nodes, orphan_slots, unnamed_slots: 0 }, now)
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
