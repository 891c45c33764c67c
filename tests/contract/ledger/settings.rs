//! The settings store: versions, the audit, applied provider files, and versions after the restore of a backup.

use sluicegate::domain::limit::Rate;
use sluicegate::domain::quota_spec::Lookback;
use sluicegate::ledger::LedgerError;
use sluicegate::ledger::provider_row::{ProviderRow, parse_provider_file};
use sluicegate::worker::settings_sync::{self, LoadedSettings, StoreVersion};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::*;

mod exceptional_changes;
mod invalid_pairs;
mod invalid_rows;
mod signed;

on_every_database!(
    every_change_bumps_the_version_and_is_audited,
    an_operators_row_has_the_contracts_defaults,
    applying_is_idempotent,
    applying_removes_unlisted_limits,
    concurrent_applies_agree,
    a_rate_and_a_pause_are_set,
    limits_and_account_rules_are_loaded_as_applied,
    a_restored_database_counts_again,
    concurrent_version_raises_agree,
    settings_version_from_limiter_triggers_reload,
);

const FILE: &str = r#"
[[provider]]
name = "stripe"
quota = "acme"
url = "https://api.stripe.example/v1/charges"
leak_per_second = 12.5
cutoff = "18:00 Europe/Berlin"
idempotency_retention_s = 86400
headers = { Authorization = "Bearer ${env:STRIPE_KEY}" }
statuses = { 402 = "declined", 418 = "review" }
[provider.request]
body = "form"
key_header = "Idempotency-Key"
template = { amount = "${amount}", deep = { list = [1, 2.5, true], text = "ü" } }
reference = "/data/id"
[[provider.limit]]
name = "per-second"
max_requests = 100
window_ms = 1000
[[provider.limit]]
name = "per-minute"
max_requests = 600
window_ms = 60000
applies_to = "charge"

[[provider]]
name = "adyen"
url = "https://checkout.adyen.example/"
[[provider.limit]]
name = "all"
max_requests = 5
window_ms = 1000
"#;

fn file(text: &str) -> Vec<ProviderRow> {
    parse_provider_file(text).unwrap_or_else(|problems| panic!("{problems:#?}"))
}

impl Fixture {
    async fn apply(&self, rows: &[ProviderRow]) -> Vec<String> {
        let changes = self.database.apply_settings(rows, false).await.unwrap();
        changes.into_iter().map(|change| format!("{}: {}", change.provider, change.description)).collect()
    }

    /// Version of the settings, and version of the provider's row.
    async fn versions(&self, provider: &str) -> (i64, i64) {
        let own = self.one(&format!("SELECT version FROM providers WHERE name = '{provider}'")).await;
        (self.database.settings_version().await.unwrap(), own.parse().unwrap())
    }
}

