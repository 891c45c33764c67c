use super::*;
use crate::captured_log::capture_log;

#[tokio::test(start_paused = true)]
async fn health_counts_from_the_last_breaker_pause() {
    let (pauses, second) = (LaneControl::default(), Duration::from_secs(1));
    pauses.pause_claims(second * 9, PauseCause::Limit, Wait::for_limit("per-minute"));
    assert_eq!(pauses.healthy_for(), Some(Duration::MAX), "at its limit it flows");
    pauses.pause_sending(
        second * 30,
        PauseCause::Setup,
        Wait::with_detail(WaitReason::Misconfigured, "provider answered 401"),
    );
    tokio::time::advance(second * 29).await;
    assert_eq!(pauses.healthy_for(), None);
    tokio::time::advance(second * 11).await;
    assert_eq!(pauses.healthy_for(), Some(second * 10));
    pauses.pause_sending(second * 30, PauseCause::Breaker, WaitReason::CircuitOpen.into());
    pauses.clear();
    assert_eq!(pauses.healthy_for(), Some(Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn slow_ledger_pauses_lane_one_miss_does_not() {
    let pauses = LaneControl::default();
    for _ in 0..100 {
        pauses.record_deadline_miss();
    }
    assert_eq!(pauses.status(), LaneStatus::default());
    pauses.record_on_time();
    for _ in 0..3 {
        assert_eq!(pauses.status(), LaneStatus::default());
        pauses.record_deadline_miss();
        tokio::time::advance(Duration::from_millis(300)).await;
    }
    let LaneStatus { does, pause } = pauses.status();
    assert_eq!((does, pause.unwrap().by, pauses.sending_pause()), (LaneState::Resting, PauseCause::Backend, None));
    tokio::time::advance(DEADLINE_MISS_PAUSE).await;
    assert_eq!(pauses.status(), LaneStatus::default());
}

/// The state stays through other pauses and through a changed row, until the broker grants the queue.
#[tokio::test(start_paused = true)]
async fn lane_without_its_queue_is_stopped() {
    let (pauses, second) = (LaneControl::default(), Duration::from_secs(1));
    pauses.pause_claims(second * 3_600, PauseCause::Limit, Wait::for_limit("all"));
    pauses.record_queue_refusal(second, "queue `payments.bolt` exists");
    for _ in 0..2 {
        let LaneStatus { does, pause } = pauses.status();
        let pause = pause.unwrap();
        assert_eq!((does, pause.by), (LaneState::Stopped, PauseCause::Setup));
        assert_eq!(pause.words, "queue `payments.bolt` exists");
        assert!(pauses.is_queue_refused());
        assert_eq!(pauses.sending_pause(), None, "active jobs continue");
        tokio::time::advance(second * 2).await;
        pauses.clear();
    }
    pauses.record_queue_open();
    assert_eq!((pauses.status().does, pauses.is_queue_refused()), (LaneState::Running, false));
}

#[tokio::test(start_paused = true)]
async fn breaker_log_names_its_provider() {
    let (log, _guard) = capture_log();
    let pauses = LaneControl::for_provider(&ProviderName::new("acme").unwrap());
    let down = Outcome::NotSent { cause: "refused".to_owned() };
    let up = Outcome::Declined { reason: "402".to_owned() };
    for (outcome, change) in [(&down, "opens"), (&up, "closes")] {
        let mut changed = false;
        for number in 0..50 {
            let job = JobId::new(format!("p{number}")).unwrap();
            changed |= pauses.observe(&job, outcome, Instant::now(), 1.0).is_some();
            tokio::time::advance(Duration::from_secs(60)).await;
        }
        assert!(changed, "{change}");
    }
    let of_breaker = log.lines_with("circuit breaker");
    assert!(of_breaker.len() >= 2 && of_breaker.iter().all(|line| line.contains("acme")), "{of_breaker:?}");
}
