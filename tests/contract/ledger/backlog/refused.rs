//! The end of jobs in the backlog whose account a rule refuses.

use super::*;

on_every_database!(waiting_jobs_of_a_refused_account_are_declined, unknown_and_claimed_jobs_stay,);

impl Fixture {
    /// Provider `stripe` with a rule that refuses the account.
    async fn refusing(&self, account: &str) {
        self.sql("INSERT INTO providers (name, url) VALUES ('stripe', 'https://x.example/')").await.unwrap();
        let rule = "INSERT INTO account_overrides (provider, account, rule)";
        self.sql(&format!("{rule} VALUES ('stripe', '{account}', 'refuse')")).await.unwrap();
    }

    async fn decline_refused(&self, at_most: u32) -> u32 {
        self.database.decline_refused(&name("stripe"), at_most).await.unwrap()
    }
}

async fn waiting_jobs_of_a_refused_account_are_declined(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.refusing("mallory").await;
    for number in 0..7 {
        fixture.record(&of("mallory", &format!("m{number}"))).await;
    }
    fixture.record(&Job { priority: 9, ..of("mallory", "urgent") }).await;
    fixture.record(&of("other", "o1")).await;
    fixture.record(&Job { account: None, ..job("n1") }).await;
    fixture.record(&Job { provider: name("adyen"), ..of("mallory", "a1") }).await;
    // A blocked flow, too.
    let first = fixture.dispatch(1, 1).await.remove(0);
    assert_eq!(first.job.id.as_str(), "urgent");
    fixture.give_back(&first, &BacklogReturn { block: Some(block(A_MINUTE, "each")), ..RETURNED }).await;
    assert_eq!([fixture.decline_refused(5).await, fixture.decline_refused(5).await], [5, 3]);
    assert_eq!(fixture.decline_refused(5).await, 0);
    let declined = "state = 'declined' AND reason = 'account_refused' AND attempts = 0 AND NOT backlog";
    assert_eq!(fixture.one(&format!("SELECT count(*) FROM jobs WHERE {declined}")).await, "8");
    let events = "SELECT count(*) FROM events WHERE state = 'declined' AND reason = 'account_refused'";
    assert_eq!(fixture.one(events).await, "8");
    assert_eq!(fixture.texts("SELECT id FROM jobs WHERE backlog ORDER BY id").await, ["a1", "n1", "o1"]);
    fixture.counts_agree().await;
    assert_eq!(ids(&fixture.dispatch(9, 9).await), ["n1", "o1"]);
}

async fn unknown_and_claimed_jobs_stay(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.refusing("mallory").await;
    let unknown = of("mallory", "unknown");
    let lease = fixture.take(&unknown).await.lease;
    assert_eq!(
        fixture.database.begin_attempt(&lease, &request("unknown"), AT_ONCE).await.unwrap(),
        BeginResult::Attempt(1)
    );
    let end = AttemptEnd { number: 1, outcome: "unknown", status: None, detail: String::new(), counts: true };
    let state = JobState::Unknown { wait: Duration::ZERO, reason: WaitReason::OutcomeUnknown.into() };
    assert_eq!(fixture.database.finish_attempt(&lease, &end, &state).await.unwrap(), FencedWrite::Applied);
    let lease = fixture.take(&unknown).await.lease;
    let how = BacklogReturn { came_from_backlog: false, ..RETURNED };
    assert_eq!(fixture.database.return_to_backlog(&lease, &how).await.unwrap(), FencedWrite::Applied);
    fixture.record(&of("mallory", "claimed")).await;
    let claimed = fixture.dispatch(9, 9).await;
    assert_eq!(ids(&claimed), ["unknown", "claimed"]);
    fixture.give_back(&claimed[0], &RETURNED).await;
    assert_eq!(fixture.decline_refused(9).await, 0);
    assert_eq!(fixture.texts("SELECT state FROM jobs ORDER BY id").await, ["waiting", "unknown"]);
    fixture.counts_agree().await;
}
