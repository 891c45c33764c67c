use proptest::prelude::*;

use super::Leader::{FallbackShare, NoLeader, Store as FromStore};
use super::NoLeaderCause::*;
use super::*;

const POLL: Duration = Duration::from_secs(1);
/// Booking horizon and send budget, in ms: the longest time from a grant to its start.
const START_DELAY_MAX_MS: u64 = 750;
const TICK_MS: u64 = 50;
const TIMING: LeadershipTiming = LeadershipTiming {
    slack: Duration::from_millis(START_DELAY_MAX_MS + TICK_MS),
    ..LeadershipTiming::with_poll_interval(POLL)
};
const SHARED: StoreDown = StoreDown::Share { workers: 2 };

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn reachable(run_id: &str, linked: u64, since: u64) -> ObservedStore<'_> {
    ObservedStore::Reachable { run_id, connected_for: s(linked), reachable_for: s(since) }
}

fn unavailable(since: u64) -> ObservedStore<'static> {
    ObservedStore::Unavailable { unavailable_for: s(since) }
}

/// A row that was written and first seen this many seconds ago, and polled just now.
fn polled(holder: &str, age: u64) -> Option<PollResult<'_>> {
    Some(PollResult { age: Duration::ZERO, row: Some(ObservedLeader { holder, age: s(age), known_for: s(age) }) })
}

fn takeover_of(decision: &LeadershipDecision) -> Option<(Option<&str>, &str)> {
    decision.takeover.as_ref().map(|take| (take.from.as_deref(), take.to.as_str()))
}

