//! Actions that two people decide: the list, the dialogs of the second person, and dialogs whose action awaits one.

use serde_json::json;

use crate::browser::Browser;
use crate::canned::Canned;
use crate::canned_approvals::{NEEDS_TWO, PENDING_ID, TOO_LATE};

const GONE: &str = "return document.querySelector('dialog') === null";

async fn open(hash: &str) -> (Canned, Browser) {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, hash).await;
    (canned, browser)
}

#[tokio::test(flavor = "multi_thread")]
async fn overview_leads_to_what_awaits_a_second_person() {
    let (_canned, browser) = open("").await;
    browser.await_text(".approvals-line", "4 decisions await a second person.").await;
    browser.await_text("header nav a[href='#/approvals'] .badge", "4").await;
    browser.click(".approvals-line a").await;
    browser.await_text("h1", "Approvals").await;
    browser
        .await_text(".about", "Charge again from 20 payments on, or from EUR 1,000.00 on; Change a limit always.")
        .await;
    for text in ["Charge again: 120 payments", "EUR 12,345.00, KWD 1.250", "Cancel: pay-1", "Pause all providers"] {
        browser.await_text("[aria-labelledby=pending-title]", text).await;
    }
    for text in ["Approved", "Refused", "Withdrawn", "Expired", "carol", "not today"] {
        browser.await_text("[aria-labelledby=decided-title]", text).await;
    }
    let rows = "return ['pending', 'decided'].map((name) => document.querySelectorAll(`[aria-labelledby=${name}-title] tbody tr`).length)";
    assert_eq!(browser.run(rows).await, json!([4, 4]));
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn second_person_approves_what_is_shown() {
    let (canned, browser) = open(&format!("#/approvals/{PENDING_ID}")).await;
    for text in ["Send 120 payments again at 50/1s.", "EUR 12,345.00", "Review", "by bob, role operator", "2 Mar"] {
        browser.await_text("main", text).await;
    }
    browser.click(".view-head .primary").await;
    browser.await_text("dialog", "If it was charged after all").await;
    browser.await_text("dialog", "The audit names bob and you.").await;
    // Too late: the reason is said, and the dialog stays.
    browser.fill("dialog input[name=because]", TOO_LATE).await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text("dialog .problem", "have changed since").await;
    browser.fill("dialog input[name=because]", "checked with the provider").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text("#messages", "Approved: started batch running.").await;
    browser.await_text("[aria-labelledby=decision-title]", "by alice, role admin").await;
    browser.await_text("[aria-labelledby=decision-title] a[href='#/batches/running']", "Progress").await;
    browser.await_true("return document.querySelector('.view-head button') === null").await;
    let sent = canned.approvals.last();
    assert_eq!(sent, Some(("approve".to_owned(), json!({"because": "checked with the provider"}))));
    browser.nothing_went_wrong(&["409 (Conflict)"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refusal_needs_a_reason() {
    let (canned, browser) = open("#/approvals/pause").await;
    browser.click(".view-head .danger").await;
    browser.await_text("dialog", "Nothing is changed. bob sees the reason").await;
    browser.click("dialog button[type=submit]").await;
    assert_eq!(canned.approvals.last(), None);
    browser.fill("dialog input[name=because]", "not on a Friday").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text("[aria-labelledby=decision-title]", "not on a Friday").await;
    assert_eq!(canned.approvals.last(), Some(("refuse".to_owned(), json!({"because": "not on a Friday"}))));
    browser.nothing_went_wrong(&[]).await;
}

/// Who requested it can withdraw it, and reads why the other buttons are disabled.
#[tokio::test(flavor = "multi_thread")]
async fn requester_withdraws_and_cannot_approve() {
    let (canned, browser) = open("#/approvals/own").await;
    browser.await_text("#why-not", "You cannot decide this. You requested it: another person decides.").await;
    let disabled = "return ['.primary', '.danger'].map((kind) => {
        const button = document.querySelector(`.view-head ${kind}`);
        return [button.disabled, button.title, button.getAttribute('aria-describedby')];
    })";
    let words = json!([true, "You requested it: another person decides", "why-not"]);
    assert_eq!(browser.run(disabled).await, json!([words, words]));
    browser.click("//button[text()='Withdraw']").await;
    browser.await_text("dialog", "no one has to decide any more").await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text(".view-head", "Withdrawn").await;
    assert_eq!(canned.approvals.last(), Some(("withdraw".to_owned(), json!({}))));
    // Another role is missing.
    browser.visit("#/approvals/limit").await;
    browser.await_text("#why-not", "Needs role admin.").await;
    browser.await_text("main", "100/1s").await;
    assert_eq!(browser.run("return document.querySelector('.view-head .primary').disabled").await, json!(true));
    browser.visit("#/approvals/nothing").await;
    browser.await_text("main", "There is no approval with this id").await;
    browser.nothing_went_wrong(&["404 (Not Found)"]).await;
}

/// Each dialog says that its action was stored, and leads to it. No message says that anything is done.
#[tokio::test(flavor = "multi_thread")]
async fn each_dialog_says_that_its_action_awaits_a_second_person() {
    let (_canned, browser) = open("").await;
    for (hash, button, choice) in [
        ("#/jobs/review", ".view-head button.primary", Some("dialog input[value=declined]")),
        ("#/jobs/dead", ".view-head button.primary", None),
        ("#/jobs/dead", ".view-head button.danger", None),
        ("#/jobs/waiting", ".view-head .push ~ button", None),
        ("#/providers/running", "[aria-label='Pause running']", None),
        ("#/providers/paused", "[aria-label='Resume paused']", None),
        ("#/", "[aria-label='Pause all providers']", None),
    ] {
        browser.visit(hash).await;
        browser.click(button).await;
        if let Some(choice) = choice {
            browser.click(choice).await;
        }
        awaits(&browser).await;
        browser.click("dialog button").await;
        browser.await_true(GONE).await;
    }
    browser.visit("#/providers/running").await;
    browser.click("[aria-label='Change limit near']").await;
    browser.fill("dialog input[name=requests]", "200").await;
    browser.await_text("dialog .second-person", "A second person must approve this. Nothing is changed before.").await;
    browser.await_true("return !document.querySelector('dialog button[type=submit]').disabled").await;
    awaits(&browser).await;
    browser.press("\u{E00C}").await;
    browser.await_true(GONE).await;
    // The number of payments reaches the rule, and the link leads to the approval.
    browser.visit("#/jobs?state=review").await;
    browser.click("//button[starts-with(text(), 'All ')]").await;
    browser.click("//button[text()='Charge again']").await;
    browser.await_text("dialog .second-person", "A second person must approve this").await;
    browser.fill("dialog input[name=typed]", "24").await;
    awaits(&browser).await;
    browser.click("dialog a").await;
    browser.await_true(GONE).await;
    browser.await_text("h1", "Charge again: 120 payments").await;
    assert_eq!(browser.text("#messages").await, "");
    browser.nothing_went_wrong(&[]).await;
}

/// The note before a confirmation follows the rules as the server does: from 20 payments on, or from EUR 1,000.00 on. A
/// sum of a currency that no rule names reaches them, too.
#[tokio::test(flavor = "multi_thread")]
async fn note_in_advance_follows_the_thresholds() {
    let (_canned, browser) = open("").await;
    browser.await_text(".approvals-line", "4 decisions").await;
    browser.run("import(document.querySelector('script[type=module]').src.replace('main.js', 'approvals.js')).then((module) => { window.note = module.secondPersonNote; })").await;
    browser.await_true("return window.note !== undefined").await;
    for (action, payments, sums, is_noted) in [
        ("resend", 19, "[]", false),
        ("resend", 20, "[]", true),
        ("resend", 1, "[{currency: 'EUR', amount: 99999}]", false),
        ("resend", 1, "[{currency: 'EUR', amount: 100000}]", true),
        ("resend", 1, "[{currency: 'USD', amount: 1}]", true),
        ("resend", 19, "[{currency: 'EUR', amount: 99999}, {currency: 'USD', amount: 1}]", true),
        ("limit", 0, "[]", true),
        ("cancel", 1000, "[{currency: 'EUR', amount: 100000}]", false),
    ] {
        let noted = browser.run(&format!("return window.note('{action}', {payments}, {sums}) !== null")).await;
        assert_eq!(noted, is_noted, "{action} of {payments} payments, {sums}");
    }
    browser.nothing_went_wrong(&[]).await;
}

/// Confirms the open dialog with the reason that needs two people.
async fn awaits(browser: &Browser) {
    browser.fill("dialog input[name=because]", NEEDS_TWO).await;
    browser.click("dialog button[type=submit]").await;
    browser.await_text("dialog h2", "This awaits a second person").await;
    browser.await_text("dialog", "Another person must approve it before 2 Mar, 12:00:00 UTC.").await;
    let link = "return document.activeElement.getAttribute('href')";
    assert_eq!(browser.run(link).await, json!(format!("#/approvals/{PENDING_ID}")));
}
