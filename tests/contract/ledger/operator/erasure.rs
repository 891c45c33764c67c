//! Erasure of an account: what is emptied, what stays, what must wait, and that no erased payment is charged again.

use sluicegate::ledger::operator::{ErasureCounts, ErasureResult};
use sluicegate::ledger::rejected::{RejectedMessage, StoredMessage};
use sluicegate::ledger::upkeep::{CheckScope, ScrubScope};

use super::*;

on_every_database!(
    account_is_erased_after_its_jobs_finish,
    erased_jobs_are_never_charged_again,
    unfinished_jobs_are_kept_and_counted,
    requests_keep_account_while_limits_count,
    an_erased_account_is_written_nowhere,
    erased_jobs_are_still_counted,
);

fn account() -> Identifier {
    Identifier::new("acct_1").unwrap()
}

impl Fixture {
    /// Records a finished payment of the account whose outcome was published.
    async fn record_published(&self, text: &str, state: FinalState) {
        let reference = Some(format!("ch_{text}"));
        let next = JobState::Final { state, reason: "settled by acct_1".to_owned(), reference };
        self.attempted(text, "accepted", &next).await;
        self.pass_events().await;
    }

    async fn erase(&self) -> ErasureResult {
        self.database.erase_account(&account(), 100, &by()).await.unwrap()
    }

    async fn erasable(&self) -> ErasureCounts {
        self.database.erasure_counts(&account()).await.unwrap()
    }

    async fn age_requests(&self) {
        let aged = if self.postgres.is_some() { "began_at - interval '33 days'" } else { "began_at - 33 * 86400000" };
        self.sql(&format!("UPDATE attempts SET began_at = {aged}")).await.unwrap();
    }
}

async fn account_is_erased_after_its_jobs_finish(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (id, state) in [("declined", FinalState::Declined), ("paid", FinalState::Succeeded)] {
        fixture.record_published(id, state).await;
    }
    fixture.record_published("dead", FinalState::Dead).await;
    let other = Job { account: Some(id("acct_2")), ..job("other") };
    let hold = fixture.take(&other).await.lease;
    assert_eq!(
        fixture.database.transition(&hold, &finished(FinalState::Declined)).await.unwrap(),
        FencedWrite::Applied
    );
    assert_eq!(fixture.erasable().await.finished, 3);
    assert_eq!(
        fixture.database.erase_account(&account(), 2, &by()).await.unwrap().jobs,
        2,
        "in the order of their ids"
    );
    assert_eq!(fixture.erase().await.jobs, 1);
    assert_eq!(fixture.erase().await, ErasureResult::default(), "each once");
    assert_eq!(fixture.erasable().await.finished, 0);
    for id in ["dead", "declined", "paid"] {
        let details = fixture.details(id).await;
        let line = &details.line;
        assert_eq!((&line.account, &line.provider_reference, &line.reference), (&None, &None, &None), "{id}");
        assert_eq!((line.reason.as_deref(), &details.payload, &details.waited), (Some("erased"), &None, &None), "{id}");
        assert_eq!((line.amount, details.idempotency_key.as_str()), (1_299, id));
        let request = details.request.unwrap();
        assert_eq!((request.url.as_str(), request.body.bytes), ("", 0), "{id}");
        assert_eq!(details.attempts[0].detail.as_deref(), Some(""), "{id}");
        let [audit] = details.audit.as_slice() else { panic!("{id}: {:?}", details.audit) };
        assert!(audit.erased && audit.new_state.as_deref() == Some(audit.old_state.as_str()), "{audit:?}");
        assert_eq!(audit.os_user.as_deref(), Some("alice@desk"));
        assert_eq!(audit.because.as_deref(), Some("asked the provider"));
    }
    let untouched = fixture.details("other").await;
    assert_eq!((untouched.line.account.as_deref(), untouched.audit.len()), (Some("acct_2"), 0));
}

