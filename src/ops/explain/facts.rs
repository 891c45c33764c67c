//! What is known of one payment, gathered: ledger, settings, queue, limiter, and the lanes and gates of a running process.
//!
//! Refuses to be half an answer: an engine that does not answer in time is told as such, and the rest is told.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::unrecorded::{self, Sought};
use crate::domain::decision::PastUse;
use crate::domain::explain::facts::{
    Before, BucketPlace, ByHand, Facts, Hand, JobFacts, LaneFacts, LimitUsed, LimiterFacts, Place, Refused, Refuser,
    Rejected, Request, RowFacts, Waited,
};
use crate::domain::explain::turn::Past;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::EpochMs;
use crate::ledger::LedgerError;
use crate::ledger::operator::{At, JobStory, Operator};
use crate::ledger::surroundings::Surroundings;
use crate::limiter::Limiter;
use crate::limiter::gate::RefusedBy;
use crate::ops::Lookout;
use crate::queue::Queue;
use crate::worker::deployment::Progress;
use crate::worker::pauses::LaneState;
use crate::worker::quotas::quota_spec;
use crate::worker::settings_watch::Known;

/// How long a broker, a gate or a limiter's store is waited for.
pub(super) const LOOK_MAX: Duration = Duration::from_secs(2);

/// What is asked. Without a process its lanes and gates are not known.
pub struct Sources<'a> {
    pub operator: &'a dyn Operator,
    pub known: &'a Known,
    pub queue: Option<&'a dyn Queue>,
    /// `None`: it is in another process.
    pub limiter: Option<&'a dyn Limiter>,
    pub process: Option<&'a Progress>,
    /// What all workers report, for the lanes' backlogs.
    pub lookout: Option<&'a Lookout>,
}

/// Everything that is known of one id, as it is now.
///
/// # Errors
/// As the ledger's.
pub async fn facts(sources: &Sources<'_>, id: &JobId) -> Result<Facts, LedgerError> {
    let story = sources.operator.show(id).await?;
    let sought = match &story {
        Some(_) => Sought::default(),
        None => unrecorded::sought(sources, id).await,
    };
    let provider = story.as_ref().map(|story| story.line.provider.as_str());
    let name = provider.and_then(|name| ProviderName::new(name).ok()).or(sought.lane);
    let row = name.as_ref().map(|name| row(sources.known, name)).unwrap_or_default();
    let quota = row.provider.as_ref().map(|provider| provider.quota.clone());
    let sharing: Vec<ProviderName> = match &quota {
        Some(quota) => {
            let rows = sources.known.providers.values().filter(|row| row.quota == *quota);
            rows.map(|row| row.name.clone()).collect()
        }
        None => name.iter().cloned().collect(),
    };
    let around = sources.operator.surroundings(id, &sharing).await?;
    let hand = match sought.hand {
        Some(hand) => hand,
        None => hand(sources.process, name.as_ref(), story.as_ref(), &around, id).await,
    };
    let ready = match (sources.queue, &name) {
        (Some(queue), Some(name)) => timeout(LOOK_MAX, queue.depth(name)).await.ok().and_then(Result::ok).flatten(),
        _ => None,
    };
    let account = match (&story, &sought.job) {
        (Some(story), _) => story.line.account.as_deref(),
        (None, job) => job.as_ref().and_then(|job| job.account.as_deref()),
    };
    let mut limiter = match (&row.spec, &name) {
        (Some(spec), Some(_)) => limiter(sources, spec, account, around.hold).await,
        _ => LimiterFacts::default(),
    };
    let gate = sources.process.and_then(|process| process.gates.get(name.as_ref()?).cloned());
    limiter.standing = gate.and_then(|gate| {
        let standing = gate.view().borrow().standing.clone();
        standing.map(|(by, until)| refused(&by, until, false))
    });
    let lane = match (sources.process, &name) {
        (Some(process), Some(name)) => lane(process, name),
        _ => LaneFacts::NotAsked,
    };
    let mut before = before(&around, ready);
    if let Some(in_queue) = sought.before {
        let jobs = in_queue + around.in_hand;
        before = Before { jobs, cost: jobs, ..before };
    }
    let now = EpochMs(around.now.0);
    Ok(Facts {
        now,
        id: id.as_str().to_owned(),
        rejected: around.rejected.iter().map(rejected).collect(),
        before,
        unrecorded: sought.job.map(|job| unrecorded::since(job, sought.ready_in, now)),
        lanes: sought.lanes,
        job: story.map(|story| job(story, &around)),
        row,
        lane,
        hand,
        limiter,
    })
}

