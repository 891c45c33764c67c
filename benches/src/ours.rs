//! Our limiter as a contender: the only file of the benchmark that builds our quotas and calls.
//!
//! Keys, arguments, function and decoding are those of the real client.

use std::time::Duration;

use redis::Value;

use super::BenchError;
use super::contender::{BenchCaller, BenchQuota, CallArguments, Contender, GrantedPermits, Program};
use sluicegate::domain::limit::Algorithm;
use sluicegate::domain::permit_protocol::{
    CallKind, CostByKind, LimiterCall, PermitGrant, PermitRelease, PermitRequest, RebuildData, RefusalReason,
    ReleaseKind,
};
use sluicegate::domain::provider::{BOOKING_HORIZON, ProviderName, StoreDown};
use sluicegate::domain::quota_spec::{LimitSpec, QuotaSpec};
use sluicegate::domain::time::Micros;
use sluicegate::limiter::redis::decode::decode_reply;
use sluicegate::limiter::redis::encode::encode_call;
use sluicegate::limiter::redis::keys::provider_keys;
use sluicegate::limiter::redis::library::SOURCE;

const QUOTA: &str = "bench";
const LIMIT: &str = "limit";
/// The default of a provider row.
const TIMEOUT: Duration = Duration::from_secs(10);
const SEND_BUDGET: Duration = Duration::from_millis(500);

/// One of our algorithms.
pub struct Ours(Algorithm);

/// All algorithms of the limiter that count in a window.
pub fn available() -> Vec<Ours> {
    Algorithm::WITH_WINDOW.map(Ours).into()
}

/// The quota's one limit, held until the response, with the times of a default provider.
pub fn spec(algorithm: Algorithm, quota: &BenchQuota) -> Result<QuotaSpec, BenchError> {
    // With every algorithm, the whole limit may be granted at once.
    let burst = match algorithm {
        Algorithm::TokenBucket => Some(quota.max_requests),
        Algorithm::Gcra => Some(quota.max_requests.saturating_sub(1)),
        Algorithm::SlidingLog | Algorithm::SlidingWindow | Algorithm::FixedWindow | Algorithm::Concurrency => None,
    };
    let limit = LimitSpec { algorithm, burst, ..LimitSpec::sliding_log(LIMIT, quota.max_requests, quota.window) };
    Ok(QuotaSpec {
        quota: ProviderName::new(QUOTA).map_err(|problem| BenchError::InvalidMeasurement(problem.to_string()))?,
        version: quota.version,
        limits: vec![limit],
        account_rules: Vec::new(),
        pacing: None,
        grant_jitter: None,
        hold_max: TIMEOUT + SEND_BUDGET,
        send_budget: SEND_BUDGET,
        store_down: StoreDown::Wait,
        members: Vec::new(),
        resumed_at: 0,
        handover: Duration::ZERO,
    })
}

impl Contender for Ours {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn program(&self) -> Program {
        Program::Library(SOURCE)
    }

    fn keeps_log(&self) -> bool {
        true
    }

    fn caller(&self, quota: &BenchQuota, id: u64) -> Result<Box<dyn BenchCaller>, BenchError> {
        let spec = spec(self.0, quota)?;
        let caller =
            OurCaller { algorithm: self.0, spec, quota: quota.clone(), id, number: 0, granted: 0, state_epoch: None };
        Ok(Box::new(caller))
    }
}

/// A caller that looks like one gate to the store.
struct OurCaller {
    algorithm: Algorithm,
    spec: QuotaSpec,
    quota: BenchQuota,
    id: u64,
    number: u64,
    /// Permits that the last call was granted.
    granted: u32,
    /// State epoch of a store in cold start. Nothing was sent before, so the next call attests that there is nothing to
    /// rebuild.
    state_epoch: Option<Micros>,
}

impl OurCaller {
    fn call_arguments(&mut self, permits: u32) -> CallArguments {
        let release = PermitRelease {
            call: self.number,
            cost: self.granted,
            kind: CallKind::Charge,
            subjects: Vec::new(),
            release_kind: ReleaseKind::Used { age: Duration::ZERO },
        };
        self.number += 1;
        let call = LimiterCall {
            incarnation: self.id,
            number: self.number,
            requests: if permits > 0 { vec![PermitRequest::charges(permits, 1)] } else { Vec::new() },
            releases: if self.granted > 0 { vec![release] } else { Vec::new() },
            pause: None,
            rebuild: self.state_epoch.take().map(|state_epoch| RebuildData {
                state_epoch,
                ended: Vec::new(),
                in_flight: CostByKind::default(),
            }),
            seeds: None,
            invalidate_epoch: None,
            look_ahead: BOOKING_HORIZON,
            run_id: self.quota.run_id.clone(),
        };
        self.granted = permits;
        CallArguments { keys: self.keys(), arguments: vec![encode_call(&self.spec, &call)] }
    }
}

impl BenchCaller for OurCaller {
    fn keys(&self) -> Vec<String> {
        provider_keys(&self.quota.prefix, &self.spec)
    }

    fn next_call(&mut self, permits: u32) -> CallArguments {
        self.call_arguments(permits)
    }

    fn release(&mut self) -> Option<CallArguments> {
        Some(self.call_arguments(0))
    }

    fn read_reply(&mut self, answer: Value) -> Result<GrantedPermits, BenchError> {
        let bytes: Vec<u8> = redis::from_redis_value(answer).map_err(redis::RedisError::from)?;
        let (limits, cells) = (self.spec.limits.len(), self.spec.provider_limits().len());
        let reply = decode_reply(&bytes, limits, cells, 1).map_err(BenchError::InvalidMeasurement)?;
        match reply.refused.map(|refused| refused.reason) {
            Some(RefusalReason::Cold) => self.state_epoch = Some(reply.state_epoch),
            Some(by @ (RefusalReason::StaleVersion | RefusalReason::StaleCall | RefusalReason::Paused)) => {
                return Err(BenchError::InvalidMeasurement(format!("the limiter refuses with {by:?}")));
            }
            Some(RefusalReason::Limit { .. } | RefusalReason::NeedsHistory { .. }) | None => {}
        }
        self.granted = permits(reply.grants.iter());
        let at_once = permits(reply.grants.iter().filter(|grant| grant.wait_us == 0));
        Ok(GrantedPermits { permits: self.granted, at_once })
    }

    fn change_quota(&mut self, quota: &BenchQuota) -> Result<(), BenchError> {
        self.spec = spec(self.algorithm, quota)?;
        self.quota = quota.clone();
        Ok(())
    }
}

fn permits<'a>(grants: impl Iterator<Item = &'a PermitGrant>) -> u32 {
    grants.map(|grant| grant.permits).sum()
}
