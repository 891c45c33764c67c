//! The configuration of a process: four raw layers, one validated [`Config`], and all problems in one report.
//!
//! Provider rows are not part of it; they are in the database. The environment is an argument, not read here.
//! `config/default.toml` lists and explains every key. A problem has its key, its origin and its fix, and repeats no
//! value that could be a secret.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::domain::sensitive::secret::path_if_safe;

pub mod address;
mod cross_checks;
mod layers;
pub mod people;
mod validated;

pub use address::{DatabaseUrl, LimiterUrl, QueueUrl, SecretUrl};
pub use cross_checks::FIX_FILE_MODE;
pub use layers::DEFAULTS;
pub use validated::{
    CardNumbers, Config, DatabaseConfig, LimiterConfig, LogConfig, LogFormat, OpsConfig, QueueConfig, WorkerConfig,
    unusable_token,
};

use layers::{FILE_VARIABLE, Keys, Layers};
use validated::KeyValidator;

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
    let mut keys = KeyValidator::new(&layers.entries);
    let config = validated::validate(purpose, &mut keys);
    let found = keys.problems;
    let mut problems = std::mem::take(&mut layers.problems);
    problems.extend(cross_checks::secrets_in_flags(&layers));
    for (key, problem) in found {
        let origin = layers.entries.get(key).map_or(Origin::Default, |entry| entry.origin.clone());
        problems.push(ConfigProblem { key: key.to_owned(), origin, message: problem.message, fix: problem.fix });
    }
    match config {
        Some(config) if problems.is_empty() => {
            let exposed = cross_checks::secrets_readable_by_others(&layers);
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

/// The place where a value was set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Default,
    /// `line` 0 is the file as a whole.
    File {
        path: PathBuf,
        line: usize,
    },
    Variable(String),
    /// The file that a `…_FILE` variable names.
    SecretFile {
        variable: String,
        path: PathBuf,
    },
    Flag,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line: 0 } => write!(f, "{}", path.display()),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Variable(name) => f.write_str(name),
            Self::SecretFile { variable, path } => write!(f, "{variable} = {}", path_if_safe(path)),
            Self::Flag => f.write_str("--set"),
        }
    }
}

/// One problem: the key, its origin, what is wrong, and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigProblem {
    pub key: String,
    pub origin: Origin,
    pub message: String,
    pub fix: String,
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}. {}", self.key, self.origin, self.message, self.fix)
    }
}

/// All problems, in the order of the keys; never empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ConfigProblems(pub Vec<ConfigProblem>);

impl ConfigProblems {
    /// A title and one line per problem.
    pub fn lines(&self) -> Vec<String> {
        let title = match self.0.len() {
            1 => "the configuration has a problem:".to_owned(),
            n => format!("the configuration has {n} problems:"),
        };
        [title].into_iter().chain(self.0.iter().map(|problem| format!("  {problem}"))).collect()
    }
}

impl fmt::Display for ConfigProblems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines().join("\n"))
    }
}

#[cfg(test)]
mod tests;
