//! Checks that need no connection: the costs and risks of a valid configuration and of valid providers, and of the files
//! that they name.
//!
//! An invalid configuration never gets here: `config` rejects it. A file that hangs does not hold up the other checks.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Access, access};
use secrecy::ExposeSecret as _;

use crate::cli::check::Finding;
use crate::cli::check::account_rules::describe_account_rules;
use crate::cli::row_risks::row_risks;
use crate::cli::run::people;
use crate::config::people::{ProxyConfig, TOKEN_DISTINCT_CHARACTERS_MIN};
use crate::config::{CardNumbers, Config, ConfigProblem, DatabaseUrl, FIX_FILE_MODE, LimiterUrl, QueueUrl};
use crate::domain::format::count;
use crate::domain::job::JobField;
use crate::domain::limit::{Algorithm, Limit, Scope};
use crate::domain::pace::Pace;
use crate::domain::provider::{JobOrder, Provider, SlotRelease, StoreDown};
use crate::files::{self, READ_TIMEOUT};
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::{InvalidRow, SettingsSnapshot, unknown_limits};
use crate::provider::http::{HeaderNames, title_case};
use crate::provider::secret_grants::{SecretGrant, SecretGrants, SecretReference, SecretUse};
use crate::worker::lane::max_local_wait;

/// RabbitMQ's default timeout for an acknowledgement. Then it closes the channel and redelivers the message.
/// <https://www.rabbitmq.com/docs/consumers#acknowledgement-timeout>
const DELIVERY_TIMEOUT_DEFAULT: Duration = Duration::from_secs(1_800);

