//! Writes that PostgreSQL refuses or holds, while it answers every read.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::Duration;

use crate::plan::WriteTrouble;
use crate::stand::{DATABASE, Stand};

/// While this file is in the data directory, writes of jobs and attempts fail as on a full disk.
const FULL: &str = "disk-is-full";

/// A row's write can be refused only from inside the server. One field of the file's description is asked for, because
/// the description as a whole has a field that is always NULL.
const REFUSE_WHILE_FULL: &str = "
    CREATE FUNCTION refuse_while_disk_is_full() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
    BEGIN
        IF (pg_catalog.pg_stat_file('disk-is-full', true)).size IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'disk_full', MESSAGE = 'could not extend file: No space left on device';
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER disk_is_full AFTER INSERT OR UPDATE ON jobs
        FOR EACH STATEMENT EXECUTE FUNCTION refuse_while_disk_is_full();
    CREATE TRIGGER disk_is_full AFTER INSERT OR UPDATE ON attempts
        FOR EACH STATEMENT EXECUTE FUNCTION refuse_while_disk_is_full()";

/// Prepares the migrated database for [`WriteTrouble::DiskFull`].
pub fn prepare(stand: &Stand) {
    administer(stand, REFUSE_WHILE_FULL);
}

/// Applies the trouble from its start to its end. The caller holds the lock of PostgreSQL.
pub fn refuse(stand: &Stand, trouble: WriteTrouble, lasts: Duration) {
    match trouble {
        WriteTrouble::ReadOnly => with_setting(stand, "default_transaction_read_only", "on", lasts),
        WriteTrouble::MissingStandby => with_setting(stand, "synchronous_standby_names", "missing", lasts),
        WriteTrouble::DiskFull => {
            let full = PathBuf::from(administer(stand, "SHOW data_directory")).join(FULL);
            std::fs::write(&full, "").unwrap();
            last(stand, lasts);
            std::fs::remove_file(&full).unwrap();
        }
    }
}

/// Every session has the setting meanwhile. Its end releases commits that wait.
fn with_setting(stand: &Stand, name: &str, value: &str, lasts: Duration) {
    administer(stand, &format!("ALTER SYSTEM SET {name} = '{value}'"));
    administer(stand, "SELECT pg_reload_conf()");
    last(stand, lasts);
    administer(stand, &format!("ALTER SYSTEM RESET {name}"));
    administer(stand, "SELECT pg_reload_conf()");
}

fn last(stand: &Stand, lasts: Duration) {
    stand.writes_are_refused.store(true, Ordering::Relaxed);
    sleep(lasts);
    stand.writes_are_refused.store(false, Ordering::Relaxed);
}

/// Runs a statement as the superuser, in a session that the troubles do not concern, and returns its output.
fn administer(stand: &Stand, sql: &str) -> String {
    let exempt = "-c default_transaction_read_only=off -c synchronous_commit=local";
    let output = stand.postgres.psql(DATABASE).env("PGOPTIONS", exempt).args(["-c", sql]).output().unwrap();
    assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}
