//! Forecast of a job's start: the limiter's own state machine, filled with the recent usage and run forward over the
//! jobs ahead.
//!
//! It has no arithmetic of its own about limits: slots, windows and buckets are those of [`Quota`]. So an estimate is
//! wrong only by what is not known: how long responses take, the cost of each single job ahead, and later jobs.

use std::collections::VecDeque;
use std::time::Duration;

use super::cost_of_part;
use crate::domain::permit_protocol::{
    BATCH_MAX, CallKind, CostByKind, LimiterCall, LimiterReply, PERMITS_MAX, PastUse, PermitRelease, PermitRequest,
    RebuildData, RefusalReason, ReleaseKind,
};
use crate::domain::quota::Quota;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::{Micros, micros_up};

/// Calls that are simulated at most. The remaining jobs are extrapolated at the rate of the second half.
const CALLS_MAX: u64 = 3_000;
/// Most groups of permit requests in one call.
const GROUPS_MAX: usize = 20;
/// If the egress rate decides, calls are no closer together than the longest window divided by this.
const STEPS_PER_WINDOW: u32 = 100;
const RUN_ID: &str = "forecast";

/// Recent usage of a quota, by the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecentUsage {
    pub ended: Vec<PastUse>,
    /// Cost of requests that may be in flight now; their responses are assumed to arrive now.
    pub in_flight: CostByKind,
    /// From a request's start to its response.
    pub hold: Duration,
}

/// The job whose start is forecast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForecastInput {
    /// Jobs ahead: the egress rate counts jobs.
    pub jobs_before: u64,
    /// Their total cost: limits count costs.
    pub cost_before: u64,
    pub cost: u32,
    pub kind: CallKind,
    /// Egress rate of all workers together; `None`: every job ahead has left its bucket.
    pub jobs_per_second: Option<f64>,
}

/// Estimated start of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartForecast {
    pub wait: Duration,
    /// The limit of the spec that refused last before the start; `None`: no limit did.
    pub limited_by: Option<usize>,
}

/// A simulated quota with recent usage, run forward in time.
struct Forecast<'a> {
    spec: &'a QuotaSpec,
    quota: Quota,
    now_us: u64,
    calls: u64,
    hold_us: u64,
    /// Responses to granted permits: instant, call, cost, kind.
    answers: VecDeque<(u64, u64, u32, CallKind)>,
}

/// Usage that counts now under each limit of the spec, as far as the ledger knows.
pub fn current_usage(spec: &QuotaSpec, now: Micros, past: &RecentUsage) -> Vec<(usize, u64)> {
    let forecast = Forecast::new(spec, now, past);
    forecast.quota.usage(now, spec, None).iter().map(|usage| (usage.index, usage.used)).collect()
}

/// Estimates when the job ahead of us starts; `None`: never, as the limits are now.
pub fn forecast_start(
    spec: &QuotaSpec,
    now: Micros,
    past: &RecentUsage,
    ahead: &ForecastInput,
) -> Option<StartForecast> {
    if ahead.cost > spec.cost_max(ahead.kind, &[]) {
        return None;
    }
    let mut forecast = Forecast::new(spec, now, past);
    let own_us = egress_time(ahead).map(|at| now.0.saturating_add(at));
    let grain_us = (spec.longest_window_us() / u64::from(STEPS_PER_WINDOW)).clamp(1_000, 1_000_000);
    let (mut served, mut by, mut half) = (0_u64, None, (now.0, 0_u64));
    while forecast.calls < CALLS_MAX {
        let since = Duration::from_micros(forecast.now_us - now.0);
        let let_out = released_by_egress(ahead.jobs_per_second, since);
        let left = ahead.cost_before.saturating_sub(served);
        let mut requests = requests_ahead(left.min(ahead.cost_of(let_out).saturating_sub(served)));
        let own = requests.len();
        if let_out > ahead.jobs_before && requests.len() < GROUPS_MAX {
            requests.push(PermitRequest { kind: ahead.kind, ..PermitRequest::charges(1, ahead.cost) });
        }
        let reply = forecast.call(requests);
        for grant in &reply.grants {
            let start_us = reply.now.0 + grant.wait_us;
            if grant.request_index == own {
                return Some(StartForecast { wait: Duration::from_micros(start_us - now.0), limited_by: by });
            }
            served += u64::from(grant.permits);
        }
        let refused_us = refusal_wait(&reply, &mut by);
        if forecast.calls == CALLS_MAX / 2 {
            half = (forecast.now_us, served);
        }
        forecast.advance(refused_us, grain_us, own_us);
    }
    // Too many jobs are ahead: extrapolate at the rate at which they were served lately.
    let (since_us, served_since) = (forecast.now_us - half.0, served - half.1);
    let left = (ahead.cost_before + u64::from(ahead.cost)).saturating_sub(served);
    let left_us = u128::from(since_us) * u128::from(left) / u128::from(served_since.max(1));
    let wait_us = u64::try_from(left_us).ok()?.checked_add(forecast.now_us - now.0)?;
    (served_since > 0).then(|| StartForecast { wait: Duration::from_micros(wait_us), limited_by: by })
}

