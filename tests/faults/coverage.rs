//! Coverage of a run: the events that its faults provoked. A fault that provoked no event proves nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::plan::{Engine, Fault, Plan, Planned, WriteTrouble};
use crate::provider::Trouble;
use crate::records::{Call, Records};
use crate::stand::{Stand, quota_key};
use crate::watch::Watch;

/// Events that faults are meant to provoke, by name, with how often they happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    pub counted: BTreeMap<&'static str, u64>,
}

/// Phrases of the workers' logs, each of which shows one event.
const PHRASES: [(&str, &str); 9] = [
    ("redelivery", "redelivered=true"),
    ("blocked connection", "broker blocks publishers"),
    ("broker connection lost", "broker connection lost"),
    ("limiter's clock stepped", "the limiter store's clock made a step"),
    ("limiter store replaced", "the limiter store was replaced"),
    ("ledger away", "database unavailable"),
    ("write refused: read-only", "the database cannot write: it is read-only"),
    ("write refused: disk full", "the database cannot write: its disk is full"),
    ("report not written", "this worker's report is not stored"),
];

/// Queries of the ledger, each of which counts one event.
const ROWS: [(&str, &str); 5] = [
    (
        "lease takeover",
        "SELECT count(*) FROM attempts WHERE detail = 'a worker was lost while the request was in flight'",
    ),
    ("unknown outcome", "SELECT count(*) FROM attempts WHERE outcome = 'unknown'"),
    ("attempt surely not sent", "SELECT count(*) FROM attempts WHERE outcome = 'not_sent'"),
    ("sum differs", "SELECT count(*) FROM attempts WHERE outcome = 'differs'"),
    ("review", "SELECT count(*) FROM jobs WHERE state = 'review'"),
];

