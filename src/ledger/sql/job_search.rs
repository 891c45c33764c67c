//! The search for jobs by a filter: pages, newest first, and totals.
//!
//! The order is that of creation, then of recording. A page begins after the last job of the page before, so new jobs
//! move no page. Each search reads one source by index, in this order: the job of an id; the few jobs of a beginning; an
//! account; the states of providers, merged; all jobs. The other conditions are checked on what the source yields. A
//! statement reads a bounded number of jobs, and the next page goes on where it ended. So no filter is slow, however few
//! jobs match. See `docs/decisions/0048-jobs-are-searched-by-index.md`.
//!
//! Statements are made for each filter, because the databases merge sorted arms only if each is written out. They
//! contain no input: all values are arguments.

use std::time::Duration;

use super::dialect::{Dialect, Template};
use super::engine::{Step, Value, args};
use super::fleet::LANES;
use super::jobs::{blocked_flow_of, summary_columns};
use super::result::{ReadRows, SqlRow, read_each};
use super::texts;
use crate::domain::job::{Identifier, JobId};
use crate::domain::job_filter::{JobFilter, ReasonFilter, STATES};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::{CurrencyTotal, JobPage, JobSearchError, JobTotals, LIST_MAX};

mod selection;

/// Most arms of a merge; with more, all jobs are read instead.
const ARMS_MAX: usize = 120;
/// Most jobs that are looked up one by one for the beginning of an id or a reference.
const FOUND_MAX: u32 = 1_000;
/// How long a page may take, and how long the totals may.
const PAGE_TIME: Duration = Duration::from_secs(5);
const TOTALS_TIME: Duration = Duration::from_secs(3);
/// Sums are kept in two parts, so that no database overflows.
const PART: i64 = 1_000_000_000;

/// Most jobs that one statement reads for a page, and for totals. SQLite has one connection, for which workers wait.
const fn scan_max(dialect: Dialect) -> u32 {
    match dialect {
        Dialect::Postgres => 20_000,
        Dialect::Sqlite => 5_000,
    }
}

const fn totals_max(dialect: Dialect) -> u32 {
    match dialect {
        Dialect::Postgres => 100_000,
        Dialect::Sqlite => 20_000,
    }
}

/// The columns of a source: those of a page, and those of conditions.
const COLUMNS: &str = "jobs.id, jobs.provider, jobs.state, jobs.amount, jobs.currency, jobs.account, jobs.reference, \
     jobs.attempts, jobs.wake_at, jobs.reason, jobs.wait_reason, jobs.wait_limit, jobs.wait_detail, \
     jobs.provider_reference, jobs.charged_amount, jobs.created_at, jobs.updated_at, jobs.priority, jobs.backlog";

/// The position of a job in the order, exactly as stored. SQLite numbers rows in the order of recording.
static POSITION: Template = Template::by_dialect(
    "SELECT created_at::text AS created, seq AS number FROM jobs WHERE id = $1",
    "SELECT CAST(created_at AS TEXT) AS created, rowid AS number FROM jobs WHERE id = $1",
);

static PROVIDERS: Template =
    Template::made(|_| format!("{LANES} SELECT provider FROM lanes WHERE provider IS NOT NULL"));

/// Where a search reads its jobs.
#[derive(Debug)]
enum Source {
    Id(JobId),
    /// Jobs that a beginning has found.
    Found(Vec<String>),
    Account(Identifier),
    /// Jobs of these providers in the possible states, merged.
    Lanes(Vec<String>),
    All,
}

impl Source {
    /// Whether an index has its jobs in the order of pages.
    fn is_ordered(&self) -> bool {
        !matches!(self, Self::Id(_) | Self::Found(_))
    }
}

/// One statement as it is put together.
struct Statement {
    dialect: Dialect,
    args: Vec<Value>,
}

impl Statement {
    /// Adds an argument; returns its name.
    fn bind(&mut self, value: impl Into<Value>) -> String {
        self.args.push(value.into());
        format!("${}", self.args.len())
    }

