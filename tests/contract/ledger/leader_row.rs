//! The leader row, which names the limiter that may grant: every worker reads it, and it changes by compare and set.

use std::time::Instant;

use sluicegate::domain::clock_comparison::{ClockAttestation, ClockOffset, LeaderRow, QuotaAttestation};
use sluicegate::domain::time::Micros;
use sluicegate::ledger::LedgerError;

use super::*;

on_every_database!(
    leader_row_changes_by_compare_and_set,
    concurrent_takeovers_agree,
    leader_is_a_run_id_or_share,
    clock_attestation_is_valid_for_its_term,
);

async fn leader_row_changes_by_compare_and_set(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let ledger = fixture.database.clone();
    let (acme, adyen) = (name("acme"), name("adyen"));
    assert!(ledger.stored_leaders(&[]).await.unwrap().is_empty());
    assert!(ledger.stored_leaders(&[acme.clone(), adyen.clone()]).await.unwrap().is_empty());
    let started = Instant::now();
    let first = ledger.take_leadership(&acme, None, "redis:a").await.unwrap();
    assert_eq!(first.holder, "redis:a");
    // The clocks of both databases may count in whole milliseconds.
    assert!(first.age <= started.elapsed() + Duration::from_millis(1), "{first:?}");
    // A takeover that expects another leader changes nothing and returns the present one.
    for (from, to) in [(None, "redis:b"), (Some("redis:b"), "redis:c"), (Some("share"), "redis:b")] {
        let held = ledger.take_leadership(&acme, from, to).await.unwrap();
        assert_eq!((held.holder.as_str(), held.term), ("redis:a", first.term), "{from:?} → {to}");
    }
    let minute = if kind == Kind::Postgres { "interval '1 minute'" } else { "60000" };
    fixture.sql(&format!("UPDATE limiter_authority SET since = since - {minute}")).await.unwrap();
    let held = ledger.stored_leaders(&[acme.clone(), adyen.clone()]).await.unwrap();
    let LeaderRow { holder, term, age, .. } = &held[&acme];
    assert_eq!((holder.as_str(), *term, held.len()), ("redis:a", first.term, 1));
    assert!(*age >= Duration::from_secs(59) && *age < Duration::from_secs(90), "{age:?}");
    let shared = ledger.take_leadership(&acme, Some("redis:a"), "share").await.unwrap();
    assert_eq!(shared.holder, "share");
    assert!(shared.term > first.term && shared.age < Duration::from_secs(30), "{shared:?}");
    // A term never returns, even after the row was deleted.
    fixture.sql("DELETE FROM limiter_authority").await.unwrap();
    tokio::time::sleep(Duration::from_millis(2)).await;
    let again = ledger.take_leadership(&acme, None, "redis:a").await.unwrap();
    assert!(again.term > shared.term, "{again:?}");
    ledger.take_leadership(&adyen, None, "share").await.unwrap();
    assert_eq!(ledger.stored_leaders(&[acme, adyen]).await.unwrap().len(), 2);
}

async fn clock_attestation_is_valid_for_its_term(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let (ledger, acme) = (fixture.database.clone(), name("acme"));
    let first = ledger.take_leadership(&acme, None, "redis:a").await.unwrap();
    assert_eq!(first.attestation, None);
    let since = Micros(1_800_000_000_000_007);
    let word = |ahead_us: i64, since_us: u64| ClockAttestation {
        offset: ClockOffset { least_us: ahead_us, most_us: ahead_us + 900 },
        since: Micros(since_us),
    };
    let attest = async |term: i64, attestation: ClockAttestation| {
        ledger.record_clock_attestations(&[QuotaAttestation { quota: acme.clone(), term, attestation }]).await.unwrap();
    };
    let stored = async || ledger.stored_leaders(std::slice::from_ref(&acme)).await.unwrap()[&acme].clone();
    attest(first.term, word(-5_000_000, since.0)).await;
    let held = stored().await;
    let (kept, age) = held.attestation.unwrap();
    assert_eq!((kept, held.holder.as_str(), held.term), (word(-5_000_000, since.0), "redis:a", first.term));
    assert!(age < Duration::from_secs(30), "{age:?}");
    let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let apart = wall.abs_diff(Duration::from_micros(held.now.0));
    assert!(apart < Duration::from_secs(30), "the database's clock is this machine's: {apart:?}");
    // An attestation that knows of a later clock step is kept. One that does not know of it is ignored.
    attest(first.term, word(25_000_000, since.0 + 9)).await;
    attest(first.term, word(-5_000_000, since.0)).await;
    attest(first.term - 1, word(1, since.0 + 20)).await;
    assert_eq!(stored().await.attestation.unwrap().0, word(25_000_000, since.0 + 9));
    // The same attestation again is younger.
    let minute = if kind == Kind::Postgres { "interval '1 minute'" } else { "60000" };
    fixture.sql(&format!("UPDATE limiter_authority SET clock_said_at = clock_said_at - {minute}")).await.unwrap();
    assert!(stored().await.attestation.unwrap().1 >= Duration::from_secs(59));
    attest(first.term, word(25_000_001, since.0 + 9)).await;
    assert!(stored().await.attestation.unwrap().1 < Duration::from_secs(30));
    // One statement attests for several quotas; one without a row, or of another term, changes nothing.
    let bank = name("bank");
    let held = ledger.take_leadership(&bank, None, "redis:a").await.unwrap();
    let said = [(&bank, held.term), (&name("none"), 1), (&acme, first.term + 1)];
    let said =
        said.map(|(quota, term)| QuotaAttestation { quota: quota.clone(), term, attestation: word(7, since.0 + 30) });
    ledger.record_clock_attestations(&said).await.unwrap();
    let rows = ledger.stored_leaders(&[acme.clone(), bank.clone()]).await.unwrap();
    assert_eq!(rows[&bank].attestation.unwrap().0, word(7, since.0 + 30));
    assert_eq!(rows[&acme].attestation.unwrap().0, word(25_000_001, since.0 + 9));
    let next = ledger.take_leadership(&acme, Some("redis:a"), "redis:b").await.unwrap();
    assert_eq!((next.attestation, stored().await.attestation), (None, None));
    assert!(fixture.sql("UPDATE limiter_authority SET clock_since_us = 5").await.is_err(), "an incomplete attestation");
}

async fn concurrent_takeovers_agree(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let mut from: Option<String> = None;
    for round in 0..5 {
        let takers = (0..8).map(|taker| {
            let (ledger, from) = (fixture.database.clone(), from.clone());
            async move {
                let to = format!("redis:{round}-{taker}");
                ledger.take_leadership(&name("acme"), from.as_deref(), &to).await.unwrap()
            }
        });
        let seen = futures_util::future::join_all(takers).await;
        let holders: Vec<(&str, i64)> = seen.iter().map(|held| (held.holder.as_str(), held.term)).collect();
        assert!(holders.iter().all(|held| *held == holders[0]), "{holders:?}");
        from = Some(holders[0].0.to_owned());
    }
}

async fn leader_is_a_run_id_or_share(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let long = format!("redis:{}", "a".repeat(65));
    for holder in ["", "redis:", "redis:a b", "Share", "a", long.as_str()] {
        let error = fixture.database.take_leadership(&name("acme"), None, holder).await.unwrap_err();
        assert!(
            matches!(&error, LedgerError::StatementFailed(text) if text.contains("holder_is_share_or")),
            "{holder}: {error}"
        );
    }
    let run_id = format!("redis:{}", "0123456789abcdef".repeat(4));
    assert_eq!(fixture.database.take_leadership(&name("acme"), None, &run_id).await.unwrap().holder, run_id);
}
