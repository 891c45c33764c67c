//! Every pair of writes on one job, in both orders: the second begins while the first is not committed.
//!
//! On PostgreSQL the second write waits for the row, and goes on with a snapshot older than the first write's commit.
//! SQLite has one writer, so there the writes follow each other.

use futures_util::{StreamExt as _, stream};
use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::operator::{Actor, Charge, JobResolution};
use sluicegate::ledger::upkeep::{WaitCause, WakeFilter};
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState, LookupEnd, NewJobAttempt};
use tokio::task::JoinHandle;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_write_pairs_keep_invariants() {
    every_pair(Kind::Postgres).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_write_pairs_keep_invariants() {
    every_pair(Kind::SqliteMemory).await;
}

/// State of a job before the pair. `Lapsed`: its worker's lease is over.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Start {
    New,
    Held,
    Lapsed,
    LapsedUnknown,
    LapsedSending,
    LapsedAsking,
    Delayed,
    Review,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Write {
    // By the first worker, with its lease.
    Begin,
    BeginLookup,
    FinishWaiting,
    FinishUnknown,
    FinishFinal,
    FinishLookup,
    FinishLookupFinal,
    Delay,
    Finalize,
    Release,
    // By another worker.
    Claim,
    RecordAndBegin,
    // By a sweeper.
    Expire,
    Return,
    WakeRefused,
    // By an operator.
    Cancel,
    CancelAhead,
    Succeeded,
    Resend,
    Replay,
    Discard,
}
use Write::*;

const TABLE: [(Start, &[Write]); 9] = [
    (Start::New, &[Claim, RecordAndBegin, CancelAhead]),
    (Start::Held, &[Begin, Delay, Finalize, Release, Claim, Return, Cancel]),
    (Start::Lapsed, &[Begin, Delay, Finalize, Release, Claim, Expire, Return, Cancel]),
    (Start::LapsedUnknown, &[Begin, BeginLookup, Delay, Finalize, Release, Claim, Return]),
    (Start::LapsedSending, &[FinishWaiting, FinishUnknown, FinishFinal, Release, Claim, Return, Cancel]),
    (Start::LapsedAsking, &[FinishLookup, FinishLookupFinal, Delay, Finalize, Release, Claim, Return, Begin]),
    (Start::Delayed, &[Claim, Expire, Return, WakeRefused, Cancel]),
    (Start::Review, &[Succeeded, Resend, Claim, Finalize]),
    (Start::Dead, &[Replay, Discard, Claim]),
];

/// Blocks each transaction that has written the row until the test releases the lock of this job.
const HELD_UP: &str = "CREATE FUNCTION held_up() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS \
     $$ BEGIN PERFORM pg_advisory_xact_lock_shared(0, hashtext(NEW.id)); RETURN NULL; END $$; \
     CREATE TRIGGER held_up AFTER INSERT OR UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION held_up()";

/// Pairs that run at the same time; each may use two of the ledger's eight connections for writes.
const PAIRS_AT_ONCE: usize = 4;

async fn every_pair(kind: Kind) {
    let fixture = Arc::new(Fixture::migrated(kind).await);
    let server = match kind {
        Kind::Postgres => {
            fixture.sql(HELD_UP).await.unwrap();
            let options = sqlx::postgres::PgPoolOptions::new().max_connections(2 * PAIRS_AT_ONCE as u32);
            Some(options.connect_lazy(&fixture.url).unwrap())
        }
        _ => None,
    };
    let pairs = TABLE.into_iter().flat_map(|(start, writes)| {
        writes.iter().flat_map(move |first| writes.iter().map(move |second| (start, *first, *second)))
    });
    let ran: Vec<(String, Option<bool>)> = stream::iter(pairs)
        .map(|(start, first, second)| {
            let (fixture, server) = (Arc::clone(&fixture), server.clone());
            let name = format!("{start:?}: {first:?}, {second:?}");
            let run = async move { Pair::prepare(fixture, server, start, [first, second]).await.run().await };
            async move { (name, tokio::spawn(run).await.ok()) }
        })
        .buffer_unordered(PAIRS_AT_ONCE)
        .collect()
        .await;
    let failed: Vec<&String> = ran.iter().filter(|(_, waited)| waited.is_none()).map(|(name, _)| name).collect();
    assert!(failed.is_empty(), "{} pairs, each reported above: {failed:#?}", failed.len());
    // Otherwise the pairs would not test concurrent writes.
    let waited = ran.iter().filter(|(_, waited)| *waited == Some(true)).count();
    assert!(kind != Kind::Postgres || waited > 150, "only {waited} of the second writes waited for the first");
}

struct Pair {
    fixture: Arc<Fixture>,
    /// A pool beside the ledger's; `None` if no write can be held up.
    server: Option<sqlx::PgPool>,
    start: Start,
    writes: [Write; 2],
    job: Job,
    hold: LeaseToken,
    number: u32,
}

/// Effect of a write, by the write's own result.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Did {
    Something,
    Nothing,
}

