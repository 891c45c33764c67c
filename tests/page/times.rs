//! Times on the page: the browser's zone with its name, UTC on request, dates where it is not today, and full instants.

use serde_json::json;

use crate::browser::Browser;
use crate::canned::{Canned, NOW};

/// Opens a view as a browser in that zone.
async fn in_zone(canned: &Canned, zone: &str, hash: &str) -> Browser {
    let browser = Browser::open(&canned.origin, "#/workers").await;
    browser.cdp("Emulation.setTimezoneOverride", json!({ "timezoneId": zone })).await;
    browser.goto(&format!("{}/{hash}", canned.origin)).await;
    browser.run("location.reload()").await;
    browser
}

#[tokio::test(flavor = "multi_thread")]
async fn times_are_local_with_their_zone_and_utc_on_request() {
    let canned = Canned::start(false).await;
    let browser = in_zone(&canned, "Europe/Berlin", "#/jobs/succeeded").await;
    browser.await_text(".headline", "Charged at 13:00:00 CET").await;
    browser.await_text(".timeline", "until 12:59:59 CET").await;
    browser.await_text(".zone", "CET").await;
    let instants = "return [...document.querySelectorAll('.headline time')].map((time) => [time.dateTime, time.title])";
    assert_eq!(browser.run(instants).await, json!([[NOW, NOW]]));
    browser.click(".zone").await;
    browser.await_text(".headline", "Charged at 12:00:00 UTC").await;
    browser.await_text(".timeline", "until 11:59:59 UTC").await;
    // The next visit remembers it.
    browser.run("location.reload()").await;
    browser.await_text(".headline", "Charged at 12:00:00 UTC").await;
    browser.click(".zone").await;
    browser.await_text(".headline", "Charged at 13:00:00 CET").await;
    browser.nothing_went_wrong(&[]).await;
}

/// The limit dialog says when the backlog clears, as the rest of the page does.
#[tokio::test(flavor = "multi_thread")]
async fn limit_dialog_has_the_time_of_day() {
    let canned = Canned::start(false).await;
    let browser = in_zone(&canned, "Europe/Berlin", "#/providers/running").await;
    for (zone, from, to) in [
        ("CET", "not before 13:02 CET (in at least 2 min)", "not before 2 Mar, 13:01 CET (in at least 1 min)"),
        ("UTC", "not before 12:02 UTC (in at least 2 min)", "not before 2 Mar, 12:01 UTC (in at least 1 min)"),
    ] {
        browser.await_text(".zone", zone).await;
        browser.click("[aria-label='Change limit near']").await;
        browser.await_text("dialog .change:nth-child(2) ins", to).await;
        browser.await_text("dialog .change:nth-child(2) del", from).await;
        browser.press("\u{E00C}").await;
        browser.await_true("return document.querySelector('dialog') === null").await;
        browser.click(".zone").await;
    }
    let script =
        "const c = await import('/assets/js/clears.js'); return args[0].map(([clears, at]) => c.clearsAt(clears, at))";
    let at = "2026-03-01T12:04:00.000Z";
    let cases = json!([
        [{"kind": "clears_in", "ms": 240_000}, at],
        [{"kind": "clears_in", "ms": 12_000}, "2026-03-01T12:00:12.000Z"],
        [{"kind": "depends_on_accounts", "at_least_ms": 1, "about_ms": 240_000}, at],
        [{"kind": "clears_in", "ms": 0}, null],
        [{"kind": "not_while_paused"}, null],
    ]);
    let found = browser.run_with(script, json!([cases])).await.to_string().replace('\u{a0}', " ");
    let expected = json!([
        "at 13:04 CET (in 4 min)",
        "at 13:00:12 CET (in 12 s)",
        "at about 13:04 CET (in about 4 min)",
        "–",
        "not while paused"
    ]);
    assert_eq!(found, expected.to_string());
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instants_have_the_date_unless_it_is_today() {
    let canned = Canned::start(false).await;
    for (zone, calls) in [
        (
            "Europe/Berlin",
            &[
                ("when('2026-03-01T12:00:00.000Z')", "13:00:00 CET"),
                ("when('2026-02-28T23:30:00.000Z')", "00:30:00 CET"),
                ("when('2026-02-28T22:30:00.000Z')", "28 Feb, 23:30:00 CET"),
                ("when('2026-07-01T12:00:00.000Z')", "1 Jul, 14:00:00 CEST"),
                ("about('2025-12-31T12:00:00.000Z')", "31 Dec 2025, 13:00 CET"),
                ("when(null)", "–"),
                // Texts of the server.
                ("inZone('11:59:00 UTC to 2026-02-27 10:00:00 UTC')", "12:59:00 CET to 27 Feb, 11:00:00 CET"),
            ][..],
        ),
        ("America/New_York", &[("when('2026-03-01T12:00:00.000Z')", "07:00:00 EST")]),
        ("Asia/Kathmandu", &[("clock('2026-03-01T12:00:00.000Z')", "17:45:00 UTC+5:45")]),
        ("UTC", &[("inZone('from 11:59:00 UTC')", "from 11:59:00 UTC")]),
    ] {
        let browser = in_zone(&canned, zone, "").await;
        browser.await_text("main", "429s").await;
        for (call, words) in calls {
            let script = format!("const i = await import('/assets/js/instants.js'); return i.{call}");
            let found = browser.run(&script).await.as_str().unwrap().replace('\u{a0}', " ");
            assert_eq!(found, *words, "{zone}: {call}");
        }
        browser.nothing_went_wrong(&[]).await;
    }
}
