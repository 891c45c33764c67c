//! docs/explain.md: the checks and their order, each sentence, and the fields are those of the code.

use std::sync::Arc;
use std::time::Duration;

use sluicegate::domain::explain::forecast::RecentUsage;
use sluicegate::domain::explain::{
    CHECKS, ClaimState, Facts, JobFacts, JobsAhead, LaneFacts, LimitUtilisation, LimiterFacts, PermitRefusal, Rejected,
    RowFacts, SentRequest, explain,
};
use sluicegate::domain::permit_protocol::{CostByKind, PastUse};
use sluicegate::domain::provider::Provider;
use sluicegate::domain::time::EpochMs;
use sluicegate::domain::wait_reason::{BlockReason, Wait, WaitReason};
use sluicegate::ledger::provider_row::{LimitRow, ProviderRow};
use sluicegate::ops::explain::ExplainedBlock;
use sluicegate::worker::quotas::quota_spec;
use sluicegate::worker::settings_sync::LoadedSettings;

use crate::page::{Page, plain};

/// 2026-11-21 14:03:20 UTC.
const NOW: i64 = 1_795_269_800_000;

fn stripe() -> Provider {
    let limit = |name: &str, scope: &str, max_requests, window_ms| LimitRow {
        name: name.to_owned(),
        scope: scope.to_owned(),
        max_requests,
        window_ms,
        ..LimitRow::default()
    };
    let row = ProviderRow {
        name: "stripe".to_owned(),
        url: "https://pay.example/".to_owned(),
        timeout_ms: 30_000,
        leak_per_second: Some(1_000.0),
        limits: vec![limit("per-minute", "provider", 600, 60_000), limit("per-account", "account", 5, 1_000)],
        ..ProviderRow::default()
    };
    row.validate(1).unwrap()
}

fn row(provider: Provider) -> RowFacts {
    let known = LoadedSettings {
        version: 1,
        providers: [(provider.name.clone(), Arc::new(provider.clone()))].into(),
        invalid_rows: vec![],
    };
    let spec = quota_spec(&known, &provider.quota).map(Arc::new);
    RowFacts { provider: Some(Arc::new(provider)), problems: Vec::new(), spec }
}

/// A job behind 37 others, 47.6 s after 600 requests were answered.
fn facts() -> Facts {
    let used = |name: &str, used, capacity| LimitUtilisation { name: name.to_owned(), used, capacity };
    let job = JobFacts {
        provider: "stripe".to_owned(),
        state: "waiting".to_owned(),
        created_at: EpochMs(NOW - 5_000),
        updated_at: EpochMs(NOW - 2_000),
        wake_at: EpochMs(NOW - 2_000),
        account: Some("shop".to_owned()),
        cost: 1,
        ..JobFacts::default()
    };
    Facts {
        now: EpochMs(NOW),
        id: "invoice-4711".to_owned(),
        job: Some(job),
        row: row(stripe()),
        lane: LaneFacts::Running,
        claim: ClaimState::Unclaimed,
        ahead: JobsAhead { jobs: 37, cost: 37, active: 0, ready: Some(38), workers: 1 },
        limiter: LimiterFacts {
            uses: vec![used("per-minute", 600, 600), used("per-account", 0, 5)],
            recent_usage: Some(RecentUsage {
                ended: vec![PastUse { age: Duration::from_millis(47_600), cost: CostByKind::charges(600) }],
                ..RecentUsage::default()
            }),
            ..LimiterFacts::default()
        },
        ..Facts::default()
    }
}

/// The facts of the page's example for a check.
fn blocked_at(check: &str) -> Facts {
    let mut facts = facts();
    let second = Duration::from_secs(1);
    let job = facts.job.as_mut().unwrap();
    match check {
        "recorded" => {
            facts.job = None;
            facts.rejected = vec![Rejected {
                at: EpochMs(NOW - 1_000),
                lane: "stripe".to_owned(),
                reason: "bad_amount".to_owned(),
                detail: "amount must be above 0".to_owned(),
            }];
        }
        "provider" => facts.row = row(Provider { paused: true, ..stripe() }),
        "time" => {
            job.wake_at = EpochMs(NOW + 4_000);
            job.reason = Some("connection refused".to_owned());
            job.wait_reason = Some(WaitReason::Retry);
        }
        "lane" => {
            let cause = Wait::with_detail(WaitReason::CircuitOpen, "no answer in time");
            facts.lane = LaneFacts::Paused { cause, ends_in: second };
        }
        "limiter" => {
            facts.limiter.block = Some(PermitRefusal { reason: BlockReason::Paused, wait: second, exact: false })
        }
        "account" => facts.limiter.uses[1].used = 5,
        "queue" => {
            facts.limiter.recent_usage = Some(RecentUsage::default());
            facts.ahead = JobsAhead { workers: 1, ..JobsAhead::default() };
        }
        "outcome" => {
            job.state = "sending".to_owned();
            job.requests = vec![SentRequest { number: 2, began_at: job.created_at, ended_at: None, outcome: None }];
            facts.claim = ClaimState::OtherWorker { worker: "w2".to_owned() };
        }
        _ => {}
    }
    facts
}

#[test]
fn explain_checks_match_the_code() {
    let table = Page::read("docs/explain.md").table("## Checks", "check");
    let named: Vec<&str> = table.iter().map(|row| plain(&row[0])).collect();
    assert_eq!(named, CHECKS);
    for row in table.iter().filter(|row| !row[2].is_empty()) {
        let check = plain(&row[0]);
        let explained = explain(&blocked_at(check));
        assert_eq!(explained.summary, row[2], "{check}");
        assert_eq!(explained.blocked_at.map_or("recorded", |at| at.check), check);
    }
}

#[test]
fn every_wait_reason_is_documented() {
    let table = Page::read("docs/explain.md").table("## Reasons to wait", "`wait_reason`");
    let named: Vec<&str> = table.iter().map(|row| plain(&row[0])).collect();
    let codes: Vec<&str> = WaitReason::ALL.iter().map(WaitReason::code).collect();
    assert_eq!(named, codes);
}

#[test]
fn explain_fields_match_the_response() {
    let stand = ExplainedBlock {
        check: String::new(),
        limit: None,
        allows: None,
        used: None,
        starts_at: None,
        starts_in_ms: None,
        start_unknown: None,
        jobs_ahead: None,
        exact: false,
    };
    let written = serde_json::to_value(stand).unwrap();
    let table = Page::read("docs/explain.md").table("## The estimate", "in `blocked_at`");
    let mut named: Vec<&str> = table.iter().map(|row| plain(&row[0])).collect();
    let mut fields: Vec<&str> = written.as_object().unwrap().keys().map(String::as_str).collect();
    named.sort_unstable();
    fields.sort_unstable();
    assert_eq!(named, fields);
}