fn row(known: &Known, name: &ProviderName) -> RowFacts {
    let provider = known.providers.get(name).cloned();
    let bad = known.bad.iter().find(|bad| bad.provider == name.as_str());
    let spec = provider.as_ref().and_then(|row| quota_spec(known, &row.quota)).map(Arc::new);
    RowFacts { provider, problems: bad.map(|bad| bad.problems.clone()).unwrap_or_default(), spec }
}

fn lane(process: &Progress, name: &ProviderName) -> LaneFacts {
    let left = |until: Instant| until.saturating_duration_since(Instant::now());
    let pauses = process.lanes.get(name);
    // What it has in hand is sent all the same.
    let still_sends = pauses.is_some_and(|pauses| pauses.is_closed_by_broker() && pauses.sending_paused().is_none());
    match pauses.map(|pauses| pauses.state()) {
        None => LaneFacts::Absent,
        Some(LaneState::Stopped(pause)) if still_sends => {
            LaneFacts::Resting { cause: pause.cause, ends_in: left(pause.until) }
        }
        Some(LaneState::Running) => LaneFacts::Running,
        Some(LaneState::Resting(pause)) => LaneFacts::Resting { cause: pause.cause, ends_in: left(pause.until) },
        Some(LaneState::Stopped(pause)) => LaneFacts::Stopped { cause: pause.cause, ends_in: left(pause.until) },
        Some(LaneState::Probing { cause }) => LaneFacts::Probing { cause },
    }
}

async fn hand(
    process: Option<&Progress>,
    name: Option<&ProviderName>,
    story: Option<&JobStory>,
    around: &Surroundings,
    id: &JobId,
) -> Hand {
    let Some(worker) = story.and_then(|story| story.lease_owner.clone()) else { return Hand::Nobody };
    if let Some(process) = process.filter(|process| process.in_hand.has(id)) {
        let here = match name {
            Some(name) => place_in(process, name, &worker, id).await,
            None => None,
        };
        return here.unwrap_or(Hand::Here { worker, place: None });
    }
    let lives = story.and_then(|story| story.lease_until).is_some_and(|until| until > around.now);
    if lives { Hand::Elsewhere { worker } } else { Hand::Nobody }
}

/// Where this process's lane has the job: in its bucket, or in its gate's line.
pub(super) async fn place_in(process: &Progress, name: &ProviderName, worker: &str, id: &JobId) -> Option<Hand> {
    let (pool, gate) = (process.pools.get(name), process.gates.get(name));
    if let Some(pool) = pool
        && let Some(place) = timeout(LOOK_MAX, pool.place_of(id.clone())).await.ok().flatten()
    {
        let at_the_gate = gate.map_or(0, |gate| gate.view().borrow().waiting);
        let before = u64::from(place.before) + u64::try_from(at_the_gate).unwrap_or(u64::MAX);
        let bucket = BucketPlace { before, leaves_in: place.leaves_in };
        return Some(Hand::InBucket { worker: worker.to_owned(), bucket });
    }
    let place = timeout(LOOK_MAX, gate?.place_of(id.clone())).await.ok().flatten()?;
    let place = Place {
        before: place.before,
        cost_before: place.cost_before,
        refused: place.refused.map(|(by, until, exact)| refused(&by, until, exact)),
        of_its_own: place.of_its_own,
    };
    Some(Hand::Here { worker: worker.to_owned(), place: Some(place) })
}

fn refused(by: &RefusedBy, until: Instant, exact: bool) -> Refused {
    let by = match by {
        RefusedBy::Limit(name) => Refuser::Limit(name.clone()),
        RefusedBy::Cold => Refuser::Cold,
        RefusedBy::NeedsHistory => Refuser::NeedsHistory,
        RefusedBy::Paused => Refuser::Paused,
        RefusedBy::StoreAway(why) => Refuser::Away(why.clone()),
        RefusedBy::StaleSettings => Refuser::StaleSettings,
        RefusedBy::TooCostly { .. } => Refuser::TooCostly,
        RefusedBy::Blocked { .. } => Refuser::Blocked,
        RefusedBy::Stopping => Refuser::Stopping,
    };
    Refused { by, wait: until.saturating_duration_since(Instant::now()), exact }
}

