//! The configuration keys: those of `config/default.toml`, which is part of the binary.
//!
//! The file is the only list of keys and defaults; the code has no second one.

use std::collections::BTreeMap;

use toml::Value;

use crate::domain::names::{ENV_PREFIX, ENV_SECTION_SEPARATOR};

/// The commented defaults, as shipped.
pub const DEFAULTS: &str = include_str!("../../config/default.toml");

/// Keys whose values are never printed and may come from a file that `…_FILE` names.
pub const SECRET_KEYS: [&str; 4] = ["database.url", "queue.url", "limiter.url", "ops.token"];

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
