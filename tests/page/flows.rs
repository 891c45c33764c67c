//! Flows of an operator on a bad day, clicked through against the real program: limits, pauses, reviews and replays.

use std::time::Instant;

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::stand::{AWAY, LOSSY, STEADY, Stand};

async fn stand() -> &'static Stand {
    tokio::task::spawn_blocking(Stand::shared).await.unwrap()
}

/// Runs a command of the program while the browser is open.
async fn beside<T: Send + 'static>(act: impl FnOnce(&'static Stand) -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(move || act(Stand::shared())).await.unwrap()
}

fn card(provider: &str) -> String {
    format!("article[aria-labelledby='card-{provider}']")
}

#[tokio::test(flavor = "multi_thread")]
async fn limit_change_shows_a_preview_first() {
    let browser = Browser::open(&stand().await.origin, "").await;
    browser.click(&format!("{} h3 a", card("minute"))).await;
    browser.await_text("h1", "minute").await;
    browser.await_text("#limits-title", "Limits").await;
    browser.click("button[aria-label='Change limit all']").await;
    browser.await_text("dialog", "The limit already has this value").await;
    let confirm = "return document.querySelector('dialog button[type=submit]').disabled";
    assert_eq!(browser.run(confirm).await, json!(true), "nothing to confirm yet");
    browser.fill("dialog input[name=requests]", "2").await;
    browser.await_text("dialog", "Set to 2/1m").await;
    // The dry run has returned and has changed nothing.
    browser.await_true("return !document.querySelector('dialog button[type=submit]').disabled").await;
    browser.await_text("dialog .changes", " (in ").await;
    assert_eq!(beside(|stand| stand.row("minute")).await["limit"][0]["max_requests"], 1);
    browser.fill("dialog input[name=because]", "they raised it").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text("#messages", "all of minute is now 2/1m").await;
    browser.await_text("#limits-title ~ .limit-list", "2/1m").await;
    assert_eq!(beside(|stand| stand.row("minute")).await["limit"][0]["max_requests"], 2);
    browser.nothing_went_wrong(&[]).await;
}

