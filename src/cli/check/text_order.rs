//! The order of texts in the report of `check`: another one than that of bytes can lose a payment from sight.

use super::Finding;
use crate::ledger::database::TextOrder;

const FIX_FOREIGN: &str = "Stop the workers, give each of them the collation that the migrations name (\"C\"; SQLite: BINARY), and build \
                    its indexes again";
const FIX_CHANGED: &str = "Nothing for Sluicegate's tables. Rebuild the indexes of other tables (REINDEX DATABASE), then \
                    ALTER DATABASE … or ALTER COLLATION … REFRESH VERSION";

/// Findings on the order in which the database compares texts; none if it is that of bytes.
pub fn text_order_findings(subject: &str, order: &TextOrder) -> Vec<Finding> {
    let foreign: Vec<String> =
        order.foreign.iter().map(|found| format!("{} (`{}`)", found.name, found.collation)).collect();
    let changed: Vec<String> =
        order.changed.iter().map(|was| format!("{} ({}, now {})", was.name, was.built, was.present)).collect();
    let error = (!foreign.is_empty()).then(|| {
        let what = format!(
            "does not compare texts byte by byte: {}. After an upgrade of the operating system a payment can be charged \
             twice",
            foreign.join(", ")
        );
        Finding::error(subject, what, FIX_FOREIGN)
    });
    let warning = (!changed.is_empty()).then(|| {
        let what =
            format!("has another version of a collation than its indexes were built with: {}", changed.join(", "));
        Finding::warning(subject, what, FIX_CHANGED)
    });
    error.into_iter().chain(warning).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::check::FindingLevel;
    use crate::ledger::database::{ChangedCollation, ForeignCollation};

    #[test]
    fn foreign_order_is_an_error_and_a_changed_version_a_warning() {
        assert_eq!(text_order_findings("database", &TextOrder::default()), []);
        let foreign = |name: &str| ForeignCollation { name: name.to_owned(), collation: "en-x-icu".to_owned() };
        let changed =
            ChangedCollation { name: "the database".to_owned(), built: "2.31".to_owned(), present: "2.36".to_owned() };
        let order = TextOrder { foreign: vec![foreign("column jobs.id"), foreign("index x")], changed: vec![changed] };
        let [error, warning] = &text_order_findings("database", &order)[..] else { panic!("{order:?}") };
        assert_eq!((error.level, warning.level), (FindingLevel::Error, FindingLevel::Warning));
        assert!(error.what.contains("column jobs.id (`en-x-icu`), index x (`en-x-icu`)"), "{error:?}");
        assert!(warning.what.contains("the database (2.31, now 2.36)"), "{warning:?}");
    }
}
