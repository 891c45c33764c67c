//! The layers of the configuration: defaults, file, environment and flags, with the origin of each value, and the keys
//! that they set.
//!
//! The keys are those of `config/default.toml`, which is part of the binary; the code has no second list. Unknown keys
//! and values of another type than the default's are rejected here. The values are validated in `validated`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Value;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use crate::config::{ConfigProblem, Origin};
use crate::domain::names::{ENV_FILE_SUFFIX, ENV_PREFIX, ENV_SECTION_SEPARATOR};
use crate::domain::sensitive::secret::is_plain_word;
use crate::files::{self, FileReadError};

/// The commented defaults, as shipped.
pub const DEFAULTS: &str = include_str!("../../config/default.toml");

/// Keys whose values are never printed and may come from a file that `…_FILE` names.
pub const SECRET_KEYS: [&str; 4] = ["database.url", "queue.url", "limiter.url", "ops.token"];

/// Keys that hold tables, which only the configuration file can write.
const TABLE_KEYS: [&str; 1] = ["ops.tokens"];

/// Prefix of our environment variables.
pub const VARIABLE_PREFIX: &str = ENV_PREFIX;

/// The default value of each `section.key`; it also fixes the key's type.
#[derive(Clone, Debug)]
pub struct Keys(BTreeMap<String, Value>);

impl Keys {
    /// Reads the embedded defaults.
    ///
    /// # Errors
    /// Never in a build that passes its tests; the text is the parser's.
    pub fn embedded() -> Result<Self, String> {
        let sections: toml::Table = DEFAULTS.parse().map_err(|error: toml::de::Error| error.message().to_owned())?;
        let mut keys = BTreeMap::new();
        for (section, values) in sections {
            let Value::Table(values) = values else { return Err(format!("`{section}` is not a section")) };
            keys.extend(values.into_iter().map(|(key, value)| (format!("{section}.{key}"), value)));
        }
        Ok(Self(keys))
    }

    pub fn default_of(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.0.iter()
    }

    /// The fix for an unknown key: the most similar existing key, in the form of `written`.
    pub fn suggest_key(&self, unknown: &str, written: impl Fn(&str) -> String) -> String {
        let nearest = self
            .0
            .keys()
            .map(|key| (strsim::jaro_winkler(unknown, key), key))
            .filter(|(likeness, _)| *likeness > 0.8)
            .max_by(|a, b| a.0.total_cmp(&b.0));
        match nearest {
            Some((_, key)) => format!("Did you mean `{}`?", written(key)),
            None => "See config/default.toml for the keys that exist".to_owned(),
        }
    }
}

/// The variable that sets a key: `queue.url` → `SLUICEGATE_QUEUE__URL`.
pub fn variable_name(key: &str) -> String {
    format!("{VARIABLE_PREFIX}{}", key.replace('.', ENV_SECTION_SEPARATOR).to_ascii_uppercase())
}

/// Parses the text of a variable or flag as the type of the default. Other text stays text, and is rejected later as a
/// value of the wrong type.
pub fn parse_typed(text: &str, default: &Value) -> Value {
    match default {
        Value::Integer(_) => text.trim().parse().map_or_else(|_| Value::String(text.to_owned()), Value::Integer),
        Value::Array(_) => Value::Array(
            text.split(',')
                .map(str::trim)
                .filter(|item| !item.is_empty())
                .map(|item| Value::String(item.to_owned()))
                .collect(),
        ),
        _ => Value::String(text.to_owned()),
    }
}

/// Names the configuration file when no flag does.
pub const FILE_VARIABLE: &str = "SLUICEGATE_CONFIG";

/// The key of a problem with a whole file.
const WHOLE_FILE_KEY: &str = "(file)";
/// Largest configuration file, in bytes.
const CONFIGURATION_BYTES_MAX: u64 = 1024 * 1024;
/// Variable that names a file with system certificates.
const SYSTEM_CERTIFICATES: &str = "SSL_CERT_FILE";
/// Largest such file, in bytes.
const SYSTEM_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Largest file with one secret, in bytes.
const SECRET_BYTES_MAX: u64 = 16 * 1024;

/// One value and its origin.
#[derive(Clone, Debug, PartialEq)]
pub struct LayeredValue {
    pub value: Value,
    pub origin: Origin,
}

/// A file that keys are read from.
#[derive(Debug)]
pub struct ConfigFile {
    pub path: PathBuf,
    /// Its permission bits; `None` when it could not be read.
    pub mode: Option<u32>,
}

