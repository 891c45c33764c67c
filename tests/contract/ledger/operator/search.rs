//! Lists of jobs by a filter: every filter finds exactly its jobs, newest first and page by page, however rare they are.

use sluicegate::domain::job_filter::{OPEN_STATES, Range, ReasonFilter, is_finished};
use sluicegate::ledger::operator::{CurrencyTotal, JobPage, JobSearchError, JobSummary, JobTotals};

use super::*;

on_every_database!(
    each_filter_finds_its_jobs_newest_first,
    new_jobs_move_no_page,
    rare_jobs_are_found_behind_a_bounded_search,
    beginnings_are_found_by_index,
    totals_are_exact_up_to_a_bound,
);

/// The first instant of [`Fixture::recorded`], in seconds.
const FIRST: i64 = 1_795_000_000;

impl Fixture {
    /// Records jobs `r-1` to `r-{count}` in this order; three share each second.
    async fn recorded(&self, kind: Kind, count: u32) {
        let at = |seconds: &str| match kind {
            Kind::Postgres => format!("to_timestamp({seconds})"),
            _ => format!("({seconds}) * 1000"),
        };
        let hash = "01".repeat(32);
        let hash = if kind == Kind::Postgres { format!("'\\x{hex}'::bytea", hex = hash) } else { format!("x'{hash}'") };
        let (created, updated) = (at(&format!("{FIRST} + n / 3")), at(&format!("{FIRST} + n / 3 + n % 11")));
        let sql = format!(
            "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, \
                 reference, cost, priority, state, reason, wake_at, wait_reason, fence, provider_reference, created_at, \
                 updated_at) \
             WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count}) \
             SELECT 'r-' || n, CASE n % 4 WHEN 0 THEN 'adyen' WHEN 1 THEN 'wise' ELSE 'stripe' END, 'r-' || n, n < 0, \
                 {hash}, n, CASE n % 3 WHEN 0 THEN 'JPY' ELSE 'EUR' END, \
                 CASE WHEN n % 7 > 0 THEN 'acct_' || (n % 7) END, CASE WHEN n % 2 = 0 THEN 'Invoice ' || n END, 1, 0, \
                 CASE n % 5 WHEN 0 THEN 'waiting' WHEN 1 THEN 'review' WHEN 2 THEN 'declined' WHEN 3 THEN 'dead' \
                     ELSE 'succeeded' END, \
                 CASE n % 5 WHEN 2 THEN 'card ' || (n % 9) WHEN 1 THEN 'outcome unknown' END, {created}, \
                 CASE WHEN n % 10 = 0 THEN 'throttled' WHEN n % 10 = 5 THEN 'retry' END, 1, \
                 CASE WHEN n % 5 = 4 THEN 'ch_' || n END, {created}, {updated} FROM numbers"
        );
        self.sql(&sql).await.unwrap();
    }

    /// All pages of a filter.
    async fn pages(&self, filter: &JobFilter, at_most: u32) -> Vec<JobPage> {
        let (mut pages, mut after) = (Vec::new(), None);
        loop {
            let page = self.database.list_jobs(filter, after.as_ref(), at_most).await.unwrap();
            assert!(page.jobs.len() <= at_most as usize && page.unreadable.is_empty(), "{page:?}");
            after = page.next.as_deref().map(id);
            pages.push(page);
            if after.is_none() {
                return pages;
            }
        }
    }

    async fn listed(&self, filter: &JobFilter, at_most: u32) -> Vec<JobSummary> {
        self.pages(filter, at_most).await.into_iter().flat_map(|page| page.jobs).collect()
    }
}

fn is_in(range: Range, value: i64, includes_end: bool) -> bool {
    let ends = |end: i64| if includes_end { value <= end } else { value < end };
    range.from.is_none_or(|from| value >= from) && range.to.is_none_or(ends)
}

/// Whether a filter holds for a job, by its definition.
fn holds(filter: &JobFilter, job: &JobSummary) -> bool {
    let begins = |text: &Option<String>, with: &str| text.as_ref().is_some_and(|text| text.starts_with(with));
    let has_finished = is_finished(&job.state);
    (filter.states.is_empty() || filter.states.contains(&job.state.as_str()))
        && filter.provider.as_ref().is_none_or(|provider| provider.as_str() == job.provider)
        && filter.account.as_ref().is_none_or(|account| Some(account.as_str()) == job.account.as_deref())
        && filter.id.as_ref().is_none_or(|id| id.as_str() == job.id)
        && filter.search.as_ref().is_none_or(|text| {
            job.id.starts_with(text)
                || begins(&job.reference, text)
                || job.provider_reference.as_deref() == Some(text.as_str())
        })
        && match &filter.reason {
            None => true,
            Some(ReasonFilter::Waits(code)) => !has_finished && job.wait_reason.as_deref() == Some(code),
            Some(ReasonFilter::Ended(text)) => has_finished && begins(&job.reason, text),
        }
        && filter.currency.as_ref().is_none_or(|currency| *currency == job.currency)
        && is_in(filter.amounts, job.amount, true)
        && is_in(filter.created, job.created_at.0, false)
        && (filter.finished.is_unbounded() || (has_finished && is_in(filter.finished, job.updated_at.0, false)))
}