impl Pair {
    async fn prepare(fixture: Arc<Fixture>, server: Option<sqlx::PgPool>, start: Start, writes: [Write; 2]) -> Self {
        let text = format!("{start:?}-{:?}-{:?}", writes[0], writes[1]);
        let job = Job { provider: name(&text.to_lowercase()), ..job(&text) };
        let hold = LeaseToken { id: job.id.clone(), fence: 7_000_000_000 };
        let this = Self { fixture, server, start, writes, job, hold, number: 1 }.started().await;
        if writes.contains(&Expire) {
            // Only now, or the expiry of another pair would end it while it is prepared.
            let past = format!("UPDATE jobs SET expires_at = created_at WHERE id = '{}'", this.job.id);
            this.fixture.without_constraints(&past).await.unwrap();
        }
        this
    }

    async fn started(mut self) -> Self {
        let (ledger, fixture) = (self.fixture.database.clone(), Arc::clone(&self.fixture));
        if self.start == Start::New {
            return self;
        }
        self.hold = fixture.take(&self.job).await.lease;
        match self.start {
            Start::LapsedSending => assert_eq!(self.begin().await, BeginResult::Attempt(1)),
            Start::LapsedUnknown | Start::LapsedAsking => {
                assert_eq!(self.begin().await, BeginResult::Attempt(1));
                self.finished("unknown", &unknown()).await;
                self.hold = fixture.take(&self.job).await.lease;
                if self.start == Start::LapsedAsking {
                    assert_eq!(ledger.begin_lookup(&self.hold, A_MINUTE).await.unwrap(), BeginResult::Attempt(2));
                    self.number = 2;
                }
            }
            Start::Delayed => {
                let wait = Duration::from_secs(20);
                let reason = Wait::for_limit("all");
                let put = ledger.transition(&self.hold, &JobState::Waiting { wait, reason }).await.unwrap();
                assert_eq!(put, FencedWrite::Applied);
            }
            Start::Review => {
                assert_eq!(self.begin().await, BeginResult::Attempt(1));
                self.finished("unknown", &done(FinalState::Review)).await;
            }
            Start::Dead => {
                assert_eq!(self.begin().await, BeginResult::Attempt(1));
                self.finished("not_sent", &done(FinalState::Dead)).await;
            }
            Start::New | Start::Held | Start::Lapsed => {}
        }
        if !matches!(self.start, Start::Held | Start::Delayed | Start::Review | Start::Dead) {
            fixture.expire_lease(&self.hold).await;
        }
        self
    }

    async fn begin(&self) -> BeginResult {
        self.fixture.database.begin_attempt(&self.hold, &request(self.job.id.as_str()), AT_ONCE).await.unwrap()
    }

    async fn finished(&self, outcome: &'static str, next: &JobState) {
        let end = AttemptEnd { number: 1, outcome, status: None, detail: String::new(), counts: true };
        assert_eq!(self.fixture.database.finish_attempt(&self.hold, &end, next).await.unwrap(), FencedWrite::Applied);
    }

    /// Runs both writes; returns whether the second waited for the first.
    async fn run(self) -> bool {
        let this = Arc::new(self);
        let [first, second] = this.writes;
        let Some(server) = &this.server else {
            let did = [Arc::clone(&this).write(first).await, Arc::clone(&this).write(second).await];
            this.judge(did).await;
            return false;
        };
        let mut holding = server.acquire().await.unwrap();
        let lock = |what: &str| AssertSqlSafe(format!("SELECT {what}(0, hashtext('{}'))", this.job.id));
        sqlx::query(lock("pg_advisory_lock")).execute(&mut *holding).await.unwrap();
        let first = tokio::spawn(Arc::clone(&this).write(first));
        this.stands(&first, "waiter.pid = held_up.pid").await;
        let first_writes = !first.is_finished();
        let second = tokio::spawn(Arc::clone(&this).write(second));
        if first_writes {
            this.stands(&second, "held_up.pid = ANY (pg_blocking_pids(waiter.pid))").await;
        }
        let waited = first_writes && !second.is_finished();
        sqlx::query(lock("pg_advisory_unlock")).execute(&mut *holding).await.unwrap();
        let did = [first.await.unwrap(), second.await.unwrap()];
        this.judge(did).await;
        waited
    }

