//! Risks of a valid provider row, for `check` and `provider apply`: the row works, and costs payments under some
//! condition.

use crate::domain::provider::Provider;

/// A risk, and its fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowRisk {
    pub what: String,
    pub fix: &'static str,
}

/// All risks of a row.
pub fn row_risks(provider: &Provider) -> Vec<RowRisk> {
    let successes = undecided_successes(provider).into_iter();
    successes.chain(deduplication_costs(provider)).chain(stray_responses(provider)).collect()
}

/// Successes that the row leaves to the default table.
fn undecided_successes(provider: &Provider) -> Vec<RowRisk> {
    let mut risks = Vec::new();
    if !provider.statuses.contains_key(&200) {
        risks.push(RowRisk {
            what: "`statuses` has no case for 200: a refusal in the body counts as paid".to_owned(),
            fix: "Name the words of the body, such as 200 = [{ code = \"succeeded\", at = \"/status\", means = \"accepted\" }, \
                  { means = \"unknown\" }]; or 200 = \"accepted\", if the provider never refuses with 200",
        });
    }
    if !provider.statuses.contains_key(&202) {
        let effect = match provider.idempotency_retention {
            Some(_) => "the payment is sent again under its key",
            None => "the payment is looked up, or goes to `review`, and is never sent again",
        };
        risks.push(RowRisk {
            what: format!("`statuses` has no case for 202: it counts as in progress, so {effect}"),
            fix: "Write 202 = \"in_progress\" to keep that; or name the words of the body, as for 200",
        });
    }
    risks
}

/// The costs of a row without deduplication.
fn deduplication_costs(provider: &Provider) -> Vec<RowRisk> {
    let mut costs = Vec::new();
    if provider.idempotency_retention.is_none() && provider.lookup.is_none() {
        costs.push(RowRisk {
            what:
                "its row has neither idempotency_retention_s nor lookup: every unknown outcome waits for manual review"
                    .to_owned(),
            fix: "Set idempotency_retention_s if it honours idempotency keys, or lookup if payments can be looked up",
        });
    }
    if provider.idempotency_retention.is_none() && provider.reuse_connections == Some(true) {
        costs.push(RowRisk {
            what: "shares connections and does not deduplicate: a refusal such as 429 on a used connection, or a \
                   connection that the provider closes, leaves the outcome unknown"
                .to_owned(),
            fix: "Remove reuse_connections, or set idempotency_retention_s if it honours idempotency keys",
        });
    }
    costs
}

/// What a response to an earlier request of the same connection can do.
fn stray_responses(provider: &Provider) -> Option<RowRisk> {
    let is_exposed = provider.reuses_connections() && provider.request.echo.fields.is_empty();
    is_exposed.then(|| RowRisk {
        what:
            "shares connections without `echo`: a response to an earlier request can be taken for the payment's own. A \
               refusal such as 429 counts only if no other response follows, so its payment waits for its deadline"
                .to_owned(),
        fix: "Name in request.echo what its responses repeat, or set reuse_connections = false",
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::ledger::provider_row::ProviderRow;

    fn risks(statuses: serde_json::Value) -> String {
        let row = json!({
            "name": "acme", "url": "https://pay.example.com", "idempotency_retention_s": 86_400, "statuses": statuses,
            "limit": [{"name": "second", "max_requests": 100, "window_ms": 1_000}],
        });
        let row: ProviderRow = serde_json::from_value(row).unwrap();
        row_risks(&row.validate(1).unwrap()).into_iter().map(|risk| risk.what + "\n").collect()
    }

    #[test]
    fn success_without_a_case_is_a_risk() {
        let refusal = "no case for 200: a refusal in the body counts as paid";
        let pending = "no case for 202";
        let none = risks(json!({}));
        assert!(none.contains(refusal) && none.contains(pending), "{none}");
        let words = json!([{"code": "ok", "at": "/status", "means": "accepted"}, {"means": "unknown"}]);
        for (statuses, has_refusal, has_pending) in [
            (json!({"200": words}), false, true),
            (json!({"200": "accepted"}), false, true),
            (json!({"201": "accepted", "202": "in_progress"}), true, false),
            (json!({"200": words, "202": "in_progress"}), false, false),
        ] {
            let found = risks(statuses.clone());
            assert_eq!((found.contains(refusal), found.contains(pending)), (has_refusal, has_pending), "{statuses}");
        }
    }

    #[test]
    fn shared_connections_without_echo_are_a_risk() {
        let is_risk = |reuse: serde_json::Value, retention: serde_json::Value, request: serde_json::Value| {
            let row = json!({
                "name": "acme", "url": "https://pay.example.com", "idempotency_retention_s": retention,
                "reuse_connections": reuse, "request": request,
                "limit": [{"name": "second", "max_requests": 100, "window_ms": 1_000}],
            });
            let row: ProviderRow = serde_json::from_value(row).unwrap();
            row_risks(&row.validate(1).unwrap()).iter().any(|risk| risk.what.contains("without `echo`"))
        };
        let (none, echo) = (json!(null), json!({"echo": {"id": "/order"}}));
        assert!(is_risk(none.clone(), json!(86_400), none.clone()), "the default with deduplication");
        assert!(is_risk(json!(true), none.clone(), none.clone()));
        assert!(!is_risk(none.clone(), none.clone(), none.clone()), "a connection for each charge");
        assert!(!is_risk(json!(false), json!(86_400), none.clone()));
        assert!(!is_risk(none, json!(86_400), echo));
    }
}
