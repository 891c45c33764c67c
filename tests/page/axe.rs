//! The rules of axe-core, an independent checker of accessibility, on each view and dialog: light and dark, on a phone, a
//! laptop and a large screen.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::canned::Canned;

/// Themes and widths of screens, in CSS pixels. Each view is checked in one of these pairs, and its neighbours in the
/// others: colours do not depend on the width, nor the layout on the theme.
const SCREENS: [[(&str, u32); 2]; 3] =
    [[("light", 390), ("dark", 1_280)], [("dark", 390), ("light", 1_920)], [("light", 1_280), ("dark", 1_920)]];

/// Each view, with a text that it shows once it is complete.
const VIEWS: [(&str, &str); 14] = [
    ("#/", "429s"),
    ("#/providers/running", "Last decisions"),
    ("#/providers/cold", "Figures begin"),
    ("#/jobs", "Attempts"),
    ("#/jobs/waiting", "37"),
    ("#/jobs/succeeded", "Waited for limit"),
    ("#/jobs/review", "Resolve"),
    ("#/attention?state=review", "Resolve"),
    ("#/attention?state=dead", "payments picked"),
    ("#/rejected", "Republish"),
    ("#/batches", "Resolve as declined"),
    ("#/batches/finished", "pay-11"),
    ("#/workers", "Round trip"),
    ("#/nowhere", "There is no such page"),
];
const EMPTY_VIEWS: [(&str, &str); 5] = [
    ("#/", "sluicegate provider apply"),
    ("#/jobs", "The ledger is empty"),
    ("#/attention", "Nothing to review"),
    ("#/rejected", "No rejected messages"),
    ("#/workers", "sluicegate run"),
];

/// A dialog: the file of its code, the view, the button that opens it, and a text of it.
struct Dialog {
    file: &'static str,
    hash: &'static str,
    button: &'static str,
    text: &'static str,
}

const fn dialog(file: &'static str, hash: &'static str, button: &'static str, text: &'static str) -> Dialog {
    Dialog { file, hash, button, text }
}

const DIALOGS: [Dialog; 15] = [
    dialog("change_limit.js", "#/providers/running", "[aria-label='Change limit near']", "Clears"),
    dialog("change_limit.js", "#/providers/running", "[aria-label='Change limit per-account']", "Clears"),
    dialog("pause.js", "#/providers/running", "[aria-label='Pause running']", "no new request is started"),
    dialog("account_rules.js", "#/providers/running", "[aria-label='Unset the rule of shop-7']", "payments are sent"),
    dialog("pause.js", "#/providers/paused", "[aria-label='Resume paused']", "within its limits"),
    dialog("account_rules.js", "#/providers/running", "[aria-label='Change the rule of shop-9']", "no longer becomes"),
    dialog("pause.js", "#/providers/paused-by-provider", ".view-head .push ~ button", "takes effect"),
    dialog("decide.js", "#/jobs/review", ".view-head button.primary", "Not charged, do not retry"),
    dialog("decide.js", "#/jobs/dead", ".view-head button.primary", "attempts start from zero"),
    dialog("decide.js", "#/jobs/dead", ".view-head button.danger", "cannot be undone"),
    dialog("decide.js", "#/jobs/waiting", ".view-head .push ~ button", "never sent"),
    dialog("batch.js", "#/batches/running", "[aria-label='Stop this batch']", "changed already and stay so"),
    dialog("pause_all.js", "#/", "[aria-label='Pause all providers']", "no new request is started"),
    dialog("rejected.js", "#/rejected", "[aria-label='Republish message 2']", "same bytes"),
    dialog("rejected.js", "#/rejected", "[aria-label='Discard message 2']", "cannot be undone"),
];

/// The dialog of a decision about many payments.
const BATCH_DIALOG: &str = "batch_dialog.js";

/// Returns the findings, as a list of sentences. All rules of WCAG 2.2 up to level AA apply, and the best practices.
const RUN: &str = r#"
const found = await axe.run(document, { resultTypes: ["violations"], rules: { "target-size": { enabled: true } } });
if (found.passes.length < 10) return [`only ${found.passes.length} rules apply`];
return found.violations.flatMap(({ id, help, nodes }) =>
  nodes.map(({ target, html, any }) => `${id}: ${help}: ${target.join(" ")} ${html.slice(0, 160)} ${any.map(({ message }) => message).join("; ")}`));
"#;

/// The checker's script; the first call may fetch it, unless tests/run has done so.
fn script() -> &'static str {
    static SCRIPT: OnceLock<String> = OnceLock::new();
    SCRIPT.get_or_init(|| {
        let kept = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let prepare = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/page/prepare");
        let output = Command::new(prepare).arg(kept).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::read_to_string(kept.join("axe-core/axe.min.js")).unwrap()
    })
}

