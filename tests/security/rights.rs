//! Rights of each role on each table, column and function: PostgreSQL's catalogue compared with the tables of
//! docs/security.md.

use crate::deployment::Deployment;
use crate::page::Page;

const ROLES: &str =
    "(VALUES ('sluicegate_worker', 1), ('sluicegate_operator', 2), ('sluicegate_reader', 3)) AS roles (role, n)";

/// A line for each table: its name, and a cell for each role.
fn tables() -> String {
    format!(
        "WITH verbs (verb, of_columns, v) AS (VALUES ('SELECT', true, 1), ('INSERT', true, 2), ('UPDATE', true, 3), \
             ('DELETE', false, 4), ('TRUNCATE', false, 5), ('REFERENCES', true, 6), ('TRIGGER', false, 7)), \
         rights AS ( \
             SELECT relname, n, v, CASE \
                 WHEN has_table_privilege(role, c.oid, verb) THEN verb \
                 WHEN of_columns AND has_any_column_privilege(role, c.oid, verb) THEN verb || ' but ' || ( \
                     SELECT string_agg('`' || attname || '`', ', ' ORDER BY attnum) FROM pg_attribute \
                     WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped \
                         AND NOT has_column_privilege(role, c.oid, attnum, verb)) \
                 END AS said \
             FROM pg_class AS c CROSS JOIN {ROLES} CROSS JOIN verbs \
             WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'v', 'm', 'p', 'f')) \
         SELECT '| `' || relname || '` | ' || string_agg(coalesce(cell, '–'), ' | ' ORDER BY n) || ' |' \
         FROM (SELECT relname, n, string_agg(said, ', ' ORDER BY v) AS cell FROM rights GROUP BY relname, n) AS cells \
         GROUP BY relname ORDER BY relname"
    )
}

/// A line for each function that one of the roles may call.
fn functions() -> String {
    let may = "has_function_privilege(role, p.oid, 'EXECUTE')";
    format!(
        "SELECT '| `' || proname || '` | ' || string_agg(CASE WHEN {may} THEN 'EXECUTE' ELSE '–' END, ' | ' ORDER BY n) || ' |' \
         FROM pg_proc AS p CROSS JOIN {ROLES} WHERE pronamespace = 'public'::regnamespace \
         GROUP BY proname HAVING bool_or({may}) ORDER BY proname"
    )
}

/// Rights that no role may have: to use sequences (`check` reads them as the operator), to create objects, to own objects, or to become another role.
fn beyond() -> String {
    format!(
        "SELECT role || ' sequence ' || relname FROM pg_class AS c CROSS JOIN {ROLES} \
         WHERE relkind = 'S' AND relnamespace = 'public'::regnamespace \
             AND has_sequence_privilege(role, c.oid, \
                 CASE WHEN role = 'sluicegate_operator' THEN 'USAGE, UPDATE' ELSE 'USAGE, SELECT, UPDATE' END) \
         UNION ALL SELECT role || ' database' FROM {ROLES} \
         WHERE has_database_privilege(role, current_database(), 'CREATE, TEMP') \
         UNION ALL SELECT role || ' schema ' || nspname FROM pg_namespace AS s CROSS JOIN {ROLES} \
         WHERE has_schema_privilege(role, s.oid, 'CREATE') \
         UNION ALL SELECT role || ' owns ' || relname FROM pg_class AS c JOIN pg_roles AS r ON r.oid = relowner \
             JOIN {ROLES} ON role = rolname \
         UNION ALL SELECT role || ' is more than a login' FROM pg_roles JOIN {ROLES} ON role = rolname \
         WHERE rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls \
             OR EXISTS (SELECT 1 FROM pg_auth_members WHERE member = pg_roles.oid) \
         UNION ALL SELECT role || ' may set session_replication_role' FROM {ROLES} \
         WHERE has_parameter_privilege(role, 'session_replication_role', 'SET') \
         UNION ALL SELECT role || ' calls ' || proname FROM pg_proc AS p CROSS JOIN {ROLES} \
         WHERE (proname ~ '^pg_(try_)?advisory_(xact_)?lock' OR proname IN ('lo_creat', 'lo_create', 'lo_from_bytea', 'lo_import')) \
             AND has_function_privilege(role, p.oid, 'EXECUTE') \
             AND NOT (role = 'sluicegate_worker' AND p.oid = 'pg_try_advisory_lock(bigint)'::regprocedure)"
    )
}

#[test]
fn every_right_is_on_the_page() {
    let deployment = Deployment::shared();
    let page = Page::read("docs/security.md");
    for (first, question) in [("table", tables()), ("function", functions())] {
        let rows = page.table("\n## Least rights", first);
        let written: Vec<String> = rows.iter().map(|cells| format!("| {} |", cells.join(" | "))).collect();
        let granted = deployment.sql(&question);
        assert_eq!(written.join("\n"), granted.trim(), "the table of the page and what PostgreSQL grants:\n{granted}");
    }
    assert_eq!(deployment.sql(&beyond()).trim(), "", "rights that no role needs");
}

/// A function that runs with the owner's rights must find the schema's own tables, whatever objects or settings its
/// caller made.
#[test]
fn owner_functions_pin_their_search_path() {
    let loose = "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND prosecdef \
                 AND NOT coalesce('search_path=public, pg_temp' = ANY (proconfig), false) ORDER BY 1";
    assert_eq!(Deployment::shared().sql(loose).trim(), "");
}
