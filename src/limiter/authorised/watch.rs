//! The watch over rows and links: polls both, takes the row when the rules say so, drops links that lead elsewhere.
//!
//! Refuses to let the rows wait for the store: one that does not answer must not make the row stale. Refuses to change a
//! row that it has not just read.

use std::convert::Infallible;

use futures_util::future::join_all;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::Authorised;
use super::seat::Seat;
use crate::domain::clock_witness::Word;
use crate::domain::provider::ProviderName;
use crate::limiter::Linked;
use crate::limiter::authority::{Cause, Take, Verdict};

pub(super) async fn until(authorised: &Authorised, stop: CancellationToken) {
    let both = async { tokio::join!(rows(authorised), links(authorised)) };
    tokio::select! {
        () = stop.cancelled() => {}
        (never, _) = both => match never {},
    }
}

async fn rows(authorised: &Authorised) -> Infallible {
    let mut tick = interval(authorised.timing.poll);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut away = false;
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = authorised.look.notified() => {}
        }
        match authorised.poll_rows().await {
            Ok(()) => {
                away = false;
                authorised.act().await;
                authorised.say_clocks().await;
            }
            Err(error) if !away => {
                away = true;
                tracing::warn!(error, "the database cannot be asked who grants; permits end soon");
            }
            Err(_) => {}
        }
    }
}

async fn links(authorised: &Authorised) -> Infallible {
    let mut tick = interval(authorised.timing.poll);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = authorised.probe.notified() => {}
        }
        authorised.drop_links().await;
        authorised.probe_links().await;
    }
}

impl Authorised {
    fn open_quotas(&self) -> Vec<ProviderName> {
        self.seats().keys().cloned().collect()
    }

    async fn poll_rows(&self) -> Result<(), String> {
        let quotas = self.open_quotas();
        if quotas.is_empty() {
            return Ok(());
        }
        let departed = Instant::now();
        let mut rows = self.rows.authority(&quotas).await?;
        let arrived = Instant::now();
        let mut seats = self.seats();
        for quota in quotas {
            if let Some(seat) = seats.get_mut(&quota) {
                seat.told(rows.remove(&quota), departed, arrived);
            }
        }
        Ok(())
    }

    async fn probe_links(&self) {
        for (quota, outcome) in self.store.probe(&self.open_quotas()).await {
            let now = Instant::now();
            let mut seats = self.seats();
            let Some(seat) = seats.get_mut(&quota) else { continue };
            let news = match outcome {
                Ok(link) => seat.reachable(link, now),
                Err(error) => seat.away(&error, now),
            };
            if news {
                self.look.notify_one();
            }
        }
    }

    /// Drops the links that lead elsewhere by now. Until another one has been probed, the row names another store than the
    /// seat's link leads to, and so nobody grants, however long this takes.
    async fn drop_links(&self) {
        let now = Instant::now();
        let astray = |(quota, seat): (&ProviderName, &Seat)| {
            let link = seat.link().filter(|_| seat.decide(now).reconnect)?;
            Some((quota.clone(), link.clone()))
        };
        let astray: Vec<(ProviderName, Linked)> = self.seats().iter().filter_map(astray).collect();
        let unlink = async |(quota, link): &(ProviderName, Linked)| {
            if !self.store.succeeds_others() {
                tracing::info!(%quota, "another limiter store grants; the link is made anew");
            }
            self.store.unlink(quota, link).await;
        };
        join_all(astray.iter().map(unlink)).await;
    }

    /// Takes rows as the rules say, and has links dropped.
    async fn act(&self) {
        let now = Instant::now();
        let takes: Vec<(ProviderName, Take)> = self
            .seats()
            .iter()
            .filter_map(|(quota, seat)| {
                let decision = seat.decide(now);
                if decision.verdict == Verdict::Nobody(Cause::TwoStores) && !self.store.succeeds_others() {
                    tracing::error!(%quota, "{}", Cause::TwoStores);
                }
                if decision.reconnect {
                    self.probe.notify_one();
                }
                Some((quota.clone(), decision.take?))
            })
            .collect();
        join_all(takes.into_iter().map(|(quota, take)| self.take(quota, take))).await;
    }

    /// Says of the stores' clocks what is to be said. Whether it was heard shows the next poll.
    async fn say_clocks(&self) {
        let due = |(quota, seat): (&ProviderName, &Seat)| {
            let (term, word) = seat.clocks.word_due(&seat.identity()?)?;
            Some((quota.clone(), term, word))
        };
        let due: Vec<_> = self.seats().iter().filter_map(due).collect();
        let say = async |(quota, term, word): (ProviderName, i64, Word)| {
            if let Err(error) = self.rows.note_clock(&quota, term, &word).await {
                tracing::debug!(%quota, error, "the word on the limiter store's clock could not be noted");
            }
        };
        join_all(due.into_iter().map(say)).await;
    }

    async fn take(&self, quota: ProviderName, Take { from, to }: Take) {
        let departed = Instant::now();
        match self.rows.take(&quota, from.as_deref(), &to).await {
            Ok(row) => {
                let (holder, term) = (row.holder.clone(), row.term);
                if holder == to && from.is_none() {
                    tracing::info!(%quota, holder, term, "the first holder grants from now on");
                } else if holder == to && self.store.succeeds_others() {
                    tracing::info!(%quota, from, holder, term, "this run grants from now on, once no permit of the former one can start");
                } else if holder == to {
                    tracing::warn!(%quota, from, holder, term, "another holder grants from now on");
                } else {
                    tracing::info!(%quota, holder, term, "somebody else was faster to say who grants");
                }
                if let Some(seat) = self.seats().get_mut(&quota) {
                    seat.told(Some(row), departed, Instant::now());
                }
            }
            Err(error) => tracing::warn!(%quota, to, error, "the row that says who grants could not be changed"),
        }
    }
}
