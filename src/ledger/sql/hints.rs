//! Hints that another process has written to the database: settings may have changed, or lanes have new payments.
//!
//! PostgreSQL sends notices (NOTIFY) to a connection of its own. SQLite numbers the commits of other connections, and the
//! number is read often. A hint may come without a change, or be lost with its connection, dropped by a pooler, or late.
//! Followers poll as well, so a lost hint only delays a change.

use std::collections::BTreeSet;
use std::time::Duration;

use sqlx::postgres::{PgListener, PgNotification, PgPoolOptions};
use sqlx::{Row as _, SqlitePool};
use tokio::time::sleep;

use super::connections::Connections;
use super::dialect::{Dialect, Template};
use super::engine::args;
use super::io_error::name_closed;
use super::session::with_statement_timeout;
use super::sqlite;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;

/// Named in `migrations/postgres/0001_settings.sql`.
const SETTINGS_CHANNEL: &str = "sluicegate_settings";
/// Its notices name a lane each.
const RECORDS_CHANNEL: &str = "sluicegate_records";
/// Pause between two attempts to listen, and after a lost connection; polling goes on meanwhile.
const RETRY: Duration = Duration::from_secs(1);
/// A connection that a firewall has dropped stays silent forever. So each is replaced after this time.
const RENEW: Duration = Duration::from_secs(300);
/// Time limit of one connect.
const CONNECT: Duration = Duration::from_secs(3);
/// Time between two readings of SQLite's number of commits.
const COMMITS_INTERVAL: Duration = Duration::from_millis(20);

static NOTIFY: Template =
    Template::new("SELECT pg_notify('sluicegate_records', value) IS NULL AS sent FROM ({texts:$1}) AS lanes");

impl Database {
    /// Hints of other processes, for one follower; `None` for a database in memory: no other process has it.
    pub fn change_hints(&self) -> Option<ChangeHints> {
        self.engine.change_hints()
    }

    /// Tells the workers of other processes that these lanes have new payments. On SQLite they see the commits.
    pub async fn notify_of_records(&self, lanes: &BTreeSet<ProviderName>) -> Result<(), LedgerError> {
        match self.dialect() {
            Dialect::Postgres => {
                let lanes: Vec<&str> = lanes.iter().map(ProviderName::as_str).collect();
                self.query(&NOTIFY, args![serde_json::Value::from(lanes).to_string()]).await.map(drop)
            }
            Dialect::Sqlite => Ok(()),
        }
    }
}

/// What another process may have written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeHint {
    Settings,
    /// Payments of this lane.
    Records(ProviderName),
    Anything,
}

/// The hints of one database.
pub struct ChangeHints(Source);

enum Source {
    Postgres(PostgresHints),
    Sqlite(SqliteHints),
}

impl ChangeHints {
    pub fn postgres(connections: Connections) -> Self {
        Self(Source::Postgres(PostgresHints { connections, listener: None, is_disconnected: false }))
    }

    pub fn sqlite(pool: SqlitePool) -> Self {
        Self(Source::Sqlite(SqliteHints { pool, seen: None }))
    }

    /// The next hint. Never fails; a lost connection is replaced meanwhile.
    pub async fn next(&mut self) -> ChangeHint {
        match &mut self.0 {
            Source::Postgres(hints) => hints.next().await,
            Source::Sqlite(hints) => hints.next().await,
        }
    }
}

struct PostgresHints {
    connections: Connections,
    listener: Option<PgListener>,
    /// Set after a loss, so that it is logged once while the database is unavailable.
    is_disconnected: bool,
}

impl PostgresHints {
    async fn listen(&self) -> Result<PgListener, sqlx::Error> {
        let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(CONNECT);
        let pool = pool.connect_lazy_with(self.connections.options().clone());
        let mut listener = PgListener::connect_with(&pool).await.map_err(name_closed)?;
        listener.eager_reconnect(false);
        with_statement_timeout(listener.listen_all([SETTINGS_CHANNEL, RECORDS_CHANNEL])).await?;
        Ok(listener)
    }

    /// The next notice; `None`: the connection is lost, or old enough to be replaced.
    async fn wait_notice(listener: &mut PgListener) -> Option<ChangeHint> {
        match tokio::time::timeout(RENEW, listener.try_recv()).await {
            Ok(Ok(Some(notice))) => Some(hint_of(&notice)),
            _ => None,
        }
    }

    async fn next(&mut self) -> ChangeHint {
        let mut short = self.connections.short();
        loop {
            // When connections are short, payments need them more than hints do.
            if *short.borrow_and_update() {
                self.listener = None;
                sleep(RETRY).await;
                continue;
            }
            if let Some(listener) = &mut self.listener {
                let heard = tokio::select! {
                    heard = Self::wait_notice(listener) => heard,
                    _ = short.changed() => None,
                };
                if let Some(hint) = heard {
                    return hint;
                }
                self.listener = None;
                sleep(RETRY).await;
            }
            match self.listen().await {
                Ok(listener) => {
                    self.listener = Some(listener);
                    self.is_disconnected = false;
                    // A change before this moment sent no hint.
                    return ChangeHint::Anything;
                }
                Err(error) => {
                    if !self.is_disconnected {
                        self.is_disconnected = true;
                        let error = LedgerError::from(&error);
                        tracing::warn!(%error, "cannot listen for changes of other processes; polling instead");
                    }
                    sleep(RETRY).await;
                }
            }
        }
    }
}

fn hint_of(notice: &PgNotification) -> ChangeHint {
    if notice.channel() == SETTINGS_CHANNEL {
        return ChangeHint::Settings;
    }
    ProviderName::new(notice.payload()).map_or(ChangeHint::Anything, ChangeHint::Records)
}

struct SqliteHints {
    pool: SqlitePool,
    /// The number of commits that was read last.
    seen: Option<i64>,
}

impl SqliteHints {
    async fn next(&mut self) -> ChangeHint {
        loop {
            sleep(COMMITS_INTERVAL).await;
            match other_commits(&self.pool).await {
                // The first one may come after a commit that nothing else tells.
                Ok(commits) if self.seen.replace(commits) != Some(commits) => return ChangeHint::Anything,
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(%error, "failed to look for commits of other processes, retrying");
                    sleep(RETRY).await;
                }
            }
        }
    }
}

/// A number that changes with each commit of another connection. It is read on the one connection that writes, so that
/// the commits of this process do not count.
async fn other_commits(pool: &SqlitePool) -> Result<i64, sqlx::Error> {
    sqlx::query("PRAGMA data_version").fetch_one(&mut *sqlite::acquire(pool).await?).await?.try_get(0)
}
