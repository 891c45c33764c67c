//! Audit of plain SQL: a change by SQL is audited like a command, and a final state that it sets publishes an event.

use super::*;

on_every_database!(
    plain_sql_is_audited_and_publishes_events,
    sql_on_active_jobs_is_audited,
    worker_writes_are_not_audited,
    resolution_without_audit_is_rolled_back,
    resolution_audit_names_its_program,
);

/// Changes by plain SQL, also of jobs that a worker has leased: situation, assignments, resulting state.
const BY_HAND: [(&str, &str, &str); 7] = [
    ("review-unknown", "state = 'succeeded', provider_reference = 'ch_1'", "succeeded"),
    ("review-rejected", "state = 'waiting', maybe_charged = (1 = 0), attempts = 0", "waiting"),
    ("dead", "state = 'waiting'", "waiting"),
    ("waiting", "state = 'cancelled'", "cancelled"),
    ("waiting-in-hand", "state = 'cancelled', holder = NULL, response_by = NULL", "cancelled"),
    ("waiting-throttled", "state = 'succeeded'", "succeeded"),
    ("unknown", "state = 'declined', maybe_charged = (1 = 0)", "declined"),
];

async fn plain_sql_is_audited_and_publishes_events(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (situation, change, state) in BY_HAND {
        fixture.bring(situation).await;
        let before = fixture.details(situation).await;
        fixture.sql(&format!("UPDATE jobs SET {change} WHERE id = '{situation}'")).await.unwrap();
        let after = fixture.details(situation).await;
        let [audit] = after.audit.as_slice() else { panic!("{situation}: {:?}", after.audit) };
        assert_eq!((audit.old_state.as_str(), audit.new_state.as_deref()), (&*before.line.state, Some(state)));
        assert_eq!(audit.cleared_maybe_charged, before.maybe_charged && !after.maybe_charged);
        let who = if kind == Kind::Postgres { "postgres" } else { "database file" };
        assert_eq!((audit.who.as_str(), &audit.os_user, &audit.because), (who, &None, &None));
        let events: Vec<&str> = after.events[before.events.len()..].iter().map(|event| event.state.as_str()).collect();
        assert_eq!(events, if state == "waiting" { vec![] } else { vec![state] }, "{situation}");
    }
    // A change of `maybe_charged` alone is audited, too.
    fixture.sql("UPDATE jobs SET maybe_charged = (1 = 0) WHERE id = 'review-unknown'").await.unwrap();
    let audit = fixture.details("review-unknown").await.audit;
    assert_eq!((audit.len(), audit[1].cleared_maybe_charged), (2, true));
    fixture.take(&job("deleted")).await;
    fixture.sql("DELETE FROM jobs WHERE id = 'deleted'").await.unwrap();
    let deleted = "SELECT old_state || '|' || coalesce(new_state, 'none') FROM job_audit WHERE job_id = 'deleted'";
    assert_eq!(fixture.one(deleted).await, "waiting|none");
    if kind == Kind::Postgres {
        assert!(fixture.sql("TRUNCATE jobs CASCADE").await.unwrap_err().contains("not be audited"));
    }
}

/// Writes of the same shape as a worker's, except for `updated_at`, which every write of a worker changes.
async fn sql_on_active_jobs_is_audited(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.bring("waiting-in-hand").await;
    fixture.bring("sending").await;
    let five_seconds = if kind == Kind::Postgres { "interval '5 s'" } else { "5000" };
    fixture.sql(&format!("UPDATE jobs SET updated_at = updated_at - {five_seconds}")).await.unwrap();
    for (situation, state) in [("waiting-in-hand", "dead"), ("sending", "succeeded")] {
        let changes = format!("state = '{state}', holder = NULL, response_by = NULL");
        fixture.sql(&format!("UPDATE jobs SET {changes} WHERE id = '{situation}'")).await.unwrap();
        let after = fixture.details(situation).await;
        let audited: Vec<_> = after.audit.iter().map(|line| line.new_state.as_deref()).collect();
        assert_eq!(audited, [Some(state)], "{situation}");
        let events: Vec<&str> = after.events.iter().map(|event| event.state.as_str()).collect();
        assert_eq!(events, [state], "{situation}");
    }
}

async fn worker_writes_are_not_audited(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for situation in SITUATIONS.iter().filter(|situation| **situation != "cancelled") {
        fixture.bring(situation).await;
    }
    // A lost worker's job is claimed again, and finished from unknown without another request.
    fixture.bring("sending-lost").await;
    let hold = LeaseToken { id: id("sending-lost"), fence: 1 };
    fixture.expire_lease(&hold).await;
    let taken = fixture.take(&job("sending-lost")).await;
    assert!(taken.maybe_charged);
    assert_eq!(
        fixture.database.transition(&taken.lease, &finished(FinalState::Succeeded)).await.unwrap(),
        FencedWrite::Applied
    );
    for state in [FinalState::Dead, FinalState::Expired, FinalState::Review] {
        let hold = fixture.take(&job(&format!("put-{}", state.name()))).await.lease;
        assert_eq!(fixture.database.transition(&hold, &finished(state)).await.unwrap(), FencedWrite::Applied);
    }
    assert_eq!(fixture.one("SELECT count(*) FROM job_audit").await, "0");
    let doubly = "SELECT count(*) FROM (SELECT job_id FROM events GROUP BY job_id HAVING count(*) > 1) AS t";
    assert_eq!(fixture.one(doubly).await, "0");
}

async fn resolution_audit_names_its_program(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let by_ops = Actor { program: Some("sluicegate ops"), ..by() };
    fixture.bring("dead").await;
    fixture.database.resolve_job(&id("dead"), &JobResolution::Discard, None, &by_ops).await.unwrap();
    let audit = fixture.details("dead").await.audit;
    assert_eq!(audit[0].program.as_deref(), Some("sluicegate ops"));
    assert_eq!((&audit[0].os_user, &audit[0].because), (&Some(by_ops.os_user), &by_ops.reason));
    // The program is recorded for that transaction alone, whichever connection is used next.
    let own = if kind == Kind::Postgres { Some("sluicegate") } else { None };
    for situation in ["waiting", "waiting-in-hand", "waiting-throttled"] {
        fixture.bring(situation).await;
        assert_eq!(fixture.decide(situation, &JobResolution::Cancel).await, Ok(()));
        assert_eq!(fixture.details(situation).await.audit[0].program.as_deref(), own);
    }
}

/// The resolution and its audit row are written together or not at all.
async fn resolution_without_audit_is_rolled_back(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.bring("dead").await;
    let picture = fixture.picture("dead").await;
    match kind {
        Kind::Postgres => {
            fixture.sql("ALTER TABLE job_audit ADD CHECK (job_id <> 'dead')").await.unwrap();
            fixture.database.resolve_job(&id("dead"), &JobResolution::Replay, None, &by()).await.unwrap_err();
        }
        _ => {
            fixture.sql("DROP TRIGGER jobs_record_decision").await.unwrap();
            let decided = settled(fixture.database.resolve_job(&id("dead"), &JobResolution::Replay, None, &by()).await);
            assert_eq!(decided, Err(ResolutionRefusal::Changed));
        }
    }
    assert_eq!(fixture.picture("dead").await, picture);
}