/// The value of each key after all layers, and the problems of the layers.
#[derive(Debug)]
pub struct Layers {
    keys: Keys,
    pub entries: BTreeMap<String, LayeredValue>,
    pub problems: Vec<ConfigProblem>,
    /// The files that were read.
    pub files: Vec<ConfigFile>,
}

/// The fix for a file that was not read: of the error itself, or `fix` when the path may be wrong.
fn fix_for(error: &FileReadError, fix: String) -> String {
    error.fix().map_or(fix, str::to_owned)
}

impl Layers {
    pub fn from_defaults(keys: Keys) -> Self {
        let entries = keys
            .iter()
            .map(|(key, value)| (key.clone(), LayeredValue { value: value.clone(), origin: Origin::Default }));
        Self { entries: entries.collect(), keys, problems: Vec::new(), files: Vec::new() }
    }

    /// Adds a TOML file as a layer.
    pub fn add_file(&mut self, path: &Path) {
        let at = |line| Origin::File { path: path.to_owned(), line };
        let text = match self.read(path, CONFIGURATION_BYTES_MAX) {
            Ok(text) => text,
            Err(error) => {
                let fix = fix_for(&error, format!("Check --config and {FILE_VARIABLE}"));
                return self.add_problem(WHOLE_FILE_KEY, at(0), format!("cannot be read: {error}"), fix);
            }
        };
        let line_of = |offset: usize| text[..offset.min(text.len())].matches('\n').count() + 1;
        let table = match DeTable::parse(&text) {
            Ok(table) => table.into_inner(),
            Err(error) => {
                // The error's Display quotes the line, which may contain a password.
                let line = error.span().map_or(0, |span| line_of(span.start));
                return self.add_problem(
                    WHOLE_FILE_KEY,
                    at(line),
                    error.message().replace('\n', ", "),
                    "Fix the TOML".to_owned(),
                );
            }
        };
        for (section, values) in table {
            let line = line_of(section.span().start);
            let DeValue::Table(values) = values.into_inner() else {
                let what = "a value outside any section".to_owned();
                self.add_problem(section.get_ref(), at(line), what, "Move it below a [section]".to_owned());
                continue;
            };
            for (name, value) in values {
                let key = format!("{}.{}", section.get_ref(), name.get_ref());
                let line = line_of(name.span().start);
                match Value::deserialize(ValueDeserializer::from(value)) {
                    Ok(value) => self.set_value(&key, value, at(line), str::to_owned),
                    Err(_) => self.add_problem(&key, at(line), "cannot be read".to_owned(), "Fix the value".to_owned()),
                }
            }
        }
    }

    /// Adds the environment as a layer. Other variables with our prefix are ignored: Kubernetes sets
    /// `SLUICEGATE_SERVICE_HOST` and the like for a service of that name.
    pub fn add_environment(&mut self, variables: &[(String, String)]) {
        for (variable, text) in variables {
            let Some(rest) = variable.strip_prefix(VARIABLE_PREFIX) else { continue };
            if !rest.contains(ENV_SECTION_SEPARATOR) {
                self.reject_single_underscore(rest, Origin::Variable(variable.clone()));
                continue;
            }
            let key = rest.replacen(ENV_SECTION_SEPARATOR, ".", 1).to_ascii_lowercase();
            let shown = if is_plain_word(&key) { variable.clone() } else { format!("{VARIABLE_PREFIX}…") };
            let origin = Origin::Variable(shown);
            match key.strip_suffix("_file").filter(|secret| SECRET_KEYS.contains(secret)) {
                Some(secret) => self.add_secret_file(secret, variable, PathBuf::from(text), variables),
                None => self.set_text(&key, text, origin, variable_name),
            }
        }
    }

    /// Checks the file of system certificates. Libraries read it, and would wait for a FIFO or read a device for ever.
    pub fn check_system_certificates(&mut self, variables: &[(String, String)]) {
        let named = variables.iter().find(|(name, path)| name == SYSTEM_CERTIFICATES && !path.is_empty());
        let Some((_, path)) = named else { return };
        if let Err(
            unread @ (FileReadError::NotRegular
            | FileReadError::TimedOut { .. }
            | FileReadError::WritableByOthers { .. }),
        ) = files::read_trusted(Path::new(path), SYSTEM_BYTES_MAX)
        {
            let origin = Origin::Variable(SYSTEM_CERTIFICATES.to_owned());
            self.add_problem(
                WHOLE_FILE_KEY,
                origin,
                format!("cannot be read: {unread}"),
                fix_for(&unread, "Name a PEM file".to_owned()),
            );
        }
    }