/// The case's name, the store, the row, the policy; then the expected leader, takeover and reconnect.
type Case<'a> =
    (&'a str, ObservedStore<'a>, Option<PollResult<'a>>, StoreDown, Leader, Option<(Option<&'a str>, &'a str)>, bool);

fn check_cases(table: &[Case<'_>]) {
    for (case, store, polled, policy, verdict, take, reconnect) in table {
        let decision = decide(*store, *polled, *policy, TIMING);
        assert_eq!(
            (decision.leader, takeover_of(&decision), decision.reconnect),
            (*verdict, *take, *reconnect),
            "{case}"
        );
    }
}

#[test]
fn store_rules() {
    let (wait, none) = (StoreDown::Wait, Some(PollResult { age: Duration::ZERO, row: None }));
    let stale = |ago_ms| {
        let row = ObservedLeader { holder: "redis:a", age: s(60), known_for: s(60) };
        Some(PollResult { age: Duration::from_millis(ago_ms), row: Some(row) })
    };
    let (to_b, to_share) = (Some((Some("redis:a"), "redis:b")), Some((Some("redis:a"), "share")));
    let no_store = NoLeader(StoreUnavailable);
    let (young, old) = (FromStore { may_rebuild: false }, FromStore { may_rebuild: true });
    let late_commit =
        Some(PollResult { age: s(1), row: Some(ObservedLeader { holder: "redis:a", age: s(60), known_for: s(1) }) });
    let clock_set_back =
        Some(PollResult { age: s(1), row: Some(ObservedLeader { holder: "redis:a", age: s(0), known_for: s(60) }) });
    check_cases(&[
        ("not polled", reachable("a", 9, 9), None, wait, NoLeader(NotPolled), None, false),
        ("stale", reachable("a", 9, 9), stale(3_001), wait, NoLeader(DatabaseUnavailable), None, false),
        ("nearly stale", reachable("a", 9, 9), stale(3_000), wait, old, None, false),
        ("no holder", reachable("a", 9, 9), none, wait, NoLeader(NoHolder), Some((None, "redis:a")), false),
        ("no holder, unavailable", unavailable(4), none, SHARED, no_store, None, false),
        ("no holder, long unavailable", unavailable(5), none, SHARED, no_store, Some((None, "share")), false),
        ("no holder, unavailable, wait", unavailable(60), none, wait, no_store, None, false),
        ("ours, fresh", reachable("a", 9, 9), polled("redis:a", 3), wait, young, None, false),
        ("ours", reachable("a", 9, 9), polled("redis:a", 4), wait, old, None, false),
        ("ours, just committed", reachable("a", 9, 9), late_commit, wait, young, None, false),
        ("ours, clock set back", reachable("a", 9, 9), clock_set_back, wait, young, None, false),
        ("ours, unavailable", unavailable(60), polled("redis:a", 60), wait, no_store, None, false),
        ("ours, unavailable, share", unavailable(4), polled("redis:a", 60), SHARED, no_store, None, false),
        ("shares begin", unavailable(5), polled("redis:a", 60), SHARED, no_store, to_share, false),
        ("another's", reachable("b", 9, 9), polled("redis:a", 5), wait, NoLeader(AnotherStore), None, true),
        ("another's, same age", reachable("b", 5, 9), polled("redis:a", 5), wait, NoLeader(AnotherStore), None, true),
        ("another's, reconnected", reachable("b", 4, 9), polled("redis:a", 5), wait, NoLeader(TwoStores), to_b, false),
    ]);
}

#[test]
fn share_rules() {
    let wait = StoreDown::Wait;
    check_cases(&[
        ("share, fresh", unavailable(60), polled("share", 3), SHARED, NoLeader(Changing), None, false),
        ("share", unavailable(60), polled("share", 4), SHARED, FallbackShare, None, false),
        (
            "share, store is available again",
            reachable("a", 9, 9),
            polled("share", 70),
            SHARED,
            FallbackShare,
            None,
            false,
        ),
        ("share, just begun", reachable("a", 20, 20), polled("share", 59), SHARED, FallbackShare, None, false),
        (
            "share ends",
            reachable("a", 10, 10),
            polled("share", 60),
            SHARED,
            FallbackShare,
            Some((Some("share"), "redis:a")),
            false,
        ),
        (
            "share, reconnected",
            reachable("a", 1, 10),
            polled("share", 60),
            SHARED,
            FallbackShare,
            Some((Some("share"), "redis:a")),
            false,
        ),
        (
            "share, policy wait",
            reachable("a", 0, 0),
            polled("share", 0),
            wait,
            NoLeader(StoreUnavailable),
            Some((Some("share"), "redis:a")),
            false,
        ),
        (
            "share, policy wait, unavailable",
            unavailable(60),
            polled("share", 60),
            wait,
            NoLeader(StoreUnavailable),
            None,
            false,
        ),
        (
            "share, stale",
            unavailable(60),
            Some(PollResult { age: s(4), ..polled("share", 60).unwrap() }),
            SHARED,
            NoLeader(DatabaseUnavailable),
            None,
            false,
        ),
        ("share, not polled", unavailable(60), None, SHARED, NoLeader(NotPolled), None, false),
    ]);
}

/// A small random generator, so that one seed determines a whole history.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A writable primary. Its run id changes when it restarts; its state is warm in one term or in none.
#[derive(Clone, Default)]
struct Primary {
    run_id: String,
    warm_in: Option<i64>,
    /// Term of the last call; a call of another term makes the state cold.
    term: i64,
}

#[derive(Clone)]
struct WrittenRow {
    holder: String,
    term: i64,
    since_ms: u64,
}

/// A poll in progress: when it was sent, when it reads the row, when it arrives.
struct Poll {
    departed: u64,
    reads_at: u64,
    arrives_at: u64,
    read: Option<Option<WrittenRow>>,
}

struct ModelWorker {
    connection: Option<(usize, String)>,
    connected_at: u64,
    /// Since when it has been reachable, or unavailable.
    since: u64,
    policy: StoreDown,
    next_poll: u64,
    /// Its polls fail until then.
    cut_until: u64,
    poll: Option<Poll>,
    /// When the last successful poll was sent, the row, and when that was first seen.
    polled: Option<(u64, Option<WrittenRow>, u64)>,
}

struct ClusterModel {
    now: u64,
    dice: Dice,
    /// A fault happens once in this many ticks and workers.
    fault_odds: u64,
    primaries: [Primary; 2],
    row: Option<WrittenRow>,
    /// When the statement began, when it commits and becomes visible, and what it writes.
    takeovers: Vec<(u64, u64, Takeover)>,
    workers: Vec<ModelWorker>,
    /// Each holder with the instant of its last grant.
    granted: Vec<(String, u64)>,
    restarts: u64,
}

impl ClusterModel {
    fn new(seed: u64, workers: usize, fault_odds: u64, shares: bool) -> Self {
        let policy = if shares { SHARED } else { StoreDown::Wait };
        let primary = |run_id: &str| Primary { run_id: run_id.to_owned(), ..Primary::default() };
        let worker = |n| ModelWorker {
            connection: Some((0, "a".to_owned())),
            connected_at: 0,
            since: 0,
            policy,
            next_poll: n * 130,
            cut_until: 0,
            poll: None,
            polled: None,
        };
        Self {
            now: 0,
            dice: Dice(seed),
            fault_odds,
            primaries: [primary("a"), primary("b")],
            row: None,
            takeovers: Vec::new(),
            workers: (0..workers as u64).map(worker).collect(),
            granted: Vec::new(),
            restarts: 0,
        }
    }

    fn tick(&mut self) -> Result<(), String> {
        self.now += TICK_MS;
        self.commit();
        for index in 0..self.workers.len() {
            self.inject_faults(index);
            self.poll(index);
            self.act(index)?;
        }
        Ok(())
    }

    fn commit(&mut self) {
        let now = self.now;
        let (due, later) = std::mem::take(&mut self.takeovers).into_iter().partition(|(_, at, _)| *at <= now);
        self.takeovers = later;
        for (since_ms, _, take) in due {
            if self.row.as_ref().map(|row| row.holder.clone()) == take.from {
                let term = self.row.as_ref().map_or(1, |row| row.term + 1);
                self.row = Some(WrittenRow { holder: take.to, term, since_ms });
            }
        }
    }

    fn inject_faults(&mut self, index: usize) {
        let (now, trouble) = (self.now, self.fault_odds);
        if self.dice.one_in(trouble) {
            let node = self.dice.below(2) as usize;
            let link = self.dice.one_in(2).then(|| (node, self.primaries[node].run_id.clone()));
            let worker = &mut self.workers[index];
            if link.is_some() != worker.connection.is_some() {
                worker.since = now;
            }
            worker.connected_at = now;
            worker.connection = link;
        }
        if self.dice.one_in(trouble * 20) {
            let node = self.dice.below(2) as usize;
            self.restarts += 1;
            self.primaries[node] = Primary { run_id: format!("r{}", self.restarts), ..Primary::default() };
            for worker in self.workers.iter_mut().filter(|w| w.connection.as_ref().is_some_and(|(n, _)| *n == node)) {
                (worker.connection, worker.since) = (None, now);
            }
        }
        if self.dice.one_in(trouble * 20) {
            self.workers[index].policy = if self.dice.one_in(2) { SHARED } else { StoreDown::Wait };
        }
    }

    fn poll(&mut self, index: usize) {
        let (now, poll_ms) = (self.now, POLL.as_millis() as u64);
        if self.dice.one_in(self.fault_odds) {
            self.workers[index].cut_until = now + self.dice.below(9_000);
        }
        let (there, back) = (self.dice.below(poll_ms / 2), self.dice.below(poll_ms / 2));
        let worker = &mut self.workers[index];
        if worker.poll.is_none() && now >= worker.next_poll {
            worker.next_poll = now + poll_ms;
            // A failed poll returns no row.
            if now >= worker.cut_until {
                let (reads_at, arrives_at) = (now + there, now + there + back);
                worker.poll = Some(Poll { departed: now, reads_at, arrives_at, read: None });
            }
        }
        let Some(poll) = &mut worker.poll else { return };
        if poll.read.is_none() && now >= poll.reads_at {
            poll.read = Some(self.row.clone());
        }
        if now >= poll.arrives_at
            && let Some(row) = poll.read.take()
        {
            let term = |row: &Option<WrittenRow>| row.as_ref().map(|row| row.term);
            let before = worker.polled.take().filter(|(_, before, _)| term(before) == term(&row));
            worker.polled = Some((poll.departed, row, before.map_or(now, |(_, _, seen)| seen)));
            worker.poll = None;
        }
    }

    fn act(&mut self, index: usize) -> Result<(), String> {
        let (now, ms) = (self.now, Duration::from_millis);
        let worker = &self.workers[index];
        let store = match &worker.connection {
            None => ObservedStore::Unavailable { unavailable_for: ms(now - worker.since) },
            Some((_, run_id)) => ObservedStore::Reachable {
                run_id,
                connected_for: ms(now - worker.connected_at),
                reachable_for: ms(now - worker.since),
            },
        };
        let polled = worker.polled.as_ref().map(|(departed, row, seen)| PollResult {
            age: ms(now - departed),
            row: row.as_ref().map(|row| ObservedLeader {
                holder: &row.holder,
                age: ms(departed.saturating_sub(row.since_ms)),
                known_for: ms(now - seen),
            }),
        });
        let term = worker.polled.as_ref().and_then(|(_, row, _)| row.as_ref()).map_or(0, |row| row.term);
        let decision = decide(store, polled, worker.policy, TIMING);
        if let Some(take) = decision.takeover
            && !self.takeovers.iter().any(|(_, _, waiting)| *waiting == take)
        {
            let committed = now + self.dice.below(3_000);
            self.takeovers.push((now, committed, take));
        }
        match decision.leader {
            Leader::Store { may_rebuild: may_warm } => {
                let (node, run_id) = worker.connection.clone().unwrap();
                let primary = &mut self.primaries[node];
                if primary.term != term {
                    (primary.term, primary.warm_in) = (term, None);
                }
                if may_warm {
                    primary.warm_in = Some(term);
                }
                if primary.warm_in == Some(term) {
                    self.grant(&holder_name(&run_id), index)?;
                }
            }
            Leader::FallbackShare => self.grant(SHARE_HOLDER, index)?,
            Leader::NoLeader(_) => {}
        }
        if decision.reconnect {
            let node = self.dice.below(2) as usize;
            let worker = &mut self.workers[index];
            (worker.connection, worker.connected_at) = (Some((node, self.primaries[node].run_id.clone())), now);
        }
        Ok(())
    }

    fn grant(&mut self, holder: &str, worker: usize) -> Result<(), String> {
        let now = self.now;
        for (other, at) in self.granted.iter().filter(|(other, _)| other != holder) {
            if now < at + START_DELAY_MAX_MS {
                return Err(format!("at {now} ms worker {worker} grants for {holder}, {other} granted at {at} ms"));
            }
        }
        self.granted.retain(|(known, _)| known != holder);
        self.granted.push((holder.to_owned(), now));
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn two_leaders_never_grant_at_once(seed: u64, workers in 2..5_usize, trouble in 20..400_u64, shares: bool) {
        let mut world = ClusterModel::new(seed, workers, trouble, shares);
        for _ in 0..2_400 {
            if let Err(breach) = world.tick() {
                prop_assert!(false, "{breach}");
            }
        }
    }
}

/// Holders that granted within the last `within_ms`.
fn grants_lately(world: &ClusterModel, within_ms: u64) -> Vec<&str> {
    let lately = world.granted.iter().filter(|(_, at)| at + within_ms > world.now);
    lately.map(|(holder, _)| holder.as_str()).collect()
}

#[test]
fn healthy_cluster_gets_grants_soon() {
    for seed in 0..20 {
        let mut world = ClusterModel::new(seed, 3, u64::MAX / 40, false);
        while world.now < 13_000 {
            world.tick().unwrap();
        }
        assert_eq!(grants_lately(&world, 1_000), ["redis:a"], "seed {seed}");
        // It restarts. The workers find it again, and it grants once all of them know it.
        world.primaries[0] = Primary { run_id: "new".to_owned(), ..Primary::default() };
        for worker in &mut world.workers {
            (worker.connection, worker.connected_at) = (Some((0, "new".to_owned())), world.now);
        }
        while world.now < 26_000 {
            world.tick().unwrap();
        }
        assert_eq!(grants_lately(&world, 1_000), ["redis:new"], "seed {seed}");
    }
}

#[test]
fn shares_begin_and_end_automatically() {
    for seed in 0..20 {
        let mut world = ClusterModel::new(seed, 3, u64::MAX / 40, true);
        for worker in &mut world.workers {
            worker.connection = None;
        }
        while world.now < 20_000 {
            world.tick().unwrap();
        }
        assert_eq!(grants_lately(&world, 1_000), [SHARE_HOLDER], "seed {seed}");
        for worker in &mut world.workers {
            (worker.connection, worker.connected_at, worker.since) = (Some((0, "a".to_owned())), world.now, world.now);
        }
        while world.now < 90_000 {
            world.tick().unwrap();
        }
        assert_eq!(grants_lately(&world, 1_000), ["redis:a"], "seed {seed}");
    }
}
