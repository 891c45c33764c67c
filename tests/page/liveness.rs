//! Polling of the page: it updates without a reload, pauses while the tab is hidden, and reports an unreachable server.

use std::time::Duration;

use serde_json::json;

use crate::browser::Browser;
use crate::canned::Canned;

#[tokio::test(flavor = "multi_thread")]
async fn hidden_page_pauses_polling() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text("main", "429s").await;
    canned.await_questions(3).await;
    let handle = browser.cover().await;
    browser.await_true("return document.hidden").await;
    // A request in flight may still end.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let hidden = canned.asked();
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(canned.asked(), hidden, "requests were sent while the tab was hidden");
    browser.uncover(&handle).await;
    browser.await_true("return !document.hidden").await;
    canned.await_questions(2).await;
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_server_is_shown_with_its_time() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text("main", "429s").await;
    browser.await_text(".pulse", "Live").await;
    // Chromium cuts the connection; the server keeps its port.
    let offline =
        |offline: bool| json!({"offline": offline, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1});
    browser.cdp("Network.emulateNetworkConditions", offline(true)).await;
    browser.await_text("#banner", "The server cannot be reached since").await;
    browser.await_text(".pulse", "No response").await;
    assert_eq!(browser.run("return document.getElementById('banner').getAttribute('role')").await, json!("alert"));
    browser.await_text("main", "12,000").await;
    browser.cdp("Network.emulateNetworkConditions", offline(false)).await;
    browser.await_text(".pulse", "Live").await;
    assert_eq!(browser.text("#banner").await, "");
    browser.nothing_went_wrong(&["ERR_INTERNET_DISCONNECTED"]).await;
}

/// The server responds, but its backends do not. No figure is zero or green, and no view loads for ever.
#[tokio::test(flavor = "multi_thread")]
async fn unavailable_backends_are_shown_in_every_view() {
    let canned = Canned::start_troubled().await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text("main", "at least 1,332").await;
    browser.await_text("main", "the broker is unreachable").await;
    browser.await_text(".pulse", "2 backends unavailable").await;
    assert_eq!(browser.run("return document.querySelector('.pulse').className").await, json!("pulse lost"));
    let figures = browser.run("return [...document.querySelectorAll('main dd')].map((dd) => dd.innerText)").await;
    assert!(!figures.as_array().unwrap().contains(&json!("0")), "{figures}");
    for hash in ["#/jobs", "#/workers", "#/attention?state=review", "#/jobs/p1"] {
        browser.visit(hash).await;
        browser.await_text("main", "the database does not answer").await;
        browser.await_text("main", "Not loaded yet; retrying every 2 s.").await;
    }
    browser.nothing_went_wrong(&["503 (Service Unavailable)"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn theme_follows_the_system_until_chosen() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    let background = "return getComputedStyle(document.body).backgroundColor";
    let system = async |theme: &str| {
        browser
            .cdp("Emulation.setEmulatedMedia", json!({"features": [{"name": "prefers-color-scheme", "value": theme}]}))
            .await;
    };
    system("light").await;
    let light = browser.run(background).await;
    system("dark").await;
    let dark = browser.run(background).await;
    assert_ne!(light, dark);
    // Automatic, light, dark, and automatic again.
    browser.click(".theme").await;
    assert_eq!(browser.run(background).await, light);
    browser.run("location.reload()").await;
    browser.await_text("main", "429s").await;
    assert_eq!(browser.run(background).await, light, "the chosen theme is lost");
    browser.click(".theme").await;
    system("light").await;
    assert_eq!(browser.run(background).await, dark);
    browser.click(".theme").await;
    assert_eq!(browser.run(background).await, light);
    browser.nothing_went_wrong(&[]).await;
}