    /// Whether `column` begins with an argument.
    fn begins_with(&mut self, column: &str, beginning: &str) -> String {
        let length = self.bind(i64::try_from(beginning.chars().count()).unwrap_or(i64::MAX));
        let text = self.bind(beginning);
        format!("substr({column}, 1, CAST({length} AS integer)) = {text}")
    }
}

/// A search of one filter, from a position on.
struct JobSearch<'a> {
    filter: &'a JobFilter,
    states: Vec<&'static str>,
    source: Source,
    after: Option<SqlRow>,
}

impl JobSearch<'_> {
    /// The jobs of the source, in the order of pages; at most so many.
    fn jobs(&self, statement: &mut Statement, at_most: u32) -> Result<String, LedgerError> {
        let bounds = self.bounds(statement)?;
        let number = match statement.dialect {
            Dialect::Postgres => "jobs.seq",
            Dialect::Sqlite => "jobs.rowid",
        };
        let arms: Vec<String> = match &self.source {
            Source::Id(id) => vec![format!("jobs.id = {}", statement.bind(id))],
            Source::Found(ids) => {
                let ids = statement.bind(texts(ids.iter().map(String::as_str)));
                vec![match statement.dialect {
                    // As `{among:…}`, for the same reason.
                    Dialect::Postgres => format!("jobs.id = ANY (ARRAY({{texts:{ids}}}))"),
                    Dialect::Sqlite => format!("jobs.id IN ({{texts:{ids}}})"),
                }]
            }
            Source::Account(account) => vec![format!("jobs.account = {}", statement.bind(account))],
            Source::Lanes(providers) => {
                let states: Vec<String> = self.states.iter().map(|state| statement.bind(*state)).collect();
                let providers: Vec<String> = providers.iter().map(|name| statement.bind(name)).collect();
                let arm =
                    |provider: &String, state: &String| format!("jobs.provider = {provider} AND jobs.state = {state}");
                providers.iter().flat_map(|name| states.iter().map(move |state| arm(name, state))).collect()
            }
            Source::All => vec!["jobs.created_at IS NOT NULL".to_owned()],
        };
        let order = "ORDER BY created_at DESC, number DESC";
        let arm = |of: &String| format!("SELECT {COLUMNS}, {number} AS number FROM jobs WHERE {of}{bounds}");
        let arms: Vec<String> = match statement.dialect {
            // PostgreSQL merges arms only if each says its order. SQLite does not accept that, and merges them anyway.
            Dialect::Postgres if arms.len() > 1 => arms.iter().map(|of| format!("({} {order})", arm(of))).collect(),
            _ => arms.iter().map(arm).collect(),
        };
        Ok(format!("{} {order} LIMIT {at_most}", arms.join(" UNION ALL ")))
    }

    /// The bounds of creation and the position, which every index in the order of pages can search.
    fn bounds(&self, statement: &mut Statement) -> Result<String, LedgerError> {
        let created = self.filter.possible_creation();
        let mut bounds = String::new();
        for (ms, comparison) in [(created.from, ">="), (created.to, "<")] {
            if let Some(ms) = ms {
                bounds += &format!(" AND jobs.created_at {comparison} {{at:{}}}", statement.bind(ms));
            }
        }
        let Some(row) = &self.after else { return Ok(bounds) };
        let created = statement.bind(row.get::<String>("created")?);
        let number = statement.bind(row.get::<i64>("number")?);
        bounds += &match statement.dialect {
            Dialect::Postgres => format!(" AND (jobs.created_at, jobs.seq) < ({created}::timestamptz, {number})"),
            Dialect::Sqlite => format!(" AND (jobs.created_at, jobs.rowid) < (CAST({created} AS INTEGER), {number})"),
        };
        Ok(bounds)
    }

    /// What [`Self::conditions`] need beside `page`.
    fn joined(&self, dialect: Dialect) -> String {
        let of_waits = matches!(self.filter.reason, Some(ReasonFilter::Waits(_)));
        if of_waits { blocked_flow_of("page", dialect) } else { String::new() }
    }

    /// The conditions that the source does not ensure, on its rows as `page`; `None` if it ensures all.
    fn conditions(&self, statement: &mut Statement) -> Option<String> {
        let filter = self.filter;
        let mut all = Vec::new();
        if !matches!(self.source, Source::Lanes(_)) {
            if let Some(provider) = &filter.provider {
                all.push(format!("jobs.provider = {}", statement.bind(provider)));
            }
            if self.states.len() < STATES.len() {
                all.push(format!("jobs.state IN ('{}')", self.states.join("', '")));
            }
        }
        if let (Some(account), false) = (&filter.account, matches!(self.source, Source::Account(_))) {
            all.push(format!("jobs.account = {}", statement.bind(account)));
        }
        if let (Some(search), false) = (&filter.search, matches!(self.source, Source::Found(_))) {
            let id = statement.begins_with("jobs.id", search);
            let reference = statement.begins_with("jobs.reference", search);
            let of_provider = statement.bind(search);
            all.push(format!("({id} OR {reference} OR jobs.provider_reference = {of_provider})"));
        }
        match &filter.reason {
            Some(ReasonFilter::Waits(code)) => {
                all.push(format!("COALESCE(flows.blocked_reason, jobs.wait_reason) = {}", statement.bind(*code)));
            }
            Some(ReasonFilter::Ended(beginning)) => all.push(statement.begins_with("jobs.reason", beginning)),
            None => {}
        }
        if let Some(currency) = &filter.currency {
            all.push(format!("jobs.currency = {}", statement.bind(currency)));
        }
        for (amount, comparison) in [(filter.amounts.from, ">="), (filter.amounts.to, "<=")] {
            if let Some(amount) = amount {
                all.push(format!("jobs.amount {comparison} {}", statement.bind(amount)));
            }
        }
        for (ms, comparison) in [(filter.finished.from, ">="), (filter.finished.to, "<")] {
            if let Some(ms) = ms {
                all.push(format!("jobs.updated_at {comparison} {{at:{}}}", statement.bind(ms)));
            }
        }
        (!all.is_empty()).then(|| all.join(" AND ").replace("jobs.", "page."))
    }
}

