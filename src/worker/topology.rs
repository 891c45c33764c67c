//! Keeps the broker's side of every provider declared, beside the lanes and never in their way, and again where it is missed.
//!
//! Refuses to give up: a declaration that the broker refuses is said and tried again, and one provider's does not stop
//! the others', nor the worker from being ready for them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::WorkerContext;
use super::settings_sync::LoadedSettings;
use super::supervisor::WorkerStatus;
use crate::domain::provider::ProviderName;
use crate::queue::{OutgoingMessage, QueueError, TopologyProblem};

const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// How often all that was declared is looked at.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// What else than a person may have deleted a queue.
const POLICY_HINT: &str =
    "unless a person did it, look for a policy with `expires` (rabbitmqctl list_policies; docs/topology.md)";

/// Declares each provider's topology once it is known, until the worker stops. The worker is ready when all that it knew
/// at its start is declared, but for what the broker refuses to some of them: their lanes say so (`lane::open`).
pub async fn keep_declared(
    worker: WorkerContext,
    known: watch::Receiver<Arc<LoadedSettings>>,
    progress: watch::Sender<WorkerStatus>,
) {
    let stop = worker.stop.clone();
    // A declaration that is under way is dropped: one for each provider, by a broker that does not answer, would hold up the end.
    stop.run_until_cancelled(declare_all(worker, known, progress)).await;
}

async fn declare_all(
    worker: WorkerContext,
    mut known: watch::Receiver<Arc<LoadedSettings>>,
    progress: watch::Sender<WorkerStatus>,
) {
    let mut declared: BTreeSet<ProviderName> = BTreeSet::new();
    let (mut said, mut unfit) = (BTreeSet::new(), BTreeSet::new());
    let mut look_at = Instant::now() + CHECK_INTERVAL;
    loop {
        if Instant::now() >= look_at {
            look_at = Instant::now() + CHECK_INTERVAL;
            check_declared(&worker, &mut declared, &mut unfit).await;
        }
        let names: Vec<ProviderName> = known.borrow_and_update().providers.keys().cloned().collect();
        let (mut missing, mut refused) = (false, BTreeSet::new());
        // What all lanes share must be there even before the first provider is.
        let shared = names.is_empty() && worker.backends.queue.declare(&[]).await.is_err();
        for name in names.iter().filter(|name| !declared.contains(*name)).cloned().collect::<Vec<_>>() {
            match worker.backends.queue.declare(std::slice::from_ref(&name)).await {
                Ok(()) => {
                    declared.insert(name);
                }
                Err(error) => {
                    missing = true;
                    if matches!(error, QueueError::Refused(_)) {
                        refused.insert(name.clone());
                    }
                    if said.insert(name.clone()) {
                        tracing::error!(provider = %name, %error, "queues not declared, will try again");
                    }
                }
            }
        }
        if is_ready(&names, &declared, &refused) && !shared {
            progress.send_if_modified(|progress| !std::mem::replace(&mut progress.ready, true));
        }
        tokio::select! {
            changed = known.changed() => if changed.is_err() { return },
            () = sleep(RETRY_INTERVAL), if missing || shared => {}
            () = sleep_until(look_at) => {}
        }
    }
}

/// Looks at what was declared. Where something is gone all is declared again: what it held is lost, and the sweeper brings the
/// jobs back. What is there otherwise, or may not be looked at, is said when it is new: its lane meets it when it opens again.
async fn check_declared(worker: &WorkerContext, declared: &mut BTreeSet<ProviderName>, said: &mut BTreeSet<String>) {
    let lanes: Vec<ProviderName> = declared.iter().cloned().collect();
    if lanes.is_empty() {
        return;
    }
    let unfit = match worker.backends.queue.topology_problems(&lanes).await {
        Ok(unfit) => unfit,
        Err(error) => {
            tracing::debug!(%error, "queues and exchanges cannot be looked at");
            return;
        }
    };
    let before = std::mem::take(said);
    for what in unfit {
        match what {
            TopologyProblem::Missing(what) => {
                worker.meter.record_missing_topology();
                tracing::error!(%what, "it was declared before, and is declared again; {POLICY_HINT}");
                declared.clear();
            }
            TopologyProblem::Mismatch(what) | TopologyProblem::Refused(what) => {
                if !before.contains(&what) {
                    tracing::error!(%what, "it was declared before; its lane goes on until it must be opened again");
                }
                said.insert(what);
            }
        }
    }
}

/// Whoever is refused everything has the wrong broker, or no rights there.
fn is_ready(names: &[ProviderName], declared: &BTreeSet<ProviderName>, refused: &BTreeSet<ProviderName>) -> bool {
    let done = names.iter().all(|name| declared.contains(name) || refused.contains(name));
    done && (names.is_empty() || names.iter().any(|name| declared.contains(name)))
}

/// Publishes; a queue or exchange that somebody deleted is declared anew, because whoever has the message would wait for it
/// for ever.
///
/// # Errors
/// As of publishing, and of declaring.
pub async fn publish(
    worker: &WorkerContext,
    provider: &ProviderName,
    message: &OutgoingMessage,
) -> Result<(), QueueError> {
    let queue = &worker.backends.queue;
    match queue.publish(message.clone()).await {
        Err(QueueError::Unroutable(_)) => {
            worker.meter.record_missing_topology();
            tracing::error!(%provider, "no queue takes a message; its queues and exchanges are declared again; {POLICY_HINT}");
            queue.declare(std::slice::from_ref(provider)).await?;
            queue.publish(message.clone()).await
        }
        published => published,
    }
}
