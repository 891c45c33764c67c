//! Concurrency limits at the gate: how soon a released slot is used, what asking costs meanwhile, and that the provider
//! never has more requests in flight, judged by the provider.

use sluicegate::domain::limit::{AppliesTo, Scope};
use sluicegate::limiter::gate::{EgressRequest, EgressRule, LaneEgress};

use super::altered::{Altered, account, hour, steered, use_one};
use super::*;

fn slots(max_requests: u32) -> QuotaSpec {
    QuotaSpec { limits: vec![LimitSpec::concurrency("slots", max_requests)], ..spec(&[]) }
}

/// What a run came to.
struct Flights {
    largest: u64,
    breaches: u64,
    answered: u64,
    /// Mean time from start to answer, in seconds.
    hold: f64,
    calls: u64,
    /// Requests of each gate.
    by_gate: Vec<u64>,
}

/// Forty tasks that always want a permit, on as many gates, for so long.
async fn fly(spec: QuotaSpec, gates: u64, seconds: u64, faults: Faults) -> Flights {
    let options = FakeOptions {
        concurrency: Some(spec.limits[0].max_requests),
        on_limit: OnLimit::Count,
        ..FakeOptions::default()
    };
    let provider = Arc::new(Mutex::new(StrictProvider::new(options)));
    let limiter = Forgetful::new(faults.reply_loss);
    let (stop, holds) = (CancellationToken::new(), Arc::new(Mutex::new(vec![Vec::new(); gates as usize])));
    let begun = Instant::now();
    let end = begun + Duration::from_secs(seconds);
    let mut tasks = JoinSet::new();
    for incarnation in 1..=gates {
        let gate = open_gate(limiter.clone(), spec.clone(), incarnation, &stop);
        for task in 0..40 / gates {
            let (gate, provider, holds) = (gate.clone(), provider.clone(), holds.clone());
            let mut random = StdRng::seed_from_u64(incarnation * 1_000 + task);
            tasks.spawn(async move {
                while Instant::now() < end {
                    let AcquireResult::Granted(permit) = gate.acquire(ask(1, end)).await else { return };
                    if random.random_bool(faults.dropped) {
                        continue;
                    }
                    sleep_until(permit.start_at).await;
                    let Ok(in_flight) = permit.begin() else { continue };
                    let start = Instant::now();
                    sleep(Duration::from_micros(random.random_range(500..20_000))).await;
                    let arrival = {
                        let mut provider = provider.lock().unwrap();
                        let arrival = provider.record_arrival(begun.elapsed().as_micros() as u64);
                        provider.begin_flight(arrival)
                    };
                    assert_eq!(arrival.refused_for, None);
                    sleep(Duration::from_millis(random.random_range(50..250))).await;
                    provider.lock().unwrap().end_flight();
                    if random.random_bool(faults.unanswered) {
                        in_flight.release_unknown();
                        continue;
                    }
                    sleep(Duration::from_micros(random.random_range(500..20_000))).await;
                    in_flight.release_used(Instant::now());
                    holds.lock().unwrap()[incarnation as usize - 1].push(start.elapsed().as_secs_f64());
                }
            });
        }
    }
    while tasks.join_next().await.is_some() {}
    stop.cancel();
    let report = provider.lock().unwrap().report();
    let holds = holds.lock().unwrap();
    let answered: usize = holds.iter().map(Vec::len).sum();
    Flights {
        largest: report.largest_in_flight,
        breaches: report.in_flight_breaches,
        answered: answered as u64,
        hold: holds.iter().flatten().sum::<f64>() / answered as f64,
        calls: limiter.calls.load(std::sync::atomic::Ordering::Relaxed),
        by_gate: holds.iter().map(|holds| holds.len() as u64).collect(),
    }
}

/// The slots are used in full, at about one call for each release: no gate asks again and again meanwhile.
#[tokio::test(start_paused = true)]
async fn freed_slots_are_used_without_polling() {
    let run = fly(slots(5), 1, 60, NO_FAULTS).await;
    assert_eq!((run.largest, run.breaches), (5, 0));
    let possible = 60.0 * 5.0 / run.hold;
    assert!(run.answered as f64 > 0.95 * possible, "{} of {possible:.0}", run.answered);
    assert!((run.calls as f64) < 1.5 * run.answered as f64, "{} calls, {} releases", run.calls, run.answered);
}