impl Database {
    /// Jobs that match, newest first, after `after`; at most `at_most`, and never more than [`LIST_MAX`]. A page that is
    /// not full may have a next one.
    ///
    /// # Errors
    /// When the ledger has no job `after`, or the database fails.
    pub async fn list_jobs(
        &self,
        filter: &JobFilter,
        after: Option<&JobId>,
        at_most: u32,
    ) -> Result<JobPage, JobSearchError> {
        let after = match after {
            Some(id) => {
                let position = self.query_one(&POSITION, args![id]).await?;
                Some(position.ok_or_else(|| JobSearchError::UnknownCursor(id.clone()))?)
            }
            None => None,
        };
        let Some(search) = self.job_search(filter, after).await? else { return Ok(JobPage::default()) };
        Ok(self.page(&search, at_most.min(LIST_MAX)).await?)
    }

    /// Number and sums of the jobs that match, or of the newest ones if there are too many.
    pub async fn job_totals(&self, filter: &JobFilter) -> Result<JobTotals, LedgerError> {
        let Some(search) = self.job_search(filter, None).await? else { return Ok(JobTotals::default()) };
        let at_most = totals_max(self.dialect());
        let mut statement = Statement { dialect: self.dialect(), args: Vec::new() };
        let jobs = search.jobs(&mut statement, at_most)?;
        let matches = search.conditions(&mut statement).unwrap_or_else(|| "1 = 1".to_owned());
        let sum = |of: String| format!("CAST(sum(CASE WHEN matches THEN {of} ELSE 0 END) AS bigint)");
        let text = format!(
            "SELECT currency, {} AS jobs, {} AS parts, {} AS rest, CAST(count(*) AS bigint) AS searched \
             FROM (SELECT page.currency, page.amount, {matches} AS matches FROM ({jobs}) AS page {}) AS matched \
             GROUP BY currency",
            sum("1".to_owned()),
            sum(format!("amount / {PART}")),
            sum(format!("amount % {PART}")),
            search.joined(self.dialect()),
        );
        totals(&self.search(&search.source, text, statement, TOTALS_TIME).await?, at_most)
    }

