//! Tests of a job's position and its estimated start there, of forecasts, and of jobs that are finished, in flight or
//! without a record. Every instant is an argument.

use super::*;
use crate::domain::clear_time::{ClearTime, MissingInput};
use crate::domain::explain::forecast::{ForecastInput, current_usage, forecast_start};
use crate::domain::permit_protocol::CallKind;
use crate::domain::time::Micros;

/// A job in the leaky bucket has the lane's queue behind it; ahead are the jobs in the bucket and at the gate.
#[test]
fn job_in_the_leaky_bucket_waits_for_egress() {
    let in_bucket = |before, leaves_in| {
        changed(|f| {
            f.ahead = JobsAhead { jobs: 62, cost: 62, active: 4, ready: Some(60), workers: 1 };
            f.claim = ClaimState::AwaitingEgress {
                worker: "w1".to_owned(),
                position: EgressPosition { before, cost_before: before, leaves_in },
            };
            f.limiter.recent_usage = Some(past(&[(47_600, 590)], 0));
        })
    };
    let egress = in_bucket(2, ms(2_100));
    let at = egress.blocked_at.as_ref().unwrap();
    assert_eq!((at.check, at.starts_in, at.jobs_ahead, at.exact), ("queue", Some(ms(2_100)), Some(2), true));
    let words = "active at worker w1, in the leaky bucket (1000.0 per second): estimated start \
                 14:03:22 UTC (in 2.1 s), 2 ahead of it";
    assert_eq!(egress.summary, words);
    // Ten slots are free: the eleventh job waits longer for the limit than for its egress.
    let limit = in_bucket(10, ms(2_100));
    let at = limit.blocked_at.as_ref().unwrap();
    assert_eq!((at.check, at.limit.as_deref(), at.jobs_ahead), ("limit", Some("per-minute"), Some(10)));
    assert!(at.starts_in.unwrap() > ms(12_000), "{at:?}");
    // A job that another worker holds has the lane's queue behind it, too.
    let elsewhere = changed(|f| f.claim = ClaimState::OtherWorker { worker: "w2".to_owned() });
    assert_eq!(elsewhere.blocked_at.unwrap().jobs_ahead, Some(5));
}

#[test]
fn start_is_forecast_only_where_known() {
    // A delayed job returns to the end of the queue.
    let delayed = |wake_ms: i64| {
        let explained = changed(|f| {
            job(f).wake_at = EpochMs(NOW.0 + wake_ms);
            delays(f, &WaitReason::Egress.into());
        });
        (explained.blocked_at.unwrap(), explained.summary)
    };
    let (at, words) = delayed(4_000);
    assert_eq!((at.check, at.starts_in, at.jobs_ahead), ("time", Some(ms(12_432)), Some(37)), "{words}");
    let (at, words) = delayed(30_000);
    assert_eq!((at.check, at.starts_in), ("time", Some(ms(30_000))), "{words}");
    // Only the running worker knows whether the lane sends at all.
    let unasked = changed(|f| f.lane = LaneFacts::NotAsked);
    let at = unasked.blocked_at.unwrap();
    assert_eq!((at.check, at.starts_in, at.jobs_ahead), ("limit", None, Some(37)));
    assert!(
        unasked.summary.ends_with("about 37 ahead of it; estimated start unknown: no running worker was asked"),
        "{}",
        unasked.summary
    );
    // The end of a pause does not tell the start either.
    let cause = Wait::with_detail(WaitReason::CircuitOpen, "no answer");
    let stopped = changed(|f| f.lane = LaneFacts::Paused { cause, ends_in: ms(1_000) }).blocked_at.unwrap();
    assert_eq!((stopped.check, stopped.starts_in, stopped.held_for), ("lane", None, Some(ms(1_000))));
}

/// Whenever the gate asks again, that is no instant at which the job starts.
#[test]
fn job_behind_requests_in_flight_has_no_start() {
    for wait_ms in [1, 50] {
        let refused = PermitRefusal { reason: BlockReason::Limit("slots".to_owned()), wait: ms(wait_ms), exact: false };
        let position = GatePosition { before: 3, cost_before: 3, refused: Some(refused), by_own_limit: false };
        let explained = changed(|f| {
            let slots = LimitSpec::concurrency("slots", 5);
            f.row.spec = Some(Arc::new(QuotaSpec { limits: vec![slots], ..spec(&[]) }));
            f.limiter.uses = vec![LimitUtilisation { name: "slots".to_owned(), used: 5, capacity: 5 }];
            f.limiter.recent_usage = Some(past(&[], 200));
            f.claim = ClaimState::AskedWorker { worker: "w1".to_owned(), position: Some(position) };
        });
        let words =
            "waits for limit slots of stripe (5 at once): until one of 5 requests in flight ends, 3 ahead of it";
        assert_eq!(explained.summary, words);
        let at = explained.blocked_at.unwrap();
        assert_eq!((at.allows.as_deref(), at.starts_in, at.used), (Some("5 at once"), None, Some(5)));
    }
}