#[tokio::test(start_paused = true)]
async fn processes_share_the_slots() {
    let run = fly(slots(4), 2, 60, NO_FAULTS).await;
    assert_eq!((run.largest, run.breaches), (4, 0));
    assert!(run.answered as f64 > 0.9 * 60.0 * 4.0 / run.hold, "{}", run.answered);
    assert!(run.by_gate.iter().all(|answered| *answered > 0), "{:?}", run.by_gate);
    // Each gate asks at most 20 times a second while all slots are taken.
    assert!(run.calls < run.answered * 2 + 2 * 60 * 20, "{} calls, {} releases", run.calls, run.answered);
}

#[tokio::test(start_paused = true)]
async fn losses_never_put_more_in_flight() {
    let faults = Faults { reply_loss: 0.05, dropped: 0.05, unanswered: 0.02 };
    let run = fly(slots(6), 3, 120, faults).await;
    assert_eq!((run.largest, run.breaches), (6, 0));
    assert!(run.answered > 500, "{}", run.answered);
}

/// The time from the release of the only slot until a waiter that another limit or kind counts has it.
async fn wake_up(limit: LimitSpec, limiter: Arc<dyn Limiter>, gates: [u64; 2]) -> Duration {
    let rate = LimitSpec::sliding_log("rate", 1_000, Duration::from_secs(1));
    let spec = QuotaSpec { limits: vec![rate, limit], ..slots(1) };
    let stop = CancellationToken::new();
    let first = open_gate(limiter.clone(), spec.clone(), gates[0], &stop);
    let second = if gates[0] == gates[1] { first.clone() } else { open_gate(limiter, spec, gates[1], &stop) };
    let patient = Instant::now() + Duration::from_secs(60);
    let request = move || AcquireRequest { account: Some("merchant".into()), ..ask(1, patient) };
    let AcquireResult::Granted(permit) = first.acquire(request()).await else { panic!("refused") };
    sleep_until(permit.start_at).await;
    let in_flight = permit.begin().unwrap();
    let waiting = tokio::spawn(async move {
        let AcquireResult::Granted(permit) = second.acquire(request()).await else { panic!("refused") };
        permit.start_at
    });
    // In the middle between two times of asking again.
    sleep(Duration::from_millis(1_027)).await;
    let released = Instant::now();
    in_flight.release_used(released);
    let started = waiting.await.unwrap();
    stop.cancel();
    started.duration_since(released)
}

#[tokio::test(start_paused = true)]
async fn release_wakes_the_waiter_at_once() {
    let slot = || LimitSpec::concurrency("slots", 1);
    for limit in
        [slot(), LimitSpec { applies_to: AppliesTo::Charge, ..slot() }, LimitSpec { scope: Scope::Account, ..slot() }]
    {
        let waited = wake_up(limit.clone(), Arc::new(EmbeddedLimiter::new()), [1, 1]).await;
        assert!(waited <= Duration::from_millis(5), "{waited:?} under {limit:?}");
    }
}

/// A process does not hear of another's release: it asks again every 50 ms.
#[tokio::test(start_paused = true)]
async fn other_process_uses_the_slot_within_50_ms() {
    for scope in [Scope::Provider, Scope::Account] {
        let slot = LimitSpec { scope, ..LimitSpec::concurrency("slots", 1) };
        let waited = wake_up(slot, Arc::new(EmbeddedLimiter::new()), [1, 2]).await;
        assert!(waited <= Duration::from_millis(55), "{waited:?} under {scope:?}");
    }
}

/// A gate as a worker uses it, whose accounts may have two requests in flight each.
struct TwoAtOnce {
    gate: Gate,
    limiter: Arc<Altered>,
    lane: Arc<LaneEgress>,
    _settings: watch::Sender<Arc<QuotaSpec>>,
}

impl TwoAtOnce {
    fn new() -> Self {
        let own = LimitSpec { scope: Scope::Account, ..LimitSpec::concurrency("own", 2) };
        let rate = LimitSpec::sliding_log("rate", 1_000, Duration::from_secs(1));
        let limiter = Altered::slow(Duration::from_millis(1));
        let steered = steered(limiter.clone(), QuotaSpec { limits: vec![rate, own], ..slots(1) });
        Self { gate: steered.gate, limiter, lane: LaneEgress::new(32, 1_000.0), _settings: steered.settings }
    }

    /// A payment whose request takes 300 ms. When it is refused, it returns to the ledger and is claimed again. Returns
    /// how often that was, and the start of its request.
    fn pay(&self, name: &str) -> impl Future<Output = (u64, Instant)> + Send + 'static {
        let (gate, lane, name) = (self.gate.clone(), Arc::clone(&self.lane), name.to_owned());
        async move {
            for returns in 0.. {
                let wait_until = hour();
                let egress = EgressRequest { lane: Arc::clone(&lane), rule: EgressRule::Paced, wait_until };
                let account_wait = Duration::from_millis(250);
                let request = AcquireRequest { account_wait, egress: Some(egress), ..ask(1, wait_until) };
                let AcquireResult::Granted(mut permit) = gate.acquire(account(&name, request)).await else {
                    sleep(Duration::from_millis(30)).await;
                    continue;
                };
                let _slot = permit.take_worker_slot();
                sleep_until(permit.start_at).await;
                let (in_flight, started) = (permit.begin().unwrap(), Instant::now());
                sleep(Duration::from_millis(300)).await;
                in_flight.release_used(Instant::now());
                return (returns, started);
            }
            unreachable!()
        }
    }
}

