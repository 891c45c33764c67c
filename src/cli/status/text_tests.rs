use super::*;
use crate::fleet::OverviewInput;
use crate::ledger::pause_of_all::PauseOfAll;
use crate::ledger::provider_row::{LimitRow, ProviderRow};
use crate::ledger::upkeep::ProviderReconciliation;

fn sample_row(name: &str) -> ProviderRow {
    let limit = |name: &str, max_requests, window_ms| LimitRow {
        name: name.to_owned(),
        max_requests,
        window_ms,
        ..LimitRow::default()
    };
    let limits = vec![limit("per-second", 100, 1_000), limit("per-minute", 600, 60_000)];
    ProviderRow { name: name.to_owned(), limits, ..ProviderRow::default() }
}

fn sample_overview() -> Overview {
    let rows = vec![sample_row("acme"), sample_row("a-provider-with-a-long-name")];
    let depths = rows.iter().map(|row| (row.name.clone(), 0)).collect();
    let accounts = Some(crate::fleet::ReconciliationByProvider::new());
    let mut picture =
        crate::fleet::overview(&OverviewInput { rows, depths, reconciliation: accounts, ..OverviewInput::default() });
    let [first, second] = picture.providers.as_mut_slice() else { panic!("two rows") };
    (first.state, first.cause, first.waiting) = (ProviderState::Running, None, 12_345);
    (first.rate_per_s, first.in_flight, first.clears) =
        (Some(94.12), Some(9), ClearTimeOverview::ClearsIn { ms: 125_000 });
    (first.limits[0].used, first.limits[0].remaining) = (Some(87), Some(13));
    (first.limits[1].used, first.limits[1].remaining) = (Some(87), Some(513));
    second.waiting = 0;
    (second.state, second.ends_in_ms) = (ProviderState::BreakerOpen, Some(4_200));
    second.cause = Some("the provider is down: no connection to pay.example".to_owned());
    picture.reconciliation =
        Some(vec![ProviderReconciliation { recorded: 1_234, ..ProviderReconciliation::default() }]);
    picture
}

#[test]
fn pause_of_all_is_a_line_of_its_own() {
    let mut picture = sample_overview();
    let since = "2026-03-01T11:57:55.000Z".to_owned();
    let (by, because) = ("alice@desk".to_owned(), Some("incident 12".to_owned()));
    picture.pause_of_all = Some(PauseOfAll { id: 7, since, by, because, providers: vec!["acme".to_owned()] });
    let page = render_overview(&picture, TableShape::Plain, None);
    let line = "all providers paused by alice@desk since 2026-03-01T11:57:55.000Z (incident 12): \
                `sluicegate provider resume --all` resumes 1 provider";
    assert!(page.contains(line), "{page}");
}

fn account(picture: &mut Overview) -> &mut ProviderReconciliation {
    &mut picture.reconciliation.as_mut().unwrap()[0]
}

#[test]
fn pipe_shows_a_line_and_cause_per_provider() {
    let page = render_overview(&sample_overview(), TableShape::Plain, None);
    let lines: Vec<Vec<&str>> = page.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        lines[1],
        ["acme", "running", "100/1s", "87", "94.1/s", "12,345", "9", "0", "0", "0", "2", "min", "5", "s"]
    );
    assert_eq!(lines[2][..4], ["a-provider-with-a-long-name", "breaker_open", "600/1m", "-"]);
    assert!(page.lines().nth(3).unwrap().starts_with("  └ the provider is down: no connection"), "{page}");
    assert!(page.lines().nth(3).unwrap().ends_with("; next try in 4.2 s"), "{page}");
    assert_eq!(page.lines().last(), Some("all 1,234 recorded payments accounted for"));
}

