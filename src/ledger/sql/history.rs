//! The history's SQL: counts of the last steps, new samples, their fold into longer steps, and the reads for a chart.
//!
//! Counts come from the ledger's own rows, found by the indexes of ended requests and of finished jobs. So they cost as
//! much as there was traffic, whatever the ledger holds. A sample is written with its run in one transaction, and only
//! if no other worker has written meanwhile: no request is counted twice.

use std::time::Duration;

use serde_json::json;

use super::dialect::{Dialect, Template};
use super::engine::args;
use super::result::{FromRow, SqlRow, from_row, read_or_log};
use super::texts;
use super::throttled::IS_THROTTLED;
use crate::domain::time::EpochMs;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::history::{HistoryClock, HistoryMark, HistorySample, MARKS_MAX, RecordedRun, RunUpdate, SampleStep};
use crate::ledger::settings::AuditedChange;

const FINE_S: i64 = SampleStep::Fine.seconds();
const FINE_MS: i64 = SampleStep::Fine.millis();
const COARSE_S: i64 = SampleStep::Coarse.seconds();
const COARSE_MS: i64 = SampleStep::Coarse.millis();

static CLOCK: Template = Template::new(
    "SELECT {now_ms} AS now_ms, {ms:max(began_at)} AS began_at_ms, {ms:max(recorded_until)} AS recorded_until_ms \
     FROM history_runs",
);

/// The condition of index `jobs_finished_by_update`, without jobs that a replay may start again.
const FINISHED_FOR_GOOD: &str = "scrubbed_at IS NULL \
     AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled') AND state <> 'dead'";

/// A year ahead. PostgreSQL expects a third of all rows for a range that is open on one side.
const UPPER_END: &str = "{after:31536000000}";

/// The end of the fine step in which an instant is.
fn step_end(column: &str) -> String {
    format!("(({{ms:{column}}}) / {FINE_MS} + 1) * {FINE_MS}")
}

/// Is one of the texts of the JSON array `$1`. PostgreSQL expects an array to be short, and seeks each in an index. The
/// rows of a function it expects to be a hundred, and joins them by reading the whole index.
pub(super) fn is_one_of(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Postgres => "= ANY (ARRAY(SELECT jsonb_array_elements_text($1::jsonb)))",
        Dialect::Sqlite => "IN (SELECT value FROM json_each($1))",
    }
}

static COUNTS: Template = Template::made(|dialect| {
    let named = is_one_of(dialect);
    // Requests of the named providers, by index `attempts_by_provider_and_end`.
    let requests = |counted: [&str; 2], step: &str, which: &str| {
        let [started, throttled] = counted;
        format!(
            "SELECT provider, {} AS at_ms, {started} AS started, 0 AS finished, {throttled} AS throttled \
             FROM attempts WHERE provider {named} AND {which} GROUP BY 1, 2",
            step_end(step)
        )
    };
    let began = "began_at >= {at:$2} AND began_at < {at:$3}";
    // Recorded too late for its permit, or without a connection: the provider has not seen it.
    let ended = format!("ended_at >= {{at:$2}} AND ended_at < {UPPER_END} AND {began} AND outcome <> 'not_sent'");
    let in_steps = format!("ended_at >= {{at:$2}} AND ended_at < {{at:$3}} AND {IS_THROTTLED}");
    let parts = [
        requests(["count(*)", "0"], "began_at", &ended),
        // In flight.
        requests(["count(*)", "0"], "began_at", &format!("ended_at IS NULL AND {began}")),
        requests(["0", "count(*)"], "ended_at", &in_steps),
        // Grouped by an expression: SQLite would rather read all jobs in the order of an index on the column.
        format!(
            "SELECT min(provider) AS provider, {} AS at_ms, 0 AS started, count(*) AS finished, 0 AS throttled \
             FROM jobs WHERE {FINISHED_FOR_GOOD} AND updated_at >= {{at:$2}} AND updated_at < {{at:$3}} \
             GROUP BY provider || '', 2",
            step_end("updated_at")
        ),
    ];
    parts.join(" UNION ALL ")
});

const COLUMNS: &str = "provider, {ms:at} AS at_ms, started, finished, throttled, waiting, review, limit_per_s";

static LAST: Template = Template::made(|_| {
    let columns = COLUMNS.replace("provider,", "history_samples.provider,");
    format!(
        "SELECT {columns} FROM ({{texts:$1}}) AS names {{join}} history_samples \
             ON history_samples.provider = names.value AND history_samples.step_s = {FINE_S} \
             AND history_samples.at = (SELECT max(latest.at) FROM history_samples AS latest \
                 WHERE latest.provider = names.value AND latest.step_s = {FINE_S})"
    )
});

