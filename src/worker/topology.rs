//! The topology task: declares the queues and exchanges of every provider, beside the lanes, and again when one is
//! missing.
//!
//! A declaration that the broker refuses is logged and retried. It holds up neither the other providers nor the
//! readiness of the worker.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::WorkerContext;
use super::settings_sync::LoadedSettings;
use super::supervisor::WorkerStatus;
use crate::domain::provider::ProviderName;
use crate::queue::{OutgoingMessage, Queue, QueueError, TopologyProblem};

const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// Time between two checks of all that was declared.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Hint about who else than an operator may have deleted a queue.
const POLICY_HINT: &str =
    "unless an operator did it, look for a policy with `expires` (rabbitmqctl list_policies; docs/topology.md)";

/// Declares each provider's topology once it is known, until the worker stops. The worker is ready when the topology of
/// its first settings is declared. A provider that the broker refuses does not count: its lane logs that
/// (`lane::open`).
pub async fn keep_declared(
    worker: WorkerContext,
    queue: Arc<dyn Queue>,
    known: watch::Receiver<Arc<LoadedSettings>>,
    progress: watch::Sender<WorkerStatus>,
) {
    let stop = worker.stop.clone();
    // Cancelled when the worker stops: one declaration per provider, by a broker that does not answer, would delay the
    // end.
    stop.run_until_cancelled(declare_all(worker, queue.as_ref(), known, progress)).await;
}

async fn declare_all(
    worker: WorkerContext,
    queue: &dyn Queue,
    mut known: watch::Receiver<Arc<LoadedSettings>>,
    progress: watch::Sender<WorkerStatus>,
) {
    let mut declared: BTreeSet<ProviderName> = BTreeSet::new();
    let (mut logged, mut unfit) = (BTreeSet::new(), BTreeSet::new());
    let mut look_at = Instant::now() + CHECK_INTERVAL;
    loop {
        if Instant::now() >= look_at {
            look_at = Instant::now() + CHECK_INTERVAL;
            check_declared(&worker, queue, &mut declared, &mut unfit).await;
        }
        let names: Vec<ProviderName> = known.borrow_and_update().providers.keys().cloned().collect();
        let (mut missing, mut refused) = (false, BTreeSet::new());
        // The shared exchanges and queues must exist even before the first provider does.
        let shared = names.is_empty() && queue.declare(&[]).await.is_err();
        for name in names.iter().filter(|name| !declared.contains(*name)).cloned().collect::<Vec<_>>() {
            match queue.declare(std::slice::from_ref(&name)).await {
                Ok(()) => {
                    declared.insert(name);
                }
                Err(error) => {
                    missing = true;
                    let is_refused = matches!(error, QueueError::Refused(_));
                    if is_refused {
                        refused.insert(name.clone());
                    }
                    match (logged.insert(name.clone()), is_refused) {
                        (true, true) => tracing::error!(provider = %name, %error, "failed to declare queues, retrying"),
                        (true, false) => tracing::warn!(provider = %name, %error, "failed to declare queues, retrying"),
                        (false, _) => {}
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

/// Checks what was declared. If something is missing, all is declared again. A lost queue loses no recorded job, because
/// the ledger has it. A mismatch, or a refused check, is logged when it is new: the lane meets it when it reopens.
async fn check_declared(
    worker: &WorkerContext,
    queue: &dyn Queue,
    declared: &mut BTreeSet<ProviderName>,
    reported: &mut BTreeSet<String>,
) {
    let lanes: Vec<ProviderName> = declared.iter().cloned().collect();
    if lanes.is_empty() {
        return;
    }
    let unfit = match queue.topology_problems(&lanes).await {
        Ok(unfit) => unfit,
        Err(error) => {
            tracing::debug!(%error, "failed to check queues and exchanges");
            return;
        }
    };
    let before = std::mem::take(reported);
    for what in unfit {
        match what {
            TopologyProblem::Missing(what) => {
                worker.meter.record_missing_topology();
                tracing::error!(%what, "deleted after it was declared; declaring it again; {POLICY_HINT}");
                declared.clear();
            }
            TopologyProblem::Mismatch(what) | TopologyProblem::Refused(what) => {
                if !before.contains(&what) {
                    tracing::error!(%what, "no longer usable as declared; its lane continues until it is reopened");
                }
                reported.insert(what);
            }
        }
    }
}

/// Ready when every provider is declared or refused. If all are refused, the broker is the wrong one or grants no
/// rights.
fn is_ready(names: &[ProviderName], declared: &BTreeSet<ProviderName>, refused: &BTreeSet<ProviderName>) -> bool {
    let done = names.iter().all(|name| declared.contains(name) || refused.contains(name));
    done && (names.is_empty() || names.iter().any(|name| declared.contains(name)))
}

/// Publishes a message. A deleted queue or exchange is declared again, because the message would wait for it for ever.
pub async fn publish(
    worker: &WorkerContext,
    provider: &ProviderName,
    message: &OutgoingMessage,
) -> Result<(), QueueError> {
    let queue = worker.backends.broker()?;
    match queue.publish(message.clone()).await {
        Err(QueueError::Unroutable(_)) => {
            worker.meter.record_missing_topology();
            tracing::error!(%provider, "message unroutable; declaring its queues and exchanges again; {POLICY_HINT}");
            queue.declare(std::slice::from_ref(provider)).await?;
            queue.publish(message.clone()).await
        }
        published => published,
    }
}