/// One of these values, by a digit of the number.
fn pick<T: Clone>(values: &[T], number: &mut usize) -> T {
    let value = values[*number % values.len()].clone();
    *number /= values.len();
    value
}

fn filter(mut number: usize) -> JobFilter {
    let range = |from: Option<i64>, to: Option<i64>| {
        let at = |second: i64| (FIRST + second) * 1_000;
        Range { from: from.map(at), to: to.map(at) }
    };
    let any = Range::default();
    let n = &mut number;
    JobFilter {
        states: pick(&[vec![], vec!["waiting"], vec!["review", "dead"], OPEN_STATES.to_vec(), vec!["succeeded"]], n),
        provider: pick(&[None, Some(name("stripe")), Some(name("adyen"))], n),
        account: pick(&[None, None, Some(id("acct_3"))], n),
        search: pick(&["", "", "", "r-1", "Invoice 1", "ch_14"], n)
            .split_terminator('\0')
            .next()
            .filter(|text| !text.is_empty())
            .map(str::to_owned),
        reason: pick(&[None, None, None, Some(ReasonFilter::new("throttled")), Some(ReasonFilter::new("card"))], n),
        currency: pick(&[None, Some("EUR".to_owned())], n),
        amounts: pick(&[any, any, Range { from: Some(50), to: Some(250) }], n),
        created: pick(&[any, any, range(Some(20), Some(90)), range(None, Some(33))], n),
        finished: pick(&[any, any, range(Some(40), None), range(Some(5), Some(60))], n),
        id: pick(&[None, None, None, None, Some(id("r-17"))], n),
    }
}

async fn each_filter_finds_its_jobs_newest_first(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.recorded(kind, 300).await;
    let all = fixture.listed(&JobFilter::default(), 1_000).await;
    let newest_first: Vec<String> = (1..=300).rev().map(|n| format!("r-{n}")).collect();
    assert_eq!(all.iter().map(|job| job.id.clone()).collect::<Vec<_>>(), newest_first);
    let mut matched = 0;
    for round in 0..250_usize {
        // Steps that reach every digit.
        let filter = filter(round * 7_919 + round * round * 104_729);
        let wanted: Vec<&JobSummary> = all.iter().filter(|job| holds(&filter, job)).collect();
        matched += usize::from(!wanted.is_empty());
        let found = fixture.listed(&filter, [1, 7, 1_000][round % 3]).await;
        assert_eq!(found.iter().collect::<Vec<_>>(), wanted, "{round}: {filter:?}");
        let totals = fixture.database.job_totals(&filter).await.unwrap();
        let sum = |of: &str| wanted.iter().filter(|job| job.currency == of).map(|job| job.amount).sum::<i64>();
        let sums: Vec<_> = totals.currencies.iter().map(|total| (total.currency.as_str(), total.amount)).collect();
        let expected: Vec<_> = ["EUR", "JPY"].into_iter().map(|of| (of, sum(of))).filter(|(_, sum)| *sum > 0).collect();
        assert_eq!((totals.jobs, sums, totals.at_least), (wanted.len() as u64, expected, false), "{filter:?}");
    }
    assert!(matched > 60, "the filters are too narrow: {matched}");
    let unknown = fixture.database.list_jobs(&JobFilter::default(), Some(&id("nobody")), 5).await;
    assert!(matches!(unknown, Err(JobSearchError::UnknownCursor(_))), "{unknown:?}");
}

async fn new_jobs_move_no_page(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.recorded(kind, 30).await;
    let first = fixture.database.list_jobs(&JobFilter::default(), None, 10).await.unwrap();
    fixture.take(&job("later")).await;
    let after = first.next.as_deref().map(id);
    let second = fixture.database.list_jobs(&JobFilter::default(), after.as_ref(), 10).await.unwrap();
    let ids = |page: &JobPage| page.jobs.iter().map(|job| job.id.clone()).collect::<Vec<_>>();
    let numbers = |from: u32| (from..from + 10).rev().map(|n| format!("r-{n}")).collect::<Vec<_>>();
    assert_eq!((ids(&first), ids(&second)), (numbers(21), numbers(11)));
    assert_eq!(fixture.database.list_jobs(&JobFilter::default(), None, 1).await.unwrap().jobs[0].id, "later");
}

