//! A configuration problem: its key, its origin, and its fix.
//!
//! All problems are reported together. None repeats a value that could be a secret.

use std::fmt;
use std::path::PathBuf;

use crate::domain::sensitive::secret::path_if_safe;

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
