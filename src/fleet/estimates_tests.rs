//! Tests of the estimates: clear times, and the figures while a source is missing or a worker is cut off.

use super::*;

pub fn ms(clears: &ClearTimeOverview) -> u64 {
    match clears {
        ClearTimeOverview::ClearsIn { ms } => *ms,
        other => panic!("{other:?}"),
    }
}

#[test]
fn account_limits_give_a_lower_bound() {
    let mut row = ProviderRow { leak_per_second: Some(10.0), ..row() };
    let each = LimitRow { name: "per-account".to_owned(), scope: "account".to_owned(), ..row.limits[1].clone() };
    row.limits.push(LimitRow { max_requests: 6, ..each });
    let mut one = evidence(vec![row], vec![worker("a", json!({}))]);
    one.depths.insert("acme".to_owned(), 150);
    let clear_time = |evidence: &OverviewInput| match overview(evidence).providers.remove(0).clears {
        ClearTimeOverview::DependsOnAccounts { at_least_ms, limits, about_ms } => {
            (at_least_ms / 1_000, limits, about_ms.map(|ms| ms / 1_000))
        }
        clears => (ms(&clears) / 1_000, Vec::new(), None),
    };
    let on = || vec!["per-account".to_owned()];
    assert_eq!(clear_time(&one), (15, on(), None));
    // 157 payments at the recent rate; a rate above the limits does not count.
    one.recent_per_s.insert("acme".to_owned(), 0.5);
    assert_eq!(clear_time(&one), (15, on(), Some(314)));
    one.recent_per_s.insert("acme".to_owned(), 80.0);
    assert_eq!(clear_time(&one), (15, on(), Some(15)));
    one.rows[0].limits.pop();
    one.providers = one.rows[0].validate(9).into_iter().map(|row| (row.name.clone(), Arc::new(row))).collect();
    assert_eq!(clear_time(&one), (15, Vec::new(), None));
}

#[test]
fn backlogs_of_one_quota_are_summed() {
    let of = |name: &str| ProviderRow { name: name.to_owned(), quota: Some("shared".to_owned()), ..row() };
    let mut workers = worker("a", json!({}));
    let lanes = &mut workers.report.as_mut().unwrap().lanes;
    lanes.insert("bolt".to_owned(), LaneReport::default());
    let mut both = evidence(vec![of("acme"), of("bolt")], vec![workers]);
    let mut theirs = account(0, 1_200);
    theirs.provider = "bolt".to_owned();
    both.reconciliation.as_mut().unwrap().insert("bolt".to_owned(), theirs);
    let drained: Vec<_> = overview(&both).providers.iter().map(|provider| ms(&provider.clears) / 60_000).collect();
    assert_eq!(drained, [2, 2]);
    both.reconciliation.as_mut().unwrap().remove("bolt");
    let drained: Vec<_> = overview(&both).providers.iter().map(|provider| ms(&provider.clears)).collect();
    assert_eq!(drained, [60, 0]);
}

