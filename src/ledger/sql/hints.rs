//! PostgreSQL's NOTIFY as a hint that settings changed, on a connection of its own.
//!
//! Refuses to be relied on: it may be lost with its connection, swallowed by a pooler or late. Whoever follows the settings
//! polls as well, so its loss is only slowness.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{PgListener, PgPoolOptions};

use super::connections::Connections;
use super::session::with_statement_timeout;
use crate::ledger::settings::SettingsHints;

/// Named in `migrations/postgres/0008_settings_hint.sql`.
const CHANNEL: &str = "sluicegate_settings";
/// Between two attempts to listen, and from a loss to the next connection; polling goes on meanwhile.
const RETRY: Duration = Duration::from_secs(1);
/// A connection that a firewall has forgotten says nothing, for ever; so each is replaced after this time.
const RENEW: Duration = Duration::from_secs(300);
/// How long one attempt to connect may take.
const CONNECT: Duration = Duration::from_secs(3);

pub struct PostgresHints {
    connections: Connections,
    listener: Option<PgListener>,
    /// Told once per loss, so that a database that is away does not fill the log.
    is_disconnected: bool,
}

impl PostgresHints {
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
}

#[async_trait]
impl SettingsHints for PostgresHints {
    async fn next(&mut self) {
        let mut short = self.connections.short();
        loop {
            // Where there are too few connections, payments need them more than hints do.
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
                    // Nobody heard what changed before this moment.
                    return;
                }
                Err(error) => {
                    if !self.is_disconnected {
                        self.is_disconnected = true;
                        tracing::warn!(%error, "no hints of changed settings; they are polled");
                    }
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}
