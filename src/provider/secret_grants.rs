//! Validated list `outbound.secrets`: the secrets that headers of provider rows may carry, each with its hosts.
//!
//! A row names its secret. The operator who writes rows need not be trusted with every secret that a worker can read.
//! So there is no default: a secret without an entry is sent nowhere.

use std::fmt;
use std::path::{Path, PathBuf};

use url::Host;

use crate::domain::names::is_config_variable;

/// Source of a secret: `env:NAME` or `file:/PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretReference {
    Env(String),
    File(PathBuf),
}

/// Reason why a text is no secret reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecretReferenceError {
    /// A variable that sets a key of this program's own configuration.
    ConfigVariable,
    RelativePath,
    Other,
}

impl SecretReference {
    /// Parses `env:NAME` or `file:/PATH`.
    pub fn parse(text: &str) -> Result<Self, SecretReferenceError> {
        match text.split_once(':') {
            Some(("env", name)) if is_config_variable(name) => Err(SecretReferenceError::ConfigVariable),
            Some(("env", name)) if !name.is_empty() && !name.contains('=') => Ok(Self::Env(name.to_owned())),
            Some(("file", path)) if Path::new(path).is_absolute() => Ok(Self::File(path.into())),
            Some(("file", _)) => Err(SecretReferenceError::RelativePath),
            _ => Err(SecretReferenceError::Other),
        }
    }
}

impl fmt::Display for SecretReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env(name) => write!(f, "env:{name}"),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

/// A secret that a row sends to a host. It is displayed as the entry of `outbound.secrets` that allows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretUse {
    pub reference: SecretReference,
    /// In the form of [`canonical_host`].
    pub host: String,
}

impl fmt::Display for SecretUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.reference, self.host)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum HostPattern {
    Exact(String),
    /// A domain; it matches hosts with exactly one more label, as in a certificate.
    Wildcard(String),
}

impl HostPattern {
    fn parse(text: &str) -> Result<Self, &'static str> {
        let below = text.strip_prefix("*.");
        let name = below.unwrap_or(text);
        if name.contains('*') {
            return Err("may have `*` only as its whole first label, as in *.adyen.com");
        }
        let host = Host::parse(name).map_err(|_| "does not end in a host: write it without scheme, port and path")?;
        let name = canonical_host(&host);
        match (below, &host) {
            (None, _) => Ok(Self::Exact(name)),
            (Some(_), Host::Domain(_)) if name.contains('.') => Ok(Self::Wildcard(name)),
            (Some(_), _) => Err("needs a domain of at least two labels after `*.`"),
        }
    }

    fn matches(&self, host: &str) -> bool {
        match self {
            Self::Exact(name) => name == host,
            Self::Wildcard(domain) => {
                host.split_once('.').is_some_and(|(label, rest)| !label.is_empty() && rest == domain)
            }
        }
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => f.write_str(name),
            Self::Wildcard(domain) => write!(f, "*.{domain}"),
        }
    }
}

/// One entry of `outbound.secrets`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretGrant {
    reference: SecretReference,
    host_pattern: HostPattern,
}

impl SecretGrant {
    /// Parses `REFERENCE@HOST`. Errors do not quote the entry, because an operator may have written a secret there.
    fn parse(entry: &str) -> Result<Self, &'static str> {
        let (reference, host) = entry.trim().rsplit_once('@').ok_or("has no `@` followed by a host")?;
        let reference = SecretReference::parse(reference).map_err(|error| match error {
            SecretReferenceError::ConfigVariable => "names a variable of this program's own configuration",
            SecretReferenceError::RelativePath => "needs an absolute path after `file:`",
            SecretReferenceError::Other => "must begin with `env:NAME` or `file:/PATH`",
        })?;
        Ok(Self { reference, host_pattern: HostPattern::parse(host)? })
    }

    pub fn permits(&self, reference: &SecretReference, host: &str) -> bool {
        self.reference == *reference && self.host_pattern.matches(host)
    }
}

impl fmt::Display for SecretGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.reference, self.host_pattern)
    }
}

/// The list `outbound.secrets`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SecretGrants(Vec<SecretGrant>);

impl SecretGrants {
    /// Parses entries like `env:STRIPE_KEY@api.stripe.com` and `file:/run/secrets/adyen@*.adyen.com`.
    ///
    /// # Errors
    /// One line per invalid entry, with its number and without its text.
    pub fn parse(entries: &[String]) -> Result<Self, Vec<String>> {
        let mut grants = Vec::with_capacity(entries.len());
        let mut problems = Vec::new();
        for (number, entry) in (1..).zip(entries) {
            match SecretGrant::parse(entry) {
                Ok(grant) => grants.push(grant),
                Err(problem) => problems.push(format!("entry {number} {problem}")),
            }
        }
        if problems.is_empty() { Ok(Self(grants)) } else { Err(problems) }
    }