async fn every_change_bumps_the_version_and_is_audited(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let other = "INSERT INTO providers (name, url) VALUES ('adyen', 'https://x.example/')";
    fixture.sql(other).await.unwrap();
    let (_, untouched) = fixture.versions("adyen").await;
    // Statement; table and key that the audit names; texts in the old and in the new row.
    let changes = [
        (
            "INSERT INTO providers (name, url) VALUES ('stripe', 'https://x.example/')",
            "providers stripe",
            "",
            "x.example",
        ),
        ("UPDATE providers SET workers = 7 WHERE name = 'stripe'", "providers stripe", "32", "7"),
        (
            "INSERT INTO provider_limits (provider, name, max_requests, window_ms) VALUES ('stripe', 'all', 41, 1000)",
            "provider_limits stripe/all",
            "",
            "41",
        ),
        (
            "UPDATE providers SET cutoff = '18:00 Europe/Berlin' WHERE name = 'stripe'",
            "providers stripe",
            "\"cutoff\"",
            "18:00 Europe/Berlin",
        ),
        ("UPDATE provider_limits SET max_requests = 42", "provider_limits stripe/all", "41", "42"),
        (
            "INSERT INTO account_overrides (provider, account, rule) VALUES ('stripe', 'acct_1', 'blocked')",
            "account_overrides stripe/acct_1/*",
            "",
            "blocked",
        ),
        ("UPDATE account_overrides SET rule = 'refuse'", "account_overrides stripe/acct_1/*", "blocked", "refuse"),
        ("UPDATE account_overrides SET weight = 701", "account_overrides stripe/acct_1/*", "refuse", "701"),
        ("DELETE FROM account_overrides", "account_overrides stripe/acct_1/*", "refuse", ""),
        ("DELETE FROM provider_limits", "provider_limits stripe/all", "42", ""),
    ];
    for (statement, key, old, new) in changes {
        let before = fixture.database.settings_version().await.unwrap();
        fixture.sql(statement).await.unwrap();
        let (version, own) = fixture.versions("stripe").await;
        assert!(version > before, "{statement}");
        assert!(own > before && own <= version, "{statement}: row {own}, settings {version}");
        let last = "FROM settings_audit WHERE id = (SELECT max(id) FROM settings_audit)";
        assert_eq!(fixture.one(&format!("SELECT table_name || ' ' || row_key {last}")).await, key);
        for (column, words) in [("old_row", old), ("new_row", new)] {
            let row = fixture.one(&format!("SELECT {column} {last}")).await;
            if words.is_empty() {
                assert_eq!(row, "NULL", "{statement}");
            } else {
                assert!(row.starts_with('{') && row.contains(words), "{statement}: {row}");
            }
        }
        assert_ne!(fixture.one(&format!("SELECT who {last}")).await, "");
    }
    assert_eq!(fixture.one("SELECT count(*) FROM settings_audit").await, "11", "one row per change, no more");
    assert_eq!(fixture.versions("adyen").await.1, untouched, "another provider's version stays");
    let before = fixture.database.settings_version().await.unwrap();
    fixture.sql("DELETE FROM providers WHERE name = 'stripe'").await.unwrap();
    assert!(fixture.database.settings_version().await.unwrap() > before);
    assert_eq!(fixture.one("SELECT count(*) FROM settings_audit").await, "12");
}

async fn an_operators_row_has_the_contracts_defaults(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.sql("INSERT INTO providers (name, url) VALUES ('stripe', 'https://x.example/')").await.unwrap();
    let limit =
        "INSERT INTO provider_limits (provider, name, max_requests, window_ms) VALUES ('stripe', 'all', 5, 1000)";
    fixture.sql(limit).await.unwrap();
    let text = "[[provider]]\nname = 'stripe'\nurl = 'https://x.example/'\n\
                [[provider.limit]]\nname = 'all'\nmax_requests = 5\nwindow_ms = 1000";
    assert_eq!(fixture.database.readable_rows(None).await.unwrap(), file(text));
    let snapshot = fixture.database.load_settings().await.unwrap();
    let provider = snapshot.providers[0].as_ref().unwrap();
    assert_eq!((provider.quota.as_str(), provider.workers), ("stripe", 32));
    assert_eq!((snapshot.version, provider.version), fixture.versions("stripe").await);
}

async fn applying_is_idempotent(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let mut rows = file(FILE);
    let planned = fixture.database.apply_settings(&rows, true).await.unwrap();
    assert_eq!(planned.len(), 5, "{planned:?}");
    assert_eq!(fixture.database.readable_rows(None).await.unwrap(), [], "a dry run writes nothing");
    assert_eq!(
        fixture.apply(&rows).await,
        [
            "stripe: created",
            "stripe: limit per-second added 100/1s",
            "stripe: limit per-minute added 600/1m for charges",
            "adyen: created",
            "adyen: limit all added 5/1s",
        ]
    );
    let version = fixture.database.settings_version().await.unwrap();
    assert_eq!(fixture.apply(&rows).await, [""; 0]);
    assert_eq!(fixture.database.settings_version().await.unwrap(), version, "nothing changed, nothing written");
    let stored = fixture.database.readable_rows(Some(&name("stripe"))).await.unwrap();
    assert_eq!((stored.len(), &stored[0].request, &stored[0].headers), (1, &rows[0].request, &rows[0].headers));
    rows[0].max_wait_ms = 8_000;
    rows[0].quota = None;
    rows[0].headers.insert("X-Extra".to_owned(), "1".into());
    rows[0].limits[0].max_requests = 200;
    rows[0].limits[1].applies_to = "all".to_owned();
    assert_eq!(
        fixture.apply(&rows).await,
        [
            "stripe: changed headers",
            "stripe: changed max_wait_ms 5000 → 8000",
            "stripe: changed quota acme → none",
            "stripe: limit per-second changed 100/1s → 200/1s",
            "stripe: limit per-minute changed applies_to charge → all",
        ]
    );
    let snapshot = fixture.database.load_settings().await.unwrap();
    let names: Vec<String> =
        snapshot.providers.iter().map(|provider| provider.as_ref().unwrap().name.to_string()).collect();
    assert_eq!(names, ["adyen", "stripe"]);
    assert!(snapshot.providers.iter().all(|provider| provider.as_ref().unwrap().version <= snapshot.version));
    assert_eq!(snapshot.providers[1].as_ref().unwrap().leak_per_second, Some(12.5));
    let cutoff = snapshot.providers[1].as_ref().unwrap().cutoff.as_ref().unwrap();
    assert_eq!(cutoff.to_string(), "18:00 Europe/Berlin");
}

