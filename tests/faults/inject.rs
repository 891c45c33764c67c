//! Fault injection: makes the faults of a plan happen, and records which happened when.
//!
//! It never waits for the deployment: a fault begins at its instant and ends after its duration. Faults that stop a whole
//! server exclude each other.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::plan::{Alarm, Engine, Fault, PROVIDERS, Peer, Planned};
use crate::provider::Trouble;
use crate::proxy::{Road, Rules};
use crate::stand::{Stand, quota_key};
use crate::support::clock::skewed_by;
use crate::writes;

/// Log text of a worker that the broker has notified of an alarm.
const BLOCKED: &str = "broker blocks publishers";
/// How much longer a provider's trouble lasts if it has met no charge. Later, all jobs may be finished.
const CHARGE_COMES_WITHIN: Duration = Duration::from_secs(30);
/// Longest time until a worker is notified. The broker notifies only connections that publish.
const ALARM_KNOWN_WITHIN: Duration = Duration::from_secs(20);

/// Events of the run, with their time since its start.
pub struct Timeline {
    begin: Instant,
    lines: Mutex<Vec<(Duration, String)>>,
}

impl Timeline {
    pub fn new() -> Self {
        Self { begin: Instant::now(), lines: Mutex::default() }
    }

    pub fn now(&self) -> Duration {
        self.begin.elapsed()
    }

    pub fn sleep_until(&self, at: Duration) {
        sleep(at.saturating_sub(self.now()));
    }

    pub fn note(&self, what: impl Into<String>) {
        let (at, what) = (self.now(), what.into());
        println!("{:>9.3} s  {what}", at.as_secs_f64());
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).push((at, what));
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        for (at, what) in self.lines.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = writeln!(text, "{:>9.3} s  {what}", at.as_secs_f64());
        }
        text
    }
}

/// Longest pause of the test process itself: proxies and providers were late by that time.
pub struct Standstill(Arc<AtomicU64>);

impl Standstill {
    pub fn watch(stand: &Stand) -> Self {
        let longest_ms = Arc::new(AtomicU64::new(0));
        let noted = Arc::clone(&longest_ms);
        stand.runtime.spawn(async move {
            let tick = Duration::from_millis(20);
            loop {
                let before = Instant::now();
                tokio::time::sleep(tick).await;
                let late = before.elapsed().saturating_sub(tick);
                noted.fetch_max(u64::try_from(late.as_millis()).unwrap(), Ordering::Relaxed);
            }
        });
        Self(longest_ms)
    }

