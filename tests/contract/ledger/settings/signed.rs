//! Signed changes of settings: the audit records the author, the program and the reason beside the change itself.

use sluicegate::ledger::operator::Actor;

use super::*;

on_every_database!(change_is_signed_by_its_author);

async fn change_is_signed_by_its_author(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let settings = fixture.database.clone();
    fixture.apply(&file(FILE)).await;
    let program = Some("sluicegate ops");
    let by = Actor { os_user: "alice@page".to_owned(), program, reason: Some("they \"asked\"".to_owned()) };
    let last = async |column: &str| {
        let last = "SELECT max(id) FROM settings_audit";
        fixture.one(&format!("SELECT coalesce({column}, 'none') FROM settings_audit WHERE id = ({last})")).await
    };
    let (stripe, rate) = (name("stripe"), "5/1m".parse().unwrap());
    for (what, table, key) in [("rate", "provider_limits", "stripe/per-minute"), ("pause", "providers", "stripe")] {
        let before: i64 = fixture.one("SELECT count(*) FROM settings_audit").await.parse().unwrap();
        match what {
            "rate" => drop(settings.set_rate_as(&stripe, "per-minute", rate, Some(&by)).await.unwrap().unwrap()),
            _ => assert!(settings.set_paused_as(&stripe, true, Some(&by)).await.unwrap()),
        }
        assert_eq!(fixture.one("SELECT count(*) FROM settings_audit").await, (before + 1).to_string(), "{what}");
        for (column, expected) in [
            ("table_name", table),
            ("row_key", key),
            ("program", "sluicegate ops"),
            ("os_user", "alice@page"),
            ("because", "they \"asked\""),
        ] {
            assert_eq!(last(column).await, expected, "{what}");
        }
    }
    // A change without effect writes no audit row, and a signature counts for one change only.
    let before = fixture.one("SELECT count(*) FROM settings_audit").await;
    assert_eq!(settings.set_rate_as(&stripe, "none", rate, Some(&by)).await.unwrap(), None);
    assert!(!settings.set_paused_as(&name("nobody"), true, Some(&by)).await.unwrap());
    assert_eq!(fixture.one("SELECT count(*) FROM settings_audit").await, before);
    settings.set_paused(&stripe, false).await.unwrap();
    let own = if kind == Kind::Postgres { "sluicegate" } else { "none" };
    let unsigned = (last("table_name").await, last("program").await, last("because").await);
    assert_eq!(unsigned, ("providers".to_owned(), own.to_owned(), "none".to_owned()));
}
