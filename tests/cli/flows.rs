//! `provider flows`: the accounts whose payments wait in the ledger, and what blocks them.

use serde_json::json;

use crate::jobs::Desk;

#[tokio::test]
async fn waiting_accounts_are_listed_with_their_blocks() {
    let desk = Desk::open().await;
    let in_an_hour = "CAST(unixepoch('subsec') * 1000 AS INTEGER) + 3600000";
    desk.sql(&format!(
        "INSERT INTO flows (provider, class, account, waiting, blocked_until, blocked_reason, blocked_limit) VALUES \
             ('acme', 10, 'flood', 4200, {in_an_hour}, 'limit', 'per-account'), \
             ('acme', 10, 'mallory', 3, {in_an_hour}, 'misconfigured', NULL), \
             ('acme', 10, '', 7, NULL, NULL, NULL), ('acme', 1, 'vip', 2, 1, 'account_blocked', NULL), \
             ('acme', 10, 'idle', 0, NULL, NULL, NULL), ('bolt', 10, 'other', 9, NULL, NULL, NULL)"
    ))
    .await;
    let mut shown = desk.run(&["provider", "flows", "acme", "--json"]).await.json();
    for flow in shown.as_array_mut().unwrap() {
        let Some(blocked) = flow.get_mut("blocked") else { continue };
        let left_ms = blocked.as_object_mut().unwrap().remove("left_ms").unwrap();
        assert!((3_500_000..=3_600_000).contains(&left_ms.as_u64().unwrap()), "{left_ms}");
    }
    assert_eq!(
        shown,
        json!([
            { "account": "vip", "priority": 9, "waiting": 2 },
            { "account": "flood", "priority": 0, "waiting": 4200,
              "blocked": { "reason": "limit", "limit": "per-account" } },
            { "account": null, "priority": 0, "waiting": 7 },
            { "account": "mallory", "priority": 0, "waiting": 3, "blocked": { "reason": "misconfigured" } },
        ])
    );
    let table = desk.run(&["provider", "flows", "acme", "--limit", "2"]).await.out;
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(table.lines().nth(2).unwrap().contains("waits for limit per-account"), "{table}");
}
