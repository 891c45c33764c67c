//! The runbook: it lists every alert with its severity, and every alert links to its section.

use std::collections::{BTreeMap, BTreeSet};

use crate::page::{Page, plain};

/// The anchor of a heading, as rendered Markdown pages have it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn anchors(page: &Page) -> BTreeSet<String> {
    let prose: String = page.text.split("```").step_by(2).collect();
    prose.lines().filter(|line| line.starts_with('#')).map(|line| anchor(line.trim_start_matches('#').trim())).collect()
}

/// Severity and runbook_url of each alert, by name.
fn alerts() -> BTreeMap<String, (String, String)> {
    let rules = Page::read("deploy/prometheus/alerts.yml").text;
    let of = |rule: &str, key: &str| {
        let mut values = rule.lines().filter_map(|line| line.trim().strip_prefix(&format!("{key}: ")));
        let value = values.next().unwrap_or_else(|| panic!("no {key}: {rule}")).trim_matches('"').to_owned();
        assert_eq!(values.next(), None, "{rule}");
        value
    };
    let rules = rules.split("- alert: ").skip(1);
    rules
        .map(|rule| (rule.lines().next().unwrap().to_owned(), (of(rule, "severity"), of(rule, "runbook_url"))))
        .collect()
}

#[test]
fn every_alert_has_a_runbook_section() {
    let page = Page::read("docs/runbook.md");
    let mut documented = BTreeMap::new();
    for row in page.table("## Alerts", "alert") {
        let link = row[2].split("](").nth(1).unwrap_or_else(|| panic!("no link: {row:?}")).trim_end_matches(')');
        documented.insert(plain(&row[0]).to_owned(), (row[1].clone(), format!("docs/runbook.md{link}")));
    }
    assert!(documented.len() >= 16);
    assert_eq!(alerts(), documented);
    let severities: BTreeSet<String> = documented.into_values().map(|(severity, _)| severity).collect();
    for severity in severities {
        assert!(page.text.contains(&format!("`{severity}` is ")), "the meaning of {severity} is not documented");
    }
}

#[test]
fn every_section_link_has_a_target() {
    let mut found = 0;
    for page in Page::all() {
        let prose: String = page.text.split("```").step_by(2).collect();
        for target in prose.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let Some((file, section)) = target.split_once('#').filter(|_| !target.contains("://")) else { continue };
            let folder = page.path.rsplit_once('/').map_or("", |(folder, _)| folder);
            let of = if file.is_empty() { page.path.clone() } else { format!("{folder}/{file}") };
            assert!(anchors(&Page::read(of.trim_start_matches('/'))).contains(section), "{}: {target}", page.path);
            found += 1;
        }
    }
    assert!(found >= 16, "links were not found: {found}");
}

#[test]
fn headings_have_the_expected_anchors() {
    assert_eq!(anchor("A key has expired, or was changed"), "a-key-has-expired-or-was-changed");
    let text = "# T\n```sh\n# no heading\n```\n## The `x`\n";
    assert_eq!(anchors(&Page { path: String::new(), text: text.to_owned() }), ["t", "the-x"].map(str::to_owned).into());
}
