//! Immutability: final states, payment content, audit rows and the settings version cannot be changed by any statement.

use sluicegate::domain::outcome::FinalState;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState};

use super::*;

on_every_database!(
    final_states_cannot_be_left,
    final_or_unknown_jobs_change_only_audited,
    payment_identity_never_changes,
    audits_never_change,
    the_version_rises_by_one,
);

/// The columns that a worker's claim sets: a lease and a higher fencing token.
const AS_A_WORKER: &str = "fence = fence + 1, holder = 'w', attempts = 0, maybe_charged = (1 = 0)";

impl Fixture {
    /// Records a job with one attempt of this outcome, in this state.
    async fn ended(&self, id: &str, outcome: &'static str, state: FinalState) {
        let hold = self.take(&job(id)).await.lease;
        assert_eq!(self.database.begin_attempt(&hold, &request(id), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
        let end = AttemptEnd { number: 1, outcome, status: None, detail: String::new(), counts: true };
        let next = JobState::Final { state, reason: "ended".to_owned(), reference: None };
        assert_eq!(self.database.finish_attempt(&hold, &end, &next).await.unwrap(), FencedWrite::Applied);
    }

    async fn refused(&self, statement: &str, rule: &str) {
        let error = self.sql(statement).await.expect_err(statement);
        assert!(error.contains(rule), "{statement}: {error}");
    }
}

async fn final_states_cannot_be_left(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let final_states = [
        ("succeeded", FinalState::Succeeded),
        ("declined", FinalState::Declined),
        ("expired", FinalState::Expired),
        ("cancelled", FinalState::Cancelled),
    ];
    for (id, state) in final_states {
        fixture.ended(id, "not_sent", state).await;
        for next in ["waiting", "review", "dead", "succeeded", "cancelled"].iter().filter(|next| **next != id) {
            let plain = format!("UPDATE jobs SET state = '{next}' WHERE id = '{id}'");
            fixture.refused(&plain, "publish a new payment").await;
        }
        let taken = format!("UPDATE jobs SET state = 'waiting', {AS_A_WORKER} WHERE id = '{id}'");
        fixture.refused(&taken, "publish a new payment").await;
        assert_eq!(fixture.state(id).await, id);
    }
}

/// A statement that looks like a worker's own write is audited all the same.
async fn final_or_unknown_jobs_change_only_audited(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.ended("dead", "not_sent", FinalState::Dead).await;
    fixture.ended("review", "unknown", FinalState::Review).await;
    let hold = fixture.take(&job("unknown")).await.lease;
    let next = JobState::Unknown { wait: Duration::ZERO, reason: Wait::with_detail(WaitReason::Retry, "no answer") };
    assert_eq!(
        fixture.database.begin_attempt(&hold, &request("unknown"), AT_ONCE).await.unwrap(),
        BeginResult::Attempt(1)
    );
    let end = AttemptEnd { number: 1, outcome: "unknown", status: None, detail: String::new(), counts: true };
    assert_eq!(fixture.database.finish_attempt(&hold, &end, &next).await.unwrap(), FencedWrite::Applied);
    for id in ["dead", "review", "unknown"] {
        let taken =
            format!("UPDATE jobs SET state = 'waiting', updated_at = updated_at, {AS_A_WORKER} WHERE id = '{id}'");
        fixture.sql(&taken).await.unwrap();
        let audit = format!("SELECT old_state || ' ' || new_state FROM job_audit WHERE job_id = '{id}'");
        assert_eq!(fixture.one(&audit).await, format!("{id} waiting"));
    }
    let cleared = "SELECT count(*) FROM job_audit WHERE cleared_maybe_charged = (1 = 1)";
    assert_eq!(fixture.one(cleared).await, "2");
}

async fn payment_identity_never_changes(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.take(&job("open")).await;
    fixture.ended("ended", "accepted", FinalState::Succeeded).await;
    let later = if kind == Kind::Postgres { "now()" } else { "1" };
    let hash = if kind == Kind::Postgres { r"'\xff'" } else { "x'ff'" };
    for id in ["open", "ended"] {
        for change in [
            "id = 'other'",
            "provider = 'other'",
            "idempotency_key = 'other'",
            "key_given = (1 = 1)",
            &format!("content_hash = {hash}"),
            "amount = 1",
            "amount = amount * 100, updated_at = created_at",
            "currency = 'USD'",
            "account = 'acct_2'",
            "reference = 'other'",
            "cost = 2",
            "priority = 9",
            &format!("not_before = {later}"),
            &format!("expires_at = {later}"),
            "payload = '{}'",
        ] {
            let update = format!("UPDATE jobs SET {change} WHERE id = '{id}'");
            fixture.refused(&update, "what a payment is never changes").await;
        }
    }
    fixture.refused("UPDATE attempts SET reference = 'other'", "what a payment is never changes").await;
    // Writing the same values again changes nothing.
    fixture.sql("UPDATE jobs SET amount = amount, account = account, payload = payload").await.unwrap();
    let emptied = "account = NULL, reference = NULL, payload = NULL";
    for change in ["account = NULL", "reference = NULL", "payload = NULL", emptied] {
        let update = format!("UPDATE jobs SET {change} WHERE id = 'open'");
        fixture.refused(&update, "what a payment is never changes").await;
    }
    fixture.sql(&format!("UPDATE jobs SET {emptied} WHERE id = 'ended'")).await.unwrap();
    let back = "UPDATE jobs SET account = 'acct_1' WHERE id = 'ended'";
    fixture.refused(back, "what a payment is never changes").await;
}

async fn audits_never_change(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.sql("INSERT INTO providers (name, url) VALUES ('stripe', 'https://x.example/')").await.unwrap();
    fixture.ended("dead", "not_sent", FinalState::Dead).await;
    fixture.sql("UPDATE jobs SET state = 'cancelled' WHERE id = 'dead'").await.unwrap();
    for table in ["job_audit", "settings_audit"] {
        assert_eq!(fixture.one(&format!("SELECT count(*) FROM {table}")).await, "1");
        for statement in [&format!("UPDATE {table} SET who = 'nobody'"), &format!("DELETE FROM {table}")] {
            fixture.refused(statement, "never changed or deleted").await;
        }
    }
    for statement in ["UPDATE job_audit SET new_state = 'waiting'", "UPDATE settings_audit SET row_key = 'other'"] {
        fixture.refused(statement, "never changed or deleted").await;
    }
    fixture.without_constraints("UPDATE job_audit SET erased = (1 = 1)").await.unwrap();
    fixture.refused("UPDATE job_audit SET erased = (1 = 0)", "never changed or deleted").await;
    if kind == Kind::Postgres {
        fixture.refused("UPDATE job_audit SET because = 'x'", "never changed or deleted").await;
        fixture.refused("TRUNCATE job_audit", "never changed or deleted").await;
        return;
    }
    // A command records its user once.
    fixture.sql("UPDATE job_audit SET os_user = 'alice@desk', because = 'x'").await.unwrap();
    fixture.refused("UPDATE job_audit SET os_user = 'bob@desk'", "never changed or deleted").await;
}

async fn the_version_rises_by_one(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for version in ["9223372036854775807", "281474976710657", "version - 1", "0"] {
        let set = format!("UPDATE settings_version SET version = {version}");
        fixture.refused(&set, "version of the settings").await;
    }
    fixture.refused("DELETE FROM settings_version", "version of the settings").await;
    let settings = fixture.database.clone();
    settings.raise_settings_version(i64::MAX - 1).await.unwrap_err();
    // The version can be raised to the highest number that a limiter's store can count. From there it rises by one.
    assert_eq!(settings.raise_settings_version((1 << 48) - 1).await.unwrap(), 1 << 48);
    settings.raise_settings_version(1 << 48).await.unwrap();
    fixture.sql("INSERT INTO providers (name, url) VALUES ('stripe', 'https://x.example/')").await.unwrap();
    assert_eq!(settings.settings_version().await.unwrap(), (1 << 48) + 2);
    let raised = "SELECT count(*) FROM settings_audit WHERE table_name = 'settings_version'";
    assert_eq!(fixture.one(raised).await, "2");
}

/// The SQL statement of docs/review.md, and decisions that its function rejects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_resolve_by_sql_function() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let page = std::fs::read_to_string("docs/review.md").unwrap();
    let statement = page.split("```sql\n").nth(1).unwrap().split("\n```").next().unwrap();
    fixture.ended("invoice-4711", "unknown", FinalState::Review).await;
    fixture.sql(statement).await.unwrap();
    let job = "SELECT state || ' ' || provider_reference || ' ' || reason FROM jobs";
    assert_eq!(fixture.one(job).await, "succeeded ch_2 seen in the dashboard");
    assert_eq!(fixture.one("SELECT old_state || ' ' || new_state FROM job_audit").await, "review succeeded");
    let events = "SELECT count(*) FROM events WHERE state = 'succeeded' AND provider_reference = 'ch_2'";
    assert_eq!(fixture.one(events).await, "1");
    // The second call finds no job in review.
    fixture.sql(statement).await.unwrap();
    assert_eq!(fixture.one("SELECT count(*) FROM job_audit").await, "1");
    for (old, new) in [("succeeded", "waiting"), ("waiting", "succeeded"), ("unknown", "cancelled"), ("review", "dead")]
    {
        let decide = format!("SELECT jobs_decide('invoice-4711', '{old}', '{new}', 'because')");
        fixture.refused(&decide, "no decision changes").await;
    }
    fixture.ended("emptied", "not_sent", FinalState::Dead).await;
    fixture.sql("UPDATE jobs SET frozen_body = '', payload = NULL WHERE id = 'emptied'").await.unwrap();
    fixture.ended("taken", "not_sent", FinalState::Dead).await;
    for call in ["'emptied', 'dead', 'waiting', 'x'", "'taken', 'dead', 'waiting', 'x', NULL, 99"] {
        fixture.sql(&format!("SELECT jobs_decide({call})")).await.unwrap();
    }
    assert_eq!((fixture.state("emptied").await, fixture.state("taken").await), ("dead".to_owned(), "dead".to_owned()));
}