static EXTEND_RUN: Template = Template::new(
    "UPDATE history_runs SET recorded_until = {at:$3} \
     WHERE began_at = {at:$1} AND recorded_until = {at:$2} RETURNING {ms:began_at} AS began_at_ms",
);

static BEGIN_RUN: Template = Template::new(
    "INSERT INTO history_runs (began_at, recorded_until) VALUES ({at:$1}, {at:$2}) ON CONFLICT (began_at) DO NOTHING \
     RETURNING {ms:began_at} AS began_at_ms",
);

/// The objects of a JSON array as rows with these columns; each is a name and PostgreSQL's type.
pub(super) fn rows_of(dialect: Dialect, columns: &[[&str; 2]]) -> String {
    let each = |column: fn(&[&str; 2]) -> String| columns.iter().map(column).collect::<Vec<_>>().join(", ");
    match dialect {
        Dialect::Postgres => {
            format!("jsonb_to_recordset($1::jsonb) AS given ({})", each(|[name, kind]| format!("{name} {kind}")))
        }
        Dialect::Sqlite => {
            let cells = each(|[name, _]| format!("value ->> '{name}' AS {name}"));
            format!("(SELECT {cells} FROM json_each($1)) AS given")
        }
    }
}

static ADD_SAMPLES: Template = Template::made(|dialect| {
    let counts = ["started", "finished", "throttled", "waiting", "review"].map(|name| [name, "bigint"]);
    let first = [["provider", "text"], ["at_ms", "bigint"]];
    let columns: Vec<[&str; 2]> =
        first.into_iter().chain(counts).chain([["limit_per_s", "double precision"]]).collect();
    format!(
        "INSERT INTO history_samples \
             (provider, step_s, at, started, finished, throttled, waiting, review, limit_per_s) \
         SELECT provider, {FINE_S}, {{at:at_ms}}, started, finished, throttled, waiting, review, limit_per_s \
         FROM {} WHERE true ON CONFLICT (provider, step_s, at) DO NOTHING",
        rows_of(dialect, &columns)
    )
});

static ADD_MARKS: Template = Template::made(|dialect| {
    let columns = ["provider", "kind", "worker", "detail"].map(|name| [name, "text"]);
    let columns: Vec<[&str; 2]> = columns.into_iter().chain([["at_ms", "bigint"]]).collect();
    format!(
        "INSERT INTO history_marks (provider, at, kind, worker, detail) \
         SELECT provider, {{at:at_ms}}, kind, worker, detail FROM {} \
         WHERE true ON CONFLICT (provider, at, kind, worker) DO NOTHING",
        rows_of(dialect, &columns)
    )
});

impl Database {
    /// The clock of the history, and what was recorded last.
    pub async fn history_clock(&self) -> Result<HistoryClock, LedgerError> {
        let row = self.query_row(&CLOCK, []).await?;
        let [began, until] = ["began_at", "recorded_until"].map(|field| row.get::<Option<EpochMs>>(field));
        let run = |(began, until): (EpochMs, EpochMs)| RecordedRun { began_at_ms: began.0, recorded_until_ms: until.0 };
        Ok(HistoryClock { now_ms: row.get::<EpochMs>("now")?.0, last: began?.zip(until?).map(run) })
    }

    /// The counts of each fine step between two instants, without the other figures; steps without any are left out.
    /// Requests are those of the named providers, finished jobs those of all.
    pub async fn history_counts(
        &self,
        providers: &[&str],
        from_ms: i64,
        to_ms: i64,
    ) -> Result<Vec<HistorySample>, LedgerError> {
        let names = texts(providers.iter().copied());
        let rows = self.query_by_index(&COUNTS, [names, from_ms.into(), to_ms.into()]).await?;
        let counts = |row: &SqlRow| {
            Ok(HistorySample {
                provider: row.get("provider")?,
                at_ms: row.get::<EpochMs>("at")?.0,
                started: row.get("started")?,
                finished: row.get("finished")?,
                throttled: row.get("throttled")?,
                ..HistorySample::default()
            })
        };
        rows.iter().map(counts).collect()
    }

    /// The last fine sample of each of these providers.
    pub async fn last_samples(&self, providers: &[&str]) -> Result<Vec<HistorySample>, LedgerError> {
        let rows = self.query_by_index(&LAST, [texts(providers.iter().copied())]).await?;
        Ok(read_or_log(&rows, "history_samples", "provider"))
    }

    /// Writes the fine samples of a run, all in one statement; false when another worker was faster.
    pub async fn record_history(&self, samples: &[HistorySample], run: RunUpdate) -> Result<bool, LedgerError> {
        let mut steps = vec![match run {
            RunUpdate::Extend { last, until_ms } => {
                self.must_affect(&EXTEND_RUN, args![last.began_at_ms, last.recorded_until_ms, until_ms])
            }
            RunUpdate::Begin(run) => self.must_affect(&BEGIN_RUN, args![run.began_at_ms, run.recorded_until_ms]),
        }];
        if !samples.is_empty() {
            steps.push(self.step(&ADD_SAMPLES, args![json!(samples).to_string()]));
        }
        Ok(self.engine.atomically(steps).await?.is_some())
    }