    pub fn iter(&self) -> impl Iterator<Item = &SecretGrant> {
        self.0.iter()
    }

    pub fn permits(&self, reference: &SecretReference, host: &str) -> bool {
        self.0.iter().any(|grant| grant.permits(reference, host))
    }

    /// The configuration change that allows these uses too, for an error text.
    pub fn fix_hint(&self, missing: &[SecretUse]) -> String {
        let mut entries: Vec<String> = missing.iter().map(|used| format!("{:?}", used.to_string())).collect();
        entries.sort();
        entries.dedup();
        let entries = entries.join(", ");
        match self.0.is_empty() {
            true => {
                format!("to allow it, write `secrets = [{entries}]` below [outbound] in the workers' configuration")
            }
            false => format!("to allow it, add {entries} to outbound.secrets in the workers' configuration"),
        }
    }
}

/// The form in which hosts are compared: lower case, without the root's trailing dot.
pub(super) fn canonical_host<S: AsRef<str>>(host: &Host<S>) -> String
where
    Host<S>: fmt::Display,
{
    match host {
        Host::Domain(name) => name.as_ref().trim_end_matches('.').to_ascii_lowercase(),
        address => address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grants(entries: &[&str]) -> Result<SecretGrants, Vec<String>> {
        SecretGrants::parse(&entries.iter().map(|entry| (*entry).to_owned()).collect::<Vec<_>>())
    }

    fn is_permitted(entry: &str, reference: &str, host: &str) -> bool {
        let host = canonical_host(&Host::parse(host).unwrap());
        grants(&[entry]).unwrap().permits(&SecretReference::parse(reference).unwrap(), &host)
    }

    #[test]
    fn secret_is_sent_only_to_its_hosts() {
        for (entry, reference, host, wanted) in [
            ("env:KEY@api.stripe.com", "env:KEY", "api.stripe.com", true),
            ("env:KEY@API.Stripe.com.", "env:KEY", "api.stripe.COM", true),
            (" env:KEY@api.stripe.com ", "env:KEY", "api.stripe.com.", true),
            ("env:KEY@api.stripe.com", "env:key", "api.stripe.com", false),
            ("env:KEY@api.stripe.com", "file:/KEY", "api.stripe.com", false),
            ("env:KEY@api.stripe.com", "env:KEY", "api.stripe.com.evil.example", false),
            ("env:KEY@api.stripe.com", "env:KEY", "x.api.stripe.com", false),
            ("env:KEY@stripe.com", "env:KEY", "evilstripe.com", false),
            ("file:/run/secrets/adyen@*.adyen.com", "file:/run/secrets/adyen", "a.adyen.com", true),
            ("file:/run/secrets/adyen@*.adyen.com", "file:/run/secrets/adyen", "adyen.com", false),
            ("file:/run/secrets/adyen@*.adyen.com", "file:/run/secrets/adyen", "a.b.adyen.com", false),
            ("file:/run/secrets/adyen@*.adyen.com", "file:/run/secrets/adyen", "evil-adyen.com", false),
            ("file:/run/secrets/adyen@*.adyen.com", "file:/run/secrets/x/../adyen", "a.adyen.com", false),
            ("file:/a@b@127.0.0.1", "file:/a@b", "127.0.0.1", true),
            ("file:/a@[::1]", "file:/a", "[0:0:0:0:0:0:0:1]", true),
            ("env:KEY@bücher.example", "env:KEY", "xn--bcher-kva.example", true),
        ] {
            assert_eq!(is_permitted(entry, reference, host), wanted, "{entry}: {reference} to {host}");
        }
    }

    #[test]
    fn invalid_entry_is_reported_without_its_text() {
        let bad = [
            "sk_live_hunter2",
            "env:sk_live_hunter2",
            "env:@x.example",
            "env:SLUICEGATE_OPS__TOKEN@x.example",
            "file:hunter2@x.example",
            "vault:hunter2@x.example",
            "env:KEY@",
            "env:KEY@*",
            "env:KEY@*.com",
            "env:KEY@*.*.hunter2.com",
            "env:KEY@api.*.hunter2.com",
            "env:KEY@*.10.0.0.1",
            "env:KEY@https://hunter2.example",
            "env:KEY@hunter2.example:443",
            "",
        ];
        let problems = grants(&bad).unwrap_err();
        assert_eq!(problems.len(), bad.len(), "{problems:?}");
        assert!(problems.iter().all(|problem| !problem.contains("hunter2")), "{problems:?}");
    }
}
