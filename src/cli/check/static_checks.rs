//! Checks that need no connection: the costs and risks of a valid configuration and of valid providers.
//!
//! An invalid configuration never gets here: `config` rejects it.

use std::collections::BTreeSet;
use std::time::Duration;

use secrecy::ExposeSecret as _;

use super::Finding;
use crate::config::{CardNumbers, Config, ConfigProblem, DatabaseUrl, LimiterUrl, QueueUrl};
use crate::domain::format::count;
use crate::domain::job::JobField;
use crate::domain::limit::{Algorithm, Limit, Scope};
use crate::domain::pace::Pace;
use crate::domain::provider::{JobOrder, Provider, SlotRelease, StoreDown};
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::SettingsSnapshot;
use crate::provider::secret_grants::{SecretGrant, SecretUse};
use crate::worker::lane::max_local_wait;

/// RabbitMQ's default timeout for an acknowledgement. Then it closes the channel and redelivers the message.
/// <https://www.rabbitmq.com/docs/consumers#acknowledgement-timeout>
const DELIVERY_TIMEOUT_DEFAULT: Duration = Duration::from_secs(1_800);

/// Fewest different characters of an `ops.token` that other machines can guess at.
const TOKEN_DISTINCT_CHARACTERS_MIN: usize = 8;

/// The fix of an invalid row, and its effect on workers.
pub const FIX_INVALID_ROW: &str =
    "Fix the row: running workers use its last valid version, and a worker that starts now has no lane for it";

/// The fix if workers with this configuration cannot call a provider, and the effect.
pub const FIX_NOT_CALLABLE: &str = "Fix the row, or the configuration if the workers have the same: running workers use the row's last \
                                 valid version, and a worker that starts now has no lane for it";

/// Findings about a valid configuration.
pub fn check_configuration(config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut warn = |key: &str, what: &str, fix: &str| {
        findings.push(Finding::warning(format!("configuration {key}"), what, fix));
    };
    match (&config.database.url, &config.limiter.url) {
        (DatabaseUrl::Sqlite { path: None, .. }, _) => {
            warn("database.url", "an in-memory database loses every payment at exit", "Use sqlite://PATH");
        }
        (DatabaseUrl::Postgres(_), LimiterUrl::Embedded) => {
            let what = "the embedded limiter serves one process; a second `run` is refused";
            warn("limiter.url", what, "Set limiter.url to Redis before adding workers");
        }
        _ => {}
    }
    for host in &config.plaintext_hosts {
        let what = format!("connections to {host} use no TLS: passwords and payments can be read on the network");
        warn("tls.plaintext_hosts", &what, "Use TLS, or use a private network");
    }
    if let Some(what) = token_problem(config) {
        warn("ops.token", &what, "Use the output of `openssl rand -hex 24`");
    }
    if config.ops.listen.is_none() {
        warn("ops.listen", "no health, metrics, API or web page", "Set ops.listen to IP:PORT");
    }
    if config.worker.card_numbers != CardNumbers::Refuse {
        let what = "card numbers in payloads get into the database, the queue and backups";
        warn("worker.card_numbers", what, "Set it to refuse");
    }
    for ConfigProblem { key, origin, message: what, fix } in &config.exposed_secrets {
        warn(key, &format!("{what} ({origin})"), fix);
    }
    if findings.is_empty() {
        findings.push(Finding::ok("configuration", "valid, no risky settings"));
    }
    findings
}

/// Why other machines that reach the ops server could guess its token. `config` rejects a short token.
fn token_problem(config: &Config) -> Option<String> {
    let listen = config.ops.listen.filter(|listen| !listen.ip().is_loopback())?;
    let token = config.ops.token.as_ref()?.expose_secret();
    let different = token.chars().collect::<BTreeSet<char>>().len();
    (different < TOKEN_DISTINCT_CHARACTERS_MIN).then(|| {
        format!("can be guessed by other machines that reach {listen}: it has only {different} different characters")
    })
}

/// Findings about the providers in the database.
pub fn check_snapshot(snapshot: &SettingsSnapshot, config: &Config) -> Vec<Finding> {
    if snapshot.providers.is_empty() {
        return vec![Finding::warning("providers", "there are none", "Run `sluicegate provider apply FILE`")];
    }
    let valid: Vec<&Provider> = snapshot.providers.iter().filter_map(|row| row.as_ref().ok()).collect();
    let check_row = |row: &Result<Provider, crate::ledger::settings::InvalidRow>| match row {
        Ok(provider) => check_provider(provider, &valid, config),
        Err(invalid) => {
            let error =
                |problem: &String| Finding::error(format!("provider {}", invalid.provider), problem, FIX_INVALID_ROW);
            invalid.problems.iter().map(error).collect()
        }
    };
    snapshot.providers.iter().flat_map(check_row).collect()
}

