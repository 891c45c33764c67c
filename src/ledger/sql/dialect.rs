//! The differences between PostgreSQL and SQLite, as placeholders `{…}` in shared SQL templates.
//!
//! A template is a `static` beside the code that runs it. It never contains user input, and is rendered at its first
//! use. `$1` means the same in both. See `docs/decisions/0024-one-sql-for-two-databases.md`.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use super::batcher::BatchOrder;
use super::engine::{Args, Sql, Step, Value};
use crate::domain::time::EpochMs;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    Postgres,
    Sqlite,
}

/// The template of one statement.
pub struct Template {
    text: TemplateText,
    rendered: Rendered<Sql>,
}

enum TemplateText {
    /// For PostgreSQL and for SQLite.
    Fixed([&'static str; 2]),
    Made(fn(Dialect) -> String),
}

/// What a template becomes in each dialect.
type Rendered<T> = [OnceLock<T>; 2];

impl Template {
    pub const fn new(text: &'static str) -> Self {
        Self::by_dialect(text, text)
    }

    /// A statement that the databases have no common words for.
    pub const fn by_dialect(postgres: &'static str, sqlite: &'static str) -> Self {
        Self { text: TemplateText::Fixed([postgres, sqlite]), rendered: [const { OnceLock::new() }; 2] }
    }

    /// A template that is put together from parts.
    pub const fn made(text: fn(Dialect) -> String) -> Self {
        Self { text: TemplateText::Made(text), rendered: [const { OnceLock::new() }; 2] }
    }

    pub fn sql(&self, dialect: Dialect) -> &Sql {
        self.rendered[dialect as usize].get_or_init(|| match self.text {
            TemplateText::Fixed(texts) => dialect.render(texts[dialect as usize]),
            TemplateText::Made(text) => dialect.render(&text(dialect)),
        })
    }
}

/// The template of a [`JobWrite`].
pub struct WriteTemplate {
    text: fn() -> JobWriteText,
    /// The order of the jobs in a batch of such writes.
    pub order: BatchOrder,
    rendered: Rendered<JobWrite>,
}

impl WriteTemplate {
    pub const fn new(text: fn() -> JobWriteText) -> Self {
        Self::with_order(BatchOrder::ById, text)
    }

    /// Batches of this write keep the order of arrival.
    pub const fn in_order_of_arrival(text: fn() -> JobWriteText) -> Self {
        Self::with_order(BatchOrder::ByArrival, text)
    }

    const fn with_order(order: BatchOrder, text: fn() -> JobWriteText) -> Self {
        Self { text, order, rendered: [const { OnceLock::new() }; 2] }
    }

    pub fn write(&self, dialect: Dialect) -> &JobWrite {
        self.rendered[dialect as usize].get_or_init(|| dialect.job_write(&(self.text)()))
    }
}

/// A job write with its side effects, all or nothing.
///
/// `$1` is the job's id. A write on an active job finds it by the id alone: it says `state || ''` and the like, so that
/// no other index fits. While a table is small, PostgreSQL would choose an index that it reads from end to end, and
/// keep that plan. The write has `{from}` before its `WHERE`: in a batch, the arguments of all jobs are there.
/// `effects` see the written row as `{job}` AS job.
pub struct JobWriteText {
    pub update: Cow<'static, str>,
    /// The columns that `effects` and `returning` need of the written row. PostgreSQL builds them again for each
    /// effect, so all columns of a wide row are expensive.
    pub written_columns: Cow<'static, str>,
    pub effects: Vec<Cow<'static, str>>,
    /// The columns of the written job that the write returns.
    pub returning: &'static str,
}

/// A rendered [`JobWriteText`]. For PostgreSQL it is a single statement (one round trip, no `BEGIN` that could stay
/// open), for SQLite one statement each.
pub struct JobWrite {
    statements: Vec<Sql>,
    batch: Option<BatchTemplate>,
}

/// The template for many jobs in one statement.
struct BatchTemplate {
    after_input: String,
    /// Complete once the types of the arguments are known; they are the same for all calls.
    sql: OnceLock<Sql>,
}

impl JobWrite {
    /// The statements as a transaction that does nothing unless the write finds its row.
    pub fn steps(&self, args: &Args) -> Vec<Step> {
        let step = |(index, sql): (usize, &Sql)| Step { sql: sql.clone(), args: args.clone(), must_affect: index == 0 };
        self.statements.iter().enumerate().map(step).collect()
    }

    /// One statement for many jobs, with an array for each argument. It returns a row, with the job's `id`, for each
    /// job that its write found. `None` for SQLite, where many statements are faster.
    pub fn batch_sql(&self, like: &Args) -> Option<Sql> {
        let many = self.batch.as_ref()?;
        let render = || {
            let arrays: Vec<String> =
                (1..).zip(&**like).map(|(n, value)| format!("${n}::{}[]", array_of(value))).collect();
            let names: Vec<String> = (1..=like.len()).map(|n| format!("a{n}")).collect();
            let (arrays, names) = (arrays.join(", "), names.join(", "));
            Arc::from(format!(
                "WITH input AS (SELECT * FROM unnest({arrays}) AS units ({names})), {}",
                many.after_input
            ))
        };
        Some(many.sql.get_or_init(render).clone())
    }
}

fn array_of(value: &Value) -> &'static str {
    match value {
        Value::Int(_) => "bigint",
        Value::Real(_) => "double precision",
        Value::Bool(_) => "boolean",
        Value::Text(_) => "text",
        Value::Bytes(_) => "bytea",
    }
}

/// Replaces each `$n` by what `name` returns for it.
fn replace_arguments(sql: &str, mut name: impl FnMut(&str) -> String) -> String {
    let mut pieces = sql.split('$');
    let mut out = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let digits = piece.find(|c: char| !c.is_ascii_digit()).unwrap_or(piece.len());
        out.push_str(&name(&piece[..digits]));
        out.push_str(&piece[digits..]);
    }
    out
}

