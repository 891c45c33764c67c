//! Tests of a gate on this worker's share: a job that costs more than the share delays no other.

use super::*;
use crate::domain::limit::AppliesTo;
use crate::domain::permit_protocol::{CostByKind, PastUse};
use crate::domain::quota_spec::Lookback;
use crate::limiter::RecentAttempts;
use crate::limiter::gate::{AcquireRequest, AcquireResult, BlockReason, Gate, GateContext, RefusalScope};
use tokio::sync::watch;

const FOUR_WORKERS: StoreDown = StoreDown::Share { workers: 4 };

struct NoAttempts;

#[async_trait]
impl RecentAttempts for NoAttempts {
    async fn recent_uses(&self, _: &ProviderName, _: Lookback) -> Result<(Vec<PastUse>, CostByKind), String> {
        Ok((Vec::new(), CostByKind::default()))
    }
}

/// A gate of a worker whose store is unavailable, once shares are in use.
async fn gate_over_a_share(limits: Vec<LimitSpec>) -> Gate {
    let bench = Harness::open(FOUR_WORKERS, None);
    let spec = QuotaSpec { limits, ..bench.spec.clone() };
    let limiter: Arc<dyn Limiter> = bench.limiter.clone();
    let (settings, spec) = watch::channel(Arc::new(spec));
    let (recent, newer, stop) = (Arc::new(NoAttempts), Arc::new(|_| {}), CancellationToken::new());
    let (gate, task) = Gate::new(GateContext { limiter, recent, spec, incarnation: 1, stop, on_newer_version: newer });
    tokio::spawn(async move {
        task.await;
        drop(settings);
    });
    bench.wait_until("shared", async || bench.run_id().await.is_ok()).await;
    use_one(&gate, charge(1, 60 * SECOND)).await;
    sleep(2 * SECOND).await;
    gate
}

fn charge(cost: u32, patience: Duration) -> AcquireRequest {
    let wait_until = Instant::now() + patience;
    AcquireRequest::new(cost, CallKind::Charge, wait_until)
}

async fn use_one(gate: &Gate, ask: AcquireRequest) {
    match gate.acquire(ask).await {
        AcquireResult::Granted(permit) => permit.begin().unwrap().release_used(Instant::now()),
        refused => panic!("{refused:?}"),
    }
}

/// Three cases: a limit on everything; one on charges alone; one on everything beside a tighter one of accounts.
#[tokio::test(start_paused = true)]
async fn job_above_a_share_delays_no_other() {
    let all = LimitSpec::sliding_log("all", 100, SECOND);
    let charges = LimitSpec { applies_to: AppliesTo::Charge, ..all.clone() };
    let own = LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("own", 8, SECOND) };
    for limits in [vec![all.clone()], vec![charges], vec![all, own]] {
        let gate = gate_over_a_share(limits).await;
        let waiting = gate.clone();
        let costly = tokio::spawn(async move { waiting.acquire(charge(30, 60 * SECOND)).await });
        for _ in 0..200 {
            sleep(Duration::from_millis(50)).await;
            use_one(&gate, charge(1, Duration::from_millis(20))).await;
            assert!(gate.is_open(), "{:?}", gate.view().borrow());
        }
        assert!(!costly.is_finished());
        costly.abort();
        // In requeue mode it gets a wait of its own, so that its lane continues.
        let AcquireResult::Refused(refusal) = gate.acquire(charge(30, Duration::ZERO)).await else { panic!("granted") };
        assert_eq!((refusal.reason, refusal.scope), (BlockReason::Limit("all".to_owned()), RefusalScope::Job));
        use_one(&gate, charge(1, Duration::from_millis(20))).await;
    }
}
