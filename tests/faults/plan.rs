//! The fault plan of a run: which faults happen, and when, drawn from a seed before anything starts.
//!
//! The same seed and size give the same plan, whatever happens during the run.

use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};

use crate::provider::Trouble;
use crate::proxy::{Flow, Rules};

pub const WORKERS: usize = 4;
/// Providers whose slots are released after the response: one deduplicates, one answers look-ups, one does neither.
pub const PROVIDERS: [&str; 3] = ["alpha", "bravo", "carol"];
/// All lanes: the providers, and one with `slot_release = "grant"`, at which no fault is aimed. Its windows are
/// reported and not judged: a worker that freezes between grant and request exceeds its limit, as the theorem says.
pub const LANES: [&str; 4] = [PROVIDERS[0], PROVIDERS[1], PROVIDERS[2], "delta"];
pub const GRANT_LANE: usize = 3;
/// Jobs of each provider among ten. The slow providers have work for most of the run; the fast one gets bursts.
const SHARES: [usize; 3] = [4, 3, 3];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    Redis,
    Rabbit,
    Postgres,
}

/// The peer at the end of a worker's network path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    Engine(Engine),
    Provider(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alarm {
    Disk,
    Memory,
}

/// Why PostgreSQL commits no write, though it answers reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteTrouble {
    /// Every transaction is read-only, as at a demoted primary.
    ReadOnly,
    /// Writes of jobs and attempts fail for lack of space.
    DiskFull,
    /// Commits wait for a synchronous standby that does not exist.
    MissingStandby,
}

/// One fault. It begins at its instant and ends after `lasts`, where it has an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL. A new process starts later, with a wall clock that is wrong by this many seconds.
    KillWorker {
        worker: usize,
        clock_s: i64,
    },
    /// SIGSTOP, later SIGCONT.
    FreezeWorker {
        worker: usize,
    },
    KillEngine(Engine),
    FreezeEngine(Engine),
    /// PostgreSQL refuses or holds writes.
    Writes(WriteTrouble),
    /// FLUSHALL.
    ForgetQuota,
    /// Redis drops the key that has a provider's state, as it does when its memory is short.
    EvictQuota {
        provider: usize,
    },
    /// FUNCTION FLUSH and SCRIPT FLUSH.
    ForgetScripts,
    Alarm(Alarm),
    /// Redis' wall clock is wrong by this much.
    RedisClock {
        millis: i64,
    },
    Road {
        worker: usize,
        peer: Peer,
        rules: Rules,
    },
    Provider {
        provider: usize,
        trouble: Trouble,
    },
}

/// A fault with its place in the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    pub at: Duration,
    pub lasts: Duration,
    pub fault: Fault,
}

/// Jobs that are published at one instant: `jobs` jobs of the lane, from number `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wave {
    pub at: Duration,
    /// Index into [`LANES`].
    pub provider: usize,
    pub first: usize,
    pub jobs: usize,
}

/// Size of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Jobs of the three providers in total.
    pub jobs: usize,
    pub worker_kills: usize,
    pub engine_kills: usize,
    pub freezes: usize,
    pub cuts: usize,
    /// Refused writes, lost or wrong state in stores, alarms, and provider faults.
    pub others: usize,
    /// Mean time between faults.
    pub every: Duration,
}

impl Size {
    pub const SMALL: Self = Self {
        jobs: 2_000,
        worker_kills: 3,
        engine_kills: 3,
        freezes: 2,
        cuts: 2,
        others: 8,
        every: Duration::from_millis(3_600),
    };
    pub const LARGE: Self = Self {
        jobs: 10_000,
        worker_kills: 38,
        engine_kills: 12,
        freezes: 10,
        cuts: 10,
        others: 20,
        every: Duration::from_millis(3_500),
    };
    pub const HUGE: Self = Self {
        jobs: 100_000,
        worker_kills: 940,
        engine_kills: 60,
        freezes: 60,
        cuts: 100,
        others: 100,
        every: Duration::from_millis(1_800),
    };

    /// Jobs of the lane with release at grant, in addition to the others.
    pub fn grant_jobs(&self) -> usize {
        self.jobs / 10
    }

    pub fn faults(&self) -> usize {
        self.worker_kills + self.engine_kills + self.freezes + self.cuts + self.others
    }

