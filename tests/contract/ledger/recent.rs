//! Recent requests of a quota, for the rebuild of a limiter: exact ages and costs, found without reading the whole
//! ledger.

use std::collections::BTreeMap;

use sluicegate::domain::limit::{AppliesTo, Scope};
use sluicegate::domain::permit_protocol::CostByKind;
use sluicegate::domain::quota_spec::{Lookback, SubjectQuery};
use sluicegate::ledger::database::Database;
use sluicegate::ledger::{AttemptEnd, BeginResult, FencedWrite, JobState, RecentUses};

use super::*;

on_every_database!(
    ages_and_costs_are_exact,
    unsent_requests_do_not_count,
    no_answer_counts_as_open,
    missing_responses_count_from_longest_request_end,
    quota_counts_only_its_own_providers,
    provider_that_left_quota_still_counts,
    close_ends_become_one_entry,
    more_than_a_page_is_counted_once,
    requests_beyond_counted_lookback_are_only_noticed,
    accounts_and_references_are_counted_separately,
    requests_record_account_and_reference,
);

const WITHIN: Duration = Duration::from_secs(600);

/// An instant this many milliseconds ago, as the database writes it.
fn ago(kind: Kind, ms: i64) -> String {
    match kind {
        Kind::Postgres => format!("clock_timestamp() - interval '{ms} ms'"),
        _ => format!("CAST(round(unixepoch('subsec') * 1000) AS INTEGER) - {ms}"),
    }
}

/// Requests as recorded: job, provider, cost, begin and end in ms before now, outcome, status.
type Sent<'a> = (&'a str, &'a str, u32, i64, Option<i64>, &'a str, Option<u16>);

impl Fixture {
    async fn provider(&self, name: &str, quota: &str) {
        let quota = if quota.is_empty() { "NULL".to_owned() } else { format!("'{quota}'") };
        let row = format!("INSERT INTO providers (name, quota, url) VALUES ('{name}', {quota}, 'https://x.example/')");
        self.sql(&row).await.unwrap();
    }

