//! The resending of payments at a steady rate, for `jobs resolve --as resend` and `dlq replay`.
//!
//! It does not start while RabbitMQ is unreachable, so that the ledger stays unchanged.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::super::connect::Services;
use super::super::{CommandError, Console, Exit, connect, provider};
use super::bulk::{BulkReport, JobActionResult};
use super::ids::IdSource;
use crate::config::Config;
use crate::domain::job::JobId;
use crate::ledger::database::Database;
use crate::ledger::operator::{Actor, JobResolution};
use crate::worker::resend::Resender;

/// The rate, and whether it is a dry run.
#[derive(Debug, clap::Args)]
pub struct ResendArgs {
    /// Payments to send again per second.
    #[arg(long, default_value = "50", value_name = "PER_SECOND", value_parser = parse_resend_rate)]
    rate: NonZeroU32,
    /// Show how many payments would be changed, and change nothing.
    #[arg(long)]
    pub dry_run: bool,
}

fn parse_resend_rate(text: &str) -> Result<NonZeroU32, String> {
    text.parse().map_err(|_| "write a whole number of payments per second, 1 or more".to_owned())
}

/// The resolution, the actor and the rate of a resend.
pub struct ResendRequest<'a> {
    /// [`JobResolution::Resend`] or [`JobResolution::Replay`].
    pub resolution: JobResolution,
    pub actor: Actor,
    pub args: &'a ResendArgs,
    pub json: bool,
}

/// Sends every payment of the source again.
///
/// # Errors
/// When a backend is unreachable before anything was changed, or the output is closed.
pub async fn run(
    request: ResendRequest<'_>,
    mut source: IdSource<'_>,
    ledger: &Database,
    config: &Config,
    services: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let ResendRequest { resolution, actor, args, json } = request;
    let providers = provider::names(&services.ledger(config).await?).await?;
    let queue = services.queue(config).await?;
    if args.dry_run {
        queue.ping().await?;
    } else {
        // Safe: the ledger has these payments, and the sweeper republishes lost messages.
        for (name, why) in connect::declare_lanes(queue.as_ref(), &providers, &providers).await? {
            console.message(&format!("warning: {name}: {why}"))?;
        }
    }
    let report = BulkReport::new(&resolution, args.dry_run, json);
    let card_numbers = config.worker.card_numbers;
    let sender = Resender { ledger, queue: queue.as_ref(), providers: &providers, card_numbers, resolution, actor };
    let (ticks, ended) = (Mutex::new(send_interval(args.rate)), AtomicBool::new(false));
    let resend = |id: JobId| {
        let (sender, ticks, ended) = (&sender, &ticks, &ended);
        async move {
            if args.dry_run {
                return match sender.prepare(&id).await {
                    Ok((reloaded, _)) => JobActionResult::WouldChange(reloaded.job.provider.to_string()),
                    Err(error) => error.into(),
                };
            }
            ticks.lock().await.tick().await;
            if ended.load(Ordering::Relaxed) {
                return JobActionResult::Skipped;
            }
            let outcome = sender.send(&id).await.map_or_else(JobActionResult::from, |()| JobActionResult::Done);
            ended.fetch_or(outcome.aborts_batch(), Ordering::Relaxed);
            outcome
        }
    };
    report.run_on_all(&mut source, resend, console).await
}

/// A steady interval: a late tick delays the next ones instead of a burst.
fn send_interval(rate: NonZeroU32) -> Interval {
    let mut ticks = interval(Duration::from_secs(1) / rate.get());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
