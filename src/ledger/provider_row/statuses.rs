//! Validation of the `statuses` column: what an HTTP status means, always or depending on a header or a code.
//!
//! Unknown keys and unreachable cases are problems. An ignored condition could pause a whole quota for one locked
//! payment, or exceed a limit.

use std::collections::BTreeMap;

use serde_json::Value;

use super::Object;
use super::validate::{RowValidator, is_header_name};
use crate::domain::response::{CodeCondition, HeaderCondition, StatusCase, StatusMeaning};

/// The keys of a case, for the message that lists them.
const KEYS: &str = "header, value, code, at and means";

impl RowValidator {
    pub(super) fn statuses(&mut self, statuses: Option<&Object>) -> BTreeMap<u16, Vec<StatusCase>> {
        let mut meant = BTreeMap::new();
        for (status, meaning) in statuses.into_iter().flatten() {
            let number = status.parse::<u16>().ok().filter(|number| (100..=599).contains(number));
            let Some(number) = number else {
                self.problem(format!("statuses: `{status}` is not an HTTP status between 100 and 599"));
                continue;
            };
            let mut check = Self::default();
            let cases = match meaning {
                Value::Array(cases) => check.cases(cases),
                name => check.meaning("the meaning", name).into_iter().map(StatusCase::always).collect(),
            };
            self.0.extend(check.0.into_iter().map(|problem| format!("statuses: {status}: {problem}")));
            meant.insert(number, cases);
        }
        meant
    }

    fn cases(&mut self, cases: &[Value]) -> Vec<StatusCase> {
        if cases.is_empty() {
            self.problem("the list has no case: write a meaning, or leave the status out".to_owned());
        }
        let mut meant: Vec<StatusCase> = Vec::new();
        for (index, case) in cases.iter().enumerate() {
            if meant.last().is_some_and(|last| last.header.is_none() && last.code.is_none()) {
                self.problem(format!("case {} is never reached: case {index} matches every response", index + 1));
                break;
            }
            let mut check = Self::default();
            match case.as_object() {
                Some(case) => meant.extend(check.case(case)),
                None => check.problem(format!("must be a table of {KEYS}")),
            }
            self.0.extend(check.0.into_iter().map(|problem| format!("case {}: {problem}", index + 1)));
        }
        meant
    }

    fn case(&mut self, case: &Object) -> Option<StatusCase> {
        for key in case.keys().filter(|key| !["header", "value", "code", "at", "means"].contains(&key.as_str())) {
            self.problem(format!("`{key}` is unknown: a case has {KEYS}"));
        }
        let [header, value, code, at] = ["header", "value", "code", "at"].map(|key| self.text(case, key));
        if header.as_ref().is_some_and(|name| !is_header_name(name)) {
            self.problem("`header` is not a header name".to_owned());
        }
        if value.is_some() && !case.contains_key("header") {
            self.problem("`value` is a header's value: name the header".to_owned());
        }
        if at.is_some() && !case.contains_key("code") {
            self.problem("`at` is the place of a code: name the code".to_owned());
        }
        if at.as_ref().is_some_and(|at| !at.starts_with('/')) {
            self.problem("`at` is not a JSON pointer: write /code or /error/code".to_owned());
        }
        let means = match case.get("means") {
            Some(name) => self.meaning("`means`", name),
            None => {
                self.problem(format!("`means` is missing: one of {}", meanings()));
                None
            }
        };
        Some(StatusCase {
            header: header.map(|name| HeaderCondition { name, value: value.map(|value| value.trim().to_owned()) }),
            code: code.map(|code| CodeCondition { code, pointer: at }),
            means: means?,
        })
    }

    fn text(&mut self, case: &Object, key: &str) -> Option<String> {
        let value = case.get(key)?;
        let text = value.as_str().map(str::trim).filter(|text| !text.is_empty());
        if text.is_none() {
            self.problem(format!("`{key}` must be text that is not empty; \"704\" matches the number 704 too"));
        }
        text.map(str::to_owned)
    }

    fn meaning(&mut self, which: &str, name: &Value) -> Option<StatusMeaning> {
        let meaning =
            name.as_str().and_then(|name| StatusMeaning::ALL.into_iter().find(|meaning| meaning.name() == name));
        if meaning.is_none() {
            self.problem(format!("{which} must be one of {}", meanings()));
        }
        meaning
    }
}