/// A limit of requests in flight has no window to enter.
#[tokio::test(flavor = "multi_thread")]
async fn requests_in_flight_change_without_a_window() {
    let browser = Browser::open(&stand().await.origin, "#/providers/steady").await;
    browser.await_text("#limits-title ~ .limit-list", "9 at once").await;
    browser.click("button[aria-label='Change limit slots']").await;
    browser.await_text("dialog .rate", "at once").await;
    let fields =
        "return [...document.querySelectorAll('dialog .rate input, dialog .rate select')].map((field) => field.name)";
    assert_eq!(browser.run(fields).await, json!(["requests"]));
    for (requests, words) in [("x", "Enter a whole number of requests"), ("4", "Requests in flight stay")] {
        browser.fill("dialog input[name=requests]", requests).await;
        browser.await_text("dialog .consequence", words).await;
    }
    browser.await_text("dialog .changes", "4 at once").await;
    browser.await_true("return !document.querySelector('dialog button[type=submit]').disabled").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text("#messages", "slots of steady is now 4 at once").await;
    browser.await_text("#limits-title ~ .limit-list", "4 at once").await;
    let limits = beside(|stand| stand.row("steady")).await["limit"].take();
    let slots = limits.as_array().unwrap().iter().find(|limit| limit["name"] == "slots").unwrap();
    assert_eq!((&slots["max_requests"], &slots["window_ms"]), (&json!(4), &Value::Null));
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_limit_is_rejected_in_the_dialog() {
    let browser = Browser::open(&stand().await.origin, "#/providers/steady").await;
    browser.click("button[aria-label='Change limit all']").await;
    for (requests, text) in [("0", "Zero closes the limit"), ("x", "Enter whole numbers")] {
        browser.fill("dialog input[name=requests]", requests).await;
        browser.await_text("dialog .consequence", text).await;
    }
    assert_eq!(browser.run("return document.querySelector('dialog button[type=submit]').disabled").await, json!(true));
    browser.fill("dialog input[name=requests]", "999999999").await;
    browser
        .await_true("const said = document.querySelector('dialog .problem[role=alert]'); return said.innerText !== ''")
        .await;
    assert_eq!(browser.run("return document.querySelector('dialog button[type=submit]').disabled").await, json!(true));
    browser.nothing_went_wrong(&["400 (Bad Request)"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_provider_is_paused_and_resumed() {
    let browser = Browser::open(&stand().await.origin, "").await;
    let steady = card("steady");
    // It has nothing to send, and idle providers are folded.
    browser.click(".lanes.idle > summary").await;
    browser.click("button[aria-label='Pause steady']").await;
    browser.await_text("dialog", "no new request is started").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text(&format!("{steady} .chip"), "Paused").await;
    assert_eq!(beside(|stand| stand.row("steady")).await["paused"], true);
    browser.run("scrollTo(0, 0)").await;
    browser.click("button[aria-label='Resume steady']").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_true("return document.querySelector(\"button[aria-label='Pause steady']\") !== null").await;
    assert_eq!(beside(|stand| stand.row("steady")).await["paused"], false);
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn payment_is_found_with_its_timeline() {
    let browser = Browser::open(&stand().await.origin, "#/jobs").await;
    browser.fill(".filters input[name=search]", "steady-3").await;
    browser.click(".filters button[type=submit]").await;
    browser.await_true("return document.querySelectorAll('tbody tr').length === 1").await;
    browser.await_text("tbody", "EUR 37.50").await;
    browser.click("tbody a[href='#/jobs/steady-3']").await;
    browser.await_text("h1", "steady-3").await;
    for text in ["Received", "Sent", "Response: accepted", "Succeeded"] {
        browser.await_text(".timeline", text).await;
    }
    // A waiting payment names the cause of its wait.
    browser.visit("#/jobs?state=waiting&provider=hourly").await;
    browser
        .await_true("return document.querySelectorAll('tbody a.none, tbody a[href^=\"#/jobs/hourly-\"]').length > 0")
        .await;
    browser.click("tbody a[href^='#/jobs/hourly-']").await;
    browser.await_text("h1", "hourly-").await;
    browser.await_true("return document.querySelector('.stands .summary')?.innerText.length > 20").await;
    browser.await_text(".stands", "limit").await;
    // A filter by state shows the ledger's payments.
    browser.visit("#/jobs?state=succeeded&provider=steady").await;
    let rows = format!("return document.querySelectorAll('tbody tr').length === {STEADY}");
    browser.await_true(&rows).await;
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_review_is_resolved() {
    let browser = Browser::open(&stand().await.origin, "").await;
    browser.click(&format!("{} a[href='#/attention?state=review&provider=lossy']", card("lossy"))).await;
    browser.await_true(&format!("return document.querySelectorAll('tbody tr').length === {LOSSY}")).await;
    browser.click("button[aria-label='Resolve lossy-2']").await;
    browser.await_text("dialog", "lossy-2, EUR 25.00 at lossy").await;
    browser.click("dialog input[value=succeeded]").await;
    browser.fill("dialog input[name=reference]", "ch_looked_up").await;
    browser.fill("dialog input[name=because]", "seen in their dashboard").await;
    browser.await_text("dialog button[type=submit]", "Resolve as succeeded").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text("#messages", "lossy-2 is now succeeded").await;
    browser.await_true(&format!("return document.querySelectorAll('tbody tr').length === {}", LOSSY - 1)).await;
    let job = beside(|stand| stand.job("lossy-2")).await;
    assert_eq!((&job["state"], &job["provider_reference"]), (&json!("succeeded"), &json!("ch_looked_up")));
    assert_eq!(job["audit"][0]["because"], "seen in their dashboard");
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_payments_are_replayed_at_a_rate() {
    let browser = Browser::open(&stand().await.origin, "#/attention?state=dead&provider=away").await;
    browser.await_true(&format!("return document.querySelectorAll('tbody tr').length === {AWAY}")).await;
    // The number of payments is shown before the action.
    browser.await_text("a[href='#/attention?state=dead&provider=away'] .badge", &AWAY.to_string()).await;
    browser.click("//button[starts-with(text(), 'All ')]").await;
    browser.click("//div[@class='bulk']//button[text()='Replay']").await;
    browser.await_text("dialog button[type=submit]", &format!("Replay: {AWAY} payments")).await;
    browser.click("//dialog//button[text()='Cancel']").await;
    browser.await_true("return document.querySelector('dialog[open]') === null").await;
    let _back = beside(Stand::away_is_back).await;
    // Replays one payment first, then the rest at two a second.
    browser.click("button[aria-label='Replay away-1']").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_true(&format!("return document.querySelectorAll('tbody tr').length === {}", AWAY - 1)).await;
    browser.click("//button[text()='Pick this page']").await;
    browser.click("//div[@class='bulk']//button[text()='Replay']").await;
    browser.fill("dialog input[name=rate]", "2").await;
    browser.fill("dialog input[name=because]", "they are back").await;
    browser.await_text("dialog button[type=submit]", "Replay: 3 payments").await;
    browser.await_true("return !document.querySelector('dialog button[type=submit]').disabled").await;
    let began = Instant::now();
    browser.click("dialog button[type=submit]").await;
    browser.await_text(".view-head", "Finished").await;
    // The first at once, the last after two halves of a second. Without the rate it would be earlier.
    assert!(began.elapsed().as_millis() >= 1_000, "{:?}", began.elapsed());
    browser.visit("#/attention?state=dead&provider=away").await;
    browser.await_text("main", "Nothing is dead").await;
    beside(|stand| stand.await_jobs("away", "succeeded", AWAY)).await;
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_and_backends_are_shown() {
    let stand = stand().await;
    let browser = Browser::open(&stand.origin, "#/workers").await;
    browser.await_true("return document.querySelectorAll('tbody tr').length === 1").await;
    browser.await_text("tbody", "Ready").await;
    browser.await_text("tbody", env!("CARGO_PKG_VERSION")).await;
    for engine in ["Database", "Limiter"] {
        browser.await_text(&format!("article[aria-label={engine}]"), "Available").await;
    }
    // The door is the ledger: there is no broker.
    browser.await_true("return document.querySelector('article[aria-label=Queue]') === null").await;
    browser.nothing_went_wrong(&[]).await;
}