    /// `None`: no job can match.
    async fn job_search<'a>(
        &self,
        filter: &'a JobFilter,
        after: Option<SqlRow>,
    ) -> Result<Option<JobSearch<'a>>, LedgerError> {
        let states = filter.possible_states();
        if states.is_empty() {
            return Ok(None);
        }
        let source = self.source(filter, &states).await?;
        Ok(Some(JobSearch { filter, states, source, after }))
    }

    async fn source(&self, filter: &JobFilter, states: &[&str]) -> Result<Source, LedgerError> {
        if let Some(id) = &filter.id {
            return Ok(Source::Id(id.clone()));
        }
        if let Some(found) = self.found(filter).await? {
            return Ok(Source::Found(found));
        }
        if let Some(account) = &filter.account {
            return Ok(Source::Account(account.clone()));
        }
        let providers: Vec<String> = match &filter.provider {
            Some(provider) => vec![provider.to_string()],
            None if states.len() == STATES.len() => return Ok(Source::All),
            None => {
                let rows = self.query_by_index(&PROVIDERS, []).await?;
                rows.iter().map(|row| row.get("provider")).collect::<Result<_, _>>()?
            }
        };
        let is_merged = (1..=ARMS_MAX).contains(&(providers.len() * states.len()));
        Ok(if is_merged { Source::Lanes(providers) } else { Source::All })
    }

    /// The jobs of a beginning, by the indexes of ids and references; `None`: nothing is searched for, or too much is
    /// found. Then a beginning is common, and a page finds it among the newest jobs.
    async fn found(&self, filter: &JobFilter) -> Result<Option<Vec<String>>, LedgerError> {
        let Some(text) = &filter.search else { return Ok(None) };
        let mut statement = Statement { dialect: self.dialect(), args: Vec::new() };
        let is = statement.bind(text);
        let at_most = FOUND_MAX + 1;
        // Both databases compare byte by byte, so a beginning is a range.
        let end = statement.bind(format!("{text}{}", char::MAX));
        let begins = |column: &str| format!("{column} >= {is} AND {column} < {end} LIMIT {at_most}");
        let mut arms = vec![
            format!("SELECT id FROM jobs WHERE state = 'succeeded' AND provider_reference = {is} LIMIT {at_most}"),
            format!("SELECT id FROM jobs WHERE reference IS NOT NULL AND {}", begins("reference")),
        ];
        if Identifier::new(text.as_str()).is_ok() {
            arms.push(format!("SELECT id FROM jobs WHERE {}", begins("id")));
        }
        let arms: Vec<String> =
            (1..).zip(arms).map(|(number, arm)| format!("SELECT id FROM ({arm}) AS arm_{number}")).collect();
        let rows = self.search(&Source::Found(Vec::new()), arms.join(" UNION "), statement, PAGE_TIME).await?;
        if rows.len() > FOUND_MAX as usize {
            return Ok(None);
        }
        rows.iter().map(|row| row.get("id")).collect::<Result<_, _>>().map(Some)
    }

    async fn page(&self, search: &JobSearch<'_>, at_most: u32) -> Result<JobPage, LedgerError> {
        let mut statement = Statement { dialect: self.dialect(), args: Vec::new() };
        let scan = scan_max(self.dialect()).max(at_most);
        // Arguments are numbered as they are added: those of the source come first, whatever the limit.
        let source = search.jobs(&mut statement, scan)?;
        let conditions = search.conditions(&mut statement);
        let is_cut = conditions.is_some();
        let conditions = conditions.map(|conditions| format!(" WHERE {conditions}")).unwrap_or_default();
        let text = format!(
            "SELECT {} FROM ({source}) AS page {}{conditions} \
             ORDER BY page.created_at DESC, page.number DESC LIMIT {at_most}",
            summary_columns("page"),
            blocked_flow_of("page", self.dialect()),
        );
        let rows = self.search(&search.source, text, statement, PAGE_TIME).await?;
        let is_full = rows.len() >= at_most as usize;
        let last = rows.last().filter(|_| is_full);
        let mut next: Option<String> = last.and_then(|row| row.get("id").ok());
        let mut searched_back_to = None;
        if is_cut
            && !is_full
            && let Some(edge) = self.edge(search, scan).await?
        {
            next = Some(edge.get("id")?);
            // An instant that cannot be read is no reason to end the list.
            searched_back_to = edge.get("created_at").ok();
        }
        let ReadRows { rows: jobs, unreadable } = read_each(&rows, "id");
        Ok(JobPage { jobs, unreadable, next, searched_back_to })
    }

    /// The last job that a full search of the source read; `None`: it read all.
    async fn edge(&self, search: &JobSearch<'_>, scan: u32) -> Result<Option<SqlRow>, LedgerError> {
        let mut statement = Statement { dialect: self.dialect(), args: Vec::new() };
        let source = search.jobs(&mut statement, 1)?;
        let text = format!(
            "SELECT page.id, {{ms:page.created_at}} AS created_at_ms FROM ({source} OFFSET {}) AS page",
            scan.saturating_sub(1)
        );
        Ok(self.search(&search.source, text, statement, PAGE_TIME).await?.into_iter().next())
    }

    /// Runs a statement of a search. PostgreSQL reads its source by the index, whatever the statistics say.
    async fn search(
        &self,
        source: &Source,
        text: String,
        statement: Statement,
        at_most: Duration,
    ) -> Result<Vec<SqlRow>, LedgerError> {
        let sql = self.dialect().render(&text);
        if self.dialect() == Dialect::Sqlite {
            return self.engine.query(&sql, statement.args.into()).await;
        }
        let plan_by_index = if source.is_ordered() { &PLAN_IN_ORDER } else { &PLAN_BY_INDEX };
        let steps = vec![self.step(plan_by_index, []), Step::new(&sql, statement.args.into())];
        let results = self.engine.atomically_within(at_most, steps).await?;
        Ok(results.into_iter().flatten().next_back().unwrap_or_default())
    }
}

