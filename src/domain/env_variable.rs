//! Names of the environment variables that hold this program's configuration.
//!
//! It only tells names apart and reads no variable.

/// Prefix of every variable.
pub const PREFIX: &str = "SLUICEGATE_";
/// Separator between the section and the name of a key.
pub const SECTION_SEPARATOR: &str = "__";
/// Suffix of a variable that names a file with the value.
pub const FILE_SUFFIX: &str = "_FILE";

/// Whether a variable sets a configuration key, or names the key's file. Variables of other programs may have the same
/// prefix: an orchestrator sets `SLUICEGATE_SERVICE_HOST` for a service of that name.
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