#[test]
fn unrecorded_job_is_explained_from_its_message() {
    let queued = changed(|f| f.unrecorded = f.job.take());
    assert_eq!((queued.state.as_str(), queued.provider.as_deref()), ("queued", Some("stripe")));
    let words =
        "published, not recorded yet; waits for limit per-minute of stripe (600 per 60 s): 600 used, estimated start";
    assert!(queued.summary.starts_with(words), "{}", queued.summary);
    assert!(queued.checks[0].text.starts_with("not yet: its message is published"), "{:?}", queued.checks[0]);
    let sought = |lanes: MessageSearch| {
        let explained = changed(|f| (f.job, f.message_search) = (None, lanes));
        assert_eq!(explained.state, "unrecorded");
        explained.summary
    };
    assert!(sought(MessageSearch::NoQueue).ends_with(": it was never recorded"));
    let lane = |provider: &str, clears| LaneQueue { provider: provider.to_owned(), ready: 1_200, clears };
    let closed = ClearTime::Never { limit: Some("second".to_owned()) };
    for (clears, words) in [
        (ClearTime::In(ms(12_000)), ", all sent by about 14:03:32 UTC"),
        (closed, ", nothing is sent: limit second is 0"),
        (ClearTime::NotWhileBlocked, ", all blocked by an account rule"),
        (ClearTime::NotWhileThrottled { passed_per_s: None }, ", the provider refuses requests with 429"),
        (ClearTime::NotWhilePaused, ", paused"),
        (ClearTime::NotWhileDisabled, ", disabled"),
        (ClearTime::NotWhileBreakerOpen, ", circuit breaker open"),
        (ClearTime::Unknown(MissingInput::Worker), ""),
        (
            ClearTime::DependsOnAccounts { at_least: ms(12_000), limits: vec!["each".to_owned()], about: None },
            ", all sent by 14:03:32 UTC at the earliest",
        ),
    ] {
        let summary =
            sought(MessageSearch::MayHold(vec![lane("stripe", clears), lane("acme", ClearTime::NotWhilePaused)]));
        let wanted = format!(
            "; if it was published, its message waits in the queue of stripe (1200 messages{words}), or of acme (1200 \
             messages, paused); otherwise it was never published"
        );
        assert!(summary.contains(&wanted), "{summary}");
    }
}

/// Start of a job with this cost ahead, in milliseconds rounded up, and the limit that decides.
fn forecast_of(
    spec: &QuotaSpec,
    past: &RecentUsage,
    before: u64,
    jobs_per_second: Option<f64>,
) -> Option<(u64, String)> {
    let kind = CallKind::Charge;
    let ahead = ForecastInput { jobs_before: before, cost_before: before, cost: 1, kind, jobs_per_second };
    let now = Micros(u64::try_from(NOW.0).unwrap() * 1_000);
    let start = forecast_start(spec, now, past, &ahead)?;
    let name = start.limited_by.map_or("none", |index| spec.limit_name(index)).to_owned();
    Some((u64::try_from(start.wait.as_micros().div_ceil(1_000)).unwrap(), name))
}

