//! Decisions about many payments at once: ticks, the dialog that counts first, and the progress and report of a batch.

use serde_json::json;

use crate::audit::{CONTRAST, STRUCTURE};
use crate::browser::Browser;
use crate::canned::Canned;
use crate::canned_batches::{MATCHING, TOO_LATE};

const ESCAPE: &str = "\u{E00C}";
const SPACE: &str = " ";
const IS_READY: &str = "return !document.querySelector('dialog button[type=submit]').disabled";
const IS_DISABLED: &str = "return document.querySelector('dialog button[type=submit]').disabled";

/// The checkbox of the nth row, from 1.
fn tick(row: usize) -> String {
    format!("tbody tr:nth-child({row}) input[name=pick]")
}

async fn reviews() -> (Canned, Browser) {
    let canned = Canned::start_full().await;
    let browser = Browser::open(&canned.origin, "#/jobs?state=review").await;
    browser.await_true("return document.querySelectorAll('tbody tr').length === 50").await;
    (canned, browser)
}

async fn focus(browser: &Browser, css: &str) {
    browser.run_with("document.querySelector(args[0]).focus()", json!([css])).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_ticked_by_mouse_and_keyboard() {
    let (_canned, browser) = reviews().await;
    browser.await_text(".bulk [role=status]", "0 payments picked").await;
    browser.click(&tick(2)).await;
    browser.await_text(".bulk [role=status]", "1 payment picked").await;
    // A range, from the last row that was ticked.
    let with_shift = "document.querySelector(args[0]).dispatchEvent(new MouseEvent('click', { shiftKey: true, bubbles: true, cancelable: true }))";
    browser.run_with(with_shift, json!([tick(6)])).await;
    browser.await_text(".bulk [role=status]", "5 payments picked").await;
    focus(&browser, &tick(8)).await;
    browser.press(SPACE).await;
    browser.await_text(".bulk [role=status]", "6 payments picked").await;
    focus(&browser, &tick(10)).await;
    browser.press_with_shift(SPACE).await;
    browser.await_text(".bulk [role=status]", "8 payments picked").await;
    let ticked =
        "return [...document.querySelectorAll('input[name=pick]')].flatMap((box, at) => (box.checked ? [at + 1] : []))";
    assert_eq!(browser.run(ticked).await, json!([2, 3, 4, 5, 6, 8, 9, 10]));
    // The focus stays, also when the list is loaded again.
    assert_eq!(
        browser.run_with("return document.activeElement.matches(args[0])", json!([tick(10)])).await,
        json!(true)
    );
    // The header would cover the button.
    browser.run("scrollTo(0, 0)").await;
    browser.click("//button[text()='Pick this page']").await;
    browser.await_text(".bulk [role=status]", "50 payments picked").await;
    browser.click("//button[text()='Pick none']").await;
    browser.await_text(".bulk [role=status]", "0 payments picked").await;
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn decisions_fit_the_states_that_are_ticked() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "#/jobs").await;
    browser.await_text(".bulk", "0 payments picked").await;
    let offered = "return [...document.querySelectorAll('.bulk .push ~ button')].map((button) => button.textContent)";
    assert_eq!(browser.run(offered).await, json!([]));
    // A finished payment cannot be ticked.
    let ticks =
        "return [...document.querySelectorAll('input[name=pick]')].map((box) => box.getAttribute('aria-label'))";
    assert_eq!(browser.run(ticks).await, json!(["Pick waiting", "Pick review", "Pick dead"]));
    browser.click("[aria-label='Pick dead']").await;
    browser.await_text(".bulk", "1 payment picked").await;
    assert_eq!(browser.run(offered).await, json!(["Replay", "Discard"]));
    browser.click("[aria-label='Pick waiting']").await;
    browser.await_text(".bulk", "2 payments picked").await;
    assert_eq!(browser.run(offered).await, json!(["Cancel", "Replay", "Discard"]));
    browser.visit("#/jobs?state=review").await;
    browser.click("//button[starts-with(text(), 'All ')]").await;
    browser.await_text(".bulk [role=status]", "All at least 100,000 that match").await;
    assert_eq!(browser.run(offered).await, json!(["Resolve as succeeded", "Resolve as declined", "Charge again"]));
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batch_is_confirmed_with_what_was_counted() {
    let (canned, browser) = reviews().await;
    for row in 1..=3 {
        browser.click(&tick(row)).await;
    }
    browser.click("//button[text()='Resolve as declined']").await;
    for text in ["EUR 311.76", "KWD 1.250", "Left as they are: 2 payments", "pay-7", "Takes about"] {
        browser.await_text("dialog .dialog-body", text).await;
    }
    browser.await_text("dialog button[type=submit]", "Resolve as declined: 3 payments").await;
    browser.fill("dialog input[name=rate]", "0").await;
    browser.await_true(IS_DISABLED).await;
    browser.fill("dialog input[name=rate]", "20").await;
    browser.await_true(IS_READY).await;
    // The browser asks for the reason; nothing is sent without one.
    browser.click("dialog button[type=submit]").await;
    assert_eq!(canned.batches.last(""), json!(null));
    browser.fill("dialog input[name=because]", "their report of today").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text("h1", "Resolve as declined: 24 payments").await;
    let (counted, sent) = (canned.batches.last("preview"), canned.batches.last(""));
    assert_eq!(counted["selection"]["ids"].as_array().unwrap().len(), 3);
    let expected = json!({
        "decision": "declined", "selection": counted["selection"], "digest": "digest-of-3", "rate": "20/1s",
        "because": "their report of today",
    });
    assert_eq!(sent, expected);
    // The link leads to the progress, which can be stopped.
    assert_eq!(browser.run("return location.hash").await, json!("#/batches/running"));
    browser.await_text(".batch-progress", "about").await;
    let bar = browser.run("const bar = document.querySelector('progress'); return [bar.value, bar.max]").await;
    assert_eq!(bar, json!([12, MATCHING]));
    browser.click("[aria-label='Stop this batch']").await;
    browser.await_text("dialog", "10 payments are changed already and stay so").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text(".view-head", "Stopped").await;
    browser.await_true("return document.querySelector('[aria-label=\"Stop this batch\"]') === null").await;
    browser.await_text("main", "by bob@desk").await;
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn charging_again_needs_the_number() {
    let (canned, browser) = reviews().await;
    browser.click("//button[starts-with(text(), 'All ')]").await;
    browser.click("//button[text()='Charge again']").await;
    browser.await_text("dialog", &format!("Type the number of payments, {MATCHING}, to charge them again")).await;
    browser.fill("dialog input[name=because]", "they have no record of them").await;
    assert_eq!(browser.run(IS_DISABLED).await, json!(true));
    for (typed, script) in [("23", IS_DISABLED), ("24", IS_READY)] {
        browser.fill("dialog input[name=typed]", typed).await;
        browser.await_true(script).await;
    }
    browser.click("dialog button[type=submit]").await;
    browser.await_text("h1", "24 payments").await;
    let sent = canned.batches.last("");
    assert_eq!((&sent["confirm_jobs"], &sent["selection"]), (&json!(24), &json!({"filter": {"state": "review"}})));
    browser.nothing_went_wrong(&[]).await;
}

/// One payment is charged again only when its id was typed again.
#[tokio::test(flavor = "multi_thread")]
async fn charging_one_payment_again_needs_its_id() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "#/jobs/review").await;
    browser.click(".view-head button.primary").await;
    assert_eq!(browser.run(IS_DISABLED).await, json!(true));
    browser.click("dialog input[value=declined]").await;
    browser.await_true(IS_READY).await;
    browser.click("dialog input[value=resend]").await;
    browser.await_true(IS_DISABLED).await;
    for (typed, script) in [("revie", IS_DISABLED), ("review", IS_READY)] {
        browser.fill("dialog input[name=typed]", typed).await;
        browser.await_true(script).await;
    }
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_set_is_counted_again() {
    let (canned, browser) = reviews().await;
    browser.click(&tick(1)).await;
    browser.click("//button[text()='Charge again']").await;
    browser.fill("dialog input[name=because]", TOO_LATE).await;
    browser.fill("dialog input[name=typed]", "1").await;
    browser.await_true(IS_READY).await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text("dialog .problem[role=alert]", "have changed since the preview").await;
    browser.await_text("dialog .problem[role=alert]", "counted again").await;
    // The number that was typed is not that of the new set.
    browser.await_text("dialog button[type=submit]", "2 payments").await;
    assert_eq!(browser.run(IS_DISABLED).await, json!(true));
    browser.fill("dialog input[name=typed]", "2").await;
    browser.await_true(IS_READY).await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text("h1", "24 payments").await;
    assert_eq!(canned.batches.last("")["digest"], "digest-of-2");
    browser.nothing_went_wrong(&["409 (Conflict)"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_can_be_read_in_both_themes_and_on_a_phone() {
    let (_canned, browser) = reviews().await;
    let fits = "const wide = document.documentElement.scrollWidth; return wide <= innerWidth ? [] : [wide]";
    for theme in ["light", "dark"] {
        let features = json!([{"name": "prefers-color-scheme", "value": theme}]);
        browser.cdp("Emulation.setEmulatedMedia", json!({ "features": features })).await;
        for width in [390, 1_280] {
            let screen = json!({"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 700});
            browser.cdp("Emulation.setDeviceMetricsOverride", screen).await;
            for (hash, text) in [
                ("#/batches", "Resolve as declined"),
                ("#/batches/finished", "pay-11"),
                ("#/batches/nowhere", "no batch with this id"),
            ] {
                browser.visit(hash).await;
                browser.await_text("main", text).await;
                for script in [CONTRAST, STRUCTURE, fits] {
                    assert_eq!(browser.run(script).await, json!([]), "{hash} {theme} {width}");
                }
            }
            browser.visit("#/jobs?state=review").await;
            browser.click("//button[starts-with(text(), 'All ')]").await;
            browser.click("//button[text()='Charge again']").await;
            browser.await_text("dialog", "Left as they are").await;
            for script in [CONTRAST, STRUCTURE, fits] {
                assert_eq!(browser.run(script).await, json!([]), "dialog {theme} {width}");
            }
            browser.press(ESCAPE).await;
            browser.await_true("return document.querySelector('dialog') === null").await;
            // The focus returns to the button.
            assert_eq!(browser.run("return document.activeElement.textContent").await, json!("Charge again"));
        }
    }
    browser.nothing_went_wrong(&["404 (Not Found)"]).await;
}
