//! Tests of the intake pace: tables, properties, and a process in virtual time whose starts wait behind its records.

use proptest::prelude::*;

use super::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A process that always has something to record.
struct Process {
    pace: IntakePace,
    now: Duration,
    recorded: u32,
    longest_wait: Duration,
}

impl Process {
    fn new() -> Self {
        Self { pace: IntakePace::default(), now: Duration::from_secs(100), recorded: 0, longest_wait: Duration::ZERO }
    }

    /// Starts every 10 ms for a second, all this late, and no records.
    fn calm(mut self, lateness: Duration) -> Self {
        for _ in 0..100 {
            self.now += ms(10);
            self.pace.record_start(lateness, self.now);
        }
        self.now += ms(10);
        self
    }

    /// Records for this long, at most 10,000 a second, with a start every 10 ms. `lateness` of the rate now.
    fn record_for(&mut self, time: Duration, lateness: impl Fn(f64) -> Duration) {
        let (end, mut start_at) = (self.now + time, self.now);
        while self.now < end {
            let wait = self.pace.take_turn(self.now);
            self.longest_wait = self.longest_wait.max(wait);
            self.now += wait.max(Duration::from_micros(100));
            self.recorded += 1;
            while start_at <= self.now {
                self.pace.record_start(lateness(self.pace.rate), start_at);
                start_at += ms(10);
            }
        }
    }

    /// Records a second for this long.
    fn rate_for(&mut self, time: Duration, lateness: impl Fn(f64) -> Duration) -> f64 {
        let before = self.recorded;
        self.record_for(time, lateness);
        f64::from(self.recorded - before) / time.as_secs_f64()
    }
}

#[test]
fn pace_falls_while_starts_are_later_than_before() {
    for (calm_us, busy_us, expected, why) in [
        (200, 200, 10_000, "they are as before"),
        (200, 250, 10_000, "a little later is allowed"),
        (200, 1_000, 2_600, "they are later"),
        (5_000, 5_050, 10_000, "they were late before"),
        (5_000, 6_000, 2_600, "they were late before, and are later"),
    ] {
        let mut process = Process::new().calm(Duration::from_micros(calm_us));
        process.record_for(Duration::from_secs(20), |_| Duration::from_micros(busy_us));
        let rate = process.rate_for(Duration::from_secs(1), |_| Duration::from_micros(busy_us));
        assert!((rate / f64::from(expected) - 1.0).abs() < 0.03, "{why}: {rate}/s");
    }
}

/// A worker that meets a full queue has seen no start without intake yet.
#[test]
fn full_queue_before_the_first_start_is_paced() {
    let mut process = Process::new();
    let late = |_| Duration::from_micros(500);
    process.record_for(Duration::from_secs(5), late);
    let rate = process.rate_for(Duration::from_secs(5), late);
    assert!((rate / RATE_MIN - 1.0).abs() < 0.03, "{rate}/s");
}

#[test]
fn pace_recovers_when_starts_are_on_time_again() {
    let mut process = Process::new().calm(Duration::ZERO);
    process.record_for(Duration::from_secs(2), |_| ms(5));
    assert!(process.pace.rate <= RATE_MIN);
    process.record_for(Duration::from_secs(15), |_| Duration::ZERO);
    let rate = process.rate_for(Duration::from_secs(1), |_| Duration::ZERO);
    assert!(rate > 9_900.0, "{rate}/s");
}

/// A lane whose limit is used up for an hour sends nothing: its queue is recorded as fast as it can be.
#[test]
fn lane_without_starts_is_not_held_back() {
    let mut process = Process::new().calm(Duration::ZERO);
    process.record_for(Duration::from_secs(2), |_| ms(5));
    let mut waited = Duration::ZERO;
    for _ in 0..100_000 {
        let wait = process.pace.take_turn(process.now);
        process.now += wait.max(Duration::from_micros(100));
        waited = wait;
    }
    assert_eq!(waited, Duration::ZERO);
}

#[test]
fn single_job_does_not_wait() {
    let mut process = Process::new().calm(Duration::ZERO);
    process.record_for(Duration::from_secs(2), |_| ms(5));
    for _ in 0..10 {
        process.now += ms(200);
        process.pace.record_start(ms(5), process.now);
        assert_eq!(process.pace.take_turn(process.now), Duration::ZERO);
    }
}

