//! Judgements that need no connection: what a configuration and providers, as meant, cost or risk.
//!
//! Refuses what `config` refuses already: a configuration with a hazard never gets here.

use std::collections::BTreeSet;
use std::time::Duration;

use secrecy::ExposeSecret as _;

use super::Finding;
use crate::config::{CardNumbers, Config, ConfigProblem, DatabaseUrl, LimiterUrl, QueueUrl};
use crate::domain::explain::format::count;
use crate::domain::job::JobField;
use crate::domain::limit::{Algorithm, Limit, Scope};
use crate::domain::provider::{Provider, SlotRelease, StoreDown};
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::SettingsSnapshot;
use crate::provider::secret_grants::{SecretGrant, SecretUse};
use crate::worker::lane::max_local_wait;

/// How long RabbitMQ waits for an acknowledgement before it closes the channel and delivers the message to another.
/// <https://www.rabbitmq.com/docs/consumers#acknowledgement-timeout>
const DELIVERY_TIMEOUT_DEFAULT: Duration = Duration::from_secs(1_800);

/// Fewest different characters of an `ops.token` that other machines can try.
const TOKEN_DISTINCT_CHARACTERS_MIN: usize = 8;

/// What a bad row means for workers.
pub const FIX_INVALID_ROW: &str =
    "Mend the row: workers go on by its last good one, and one that starts now has no lane for it";

/// What it means if workers of this configuration cannot call what a row names.
pub const FIX_NOT_CALLABLE: &str = "Mend the row, or this configuration where the workers have it too: workers go on by the row's last \
                                 good version, and one that starts now has no lane for it";

/// Findings about a configuration that could be meant.
pub fn check_configuration(config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut warn = |key: &str, what: &str, mend: &str| {
        findings.push(Finding::warning(format!("configuration {key}"), what, mend));
    };
    match (&config.database.url, &config.limiter.url) {
        (DatabaseUrl::Sqlite { path: None, .. }, _) => {
            warn("database.url", "an in-memory database forgets every payment at exit", "Use sqlite://PATH");
        }
        (DatabaseUrl::Postgres(_), LimiterUrl::Embedded) => {
            let what = "the embedded limiter serves one process; a second `run` is refused";
            warn("limiter.url", what, "Set limiter.url to Redis before adding workers");
        }
        _ => {}
    }
    for host in &config.plaintext_hosts {
        let what = format!("{host} is spoken to without TLS: passwords and payments are readable on the way");
        warn("tls.plaintext_hosts", &what, "Use TLS, or keep that network private");
    }
    if let Some(what) = token_problem(config) {
        warn("ops.token", &what, "Use what `openssl rand -hex 24` writes");
    }
    if config.ops.listen.is_none() {
        warn("ops.listen", "no health, metrics, API or web page", "Set ops.listen to IP:PORT");
    }
    if config.worker.card_numbers != CardNumbers::Refuse {
        let what = "card numbers in payloads reach the database, the broker and back-ups";
        warn("worker.card_numbers", what, "Set it to refuse");
    }
    for ConfigProblem { key, origin, message: what, fix: mend } in &config.exposed_secrets {
        warn(key, &format!("{what} ({origin})"), mend);
    }
    if findings.is_empty() {
        findings.push(Finding::ok("configuration", "is safe as it stands"));
    }
    findings
}

/// Why other machines could guess the token of the ops server, if they reach it. A short token is refused before.
fn token_problem(config: &Config) -> Option<String> {
    let listen = config.ops.listen.filter(|listen| !listen.ip().is_loopback())?;
    let token = config.ops.token.as_ref()?.expose_secret();
    let different = token.chars().collect::<BTreeSet<char>>().len();
    (different < TOKEN_DISTINCT_CHARACTERS_MIN).then(|| {
        format!("can be guessed from other machines, which reach {listen}: only {different} characters of it differ")
    })
}

/// Findings about the providers in the database.
pub fn check_snapshot(snapshot: &SettingsSnapshot, config: &Config) -> Vec<Finding> {
    if snapshot.providers.is_empty() {
        return vec![Finding::warning("providers", "there are none", "Run sluicegate provider apply FILE")];
    }
    let judge = |row: &Result<Provider, crate::ledger::settings::InvalidRow>| match row {
        Ok(meant) => check_provider(meant, config),
        Err(bad) => {
            let error =
                |problem: &String| Finding::error(format!("provider {}", bad.provider), problem, FIX_INVALID_ROW);
            bad.problems.iter().map(error).collect()
        }
    };
    snapshot.providers.iter().flat_map(judge).collect()
}

/// Findings about a row that only its writing shows; what it means is right.
pub fn check_raw_row(row: &ProviderRow) -> Vec<Finding> {
    let mend =
        "Mend the row: it goes on working, and the database, its audit and its back-ups show it to whoever reads them";
    let warning = |problem: String| Finding::warning(format!("provider {}", row.name), problem, mend);
    row.literal_credentials().into_iter().map(warning).collect()
}

/// Who uses each entry of `outbound.secrets`. `sent` is what providers send; of all of them, if `all_senders`.
pub fn check_secrets(config: &Config, sent: &[(String, SecretUse)], all_senders: bool) -> Vec<Finding> {
    let judge = |grant: &SecretGrant| {
        let users = sent.iter().filter(|(_, used)| grant.permits(&used.reference, &used.host));
        let users: BTreeSet<&str> = users.map(|(name, _)| name.as_str()).collect();
        let subject = format!("secret {grant}");
        if !users.is_empty() {
            return Finding::ok(subject, format!("sent by {}", users.into_iter().collect::<Vec<_>>().join(", ")));
        }
        if !all_senders {
            return Finding::ok(subject, "may be sent by any provider's row");
        }
        let mend = "Remove it from outbound.secrets, unless a row shall use it: whoever writes one could";
        Finding::warning(subject, "no provider's row sends it", mend)
    };
    config.outbound_secrets.iter().map(judge).collect()
}

