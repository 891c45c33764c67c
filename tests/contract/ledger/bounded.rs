//! Size limits of frozen requests and payloads, and the count of workers that were lost with the same job.

use sluicegate::domain::expansion::{REQUEST_BODY_BYTES_MAX, URL_BYTES_MAX};
use sluicegate::domain::job::BODY_BYTES_MAX;
use sluicegate::ledger::{BeginResult, FencedWrite, JobState, NewJobAttempt, RequestTiming};

use super::*;

on_every_database!(
    a_request_is_kept_up_to_its_bounds,
    a_payload_is_kept_up_to_its_bound,
    consecutive_lost_workers_are_counted,
    started_request_resets_the_lost_count,
);

fn sized(id: &str, body: usize, url: usize) -> FrozenRequest {
    let url = format!("https://x.example/{}", "u".repeat(url - "https://x.example/".len()));
    FrozenRequest { body: vec![b'x'; body].into(), url: url.into(), ..request(id) }
}

async fn a_request_is_kept_up_to_its_bounds(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    for (number, (body, url, fits)) in [
        (REQUEST_BODY_BYTES_MAX, URL_BYTES_MAX, true),
        (REQUEST_BODY_BYTES_MAX + 1, URL_BYTES_MAX, false),
        (REQUEST_BODY_BYTES_MAX, URL_BYTES_MAX + 1, false),
    ]
    .into_iter()
    .enumerate()
    {
        let (claimed, alone) = (job(&format!("claimed-{number}")), job(&format!("first-{number}")));
        let hold = fixture.take(&claimed).await.lease;
        let attempt = ledger.begin_attempt(&hold, &sized(claimed.id.as_str(), body, url), AT_ONCE).await;
        let hold = LeaseToken { id: alone.id.clone(), fence: 7_000_000_000 };
        let request = sized(alone.id.as_str(), body, url);
        let timing = RequestTiming::immediate(A_MINUTE);
        let first = NewJobAttempt { job: &alone, hash: hash(1), lease: &hold, holder: "a", timing, request: &request };
        let first = ledger.record_and_begin(first).await;
        if fits {
            assert_eq!((attempt.unwrap(), first.unwrap()), (BeginResult::Attempt(1), FencedWrite::Applied));
            continue;
        }
        for error in [attempt.unwrap_err().to_string(), first.unwrap_err().to_string()] {
            assert!(error.contains("frozen_request_is_at_most_1_mib_to_a_url_of_8_kib"), "{error}");
        }
    }
}

async fn a_payload_is_kept_up_to_its_bound(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let of = |bytes: usize| Some(format!("{{\"a\":\"{}\"}}", "x".repeat(bytes - 8)).into());
    fixture.take(&Job { payload: of(BODY_BYTES_MAX), ..job("fits") }).await;
    let longer = Job { payload: of(BODY_BYTES_MAX + 1), ..job("longer") };
    let error = fixture.database.claim(&longer, hash(1), "a").await.unwrap_err().to_string();
    assert!(error.contains("payload_is_at_most_64_kib"), "{error}");
    let change = format!("UPDATE jobs SET payload = '{}' WHERE id = 'fits'", longer.payload.unwrap());
    // The rule that a payment's content never changes applies before the size limit.
    assert!(fixture.sql(&change).await.unwrap_err().contains("what a payment is never changes"));
}

async fn consecutive_lost_workers_are_counted(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (ledger, job) = (fixture.database.clone(), job("p1"));
    let mut claimed = fixture.take(&job).await;
    for lost in 1..=6 {
        fixture.expire_lease(&claimed.lease).await;
        claimed = fixture.take(&job).await;
        assert_eq!(claimed.lost_holders, lost);
        let known = fixture.database.queue_position(&job.id, &[]).await.unwrap();
        assert_eq!(known.progress.lost_holders, lost);
    }
    // A worker that releases the lease may not have looked at the job, so the count stays.
    assert_eq!(ledger.release(&claimed.lease).await.unwrap(), FencedWrite::Applied);
    let claimed = fixture.take(&job).await;
    assert_eq!(claimed.lost_holders, 6);
    // A worker that delays the job has survived it, so the count is reset.
    let next = JobState::Waiting { wait: SECOND, reason: Wait::with_detail(WaitReason::Retry, "limit per-second") };
    assert_eq!(ledger.transition(&claimed.lease, &next).await.unwrap(), FencedWrite::Applied);
    assert_eq!(fixture.take(&job).await.lost_holders, 0);
}

async fn started_request_resets_the_lost_count(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (ledger, job) = (fixture.database.clone(), job("p1"));
    let lose = async |claimed: Claimed| {
        fixture.expire_lease(&claimed.lease).await;
        fixture.take(&job).await
    };
    let mut claimed = lose(fixture.take(&job).await).await;
    claimed = lose(claimed).await;
    assert_eq!(claimed.lost_holders, 2);
    assert_eq!(ledger.begin_attempt(&claimed.lease, &request("p1"), AT_ONCE).await.unwrap(), BeginResult::Attempt(1));
    claimed = lose(claimed).await;
    assert_eq!((claimed.lost_holders, claimed.maybe_charged), (0, true));
    claimed = lose(lose(claimed).await).await;
    assert_eq!(claimed.lost_holders, 2);
    assert_eq!(ledger.begin_lookup(&claimed.lease, A_MINUTE).await.unwrap(), BeginResult::Attempt(2));
    assert_eq!(lose(claimed).await.lost_holders, 0);
}
