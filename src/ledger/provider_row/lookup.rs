//! Validation of the columns `lookup` and `statuses`: how to ask about a payment, and what responses mean.
//!
//! A misread look-up ends payments in the wrong state. So unknown keys are problems, and so is an address without the
//! payment. `resend` needs a provider that deduplicates.
//!
//! A status has a meaning, always or depending on a header or a code. An ignored condition could pause a whole quota for
//! one locked payment, or exceed a limit. So unreachable cases are problems, too.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::Object;
use super::request::SumRow;
use super::validate::RowValidator;
use crate::domain::provider::{LookupConfig, LookupMethod, LookupUrl, WhenNotFound};
use crate::domain::response::{CodeCondition, HeaderCondition, StatusCase, StatusMeaning};

/// The column's content; absent keys have the defaults of [`RowValidator::lookup`].
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LookupRow {
    url: Option<String>,
    method: Option<String>,
    state: Option<String>,
    accepted: Option<Vec<String>>,
    declined: Option<Vec<String>>,
    in_progress: Option<Vec<String>>,
    reference: Option<String>,
    amount: Option<String>,
    currency: Option<String>,
    amount_unit: Option<String>,
    partial: Option<String>,
    echo: Option<Object>,
    not_found: Option<String>,
    give_up_after_s: Option<i64>,
}

const GIVE_UP_AFTER_S: i64 = 3_600;

impl RowValidator {
    pub fn lookup(&mut self, object: &Object, retention: Option<Duration>) -> Option<LookupConfig> {
        let row: LookupRow = self.keys("lookup", object)?;
        let methods = [("GET", LookupMethod::Get), ("POST", LookupMethod::Post)];
        let method = self.one_of("lookup.method", row.method.as_deref().unwrap_or("GET"), &methods);
        let words = self.check_word_lists([
            ("accepted", row.accepted, "succeeded"),
            ("declined", row.declined, "declined"),
            ("in_progress", row.in_progress, "processing"),
        ]);
        let endings = [("review", WhenNotFound::Review), ("resend", WhenNotFound::Resend)];
        let not_found = self.one_of("lookup.not_found", row.not_found.as_deref().unwrap_or("review"), &endings);
        if not_found == Some(WhenNotFound::Resend) && retention.is_none() {
            self.problem("lookup.not_found is `resend`: a provider that does not deduplicate could charge twice; use review, or set \
                 idempotency_retention_s if it does");
        }
        let [accepted, declined, in_progress] = words;
        let url = self.lookup_url(row.url.as_deref());
        for (key, pointer) in [("state", &row.state), ("reference", &row.reference)] {
            self.pointer(&format!("lookup.{key}"), pointer.as_ref(), &format!("/{key} or /data/{key}"));
        }
        let sum = SumRow { amount: row.amount, currency: row.currency, unit: row.amount_unit, partial: row.partial };
        let sum = self.sum_fields("lookup", sum);
        let echo = self.echo("lookup.echo", row.echo.as_ref());
        let give_up_after: Duration =
            self.seconds("lookup.give_up_after_s", row.give_up_after_s.unwrap_or(GIVE_UP_AFTER_S));
        if let (Some(WhenNotFound::Resend), Some(retention)) = (not_found, retention) {
            self.check_retention(give_up_after, retention);
        }
        Some(LookupConfig {
            url: url?,
            method: method?,
            state: row.state.unwrap_or_else(|| "/state".to_owned()),
            accepted,
            declined,
            in_progress,
            reference: row.reference.unwrap_or_else(|| "/id".to_owned()),
            sum,
            echo,
            not_found: not_found?,
            give_up_after,
        })
    }

    /// No job is sent again once half of the retention has passed.
    fn check_retention(&mut self, give_up_after: Duration, retention: Duration) {
        if give_up_after >= retention / 2 {
            self.problem(format!(
                "lookup.give_up_after_s is {}, and not_found is `resend`: by then the idempotency key may be forgotten; set it \
                 below half of idempotency_retention_s ({}), or use review",
                give_up_after.as_secs(),
                retention.as_secs()
            ));
        }
    }

    fn lookup_url(&mut self, text: Option<&str>) -> Option<LookupUrl> {
        let Some(text) = text else {
            self.problem("lookup.url is missing: write the address to ask, with ${job:id} for the payment");
            return None;
        };
        match LookupUrl::parse(text) {
            Ok(url) => {
                self.url("lookup.url", &url.sample());
                Some(url)
            }
            Err(problem) => {
                self.problem(format!("lookup.url {problem}"));
                None
            }
        }
    }

