//! Tests that compare the OpenAPI description with the router, and a validator of values by their schemas.
//!
//! The validator knows the subset of JSON Schema that is used here. It is stricter than the standard: a field that no
//! schema names is a fault.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::tests::start;
use super::*;

/// The description as it is published.
pub struct PublishedApi(pub Value);

impl PublishedApi {
    pub fn current() -> Self {
        Self(serde_json::to_value(openapi::description()).unwrap())
    }

    /// The described path and operation for an address.
    fn operation(&self, method: &str, address: &str) -> Option<(&str, &Value)> {
        let address = address.split('?').next().unwrap();
        let fits = |template: &str| {
            let (given, wanted): (Vec<_>, Vec<_>) = (address.split('/').collect(), template.split('/').collect());
            given.len() == wanted.len() && wanted.iter().zip(&given).all(|(w, g)| w.starts_with('{') || w == g)
        };
        let paths = self.0["paths"].as_object().unwrap();
        // A path without a placeholder wins, as in the router.
        let mut fitting: Vec<&String> = paths.keys().filter(|path| fits(path)).collect();
        fitting.sort_by_key(|path| path.matches('{').count());
        let path = fitting.first()?;
        Some((path.as_str(), paths[*path].get(method)?))
    }

    /// The faults of a response.
    pub fn response_faults(&self, method: &str, address: &str, status: u16, body: &Value) -> Vec<String> {
        let Some((path, operation)) = self.operation(method, address) else {
            return vec![format!("{method} {address} is not described")];
        };
        let answer = &operation["responses"][status.to_string()];
        let schema = &answer["content"]["application/json"]["schema"];
        if schema.is_null() {
            return vec![format!("{method} {path}: {status} is not described")];
        }
        self.faults(schema, body, &format!("{method} {path} {status}"))
    }

    /// The faults of a request body.
    pub fn request_faults(&self, method: &str, address: &str, body: &Value) -> Vec<String> {
        let operation = self.operation(method, address).map_or(&Value::Null, |(_, operation)| operation);
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        self.faults(schema, body, &format!("{method} {address} body"))
    }

    fn resolved<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(reference) => self.resolved(self.0.pointer(reference.trim_start_matches('#')).expect(reference)),
            None => schema,
        }
    }

    fn faults(&self, schema: &Value, value: &Value, at: &str) -> Vec<String> {
        let mut faults = self.schema_faults(schema, value, at);
        if let (Some(object), Some(known)) = (value.as_object(), self.properties(schema)) {
            let unknown = object.keys().filter(|name| !known.contains(*name));
            faults.extend(unknown.map(|name| format!("{at}/{name}: is not described")));
        }
        faults
    }

    /// The properties that an object may have; `None` means any.
    fn properties(&self, schema: &Value) -> Option<BTreeSet<String>> {
        let schema = self.resolved(schema);
        if schema["additionalProperties"].is_object() || schema.get("type").is_none() && schema.get("allOf").is_none() {
            return None;
        }
        let own = schema["properties"].as_object().into_iter().flat_map(|own| own.keys().cloned());
        let parts = schema["allOf"].as_array().into_iter().flatten();
        Some(own.chain(parts.flat_map(|part| self.properties(part).unwrap_or_default())).collect())
    }

    fn schema_faults(&self, schema: &Value, value: &Value, at: &str) -> Vec<String> {
        let schema = self.resolved(schema);
        let Some(rules) = schema.as_object() else { return vec![format!("{at}: has no schema")] };
        let mut faults = Vec::new();
        for (rule, wanted) in rules {
            match rule.as_str() {
                "type" if !has_type(wanted, value) => faults.push(format!("{at}: {value} is no {wanted}")),
                "enum" if !wanted.as_array().unwrap().contains(value) => {
                    faults.push(format!("{at}: {value} is none of {wanted}"));
                }
                "minimum" if value.as_f64().is_some_and(|number| number < wanted.as_f64().unwrap()) => {
                    faults.push(format!("{at}: {value} is less than {wanted}"));
                }
                "required" => {
                    let missing =
                        wanted.as_array().unwrap().iter().filter(|name| value.get(name.as_str().unwrap()).is_none());
                    faults.extend(missing.map(|name| format!("{at}: has no {name}")));
                }
                "properties" => {
                    let given =
                        wanted.as_object().unwrap().iter().filter_map(|(name, s)| Some((name, s, value.get(name)?)));
                    faults.extend(
                        given.flat_map(|(name, schema, value)| self.faults(schema, value, &format!("{at}/{name}"))),
                    );
                }
                "additionalProperties" if wanted.is_object() => {
                    let values = value.as_object().into_iter().flatten();
                    faults.extend(values.flat_map(|(name, value)| self.faults(wanted, value, &format!("{at}/{name}"))));
                }
                "items" => {
                    let items = value.as_array().into_iter().flatten().enumerate();
                    faults.extend(items.flat_map(|(index, item)| self.faults(wanted, item, &format!("{at}/{index}"))));
                }
                "allOf" => {
                    let parts = wanted.as_array().unwrap().iter();
                    faults.extend(parts.flat_map(|part| self.schema_faults(part, value, at)));
                }
                "oneOf" => {
                    let fits = |part: &&Value| self.faults(part, value, at).is_empty();
                    let fitting = wanted.as_array().unwrap().iter().filter(fits).count();
                    faults.extend((fitting != 1).then(|| format!("{at}: {value} fits {fitting} of {wanted}")));
                }
                "format" if wanted == "date-time" => {
                    let instant = value.as_str().is_none_or(|text| text.parse::<jiff::Timestamp>().is_ok());
                    faults.extend((!instant).then(|| format!("{at}: {value} is no instant")));
                }
                "type"
                | "enum"
                | "minimum"
                | "additionalProperties"
                | "format"
                | "description"
                | "default"
                | "propertyNames" => {}
                other => faults.push(format!("{at}: this test does not know the rule {other}")),
            }
        }
        faults
    }
}

