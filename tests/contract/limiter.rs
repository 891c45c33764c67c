//! The limiter: one conformance suite for every implementation, and the Rust specification against the Lua script on
//! random histories. The rate guarantee is judged at a provider with a clock of its own. Other modules test faults of
//! Redis.

use std::sync::Arc;
use std::time::Duration;

use sluicegate::domain::permit_protocol::{
    CallKind, CostByKind, CounterSeeds, LimiterCall, LimiterRefusal, LimiterReply, PastUse, PermitRelease,
    PermitRequest, RebuildData, RefusalReason, ReleaseKind, Subject,
};
use sluicegate::domain::provider::{BOOKING_HORIZON, ProviderName, StoreDown};
use sluicegate::domain::quota_spec::{self, LimitSpec, QuotaSpec};
use sluicegate::domain::time::Micros;
use sluicegate::limiter::gate::AcquireRequest;
use sluicegate::limiter::{Limiter, LimiterError};

mod clock_attestation;
mod cluster;
mod conformance;
mod differential;
mod exact_waits;
mod faults;
mod leadership;
mod malformed_replies;
mod model;
mod oracle;
mod peek;
mod rate_guarantee;
mod rate_guarantee_mixed;
mod refusals;
mod saturation;
mod state_resets;

const SECOND: Duration = Duration::from_secs(1);

/// The longest hold of most specs: no hold ends during a test, also on a busy machine.
const HOLD_MAX: Duration = Duration::from_secs(60);

/// A spec of sliding logs.
fn spec(limits: &[(&str, u32, u64)]) -> QuotaSpec {
    let limit = |&(name, max_requests, window_ms): &(&str, u32, u64)| {
        LimitSpec::sliding_log(name, max_requests, Duration::from_millis(window_ms))
    };
    QuotaSpec {
        quota: ProviderName::new("acme").unwrap(),
        version: 1,
        limits: limits.iter().map(limit).collect(),
        account_rules: Vec::new(),
        pacing: None,
        grant_jitter: None,
        hold_max: HOLD_MAX,
        send_budget: Duration::from_millis(100),
        store_down: StoreDown::Wait,
        members: Vec::new(),
        resumed_at: 0,
        handover: Duration::ZERO,
    }
}

fn padded_us(spec: &QuotaSpec, limit: usize) -> u64 {
    spec.limits[limit].padded_window_us()
}

/// How long a limit with an unknown past grants nothing: the booking horizon, the longest hold and the window.
fn unknown_past_us(spec: &QuotaSpec, limit: usize) -> u64 {
    let before = BOOKING_HORIZON + spec.hold_max;
    padded_us(spec, limit) + u64::try_from(before.as_micros()).unwrap()
}

/// The caller side of one gate: numbers its calls and keeps the releases to report.
#[derive(Clone)]
struct Caller {
    limiter: Arc<dyn Limiter>,
    spec: QuotaSpec,
    incarnation: u64,
    number: u64,
    settlements: Vec<PermitRelease>,
    seeds: Option<CounterSeeds>,
    pause: Option<Duration>,
    warm: Option<Micros>,
    look_ahead: Duration,
}

impl Caller {
    /// A caller whose first call is made and whose cold start the ledger has ended, with no past use.
    async fn warm(limiter: &Arc<dyn Limiter>, spec: QuotaSpec) -> Self {
        let mut caller = Self::new(limiter, spec);
        caller.warm_up().await;
        caller
    }

    fn new(limiter: &Arc<dyn Limiter>, spec: QuotaSpec) -> Self {
        let (limiter, incarnation) = (Arc::clone(limiter), rand::random::<u64>() >> 16);
        Self {
            limiter,
            spec,
            incarnation,
            number: 0,
            settlements: Vec::new(),
            seeds: None,
            pause: None,
            warm: None,
            look_ahead: BOOKING_HORIZON,
        }
    }

    async fn warm_up(&mut self) {
        let cold = self.call(&[]).await;
        assert_eq!(
            cold.refused.map(|refused| refused.reason),
            Some(RefusalReason::Cold),
            "the ledger has not ended the cold start yet"
        );
        self.warm = Some(cold.state_epoch);
        let warm = self.call(&[]).await;
        assert_eq!((warm.refused, warm.state_epoch), (None, cold.state_epoch));
    }

    async fn call(&mut self, wants: &[u32]) -> LimiterReply {
        self.try_call(wants).await.unwrap()
    }

    async fn try_call(&mut self, wants: &[u32]) -> Result<LimiterReply, LimiterError> {
        self.number += 1;
        self.repeat(wants).await
    }