/// What the limiter says, and what the ledger remembers of the quota's use.
async fn limiter(
    sources: &Sources<'_>,
    spec: &QuotaSpec,
    account: Option<&str>,
    hold: Option<Duration>,
) -> LimiterFacts {
    let mut facts = LimiterFacts::default();
    let subjects = spec.subjects(account, None).unwrap_or_default();
    if let Some(limiter) = sources.limiter {
        match timeout(LOOK_MAX, limiter.peek(spec, subjects.first())).await {
            Ok(Ok(uses)) => {
                let enforced = uses.into_iter().filter(|limit| !limit.shadow);
                let used =
                    enforced.map(|it| LimitUsed { name: it.name, used: it.used, capacity: u64::from(it.capacity) });
                facts.uses = used.collect();
            }
            Ok(Err(error)) => facts.away = Some(error.to_string()),
            Err(_) => facts.away = Some("no answer in time".to_owned()),
        }
    }
    match timeout(LOOK_MAX, sources.operator.recent_uses(&spec.quota, spec.lookback())).await {
        Err(_) => tracing::debug!("no turn can be reckoned: the ledger takes long to tell what was used"),
        Ok(Ok(uses)) => {
            let ended = uses.ended.into_iter().map(|(age, cost)| PastUse { age, cost }).collect();
            facts.past = Some(Past { ended, open: uses.open, hold: hold.unwrap_or_default() });
        }
        Ok(Err(error)) => tracing::debug!(%error, "no turn can be reckoned: the ledger cannot tell what was used"),
    }
    facts
}

/// Those before it by the ledger, and messages in the queue that the ledger does not know yet.
fn before(around: &Surroundings, ready: Option<u64>) -> Before {
    let unrecorded = ready.unwrap_or_default().saturating_sub(around.due);
    Before {
        jobs: around.before + unrecorded,
        cost: around.cost_before + unrecorded,
        in_hand: around.in_hand,
        ready,
        workers: around.workers,
    }
}

fn rejected(rejection: &crate::ledger::surroundings::Rejection) -> Rejected {
    let crate::ledger::surroundings::Rejection { at, lane, reason, detail } = rejection.clone();
    Rejected { at: EpochMs(at.0), lane, reason, detail }
}

fn job(story: JobStory, around: &Surroundings) -> JobFacts {
    let ms = |at: At| EpochMs(at.0);
    let request = |it: &crate::ledger::operator::AttemptLine| Request {
        number: it.number,
        began_at: ms(it.began_at),
        ended_at: it.ended_at.map(ms),
        outcome: it.outcome.clone(),
    };
    let event = story.events.iter().rev().find(|event| event.state == story.line.state);
    let by_hand = story
        .audit
        .last()
        .map(|it| ByHand { who: it.os_user.clone().unwrap_or_else(|| it.who.clone()), because: it.because.clone() });
    JobFacts {
        created_at: ms(story.line.created_at),
        updated_at: ms(story.line.updated_at),
        wake_at: ms(story.line.wake_at),
        not_before: story.not_before.map(ms),
        expires_at: story.expires_at.map(ms),
        revived_at: story.revived_at.map(ms),
        first_sent_at: story.first_sent_at.map(ms),
        unknown_since: around.own.unknown_since.map(ms),
        cost: story.cost,
        attempts: story.line.attempts,
        lookups: around.own.lookups,
        resend: around.own.resend,
        lost_holders: around.own.lost_holders,
        requests: story.attempts.iter().map(request).collect(),
        waited: story.waited.map(|it| Waited { reason: it.reason, since: ms(it.since), request: it.request }),
        event: event.map(|event| event.published_at.map(ms)),
        by_hand,
        provider: story.line.provider,
        state: story.line.state,
        reason: story.line.reason,
        reference: story.line.provider_reference,
        account: story.line.account,
    }
}