async fn set_theme(browser: &Browser, theme: &str) {
    // Without transitions a colour is the new one at once.
    let features = json!([{"name": "prefers-color-scheme", "value": theme}, {"name": "prefers-reduced-motion", "value": "reduce"}]);
    browser.cdp("Emulation.setEmulatedMedia", json!({ "features": features })).await;
}

async fn set_width(browser: &Browser, width: u32) {
    let screen = json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700});
    browser.cdp("Emulation.setDeviceMetricsOverride", screen).await;
}

/// Findings on what the browser shows now.
async fn findings(browser: &Browser) -> Value {
    if browser.run("return typeof axe === 'undefined'").await == json!(true) {
        // As the driver's own script: the page's policy forbids `eval`.
        browser.run(script()).await;
    }
    browser.run(RUN).await
}

/// Checks what the browser shows on one pair of screens, or on all if pictures are kept; `shown` names it.
async fn assert_clean(browser: &Browser, shown: &str, pair: usize) {
    let keeps_all = std::env::var_os("SCREENSHOTS").is_some();
    let pair = pair % SCREENS.len();
    for (_, screens) in SCREENS.iter().enumerate().filter(|(number, _)| keeps_all || *number == pair) {
        for (theme, width) in screens {
            set_theme(browser, theme).await;
            set_width(browser, *width).await;
            browser.keep_screenshot(&format!("{shown} {theme} {width}")).await;
            assert_eq!(findings(browser).await, json!([]), "{shown}, {theme}, {width} pixels");
            let fits = format!("return document.documentElement.scrollWidth <= {width}");
            assert_eq!(browser.run(&fits).await, json!(true), "{shown} is wider than {width} pixels");
        }
    }
    set_width(browser, 1_280).await;
}

async fn check_views(canned: Canned, name: &str, views: &[(&str, &str)]) {
    let browser = Browser::open(&canned.origin, "").await;
    for (pair, (hash, text)) in views.iter().enumerate() {
        browser.visit(hash).await;
        browser.await_text("main", text).await;
        assert_clean(&browser, &format!("{name} {hash}"), pair).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn axe_finds_nothing_on_any_view() {
    check_views(Canned::start(false).await, "states", &VIEWS).await;
    check_views(Canned::start(true).await, "empty", &EMPTY_VIEWS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn axe_finds_nothing_on_any_overview() {
    check_views(Canned::start_few().await, "few", &[("#/", "429s")]).await;
    check_views(Canned::start_incident().await, "incident", &[("#/", "Nothing is lost")]).await;
    check_views(Canned::start_long().await, "long", &[("#/", "429s")]).await;
    check_views(Canned::start_troubled().await, "troubled", &[("#/", "unreachable")]).await;
    check_views(Canned::start_full().await, "full", &[("#/", "429s"), ("#/attention?state=dead", "payment-")]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn axe_finds_nothing_in_any_dialog() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    for (pair, Dialog { hash, button, text, .. }) in DIALOGS.into_iter().enumerate() {
        browser.visit(hash).await;
        browser.click(button).await;
        browser.await_text("dialog[open]", text).await;
        let title = browser.text("dialog[open] h2").await;
        assert_clean(&browser, &format!("{hash} {title}"), pair).await;
        browser.press("\u{E00C}").await;
        browser.await_true("return document.querySelector('dialog') === null").await;
    }
    // This one needs a selection first.
    browser.visit("#/attention?state=dead").await;
    browser.click("//button[starts-with(text(), 'All ')]").await;
    browser.click("//div[@class='bulk']//button[text()='Replay']").await;
    browser.await_text("dialog[open]", "Takes about").await;
    assert_clean(&browser, BATCH_DIALOG, 0).await;
}

/// A new file with dialogs needs lines in [`DIALOGS`].
#[test]
fn every_file_with_dialogs_is_checked() {
    let views = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops/page/assets/js/views");
    let files = DIALOGS.iter().map(|dialog| dialog.file).chain([BATCH_DIALOG]);
    let checked: BTreeSet<String> = files.map(str::to_owned).collect();
    let mut asking = BTreeSet::new();
    for entry in std::fs::read_dir(views).unwrap() {
        let entry = entry.unwrap();
        let text = std::fs::read_to_string(entry.path()).unwrap();
        if text.lines().any(|line| line.starts_with("import { ask") && line.ends_with("\"../dialog.js\";")) {
            asking.insert(entry.file_name().into_string().unwrap());
        }
    }
    assert_eq!(checked, asking);
}
