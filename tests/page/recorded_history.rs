//! The recorded history on a provider's page: ranges, zoom by pointer and by buttons, marks, and the table of figures.

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::canned::Canned;

const CHOSEN: &str = "return document.querySelector('.choices [aria-pressed=\"true\"]')?.innerText ?? ''";
/// Both ends of the range that the chart shows, in seconds.
const PLOT: &str = "#rate-title ~ .canvas .u-over";

async fn open(canned: &Canned) -> Browser {
    let browser = Browser::open(&canned.origin, "#/providers/running").await;
    browser.await_text("#rate-title", "Rate against limit").await;
    browser.await_true("return document.querySelectorAll('details.marks li').length > 0").await;
    browser
}

#[tokio::test(flavor = "multi_thread")]
async fn ranges_zoom_and_marks_are_operable() {
    let canned = Canned::start(false).await;
    let browser = open(&canned).await;
    assert_eq!(browser.run(CHOSEN).await, json!("1 h"));
    // Each mark is a line with a number, and its text is in the list.
    browser.click("details.marks summary").await;
    let marks =
        browser.run("return [...document.querySelectorAll('details.marks li b')].map((b) => b.innerText)").await;
    assert_eq!(marks, json!(["1", "2", "3"]));
    browser.click("#rate-title ~ details:last-of-type summary").await;
    let rows = "return [...document.querySelectorAll('#rate-title ~ details:last-of-type tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText))";
    let rows = browser.run(rows).await;
    assert_eq!(rows.as_array().unwrap().len(), 20, "{rows}");
    assert_eq!(rows[0][6], json!("0"), "{rows}");
    let unknown = rows.as_array().unwrap().iter().filter(|row| row[1] == json!("–")).count();
    assert_eq!(unknown, 1, "three of the five unknown minutes are one row: {rows}");
    let words = browser.run("return document.querySelector('#rate-title ~ .canvas').getAttribute('aria-label')").await;
    assert!(words.as_str().unwrap().contains("the provider responded with 1 429"), "{words}");

    for (button, chosen) in [("24 h", "24 h"), ("30 d", "30 d"), ("1 h", "1 h")] {
        browser.click(&format!("//button[text()='{button}']")).await;
        browser.await_true(&format!("return ({}) === '{chosen}'", CHOSEN.trim_start_matches("return "))).await;
    }
    // The buttons do what dragging does.
    browser.click("//button[text()='Zoom in']").await;
    browser.await_true("return document.querySelector('.choices [aria-pressed=\"true\"]') === null").await;
    let shown = "return document.querySelector('.chart-tools .muted')?.innerText ?? ''";
    let zoomed = browser.run(shown).await;
    assert!(zoomed.as_str().unwrap().contains(" to "), "{zoomed}");
    browser.click("//button[text()='Earlier']").await;
    browser.await_true(&format!("return ({}) !== {zoomed}", shown.trim_start_matches("return "))).await;
    browser.click("//button[text()='6 h']").await;
    drag(&browser).await;
    browser.await_true("return document.querySelector('.choices [aria-pressed=\"true\"]') === null").await;
    browser.nothing_went_wrong(&[]).await;
}

/// Drags over the middle of the upper chart.
async fn drag(browser: &Browser) {
    let place = "const node = document.querySelector(args[0]); node.scrollIntoView({block: 'center'}); const box = node.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]";
    let place = browser.run_with(place, json!([PLOT])).await;
    let at = |index: usize| place[index].as_f64().unwrap();
    let y = at(1) + at(3) / 2.0;
    for (kind, share) in
        [("mouseMoved", 0.3), ("mousePressed", 0.3), ("mouseMoved", 0.5), ("mouseMoved", 0.6), ("mouseReleased", 0.6)]
    {
        let x = at(0) + at(2) * share;
        let event = json!({"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1});
        browser.cdp("Input.dispatchMouseEvent", event).await;
    }
}

/// A young deployment is not drawn in the corner of an hour, and one that was stopped shows what was before.
#[tokio::test(flavor = "multi_thread")]
async fn default_range_is_the_shortest_with_the_data() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    for (provider, chosen, begins) in
        [("cold", "15 min", "Figures begin at 11:52 UTC."), ("closed", "6 h", ""), ("running", "1 h", "")]
    {
        browser.visit(&format!("#/providers/{provider}")).await;
        browser.await_text("h1", provider).await;
        browser.await_true("return document.querySelectorAll('details.marks li').length > 0").await;
        browser.await_true(&format!("return ({}) === '{chosen}'", CHOSEN.trim_start_matches("return "))).await;
        assert_eq!(browser.text(".begins").await, begins, "{provider}");
    }
    // What a person has chosen stays.
    browser.visit("#/providers/cold").await;
    browser.await_text(".begins", "11:52").await;
    browser.click("//button[text()='1 h']").await;
    canned.await_questions(12).await;
    assert_eq!(browser.run(CHOSEN).await, json!("1 h"));
    let fitting = "const r = await import('/assets/js/recorded.js'); const ranges = r.RANGES.map(([label, length]) => ({ label, length }));
         return args[0].map((age) => r.fitting(ranges, 0, age * 60_000).label)";
    let found = browser.run_with(fitting, json!([[0, 5, 6, 15, 16, 60, 999]])).await;
    assert_eq!(found, json!(["5 min", "5 min", "15 min", "15 min", "1 h", "1 h", "1 h"]));
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_history_has_no_scale() {
    let canned = Canned::start(true).await;
    let browser = Browser::open(&canned.origin, "#/providers/running").await;
    browser.await_text("#rate-title", "Rate against limit").await;
    browser.await_true("return document.querySelectorAll('#rate-title ~ .canvas.no-data').length === 2").await;
    assert_eq!(browser.run("return document.querySelector('.marks')").await, Value::Null);
    let words = browser.run("return document.querySelector('#rate-title ~ .canvas').getAttribute('aria-label')").await;
    assert_eq!(words, json!("Nothing is recorded for this range."));
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn range_functions_keep_within_bounds() {
    let canned = Canned::start(true).await;
    let browser = Browser::open(&canned.origin, "").await;
    let hour = 3_600_000_i64;
    let now = 2_400 * hour;
    for (call, result) in [
        (format!("rangeOf({{length: {hour}}}, {now})"), json!({"from": now - hour, "to": now})),
        (format!("bounded({{from: {now}, to: {now} - {hour}}}, {now})"), json!({"from": now - hour, "to": now})),
        (format!("bounded({{from: {now} - 1000, to: {now}}}, {now})"), json!({"from": now - 120_000, "to": now})),
        (format!("scaled({{from: {now} - {hour}, to: {now}}}, 2, {now})"), json!({"from": now - 2 * hour, "to": now})),
        (format!("scaled({{from: 0, to: {now}}}, 2, {now}).from"), json!(now - (now / 2 - 360 * hour) - 720 * hour)),
        (format!("moved({{from: {now} - {hour}, to: {now}}}, 0.5, {now})"), json!({"from": now - hour, "to": now})),
        ("axisTime(0, 3600000)".to_owned(), json!("00:00")),
        ("axisTime(0, 604800000)".to_owned(), json!("1 Jan")),
        ("tableRows([]).length".to_owned(), json!(0)),
    ] {
        let script = format!("const r = await import('/assets/js/recorded.js'); return r.{call}");
        assert_eq!(browser.run(&script).await, result, "{call}");
    }
    browser.nothing_went_wrong(&[]).await;
}