#[test]
fn full_stop_is_named_instead_of_a_time() {
    let clears = |evidence: &OverviewInput| overview(evidence).providers.remove(0).clears;
    let mut one = evidence(vec![row()], vec![worker("a", json!({}))]);
    one.reconciliation = Some(by_provider([account(1, 0)]));
    one.reconciliation.as_mut().unwrap().get_mut("acme").unwrap().delayed_for = Some(Duration::from_millis(2_820_000));
    assert_eq!(clears(&one), ClearTimeOverview::ClearsIn { ms: 2_820_000 }, "not before its time comes");
    // A job that a rule blocks is delayed again and again; if others wait too, those are estimated.
    one.rows[0].accounts =
        vec![AccountRow { account: "shop".to_owned(), rule: Some("blocked".to_owned()), ..AccountRow::default() }];
    one.providers = [(ProviderName::new("acme").unwrap(), Arc::new(one.rows[0].validate(9).unwrap()))].into();
    assert_eq!(clears(&one), ClearTimeOverview::NotWhileBlocked);
    // So it is if the others wait in the backlog, in flows that the rule blocks.
    let count = one.reconciliation.as_mut().unwrap().get_mut("acme").unwrap();
    (count.backlog, count.account_blocked, count.recorded) = (7, 7, count.recorded + 7);
    assert_eq!(clears(&one), ClearTimeOverview::NotWhileBlocked);
    let blocked = overview(&one).providers.remove(0);
    let cause = "a rule blocks the account of each waiting payment (blocked: shop)";
    assert_eq!((blocked.state, blocked.cause.as_deref()), (ProviderState::Blocked, Some(cause)));
    one.reconciliation.as_mut().unwrap().get_mut("acme").unwrap().account_blocked = 6;
    assert!(matches!(clears(&one), ClearTimeOverview::ClearsIn { .. }), "one of another account waits");
    one.reconciliation.as_mut().unwrap().get_mut("acme").unwrap().account_blocked = 7;
    one.depths.insert("acme".to_owned(), 5);
    assert!(matches!(clears(&one), ClearTimeOverview::ClearsIn { .. }));
    // Nothing says when a provider that is down comes back.
    for down in [
        json!({"does": "stopped", "pause": pause("breaker", "the provider is down", 24_000)}),
        json!({"does": "probing", "pause": pause("breaker", "the provider is down", 24_000)}),
    ] {
        assert_eq!(clears(&evidence(vec![row()], vec![worker("a", down)])), ClearTimeOverview::NotWhileBreakerOpen);
    }
    let refused = json!({"does": "stopped", "pause": pause("setup", "401", 24_000)});
    let refused = clears(&evidence(vec![row()], vec![worker("a", refused)]));
    assert_eq!(refused, ClearTimeOverview::Unknown { missing: MissingSource::Configuration });
    let disabled = evidence(vec![ProviderRow { enabled: false, ..row() }], vec![worker("a", json!({}))]);
    assert_eq!(clears(&disabled), ClearTimeOverview::NotWhileDisabled);
    // A source that does not answer is not an empty one.
    let mut blind = evidence(vec![row()], vec![worker("a", json!({}))]);
    blind.reconciliation = None;
    assert_eq!(clears(&blind), ClearTimeOverview::Unknown { missing: MissingSource::Ledger });
}

/// The row allows 30 per second, and the provider half of it.
#[test]
fn nothing_is_promised_while_429s_come() {
    let limit = LimitRow { name: "per-second".to_owned(), max_requests: 30, ..row().limits.remove(0) };
    let row = ProviderRow { limits: vec![limit], cutoff: Some("12:00 UTC".to_owned()), ..row() };
    let paused = json!({"pause": pause("provider", "asked for a pause", 900)});
    let of = |lane: &Value, throttling: Throttling| {
        let mut one = evidence(vec![row.clone()], vec![worker("a", lane.clone())]);
        one.depths.insert("acme".to_owned(), 5_000);
        one.throttling = Some([("acme".to_owned(), throttling)].into());
        one
    };
    let ended =
        Throttling { requests: 248, last_at_ms: 1_799_999_900_000, passed_per_s: None, ..Throttling::default() };
    let comes = Throttling { keep_coming: true, is_repeated: true, passed_per_s: Some(6.2), ..ended };
    let first = Throttling { requests: 1, keep_coming: true, ..ended };
    let old = Throttling { last_at_ms: 1_799_998_000_000, ..ended };
    let text =
        "the provider refused 248 requests with 429 in the last hour; 6.2/s get through: it allows less than its row";
    for (lane, throttling, passed_per_s, state, cause) in [
        (json!({}), comes, Some(Some(6.2)), ProviderState::Throttled, text),
        (paused.clone(), comes, Some(Some(6.2)), ProviderState::Throttled, text),
        (json!({}), first, Some(None), ProviderState::Running, ""),
        (paused.clone(), first, Some(None), ProviderState::PausedByProvider, "asked for a pause"),
        (json!({}), ended, None, ProviderState::Running, ""),
        // A wait after another response, long after the last 429.
        (paused.clone(), old, None, ProviderState::PausedByProvider, "asked for a pause"),
    ] {
        let input = of(&lane, throttling);
        let shown = overview(&input).providers.remove(0);
        assert_eq!((shown.state, shown.cause.as_deref().unwrap_or_default()), (state, cause), "{lane}");
        assert_eq!(shown.refused_by_provider, Some(throttling.requests));
        let remedy =
            ProviderRow { limits: vec![LimitRow { max_requests: 15, ..row.limits[0].clone() }], ..row.clone() };
        let proposed = ClearTimeOverview::from(clear_time(&input, &remedy.validate(9).unwrap()));
        for clears in [&shown.clears, &proposed] {
            match passed_per_s {
                Some(passed_per_s) => assert_eq!(*clears, ClearTimeOverview::NotWhileThrottled { passed_per_s }),
                None => assert!(ms(clears) > 0, "{clears:?}"),
            }
        }
        assert_eq!(shown.clears_at.is_none(), passed_per_s.is_some());
        let forecast = shown.cutoff.unwrap().forecast;
        assert_eq!(forecast == CutoffForecastOverview::Unknown, passed_per_s.is_some(), "{forecast:?}");
    }
}