fn meanings() -> String {
    StatusMeaning::ALL.map(StatusMeaning::name).join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::with;
    use super::*;

    #[test]
    fn status_cases_keep_their_order() {
        let row = with(json!({ "statuses": {
            "402": "review",
            "429": [
                {"header": "Stripe-Rate-Limited-Reason", "value": "resource-specific", "means": "busy"},
                {"header": "X-Locked", "means": "busy"},
                {"code": "lock_timeout", "at": "/error/code", "means": "busy"},
                {"code": "704", "means": "in_progress"},
                {"means": "throttled"},
            ],
        }}));
        let statuses = row.validate(1).unwrap().statuses;
        assert_eq!(statuses[&402], [StatusCase::always(StatusMeaning::Review)]);
        let header = |name: &str, value: Option<&str>| {
            Some(HeaderCondition { name: name.to_owned(), value: value.map(str::to_owned) })
        };
        let code = |code: &str, at: Option<&str>| {
            Some(CodeCondition { code: code.to_owned(), pointer: at.map(str::to_owned) })
        };
        let case = |header, code, means| StatusCase { header, code, means };
        let busy = StatusMeaning::Busy;
        assert_eq!(
            statuses[&429],
            [
                case(header("Stripe-Rate-Limited-Reason", Some("resource-specific")), None, busy),
                case(header("X-Locked", None), None, busy),
                case(None, code("lock_timeout", Some("/error/code")), busy),
                case(None, code("704", None), StatusMeaning::InProgress),
                StatusCase::always(StatusMeaning::Throttled),
            ]
        );
    }

    #[test]
    fn every_meaning_can_be_named() {
        for meaning in StatusMeaning::ALL {
            let provider = with(json!({ "statuses": {"418": meaning.name()} })).validate(1).unwrap();
            assert_eq!(provider.statuses[&418], [StatusCase::always(meaning)]);
        }
    }

    #[test]
    fn invalid_status_cases_are_reported_with_fixes() {
        let all = "accepted, declined, misconfigured, unknown, in_progress, throttled, busy, unavailable, review";
        let one_of = format!("the meaning must be one of {all}");
        let means = format!("`means` must be one of {all}");
        let missing = format!("`means` is missing: one of {all}");
        let table = [
            (json!("refused"), one_of.as_str()),
            (json!(5), one_of.as_str()),
            (json!({"means": "busy"}), one_of.as_str()),
            (json!([]), "the list has no case"),
            (json!(["busy"]), "case 1: must be a table of header, value, code, at and means"),
            (json!([{"code": "x"}]), missing.as_str()),
            (json!([{"means": "waiting"}]), means.as_str()),
            (json!([{"body": "x", "means": "busy"}]), "case 1: `body` is unknown: a case has header, value, code"),
            (json!([{"value": "x", "means": "busy"}]), "case 1: `value` is a header's value: name the header"),
            (json!([{"at": "/x", "means": "busy"}]), "case 1: `at` is the place of a code: name the code"),
            (json!([{"code": "x", "at": "error.code", "means": "busy"}]), "case 1: `at` is not a JSON pointer"),
            (json!([{"code": 704, "means": "busy"}]), "case 1: `code` must be text that is not empty; \"704\" matches"),
            (json!([{"code": " ", "means": "busy"}]), "case 1: `code` must be text"),
            (json!([{"header": "a b", "means": "busy"}]), "case 1: `header` is not a header name"),
            (json!([{"header": "a", "means": "busy"}, {"means": 1}]), "case 2: `means` must be one of"),
            (
                json!([{"means": "busy"}, {"code": "x", "means": "busy"}]),
                "case 2 is never reached: case 1 matches every",
            ),
        ];
        for (meaning, problem) in table {
            let bad = with(json!({ "statuses": {"429": meaning} })).validate(1).unwrap_err();
            let wanted = format!("statuses: 429: {problem}");
            // A case may be in a line below its own number.
            let found = bad.problems.iter().any(|line| line.starts_with("statuses: 429: ") && line.contains(problem));
            assert!(found, "{wanted}: {:#?}", bad.problems);
            assert_eq!(bad.problems.len(), 1, "{:#?}", bad.problems);
        }
    }
}
