//! Sending payments again, at a steady rate: what `jobs resolve --as resend` and `dlq replay` have in common.
//!
//! Refuses to begin while the broker is away: then the ledger stays as it is.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::super::connect::Services;
use super::super::{CommandError, Console, Exit, lane_declaration, provider};
use super::bulk::{BulkReport, JobActionResult};
use super::ids::IdSource;
use crate::config::Config;
use crate::domain::job::JobId;
use crate::ledger::operator::{Actor, JobResolution, Operator};
use crate::worker::resend::Resender;

/// How fast, or whether at all.
#[derive(Debug, clap::Args)]
pub struct ResendArgs {
    /// Payments sent again per second.
    #[arg(long, default_value = "50", value_name = "PER_SECOND", value_parser = parse_resend_rate)]
    rate: NonZeroU32,
    /// Say how many would be changed, and change nothing.
    #[arg(long)]
    pub dry_run: bool,
}

fn parse_resend_rate(text: &str) -> Result<NonZeroU32, String> {
    text.parse().map_err(|_| "write a whole number of payments per second, 1 or more".to_owned())
}

/// What to do, for whom, how fast.
pub struct ResendRequest<'a> {
    /// [`Verdict::Resend`] or [`Verdict::Replay`].
    pub resolution: JobResolution,
    pub actor: Actor,
    pub args: &'a ResendArgs,
    pub json: bool,
}

/// Sends every payment of the source again.
///
/// # Errors
/// When an engine is away before anything was changed, or the output is closed.
pub async fn run(
    order: ResendRequest<'_>,
    mut source: IdSource<'_>,
    operator: &dyn Operator,
    config: &Config,
    engines: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let ResendRequest { resolution: verdict, actor: by, args: pace, json } = order;
    let providers = provider::names(engines.settings(config).await?.as_ref()).await?;
    let queue = engines.queue(config).await?;
    if pace.dry_run {
        queue.ping().await?;
    } else {
        // Safe even so: the ledger has these payments, and the sweeper finds those whose messages are lost.
        for (name, why) in lane_declaration::declare_lanes(queue.as_ref(), &providers, &providers).await? {
            console.message(&format!("warning: {name}: {why}"))?;
        }
    }
    let report = BulkReport::new(&verdict, pace.dry_run, json);
    let card_numbers = config.worker.card_numbers;
    let sender = Resender {
        operator,
        queue: queue.as_ref(),
        providers: &providers,
        card_numbers,
        resolution: verdict,
        actor: by,
    };
    let (turns, ended) = (Mutex::new(send_interval(pace.rate)), AtomicBool::new(false));
    let one = |id: JobId| {
        let (sender, turns, ended) = (&sender, &turns, &ended);
        async move {
            if pace.dry_run {
                return match sender.prepare(&id).await {
                    Ok((recalled, _)) => JobActionResult::WouldChange(recalled.job.provider.to_string()),
                    Err(error) => error.into(),
                };
            }
            turns.lock().await.tick().await;
            if ended.load(Ordering::Relaxed) {
                return JobActionResult::Skipped;
            }
            let outcome = sender.send(&id).await.map_or_else(JobActionResult::from, |()| JobActionResult::Done);
            ended.fetch_or(outcome.aborts_batch(), Ordering::Relaxed);
            outcome
        }
    };
    report.run_on_all(&mut source, one, console).await
}

/// Never faster to make up for what was slow.
fn send_interval(rate: NonZeroU32) -> Interval {
    let mut turns = interval(Duration::from_secs(1) / rate.get());
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    turns
}
