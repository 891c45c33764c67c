use proptest::prelude::*;

use super::Cause::*;
use super::Verdict::{Nobody, OwnShare, Store as FromStore};
use super::*;

const POLL: Duration = Duration::from_secs(1);
/// Booking horizon and send budget, in ms: permits in hands start at most this much later.
const IN_HAND_MS: u64 = 750;
const TICK_MS: u64 = 50;
const TIMING: Timing = Timing { slack: Duration::from_millis(IN_HAND_MS + TICK_MS), ..Timing::polled_every(POLL) };
const OF_TWO: StoreDown = StoreDown::Share { of: 2 };

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn linked(run_id: &str, linked: u64, since: u64) -> Store<'_> {
    Store::Reachable { run_id, linked: s(linked), since: s(since) }
}

fn away(since: u64) -> Store<'static> {
    Store::Away { since: s(since) }
}

/// A row first seen, and by the database written, this many seconds ago; polled just now.
fn row(holder: &str, age: u64) -> Option<Polled<'_>> {
    Some(Polled { ago: Duration::ZERO, row: Some(Row { holder, age: s(age), seen: s(age) }) })
}

fn taken(decision: &Decision) -> Option<(Option<&str>, &str)> {
    decision.take.as_ref().map(|take| (take.from.as_deref(), take.to.as_str()))
}

/// What happens, the store, the row, the policy; then verdict, take and reconnect.
type Case<'a> = (&'a str, Store<'a>, Option<Polled<'a>>, StoreDown, Verdict, Option<(Option<&'a str>, &'a str)>, bool);

