//! Tests of a job's position, and of its estimated start there. Every instant is an argument.

use super::*;
use crate::domain::clear_time::{ClearTime, MissingInput};

/// A job in the leaky bucket has the lane's queue behind it; ahead are the jobs in the bucket and at the gate.
#[test]
fn job_in_the_leaky_bucket_waits_for_egress() {
    let in_bucket = |before, leaves_in| {
        changed(|f| {
            f.ahead = JobsAhead { jobs: 62, cost: 62, active: 4, ready: Some(60), workers: 1 };
            f.claim =
                ClaimState::AwaitingEgress { worker: "w1".to_owned(), position: EgressPosition { before, leaves_in } };
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
        let refused =
            PermitRefusal { reason: PermitRefusalReason::Limit("slots".to_owned()), wait: ms(wait_ms), exact: false };
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
    assert!(sought(MessageSearch::Searched).contains("no lane's queue has its message"));
    let lane = |provider: &str, clears| LaneQueue { provider: provider.to_owned(), ready: 1_200, clears };
    let closed = ClearTime::Never { limit: Some("second".to_owned()) };
    for (clears, words) in [
        (ClearTime::In(ms(12_000)), ", all sent by about 14:03:32 UTC"),
        (closed, ", nothing is sent: limit second is 0"),
        (ClearTime::Never { limit: None }, ", all blocked by an account rule"),
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
