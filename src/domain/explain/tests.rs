use std::sync::Arc;
use std::time::Duration;

use super::forecast::RecentUsage;
use super::*;
use crate::domain::backoff::BackoffPolicy;
use crate::domain::limit::{AccountRule, Algorithm, Rate, Rule, Scope};
use crate::domain::permit_protocol::{CostByKind, PastUse};
use crate::domain::provider::{
    JobOrder, Mode, Pacing, Provider, ProviderName, RequestShape, SlotRelease, StoreDown, WhenNotFound,
};
use crate::domain::quota_spec::{LimitSpec, QuotaSpec};
use crate::domain::sum::AmountRules;

mod backlog;
mod positions;

/// 2026-11-21 14:03:20 UTC: 20 s into its minute.
const NOW: EpochMs = EpochMs(1_795_269_800_000);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn spec(limits: &[(&str, Algorithm, u32, u64, Option<u32>)]) -> QuotaSpec {
    let limit = |(name, algorithm, max_requests, window_ms, burst): &(&str, Algorithm, u32, u64, Option<u32>)| {
        let plain = LimitSpec::sliding_log(*name, *max_requests, ms(*window_ms));
        LimitSpec { algorithm: *algorithm, burst: *burst, ..plain }
    };
    QuotaSpec {
        quota: ProviderName::new("stripe").unwrap(),
        version: 1,
        limits: limits.iter().map(limit).collect(),
        account_rules: Vec::new(),
        pacing: None,
        grant_jitter: None,
        hold_max: Duration::from_secs(30),
        send_budget: ms(500),
        store_down: StoreDown::Wait,
        members: Vec::new(),
        resumed_at: 0,
        handover: Duration::ZERO,
    }
}

fn past(ended: &[(u64, u32)], hold_ms: u64) -> RecentUsage {
    let ended =
        ended.iter().map(|(age_ms, cost)| PastUse { age: ms(*age_ms), cost: CostByKind::charges(*cost) }).collect();
    RecentUsage { ended, in_flight: CostByKind::default(), hold: ms(hold_ms) }
}

fn provider() -> Provider {
    Provider {
        name: ProviderName::new("stripe").unwrap(),
        quota: ProviderName::new("stripe").unwrap(),
        enabled: true,
        paused: false,
        url: "https://pay.example/".to_owned(),
        mode: Mode::Blocking,
        slot_release: SlotRelease::Response,
        pacing: Pacing::Burst,
        reserve_percent: 0,
        store_down: StoreDown::Wait,
        timeout: Duration::from_secs(30),
        send_budget: ms(500),
        connection_max_age: Duration::from_secs(60),
        reuse_connections: None,
        workers: 10,
        bucket_capacity: 100,
        leak_per_second: Some(1_000.0),
        max_wait: Duration::from_secs(30),
        max_attempts: 5,
        max_age: Duration::from_secs(86_400),
        backoff: BackoffPolicy { base: ms(500), max: Duration::from_secs(60) },
        idempotency_retention: Some(Duration::from_secs(86_400)),
        headers: Default::default(),
        request: RequestShape::default(),
        statuses: Default::default(),
        lookup: None,
        require: Default::default(),
        order: JobOrder::None,
        amounts: AmountRules::default(),
        cutoff: None,
        resumed_at: 0,
        version: 1,
        limits: Vec::new(),
        account_rules: Vec::new(),
    }
}

/// A job that waits for `per-minute` with 37 jobs ahead, held by no worker.
fn waiting() -> Facts {
    let minute = spec(&[("per-minute", Algorithm::SlidingLog, 600, 60_000, None)]);
    let job = JobFacts {
        provider: "stripe".to_owned(),
        state: "waiting".to_owned(),
        created_at: EpochMs(NOW.0 - 5_000),
        updated_at: EpochMs(NOW.0 - 2_000),
        wake_at: EpochMs(NOW.0 - 2_000),
        cost: 1,
        ..JobFacts::default()
    };
    Facts {
        now: NOW,
        id: "inv-7".to_owned(),
        job: Some(job),
        row: RowFacts { provider: Some(Arc::new(provider())), problems: Vec::new(), spec: Some(Arc::new(minute)) },
        lane: LaneFacts::Running,
        claim: ClaimState::Unclaimed,
        ahead: JobsAhead { jobs: 37, cost: 37, active: 5, ready: Some(30), workers: 1 },
        limiter: LimiterFacts {
            uses: vec![LimitUtilisation { name: "per-minute".to_owned(), used: 600, capacity: 600 }],
            recent_usage: Some(past(&[(47_600, 600)], 0)),
            ..LimiterFacts::default()
        },
        ..Facts::default()
    }
}

