//! GCRA against the arithmetic that redis-cell documents for `CL.THROTTLE <key> <max_burst> <count> <period>
//! <quantity>`, see <https://github.com/brandur/redis-cell#response>.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sluicegate::domain::limit::Algorithm;
use sluicegate::domain::permit_protocol::RefusalReason;
use sluicegate::domain::quota::Quota;

use super::*;

on_every_limiter!(the_documented_example_has_its_documented_answers);

/// The limiter's reply as `CL.THROTTLE` gives it, for one permit at its start: a permit that was booked ahead is treated as a call at that time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ThrottleResponse {
    limited: bool,
    /// Requests that may come at once: for GCRA, its burst and one more.
    limit: u32,
    /// Requests that may still come at once.
    remaining: u64,
    /// `None` if it was allowed, or if it costs more than the limit.
    retry_after: Option<Duration>,
    /// Time until nothing is used any more.
    reset_after: Duration,
}

impl ThrottleResponse {
    /// The response of the deciding limit to a call for one permit of this cost.
    fn from_reply(spec: &QuotaSpec, cost: u32, reply: &LimiterReply) -> Self {
        let limit = spec.limits.get(reply.deciding_limit).map_or(0, |limit| limit.cost_max());
        let ahead_us = reply.grants.last().map_or(0, |grant| grant.wait_us);
        let retry_after = reply.refused.filter(|refused| match refused.reason {
            RefusalReason::Limit { .. } => cost <= limit,
            _ => true,
        });
        Self {
            limited: reply.refused.is_some(),
            limit,
            remaining: reply.remaining,
            retry_after: retry_after.map(|refused| Duration::from_micros(refused.wait_us)),
            reset_after: Duration::from_micros(reply.reset_us.saturating_sub(ahead_us)),
        }
    }

    /// The values as `CL.THROTTLE` prints them: whole seconds, rounded up, and -1 for no retry.
    fn seconds(&self) -> [i64; 5] {
        let whole = |duration: Duration| {
            i64::try_from(duration.as_secs()).unwrap_or(i64::MAX) + i64::from(duration.subsec_nanos() > 0)
        };
        [
            i64::from(self.limited),
            i64::from(self.limit),
            i64::try_from(self.remaining).unwrap_or(i64::MAX),
            self.retry_after.map_or(-1, whole),
            whole(self.reset_after),
        ]
    }
}

/// The command's state, in microseconds: a theoretical arrival time, an emission interval, and a tolerance of `burst +
/// 1` intervals.
#[derive(Clone, Debug)]
struct RedisCell {
    interval_us: i64,
    limit: i64,
    arrival_us: i64,
}

impl RedisCell {
    fn new(max_burst: u32, count: i64, period_us: i64) -> Self {
        Self { interval_us: period_us / count, limit: i64::from(max_burst) + 1, arrival_us: 0 }
    }

    /// Limited, limit, remaining, retry after, reset after. -1: never.
    fn throttle(&mut self, now_us: i64, quantity: i64) -> [i64; 5] {
        let tolerance_us = self.interval_us * self.limit;
        let arrival_us = self.arrival_us.max(now_us);
        let next_us = arrival_us + self.interval_us * quantity;
        let early_us = next_us - tolerance_us - now_us;
        let is_limited = early_us > 0;
        let retry_us = if is_limited && self.interval_us * quantity <= tolerance_us { early_us } else { -1 };
        if !is_limited {
            self.arrival_us = next_us;
        }
        let reset_us = if is_limited { arrival_us } else { next_us } - now_us;
        let remaining = (tolerance_us - reset_us) / self.interval_us;
        [i64::from(is_limited), self.limit, remaining, retry_us, reset_us]
    }
}

/// Whole seconds, rounded up as the module does, so that no caller retries too early.
fn in_seconds(answers: [i64; 5]) -> [i64; 5] {
    let up = |us: i64| if us < 0 { us } else { (us + 999_999) / 1_000_000 };
    [answers[0], answers[1], answers[2], up(answers[3]), up(answers[4])]
}

fn in_micros(answers: &ThrottleResponse) -> [i64; 5] {
    let us = |duration: Duration| i64::try_from(duration.as_micros()).unwrap();
    [
        i64::from(answers.limited),
        i64::from(answers.limit),
        i64::try_from(answers.remaining).unwrap(),
        answers.retry_after.map_or(-1, us),
        us(answers.reset_after),
    ]
}

