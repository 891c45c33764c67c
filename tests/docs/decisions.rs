//! Decision records: numbered without a gap, one page each, with the same four sections and one line in the index.

use sluicegate::fleet::provider_status::ProviderState;

use crate::page::Page;

const FOLDER: &str = "docs/decisions/";
const SECTIONS: [&str; 4] = ["Context", "Decision", "Consequences", "Evidence"];
/// Most words of a record; a longer one holds more than one decision, or more than a page.
const WORDS_MAX: usize = 700;

fn records() -> Vec<Page> {
    Page::all().into_iter().filter(|page| page.path.starts_with(FOLDER) && !page.path.ends_with("README.md")).collect()
}

/// Faults of the record that should have this number.
fn faults(number: usize, record: &Page) -> Vec<String> {
    let digits = format!("{number:04}");
    let headings: Vec<&str> = record.text.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    let evidence = record.text.split("## Evidence").nth(1).unwrap_or_default();
    let checks = [
        (record.path.starts_with(&format!("{FOLDER}{digits}-")), "its file does not have the next number"),
        (record.text.starts_with(&format!("# {digits}. ")), "its title does not have its number"),
        (headings == SECTIONS, "its sections are not context, decision, consequences and evidence"),
        (record.text.split_whitespace().count() <= WORDS_MAX, "it is longer than a page"),
        (evidence.contains('`') || evidence.contains("]("), "its evidence names no test and no source"),
    ];
    checks.iter().filter(|(holds, _)| !holds).map(|(_, fault)| format!("{}: {fault}", record.path)).collect()
}

#[test]
fn every_record_has_its_number_and_sections() {
    let records = records();
    assert!(records.len() >= 30, "the records were not found: {}", records.len());
    let faults: Vec<String> = (1..).zip(&records).flat_map(|(number, record)| faults(number, record)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn faulty_record_is_detected() {
    let whole = "# 0001. T\n\n## Context\n\n## Decision\n\n## Consequences\n\n## Evidence\n\n`t`\n";
    let page = |path: &str, text: &str| Page { path: format!("{FOLDER}{path}"), text: text.to_owned() };
    let found = |path, text: &str| faults(1, &page(path, text)).len();
    assert_eq!(found("0001-t.md", whole), 0);
    assert_eq!(found("0002-t.md", whole), 1);
    assert_eq!(found("0001-t.md", &whole.replace("# 0001.", "# 0002.")), 1);
    assert_eq!(found("0001-t.md", &whole.replace("## Context\n", "")), 1);
    assert_eq!(found("0001-t.md", &whole.replace("`t`", "t")), 1);
    assert_eq!(found("0001-t.md", &format!("{whole}{}", "word ".repeat(WORDS_MAX))), 1);
}

fn record(number: &str) -> Page {
    let start = format!("{FOLDER}{number}-");
    records().into_iter().find(|page| page.path.starts_with(&start)).unwrap()
}

/// The precedence of a provider's states: earlier states hide later ones.
#[test]
fn the_states_of_a_provider_are_in_order() {
    let mut states = [
        ProviderState::Disabled,
        ProviderState::Paused,
        ProviderState::Closed,
        ProviderState::NoWorker,
        ProviderState::Draining,
        ProviderState::Held,
        ProviderState::BackendUnavailable,
        ProviderState::Misconfigured,
        ProviderState::BreakerOpen,
        ProviderState::Cold,
        ProviderState::Throttled,
        ProviderState::PausedByProvider,
        ProviderState::Probing,
        ProviderState::Blocked,
        ProviderState::WaitingForLimit,
        ProviderState::Running,
        ProviderState::Idle,
    ];
    states.sort();
    let spans = record("0006").spans();
    let documented: Vec<String> =
        spans.iter().cloned().skip_while(|span| span != "disabled").take(states.len()).collect();
    assert_eq!(documented, states.map(|state| state.to_string()));
}
