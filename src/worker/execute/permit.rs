//! A permit for one request: waited for in hand as long as the mode says, and not longer than the lane may send.
//!
//! Refuses to send: what becomes of a refusal is a wait, and the job is put down for it.

use std::time::Duration;

use tokio::time::Instant;
use tracing::Span;

use super::record::{give_back, park};
use super::{JobInHand, LaneParts};
use crate::domain::decision::CallKind;
use crate::domain::disposition::COST_WAIT;
use crate::domain::explain::parked;
use crate::domain::job::{Job, JobId};
use crate::domain::provider::{Mode, Provider};
use crate::fleet::report::By;
use crate::limiter::gate::{Ask, Concerns, GateRefusal, Grant, Permit, RefusedBy};
use crate::queue::DELAY_STEPS;
use crate::telemetry::spans;
use crate::worker::intake::End;
use crate::worker::lane::patience;
use crate::worker::meter::Refused;

pub(super) enum Pass {
    Granted(Permit),
    Refused(GateRefusal),
    /// The lane must not send.
    Held(String),
    Stopping,
}

/// What a job asks the gate for.
pub(super) fn ask(job: &Job, kind: CallKind, provider: &Provider, delivered_at: Instant) -> Ask {
    Ask {
        // A job's cost is what its charge uses.
        cost: if kind == CallKind::Charge { u32::from(job.cost) } else { 1 },
        kind,
        priority: job.priority,
        account: job.account.as_ref().map(|account| account.as_str().to_owned()),
        reference: job.reference.clone(),
        wait_until: match provider.mode {
            Mode::Blocking => delivered_at + patience(provider),
            // What no delay queue can hold is slept in hand.
            Mode::Requeue => Instant::now() + DELAY_STEPS[0],
        },
    }
}

pub(super) async fn permit(lane: &LaneParts, job: JobId, ask: Ask) -> Pass {
    let (asked_at, _waiting) = (Instant::now(), lane.meter.waits_for_permit());
    let mut sending = lane.pauses.watch_sending();
    let mut settings = lane.settings.clone();
    settings.mark_unchanged();
    let asked = lane.gate.permit_for(Some(job), ask);
    tokio::pin!(asked);
    loop {
        sending.mark_unchanged();
        if let Some(pause) = lane.pauses.sending_paused() {
            return Pass::Held(pause.cause);
        }
        if settings.borrow_and_update().provider.paused {
            return Pass::Held("the provider is paused".to_owned());
        }
        tokio::select! {
            grant = &mut asked => return match grant {
                Grant::Granted(permit) => {
                    let usable_at = permit.start_at.max(Instant::now());
                    lane.meter.permit_waited(usable_at.saturating_duration_since(asked_at));
                    Pass::Granted(permit)
                }
                Grant::Refused(GateRefusal { by: RefusedBy::Stopping, .. }) if lane.stop.is_cancelled() => Pass::Stopping,
                // Handed back to a lane that still takes, it would be here again at once.
                Grant::Refused(GateRefusal { by: RefusedBy::Stopping, .. }) => {
                    Pass::Held("the quota is not open in this worker".to_owned())
                }
                Grant::Refused(refusal) => Pass::Refused(refusal),
            },
            _ = sending.changed() => {}
            _ = settings.changed() => {}
            () = lane.stop.cancelled() => return Pass::Stopping,
        }
    }
}

