//! Timestamps that no program can read: the database rejects them, and a row that has one anyway affects only itself.

use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::operator::{JobFilter, JobPage};
use sluicegate::ledger::upkeep::CheckScope;
use sluicegate::ledger::{FencedWrite, JobState};

use super::*;

on_every_database!(
    no_instant_is_infinite,
    an_unreadable_row_is_named_and_skipped,
    unreadable_claim_releases_the_lease,
    unreadable_event_does_not_block_others,
    unreadable_review_and_dead_jobs_are_counted,
);

const MINUTE: Duration = Duration::from_secs(60);

/// Instants before and after the readable range, as SQL.
pub(super) fn beyond(kind: Kind) -> [&'static str; 4] {
    match kind {
        Kind::Postgres => ["'-infinity'", "'0001-01-01 00:00:00+00 BC'", "'9999-12-30 22:00:00+00'", "'infinity'"],
        _ => ["-9000000000000000000", "-62135596800001", "253402207200000", "9223372036854775807"],
    }
}

impl Fixture {
    /// Drops the rules that the rows of these tests break.
    pub(super) async fn without_rules(&self) {
        let off = match self.postgres {
            Some(_) => {
                "ALTER TABLE jobs DROP CONSTRAINT instants_are_finite, DROP CONSTRAINT attempts_is_0_or_more, \
                     DROP CONSTRAINT state_is_known; \
                 ALTER TABLE events DROP CONSTRAINT instants_are_finite, DROP CONSTRAINT event_state_is_final"
            }
            None => {
                "DROP TRIGGER instants_are_finite_of_jobs; DROP TRIGGER instants_are_finite_of_events; \
                 PRAGMA ignore_check_constraints = ON"
            }
        };
        self.sql(off).await.unwrap();
    }

    /// Records a due job that is neither leased nor in the backlog.
    async fn asleep(&self, id: &str) {
        let hold = self.take(&job(id)).await.lease;
        let due = JobState::Waiting { wait: Duration::ZERO, reason: WaitReason::Retry.into() };
        assert_eq!(self.database.transition(&hold, &due).await.unwrap(), FencedWrite::Applied);
    }
}

async fn no_instant_is_infinite(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.asleep("p1").await;
    for instant in beyond(kind) {
        for column in ["wake_at", "created_at", "updated_at", "response_by", "first_sent_at"] {
            let with = match column {
                "response_by" => ", holder = 'w'",
                "first_sent_at" => ", first_sent_number = 1",
                _ => "",
            };
            let set = format!("UPDATE jobs SET {column} = {instant}{with}");
            let error = fixture.sql(&set).await.expect_err(&set);
            assert!(error.contains("instants_are_finite"), "{set}: {error}");
        }
        let insert = format!(
            "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, cost, priority, state, \
                 wake_at, fence, created_at, updated_at, expires_at) \
             SELECT 'p2', provider, 'p2', key_given, content_hash, amount, currency, cost, priority, state, wake_at, fence, \
                 created_at, updated_at, {instant} FROM jobs"
        );
        let error = fixture.sql(&insert).await.expect_err(&insert);
        assert!(error.contains("instants_are_finite"), "{insert}: {error}");
    }
    let within = match kind {
        Kind::Postgres => ["'0001-01-01 00:00:00+00'", "'9999-12-30 21:59:59.999+00'"],
        _ => ["-62135596800000", "253402207199999"],
    };
    for instant in within {
        fixture.sql(&format!("UPDATE jobs SET wake_at = {instant}")).await.unwrap();
        assert_eq!(fixture.database.list_jobs(&JobFilter::default(), None, 5).await.unwrap().jobs.len(), 1);
    }
}