/// Findings about one provider.
pub fn check_provider(provider: &Provider, config: &Config) -> Vec<Finding> {
    let subject = format!("provider {}", provider.name);
    let mut findings = Vec::new();
    let mut warn = |what: String, mend: &str| findings.push(Finding::warning(&subject, what, mend));
    if !provider.enabled {
        return vec![Finding::ok(subject, "is disabled")];
    }
    if provider.paused {
        warn("is paused: its queue keeps collecting".to_owned(), "Run sluicegate provider resume when it is time");
    }
    for (what, fix) in deduplication_costs(provider) {
        warn(what.to_owned(), fix);
    }
    if matches!(provider.slot_release, SlotRelease::Grant { .. }) {
        let what = "slot_release = grant holds only while the way to the provider varies less than transit_jitter_ms";
        warn(what.to_owned(), "Use slot_release = response for the proven limit");
    }
    if let StoreDown::Share { workers: of } = provider.store_down {
        let workers = if of == 1 { "1 worker exceeds".to_owned() } else { format!("{of} workers exceed") };
        let what = format!("while Redis is away each worker uses 1/{of} of the limits: more than {workers} them");
        warn(what, "Keep share_of at the number of workers or above, or use store_down = wait");
    }
    if config.worker.drain_timeout <= provider.hold_max() {
        let what = format!(
            "timeout_ms + send_budget_ms make {}, and worker.drain_timeout_ms is {}: a stop may abandon requests",
            provider.hold_max().as_millis(),
            config.worker.drain_timeout.as_millis()
        );
        warn(
            what,
            "Raise worker.drain_timeout_ms above them, and the orchestrator's grace period above that and 9 s (14 s with traces)",
        );
    }
    if provider.limits.iter().all(|limit| limit.shadow) {
        warn("has only shadow limits: nothing holds it back".to_owned(), "Set shadow = false on one limit");
    }
    for (scope, field) in [(Scope::Account, JobField::Account), (Scope::Reference, JobField::Reference)] {
        let of_scope = |limit: &&Limit| limit.scope == scope && !limit.shadow;
        if let Some(limit) = provider.limits.iter().find(of_scope)
            && !provider.require.contains(&field)
        {
            let field = field.name();
            warn(
                format!("limit {} counts by {field}, and a message without {field} passes it uncounted", limit.name),
                &format!("Set require = [\"{field}\"], so that such a message is refused"),
            );
        }
    }
    for limit in &provider.limits {
        if limit.rate.max_requests() == 0 {
            warn(format!("limit {} is closed: nothing is sent", limit.name), "Run sluicegate limits set");
        }
        if limit.algorithm != Algorithm::SlidingLog {
            let what = format!("limit {} counts by {}, which is not proven", limit.name, limit.algorithm.name());
            warn(what, "Use sliding_log unless the provider counts that way");
        }
    }
    if findings.is_empty() {
        let rate = provider.tightest_rate().map(|rate| rate.to_string()).unwrap_or_default();
        findings.push(Finding::ok(subject, format!("tightest limit {rate}")));
    }
    findings
}

/// What a row without deduplication costs, each with its fix.
fn deduplication_costs(provider: &Provider) -> Vec<(&'static str, &'static str)> {
    let mut costs = Vec::new();
    if provider.idempotency_retention.is_none() && provider.lookup.is_none() {
        costs.push((
            "does not deduplicate, as far as its row says: every unknown outcome waits for a person",
            "Set idempotency_retention_s if it honours idempotency keys, or lookup if it can be asked",
        ));
    }
    if provider.idempotency_retention.is_none() && provider.reuse_connections == Some(true) {
        costs.push((
            "shares connections and does not deduplicate: a refusal such as 429 on a used connection, or a connection that \
             the provider closes, leaves the outcome unknown",
            "Remove reuse_connections, or set idempotency_retention_s if it honours idempotency keys",
        ));
    }
    costs
}

/// What AMQP cannot tell: whether the broker waits long enough for acknowledgements.
pub fn check_delivery_timeout(providers: &[&Provider], config: &Config) -> Option<Finding> {
    let QueueUrl::Amqp(_) = config.queue.url else { return None };
    let slowest = providers.iter().max_by_key(|provider| unacknowledged_max(provider))?;
    let longest = unacknowledged_max(slowest);
    let minutes = u64::try_from(longest.as_millis().div_ceil(60_000)).unwrap_or(u64::MAX);
    let what = format!(
        "cannot be read over AMQP; it must be above {}: provider {} may hold a message for {} s (max_wait_ms, \
         timeout_ms and send_budget_ms). RabbitMQ's default is {}",
        count(minutes, "minute"),
        slowest.name,
        longest.as_secs_f64(),
        count(DELIVERY_TIMEOUT_DEFAULT.as_secs() / 60, "minute"),
    );
    let subject = "broker's delivery timeout";
    if longest > DELIVERY_TIMEOUT_DEFAULT / 2 {
        let mend = "Lower max_wait_ms or timeout_ms, or raise consumer_timeout in rabbitmq.conf to twice that time";
        return Some(Finding::warning(subject, what, mend));
    }
    Some(Finding::ok(subject, what))
}

/// From a message's delivery to the answer that it is acknowledged with.
fn unacknowledged_max(provider: &Provider) -> Duration {
    max_local_wait(provider) + provider.hold_max()
}
