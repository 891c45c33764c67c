//! Tests of a job in the backlog: its place, what blocks its flow, and its estimated start, or why there is none.

use super::*;

/// The 17th of 230 jobs of account `shop`, of which each may have 10 in 10 s and has had them 4 s ago. 40 jobs are
/// ahead of it on the lane, which has capacity for them.
fn in_backlog() -> Facts {
    let mut facts = waiting();
    let mut limits = spec(&[
        ("all", Algorithm::SlidingLog, 600, 60_000, None),
        ("per-account", Algorithm::SlidingLog, 10, 10_000, None),
    ]);
    limits.limits[1].scope = Scope::Account;
    facts.row.spec = Some(Arc::new(limits));
    job(&mut facts).account = Some("shop".to_owned());
    facts.ahead = JobsAhead { jobs: 40, cost: 40, active: 5, ready: Some(0), workers: 1 };
    facts.limiter = LimiterFacts { recent_usage: Some(past(&[(4_000, 10)], 0)), ..LimiterFacts::default() };
    facts.backlog = Some(BacklogPlace {
        priority: Some(0),
        before_in_flow: 16,
        waiting_in_flow: 230,
        account_ahead: 0,
        account_cost_ahead: 16,
        account_holder: None,
        block: None,
        account_usage: Some(past(&[(4_000, 10)], 0)),
    });
    facts
}

fn place(facts: &mut Facts) -> &mut BacklogPlace {
    facts.backlog.as_mut().unwrap()
}

/// So many jobs before it in its flow, and of its account elsewhere, each of cost 1.
fn ahead(facts: &mut Facts, before_in_flow: u64, account_ahead: u64) {
    let place = place(facts);
    (place.before_in_flow, place.account_ahead) = (before_in_flow, account_ahead);
    place.account_cost_ahead = before_in_flow + account_ahead;
}

/// The ledger also shows the block as the job's wait.
fn block_with(facts: &mut Facts, wait: Wait, left_ms: u64) {
    delays(facts, &wait);
    job(facts).wake_at = EpochMs(NOW.0 + i64::try_from(left_ms).unwrap());
    place(facts).block = Some(FlowBlock { wait, left: ms(left_ms) });
}

fn block(facts: &mut Facts, reason: WaitReason, left_ms: u64) {
    block_with(facts, reason.into(), left_ms);
}

fn own_limit(facts: &mut Facts, limit: LimitSpec) {
    let mut spec = QuotaSpec::clone(facts.row.spec.as_ref().unwrap());
    spec.limits[1] = LimitSpec { scope: Scope::Account, ..limit };
    facts.row.spec = Some(Arc::new(spec));
}

fn blocked_by_own_limit(facts: &mut Facts, left_ms: u64) {
    block(facts, WaitReason::Limit("per-account".to_owned()), left_ms);
}

/// The account's ten of the last window are free 6.007 s from now, and the next seven of its flow a window later.
#[test]
fn blocked_flow_names_place_block_and_start() {
    let mut facts = in_backlog();
    blocked_by_own_limit(&mut facts, 5_857);
    facts.limiter.uses = vec![LimitUtilisation { name: "per-account".to_owned(), used: 10, capacity: 10 }];
    let explained = explain(&facts);
    assert_eq!(
        explained.summary,
        "waits for limit per-account of stripe, counted for account shop (10 per 10 s): 10 used, estimated start \
         14:03:36 UTC (in 16.0 s), about 40 ahead of it; it is the 17th of 230 waiting payments of account shop with \
         priority 0, blocked until 14:03:25 UTC (in 5.8 s)"
    );
    let time = &explained.checks[2];
    assert!(time.passed && time.text == "its account's payments are blocked, for a reason named below", "{time:?}");
    let at = explained.blocked_at.unwrap();
    assert_eq!(
        (at.check, at.limit.as_deref(), at.jobs_ahead, at.exact),
        ("account", Some("per-account"), Some(40), false)
    );
    assert_eq!((at.starts_in, at.held_for, at.start_unknown), (Some(ms(16_014)), Some(ms(5_857)), None));
}

