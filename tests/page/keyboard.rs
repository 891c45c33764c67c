//! Use of the page by keyboard alone: the order of the focus, the focus in dialogs, and that new data from the server
//! do not move it.

use serde_json::json;

use crate::browser::Browser;
use crate::canned::Canned;

const TAB: &str = "\u{E004}";
const ENTER: &str = "\u{E007}";
const ESCAPE: &str = "\u{E00C}";

/// Presses Tab until the element has the focus.
async fn tab_to(browser: &Browser, css: &str) {
    for _ in 0..60 {
        browser.press(TAB).await;
        let there = browser.run_with("return document.activeElement?.matches(args[0]) ?? false", json!([css])).await;
        if there == json!(true) {
            let ring = "const s = getComputedStyle(document.activeElement); return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2";
            assert_eq!(browser.run(ring).await, json!(true), "`{css}` has the focus without a visible outline");
            return;
        }
    }
    panic!("Tab does not reach `{css}`");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_can_be_changed_without_a_mouse() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text("main", "429s").await;
    browser.press(TAB).await;
    browser.await_text(":focus", "Skip to the content").await;
    browser.press(ENTER).await;
    browser.await_true("return document.activeElement.id === 'main' && location.hash === ''").await;
    tab_to(&browser, "a[href='#/providers/running']").await;
    browser.press(ENTER).await;
    browser.await_text("h1:focus", "running").await;
    browser.await_text("#limits-title", "Limits").await;
    tab_to(&browser, "[aria-label='Change limit near']").await;
    browser.press(ENTER).await;
    browser.await_true("return document.activeElement.name === 'requests'").await;
    // Tab cycles within the dialog and does not reach the page behind it.
    for _ in 0..12 {
        browser.press(TAB).await;
        let inside = "const at = document.activeElement; return at === document.body || at.closest('dialog') !== null";
        assert_eq!(browser.run(inside).await, json!(true));
    }
    browser.press(ESCAPE).await;
    browser.await_true("return document.querySelector('dialog') === null").await;
    let back = "return document.activeElement.getAttribute('aria-label')";
    assert_eq!(browser.run(back).await, json!("Change limit near"), "the focus is not where it came from");
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slash_key_searches_payments_and_providers() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "#/workers").await;
    browser.await_text("main", "Round trip").await;
    browser.press("/").await;
    browser.await_true("return document.activeElement.id === 'search'").await;
    browser.press("a/b").await;
    assert_eq!(
        browser.run("return document.activeElement.value").await,
        json!("a/b"),
        "in a field, the slash is a character"
    );
    browser.fill("#search", "waiting").await;
    browser.press(ENTER).await;
    browser.await_text("h1", "waiting").await;
    assert_eq!(browser.run("return location.hash").await, json!("#/jobs/waiting"));
    browser.press("/idle").await;
    browser.press(ENTER).await;
    browser.await_true("return location.hash === '#/providers/idle'").await;
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refresh_keeps_focus_text_and_scroll() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "#/jobs").await;
    browser.await_text("main", "Attempts").await;
    browser.fill("input[name=account]", "acct_half_typ").await;
    browser.run("document.querySelector('input[name=account]').setSelectionRange(2, 5); window.row = document.querySelector('tbody tr'); document.body.style.minHeight = '4000px'; scrollTo(0, 300)").await;
    canned.await_questions(6).await;
    let now = browser.run("const at = document.activeElement; return [at.name, at.value, at.selectionStart, at.selectionEnd, scrollY, document.querySelector('tbody tr') === window.row]").await;
    assert_eq!(now, json!(["account", "acct_half_typ", 2, 5, 300, true]));
    browser.nothing_went_wrong(&[]).await;
}
