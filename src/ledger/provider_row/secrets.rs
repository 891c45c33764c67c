//! Secrets and provider rows: literal credentials, the check for obvious secrets, and a row for output.
//!
//! A row holds references to secrets (`${env:NAME}`, `${file:PATH}`) and no secret itself, because it is stored in the
//! database, its audit and its backups, and `provider show` prints it. The check finds secrets with an issuer's known
//! prefix; it cannot find others.
//!
//! Literal credentials are found by the name of their header or parameter, which needs a reference instead.
//! New rows with one are rejected. Rows that are already stored stay valid, because a stricter rule must not stop a
//! lane; `check` reports them.
//!
//! Commands and the API show a row's addresses without the values of their parameters. Applying such a row is reported
//! as a problem, because a value is missing.

use serde::Serialize;
use serde_json::Value;

use super::ProviderRow;
use super::validate::RowValidator;
use crate::domain::printable::{has_redaction, redact_url};
use crate::domain::sensitive::secret::{looks_secret, names_credential};

/// References that a header may hold besides its text.
const REFERENCES: [&str; 3] = ["${env:", "${file:", "${job:account}"];

impl ProviderRow {
    /// The addresses of charges and of look-ups, with their columns.
    fn addresses(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let lookup = self.lookup.as_ref().and_then(|lookup| lookup.get("url")).and_then(Value::as_str);
        [("url", self.url.as_str())].into_iter().chain(lookup.map(|url| ("lookup.url", url)))
    }

    /// One problem for each header and parameter that carries a credential without a reference. Names the place, never
    /// the value.
    pub fn literal_credentials(&self) -> Vec<String> {
        let headers = self.headers.iter().filter_map(|(name, value)| {
            let text = value.as_str()?;
            let is_literal = names_credential(name) && !REFERENCES.iter().any(|reference| text.contains(reference));
            is_literal.then(|| {
                let fix = "put it into a variable or a file, replace it at its issuer, and refer to the new one by \
                            ${env:NAME} or ${file:PATH}";
                format!("headers: the value of `{name}` is a credential in the row itself: {fix}")
            })
        });
        let parameters = self.addresses().flat_map(|(column, url)| {
            credential_parameters(url).into_iter().map(move |name| {
                let fix = "send it in `headers` by ${env:NAME} or ${file:PATH}, and replace it at its issuer";
                format!("{column}: the parameter `{name}` is a credential in the row itself: {fix}")
            })
        });
        headers.chain(parameters).collect()
    }
}

/// Names of parameters that carry a credential and no job field.
fn credential_parameters(url: &str) -> Vec<String> {
    let query = url.split_once('?').map_or("", |(_, query)| query);
    let query = query.split_once('#').map_or(query, |(query, _)| query);
    url::form_urlencoded::parse(query.as_bytes())
        .filter(|(name, value)| names_credential(name) && !value.contains("${"))
        .map(|(name, _)| name.into_owned())
        .collect()
}

impl RowValidator {
    /// One problem for each column that holds a credential.
    pub fn check_secrets(&mut self, row: &ProviderRow) {
        let problem = "holds what is obviously a secret: replace it there and at its issuer, and refer to the new one in \
                       `headers` by ${env:NAME} or ${file:PATH}";
        for (name, value) in &row.headers {
            if holds_secret(value) {
                self.problem(format!("headers: the value of `{name}` {problem}"));
            }
        }
        if looks_secret(&row.url) {
            self.problem(format!("url {problem}"));
        }
        for (column, object) in row.json_columns() {
            if object.as_ref().is_some_and(|object| object.values().any(holds_secret)) {
                self.problem(format!("{column} {problem}"));
            }
        }
    }
}