/// Change of the plain case; the check that blocks, the estimated start in milliseconds or why there is none, and a part
/// of the sentence.
#[test]
#[allow(clippy::too_many_lines, reason = "one table")]
fn start_is_the_latest_of_lane_account_and_block() {
    type Change = Box<dyn Fn(&mut Facts)>;
    let in_flight = "nothing names the instant at which a request in flight ends";
    let cases: Vec<(Change, &str, Result<u64, &str>, &str)> = vec![
        (Box::new(|_| ()), "account", Ok(16_014), "estimated start 14:03:36 UTC"),
        (Box::new(|f| ahead(f, 0, 0)), "account", Ok(6_007), "the 1st of 230 waiting payments"),
        // A worker holds four of the account, which are sent before it.
        (Box::new(|f| ahead(f, 6, 4)), "account", Ok(16_014), "the 7th of"),
        // Those before it cost 25.
        (Box::new(|f| place(f).account_cost_ahead = 25), "account", Ok(26_021), "the 17th of"),
        (Box::new(|f| blocked_by_own_limit(f, 20_000)), "account", Ok(20_000), "blocked until 14:03:40 UTC (in 20 s)"),
        // The lane's own limit is full for longer.
        (
            Box::new(|f| {
                f.limiter.recent_usage = Some(past(&[(20_000, 600)], 0));
                f.limiter.uses = vec![LimitUtilisation { name: "all".to_owned(), used: 600, capacity: 600 }];
            }),
            "limit",
            Ok(40_032),
            "waits for limit all of stripe (600 per 60 s): 600 used, estimated start 14:04:00 UTC (in 40.0 s), about 40 \
             ahead of it; it is the 17th of 230 waiting payments of account shop with priority 0",
        ),
        // Neither holds it: it waits for the jobs ahead of it.
        (
            Box::new(|f| place(f).account_usage = Some(past(&[], 0))),
            "account",
            Ok(10_007),
            "the 17th of 230 waiting payments",
        ),
        (
            Box::new(|f| {
                place(f).account_usage = Some(past(&[], 0));
                ahead(f, 3, 0);
            }),
            "queue",
            Ok(40),
            "in the backlog of lane stripe: estimated start 14:03:20 UTC (in 40 ms), about 40 ahead of it; it is the 4th of",
        ),
        (
            Box::new(|f| {
                job(f).account = None;
                ahead(f, 0, 0);
                (place(f).waiting_in_flow, place(f).priority) = (1, Some(9));
                f.ahead = JobsAhead { workers: 1, ..JobsAhead::default() };
            }),
            "queue",
            Ok(0),
            "in the backlog of lane stripe: none ahead of it; it is the only waiting payment without an account with \
             priority 9",
        ),
        (
            Box::new(|f| {
                let wait = Wait::with_detail(WaitReason::Misconfigured, "the provider refused it");
                block_with(f, wait, 30_000);
            }),
            "account",
            Err("when the block ends, one payment"),
            "the provider refused it, about 40 ahead of it; estimated start unknown: when the block ends, one payment \
             of the account is sent, and its response decides about the others; it is the 17th",
        ),
        (
            Box::new(|f| block(f, WaitReason::RejectedStreak, 30_000)),
            "account",
            Err("when the block ends, one payment"),
            "blocked until 14:03:50 UTC (in 30 s)",
        ),
        // The rule is gone, and its block ends with the next sweep.
        (
            Box::new(|f| block(f, WaitReason::AccountBlocked, 1_000)),
            "account",
            Err("a rule of the provider"),
            "blocked by",
        ),
        (
            Box::new(|f| place(f).account_usage = None),
            "queue",
            Err("the ledger did not report"),
            "estimated start unknown",
        ),
        (
            Box::new(|f| f.limiter.recent_usage = None),
            "queue",
            Err("the ledger did not report"),
            "estimated start unknown",
        ),
        (
            Box::new(|f| {
                own_limit(f, LimitSpec::concurrency("slots", 5));
                block(f, WaitReason::Limit("slots".to_owned()), 500);
                place(f).account_usage = Some(RecentUsage { in_flight: CostByKind::charges(5), ..past(&[], 200) });
            }),
            "account",
            Err(in_flight),
            "waits for limit slots of stripe, counted for account shop (5 at once)",
        ),
        (
            Box::new(|f| {
                let mut spec = QuotaSpec::clone(f.row.spec.as_ref().unwrap());
                spec.limits[0] = LimitSpec::concurrency("slots", 5);
                f.row.spec = Some(Arc::new(spec));
                f.limiter.recent_usage = Some(past(&[], 60_000));
                place(f).account_usage = Some(past(&[], 0));
                ahead(f, 0, 0);
            }),
            "limit",
            Err(in_flight),
            "waits for limit slots of stripe (5 at once): until one of 0 requests in flight ends, about 40 ahead of it; \
             estimated start unknown: nothing names",
        ),
        (
            Box::new(|f| f.lane = LaneFacts::NotAsked),
            "account",
            Err("no running worker was asked"),
            "unknown: no running",
        ),
        // What holds the whole lane is named first, and the place after it.
        (
            Box::new(|f| {
                blocked_by_own_limit(f, 5_000);
                let cause = Wait::with_detail(WaitReason::CircuitOpen, "no answer");
                f.lane = LaneFacts::Paused { cause, ends_in: ms(1_000) };
            }),
            "lane",
            Err(""),
            "sends nothing until 14:03:21 UTC (in 1 s): the provider is down: no answer; it is the 17th of 230 waiting \
             payments of account shop with priority 0, blocked until 14:03:25 UTC (in 5 s)",
        ),
        // A job of the backlog needs no message.
        (Box::new(|f| f.queue_problem = Some("refused".to_owned())), "account", Ok(16_014), "the 17th of"),
    ];
    for (nth, (change, check, start, words)) in cases.into_iter().enumerate() {
        let mut facts = in_backlog();
        change(&mut facts);
        let explained = explain(&facts);
        let at = explained.blocked_at.as_ref().unwrap();
        assert_eq!(at.check, check, "{nth}: {}", explained.summary);
        assert!(explained.summary.contains(words), "{nth}: {}, not {words}", explained.summary);
        match start {
            Ok(start_ms) => {
                let start = at.starts_in.unwrap_or_else(|| panic!("{nth}: {at:?}"));
                assert!(start.as_millis().abs_diff(u128::from(start_ms)) <= 2, "{nth}: {start:?}, not {start_ms} ms");
                assert_eq!(at.start_unknown, None, "{nth}");
            }
            Err(why) => {
                assert_eq!(at.starts_in, None, "{nth}");
                assert!(at.start_unknown.unwrap_or_default().starts_with(why), "{nth}: {at:?}");
            }
        }
    }
}