/// Settings of one transaction of PostgreSQL.
pub(super) static PLAN_BY_INDEX: Template = Template::new(
    "SELECT set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true), \
         set_config('enable_mergejoin', 'off', true), set_config('jit', 'off', true), \
         set_config('plan_cache_mode', 'force_generic_plan', true)",
);
/// The same, for a source whose index has the order of pages.
static PLAN_IN_ORDER: Template = Template::new(
    "SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), \
         set_config('enable_sort', 'off', true), set_config('enable_incremental_sort', 'off', true), \
         set_config('jit', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true)",
);

fn totals(rows: &[SqlRow], at_most: u32) -> Result<JobTotals, LedgerError> {
    let mut totals = JobTotals::default();
    let mut searched = 0;
    for row in rows {
        searched += row.get::<u64>("searched")?;
        let sum = i128::from(row.get::<i64>("parts")?) * i128::from(PART) + i128::from(row.get::<i64>("rest")?);
        let amount = i64::try_from(sum).unwrap_or(i64::MAX);
        totals.at_least |= i128::from(amount) != sum;
        let total = CurrencyTotal { currency: row.get("currency")?, jobs: row.get("jobs")?, amount };
        if total.jobs > 0 {
            totals.jobs += total.jobs;
            totals.currencies.push(total);
        }
    }
    totals.currencies.sort_by(|a, b| a.currency.cmp(&b.currency));
    totals.at_least |= searched >= u64::from(at_most);
    Ok(totals)
}