    /// Calls again under the number of the last call, with the same releases.
    async fn repeat(&self, wants: &[u32]) -> Result<LimiterReply, LimiterError> {
        self.repeat_for(self::wants(wants)).await
    }

    /// Calls with permit requests of any kind, also for accounts and references.
    async fn ask(&mut self, wants: &[PermitRequest]) -> LimiterReply {
        self.number += 1;
        self.repeat_for(wants.to_vec()).await.unwrap()
    }

    async fn repeat_for(&self, wants: Vec<PermitRequest>) -> Result<LimiterReply, LimiterError> {
        let call = LimiterCall {
            incarnation: self.incarnation,
            number: self.number,
            requests: wants,
            releases: self.settlements.clone(),
            pause: self.pause,
            rebuild: self.warm.map(forgotten_nothing),
            seeds: self.seeds.clone(),
            invalidate_epoch: None,
            look_ahead: self.look_ahead,
            run_id: self.limiter.run_id(&self.spec.quota).await?,
        };
        self.limiter.call(&self.spec, &call).await
    }

    /// Reports these releases with the next call alone.
    async fn settle(&mut self, settlements: Vec<PermitRelease>, wants: &[u32]) -> LimiterReply {
        self.settlements = settlements;
        let reply = self.call(wants).await;
        self.settlements.clear();
        reply
    }
}

fn used(call: u64, cost: u32, age_us: u64) -> PermitRelease {
    PermitRelease {
        call,
        cost,
        kind: CallKind::Charge,
        subjects: Vec::new(),
        release_kind: ReleaseKind::Used { age: Duration::from_micros(age_us) },
    }
}

fn not_sent(call: u64, cost: u32, origins: &[u64]) -> PermitRelease {
    let fate = ReleaseKind::Unused { origins: origins.to_vec() };
    PermitRelease { call, cost, kind: CallKind::Charge, subjects: Vec::new(), release_kind: fate }
}

/// Charges of these costs; neighbours of equal cost are one request.
fn wants(costs: &[u32]) -> Vec<PermitRequest> {
    costs
        .chunk_by(|a, b| a == b)
        .map(|same| PermitRequest::charges(u32::try_from(same.len()).unwrap(), same[0]))
        .collect()
}

/// The rebuild data of a ledger that knows no recent request.
fn forgotten_nothing(born: Micros) -> RebuildData {
    RebuildData { state_epoch: born, ended: Vec::new(), in_flight: CostByKind::default() }
}

/// Each permit of a reply: its cost, its wait and the origins of its slots.
fn permits(call: &LimiterCall, reply: &LimiterReply) -> Vec<(u32, u64, Vec<u64>)> {
    let permit = |run: &sluicegate::domain::permit_protocol::PermitGrant| {
        let cost = call.requests[run.request_index].cost;
        std::iter::repeat_n((cost, run.wait_us, run.origins.clone()), usize::try_from(run.permits).unwrap())
    };
    reply.grants.iter().flat_map(permit).collect()
}

/// The refusal of a reply. A reply without one fails the test.
fn refused(reply: &LimiterReply) -> LimiterRefusal {
    reply.refused.unwrap_or_else(|| panic!("nothing refused: {reply:?}"))
}

/// When the slot of an answer `age_us` before this reply may start again.
fn free_again_us(reply: &LimiterReply, age_us: u64, window_us: u64) -> u64 {
    (reply.now.0 - age_us).div_ceil(1_000) * 1_000 + window_us
}

/// The promised start of a refusal: from this instant on, a permit can start.
fn promised_us(reply: &LimiterReply) -> u64 {
    reply.now.0 + refused(reply).wait_us
}

/// Waits until the limiter's clock reaches this instant. It reads that clock, so no sleep needs to be exact.
async fn until_us(caller: &Caller, instant_us: u64) {
    let mut clock = Caller::new(
        &caller.limiter,
        QuotaSpec { quota: ProviderName::new(format!("{}-clock", caller.spec.quota)).unwrap(), ..caller.spec.clone() },
    );
    loop {
        let now_us = clock.call(&[]).await.now.0;
        if now_us >= instant_us {
            return;
        }
        tokio::time::sleep(Duration::from_micros(instant_us - now_us)).await;
    }
}

/// A request for one charge that waits until this instant.
fn ask(wait_until: tokio::time::Instant) -> AcquireRequest {
    AcquireRequest::new(1, CallKind::Charge, wait_until)
}
