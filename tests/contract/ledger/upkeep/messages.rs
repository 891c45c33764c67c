//! Count of the messages of recorded jobs that are ready in the lane: the ledger knows which ones a delay queue holds.

use super::*;

on_every_database!(returned_messages_of_waiting_jobs_count,);

async fn returned_messages_of_waiting_jobs_count(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let counted = async || {
        let account = fixture.account(CheckScope::Since(MINUTE)).await;
        (account.delayed + account.due, account.messages_min, account.messages_max)
    };
    // Delayed this many seconds ago, to wait for this long: by the longest step that fits. A second step follows only
    // after a claim.
    for (id, wait_s, ago_s) in [("away", 90, 50), ("back", 90, 62), ("back-long-ago", 7_200, 3_600), ("due", 1, 5)] {
        fixture.waiting(&job(id), Duration::from_secs(wait_s)).await;
        for column in ["updated_at", "delayed_until", "wake_at"] {
            fixture.move_back(id, column, ago_s).await;
        }
    }
    assert_eq!(counted().await, (4, 3, 3));
    // A message that returns at this moment may be there or not.
    fixture.waiting(&job("just-now"), Duration::from_secs(90)).await;
    fixture.move_back("just-now", "delayed_until", 60).await;
    let (open, least, most) = counted().await;
    assert_eq!((open, most), (5, 4));
    assert!((3..=4).contains(&least), "{least}");
    // The first job has no message in any queue, the second one may have two.
    fixture.sql("UPDATE jobs SET unqueued = true WHERE id = 'back'").await.unwrap();
    fixture.sql("UPDATE jobs SET sweeps = 1 WHERE id = 'due'").await.unwrap();
    let (open, _, most) = counted().await;
    assert_eq!((open, most), (5, 4));
    // The message of a leased job is not ready.
    fixture.take(&job("due")).await;
    assert_eq!((counted().await.0, counted().await.2), (4, 2));
}