fn changed(change: impl FnOnce(&mut Facts)) -> Explanation {
    let mut facts = waiting();
    change(&mut facts);
    explain(&facts)
}

fn job(facts: &mut Facts) -> &mut JobFacts {
    facts.job.as_mut().unwrap()
}

#[test]
fn limit_shows_usage_start_and_jobs_ahead() {
    let explained = explain(&waiting());
    assert_eq!(
        explained.summary,
        "waits for limit per-minute of stripe (600 per 60 s): 600 used, estimated start 14:03:32 UTC (in 12.4 s), \
         about 37 ahead of it"
    );
    let names: Vec<&str> = explained.checks.iter().map(|check| check.name).collect();
    assert_eq!(names, CHECKS);
    let passed: Vec<&str> = explained.checks.iter().filter(|check| check.passed).map(|check| check.name).collect();
    assert_eq!(passed, CHECKS[..6]);
    let at = explained.blocked_at.unwrap();
    assert_eq!((at.check, at.limit.as_deref(), at.allows.as_deref()), ("limit", Some("per-minute"), Some("600/1m")));
    assert_eq!((at.used, at.jobs_ahead, at.exact), (Some(600), Some(37), false));

    // In the gate's wait queue the count is exact, and for the first job the announced instant is the start.
    let at_gate = |before: u64| {
        let refused =
            PermitRefusal { reason: BlockReason::Limit("per-minute".to_owned()), wait: ms(12_000), exact: true };
        let position = GatePosition { before, cost_before: before, refused: Some(refused), by_own_limit: false };
        changed(|facts| facts.claim = ClaimState::AskedWorker { worker: "w1".to_owned(), position: Some(position) })
    };
    assert!(at_gate(37).summary.ends_with("(in 12.4 s), 37 ahead of it"), "{}", at_gate(37).summary);
    assert!(at_gate(0).summary.ends_with("(in 12 s), none ahead of it"), "{}", at_gate(0).summary);
    assert!(at_gate(37).blocked_at.unwrap().exact);
}

/// The job waits for this, as the ledger says.
fn delays(facts: &mut Facts, wait: &Wait) {
    let job = job(facts);
    (job.reason, job.wait_reason) = (Some(wait.to_string()), Some(wait.reason.clone()));
}

