//! Environment variables that hold this program's own configuration, told from all others by their names.
//!
//! Refuses to read any: names are values here.

/// What they begin with.
pub const PREFIX: &str = "SLUICEGATE_";
/// Between the section of a key and its name.
pub const SECTION_SEPARATOR: &str = "__";
/// The variable names a file that holds the value.
pub const FILE_SUFFIX: &str = "_FILE";

/// Whether a variable sets a key of the configuration, or names the file of one. Other programs' variables may begin alike:
/// an orchestrator makes `SLUICEGATE_SERVICE_HOST` for a service of that name.
#[must_use]
pub fn is_config_variable(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|key| key.contains(SECTION_SEPARATOR))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_variables_are_recognised() {
        for (name, own) in [
            ("SLUICEGATE_OPS__TOKEN", true),
            ("SLUICEGATE_DATABASE__URL_FILE", true),
            ("SLUICEGATE_CONFIG", false),
            ("SLUICEGATE_SERVICE_HOST", false),
            ("ACME__TOKEN", false),
            ("ACME_KEY", false),
        ] {
            assert_eq!(is_config_variable(name), own, "{name}");
        }
    }
}
