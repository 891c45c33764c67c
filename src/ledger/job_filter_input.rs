//! The input of a filter for jobs: the words of an operator, from a query string or from flags, parsed once into a
//! [`JobFilter`].
//!
//! An error names the field and how to write it. Amounts are written like `12.99`, in units of their currency.

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use serde::Deserialize;
use utoipa::ToSchema;

use crate::domain::amount::minor_amount;
use crate::domain::job::Identifier;
use crate::domain::job_filter::{JobFilter, Range, ReasonFilter, STATES, is_instant};
use crate::domain::provider::ProviderName;

/// Longest text to search for, in characters: the longest reference.
const TEXT_CHARS_MAX: usize = 255;

/// A filter as it was written; an absent field is no condition.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RawJobFilter {
    /// States, separated by commas.
    pub state: Option<String>,
    pub provider: Option<String>,
    pub account: Option<String>,
    pub id: Option<String>,
    pub search: Option<String>,
    pub reason: Option<String>,
    pub currency: Option<String>,
    pub min_amount: Option<String>,
    pub max_amount: Option<String>,
    pub created_from: Option<String>,
    pub created_to: Option<String>,
    pub finished_from: Option<String>,
    pub finished_to: Option<String>,
}

/// An invalid field of a filter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{field}`: {problem}")]
pub struct InvalidFilter {
    pub field: &'static str,
    /// What is wrong, and how to write it.
    pub problem: String,
}

impl InvalidFilter {
    fn new(field: &'static str, problem: impl ToString) -> Self {
        Self { field, problem: problem.to_string() }
    }

    /// The same for a command line.
    pub fn as_flag(&self) -> String {
        format!("--{}: {}", self.field.replace('_', "-"), self.problem)
    }
}

impl RawJobFilter {
    /// Reads the query of an address of the list, like `provider=acme&state=review`.
    ///
    /// # Errors
    /// When a field is unknown or given twice.
    pub fn from_query(text: &str) -> Result<Self, String> {
        let mut fields = serde_json::Map::new();
        for (name, value) in url::form_urlencoded::parse(text.trim_start_matches('?').as_bytes()) {
            if fields.insert(name.to_string(), value.into()).is_some() {
                return Err(format!("`{name}` is given twice: write it once"));
            }
        }
        serde_json::from_value(fields.into()).map_err(|error| error.to_string())
    }

    /// # Errors
    /// The first invalid field.
    pub fn validate(self) -> Result<JobFilter, InvalidFilter> {
        let provider = self.provider.map(ProviderName::new).transpose();
        let currency = self.currency.map(currency).transpose()?;
        let amounts = [("min_amount", self.min_amount), ("max_amount", self.max_amount)];
        let [min, max] = amounts.map(|(field, text)| amount(field, text, currency.as_deref()));
        let filter = JobFilter {
            states: self.state.as_deref().map(states).transpose()?.unwrap_or_default(),
            provider: provider.map_err(|why| InvalidFilter::new("provider", why))?,
            account: identifier("account", self.account)?,
            id: identifier("id", self.id)?,
            search: text("search", self.search)?,
            reason: text("reason", self.reason)?.as_deref().map(ReasonFilter::new),
            currency,
            amounts: Range { from: min?, to: max? },
            created: Range {
                from: instant("created_from", self.created_from)?,
                to: instant("created_to", self.created_to)?,
            },
            finished: Range {
                from: instant("finished_from", self.finished_from)?,
                to: instant("finished_to", self.finished_to)?,
            },
        };
        let ranges =
            [("max_amount", filter.amounts, 0), ("created_to", filter.created, 1), ("finished_to", filter.finished, 1)];
        for (field, range, least) in ranges {
            if let (Some(from), Some(to)) = (range.from, range.to)
                && to.saturating_sub(from) < least
            {
                return Err(InvalidFilter::new(field, "the range is empty: its end must be after its beginning"));
            }
        }
        Ok(filter)
    }
}

fn states(text: &str) -> Result<Vec<&'static str>, InvalidFilter> {
    let known = |name: &str| {
        let found = STATES.into_iter().find(|state| *state == name);
        found.ok_or_else(|| InvalidFilter::new("state", format!("must be one or more of {}", STATES.join(","))))
    };
    text.split(',').map(known).collect()
}

fn identifier(field: &'static str, text: Option<String>) -> Result<Option<Identifier>, InvalidFilter> {
    text.map(Identifier::new).transpose().map_err(|why| InvalidFilter::new(field, why))
}

fn text(field: &'static str, text: Option<String>) -> Result<Option<String>, InvalidFilter> {
    let Some(text) = text else { return Ok(None) };
    let text = text.trim();
    if text.is_empty() || text.chars().count() > TEXT_CHARS_MAX || text.chars().any(char::is_control) {
        let problem = format!("must be 1 to {TEXT_CHARS_MAX} characters without control characters");
        return Err(InvalidFilter::new(field, problem));
    }
    Ok(Some(text.to_owned()))
}

fn currency(text: String) -> Result<String, InvalidFilter> {
    if text.len() == 3 && text.bytes().all(|b| b.is_ascii_uppercase()) {
        return Ok(text);
    }
    Err(InvalidFilter::new("currency", "must be 3 capital letters, like EUR"))
}

fn amount(field: &'static str, text: Option<String>, currency: Option<&str>) -> Result<Option<i64>, InvalidFilter> {
    let Some(text) = text else { return Ok(None) };
    let Some(currency) = currency else {
        return Err(InvalidFilter::new(field, "an amount needs its currency: give `currency` too"));
    };
    let minor = minor_amount(&text, currency);
    minor.map(Some).ok_or_else(|| {
        InvalidFilter::new(
            field,
            format!("must be an amount in {currency}, like 12.99, with no more decimals than it has"),
        )
    })
}