/// The rule of its table covers every column that holds an instant, in both databases.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_timestamp_column_has_a_rule() {
    let postgres = Fixture::migrated(Kind::Postgres).await;
    let sqlite = Fixture::migrated(Kind::SqliteMemory).await;
    let instants = "FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid \
         WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace AND a.atttypid = 'timestamptz'::regtype \
             AND NOT a.attisdropped AND c.relname <> '_sqlx_migrations'";
    let all = postgres.column(&format!("SELECT c.relname || '.' || a.attname {instants} ORDER BY 1")).await;
    assert!(all.len() > 30, "{all:?}");
    let ruled = format!(
        "SELECT c.relname || '.' || a.attname {instants} AND EXISTS (SELECT 1 FROM pg_constraint AS r \
             WHERE r.conrelid = c.oid AND r.conname = 'instants_are_finite' AND a.attnum = ANY (r.conkey)) ORDER BY 1"
    );
    assert_eq!(postgres.column(&ruled).await, all);
    // SQLite has no batches of events.
    for of in all.into_iter().flatten().filter(|of| !of.starts_with("event_batches.")) {
        let (table, column) = of.split_once('.').unwrap();
        for name in [format!("instants_are_finite_of_{table}"), format!("instants_are_finite_of_{table}_on_insert")] {
            let rule = sqlite.one(&format!("SELECT sql FROM sqlite_schema WHERE name = '{name}'")).await;
            assert!(rule.contains(&format!("NEW.{column} NOT BETWEEN")), "{name}: {column}");
            let fires = rule.split_once("WHEN").unwrap().0.replace([',', '\n'], " ");
            assert!(fires.contains(" INSERT ") || fires.split(' ').any(|word| word == column), "{name}: {column}");
        }
    }
}

async fn an_unreadable_row_is_named_and_skipped(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let [early, .., late] = beyond(kind);
    for id in ["early", "good-1", "good-2", "held", "late", "negative", "never", "young"] {
        fixture.asleep(id).await;
    }
    fixture.without_rules().await;
    for (id, set) in [
        ("early", format!("wake_at = {early}")),
        ("late", format!("wake_at = {late}")),
        ("never", format!("expires_at = {late}")),
        ("young", format!("created_at = {late}")),
        ("negative", "attempts = -1".to_owned()),
        ("held", "state = 'held'".to_owned()),
    ] {
        fixture.without_constraints(&format!("UPDATE jobs SET {set} WHERE id = '{id}'")).await.unwrap();
    }
    let operator = fixture.database.clone();
    let filters = [
        JobFilter::default(),
        JobFilter { provider: Some(name("stripe")), ..JobFilter::default() },
        JobFilter { account: Some(Identifier::new("acct_1").unwrap()), ..JobFilter::default() },
        JobFilter::of_state("waiting"),
    ];
    for filter in filters {
        let JobPage { mut jobs, mut unreadable, next, .. } = operator.list_jobs(&filter, None, 100).await.unwrap();
        // Job lists do not read `expires_at`.
        jobs.retain(|line| line.id != "held");
        jobs.sort_by(|a, b| a.id.cmp(&b.id));
        unreadable.sort_by(|a, b| a.id.cmp(&b.id));
        let listed: Vec<&str> = jobs.iter().map(|line| line.id.as_str()).collect();
        assert_eq!((listed.as_slice(), next), (["good-1", "good-2", "never"].as_slice(), None), "{filter:?}");
        let named: Vec<&str> = unreadable.iter().map(|row| row.id.as_str()).collect();
        assert_eq!(named, ["early", "late", "negative", "young"], "{filter:?}");
        for (row, field) in unreadable.iter().zip(["`wake_at`", "`wake_at`", "`attempts`", "`created_at`"]) {
            assert!(row.problem.contains(field) && row.to_string().contains(&row.id), "{row}");
        }
    }
    let full = operator.list_jobs(&JobFilter::default(), None, 1).await.unwrap();
    assert_eq!((full.jobs.len(), full.next.as_deref()), (0, Some("young")), "the next page begins after it");
    let one = JobFilter { id: Some(Identifier::new("late").unwrap()), ..JobFilter::default() };
    assert_eq!(operator.list_jobs(&one, None, 5).await.unwrap().unreadable.len(), 1);

    for checked in [CheckScope::Since(MINUTE), CheckScope::All] {
        let accounts = fixture.database.reconcile(2 * MINUTE, checked).await.unwrap();
        let [account] = &accounts[..] else { panic!("{accounts:?}") };
        assert_eq!((account.recorded, account.unreadable, account.open()), (8, 5, 7), "{account:?}");
        assert_eq!(account.active + account.delayed + account.due, 7, "each is counted where it is");
        let mut faults = account.discrepancies();
        // A job whose state is not open has no event here.
        faults.retain(|fault| !fault.contains("without an event"));
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(faults[0].starts_with("5 jobs whose row cannot be read"), "{faults:?}");
        assert!(faults[1].starts_with("1 job in state `held`"), "{faults:?}");
        assert!(account.oldest_open.is_some_and(|age| age < MINUTE), "{account:?}");
    }
    let oldest = fixture.database.oldest_open(&[name("stripe")]).await.unwrap();
    assert_eq!(oldest.len(), 1);

    let returned = fixture.database.return_now(&name("stripe"), 100).await.unwrap();
    assert_eq!((returned.flows.len(), returned.lost), (2, 0));
    let in_backlog = fixture.column("SELECT id FROM jobs WHERE backlog ORDER BY id").await;
    assert_eq!(in_backlog, ["good-1", "good-2"].map(|id| Some(id.to_owned())));
}

