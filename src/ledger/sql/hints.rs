//! PostgreSQL's NOTIFY as a hint that settings changed, on a connection of its own.
//!
//! A hint may be lost with its connection, dropped by a pooler, or late. Followers poll as well, so a lost hint only
//! delays a change.

use std::time::Duration;

use sqlx::postgres::{PgListener, PgPoolOptions};

use super::connections::Connections;
use super::session::with_statement_timeout;

/// Named in `migrations/postgres/0001_settings.sql`.
const CHANNEL: &str = "sluicegate_settings";
/// Pause between two attempts to listen, and after a lost connection; polling goes on meanwhile.
const RETRY: Duration = Duration::from_secs(1);
/// A connection that a firewall has dropped stays silent forever. So each is replaced after this time.
const RENEW: Duration = Duration::from_secs(300);
/// Time limit of one connect.
const CONNECT: Duration = Duration::from_secs(3);

/// Hints that settings may have changed. They are not reliable: one may come without a change, and a change may come
/// without one.
pub struct SettingsHints {
    connections: Connections,
    listener: Option<PgListener>,
    /// Set after a loss, so that it is logged once while the database is unavailable.
    is_disconnected: bool,
}

impl SettingsHints {
    pub fn new(connections: Connections) -> Self {
        Self { connections, listener: None, is_disconnected: false }
    }

    async fn listen(&self) -> Result<PgListener, sqlx::Error> {
        let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(CONNECT);
        let mut listener =
            PgListener::connect_with(&pool.connect_lazy_with(self.connections.options().clone())).await?;
        listener.eager_reconnect(false);
        with_statement_timeout(listener.listen(CHANNEL)).await?;
        Ok(listener)
    }

    /// Whether a notification came. Otherwise the connection is lost, or old enough to be replaced.
    async fn wait_notification(listener: &mut PgListener) -> bool {
        matches!(tokio::time::timeout(RENEW, listener.try_recv()).await, Ok(Ok(Some(_))))
    }

    /// Returns when settings may have changed. Never fails; a lost connection is replaced meanwhile.
    pub async fn next(&mut self) {
        let mut short = self.connections.short();
        loop {
            // When connections are short, payments need them more than hints do.
            if *short.borrow_and_update() {
                self.listener = None;
                tokio::time::sleep(RETRY).await;
                continue;
            }
            if let Some(listener) = &mut self.listener {
                let heard = tokio::select! {
                    heard = Self::wait_notification(listener) => heard,
                    _ = short.changed() => false,
                };
                if heard {
                    return;
                }
                self.listener = None;
                tokio::time::sleep(RETRY).await;
            }
            match self.listen().await {
                Ok(listener) => {
                    self.listener = Some(listener);
                    self.is_disconnected = false;
                    // A change before this moment sent no hint.
                    return;
                }
                Err(error) => {
                    if !self.is_disconnected {
                        self.is_disconnected = true;
                        tracing::warn!(%error, "cannot listen for changed settings; polling them instead");
                    }
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}
