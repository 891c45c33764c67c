//! The configuration of a process: four raw layers, one validated [`Config`], and all problems in one report.
//!
//! Provider rows are not part of it; they are in the database. The environment is an argument, not read here.
//! `config/default.toml` lists and explains every key.

use std::path::{Path, PathBuf};

pub mod address;
mod cross_checks;
mod keys;
mod layers;
mod problem;
mod raw;
mod secrets;
mod validated;

pub use address::{DatabaseUrl, LimiterUrl, QueueUrl, SecretUrl};
pub use keys::DEFAULTS;
pub use problem::{ConfigProblem, ConfigProblems, Origin};
pub use secrets::FIX_FILE_MODE;
pub use validated::{
    CardNumbers, Config, DatabaseConfig, LimiterConfig, LogConfig, LogFormat, OpsConfig, QueueConfig, WorkerConfig,
};

use keys::Keys;
use layers::{FILE_VARIABLE, Layers};
use raw::RawConfig;
use validated::ProblemCollector;

/// The purpose of a configuration, which decides the cross-checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A worker or another command: every check applies.
    Run,
    /// A migration uses only the database, so only the database is checked.
    Migrate,
}

/// Reads and validates the layers for [`Purpose::Run`].
///
/// `file` is the `--config` flag, `sets` the `--set key=value` flags.
///
/// # Errors
/// Every problem of every layer, in one value.
pub fn load(
    file: Option<&Path>,
    environment: impl IntoIterator<Item = (String, String)>,
    sets: &[String],
) -> Result<Config, ConfigProblems> {
    load_for(Purpose::Run, file, environment, sets)
}

/// Reads and validates the layers for a purpose, like [`load`].
///
/// # Errors
/// Every problem of every layer, in one value.
pub fn load_for(
    purpose: Purpose,
    file: Option<&Path>,
    environment: impl IntoIterator<Item = (String, String)>,
    sets: &[String],
) -> Result<Config, ConfigProblems> {
    let variables: Vec<(String, String)> = environment.into_iter().collect();
    let keys = Keys::embedded().map_err(broken_defaults)?;
    let mut layers = Layers::from_defaults(keys);
    let named = variables.iter().find(|(name, path)| name == FILE_VARIABLE && !path.is_empty());
    let named = named.map(|(_, path)| PathBuf::from(path));
    if let Some(path) = file.or(named.as_deref()) {
        layers.add_file(path);
    }
    layers.add_environment(&variables);
    layers.check_system_certificates(&variables);
    layers.add_flags(sets);
    let raw: RawConfig =
        layers.document().try_into().map_err(|e: toml::de::Error| broken_defaults(e.message().to_owned()))?;
    let mut found = ProblemCollector::default();
    let config = validated::validate(&raw, purpose, &mut found);
    let mut problems = std::mem::take(&mut layers.problems);
    problems.extend(secrets::secrets_in_flags(&layers));
    for (key, problem) in found.0 {
        let origin = layers.entries.get(key).map_or(Origin::Default, |entry| entry.origin.clone());
        problems.push(ConfigProblem { key: key.to_owned(), origin, message: problem.message, fix: problem.fix });
    }
    match config {
        Some(config) if problems.is_empty() => {
            let exposed = secrets::secrets_readable_by_others(&layers);
            Ok(Config {
                config_files: layers.files.into_iter().map(|file| file.path).collect(),
                exposed_secrets: exposed,
                ..config
            })
        }
        _ => Err(ConfigProblems(problems)),
    }
}

fn broken_defaults(message: String) -> ConfigProblems {
    let fix = "This build is broken: config/default.toml and the code disagree".to_owned();
    ConfigProblems(vec![ConfigProblem { key: "(defaults)".to_owned(), origin: Origin::Default, message, fix }])
}

#[cfg(test)]
mod tests;