    /// Records marks; one that exists already stays as it is.
    pub async fn record_marks(&self, marks: &[HistoryMark]) -> Result<(), LedgerError> {
        if marks.is_empty() {
            return Ok(());
        }
        self.query(&ADD_MARKS, args![json!(marks).to_string()]).await.map(drop)
    }
}

from_row!(row => HistorySample {
    provider, started, finished, throttled, waiting, review, limit_per_s;
    at_ms: row.get::<EpochMs>("at")?.0,
});

impl FromRow for RecordedRun {
    fn from_row(row: &SqlRow) -> Result<Self, LedgerError> {
        let (began, until) = (row.get::<EpochMs>("began_at")?, row.get::<EpochMs>("recorded_until")?);
        Ok(Self { began_at_ms: began.0, recorded_until_ms: until.0 })
    }
}

from_row!(row => HistoryMark {
    provider, kind, worker, detail;
    at_ms: row.get::<EpochMs>("at")?.0,
});

static SAMPLES: Template = Template::made(|_| {
    format!(
        "SELECT {COLUMNS} FROM history_samples \
         WHERE provider = $1 AND step_s = $2 AND at > {{at:$3}} AND at <= {{at:$4}} ORDER BY at"
    )
});

static SAMPLE_BEFORE: Template = Template::made(|_| {
    format!(
        "SELECT {COLUMNS} FROM history_samples \
         WHERE provider = $1 AND step_s = $2 AND at <= {{at:$3}} ORDER BY at DESC LIMIT 1"
    )
});

static RUNS: Template = Template::new(
    "SELECT {ms:began_at} AS began_at_ms, {ms:recorded_until} AS recorded_until_ms FROM history_runs \
     WHERE recorded_until > {at:$1} AND began_at < {at:$2} ORDER BY began_at",
);

static MARKS: Template = Template::made(|_| {
    format!(
        "SELECT provider, {{ms:at}} AS at_ms, kind, worker, detail FROM history_marks \
         WHERE provider IN ('', $1) AND at > {{at:$2}} AND at <= {{at:$3}} ORDER BY at DESC LIMIT {MARKS_MAX}"
    )
});

static SETTINGS_CHANGES: Template = Template::made(|_| {
    format!(
        "SELECT {{ms:at}} AS at_ms, who, os_user, program, because, table_name, row_key, \
             {{text:old_row}} AS old_row, {{text:new_row}} AS new_row FROM settings_audit \
         WHERE at > {{at:$2}} AND at <= {{at:$3}} AND table_name <> 'settings_version' \
             AND (row_key = $1 OR substr(row_key, 1, length($1) + 1) = $1 || '/') \
         ORDER BY at DESC LIMIT {MARKS_MAX}"
    )
});

impl Database {
    /// The changes of a provider's rows within a time, newest first.
    pub async fn settings_changes(
        &self,
        provider: &str,
        from_ms: i64,
        to_ms: i64,
    ) -> Result<Vec<AuditedChange>, LedgerError> {
        let rows = self.query_by_index(&SETTINGS_CHANGES, args![provider, from_ms, to_ms]).await?;
        Ok(read_or_log(&rows, "settings_audit", "row_key"))
    }

    /// The samples of one provider that end within a time, oldest first.
    pub async fn history_samples(
        &self,
        provider: &str,
        step: SampleStep,
        from_ms: i64,
        to_ms: i64,
    ) -> Result<Vec<HistorySample>, LedgerError> {
        let rows = self.query_by_index(&SAMPLES, args![provider, step.seconds(), from_ms, to_ms]).await?;
        Ok(read_or_log(&rows, "history_samples", "provider"))
    }

    /// The last sample of one provider until this instant.
    pub async fn history_before(
        &self,
        provider: &str,
        step: SampleStep,
        until_ms: i64,
    ) -> Result<Option<HistorySample>, LedgerError> {
        let rows = self.query_by_index(&SAMPLE_BEFORE, args![provider, step.seconds(), until_ms]).await?;
        Ok(read_or_log(&rows, "history_samples", "provider").pop())
    }

    /// The runs that touch a time, oldest first.
    pub async fn history_runs(&self, from_ms: i64, to_ms: i64) -> Result<Vec<RecordedRun>, LedgerError> {
        Ok(read_or_log(&self.query(&RUNS, args![from_ms, to_ms]).await?, "history_runs", "began_at"))
    }