/// It is closed until an instant before the cut-off, until one after it, or for good.
#[test]
fn closed_limit_that_returns_is_not_closed_for_good() {
    let never = || ClearTimeOverview::Never { limit: Some("per-second".to_owned()) };
    let not_before =
        |at: DatabaseTime| ClearTimeOverview::NotBefore { limit: "per-second".to_owned(), at: at.to_string() };
    let back = |until, max_requests| LimitReturn { until, max_requests, window_ms: Some(1_000) };
    let soon = DatabaseTime(1_800_000_600_000);
    let late = DatabaseTime(1_800_090_000_000);
    for (returns, clears, is_known) in [
        (Some(back(soon, 100)), not_before(soon), false),
        (Some(back(late, 100)), not_before(late), true),
        (Some(back(soon, 0)), never(), true),
        (None, never(), true),
    ] {
        let mut closed = ProviderRow { cutoff: Some("12:00 UTC".to_owned()), ..row() };
        (closed.limits[0].max_requests, closed.limits[0].returns) = (0, returns);
        let shown = overview(&evidence(vec![closed], vec![worker("a", json!({}))])).providers.remove(0);
        assert_eq!((shown.state, &shown.clears), (ProviderState::Closed, &clears));
        let until = returns.map(|returns| format!(" {returns}")).unwrap_or_default();
        assert_eq!(shown.cause, Some(format!("limit \"per-second\" is 0/1s{until}: nothing is sent")));
        assert_eq!(shown.cutoff.unwrap().forecast != CutoffForecastOverview::Unknown, is_known, "{returns:?}");
    }
}

/// The dialog's value before a change is the one of the table, and the value after it starts from the same usage.
#[test]
fn proposed_limit_is_estimated_like_the_current_one() {
    let mut one = evidence(vec![row()], vec![worker("a", json!({"in_flight": 2, "sent_10s": 100}))]);
    one.depths.insert("acme".to_owned(), 5_000);
    one.limit_usage.insert(ProviderName::new("acme").unwrap(), vec![used("per-minute", 600, 590)]);
    let shown = overview(&one).providers.remove(0).clears;
    let of = |max_requests: i64, input: &OverviewInput| {
        let mut row = row();
        row.limits[1].max_requests = max_requests;
        ClearTimeOverview::from(clear_time(input, &row.validate(9).unwrap()))
    };
    assert_eq!(of(600, &one), shown);
    assert!(ms(&of(1_200, &one)) < ms(&shown) && ms(&of(300, &one)) > ms(&shown));
    assert_eq!(of(0, &one), ClearTimeOverview::Never { limit: Some("per-minute".to_owned()) });
    // From a closed limit, as from an open one.
    one.rows[0].limits[1].max_requests = 0;
    one.providers = one.rows[0].validate(9).into_iter().map(|row| (row.name.clone(), Arc::new(row))).collect();
    assert_eq!(overview(&one).providers[0].clears, ClearTimeOverview::Never { limit: Some("per-minute".to_owned()) });
    assert_eq!(of(600, &one), shown);
}

/// Limits count costs: a backlog whose jobs cost five takes five times as long. Messages count like the recorded jobs.
#[test]
fn costly_jobs_take_longer() {
    let clears_in_ms = |cost_per_job: u64, in_queue: u64| {
        let mut one = evidence(vec![row()], vec![worker("a", json!({"in_flight": 2, "sent_10s": 100}))]);
        one.depths.insert("acme".to_owned(), in_queue);
        let count = one.reconciliation.as_mut().unwrap().get_mut("acme").unwrap();
        (count.backlog, count.recorded) = (9_000, count.recorded + 9_000);
        count.waiting_cost = count.waiting() * cost_per_job;
        ms(&overview(&one).providers.remove(0).clears)
    };
    for in_queue in [0, 3_000] {
        let [of_1, of_5, of_0] = [1, 5, 0].map(|cost| clears_in_ms(cost, in_queue));
        assert!((of_1 * 48 / 10..=of_1 * 52 / 10).contains(&of_5), "{of_1} ms, {of_5} ms");
        assert_eq!(of_0, of_1, "no cost is below 1");
    }
}

