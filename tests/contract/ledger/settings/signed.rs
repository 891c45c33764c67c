//! Changes that somebody signs: who, with what and why stand in the audit beside the change itself.

use sluicegate::ledger::operator::By;

use super::*;

on_every_database!(a_change_is_signed_by_who_made_it);

async fn a_change_is_signed_by_who_made_it(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let settings = fixture.settings();
    fixture.apply(&file(FILE)).await;
    let program = Some("sluicegate ops");
    let by = By { os_user: "alice@page".to_owned(), program, because: Some("they \"asked\"".to_owned()) };
    let last = async |column: &str, back: u8| {
        let row = format!("SELECT max(id) - {back} FROM settings_audit");
        fixture.one(&format!("SELECT coalesce({column}, 'none') FROM settings_audit WHERE id = ({row})")).await
    };
    let (stripe, rate) = (name("stripe"), "5/1m".parse().unwrap());
    for (what, table, key) in [("rate", "provider_limits", "stripe/per-minute"), ("pause", "providers", "stripe")] {
        let before: i64 = fixture.one("SELECT count(*) FROM settings_audit").await.parse().unwrap();
        match what {
            "rate" => drop(settings.set_rate_by(&stripe, "per-minute", rate, Some(&by)).await.unwrap().unwrap()),
            _ => assert!(settings.set_paused_by(&stripe, true, Some(&by)).await.unwrap()),
        }
        assert_eq!(fixture.one("SELECT count(*) FROM settings_audit").await, (before + 2).to_string(), "{what}");
        let change = (last("table_name", 1).await, last("row_key", 1).await, last("program", 1).await);
        assert_eq!(change, (table.to_owned(), key.to_owned(), "sluicegate ops".to_owned()));
        let request = (last("table_name", 0).await, last("row_key", 0).await, last("program", 0).await);
        assert_eq!(request, ("request".to_owned(), format!("{table}/{key}"), "sluicegate ops".to_owned()));
        assert_eq!(last("new_row ->> 'os_user'", 0).await, "alice@page");
        assert_eq!(last("new_row ->> 'because'", 0).await, "they \"asked\"");
    }
    // What changes nothing says nothing, and a signature is for one change alone.
    let before = fixture.one("SELECT count(*) FROM settings_audit").await;
    assert_eq!(settings.set_rate_by(&stripe, "none", rate, Some(&by)).await.unwrap(), None);
    assert!(!settings.set_paused_by(&name("nobody"), true, Some(&by)).await.unwrap());
    assert_eq!(fixture.one("SELECT count(*) FROM settings_audit").await, before);
    settings.set_paused(&stripe, false).await.unwrap();
    let own = if kind == Kind::Postgres { "sluicegate" } else { "none" };
    assert_eq!((last("table_name", 0).await, last("program", 0).await), ("providers".to_owned(), own.to_owned()));
}