    /// Returns when the write has ended, or when `condition` is true for it beside the write that is held up.
    async fn stands(&self, write: &JoinHandle<Did>, condition: &str) {
        let waiting = format!(
            "SELECT EXISTS (SELECT 1 FROM pg_stat_activity AS waiter, pg_locks AS held_up \
                 WHERE held_up.locktype = 'advisory' AND NOT held_up.granted AND held_up.classid = 0 \
                     AND held_up.objid = (hashtext('{}')::bigint & 4294967295)::oid AND {condition})",
            self.job.id,
        );
        let Some(server) = &self.server else { return };
        while !write.is_finished() {
            let stands = sqlx::query_scalar::<_, bool>(AssertSqlSafe(waiting.clone())).fetch_one(server).await.unwrap();
            if stands {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn write(self: Arc<Self>, write: Write) -> Did {
        if self.does(write).await { Did::Something } else { Did::Nothing }
    }

    async fn does(&self, write: Write) -> bool {
        let (ledger, hold) = (self.fixture.database.clone(), &self.hold);
        let id = self.job.id.clone();
        let (number, grants_resend) = (self.number, false);
        let lookup = |outcome| LookupEnd { number, outcome, status: Some(200), detail: String::new(), grants_resend };
        let kept = |written: Result<FencedWrite, _>| written.unwrap() == FencedWrite::Applied;
        match write {
            Begin => self.begin().await != BeginResult::Stale,
            BeginLookup => ledger.begin_lookup(hold, A_MINUTE).await.unwrap() != BeginResult::Stale,
            FinishWaiting | FinishUnknown | FinishFinal => {
                let (outcome, next) = match write {
                    FinishWaiting => ("throttled", waiting()),
                    FinishUnknown => ("unknown", unknown()),
                    _ => ("accepted", done(FinalState::Succeeded)),
                };
                let end =
                    AttemptEnd { number: self.number, outcome, status: None, detail: String::new(), counts: true };
                kept(ledger.finish_attempt(hold, &end, &next).await)
            }
            FinishLookup => kept(ledger.finish_lookup(hold, &lookup("not_found"), &unknown()).await.map(|w| w.0)),
            FinishLookupFinal => {
                let succeeded = done(FinalState::Succeeded);
                kept(ledger.finish_lookup(hold, &lookup("accepted"), &succeeded).await.map(|w| w.0))
            }
            Delay => kept(ledger.transition(hold, &waiting()).await),
            Finalize => kept(ledger.transition(hold, &done(FinalState::Review)).await),
            Release => kept(ledger.release(hold).await),
            Claim => {
                let claim = ledger.claim(&self.job, hash(1), "worker-b").await.unwrap();
                matches!(claim, super::Claim::Claimed(_))
            }
            RecordAndBegin => {
                let (job, request) = (&self.job, request(id.as_str()));
                let (hash, holder) = (hash(1), "worker-a");
                let first = NewJobAttempt { job, hash, lease: hold, holder, timing: AT_ONCE, request: &request };
                kept(ledger.record_and_begin(first).await)
            }
            Expire => ledger.expire("expires_at has passed", 10).await.unwrap() > 0,
            Return => {
                let returned = ledger.return_now(&self.job.provider, 10).await.unwrap();
                !returned.flows.is_empty()
            }
            WakeRefused => ledger.wake_waiting(&self.job.provider, &REFUSED_BEFORE_NOW).await.unwrap() > 0,
            Cancel => self.decide(JobResolution::Cancel).await,
            Succeeded => self.decide(JobResolution::Succeeded(Charge::default())).await,
            Resend => self.decide(JobResolution::Resend).await,
            Replay => self.decide(JobResolution::Replay).await,
            Discard => self.decide(JobResolution::Discard).await,
            CancelAhead => {
                let operator = self.fixture.database.clone();
                settled(operator.precancel(&id, &self.job.provider, &by()).await).is_ok()
            }
        }
    }

    async fn decide(&self, verdict: JobResolution) -> bool {
        settled(self.fixture.database.resolve_job(&self.job.id, &verdict, None, &by()).await).is_ok()
    }

    async fn judge(&self, did: [Did; 2]) {
        let what = format!("{:?}, {:?}: {did:?}", self.start, self.writes);
        let now = self.picture().await;
        now.hold_together(&what);
        self.final_states_stay(&now, &what, did[1]);
        self.a_stale_hold_writes_nothing(&now, &what).await;
        self.goes_on(&now, &what).await;
    }

    async fn picture(&self) -> Picture {
        let id = &self.job.id;
        let fields = format!(
            "SELECT state || '|' || fence || '|' || CASE WHEN holder IS NULL THEN 'free' ELSE 'held' END || '|' || \
                 last_attempt || '|' || (SELECT count(*) FROM events WHERE job_id = id AND events.state = jobs.state) \
             FROM jobs WHERE id = '{id}'"
        );
        let fields = self.fixture.one(&fields).await;
        let fields: Vec<&str> = fields.split('|').collect();
        let open = format!("SELECT number FROM attempts WHERE job_id = '{id}' AND ended_at IS NULL");
        let open = self.fixture.column(&open).await;
        Picture {
            state: fields[0].to_owned(),
            fence: fields[1].parse().unwrap(),
            held: fields[2] == "held",
            last_attempt: fields[3].to_owned(),
            events: fields[4].parse().unwrap(),
            open: open.into_iter().flatten().collect(),
        }
    }

    /// A final state that the first write has set stays.
    fn final_states_stay(&self, now: &Picture, what: &str, second: Did) {
        let end = match self.writes[0] {
            FinishFinal | FinishLookupFinal | Succeeded => "succeeded",
            Cancel | CancelAhead | Discard => "cancelled",
            Expire => "expired",
            _ => return,
        };
        // The expiry may have ended another job.
        let is_other = matches!(self.writes[1], Expire);
        assert!(now.state != end || second == Did::Nothing || is_other, "{what}: overwrote `{end}`");
    }

    async fn a_stale_hold_writes_nothing(&self, now: &Picture, what: &str) {
        if now.fence == self.hold.fence {
            return;
        }
        for stale in [Begin, BeginLookup, FinishUnknown, FinishLookup, Delay, Release] {
            assert!(!self.does(stale).await, "{what}: the stale lease wrote with {stale:?}");
        }
        assert_eq!(self.picture().await, *now, "{what}");
    }

    /// The next worker can claim an open job, and an operator can resolve a review.
    async fn goes_on(&self, now: &Picture, what: &str) {
        if matches!(now.state.as_str(), "waiting" | "sending" | "unknown") {
            let id = &self.job.id;
            let over = format!("UPDATE jobs SET holder = 'lost' WHERE holder IS NOT NULL AND id = '{id}'");
            self.fixture.sql(&over).await.unwrap();
            self.fixture.sql(&format!("UPDATE jobs SET wake_at = created_at WHERE id = '{id}'")).await.unwrap();
            let claimed = self.fixture.take_returned(&self.job).await;
            let taken = self.picture().await;
            assert!(taken.open.is_empty(), "{what}: taken over, and attempts {:?} stay open", taken.open);
            assert_eq!(claimed.maybe_charged, taken.state == "unknown", "{what}");
            assert_eq!(claimed.unknown_age.is_some(), claimed.maybe_charged, "{what}");
            let put = self.fixture.database.transition(&claimed.lease, &done(FinalState::Review)).await.unwrap();
            assert_eq!(put, FencedWrite::Applied, "{what}");
        }
        if self.picture().await.state == "review" {
            let resolved = self.decide(JobResolution::Succeeded(Charge::default())).await;
            assert!(resolved, "{what}: its review cannot be resolved");
        }
    }
}

const REFUSED_BEFORE_NOW: WakeFilter = WakeFilter {
    changed_ago: Some(Duration::ZERO),
    cause: WaitCause::Limit,
    propagation_time: SECOND,
    due_within: Duration::ZERO,
    at_most: 10,
};

#[derive(Debug, PartialEq)]
struct Picture {
    state: String,
    fence: i64,
    held: bool,
    last_attempt: String,
    /// Events of the job's present state.
    events: u32,
    open: Vec<String>,
}

impl Picture {
    fn hold_together(&self, what: &str) {
        let is_open = matches!(self.state.as_str(), "waiting" | "sending" | "unknown");
        assert!(self.open.len() <= 1, "{what}: several open attempts: {self:?}");
        if let Some(number) = self.open.first() {
            assert!(is_open && self.held, "{what}: an open attempt without a lease: {self:?}");
            assert_eq!(*number, self.last_attempt, "{what}");
        }
        assert!(self.state != "sending" || !self.open.is_empty(), "{what}: sending without an attempt: {self:?}");
        assert!(is_open || !self.held, "{what}: a final job with a lease: {self:?}");
        assert!(is_open || self.events > 0, "{what}: a final job without its event: {self:?}");
    }
}

fn waiting() -> JobState {
    JobState::Waiting { wait: Duration::ZERO, reason: Wait::with_detail(WaitReason::Retry, "again") }
}

fn unknown() -> JobState {
    JobState::Unknown { wait: Duration::ZERO, reason: Wait::with_detail(WaitReason::Retry, "no answer in time") }
}

fn done(state: FinalState) -> JobState {
    JobState::Final { state, reason: "done".to_owned(), reference: None }
}

fn by() -> Actor {
    Actor { os_user: "alice@desk".to_owned(), program: None, reason: None }
}