/// Permit requests for the jobs ahead, as permits of cost 1.
fn requests_ahead(mut left: u64) -> Vec<PermitRequest> {
    let mut requests = Vec::new();
    while left > 0 && requests.len() < GROUPS_MAX {
        let permits = u32::try_from(left).unwrap_or(u32::MAX).min(PERMITS_MAX);
        requests.push(PermitRequest::charges(permits, 1));
        left -= u64::from(permits);
    }
    requests
}

/// Jobs that the egress rate has let out: the first at once.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative, and saturates")]
fn released_by_egress(jobs_per_second: Option<f64>, since: Duration) -> u64 {
    jobs_per_second.map_or(u64::MAX, |rate| 1 + (rate * since.as_secs_f64()) as u64)
}

/// Time until the egress rate lets the job out, in microseconds.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "saturates")]
fn egress_time(ahead: &ForecastInput) -> Option<u64> {
    ahead.jobs_per_second.map(|rate| (ahead.jobs_before as f64 * 1e6 / rate).ceil() as u64)
}

impl ForecastInput {
    /// Cost of the first of the jobs ahead.
    fn cost_of(&self, jobs: u64) -> u64 {
        cost_of_part(jobs, self.jobs_before, self.cost_before)
    }
}

/// Wait of refused requests by the reply, and whether it is exact; notes which limit refuses.
fn refusal_wait(reply: &LimiterReply, by: &mut Option<usize>) -> Option<(u64, bool)> {
    let of_kind = reply.skipped.first().map(|skipped| (skipped.limit, skipped.wait_us, skipped.exact));
    let of_all = reply.refused.and_then(|refused| match refused.reason {
        RefusalReason::Limit { index } => Some((index, refused.wait_us, refused.exact)),
        _ => None,
    });
    let (limit, wait_us, exact) = of_all.or(of_kind)?;
    *by = Some(limit);
    Some((wait_us, exact))
}

impl<'a> Forecast<'a> {
    fn new(spec: &'a QuotaSpec, now: Micros, past: &RecentUsage) -> Self {
        let hold_us = micros_up(past.hold);
        let quota = Quota::default();
        let mut forecast = Self { spec, quota, now_us: now.0, calls: 0, hold_us, answers: VecDeque::new() };
        let state_epoch = forecast.call(Vec::new()).state_epoch;
        let mut ended = past.ended.clone();
        ended.truncate(BATCH_MAX);
        if past.in_flight != CostByKind::default() {
            // Requests in flight soon have a response: treat them as answered now.
            ended.truncate(BATCH_MAX - 1);
            ended.push(PastUse { age: Duration::ZERO, cost: past.in_flight });
        }
        forecast.calls += 1;
        let call = LimiterCall {
            rebuild: Some(RebuildData { state_epoch, ended, in_flight: CostByKind::default() }),
            ..forecast.empty_call(Vec::new())
        };
        forecast.quota.call(now, spec, &call);
        forecast
    }

    fn empty_call(&self, requests: Vec<PermitRequest>) -> LimiterCall {
        LimiterCall {
            incarnation: 1,
            number: self.calls,
            requests,
            look_ahead: crate::domain::provider::BOOKING_HORIZON,
            run_id: RUN_ID.to_owned(),
            ..LimiterCall::default()
        }
    }

    /// Calls the quota now, and releases the permits of all responses that have arrived.
    fn call(&mut self, requests: Vec<PermitRequest>) -> LimiterReply {
        self.calls += 1;
        let kinds: Vec<(u32, CallKind)> = requests.iter().map(|request| (request.cost, request.kind)).collect();
        let mut call = self.empty_call(requests);
        while let Some((at_us, number, cost, kind)) = self.answers.front().copied() {
            if at_us > self.now_us || call.releases.len() == BATCH_MAX {
                break;
            }
            self.answers.pop_front();
            let release_kind = ReleaseKind::Used { age: Duration::from_micros(self.now_us - at_us) };
            call.releases.push(PermitRelease { call: number, cost, kind, subjects: Vec::new(), release_kind });
        }
        let reply = self.quota.call(Micros(self.now_us), self.spec, &call);
        for grant in &reply.grants {
            let (cost, kind) = kinds.get(grant.request_index).copied().unwrap_or((1, CallKind::Charge));
            let at_us = reply.now.0 + grant.wait_us + self.hold_us;
            self.answers.push_back((at_us, self.calls, cost * grant.permits, kind));
        }
        reply
    }

    /// Advances to the instant at which another call is useful.
    fn advance(&mut self, refused: Option<(u64, bool)>, grain_us: u64, own_us: Option<u64>) {
        let answer_us = self.answers.front().map(|(at_us, ..)| (*at_us).max(self.now_us + 1_000));
        let next_us = match refused {
            Some((wait_us, true)) => self.now_us + wait_us.max(1),
            // Earlier if a response arrives: the refused requests wait for it.
            Some((wait_us, false)) => {
                let at_latest_us = self.now_us + wait_us.max(1_000);
                answer_us.map_or(at_latest_us, |answer_us| answer_us.min(at_latest_us))
            }
            None => {
                let next_us = self.now_us + grain_us;
                own_us.filter(|own_us| *own_us > self.now_us).map_or(next_us, |own_us| own_us.min(next_us))
            }
        };
        self.now_us = next_us;
    }
}
