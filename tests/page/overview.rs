//! The overview by attention: the order of its sections, cards or a table, one bar per incident, and long names.

use serde_json::{Value, json};

use crate::audit::{CONTRAST, STRUCTURE};
use crate::browser::Browser;
use crate::canned::{Canned, STATES, long_name};

/// Names of the providers in each section, by its class.
const SECTIONS: &str = "return [...document.querySelectorAll('.lanes')].map((section) => [
    section.classList[1],
    [...section.querySelectorAll('h3 a, td.lane a')].map((name) => name.textContent)])";

#[tokio::test(flavor = "multi_thread")]
async fn providers_are_in_the_order_of_attention() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text("main", "429s").await;
    // The row of `probing` is invalid, and payments wait though `disabled` never sends them.
    let attention = [
        "held",
        "throttled",
        "breaker-open",
        "misconfigured",
        "backend-unavailable",
        "no-worker",
        "paused",
        "closed",
        "blocked",
        "probing",
        "disabled",
    ];
    assert_eq!(
        browser.run(SECTIONS).await,
        json!([
            ["attention", attention],
            ["limited", ["running", "waiting-for-limit", "cold", "paused-by-provider", "draining"]],
            ["idle", ["idle"]],
        ])
    );
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cards_show_eight_providers_and_a_table_more() {
    let figures =
        "return [document.querySelectorAll('article.card').length, document.querySelectorAll('tr.lane-row').length]";
    let canned = Canned::start_few().await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text("main", "429s").await;
    // The idle one is folded.
    assert_eq!(browser.run(figures).await, json!([7, 1]));
    assert_eq!(browser.run("return document.querySelector('.lanes.idle').open").await, json!(false));
    // A chart without figures has no lines.
    browser
        .await_true("return document.querySelector('[aria-labelledby=card-cold] .canvas').matches('.no-data:empty')")
        .await;
    browser.await_true("return document.querySelector('[aria-labelledby=card-running] .spark-rate') !== null").await;
    browser.nothing_went_wrong(&[]).await;

    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text("main", "429s").await;
    assert_eq!(browser.run(figures).await, json!([0, STATES.len()]));
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_incident_is_one_bar() {
    let canned = Canned::start_incident().await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text(".incident", "Redis unreachable since 11:57 UTC. Nothing is lost. 84,080 payments wait.").await;
    browser.await_text(".pulse", "Redis unreachable").await;
    assert_eq!(browser.run("return document.querySelector('.pulse').className").await, json!("pulse lost"));
    assert_eq!(browser.run("return document.querySelectorAll('.incident').length").await, json!(1));
    assert_eq!(browser.text("main").await.matches("limiter: gone").count(), 1, "the cause is repeated");
    // What an operator paused still needs one; the others go on by themselves.
    let sections = browser.run(SECTIONS).await;
    let names: Vec<&Value> = sections.as_array().unwrap().iter().map(|section| &section[0]).collect();
    assert_eq!(names, ["attention", "stopped"]);
    assert_eq!((&sections[0][1], sections[1][1].as_array().unwrap().len()), (&json!(["paused"]), 7));
    // What is zero and should be zero is one line.
    browser.await_text(".accounted", "Nothing to review, none dead, no 429s; all 5 recorded payments").await;
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pause_of_all_is_one_bar_with_its_resume() {
    let canned = Canned::start_paused().await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text(".incident", "2 providers paused together by alice@desk since 11:57 UTC.").await;
    browser.await_text(".incident", "Incident 12. They start no new request. Payments wait; nothing is lost.").await;
    browser.await_text(".pulse", "Providers paused").await;
    assert_eq!(browser.run("return document.querySelectorAll('.incident').length").await, json!(1));
    for (button, texts, done) in [
        (
            "[aria-label='Pause all providers']",
            ["1 provider sends", "It extends the pause of alice@desk."],
            "1 provider is paused",
        ),
        (
            ".incident button",
            ["2 providers paused", "A wait that a provider asked for stays"],
            "2 providers are resumed",
        ),
    ] {
        browser.click(button).await;
        for text in texts {
            browser.await_text("dialog[open]", text).await;
        }
        for script in [CONTRAST, STRUCTURE] {
            assert_eq!(browser.run(script).await, json!([]), "{button}");
        }
        browser.fill("dialog input[name=because]", "ticket 4711").await;
        browser.click("dialog button[type=submit]").await;
        browser.await_text("#messages", done).await;
    }
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_backends_are_two_incidents() {
    let canned = Canned::start_troubled().await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text("main", "PostgreSQL unreachable since 11:57 UTC.").await;
    browser.await_text("main", "RabbitMQ unreachable since 11:57 UTC.").await;
    browser.await_text(".incident", "Nothing is lost. At least 1,332 payments wait.").await;
    assert_eq!(browser.run("return document.querySelectorAll('.incident').length").await, json!(2));
    browser.nothing_went_wrong(&["503 (Service Unavailable)"]).await;
}

/// Neither names nor limits push a button out of its line, or anything out of the page.
async fn nothing_wraps(canned: &Canned, shown: &str) {
    let browser = Browser::open(&canned.origin, "").await;
    for width in [390, 1_280, 1_920] {
        let screen = json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700});
        browser.cdp("Emulation.setDeviceMetricsOverride", screen).await;
        browser.await_text("main", &long_name(8)).await;
        let wrong = "const shown = [...document.querySelectorAll('main button, main .chip, main .decide')].filter((node) => node.checkVisibility());
                     const wrong = shown.filter((node) => node.getBoundingClientRect().height > 40 || node.getBoundingClientRect().right > innerWidth);
                     return [wrong.map((node) => node.outerHTML), document.documentElement.scrollWidth <= innerWidth]";
        assert_eq!(browser.run(wrong).await, json!([[], true]), "{width}");
        assert_ne!(
            browser.run_with("return document.querySelectorAll(args[0]).length", json!([shown])).await,
            json!(0)
        );
    }
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_names_wrap_no_button() {
    nothing_wraps(&Canned::start_long().await, "article.card button").await;
    nothing_wraps(&Canned::start_full().await, "tr.lane-row .chip").await;
}
