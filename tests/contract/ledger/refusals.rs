//! Refusals of single payments: when they count, and that another version, a replay or a stale lease changes that.

use sluicegate::domain::disposition::Refusals;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState};

use super::*;

on_every_database!(refusals_count_alone_only_with_a_pass_between);

impl Fixture {
    async fn refuse(&self, hold: &LeaseToken, version: i64) -> Option<Refusals> {
        // Instants are milliseconds in SQLite: what passed before must not seem to have passed since.
        tokio::time::sleep(Duration::from_millis(5)).await;
        let counted = self.database.record_refusal(hold, version).await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
        counted
    }

    /// Another payment is sent and has this outcome.
    async fn ends(&self, id: &str, account: Option<&str>, outcome: &'static str) {
        let account = account.map(|account| Identifier::new(account).unwrap());
        let hold = self.take(&Job { account, ..job(id) }).await.lease;
        assert_eq!(self.database.begin_attempt(&hold, &request(id), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
        let end = AttemptEnd { number: 1, outcome, status: Some(200), detail: String::new(), counts: true };
        let state = JobState::Waiting { wait: Duration::ZERO, reason: WaitReason::Retry.into() };
        assert_eq!(self.database.finish_attempt(&hold, &end, &state).await.unwrap(), FencedWrite::Applied);
    }
}

fn counts(all: u32, alone: u32) -> Option<Refusals> {
    Some(Refusals { all, alone })
}

async fn refusals_count_alone_only_with_a_pass_between(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.ends("before", None, "accepted").await;
    let bad = Job { account: None, ..job("bad") };
    let hold = fixture.take(&bad).await.lease;
    assert_eq!(fixture.refuse(&hold, 7).await, counts(1, 1));
    assert_eq!(fixture.refuse(&hold, 7).await, counts(2, 1), "nothing has passed since");
    fixture.ends("other", Some("shop"), "accepted").await;
    fixture.ends("also-refused", None, "misconfigured").await;
    assert_eq!(fixture.refuse(&hold, 7).await, counts(3, 1), "an account's payment says nothing, nor does a refusal");
    for (number, outcome) in [(4, "accepted"), (5, "declined"), (6, "busy"), (7, "in_progress")] {
        fixture.ends(&format!("passed-{number}"), None, outcome).await;
        assert_eq!(fixture.refuse(&hold, 7).await, counts(number, number - 2), "{outcome}");
    }
    // Another version of the row may have another address or key.
    fixture.ends("passed-again", None, "accepted").await;
    assert_eq!(fixture.refuse(&hold, 8).await, counts(1, 1));
    let stale = LeaseToken { fence: hold.fence + 1, ..hold.clone() };
    assert_eq!(fixture.refuse(&stale, 8).await, None);
    // With an account, its own payments count.
    let own = Job { account: Some(Identifier::new("shop").unwrap()), ..job("own") };
    let hold = fixture.take(&own).await.lease;
    assert_eq!(fixture.refuse(&hold, 8).await, counts(1, 1));
    fixture.ends("without", None, "accepted").await;
    assert_eq!(fixture.refuse(&hold, 8).await, counts(2, 1));
    fixture.ends("with", Some("shop"), "accepted").await;
    assert_eq!(fixture.refuse(&hold, 8).await, counts(3, 2));
}
