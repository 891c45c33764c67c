//! Displayed estimates and unknown figures: limits per account, unrecorded payments, unavailable backends, old counts,
//! and the order of a payment's timeline.

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::canned::Canned;

fn card(provider: &str) -> String {
    format!("article[aria-labelledby='card-{provider}']")
}

#[tokio::test(flavor = "multi_thread")]
async fn account_limits_mark_clear_time_as_estimate() {
    let canned = Canned::start_few().await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text(&card("running"), "at least 34 s\ndepends on the accounts").await;
    browser.await_text(&card("waiting-for-limit"), "about 7 min 8 s\ndepends on the accounts").await;
    assert!(!browser.text(&card("cold")).await.contains("depends"), "nothing depends on accounts there");
    browser.visit("#/providers/waiting-for-limit").await;
    browser.await_text(".depends", "at the rate of the last minutes: limit per-account").await;
    // Before a change: the effect of an account limit is unknown; for another limit, the lower bound is known.
    browser.visit("#/providers/running").await;
    browser.await_text(".depends", "limit per-account counts each account or reference separately").await;
    browser.await_text("#limits-title", "Limits").await;
    browser.click("button[aria-label='Change limit per-account']").await;
    browser.fill("dialog input[name=requests]", "0").await;
    browser.await_true("return !document.querySelector('dialog button[type=submit]').disabled").await;
    let changes = browser.text("dialog .changes").await;
    assert_eq!(changes.matches("depends on accounts").count(), 2, "{changes}");
    browser.click("//dialog//button[text()='Cancel']").await;
    browser.click("button[aria-label='Change limit near']").await;
    browser.fill("dialog input[name=requests]", "200").await;
    browser.await_text("dialog .changes", "not before 2 Mar, 12:01 UTC (in at least 1 min)").await;
    browser.await_text("dialog", "depends on their accounts and references").await;
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unrecorded_queued_jobs_are_shown() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "#/jobs?state=waiting&provider=paused").await;
    let words = "80 more are in the queue of paused: no worker has recorded them yet.";
    browser.await_text(".queued", words).await;
    browser.visit("#/jobs?state=waiting&provider=paused&account=shop").await;
    browser.await_text(".queued", "their ids and accounts are unknown").await;
    for elsewhere in ["#/jobs?state=succeeded&provider=paused", "#/jobs?state=waiting&provider=running"] {
        browser.visit(elsewhere).await;
        browser.await_text("tbody", "KWD").await;
        assert_eq!(browser.text(".queued").await, "", "{elsewhere}");
    }
    browser.visit("#/jobs/paused-0042").await;
    browser.await_text("main", "Not in the ledger").await;
    browser.await_text("main", "In queues, not recorded yet: 80 at paused").await;
    browser.nothing_went_wrong(&["404 (Not Found)"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_payments_are_named() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    for list in
        ["#/attention?state=review&provider=torn", "#/attention?state=dead&provider=torn", "#/jobs?provider=torn"]
    {
        browser.visit(list).await;
        browser
            .await_text(".unreadable", "The row of payment torn-1 cannot be read: column `wake_at` is no instant")
            .await;
        // A page of unreadable rows alone does not hide later pages.
        browser.await_true("return document.querySelector('.pages button:last-child').disabled === false").await;
    }
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_figures_are_marked_unknown() {
    let canned = Canned::start_few().await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text(".counted", "Payments in the ledger were counted 2 min 5 s ago").await;
    browser.await_text(&card("probing"), "Invalid configuration, the last valid one applies: limit all").await;
    browser.visit("#/providers/backend-unavailable").await;
    browser.await_text("#limits-title", "Limits").await;
    let feet = "return [...document.querySelectorAll('.limit-foot')].map((foot) => foot.firstElementChild.innerText)";
    browser.await_true("return document.querySelectorAll('.limit-foot').length === 3").await;
    let silent = "usage unknown: the limiter does not respond";
    assert_eq!(
        browser.run(feet).await,
        json!([silent, "usage unknown: the limit is switched off", "counted per reference"])
    );
    browser.await_text("#changes-title ~ *", "ticket 4711").await;
    browser.await_text("#waits-title ~ *", "Only the wait while the payment is active in a worker").await;
    browser.visit("#/workers").await;
    browser.await_text("article[aria-label=Limiter]", "No answer in time").await;
    browser.await_text("article[aria-label=Database]", "Round trip under 0.01 ms").await;
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attempts_are_shown_where_there_are_any() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "#/jobs?provider=fresh").await;
    browser.await_text("tbody", "tried").await;
    let titles = "return [...document.querySelectorAll('thead th')].map((title) => title.textContent)";
    let columns = json!(["Pick", "Payment", "State", "Amount", "Provider", "Account", "Created", "Reason"]);
    assert_eq!(browser.run(titles).await, columns);
    browser.visit("#/jobs?provider=fresh&account=tried").await;
    browser.await_text("thead", "Attempts").await;
    let cells = "return [...document.querySelectorAll('td[data-title=Attempts]')].map((cell) => cell.textContent)";
    assert_eq!(browser.run(cells).await, json!(["", "3"]));
    browser.nothing_went_wrong(&[]).await;
}

/// Bursts may be faster than a mean rate, so the limit is shown as its row has it.
#[tokio::test(flavor = "multi_thread")]
async fn limits_are_shown_as_they_are_written() {
    let canned = Canned::start_few().await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text(&format!("{} figcaption", card("cold")), "limit 100/1m").await;
    browser.await_text(&format!("{} .limits", card("cold")), "100/1m").await;
    let said = "return document.querySelector(\"[aria-labelledby='card-running'] .spark\").getAttribute('aria-label')";
    browser.await_true(&format!("{said}.includes('limit 100/1s')")).await;
    let words = browser.text("main").await;
    assert!(!words.contains("allowed") && !words.contains(" per 1"), "{words}");
    browser.visit("#/providers/running").await;
    browser.await_text("#rate-title ~ .readout", "limit 100/1s").await;
    // A recorded rate is that of the limit, or of another one in its time.
    browser.click("#rate-title ~ details:last-of-type summary").await;
    browser.await_text("#rate-title ~ details:last-of-type tbody", "100/1s").await;
    let script = "const l = await import('/assets/js/limits.js'); return args[0].map((mean) => l.limitWas(mean, { limits: args[1] }))";
    let limits = json!([{"max_requests": 600, "window_ms": 60_000}, {"max_requests": 5, "window_ms": null}]);
    let found = browser.run_with(script, json!([[10.0, 20.0, null], limits])).await;
    assert_eq!(found, json!(["600/1m", "20.0/s on average", "–"]));
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn card_shows_the_tightest_limits() {
    let canned = Canned::start_few().await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text(&card("cold"), "tight").await;
    let names = "return [...document.querySelectorAll(`${args[0]} .limit-name`)].map((name) => name.innerText)";
    assert_eq!(browser.run_with(names, json!([card("cold")])).await, json!(["tight", "middling"]));
    browser.nothing_went_wrong(&[]).await;
}

/// Titles and texts of a payment's timeline, in their order.
async fn timeline(browser: &Browser, id: &str) -> Vec<String> {
    browser.visit(&format!("#/jobs/{id}")).await;
    browser.await_text("h1", id).await;
    browser.await_text(".timeline", "Received").await;
    // The explanation is loaded after the payment, and adds what the payment waited for.
    browser.await_true("return document.querySelector('.stands .summary') !== null").await;
    let script = "return [...document.querySelectorAll('.timeline > li')].map((entry) => entry.innerText)";
    let entries = browser.run(script).await;
    let plain = |entry: &Value| entry.as_str().unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    entries.as_array().unwrap().iter().map(plain).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn timeline_shows_only_what_happened() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    let entries = timeline(&browser, "succeeded").await;
    let starts = [
        "Received",
        "Waited for limit per-account For 2 min 4 s, until 11:59:59 UTC.",
        "Sent",
        "Response: accepted",
        "Succeeded",
    ];
    assert_eq!(entries.len(), starts.len() + 1, "{entries:#?}");
    for (entry, words) in entries.iter().zip(starts) {
        assert!(entry.contains(words) && entry.contains(" UTC"), "{words}: {entries:#?}");
    }
    assert!(!browser.text("#facts-title ~ *").await.contains("May have been charged"), "it was charged");
    // No request left the worker, so there is no response.
    let text = timeline(&browser, "dead").await.join("\n");
    assert!(text.contains("Could not be sent") && text.contains("Connection refused."), "{text}");
    assert!(!text.contains("Response") && !text.contains("Sent "), "{text}");
    // The text of the current state appears once.
    timeline(&browser, "review").await;
    browser.await_text(".timeline", "Waits for manual review.").await;
    assert_eq!(browser.text(".checks .here .check-words").await, "");
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn page_works_with_credentials_in_the_url() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.goto(&canned.origin.replace("http://", "http://alice:secret@")).await;
    browser.await_text("main", "429s").await;
    browser.await_text(".pulse", "Live").await;
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keyboard_search_focuses_the_result() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text("main", "429s").await;
    browser.press("/").await;
    browser.fill("#search", "succeeded").await;
    browser.press("\u{E007}").await;
    browser.await_text(".timeline", "Received").await;
    browser.await_true("return document.activeElement.matches('main h1')").await;
    assert_eq!(browser.text(":focus").await, "succeeded");
    browser.nothing_went_wrong(&[]).await;
}