/// Change of the plain case, the check that must block it, and a part of its sentence.
#[test]
#[allow(clippy::too_many_lines, reason = "one table")]
fn every_state_and_blocker_is_described() {
    let other = |at: &str| Some(at.to_owned());
    let second = Duration::from_secs(1);
    let claims_paused = |cause: Wait| LaneFacts::ClaimsPaused { cause, ends_in: second };
    let blocked = |reason| Some(PermitRefusal { reason, wait: second, exact: false });
    let room = |facts: &mut Facts| {
        facts.limiter.recent_usage = Some(RecentUsage::default());
        facts.ahead = JobsAhead { ready: Some(0), workers: 1, ..JobsAhead::default() };
    };
    let set = |change: fn(&mut Provider)| {
        let mut row = provider();
        change(&mut row);
        Some(Arc::new(row))
    };
    let rule = |facts: &mut Facts, rule| {
        let mut spec = QuotaSpec::clone(facts.row.spec.as_ref().unwrap());
        spec.account_rules = vec![AccountRule { account: "shop".to_owned(), limit: None, rule }];
        let own = LimitSpec::sliding_log("per-account", 5, second);
        spec.limits.push(LimitSpec { scope: Scope::Account, ..own });
        facts.row.spec = Some(Arc::new(spec));
        job(facts).account = Some("shop".to_owned());
    };
    type Change<'a> = Box<dyn FnOnce(&mut Facts) + 'a>;
    let cases: Vec<(Change<'_>, &str, &str)> = vec![
        (Box::new(|f| f.row = RowFacts::default()), "provider", "no provider row stripe: `sluicegate provider apply"),
        (
            Box::new(|f| f.row = RowFacts { problems: vec!["url: is empty".to_owned()], ..RowFacts::default() }),
            "provider",
            "is invalid: url: is empty",
        ),
        (Box::new(|f| f.row.provider = set(|row| row.enabled = false)), "provider", "is disabled"),
        (
            Box::new(|f| f.row.provider = set(|row| row.paused = true)),
            "provider",
            "`sluicegate provider resume stripe`",
        ),
        (Box::new(|f| f.row.spec = None), "provider", "another row of quota stripe is invalid"),
        (
            Box::new(|f| {
                job(f).wake_at = EpochMs(NOW.0 + 60_000);
                job(f).not_before = Some(EpochMs(NOW.0 + 60_000));
            }),
            "time",
            "its `not_before` is 14:04:20 UTC (in 1 min)",
        ),
        (
            Box::new(|f| {
                job(f).wake_at = EpochMs(NOW.0 + 4_000);
                delays(f, &Wait::with_detail(WaitReason::Retry, "connection refused"));
            }),
            "time",
            "delayed until 14:03:24 UTC (in 4 s): connection refused; then about 37 ahead of it, estimated start 14",
        ),
        (
            Box::new(|f| {
                job(f).wake_at = EpochMs(NOW.0 + 30_000);
                delays(f, &Wait::for_limit("per-minute"));
            }),
            "limit",
            "600 used, estimated start 14:03:50 UTC (in 30 s)",
        ),
        (Box::new(|f| f.lane = LaneFacts::Absent), "lane", "no lane"),
        (
            Box::new(|f| f.queue_problem = other("broker unavailable: refused")),
            "lane",
            "no worker takes it until the queue answers: broker unavailable: refused",
        ),
        (
            Box::new(|f| f.lane = claims_paused(WaitReason::LedgerUnavailable.into())),
            "lane",
            "starts no more jobs until",
        ),
        (Box::new(|f| f.lane = claims_paused(Wait::for_limit("per-minute"))), "limit", "600 used"),
        (
            Box::new(|f| {
                f.lane = LaneFacts::Paused { cause: WaitReason::CircuitOpen.into(), ends_in: second };
            }),
            "lane",
            "sends nothing until 14:03:21 UTC (in 1 s): the provider is down",
        ),
        (Box::new(|f| f.lane = LaneFacts::Probing { cause: "down".to_owned() }), "lane", "one payment at a time"),
        (Box::new(|f| f.limiter.block = blocked(BlockReason::Cold)), "limiter", "starts cold"),
        (Box::new(|f| f.limiter.block = blocked(BlockReason::Paused)), "limiter", "stripe asked for a pause"),
        (Box::new(|f| f.limiter.block = blocked(BlockReason::StaleSettings)), "limiter", "newer settings"),
        (
            Box::new(|f| f.limiter.unavailable = other("limiter store unavailable: connection refused")),
            "limiter",
            "is unavailable: connection refused",
        ),
        (
            Box::new(|f| {
                job(f).wake_at = EpochMs(NOW.0 + 30_000);
                delays(f, &WaitReason::ProviderPaused.into());
            }),
            "limiter",
            "the provider asked for a pause; it is checked again 14:03:50",
        ),
        (Box::new(|f| rule(f, Rule::Blocked)), "account", "account shop is blocked by a rule"),
        (Box::new(|f| rule(f, Rule::Refuse)), "account", "account shop is refused by another provider of the quota"),
        (
            Box::new(|f| {
                rule(f, Rule::Refuse);
                f.row.provider = set(|row| {
                    let account = "shop".to_owned();
                    row.account_rules = vec![AccountRule { account, limit: None, rule: Rule::Refuse }];
                });
            }),
            "account",
            "account shop is refused by a rule of stripe: its jobs end as declined",
        ),
        (
            Box::new(|f| {
                rule(f, Rule::Exempt);
                rule(f, Rule::Limit("5/1s".parse::<Rate>().unwrap().into()));
                f.limiter.uses.push(LimitUtilisation { name: "per-account".to_owned(), used: 5, capacity: 5 });
            }),
            "account",
            "waits for limit per-account of stripe, counted for account shop (5 per 1 s): 5 used",
        ),
        (
            Box::new(|f| job(f).cost = 601),
            "limit",
            "its cost of 601 exceeds the smallest limit, which allows 600 at once: it waits until the limit is raised",
        ),
        (
            Box::new(|f| {
                rule(f, Rule::Limit("5/1s".parse::<Rate>().unwrap().into()));
                job(f).cost = 6;
            }),
            "account",
            "its cost of 6 exceeds its own limit per-account, which allows 5 at once: it waits until the limit",
        ),
        (
            Box::new(|f| f.row.spec = Some(Arc::new(spec(&[("shut", Algorithm::SlidingLog, 0, 1_000, None)])))),
            "limit",
            "limit shut of stripe is 0 per 1 s: nothing is sent; `sluicegate limits set stripe shut",
        ),
        (
            Box::new(room),
            "queue",
            "in the queue of lane stripe, waits for a worker with free prefetch: none ahead of it",
        ),
        (
            Box::new(|f| {
                room(f);
                f.ahead.workers = 0;
                f.lane = LaneFacts::NotAsked;
            }),
            "queue",
            "is `sluicegate run` running?",
        ),
        (
            Box::new(|f| {
                room(f);
                f.claim = ClaimState::OtherWorker { worker: "w2".to_owned() };
            }),
            "queue",
            "active at worker w2, which was not asked",
        ),
        (
            Box::new(|f| {
                room(f);
                f.claim = ClaimState::AskedWorker { worker: "w1".to_owned(), position: None };
            }),
            "queue",
            "active at worker w1, between two steps: none ahead of it",
        ),
        (
            Box::new(|f| {
                let cause = Wait::with_detail(WaitReason::Unbuildable, "header Authorization: no variable KEY");
                job(f).wake_at = EpochMs(NOW.0 + 30_000);
                delays(f, &cause);
                f.lane = LaneFacts::Paused { cause, ends_in: second };
            }),
            "lane",
            "(in 1 s): the request cannot be built yet: header Authorization: no variable KEY",
        ),
        (
            Box::new(|f| {
                let cause = Wait::with_detail(WaitReason::Misconfigured, "provider answered 401");
                job(f).wake_at = EpochMs(NOW.0 + 30_000);
                // The lane's pause and the job's wait are compared by their codes, and not by their texts.
                delays(f, &Wait::with_detail(WaitReason::Misconfigured, "provider answered 403"));
                f.lane = LaneFacts::Paused { cause, ends_in: second };
            }),
            "lane",
            "sends nothing until 14:03:21 UTC (in 1 s): provider answered 401",
        ),
    ];
    for (nth, (change, check, words)) in cases.into_iter().enumerate() {
        let explained = changed(change);
        let at = explained.blocked_at.as_ref().map(|at| at.check);
        assert!(
            at == Some(check) && explained.summary.contains(words),
            "{nth}: {at:?} {}, not {words}",
            explained.summary
        );
        // The blocking check is the first that has not passed.
        assert_eq!(explained.checks.iter().find(|check| !check.passed).map(|check| check.name), at, "{nth}");
    }
    let expiring = changed(|f| job(f).expires_at = Some(EpochMs(NOW.0 + 3_000)));
    assert!(expiring.summary.ends_with("it expires before that, 14:03:23 UTC (in 3 s)"), "{}", expiring.summary);
}

