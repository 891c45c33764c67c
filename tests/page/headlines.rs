//! A payment's own view: its headline in each state, copied texts, folded checks, and the question to the provider.

use serde_json::json;

use crate::browser::Browser;
use crate::canned::Canned;

#[tokio::test(flavor = "multi_thread")]
async fn headline_says_in_plain_words_what_happened() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    for (state, words) in [
        ("waiting", "Not charged yet, sent once: limit per-minute is in full use; starts at about 12:00:12 UTC."),
        ("sending", "Being sent since 11:57:55 UTC; no response yet."),
        ("unknown", "Unknown: sent at 11:57:55 UTC, the response 503 does not say; asked again at about 12:00:12 UTC."),
        ("review", "Unknown, a person must decide: sent at 11:57:55 UTC, the response 503 does not say."),
        ("dead", "Not charged: 1 request failed, the last at 11:57:55 UTC"),
        ("succeeded", "Charged at 12:00:00 UTC, KWD 1.250; the provider's reference is ch_1."),
        ("declined", "Declined by the provider at 12:00:00 UTC"),
        ("expired", "Expired at 12:00:00 UTC; not charged."),
        ("cancelled", "Cancelled at 12:00:00 UTC; not charged."),
    ] {
        browser.visit(&format!("#/jobs/{state}")).await;
        browser.await_text("h1", state).await;
        browser.await_text(".headline", words).await;
    }
    browser.nothing_went_wrong(&[]).await;
}

/// What is copied is what is shown: no hidden character reaches a terminal or a mail.
#[tokio::test(flavor = "multi_thread")]
async fn ids_and_questions_are_copied_as_shown() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "#/jobs/review").await;
    browser.await_text(".headline", "Unknown").await;
    browser.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }").await;
    for (what, wanted) in [("payment id", "review"), ("idempotency key", "k"), ("provider's reference", "ch_1")] {
        browser.click(&format!("//button[@aria-label=\"Copy the {what}\"]")).await;
        browser.await_true(&format!("return window.copied === '{wanted}'")).await;
        browser.await_text("#messages", &format!("The {what} is copied.")).await;
    }
    // The header would cover the button.
    browser.run("scrollTo(0, 0)").await;
    browser.click("//button[@aria-label='Copy the question']").await;
    browser.await_true("return window.copied.includes('Idempotency key')").await;
    let copied = browser.run("return window.copied").await;
    let copied = copied.as_str().unwrap();
    for part in [
        "Idempotency key: k",
        "KWD 1.250",
        "Our payment:     review",
        "2026-03-01T11:57:55.000Z, response 503",
        "\\u{202e}",
    ] {
        assert!(copied.contains(part), "{part}: {copied}");
    }
    assert!(copied.chars().all(|c| c == '\n' || !c.is_control()), "{copied}");
    // Without the right to the clipboard, the older way.
    browser.run("navigator.clipboard.writeText = async () => { throw new Error('denied'); }; document.addEventListener('copy', () => { window.copied = document.activeElement.value; })").await;
    browser.run("scrollTo(0, 0)").await;
    browser.click("//button[@aria-label='Copy the payment id']").await;
    browser.await_true("return window.copied === 'review'").await;
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn passed_checks_and_answered_questions_are_folded() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "#/jobs/waiting").await;
    browser.await_text(".passed-checks summary", "1 check passed, it is at “Limit”").await;
    let open = "return [document.querySelector('.passed-checks').open, document.querySelectorAll('.checks .passed time[datetime][title]').length]";
    assert_eq!(browser.run(open).await, json!([false, 1]));
    browser.visit("#/jobs/succeeded").await;
    browser.await_text(".fold summary", "What to ask the provider").await;
    assert_eq!(browser.run("return document.querySelector('.fold').open").await, json!(false));
    // Nothing left the worker, so the provider knows nothing.
    browser.visit("#/jobs/dead").await;
    browser.await_text(".headline", "Not charged").await;
    assert_eq!(browser.run("return document.querySelector('.ask')").await, json!(null));
    browser.nothing_went_wrong(&[]).await;
}
