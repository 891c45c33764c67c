//! A gate over this worker's own share: who costs more than a share waits alone.

use super::*;
use crate::domain::decision::{ByKind, PastUse};
use crate::domain::limit::AppliesTo;
use crate::domain::quota_spec::Lookback;
use crate::limiter::RecentAttempts;
use crate::limiter::gate::{Ask, Concerns, Gate, GateParts, Grant, RefusedBy};
use tokio::sync::watch;

const OF_FOUR: StoreDown = StoreDown::Share { of: 4 };

struct NoAttempts;

#[async_trait]
impl RecentAttempts for NoAttempts {
    async fn recent_uses(&self, _: &ProviderName, _: Lookback) -> Result<(Vec<PastUse>, ByKind), String> {
        Ok((Vec::new(), ByKind::default()))
    }
}

/// A gate of a worker whose store is away, once shares hold.
async fn gate_over_a_share(limits: Vec<LimitSpec>) -> Gate {
    let bench = Bench::open(OF_FOUR, None);
    let spec = QuotaSpec { limits, ..bench.spec.clone() };
    let limiter: Arc<dyn Limiter> = bench.authorised.clone();
    let (settings, spec) = watch::channel(Arc::new(spec));
    let (recent, newer, stop) = (Arc::new(NoAttempts), Arc::new(|_| {}), CancellationToken::new());
    let (gate, task) = Gate::new(GateParts { limiter, recent, spec, incarnation: 1, stop, newer });
    tokio::spawn(async move {
        task.await;
        drop(settings);
    });
    bench.until("shared", async || bench.run_id().await.is_ok()).await;
    use_one(&gate, charge(1, 60 * SECOND)).await;
    sleep(2 * SECOND).await;
    gate
}

fn charge(cost: u32, patience: Duration) -> Ask {
    let wait_until = Instant::now() + patience;
    Ask { cost, kind: CallKind::Charge, priority: 0, account: None, reference: None, wait_until }
}

async fn use_one(gate: &Gate, ask: Ask) {
    match gate.permit(ask).await {
        Grant::Granted(permit) => permit.begin().unwrap().answered(Instant::now()),
        Grant::Refused(refusal) => panic!("{refusal:?}"),
    }
}

/// Under a limit on everything, on charges alone, and beside a tighter one of accounts that such a job does not have.
#[tokio::test(start_paused = true)]
async fn a_job_that_costs_more_than_a_share_holds_nobody_else() {
    let all = LimitSpec::sliding_log("all", 100, SECOND);
    let charges = LimitSpec { applies_to: AppliesTo::Charge, ..all.clone() };
    let own = LimitSpec { scope: Scope::Account, ..LimitSpec::sliding_log("own", 8, SECOND) };
    for limits in [vec![all.clone()], vec![charges], vec![all, own]] {
        let gate = gate_over_a_share(limits).await;
        let waiting = gate.clone();
        let costly = tokio::spawn(async move { waiting.permit(charge(30, 60 * SECOND)).await });
        for _ in 0..200 {
            sleep(Duration::from_millis(50)).await;
            use_one(&gate, charge(1, Duration::from_millis(20))).await;
            assert!(gate.moves(), "{:?}", gate.view().borrow());
        }
        assert!(!costly.is_finished());
        costly.abort();
        // In requeue mode it is told a wait of its own, so that its lane goes on.
        let Grant::Refused(refusal) = gate.permit(charge(30, Duration::ZERO)).await else { panic!("granted") };
        assert_eq!((refusal.by, refusal.concerns), (RefusedBy::Limit("all".to_owned()), Concerns::Itself));
        use_one(&gate, charge(1, Duration::from_millis(20))).await;
    }
}
