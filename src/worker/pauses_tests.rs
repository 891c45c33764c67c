use super::*;

#[tokio::test(start_paused = true)]
async fn jobs_flow_since_the_last_rest_for_a_provider_that_was_down() {
    let (pauses, second) = (Pauses::default(), Duration::from_secs(1));
    pauses.stop_taking(second * 9, By::Limit, "waits for limit per-minute");
    assert_eq!(pauses.flows_for(), Some(Duration::MAX), "at its limit it flows");
    pauses.stop_sending(second * 30, By::Setup, "provider answered 401");
    tokio::time::advance(second * 29).await;
    assert_eq!(pauses.flows_for(), None);
    tokio::time::advance(second * 11).await;
    assert_eq!(pauses.flows_for(), Some(second * 10));
    pauses.stop_sending(second * 30, By::Breaker, "down");
    pauses.lift();
    assert_eq!(pauses.flows_for(), Some(Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn a_lane_rests_for_a_ledger_that_stands_still_and_not_for_one_late_permit() {
    let pauses = Pauses::default();
    for _ in 0..100 {
        pauses.permit_late();
    }
    assert_eq!(pauses.state(), LaneState::Running);
    pauses.permit_in_time();
    for _ in 0..3 {
        assert_eq!(pauses.state(), LaneState::Running);
        pauses.permit_late();
        tokio::time::advance(Duration::from_millis(300)).await;
    }
    let LaneState::Resting(pause) = pauses.state() else { panic!("{:?}", pauses.state()) };
    assert_eq!((pause.by, pauses.sending_paused()), (By::Engine, None));
    tokio::time::advance(LATE_REST).await;
    assert_eq!(pauses.state(), LaneState::Running);
}

/// Through every other rest, and through a changed row, until the broker lets it have its queue.
#[tokio::test(start_paused = true)]
async fn a_lane_without_its_queue_is_stopped_until_it_has_it() {
    let (pauses, second) = (Pauses::default(), Duration::from_secs(1));
    pauses.stop_taking(second * 3_600, By::Limit, "waits for limit all");
    pauses.closed_by_broker(second, "queue `payments.bolt` exists");
    for _ in 0..2 {
        let LaneState::Stopped(pause) = pauses.state() else { panic!("{:?}", pauses.state()) };
        assert_eq!((pause.by, pause.cause.as_str()), (By::Setup, "queue `payments.bolt` exists"));
        assert!(pauses.is_closed_by_broker());
        assert_eq!(pauses.sending_paused(), None, "what is in hand goes on");
        tokio::time::advance(second * 2).await;
        pauses.lift();
    }
    pauses.opened();
    assert_eq!((pauses.state(), pauses.is_closed_by_broker()), (LaneState::Running, false));
}

/// What was logged meanwhile.
#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Page {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn the_circuit_breaker_says_whose_it_is() {
    let page = Page::default();
    let writer = page.clone();
    let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _kept = tracing::subscriber::set_default(lines);
    let pauses = Pauses::of(&ProviderName::new("acme").unwrap());
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
    let log = String::from_utf8(page.0.lock().unwrap().clone()).unwrap();
    let of_breaker: Vec<&str> = log.lines().filter(|line| line.contains("circuit breaker")).collect();
    assert!(of_breaker.len() >= 2 && of_breaker.iter().all(|line| line.contains("acme")), "{log}");
}