/// Findings about the text of a valid row.
pub fn check_raw_row(row: &ProviderRow) -> Vec<Finding> {
    let fix = "Fix the row: it keeps working, but every reader of the database, its audit and its backups can see it";
    let warning = |problem: String| Finding::warning(format!("provider {}", row.name), problem, fix);
    row.literal_credentials().into_iter().map(warning).collect()
}

/// The providers that use each entry of `outbound.secrets`. `sent` lists what providers send: of all providers, if
/// `all_senders`.
pub fn check_secrets(config: &Config, sent: &[(String, SecretUse)], all_senders: bool) -> Vec<Finding> {
    let check_grant = |grant: &SecretGrant| {
        let users = sent.iter().filter(|(_, used)| grant.permits(&used.reference, &used.host));
        let users: BTreeSet<&str> = users.map(|(name, _)| name.as_str()).collect();
        let subject = format!("secret {grant}");
        if !users.is_empty() {
            return Finding::ok(subject, format!("sent by {}", users.into_iter().collect::<Vec<_>>().join(", ")));
        }
        if !all_senders {
            return Finding::ok(subject, "any provider's row may send it");
        }
        let fix = "Remove it from outbound.secrets unless a row needs it: a new row could send it";
        Finding::warning(subject, "no provider's row sends it", fix)
    };
    config.outbound_secrets.iter().map(check_grant).collect()
}

/// Findings about one provider of `all`, and its pace.
pub fn check_provider(provider: &Provider, all: &[&Provider], config: &Config) -> Vec<Finding> {
    let subject = format!("provider {}", provider.name);
    let mut findings = Vec::new();
    let mut warn = |what: String, fix: &str| findings.push(Finding::warning(&subject, what, fix));
    if !provider.enabled {
        return vec![Finding::ok(subject, "is disabled")];
    }
    if provider.paused {
        warn("is paused: its queue keeps collecting".to_owned(), "Run `sluicegate provider resume` to send again");
    }
    for (what, fix) in deduplication_costs(provider) {
        warn(what.to_owned(), fix);
    }
    if matches!(provider.slot_release, SlotRelease::Grant { .. }) {
        let what =
            "slot_release = grant keeps the limit only while the network delay varies less than transit_jitter_ms";
        warn(what.to_owned(), "Use slot_release = response: it is proven for any delay");
    }
    if let StoreDown::Share { workers: share } = provider.store_down {
        let workers = if share == 1 { "1 worker exceeds".to_owned() } else { format!("{share} workers exceed") };
        let what =
            format!("while Redis is unreachable each worker uses 1/{share} of the limits: more than {workers} them");
        warn(what, "Set share_of to the number of workers or more, or use store_down = wait");
    }
    if config.worker.drain_timeout <= provider.hold_max() {
        let what = format!(
            "timeout_ms + send_budget_ms is {}, and worker.drain_timeout_ms is {}: a stop may abandon requests",
            provider.hold_max().as_millis(),
            config.worker.drain_timeout.as_millis()
        );
        warn(
            what,
            "Raise worker.drain_timeout_ms above that sum, and the orchestrator's grace period above it by 9 s (14 s with traces)",
        );
    }
    if provider.limits.iter().all(|limit| limit.shadow) {
        warn("has only shadow limits: no limit is enforced".to_owned(), "Set shadow = false on one limit");
    }
    for (what, field) in uses_of_optional_fields(provider) {
        warn(what, &format!("Set require = [\"{}\"] to reject such a message", field.name()));
    }
    for limit in &provider.limits {
        if limit.rate.max_requests() == 0 {
            let rate = if limit.rate.is_at_once() { "'N at once'" } else { "N/DURATION" };
            let fix = format!("Run `sluicegate limits set {} {} {rate}` to open it", provider.name, limit.name);
            warn(format!("limit \"{}\" is {}: nothing is sent", limit.name, limit.rate), &fix);
        }
        if !matches!(limit.algorithm, Algorithm::SlidingLog | Algorithm::Concurrency) {
            let what = format!(
                "limit {} uses {}, which is not proven against every provider",
                limit.name,
                limit.algorithm.name()
            );
            warn(what, "Use sliding_log unless the provider counts that way");
        }
    }
    let pace = Pace::new(provider, all.iter().copied());
    findings.extend(pace.map(|pace| Finding::ok(subject, format!("pace: {pace}"))));
    findings
}