impl Dialect {
    /// Renders a template. Placeholders: `{now}`; `{now_ms}`; `{ms:T}` instant to epoch ms; `{at:MS}` the reverse;
    /// `{after:MS}` now plus that; `{until:T}` and `{since:T}` ms from and to now, `until` rounded up; `{aged:T}` like
    /// `since`, never more than the true age and never negative; `{readable:T}` whether it is an instant that
    /// [`EpochMs`] can hold; `{json:X}` text to JSON; `{text:X}` JSON to text; `{among:X}` is in a JSON array of
    /// integers; `{texts:X}` rows of a JSON array of texts; `{held:X}` rows (id, fence) and
    /// `{attested:X}` rows of clock attestations, each of a JSON array; `{who}` and
    /// `{program}` as the audit's triggers name them; `{version}` of the database; `{unlocked}` rows without another
    /// session's lock; `{join}` the left rows first, one by one; `{greatest}` the function of that name; `{job}`.
    pub fn render(self, template: &str) -> Sql {
        let mut out = String::with_capacity(template.len() * 2);
        let mut rest = template;
        while let Some((before, after)) = rest.split_once('{') {
            let (place, tail) = after.split_once('}').unwrap_or((after, ""));
            let (name, argument) = place.split_once(':').unwrap_or((place, ""));
            out.push_str(before);
            out.push_str(&self.placeholder(name, argument));
            rest = tail;
        }
        out.push_str(rest);
        Arc::from(out)
    }

    fn job_write(self, text: &JobWriteText) -> JobWrite {
        let JobWriteText { update: write, written_columns: kept, effects: then, returning } = text;
        let alone = write.replace("{from}", "");
        if self == Self::Sqlite {
            let first = self.render(&format!("{alone} RETURNING {returning}"));
            let then = then.iter().map(|text| self.render(text));
            return JobWrite { statements: std::iter::once(first).chain(then).collect(), batch: None };
        }
        let beside = (0..).zip(then).map(|(index, text)| format!(", beside_{index} AS ({text} RETURNING 1)"));
        let rest = format!("{} SELECT job.id AS id, {returning} FROM job", beside.collect::<String>());
        let statement = self.render(&format!("WITH job AS ({alone} RETURNING {kept}){rest}"));
        let write = replace_arguments(&write.replace("{from}", "FROM input"), |n| format!("input.a{n}"));
        // Only the needed arguments are joined to the written row.
        let mut beside = BTreeSet::new();
        let rest = replace_arguments(&rest, |n| {
            if n == "1" {
                return "job.id".to_owned();
            }
            beside.insert(format!(", input.a{n}"));
            format!("job.a{n}")
        });
        let beside: String = beside.into_iter().collect();
        let after_input = self.render(&format!("job AS ({write} RETURNING {kept}{beside}){rest}")).to_string();
        JobWrite { statements: vec![statement], batch: Some(BatchTemplate { after_input, sql: OnceLock::new() }) }
    }

