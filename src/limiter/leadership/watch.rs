//! The background tasks that poll leader rows and probe connections, take rows over, and drop stale connections.
//!
//! Rows and connections have a task each, so that a store that does not respond cannot make the polled row stale. A row
//! is changed only by compare-and-set on what was just read.

use std::convert::Infallible;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::LeaderGuardedLimiter;
use super::view::LeadershipView;
use crate::domain::clock_comparison::QuotaAttestation;
use crate::domain::provider::ProviderName;
use crate::limiter::StoreConnection;
use crate::limiter::leader_election::{Leader, NoLeaderCause, Takeover};

/// Two changes of the leader that are closer are no fail-over: workers are connected to two stores.
const FAIL_OVERS_APART_MIN: Duration = Duration::from_secs(60);

pub(super) async fn run_until_stopped(limiter: &LeaderGuardedLimiter, stop: CancellationToken) {
    let both = async { tokio::join!(watch_rows(limiter), watch_connections(limiter)) };
    tokio::select! {
        () = stop.cancelled() => {}
        (never, _) = both => match never {},
    }
}

async fn watch_rows(limiter: &LeaderGuardedLimiter) -> Infallible {
    let mut tick = interval(limiter.timing.poll_interval);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_failing = false;
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = limiter.poll_now.notified() => {}
        }
        match limiter.poll_rows().await {
            Ok(()) => {
                is_failing = false;
                limiter.apply_decisions().await;
                limiter.record_attestations().await;
            }
            Err(error) if !is_failing => {
                is_failing = true;
                tracing::warn!(
                    error,
                    "cannot poll the leader rows: no permit is granted until the database is reachable again"
                );
            }
            Err(_) => {}
        }
    }
}

async fn watch_connections(limiter: &LeaderGuardedLimiter) -> Infallible {
    let mut tick = interval(limiter.timing.poll_interval);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = limiter.probe_now.notified() => {}
        }
        limiter.drop_stale_connections().await;
        limiter.probe_connections().await;
    }
}

impl LeaderGuardedLimiter {
    fn open_quotas(&self) -> Vec<ProviderName> {
        self.views.lock().keys().cloned().collect()
    }

    async fn poll_rows(&self) -> Result<(), String> {
        let quotas = self.open_quotas();
        if quotas.is_empty() {
            return Ok(());
        }
        let sent_at = Instant::now();
        let mut rows = self.rows.leader_rows(&quotas).await?;
        let received_at = Instant::now();
        let mut views = self.views.lock();
        for quota in quotas {
            if let Some(view) = views.get_mut(&quota) {
                view.record_row(rows.remove(&quota), sent_at, received_at);
            }
        }
        Ok(())
    }

    async fn probe_connections(&self) {
        for (quota, outcome) in self.store.probe(&self.open_quotas()).await {
            let now = Instant::now();
            let mut views = self.views.lock();
            let Some(view) = views.get_mut(&quota) else { continue };
            let is_change = match outcome {
                Ok(connection) => view.record_reachable(connection, now),
                Err(error) => view.record_unavailable(&error, now),
            };
            if is_change {
                self.poll_now.notify_one();
            }
        }
    }

    /// Drops connections that lead to another store than the row names. Until a new one is probed, row and view
    /// disagree, so no permit is granted, however long this takes.
    async fn drop_stale_connections(&self) {
        let now = Instant::now();
        let stale_connection = |(quota, view): (&ProviderName, &LeadershipView)| {
            let connection = view.connection().filter(|_| view.decide(now).reconnect)?;
            Some((quota.clone(), connection.clone()))
        };
        let stale: Vec<(ProviderName, StoreConnection)> =
            self.views.lock().iter().filter_map(stale_connection).collect();
        let disconnect = async |(quota, connection): &(ProviderName, StoreConnection)| {
            if !self.store.previous_store_has_ended() {
                tracing::info!(%quota, "another limiter store is leader: reconnecting");
            }
            self.store.disconnect(quota, connection).await;
        };
        join_all(stale.iter().map(disconnect)).await;
    }

    /// Takes over rows as the election decides, and has stale connections dropped.
    async fn apply_decisions(&self) {
        let now = Instant::now();
        let takeovers: Vec<(ProviderName, Takeover)> = self
            .views
            .lock()
            .iter()
            .filter_map(|(quota, view)| {
                let decision = view.decide(now);
                let two_stores = decision.leader == Leader::NoLeader(NoLeaderCause::TwoStores)
                    && !self.store.previous_store_has_ended();
                match two_stores.then(|| view.changed_within(FAIL_OVERS_APART_MIN, now)) {
                    Some(true) => tracing::error!(%quota, "{}", NoLeaderCause::TwoStores),
                    // A fail-over; the line about the new leader follows.
                    Some(false) => tracing::info!(%quota, "{}", NoLeaderCause::TwoStores),
                    None => {}
                }
                if decision.reconnect {
                    self.probe_now.notify_one();
                }
                Some((quota.clone(), decision.takeover?))
            })
            .collect();
        join_all(takeovers.into_iter().map(|(quota, takeover)| self.take_over(quota, takeover))).await;
    }

    /// Records the clock attestations that are due. The next poll shows whether that worked.
    async fn record_attestations(&self) {
        let due = |(quota, view): (&ProviderName, &LeadershipView)| {
            let (term, attestation) = view.attestation_due()?;
            Some(QuotaAttestation { quota: quota.clone(), term, attestation })
        };
        let due: Vec<_> = self.views.lock().iter().filter_map(due).collect();
        if due.is_empty() {
            return;
        }
        if let Err(error) = self.rows.record_attestations(&due).await {
            tracing::debug!(error, "cannot record the clock attestations: retrying with the next poll");
        }
    }

    async fn take_over(&self, quota: ProviderName, Takeover { from, to }: Takeover) {
        let sent_at = Instant::now();
        match self.rows.take_over(&quota, from.as_deref(), &to).await {
            Ok(row) => {
                let (holder, term) = (row.holder.clone(), row.term);
                if holder == to && from.is_none() {
                    tracing::info!(%quota, holder, term, "the limiter leader is set for the first time");
                } else if holder == to && self.store.previous_store_has_ended() {
                    tracing::info!(
                        %quota,
                        from,
                        holder,
                        term,
                        "this run is limiter leader now: it grants once no permit of the former run can start"
                    );
                } else if holder == to {
                    tracing::warn!(
                        %quota,
                        from,
                        holder,
                        term,
                        "the limiter leader has changed: it grants once no permit of the former one can start"
                    );
                } else {
                    tracing::info!(%quota, holder, term, "another worker changed the limiter leader first");
                }
                if let Some(view) = self.views.lock().get_mut(&quota) {
                    view.record_row(Some(row), sent_at, Instant::now());
                }
            }
            Err(error) => {
                tracing::warn!(%quota, to, error, "cannot change the limiter leader: retrying with the next poll");
            }
        }
    }
}