    async fn sent(&self, kind: Kind, requests: &[Sent<'_>]) {
        let blob = if kind == Kind::Postgres { "decode(repeat('00', 32), 'hex')" } else { "zeroblob(32)" };
        let no = if kind == Kind::Postgres { "false" } else { "0" };
        for (id, provider, cost, began, ended, outcome, status) in requests {
            let now = ago(kind, 0);
            let job = format!(
                "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, cost, \
                     priority, state, wake_at, fence, created_at, updated_at) \
                 VALUES ('{id}', '{provider}', '{id}', {no}, {blob}, 1, 'EUR', {cost}, 0, 'waiting', {now}, 1, {now}, \
                     {now})"
            );
            let status = status.map_or("NULL".to_owned(), |status| status.to_string());
            let end = match ended {
                Some(ended) => format!("{}, '{outcome}', {status}, {no}", ago(kind, *ended)),
                None => "NULL, NULL, NULL, NULL".to_owned(),
            };
            let attempt = format!(
                "INSERT INTO attempts (job_id, number, provider, began_at, ended_at, outcome, status, counted) \
                 VALUES ('{id}', 1, '{provider}', {}, {end})",
                ago(kind, *began)
            );
            self.sql(&job).await.unwrap();
            self.sql(&attempt).await.unwrap();
        }
    }

    async fn recent(&self, quota: &str) -> RecentUses {
        self.database.recent_uses(&name(quota), Lookback::all(WITHIN)).await.unwrap()
    }
}

/// Ages are as written, at most `late` later, and never more than the true age.
fn assert_ages(uses: &RecentUses, expected: &[(u64, u32)], since: std::time::Instant) {
    let late = since.elapsed() + Duration::from_millis(2);
    let bucket = WITHIN / 997 + Duration::from_millis(1);
    assert_eq!(uses.ended.len(), expected.len(), "{uses:?}");
    for ((age, cost), (age_ms, expected_cost)) in uses.ended.iter().zip(expected) {
        let written = Duration::from_millis(*age_ms);
        assert_eq!(*cost, CostByKind::charges(*expected_cost), "{uses:?}");
        assert!(*age <= written + late && *age + bucket >= written, "{age:?} for {written:?}, {late:?} ago");
    }
}

async fn ages_and_costs_are_exact(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.provider("stripe", "").await;
    let uses = fixture.recent("stripe").await;
    assert_eq!(uses, RecentUses::default());
    let since = std::time::Instant::now();
    let requests: [Sent; 5] = [
        ("p1", "stripe", 1, 500, Some(100), "accepted", Some(200)),
        ("p2", "stripe", 7, 90_500, Some(90_000), "declined", Some(402)),
        ("p3", "stripe", 1_000, 301_000, Some(300_000), "unknown", Some(503)),
        ("p4", "stripe", 3, 650_000, Some(630_000), "accepted", Some(200)),
        ("p5", "stripe", 5, 700, None, "", None),
    ];
    fixture.sent(kind, &requests).await;
    let uses = fixture.recent("stripe").await;
    assert_ages(&uses, &[(100, 1), (90_000, 7), (300_000, 1_000)], since);
    assert_eq!(uses.open, CostByKind::charges(5), "p4 is too old, p5 is in flight");
    // A bucket is a thousandth of the lookback: for one second, ages are exact to a millisecond.
    let since = std::time::Instant::now();
    let exact: Sent = ("p6", "stripe", 2, 60, Some(50), "accepted", Some(200));
    fixture.sent(kind, &[exact]).await;
    let within = Duration::from_secs(1);
    let uses = fixture.database.recent_uses(&name("stripe"), Lookback::all(within)).await.unwrap();
    let (age, cost) = uses.ended[0];
    let true_age = Duration::from_millis(50) + since.elapsed();
    assert_eq!(cost, CostByKind::charges(2), "{uses:?}");
    assert!(age >= Duration::from_millis(48) && age <= true_age, "{age:?}, truly at most {true_age:?}");
}

async fn unsent_requests_do_not_count(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.provider("stripe", "").await;
    let requests: [Sent; 2] = [
        ("p1", "stripe", 1, 500, Some(100), "not_sent", None),
        // A crash before the end was recorded: the request counts as over.
        ("p2", "stripe", 9, 601_000, None, "", None),
    ];
    fixture.sent(kind, &requests).await;
    assert_eq!(fixture.recent("stripe").await, RecentUses::default());
}

async fn no_answer_counts_as_open(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.provider("stripe", "").await;
    let since = std::time::Instant::now();
    let requests: [Sent; 2] = [
        // Connection reset: the provider may count the request later than our record of its end.
        ("p1", "stripe", 4, 200, Some(100), "unknown", None),
        // No provider row allows a request to be in flight for more than 660.25 s.
        ("p2", "stripe", 6, 800_000, Some(500_000), "unknown", None),
    ];
    fixture.sent(kind, &requests).await;
    let uses = fixture.recent("stripe").await;
    assert_eq!(uses.open, CostByKind::charges(4));
    assert_ages(&uses, &[(139_750, 6)], since);
}

/// A request without a response counts as ended once the longest request time is over. It does not matter when its end
/// was recorded, or whether it was.
async fn missing_responses_count_from_longest_request_end(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.provider("stripe", "").await;
    let requests: [Sent; 4] = [
        ("p1", "stripe", 1, 3_600_000, Some(3_590_000), "unknown", None),
        ("p2", "stripe", 2, 7_200_000, Some(100), "unknown", None),
        ("p3", "stripe", 4, 10_800_000, None, "", None),
        ("p4", "stripe", 8, 600_000, None, "", None),
    ];
    fixture.sent(kind, &requests).await;
    let day = Duration::from_secs(86_400);
    let uses = fixture.database.recent_uses(&name("stripe"), Lookback::all(day)).await.unwrap();
    assert_eq!(uses.open, CostByKind::charges(8), "{uses:?}");
    let buckets: Vec<(u64, u32)> =
        uses.ended.iter().map(|(age, cost)| ((age.as_secs() + 660).div_ceil(600), cost.charges)).collect();
    assert_eq!(buckets, [(6, 1), (12, 2), (18, 4)], "in parts of ten minutes: {uses:?}");
}

async fn quota_counts_only_its_own_providers(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.provider("stripe", "acme").await;
    fixture.provider("stripe-eu", "acme").await;
    fixture.provider("adyen", "").await;
    let since = std::time::Instant::now();
    let requests: [Sent; 5] = [
        ("p1", "stripe", 1, 2_000, Some(1_000), "accepted", Some(200)),
        ("p2", "stripe-eu", 2, 30_000, Some(20_000), "accepted", Some(200)),
        ("p3", "stripe-eu", 8, 100, None, "", None),
        ("p4", "adyen", 16, 2_000, Some(1_000), "accepted", Some(200)),
        ("p5", "adyen", 32, 100, None, "", None),
    ];
    fixture.sent(kind, &requests).await;
    let uses = fixture.recent("acme").await;
    assert_eq!(uses.open, CostByKind::charges(8));
    assert_ages(&uses, &[(1_000, 1), (20_000, 2)], since);
    assert_eq!(fixture.recent("adyen").await.open, CostByKind::charges(32));
    // No quota has this name any more, so no provider counts there.
    assert_eq!(fixture.recent("stripe").await, RecentUses::default());
}

async fn provider_that_left_quota_still_counts(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.provider("moved", "acme").await;
    fixture.provider("gone", "acme").await;
    fixture.provider("own", "").await;
    let requests: [Sent; 3] = [
        ("p1", "moved", 1, 20, None, "", None),
        ("p2", "gone", 2, 20, None, "", None),
        ("p3", "own", 4, 20, None, "", None),
    ];
    fixture.sent(kind, &requests).await;
    assert_eq!((fixture.recent("acme").await.open.charges, fixture.recent("own").await.open.charges), (3, 4));
    fixture.sql("UPDATE providers SET quota = 'other' WHERE name IN ('moved', 'own')").await.unwrap();
    fixture.sql("DELETE FROM providers WHERE name = 'gone'").await.unwrap();
    assert_eq!((fixture.recent("acme").await.open.charges, fixture.recent("own").await.open.charges), (3, 4));
    assert_eq!(fixture.recent("other").await.open.charges, 5, "their requests count in their present quota, too");
    // Long afterwards, none of their requests can count there.
    let long_ago = ago(kind, 3_600_000 + 700_000);
    fixture.without_constraints(&format!("UPDATE settings_audit SET at = {long_ago}")).await.unwrap();
    assert_eq!(fixture.recent("acme").await, RecentUses::default());
}

/// `count` jobs with one request each, ended evenly over the last `over_ms`.
fn many(kind: Kind, provider: &str, count: u32, over_ms: u32) -> [String; 2] {
    let rows = match kind {
        Kind::Postgres => format!("generate_series(1, {count}) AS s (n)"),
        _ => format!(
            "(WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count}) SELECT n FROM s)"
        ),
    };
    let (blob, no, now) = match kind {
        Kind::Postgres => ("decode(repeat('00', 32), 'hex')", "false", "now()".to_owned()),
        _ => ("zeroblob(32)", "0", ago(kind, 0)),
    };
    let ended = match kind {
        Kind::Postgres => format!("now() - n * interval '1 ms' * ({over_ms}::float8 / {count})"),
        _ => format!("{now} - n * {over_ms} / {count}"),
    };
    let jobs = format!(
        "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, cost, priority, \
             state, wake_at, fence, created_at, updated_at) \
         SELECT '{provider}-' || n, '{provider}', '{provider}-' || n, {no}, {blob}, 1, 'EUR', 2, 0, 'waiting', {now}, \
             1, {now}, {now} FROM {rows}"
    );
    let attempts = format!(
        "INSERT INTO attempts (job_id, number, provider, began_at, ended_at, outcome, status, counted) \
         SELECT '{provider}-' || n, 1, '{provider}', {ended}, {ended}, 'accepted', 200, {no} FROM {rows}"
    );
    [jobs, attempts]
}

async fn close_ends_become_one_entry(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.provider("stripe", "").await;
    for statement in many(kind, "stripe", 20_000, 500_000) {
        fixture.sql(&statement).await.unwrap();
    }
    let uses = fixture.recent("stripe").await;
    let cost: u32 = uses.ended.iter().map(|(_, cost)| cost.counted_by(AppliesTo::All)).sum();
    assert_eq!((cost, uses.open), (40_000, CostByKind::default()));
    assert!((800..=1_000).contains(&uses.ended.len()), "{}", uses.ended.len());
    assert!(uses.ended.is_sorted_by(|(a, _), (b, _)| a < b), "youngest first");
}

async fn more_than_a_page_is_counted_once(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    // One provider's requests ended evenly over the time, the other's all at one instant, where no page can end.
    for (provider, over_ms) in [("even", 500_000), ("crowd", 0)] {
        fixture.provider(provider, "acme").await;
        for statement in many(kind, provider, 110_000, over_ms) {
            fixture.sql(&statement).await.unwrap();
        }
    }
    let uses = fixture.recent("acme").await;
    let cost: u64 = uses.ended.iter().map(|(_, cost)| u64::from(cost.counted_by(AppliesTo::All))).sum();
    assert_eq!((cost, uses.open), (4 * 110_000, CostByKind::default()));
    assert!(uses.ended.len() <= 1_000, "{}", uses.ended.len());
    assert!(uses.ended.is_sorted_by(|(a, _), (b, _)| a < b), "youngest first");
}

/// Requests are counted over ten minutes for enforced limits. They are noticed over a month for shadow limits and
/// accounts.
async fn requests_beyond_counted_lookback_are_only_noticed(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let month = Duration::from_secs(31 * 86_400);
    let lookback = Lookback { count_within: WITHIN, notice_within: month };
    let recent = async || fixture.database.recent_uses(&name("acme"), lookback).await.unwrap();
    let once = (WITHIN, CostByKind::charges(1));
    for provider in ["unsent", "older", "endless", "both"] {
        fixture.provider(provider, "acme").await;
    }
    let nothing: [Sent; 2] = [
        ("p1", "unsent", 9, 3_700_000, Some(3_600_000), "not_sent", None),
        ("p2", "older", 9, 2_800_000_000, Some(2_700_000_000), "accepted", Some(200)),
    ];
    fixture.sent(kind, &nothing).await;
    assert_eq!(recent().await, RecentUses::default());
    // A crash before the end was recorded, long ago.
    fixture.sent(kind, &[("p3", "endless", 9, 3_600_000, None, "", None)]).await;
    assert_eq!(recent().await, RecentUses { ended: vec![once], open: CostByKind::default() });
    let both: [Sent; 3] = [
        ("p4", "both", 9, 3_700_000, Some(3_600_000), "accepted", Some(200)),
        ("p5", "both", 9, 90_000_000, Some(80_000_000), "accepted", Some(200)),
        ("p6", "both", 7, 40_000, Some(30_000), "accepted", Some(200)),
    ];
    fixture.sent(kind, &both).await;
    let uses = recent().await;
    assert_eq!((uses.ended.len(), uses.ended[0].1, uses.ended[1]), (2, CostByKind::charges(7), once), "{uses:?}");
}

async fn uses_of(fixture: &Fixture, scope: Scope, names: &[&str]) -> BTreeMap<String, RecentUses> {
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    let asked = SubjectQuery { scope, names, within: WITHIN };
    fixture.database.recent_subject_uses(&name("acme"), &asked).await.unwrap()
}

async fn accounts_and_references_are_counted_separately(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.provider("stripe", "acme").await;
    fixture.provider("stripe-eu", "acme").await;
    fixture.provider("adyen", "").await;
    let since = std::time::Instant::now();
    let requests: [Sent; 9] = [
        ("p1", "stripe", 1, 2_000, Some(1_000), "accepted", Some(200)),
        ("p2", "stripe-eu", 2, 91_000, Some(90_000), "declined", Some(402)),
        ("p3", "stripe", 4, 700, None, "", None),
        ("p4", "stripe", 8, 300, Some(200), "unknown", None),
        // No provider row allows a request to be in flight for more than 660.25 s.
        ("p5", "stripe", 16, 800_000, Some(500_000), "unknown", None),
        ("p6", "stripe", 32, 500, Some(100), "not_sent", None),
        ("p7", "stripe", 64, 650_000, Some(630_000), "accepted", Some(200)),
        ("p8", "stripe", 128, 2_000, Some(1_000), "accepted", Some(200)),
        ("p9", "adyen", 256, 2_000, Some(1_000), "accepted", Some(200)),
    ];
    fixture.sent(kind, &requests).await;
    fixture.without_constraints("UPDATE attempts SET account = 'a', reference = 'r' || job_id").await.unwrap();
    fixture
        .without_constraints("UPDATE attempts SET account = 'b', reference = 'r' WHERE job_id = 'p8'")
        .await
        .unwrap();
    let uses = uses_of(&fixture, Scope::Account, &["a", "b", "nobody"]).await;
    assert_eq!(uses.keys().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(uses["a"].open, CostByKind::charges(4 + 8), "{uses:?}");
    let ages = |uses: &RecentUses, expected: &[(u64, u32)]| {
        let late = since.elapsed() + Duration::from_millis(2);
        let bucket = WITHIN / 254 + Duration::from_millis(1);
        assert_eq!(uses.ended.len(), expected.len(), "{uses:?}");
        for ((age, cost), (age_ms, expected_cost)) in uses.ended.iter().zip(expected) {
            let written = Duration::from_millis(*age_ms);
            assert_eq!(*cost, CostByKind::charges(*expected_cost), "{uses:?}");
            assert!(*age <= written + late && *age + bucket >= written, "{age:?} for {written:?}, {late:?} ago");
        }
    };
    ages(&uses["a"], &[(1_000, 1), (90_000, 2), (139_750, 16)]);
    ages(&uses["b"], &[(1_000, 128)]);
    let uses = uses_of(&fixture, Scope::Reference, &["r", "rp2", "rp9"]).await;
    assert_eq!(uses.keys().collect::<Vec<_>>(), ["r", "rp2"], "another provider's request is not in the quota");
    ages(&uses["rp2"], &[(90_000, 2)]);
}

/// Requests as workers record them: a charge, and a look-up of it.
async fn requests_record_account_and_reference(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.provider("stripe", "acme").await;
    let (ledger, job) = (fixture.database.clone(), job("p1"));
    let hold = fixture.take(&job).await.lease;
    let BeginResult::Attempt(number) = ledger.begin_attempt(&hold, &request("p1"), AT_ONCE).await.unwrap() else {
        panic!("the lease is stale")
    };
    let end = AttemptEnd { number, outcome: "unknown", status: Some(503), detail: String::new(), counts: true };
    let next = JobState::Unknown { wait: Duration::ZERO, reason: Wait::with_detail(WaitReason::Retry, "no answer") };
    let written = ledger.finish_attempt(&hold, &end, &next).await.unwrap();
    assert_eq!(written, FencedWrite::Applied);
    let hold = fixture.take(&job).await.lease;
    assert!(matches!(ledger.begin_lookup(&hold, A_MINUTE).await.unwrap(), BeginResult::Attempt(2)));
    for (scope, name) in [(Scope::Account, "acct_1"), (Scope::Reference, "invoice 7")] {
        let uses = &uses_of(&fixture, scope, &[name]).await[name];
        assert_eq!(uses.ended.iter().map(|(_, cost)| *cost).collect::<Vec<_>>(), [CostByKind::charges(1)], "{uses:?}");
        assert_eq!(uses.open, CostByKind { charges: 0, lookups: 1 }, "{uses:?}");
    }
}

/// Plans depend on the tables' content, so this test asks a real server, as in production.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rebuild_reads_by_index() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let started = std::time::Instant::now();
    for (provider, quota, count) in [("stripe", "acme", 150_000), ("stripe-eu", "acme", 20_000), ("adyen", "", 30_000)]
    {
        fixture.provider(provider, quota).await;
        // Five days of requests, of which the rebuild reads ten minutes.
        for statement in many(Kind::Postgres, provider, count, 432_000_000) {
            fixture.sql(&statement).await.unwrap();
        }
    }
    fixture.sql("ANALYZE").await.unwrap();
    let database = Database::open(&fixture.url, 1).unwrap();
    // More often than the five custom plans, after which PostgreSQL may choose a generic plan.
    for _ in 0..8 {
        let uses = database.recent_uses(&name("acme"), Lookback::all(WITHIN)).await.unwrap();
        let cost: u32 = uses.ended.iter().map(|(_, cost)| cost.counted_by(AppliesTo::All)).sum();
        // 150,000 and 20,000 requests over five days: 208 and 27 of them in ten minutes, at cost 2. The count falls
        // with the time since they were made.
        let left = WITHIN.saturating_sub(started.elapsed()).as_secs_f64() / WITHIN.as_secs_f64();
        assert!(f64::from(cost) >= 450.0 * left && cost <= 480, "{cost} with {left} of the time left");
    }
    // A session reports its statistics when it ends. Index entries are counted, not rows: once the table is vacuumed,
    // the index alone may suffice.
    database.close().await;
    let ended = "SELECT coalesce(sum(idx_tup_read), 0)::bigint FROM pg_stat_user_indexes WHERE relname = 'attempts'";
    let read = async || fixture.one(ended).await.parse::<u64>().unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while read().await < 8 * 50 && std::time::Instant::now() < deadline {
        tokio::task::yield_now().await;
    }
    let found = read().await;
    assert!((8 * 50..20_000).contains(&found), "{found}");
    for table in ["attempts", "jobs"] {
        let read = format!("SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = '{table}'");
        assert_eq!(fixture.one(&read).await, "0", "rows of {table} that were read without an index");
    }
}