    fn placeholder(self, name: &str, x: &str) -> String {
        match self {
            Self::Postgres => match name {
                // The start of the statement: one value for each statement, and never later than its effects.
                "now" => "statement_timestamp()".to_owned(),
                "who" => "session_user".to_owned(),
                "version" => "split_part(current_setting('server_version'), ' ', 1)".to_owned(),
                "program" => "nullif(current_setting('application_name'), '')".to_owned(),
                "now_ms" => "floor(extract(epoch FROM statement_timestamp()) * 1000)::bigint".to_owned(),
                "ms" => unless_infinite(x, "floor(extract(epoch FROM {x}) * 1000)::bigint", [i64::MAX, -i64::MAX]),
                "at" => format!("(timestamptz 'epoch' + {x} * interval '1 millisecond')"),
                "after" => format!("(statement_timestamp() + {x} * interval '1 millisecond')"),
                "until" => {
                    let until = "ceil(extract(epoch FROM ({x}) - statement_timestamp()) * 1000)::bigint";
                    unless_infinite(x, until, [i64::MAX, -i64::MAX])
                }
                "since" => {
                    let since = "floor(extract(epoch FROM statement_timestamp() - ({x})) * 1000)::bigint";
                    unless_infinite(x, since, [-i64::MAX, i64::MAX])
                }
                "aged" => {
                    let since = "greatest(0, floor(extract(epoch FROM statement_timestamp() - ({x})) * 1000)::bigint)";
                    unless_infinite(x, since, [0, 0])
                }
                "readable" => format!("({x} >= '{FIRST_INSTANT}' AND {x} < '{END_OF_INSTANTS}')"),
                "unlocked" => "FOR UPDATE SKIP LOCKED".to_owned(),
                "join" => "JOIN".to_owned(),
                "greatest" => "greatest".to_owned(),
                "json" => format!("{x}::jsonb"),
                "text" => format!("{x}::text"),
                // PostgreSQL expects an array to be short, but a hundred rows from a function. Those it would join by
                // reading the whole table, as long as that is small.
                "among" => format!("= ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text({x}::jsonb)))"),
                "texts" => format!("SELECT value FROM jsonb_array_elements_text({x}::jsonb)"),
                "attested" => format!(
                    "(SELECT e ->> 'quota' AS quota, (e ->> 'term')::bigint AS term, \
                         (e ->> 'least_us')::bigint AS least_us, (e ->> 'most_us')::bigint AS most_us, \
                         (e ->> 'since_us')::bigint AS since_us FROM jsonb_array_elements({x}::jsonb) AS e) AS attested"
                ),
                "held" => format!(
                    "(SELECT e ->> 'id' AS id, (e ->> 'fence')::bigint AS fence \
                     FROM jsonb_array_elements({x}::jsonb) AS e) AS held"
                ),
                _ => "job".to_owned(),
            },
            Self::Sqlite => match name {
                "now" | "now_ms" => SQLITE_NOW.to_owned(),
                "who" => "'database file'".to_owned(),
                "version" => "sqlite_version()".to_owned(),
                "program" => "NULL".to_owned(),
                // SQLite has one writer: no other session could have locked a row.
                "unlocked" => String::new(),
                // Without statistics, SQLite may begin with the large table and build an index of the small one. It
                // never reorders this:
                // https://www.sqlite.org/optoverview.html#manual_control_of_query_plans_using_cross_join
                "join" => "CROSS JOIN".to_owned(),
                "greatest" => "max".to_owned(),
                "ms" | "at" | "json" | "text" => x.to_owned(),
                "after" => format!("({SQLITE_NOW} + {x})"),
                "until" => format!("(({x}) - {SQLITE_NOW})"),
                "since" => format!("({SQLITE_NOW} - ({x}))"),
                // Both instants were cut to milliseconds, so their difference may be one too many.
                "aged" => format!("max(0, {SQLITE_NOW} - ({x}) - 1)"),
                "readable" => format!("({x} BETWEEN {} AND {})", EpochMs::FIRST.0, EpochMs::LAST.0),
                "among" => format!("IN (SELECT value FROM json_each({x}))"),
                "texts" => format!("SELECT value FROM json_each({x})"),
                "attested" => format!(
                    "(SELECT value ->> 'quota' AS quota, value ->> 'term' AS term, value ->> 'least_us' AS least_us, \
                         value ->> 'most_us' AS most_us, value ->> 'since_us' AS since_us \
                     FROM json_each({x})) AS attested"
                ),
                "held" => format!(
                    "(SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.fence') AS fence \
                     FROM json_each({x})) AS held"
                ),
                _ => "(SELECT * FROM jobs WHERE id = $1) AS job".to_owned(),
            },
        }
    }
}

