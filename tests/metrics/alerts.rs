//! The alert rules: promtool runs each in virtual time, and each both fires and stays silent as expected.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use crate::names::documented;

pub fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/prometheus"))
}

/// Values of one key, in a file with one value per line.
pub fn values(text: &str, key: &str) -> Vec<String> {
    let lines = text.lines().map(|line| line.trim_start().trim_start_matches("- "));
    lines.filter_map(|line| line.strip_prefix(key)?.strip_prefix(": ")).map(str::to_owned).collect()
}

/// Metrics of this program in an expression.
pub fn named(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("sluicegate_")).map(str::to_owned).collect()
}

/// Metrics of the expression that no scrape shows.
pub fn unknown(expression: &str) -> Vec<String> {
    let documented = documented();
    let shown = |name: &String| {
        let parts = ["_bucket", "_sum", "_count"].iter().filter_map(|part| name.strip_suffix(part));
        let histogram = |name: &str| documented.get(name).is_some_and(|(kind, _)| kind == "histogram");
        documented.get(name).is_some_and(|(kind, _)| kind != "histogram") || parts.into_iter().any(histogram)
    };
    named(expression).into_iter().filter(|name| !shown(name)).collect()
}

fn promtool(args: &[&str]) -> (bool, String) {
    let output = Command::new("promtool").args(args).current_dir(folder()).output().unwrap();
    (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

#[test]
fn every_alert_fires_exactly_when_expected() {
    let (fine, output) = promtool(&["check", "rules", "alerts.yml"]);
    assert!(fine, "{output}");
    let (fine, output) = promtool(&["test", "rules", "alerts_test.yml"]);
    assert!(fine, "{output}");
    // Each alert is tested firing and silent.
    let read = |name: &str| std::fs::read_to_string(folder().join(name)).unwrap();
    let (rules, tests) = (read("alerts.yml"), read("alerts_test.yml"));
    let cases: Vec<&str> = tests.split("alertname: ").skip(1).collect();
    for alert in values(&rules, "alert") {
        let own = |case: &&&str| case.lines().next() == Some(&alert);
        let fires = |case: &&str| case.lines().skip(1).any(|line| line.trim_start().starts_with("- exp_labels"));
        let fired: Vec<bool> = cases.iter().filter(own).map(fires).collect();
        assert!(fired.contains(&true) && fired.contains(&false), "{alert}: fires and is silent: {fired:?}");
    }
}

/// The scrape configurations of docs/metrics.md are valid, and name the job as the rules expect.
#[test]
fn prometheus_accepts_the_documented_scrape_configurations() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md")).unwrap();
    let blocks: Vec<&str> = page.split("```yaml\n").skip(1).map(|block| block.split("```").next().unwrap()).collect();
    assert_eq!(blocks.len(), 2);
    let dir = tempfile::tempdir().unwrap();
    for block in blocks {
        let file = dir.path().join("prometheus.yml");
        // Debian's Prometheus is built without Kubernetes discovery; it reads the rest of that block.
        std::fs::write(&file, block.replace("kubernetes_sd_configs: [{ role: pod }]", "static_configs: []")).unwrap();
        let (fine, output) = promtool(&["check", "config", "--syntax-only", file.to_str().unwrap()]);
        assert!(fine, "{output}\n{block}");
        assert!(block.contains("job_name: sluicegate\n"), "{block}");
    }
}

#[test]
fn alerts_name_metrics_that_exist() {
    let rules = std::fs::read_to_string(folder().join("alerts.yml")).unwrap();
    let expressions = values(&rules, "expr");
    assert!(expressions.len() >= 8);
    for expression in expressions {
        assert_eq!(unknown(&expression), Vec::<String>::new(), "{expression}");
    }
    assert_eq!(
        unknown("rate(sluicegate_jobs_sum[5m]) + sluicegate_hold_seconds"),
        ["sluicegate_hold_seconds", "sluicegate_jobs_sum"]
    );
}
