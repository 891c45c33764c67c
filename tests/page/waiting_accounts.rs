//! The accounts whose payments wait, on a provider's view and on that of a payment, against the real program.

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::canned::Canned;
use crate::stand::{CROWD, FLOOD, Stand, flood};

const ROWS: &str = "[aria-labelledby=flows-title] tbody tr";

async fn browser(hash: &str) -> Browser {
    let stand = tokio::task::spawn_blocking(Stand::shared).await.unwrap();
    Browser::open(&stand.origin, hash).await
}

async fn beside(args: &'static [&'static str]) -> String {
    tokio::task::spawn_blocking(|| Stand::shared().sluicegate(args)).await.unwrap()
}

/// The page, the command and the list of payments agree.
#[tokio::test(flavor = "multi_thread")]
async fn accounts_that_wait_are_shown_with_their_blocks() {
    let browser = browser("#/providers/crowd").await;
    browser.await_true(&format!("return document.querySelectorAll('{ROWS}').length === 20")).await;
    browser.await_text("#flows-title ~ .table-frame", "Waits for limit own until").await;
    let cells =
        "return [...document.querySelectorAll(args[0])].map((row) => [...row.cells].map((cell) => cell.innerText))";
    let rows = browser.run_with(cells, json!([ROWS])).await;
    let flood_row: Vec<&str> = rows[0].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(flood_row[..5], [flood().as_str(), "0", &(FLOOD - 1).to_string(), "1", ""]);
    // Of the accounts with one payment each, the most urgent comes first.
    assert_eq!((&rows[1][0], &rows[1][1], &rows[1][2]), (&json!("shop-0"), &json!("1"), &json!("1")));
    let rest = CROWD - 20;
    browser
        .await_text(
            "[aria-labelledby=flows-title]",
            &format!("{rest} more flows with {rest} waiting payments not listed"),
        )
        .await;

    let shown: Value = serde_json::from_str(&beside(&["provider", "flows", "crowd", "--json"]).await).unwrap();
    assert_eq!((&shown["total_flows"], &shown["total_waiting"]), (&json!(CROWD), &json!(CROWD - 1 + FLOOD - 1)));
    let names: Vec<&Value> = shown["flows"].as_array().unwrap().iter().map(|flow| &flow["account"]).collect();
    let on_page: Vec<&Value> = rows.as_array().unwrap().iter().map(|row| &row[0]).collect();
    assert_eq!(names, on_page);
    let listed =
        beside(&["jobs", "list", "--provider", "crowd", "--state", "waiting", "--limit", "200", "--json"]).await;
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(json!(listed["jobs"].as_array().unwrap().len()), shown["total_waiting"]);
    let peek =
        tokio::task::spawn_blocking(|| Stand::shared().sluicegate(&["limits", "peek", "crowd", "--account", &flood()]));
    // In one line, though a terminal wraps it.
    let peek = peek.await.unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    let waits =
        format!("{} payments of account {} wait in the backlog of crowd; the next starts in ", FLOOD - 1, flood());
    assert!(peek.contains(&waits) && peek.ends_with(" at the earliest: waits for limit own"), "{peek}");
    // The account leads to its payments.
    browser.click("tbody a[href$='account=shop-0']").await;
    browser.await_true("return document.querySelectorAll('tbody tr').length === 1").await;
    browser.await_text("tbody", "waits for limit own").await;
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lane_without_backlog_says_so_in_one_line() {
    let browser = browser("#/providers/steady").await;
    browser.await_text("[aria-labelledby=flows-title]", "No payment of steady waits in the ledger's backlog.").await;
    assert_eq!(browser.run(&format!("return document.querySelectorAll('{ROWS}').length")).await, json!(0));
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn payment_shows_its_place_in_its_account() {
    let listed =
        beside(&["jobs", "list", "--provider", "crowd", "--state", "waiting", "--limit", "200", "--json"]).await;
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let of_flood = |job: &&Value| job["account"] == flood().as_str();
    let id = listed["jobs"].as_array().unwrap().iter().find(of_flood).unwrap()["id"].as_str().unwrap().to_owned();
    let browser = browser(&format!("#/jobs/{id}")).await;
    browser.await_text(".forecast", &format!("of {}", FLOOD - 1)).await;
    browser.await_text(".forecast", "Blocked until").await;
    browser.await_text(".stands .summary", &format!("waiting payments of account {} with priority 0", flood())).await;
    let explained =
        tokio::task::spawn_blocking(move || Stand::shared().sluicegate(&["jobs", "explain", &id, "--json"]));
    let explained: Value = serde_json::from_str(&explained.await.unwrap()).unwrap();
    let place = &explained["backlog"];
    assert_eq!((&place["waiting"], &place["blocked"]["limit"]), (&json!(FLOOD - 1), &json!("own")), "{explained}");
    browser.await_text(".forecast", &format!("{} of {}", place["position"], FLOOD - 1)).await;
    browser.nothing_went_wrong(&[]).await;
}

/// Prepared accounts: one with the longest name, one without a name, one with hostile text.
#[tokio::test(flavor = "multi_thread")]
async fn long_and_missing_accounts_fit_narrow_screens() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "#/providers/running").await;
    browser
        .await_text("[aria-labelledby=flows-title]", "10,000 more flows with 761,041 waiting payments not listed")
        .await;
    for text in ["no account", "outcome unknown", "Waits for limit per-account until 12:00:12 UTC", "25%"] {
        browser.await_text("[aria-labelledby=flows-title]", text).await;
    }
    for width in [360, 400, 1_280] {
        let screen = json!({"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 700});
        browser.cdp("Emulation.setDeviceMetricsOverride", screen).await;
        let wide = "return [...document.querySelectorAll('[aria-labelledby=flows-title] :not(.unseen, thead, thead *)')].every((node) => \
                    node.getBoundingClientRect().right <= innerWidth && node.scrollWidth <= innerWidth)";
        browser.await_true(wide).await;
    }
    browser.visit("#/providers/idle").await;
    browser.await_text("[aria-labelledby=flows-title]", "No payment of idle waits in the ledger's backlog.").await;
    browser.nothing_went_wrong(&[]).await;
}