fn has_type(wanted: &Value, value: &Value) -> bool {
    match wanted {
        Value::Array(any) => any.iter().any(|kind| has_type(kind, value)),
        kind => match kind.as_str().unwrap() {
            "null" => value.is_null(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            other => panic!("{other} is no type"),
        },
    }
}

/// The paths of the real router, read from its debug output: it has no list of them.
pub async fn routes() -> BTreeSet<String> {
    let printed = format!("{:?}", router(tests::state(None).await.0));
    let quoted = printed.split('"').skip(1).step_by(2);
    let paths: BTreeSet<String> = quoted.filter(|text| text.starts_with('/')).map(str::to_owned).collect();
    assert!(
        paths.contains("/livez") && paths.contains("/api/v1/jobs/{id}"),
        "the router prints other things: {printed}"
    );
    paths
}

/// An address for a path, with an existing value for each placeholder and each required parameter.
pub fn example_address(path: &str) -> String {
    if path == "/api/v1/history" {
        return format!("{path}?provider=acme");
    }
    let path =
        path.replace("rejected/{id}", "rejected/1").replace("batches/{id}", "batches/01937f2c5b0e7c3a9d4e5f60718293a4");
    path.replace("{id}", "pay-1").replace("{name}", "acme").replace("{provider}", "acme").replace("{limit}", "second")
}

#[tokio::test]
async fn routes_and_description_match() {
    let (address, _progress, stop) = start(None).await;
    let published = PublishedApi::current();
    assert_eq!(published.0["openapi"], "3.1.0");
    let described: BTreeMap<&String, &Map<String, Value>> =
        published.0["paths"].as_object().unwrap().iter().map(|(path, all)| (path, all.as_object().unwrap())).collect();
    let routes = routes().await;
    for path in described.keys() {
        assert!(routes.contains(*path), "{path} is described and no route");
    }
    let client = tests::client();
    for path in routes.iter().filter(|path| path.starts_with("/api/")) {
        for method in ["get", "post", "put", "patch", "delete"] {
            let url = format!("{address}{}", example_address(path));
            let request = client.request(method.to_uppercase().parse().unwrap(), url);
            let request = request.header("content-type", "application/json").body("no JSON");
            let exists = request.send().await.unwrap().status() != StatusCode::METHOD_NOT_ALLOWED;
            let is_described = described.get(path).is_some_and(|all| all.contains_key(method));
            assert_eq!(
                exists, is_described,
                "{method} {path}: whether it exists, and whether it is described. Give its handler #[utoipa::path], \
                 and a line in src/ops/openapi.rs"
            );
        }
    }
    stop.cancel();
}

#[test]
fn every_operation_has_summary_and_responses() {
    let published = PublishedApi::current();
    for (path, operations) in published.0["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            let at = format!("{method} {path}");
            assert!(operation["summary"].as_str().is_some_and(|text| text.len() > 10), "{at}: has no summary");
            let answers = operation["responses"].as_object().unwrap();
            assert!(answers.contains_key("200") || answers.contains_key("201"), "{at}");
            for (status, answer) in answers {
                let has_rows = answer["content"].get("text/csv").is_some();
                if (path.as_str(), status.as_str(), has_rows) == ("/api/v1/job-export", "200", true) {
                    continue;
                }
                let schema = &answer["content"]["application/json"]["schema"];
                assert!(schema.is_object(), "{at} {status}: no schema");
                let error = schema["$ref"] == "#/components/schemas/ErrorBody";
                assert_eq!(error, !status.starts_with('2'), "{at} {status}");
            }
            let changes = method != "get";
            assert_eq!(operation["requestBody"]["required"] == true, changes, "{at}: a body");
        }
    }
    // Every reference leads somewhere.
    let text = published.0.to_string();
    for reference in text.split("\"$ref\":\"#").skip(1).map(|rest| rest.split('"').next().unwrap()) {
        assert!(published.0.pointer(reference).is_some(), "{reference}");
    }
}

