//! Provider rows that no constraint can reject: each stops its own provider, and no other.

use super::*;
use sluicegate::ops::change::set_paused;

on_every_database!(invalid_row_stops_only_its_provider, unreadable_row_closes_quota_and_keeps_pause,);

async fn invalid_row_stops_only_its_provider(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.apply(&file(FILE)).await;
    // Rows that no CHECK can reject.
    for sql in [
        "INSERT INTO providers (name, url) VALUES ('bare', 'https://x.example/')",
        "INSERT INTO providers (name, url, statuses) VALUES ('odd', 'https://u:secret@x.example/', '{\"9\": \"fine\"}')",
        "INSERT INTO provider_limits (provider, name, max_requests, window_ms) VALUES ('odd', 'all', 5, 1000)",
        "INSERT INTO providers (name, url, lookup) VALUES ('later', 'https://x.example/', '{}')",
        "INSERT INTO provider_limits (provider, name, max_requests, window_ms) VALUES ('later', 'all', 5, 1000)",
        "INSERT INTO providers (name, url) VALUES ('shady', 'https://x.example/')",
        "INSERT INTO provider_limits (provider, name, max_requests, window_ms, shadow) \
         VALUES ('shady', 'all', 5, 1000, true)",
        "INSERT INTO provider_limits (provider, name, max_requests, window_ms, scope) \
         VALUES ('shady', 'own', 5, 1000, 'account')",
        "INSERT INTO account_overrides (provider, account, rule) VALUES ('shady', 'a', 'exempt')",
        "DELETE FROM provider_limits WHERE name = 'own'",
    ] {
        fixture.sql(sql).await.unwrap();
    }
    let snapshot = fixture.database.load_settings().await.unwrap();
    let (good, bad): (Vec<_>, Vec<_>) = snapshot.providers.into_iter().partition(Result::is_ok);
    assert_eq!(good.len(), 2);
    let bad: Vec<_> = bad.into_iter().map(Result::unwrap_err).collect();
    let names: Vec<&str> = bad.iter().map(|row| row.provider.as_str()).collect();
    assert_eq!(names, ["bare", "later", "odd", "shady"]);
    assert!(bad[0].problems[0].contains("closed, not unlimited"), "{:?}", bad[0]);
    assert!(bad[1].problems[0].contains("lookup.url is missing"), "{:?}", bad[1]);
    assert_eq!(bad[2].problems.len(), 2, "{:?}", bad[2]);
    assert!(bad[3].problems[0].contains("no enabled limit holds every charge"), "{:?}", bad[3]);
    assert!(bad[3].problems[1].contains("account `a`: rule `exempt` changes nothing"), "{:?}", bad[3]);
    assert!(!format!("{bad:?}").contains("secret"), "{bad:?}");
}

/// PostgreSQL and SQLite accept numbers that no Rust number type can hold.
async fn unreadable_row_closes_quota_and_keeps_pause(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for name in ["bolt", "dash"] {
        let row = format!("INSERT INTO providers (name, quota, url) VALUES ('{name}', 'acme', 'https://x.example/')");
        fixture.sql(&row).await.unwrap();
    }
    let unreadable = "UPDATE providers SET statuses = '{\"402\": 1e999}'";
    fixture.sql(unreadable).await.unwrap();
    fixture.sql("UPDATE providers SET paused = true WHERE name = 'dash'").await.unwrap();
    let snapshot = fixture.database.load_settings().await.unwrap();
    let bad: Vec<(&str, &str, bool)> = snapshot
        .providers
        .iter()
        .map(|provider| provider.as_ref().unwrap_err())
        .map(|bad| (bad.provider.as_str(), bad.quota.as_str(), bad.paused))
        .collect();
    assert_eq!(bad, [("bolt", "acme", false), ("dash", "acme", true)]);
    let bolt = ProviderName::new("bolt").unwrap();
    assert!(set_paused(&fixture.database, &bolt, true, None).await.unwrap(), "it can be paused all the same");
    let snapshot = fixture.database.load_settings().await.unwrap();
    assert!(snapshot.providers[0].as_ref().unwrap_err().paused);
    // Payments can still be enqueued for the others, and the error names the unreadable row.
    assert_eq!(fixture.database.provider_names().await.unwrap(), ["bolt", "dash"]);
    let error = fixture.database.readable_rows(None).await.unwrap_err().to_string();
    assert!(error.contains("provider `bolt`: column `statuses` is not a JSON object"), "{error}");
}
