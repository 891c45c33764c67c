//! Changes of providers by file, by command and by SQL in each order: `provider apply` loses none, and account rules that
//! end go back to the rule before.

use jiff::Timestamp;
use sluicegate::cli::provider::parse_rows;
use sluicegate::domain::job::Identifier;
use sluicegate::domain::provider::ProviderName;
use sluicegate::ledger::operator::Actor;
use sluicegate::ledger::settings::{ApplyMode, FileApplyError};
use sluicegate::ops::account_rules::{RuleChange, RuleSubject, WantedRule, change_rule, list_rules};
use sluicegate::ops::change::SettingsChangeError;
use sluicegate::ops::until::Until;
use sluicegate::worker::limit_returns;

use super::*;

on_every_database!(
    no_block_is_lost_in_any_order,
    contradicting_changes_stop_the_file,
    temporary_rule_gives_way_to_the_block_before,
    end_of_a_rule_is_no_change_by_hand,
    unusable_rules_are_refused_everywhere,
);

/// A provider with one limit, and what is written between both.
fn text_of(provider: &str, between: &str, below: &str) -> String {
    format!(
        "[[provider]]\nname = \"{provider}\"\nurl = \"https://pay.example.com/\"\n{between}\n\
         [[provider.limit]]\nname = \"all\"\nmax_requests = 100\nwindow_ms = 1000\n{below}"
    )
}

fn rule_text(account: &str, rule: &str) -> String {
    format!("[[provider.account]]\naccount = \"{account}\"\n{rule}\n")
}

const BLOCKED: &str = "rule = \"blocked\"";

fn by() -> Actor {
    Actor { os_user: "alice@host".to_owned(), reason: Some("fraud, ticket 12".to_owned()), program: None }
}

fn set(rule: &str, until: &str) -> WantedRule {
    let until = if until.is_empty() { Until::NoEnd } else { until.parse().unwrap() };
    WantedRule::Set { rule: Some(rule.parse().unwrap()), weight: None, until }
}

fn in_an_hour() -> String {
    let at = Timestamp::now().as_millisecond() + 3_600_000;
    Timestamp::from_millisecond(at).unwrap().to_string()
}

impl Fixture {
    /// Applies a file as `provider apply` does; returns what stays, or what stops it.
    async fn apply_by_command(&self, text: &str) -> Result<Vec<String>, Vec<String>> {
        let rows = parse_rows(text).unwrap();
        let lines = |changes: Vec<sluicegate::ledger::settings::HandChangeBy>| {
            let line = |found: &sluicegate::ledger::settings::HandChangeBy| {
                let by = found.by.as_ref().map(|by| format!("{} ({})", by.who, by.because.as_deref().unwrap_or("")));
                let (is, file) = (found.change.by_hand.clone(), found.change.in_file.clone());
                let value = |value: Option<String>| value.unwrap_or_default();
                format!("{}: {} | {} by {}", found.change.what, value(is), value(file), by.unwrap_or_default())
            };
            changes.iter().map(line).collect::<Vec<_>>()
        };
        match self.database.apply_file(&rows, ApplyMode::Compare, false, None).await {
            Ok(applied) => Ok(lines(applied.kept)),
            Err(FileApplyError::Conflicts(conflicts)) => Err(lines(conflicts)),
            Err(FileApplyError::Ledger(error)) => panic!("{error}"),
        }
    }

    async fn rule(
        &self,
        provider: &ProviderName,
        account: &str,
        wanted: &WantedRule,
    ) -> Result<RuleChange, SettingsChangeError> {
        let account = Identifier::new(account).unwrap();
        let of = RuleSubject { provider, account: &account, limit: None };
        change_rule(&self.database, &of, wanted, Some(&by())).await
    }

    /// The rules of a provider: `shop blocked`.
    async fn rules(&self, provider: &ProviderName) -> Vec<String> {
        let row = self.database.readable_rows(Some(provider)).await.unwrap().remove(0);
        let mut rules: Vec<String> =
            row.accounts.iter().map(|rule| format!("{} {}", rule.account, rule.describe())).collect();
        rules.sort();
        rules
    }

    async fn pass_the_end_of_rules(&self) {
        let at = if self.postgres.is_some() { "now() - interval '1 second'" } else { "1000" };
        self.sql(&format!("UPDATE account_overrides SET until_at = {at} WHERE until_at IS NOT NULL")).await.unwrap();
        assert_eq!(limit_returns::apply_due(&self.database, "w1").await.unwrap().returned, 1);
    }
}