    /// Adds `--set key=value` flags as a layer, in their order.
    pub fn add_flags(&mut self, flags: &[String]) {
        for flag in flags {
            match flag.split_once('=') {
                Some((key, text)) => self.set_text(key.trim(), text, Origin::Flag, str::to_owned),
                None => {
                    let fix = "Write --set section.key=value".to_owned();
                    self.add_problem(flag, Origin::Flag, "has no value".to_owned(), fix);
                }
            }
        }
    }

    fn add_secret_file(&mut self, key: &str, variable: &str, path: PathBuf, variables: &[(String, String)]) {
        let origin = Origin::SecretFile { variable: variable.to_owned(), path: path.clone() };
        let direct = variable_name(key);
        let read = self.read(&path, SECRET_BYTES_MAX);
        if variables.iter().any(|(name, _)| *name == direct) {
            let what = format!("{direct} is set as well");
            return self.add_problem(key, origin, what, "Set one of the two".to_owned());
        }
        match read {
            // An empty file is probably a failed write, not an intended empty secret.
            Ok(text) if text.trim().is_empty() => {
                let fix = "Write the value into it, or unset the variable".to_owned();
                self.add_problem(key, origin, "the file is empty".to_owned(), fix);
            }
            Ok(text) => self.set_text(key, text.trim_end_matches(['\r', '\n']), origin, variable_name),
            Err(error) => {
                let fix = fix_for(&error, "Check the path and that this process's user may read it".to_owned());
                self.add_problem(key, origin, format!("the file cannot be read: {error}"), fix);
            }
        }
    }

    /// Reads a file and records its path and mode.
    fn read(&mut self, path: &Path, bytes_max: u64) -> Result<String, FileReadError> {
        let read = files::read_trusted(path, bytes_max);
        let mode = read.as_ref().ok().map(|file| file.mode);
        self.files.push(ConfigFile { path: path.to_owned(), mode });
        read.map(|file| file.text)
    }

    fn reject_single_underscore(&mut self, rest: &str, origin: Origin) {
        let bare = rest.strip_suffix(ENV_FILE_SUFFIX).unwrap_or(rest);
        let intended =
            self.keys.iter().map(|(key, _)| key).find(|key| key.replace('.', "_").eq_ignore_ascii_case(bare));
        if let Some(key) = intended.cloned() {
            let fix = format!("Write {}, with two underscores after the section", variable_name(&key));
            self.add_problem(&key, origin, "this variable is not read".to_owned(), fix);
        }
    }

    fn set_text(&mut self, key: &str, text: &str, origin: Origin, written: impl Fn(&str) -> String) {
        if TABLE_KEYS.contains(&key) {
            let what = "is set by the configuration file alone".to_owned();
            return self.add_problem(key, origin, what, format!("Write tables [[{key}]] into that file"));
        }
        let value = match self.keys.default_of(key) {
            Some(default) => parse_typed(text, default),
            None => Value::String(String::new()),
        };
        self.set_value(key, value, origin, written);
    }

    fn set_value(&mut self, key: &str, value: Value, origin: Origin, written: impl Fn(&str) -> String) {
        let Some(default) = self.keys.default_of(key) else {
            let fix = self.keys.suggest_key(key, written);
            return self.add_problem(key, origin, "there is no such key".to_owned(), fix);
        };
        let holds_tables = TABLE_KEYS.contains(&key);
        let is_item = if holds_tables { Value::is_table } else { Value::is_str };
        let items_fit = value.as_array().is_none_or(|items| items.iter().all(is_item));
        if !default.same_type(&value) || !items_fit {
            let wanted = match default {
                Value::Integer(_) => "a whole number",
                Value::Array(_) if holds_tables => "tables",
                Value::Array(_) => "a list of texts",
                _ => "a text",
            };
            let what = format!("must be {wanted}");
            return self.add_problem(key, origin, what, format!("The default is `{default}`"));
        }
        self.entries.insert(key.to_owned(), LayeredValue { value, origin });
    }

    /// Adds a problem. A key that could be a pasted secret is not repeated.
    fn add_problem(&mut self, key: &str, origin: Origin, message: String, fix: String) {
        let is_known = self.keys.default_of(key).is_some() || key == WHOLE_FILE_KEY;
        let key = if is_known || is_plain_word(key) { key } else { "(a key that is not shown)" };
        self.problems.push(ConfigProblem { key: key.to_owned(), origin, message, fix });
    }
}