/// The next claim does not count the lease's owner as a lost worker.
async fn unreadable_claim_releases_the_lease(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.record(&job("p")).await;
    match kind {
        Kind::Postgres => fixture.sql("ALTER TABLE jobs DROP CONSTRAINT resend_is_granted_or_used").await.unwrap(),
        _ => fixture.sql("PRAGMA ignore_check_constraints = ON").await.unwrap(),
    }
    fixture.without_constraints("UPDATE jobs SET resend = 'maybe'").await.unwrap();
    for _ in 0..2 {
        assert_eq!(fixture.dispatch(1, 1).await, []);
        assert_eq!(fixture.one("SELECT count(*) FROM jobs WHERE holder IS NULL AND lost_holders = 0").await, "1");
        fixture.database.return_now(&name("stripe"), 10).await.unwrap();
    }
    assert_eq!(fixture.one("SELECT resend FROM jobs").await, "maybe", "as it was");
}

async fn unreadable_review_and_dead_jobs_are_counted(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let [.., late] = beyond(kind);
    for (id, state) in [("review", FinalState::Review), ("dead", FinalState::Dead), ("paid", FinalState::Succeeded)] {
        let hold = fixture.take(&job(id)).await.lease;
        let next = JobState::Final { state, reason: "ended".to_owned(), reference: None };
        assert_eq!(fixture.database.transition(&hold, &next).await.unwrap(), FencedWrite::Applied);
    }
    fixture.without_rules().await;
    fixture.without_constraints(&format!("UPDATE jobs SET wake_at = {late}")).await.unwrap();
    for checked in [CheckScope::Since(MINUTE), CheckScope::All] {
        let accounts = fixture.database.reconcile(MINUTE, checked).await.unwrap();
        let [account] = &accounts[..] else { panic!("{accounts:?}") };
        assert_eq!((account.recorded, account.unreadable), (3, 2), "{account:?}");
        let faults = account.discrepancies();
        let named = |fault: &String| fault.starts_with("2 jobs whose row cannot be read");
        assert!(faults.iter().any(named), "{faults:?}");
    }
}

async fn unreadable_event_does_not_block_others(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let [.., late] = beyond(kind);
    for (id, reason) in [("late", "late"), ("held", "held"), ("good", "good")] {
        let hold = fixture.take(&job(id)).await.lease;
        let state = sluicegate::domain::outcome::FinalState::Declined;
        let next = sluicegate::ledger::JobState::Final { state, reason: reason.to_owned(), reference: None };
        assert_eq!(fixture.database.transition(&hold, &next).await.unwrap(), sluicegate::ledger::FencedWrite::Applied);
    }
    fixture.without_rules().await;
    fixture.sql(&format!("UPDATE events SET at = {late} WHERE job_id = 'late'")).await.unwrap();
    fixture.sql("UPDATE events SET state = 'held' WHERE job_id = 'held'").await.unwrap();
    fixture.place_events().await;
    let page = fixture.page_after(0).await;
    assert_eq!(page.events.iter().map(|event| event.id.as_str()).collect::<Vec<_>>(), ["good"]);
    let results = PublishResults { rejected: page.unreadable, ..PublishResults::default() };
    fixture.database.move_event_cursor(0, page.upto, &results).await.unwrap();
    let unpublished = fixture.database.unpublished_events().await.unwrap();
    assert_eq!((unpublished.events, unpublished.rejected), (2, 2), "tried later, like those that a queue has rejected");
}