async fn erased_jobs_are_never_charged_again(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.record_published("paid", FinalState::Succeeded).await;
    fixture.record_published("dead", FinalState::Dead).await;
    assert_eq!(fixture.erase().await.jobs, 2);
    for id in ["paid", "dead"] {
        // The same message, with the account in it, is known by its hash. A message with another hash is a conflict.
        let claim = async |hash| fixture.database.claim(&job(id), hash, "worker-b").await.unwrap();
        assert_eq!(claim(hash(1)).await, Claim::NotOpen, "{id}");
        assert!(matches!(claim(hash(2)).await, Claim::Conflict(_)), "{id}");
    }
    assert_eq!(fixture.decide("dead", &JobResolution::Replay).await, Err(ResolutionRefusal::Scrubbed));
    if kind == Kind::Postgres {
        fixture.sql("SELECT jobs_decide('dead', 'dead', 'waiting', 'x')").await.unwrap();
    }
    assert_eq!(fixture.state("dead").await, "dead");
    assert_eq!(fixture.one("SELECT count(*) FROM attempts").await, "2");
}

async fn unfinished_jobs_are_kept_and_counted(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.take(&job("held")).await;
    fixture.record_published("review", FinalState::Review).await;
    let hold = fixture.take(&job("unpublished")).await.lease;
    assert_eq!(
        fixture.database.transition(&hold, &finished(FinalState::Declined)).await.unwrap(),
        FencedWrite::Applied
    );
    fixture.sql("INSERT INTO providers (name, url) VALUES ('stripe', 'https://x.example/')").await.unwrap();
    let rule = "INSERT INTO account_overrides (provider, account, rule) VALUES ('stripe', 'acct_1', 'blocked')";
    fixture.sql(rule).await.unwrap();
    assert_eq!(fixture.erase().await, ErasureResult::default());
    let left = fixture.erasable().await;
    assert_eq!((left.finished, left.open, left.review, left.unpublished, left.rules), (0, 1, 1, 1, 1));
    for id in ["held", "review", "unpublished"] {
        assert_eq!(fixture.details(id).await.line.account.as_deref(), Some("acct_1"), "{id}");
    }
}

/// Otherwise an account's limit would grant more permits than it may.
async fn requests_keep_account_while_limits_count(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.record_published("paid", FinalState::Succeeded).await;
    let known = "SELECT count(*) FROM attempts WHERE account = 'acct_1' AND reference = 'invoice 7'";
    assert_eq!(fixture.erase().await, ErasureResult { jobs: 1, requests: 0 });
    assert_eq!(fixture.one(known).await, "1");
    let left = fixture.erasable().await;
    let days = (left.requests_until.unwrap().0 - fixture.details("paid").await.attempts[0].began_at.0) / 86_400_000;
    assert_eq!((left.requests, days), (1, 32));
    fixture.age_requests().await;
    assert_eq!(fixture.erasable().await.requests, 0);
    assert_eq!(fixture.erase().await, ErasureResult { jobs: 0, requests: 1 });
    assert_eq!(fixture.one(known).await, "0");
    assert_eq!(fixture.erase().await, ErasureResult::default(), "each once");
}

/// Checks every column of the schema, also those of later migrations.
async fn an_erased_account_is_written_nowhere(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.record_published("paid", FinalState::Succeeded).await;
    let waits =
        JobState::Waiting { wait: Duration::ZERO, reason: Wait::with_detail(WaitReason::Retry, "limit of acct_1") };
    fixture.attempted("waited", "throttled", &waits).await;
    let hold = fixture.take(&job("waited")).await.lease;
    assert_eq!(
        fixture.database.transition(&hold, &finished(FinalState::Declined)).await.unwrap(),
        FencedWrite::Applied
    );
    fixture.pass_events().await;
    fixture.age_requests().await;
    let rejected = RejectedMessage {
        lane: name("stripe"),
        job_id: Some("paid".to_owned()),
        reason: "conflict",
        detail: "recorded before with other content".to_owned(),
        body_sha256: [7; 32],
        body_bytes: 10,
        head: String::new(),
        stored: StoredMessage::default(),
    };
    fixture.database.reject(&rejected).await.unwrap();
    let personal = ["acct_1", "invoice 7", "tok_1", "ch_paid", "said so", "charges"];
    assert!(fixture.found(&personal).await.len() > 8);
    fixture.sweep_flows().await;
    assert_eq!(fixture.erase().await, ErasureResult { jobs: 2, requests: 2 });
    assert_eq!(fixture.found(&personal).await, Vec::<String>::new());
}

