//! The check that a provider row holds references to secrets (`${env:NAME}`, `${file:PATH}`) and no secret itself.
//!
//! The row is stored in the database, its audit and its backups, and `provider show` prints it. The check finds secrets
//! with an issuer's known prefix; it cannot find others.

use serde_json::Value;

use super::ProviderRow;
use super::validate::RowValidator;
use crate::domain::sensitive::secret::looks_secret;

impl RowValidator {
    /// One problem for each column that holds a credential.
    pub(super) fn check_secrets(&mut self, row: &ProviderRow) {
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
        for (column, object) in [("request", &row.request), ("lookup", &row.lookup), ("statuses", &row.statuses)] {
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
}
