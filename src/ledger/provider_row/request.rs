//! Validation of the `request` column, and of `echo` in the columns `request` and `lookup`.
//!
//! `request` says how a charge is sent, and where the response has the reference and a wait. Unknown keys are problems.
//! The unit of a wait must be given: an instant that is read as seconds would be no wait at all.
//!
//! `echo` has the job fields that a response must repeat, and where. A location that no response has would send every
//! payment to review. So a text must be a JSON pointer, and a header is named as `{ header = "Name" }`.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::Object;
use super::validate::RowValidator;
use crate::domain::expansion::TEMPLATE_BYTES_MAX;
use crate::domain::job::JobField;
use crate::domain::provider::{Provider, RequestShape};
use crate::domain::response::{
    AmountUnit, Echo, EchoField, EchoedField, ResponseLocation, SumFields, WaitField, WaitUnit,
};

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
    amount: Option<String>,
    currency: Option<String>,
    amount_unit: Option<String>,
    partial: Option<String>,
}

/// Keys of the columns `request` and `lookup` about the sum in a response.
pub(super) struct SumRow {
    pub amount: Option<String>,
    pub currency: Option<String>,
    pub unit: Option<String>,
    pub partial: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WaitRow {
    header: Option<String>,
    at: Option<String>,
    unit: Option<String>,
}

impl RowValidator {
    pub fn request(&mut self, request: Option<&Object>) -> RequestShape {
        let row: Option<RequestRow> = request.and_then(|object| self.keys("request", object));
        let Some(row) = row else { return RequestShape::default() };
        if let Some(method) = &row.method {
            self.one_of("request.method", method, &[("POST", ()), ("PUT", ()), ("PATCH", ())]);
        }
        self.header_name("request.key_header", row.key_header.as_ref());
        let body = row.body.as_deref().unwrap_or("json");
        let form_encoded = self.one_of("request.body", body, &[("json", false), ("form", true)]);
        self.pointer("request.reference", row.reference.as_ref(), "/id or /data/id");
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
            sum: self.sum_fields(
                "request",
                SumRow { amount: row.amount, currency: row.currency, unit: row.amount_unit, partial: row.partial },
            ),
        }
    }

