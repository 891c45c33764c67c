//! What stands around a job: those before it, those who work, and messages under its id that never became a job.

use sluicegate::domain::disposition::Resend;
use sluicegate::domain::quota_spec::Lookback;
use sluicegate::ledger::RejectedMessage;

use super::*;

on_every_database!(
    those_before_a_job_are_due_earlier_or_more_urgent,
    a_requests_past_is_told,
    what_never_became_a_job_is_found_by_its_id,
);

async fn those_before_a_job_are_due_earlier_or_more_urgent(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.ledger();
    let put = async |job: Job, wait: Duration| {
        let hold = fixture.take(&job).await.hold;
        let state = JobState::Waiting { wait, reason: "why".to_owned() };
        assert_eq!(ledger.put_down(&hold, &state).await.unwrap(), Written::Kept);
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
        fixture.operator().surroundings(&id(text), &sharing).await.unwrap()
    };
    let b = around("b", &["stripe"]).await;
    assert_eq!((b.before, b.cost_before, b.due, b.workers), (2, 12, 4, 1), "{b:?}");
    let a = around("a", &["stripe"]).await;
    assert_eq!((a.before, a.cost_before), (1, 7), "{a:?}");
    let later = around("later", &["stripe"]).await;
    // Everything but the one on the wire.
    assert_eq!((later.before, later.cost_before), (6, 16), "{later:?}");
    let shared = around("later", &["stripe", "stripe-eu"]).await;
    assert_eq!((shared.before, shared.cost_before), (7, 27), "{shared:?}");
    let nobody = around("nobody", &["stripe"]).await;
    assert_eq!((nobody.before, nobody.cost_before, nobody.due), (0, 0, 0), "{nobody:?}");
    assert!(b.now.0 > 1_600_000_000_000 && nobody.now >= b.now);
}

async fn a_requests_past_is_told(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let none = fixture.operator().surroundings(&id("unknown"), &[name("stripe")]).await.unwrap();
    assert_eq!((none.hold, none.own.unknown_since, none.own.lookups, none.own.resend), (None, None, 0, Resend::Never));
    fixture.bring("unknown").await;
    let known = fixture.operator().surroundings(&id("unknown"), &[name("stripe")]).await.unwrap();
    assert!(
        known.hold.unwrap() < Duration::from_secs(60) && known.own.unknown_since.unwrap() <= known.now,
        "{known:?}"
    );
    let uses = fixture.operator().recent_uses(&name("stripe"), Lookback::all(Duration::from_secs(60))).await;
    assert_eq!(
        uses.unwrap(),
        fixture.ledger().recent_uses(&name("stripe"), Lookback::all(Duration::from_secs(60))).await.unwrap()
    );
}

async fn what_never_became_a_job_is_found_by_its_id(kind: Kind) {
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
        };
        fixture.ledger().reject(&message).await.unwrap();
    }
    let around = fixture.operator().surroundings(&id("odd"), &[]).await.unwrap();
    let reasons: Vec<&str> = around.rejected.iter().map(|it| it.reason.as_str()).collect();
    assert_eq!(reasons, ["conflict", "bad_amount"]);
    assert_eq!((around.rejected[0].lane.as_str(), around.rejected[0].detail.as_str()), ("stripe", "why"));
    assert!(around.rejected[0].at <= around.now);
}
