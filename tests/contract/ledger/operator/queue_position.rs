//! A job's queue position, its provider's recent requests, and rejected messages with the job's id.

use sluicegate::domain::disposition::Resend;
use sluicegate::domain::quota_spec::Lookback;
use sluicegate::ledger::rejected::{RejectedMessage, StoredMessage};

use super::*;

on_every_database!(
    queue_position_follows_due_time_and_priority,
    request_history_is_reported,
    invalid_message_is_found_by_its_id,
);

async fn queue_position_follows_due_time_and_priority(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    let put = async |job: Job, wait: Duration| {
        let hold = fixture.take(&job).await.lease;
        let state = JobState::Waiting { wait, reason: Wait::with_detail(WaitReason::Retry, "why") };
        assert_eq!(ledger.transition(&hold, &state).await.unwrap(), FencedWrite::Applied);
    };
    let (now, hour) = (Duration::ZERO, Duration::from_secs(3_600));
    put(Job { cost: 5, ..job("a") }, now).await;
    put(job("b"), now).await;
    put(job("c"), now).await;
    put(Job { cost: 7, priority: 9, ..job("urgent") }, now).await;
    put(Job { priority: 9, ..job("urgent-later") }, hour).await;
    put(job("later"), hour * 2).await;
    put(Job { cost: 11, provider: name("stripe-eu"), ..job("0-elsewhere") }, now).await;
    fixture.take(&job("z-in-hand")).await;
    fixture.bring("sending").await;

    let around = async |text: &str, sharing: &[&str]| {
        let sharing: Vec<ProviderName> = sharing.iter().map(|text| name(text)).collect();
        fixture.database.queue_position(&id(text), &sharing).await.unwrap()
    };
    let b = around("b", &["stripe"]).await;
    assert_eq!((b.jobs_ahead, b.cost_ahead, b.workers), (2, 12, 1), "{b:?}");
    let a = around("a", &["stripe"]).await;
    assert_eq!((a.jobs_ahead, a.cost_ahead), (1, 7), "{a:?}");
    let later = around("later", &["stripe"]).await;
    // Every job except the one in flight.
    assert_eq!((later.jobs_ahead, later.cost_ahead), (6, 16), "{later:?}");
    let shared = around("later", &["stripe", "stripe-eu"]).await;
    assert_eq!((shared.jobs_ahead, shared.cost_ahead), (7, 27), "{shared:?}");
    let unknown = around("unknown", &["stripe"]).await;
    assert_eq!((unknown.jobs_ahead, unknown.cost_ahead), (0, 0), "{unknown:?}");
    assert!(b.now.0 > 1_600_000_000_000 && unknown.now >= b.now);
}

async fn request_history_is_reported(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let none = fixture.database.queue_position(&id("unknown"), &[name("stripe")]).await.unwrap();
    assert_eq!(
        (none.mean_request_time, none.progress.unknown_since, none.progress.lookups, none.progress.resend),
        (None, None, 0, Resend::Never)
    );
    fixture.bring("unknown").await;
    let known = fixture.database.queue_position(&id("unknown"), &[name("stripe")]).await.unwrap();
    assert!(
        known.mean_request_time.unwrap() < Duration::from_secs(60)
            && known.progress.unknown_since.unwrap() <= known.now,
        "{known:?}"
    );
    let uses = fixture.database.recent_uses(&name("stripe"), Lookback::all(Duration::from_secs(60))).await;
    assert_eq!(
        uses.unwrap(),
        fixture.database.recent_uses(&name("stripe"), Lookback::all(Duration::from_secs(60))).await.unwrap()
    );
}

async fn invalid_message_is_found_by_its_id(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (job_id, reason) in
        [(Some("odd"), "bad_amount"), (Some("other"), "bad_field"), (None, "malformed"), (Some("odd"), "conflict")]
    {
        let message = RejectedMessage {
            lane: name("stripe"),
            job_id: job_id.map(str::to_owned),
            reason,
            detail: "why".to_owned(),
            body_sha256: [7; 32],
            body_bytes: 9,
            head: String::new(),
            stored: StoredMessage::default(),
        };
        fixture.database.reject(&message).await.unwrap();
    }
    let around = fixture.database.queue_position(&id("odd"), &[]).await.unwrap();
    let reasons: Vec<&str> = around.rejected.iter().map(|rejection| rejection.reason.as_str()).collect();
    assert_eq!(reasons, ["conflict", "bad_amount"]);
    assert_eq!((around.rejected[0].lane.as_str(), around.rejected[0].detail.as_str()), ("stripe", "why"));
    assert!(around.rejected[0].at.0 <= around.now.0);
}
