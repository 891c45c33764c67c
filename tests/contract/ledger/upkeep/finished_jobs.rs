//! Totals of finished jobs: a reconciliation that starts from them equals one that counts every job.

use std::collections::BTreeMap;

use super::*;

on_every_database!(
    incremental_reconciliation_equals_a_full_count,
    stored_sum_is_used_until_recount,
    stale_sum_catches_up_in_steps,
    clock_set_back_hides_jobs_under_a_minute,
    concurrent_sums_count_once,
    late_sql_changes_are_recounted,
);

const STATES: [FinalState; 5] =
    [FinalState::Succeeded, FinalState::Declined, FinalState::Dead, FinalState::Expired, FinalState::Review];

impl Fixture {
    /// Records jobs of two providers in each state that an attempt can lead to, finished this long ago.
    async fn finish_ago(&self, run: &str, ago_s: i64) {
        for (number, state) in (0..).zip(STATES) {
            let id = format!("{run}-{number}");
            self.finish(&id, state).await;
            self.move_back(&id, "updated_at", ago_s).await;
        }
        let other = Job { provider: name("adyen"), ..job(&format!("{run}-adyen")) };
        let hold = self.take(&other).await.lease;
        let next = JobState::Final { state: FinalState::Cancelled, reason: "no".to_owned(), reference: None };
        assert_eq!(self.database.transition(&hold, &next).await.unwrap(), FencedWrite::Applied);
        self.move_back(other.id.as_str(), "updated_at", ago_s).await;
    }

    async fn sum_up(&self) {
        self.database.update_finished_totals().await.unwrap();
    }

    async fn states(&self, checked: CheckScope) -> Vec<(String, u64, BTreeMap<String, u64>)> {
        let accounts = self.database.reconcile(2 * MINUTE, checked).await.unwrap();
        let parts = |account: ProviderReconciliation| (account.provider, account.recorded, account.states);
        accounts.into_iter().map(parts).collect()
    }

    /// Asserts that the reconciliation from the totals equals the full count; returns the number of jobs.
    async fn agree(&self, when: &str) -> u64 {
        let all = self.states(CheckScope::All).await;
        for scope in [CheckScope::Since(MINUTE), CheckScope::CountsOnly] {
            assert_eq!(self.states(scope).await, all, "{when}, {scope:?}");
        }
        all.iter().map(|(_, recorded, _)| recorded).sum()
    }

    /// Jobs in the totals.
    async fn summed(&self) -> String {
        self.one("SELECT coalesce(sum(jobs), 0) FROM finished_jobs").await
    }

    /// Moves an instant of the totals' mark into the past.
    async fn mark_back(&self, column: &str, by_s: i64) {
        let moved = match self.postgres {
            Some(_) => format!("{column} - {by_s} * interval '1 second'"),
            None => format!("{column} - {by_s} * 1000"),
        };
        self.sql(&format!("UPDATE finished_mark SET {column} = {moved}")).await.unwrap();
    }
}

async fn incremental_reconciliation_equals_a_full_count(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    assert_eq!(fixture.agree("nothing").await, 0);
    fixture.finish_ago("old", 3_600).await;
    fixture.finish_ago("young", 0).await;
    fixture.waiting(&job("parked"), MINUTE).await;
    fixture.take(&job("held")).await;
    assert_eq!(fixture.agree("not summed up").await, 14);
    fixture.sum_up().await;
    // The succeeded, declined, expired and cancelled jobs.
    assert_eq!((fixture.agree("summed up").await, fixture.summed().await), (14, "4".to_owned()));
    // Some minutes later others have finished, and are added.
    fixture.mark_back("counted_before", 300).await;
    fixture.finish_ago("later", 200).await;
    assert_eq!(fixture.agree("finished since").await, 20);
    fixture.sum_up().await;
    assert_eq!((fixture.agree("added").await, fixture.summed().await), (20, "8".to_owned()));
    fixture.sum_up().await;
    assert_eq!((fixture.agree("added once").await, fixture.summed().await), (20, "8".to_owned()));
    // A job that an operator resolves was not in the totals before.
    fixture.sql("UPDATE jobs SET state = 'waiting', fence = fence + 1 WHERE id = 'old-2'").await.unwrap();
    fixture
        .sql("UPDATE jobs SET state = 'declined', fence = fence + 1, updated_at = created_at WHERE id = 'old-4'")
        .await
        .unwrap();
    assert_eq!(fixture.agree("decided").await, 20);
}

