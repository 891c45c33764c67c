//! The limit dialog beyond a new rate: the slider with the finish time, a rate until an instant, and the rate that a
//! provider seems to allow.

use std::time::Duration;

use jiff::{Timestamp, ToSpan as _};
use serde_json::{Value, json};

use crate::browser::Browser;
use crate::canned::Canned;
use crate::stand::Stand;

async fn stand() -> &'static Stand {
    tokio::task::spawn_blocking(Stand::shared).await.unwrap()
}

async fn sluicegate(args: &[&str]) -> String {
    let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
    let run = move || Stand::shared().sluicegate(&args.iter().map(String::as_str).collect::<Vec<_>>());
    tokio::task::spawn_blocking(run).await.unwrap()
}

async fn all_of(provider: &str) -> Value {
    let limits: Value = serde_json::from_str(&sluicegate(&["limits", "list", "--json"]).await).unwrap();
    let mut limits = limits.as_array().unwrap().iter();
    limits.find(|limit| limit["provider"] == provider && limit["limit"] == "all").cloned().unwrap()
}

/// The slider asks the server's estimator. One key is one step, and the number follows.
#[tokio::test(flavor = "multi_thread")]
async fn slider_shows_the_finish_time_by_keyboard() {
    let browser = Browser::open(&stand().await.origin, "#/providers/hourly").await;
    browser.await_text("#limits-title", "Limits").await;
    browser.click("button[aria-label='Change limit all']").await;
    // Time of day and time left, of the old rate and of the new one.
    let [old, new] =
        ["del", "ins"].map(|of| format!("document.querySelector('dialog .change:nth-child(2) {of}').innerText"));
    let same = format!("return {new}.includes('(in') && {old} === {new}");
    browser.await_true(&same).await;
    browser.run("document.querySelector('dialog input[name=slider]').focus()").await;
    browser.press("\u{E014}").await;
    browser.await_true("return document.querySelector('dialog input[name=requests]').value === '2'").await;
    // Two wait, and an hour passes for each or for both.
    browser.await_true(&format!("return {new}.startsWith('at ') && {new}.includes('(in') && {old} !== {new}")).await;
    let value = "return document.querySelector('dialog input[name=slider]').getAttribute('aria-valuetext')";
    assert_eq!(browser.run(value).await, json!("2/1h"));
    browser.press("\u{E012}").await;
    browser.await_true(&same).await;
    browser.press("\u{E00C}").await;
    assert_eq!(all_of("hourly").await["rate"], "1/1h", "nothing was changed");
    browser.nothing_went_wrong(&[]).await;
}

/// On the running program: set for a time on the page, then it goes back by itself, and a later change ends it.
#[tokio::test(flavor = "multi_thread")]
async fn limit_set_for_a_time_goes_back() {
    let browser = Browser::open(&stand().await.origin, "#/providers/crowd").await;
    browser.await_text("#limits-title", "Limits").await;
    browser.click("button[aria-label='Change limit all']").await;
    browser.fill("dialog input[name=requests]", "60").await;
    // A field of local time: its keys depend on the browser's language.
    let tomorrow = Timestamp::now().checked_add(24.hours()).unwrap().strftime("%Y-%m-%dT06:00").to_string();
    let fill = "const field = document.querySelector('dialog input[name=until]'); field.value = args[0]; \
                field.dispatchEvent(new Event('input', { bubbles: true }))";
    browser.run_with(fill, json!([tomorrow])).await;
    browser.await_true("return !document.querySelector('dialog button[type=submit]').disabled").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text("#messages", "all of crowd is now 60/1s, until ").await;
    browser.await_text(".limit-list", "then back to 50/1s").await;
    let set = all_of("crowd").await;
    assert_eq!((&set["rate"], &set["then"]), (&json!("60/1s"), &json!("50/1s")));
    // The dialog says that a rate without an end stays.
    browser.click("button[aria-label='Change limit all']").await;
    browser.await_text("dialog .consequence", "no longer goes back to 50/1s").await;
    browser.press("\u{E00C}").await;
    let soon = Timestamp::now() + Duration::from_secs(5);
    let answer = sluicegate(&["limits", "set", "crowd", "all", "70/1s", "--until", &soon.to_string()]).await;
    assert!(answer.contains("60/1s → 70/1s until ") && answer.contains("then back to 50/1s"), "{answer}");
    // The page may not have read the rate of a few seconds.
    browser
        .await_true(
            "const list = document.querySelector('.limit-list').innerText; return list.includes('50/1s') && !list.includes('then back')",
        )
        .await;
    let history = sluicegate(&["limits", "history", "crowd", "--json"]).await;
    let history: Value = serde_json::from_str(&history).unwrap();
    let back: Vec<&Value> = history["changes"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|change| change["what"].as_str().unwrap().contains("max_requests 70 → 50, went back as planned"))
        .collect();
    assert_eq!(back.len(), 1, "{history}");
    assert!(back[0]["who"].as_str().unwrap().starts_with("worker "), "{history}");
    browser.nothing_went_wrong(&[]).await;
}

/// The suggestion opens the dialog with its rate. The operator confirms it, or does not.
#[tokio::test(flavor = "multi_thread")]
async fn suggested_rate_opens_the_dialog() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "#/providers/running").await;
    browser.await_text(".throttled", "34 × 429 in the last hour; the largest window without one was 600/1m.").await;
    browser.click(".throttled button").await;
    browser.await_text("dialog h2", "Change near of running").await;
    let value =
        "return ['requests', 'length', 'unit'].map((name) => document.querySelector(`dialog [name=${name}]`).value)";
    assert_eq!(browser.run(value).await, json!(["600", "1", "min"]));
    browser.await_text("dialog .finish", "120 payments miss the cut-off at 18:00 UTC instead of 3,120.").await;
    browser.press("\u{E00C}").await;
    browser.visit("#/providers/idle").await;
    browser.await_text("#limits-title", "Limits").await;
    assert_eq!(browser.run("return document.querySelector('.throttled')").await, Value::Null);
    browser.nothing_went_wrong(&[]).await;
}
