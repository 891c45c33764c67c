//! A provider row for output: its addresses without the values of their parameters.
//!
//! Commands and the API show rows in this form. Applying such a row is reported as a problem, because a value is
//! missing.

use serde::Serialize;
use serde_json::Value;

use super::ProviderRow;
use crate::domain::printable::{has_redaction, redact_url};

/// Serialises like the row.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub struct RedactedRow(ProviderRow);

impl From<&ProviderRow> for RedactedRow {
    fn from(row: &ProviderRow) -> Self {
        let mut shown = row.clone();
        shown.url = redact_url(&row.url);
        if let Some(Value::String(url)) = shown.lookup.as_mut().and_then(|lookup| lookup.get_mut("url")) {
            *url = redact_url(url);
        }
        Self(shown)
    }
}

impl RedactedRow {
    /// The row with the values of its parameters, for `--reveal`.
    pub fn unredacted(row: &ProviderRow) -> Self {
        Self(row.clone())
    }
}

impl ProviderRow {
    /// One problem for each address that was copied from redacted output.
    pub fn redaction_problems(&self) -> Vec<String> {
        let lookup = self.lookup.as_ref().and_then(|lookup| lookup.get("url")).and_then(Value::as_str);
        let urls = [("url", Some(self.url.as_str())), ("lookup.url", lookup)];
        let shown = urls.into_iter().filter(|(_, url)| url.is_some_and(has_redaction));
        let problem = |(column, _)| {
            format!(
                "{column} holds `…`, which stands for a value that is not shown: write the value; `provider show NAME --reveal` prints it"
            )
        };
        shown.map(problem).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::{good, with};
    use super::*;

    #[test]
    fn parameter_values_are_redacted_by_default() {
        let row = with(json!({
            "url": "https://pay.example/charges?sig=hunter2",
            "lookup": {"url": "https://pay.example/charges?id=${job:id}&sig=hunter2", "state": "/state"},
        }));
        let shown = serde_json::to_value(RedactedRow::from(&row)).unwrap();
        assert_eq!(shown["url"], "https://pay.example/charges?sig=…");
        let lookup = json!({"url": "https://pay.example/charges?id=${job:id}&sig=…", "state": "/state"});
        assert_eq!(shown["lookup"], lookup);
        assert_eq!(serde_json::to_value(RedactedRow::unredacted(&row)).unwrap(), serde_json::to_value(&row).unwrap());
        let copied: ProviderRow = serde_json::from_value(shown).unwrap();
        let problems = copied.redaction_problems();
        assert!(problems.len() == 2 && problems[1].starts_with("lookup.url holds `…`"), "{problems:?}");
        assert!(row.redaction_problems().is_empty() && good().redaction_problems().is_empty());
    }
}
