//! When a job's turn comes: the limiter's own state machine, told what was used lately, run forward over those before it.
//!
//! Refuses arithmetic of its own about limits: slots, windows and buckets are those of [`Quota`], so an estimate is wrong
//! only by what nobody can know (how long answers will take, who else comes).

use std::collections::VecDeque;
use std::time::Duration;

use crate::domain::permit_protocol::{
    BATCH_MAX, CallKind, CostByKind, LimiterCall, LimiterReply, PERMITS_MAX, PastUse, PermitRelease, PermitRequest,
    RebuildData, RefusalReason, ReleaseKind,
};
use crate::domain::quota::Quota;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::{Micros, micros_up};

/// So many calls are run; what is left then is reckoned at the rate of their second half.
const CALLS_MAX: u64 = 3_000;
/// Most groups of wants in one call.
const GROUPS_MAX: usize = 20;
/// Where a steady outflow decides, calls are no closer together than this share of the longest window.
const STEPS_PER_WINDOW: u32 = 100;
const RUN_ID: &str = "forecast";

/// What was used of a quota lately, by the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecentUsage {
    pub ended: Vec<PastUse>,
    /// Cost of requests that may be on the wire now; reckoned to be answered at once.
    pub in_flight: CostByKind,
    /// From a request's start to its answer.
    pub hold: Duration,
}

/// Who is asked about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForecastInput {
    /// The costs of those before it, together.
    pub cost_before: u64,
    pub cost: u32,
    pub kind: CallKind,
    /// What the workers' buckets let out together; `None`: all of them have passed it.
    pub jobs_per_second: Option<f64>,
}

/// When a job's turn comes, as far as everybody's limits say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartForecast {
    pub wait: Duration,
    /// The limit of the spec that refused last before it; `None`: none has.
    pub limited_by: Option<usize>,
}

/// A quota that is told its past and run forward.
struct Forecast<'a> {
    spec: &'a QuotaSpec,
    quota: Quota,
    now_us: u64,
    calls: u64,
    hold_us: u64,
    /// When the answers of granted permits come: instant, call, cost, kind.
    answers: VecDeque<(u64, u64, u32, CallKind)>,
}

/// How many uses count now under each limit of the spec, as far as the ledger knows.
#[must_use]
pub fn current_usage(spec: &QuotaSpec, now: Micros, past: &RecentUsage) -> Vec<(usize, u64)> {
    let forecast = Forecast::new(spec, now, past);
    forecast.quota.usage(now, spec, None).iter().map(|standing| (standing.index, standing.used)).collect()
}

/// When the turn of the job comes that is ahead of us; `None`: never, as the limits are now.
#[must_use]
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
        let mut wants = requests_ahead(left.min(let_out.saturating_sub(served)));
        let own = wants.len();
        if let_out > ahead.cost_before && wants.len() < GROUPS_MAX {
            wants.push(PermitRequest { kind: ahead.kind, ..PermitRequest::charges(1, ahead.cost) });
        }
        let reply = forecast.call(wants);
        for run in &reply.grants {
            let start_us = reply.now.0 + run.wait_us;
            if run.request_index == own {
                return Some(StartForecast { wait: Duration::from_micros(start_us - now.0), limited_by: by });
            }
            served += u64::from(run.permits);
        }
        let refused_us = refusal_wait(&reply, &mut by);
        if forecast.calls == CALLS_MAX / 2 {
            half = (forecast.now_us, served);
        }
        forecast.advance(refused_us, grain_us, own_us);
    }
    // Far behind: at the rate at which those before it were served lately.
    let (since_us, served_since) = (forecast.now_us - half.0, served - half.1);
    let left = (ahead.cost_before + u64::from(ahead.cost)).saturating_sub(served);
    let left_us = u128::from(since_us) * u128::from(left) / u128::from(served_since.max(1));
    let wait_us = u64::try_from(left_us).ok()?.checked_add(forecast.now_us - now.0)?;
    (served_since > 0).then(|| StartForecast { wait: Duration::from_micros(wait_us), limited_by: by })
}