    /// Checks the lists of words; no word may be in two of them.
    fn check_word_lists(&mut self, lists: [(&str, Option<Vec<String>>, &str); 3]) -> [Vec<String>; 3] {
        let mut seen: Vec<(String, String)> = Vec::new();
        lists.map(|(key, list, default)| {
            let list = list.unwrap_or_else(|| vec![default.to_owned()]);
            if key == "accepted" && list.is_empty() {
                self.problem("lookup.accepted is empty: name the word for a payment that was made");
            }
            for word in &list {
                if word.trim().is_empty() {
                    self.problem(format!("lookup.{key} has an empty word"));
                }
                match seen.iter().find(|(known, _)| known == word) {
                    Some((_, other)) => {
                        self.problem(format!("lookup.{key}: `{word}` is in {other} too: list each word once"));
                    }
                    None => seen.push((word.clone(), key.to_owned())),
                }
            }
            list
        })
    }
}

/// The keys of a case, for the message that lists them.
const KEYS: &str = "header, value, code, at and means";

impl RowValidator {
    pub fn statuses(&mut self, statuses: Option<&Object>) -> BTreeMap<u16, Vec<StatusCase>> {
        let mut meant = BTreeMap::new();
        for (status, meaning) in statuses.into_iter().flatten() {
            let number = status.parse::<u16>().ok().filter(|number| (100..=599).contains(number));
            let Some(number) = number else {
                self.problem(format!("statuses: `{status}` is not an HTTP status between 100 and 599"));
                continue;
            };
            let cases = self.at(&format!("statuses: {status}"), |check| match meaning {
                Value::Array(cases) => check.cases(cases),
                name => check.meaning("the meaning", name).into_iter().map(StatusCase::always).collect(),
            });
            meant.insert(number, cases);
        }
        meant
    }

    fn cases(&mut self, cases: &[Value]) -> Vec<StatusCase> {
        if cases.is_empty() {
            self.problem("the list has no case: write a meaning, or leave the status out");
        }
        let mut meant: Vec<StatusCase> = Vec::new();
        for (index, case) in cases.iter().enumerate() {
            if meant.last().is_some_and(|last| last.header.is_none() && last.code.is_none()) {
                self.problem(format!("case {} is never reached: case {index} matches every response", index + 1));
                break;
            }
            self.at(&format!("case {}", index + 1), |check| match case.as_object() {
                Some(case) => meant.extend(check.case(case)),
                None => check.problem(format!("must be a table of {KEYS}")),
            });
        }
        meant
    }