/// A window of a log is padded by 2 ms and 0.05 %: 60.032 s for a minute, 10.007 s for ten seconds.
#[test]
fn forecasts_match_hand_calculation() {
    use Algorithm::{FixedWindow, Gcra, SlidingLog, TokenBucket};
    let minute = spec(&[("per-minute", SlidingLog, 600, 60_000, None)]);
    let burst = past(&[(47_600, 600)], 0);
    let spread: Vec<(u64, u32)> = (0..10).map(|s| (s * 1_000, 1)).collect();
    let ten = spec(&[("ten", SlidingLog, 10, 10_000, None)]);
    let fixed = spec(&[("fixed", FixedWindow, 100, 60_000, None)]);
    let bucket = spec(&[("bucket", TokenBucket, 10, 1_000, Some(10))]);
    let gcra = spec(&[("gcra", Gcra, 10, 1_000, None)]);
    let both = spec(&[("a", SlidingLog, 100, 1_000, None), ("per-minute", SlidingLog, 600, 60_000, None)]);
    let nothing = past(&[], 0);
    let fifty = past(&[(1_000, 50)], 0);
    for (case, spec, past, before, egress, wanted) in [
        ("all of them are free at once", &minute, &burst, 37, None, (12_432, "per-minute")),
        ("the 601st waits for another window", &minute, &burst, 600, None, (72_464, "per-minute")),
        (
            "and for an answer",
            &minute,
            &RecentUsage { hold: ms(1_000), ..burst.clone() },
            600,
            None,
            (73_464, "per-minute"),
        ),
        ("a hundred windows behind", &minute, &burst, 60_000, None, (12_432 + 100 * 60_032, "per-minute")),
        ("the fourth oldest is free 10.007 - 6 s from now", &ten, &past(&spread, 0), 3, None, (4_007, "ten")),
        ("there is capacity for the jobs ahead, too", &minute, &fifty, 549, None, (0, "none")),
        ("the next minute of the calendar", &fixed, &past(&[(5_000, 100)], 0), 99, None, (40_000, "fixed")),
        ("the one after it", &fixed, &past(&[(5_000, 100)], 0), 100, None, (100_000, "fixed")),
        ("last minute's uses are over", &fixed, &past(&[(25_000, 100)], 0), 99, None, (0, "none")),
        ("a tenth of a second each", &bucket, &past(&[(0, 10)], 0), 4, None, (500, "bucket")),
        ("the same without a burst", &gcra, &past(&[(0, 1)], 0), 4, None, (500, "gcra")),
        ("the one that refuses last is named", &both, &burst, 37, None, (12_432, "per-minute")),
        ("the bucket of one worker lets out ten a second", &minute, &nothing, 37, Some(10.0), (3_700, "none")),
    ] {
        let (wait_ms, by) = forecast_of(spec, past, before, egress).unwrap();
        // The first call is a microsecond's rounding away.
        assert!(wait_ms.abs_diff(wanted.0) <= 1 && by == wanted.1, "{case}: {wait_ms} ms by {by}, not {wanted:?}");
    }
    let open = RecentUsage { in_flight: CostByKind::charges(600), ..nothing };
    assert_eq!(forecast_of(&minute, &open, 0, None).unwrap().0, 60_032, "requests in flight count as answered now");
    assert_eq!(forecast_of(&spec(&[("shut", SlidingLog, 0, 1_000, None)]), &burst, 0, None), None);
    assert_eq!(current_usage(&minute, Micros(0), &RecentUsage::default()), [(0, 0)]);
}

/// The egress rate counts jobs, and limits count costs.
#[test]
fn egress_rate_of_a_forecast_counts_jobs() {
    let hundred = spec(&[("all", Algorithm::SlidingLog, 1_000, 1_000, None)]);
    let now = Micros(u64::try_from(NOW.0).unwrap() * 1_000);
    for (jobs_before, cost_before, wanted_ms) in [(50, 50, 5_000), (50, 500, 5_000), (5, 500, 500), (0, 0, 0)] {
        let (kind, jobs_per_second) = (CallKind::Charge, Some(10.0));
        let ahead = ForecastInput { jobs_before, cost_before, cost: 10, kind, jobs_per_second };
        let start = forecast_start(&hundred, now, &past(&[], 0), &ahead).unwrap();
        assert_eq!((start.wait, start.limited_by), (ms(wanted_ms), None), "{jobs_before} of {cost_before}");
    }
}

#[test]
fn long_queue_forecast_is_within_one_window() {
    let hundred = spec(&[("all", Algorithm::SlidingLog, 100, 1_000, None)]);
    let spread: Vec<(u64, u32)> = (0..100).map(|nth| (nth * 10, 1)).collect();
    let wanted = 10_000.0 * 1_002.5;
    let (wait_ms, _) = forecast_of(&hundred, &past(&spread, 0), 1_000_000, None).unwrap();
    assert!((wait_ms as f64 - wanted).abs() / wanted < 0.01, "{wait_ms} ms, not {wanted}");
    let (near_ms, _) = forecast_of(&hundred, &past(&spread, 0), 10_000, None).unwrap();
    assert!((near_ms as f64 - 100_250.0).abs() < 1_003.0, "{near_ms} ms");
}