    /// The recorded marks of one provider and of all, newest first.
    pub async fn history_marks(
        &self,
        provider: &str,
        from_ms: i64,
        to_ms: i64,
    ) -> Result<Vec<HistoryMark>, LedgerError> {
        let rows = self.query_by_index(&MARKS, args![provider, from_ms, to_ms]).await?;
        Ok(read_or_log(&rows, "history_marks", "kind"))
    }
}

/// All providers that have a sample: steps from one to the next, as `fleet::LANES` does.
static SAMPLED: Template = Template::new(
    "WITH RECURSIVE sampled (provider) AS ( \
         SELECT min(provider) FROM history_samples \
         UNION ALL \
         SELECT (SELECT min(provider) FROM history_samples WHERE history_samples.provider > sampled.provider) \
         FROM sampled WHERE sampled.provider IS NOT NULL) \
     SELECT provider FROM sampled WHERE provider IS NOT NULL",
);

/// A coarse sample sums the fine ones within it. The figures are those of the last one.
static FOLD: Template = Template::made(|_| {
    format!(
        "INSERT INTO history_samples \
             (provider, step_s, at, started, finished, throttled, waiting, review, limit_per_s) \
         SELECT sums.provider, {COARSE_S}, {{at:sums.end_ms}}, sums.started, sums.finished, sums.throttled, \
             latest.waiting, latest.review, latest.limit_per_s \
         FROM (SELECT fine.provider AS provider, \
                   (({{ms:fine.at}}) + {COARSE_MS} - 1) / {COARSE_MS} * {COARSE_MS} AS end_ms, max(fine.at) AS last_at, \
                   CAST(sum(fine.started) AS bigint) AS started, CAST(sum(fine.finished) AS bigint) AS finished, \
                   CAST(sum(fine.throttled) AS bigint) AS throttled \
               FROM ({{texts:$1}}) AS names {{join}} history_samples AS fine \
                   ON fine.provider = names.value AND fine.step_s = {FINE_S} AND fine.at <= {{at:$2}} \
                   AND fine.at > COALESCE((SELECT max(coarse.at) FROM history_samples AS coarse \
                       WHERE coarse.provider = names.value AND coarse.step_s = {COARSE_S}), {{at:0}}) \
               GROUP BY 1, 2) AS sums \
         {{join}} history_samples AS latest ON latest.provider = sums.provider AND latest.step_s = {FINE_S} \
             AND latest.at = sums.last_at \
         WHERE true ON CONFLICT (provider, step_s, at) DO NOTHING RETURNING provider"
    )
});

static FORGET_SAMPLES: Template = Template::made(|dialect| {
    format!(
        "DELETE FROM history_samples WHERE provider {} AND step_s = $2 AND at <= {{after:(0 - $3)}} RETURNING provider",
        is_one_of(dialect)
    )
});

/// A run in the future is left from before the clock was set back.
static FORGET_RUNS: Template = Template::new(
    "DELETE FROM history_runs WHERE recorded_until <= {after:(0 - $1)} OR recorded_until > {after:3600000} \
     RETURNING {ms:began_at} AS began_at_ms",
);

static FORGET_MARKS: Template = Template::new("DELETE FROM history_marks WHERE at <= {after:(0 - $1)} RETURNING kind");

impl Database {
    /// The providers that have samples.
    pub async fn sampled_providers(&self) -> Result<Vec<String>, LedgerError> {
        self.query_by_index(&SAMPLED, []).await?.iter().map(|row| row.get("provider")).collect()
    }

    /// Writes the coarse samples that end until this instant, a multiple of their length, and are not written yet;
    /// returns how many.
    pub async fn fold_history(&self, providers: &[String], until_ms: i64) -> Result<u32, LedgerError> {
        let names = texts(providers.iter().map(String::as_str));
        Ok(u32::try_from(self.query_by_index(&FOLD, [names, until_ms.into()]).await?.len()).unwrap_or(u32::MAX))
    }

    /// Deletes samples of one step that are older than this; returns how many.
    pub async fn forget_samples(
        &self,
        providers: &[String],
        step: SampleStep,
        older_than: Duration,
    ) -> Result<u32, LedgerError> {
        let names = texts(providers.iter().map(String::as_str));
        let args = [names, step.seconds().into(), older_than.into()];
        Ok(u32::try_from(self.query_by_index(&FORGET_SAMPLES, args).await?.len()).unwrap_or(u32::MAX))
    }

    /// Deletes runs and marks that ended longer ago than this.
    pub async fn forget_runs_and_marks(&self, older_than: Duration) -> Result<(), LedgerError> {
        self.query(&FORGET_RUNS, args![older_than]).await?;
        self.query(&FORGET_MARKS, args![older_than]).await.map(drop)
    }
}