#[test]
fn unknown_outcome_names_the_next_action() {
    let unknown = |f: &mut Facts| {
        let job = job(f);
        job.state = "unknown".to_owned();
        job.reason = Some("no answer in time".to_owned());
        job.wake_at = EpochMs(NOW.0 + 12_000);
        job.attempts = 1;
        (job.first_sent_at, job.unknown_since) = (Some(job.created_at), Some(job.created_at));
        job.requests = vec![SentRequest {
            number: 1,
            began_at: job.created_at,
            ended_at: Some(job.updated_at),
            outcome: Some("unknown".to_owned()),
        }];
    };
    let again = changed(unknown).summary;
    assert!(
        again.contains("next, the same request is sent under the same key; delayed until 14:03:32 UTC (in 12 s)"),
        "{again}"
    );
    let with = |change: fn(&mut Provider)| {
        changed(|facts| {
            unknown(facts);
            let mut row = provider();
            change(&mut row);
            facts.row.provider = Some(Arc::new(row));
        })
        .summary
    };
    let review = with(|row| row.idempotency_retention = None);
    assert!(review.contains("next, manual review (the outcome is unknown and the provider does not"), "{review}");
    let asked = with(|row| {
        row.idempotency_retention = None;
        row.lookup = Some(crate::domain::provider::LookupConfig {
            url: crate::domain::provider::LookupUrl::parse("https://pay.example/x/${job:id}").unwrap(),
            method: crate::domain::provider::LookupMethod::Get,
            state: "/state".to_owned(),
            accepted: vec!["ok".to_owned()],
            declined: Vec::new(),
            in_progress: Vec::new(),
            reference: "/id".to_owned(),
            sum: Default::default(),
            echo: Default::default(),
            not_found: WhenNotFound::Review,
            give_up_after: Duration::from_secs(600),
        });
    });
    assert!(asked.contains("next, the provider is asked for the outcome (look-up)"), "{asked}");
}
