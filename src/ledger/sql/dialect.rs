//! What PostgreSQL and SQLite write differently, as places `{…}` in one shared SQL text.
//!
//! Refuses user input: templates are constants of this program, rendered once at start. `$1` means the same in both.

use std::sync::Arc;

use super::engine::{Args, Sql, Step};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    Postgres,
    Sqlite,
}

/// An update of one job together with what must be written beside it, all or nothing.
///
/// `$1` is the job's id. `then` statements see the updated row as `{job}` AS job.
pub struct ChainText<'a> {
    pub update: &'a str,
    pub then: &'a [&'a str],
    /// What to answer with, over the columns of `jobs`.
    pub returning: &'a str,
}

/// A rendered [`ChainText`]: for PostgreSQL a single statement (one round trip, no `BEGIN` that could be left open), for
/// SQLite one statement each.
#[derive(Clone, Debug)]
pub struct Chain {
    statements: Vec<Sql>,
}

impl Chain {
    /// The statements as a transaction that does nothing unless the update finds its row.
    #[must_use]
    pub fn steps(&self, args: &Args) -> Vec<Step> {
        let step = |(index, sql): (usize, &Sql)| Step { sql: sql.clone(), args: args.clone(), must_affect: index == 0 };
        self.statements.iter().enumerate().map(step).collect()
    }
}

impl Dialect {
    /// Renders a template. Places: `{now}`; `{now_ms}`; `{ms:T}` instant to epoch ms; `{at:MS}` the reverse; `{after:MS}` now plus
    /// that; `{until:T}` and `{since:T}` ms from and to now, `until` rounded up;
    /// `{aged:T}` like `since`, never more than the true age and never negative; `{json:X}` text to JSON; `{text:X}`
    /// JSON to text; `{ints:X}` and `{texts:X}` rows of a JSON array of integers or texts; `{held:X}` rows (id, fence) of a JSON array;
    /// `{unlocked}` rows that nobody else is taking; `{job}`.
    #[must_use]
    pub fn sql(self, template: &str) -> Sql {
        let mut out = String::with_capacity(template.len() * 2);
        let mut rest = template;
        while let Some((before, after)) = rest.split_once('{') {
            let (place, tail) = after.split_once('}').unwrap_or((after, ""));
            let (name, argument) = place.split_once(':').unwrap_or((place, ""));
            out.push_str(before);
            out.push_str(&self.place(name, argument));
            rest = tail;
        }
        out.push_str(rest);
        Arc::from(out)
    }

    #[must_use]
    pub fn chain(self, text: &ChainText<'_>) -> Chain {
        let ChainText { update, then, returning } = text;
        let statements = match self {
            Self::Postgres => {
                let beside: String = then
                    .iter()
                    .enumerate()
                    .map(|(index, statement)| format!(", beside_{index} AS ({statement} RETURNING 1)"))
                    .collect();
                vec![self.sql(&format!("WITH job AS ({update} RETURNING *){beside} SELECT {returning} FROM job"))]
            }
            Self::Sqlite => {
                let first = self.sql(&format!("{update} RETURNING {returning}"));
                std::iter::once(first).chain(then.iter().map(|statement| self.sql(statement))).collect()
            }
        };
        Chain { statements }
    }

    fn place(self, name: &str, x: &str) -> String {
        match self {
            Self::Postgres => match name {
                // The statement's own start: one value per statement, and never later than what the statement does.
                "now" => "statement_timestamp()".to_owned(),
                "now_ms" => self.place("ms", "statement_timestamp()"),
                "ms" => format!("floor(extract(epoch FROM {x}) * 1000)::bigint"),
                "at" => format!("(timestamptz 'epoch' + {x} * interval '1 millisecond')"),
                "after" => format!("(statement_timestamp() + {x} * interval '1 millisecond')"),
                "until" => format!("ceil(extract(epoch FROM ({x}) - statement_timestamp()) * 1000)::bigint"),
                "since" => format!("floor(extract(epoch FROM statement_timestamp() - ({x})) * 1000)::bigint"),
                "aged" => {
                    format!("greatest(0, floor(extract(epoch FROM statement_timestamp() - ({x})) * 1000)::bigint)")
                }
                "unlocked" => "FOR UPDATE SKIP LOCKED".to_owned(),
                "json" => format!("{x}::jsonb"),
                "text" => format!("{x}::text"),
                "ints" => format!("SELECT value::bigint FROM jsonb_array_elements_text({x}::jsonb)"),
                "texts" => format!("SELECT value FROM jsonb_array_elements_text({x}::jsonb)"),
                "held" => format!(
                    "(SELECT e ->> 'id' AS id, (e ->> 'fence')::bigint AS fence \
                     FROM jsonb_array_elements({x}::jsonb) AS e) AS held"
                ),
                _ => "job".to_owned(),
            },
            Self::Sqlite => match name {
                "now" | "now_ms" => SQLITE_NOW.to_owned(),
                // One writer: there is nobody else whose rows could be locked.
                "unlocked" => String::new(),
                "ms" | "at" | "json" | "text" => x.to_owned(),
                "after" => format!("({SQLITE_NOW} + {x})"),
                "until" => format!("(({x}) - {SQLITE_NOW})"),
                "since" => format!("({SQLITE_NOW} - ({x}))"),
                // Both instants were cut to milliseconds, so their difference may be one too many.
                "aged" => format!("max(0, {SQLITE_NOW} - ({x}) - 1)"),
                "ints" | "texts" => format!("SELECT value FROM json_each({x})"),
                "held" => format!(
                    "(SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.fence') AS fence \
                     FROM json_each({x})) AS held"
                ),
                _ => "(SELECT * FROM jobs WHERE id = $1) AS job".to_owned(),
            },
        }
    }
}

/// `subsec` has milliseconds; the product is rounded because 1.001 * 1000 is not 1001 in binary.
const SQLITE_NOW: &str = "CAST(round(unixepoch('subsec') * 1000) AS INTEGER)";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_says_the_same_in_both_dialects() {
        let template = "UPDATE t SET a = {after:$2}, b = {json:$3} WHERE c <= {now}";
        let postgres = Dialect::Postgres.sql(template);
        assert_eq!(
            &*postgres,
            "UPDATE t SET a = (statement_timestamp() + $2 * interval '1 millisecond'), b = $3::jsonb \
             WHERE c <= statement_timestamp()"
        );
        let sqlite = Dialect::Sqlite.sql(template);
        assert_eq!(&*sqlite, format!("UPDATE t SET a = ({SQLITE_NOW} + $2), b = $3 WHERE c <= {SQLITE_NOW}").as_str());
    }

    #[test]
    fn a_chain_is_one_statement_or_one_guarded_transaction() {
        let text = ChainText {
            update: "UPDATE jobs SET fence = 1 WHERE id = $1",
            then: &["INSERT INTO x SELECT id FROM {job}"],
            returning: "fence",
        };
        let args: Args = Arc::from([]);
        let postgres = Dialect::Postgres.chain(&text).steps(&args);
        assert_eq!(postgres.len(), 1);
        assert!(postgres[0].sql.starts_with("WITH job AS (UPDATE jobs"), "{}", postgres[0].sql);
        let sqlite = Dialect::Sqlite.chain(&text).steps(&args);
        assert_eq!(sqlite.iter().map(|step| step.must_affect).collect::<Vec<_>>(), [true, false]);
    }
}