/// The account's payments follow each other without a gap, few of them return to the ledger, and those of others start
/// at once.
#[tokio::test(start_paused = true)]
async fn account_at_its_limit_waits_for_a_release() {
    let rig = TwoAtOnce::new();
    // A new gate compares clocks first.
    use_one(&rig.gate, account("early", ask(1, hour()))).await;
    let (before, began) = (rig.limiter.calls(), Instant::now());
    let mut flood = JoinSet::new();
    (0..20).for_each(|_| drop(flood.spawn(rig.pay("flood"))));
    let mut others = JoinSet::new();
    (0..20).for_each(|number| drop(others.spawn(rig.pay(&format!("other-{number}")))));
    while let Some(other) = others.join_next().await {
        let (returns, started) = other.unwrap();
        assert!(returns == 0 && started - began < Duration::from_millis(50), "{:?}", started - began);
    }
    let returns: u64 = flood.join_all().await.into_iter().map(|(returns, _)| returns).sum();
    let (took, calls) = (began.elapsed(), rig.limiter.calls() - before);
    let utilisation = 20.0 / 2.0 * 0.3 / took.as_secs_f64();
    assert!(utilisation > 0.9, "{utilisation:.3}");
    assert!(returns <= 20, "{returns} returns of 20 payments");
    // A call for each request and each release, and 20 a second that ask again.
    assert!(calls < 2 * 40 + 20 * 4, "{calls} calls");
}

/// A full prefetch of one account does not wait: all but a few return to the ledger, also in a lane with few worker
/// slots.
#[tokio::test(start_paused = true)]
async fn few_jobs_of_an_account_wait_for_a_release() {
    for (workers, expected) in [(32, 16), (4, 4)] {
        let rig = TwoAtOnce { lane: LaneEgress::new(workers, 1_000.0), ..TwoAtOnce::new() };
        let mut held = Vec::new();
        for _ in 0..2 {
            let AcquireResult::Granted(permit) = rig.gate.acquire(account("flood", ask(1, hour()))).await else {
                panic!("refused")
            };
            sleep_until(permit.start_at).await;
            held.push(permit.begin().unwrap());
        }
        let (patience, mut waiting) = (Duration::from_millis(250), JoinSet::new());
        for _ in 0..100 {
            let egress = EgressRequest { lane: Arc::clone(&rig.lane), rule: EgressRule::Paced, wait_until: hour() };
            let request = AcquireRequest { account_wait: patience, egress: Some(egress), ..ask(1, hour()) };
            let (gate, request) = (rig.gate.clone(), account("flood", request));
            waiting.spawn(async move { gate.acquire(request).await });
        }
        let mut until = async |time: Duration| {
            sleep(time).await;
            while waiting.try_join_next().is_some() {}
            waiting.len()
        };
        assert_eq!(until(patience + Duration::from_millis(50)).await, expected, "{workers} worker slots");
        assert_eq!(until(Duration::from_millis(1_500)).await, expected);
        assert_eq!(until(Duration::from_millis(300)).await, 0, "after two seconds they return, too");
    }
}

/// Many accounts at their limits ask again in the same calls.
#[tokio::test(start_paused = true)]
async fn accounts_at_their_limits_ask_again_together() {
    let rig = TwoAtOnce::new();
    let mut held = Vec::new();
    for number in 0..30 {
        for _ in 0..2 {
            let request = account(&format!("merchant-{number}"), ask(1, hour()));
            let AcquireResult::Granted(permit) = rig.gate.acquire(request).await else { panic!("refused") };
            sleep_until(permit.start_at).await;
            held.push(permit.begin().unwrap());
        }
    }
    let mut waiting = JoinSet::new();
    for number in 0..30 {
        waiting.spawn(rig.pay(&format!("merchant-{number}")));
        sleep(Duration::from_millis(7)).await;
    }
    let before = rig.limiter.calls();
    sleep(Duration::from_secs(1)).await;
    let calls = rig.limiter.calls() - before;
    assert!((15..=25).contains(&calls), "{calls} calls in a second");
    assert!(waiting.try_join_next().is_none());
}