/// With `order = "account"`, the payment that holds the account is named, and what an operator can do about it.
#[test]
fn payment_that_holds_an_ordered_account_is_named() {
    for (state, words) in [
        ("sending", "held by payment first-7 of its account, whose request is in flight"),
        ("unknown", "held by payment first-7 of its account, whose outcome is unknown"),
        ("waiting", "held by payment first-7 of its account, which is not decided"),
        ("review", "which is in manual review (`sluicegate jobs resolve first-7` ends that)"),
    ] {
        let mut facts = in_backlog();
        place(&mut facts).account_holder = Some(AccountHolder { id: "first-7".to_owned(), state: state.to_owned() });
        let explained = explain(&facts);
        assert!(explained.summary.ends_with(words), "{}", explained.summary);
        let at = explained.blocked_at.unwrap();
        assert_eq!(
            (at.starts_in, at.start_unknown),
            (None, Some("the payment of its account before it must be decided first"))
        );
    }
}

/// An account that a rule exempts has no limit of its own; one with a rule has its own numbers.
#[test]
fn rules_of_the_account_count() {
    let with = |rule: Rule| {
        let mut facts = in_backlog();
        let mut spec = QuotaSpec::clone(facts.row.spec.as_ref().unwrap());
        spec.account_rules = vec![AccountRule { account: "shop".to_owned(), limit: None, rule }];
        facts.row.spec = Some(Arc::new(spec));
        explain(&facts).blocked_at.unwrap()
    };
    let exempt = with(Rule::Exempt);
    assert!(exempt.check == "queue" && exempt.starts_in.unwrap() < ms(100), "{exempt:?}");
    let blocked = with(Rule::Blocked);
    assert_eq!((blocked.check, blocked.starts_in), ("account", None));
}
