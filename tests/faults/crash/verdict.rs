//! The verdict on a cell: what its provider, its broker and its ledger say, compared.
//!
//! Each oracle counts its findings. They are a pure function of the evidence, and the test below shows that each of them
//! can find something.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::Value;
use sluicegate::provider::simulated::Effect;

use super::cell::Cell;

/// Findings of all oracles; a sound run has only zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Published payments that are in no ledger row and no queue.
    pub lost: u64,
    pub double: u64,
    pub breach: u64,
    /// Payments that were requested under more than one key.
    pub several_keys: u64,
    /// Charges that differ from their message.
    pub wrong: u64,
    /// Payments whose ledger row, outcome event and provider records disagree.
    pub contradicted: u64,
    pub unsettled: u64,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = [
            ("lost", self.lost),
            ("double", self.double),
            ("breach", self.breach),
            ("several keys", self.several_keys),
            ("wrong", self.wrong),
            ("contradicted", self.contradicted),
            ("unsettled", self.unsettled),
        ];
        let seen: Vec<String> =
            counts.iter().filter(|(_, count)| *count > 0).map(|(name, count)| format!("{name} {count}")).collect();
        f.write_str(if seen.is_empty() { "nothing" } else { "" })?;
        f.write_str(&seen.join(", "))
    }
}

/// What a cell left behind.
#[derive(Clone, Debug, Default)]
struct Evidence {
    published: BTreeSet<String>,
    /// The state of each row of the ledger.
    rows: BTreeMap<String, String>,
    /// Messages in the lane's queue.
    waiting: u64,
    /// The provider's charges and its own counts.
    effects: Vec<Effect>,
    doubles: u64,
    several_keys: u64,
    breaches: u64,
    /// Payments and states of the outcome events.
    events: BTreeSet<(String, String)>,
}

impl Cell {
    /// Compares the provider's, the broker's and the ledger's records of all published payments.
    pub async fn verdict(&self) -> Verdict {
        let report = self.fake.report();
        let rows: Vec<(String, String)> =
            sqlx::query_as("SELECT id, state FROM jobs").fetch_all(&self.ledger).await.unwrap();
        let text = |event: &Value, field: &str| event[field].as_str().unwrap().to_owned();
        let events = self.broker.drain(&self.outcomes).await;
        let evidence = Evidence {
            published: self.published.clone(),
            rows: rows.into_iter().collect(),
            waiting: u64::from(self.broker.ready(&self.queue(&self.name)).await.unwrap_or(0)),
            effects: self.fake.effects(),
            doubles: report.doubles,
            several_keys: report.several_keys,
            breaches: report.limits.iter().map(|limit| limit.breaches).sum(),
            events: events.iter().map(|event| (text(event, "id"), text(event, "state"))).collect(),
        };
        evidence.judge()
    }
}

impl Evidence {
    fn judge(&self) -> Verdict {
        let Self { published, rows, waiting, effects, events, .. } = self;
        let missing = published.iter().filter(|id| !rows.contains_key(*id)).count() as u64;
        let charged: BTreeSet<&str> =
            effects.iter().filter(|effect| effect.count > 0).map(|effect| effect.id.as_str()).collect();
        let amount = |id: &str| id.rsplit('-').next().and_then(|number| number.parse::<i64>().ok()).map(|n| n + 100);
        let wrong = effects.iter().filter(|effect| {
            !published.contains(&effect.id) || Some(effect.amount) != amount(&effect.id) || effect.currency != "EUR"
        });
        let ended = |state: &str| !matches!(state, "waiting" | "sending" | "unknown");
        let contradicts = |(id, state): &(&String, &String)| match state.as_str() {
            "succeeded" => !charged.contains(id.as_str()),
            // An operator resolves it, so it may be charged or not.
            "review" => false,
            _ => charged.contains(id.as_str()),
        };
        let untold =
            rows.iter().filter(|(id, state)| ended(state) && !events.contains(&((*id).clone(), (*state).clone())));
        let foreign = events.iter().filter(|(id, state)| rows.get(id) != Some(state)).count();
        Verdict {
            lost: missing.saturating_sub(*waiting),
            double: self.doubles,
            breach: self.breaches,
            several_keys: self.several_keys,
            wrong: wrong.count() as u64,
            contradicted: (rows.iter().filter(contradicts).count() + untold.count() + foreign) as u64,
            unsettled: rows.values().filter(|state| !ended(state)).count() as u64 + missing.min(*waiting),
        }
    }
}

/// One payment that was charged, one that was declined.
fn honest() -> Evidence {
    let states = [("p-0", "succeeded"), ("p-1", "declined")].map(|(id, state)| (id.to_owned(), state.to_owned()));
    let effect = |id: &str, amount, count| Effect {
        id: id.to_owned(),
        amount,
        charged: None,
        currency: "EUR".to_owned(),
        account: None,
        key: None,
        count,
        several_keys: false,
        first_us: 0,
    };
    Evidence {
        published: states.iter().map(|(id, _)| id.clone()).collect(),
        events: states.clone().into(),
        rows: states.into(),
        effects: vec![effect("p-0", 100, 1), effect("p-1", 101, 0)],
        ..Evidence::default()
    }
}

#[test]
fn each_oracle_finds_what_is_planted() {
    type Change = fn(&mut Evidence);
    assert_eq!(honest().judge(), Verdict::default());
    let forget: Change = |found| {
        found.rows.remove("p-1");
        found.events.retain(|(id, _)| id != "p-1");
    };
    let reopened: Change = |found| {
        found.rows.insert("p-1".to_owned(), "unknown".to_owned());
        found.events.retain(|(id, _)| id != "p-1");
    };
    let none = Verdict::default();
    let table: [(&str, Change, Verdict); 12] = [
        ("not recorded", forget, Verdict { lost: 1, ..none }),
        ("still open", reopened, Verdict { unsettled: 1, ..none }),
        ("charged twice", |found| found.doubles = 1, Verdict { double: 1, ..none }),
        ("under two keys", |found| found.several_keys = 1, Verdict { several_keys: 1, ..none }),
        ("above the limit", |found| found.breaches = 1, Verdict { breach: 1, ..none }),
        ("another amount", |found| found.effects[0].amount = 1, Verdict { wrong: 1, ..none }),
        ("another currency", |found| found.effects[0].currency = "USD".to_owned(), Verdict { wrong: 1, ..none }),
        ("never published", |found| assert!(found.published.remove("p-1")), Verdict { wrong: 1, ..none }),
        ("declined and charged", |found| found.effects[1].count = 1, Verdict { contradicted: 1, ..none }),
        ("paid and never charged", |found| found.effects[0].count = 0, Verdict { contradicted: 1, ..none }),
        ("no event", |found| drop(found.events.pop_last()), Verdict { contradicted: 1, ..none }),
        (
            "an event of no payment",
            |found| assert!(found.events.insert(("p-9".to_owned(), "dead".to_owned()))),
            Verdict { contradicted: 1, ..none },
        ),
    ];
    for (what, change, expected) in table {
        let mut evidence = honest();
        change(&mut evidence);
        assert_eq!(evidence.judge(), expected, "{what}");
    }
    let mut queued = honest();
    forget(&mut queued);
    queued.waiting = 1;
    assert_eq!(queued.judge(), Verdict { unsettled: 1, ..none }, "not recorded, and its message waits");
}