/// `curl ADDRESS`, `curl ADDRESS --json 'BODY'`.
#[test]
fn documented_examples_match_the_description() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/api.md")).unwrap();
    let published = PublishedApi::current();
    let examples: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("curl ")).collect();
    assert!(examples.len() > 12, "{examples:?}");
    for example in examples {
        let (address, body) = example.split_once(" --json ").unzip();
        let address = address.unwrap_or(example).trim_matches('\'');
        let path = address.strip_prefix("localhost:9464").unwrap_or_else(|| panic!("{example}"));
        let method = if body.is_some() { "post" } else { "get" };
        let (_, operation) = published.operation(method, path).unwrap_or_else(|| panic!("{example}: no such route"));
        if let Some(body) = body {
            let body: Value = serde_json::from_str(body.trim_matches('\'')).unwrap();
            assert_eq!(published.request_faults(method, path, &body), Vec::<String>::new(), "{example}");
        }
        let query = path.split_once('?').map(|(_, query)| query).unwrap_or_default();
        for name in query.split('&').filter_map(|pair| pair.split('=').next()).filter(|name| !name.is_empty()) {
            let parameters = operation["parameters"].as_array().unwrap();
            assert!(parameters.iter().any(|p| p["in"] == "query" && p["name"] == name), "{example}: {name}");
        }
    }
}

#[test]
fn validator_finds_faults() {
    let published = PublishedApi::current();
    let good = serde_json::json!({"limit": "a", "from": "1/1s", "to": "2/1s", "changed": true,
                                  "clears": {"from": {"kind": "not_while_paused"}, "to": {"kind": "clears_in", "ms": 5}},
                                  "clears_at": {"from": null, "to": "2026-11-28T06:00:00.000Z"},
                                  "cutoff": {"from": null, "to": null}});
    let faults = |change: fn(&mut Value)| {
        let mut body = good.clone();
        change(&mut body);
        published.response_faults("post", "/api/v1/providers/acme/limits/second", 200, &body)
    };
    assert_eq!(faults(|_| ()), Vec::<String>::new());
    for (change, words) in [
        ((|body| body["changed"] = "yes".into()) as fn(&mut Value), "is no \"boolean\""),
        (|body| body["more"] = 1.into(), "/more: is not described"),
        (|body| body["clears"]["to"]["ms"] = (-1).into(), "fits 0 of"),
        (|body| body["clears"]["via"] = 1.into(), "/via: is not described"),
        (|body| drop(body.as_object_mut().unwrap().remove("to")), "has no \"to\""),
    ] {
        let faults = faults(change);
        assert!(faults.len() == 1 && faults[0].contains(words), "{words}: {faults:?}");
    }
    let page = serde_json::json!({"jobs": [{"id": "a"}], "next": null});
    assert!(published.response_faults("get", "/api/v1/jobs", 200, &page).len() > 5);
    assert_eq!(published.response_faults("get", "/api/v1/jobs", 418, &page).len(), 1);
    let unknown = serde_json::json!({"becuase": "x"});
    assert_eq!(published.request_faults("post", "/api/v1/jobs/a/cancel", &unknown).len(), 1);
}