async fn applying_removes_unlisted_limits(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let mut rows = file(FILE);
    fixture.apply(&rows).await;
    let override_row = "INSERT INTO account_overrides (provider, account, limit_name, rule) \
                        VALUES ('stripe', 'acct_1', 'per-minute', 'blocked')";
    fixture.sql(override_row).await.unwrap();
    rows[0].limits.pop();
    assert_eq!(
        fixture.apply(&rows[..1]).await,
        ["stripe: limit per-minute removed", "stripe: account acct_1 at limit per-minute removed"]
    );
    assert_eq!(fixture.database.readable_rows(None).await.unwrap().len(), 2, "providers that are not named stay");
    // Nothing is written when one row of the file is invalid.
    rows[0].workers = 1;
    rows[1].workers = 0;
    let error = fixture.database.apply_settings(&rows, false).await.unwrap_err();
    assert!(matches!(&error, LedgerError::StatementFailed(text) if text.contains("`adyen`: workers is 0")), "{error}");
    assert_eq!(fixture.one("SELECT workers FROM providers WHERE name = 'stripe'").await, "32");
}

async fn concurrent_applies_agree(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let appliers = (1..=4).map(|number| {
        let settings = fixture.database.clone();
        let mut rows = file(FILE);
        rows[0].workers = number;
        rows[1].workers = number;
        tokio::spawn(async move { settings.apply_settings(&rows, false).await.unwrap() })
    });
    let changes: Vec<_> = futures_util::future::join_all(appliers).await.into_iter().flat_map(Result::unwrap).collect();
    assert_eq!(changes.iter().filter(|change| change.description == "created").count(), 2, "{changes:?}");
    let workers = fixture.column("SELECT DISTINCT workers FROM providers").await;
    assert_eq!(workers.len(), 1, "both rows come from the same file: {workers:?}");
}

async fn a_rate_and_a_pause_are_set(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let settings = fixture.database.clone();
    fixture.apply(&file(FILE)).await;
    let rate = |text: &str| text.parse::<Rate>().unwrap();
    let stripe = name("stripe");
    assert_eq!(settings.set_rate(&stripe, "per-minute", rate("0/5m")).await.unwrap(), Some(rate("600/1m").into()));
    assert_eq!(settings.set_rate(&stripe, "none", rate("1/1s")).await.unwrap(), None);
    let rows = settings.readable_rows(Some(&stripe)).await.unwrap();
    let changed = &rows[0].limits[0];
    assert_eq!((changed.max_requests, changed.window_ms, changed.applies_to.as_str()), (0, 300_000, "charge"));
    assert!(settings.set_paused(&stripe, true).await.unwrap());
    assert!(!settings.set_paused(&name("nobody"), true).await.unwrap());
    // A resume is recorded although nothing was paused: it ends a pause that the provider named.
    let resumed_at = async || {
        let snapshot = settings.load_settings().await.unwrap();
        let stripe = snapshot.providers.into_iter().map(Result::unwrap).find(|row| row.name == stripe).unwrap();
        (snapshot.version, stripe.resumed_at)
    };
    let (version, never) = resumed_at().await;
    assert_eq!(never, 0);
    assert!(settings.set_paused(&name("adyen"), false).await.unwrap());
    assert_eq!(resumed_at().await.1, 0, "the resume of another row");
    assert!(settings.set_paused(&stripe, false).await.unwrap());
    let (later, at) = resumed_at().await;
    assert!(later > version && at > 1_700_000_000_000, "{at}");
    let mut rows = file(FILE);
    rows.iter_mut().for_each(|row| row.workers = 5);
    fixture.apply(&rows).await;
    assert_eq!(resumed_at().await.1, at, "a provider file does not change it");
    let audited = "SELECT count(*) FROM settings_audit WHERE new_row ->> 'resumed_at' IS NOT NULL \
                   AND old_row ->> 'resumed_at' IS NULL";
    assert_eq!(fixture.one(audited).await, "2");
    assert!(settings.set_paused(&stripe, true).await.unwrap());
    let snapshot = settings.load_settings().await.unwrap();
    let paused: Vec<bool> = snapshot.providers.iter().map(|provider| provider.as_ref().unwrap().paused).collect();
    assert_eq!(paused, [false, true]);
}