/// [`EpochMs::FIRST`] and the end of the millisecond [`EpochMs::LAST`], as PostgreSQL reads them.
const FIRST_INSTANT: &str = "0001-01-01 00:00:00+00";
const END_OF_INSTANTS: &str = "9999-12-30 22:00:00+00";

/// PostgreSQL fails the whole statement for one row whose instant is `infinity`. So such an instant becomes a number
/// that no finite instant has, and the code that reads that row reports it.
fn unless_infinite(x: &str, otherwise: &str, [late, early]: [i64; 2]) -> String {
    let otherwise = otherwise.replace("{x}", x);
    format!("CASE {x} WHEN 'infinity' THEN {late} WHEN '-infinity' THEN {early} ELSE {otherwise} END")
}

/// `subsec` has milliseconds; the product is rounded because 1.001 * 1000 is not 1001 in binary.
const SQLITE_NOW: &str = "CAST(round(unixepoch('subsec') * 1000) AS INTEGER)";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_renders_for_both_dialects() {
        let template = "UPDATE t SET a = {after:$2}, b = {json:$3} WHERE c <= {now}";
        let postgres = Dialect::Postgres.render(template);
        assert_eq!(
            &*postgres,
            "UPDATE t SET a = (statement_timestamp() + $2 * interval '1 millisecond'), b = $3::jsonb \
             WHERE c <= statement_timestamp()"
        );
        let sqlite = Dialect::Sqlite.render(template);
        assert_eq!(&*sqlite, format!("UPDATE t SET a = ({SQLITE_NOW} + $2), b = $3 WHERE c <= {SQLITE_NOW}").as_str());
    }

    #[test]
    fn job_write_is_one_statement_or_transaction() {
        let text = JobWriteText {
            update: "UPDATE jobs SET fence = $2 {from} WHERE id = $1".into(),
            written_columns: "jobs.id, fence".into(),
            effects: vec!["INSERT INTO x SELECT id, $2 FROM {job} WHERE id <> $1".into()],
            returning: "fence",
        };
        let args: Args = Arc::from([]);
        let postgres = Dialect::Postgres.job_write(&text).steps(&args);
        assert_eq!(postgres.len(), 1);
        assert!(postgres[0].sql.starts_with("WITH job AS (UPDATE jobs"), "{}", postgres[0].sql);
        let sqlite = Dialect::Sqlite.job_write(&text).steps(&args);
        assert_eq!(sqlite.iter().map(|step| step.must_affect).collect::<Vec<_>>(), [true, false]);
        assert_eq!(Dialect::Sqlite.job_write(&text).batch_sql(&args), None);
    }

    #[test]
    fn batched_job_write_takes_arrays() {
        let text = JobWriteText {
            update: "UPDATE jobs SET fence = $2 {from} WHERE id = $1".into(),
            written_columns: "jobs.id, fence".into(),
            effects: vec!["INSERT INTO x SELECT id, $2 FROM {job} WHERE id <> $1".into()],
            returning: "fence",
        };
        let like: Args = Arc::from(["a".into(), 1_i64.into()]);
        assert_eq!(
            &*Dialect::Postgres.job_write(&text).batch_sql(&like).unwrap(),
            "WITH input AS (SELECT * FROM unnest($1::text[], $2::bigint[]) AS units (a1, a2)), \
             job AS (UPDATE jobs SET fence = input.a2 FROM input WHERE id = input.a1 RETURNING jobs.id, fence, input.a2), \
             beside_0 AS (INSERT INTO x SELECT id, job.a2 FROM job WHERE id <> job.id RETURNING 1) \
             SELECT job.id AS id, fence FROM job"
        );
    }
}
