//! The names of the metrics are a contract: docs/metrics.md lists all of them with type and labels, and no other is
//! shown.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::process::{Command, Stdio};

use crate::rig::{Rig, jobs};
use crate::scrape::Scrape;

/// Name → type and labels, as documented.
pub fn documented() -> BTreeMap<String, (String, BTreeSet<String>)> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md");
    let text = std::fs::read_to_string(path).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| `sluicegate_"));
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [name, kind, labels, meaning] = cells.as_slice() else { panic!("{line}") };
        assert!(meaning.len() > 10, "{line}");
        let labels = labels.split(' ').map(|label| label.trim_matches(&['`', ','][..]).to_owned());
        let labels = labels.filter(|label| !label.is_empty()).collect();
        (name.trim_matches('`').to_owned(), ((*kind).to_owned(), labels))
    };
    let all: BTreeMap<_, _> = rows.map(row).collect();
    assert!(all.len() > 30, "the table was not found");
    all
}

fn shown(scrape: &Scrape) -> BTreeMap<String, (String, BTreeSet<String>)> {
    let family = |(name, family): (&String, &crate::scrape::Family)| {
        let labels = family.labels().into_iter().map(str::to_owned).collect();
        (name.clone(), (family.kind.clone(), labels))
    };
    scrape.families.iter().map(family).collect()
}

fn lint(text: &str) -> (bool, String) {
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(printed).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_metric_is_documented_and_passes_the_lint() {
    let mut rig = Rig::prepare().await;
    // Successful jobs, delayed jobs and an invalid message.
    rig.publish(jobs("acme", 5)).await;
    rig.publish(jobs("crate", 8)).await;
    rig.publish([("acme", "no job".to_owned())]).await;
    rig.run();
    rig.await_succeeded(13).await;
    let scrape = rig.scrape().await;

    let (documented, shown) = (documented(), shown(&scrape));
    let missing: Vec<_> = documented.keys().filter(|name| !shown.contains_key(*name)).collect();
    let unknown: Vec<_> = shown.keys().filter(|name| !documented.contains_key(*name)).collect();
    assert!(missing.is_empty() && unknown.is_empty(), "documented alone: {missing:?}; shown alone: {unknown:?}");
    for (name, expected) in &documented {
        assert_eq!(&shown[name], expected, "{name}: shown, documented");
        assert!(!scrape.families[name].samples.is_empty(), "{name} has no value");
        assert!(scrape.families[name].help.ends_with('.'), "{name}: help is a sentence");
    }
    // No label contains an account or a job id.
    assert!(!scrape.text.contains("payment-") && !scrape.text.contains("customer-"), "{}", scrape.text);

    let (clean, output) = lint(&scrape.text);
    assert!(clean, "{output}");
    let (clean, output) = lint(&scrape.text.replace("sluicegate_jobs_total", "sluicegate_jobs"));
    assert!(!clean && output.contains("_total"), "the lint sees nothing: {output}");

    let (kind, text) = rig.scrape_as_open_metrics().await;
    assert!(kind.starts_with("application/openmetrics-text; version=1.0.0"), "{kind}");
    assert!(text.ends_with("# EOF\n") && text.contains("# TYPE sluicegate_jobs counter\n"), "{text}");
}
