//! Settings that change while workers run: in force in every worker within 2 s, with hints and without. Also the audit
//! of each change.

use std::time::Instant;

use sluicegate::domain::limit::Rate;
use sluicegate::ledger::database::Database;
use sluicegate::ledger::operator::Actor;
use sluicegate::ledger::provider_row::parse_provider_file;
use sluicegate::worker::change_hints;
use sluicegate::worker::settings_sync::{self, LoadedSettings, POLL_INTERVAL, StoreVersion};
use tokio::sync::{Notify, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::*;

on_every_database!(
    changes_are_listed_with_author_and_reason,
    actor_applies_to_one_change_only,
    invalid_row_keeps_the_last_valid_one,
);

/// Longest time from the commit of a change until it is in force: guarantee G6 of docs/guarantees.md.
const IN_FORCE_MAX: Duration = Duration::from_secs(2);

/// Longest wait, so that a failing test ends.
const PATIENCE: Duration = Duration::from_secs(30);

/// The settings of one worker, with a database connection of its own.
struct Follower {
    known: watch::Receiver<Arc<LoadedSettings>>,
    _gates: StoreVersion,
    _stop: DropGuard,
}

impl Follower {
    async fn start(url: &str, poll: Duration) -> Self {
        let settings = Database::open(url, 4).unwrap();
        let first = settings_sync::load(&settings, &LoadedSettings::default()).await.unwrap();
        let (sender, known) = watch::channel(Arc::new(first));
        let (gates, store) = StoreVersion::channel();
        let (stop, hinted) = (CancellationToken::new(), Arc::new(Notify::new()));
        if let Some(hints) = settings.change_hints() {
            tokio::spawn(change_hints::follow(hints, hinted.clone(), settings.record_news().clone(), stop.clone()));
        }
        tokio::spawn(settings_sync::poll(settings, poll, stop.clone(), sender, store, hinted, Arc::default()));
        Self { known, _gates: gates, _stop: stop.drop_guard() }
    }

    /// Instant at which this worker had loaded settings that allow `rate`.
    async fn in_force(&self, rate: &str) -> Instant {
        let rate: Rate = rate.parse().unwrap();
        let mut known = self.known.clone();
        let allows = |known: &Arc<LoadedSettings>| known.providers[&name("acme")].limits[0].rate == rate;
        let loaded = tokio::time::timeout(PATIENCE, known.wait_for(allows)).await;
        drop(loaded.unwrap_or_else(|_| panic!("{rate} is not in force after {PATIENCE:?}")).unwrap());
        Instant::now()
    }
}

async fn with_acme(fixture: &Fixture) {
    let row = "[[provider]]\nname = \"acme\"\nurl = \"https://acme.example/\"\n[[provider.limit]]\n\
               name = \"all\"\nmax_requests = 100\nwindow_ms = 1000\n";
    fixture.database.apply_settings(&parse_provider_file(row).unwrap(), false).await.unwrap();
}

/// Both workers must load the change within the time that G6 gives, measured from its commit.
async fn followed(workers: &[Follower; 2], rate: &str, change: impl Future<Output = ()>) {
    let (first, second) = (workers[0].in_force(rate), workers[1].in_force(rate));
    change.await;
    let committed = Instant::now();
    let (first, second) = tokio::join!(first, second);
    for instant in [first, second] {
        let took = instant.saturating_duration_since(committed);
        assert!(took <= IN_FORCE_MAX, "{rate} was in force {took:?} after its commit");
    }
}

async fn by_sql(fixture: &Fixture, max_requests: u32) {
    fixture.sql(&format!("UPDATE provider_limits SET max_requests = {max_requests}")).await.unwrap();
}

async fn by_command(fixture: &Fixture, rate: &str) {
    let by = Actor { os_user: "alice@host".to_owned(), reason: None, program: None };
    fixture.database.set_rate_as(&name("acme"), "all", rate.parse().unwrap(), Some(&by)).await.unwrap().unwrap();
}

const LISTENERS: &str = "FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'";

async fn until_listening(fixture: &Fixture, listeners: &str) {
    let deadline = Instant::now() + PATIENCE;
    while fixture.one(&format!("SELECT count(*) {LISTENERS}")).await != listeners {
        assert!(Instant::now() < deadline, "the number of listeners is never {listeners}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Workers poll once an hour here, so only the hint applies the change. This holds after its connection was cut, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hint_applies_a_change_in_every_worker() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    with_acme(&fixture).await;
    let hour = Duration::from_secs(3_600);
    let workers = [Follower::start(&fixture.url, hour).await, Follower::start(&fixture.url, hour).await];
    until_listening(&fixture, "2").await;
    followed(&workers, "200/1s", by_sql(&fixture, 200)).await;
    followed(&workers, "7/1m", by_command(&fixture, "7/1m")).await;
    let cut = fixture.one(&format!("SELECT count(pg_terminate_backend(pid)) {LISTENERS}")).await;
    assert_eq!(cut, "2");
    // A change without a listener is loaded when the workers listen again.
    by_sql(&fixture, 8).await;
    tokio::join!(workers[0].in_force("8/1m"), workers[1].in_force("8/1m"));
    until_listening(&fixture, "2").await;
    followed(&workers, "9/1m", by_sql(&fixture, 9)).await;
}

/// No worker gets a hint: the trigger is dropped and the connections are cut. Polling alone keeps the promise.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn polling_applies_changes_within_two_seconds() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    with_acme(&fixture).await;
    fixture.sql("DROP TRIGGER hint ON settings_version").await.unwrap();
    let workers =
        [Follower::start(&fixture.url, POLL_INTERVAL).await, Follower::start(&fixture.url, POLL_INTERVAL).await];
    until_listening(&fixture, "2").await;
    assert_eq!(fixture.one(&format!("SELECT count(pg_terminate_backend(pid)) {LISTENERS}")).await, "2");
    followed(&workers, "200/1s", by_sql(&fixture, 200)).await;
    followed(&workers, "7/1m", by_command(&fixture, "7/1m")).await;
}

/// SQLite sends nothing, but each worker sees the commits of others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_commits_apply_a_change_in_every_worker() {
    let fixture = Fixture::migrated(Kind::SqliteFile).await;
    with_acme(&fixture).await;
    let hour = Duration::from_secs(3_600);
    let workers = [Follower::start(&fixture.url, hour).await, Follower::start(&fixture.url, hour).await];
    followed(&workers, "200/1s", by_sql(&fixture, 200)).await;
    followed(&workers, "7/1m", by_command(&fixture, "7/1m")).await;
}

async fn changes_are_listed_with_author_and_reason(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let settings = fixture.database.clone();
    let acme = name("acme");
    with_acme(&fixture).await;
    let by = Actor { os_user: "alice@host".to_owned(), reason: Some("billing day".to_owned()), program: None };
    settings.set_rate_as(&acme, "all", "200/1s".parse().unwrap(), Some(&by)).await.unwrap().unwrap();
    assert!(settings.set_paused_as(&acme, true, Some(&by)).await.unwrap());
    assert!(!settings.set_paused_as(&name("nobody"), true, Some(&by)).await.unwrap());
    fixture.sql("UPDATE provider_limits SET max_requests = 5").await.unwrap();
    fixture.sql("INSERT INTO providers (name, url) VALUES ('acme2', 'https://x.example/')").await.unwrap();
    let changes = settings.settings_audit(Some(&acme), 10).await.unwrap();
    let what: Vec<&str> = changes.iter().map(|change| change.what.as_str()).collect();
    assert_eq!(
        what,
        [
            "limit all: max_requests 200 → 5",
            "paused false → true",
            "limit all: max_requests 100 → 200",
            "limit all added, 100/1s",
            "created",
        ]
    );
    let user = if kind == Kind::Postgres { "postgres" } else { "database file" };
    assert_eq!((changes[0].who.as_str(), &changes[0].because), (user, &None));
    assert_eq!(changes[1].who, format!("alice@host ({user})"));
    assert_eq!(changes[1].because.as_deref(), Some("billing day"));
    assert_eq!(changes[2].new.as_ref().unwrap()["max_requests"], 200);
    assert_eq!(changes[1].program.as_deref(), Some("sluicegate"));
    assert!(changes[0].at.0 >= changes[4].at.0 && changes[4].at.0 > 1_700_000_000_000);
    let last = settings.settings_audit(None, 1).await.unwrap();
    assert_eq!((last.len(), last[0].provider.as_deref()), (1, Some("acme2")));
}

async fn actor_applies_to_one_change_only(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    with_acme(&fixture).await;
    let by = Actor { os_user: "alice@host".to_owned(), reason: Some("why".to_owned()), program: None };
    let settings = fixture.database.clone();
    // The first change is rolled back, the second changes nothing, the third changes something. None lends its author
    // to a later change.
    assert!(settings.set_rate_as(&name("acme"), "none", "1/1s".parse().unwrap(), Some(&by)).await.unwrap().is_none());
    settings.set_rate_as(&name("acme"), "all", "100/1s".parse().unwrap(), Some(&by)).await.unwrap().unwrap();
    settings.set_rate_as(&name("acme"), "all", "50/1s".parse().unwrap(), Some(&by)).await.unwrap().unwrap();
    for round in 0..20 {
        settings.set_rate(&name("acme"), "all", format!("{}/1s", 10 + round).parse().unwrap()).await.unwrap();
    }
    let changes = settings.settings_audit(None, 100).await.unwrap();
    let named = changes.iter().filter(|change| change.because.is_some()).count();
    assert_eq!((named, changes.len()), (1, 23), "{changes:#?}");
}

/// Rows that no CHECK rejects, written by SQL over valid ones.
async fn invalid_row_keeps_the_last_valid_one(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    with_acme(&fixture).await;
    let settings = fixture.database.clone();
    let good = settings_sync::load(&settings, &LoadedSettings::default()).await.unwrap();
    for (bad, words) in [
        ("UPDATE provider_limits SET enabled = false", "limit"),
        ("UPDATE providers SET request = '{\"body\": \"telegram\"}'", "request"),
        ("UPDATE providers SET statuses = '{\"9\": \"fine\"}'", "statuses"),
        ("UPDATE providers SET url = 'https://u:secret@x.example/'", "url"),
    ] {
        fixture.sql(bad).await.unwrap();
        let next = settings_sync::refresh(&settings, &good, 0).await.unwrap().unwrap();
        assert_eq!(next.invalid_rows.len(), 1, "{bad}");
        let problems = next.invalid_rows[0].problems.join("\n");
        assert!(problems.contains(words) && !problems.contains("secret"), "{bad}: {problems}");
        assert_eq!(next.providers[&name("acme")], good.providers[&name("acme")], "{bad}: the last valid row counts");
        // A pause is applied although the rest of the row is invalid.
        fixture.sql("UPDATE providers SET paused = true").await.unwrap();
        let paused = settings_sync::refresh(&settings, &good, 0).await.unwrap().unwrap();
        assert!(paused.providers[&name("acme")].paused, "{bad}");
        fixture.sql("UPDATE providers SET paused = false").await.unwrap();
    }
}
