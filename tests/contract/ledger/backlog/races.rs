//! Dispatchers, recorders, workers and operators at the same time: no job twice, none forgotten, and counts that agree.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use futures_util::future::join_all;
use sluicegate::ledger::backlog::RepairedFlows;
use sluicegate::ledger::database::Database;

use super::*;

on_every_database!(two_dispatchers_never_claim_a_job_twice, random_histories_keep_the_counts);

/// The same numbers for the same seed.
pub(super) struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// Claims, or waits for the other process.
async fn dispatch(backlog: &Database, at_most: u32, quantum: u32) -> Vec<BacklogJob> {
    let (lane, bounds) = (name("stripe"), FairClaim { at_most, quantum, ..everything() });
    loop {
        match backlog.claim_backlog(&claim_of(&lane, &bounds)).await.unwrap() {
            BacklogClaim::Claimed { jobs, .. } => return jobs,
            BacklogClaim::Busy => tokio::task::yield_now().await,
        }
    }
}

/// Recorders go on while two dispatchers claim, and every third claimed job is returned once.
async fn two_dispatchers_never_claim_a_job_twice(kind: Kind) {
    const JOBS: u32 = 400;
    let fixture = Fixture::migrated(kind).await;
    let claims: Arc<Mutex<BTreeMap<String, u32>>> = Arc::default();
    let left = Arc::new(AtomicU32::new(JOBS));
    let recorders = (0..4).map(|recorder| {
        let backlog = fixture.database.clone();
        tokio::spawn(async move {
            for number in (recorder..JOBS).step_by(4) {
                let job = of(&format!("acct_{}", number % 17), &format!("p{number:04}"));
                let recorded = backlog.record_backlog(&job, hash(1), Duration::ZERO).await.unwrap();
                assert!(matches!(recorded, BacklogRecord::Recorded { .. }), "{recorded:?}");
            }
        })
    });
    let recorders: Vec<_> = recorders.collect();
    let dispatchers = (0..2).map(|_| {
        let (backlog, claims, left) = (fixture.database.clone(), Arc::clone(&claims), Arc::clone(&left));
        tokio::spawn(async move {
            while left.load(Ordering::SeqCst) > 0 {
                for job in dispatch(&backlog, 10, 3).await {
                    let times = {
                        let mut claims = claims.lock().unwrap();
                        let times = claims.entry(job.job.id.as_str().to_owned()).or_default();
                        *times += 1;
                        *times
                    };
                    if times == 1 && job.job.id.as_str().ends_with(['0', '3', '6', '9']) {
                        let written = backlog.return_to_backlog(&job.claimed.lease, &RETURNED).await;
                        assert_eq!(written.unwrap(), FencedWrite::Applied);
                    } else {
                        left.fetch_sub(1, Ordering::SeqCst);
                    }
                }
            }
        })
    });
    for task in join_all(dispatchers.collect::<Vec<_>>().into_iter().chain(recorders)).await {
        task.unwrap();
    }
    let claims = claims.lock().unwrap().clone();
    assert_eq!(claims.len() as u32, JOBS);
    for (id, times) in claims {
        let wanted = if id.ends_with(['0', '3', '6', '9']) { 2 } else { 1 };
        assert_eq!(times, wanted, "{id}");
    }
    fixture.counts_agree().await;
    assert_eq!(fixture.one("SELECT count(*) FROM jobs WHERE backlog").await, "0");
}

/// One worker of a history, with the jobs that it has claimed.
struct Worker {
    ledger: Database,
    random: Random,
    number: u64,
    recorded: u64,
    active: Vec<BacklogJob>,
}

impl Worker {
    async fn step(&mut self, fixture: &Fixture) {
        let lane = name("stripe");
        let account = format!("acct_{}", self.random.below(4));
        match self.random.below(15) {
            0..=4 => {
                self.recorded += 1;
                let priority = u8::try_from(self.random.below(3) * 4).unwrap();
                let expires_at = (self.random.below(9) == 0).then_some(EpochMs(1));
                let id = format!("w{}-{}", self.number, self.recorded);
                fixture.record(&Job { priority, expires_at, ..of(&account, &id) }).await;
            }
            5 | 6 => {
                let (at_most, per_flow) = (self.random.below(6), self.random.below(3));
                let jobs = dispatch(&self.ledger, at_most as u32 + 1, per_flow as u32 + 1).await;
                self.active.extend(jobs);
            }
            7 => drop(self.ledger.expire("too late", 3).await.unwrap()),
            8 => {
                let id = format!("w{}-{}", self.number, self.random.below(self.recorded + 1));
                fixture
                    .sql(&format!("UPDATE jobs SET state = 'cancelled' WHERE id = '{id}' AND backlog"))
                    .await
                    .unwrap();
            }
            9 => drop(self.ledger.unblock_flows(&lane).await.unwrap()),
            10 => drop(self.ledger.remove_idle_flows(&lane, 3).await.unwrap()),
            11 => drop(self.ledger.return_now(&lane, 3).await.unwrap()),
            _ => self.end_one().await,
        }
    }

