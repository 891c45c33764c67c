//! Our limiter as it is measured: the one file of the bench that builds quotas and calls.
//!
//! Refuses a way of its own: keys, argument, function and the reading of replies are those of the real client.

use std::time::Duration;

use redis::Value;

use super::BenchError;
use super::contender::{Ask, Caller, Contender, Granted, Program, Quota};
use crate::domain::decision::{ByKind, Call, CallKind, Fate, Rebuild, Refusal, Run, Settlement, Want};
use crate::domain::limit::Algorithm;
use crate::domain::provider::{ProviderName, StoreDown};
use crate::domain::quota_spec::{LimitSpec, QuotaSpec};
use crate::domain::time::Micros;
use crate::limiter::redis::answer::parse_reply;
use crate::limiter::redis::argument::argument;
use crate::limiter::redis::keys::provider_keys;
use crate::limiter::redis::library::SOURCE;

const QUOTA: &str = "bench";
const LIMIT: &str = "limit";
/// As a provider row has it by default.
const TIMEOUT: Duration = Duration::from_secs(10);
const SEND_BUDGET: Duration = Duration::from_millis(500);

/// One of our algorithms.
pub struct Ours(Algorithm);

/// Those that the limiter has.
#[must_use]
pub fn available() -> Vec<Ours> {
    Algorithm::ALL.map(Ours).into()
}

/// The quota's one limit, held until the answer, with the times of a default provider.
///
/// # Errors
/// When the quota's name is no name.
pub fn spec(algorithm: Algorithm, quota: &Quota) -> Result<QuotaSpec, BenchError> {
    // Whatever the algorithm, all of the limit may come at once.
    let burst = match algorithm {
        Algorithm::TokenBucket => Some(quota.max_requests),
        Algorithm::Gcra => Some(quota.max_requests.saturating_sub(1)),
        Algorithm::SlidingLog | Algorithm::SlidingWindow | Algorithm::FixedWindow => None,
    };
    let limit = LimitSpec { algorithm, burst, ..LimitSpec::sliding_log(LIMIT, quota.max_requests, quota.window) };
    Ok(QuotaSpec {
        quota: ProviderName::new(QUOTA).map_err(BenchError::Void)?,
        version: quota.version,
        limits: vec![limit],
        account_rules: Vec::new(),
        even: false,
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

    fn counts(&self) -> bool {
        true
    }

    fn caller(&self, quota: &Quota, id: u64) -> Result<Box<dyn Caller>, BenchError> {
        let spec = spec(self.0, quota)?;
        let caller = OurCaller { algorithm: self.0, spec, quota: quota.clone(), id, number: 0, taken: 0, born: None };
        Ok(Box::new(caller))
    }
}

/// One gate, as far as the store can see.
struct OurCaller {
    algorithm: Algorithm,
    spec: QuotaSpec,
    quota: Quota,
    id: u64,
    number: u64,
    /// Permits that the last call was granted.
    taken: u32,
    /// A store that is cold was born then; nothing was sent before, so the next call vouches for it.
    born: Option<Micros>,
}

impl OurCaller {
    fn ask(&mut self, permits: u32) -> Ask {
        let taken = Settlement {
            call: self.number,
            cost: self.taken,
            kind: CallKind::Charge,
            subjects: Vec::new(),
            fate: Fate::Used { age: Duration::ZERO },
        };
        self.number += 1;
        let call = Call {
            incarnation: self.id,
            number: self.number,
            wants: if permits > 0 { vec![Want::charges(permits, 1)] } else { Vec::new() },
            settlements: if self.taken > 0 { vec![taken] } else { Vec::new() },
            pause: None,
            rebuild: self.born.take().map(|born| Rebuild { born, ended: Vec::new(), open: ByKind::default() }),
            seeds: None,
            distrust: None,
            run_id: self.quota.run_id.clone(),
        };
        self.taken = permits;
        Ask { keys: self.keys(), arguments: vec![argument(&self.spec, &call)] }
    }
}

impl Caller for OurCaller {
    fn keys(&self) -> Vec<String> {
        provider_keys(&self.quota.prefix, &self.spec)
    }

    fn next(&mut self, permits: u32) -> Ask {
        self.ask(permits)
    }

    fn settle(&mut self) -> Option<Ask> {
        Some(self.ask(0))
    }

    fn read(&mut self, answer: Value) -> Result<Granted, BenchError> {
        let bytes: Vec<u8> = redis::from_redis_value(answer).map_err(redis::RedisError::from)?;
        let (limits, cells) = (self.spec.limits.len(), self.spec.provider_limits().len());
        let reply = parse_reply(&bytes, limits, cells, 1).map_err(BenchError::Void)?;
        match reply.refused.map(|refused| refused.by) {
            Some(Refusal::Cold) => self.born = Some(reply.born),
            Some(by @ (Refusal::StaleVersion | Refusal::StaleCall | Refusal::Paused)) => {
                return Err(BenchError::Void(format!("the limiter refuses for {by:?}")));
            }
            Some(Refusal::Limit { .. } | Refusal::NeedsHistory { .. }) | None => {}
        }
        self.taken = permits(reply.granted.iter());
        let at_once = permits(reply.granted.iter().filter(|run| run.wait_us == 0));
        Ok(Granted { permits: self.taken, at_once })
    }

    fn change(&mut self, quota: &Quota) -> Result<(), BenchError> {
        self.spec = spec(self.algorithm, quota)?;
        self.quota = quota.clone();
        Ok(())
    }
}

fn permits<'a>(runs: impl Iterator<Item = &'a Run>) -> u32 {
    runs.map(|run| run.permits).sum()
}
