//! Weights of accounts: a flow has the weight of its account's row, from its first job on and after each change.

use super::*;

on_every_database!(
    new_flow_has_its_accounts_weight,
    changed_weights_reach_the_flows,
    recreated_flow_has_its_accounts_weight,
    account_rows_divide_the_lane,
);

const WEIGHTS: &str = "SELECT account || weight FROM flows ORDER BY account";

impl Fixture {
    /// Providers `stripe` and `adyen`, with account rows of `stripe`.
    pub(super) async fn with_weights(&self, weights: &[(&str, u32)]) {
        for provider in ["stripe", "adyen"] {
            let row = format!("INSERT INTO providers (name, url) VALUES ('{provider}', 'https://x.example/')");
            self.sql(&row).await.unwrap();
            let limit = "INSERT INTO provider_limits (provider, name, max_requests, window_ms, scope)";
            let limit = format!("{limit} VALUES ('{provider}', 'each', 1, 1000, 'account')");
            self.sql(&limit).await.unwrap();
        }
        for (account, weight) in weights {
            let columns = "INSERT INTO account_overrides (provider, account, weight)";
            self.sql(&format!("{columns} VALUES ('stripe', '{account}', {weight})")).await.unwrap();
        }
    }

    async fn weights(&self) -> Vec<String> {
        self.texts(WEIGHTS).await
    }

    pub(super) async fn texts(&self, sql: &str) -> Vec<String> {
        self.column(sql).await.into_iter().flatten().collect()
    }

    async fn sync_weights(&self, lane: &str) -> u32 {
        self.database.sync_weights(&name(lane)).await.unwrap()
    }
}

async fn new_flow_has_its_accounts_weight(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.with_weights(&[("heavy", 3)]).await;
    let own = "INSERT INTO account_overrides (provider, account, limit_name, rule)";
    fixture.sql(&format!("{own} VALUES ('stripe', 'heavy', 'each', 'exempt')")).await.unwrap();
    fixture.sql(&format!("{own} VALUES ('stripe', 'plain', 'each', 'exempt')")).await.unwrap();
    fixture.record(&of("heavy", "p1")).await;
    fixture.record(&of("plain", "p2")).await;
    fixture.record(&Job { account: None, ..job("p3") }).await;
    fixture.record(&Job { provider: name("adyen"), ..of("heavy", "p4") }).await;
    assert_eq!(
        fixture.texts("SELECT provider || account || weight FROM flows ORDER BY provider, account").await,
        ["adyenheavy1", "stripe1", "stripeheavy3", "stripeplain1"]
    );
    // A flow that begins with a returned job.
    let claimed = fixture.dispatch(1_000, 1_000).await;
    fixture.sql("DELETE FROM flows").await.unwrap();
    for job in &claimed {
        fixture.give_back(job, &RETURNED).await;
    }
    assert_eq!(fixture.weights().await, ["1", "heavy3", "plain1"]);
}

async fn changed_weights_reach_the_flows(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.with_weights(&[("a", 3), ("b", 5)]).await;
    for account in ["a", "b", "c"] {
        fixture.record(&of(account, &format!("{account}-bulk"))).await;
        fixture.record(&Job { priority: 9, ..of(account, &format!("{account}-urgent")) }).await;
    }
    assert_eq!(fixture.sync_weights("stripe").await, 0, "they have them already");
    for change in [
        "UPDATE account_overrides SET weight = 1000 WHERE account = 'a'",
        "DELETE FROM account_overrides WHERE account = 'b'",
        "INSERT INTO account_overrides (provider, account, rule, weight) VALUES ('stripe', 'c', 'exempt', 2)",
    ] {
        fixture.sql(change).await.unwrap();
    }
    let tags = fixture.texts("SELECT tag FROM flows ORDER BY class, account").await;
    assert_eq!(fixture.sync_weights("adyen").await, 0, "another lane's");
    assert_eq!(fixture.sync_weights("stripe").await, 6);
    assert_eq!(fixture.weights().await, ["a1000", "a1000", "b1", "b1", "c2", "c2"]);
    assert_eq!(fixture.texts("SELECT tag FROM flows ORDER BY class, account").await, tags, "tags stay");
    assert_eq!(fixture.sync_weights("stripe").await, 0);
    fixture.counts_agree().await;
}

async fn recreated_flow_has_its_accounts_weight(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.with_weights(&[("heavy", 3)]).await;
    fixture.record(&of("heavy", "p1")).await;
    fixture.sql("DELETE FROM flows").await.unwrap();
    assert_eq!(fixture.database.repair_flows(&name("stripe"), 10).await.unwrap().recreated, 1);
    assert_eq!(fixture.weights().await, ["heavy3"]);
}

async fn account_rows_divide_the_lane(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.with_weights(&[("heavy", 3)]).await;
    for number in 0..60 {
        fixture.record(&of("heavy", &format!("heavy-{number}"))).await;
        fixture.record(&of("light", &format!("light-{number}"))).await;
    }
    let mut heavy = 0;
    for _ in 0..10 {
        heavy += ids(&fixture.dispatch(4, 1).await).iter().filter(|id| id.starts_with("heavy")).count();
    }
    assert!((28..=32).contains(&heavy), "{heavy} of 40");
    // Without the row, both have the same share from now on.
    fixture.sql("DELETE FROM account_overrides").await.unwrap();
    assert_eq!(fixture.sync_weights("stripe").await, 1);
    let mut heavy = 0;
    for _ in 0..10 {
        heavy += ids(&fixture.dispatch(4, 1).await).iter().filter(|id| id.starts_with("heavy")).count();
    }
    assert!((18..=22).contains(&heavy), "{heavy} of 40");
}