fn hold(table: &[Case<'_>]) {
    for (case, store, polled, policy, verdict, take, reconnect) in table {
        let decision = decide(*store, *polled, *policy, TIMING);
        assert_eq!((decision.verdict, taken(&decision), decision.reconnect), (*verdict, *take, *reconnect), "{case}");
    }
}

#[test]
fn the_rules_of_a_store_as_a_table() {
    let (wait, none) = (StoreDown::Wait, Some(Polled { ago: Duration::ZERO, row: None }));
    let stale = |ago_ms| {
        let row = Row { holder: "redis:a", age: s(60), seen: s(60) };
        Some(Polled { ago: Duration::from_millis(ago_ms), row: Some(row) })
    };
    let late_commit = Some(Polled { ago: s(1), row: Some(Row { holder: "redis:a", age: s(60), seen: s(1) }) });
    let clock_set_back = Some(Polled { ago: s(1), row: Some(Row { holder: "redis:a", age: s(0), seen: s(60) }) });
    hold(&[
        ("not polled", linked("a", 9, 9), None, wait, Nobody(NotPolled), None, false),
        ("stale", linked("a", 9, 9), stale(3_001), wait, Nobody(DatabaseAway), None, false),
        ("nearly stale", linked("a", 9, 9), stale(3_000), wait, FromStore { may_warm: true }, None, false),
        ("no holder", linked("a", 9, 9), none, wait, Nobody(NoHolder), Some((None, "redis:a")), false),
        ("no holder, away", away(4), none, OF_TWO, Nobody(StoreAway), None, false),
        ("no holder, long away", away(5), none, OF_TWO, Nobody(StoreAway), Some((None, "share")), false),
        ("no holder, away, wait", away(60), none, wait, Nobody(StoreAway), None, false),
        ("ours, fresh", linked("a", 9, 9), row("redis:a", 3), wait, FromStore { may_warm: false }, None, false),
        ("ours", linked("a", 9, 9), row("redis:a", 4), wait, FromStore { may_warm: true }, None, false),
        ("ours, just committed", linked("a", 9, 9), late_commit, wait, FromStore { may_warm: false }, None, false),
        ("ours, clock set back", linked("a", 9, 9), clock_set_back, wait, FromStore { may_warm: false }, None, false),
        ("ours, away", away(60), row("redis:a", 60), wait, Nobody(StoreAway), None, false),
        ("ours, away, share", away(4), row("redis:a", 60), OF_TWO, Nobody(StoreAway), None, false),
        (
            "shares begin",
            away(5),
            row("redis:a", 60),
            OF_TWO,
            Nobody(StoreAway),
            Some((Some("redis:a"), "share")),
            false,
        ),
        ("another's", linked("b", 9, 9), row("redis:a", 5), wait, Nobody(AnotherStore), None, true),
        ("another's, same age", linked("b", 5, 9), row("redis:a", 5), wait, Nobody(AnotherStore), None, true),
        (
            "another's, linked anew",
            linked("b", 4, 9),
            row("redis:a", 5),
            wait,
            Nobody(TwoStores),
            Some((Some("redis:a"), "redis:b")),
            false,
        ),
    ]);
}

#[test]
fn the_rules_of_shares_as_a_table() {
    let wait = StoreDown::Wait;
    hold(&[
        ("share, fresh", away(60), row("share", 3), OF_TWO, Nobody(Changing), None, false),
        ("share", away(60), row("share", 4), OF_TWO, OwnShare, None, false),
        ("share, store is back", linked("a", 9, 9), row("share", 70), OF_TWO, OwnShare, None, false),
        ("share, just begun", linked("a", 20, 20), row("share", 59), OF_TWO, OwnShare, None, false),
        (
            "share ends",
            linked("a", 10, 10),
            row("share", 60),
            OF_TWO,
            OwnShare,
            Some((Some("share"), "redis:a")),
            false,
        ),
        (
            "share, relinked",
            linked("a", 1, 10),
            row("share", 60),
            OF_TWO,
            OwnShare,
            Some((Some("share"), "redis:a")),
            false,
        ),
        (
            "share, policy wait",
            linked("a", 0, 0),
            row("share", 0),
            wait,
            Nobody(StoreAway),
            Some((Some("share"), "redis:a")),
            false,
        ),
        ("share, policy wait, away", away(60), row("share", 60), wait, Nobody(StoreAway), None, false),
        (
            "share, stale",
            away(60),
            Some(Polled { ago: s(4), ..row("share", 60).unwrap() }),
            OF_TWO,
            Nobody(DatabaseAway),
            None,
            false,
        ),
        ("share, not polled", away(60), None, OF_TWO, Nobody(NotPolled), None, false),
    ]);
}

/// A tiny generator, so that a whole history hangs on one number.
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

/// A writable primary: its run id changes when it restarts, its state is warm in one term or not at all.
#[derive(Clone, Default)]
struct Primary {
    run_id: String,
    warm_in: Option<i64>,
    /// The term of the last call; a call of another term makes the state cold.
    term: i64,
}

#[derive(Clone)]
struct WrittenRow {
    holder: String,
    term: i64,
    since_ms: u64,
}

/// A poll under way: departed, reads the row, arrives.
struct Poll {
    departed: u64,
    reads_at: u64,
    arrives_at: u64,
    read: Option<Option<WrittenRow>>,
}

struct Worker {
    link: Option<(usize, String)>,
    linked_at: u64,
    /// Since when it has been reachable, or away.
    since: u64,
    policy: StoreDown,
    next_poll: u64,
    /// Until when its polls fail.
    cut_until: u64,
    poll: Option<Poll>,
    /// Departure of the last poll that succeeded, the row, and when it was first seen.
    polled: Option<(u64, Option<WrittenRow>, u64)>,
}

struct World {
    now: u64,
    dice: Dice,
    /// Things go wrong once in so many ticks and workers.
    trouble: u64,
    primaries: [Primary; 2],
    row: Option<WrittenRow>,
    /// Written by a statement that began then, seen by others when it is committed.
    takes: Vec<(u64, u64, Take)>,
    workers: Vec<Worker>,
    /// Holder and instant of each holder's last grant.
    granted: Vec<(String, u64)>,
    restarts: u64,
}

impl World {
    fn new(seed: u64, workers: usize, trouble: u64, shares: bool) -> Self {
        let policy = if shares { OF_TWO } else { StoreDown::Wait };
        let primary = |run_id: &str| Primary { run_id: run_id.to_owned(), ..Primary::default() };
        let worker = |n| Worker {
            link: Some((0, "a".to_owned())),
            linked_at: 0,
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
            trouble,
            primaries: [primary("a"), primary("b")],
            row: None,
            takes: Vec::new(),
            workers: (0..workers as u64).map(worker).collect(),
            granted: Vec::new(),
            restarts: 0,
        }
    }

    fn tick(&mut self) -> Result<(), String> {
        self.now += TICK_MS;
        self.commit();
        for index in 0..self.workers.len() {
            self.go_wrong(index);
            self.poll(index);
            self.act(index)?;
        }
        Ok(())
    }

    fn commit(&mut self) {
        let now = self.now;
        let (due, later) = std::mem::take(&mut self.takes).into_iter().partition(|(_, at, _)| *at <= now);
        self.takes = later;
        for (since_ms, _, take) in due {
            if self.row.as_ref().map(|row| row.holder.clone()) == take.from {
                let term = self.row.as_ref().map_or(1, |row| row.term + 1);
                self.row = Some(WrittenRow { holder: take.to, term, since_ms });
            }
        }
    }

    fn go_wrong(&mut self, index: usize) {
        let (now, trouble) = (self.now, self.trouble);
        if self.dice.one_in(trouble) {
            let node = self.dice.below(2) as usize;
            let link = self.dice.one_in(2).then(|| (node, self.primaries[node].run_id.clone()));
            let worker = &mut self.workers[index];
            if link.is_some() != worker.link.is_some() {
                worker.since = now;
            }
            worker.linked_at = now;
            worker.link = link;
        }
        if self.dice.one_in(trouble * 20) {
            let node = self.dice.below(2) as usize;
            self.restarts += 1;
            self.primaries[node] = Primary { run_id: format!("r{}", self.restarts), ..Primary::default() };
            for worker in self.workers.iter_mut().filter(|w| w.link.as_ref().is_some_and(|(n, _)| *n == node)) {
                (worker.link, worker.since) = (None, now);
            }
        }
        if self.dice.one_in(trouble * 20) {
            self.workers[index].policy = if self.dice.one_in(2) { OF_TWO } else { StoreDown::Wait };
        }
    }

    fn poll(&mut self, index: usize) {
        let (now, poll_ms) = (self.now, POLL.as_millis() as u64);
        if self.dice.one_in(self.trouble) {
            self.workers[index].cut_until = now + self.dice.below(9_000);
        }
        let (there, back) = (self.dice.below(poll_ms / 2), self.dice.below(poll_ms / 2));
        let worker = &mut self.workers[index];
        if worker.poll.is_none() && now >= worker.next_poll {
            worker.next_poll = now + poll_ms;
            // A poll that fails is one that says nothing.
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
        let store = match &worker.link {
            None => Store::Away { since: ms(now - worker.since) },
            Some((_, run_id)) => {
                Store::Reachable { run_id, linked: ms(now - worker.linked_at), since: ms(now - worker.since) }
            }
        };
        let polled = worker.polled.as_ref().map(|(departed, row, seen)| Polled {
            ago: ms(now - departed),
            row: row.as_ref().map(|row| Row {
                holder: &row.holder,
                age: ms(departed.saturating_sub(row.since_ms)),
                seen: ms(now - seen),
            }),
        });
        let term = worker.polled.as_ref().and_then(|(_, row, _)| row.as_ref()).map_or(0, |row| row.term);
        let decision = decide(store, polled, worker.policy, TIMING);
        if let Some(take) = decision.take
            && !self.takes.iter().any(|(_, _, waiting)| *waiting == take)
        {
            let committed = now + self.dice.below(3_000);
            self.takes.push((now, committed, take));
        }
        match decision.verdict {
            Verdict::Store { may_warm } => {
                let (node, run_id) = worker.link.clone().unwrap();
                let primary = &mut self.primaries[node];
                if primary.term != term {
                    (primary.term, primary.warm_in) = (term, None);
                }
                if may_warm {
                    primary.warm_in = Some(term);
                }
                if primary.warm_in == Some(term) {
                    self.grant(&holder_of(&run_id), index)?;
                }
            }
            Verdict::OwnShare => self.grant(SHARE, index)?,
            Verdict::Nobody(_) => {}
        }
        if decision.reconnect {
            let node = self.dice.below(2) as usize;
            let worker = &mut self.workers[index];
            (worker.link, worker.linked_at) = (Some((node, self.primaries[node].run_id.clone())), now);
        }
        Ok(())
    }

    fn grant(&mut self, holder: &str, worker: usize) -> Result<(), String> {
        let now = self.now;
        for (other, at) in self.granted.iter().filter(|(other, _)| other != holder) {
            if now < at + IN_HAND_MS {
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
    fn two_holders_never_grant_at_once(seed: u64, workers in 2..5_usize, trouble in 20..400_u64, shares: bool) {
        let mut world = World::new(seed, workers, trouble, shares);
        for _ in 0..2_400 {
            if let Err(breach) = world.tick() {
                prop_assert!(false, "{breach}");
            }
        }
    }
}

/// Grants within the last so many ms, by holder.
fn grants_lately(world: &World, within_ms: u64) -> Vec<&str> {
    let lately = world.granted.iter().filter(|(_, at)| at + within_ms > world.now);
    lately.map(|(holder, _)| holder.as_str()).collect()
}

#[test]
fn a_calm_cluster_is_granted_soon() {
    for seed in 0..20 {
        let mut world = World::new(seed, 3, u64::MAX / 40, false);
        while world.now < 13_000 {
            world.tick().unwrap();
        }
        assert_eq!(grants_lately(&world, 1_000), ["redis:a"], "seed {seed}");
        // It restarts: workers find it again, and it grants once everybody knows.
        world.primaries[0] = Primary { run_id: "new".to_owned(), ..Primary::default() };
        for worker in &mut world.workers {
            (worker.link, worker.linked_at) = (Some((0, "new".to_owned())), world.now);
        }
        while world.now < 26_000 {
            world.tick().unwrap();
        }
        assert_eq!(grants_lately(&world, 1_000), ["redis:new"], "seed {seed}");
    }
}

#[test]
fn shares_begin_and_end_without_a_person() {
    for seed in 0..20 {
        let mut world = World::new(seed, 3, u64::MAX / 40, true);
        for worker in &mut world.workers {
            worker.link = None;
        }
        while world.now < 20_000 {
            world.tick().unwrap();
        }
        assert_eq!(grants_lately(&world, 1_000), [SHARE], "seed {seed}");
        for worker in &mut world.workers {
            (worker.link, worker.linked_at, worker.since) = (Some((0, "a".to_owned())), world.now, world.now);
        }
        while world.now < 90_000 {
            world.tick().unwrap();
        }
        assert_eq!(grants_lately(&world, 1_000), ["redis:a"], "seed {seed}");
    }
}