    pub fn longest_ms(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Applies one fault from its start to its end.
pub fn happen(stand: &Stand, planned: &Planned, timeline: &Timeline) {
    timeline.sleep_until(planned.at);
    timeline.note(planned.fault.to_string());
    let lasts = planned.lasts;
    match planned.fault {
        Fault::KillWorker { worker, clock_s } => kill_worker(stand, worker, clock_s, lasts),
        Fault::FreezeWorker { worker } => {
            stand.freeze_worker(worker, true);
            sleep(lasts);
            stand.freeze_worker(worker, false);
        }
        Fault::KillEngine(engine) => kill_engine(stand, engine, lasts),
        Fault::FreezeEngine(engine) => freeze_engine(stand, engine, lasts),
        Fault::Writes(trouble) => {
            let _held = held(&stand.postgres_lock);
            writes::refuse(stand, trouble, lasts);
        }
        Fault::ForgetQuota => {
            let _held = held(&stand.redis_lock);
            stand.redis.command::<String>("FLUSHALL");
        }
        Fault::EvictQuota { provider } => {
            let _held = held(&stand.redis_lock);
            stand.redis.command::<u64>(&format!("DEL {}", quota_key(PROVIDERS[provider])));
        }
        Fault::ForgetScripts => {
            let _held = held(&stand.redis_lock);
            stand.redis.command::<String>("FUNCTION FLUSH");
            stand.redis.command::<String>("SCRIPT FLUSH");
        }
        Fault::Alarm(alarm) => raise(stand, alarm, lasts),
        Fault::RedisClock { millis } => {
            stand.set_redis_clock(millis);
            sleep(lasts);
            stand.set_redis_clock(0);
        }
        Fault::Road { worker, peer, rules } => {
            let road = road(stand, worker, peer);
            road.set(rules);
            sleep(lasts);
            road.set(Rules::PASS);
        }
        Fault::Provider { provider, trouble } => {
            let provider = stand.provider(PROVIDERS[provider]);
            let before = provider.charges_met(trouble);
            provider.trouble(trouble);
            sleep(lasts);
            // While other backends are away, no charge meets it.
            let until = Instant::now() + CHARGE_COMES_WITHIN;
            while provider.charges_met(trouble) == before && Instant::now() < until {
                sleep(Duration::from_millis(20));
            }
            provider.trouble(Trouble::None);
        }
    }
    timeline.note(format!("over: {}", planned.fault));
}

/// The network path from a worker to one of its peers.
pub fn road(stand: &Stand, worker: usize, peer: Peer) -> Arc<Road> {
    match peer {
        Peer::Engine(Engine::Redis) => stand.road_to_redis(worker),
        Peer::Engine(Engine::Rabbit) => stand.road_to_rabbit(worker),
        Peer::Engine(Engine::Postgres) => stand.road_to_postgres(worker),
        Peer::Provider(provider) => stand.road_to_provider(worker, PROVIDERS[provider]),
    }
}

fn held(lock: &Mutex<()>) -> std::sync::MutexGuard<'_, ()> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

fn kill_worker(stand: &Stand, worker: usize, clock_s: i64, down: Duration) {
    stand.kill_worker(worker);
    sleep(down);
    let environment = if clock_s == 0 { Vec::new() } else { skewed_by(clock_s) };
    stand.replace_worker(worker, &environment);
}

fn kill_engine(stand: &Stand, engine: Engine, down: Duration) {
    match engine {
        Engine::Redis => {
            let _held = held(&stand.redis_lock);
            stand.redis.kill();
            sleep(down);
            stand.redis.restart();
        }
        Engine::Rabbit => {
            let _held = held(&stand.rabbit_lock);
            stand.rabbit.kill();
            sleep(down);
            stand.rabbit.restart();
        }
        Engine::Postgres => {
            let _held = held(&stand.postgres_lock);
            stand.postgres.kill();
            sleep(down);
            stand.postgres.restart();
        }
    }
}

fn freeze_engine(stand: &Stand, engine: Engine, lasts: Duration) {
    match engine {
        Engine::Redis => {
            let _held = held(&stand.redis_lock);
            stand.redis.signal("STOP");
            sleep(lasts);
            stand.redis.signal("CONT");
        }
        Engine::Rabbit => {
            let _held = held(&stand.rabbit_lock);
            stand.rabbit.signal("STOP");
            sleep(lasts);
            stand.rabbit.signal("CONT");
        }
        Engine::Postgres => {
            let _held = held(&stand.postgres_lock);
            stand.postgres.freeze(true);
            sleep(lasts);
            stand.postgres.freeze(false);
        }
    }
}

/// The broker blocks publishers while it believes that it is short of disk or memory.
pub fn raise(stand: &Stand, alarm: Alarm, lasts: Duration) {
    let _held = held(&stand.rabbit_lock);
    let (on, off): ([&str; 3], [&str; 3]) = match alarm {
        Alarm::Disk => (["set_disk_free_limit", "1000000GB", ""], ["set_disk_free_limit", "1MB", ""]),
        Alarm::Memory => {
            let set = "set_vm_memory_high_watermark";
            ([set, "absolute", "1MB"], [set, "absolute", "1GB"])
        }
    };
    let run = |words: [&str; 3]| {
        let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
        stand.rabbit.ctl(&words);
    };
    let blocked = || stand.logs().map(|(_, log)| log.matches(BLOCKED).count()).sum::<usize>();
    // After a restart, the broker's ports answer before it accepts such commands.
    run(["await_startup", "--timeout", "60"]);
    let before = blocked();
    let deadline = Instant::now() + ALARM_KNOWN_WITHIN;
    // On a slow machine the broker can accept the command and not raise the alarm. So the command is repeated until a
    // publisher is notified.
    while blocked() == before && Instant::now() < deadline {
        run(on);
        let again = Instant::now() + Duration::from_secs(5);
        while blocked() == before && Instant::now() < again {
            sleep(Duration::from_millis(100));
        }
    }
    stand.publishers_are_blocked.store(true, Ordering::Relaxed);
    sleep(lasts);
    stand.publishers_are_blocked.store(false, Ordering::Relaxed);
    run(off);
}