async fn stored_sum_is_used_until_recount(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.finish_ago("old", 3_600).await;
    fixture.sum_up().await;
    fixture.sql("UPDATE finished_jobs SET jobs = 1000 WHERE state = 'succeeded'").await.unwrap();
    let recorded = async |checked| fixture.account(checked).await.recorded;
    assert_eq!((recorded(CheckScope::Since(MINUTE)).await, recorded(CheckScope::All).await), (1_004, 5));
    // A recount is expensive, and not due yet.
    fixture.sum_up().await;
    assert_eq!(recorded(CheckScope::Since(MINUTE)).await, 1_004);
    fixture.mark_back("recount_after", 700).await;
    fixture.sum_up().await;
    assert_eq!(fixture.agree("recounted").await, 6);
    // Scrubbed jobs are in no index of finished jobs, but in the totals.
    assert_eq!(fixture.database.scrub(ScrubScope::Finished, MINUTE, 100).await.unwrap(), 5);
    fixture.mark_back("recount_after", 700).await;
    fixture.sum_up().await;
    assert_eq!((fixture.agree("scrubbed").await, fixture.summed().await), (6, "4".to_owned()));
}

async fn stale_sum_catches_up_in_steps(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.sum_up().await;
    fixture.mark_back("counted_before", 600).await;
    for (run, ago_s) in [("early", 500), ("late", 200), ("young", 0)] {
        fixture.finish_ago(run, ago_s).await;
    }
    // The totals' mark moves from 720 seconds ago to 420, and then to 120.
    for summed in ["4", "8", "8"] {
        fixture.sum_up().await;
        assert_eq!((fixture.agree("step by step").await, fixture.summed().await), (18, summed.to_owned()));
    }
}

async fn clock_set_back_hides_jobs_under_a_minute(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.finish_ago("before", 0).await;
    fixture.sum_up().await;
    // The clock was set back by an hour, so the totals' mark is an hour ahead.
    fixture.mark_back("counted_before", -3_600).await;
    fixture.mark_back("recount_after", -3_600).await;
    fixture.finish_ago("after", 0).await;
    fixture.sum_up().await;
    assert_eq!(fixture.agree("set back").await, 12);
}

async fn concurrent_sums_count_once(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.sum_up().await;
    fixture.mark_back("counted_before", 300).await;
    fixture.finish_ago("lately", 200).await;
    let sums = (0..8).map(|_| {
        let upkeep = fixture.database.clone();
        tokio::spawn(async move { upkeep.update_finished_totals().await.unwrap() })
    });
    for sum in futures_util::future::join_all(sums).await {
        sum.unwrap();
    }
    assert_eq!((fixture.agree("summed up").await, fixture.summed().await), (6, "4".to_owned()));
}

async fn late_sql_changes_are_recounted(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.finish_ago("old", 3_600).await;
    fixture.waiting(&job("cancelled-by-hand"), MINUTE).await;
    fixture.move_back("cancelled-by-hand", "updated_at", 3_600).await;
    fixture.sum_up().await;
    fixture.sql("UPDATE jobs SET state = 'cancelled' WHERE id = 'cancelled-by-hand'").await.unwrap();
    fixture.without_constraints("UPDATE jobs SET state = 'review' WHERE id = 'old-0'").await.unwrap();
    fixture.mark_back("recount_after", 700).await;
    fixture.sum_up().await;
    assert_eq!((fixture.agree("by hand").await, fixture.summed().await), (7, "4".to_owned()));
}

/// The recount is the one transaction that may exceed the timeout: its statements are slow, but the server is not
/// silent.
#[tokio::test]
async fn recount_may_exceed_the_silence_timeout() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    fixture.finish("p1", FinalState::Succeeded).await;
    fixture.move_back("p1", "updated_at", 3_600).await;
    fixture
        .sql(
            "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS \
                 $$ BEGIN PERFORM pg_sleep(16); RETURN NULL; END $$",
        )
        .await
        .unwrap();
    fixture
        .sql("CREATE TRIGGER slowly BEFORE INSERT ON finished_jobs FOR EACH STATEMENT EXECUTE FUNCTION slowly()")
        .await
        .unwrap();
    fixture.database.update_finished_totals().await.unwrap();
    assert_eq!(fixture.one("SELECT sum(jobs) FROM finished_jobs").await, "1");
}