/// One limit with the default egress rate says it all.
#[test]
fn pace_is_shown_unless_one_limit_says_it() {
    let paces = |change: fn(&mut ProviderRow)| {
        let mut row = ProviderRow { url: "https://acme.example/".to_owned(), ..sample_row("acme") };
        change(&mut row);
        let provider = std::sync::Arc::new(row.validate(1).unwrap());
        let providers = [(provider.name.clone(), provider)].into();
        let rows = vec![row];
        render_overview(
            &crate::fleet::overview(&OverviewInput { rows, providers, ..OverviewInput::default() }),
            TableShape::Plain,
            None,
        )
    };
    let pace = "pace: up to 100/s (limit per-second), 600/1m over time (limit per-minute); egress";
    assert!(paces(|_| ()).contains(&format!("{pace} 100/s per process")));
    assert!(
        paces(|row| row.leak_per_second = Some(9.0)).contains(&format!("{pace} 9/s per process (leak_per_second)"))
    );
    assert!(!paces(|row| row.limits.truncate(1)).contains("pace:"));
}

#[test]
fn shown_limit_applies_to_charges() {
    let mut picture = sample_overview();
    let limit = picture.providers[1].limits[0].clone();
    let with = |name: &str, max_requests, change: fn(&mut LimitOverview)| {
        let mut with = LimitOverview { name: name.to_owned(), max_requests, ..limit.clone() };
        change(&mut with);
        with
    };
    picture.providers[1].limits = vec![
        with("account", 100, |_| ()),
        with("endpoint", 25, |limit| limit.applies_to = "charge".to_owned()),
        with("search", 20, |limit| limit.applies_to = "lookup".to_owned()),
        with("rehearsed", 10, |limit| limit.shadow = true),
        with("each", 1, |limit| limit.scope = "account".to_owned()),
    ];
    let page = render_overview(&picture, TableShape::Plain, None);
    assert_eq!(page.lines().nth(2).unwrap().split_whitespace().nth(2), Some("25/1s"), "{page}");
}

#[test]
fn account_limits_make_clear_time_a_lower_bound() {
    let mut picture = sample_overview();
    let depends = |about_ms| ClearTimeOverview::DependsOnAccounts {
        at_least_ms: 125_000,
        limits: vec!["per-account".to_owned()],
        about_ms,
    };
    picture.providers[0].clears = depends(None);
    let page = render_overview(&picture, TableShape::Plain, None);
    let lines: Vec<&str> = page.lines().collect();
    assert!(lines[1].ends_with("≥ 2 min 5 s"), "{page}");
    assert_eq!(lines[2], "  └ limit per-account counts each account or reference on its own");
    picture.providers[0].clears = depends(Some(428_000));
    let page = render_overview(&picture, TableShape::Plain, None);
    assert!(page.contains("clears in about 7 min 8 s at the rate of the last minutes; limit per-account"), "{page}");
    for (clears, words, note) in [
        (ClearTimeOverview::Never { limit: Some("second".to_owned()) }, "never", ""),
        (ClearTimeOverview::NotWhileBlocked, "not while blocked", ""),
        (ClearTimeOverview::NotWhileThrottled { passed_per_s: None }, "unknown: 429s", ""),
        (ClearTimeOverview::NotWhileThrottled { passed_per_s: Some(6.2) }, "unknown: 429s; 6.2/s get through", ""),
        (
            ClearTimeOverview::NotBefore { limit: "second".to_owned(), at: "2026-11-28T07:13:00.000Z".to_owned() },
            "not before 2026-11-28T07:13:00.000Z",
            "",
        ),
        (ClearTimeOverview::NotWhilePaused, "not while paused", ""),
        (ClearTimeOverview::NotWhileDisabled, "not while disabled", ""),
        (ClearTimeOverview::NotWhileBreakerOpen, "not while the breaker is open", ""),
        (ClearTimeOverview::Unknown { missing: MissingSource::Worker }, "unknown", ""),
        (
            ClearTimeOverview::Unknown { missing: MissingSource::Queue },
            "unknown",
            "the broker does not report how many jobs wait",
        ),
    ] {
        picture.providers[0].clears = clears;
        let page = render_overview(&picture, TableShape::Plain, None);
        let lines: Vec<&str> = page.lines().collect();
        assert!(lines[1].ends_with(words) && (note.is_empty() || lines[2].ends_with(note)), "{page}");
    }
}

