//! Pauses that a provider has named: each blocks every caller until it is over or an operator lifts it.

use super::*;

on_every_limiter!(pause_blocks_all_callers_and_never_shortens, a_pause_ends_when_an_operator_lifts_it);

async fn pause_blocks_all_callers_and_never_shortens(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("all", 9, 100)])).await;
    let mut other = Caller::new(&limiter, caller.spec.clone());
    caller.pause = Some(Duration::from_millis(200));
    let paused = caller.call(&[1]).await;
    assert_eq!(
        (paused.permits(), refused(&paused).reason, refused(&paused).wait_us),
        (0, RefusalReason::Paused, 200_000)
    );
    until_us(&caller, promised_us(&paused)).await;
    assert_eq!(other.call(&[1]).await.permits(), 1);
    // A pause so long that it outlasts the next call.
    caller.pause = Some(3 * SECOND);
    let paused = caller.call(&[1]).await;
    other.pause = Some(Duration::from_millis(1));
    let reply = other.call(&[1]).await;
    assert_eq!((refused(&reply).reason, promised_us(&reply)), (RefusalReason::Paused, promised_us(&paused)));
}

async fn a_pause_ends_when_an_operator_lifts_it(limiter: Arc<dyn Limiter>) {
    let mut caller = Caller::warm(&limiter, spec(&[("all", 9, 100)])).await;
    let mut other = Caller::new(&limiter, caller.spec.clone());
    caller.pause = Some(900 * SECOND);
    assert_eq!(refused(&caller.call(&[1]).await).reason, RefusalReason::Paused);
    caller.pause = None;
    other.spec = QuotaSpec { version: 2, ..other.spec };
    assert_eq!(
        refused(&other.call(&[1]).await).reason,
        RefusalReason::Paused,
        "a settings change alone lifts no pause"
    );
    other.spec = QuotaSpec { version: 3, resumed_at: 1_800_000_000_000, ..other.spec };
    assert_eq!(other.call(&[1]).await.permits(), 1);
    // A caller with stale settings cannot bring the pause back.
    caller.pause = Some(900 * SECOND);
    assert_eq!(refused(&caller.call(&[1]).await).reason, RefusalReason::StaleVersion);
    (caller.pause, caller.spec) = (None, other.spec.clone());
    assert_eq!(caller.call(&[1]).await.permits(), 1);
    // A pause that the provider names later blocks all callers again.
    other.pause = Some(900 * SECOND);
    assert_eq!(refused(&other.call(&[1]).await).reason, RefusalReason::Paused);
    assert_eq!(refused(&caller.call(&[1]).await).reason, RefusalReason::Paused);
}
