//! Arrivals of a provider's jobs, which `sluicegate simulate` replays: exact for a period, and complete over many
//! pages.

use sluicegate::ledger::operator::{DatabaseTime, PastArrival};

use super::*;

on_every_database!(arrivals_in_a_period_are_exact, long_history_is_read_in_pages);

async fn arrivals_in_a_period_are_exact(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let urgent = Job {
        cost: 3,
        priority: 9,
        expires_at: Some(sluicegate::domain::time::EpochMs(4_100_000_000_987)),
        ..job("urgent")
    };
    let plain = Job { account: None, ..job("plain") };
    let elsewhere = Job { provider: name("adyen"), ..job("elsewhere") };
    for one in [&urgent, &plain, &elsewhere] {
        fixture.take(one).await;
    }
    let came = async |text: &str| fixture.details(text).await.line.created_at;
    let all = async |from: DatabaseTime, to: DatabaseTime, at_most| {
        fixture.database.arrivals(&name("stripe"), from, to, at_most).await.unwrap()
    };
    let account = urgent.account.as_ref().map(|account| account.as_str().to_owned());
    let (urgent_at, plain_at) = (came("urgent").await, came("plain").await);
    let arrivals = [
        PastArrival { created_at: plain_at, expires_at: None, account: None, cost: 1, priority: 0 },
        PastArrival {
            created_at: urgent_at,
            expires_at: Some(DatabaseTime(4_100_000_000_987)),
            account,
            cost: 3,
            priority: 9,
        },
    ];
    let last = DatabaseTime(urgent_at.0.max(plain_at.0));
    assert_eq!(all(urgent_at, DatabaseTime(last.0 + 1), 100).await, arrivals);
    assert_eq!(all(urgent_at, DatabaseTime(last.0 + 1), 1).await, arrivals[..1]);
    assert_eq!(all(DatabaseTime(last.0 + 1), DatabaseTime(i64::MAX / 1_000_000), 100).await, []);
    assert_eq!(all(DatabaseTime(0), urgent_at, 100).await, [], "the end is not part of it");
}

/// Pages are full of jobs from other periods, and some jobs have keys of their own. No job is left out or listed twice.
async fn long_history_is_read_in_pages(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.fill(kind).await;
    // Of each lane's 2,000 jobs, every tenth has a key of its own, in another order than its id.
    let keyed =
        "UPDATE jobs SET key_given = (1 = 1), idempotency_key = 'k-' || substr(id, 5) || '-' || id WHERE id LIKE '%7'";
    fixture.without_constraints(keyed).await.unwrap();
    let lane = name("lane-3");
    let all =
        fixture.database.arrivals(&lane, DatabaseTime(0), DatabaseTime(4_000_000_000_000), 100_000).await.unwrap();
    let counted = "SELECT count(*) FROM jobs WHERE provider = 'lane-3'";
    assert_eq!(all.len().to_string(), fixture.one(counted).await);
    let mut came: Vec<DatabaseTime> = all.iter().map(|job| job.created_at).collect();
    came.sort();
    let (from, to) = (came[came.len() / 2], came[came.len() / 2 + 100]);
    let within = came.iter().filter(|at| **at >= from && **at < to).count();
    assert_eq!(fixture.database.arrivals(&lane, from, to, 100_000).await.unwrap().len(), within);
    assert_eq!(fixture.database.arrivals(&lane, from, to, 7).await.unwrap().len(), 7);
}