fn gcra(burst: u32, count: u32, period: Duration) -> QuotaSpec {
    let limit = LimitSpec::sliding_log("gcra", count, period);
    let limit = LimitSpec { algorithm: Algorithm::Gcra, burst: Some(burst), ..limit };
    QuotaSpec { limits: vec![limit], ..spec(&[]) }
}

async fn the_documented_example_has_its_documented_answers(limiter: Arc<dyn Limiter>) {
    let spec = gcra(15, 30, Duration::from_secs(60));
    let mut caller = Caller::warm(&limiter, spec.clone()).await;
    let mut cell = RedisCell::new(15, 30, 60_000_000);
    for turn in 0..20 {
        let reply = caller.call(&[1]).await;
        let answers = ThrottleResponse::from_reply(&spec, 1, &reply);
        let now_us = i64::try_from(reply.now.0).unwrap();
        let ahead_us = reply.grants.first().map_or(0, |run| i64::try_from(run.wait_us).unwrap());
        let documented = cell.throttle(now_us + ahead_us, 1);
        assert_eq!(in_micros(&answers), documented, "round {turn}: {reply:?}");
        assert_eq!(answers.seconds(), in_seconds(documented), "round {turn}");
        if turn == 0 {
            assert_eq!(answers.seconds(), [0, 16, 15, -1, 2], "as printed in the README of redis-cell");
        }
    }
}

/// Random sequences of gaps and quantities; a quantity of 0 only reads. A booked permit corresponds to two commands:
/// one that is told when to retry, and one at that start.
#[test]
fn five_reply_values_match_redis_cell() {
    let call = (prop_oneof![3 => 0_u64..300_000, 2 => 0_u64..4_000_000, 1 => Just(0)], 0_u32..6);
    let numbers = (0_u32..8, 1_u32..40, 1_u64..3_000_000);
    let histories = (numbers, prop::collection::vec(call, 1..60));
    let (limited, booked) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let mut runner = TestRunner::new(Config { cases: 3_000, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&histories, |((burst, count, interval_us), calls)| {
        // A period of whole milliseconds that divides into whole microseconds.
        let period_ms = (interval_us * u64::from(count)).div_ceil(1_000).next_multiple_of(u64::from(count));
        let spec = gcra(burst, count, Duration::from_millis(period_ms));
        let period_us = i64::try_from(period_ms * 1_000).unwrap();
        let mut cell = RedisCell::new(burst, i64::from(count), period_us);
        let (mut quota, mut born, mut now_us) = (Quota::default(), None, 1_800_000_000_000_000);
        for (number, (gap_us, quantity)) in (1..).zip(&calls) {
            now_us += gap_us;
            let wants = if *quantity == 0 { Vec::new() } else { vec![PermitRequest::charges(1, *quantity)] };
            let call = LimiterCall {
                incarnation: 1,
                number,
                requests: wants,
                releases: Vec::new(),
                pause: None,
                rebuild: born.map(forgotten_nothing),
                seeds: None,
                invalidate_epoch: None,
                look_ahead: BOOKING_HORIZON,
                run_id: "run".to_owned(),
            };
            let reply = quota.call(Micros(now_us), &spec, &call);
            if born.replace(reply.state_epoch).is_none() {
                continue;
            }
            let (at, quantity) = (i64::try_from(now_us).unwrap(), i64::from(*quantity));
            let ahead_us = reply.grants.first().map_or(0, |run| i64::try_from(run.wait_us).unwrap());
            if ahead_us > 0 {
                let throttled = cell.throttle(at, quantity);
                prop_assert_eq!((throttled[0], throttled[3]), (1, ahead_us), "the retry is due at the booked start");
                booked.set(booked.get() + 1);
            }
            let documented = cell.throttle(at + ahead_us, quantity);
            now_us += u64::try_from(ahead_us).unwrap();
            limited.set(limited.get() + documented[0]);
            let answers = ThrottleResponse::from_reply(&spec, u32::try_from(quantity).unwrap(), &reply);
            prop_assert_eq!(in_micros(&answers), documented, "{:?}", reply);
            prop_assert_eq!(answers.seconds(), in_seconds(documented));
        }
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    assert!(limited.get() > 5_000 && booked.get() > 1_000, "{limited:?} limited, {booked:?} booked");
}
