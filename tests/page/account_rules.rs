//! The account rules of a provider's view: an operator blocks an account and ends the block, with a reason.

use serde_json::Value;

use crate::browser::Browser;
use crate::stand::Stand;

async fn rules() -> Value {
    let run = || Stand::shared().sluicegate(&["accounts", "list", "crowd", "--json"]);
    serde_json::from_str(&tokio::task::spawn_blocking(run).await.unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn account_is_blocked_and_released_on_the_page() {
    let origin = tokio::task::spawn_blocking(|| Stand::shared().origin.clone()).await.unwrap();
    let browser = Browser::open(&origin, "#/providers/crowd").await;
    browser.await_text("[aria-labelledby=accounts-title]", "No account of crowd has a rule.").await;
    browser.click("button[aria-label='Set a rule for an account of crowd']").await;
    browser.fill("dialog input[name=account]", "fraud-7").await;
    // The reason is required.
    browser.await_true("return document.querySelector('dialog button[type=submit]').disabled").await;
    browser.fill("dialog input[name=because]", "fraud, ticket 12").await;
    browser.await_true("return !document.querySelector('dialog button[type=submit]').disabled").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text("#messages", "fraud-7 of crowd is now blocked.").await;
    browser.await_text("#messages", "no payment of crowd has ever named account").await;
    browser.await_text("[aria-labelledby=accounts-title]", "fraud, ticket 12").await;
    let set = rules().await;
    assert_eq!((&set[0]["rule"], &set[0]["account"]), (&"blocked".into(), &"fraud-7".into()), "{set}");
    browser.click("button[aria-label='Unset the rule of fraud-7']").await;
    browser.fill("dialog input[name=because]", "cleared").await;
    browser.await_true("return !document.querySelector('dialog button[type=submit]').disabled").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text("[aria-labelledby=accounts-title]", "No account of crowd has a rule.").await;
    assert_eq!(rules().await, serde_json::json!([]));
    browser.nothing_went_wrong(&[]).await;
}