#[test]
fn stale_count_shows_its_age() {
    let mut picture = sample_overview();
    let last =
        |picture: &Overview| render_overview(picture, TableShape::Plain, None).lines().last().unwrap().to_owned();
    picture.at = "2026-03-01T12:00:00.000Z".to_owned();
    picture.counted_at = Some("2026-03-01T11:59:56.000Z".to_owned());
    assert_eq!(last(&picture), "all 1,234 recorded payments accounted for");
    picture.counted_at = Some("2026-03-01T11:57:55.000Z".to_owned());
    assert_eq!(last(&picture), "all 1,234 recorded payments accounted for; the counts shown are 125 s old");
    account(&mut picture).recorded = 1;
    assert_eq!(last(&picture), "the one recorded payment is accounted for; the counts shown are 125 s old");
    account(&mut picture).recorded = 0;
    assert_eq!(last(&picture), "no recorded payments; the counts shown are 125 s old");
    picture.reconciliation = None;
    assert_eq!(last(&picture), "reconciliation: unknown, because there is no recent count of the payments");
}

#[test]
fn overview_fits_a_narrow_terminal() {
    for width in [40, 60, 80, 100, 120, 200] {
        let page = render_overview(&sample_overview(), TableShape::Terminal { width: Some(width) }, None);
        assert!(page.lines().all(|line| line.chars().count() <= usize::from(width)), "{width}:\n{page}");
        assert_eq!(page.matches('└').count(), 1, "{width}:\n{page}");
        assert!(!page.contains("delayed") && !page.contains("review"), "all of them are 0\n{page}");
        if width < 80 {
            continue;
        }
        let line_with = |text: &str| page.lines().position(|line| line.contains(text));
        let (running, down) = (line_with("running"), line_with("breaker open"));
        assert!(running.is_some() && running < down && down < line_with("└ the provider is down"), "{width}:\n{page}");
        assert_eq!(page.contains("in flight"), width >= 100, "{width}:\n{page}");
        assert!(page.contains("87 of 100/1s") && page.contains("2 min 5 s"), "{width}:\n{page}");
    }
    // The clear time is never cut, whatever the state.
    let mut worst = sample_overview();
    let [first, second] = worst.providers.as_mut_slice() else { panic!("two rows") };
    (first.state, first.review, first.dead) = (ProviderState::BackendUnavailable, Some(3), Some(12));
    (first.waiting_is_at_least, first.clears) = (true, ClearTimeOverview::Unknown { missing: MissingSource::Worker });
    second.clears = ClearTimeOverview::NotWhilePaused;
    let page = render_overview(&worst, TableShape::Terminal { width: Some(60) }, None);
    let line = |start: &str| page.lines().find(|line| line.starts_with(start)).unwrap_or_default().to_owned();
    assert!(line("acme").ends_with("unknown") && line("a-").ends_with("not while paused"), "{page}");
    // With names as they are, 80 columns hold what there is.
    let titles = |picture: &Overview| {
        let page = render_overview(picture, TableShape::Terminal { width: Some(80) }, None);
        page.lines().next().unwrap().split_whitespace().collect::<Vec<&str>>().join(" ")
    };
    let mut usual = sample_overview();
    usual.providers[1].name = "stripe".to_owned();
    assert_eq!(titles(&usual), "provider state used rate waiting in flight clears in");
    usual.providers[0].delayed = Some(1_200);
    assert_eq!(titles(&usual), "provider state used rate waiting delayed clears in");
    usual.providers[1].review = Some(3);
    assert_eq!(titles(&usual), "provider state used rate waiting review clears in");
    let page = render_overview(&usual, TableShape::Terminal { width: Some(60) }, None);
    assert!(page.lines().next().unwrap().ends_with("clears in") && !page.contains('…'), "{page}");
    let page = render_overview(&usual, TableShape::Terminal { width: Some(80) }, None);
    assert_eq!(page.lines().count(), 6, "two providers, their header, one cause, and the reconciliation\n{page}");
}