/// What has no effect on a message without a field that the row does not require, and the field.
fn uses_of_optional_fields(provider: &Provider) -> Vec<(String, JobField)> {
    let mut uses = Vec::new();
    for (scope, field) in [(Scope::Account, JobField::Account), (Scope::Reference, JobField::Reference)] {
        let of_scope = |limit: &&Limit| limit.scope == scope && !limit.shadow;
        if let Some(limit) = provider.limits.iter().find(of_scope) {
            let (limit, name) = (&limit.name, field.name());
            uses.push((format!("limit {limit} counts by {name}: it does not count a message without {name}"), field));
        }
    }
    if provider.order == JobOrder::Account {
        uses.push(("order = account keeps no order of messages without account".to_owned(), JobField::Account));
    }
    uses.retain(|(_, field)| !provider.require.contains(field));
    uses
}

/// What a row without deduplication costs, each with its fix.
fn deduplication_costs(provider: &Provider) -> Vec<(&'static str, &'static str)> {
    let mut costs = Vec::new();
    if provider.idempotency_retention.is_none() && provider.lookup.is_none() {
        costs.push((
            "its row has neither idempotency_retention_s nor lookup: every unknown outcome waits for manual review",
            "Set idempotency_retention_s if it honours idempotency keys, or lookup if payments can be looked up",
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

/// Whether the broker waits long enough for acknowledgements. AMQP cannot read that setting.
pub fn check_delivery_timeout(providers: &[&Provider], config: &Config) -> Option<Finding> {
    let QueueUrl::Amqp(_) = config.queue.url else { return None };
    let slowest = providers.iter().max_by_key(|provider| unacknowledged_max(provider))?;
    let longest = unacknowledged_max(slowest);
    let minutes = u64::try_from(longest.as_millis().div_ceil(60_000)).unwrap_or(u64::MAX);
    let what = format!(
        "AMQP cannot read it; it must be above {}: provider {} may hold a message for {} s (max_wait_ms, \
         timeout_ms and send_budget_ms). RabbitMQ's default is {}",
        count(minutes, "minute"),
        slowest.name,
        longest.as_secs_f64(),
        count(DELIVERY_TIMEOUT_DEFAULT.as_secs() / 60, "minute"),
    );
    let subject = "broker's delivery timeout";
    if longest > DELIVERY_TIMEOUT_DEFAULT / 2 {
        let fix = "Lower max_wait_ms or timeout_ms, or raise consumer_timeout in rabbitmq.conf to twice that time";
        return Some(Finding::warning(subject, what, fix));
    }
    Some(Finding::ok(subject, what))
}

/// Longest time from a message's delivery to its acknowledgement.
fn unacknowledged_max(provider: &Provider) -> Duration {
    max_local_wait(provider) + provider.hold_max()
}

#[cfg(test)]
mod tests {
    use super::super::FindingLevel;
    use super::*;
    use crate::config;
    use crate::ledger::provider_row::LimitRow;

    fn provider(name: &str) -> Provider {
        let limit = LimitRow { name: "second".into(), max_requests: 100, window_ms: 1_000, ..LimitRow::default() };
        let url = "https://pay.example.com".to_owned();
        let row = ProviderRow { name: name.to_owned(), url, limits: vec![limit], ..ProviderRow::default() };
        row.validate(1).unwrap()
    }

    /// Validation rejects such a row first; so does the next test's.
    #[test]
    fn only_shadow_limits_warn() {
        let mut provider = provider("acme");
        provider.limits[0].shadow = true;
        let config = config::load(None, [], &[]).unwrap();
        let findings = check_provider(&provider, &[&provider], &config);
        let found = findings.iter().find(|found| found.what == "has only shadow limits: no limit is enforced").unwrap();
        assert!(found.level == FindingLevel::Warning && found.fix.is_some());
    }

    #[test]
    fn long_requests_warn_of_the_delivery_timeout() {
        let quick = provider("other");
        let slow = Provider { timeout: Duration::from_secs(899), ..provider("acme") };
        let config = config::load(None, [], &["queue.url=amqps://broker.example.com".to_owned()]).unwrap();
        let found = check_delivery_timeout(&[&slow, &quick], &config).unwrap();
        assert_eq!(found.level, FindingLevel::Warning);
        assert!(found.what.contains("provider acme") && found.fix.is_some(), "{}", found.what);
        assert_eq!(check_delivery_timeout(&[&quick], &config).unwrap().level, FindingLevel::Ok);
    }
}