/// Unless `secure_delete` is on, SQLite leaves overwritten and deleted bytes in its file and in the log beside it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn erased_bytes_leave_the_sqlite_files() {
    let fixture = Fixture::migrated(Kind::SqliteFile).await;
    fixture.record_published("paid", FinalState::Succeeded).await;
    fixture.age_requests().await;
    let personal = ["acct_1", "invoice 7", "tok_1", "ch_paid", "said so", "charges"];
    let path = fixture.url.strip_prefix("sqlite://").unwrap();
    let found = || {
        let bytes = |suffix| std::fs::read(format!("{path}{suffix}")).unwrap_or_default();
        let files = String::from_utf8_lossy(&[bytes(""), bytes("-wal")].concat()).into_owned();
        personal.into_iter().filter(|text| files.contains(text)).collect::<Vec<_>>()
    };
    assert_eq!(found(), personal);
    fixture.sweep_flows().await;
    assert_eq!(fixture.erase().await, ErasureResult { jobs: 1, requests: 1 });
    assert_eq!(fixture.erase().await, ErasureResult::default());
    assert_eq!(found(), [""; 0]);
}

impl Fixture {
    /// Removes the rows of flows without jobs, as a sweep does: they name their accounts.
    async fn sweep_flows(&self) {
        assert!(self.database.remove_idle_flows(&name("stripe"), 100).await.unwrap() > 0);
    }

    /// Columns of the ledger that hold one of these texts.
    async fn found(&self, texts: &[&str]) -> Vec<String> {
        let mut found = Vec::new();
        let tables = match self.postgres {
            Some(_) => "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace",
            None => "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'",
        };
        // docs/security.md names what stays: the accounts of rules, and the audit of the settings.
        let stay = ["settings_audit", "account_overrides", "_sqlx_migrations"];
        let tables = self.column(tables).await.into_iter().flatten();
        for table in tables.filter(|table| !stay.contains(&table.as_str())) {
            let columns = match self.postgres {
                Some(_) => format!("SELECT column_name FROM information_schema.columns WHERE table_name = '{table}'"),
                None => format!("SELECT name FROM pragma_table_info('{table}')"),
            };
            for column in self.column(&columns).await.into_iter().flatten() {
                let text = match self.postgres {
                    Some(_) if column == "frozen_body" => "encode(frozen_body, 'escape')".to_owned(),
                    _ => format!("CAST(\"{column}\" AS text)"),
                };
                for looked_for in texts {
                    let which = format!("SELECT count(*) FROM {table} WHERE {text} LIKE '%{looked_for}%'");
                    if self.one(&which).await != "0" {
                        found.push(format!("{table}.{column}: {looked_for}"));
                    }
                }
            }
        }
        found
    }
}

/// The totals of finished jobs hold erased jobs, or find them later.
async fn erased_jobs_are_still_counted(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let upkeep = fixture.database.clone();
    fixture.record_published("lately", FinalState::Succeeded).await;
    fixture.record_published("long-ago", FinalState::Declined).await;
    fixture.record_published("review", FinalState::Review).await;
    let past = if kind == Kind::Postgres { "updated_at - interval '1 day'" } else { "updated_at - 86400000" };
    for id in ["long-ago", "review"] {
        fixture.sql(&format!("UPDATE jobs SET updated_at = {past} WHERE id = '{id}'")).await.unwrap();
    }
    upkeep.update_finished_totals().await.unwrap();
    assert_eq!(fixture.erase().await.jobs, 2);
    assert_eq!(upkeep.scrub(ScrubScope::InReview, Duration::from_secs(3_600), 10).await.unwrap(), 1);
    let recorded = async || {
        let accounts = upkeep.reconcile(A_MINUTE, CheckScope::Since(A_MINUTE)).await.unwrap();
        assert_eq!(accounts[0].discrepancies(), Vec::<String>::new());
        accounts[0].recorded
    };
    assert_eq!(recorded().await, 3);
    // The job is emptied first and resolved afterwards.
    assert_eq!(fixture.decide("review", &JobResolution::Resend).await, Err(ResolutionRefusal::Scrubbed));
    assert_eq!(fixture.decide("review", &JobResolution::Declined).await, Ok(()));
    assert_eq!(recorded().await, 3);
    upkeep.update_finished_totals().await.unwrap();
    assert_eq!(recorded().await, 3);
}