/// Wants of those before it, as permits of cost 1.
fn requests_ahead(mut left: u64) -> Vec<PermitRequest> {
    let mut wants = Vec::new();
    while left > 0 && wants.len() < GROUPS_MAX {
        let permits = u32::try_from(left).unwrap_or(u32::MAX).min(PERMITS_MAX);
        wants.push(PermitRequest::charges(permits, 1));
        left -= u64::from(permits);
    }
    wants
}

/// Jobs that the steady outflow has let out: the first at once.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative, and saturates")]
fn released_by_egress(jobs_per_second: Option<f64>, since: Duration) -> u64 {
    jobs_per_second.map_or(u64::MAX, |rate| 1 + (rate * since.as_secs_f64()) as u64)
}

/// When the steady outflow lets it out, in microseconds from now.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "saturates")]
fn egress_time(ahead: &ForecastInput) -> Option<u64> {
    ahead.jobs_per_second.map(|rate| (ahead.cost_before as f64 * 1e6 / rate).ceil() as u64)
}

/// How long the reply says that those who were refused must wait, and whether exactly; notes which limit refuses.
fn refusal_wait(reply: &LimiterReply, by: &mut Option<usize>) -> Option<(u64, bool)> {
    let of_kind = reply.skipped.first().map(|passed| (passed.limit, passed.wait_us, passed.exact));
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
        let born = forecast.call(Vec::new()).state_epoch;
        let mut ended = past.ended.clone();
        ended.truncate(BATCH_MAX);
        if past.in_flight != CostByKind::default() {
            // What is on the wire is over soon: as if it were now.
            ended.truncate(BATCH_MAX - 1);
            ended.push(PastUse { age: Duration::ZERO, cost: past.in_flight });
        }
        forecast.calls += 1;
        let call = LimiterCall {
            rebuild: Some(RebuildData { state_epoch: born, ended, in_flight: CostByKind::default() }),
            ..forecast.empty_call(Vec::new())
        };
        forecast.quota.call(now, spec, &call);
        forecast
    }

    fn empty_call(&self, wants: Vec<PermitRequest>) -> LimiterCall {
        LimiterCall {
            incarnation: 1,
            number: self.calls,
            requests: wants,
            releases: Vec::new(),
            pause: None,
            rebuild: None,
            seeds: None,
            invalidate_epoch: None,
            run_id: RUN_ID.to_owned(),
        }
    }

    /// Asks now, and settles what has been answered by now.
    fn call(&mut self, wants: Vec<PermitRequest>) -> LimiterReply {
        self.calls += 1;
        let kinds: Vec<(u32, CallKind)> = wants.iter().map(|want| (want.cost, want.kind)).collect();
        let mut call = self.empty_call(wants);
        while let Some((at_us, number, cost, kind)) = self.answers.front().copied() {
            if at_us > self.now_us || call.releases.len() == BATCH_MAX {
                break;
            }
            self.answers.pop_front();
            let fate = ReleaseKind::Used { age: Duration::from_micros(self.now_us - at_us) };
            call.releases.push(PermitRelease { call: number, cost, kind, subjects: Vec::new(), release_kind: fate });
        }
        let reply = self.quota.call(Micros(self.now_us), self.spec, &call);
        for run in &reply.grants {
            let (cost, kind) = kinds.get(run.request_index).copied().unwrap_or((1, CallKind::Charge));
            let at_us = reply.now.0 + run.wait_us + self.hold_us;
            self.answers.push_back((at_us, self.calls, cost * run.permits, kind));
        }
        reply
    }

    /// To the instant at which asking again is worth it.
    fn advance(&mut self, refused: Option<(u64, bool)>, grain_us: u64, own_us: Option<u64>) {
        let answer_us = self.answers.front().map(|(at_us, ..)| (*at_us).max(self.now_us + 1_000));
        let next_us = match refused {
            Some((wait_us, true)) => self.now_us + wait_us.max(1),
            // Sooner, if an answer comes: it is what they wait for.
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
