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
    for flow in shown["flows"].as_array_mut().unwrap() {
        let Some(blocked) = flow.get_mut("blocked") else { continue };
        let left_ms = blocked.as_object_mut().unwrap().remove("left_ms").unwrap();
        assert!((3_500_000..=3_600_000).contains(&left_ms.as_u64().unwrap()), "{left_ms}");
        assert!(
            blocked.as_object_mut().unwrap().remove("until").unwrap().as_str().unwrap().ends_with('Z'),
            "{blocked}"
        );
    }
    assert_eq!(
        shown,
        json!({ "total_flows": 4, "total_waiting": 4212, "flows": [
            { "account": "flood", "priority": 0, "waiting": 4200, "weight": 1,
              "blocked": { "reason": "limit", "limit": "per-account", "text": "waits for limit per-account" } },
            { "account": null, "priority": 0, "waiting": 7, "weight": 1, "share": 1.0 },
            { "account": "mallory", "priority": 0, "waiting": 3, "weight": 1, "blocked": { "reason": "misconfigured",
              "text": "the provider refused address, method or credential of the account" } },
            { "account": "vip", "priority": 9, "waiting": 2, "weight": 1, "share": 1.0 },
        ] })
    );
    let table = desk.run(&["provider", "flows", "acme", "--limit", "2"]).await;
    let lines: Vec<&str> = table.out.lines().map(str::trim).collect();
    assert_eq!(lines.len(), 3, "{}", table.out);
    assert!(lines[1].starts_with("flood ") && lines[1].contains("UTC (in 59 min"), "{}", table.out);
    assert!(lines[1].ends_with("waits for limit per-account") && lines[2].starts_with("no account "), "{}", table.out);
    assert_eq!(table.err, "2 more flows with 5 waiting payments not listed: `--limit N` lists more\n");
    assert_eq!(desk.run(&["provider", "flows", "acme"]).await.err, "");
    desk.sql("UPDATE flows SET waiting = 0").await;
    let none = desk.run(&["provider", "flows", "acme"]).await;
    assert_eq!((none.out.as_str(), none.err.as_str()), ("", "no payment of acme waits in the ledger's backlog\n"));
    assert_eq!(desk.run(&["provider", "flows", "acme", "--json"]).await.json()["flows"], json!([]));
}
