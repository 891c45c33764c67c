//! The watch over rows and links: polls both, takes the row when the rules say so, drops links that lead elsewhere.
//!
//! Refuses to let the rows wait for the store: one that does not answer must not make the row stale. Refuses to change a
//! row that it has not just read.

use std::convert::Infallible;

use futures_util::future::join_all;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::LeaderGuardedLimiter;
use super::view::LeadershipView;
use crate::domain::clock_attestation::ClockAttestation;
use crate::domain::provider::ProviderName;
use crate::limiter::StoreConnection;
use crate::limiter::leader_election::{Leader, NoLeaderCause, Takeover};

pub(super) async fn run_until_stopped(authorised: &LeaderGuardedLimiter, stop: CancellationToken) {
    let both = async { tokio::join!(watch_rows(authorised), watch_connections(authorised)) };
    tokio::select! {
        () = stop.cancelled() => {}
        (never, _) = both => match never {},
    }
}

async fn watch_rows(authorised: &LeaderGuardedLimiter) -> Infallible {
    let mut tick = interval(authorised.timing.poll_interval);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut away = false;
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = authorised.poll_now.notified() => {}
        }
        match authorised.poll_rows().await {
            Ok(()) => {
                away = false;
                authorised.apply_decisions().await;
                authorised.record_attestations().await;
            }
            Err(error) if !away => {
                away = true;
                tracing::warn!(error, "the database cannot be asked who grants; permits end soon");
            }
            Err(_) => {}
        }
    }
}

async fn watch_connections(authorised: &LeaderGuardedLimiter) -> Infallible {
    let mut tick = interval(authorised.timing.poll_interval);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = authorised.probe_now.notified() => {}
        }
        authorised.drop_stale_connections().await;
        authorised.probe_connections().await;
    }
}

impl LeaderGuardedLimiter {
    fn open_quotas(&self) -> Vec<ProviderName> {
        self.lock_views().keys().cloned().collect()
    }

    async fn poll_rows(&self) -> Result<(), String> {
        let quotas = self.open_quotas();
        if quotas.is_empty() {
            return Ok(());
        }
        let departed = Instant::now();
        let mut rows = self.rows.leader_rows(&quotas).await?;
        let arrived = Instant::now();
        let mut seats = self.lock_views();
        for quota in quotas {
            if let Some(seat) = seats.get_mut(&quota) {
                seat.record_row(rows.remove(&quota), departed, arrived);
            }
        }
        Ok(())
    }

    async fn probe_connections(&self) {
        for (quota, outcome) in self.store.probe(&self.open_quotas()).await {
            let now = Instant::now();
            let mut seats = self.lock_views();
            let Some(seat) = seats.get_mut(&quota) else { continue };
            let news = match outcome {
                Ok(link) => seat.record_reachable(link, now),
                Err(error) => seat.record_unavailable(&error, now),
            };
            if news {
                self.poll_now.notify_one();
            }
        }
    }

    /// Drops the links that lead elsewhere by now. Until another one has been probed, the row names another store than the
    /// seat's link leads to, and so nobody grants, however long this takes.
    async fn drop_stale_connections(&self) {
        let now = Instant::now();
        let astray = |(quota, seat): (&ProviderName, &LeadershipView)| {
            let link = seat.connection().filter(|_| seat.decide(now).reconnect)?;
            Some((quota.clone(), link.clone()))
        };
        let astray: Vec<(ProviderName, StoreConnection)> = self.lock_views().iter().filter_map(astray).collect();
        let unlink = async |(quota, link): &(ProviderName, StoreConnection)| {
            if !self.store.previous_store_has_ended() {
                tracing::info!(%quota, "another limiter store grants; the link is made anew");
            }
            self.store.disconnect(quota, link).await;
        };
        join_all(astray.iter().map(unlink)).await;
    }

    /// Takes rows as the rules say, and has links dropped.
    async fn apply_decisions(&self) {
        let now = Instant::now();
        let takes: Vec<(ProviderName, Takeover)> = self
            .lock_views()
            .iter()
            .filter_map(|(quota, seat)| {
                let decision = seat.decide(now);
                if decision.leader == Leader::NoLeader(NoLeaderCause::TwoStores)
                    && !self.store.previous_store_has_ended()
                {
                    tracing::error!(%quota, "{}", NoLeaderCause::TwoStores);
                }
                if decision.reconnect {
                    self.probe_now.notify_one();
                }
                Some((quota.clone(), decision.takeover?))
            })
            .collect();
        join_all(takes.into_iter().map(|(quota, take)| self.take_over(quota, take))).await;
    }

    /// Says of the stores' clocks what is to be said. Whether it was heard shows the next poll.
    async fn record_attestations(&self) {
        let due = |(quota, seat): (&ProviderName, &LeadershipView)| {
            let (term, word) = seat.attestations.attestation_due(&seat.term_run_id()?)?;
            Some((quota.clone(), term, word))
        };
        let due: Vec<_> = self.lock_views().iter().filter_map(due).collect();
        let say = async |(quota, term, word): (ProviderName, i64, ClockAttestation)| {
            if let Err(error) = self.rows.record_attestation(&quota, term, &word).await {
                tracing::debug!(%quota, error, "the word on the limiter store's clock could not be noted");
            }
        };
        join_all(due.into_iter().map(say)).await;
    }

    async fn take_over(&self, quota: ProviderName, Takeover { from, to }: Takeover) {
        let departed = Instant::now();
        match self.rows.take_over(&quota, from.as_deref(), &to).await {
            Ok(row) => {
                let (holder, term) = (row.holder.clone(), row.term);
                if holder == to && from.is_none() {
                    tracing::info!(%quota, holder, term, "the first holder grants from now on");
                } else if holder == to && self.store.previous_store_has_ended() {
                    tracing::info!(%quota, from, holder, term, "this run grants from now on, once no permit of the former one can start");
                } else if holder == to {
                    tracing::warn!(%quota, from, holder, term, "another holder grants from now on");
                } else {
                    tracing::info!(%quota, holder, term, "somebody else was faster to say who grants");
                }
                if let Some(seat) = self.lock_views().get_mut(&quota) {
                    seat.record_row(Some(row), departed, Instant::now());
                }
            }
            Err(error) => tracing::warn!(%quota, to, error, "the row that says who grants could not be changed"),
        }
    }
}