    async fn end_one(&mut self) {
        if self.active.is_empty() {
            return;
        }
        let at = self.random.below(self.active.len() as u64) as usize;
        let job = self.active.swap_remove(at);
        let lease = &job.claimed.lease;
        let block = (self.random.below(2) == 0).then(|| block(A_MINUTE, "per-second"));
        let written = match self.random.below(4) {
            0 | 1 => self.ledger.return_to_backlog(lease, &BacklogReturn { block, ..RETURNED }).await.unwrap(),
            2 => {
                let done = JobState::Final { state: FinalState::Declined, reason: "no".to_owned(), reference: None };
                self.ledger.transition(lease, &done).await.unwrap()
            }
            _ => {
                let wait = JobState::Waiting { wait: Duration::ZERO, reason: Wait::for_limit("a") };
                self.ledger.transition(lease, &wait).await.unwrap()
            }
        };
        assert_eq!(written, FencedWrite::Applied, "{job:?}");
    }
}

/// Any operations in any order by four workers at once, and the count of each flow is that of its jobs.
async fn random_histories_keep_the_counts(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for seed in [0x5EED_0001, 0x5EED_0002] {
        let fixture = &fixture;
        let workers = (0..4_u64).map(async |number| {
            let mut worker = Worker {
                ledger: fixture.database.clone(),
                random: Random(seed + number * 0x9E37_79B9),
                number: seed * 8 + number,
                recorded: 0,
                active: Vec::new(),
            };
            for _ in 0..60 {
                worker.step(fixture).await;
            }
        });
        join_all(workers).await;
        fixture.counts_agree().await;
        let repaired = fixture.database.repair_flows(&name("stripe"), 9).await.unwrap();
        assert_eq!(repaired, RepairedFlows::default(), "seed {seed:x}");
    }
    // Nothing is forgotten: all that wait are claimed once no flow is blocked.
    fixture.database.unblock_flows(&name("stripe")).await.unwrap();
    let waiting = fixture.one("SELECT count(*) FROM jobs WHERE backlog").await;
    let mut claimed = 0;
    loop {
        let jobs = fixture.dispatch(50, 5).await;
        claimed += jobs.len();
        if jobs.is_empty() {
            break;
        }
    }
    assert_eq!(claimed.to_string(), waiting);
    fixture.counts_agree().await;
}

/// Its flow's row is locked by one batch or another nearly all of the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flood_does_not_starve_its_dispatcher() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let is_over = Arc::new(AtomicBool::new(false));
    fixture.record(&job("first")).await;
    fixture.dispatch(1, 1).await;
    let recorders: Vec<_> = (0..3)
        .map(|recorder| {
            let (database, is_over) = (Database::open(&fixture.url, 4).unwrap(), Arc::clone(&is_over));
            tokio::spawn(async move {
                for number in 0_u32.. {
                    if is_over.load(Ordering::SeqCst) {
                        return;
                    }
                    let job = job(&format!("p{recorder}-{number}"));
                    database.record_backlog(&job, hash(1), Duration::ZERO).await.unwrap();
                }
            })
        })
        .collect();
    while fixture.one("SELECT waiting > 40 FROM flows").await != "true" {
        tokio::task::yield_now().await;
    }
    let backlog = fixture.database.clone();
    // On a busy machine, a batch may hold the lock for longer than a dispatcher waits.
    let mut claimed = 0;
    for _ in 0..30 {
        claimed += dispatch(&backlog, 1, 1).await.len();
    }
    assert!(claimed >= 20, "{claimed} of 30 claims found the flow");
    is_over.store(true, Ordering::SeqCst);
    for recorder in recorders {
        recorder.await.unwrap();
    }
    fixture.counts_agree().await;
}

/// A row that a person has locked in `psql` holds up its own flow alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_flow_does_not_block_others() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    for (account, id) in [("acct_1", "a1"), ("acct_2", "b1")] {
        fixture.record(&of(account, id)).await;
    }
    let pool = fixture.postgres.clone().unwrap();
    let mut person = pool.begin().await.unwrap();
    sqlx::query("SELECT FROM flows WHERE account = 'acct_1' FOR UPDATE").execute(&mut *person).await.unwrap();
    assert_eq!(ids(&fixture.dispatch(9, 9).await), ["b1"]);
    person.rollback().await.unwrap();
    assert_eq!(ids(&fixture.dispatch(9, 9).await), ["a1"]);
}

/// It changes the flow's count when it ends, and until then the flow goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_transaction_does_not_hold_up_its_flow() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    for id in ["p1", "p2", "p3"] {
        fixture.record(&job(id)).await;
    }
    let pool = fixture.postgres.clone().unwrap();
    let mut person = pool.begin().await.unwrap();
    sqlx::query("UPDATE jobs SET state = 'cancelled' WHERE id = 'p1'").execute(&mut *person).await.unwrap();
    fixture.record(&job("p4")).await;
    assert_eq!(ids(&fixture.dispatch(2, 9).await), ["p2", "p3"]);
    fixture.counts_agree().await;
    person.commit().await.unwrap();
    fixture.counts_agree().await;
    assert_eq!(ids(&fixture.dispatch(9, 9).await), ["p4"]);
}