#[derive(Clone, Debug)]
enum Happening {
    Start { lateness_us: u64 },
    Records(u32),
    Pass { us: u64 },
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        (0..50_000_u64).prop_map(|lateness_us| Happening::Start { lateness_us }),
        (1..500_u32).prop_map(Happening::Records),
        (0..3_000_000_u64).prop_map(|us| Happening::Pass { us }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever has happened and however late starts are, no record waits longer than one turn at the lowest pace, and
    /// in each second as many are made.
    #[test]
    fn intake_never_starves(happenings in prop::collection::vec(happening(), 0..60), late_us in 0..1_000_000_u64) {
        let mut process = Process::new();
        let turn = Duration::from_secs_f64(RATE_MIN.recip()) + Duration::from_micros(1);
        for happening in happenings {
            match happening {
                Happening::Start { lateness_us } => {
                    process.pace.record_start(Duration::from_micros(lateness_us), process.now);
                }
                Happening::Records(records) => (0..records).for_each(|_| {
                    let wait = process.pace.take_turn(process.now);
                    assert!(wait <= turn, "{wait:?}");
                    process.now += wait;
                }),
                Happening::Pass { us } => process.now += Duration::from_micros(us),
            }
        }
        for _ in 0..5 {
            let rate = process.rate_for(Duration::from_secs(1), |_| Duration::from_micros(late_us));
            prop_assert!(rate >= RATE_MIN * 0.99, "{rate}/s");
        }
        prop_assert!(process.longest_wait <= turn, "{:?}", process.longest_wait);
    }

    /// Where starts become late beyond some rate, the pace stays near it, and uses most of it.
    #[test]
    fn pace_follows_the_rate_that_makes_no_start_late(knee in 3_500.0..9_500_f64, calm_us in 0..5_000_u64) {
        let calm = Duration::from_micros(calm_us);
        let lateness = |rate: f64| if rate > knee { calm + ms(3) } else { calm };
        let mut process = Process::new().calm(calm);
        process.record_for(Duration::from_secs(3), lateness);
        let rate = process.rate_for(Duration::from_secs(20), lateness);
        prop_assert!((knee * 0.6..=knee * 1.05).contains(&rate), "{rate}/s of {knee}/s");
    }
}

/// A process in virtual time with one processor, on which starts wait behind the records that are ready. Its prefetch
/// of 100 is recorded in commits of 10 ms.
struct Simulated {
    pace: IntakePace,
    is_paced: bool,
    lateness: Vec<Duration>,
    recorded: u32,
}

impl Simulated {
    const WORK: Duration = Duration::from_micros(90);
    const COMMIT: Duration = Duration::from_millis(10);
    const PREFETCH: usize = 100;

    /// Starts every 7 ms; with `records`, the queue is full.
    fn run(&mut self, from: Duration, time: Duration, records: bool) {
        let (mut free_at, mut start_at) = (from, from);
        let mut turn_at = records.then_some(from);
        // When each place of the prefetch is free.
        let mut places = [from; Self::PREFETCH];
        while start_at < from + time {
            match turn_at.filter(|at| *at <= start_at) {
                Some(at) => {
                    free_at = free_at.max(at) + Self::WORK;
                    self.recorded += 1;
                    let commits = free_at.as_nanos() / Self::COMMIT.as_nanos() + 1;
                    *places.iter_mut().min().unwrap() = Self::COMMIT * u32::try_from(commits).unwrap();
                    let next = at.max(*places.iter().min().unwrap());
                    let wait = self.pace.take_turn(next);
                    // A timer counts whole milliseconds and rounds up.
                    let wait = if self.is_paced && !wait.is_zero() { wait + ms(1) } else { Duration::ZERO };
                    turn_at = Some(next + wait);
                }
                None => {
                    let lateness = free_at.saturating_sub(start_at) + Duration::from_micros(200);
                    self.pace.record_start(lateness, start_at);
                    self.lateness.push(lateness);
                    start_at += ms(7);
                }
            }
        }
    }

    /// Without the first two seconds, in which the pace is found.
    fn p99_ms(&mut self) -> f64 {
        let settled = 2_000 / 7;
        self.lateness.drain(..settled.min(self.lateness.len() / 2));
        self.lateness.sort();
        let last = self.lateness.len() * 99 / 100;
        self.lateness[last].as_secs_f64() * 1e3
    }
}

/// Two processes at half of the bar each: 5,000/s.
#[test]
fn full_queue_makes_no_start_late() {
    let figures = [false, true].map(|is_paced| {
        let new = |pace| Simulated { pace, is_paced, lateness: Vec::new(), recorded: 0 };
        let mut calm = new(IntakePace::default());
        calm.run(Duration::from_secs(100), Duration::from_secs(5), false);
        let mut busy = new(calm.pace.clone());
        busy.run(Duration::from_secs(105), Duration::from_secs(20), true);
        let later_ms = busy.p99_ms() - calm.p99_ms();
        (later_ms, f64::from(busy.recorded) / 20.0)
    });
    let [(unpaced_ms, unpaced), (paced_ms, paced)] = figures;
    assert!(unpaced_ms > 2.0 && unpaced > 4_000.0, "{figures:?}");
    assert!(paced_ms <= 1.0 && paced >= 2_500.0, "{figures:?}");
}