/// Every way in which a limit can count.
const SHAPES: &str = r#"
[[provider]]
name = "stripe"
url = "https://api.stripe.example/v1/charges"
pacing = "even"
store_down = "share"
share_of = 4
require = ["account"]
statuses = { 402 = "declined", 429 = [
  { header = "Stripe-Rate-Limited-Reason", value = "resource-specific", means = "busy" },
  { code = "lock_timeout", at = "/error/code", means = "busy" },
] }
[[provider.limit]]
name = "all"
max_requests = 100
window_ms = 1000
[[provider.limit]]
name = "burst"
algorithm = "token_bucket"
max_requests = 25
window_ms = 1000
burst = 50
applies_to = "charge"
[[provider.limit]]
name = "daily"
algorithm = "fixed_window"
max_requests = 1000000
window_ms = 86400000
offset_ms = 18000000
shadow = true
[[provider.limit]]
name = "per-account"
algorithm = "gcra"
max_requests = 10
window_ms = 60000
scope = "account"
[[provider.limit]]
name = "per-reference"
algorithm = "sliding_window"
max_requests = 5
window_ms = 60000
scope = "reference"
[[provider.account]]
account = "big"
rule = "limit"
limit_name = "per-account"
max_requests = 100
window_ms = 60000
burst = 20
[[provider.account]]
account = "heavy"
weight = 3
[[provider.account]]
account = "own"
rule = "exempt"
weight = 2
[[provider.account]]
account = "rogue"
rule = "blocked"
"#;

/// Every column that defines how a limit counts, and for which accounts, is loaded as it was applied.
async fn limits_and_account_rules_are_loaded_as_applied(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let rows = file(SHAPES);
    assert_eq!(
        fixture.apply(&rows).await,
        [
            "stripe: created",
            "stripe: limit all added 100/1s",
            "stripe: limit burst added 25/1s for charges, token_bucket with burst 50",
            "stripe: limit daily added 1000000/1d, fixed_window from 5h, shadow",
            "stripe: limit per-account added 10/1m per account, gcra",
            "stripe: limit per-reference added 5/1m per reference, sliding_window",
            "stripe: account big at limit per-account added limit 100/1m with burst 20",
            "stripe: account heavy added weight 3",
            "stripe: account own added exempt, weight 2",
            "stripe: account rogue added blocked",
        ]
    );
    assert_eq!(fixture.database.readable_rows(None).await.unwrap(), rows);
    let snapshot = fixture.database.load_settings().await.unwrap();
    let provider = snapshot.providers[0].as_ref().unwrap();
    assert_eq!(*provider, rows[0].validate(provider.version).unwrap());
    assert_eq!((provider.limits.len(), provider.account_rules.len(), provider.statuses[&429].len()), (5, 3, 2));
    // `limits set` reports the constraint of the database.
    let narrow = "10/500ms".parse::<Rate>().unwrap();
    let error = fixture.database.set_rate(&name("stripe"), "per-reference", narrow).await.unwrap_err();
    assert!(error.to_string().contains("sliding_window_has_window_ms_of_1000_or_more"), "{error}");
}

