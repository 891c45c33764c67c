//! Names that are checked where they come in: of jobs, accounts and idempotency keys, of providers, and of the
//! environment variables that hold this program's configuration.
//!
//! A name is safe wherever it is written: in a key, an address, a metric label and a log line. [`named_enum`] makes a
//! list of names that is closed.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

/// A closed list: its variants, `ALL` of them in their order, and the name of each, as the database, JSON and messages
/// have it.
macro_rules! named_enum {
    ($(#[$meta:meta])* pub enum $enum:ident { $($(#[$about:meta])* $variant:ident = $text:literal,)+ }
     $(#[$doc:meta])* pub fn $name:ident(self);) => {
        $(#[$meta])*
        pub enum $enum { $($(#[$about])* $variant,)+ }

        impl $enum {
            pub const ALL: [Self; [$($text),+].len()] = [$(Self::$variant),+];

            $(#[$doc])*
            pub fn $name(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }
    };
    ($(#[$meta:meta])* pub enum $enum:ident {
        $($(#[$about:meta])* $variant:ident $(($payload:ident))? = $text:literal,)+
    }
     $(#[$doc:meta])* pub fn $name:ident(&self);) => {
        $(#[$meta])*
        pub enum $enum { $($(#[$about])* $variant $(($payload))?,)+ }

        impl $enum {
            /// One of each; a payload is empty.
            pub const ALL: [Self; [$($text),+].len()] = [$(Self::$variant $(($payload::new()))?),+];

            $(#[$doc])*
            pub fn $name(&self) -> &'static str {
                match self { $(Self::$variant { .. } => $text,)+ }
            }
        }
    };
}
pub(crate) use named_enum;

/// Why a text is no name, and the fix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    #[error("must be 1 to 64 characters of A-Z a-z 0-9 _ -")]
    Identifier,
    #[error("`{0}` is not a name: use 1 to 63 of a-z 0-9 _ -, beginning with a letter or digit")]
    Provider(String),
}

/// Longest job id, account and idempotency key, in characters.
pub const ID_CHARS_MAX: usize = 64;

/// 1–64 of `A-Z a-z 0-9 _ -`: identifies a payment, an account or an idempotency key. Its clones share one text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identifier(Arc<str>);

impl Identifier {
    /// # Errors
    /// If the text is empty, longer than 64 characters or holds any other character.
    pub fn new(text: impl AsRef<str>) -> Result<Self, InvalidName> {
        let text = text.as_ref();
        let fits = (1..=ID_CHARS_MAX).contains(&text.len());
        if fits && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
            return Ok(Self(text.into()));
        }
        Err(InvalidName::Identifier)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The shared text.
impl From<&Identifier> for Arc<str> {
    fn from(name: &Identifier) -> Self {
        Self::clone(&name.0)
    }
}

impl fmt::Display for Identifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Identity of a payment, for ever and over all providers.
pub type JobId = Identifier;

/// Names that no provider can have, because our own queues have them.
pub const RESERVED_NAMES: [&str; 3] = ["invalid", "dead", "outcomes"];

/// `[a-z0-9][a-z0-9_-]{0,62}`: safe as a routing key, in a Redis key and as a metric label. Its clones share one text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProviderName(Arc<str>);

impl ProviderName {
    pub fn new(text: impl AsRef<str>) -> Result<Self, InvalidName> {
        let text = text.as_ref();
        let body = text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-');
        let head = text.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if head && body && text.len() <= 63 {
            return Ok(Self(text.into()));
        }
        Err(InvalidName::Provider(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The shared text.
impl From<&ProviderName> for Arc<str> {
    fn from(name: &ProviderName) -> Self {
        Self::clone(&name.0)
    }
}

/// Lets maps by name be searched with any text.
impl Borrow<str> for ProviderName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ProviderName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Prefix of every variable of this program.
pub const ENV_PREFIX: &str = "SLUICEGATE_";
/// Separator between the section and the name of a key.
pub const ENV_SECTION_SEPARATOR: &str = "__";
/// Suffix of a variable that names a file with the value.
pub const ENV_FILE_SUFFIX: &str = "_FILE";

/// Whether a variable sets a configuration key, or names the key's file. Variables of other programs may have the same
/// prefix: an orchestrator sets `SLUICEGATE_SERVICE_HOST` for a service of that name.
pub fn is_config_variable(name: &str) -> bool {
    name.strip_prefix(ENV_PREFIX).is_some_and(|key| key.contains(ENV_SECTION_SEPARATOR))
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
