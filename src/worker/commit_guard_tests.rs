//! Which charges the guard admits, and what it does with a ledger that lacks a commit.

use super::*;
use crate::ledger::provider_row::{LimitRow, ProviderRow};

fn provider(name: &str, idempotency_retention_s: Option<i64>) -> Arc<Provider> {
    let limit = LimitRow { name: "all".to_owned(), max_requests: 10, window_ms: 1_000, ..LimitRow::default() };
    let row = ProviderRow {
        name: name.to_owned(),
        url: "https://x.example/".to_owned(),
        idempotency_retention_s,
        limits: vec![limit],
        ..ProviderRow::default()
    };
    Arc::new(row.validate(1).unwrap())
}

fn token(id: &str, fence: i64) -> LeaseToken {
    LeaseToken { id: JobId::new(id).unwrap(), fence }
}

async fn migrated() -> Database {
    let ledger = Database::open("sqlite::memory:", 1).unwrap();
    ledger.migrate().await.unwrap();
    ledger
}

#[tokio::test]
async fn held_or_uncompared_lane_admits_no_charge() {
    let ledger = migrated().await;
    let (changes, seen) = watch::channel(0);
    let mut guard = CommitGuard::new(&ledger);
    guard.server_changes = Some(seen);
    let plain = provider("acme", None);
    let keeps = provider("bolt", Some(86_400));
    assert_eq!(guard.admit_charge(&plain), Ok(()));
    changes.send_replace(1);
    assert_eq!(guard.admit_charge(&plain), Err(HeldBack::NotCompared));
    assert_eq!(guard.admit_charge(&keeps), Ok(()), "its provider recognises a repeated key");
    guard.compared.store(1, Ordering::Release);
    assert_eq!(guard.admit_charge(&plain), Ok(()));
    ledger.hold_lanes(std::slice::from_ref(&keeps.name), HoldCause::Recover, "restored").await.unwrap();
    guard.read_holds(&ledger, "worker-a").await.unwrap();
    assert!(matches!(guard.admit_charge(&keeps), Err(HeldBack::Hold(wait)) if wait.to_string().contains("recover")));
    assert_eq!(guard.admit_charge(&plain), Ok(()));
}

#[tokio::test]
async fn lost_commit_holds_lanes_and_awaits_its_repair() {
    let ledger = migrated().await;
    let acme = provider("acme", None);
    let others = [provider("bolt", Some(86_400)), provider("crate", None)];
    let settings = LoadedSettings {
        providers: others.into_iter().chain([Arc::clone(&acme)]).map(|row| (row.name.clone(), row)).collect(),
        ..LoadedSettings::default()
    };
    let guard = CommitGuard::new(&ledger);
    guard.compare(&ledger, &settings).await.unwrap();
    assert!(ledger.lane_hold(&acme.name).await.unwrap().is_none(), "nothing is remembered");
    guard.remember(&acme.name, &token("gone", 7), 1, Progress::Sent);
    guard.compare(&ledger, &settings).await.unwrap();
    guard.read_holds(&ledger, "worker-a").await.unwrap();
    let held: Vec<String> = guard.holds.lock().keys().map(ToString::to_string).collect();
    assert_eq!(held, ["acme", "crate"], "all lanes without retention, and no other");
    assert!(guard.memory.lock().marks(guard.now()).is_empty() && guard.lost.lock().len() == 1);
    // Its request was in flight: the response comes, and the ledger rejects it.
    let state = JobState::Final { state: FinalState::Succeeded, reason: String::new(), reference: None };
    let response = KeptResponse { outcome: "accepted", status: Some(200), state, end: FinalState::Succeeded };
    guard.record_end(&token("gone", 7), 1, Progress::Ended(response.clone()), FencedWrite::Stale);
    assert_eq!(guard.lost.lock().values().next().unwrap().commit.progress, Progress::Ended(response));
}