/// A date is the beginning of its day in UTC.
fn instant(field: &'static str, text: Option<String>) -> Result<Option<i64>, InvalidFilter> {
    let Some(text) = text else { return Ok(None) };
    let of_day = |text: &str| Some(text.parse::<Date>().ok()?.to_zoned(TimeZone::UTC).ok()?.timestamp());
    let at = text.parse::<Timestamp>().ok().or_else(|| of_day(&text));
    let at = at.map(Timestamp::as_millisecond).filter(|ms| is_instant(*ms));
    at.map(Some).ok_or_else(|| {
        InvalidFilter::new(field, "must be an instant like 2026-11-27T14:00:00Z, or a date like 2026-11-27")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(fields: &[(&str, &str)]) -> Result<JobFilter, InvalidFilter> {
        let mut raw = RawJobFilter::default();
        for (name, value) in fields {
            let field = match *name {
                "state" => &mut raw.state,
                "provider" => &mut raw.provider,
                "account" => &mut raw.account,
                "search" => &mut raw.search,
                "reason" => &mut raw.reason,
                "currency" => &mut raw.currency,
                "min_amount" => &mut raw.min_amount,
                "max_amount" => &mut raw.max_amount,
                "created_from" => &mut raw.created_from,
                "created_to" => &mut raw.created_to,
                "finished_to" => &mut raw.finished_to,
                other => panic!("{other}"),
            };
            *field = Some((*value).to_owned());
        }
        raw.validate()
    }

    #[test]
    fn every_field_becomes_a_condition() {
        let filter = parse(&[
            ("state", "dead,review"),
            ("provider", "acme"),
            ("account", "acct_1"),
            ("search", " inv-7 "),
            ("reason", "insufficient"),
            ("currency", "KWD"),
            ("min_amount", "1.5"),
            ("max_amount", "12"),
            ("created_from", "2026-11-27"),
            ("created_to", "2026-11-27T14:00:00.250+01:00"),
        ]);
        let day = 1_795_737_600_000;
        let expected = JobFilter {
            states: vec!["dead", "review"],
            provider: Some(ProviderName::new("acme").unwrap()),
            account: Some(Identifier::new("acct_1").unwrap()),
            id: None,
            search: Some("inv-7".to_owned()),
            reason: Some(ReasonFilter::Ended("insufficient".to_owned())),
            currency: Some("KWD".to_owned()),
            amounts: Range { from: Some(1_500), to: Some(12_000) },
            created: Range { from: Some(day), to: Some(day + 13 * 3_600_000 + 250) },
            finished: Range::default(),
        };
        assert_eq!(filter, Ok(expected));
        assert_eq!(parse(&[]), Ok(JobFilter::default()));
        assert_eq!(parse(&[("reason", "throttled")]).unwrap().reason, Some(ReasonFilter::Waits("throttled")));
    }

    #[test]
    fn query_of_an_address_is_a_filter() {
        let raw = RawJobFilter::from_query("?state=dead,review&search=inv%207&provider=acme").unwrap();
        let expected = [Some("dead,review"), Some("inv 7"), Some("acme"), None];
        assert_eq!([raw.state, raw.search, raw.provider, raw.account], expected.map(|text| text.map(str::to_owned)));
        assert_eq!(RawJobFilter::from_query(""), Ok(RawJobFilter::default()));
        for (text, words) in
            [("state=dead&state=review", "`state` is given twice"), ("colour=red", "unknown field `colour`")]
        {
            assert!(RawJobFilter::from_query(text).unwrap_err().contains(words), "{text}");
        }
    }

    #[test]
    fn errors_name_the_field_and_its_form() {
        for (fields, words) in [
            (&[("state", "lost")][..], "`state`: must be one or more of waiting,sending"),
            (&[("state", "")], "`state`: must be one or more of"),
            (&[("provider", "A")], "`provider`: `A` is not a name"),
            (&[("account", "a b")], "`account`: must be 1 to 64 characters"),
            (&[("search", " ")], "`search`: must be 1 to 255 characters"),
            (&[("reason", "a\nb")], "`reason`: must be 1 to 255 characters"),
            (&[("currency", "eur")], "`currency`: must be 3 capital letters"),
            (&[("min_amount", "5")], "`min_amount`: an amount needs its currency"),
            (&[("currency", "JPY"), ("min_amount", "5.5")], "`min_amount`: must be an amount in JPY"),
            (&[("currency", "EUR"), ("max_amount", "-1")], "`max_amount`: must be an amount in EUR"),
            (&[("currency", "EUR"), ("min_amount", "2"), ("max_amount", "1")], "`max_amount`: the range is empty"),
            (&[("created_from", "yesterday")], "`created_from`: must be an instant like"),
            (&[("created_from", "2026-11-27"), ("created_to", "2026-11-27")], "`created_to`: the range is empty"),
            (&[("finished_to", "+010000-01-01")], "`finished_to`: must be an instant like"),
        ] {
            let problem = parse(fields).unwrap_err();
            assert!(problem.to_string().starts_with(words), "{fields:?}: {problem}");
            assert!(problem.as_flag().starts_with(&format!("--{}: ", problem.field.replace('_', "-"))));
        }
        let equal = [("currency", "EUR"), ("min_amount", "2"), ("max_amount", "2")];
        assert_eq!(parse(&equal).unwrap().amounts, Range { from: Some(200), to: Some(200) });
    }
}