#[test]
fn finished_and_in_flight_jobs_are_explained() {
    let ended = |state: &str, requests: u32| {
        changed(|f| {
            let job = job(f);
            state.clone_into(&mut job.state);
            job.reason = Some("why".to_owned());
            job.requests = (1..=requests)
                .map(|number| SentRequest { number, began_at: job.created_at, ended_at: None, outcome: None })
                .collect();
        })
    };
    for (state, requests, words, blocked_at) in [
        ("succeeded", 1, "charged at 14:03:18 UTC (2 s ago), after 1 request: why", None),
        ("declined", 2, "after 2 requests: why; not charged", None),
        ("dead", 3, "`sluicegate dlq replay inv-7` tries again", None),
        ("dead", 3, "`sluicegate dlq discard inv-7 --yes` ends it", None),
        ("expired", 0, "nothing was ever sent: why; confirmed not charged", None),
        ("cancelled", 0, "cancelled at 14:03:18 UTC", None),
        ("review", 1, "`sluicegate jobs resolve inv-7 --as succeeded`", Some("outcome")),
        ("review", 0, "fix the cause, then `sluicegate jobs resolve inv-7 --as resend`", Some("outcome")),
        ("sending", 2, "request 2 is in flight since 14:03:15 UTC (5 s), and its worker is lost", Some("outcome")),
    ] {
        let explained = ended(state, requests);
        assert!(explained.summary.contains(words), "{state}: {}", explained.summary);
        assert_eq!(explained.blocked_at.map(|at| at.check), blocked_at, "{state}");
    }
    // The reason of a delay stays known after the request is sent; it belongs to this request only.
    let late = |state: &str, before: u32| {
        let explained = changed(|f| {
            let job = job(f);
            state.clone_into(&mut job.state);
            job.requests = vec![SentRequest { number: 1, began_at: NOW, ended_at: None, outcome: None }];
            let since = EpochMs(NOW.0 - 428_000);
            job.last_delay = Some(LastDelay { reason: Wait::for_limit("per-account"), since, request: before });
        });
        let check = explained.checks.into_iter().find(|check| check.name == "time").unwrap();
        (check.at, check.text)
    };
    let waited = "waited for limit per-account from 13:56:12 UTC to 14:03:20 UTC (7 min 8 s)".to_owned();
    for state in ["succeeded", "sending"] {
        assert_eq!(late(state, 1), (Some(EpochMs(NOW.0 - 428_000)), waited.clone()), "{state}");
        assert!(late(state, 2).1.starts_with("passed for"), "{state}");
    }
    let held = changed(|f| {
        job(f).state = "sending".to_owned();
        f.claim = ClaimState::OtherWorker { worker: "w2".to_owned() };
    });
    assert!(held.summary.contains("at worker w2; the response timeout is 30 s"), "{}", held.summary);

    let unknown = changed(|f| f.job = None);
    assert!(unknown.summary.contains("waits in its lane's queue"), "{}", unknown.summary);
    assert_eq!((unknown.state.as_str(), unknown.checks.len()), ("unrecorded", 0));
    let rejected = changed(|f| {
        f.job = None;
        let (lane, reason, detail) =
            ("stripe".to_owned(), "bad_amount".to_owned(), "amount must be above 0".to_owned());
        f.rejected = vec![Rejected { at: EpochMs(NOW.0 - 1_000), lane, reason, detail }];
    });
    assert!(
        rejected.summary.contains("can never be a job (bad_amount: amount must be above 0)"),
        "{}",
        rejected.summary
    );
}

/// A decision's text is the job's reason. An earlier change of the same job is not.
#[test]
fn decisive_reason_is_shown_once() {
    for (is_decisive, words) in [
        (true, "after 1 request: resolved by an operator: seen; changed by alice; not charged"),
        (false, "after 1 request: resolved by an operator: seen; changed by alice (seen); not charged"),
    ] {
        let explained = changed(|f| {
            let job = job(f);
            (job.state, job.reason) = ("declined".to_owned(), Some("resolved by an operator: seen".to_owned()));
            job.requests = vec![SentRequest { number: 1, began_at: NOW, ended_at: None, outcome: None }];
            let (operator, reason) = ("alice".to_owned(), Some("seen".to_owned()));
            job.manual_change = Some(ManualChange { operator, reason, is_decisive });
        });
        assert!(explained.summary.contains(words), "{}", explained.summary);
    }
}