/// A lane at half of its pace: a raised limit is rehearsed with half of the new pace, and a lane that keeps its pace with
/// all of it.
#[test]
fn proposed_limit_keeps_the_part_of_the_pace() {
    let mut one = evidence(vec![row()], vec![worker("a", json!({"in_flight": 2, "sent_10s": 100}))]);
    one.depths.insert("acme".to_owned(), 5_000);
    let of = |max_requests: i64, input: &OverviewInput| {
        let mut row = row();
        row.limits.truncate(1);
        row.limits[0].max_requests = max_requests;
        ms(&ClearTimeOverview::from(clear_time(input, &row.validate(9).unwrap())))
    };
    one.rows[0].limits.truncate(1);
    one.providers = one.rows[0].validate(9).into_iter().map(|row| (row.name.clone(), Arc::new(row))).collect();
    let current = one.rows[0].limits[0].max_requests;
    let by_limits = [current, 2 * current].map(|max_requests| of(max_requests, &one));
    #[allow(clippy::cast_precision_loss, reason = "a small limit")]
    let half = current as f64 * 10.0 / 2.0;
    one.sent_before.insert("acme".to_owned(), vec![half; 12]);
    one.judged_before.insert("acme".to_owned(), vec![1.0; 12]);
    let by_pace = [current, 2 * current].map(|max_requests| of(max_requests, &one));
    for (by_limits, by_pace) in by_limits.into_iter().zip(by_pace) {
        assert!((by_limits * 18 / 10..=by_limits * 21 / 10).contains(&by_pace), "{by_limits} ms, {by_pace} ms");
    }
}

/// Jobs that a lane sends after the count are no longer in the backlog.
#[test]
fn old_count_shortens_the_clear_time() {
    let clears_in_ms = |jobs: u64, lane: Value, age_ms: Option<i64>| {
        let mut one = evidence(vec![row()], vec![worker("a", lane)]);
        one.depths.insert("acme".to_owned(), jobs);
        one.counted_at_ms = age_ms.map(|age_ms| one.at_ms - age_ms);
        ms(&overview(&one).providers.remove(0).clears)
    };
    let lane = |sent_10s: u64| json!({"sent_10s": sent_10s});
    let now_ms = clears_in_ms(6_000, lane(100), Some(0));
    assert_eq!(clears_in_ms(6_000, lane(100), None), now_ms);
    // Ten a second were sent: as if fewer waited.
    assert_eq!(clears_in_ms(6_000, lane(100), Some(120_000)), clears_in_ms(4_800, lane(100), Some(0)));
    assert_eq!(clears_in_ms(6_000, lane(0), Some(120_000)), clears_in_ms(6_000, lane(0), Some(0)));
    // However many were sent, more may have come.
    let half_ms = |jobs| clears_in_ms(jobs, lane(1_000), Some(0));
    let left_ms = clears_in_ms(6_000, lane(1_000), Some(240_000));
    assert!((half_ms(2_950)..half_ms(3_050)).contains(&left_ms), "{left_ms}");
    // A lane that waits has sent what it sent in the last ten seconds.
    let cold = || json!({"sent_10s": 100, "gate": pause("cold", "lost its state", 3_000)});
    assert_eq!(clears_in_ms(6_000, cold(), Some(120_000)), clears_in_ms(5_900, cold(), Some(0)));
}

/// Usage of 600 a minute, which a lane uses at 20 a second, in the first half of each minute. Of the last half, these
/// seconds are left, and these permits have not started.
fn used_at_20_a_second(left_s: u64, permits: u64) -> UsageByQuota {
    let returned = |after_s: u64| 20 * (after_s.min(left_s) + after_s.saturating_sub(30 + left_s));
    let still_used = (1..=15).map(|step| 600 - returned(step * 4).min(600 - permits)).collect();
    let window = Duration::from_secs(60);
    let minute = LimitStatus { window, reset_after: window, still_used, ..used("per-minute", 600, 600) };
    BTreeMap::from([(ProviderName::new("acme").unwrap(), vec![used("per-second", 20, 0), minute])])
}