/// More jobs than one statement reads, of which only the oldest matches.
async fn rare_jobs_are_found_behind_a_bounded_search(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.recorded(kind, 21_000).await;
    let cheap = JobFilter {
        currency: Some("EUR".to_owned()),
        amounts: Range { from: None, to: Some(1) },
        ..JobFilter::default()
    };
    for filter in [cheap.clone(), JobFilter { finished: Range { from: Some(1), to: None }, ..cheap }] {
        let pages = fixture.pages(&filter, 5).await;
        let (last, empty) = pages.split_last().unwrap();
        assert_eq!(last.jobs.iter().map(|job| job.id.as_str()).collect::<Vec<_>>(), ["r-1"]);
        assert_eq!((&last.next, last.searched_back_to), (&None, None));
        assert!(empty.iter().all(|page| page.jobs.is_empty() && page.searched_back_to.is_some()), "{empty:?}");
        // PostgreSQL reads all finished jobs at once.
        assert!(!empty.is_empty() || (kind == Kind::Postgres && !filter.finished.is_unbounded()), "{filter:?}");
        let totals = fixture.database.job_totals(&filter).await.unwrap();
        assert_eq!((totals.jobs, totals.currencies.len()), if totals.at_least { (0, 0) } else { (1, 1) });
    }
}

async fn beginnings_are_found_by_index(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.recorded(kind, 6_000).await;
    fixture.take(&Job { reference: Some("invoice-é/1".into()), ..job("Z_last-1") }).await;
    fixture.take(&Job { reference: Some("invoice-e/2".into()), ..job("Z-last_2") }).await;
    for (text, found) in [
        ("r-4711", &["r-4711"][..]),
        ("Z", &["Z-last_2", "Z_last-1"]),
        ("Z_", &["Z_last-1"]),
        ("Z-", &["Z-last_2"]),
        ("invoice-é", &["Z_last-1"]),
        ("invoice-e", &["Z-last_2"]),
        ("invoice-", &["Z-last_2", "Z_last-1"]),
        ("Invoice 4712", &["r-4712"]),
        ("ch_14", &["r-14"]),
        ("z", &[]),
        ("%", &[]),
        ("'; --", &[]),
    ] {
        let filter = JobFilter { search: Some(text.to_owned()), ..JobFilter::default() };
        let page = fixture.database.list_jobs(&filter, None, 50).await.unwrap();
        let ids: Vec<&str> = page.jobs.iter().map(|job| job.id.as_str()).collect();
        assert_eq!((ids.as_slice(), page.next), (found, None), "{text}");
    }
    // A beginning that most jobs have is found among the newest.
    let common = JobFilter { search: Some("r-".to_owned()), ..JobFilter::default() };
    let page = fixture.database.list_jobs(&common, None, 2).await.unwrap();
    assert_eq!(page.jobs.iter().map(|job| job.id.as_str()).collect::<Vec<_>>(), ["r-6000", "r-5999"]);
}

async fn totals_are_exact_up_to_a_bound(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let total = |currency: &str, jobs, amount| CurrencyTotal { currency: currency.to_owned(), jobs, amount };
    fixture.take(&Job { amount: i64::MAX - 5, ..job("huge") }).await;
    fixture.take(&Job { amount: 5, ..job("tiny") }).await;
    let exact = JobTotals { at_least: false, jobs: 2, currencies: vec![total("EUR", 2, i64::MAX)] };
    assert_eq!(fixture.database.job_totals(&JobFilter::default()).await.unwrap(), exact);
    fixture.take(&Job { amount: 1, ..job("more") }).await;
    let beyond = JobTotals { at_least: true, jobs: 3, currencies: vec![total("EUR", 3, i64::MAX)] };
    assert_eq!(fixture.database.job_totals(&JobFilter::default()).await.unwrap(), beyond);
    // SQLite counts fewer, because its workers wait meanwhile.
    if kind != Kind::Postgres {
        fixture.recorded(kind, 21_000).await;
        let totals = fixture.database.job_totals(&JobFilter::default()).await.unwrap();
        assert_eq!((totals.at_least, totals.jobs), (true, 20_000));
    }
    assert_eq!(
        fixture.database.job_totals(&JobFilter::of_state("expired")).await.unwrap(),
        JobTotals { at_least: false, jobs: 0, currencies: Vec::new() }
    );
}
