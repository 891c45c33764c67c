//! Literal credentials in a provider row, found by the name of their header or parameter, which needs a reference
//! instead.
//!
//! New rows with one are rejected. Rows that are already stored stay valid, because a stricter rule must not stop a
//! lane; `check` reports them.

use serde_json::Value;

use super::ProviderRow;
use crate::domain::sensitive::secret::names_credential;

/// References that a header may hold besides its text.
const REFERENCES: [&str; 3] = ["${env:", "${file:", "${job:account}"];

impl ProviderRow {
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
        let lookup = self.lookup.as_ref().and_then(|lookup| lookup.get("url")).and_then(Value::as_str);
        let urls = [("url", Some(self.url.as_str())), ("lookup.url", lookup)];
        let parameters = urls.into_iter().flat_map(|(column, url)| {
            let found = url.into_iter().flat_map(credential_parameters);
            found.map(move |name| {
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::{good, with};

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
}
