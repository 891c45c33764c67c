//! Limits that are changed for a time: their return happens once, and every later change ends it.

use jiff::Timestamp;
use sluicegate::ledger::operator::Actor;
use sluicegate::ledger::provider_row::{LimitRow, parse_provider_file};
use sluicegate::ops::limit_change::{RateChange, WantedLimit, set_limit};
use sluicegate::ops::until::Until;
use sluicegate::worker::limit_returns;

use super::*;

on_every_database!(
    temporary_limit_returns_once,
    later_change_ends_the_return,
    same_end_again_keeps_the_lasting_rate,
    change_during_the_return_wins,
    rejected_returns_hold_up_no_other,
);

const HOUR_MS: i64 = 3_600_000;
const FILE: &str = r#"
[[provider]]
name = "stripe"
url = "https://api.stripe.example/v1/charges"
[[provider.limit]]
name = "per-second"
max_requests = 100
window_ms = 1000
[[provider.limit]]
name = "per-minute"
max_requests = 600
window_ms = 60000
"#;
const LIMIT: &str = "per-minute";

fn now_ms() -> i64 {
    Timestamp::now().as_millisecond()
}

impl Fixture {
    /// Applies a provider file, and describes the changes.
    async fn apply_file(&self, text: &str) -> Vec<String> {
        let changes = self.database.apply_settings(&parse_provider_file(text).unwrap(), false).await.unwrap();
        changes.into_iter().map(|change| change.description).collect()
    }

    /// Sets a limit of `stripe` for an hour.
    async fn for_an_hour(&self, limit: &str, rate: &str) -> RateChange {
        let until = Timestamp::from_millisecond(now_ms() + HOUR_MS).unwrap().to_string();
        self.until(limit, rate, &until).await
    }

    async fn until(&self, limit: &str, rate: &str, until: &str) -> RateChange {
        let (provider, until) = (name("stripe"), until.parse::<Until>().unwrap());
        let wanted = WantedLimit { provider: &provider, limit, rate: Some(rate.parse().unwrap()), until };
        let by = Actor { os_user: "alice@host".to_owned(), reason: None, program: None };
        set_limit(&self.database, &wanted, false, Some(&by)).await.unwrap()
    }

    async fn limit(&self, limit: &str) -> LimitRow {
        let row = self.database.readable_rows(Some(&name("stripe"))).await.unwrap().remove(0);
        row.limits.into_iter().find(|row| row.name == limit).unwrap()
    }

    /// The rate, and the one that comes back.
    async fn shown_limit(&self, limit: &str) -> String {
        let row = self.limit(limit).await;
        let then = row.returns.map(|returns| format!(", then {}", returns.describe_rate())).unwrap_or_default();
        format!("{}{then}", row.describe_rate())
    }

    /// The time of each return is over.
    async fn pass_the_time(&self) {
        let at = if self.postgres.is_some() { "now() - interval '1 second'" } else { "1000" };
        self.sql(&format!("UPDATE provider_limits SET until_at = {at} WHERE until_at IS NOT NULL")).await.unwrap();
    }

    async fn returned(&self) -> u32 {
        limit_returns::apply_due(&self.database, "w1").await.unwrap().returned
    }

    /// The last audited changes of `stripe`, the last one first.
    async fn audited(&self, at_most: u32) -> Vec<String> {
        let changes = self.database.settings_audit(Some(&name("stripe")), at_most).await.unwrap();
        changes.into_iter().map(|change| format!("{}: {}", change.who, change.what)).collect()
    }
}

async fn temporary_limit_returns_once(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.apply_file(FILE).await;
    let change = fixture.for_an_hour(LIMIT, "900/1m").await;
    assert_eq!((change.rate_before.to_string(), change.ended_return()), ("600/1m".to_owned(), None));
    assert_eq!(fixture.shown_limit(LIMIT).await, "900/1m, then 600/1m");
    let audited = fixture.audited(1).await.remove(0);
    let set = audited.contains("max_requests 600 → 900, until 20") && audited.ends_with("Z, then back to 600/1m");
    assert!(set && audited.starts_with("alice@host ("), "{audited}");
    // Before its time, a look changes nothing, not even the version.
    let version = fixture.database.settings_version().await.unwrap();
    let look = limit_returns::apply_due(&fixture.database, "w1").await.unwrap();
    let next = look.next.unwrap().as_millis();
    assert!(look.returned == 0 && (3_500_000..=3_600_000).contains(&next), "{look:?}");
    let planned = fixture.database.planned_returns().await.unwrap().remove(0);
    let by = Actor { os_user: "worker".to_owned(), reason: None, program: None };
    assert!(!fixture.database.return_row(&planned, &by).await.unwrap(), "an hour early");
    assert_eq!(fixture.database.settings_version().await.unwrap(), version);
    // Eight workers at the same time.
    fixture.pass_the_time().await;
    let workers: Vec<_> = (0..8)
        .map(|worker| {
            let database = fixture.database.clone();
            tokio::spawn(async move { limit_returns::apply_due(&database, &format!("w{worker}")).await.unwrap() })
        })
        .collect();
    let mut returned = 0;
    for worker in workers {
        returned += worker.await.unwrap().returned;
    }
    assert_eq!((returned, fixture.shown_limit(LIMIT).await.as_str()), (1, "600/1m"));
    let went: Vec<String> = fixture.audited(50).await.into_iter().filter(|what| what.contains("went back")).collect();
    assert_eq!(went.len(), 1, "{went:?}");
    assert!(went[0].starts_with("worker w") && went[0].contains("max_requests 900 → 600, went back"), "{went:?}");
    let because = "SELECT because FROM settings_audit WHERE id = (SELECT max(id) FROM settings_audit)";
    assert!(fixture.one(because).await.starts_with("it was set until "));
    assert_eq!(limit_returns::apply_due(&fixture.database, "w1").await.unwrap(), limit_returns::Look::default());
}