#[test]
fn low_terminal_shows_problems_and_busiest_providers() {
    let mut many = sample_overview();
    let idle = many.providers[0].clone();
    many.providers[0].waiting = 1;
    many.providers.extend((0..30).map(|nth| ProviderOverview {
        name: format!("p{nth:02}"),
        waiting: nth,
        ..idle.clone()
    }));
    let page = render_overview(&many, TableShape::Terminal { width: Some(100) }, Some(12));
    assert_eq!(page.lines().count(), 12, "\n{page}");
    let names: Vec<&str> = page.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names[..5], ["provider", "a-provider-with-a-long-name", "└", "p29", "p28"], "\n{page}");
    assert!(page.contains("\n… 25 more\n") && page.ends_with("all 1,234 recorded payments accounted for"), "\n{page}");
    many.warnings = (0..30).map(|nth| format!("worker {nth} is lost")).collect();
    let page = render_overview(&many, TableShape::Terminal { width: Some(100) }, Some(12));
    assert!(page.lines().count() <= 12 && page.contains("… 28 more lines"), "\n{page}");
}

#[test]
fn invalid_row_shows_the_limit_in_force() {
    let mut bad = sample_overview();
    bad.providers[0].problems = vec!["limit per-second: max_requests is -3".to_owned()];
    assert!(
        render_overview(&bad, TableShape::Plain, None).contains("└ invalid row, nothing is sent: limit per-second")
    );
    bad.providers[0].has_valid_row = true;
    let page = render_overview(&bad, TableShape::Plain, None);
    assert!(
        page.contains(
            "└ invalid row, its last valid version is in force (per-second 100/1s): limit per-second: max_requests"
        ),
        "{page}"
    );
}

#[test]
fn discrepancies_and_warnings_are_shown() {
    let mut picture = sample_overview();
    let account = account(&mut picture);
    account.provider = "acme".to_owned();
    account.faults = vec!["7 jobs open, 6 active, delayed, due or in the backlog".to_owned()];
    picture.warnings = vec!["worker a:1 is lost\u{1b}[2J".to_owned()];
    let page = render_overview(&picture, TableShape::Plain, None);
    assert!(page.contains(
        "reconciliation: acme: 7 jobs open, 6 active, delayed, due or in the backlog\nwarning: worker a:1 is lost"
    ));
    assert!(!page.contains('\u{1b}') && !page.contains("accounted for"), "{page}");
}

#[test]
fn numbers_and_durations_are_formatted() {
    for (number, words) in [(0, "0"), (999, "999"), (1_000, "1,000"), (1_234_567, "1,234,567")] {
        assert_eq!(group_thousands(number), words);
    }
    for (ms, words) in [
        (0, "0.0 s"),
        (1_250, "1.2 s"),
        (59_999, "59 s"),
        (125_000, "2 min 5 s"),
        (3_600_000, "1 h 0 min"),
        (90_000_000, "1 d 1 h"),
    ] {
        assert_eq!(rounded_duration(ms), words);
    }
}

#[test]
fn missing_source_is_not_shown_as_zero() {
    let rows = vec![ProviderRow { name: "acme".to_owned(), ..ProviderRow::default() }];
    let account = || ProviderReconciliation {
        provider: "acme".to_owned(),
        delayed: 1_000,
        due: 332,
        ..ProviderReconciliation::default()
    };
    for (queue, ledger, away, waiting, said) in [
        (true, true, false, "1,664", None),
        (false, true, false, "≥ 1,332", Some("at least 1,332 wait; the broker is unreachable")),
        (true, false, true, "≥ 332", Some("at least 332 wait; the jobs in the database could not be counted")),
        (false, false, true, "≥ 0", Some("at least 0 wait; the broker and the database are unreachable")),
    ] {
        let evidence = OverviewInput {
            rows: rows.clone(),
            depths: queue.then(|| ("acme".to_owned(), 332)).into_iter().collect(),
            reconciliation: ledger.then(|| crate::fleet::by_provider([account()])),
            database_problem: away.then(|| "gone".to_owned()),
            ..OverviewInput::default()
        };
        let picture = crate::fleet::overview(&evidence);
        let page = render_overview(&picture, TableShape::Plain, None);
        let cells: Vec<&str> =
            page.lines().nth(1).unwrap().split("  ").filter(|cell| !cell.is_empty()).map(str::trim).collect();
        assert_eq!((cells[5], cells[6] == "-", cells[4] == "-"), (waiting, !ledger, away), "{page}");
        match said {
            Some(words) => assert!(page.contains(words), "{page}"),
            None => assert!(!page.contains("at least"), "{page}"),
        }
    }
}