fn holds_secret(value: &Value) -> bool {
    match value {
        Value::String(text) => literals(text).any(looks_secret),
        Value::Array(items) => items.iter().any(holds_secret),
        Value::Object(members) => members.values().any(holds_secret),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// The text outside of `${…}`: a reference's name may look like a secret.
fn literals(text: &str) -> impl Iterator<Item = &str> {
    let mut pieces = text.split("${");
    let first = pieces.next();
    first.into_iter().chain(pieces.map(|piece| piece.split_once('}').map_or("", |(_, rest)| rest)))
}

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
        let shown = self.addresses().filter(|(_, url)| has_redaction(url));
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
    fn literal_credential_is_found_by_position() {
        for (columns, place) in [
            (json!({"headers": {"Authorization": "Basic aHVudGVyMg=="}}), "headers: the value of `Authorization`"),
            (json!({"headers": {"authorization": "Bearer hunter2"}}), "headers: the value of `authorization`"),
            (json!({"headers": {"X-API-Key": "hunter2"}}), "headers: the value of `X-API-Key`"),
            (json!({"headers": {"X-Auth-Token": "${job:id} hunter2"}}), "headers: the value of `X-Auth-Token`"),
            (json!({"url": "https://api.example.com/?a=b&api_key=hunter2"}), "url: the parameter `api_key`"),
            (
                json!({"lookup": {"url": "https://api.example.com/${job:id}?access%5Ftoken=hunter2#x"}}),
                "lookup.url: the parameter `access_token`",
            ),
        ] {
            let row = with(columns);
            let found = row.literal_credentials();
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].starts_with(place) && found[0].contains("${env:NAME}"), "{found:?}");
            assert!(!found[0].contains("hunter2") && !found[0].contains("aHVudGVyMg"), "{found:?}");
        }
    }

    #[test]
    fn references_and_plain_headers_are_accepted() {
        let row = with(json!({
            "url": "https://api.example.com/charges?version=3",
            "headers": {
                "Authorization": "Bearer ${env:KEY}",
                "X-API-Key": "${file:/run/secrets/sluicegate/key}",
                "X-Account-Token": "acct_${job:account}",
                "X-Version": "2026-01-01",
                "Stripe-Account": "acct_1",
            },
            "lookup": {"url": "https://api.example.com/charges?idempotency_key=${job:idempotency_key}&key=${job:id}&api_key=${reference}"},
        }));
        assert_eq!(row.literal_credentials(), [""; 0]);
        assert_eq!(good().literal_credentials(), [""; 0]);
    }

    #[test]
    fn existing_row_with_literal_credential_is_accepted() {
        assert!(with(json!({"headers": {"Authorization": "Basic aHVudGVyMg=="}})).validate(1).is_ok());
    }

    fn problems(change: impl FnOnce(&mut ProviderRow)) -> Vec<String> {
        let url = "https://api.example/charges".to_owned();
        let mut row = ProviderRow { name: "acme".to_owned(), url, ..ProviderRow::default() };
        change(&mut row);
        let mut check = RowValidator::default();
        check.check_secrets(&row);
        check.0
    }

    #[test]
    fn secret_in_row_is_rejected_but_not_repeated() {
        let secret = "sk_live_4eC39HqLyjWDarjtT1zdp7dc";
        let object = |value: serde_json::Value| value.as_object().unwrap().clone();
        let found = [
            problems(|row| row.headers = object(json!({ "Authorization": format!("Bearer {secret}") }))),
            problems(|row| row.headers = object(json!({ "x-key": format!("${{env:A}}{secret}") }))),
            problems(|row| row.url = format!("https://api.example/charges?key={secret}")),
            problems(|row| row.request = Some(object(json!({ "body": { "key": [secret] } })))),
        ];
        for problems in found {
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(!problems[0].contains(secret) && problems[0].contains("${env:NAME}"), "{problems:?}");
        }
    }

    #[test]
    fn secret_reference_is_not_a_secret() {
        let headers = json!({
            "Authorization": "Bearer ${env:sk_live_key_of_production}",
            "x-key": "${file:/run/secrets/sk_live_key_of_production}",
        });
        assert!(problems(|row| row.headers = headers.as_object().unwrap().clone()).is_empty());
    }

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
