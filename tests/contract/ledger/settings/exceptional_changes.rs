//! Changes of settings by a database user without the rights, and of rows that no constraint would have accepted.

use super::*;

on_every_database!(rate_of_invalid_row_can_be_set, permission_error_names_the_required_role,);

async fn permission_error_names_the_required_role(kind: Kind) {
    if kind != Kind::Postgres {
        return;
    }
    let fixture = Fixture::migrated(kind).await;
    fixture.apply(&file(FILE)).await;
    fixture.sql("CREATE ROLE may_read LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO may_read").await.unwrap();
    let url = fixture.url.replacen("://postgres@", "://may_read@", 1);
    let settings = Database::open(&url, 2).unwrap();
    let error = settings.set_paused(&name("stripe"), true).await.unwrap_err();
    assert!(matches!(error, LedgerError::StatementFailed(_)), "{error}");
    for part in ["permission denied for table providers (SQLSTATE 42501)", "the operator's URL", "docs/security.md"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

async fn rate_of_invalid_row_can_be_set(kind: Kind) {
    if kind == Kind::Postgres {
        return;
    }
    let fixture = Fixture::migrated(kind).await;
    fixture.apply(&file(FILE)).await;
    let bad = "UPDATE provider_limits SET max_requests = -3 WHERE name = 'per-minute'";
    fixture
        .sql(&format!("PRAGMA ignore_check_constraints = 1; {bad}; PRAGMA ignore_check_constraints = 0"))
        .await
        .unwrap();
    let (settings, stripe) = (fixture.database.clone(), name("stripe"));
    let was = settings.set_rate(&stripe, "per-minute", "20/1s".parse().unwrap()).await.unwrap().unwrap();
    assert_eq!((was.max_requests, was.validate().is_err()), (-3, true));
    assert_eq!(settings.readable_rows(Some(&stripe)).await.unwrap()[0].limits[0].max_requests, 20);
}
