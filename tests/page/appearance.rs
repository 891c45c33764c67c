//! Appearance of the views, full and empty: structure, contrast in both themes, narrow screens, escaped text, and
//! figures with units.

use iso_currency::Currency;
use serde_json::{Value, json};
use sluicegate::domain::printable::{is_hidden, printable};

use crate::audit::{CONTRAST, STRUCTURE};
use crate::browser::Browser;
use crate::canned::{Canned, STATES};

/// Each view, with a text that it shows once it is complete.
const VIEWS: [(&str, &str); 9] = [
    ("#/", "429s"),
    ("#/providers/running", "Last decisions"),
    ("#/jobs", "Attempts"),
    ("#/jobs/waiting", "37"),
    ("#/jobs/review", "Resolve"),
    ("#/attention?state=review", "Resolve"),
    ("#/attention?state=dead", "payments picked"),
    ("#/workers", "Round trip"),
    ("#/nowhere", "There is no such page"),
];

async fn each_view(browser: &Browser, script: &str) {
    for (hash, text) in VIEWS {
        browser.visit(hash).await;
        browser.await_text("main", text).await;
        let wrong = browser.run(script).await;
        assert_eq!(wrong, json!([]), "{hash}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_view_can_be_read_in_both_themes() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    for theme in ["light", "dark"] {
        let features = json!([{"name": "prefers-color-scheme", "value": theme}, {"name": "prefers-reduced-motion", "value": "reduce"}]);
        browser.cdp("Emulation.setEmulatedMedia", json!({ "features": features })).await;
        each_view(&browser, CONTRAST).await;
    }
    each_view(&browser, STRUCTURE).await;
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dialogs_can_be_read_in_both_themes_too() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    for theme in ["light", "dark"] {
        let features = json!([{"name": "prefers-color-scheme", "value": theme}]);
        browser.cdp("Emulation.setEmulatedMedia", json!({ "features": features })).await;
        for (hash, button, text) in [
            ("#/providers/running", "[aria-label='Change limit near']", "Clears"),
            ("#/providers/running", "[aria-label='Pause running']", "no new request is started"),
            ("#/providers/paused", "[aria-label='Resume paused']", "within its limits"),
            ("#/jobs/review", ".view-head button.primary", "Not charged, do not retry"),
            ("#/jobs/dead", ".view-head button.danger", "cannot be undone"),
            ("#/jobs/waiting", ".view-head .push ~ button", "never sent"),
        ] {
            browser.visit(hash).await;
            browser.click(button).await;
            browser.await_text("dialog[open]", text).await;
            for script in [CONTRAST, STRUCTURE] {
                assert_eq!(browser.run(script).await, json!([]), "{hash} {button} {theme}");
            }
            browser.press("\u{E00C}").await;
            browser.await_true("return document.querySelector('dialog') === null").await;
        }
    }
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn views_fit_a_phone_screen() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    for width in [360, 390, 768, 1_920] {
        let screen = json!({"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 700});
        browser.cdp("Emulation.setDeviceMetricsOverride", screen).await;
        // `innerWidth` of a phone grows with the content.
        let fits = format!("const wide = document.documentElement.scrollWidth; return wide <= {width} ? [] : [wide]");
        each_view(&browser, &fits).await;
    }
    browser.nothing_went_wrong(&[]).await;
}

/// Neither the ten figures of a provider nor the sums of all leave a hole in their rows.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_figures_are_full() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    let holes = "const list = document.querySelector('main > .sums .figures');
         const rows = new Map();
         for (const node of list.children) {
           const { top, right } = node.getBoundingClientRect();
           rows.set(Math.round(top), right);
         }
         const end = list.getBoundingClientRect().right;
         return [...rows.values()].filter((right) => right < end - 1.5 || right > end + 1.5)";
    for (hash, text, figures) in [("#/", "429s", 6), ("#/providers/misconfigured", "Last decisions", 10)] {
        browser.visit(hash).await;
        browser.await_text("main", text).await;
        let found = "return document.querySelectorAll('main > .sums .figure').length";
        assert_eq!(browser.run(found).await, json!(figures), "{hash}");
        for width in [390, 560, 768, 1_024, 1_280, 1_440, 1_600, 1_920] {
            let screen = json!({"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 700});
            browser.cdp("Emulation.setDeviceMetricsOverride", screen).await;
            assert_eq!(browser.run(holes).await, json!([]), "{hash} {width}");
        }
    }
    // What a person must decide is beside the state, as on the cards.
    for text in ["2 to review", "1 dead", "1 × 429"] {
        browser.await_text(".view-head", text).await;
    }
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn external_text_is_escaped() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    each_view(
        &browser,
        "const made = document.querySelectorAll('main img, main script, header img').length;
         return made === 0 && !document.title.includes('owned') ? [] : [made, document.title]",
    )
    .await;
    browser.visit("#/jobs/unheard-of").await;
    browser.await_text("main", "Not in the ledger").await;
    // The server's error message, in the dialog whose action it refuses.
    browser.visit("#/jobs/dead").await;
    browser.click(".view-head button.danger").await;
    browser.click("dialog button.danger").await;
    browser.await_text("dialog .problem", "<img src=x").await;
    browser.nothing_went_wrong(&["404 (Not Found)"]).await;
}

/// Returns every text and attribute with a hidden character.
const HIDDEN: &str = r"
const hidden = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\u{e0000}-\u{e007f}]/u;
const wrong = [];
for (const node of document.querySelectorAll('header *, main, main *, dialog *, #messages *')) {
  const attributes = [...node.attributes].map((attribute) => attribute.value);
  const texts = [...node.childNodes].filter((child) => child.nodeType === Node.TEXT_NODE).map((child) => child.nodeValue);
  for (const text of [...attributes, ...texts]) if (hidden.test(text)) wrong.push(text);
}
if (hidden.test(document.title)) wrong.push(document.title);
return wrong";

#[tokio::test(flavor = "multi_thread")]
async fn no_view_shows_hidden_characters() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    each_view(&browser, HIDDEN).await;
    browser.visit("#/jobs/dead").await;
    browser.await_text("main", "\\n\\r\\t\\u{1b}[2J\\u{9b}\\u{85}\\u{202e}").await;
    browser.click(".view-head button.danger").await;
    browser.click("dialog button.danger").await;
    browser.await_text("dialog .problem", "\\u{202e}").await;
    assert_eq!(browser.run(HIDDEN).await, json!([]));
    browser.nothing_went_wrong(&["404 (Not Found)"]).await;
}

/// The page escapes the same characters as the commands, in the same form.
#[tokio::test(flavor = "multi_thread")]
async fn page_and_commands_escape_the_same_characters() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    let script = "const own = document.querySelector('script[type=module]').src;
        return import(new URL('printable.js', own)).then(({ printable }) => {
          const escaped = [];
          for (let code = 0; code <= 0x10ffff; code++) {
            if (code >= 0xd800 && code <= 0xdfff) continue;
            const shown = printable(String.fromCodePoint(code));
            if (shown !== String.fromCodePoint(code)) escaped.push(shown);
          }
          return escaped;
        })";
    let escaped: Vec<String> = (0..=0x0010_ffff)
        .filter_map(char::from_u32)
        .filter(|c| is_hidden(*c))
        .map(|c| printable(&c.to_string()).into_owned())
        .collect();
    assert_eq!(browser.run(script).await, json!(escaped));
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn states_and_bars_have_text_labels() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text("main", "No worker").await;
    let chips =
        browser.run("return [...document.querySelectorAll('.lane-row .chip')].map((chip) => chip.textContent)").await;
    let chips: Vec<&str> = chips.as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(chips.len(), STATES.len());
    assert!(chips.iter().all(|word| !word.is_empty() && !word.contains('_')), "{chips:?}");
    let distinct: std::collections::BTreeSet<_> = chips.iter().collect();
    assert_eq!(distinct.len(), chips.len(), "{chips:?}");
    browser.visit("#/providers/running").await;
    browser.await_text("#rate-title", "Rate against limit").await;
    let bars = browser.run("return [...document.querySelectorAll('[role=meter]')].map((bar) => [bar.parentElement.className, bar.getAttribute('aria-valuetext'), getComputedStyle(bar.firstElementChild).backgroundColor])").await;
    let bar = |at: usize| (bars[at][0].as_str().unwrap(), bars[at][1].as_str().unwrap());
    assert_eq!(bar(0), ("limit fine", "10 of 100 used"));
    assert_eq!(bar(1), ("limit fine", "80 of 100 used"));
    assert_eq!(bar(2), ("limit full", "100 of 100 used"));
    assert_eq!(bar(3), ("limit closed", "closed: nothing is sent"));
    assert_eq!(bars[0][2], bars[1][2]);
    assert_ne!(bars[1][2], bars[2][2], "a full bar has the colour of one of 80 %");
    assert_ne!(bars[2][2], bars[3][2], "a closed limit has the colour of a full one");
    for words in ["80%", "100% · in full use", "counted per account"] {
        browser.await_text("#main", words).await;
    }
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_views_suggest_the_next_step() {
    let canned = Canned::start(true).await;
    let browser = Browser::open(&canned.origin, "").await;
    for (hash, text) in [
        ("#/", "sluicegate provider apply"),
        ("#/jobs", "The ledger is empty"),
        ("#/attention", "Nothing to review"),
        ("#/attention?state=dead", "Nothing is dead"),
        ("#/workers", "sluicegate run"),
    ] {
        browser.visit(hash).await;
        browser.await_text("main", text).await;
        assert_eq!(browser.run(STRUCTURE).await, json!([]), "{hash}");
    }
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_times_and_amounts_are_formatted() {
    let canned = Canned::start(true).await;
    let browser = Browser::open(&canned.origin, "").await;
    let formatted = async |call: &str| {
        let script = format!("const f = await import('/assets/js/format.js'); return f.{call}");
        browser.run(&script).await.as_str().unwrap().replace('\u{a0}', " ")
    };
    for (call, words) in [
        ("count(1234567)", "1,234,567"),
        ("count(null)", "–"),
        ("rate(94.12)", "94.1/s"),
        ("rate(0.0833)", "0.083/s"),
        ("rate(0)", "0/s"),
        ("duration(0)", "0 ms"),
        ("duration(420)", "420 ms"),
        ("duration(1500)", "1.5 s"),
        ("duration(12400)", "12 s"),
        ("duration(59999)", "1 min"),
        ("duration(125000)", "2 min 5 s"),
        ("duration(3600000)", "1 h"),
        ("duration(90061000)", "1 d 1 h"),
        ("rateSpec(600, 60000)", "600/1m"),
        ("rateSpec(5, 1500)", "5/1500ms"),
        ("rateSpec(5, null)", "5 at once"),
        ("money(1250, 'EUR')", "EUR 12.50"),
        ("money(-1250, 'JPY')", "JPY -1,250"),
        ("money(1250, 'KWD')", "KWD 1.250"),
    ] {
        assert_eq!(formatted(call).await, words, "{call}");
    }
    let letters = || 'A'..='Z';
    let codes = letters().flat_map(|a| letters().flat_map(move |b| letters().map(move |c| format!("{a}{b}{c}"))));
    let currencies: Vec<Currency> = codes.filter_map(|code| Currency::from_code(&code)).collect();
    assert!(currencies.len() > 150, "{}", currencies.len());
    let codes: Vec<&str> = currencies.iter().map(|currency| currency.code()).collect();
    let script = "const f = await import('/assets/js/format.js'); return args[0].map(f.exponent)";
    let exponents = browser.run_with(script, json!([codes])).await;
    for (currency, exponent) in currencies.iter().zip(exponents.as_array().unwrap()) {
        // Metals and funds have no decimals, and no payment is made in them.
        let Some(digits) = currency.exponent() else { continue };
        assert_eq!(exponent.as_u64(), Some(u64::from(digits)), "{}", currency.code());
    }
    browser.nothing_went_wrong(&[]).await;
}