/// The fix of a token's secret that cannot be used.
const FIX_TOKENS: &str = "Fix the files or variables of ops.tokens: `run` does not start with them";

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
    if config.ops.listen.is_some_and(|listen| !listen.ip().is_loopback())
        && config.ops.people.proxy.as_ref().is_some_and(ProxyConfig::trusts_a_wide_range)
    {
        let what = "any program in a range of more than 65536 addresses can be any person";
        warn("ops.proxy_trusted", what, "Name the proxy's own addresses");
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
    if let Err(problem) = people(config) {
        findings.push(Finding::error("configuration ops.tokens".to_owned(), problem.to_string(), FIX_TOKENS));
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
    let invalid: Vec<InvalidRow> = snapshot.providers.iter().filter_map(|row| row.as_ref().err().cloned()).collect();
    let check_row = |row: &Result<Provider, InvalidRow>| match row {
        Ok(provider) => {
            let unknown =
                if provider.enabled { unknown_limits(&invalid, &provider.quota, |_| false) } else { Vec::new() };
            let subject = || format!("provider {}", provider.name);
            let unknown = unknown.iter().map(|problem| Finding::error(subject(), problem, FIX_INVALID_ROW));
            unknown.chain(check_provider(provider, &valid, config)).collect::<Vec<Finding>>()
        }
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
        warn(
            "is paused: its payments are recorded and wait".to_owned(),
            "Run `sluicegate provider resume` to send again",
        );
    }
    for risk in row_risks(provider) {
        warn(risk.what, risk.fix);
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
    findings.extend(spelled_headers(provider).into_iter().map(|header| Finding::ok(&subject, header)));
    findings.extend(describe_account_rules(provider).into_iter().map(|rule| Finding::ok(&subject, rule)));
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

/// Headers whose names are sent in another spelling than title case. A server may compare names with regard to case.
fn spelled_headers(provider: &Provider) -> Vec<String> {
    let spelled = |name: &String| {
        format!("header `{name}` is sent as the row spells it; title case would be `{}`", title_case(name))
    };
    HeaderNames::from_provider(provider).exact().iter().map(spelled).collect()
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

/// Bits of a file's mode: group and others.
const GROUP_AND_OTHERS: u32 = 0o077;

/// Why a missing file cannot be created.
pub fn creation_problem(path: &Path) -> Option<String> {
    // SQLite creates two files beside it, and `run` a third.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let shown = folder.display();
    match std::fs::metadata(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Some(format!("its folder {shown} does not exist")),
        Err(error) => Some(format!("its folder {shown} cannot be reached: {error}")),
        Ok(found) if !found.is_dir() => Some(format!("{shown} is not a folder")),
        Ok(_) => {
            let refused = access(folder, Access::WRITE_OK | Access::EXEC_OK).err()?;
            Some(format!("this user may not create files in its folder {shown}: {refused}"))
        }
    }
}

/// Why a file or the files beside it cannot be written.
pub fn write_problem(path: &Path) -> Option<String> {
    let refused = path.exists().then(|| access(path, Access::READ_OK | Access::WRITE_OK).err()).flatten();
    let refused = refused.map(|refused| format!("this user may not write {}: {refused}", path.display()));
    refused.or_else(|| creation_problem(path))
}

/// A warning if other users of this machine can read the file with payloads and requests.
pub fn readable_by_others(path: &Path) -> Option<String> {
    let mode = std::fs::metadata(path).ok()?.permissions().mode();
    (mode & GROUP_AND_OTHERS != 0)
        .then(|| format!("others on this machine can reach its file: its mode is {:03o}", mode & 0o777))
}

/// Secrets of provider rows in files that others on this machine may read. Files without a grant are not looked at.
pub async fn exposed_secrets(sent: &[(String, SecretUse)], grants: &SecretGrants) -> Vec<Finding> {
    let paths = sent.iter().filter_map(|(_, used)| match &used.reference {
        SecretReference::File(path) if grants.permits(&used.reference, &used.host) => Some(path.clone()),
        SecretReference::File(_) | SecretReference::Env(_) => None,
    });
    let paths: BTreeSet<PathBuf> = paths.collect();
    let judged = tokio::task::spawn_blocking(move || judge_modes(paths, files::mode_of, READ_TIMEOUT));
    judged.await.unwrap_or_default()
}

/// Looks at all files within one time, however many of them hang.
fn judge_modes(paths: BTreeSet<PathBuf>, mode_of: fn(&Path) -> Option<u32>, within: Duration) -> Vec<Finding> {
    let judge = move |path: PathBuf| {
        let mode = mode_of(&path).filter(|mode| files::is_world_readable(*mode))?;
        let what = format!("others on this machine may read it: its mode is {mode:03o}");
        Some(Finding::warning(format!("secret file:{}", path.display()), what, FIX_FILE_MODE))
    };
    let judged = files::run_with_timeout(within, move || paths.into_iter().filter_map(judge).collect());
    judged.unwrap_or_else(|error| {
        let what = format!("the modes of their files are unknown: {error}");
        vec![Finding::warning("secrets of providers", what, error.fix().unwrap_or("Run check again"))]
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::check::FindingLevel;
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

    #[tokio::test]
    async fn secret_readable_by_others_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str, mode: u32| {
            let path = dir.path().join(name);
            std::fs::write(&path, "hunter2").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let reference = SecretReference::File(path);
            ("acme".to_owned(), SecretUse { reference, host: "x.example".to_owned() })
        };
        let sent = [at("open", 0o644), at("group", 0o440), at("own", 0o600), at("ungranted", 0o644)];
        let granted = sent[..3].iter().map(|(_, used)| format!("{}@x.example", used.reference));
        let grants = SecretGrants::parse(&granted.collect::<Vec<_>>()).unwrap();
        let found = exposed_secrets(&sent, &grants).await;
        let found: Vec<String> =
            found.into_iter().map(|finding| format!("{}: {}", finding.subject, finding.what)).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("/open: others on this machine may read it: its mode is 644"), "{found:?}");
    }

    #[test]
    fn hanging_secret_files_share_one_timeout() {
        let paths = (0..1_000).map(|number| PathBuf::from(format!("/hung/{number}"))).collect();
        let hung = |_: &Path| {
            std::thread::park();
            None
        };
        let found = judge_modes(paths, hung, Duration::from_millis(10));
        assert!(found.len() == 1 && found[0].what.contains("not read within 0.01 s"), "{found:?}");
    }

    #[test]
    fn unwritable_folder_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let problem = |path: &Path| creation_problem(path).unwrap_or_default();
        assert_eq!(problem(&dir.path().join("new.db")), "");
        assert_eq!(problem(Path::new("new.db")), "", "the current folder");
        let missing = dir.path().join("missing");
        assert_eq!(problem(&missing.join("new.db")), format!("its folder {} does not exist", missing.display()));
        assert_eq!(problem(&file.join("new.db")), format!("{} is not a folder", file.display()));
        assert!(problem(&file.join("below/new.db")).contains("cannot be reached: Not a directory"));
        assert_eq!(write_problem(&file), None);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was created");
    }
}
