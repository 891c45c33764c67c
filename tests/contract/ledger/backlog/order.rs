//! The order of an account's jobs: at most one is on its way, and the next one is claimed when it is decided.

use super::*;

on_every_database!(
    one_job_of_an_account_is_claimed_at_a_time,
    undecided_job_holds_its_account,
    account_has_one_job_in_all_classes,
    jobs_claimed_without_order_hold_nothing,
);

async fn claim(fixture: &Fixture) -> Vec<BacklogJob> {
    fixture.dispatch_with(&FairClaim { order: JobOrder::Account, ..everything() }).await
}

pub(super) fn ended(state: FinalState) -> JobState {
    JobState::Final { state, reason: "by a test".to_owned(), reference: None }
}

impl Fixture {
    pub(super) async fn becomes(&self, lease: &LeaseToken, state: &JobState) {
        assert_eq!(self.database.transition(lease, state).await.unwrap(), FencedWrite::Applied);
    }
}

async fn one_job_of_an_account_is_claimed_at_a_time(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (account, id) in [("acct_1", "a1"), ("acct_1", "a2"), ("acct_2", "b1"), ("acct_2", "b2")] {
        fixture.record(&of(account, id)).await;
    }
    for id in ["n1", "n2"] {
        fixture.record(&Job { account: None, ..job(id) }).await;
    }
    let mut first = claim(&fixture).await;
    first.sort_by(|one, other| one.job.id.as_str().cmp(other.job.id.as_str()));
    assert_eq!(ids(&first), ["a1", "b1", "n1", "n2"], "jobs without account have no order");
    assert_eq!(claim(&fixture).await, []);
    // One that returns is the first again. It waits for nothing but its turn.
    fixture.give_back(&first[0], &BacklogReturn { reason: None, ..RETURNED }).await;
    let waits = "SELECT count(*) FROM jobs WHERE id = 'a1' AND wait_reason IS NULL AND wait_detail IS NULL";
    assert_eq!(fixture.one(waits).await, "1");
    let again = claim(&fixture).await;
    assert_eq!(ids(&again), ["a1"]);
    fixture.becomes(&again[0].claimed.lease, &ended(FinalState::Declined)).await;
    assert_eq!(ids(&claim(&fixture).await), ["a2"]);
    fixture.counts_agree().await;
}

async fn undecided_job_holds_its_account(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for id in ["a1", "a2", "a3", "a4"] {
        fixture.record(&of("acct_1", id)).await;
    }
    let holder_of = async |id: &str| {
        let position = fixture.database.queue_position(&job(id).id, &[name("stripe")]).await.unwrap();
        position.backlog.unwrap().account_holder.map(|holder| (holder.id, holder.state))
    };
    let held_by = |id: &str, state: &str| Some((id.to_owned(), state.to_owned()));
    assert_eq!(holder_of("a4").await, None);
    let (wait, reason) = (Duration::ZERO, || WaitReason::Retry.into());
    for (id, outcome, undecided) in [
        ("a1", "not_sent", JobState::Waiting { wait, reason: reason() }),
        ("a2", "unknown", JobState::Unknown { wait, reason: reason() }),
    ] {
        let claimed = claim(&fixture).await;
        assert_eq!(ids(&claimed), [id]);
        let lease = &claimed[0].claimed.lease;
        assert_eq!(
            fixture.database.begin_attempt(lease, &request(id), AT_ONCE).await.unwrap(),
            BeginResult::Attempt(1)
        );
        assert_eq!(claim(&fixture).await, [], "its request is in flight");
        let end = AttemptEnd { number: 1, outcome, status: None, detail: "no answer".to_owned(), counts: true };
        assert_eq!(fixture.database.finish_attempt(lease, &end, &undecided).await.unwrap(), FencedWrite::Applied);
        assert_eq!(claim(&fixture).await, [], "{undecided:?}");
        let state = if outcome == "unknown" { "unknown" } else { "waiting" };
        assert_eq!(holder_of("a4").await, held_by(id, state));
        let again = fixture.take(&of("acct_1", id)).await;
        assert_eq!(claim(&fixture).await, [], "it is on its way again");
        fixture.becomes(&again.lease, &ended(FinalState::Declined)).await;
    }
    let claimed = claim(&fixture).await;
    assert_eq!(ids(&claimed), ["a3"]);
    fixture.becomes(&claimed[0].claimed.lease, &ended(FinalState::Review)).await;
    assert_eq!(claim(&fixture).await, [], "a job in review is undecided");
    assert_eq!(holder_of("a4").await, held_by("a3", "review"));
    let by = Actor { os_user: "alice@desk".to_owned(), program: None, reason: None };
    let decided = fixture.database.resolve_job(&job("a3").id, &JobResolution::Declined, None, &by).await;
    decided.unwrap();
    assert_eq!(ids(&claim(&fixture).await), ["a4"]);
    fixture.counts_agree().await;
}

async fn account_has_one_job_in_all_classes(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (priority, id) in [(0, "a1"), (9, "a2"), (0, "a3")] {
        fixture.record(&Job { priority, ..of("acct_1", id) }).await;
    }
    for id in ["a2", "a1", "a3"] {
        let claimed = claim(&fixture).await;
        assert_eq!(ids(&claimed), [id]);
        assert_eq!(claim(&fixture).await, []);
        fixture.becomes(&claimed[0].claimed.lease, &ended(FinalState::Declined)).await;
    }
}

/// A row that changes to this order does not wait for what is on its way.
async fn jobs_claimed_without_order_hold_nothing(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for id in ["a1", "a2"] {
        fixture.record(&of("acct_1", id)).await;
    }
    assert_eq!(ids(&fixture.dispatch(1, 1).await), ["a1"]);
    assert_eq!(ids(&claim(&fixture).await), ["a2"]);
}