/// All orders of so many steps.
fn orders(steps: usize) -> Vec<Vec<usize>> {
    let mut all = vec![Vec::new()];
    for step in 0..steps {
        let longer = |order: &Vec<usize>| {
            (0..=order.len()).map(|at| [&order[..at], &[step], &order[at..]].concat()).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(longer).collect();
    }
    all
}

async fn no_block_is_lost_in_any_order(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    for (number, order) in orders(4).into_iter().enumerate() {
        let provider = format!("p{number}");
        let named = name(&provider);
        let listed = rule_text("by-file", BLOCKED);
        let file = |between: &str, below: &str| text_of(&provider, between, below);
        fixture.apply_by_command(&file("", &listed)).await.unwrap();
        for step in &order {
            let kept = match step {
                // A file with rules, which changes something else.
                0 => fixture.apply_by_command(&file("workers = 7", &listed)).await.unwrap(),
                // A file that says nothing of accounts.
                1 => fixture.apply_by_command(&file("max_attempts = 3", "")).await.unwrap(),
                2 => {
                    fixture.rule(&named, "by-hand", &set("blocked", "")).await.unwrap();
                    continue;
                }
                _ => {
                    let sql = "INSERT INTO account_overrides (provider, account, rule)";
                    fixture.sql(&format!("{sql} VALUES ('{provider}', 'by-sql', 'blocked')")).await.unwrap();
                    continue;
                }
            };
            let is_kept =
                |account: &str| kept.iter().any(|line| line.starts_with(&format!("account {account}: blocked")));
            let before =
                |other: usize| order.iter().position(|at| *at == other) < order.iter().position(|at| at == step);
            let reported = [is_kept("by-hand"), is_kept("by-sql")];
            assert_eq!(reported, if *step == 0 { [before(2), before(3)] } else { [false; 2] }, "{order:?}: {kept:?}");
        }
        let blocked = ["by-file blocked", "by-hand blocked", "by-sql blocked"];
        assert_eq!(fixture.rules(&named).await, blocked, "{order:?}");
        // The file ends what the file began, and nothing else.
        fixture.apply_by_command(&file("accounts = []", "")).await.unwrap();
        assert_eq!(fixture.rules(&named).await, blocked[1..], "{order:?}");
    }
}

/// Each change by hand, the file that contradicts it, and what stops the file.
async fn contradicting_changes_stop_the_file(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let by_sql = if kind == Kind::Postgres { "postgres ()" } else { "database file ()" };
    let by_alice = |who: &str| format!("alice@host ({who}) (fraud, ticket 12)");
    let by_alice = by_alice(by_sql.trim_end_matches(" ()"));
    let [refused, exempt] = ["refuse", "exempt"].map(|rule| rule_text("shop", &format!("rule = \"{rule}\"")));
    let table = [
        ("command", rule_text("shop", BLOCKED), exempt, "rule of account shop: refuse | exempt"),
        ("sql", rule_text("shop", BLOCKED), String::from("accounts"), "account shop: refuse | none"),
        ("sql", String::new(), rule_text("shop", BLOCKED), "account shop: refuse | blocked"),
        ("command", String::new(), rule_text("shop", "weight = 3"), "account shop: refuse | weight 3"),
        ("gone", rule_text("shop", BLOCKED), refused, "account shop: none | refuse"),
    ];
    for (number, (how, before, after, wanted)) in table.into_iter().enumerate() {
        let provider = name(&format!("q{number}"));
        let own = "[[provider.limit]]\nname = \"own\"\nscope = \"account\"\nmax_requests = 5\nwindow_ms = 1000\n";
        let file = |rules: &str| match rules {
            "accounts" => text_of(provider.as_str(), "accounts = []", own),
            rules => text_of(provider.as_str(), "", &format!("{own}{rules}")),
        };
        fixture.apply_by_command(&file(&before)).await.unwrap();
        let update = format!("WHERE provider = '{provider}' AND account = 'shop'");
        match (how, before.is_empty()) {
            ("command", _) => drop(fixture.rule(&provider, "shop", &set("refuse", "")).await.unwrap()),
            ("gone", _) => drop(fixture.rule(&provider, "shop", &WantedRule::Unset).await.unwrap()),
            (_, true) => {
                let sql = "INSERT INTO account_overrides (provider, account, rule)";
                fixture.sql(&format!("{sql} VALUES ('{provider}', 'shop', 'refuse')")).await.unwrap();
            }
            _ => fixture.sql(&format!("UPDATE account_overrides SET rule = 'refuse' {update}")).await.unwrap(),
        }
        let rules = fixture.rules(&provider).await;
        let version = fixture.database.settings_version().await.unwrap();
        let text = file(&after).replace("max_requests = 100", "max_requests = 50");
        let stopped = fixture.apply_by_command(&text).await.unwrap_err();
        let author = if how == "sql" { by_sql } else { &by_alice };
        assert_eq!(stopped, [format!("{wanted} by {author}")]);
        assert_eq!(fixture.rules(&provider).await, rules);
        assert_eq!(fixture.database.settings_version().await.unwrap(), version, "something was applied");
        // With --reset the file wins, and the next apply has nothing to report.
        let changes = fixture.database.apply_settings(&parse_rows(&text).unwrap(), false).await.unwrap();
        assert!(!changes.is_empty());
        assert_eq!(fixture.apply_by_command(&text).await, Ok(Vec::new()));
    }
}

/// Whatever is set for a time: the end restores what was there before.
async fn temporary_rule_gives_way_to_the_block_before(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let acme = name("acme");
    let text = text_of("acme", "", "");
    fixture.apply_by_command(&text).await.unwrap();
    fixture.rule(&acme, "shop", &set("blocked", "")).await.unwrap();
    let until = in_an_hour();
    let change = fixture.rule(&acme, "shop", &set("5/1s", &until)).await.unwrap();
    assert!(change.unknown_account, "no payment names it");
    assert_eq!(change.after.as_ref().unwrap().returns.as_ref().unwrap().describe_then(), "blocked");
    // A second temporary rule still goes back to the block, and so does one that a file is applied beside.
    fixture.rule(&acme, "shop", &set("9/1s", &until)).await.unwrap();
    let same = fixture.rule(&acme, "shop", &set("9/1s", &until)).await.unwrap();
    assert!(!same.is_change());
    let refused = fixture.rule(&acme, "shop", &set("blocked", &until)).await.unwrap_err().to_string();
    assert_eq!(refused, "account `shop` would go back to the same rule, blocked: leave the end out");
    let kept =
        fixture.apply_by_command(&text.replace("name = \"acme\"", "name = \"acme\"\nworkers = 7")).await.unwrap();
    assert_eq!(kept, Vec::<String>::new(), "the file does not mention accounts");
    let lines = list_rules(&fixture.database, &acme).await.unwrap();
    let line = &lines[0];
    assert_eq!((line.rule.as_deref(), line.then.as_deref()), (Some("9/1s"), Some("blocked")));
    assert_eq!(line.because.as_deref(), Some("fraud, ticket 12"));
    assert!(line.who.as_deref().unwrap().starts_with("alice@host ("), "{line:?}");
    fixture.pass_the_end_of_rules().await;
    assert_eq!(fixture.rules(&acme).await, ["shop blocked"]);
    assert!(list_rules(&fixture.database, &acme).await.unwrap()[0].who.as_deref().unwrap().starts_with("alice"));
    // A rule of an account without one is gone after its end; a later change keeps it.
    fixture.rule(&acme, "other", &set("5/1s", &until)).await.unwrap();
    fixture.pass_the_end_of_rules().await;
    assert_eq!(fixture.rules(&acme).await, ["shop blocked"]);
    fixture.rule(&acme, "shop", &set("5/1s", &until)).await.unwrap();
    fixture.sql("UPDATE account_overrides SET rule = 'refuse', max_requests = NULL, window_ms = NULL").await.unwrap();
    assert_eq!(limit_returns::apply_due(&fixture.database, "w1").await.unwrap(), limit_returns::Look::default());
    assert_eq!(fixture.rules(&acme).await, ["shop refuse"]);
    let what = fixture.database.settings_audit(Some(&acme), 50).await.unwrap();
    let what: Vec<&str> = what.iter().map(|change| change.what.as_str()).collect();
    for words in ["went back as planned for", "ended as planned for", "no longer becomes blocked at 20", "then no rule"]
    {
        assert!(what.iter().any(|line| line.contains(words)), "{words}: {what:#?}");
    }
}

async fn end_of_a_rule_is_no_change_by_hand(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let acme = name("acme");
    let text = |rule: &str| text_of("acme", "", &rule_text("shop", rule));
    fixture.apply_by_command(&text(BLOCKED)).await.unwrap();
    fixture.rule(&acme, "shop", &set("5/1s", &in_an_hour())).await.unwrap();
    let stopped = fixture.apply_by_command(&text("rule = \"refuse\"")).await.unwrap_err();
    assert!(stopped[0].starts_with("rule of account shop: limit 5/1s | refuse by alice"), "{stopped:?}");
    // A file that changes another column of the row keeps the rule and its end.
    let kept = fixture.apply_by_command(&text(&format!("{BLOCKED}\nweight = 3"))).await.unwrap();
    assert!(kept.len() == 1 && kept[0].starts_with("rule of account shop: limit 5/1s | blocked"), "{kept:?}");
    assert_eq!(fixture.rules(&acme).await, ["shop limit 5/1s, weight 3"]);
    fixture.pass_the_end_of_rules().await;
    assert_eq!(fixture.rules(&acme).await[0].split(',').next(), Some("shop blocked"));
    assert_eq!(fixture.apply_by_command(&text("rule = \"refuse\"")).await, Ok(Vec::new()));
    assert_eq!(fixture.rules(&acme).await, ["shop refuse"]);
}

/// The command, the file and the database refuse the same rules.
async fn unusable_rules_are_refused_everywhere(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let acme = name("acme");
    let own = "[[provider.limit]]\nname = \"own\"\nscope = \"account\"\nmax_requests = 5\nwindow_ms = 60000\n";
    // Lines of the own limit; rule, limit, numbers and burst; the constraint.
    let table = [
        ("", "'exempt', NULL, NULL, NULL, NULL", "rule_exempt_needs_a_limit_of_scope_account"),
        ("", "'exempt', 'all', NULL, NULL, NULL", "limit_name_of_the_rule_is_a_limit_of_scope_account"),
        ("", "'limit', 'all', 5, 1000, NULL", "limit_name_of_the_rule_is_a_limit_of_scope_account"),
        ("", "'limit', NULL, 5, NULL, NULL", "window_ms_of_the_rule_fits_its_limits"),
        ("", "'limit', NULL, 5, 1000, 3", "burst_of_the_rule_needs_a_token_bucket_or_gcra"),
        ("", "'limit', NULL, 10001, 1000, NULL", "max_requests_of_the_rule_is_at_most_10000_in_a_sliding_log"),
        ("", "'limit', NULL, 1, 1000, NULL", "max_requests_of_the_rule_exceeds_the_reserve"),
        ("enabled = true", "'limit', 'own', 10001, 1000, NULL", "max_requests_of_the_rule_is_at_most_10000"),
        ("algorithm = \"fixed_window\"\noffset_ms = 30000", "'limit', NULL, 5, 20000, NULL", "is_long_enough"),
        ("algorithm = \"sliding_window\"", "'limit', 'own', 5, 999, NULL", "is_long_enough"),
        ("enabled = true", "'limit', 'own', 5, NULL, NULL", "window_ms_of_the_rule_fits_its_limits"),
    ];
    let insert = "INSERT INTO account_overrides (provider, account, rule, limit_name, max_requests, window_ms, burst)";
    for (own_lines, values, constraint) in table {
        let limit = if own_lines.is_empty() { String::new() } else { format!("{own}{own_lines}\n") };
        let text = text_of("acme", "reserve_percent = 60\naccounts = []", &limit);
        fixture.database.apply_settings(&parse_rows(&text).unwrap(), false).await.unwrap();
        let sql = format!("{insert} VALUES ('acme', 'shop', {values})");
        let error = fixture.sql(&sql).await.unwrap_err();
        assert!(error.contains(constraint), "{values}: {error}");
        fixture
            .sql("INSERT INTO account_overrides (provider, account, rule) VALUES ('acme', 'shop', 'blocked')")
            .await
            .unwrap();
        let columns = "(rule, limit_name, max_requests, window_ms, burst)";
        let error = fixture.sql(&format!("UPDATE account_overrides SET {columns} = ({values})")).await.unwrap_err();
        assert!(error.contains(constraint), "{values}: {error}");
        fixture.sql("DELETE FROM account_overrides").await.unwrap();
        // The same by file, and by the command where its words reach so far.
        let parts: Vec<&str> = values.split(", ").collect();
        let names = ["rule", "limit_name", "max_requests", "window_ms", "burst"];
        let given = names.iter().zip(&parts).filter(|(_, value)| **value != "NULL");
        let lines: Vec<String> = given.map(|(name, value)| format!("{name} = {}", value.replace('\'', "\""))).collect();
        let text = text_of("acme", "reserve_percent = 60", &format!("{limit}{}", rule_text("shop", &lines.join("\n"))));
        let problems = parse_rows(&text).unwrap_err();
        assert!(problems.iter().any(|problem| problem.contains("account `shop`")), "{values}: {problems:?}");
        if parts[4] == "NULL" && !(parts[0] == "'limit'" && parts[3] == "NULL") {
            let written = match parts[0] {
                "'limit'" => format!("{}/{}ms", parts[2], parts[3]),
                rule => rule.replace('\'', ""),
            };
            let account = Identifier::new("shop").unwrap();
            let limit = Some(parts[1].replace('\'', "")).filter(|limit| limit != "NULL");
            let of = RuleSubject { provider: &acme, account: &account, limit: limit.as_deref() };
            let refused = change_rule(&fixture.database, &of, &set(&written, ""), None).await.unwrap_err();
            assert!(matches!(refused, SettingsChangeError::InvalidRow(_)), "{values}: {refused}");
        }
        assert_eq!(fixture.one("SELECT count(*) FROM account_overrides").await, "0");
    }
}