async fn a_restored_database_counts_again(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.apply(&file(FILE)).await;
    let settings = fixture.database.clone();
    let before = settings_sync::load(&settings, &LoadedSettings::default()).await.unwrap();
    assert_eq!(settings_sync::refresh(&settings, &before, before.version).await.unwrap(), None);
    let audits = "SELECT count(*) FROM settings_audit WHERE table_name = 'settings_version'";
    assert_eq!(fixture.one(audits).await, "0");
    let ledger = fixture.database.clone();
    assert!(ledger.recent_uses(&name("acme"), Lookback::all(A_MINUTE)).await.is_ok());
    // A gate reports a version above any that the database has had.
    let store = before.version + 41;
    let after = settings_sync::refresh(&settings, &before, store).await.unwrap().unwrap();
    assert_eq!((after.version, after.providers.len()), (store + 1, 2));
    assert_eq!(settings.settings_version().await.unwrap(), store + 1);
    let audit = "SELECT row_key || ' ' || (old_row ->> 'version') || ' ' || (new_row ->> 'version') FROM settings_audit \
                 WHERE table_name = 'settings_version'";
    assert_eq!(fixture.one(audit).await, format!("version {} {}", before.version, store + 1));
    assert_ne!(fixture.one("SELECT who FROM settings_audit ORDER BY id DESC LIMIT 1").await, "");
    // The database lacks requests since its backup. No limiter may be rebuilt from it until those can no longer count.
    let error = ledger.recent_uses(&name("acme"), Lookback::all(A_MINUTE)).await.unwrap_err();
    assert!(error.to_string().contains("backup"), "{error}");
    let minutes = if kind == Kind::Postgres { "interval '2 minutes'" } else { "120000" };
    fixture.without_constraints(&format!("UPDATE settings_audit SET at = at - {minutes}")).await.unwrap();
    assert!(ledger.recent_uses(&name("acme"), Lookback::all(A_MINUTE)).await.is_ok());
    // The raise is recorded once: the next refresh finds nothing new, and changes count as before.
    assert_eq!(settings_sync::refresh(&settings, &after, store).await.unwrap(), None);
    settings.set_paused(&name("stripe"), true).await.unwrap();
    let next = settings_sync::refresh(&settings, &after, store).await.unwrap().unwrap();
    assert_eq!(next.version, store + 2);
    // Without a limiter store, the worker itself knows a higher version.
    fixture.without_constraints("UPDATE settings_version SET version = 2").await.unwrap();
    let again = settings_sync::refresh(&settings, &next, 0).await.unwrap().unwrap();
    assert_eq!(again.version, store + 3);
}

async fn concurrent_version_raises_agree(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let raisers = (0..6).map(|_| {
        let settings = fixture.database.clone();
        async move { settings.raise_settings_version(1_000).await.unwrap() }
    });
    assert_eq!(futures_util::future::join_all(raisers).await, [1_001; 6]);
    assert_eq!(fixture.one("SELECT count(*) FROM settings_audit").await, "1");
    assert_eq!(fixture.database.raise_settings_version(7).await.unwrap(), 1_001, "never lowered");
}

async fn settings_version_from_limiter_triggers_reload(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let settings = fixture.database.clone();
    let first = settings_sync::load(&settings, &LoadedSettings::default()).await.unwrap();
    let (known, mut following) = watch::channel(Arc::new(first.clone()));
    let (gate, store) = StoreVersion::channel();
    let stop = CancellationToken::new();
    // The settings are polled once at the start, and not again before the test ends.
    let hour = Duration::from_secs(3_600);
    let watch = tokio::spawn(settings_sync::poll(
        settings.clone(),
        hour,
        stop.clone(),
        known,
        store,
        Arc::default(),
        Arc::default(),
    ));
    fixture.apply(&file(FILE)).await;
    let version = settings.settings_version().await.unwrap();
    gate.observe(version);
    following.wait_for(|known| known.version == version).await.unwrap();
    gate.observe(version + 5);
    gate.observe(version);
    let known = following.wait_for(|known| known.version > version).await.unwrap().clone();
    assert_eq!((known.version, known.providers.len()), (version + 6, 2));
    drop(gate); // A worker without gates continues to poll.
    stop.cancel();
    watch.await.unwrap();
}