    /// Where a response has the sum. `column` is `request` or `lookup`.
    pub(super) fn sum_fields(&mut self, column: &str, row: SumRow) -> SumFields {
        for (key, pointer) in [("amount", &row.amount), ("currency", &row.currency)] {
            self.pointer(&format!("{column}.{key}"), pointer.as_ref(), &format!("/{key} or /data/{key}"));
        }
        let units = AmountUnit::ALL.map(|unit| (unit.name(), unit));
        let unit = row.unit.as_ref().map(|unit| self.one_of(&format!("{column}.amount_unit"), unit, &units));
        let endings = [("review", false), ("accept", true)];
        let partial = row.partial.as_ref().map(|partial| self.one_of(&format!("{column}.partial"), partial, &endings));
        for (key, is_given) in [("amount_unit", unit.is_some()), ("partial", partial.is_some())] {
            if is_given && row.amount.is_none() {
                self.problem(format!("{column}.{key} is about {column}.amount, which is missing: name its place"));
            }
        }
        SumFields {
            amount: row.amount,
            currency: row.currency,
            unit: unit.flatten().unwrap_or_default(),
            accepts_partial: partial.flatten().unwrap_or_default(),
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
        self.header_name("request.wait.header", row.header.as_ref());
        self.pointer("request.wait.at", row.at.as_ref(), "/retry_after or /error/retry_after");
        let location = match (row.header, row.at) {
            (Some(header), None) => ResponseLocation::Header(header),
            (None, Some(at)) => ResponseLocation::Body(at),
            _ => {
                self.problem("request.wait needs `header` or `at`, and not both: where the response has the wait");
                return None;
            }
        };
        Some(WaitField { location, unit: unit? })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EchoRow {
    id: Option<EchoLocationsRow>,
    idempotency_key: Option<EchoLocationsRow>,
    reference: Option<EchoLocationsRow>,
    amount: Option<EchoLocationsRow>,
    except: Option<Vec<u16>>,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "write a JSON pointer such as \"/metadata/id\", { header = \"Name\" }, or a list of these"
)]
enum EchoLocationsRow {
    One(EchoLocationRow),
    Any(Vec<EchoLocationRow>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum EchoLocationRow {
    Pointer(String),
    Header(EchoHeaderRow),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EchoHeaderRow {
    header: String,
}

impl RowValidator {
    /// `column` is `request.echo` or `lookup.echo`.
    pub fn echo(&mut self, column: &str, object: Option<&Object>) -> Echo {
        let row: Option<EchoRow> = object.and_then(|object| self.keys(column, object));
        let Some(row) = row else { return Echo::default() };
        let fields = [
            (EchoField::Id, "id", row.id),
            (EchoField::IdempotencyKey, "idempotency_key", row.idempotency_key),
            (EchoField::Reference, "reference", row.reference),
            (EchoField::Amount, "amount", row.amount),
        ];
        let fields: Vec<EchoedField> = fields
            .into_iter()
            .filter_map(|(field, key, places)| {
                Some(EchoedField { field, locations: self.echo_locations(&format!("{column}.{key}"), places?) })
            })
            .collect();
        if fields.is_empty() {
            self.problem(format!("{column} compares nothing: name id, idempotency_key, reference or amount"));
        }
        let except: BTreeSet<u16> = row.except.unwrap_or_default().into_iter().collect();
        if let Some(status) = except.iter().find(|status| !(100..=599).contains(*status)) {
            self.problem(format!("{column}.except: {status} is not an HTTP status between 100 and 599"));
        }
        Echo { fields, exempt_statuses: except }
    }

    fn echo_locations(&mut self, key: &str, places: EchoLocationsRow) -> Vec<ResponseLocation> {
        let places = match places {
            EchoLocationsRow::One(place) => vec![place],
            EchoLocationsRow::Any(places) => places,
        };
        if places.is_empty() {
            self.problem(format!("{key} has no location: write a JSON pointer such as /metadata/id"));
        }
        let location = |place| match place {
            EchoLocationRow::Pointer(pointer) => {
                let examples = "/metadata/id, or { header = \"Name\" }";
                self.pointer(key, Some(&pointer), examples);
                ResponseLocation::Body(pointer)
            }
            EchoLocationRow::Header(EchoHeaderRow { header }) => {
                self.header_name(&format!("{key}.header"), Some(&header));
                ResponseLocation::Header(header)
            }
        };
        places.into_iter().map(location).collect()
    }

    /// On a shared connection a decline that repeats nothing may be a copy of another payment's. And payments without a
    /// reference could not be told apart by it.
    pub fn check_echoes(&mut self, provider: &Provider) {
        let shares_lookups = provider.reuse_connections.unwrap_or(true);
        let request = ("request", &provider.request.echo, provider.reuses_connections());
        let lookup = provider.lookup.as_ref().map(|lookup| ("lookup", &lookup.echo, shares_lookups));
        for (column, echo, is_shared) in [request].into_iter().chain(lookup) {
            let has_reference = echo.fields.iter().any(|echoed| echoed.field == EchoField::Reference);
            if has_reference && !provider.require.contains(&JobField::Reference) {
                self.problem(format!(
                    "{column}.echo.reference: a payment without a reference could not be told from another one; add \
                     \"reference\" to `require`, or compare the id"
                ));
            }
            if is_shared && !echo.exempt_statuses.is_empty() {
                self.problem(format!(
                    "{column}.echo.except: on a shared connection such a response may belong to another payment; set \
                     reuse_connections = false, or remove `except`"
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

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

    fn problems(row: Value) -> Vec<String> {
        with(row).validate(1).map_or_else(|bad| bad.problems, |_| Vec::new())
    }

    #[test]
    fn echo_may_be_in_body_or_header() {
        let echo = json!({
            "id": ["/metadata/id", "/error/metadata/id"], "idempotency_key": {"header": "X-Key"}, "reference": "/reference",
            "amount": ["/amount", {"header": "X-Amount"}], "except": [422, 404],
        });
        let lookup = json!({"url": "https://api.example.com/${job:id}", "echo": {"id": "/0/id"}});
        let row = with(
            json!({"request": {"echo": echo}, "lookup": lookup, "require": ["reference"], "reuse_connections": false}),
        )
        .validate(1)
        .unwrap();
        let body = |pointer: &str| ResponseLocation::Body(pointer.to_owned());
        let header = |name: &str| ResponseLocation::Header(name.to_owned());
        let field = |field, places: &[ResponseLocation]| EchoedField { field, locations: places.to_vec() };
        let fields = vec![
            field(EchoField::Id, &[body("/metadata/id"), body("/error/metadata/id")]),
            field(EchoField::IdempotencyKey, &[header("X-Key")]),
            field(EchoField::Reference, &[body("/reference")]),
            field(EchoField::Amount, &[body("/amount"), header("X-Amount")]),
        ];
        assert_eq!(row.request.echo, Echo { fields, exempt_statuses: [404, 422].into() });
        assert_eq!(row.lookup.unwrap().echo.fields, [field(EchoField::Id, &[body("/0/id")])]);
        assert_eq!(with(json!({})).validate(1).unwrap().request.echo, Echo::default());
    }

    #[test]
    fn echo_exceptions_need_single_use_connections() {
        let request = json!({"echo": {"id": "/id", "except": [422]}});
        let row = |reuse: Option<bool>, retention: Option<u32>| json!({"request": request, "reuse_connections": reuse, "idempotency_retention_s": retention});
        for row in [row(None, Some(86_400)), row(Some(true), Some(86_400)), row(Some(true), None)] {
            let found = problems(row);
            assert!(
                found.len() == 1 && found[0].contains("request.echo.except") && found[0].contains("reuse_connections")
            );
        }
        for row in [row(Some(false), Some(86_400)), row(None, None)] {
            assert_eq!(problems(row), [""; 0]);
        }
        let lookup = json!({"url": "https://api.example.com/${job:id}", "echo": {"id": "/id", "except": [404]}});
        let found = problems(json!({ "lookup": lookup }));
        assert!(found.len() == 1 && found[0].starts_with("lookup.echo.except: on a shared connection"), "{found:#?}");
    }

    #[test]
    fn an_invalid_echo_is_named_with_its_fix() {
        for (echo, problem) in [
            (json!({}), "request.echo compares nothing: name id, idempotency_key, reference or amount"),
            (json!({"except": [422]}), "request.echo compares nothing"),
            (json!({"ID": "/id"}), "request.echo: unknown field `ID`, expected one of `id`, `idempotency_key`"),
            (
                json!({"id": "metadata/id"}),
                "request.echo.id is not a JSON pointer: write /metadata/id, or { header = \"Name\" }",
            ),
            (json!({"id": "reference"}), "request.echo.id is not a JSON pointer"),
            (json!({"id": ""}), "request.echo.id is not a JSON pointer"),
            (json!({"id": []}), "request.echo.id has no location"),
            (
                json!({"id": 5}),
                "request.echo.id: write a JSON pointer such as \"/metadata/id\", { header = \"Name\" }, or",
            ),
            (json!({"id": {"headr": "X"}}), "request.echo.id: write a JSON pointer such as"),
            (json!({"id": {"header": "a b"}}), "request.echo.id.header is not a header name"),
            (json!({"id": "/id", "except": [99]}), "request.echo.except: 99 is not an HTTP status"),
            (json!({"id": "/id", "except": 422}), "request.echo.except: invalid type"),
            (json!({"reference": "/r"}), "request.echo.reference: a payment without a reference could not be told"),
            (json!("/id"), "request.echo: invalid type"),
        ] {
            let found = problems(json!({"request": {"echo": echo}}));
            assert!(found.len() == 1 && found[0].starts_with(problem), "{echo}: {found:#?}");
        }
        let lookup = json!({"url": "https://api.example.com/${job:id}", "echo": {"id": "id", "amount": 1}});
        let found = problems(json!({ "lookup": lookup }));
        assert!(found.len() == 1 && found[0].starts_with("lookup.echo.amount: write a JSON pointer"), "{found:#?}");
    }
}