    fn case(&mut self, case: &Object) -> Option<StatusCase> {
        for key in case.keys().filter(|key| !["header", "value", "code", "at", "means"].contains(&key.as_str())) {
            self.problem(format!("`{key}` is unknown: a case has {KEYS}"));
        }
        let [header, value, code, at] = ["header", "value", "code", "at"].map(|key| self.text(case, key));
        self.header_name("`header`", header.as_ref());
        if value.is_some() && !case.contains_key("header") {
            self.problem("`value` is a header's value: name the header");
        }
        if at.is_some() && !case.contains_key("code") {
            self.problem("`at` is the place of a code: name the code");
        }
        self.pointer("`at`", at.as_ref(), "/code or /error/code");
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
    use serde_json::{Value, json};

    use super::super::tests::with;
    use crate::domain::response::{AmountUnit, Echo, SumFields};

    use super::*;

    const URL: &str = "https://api.example.com/charges?id=${job:id}";

    fn problems(lookup: Value) -> Vec<String> {
        with(json!({ "lookup": lookup })).validate(1).map_or_else(|bad| bad.problems, |_| Vec::new())
    }

    #[test]
    fn lookup_url_alone_is_enough() {
        let lookup = with(json!({"lookup": {"url": URL}})).validate(1).unwrap().lookup.unwrap();
        let words = |word: &str| vec![word.to_owned()];
        let wanted = LookupConfig {
            url: LookupUrl::parse(URL).unwrap(),
            method: LookupMethod::Get,
            state: "/state".to_owned(),
            accepted: words("succeeded"),
            declined: words("declined"),
            in_progress: words("processing"),
            reference: "/id".to_owned(),
            sum: SumFields::default(),
            echo: Echo::default(),
            not_found: WhenNotFound::Review,
            give_up_after: Duration::from_secs(3_600),
        };
        assert_eq!(lookup, wanted);
        assert_eq!(with(json!({})).validate(1).unwrap().lookup, None);
    }

    #[test]
    fn every_lookup_field_can_be_set() {
        let row = with(json!({"idempotency_retention_s": 121, "lookup": {
            "url": URL, "method": "POST", "state": "/data/0/status", "accepted": ["paid", "captured"], "declined": [],
            "in_progress": ["pending"], "reference": "/data/0/id", "amount": "/data/0/amount",
            "currency": "/data/0/currency", "amount_unit": "decimal", "partial": "accept", "not_found": "resend", "give_up_after_s": 60,
        }}));
        let lookup = row.validate(1).unwrap().lookup.unwrap();
        assert_eq!((lookup.method, lookup.not_found), (LookupMethod::Post, WhenNotFound::Resend));
        assert_eq!((lookup.accepted.len(), lookup.declined.len()), (2, 0));
        let sum = SumFields {
            amount: Some("/data/0/amount".to_owned()),
            currency: Some("/data/0/currency".to_owned()),
            unit: AmountUnit::Decimal,
            accepts_partial: true,
        };
        assert_eq!(lookup.sum, sum);
        assert_eq!(lookup.give_up_after, Duration::from_secs(60));
    }

    #[test]
    fn invalid_lookup_is_reported_with_its_fix() {
        let with_url = |change: Value| {
            let mut lookup = json!({"url": URL});
            lookup.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            lookup
        };
        let table = [
            (json!({}), "lookup.url is missing: write the address to ask, with ${job:id}"),
            (json!({"url": "https://x.example/charges"}), "lookup.url names no payment"),
            (json!({"url": "https://${job:id}.example/"}), "lookup.url has a placeholder in its host"),
            (json!({"url": "https://x.example/${job:amount}"}), "lookup.url has an unknown placeholder: use ${job:id}"),
            (json!({"url": "ftp://x.example/${job:id}"}), "lookup.url must begin with https://"),
            (json!({"url": "https://u:secret@x.example/${job:id}"}), "lookup.url holds a user name"),
            (json!({"url": "https://x.example/a b${job:id}"}), "lookup.url holds spaces"),
            (with_url(json!({"uri": "x"})), "lookup: unknown field `uri`, expected one of `url`, `method`"),
            (with_url(json!({"state": 5})), "lookup.state: invalid type"),
            (with_url(json!({"accepted": "paid"})), "lookup.accepted: invalid type"),
            (with_url(json!({"method": "PUT"})), "lookup.method is `PUT`: must be GET or POST"),
            (with_url(json!({"state": "state"})), "lookup.state is not a JSON pointer: write /state or /data/state"),
            (with_url(json!({"reference": ""})), "lookup.reference is not a JSON pointer"),
            (with_url(json!({"amount": "amount"})), "lookup.amount is not a JSON pointer"),
            (with_url(json!({"currency": "x"})), "lookup.currency is not a JSON pointer"),
            (
                with_url(json!({"amount": "/a", "amount_unit": "cents"})),
                "lookup.amount_unit is `cents`: must be minor or",
            ),
            (with_url(json!({"amount": "/a", "partial": "yes"})), "lookup.partial is `yes`: must be review or accept"),
            (with_url(json!({"partial": "accept"})), "lookup.partial is about lookup.amount, which is missing"),
            (with_url(json!({"amount_unit": "minor"})), "lookup.amount_unit is about lookup.amount"),
            (with_url(json!({"accepted": []})), "lookup.accepted is empty"),
            (with_url(json!({"declined": [" "]})), "lookup.declined has an empty word"),
            (with_url(json!({"declined": ["succeeded"]})), "lookup.declined: `succeeded` is in accepted too"),
            (with_url(json!({"not_found": "dead"})), "lookup.not_found is `dead`: must be review or resend"),
            (with_url(json!({"not_found": "resend"})), "lookup.not_found is `resend`: a provider that does not dedup"),
            (with_url(json!({"give_up_after_s": 0})), "lookup.give_up_after_s is 0: must lie between 1 and"),
        ];
        for (lookup, problem) in table {
            let found = problems(lookup.clone());
            assert!(found.len() == 1 && found[0].contains(problem), "{lookup}: {found:#?}");
            assert!(!found[0].contains("secret"));
        }
        assert_eq!(problems(json!({"url": 1, "state": 2, "uri": 3})).len(), 3, "every problem at once");
    }

    /// While a resend is possible, the provider must still remember the key.
    #[test]
    fn resend_needs_a_retained_key() {
        let validated = |not_found: &str, give_up_after_s: i64| {
            let lookup = json!({"url": URL, "not_found": not_found, "give_up_after_s": give_up_after_s});
            with(json!({"idempotency_retention_s": 120, "lookup": lookup})).validate(1)
        };
        validated("resend", 59).unwrap();
        validated("review", 60).unwrap();
        let found = validated("resend", 60).unwrap_err().problems.join("; ");
        let fix = "set it below half of idempotency_retention_s (120), or use review";
        assert!(found.contains("lookup.give_up_after_s is 60") && found.contains(fix), "{found}");
    }

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