/// Epochs of the limiter's state, sampled during the run. Each begins with a cold start. Its start is in bytes 25 to 31
/// of field `m` (`lua/quota.lua`).
pub fn sample_births(stand: &Stand, over: &AtomicBool) -> BTreeSet<(String, Vec<u8>)> {
    let client = redis::Client::open(stand.redis.url()).unwrap();
    let mut births = BTreeSet::new();
    while !over.load(Ordering::Relaxed) {
        let patience = Duration::from_secs(1);
        let Ok(mut connection) = client.get_connection_with_timeout(patience) else { continue };
        let _ = connection.set_read_timeout(Some(patience));
        for name in stand.providers.keys() {
            let state = redis::cmd("HGET").arg(quota_key(name)).arg("m").query::<Option<Vec<u8>>>(&mut connection);
            if let Ok(Some(state)) = state {
                births.insert((name.clone(), state[16..23].to_vec()));
            }
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    births
}

impl Coverage {
    pub fn of(stand: &Stand, watch: &Watch, records: &Records, births: usize) -> Self {
        let mut counted: BTreeMap<&'static str, u64> = BTreeMap::new();
        counted.insert("cold start", births.saturating_sub(stand.providers.len()) as u64);
        counted.insert("connection in trouble", (0..stand.workers()).map(|worker| stand.troubled(worker)).sum());
        for (_, log) in stand.logs() {
            for (name, phrase) in PHRASES {
                *counted.entry(name).or_default() += log.matches(phrase).count() as u64;
            }
        }
        for (name, sql) in ROWS {
            let rows = watch.number(stand, sql).expect("the database runs");
            counted.insert(name, u64::try_from(rows).unwrap());
        }
        let calls = || records.providers.values().flat_map(|record| &record.calls);
        let of_status = |status: u16| calls().filter(|call| call.status == Some(status)).count() as u64;
        counted.insert("same-key replay answered", calls().filter(|call| call.replayed).count() as u64);
        counted.insert("look-up", calls().filter(|call| call.is_look_up).count() as u64);
        counted.insert("request cut in the middle", calls().filter(|call| call.received_us.is_none()).count() as u64);
        let is_not_found = |call: &&Call| call.status == Some(404) && !call.is_look_up;
        counted.insert("404 to a charge", calls().filter(is_not_found).count() as u64);
        counted.insert("approved in part", calls().filter(|call| call.approved_part.is_some()).count() as u64);
        counted.insert("409 in progress", of_status(409));
        counted.insert("429", of_status(429));
        counted.insert("declined", of_status(402));
        let workers: u64 = (0..stand.workers()).map(|worker| stand.starts(worker) as u64).sum();
        counted.insert("worker processes", workers);
        Self { counted }
    }

    /// Events that the plan should have provoked and did not.
    pub fn missing(&self, plan: &Plan) -> Vec<&'static str> {
        let expected = expected(plan);
        expected.into_iter().filter(|name| self.counted.get(name).copied().unwrap_or_default() == 0).collect()
    }
}

/// Events that a plan is certain to provoke while there is work.
fn expected(plan: &Plan) -> Vec<&'static str> {
    let number = |what: fn(&Planned) -> bool| plan.faults.iter().filter(|planned| what(planned)).count();
    let has = |what: fn(&Planned) -> bool| number(what) > 0;
    let roads = number(|planned| matches!(planned.fault, Fault::Road { .. }));
    let forgets = has(|planned| matches!(planned.fault, Fault::ForgetQuota | Fault::KillEngine(Engine::Redis)));
    // Before the first fault, the state may not have been sampled yet. After the last one, no job may need a new one.
    let mut between = plan.faults.iter().take(plan.faults.len().saturating_sub(1)).skip(1);
    let evicts = between.any(|planned| matches!(planned.fault, Fault::EvictQuota { .. }));
    let rows: [(&str, bool); 10] = [
        ("cold start", forgets || evicts),
        ("redelivery", has(|planned| matches!(planned.fault, Fault::KillWorker { .. }))),
        ("broker connection lost", has(|planned| matches!(planned.fault, Fault::KillEngine(Engine::Rabbit)))),
        ("blocked connection", has(|planned| matches!(planned.fault, Fault::Alarm(_)))),
        // Other troubles of writes are shorter than a statement may take, or meet a time without jobs.
        ("ledger away", has(|planned| matches!(planned.fault, Fault::KillEngine(Engine::Postgres)))),
        ("limiter store replaced", has(|planned| matches!(planned.fault, Fault::KillEngine(Engine::Redis)))),
        // Even an idle worker writes its report every two seconds, and waits two seconds for that.
        ("write refused: read-only", has(|planned| planned.fault == Fault::Writes(WriteTrouble::ReadOnly))),
        ("report not written", has(holds_reports)),
        // A single network path may carry no traffic during its fault.
        ("connection in trouble", roads > 5),
        ("declined", true),
    ];
    let mut names: Vec<&str> = rows.into_iter().filter(|(_, expected)| *expected).map(|(name, _)| name).collect();
    // A single provider fault may meet no work, or only jobs that must not be sent again.
    if number(loses_answers) > 5 {
        names.extend(["unknown outcome", "same-key replay answered"]);
    }
    if number(|planned| is_long(planned, Trouble::NotFound)) > 0 {
        names.push("404 to a charge");
    }
    if number(|planned| is_long(planned, Trouble::Partial)) > 0 {
        names.extend(["approved in part", "sum differs"]);
    }
    names
}

fn holds_reports(planned: &Planned) -> bool {
    planned.fault == Fault::Writes(WriteTrouble::MissingStandby) && planned.lasts >= Duration::from_secs(5)
}

fn loses_answers(planned: &Planned) -> bool {
    let Fault::Provider { trouble, .. } = planned.fault else { return false };
    matches!(trouble, Trouble::ResetAfter | Trouble::Silent | Trouble::Garbled)
}

fn is_long(planned: &Planned, which: Trouble) -> bool {
    matches!(planned.fault, Fault::Provider { trouble, .. } if trouble == which)
        && planned.lasts >= Duration::from_secs(1)
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count) in &self.counted {
            writeln!(f, "  {name:<28} {count:>7}")?;
        }
        Ok(())
    }
}
