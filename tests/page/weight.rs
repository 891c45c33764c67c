//! Costs of the page: the size of its files, compressed, and its height on a phone with long lists.

use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::json;

use crate::browser::Browser;
use crate::canned::Canned;

/// All files of the page together, compressed.
const WEIGHT_MAX: usize = 150_000;
/// Screens of a phone that fifty rows may take.
const SCREENS_MAX: u64 = 5;
const PHONE: (u64, u64) = (390, 844);

fn compressed(body: &[u8]) -> usize {
    let mut gzip = Command::new("gzip").arg("-9").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = gzip.stdin.take().unwrap();
    let body = body.to_vec();
    let writer = std::thread::spawn(move || input.write_all(&body).unwrap());
    let output = gzip.wait_with_output().unwrap();
    writer.join().unwrap();
    output.stdout.len()
}

#[tokio::test(flavor = "multi_thread")]
async fn page_weighs_less_than_150_kb_compressed() {
    let canned = Canned::start(false).await;
    let browser = Browser::open(&canned.origin, "").await;
    browser.await_text("main", "429s").await;
    let loaded = "return [location.href, ...performance.getEntriesByType('resource').map(({ name }) => name)]";
    let loaded = browser.run(loaded).await;
    let mut files: Vec<&str> = loaded.as_array().unwrap().iter().filter_map(|url| url.as_str()).collect();
    files.retain(|url| !url.contains("/api/"));
    files.sort_unstable();
    files.dedup();
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let mut weight = 0;
    for url in &files {
        weight += compressed(&client.get(*url).send().await.unwrap().bytes().await.unwrap());
    }
    assert!(files.len() > 30, "the files were not found: {files:?}");
    assert!(weight <= WEIGHT_MAX, "{weight} bytes in {} files", files.len());
    browser.nothing_went_wrong(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_rows_are_five_screens_of_a_phone() {
    let canned = Canned::start_full().await;
    let browser = Browser::open(&canned.origin, "").await;
    let (width, height) = PHONE;
    let screen = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": true});
    browser.cdp("Emulation.setDeviceMetricsOverride", screen).await;
    for (hash, rows) in
        [("#/", "tr.lane-row"), ("#/attention?state=review", "tbody tr"), ("#/attention?state=dead", "tbody tr")]
    {
        browser.visit(hash).await;
        browser.await_true(&format!("return document.querySelectorAll('{rows}').length === 50")).await;
        let taken = browser.run("return document.documentElement.scrollHeight").await.as_u64().unwrap();
        assert!(taken <= SCREENS_MAX * height, "{hash}: {taken} pixels");
    }
    browser.nothing_went_wrong(&[]).await;
}