/// As many jobs wait as slots return in this half minute. If jobs and slots were of two moments, some would have to wait
/// for the next one.
#[test]
fn jobs_and_slots_are_of_one_moment() {
    let mut row = row();
    row.limits[0].max_requests = 20;
    let clears_in_ms = |jobs: u64, in_flight: u64, usage_at_count: UsageByQuota| {
        let lane = json!({"sent_10s": 110, "mean_hold_us": 50_000});
        let mut one = evidence(vec![row.clone()], vec![worker("a", lane)]);
        let counted = ProviderReconciliation { active: in_flight, in_flight, ..account(0, jobs) };
        one.reconciliation = Some(by_provider([counted]));
        one.depths.insert("acme".to_owned(), 0);
        one.counted_at_ms = Some(one.at_ms - 2_000);
        (one.usage_at_count, one.limit_usage) = (usage_at_count, used_at_20_a_second(6, 0));
        ms(&overview(&one).providers.remove(0).clears)
    };
    let seconds = |ms: u64| (ms + 500) / 1_000;
    // Of the count, 160 slots returned within 8 s, and now they return within 6.
    assert_eq!(seconds(clears_in_ms(160, 0, used_at_20_a_second(8, 0))), 6);
    // Three of the jobs have a permit for a slot that is used again.
    assert_eq!(seconds(clears_in_ms(163, 0, used_at_20_a_second(8, 3))), 6);
    // Of three in flight, two have a response that is not recorded yet. Two more of the jobs have a permit.
    assert_eq!(seconds(clears_in_ms(162, 3, used_at_20_a_second(8, 3))), 6);
    assert!(seconds(clears_in_ms(180, 0, used_at_20_a_second(8, 0))) > 30, "more than return in this half minute");
    let by_rate = clears_in_ms(160, 0, UsageByQuota::new());
    assert!(seconds(by_rate) > 30, "at the rate of ten seconds, 22 were sent since the count: {by_rate}");
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Missing {
    Nothing,
    Queue,
    /// Jobs cannot be counted; the rest of the database answers.
    Counts,
    Database,
    Limiter,
    Reports,
}

/// 1,332 payments are recorded and 16,541 are in the queue alone.
fn with_missing(missing: Missing) -> OverviewInput {
    let mut row = row();
    row.limits = vec![LimitRow { name: "all".to_owned(), ..row.limits[0].clone() }];
    let lane = json!({"sent_10s": 950, "sent_total": 9_000, "in_flight": 2});
    // Workers that were read last stay, although they are not current.
    let workers = if missing == Missing::Reports { Vec::new() } else { vec![worker("a", lane)] };
    let counted = ProviderReconciliation {
        provider: "acme".to_owned(),
        delayed: 1_000,
        due: 300,
        active: 34,
        in_flight: 2,
        states: [("review", 2), ("dead", 1), ("succeeded", 9_000)].map(|(state, jobs)| (state.to_owned(), jobs)).into(),
        ..ProviderReconciliation::default()
    };
    let quota = ProviderName::new("acme").unwrap();
    let problem = |which: Missing| (missing == which).then(|| format!("{which:?}: gone"));
    let database = missing == Missing::Database;
    OverviewInput {
        reconciliation: (!database && missing != Missing::Counts).then(|| by_provider([counted])),
        depths: (missing != Missing::Queue).then(|| ("acme".to_owned(), 16_841)).into_iter().collect(),
        oldest_ms: (!database).then(|| [("acme".to_owned(), 1_799_999_990_000)].into()),
        limit_usage: (missing != Missing::Limiter).then(|| (quota, vec![used("all", 100, 87)])).into_iter().collect(),
        throttling: (!database).then(ThrottlingByProvider::new),
        database_problem: problem(Missing::Database),
        backend_problems: problem(missing).filter(|_| !database && missing != Missing::Nothing).into_iter().collect(),
        ..evidence(vec![row], workers)
    }
}

#[test]
fn a_missing_source_never_counts_as_zero() {
    let ledgers = ["backlog", "delayed", "active", "in_flight", "review", "dead", "succeeded", "declined", "unknown"];
    for (missing, waiting, unknown) in [
        (Missing::Nothing, json!([18_173, false]), vec![]),
        (Missing::Queue, json!([1_332, true]), vec!["queued", "unrecorded", "clears"]),
        (Missing::Counts, json!([16_841, true]), [&ledgers[..], &["unrecorded", "clears"]].concat()),
        (
            Missing::Database,
            json!([16_841, true]),
            [&ledgers[..], &["unrecorded", "clears", "rate_per_s", "refused_by_provider"]].concat(),
        ),
        (Missing::Limiter, json!([18_173, false]), vec!["used"]),
        (Missing::Reports, json!([18_173, false]), vec!["clears"]),
    ] {
        let picture = serde_json::to_value(overview(&with_missing(missing))).unwrap();
        let acme = &picture["providers"][0];
        assert_eq!(json!([acme["waiting"], acme["waiting_is_at_least"]]), waiting, "{missing:?}");
        let figures = [&ledgers[..], &["queued", "unrecorded", "clears", "rate_per_s", "refused_by_provider", "used"]];
        for figure in figures.concat() {
            let value = match figure {
                "used" => &acme["limits"][0]["used"],
                // There is such a time.
                "clears" => &acme["clears"]["ms"],
                _ => &acme[figure],
            };
            assert_eq!(*value == Value::Null, unknown.contains(&figure), "{missing:?}: {figure} is {value}");
        }
        // The oldest known payment is shown as at least that old.
        let hidden = missing != Missing::Nothing && missing != Missing::Limiter && missing != Missing::Reports;
        assert!(acme["oldest_is_at_least"] == true || !hidden, "{missing:?}");
        let silent = matches!(missing, Missing::Nothing);
        assert_eq!(picture["warnings"].as_array().unwrap().is_empty(), silent, "{missing:?}: {}", picture["warnings"]);
        let state = match missing {
            Missing::Database => "backend_unavailable",
            Missing::Reports => "no_worker",
            _ => "running",
        };
        assert_eq!(acme["state"], state, "{missing:?}");
    }
}

/// A draining process no longer counts as a running lane; other workers count, or the state is `draining`.
#[test]
fn draining_worker_is_not_a_running_lane() {
    let mut seen = with_missing(Missing::Nothing);
    let state = |seen: &OverviewInput| overview(seen).providers.remove(0).state.to_string();
    seen.workers[0].report.as_mut().unwrap().draining = true;
    assert_eq!(
        (state(&seen), overview(&seen).providers.remove(0).clears),
        ("draining".to_owned(), ClearTimeOverview::Unknown { missing: MissingSource::Worker })
    );
    let mut other = seen.workers[0].clone();
    other.report.as_mut().unwrap().draining = false;
    seen.workers.push(other);
    assert_eq!(state(&seen), "running");
}

#[test]
fn cut_off_worker_does_not_hide_others() {
    let mut three = evidence(vec![row()], ["a", "b", "c"].map(|id| worker(id, json!({}))).to_vec());
    let cut_off =
        |worker: &mut WorkerProcess| worker.report.as_mut().unwrap().backends.get_mut("queue").unwrap().ok = false;
    cut_off(&mut three.workers[1]);
    let picture = overview(&three);
    assert_eq!((picture.providers[0].state, picture.providers[0].cause.as_deref()), (ProviderState::Running, None));
    assert_eq!(picture.warnings, ["worker host-b:7: queue: does not answer"]);
    three.workers.iter_mut().for_each(cut_off);
    let picture = overview(&three);
    assert_eq!(picture.providers[0].state, ProviderState::BackendUnavailable);
    assert_eq!(
        picture.warnings,
        ["workers host-a:7, host-b:7, host-c:7: queue: does not answer"],
        "one line, not three"
    );
}

#[test]
fn slow_database_lane_does_not_hide_others() {
    let mut two = evidence(vec![row()], ["a", "b"].map(|id| worker(id, json!({}))).to_vec());
    let pause = ReportedPause {
        by: PauseCause::Backend,
        words: "the ledger is slow".to_owned(),
        ends_in_ms: Some(900),
        ..ReportedPause::default()
    };
    let rest = |worker: &mut WorkerProcess| {
        let lane = worker.report.as_mut().unwrap().lanes.get_mut("acme").unwrap();
        lane.status = LaneStatus { does: LaneState::Resting, pause: Some(pause.clone()) };
    };
    rest(&mut two.workers[0]);
    assert_eq!(overview(&two).providers[0].state, ProviderState::Running);
    rest(&mut two.workers[1]);
    assert_eq!(status_of(&two), (ProviderState::BackendUnavailable, "the ledger is slow".to_owned(), None));
}