pub(super) async fn refused(lane: &LaneParts, job: &JobInHand, refusal: &GateRefusal) -> End {
    let cause = match &refusal.by {
        RefusedBy::TooCostly { limit, at_once } => {
            let reason = parked::by_cost(limit, job.job.cost, *at_once);
            return park(lane, job, cost_wait(lane, job), (reason_of(&refusal.by), &reason)).await;
        }
        RefusedBy::Limit(name) => parked::by_limit(name),
        RefusedBy::Blocked { account } => parked::by_rule(account),
        RefusedBy::Cold => parked::COLD.to_owned(),
        RefusedBy::NeedsHistory => parked::NEEDS_HISTORY.to_owned(),
        RefusedBy::Paused => parked::PAUSED.to_owned(),
        RefusedBy::StoreAway(_) => parked::STORE_AWAY.to_owned(),
        RefusedBy::StaleSettings => parked::STALE_SETTINGS.to_owned(),
        RefusedBy::Stopping => return give_back(lane, job).await,
    };
    match refusal.concerns {
        // It says nothing of the jobs behind it.
        Concerns::Itself => {}
        Concerns::Charges => lane.pauses.stop_taking_charges(refusal.retry_after, held_by(&refusal.by), &cause),
        Concerns::All => lane.pauses.stop_taking(refusal.retry_after, held_by(&refusal.by), &cause),
    }
    park(lane, job, refusal.retry_after, (reason_of(&refusal.by), &cause)).await
}

/// Until a raised limit ends it, the job is looked at again before its age ends it.
fn cost_wait(lane: &LaneParts, job: &JobInHand) -> Duration {
    let age = job.claimed.age + job.claimed_at.elapsed();
    let left = lane.settings.borrow().provider.max_age.saturating_sub(age);
    left.clamp(DELAY_STEPS[0], COST_WAIT)
}

/// Stable word for metrics.
fn reason_of(by: &RefusedBy) -> &'static str {
    match by {
        RefusedBy::Limit(_) => "limit",
        RefusedBy::Cold => "cold",
        RefusedBy::NeedsHistory => "needs_history",
        RefusedBy::Paused => "paused_by_provider",
        RefusedBy::StoreAway(_) => "store_away",
        RefusedBy::StaleSettings => "stale_settings",
        RefusedBy::TooCostly { .. } => "cost_exceeds_limit",
        RefusedBy::Blocked { .. } => "blocked",
        RefusedBy::Stopping => "stopping",
    }
}

/// Counts a refusal, notes it on the span of the wait, and says it to a person: never whose account it was.
pub(super) fn tell_refused((lane, provider): (&LaneParts, &Provider), refusal: &GateRefusal, waiting: &Span) {
    let reason = reason_of(&refusal.by);
    let (limit, by) = match &refusal.by {
        RefusedBy::Limit(name) => {
            let limit = provider.limits.iter().find(|limit| limit.name == *name);
            let allows = limit.map(|limit| format!(" ({})", limit.rate)).unwrap_or_default();
            (Some(name.clone()), format!("{name}{allows}"))
        }
        RefusedBy::Cold => (None, "a limiter that has lost its state".to_owned()),
        RefusedBy::NeedsHistory => (None, "a limit whose usage is being read from the ledger".to_owned()),
        RefusedBy::Paused => (None, "a pause that the provider asked for".to_owned()),
        RefusedBy::StoreAway(_) => (None, "a limiter store that is away".to_owned()),
        RefusedBy::StaleSettings => (None, "settings that are not loaded yet".to_owned()),
        RefusedBy::TooCostly { limit, at_once } => {
            (Some(limit.clone()), format!("its cost, above the {at_once} at once of {limit}"))
        }
        RefusedBy::Blocked { .. } => (None, "a rule on its account".to_owned()),
        RefusedBy::Stopping => (None, "a gate that is closing".to_owned()),
    };
    spans::refused(waiting, reason, limit.as_deref());
    let free = if refusal.exact { "free in" } else { "free no sooner than in" };
    let words = format!("refused by {by}, {free} {:.1} s", refusal.retry_after.as_secs_f64());
    lane.meter.refused(Refused { reason, limit }, words);
}

/// What a refusal makes the lane rest for, as reports name it.
pub(in crate::worker) fn held_by(refused: &RefusedBy) -> By {
    match refused {
        RefusedBy::Limit(_) => By::Limit,
        RefusedBy::Cold | RefusedBy::NeedsHistory => By::Cold,
        RefusedBy::Paused => By::Provider,
        RefusedBy::StoreAway(_) => By::Engine,
        RefusedBy::StaleSettings | RefusedBy::TooCostly { .. } | RefusedBy::Blocked { .. } | RefusedBy::Stopping => {
            By::Other
        }
    }
}