    /// The same mixture with this many faults.
    pub fn with_faults(self, faults: usize) -> Self {
        let share = |of: usize| of * faults / self.faults();
        let (engine_kills, freezes, cuts) = (share(self.engine_kills), share(self.freezes), share(self.cuts));
        let others = share(self.others);
        Self {
            worker_kills: faults - engine_kills - freezes - cuts - others,
            engine_kills,
            freezes,
            cuts,
            others,
            ..self
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub seed: u64,
    pub faults: Vec<Planned>,
    pub waves: Vec<Wave>,
}

/// Draws the plan of a seed.
pub fn plan(seed: u64, size: &Size) -> Plan {
    let mut rng = StdRng::seed_from_u64(seed);
    let rng = &mut rng;
    let mut faults: Vec<Fault> = Vec::new();
    faults.extend((0..size.worker_kills).map(|_| {
        let clock_s = if rng.random_ratio(1, 3) { rng.random_range(-3_600..=3_600) } else { 0 };
        Fault::KillWorker { worker: rng.random_range(0..WORKERS), clock_s }
    }));
    let first = rng.random_range(0..3);
    faults.extend((0..size.engine_kills).map(|n| Fault::KillEngine(engine(first + n))));
    // Alternates workers and backends.
    faults.extend((0..size.freezes).map(|n| match n % 2 {
        0 => Fault::FreezeWorker { worker: rng.random_range(0..WORKERS) },
        _ => Fault::FreezeEngine(engine(rng.random_range(0..3))),
    }));
    let first = rng.random_range(0..6);
    faults.extend((0..size.cuts).map(|n| road(rng, first + n)));
    // By the seed itself, so that successive seeds go through all of them.
    let first = usize::try_from(seed).unwrap();
    faults.extend((0..size.others).map(|n| other(rng, first.wrapping_add(n))));
    faults.shuffle(rng);
    let planned = |(number, fault): (usize, Fault)| {
        let slot = size.every * u32::try_from(number + 1).unwrap();
        let at = slot - size.every.mul_f64(rng.random_range(0.0..0.8));
        Planned { at: whole(at), lasts: lasts(rng, fault), fault }
    };
    let faults: Vec<Planned> = faults.into_iter().enumerate().map(planned).collect();
    let waves = waves(rng, size, &faults);
    Plan { seed, faults, waves }
}

fn engine(number: usize) -> Engine {
    [Engine::Redis, Engine::Rabbit, Engine::Postgres][number % 3]
}

fn road(rng: &mut StdRng, kind: usize) -> Fault {
    let peer = match rng.random_range(0..6) {
        number @ 0..3 => Peer::Engine(engine(number)),
        _ => Peer::Provider(rng.random_range(0..PROVIDERS.len())),
    };
    let late = Flow::Delay(Duration::from_millis(rng.random_range(100..900)));
    let short = Flow::Truncate(rng.random_range(20..2_000));
    let rules = match kind % 6 {
        0 => Rules::CUT,
        1 => Rules { to_client: Flow::Discard, ..Rules::PASS },
        2 => Rules::RESET,
        3 => Rules { to_server: Flow::Discard, ..Rules::PASS },
        4 => Rules { to_server: late, to_client: late, reset: false },
        _ if rng.random() => Rules { to_server: short, ..Rules::PASS },
        _ => Rules { to_client: short, ..Rules::PASS },
    };
    Fault::Road { worker: rng.random_range(0..WORKERS), peer, rules }
}

/// Provider troubles, in the order in which successive provider faults of a plan go through them.
const TROUBLES: [Trouble; 9] = [
    Trouble::ResetBefore,
    Trouble::ResetAfter,
    Trouble::NotFound,
    Trouble::Error,
    Trouble::Unavailable,
    Trouble::Partial,
    Trouble::Throttle { seconds: 2 },
    Trouble::Garbled,
    Trouble::Silent,
];

const WRITE_TROUBLES: [WriteTrouble; 3] =
    [WriteTrouble::DiskFull, WriteTrouble::ReadOnly, WriteTrouble::MissingStandby];

/// Eleven kinds in turn. Any eight of them in a row, as a small plan has, contain refused writes, an eviction, and two
/// provider faults.
fn other(rng: &mut StdRng, number: usize) -> Fault {
    match number % 11 {
        // These two are five or six apart, so each is another trouble than the one before.
        0 | 6 => Fault::Writes(WRITE_TROUBLES[number / 5 % WRITE_TROUBLES.len()]),
        1 | 7 => Fault::EvictQuota { provider: rng.random_range(0..PROVIDERS.len()) },
        3 => Fault::ForgetQuota,
        4 => Fault::Alarm(if rng.random() { Alarm::Disk } else { Alarm::Memory }),
        9 => Fault::ForgetScripts,
        10 => Fault::RedisClock { millis: [-30_000, -300, 300, 3_600_000][rng.random_range(0..4)] },
        _ => {
            let trouble = TROUBLES[number % TROUBLES.len()];
            Fault::Provider { provider: rng.random_range(0..PROVIDERS.len()), trouble }
        }
    }
}

fn lasts(rng: &mut StdRng, fault: Fault) -> Duration {
    let millis = match fault {
        Fault::KillWorker { .. } => rng.random_range(200..4_000),
        // One freeze in four lasts longer than the leases, so that other workers take over the jobs.
        Fault::FreezeWorker { .. } if rng.random_ratio(1, 4) => rng.random_range(31_000..36_000),
        Fault::FreezeWorker { .. } | Fault::FreezeEngine(_) => rng.random_range(1_000..8_000),
        Fault::KillEngine(_) => rng.random_range(0..3_000),
        Fault::Writes(_) => rng.random_range(3_000..8_000),
        Fault::ForgetQuota | Fault::EvictQuota { .. } | Fault::ForgetScripts => 0,
        // Meanwhile the broker blocks every publisher.
        Fault::Alarm(_) => rng.random_range(3_000..6_000),
        Fault::RedisClock { .. } => rng.random_range(1_000..6_000),
        Fault::Road { .. } => rng.random_range(1_000..8_000),
        Fault::Provider { .. } => rng.random_range(500..3_000),
    };
    Duration::from_millis(millis)
}

/// A third of each provider's jobs is published at the start. The rest comes just before faults, so that jobs are
/// active when a fault begins.
fn waves(rng: &mut StdRng, size: &Size, faults: &[Planned]) -> Vec<Wave> {
    let shares: usize = SHARES.iter().sum();
    let mut waves = Vec::new();
    for (provider, share) in SHARES.iter().enumerate() {
        let jobs = if provider == 0 {
            size.jobs - SHARES[1..].iter().map(|share| size.jobs * share / shares).sum::<usize>()
        } else {
            size.jobs * share / shares
        };
        let mut first = 0;
        let mut wave = |at: Duration, up_to: usize| {
            if up_to > first {
                waves.push(Wave { at, provider, first, jobs: up_to - first });
                first = up_to;
            }
        };
        let at_once = if faults.is_empty() { jobs } else { jobs / 3 };
        wave(Duration::ZERO, at_once);
        for (number, fault) in faults.iter().enumerate() {
            let is_aimed_at = matches!(fault.fault, Fault::Provider { provider: at, .. } if at == provider);
            // The fast provider's jobs come in larger waves; otherwise its limit would never be reached.
            if provider == 0 && number % 7 != 6 && number + 1 != faults.len() && !is_aimed_at {
                continue;
            }
            // A wave that is gone before its provider is in trouble would meet nothing of that.
            let ahead = Duration::from_millis(if is_aimed_at { 0 } else { rng.random_range(200..1_200) });
            wave(whole(fault.at.saturating_sub(ahead)), at_once + (jobs - at_once) * (number + 1) / faults.len());
        }
    }
    waves.extend(grant_waves(size, faults));
    waves.sort_by_key(|wave| wave.at);
    waves
}

/// The same number of jobs with every fault.
fn grant_waves(size: &Size, faults: &[Planned]) -> Vec<Wave> {
    let up_to = |number: usize| size.grant_jobs() * number / faults.len().max(1);
    let wave = |(number, at): (usize, Duration)| {
        let first = up_to(number);
        Wave { at, provider: GRANT_LANE, first, jobs: up_to(number + 1) - first }
    };
    let instants = faults.iter().map(|fault| fault.at.saturating_sub(Duration::from_millis(500)));
    let instants = if faults.is_empty() { vec![Duration::ZERO] } else { instants.collect() };
    instants.into_iter().enumerate().map(wave).filter(|wave| wave.jobs > 0).collect()
}

fn whole(duration: Duration) -> Duration {
    Duration::from_millis(u64::try_from(duration.as_millis()).unwrap())
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine(engine) => write!(f, "{engine:?}"),
            Self::Provider(provider) => f.write_str(PROVIDERS[*provider]),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KillWorker { worker, clock_s: 0 } => write!(f, "kill worker {worker}"),
            Self::KillWorker { worker, clock_s } => {
                write!(f, "kill worker {worker}, back with its clock {clock_s:+} s")
            }
            Self::FreezeWorker { worker } => write!(f, "freeze worker {worker}"),
            Self::KillEngine(engine) => write!(f, "kill {engine:?}"),
            Self::FreezeEngine(engine) => write!(f, "freeze {engine:?}"),
            Self::Writes(trouble) => write!(f, "PostgreSQL's writes: {trouble:?}"),
            Self::ForgetQuota => f.write_str("FLUSHALL"),
            Self::EvictQuota { provider } => write!(f, "evict the state of {}", PROVIDERS[*provider]),
            Self::ForgetScripts => f.write_str("FUNCTION FLUSH, SCRIPT FLUSH"),
            Self::Alarm(alarm) => write!(f, "{alarm:?} alarm at the broker"),
            Self::RedisClock { millis } => write!(f, "Redis' clock {millis:+} ms"),
            Self::Road { worker, peer, rules } if rules.reset => write!(f, "road {worker} - {peer}: reset"),
            Self::Road { worker, peer, rules } => {
                write!(f, "road {worker} - {peer}: there {:?}, back {:?}", rules.to_server, rules.to_client)
            }
            Self::Provider { provider, trouble } => write!(f, "provider {}: {trouble:?}", PROVIDERS[*provider]),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let jobs: usize = self.waves.iter().map(|wave| wave.jobs).sum();
        writeln!(f, "seed {}: {} faults, {jobs} jobs in {} waves", self.seed, self.faults.len(), self.waves.len())?;
        for planned in &self.faults {
            let (at, lasts) = (planned.at.as_secs_f64(), planned.lasts.as_secs_f64());
            writeln!(f, "  {at:>8.3} s  for {lasts:.3} s  {}", planned.fault)?;
        }
        Ok(())
    }
}