async fn later_change_ends_the_return(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.apply_file(FILE).await;
    let stripe = name("stripe");
    for (change, left) in [
        ("sql", "7/1m"),
        ("window", "900/2m"),
        ("shadow", "900/1m"),
        ("command", "8/1m"),
        ("same", "900/1m"),
        ("none", "900/1m"),
        ("file", "600/1m"),
        ("same file", "900/1m"),
    ] {
        fixture.sql("UPDATE provider_limits SET shadow = false").await.unwrap();
        fixture.database.set_rate(&stripe, LIMIT, "600/1m".parse().unwrap()).await.unwrap();
        fixture.for_an_hour(LIMIT, "900/1m").await;
        let set = async |what: &str| {
            fixture.sql(&format!("UPDATE provider_limits SET {what} WHERE name = '{LIMIT}'")).await.unwrap();
        };
        match change {
            "sql" => set("max_requests = 7").await,
            "window" => set("window_ms = 120000").await,
            "shadow" => set("shadow = true").await,
            "command" => drop(fixture.database.set_rate(&stripe, LIMIT, "8/1m".parse().unwrap()).await.unwrap()),
            "same" => drop(fixture.database.set_rate(&stripe, LIMIT, "900/1m".parse().unwrap()).await.unwrap()),
            "none" => {
                let ended = fixture.until(LIMIT, "900/1m", "none").await.ended_return().unwrap();
                assert_eq!(ended.describe_rate(), "600/1m");
            }
            other => {
                let rate = if other == "file" { "600" } else { "900" };
                let text = FILE.replace("max_requests = 600", &format!("max_requests = {rate}"));
                let described = fixture.apply_file(&text).await;
                assert!(described.iter().any(|what| what.contains("no longer goes back")), "{described:?}");
            }
        }
        assert_eq!(fixture.shown_limit(LIMIT).await, left, "{change}");
        let audited = fixture.audited(1).await.remove(0);
        assert!(audited.contains("no longer goes back to 600/1m at 20"), "{change}: {audited}");
        fixture.pass_the_time().await;
        assert_eq!((fixture.returned().await, fixture.shown_limit(LIMIT).await.as_str()), (0, left), "{change}");
    }
    // What does not change the limit leaves its return.
    fixture.database.set_rate(&stripe, LIMIT, "600/1m".parse().unwrap()).await.unwrap();
    fixture.for_an_hour(LIMIT, "900/1m").await;
    fixture.sql("UPDATE provider_limits SET max_requests = max_requests").await.unwrap();
    fixture.sql("UPDATE providers SET workers = 7").await.unwrap();
    fixture.database.set_rate(&stripe, "per-second", "7/1s".parse().unwrap()).await.unwrap();
    assert_eq!(fixture.shown_limit(LIMIT).await, "900/1m, then 600/1m");
    fixture.sql(&format!("DELETE FROM provider_limits WHERE name = '{LIMIT}'")).await.unwrap();
    assert_eq!(fixture.returned().await, 0);
}

/// The trigger cannot tell the same end again from no new end; the command ends the former one first.
async fn same_end_again_keeps_the_lasting_rate(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.apply_file(FILE).await;
    let until = "2099-01-15T06:00:00Z".parse::<Timestamp>().unwrap();
    let until = until.min(Timestamp::from_millisecond(now_ms() + 24 * HOUR_MS).unwrap()).to_string();
    fixture.until(LIMIT, "900/1m", &until).await;
    let change = fixture.until(LIMIT, "1000/1m", &until).await;
    assert_eq!(fixture.shown_limit(LIMIT).await, "1000/1m, then 600/1m");
    assert_eq!(change.ended_return(), None, "the end stays");
    let version = fixture.database.settings_version().await.unwrap();
    fixture.until(LIMIT, "1000/1m", &until).await;
    assert_eq!(fixture.database.settings_version().await.unwrap(), version, "the same again changes nothing");
    let (provider, until) = (name("stripe"), until.parse::<Until>().unwrap());
    let rate = Some("600/1m".parse().unwrap());
    let wanted = WantedLimit { provider: &provider, limit: LIMIT, rate, until };
    let refused = set_limit(&fixture.database, &wanted, false, None).await.unwrap_err().to_string();
    assert_eq!(refused, "limit `per-minute` would go back to the same rate, 600/1m: leave the end out");
}

/// Whichever of both is first: the change is what stays.
async fn change_during_the_return_wins(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.apply_file(FILE).await;
    for round in 0..20 {
        fixture.for_an_hour(LIMIT, "900/1m").await;
        fixture.pass_the_time().await;
        let change = format!("UPDATE provider_limits SET max_requests = {} WHERE name = '{LIMIT}'", 10 + round);
        let (changed, _) = tokio::join!(fixture.sql(&change), fixture.returned());
        changed.unwrap();
        assert_eq!(fixture.shown_limit(LIMIT).await, format!("{}/1m", 10 + round));
    }
}

/// A rate that a CHECK rejects can only be written by SQL.
async fn rejected_returns_hold_up_no_other(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.apply_file(FILE).await;
    fixture.for_an_hour(LIMIT, "900/1m").await;
    fixture.for_an_hour("per-second", "200/1s").await;
    fixture.sql("UPDATE provider_limits SET then_window_ms = NULL WHERE name = 'per-minute'").await.unwrap();
    fixture.pass_the_time().await;
    assert_eq!(fixture.returned().await, 1);
    assert_eq!(
        (fixture.shown_limit("per-second").await.as_str(), fixture.limit(LIMIT).await.max_requests),
        ("100/1s", 900)
    );
}
