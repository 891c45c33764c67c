use super::*;
use crate::fleet::{Conserved, Evidence};
use crate::ledger::provider_row::{LimitRow, ProviderRow};

fn picture() -> Overview {
    let limit = |name: &str, max_requests, window_ms| LimitRow {
        name: name.to_owned(),
        max_requests,
        window_ms,
        ..LimitRow::default()
    };
    let row = |name: &str| ProviderRow {
        name: name.to_owned(),
        limits: vec![limit("per-second", 100, 1_000), limit("per-minute", 600, 60_000)],
        ..ProviderRow::default()
    };
    let rows = vec![row("acme"), row("a-provider-with-a-long-name")];
    let mut picture = crate::fleet::overview(&Evidence { rows, ..Evidence::default() });
    let [first, second] = picture.providers.as_mut_slice() else { panic!("two rows") };
    (first.state, first.cause, first.waiting) = (State::Running, None, 12_345);
    (first.rate_per_s, first.in_flight, first.drained_in_ms) = (94.12, 9, Some(125_000));
    (first.limits[0].used, first.limits[0].free) = (Some(87), Some(13));
    (first.limits[1].used, first.limits[1].free) = (Some(87), Some(513));
    (second.state, second.ends_in_ms) = (State::BreakerOpen, Some(4_200));
    second.cause = Some("the provider is down: no connection to pay.example (refused)".to_owned());
    picture.conservation =
        vec![Conserved { recorded: 1_234, ..Conserved::from(crate::ledger::upkeep::Account::default()) }];
    picture
}

#[test]
fn in_a_pipe_each_provider_is_a_line_with_its_cause_under_it() {
    let page = overview(&picture(), Shape::Plain);
    let lines: Vec<Vec<&str>> = page.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        lines[1],
        ["acme", "running", "100/1s", "87", "94.1/s", "12,345", "9", "0", "0", "0", "2", "min", "5", "s"]
    );
    assert_eq!(lines[2][..4], ["a-provider-with-a-long-name", "breaker_open", "600/1m", "-"]);
    assert!(page.lines().nth(3).unwrap().starts_with("  └ the provider is down: no connection"), "{page}");
    assert!(page.lines().nth(3).unwrap().ends_with("; ends in 4.2 s"), "{page}");
    assert_eq!(page.lines().last(), Some("conservation: adds up (1,234 jobs)"));
}

#[test]
fn where_accounts_decide_the_drain_time_is_the_least_and_says_so() {
    let mut picture = picture();
    picture.providers[0].drain_depends_on = vec!["per-account".to_owned()];
    let page = overview(&picture, Shape::Plain);
    let lines: Vec<&str> = page.lines().collect();
    assert!(lines[1].ends_with("≥ 2 min 5 s"), "{page}");
    assert_eq!(lines[2], "  └ limit per-account counts each account or reference on its own");
    picture.providers[0].drained_about_ms = Some(428_000);
    let page = overview(&picture, Shape::Plain);
    assert!(page.contains("drained in about 7 min 8 s at the rate of the last minutes; limit per-account"), "{page}");
    // Nothing waits: there is nothing to say.
    picture.providers[0].waiting = 0;
    assert!(!overview(&picture, Shape::Plain).contains("per-account"));
}

#[test]
fn an_old_count_says_how_old_it_is() {
    let mut picture = picture();
    let last = |picture: &Overview| overview(picture, Shape::Plain).lines().last().unwrap().to_owned();
    picture.at = "2026-03-01T12:00:00.000Z".to_owned();
    picture.counted_at = Some("2026-03-01T11:59:56.000Z".to_owned());
    assert_eq!(last(&picture), "conservation: adds up (1,234 jobs)");
    picture.counted_at = Some("2026-03-01T11:57:55.000Z".to_owned());
    assert_eq!(last(&picture), "conservation: adds up (1,234 jobs, counted 125 s ago)");
}

#[test]
fn a_narrow_terminal_holds_everything() {
    for width in [40, 60, 80, 100, 120, 200] {
        let page = overview(&picture(), Shape::Terminal { width: Some(width) });
        assert!(page.lines().all(|line| line.chars().count() <= usize::from(width)), "{width}:\n{page}");
        assert_eq!(page.matches('└').count(), 1, "{width}:\n{page}");
        if width < 80 {
            continue;
        }
        let line_with = |text: &str| page.lines().position(|line| line.contains(text));
        let (running, down) = (line_with("running"), line_with("breaker_open"));
        assert!(running.is_some() && running < down && down < line_with("└ the provider is down"), "{width}:\n{page}");
        assert_eq!(page.contains("parked"), width > 120, "{width}:\n{page}");
        assert!(page.contains("review") && page.contains("2 min 5 s"), "{width}:\n{page}");
    }
}

#[test]
fn faults_and_warnings_are_said() {
    let mut picture = picture();
    picture.conservation[0].provider = "acme".to_owned();
    picture.conservation[0].faults = vec!["7 jobs open, 6 in hand, parked or due".to_owned()];
    picture.warnings = vec!["worker a:1 is lost\u{1b}[2J".to_owned()];
    let page = overview(&picture, Shape::Plain);
    assert!(page.contains("conservation: acme: 7 jobs open, 6 in hand, parked or due\nwarning: worker a:1 is lost"));
    assert!(!page.contains('\u{1b}') && !page.contains("adds up"), "{page}");
}

#[test]
fn numbers_and_times_are_read_at_a_glance() {
    for (number, words) in [(0, "0"), (999, "999"), (1_000, "1,000"), (1_234_567, "1,234,567")] {
        assert_eq!(grouped(number), words);
    }
    for (ms, words) in [
        (0, "0.0 s"),
        (1_250, "1.2 s"),
        (59_999, "59 s"),
        (125_000, "2 min 5 s"),
        (3_600_000, "1 h 0 min"),
        (90_000_000, "1 d 1 h"),
    ] {
        assert_eq!(in_words(ms), words);
    }
}
