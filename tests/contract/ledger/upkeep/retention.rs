//! Retention: what the ledger empties of old payments, and which ids it keeps for ever.

use sluicegate::ledger::operator::{Actor, JobResolution, ResolutionRefusal};
use sluicegate::ledger::rejected::RecordedContent;

use super::*;

on_every_database!(
    old_payloads_are_emptied_ids_are_kept,
    old_reviews_are_emptied_if_configured,
    references_are_forgotten_when_no_limit_counts_them,
);

async fn old_payloads_are_emptied_ids_are_kept(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let day = Duration::from_secs(86_400);
    for (id, state) in [
        ("succeeded", FinalState::Succeeded),
        ("declined", FinalState::Declined),
        ("young", FinalState::Succeeded),
        ("review", FinalState::Review),
    ] {
        fixture.finish(id, state).await;
    }
    fixture.waiting(&job("open"), MINUTE).await;
    fixture.waiting(&job("unsent"), MINUTE).await;
    fixture.sql("UPDATE jobs SET state = 'cancelled' WHERE id = 'unsent'").await.unwrap();
    for id in ["succeeded", "declined", "review", "open", "unsent"] {
        fixture.move_back(id, "updated_at", 90 * 86_400 + 60).await;
    }
    assert_eq!(fixture.database.scrub(ScrubScope::Finished, 91 * day, 100).await.unwrap(), 0);
    assert_eq!(fixture.database.scrub(ScrubScope::Finished, 90 * day, 2).await.unwrap(), 2);
    assert_eq!(fixture.database.scrub(ScrubScope::Finished, 90 * day, 100).await.unwrap(), 1);
    assert_eq!(fixture.database.scrub(ScrubScope::Finished, 90 * day, 100).await.unwrap(), 0, "each once");
    let empty = "SELECT id FROM jobs WHERE payload IS NULL AND reference IS NULL AND coalesce(frozen_url, '') = '' \
                 AND coalesce(length(frozen_body), 0) = 0 ORDER BY id";
    let empty: Vec<String> = fixture.column(empty).await.into_iter().flatten().collect();
    assert_eq!(empty, ["declined", "succeeded", "unsent"]);
    // The same message changes nothing, after any time. With other content it is a conflict.
    for id in ["succeeded", "declined", "unsent"] {
        let claim = async |hash| fixture.database.claim(&job(id), hash, "worker-b").await.unwrap();
        assert_eq!(claim(hash(1)).await, Claim::NotOpen, "{id}");
        assert!(matches!(claim(hash(2)).await, Claim::Conflict(_)), "{id}");
        let recorded = fixture.database.recorded_content(&job(id), hash(1)).await.unwrap();
        assert_eq!(recorded, RecordedContent::Same);
    }
    let reopened = fixture.without_constraints("UPDATE jobs SET state = 'waiting' WHERE id = 'unsent'").await;
    assert!(reopened.unwrap_err().contains("open_jobs_are_not_scrubbed"));
}

/// An emptied review can still be resolved.
async fn old_reviews_are_emptied_if_configured(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let day = Duration::from_secs(86_400);
    for id in ["old", "young"] {
        fixture.finish(id, FinalState::Review).await;
    }
    fixture.move_back("old", "updated_at", 30 * 86_400 + 60).await;
    assert_eq!(fixture.database.scrub(ScrubScope::InReview, 31 * day, 10).await.unwrap(), 0);
    assert_eq!(fixture.database.scrub(ScrubScope::InReview, 30 * day, 10).await.unwrap(), 1);
    assert_eq!(fixture.database.scrub(ScrubScope::InReview, 30 * day, 10).await.unwrap(), 0, "each once");
    let empty = "SELECT id FROM jobs WHERE payload IS NULL AND reference IS NULL AND length(frozen_body) = 0";
    assert_eq!(fixture.column(empty).await, [Some("old".to_owned())]);
    let (operator, id) = (fixture.database.clone(), Identifier::new("old").unwrap());
    let by = Actor { os_user: "alice@desk".to_owned(), program: None, reason: None };
    let resent = settled(operator.resolve_job(&id, &JobResolution::Resend, None, &by).await);
    assert_eq!(resent, Err(ResolutionRefusal::Scrubbed));
    assert!(ResolutionRefusal::Scrubbed.to_string().contains("ledger.scrub_review_after_days"));
    operator.resolve_job(&id, &JobResolution::Declined, None, &by).await.unwrap();
    let claim = fixture.database.claim(&job("old"), hash(1), "worker-b").await.unwrap();
    assert_eq!(claim, Claim::NotOpen);
}

/// The ledger keeps a reference for the payment until that is emptied, and for the windows of limits.
async fn references_are_forgotten_when_no_limit_counts_them(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for id in ["long-ago", "lately"] {
        fixture.finish(id, FinalState::Succeeded).await;
    }
    let (moved, day) = match fixture.postgres {
        Some(_) => ("began_at - interval '32 days 1 minute'", "began_at + interval '1 day'"),
        None => ("began_at - 32 * 86400000 - 60000", "began_at + 86400000"),
    };
    let known = "SELECT job_id FROM attempts WHERE reference = 'invoice 7' ORDER BY job_id";
    fixture.sql(&format!("UPDATE attempts SET began_at = {moved} WHERE job_id = 'long-ago'")).await.unwrap();
    fixture.sql(&format!("UPDATE attempts SET began_at = {day} WHERE job_id = 'long-ago'")).await.unwrap();
    assert_eq!(fixture.database.forget_references(10).await.unwrap(), 0, "a window of 31 days may count it");
    fixture.sql(&format!("UPDATE attempts SET began_at = {moved} WHERE job_id = 'long-ago'")).await.unwrap();
    assert_eq!(fixture.database.forget_references(10).await.unwrap(), 1);
    assert_eq!(fixture.column(known).await, [Some("lately".to_owned())]);
    assert_eq!(fixture.database.forget_references(10).await.unwrap(), 0, "each once");
    let of_payments = "SELECT id FROM jobs WHERE reference IS NOT NULL ORDER BY id";
    assert_eq!(fixture.column(of_payments).await, [Some("lately".to_owned()), Some("long-ago".to_owned())]);
}
