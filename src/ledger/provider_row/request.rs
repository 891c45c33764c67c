//! Validation of the `request` column: how a charge is sent, and where the response has the reference and a wait.
//!
//! Unknown keys are problems. The unit of a wait must be given: an instant that is read as seconds would be no wait at
//! all.

use serde::Deserialize;

use super::Object;
use super::validate::{RowValidator, is_header_name};
use crate::domain::expansion::TEMPLATE_BYTES_MAX;
use crate::domain::provider::RequestShape;
use crate::domain::response::{ResponseLocation, WaitField, WaitUnit};

/// The column's content; an absent key has the contract's default.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestRow {
    method: Option<String>,
    key_header: Option<String>,
    body: Option<String>,
    template: Option<Object>,
    reference: Option<String>,
    wait: Option<Object>,
    echo: Option<Object>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WaitRow {
    header: Option<String>,
    at: Option<String>,
    unit: Option<String>,
}

impl RowValidator {
    pub(super) fn request(&mut self, request: Option<&Object>) -> RequestShape {
        let row: Option<RequestRow> = request.and_then(|object| self.keys("request", object));
        let Some(row) = row else { return RequestShape::default() };
        if let Some(method) = &row.method {
            self.one_of("request.method", method, &[("POST", ()), ("PUT", ()), ("PATCH", ())]);
        }
        if row.key_header.as_ref().is_some_and(|name| !is_header_name(name)) {
            self.problem("request.key_header is not a header name".to_owned());
        }
        let body = row.body.as_deref().unwrap_or("json");
        let form_encoded = self.one_of("request.body", body, &[("json", false), ("form", true)]);
        if row.reference.as_ref().is_some_and(|pointer| !pointer.starts_with('/')) {
            self.problem("request.reference is not a JSON pointer: write /id or /data/id".to_owned());
        }
        let template = row.template.map(|template| serde_json::Value::Object(template).to_string());
        if template.as_ref().is_some_and(|template| template.len() > TEMPLATE_BYTES_MAX) {
            self.problem(format!("request.template is longer than {TEMPLATE_BYTES_MAX} bytes as JSON"));
        }
        RequestShape {
            method: row.method,
            key_header: row.key_header,
            form_encoded: form_encoded.unwrap_or_default(),
            template,
            reference_pointer: row.reference,
            wait: row.wait.and_then(|wait| self.wait(&wait)),
            echo: self.echo("request.echo", row.echo.as_ref()),
        }
    }

    fn wait(&mut self, object: &Object) -> Option<WaitField> {
        let row: WaitRow = self.keys("request.wait", object)?;
        let units = WaitUnit::ALL.map(|unit| (unit.name(), unit));
        let unit = match &row.unit {
            Some(unit) => self.one_of("request.wait.unit", unit, &units),
            None => {
                let names = WaitUnit::ALL.map(WaitUnit::name).join(", ");
                self.problem(format!("request.wait.unit is missing: one of {names}"));
                None
            }
        };
        let place = match (row.header, row.at) {
            (Some(header), None) if is_header_name(&header) => ResponseLocation::Header(header),
            (None, Some(at)) if at.starts_with('/') => ResponseLocation::Body(at),
            (Some(_), None) => {
                self.problem("request.wait.header is not a header name".to_owned());
                return None;
            }
            (None, Some(_)) => {
                self.problem(
                    "request.wait.at is not a JSON pointer: write /retry_after or /error/retry_after".to_owned(),
                );
                return None;
            }
            _ => {
                self.problem(
                    "request.wait needs `header` or `at`, and not both: where the response has the wait".to_owned(),
                );
                return None;
            }
        };
        Some(WaitField { location: place, unit: unit? })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::with;
    use super::*;

    #[test]
    fn wait_is_read_from_header_or_body() {
        for unit in WaitUnit::ALL {
            let wait = |wait| with(json!({"request": {"wait": wait}})).validate(1).unwrap().request.wait.unwrap();
            let header = wait(json!({"header": "X-Reset", "unit": unit.name()}));
            assert_eq!(header, WaitField { location: ResponseLocation::Header("X-Reset".to_owned()), unit });
            let body = wait(json!({"at": "/error/reset", "unit": unit.name()}));
            assert_eq!(body, WaitField { location: ResponseLocation::Body("/error/reset".to_owned()), unit });
        }
    }

    #[test]
    fn invalid_request_keys_are_reported_with_fixes() {
        let table = [
            (json!({"metod": "POST"}), "request: unknown field `metod`"),
            (json!({"method": "GET"}), "request.method is `GET`"),
            (json!({"method": 5}), "request.method: invalid type"),
            (json!({"body": "xml"}), "request.body is `xml`"),
            (json!({"reference": "id"}), "request.reference is not a JSON pointer"),
            (json!({"key_header": "a:b"}), "request.key_header is not a header name"),
            (json!({"template": {"a": "x".repeat(16_384)}}), "request.template is longer than 16384 bytes"),
            (json!({"wait": "X-Reset"}), "request.wait: invalid type"),
            (json!({"wait": {"unit": "s"}}), "request.wait needs `header` or `at`"),
            (
                json!({"wait": {"header": "a", "at": "/b", "unit": "s"}}),
                "request.wait needs `header` or `at`, and not both",
            ),
            (json!({"wait": {"header": "a b", "unit": "s"}}), "request.wait.header is not a header name"),
            (json!({"wait": {"at": "retry_after", "unit": "s"}}), "request.wait.at is not a JSON pointer"),
            (json!({"wait": {"header": "a"}}), "request.wait.unit is missing: one of s, ms, epoch_s, epoch_ms"),
            (json!({"wait": {"header": "a", "unit": "min"}}), "request.wait.unit is `min`: must be s or ms or epoch_s"),
            (json!({"wait": {"header": "a", "unit": 1}}), "request.wait.unit: invalid type"),
            (json!({"wait": {"headr": "a", "unit": "s"}}), "request.wait: unknown field `headr`"),
        ];
        for (request, problem) in table {
            let bad = with(json!({ "request": request })).validate(1).unwrap_err();
            assert!(bad.problems.len() == 1 && bad.problems[0].starts_with(problem), "{request}: {:#?}", bad.problems);
        }
        let bad = with(json!({"request": {"method": "GET", "body": "xml", "wait": {}}})).validate(1).unwrap_err();
        assert_eq!(bad.problems.len(), 4, "all of them: {:#?}", bad.problems);
    }
}
