//! Header values of a provider row: stored as references, resolved for each request, never printed.
//!
//! A resolved value lives for one request, in types that redact themselves. Error texts name the header and the
//! reference, never the value.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use secrecy::{ExposeSecret as _, SecretString};
use sha2::{Digest as _, Sha256};

use super::outbound::OutboundPolicy;
use super::request;
use super::secret_files::{FileContents, SecretFiles, SecretReadError};
use super::template::{TemplatePart, split_placeholders};
use crate::domain::expansion::HEADERS_BYTES_MAX;
use crate::domain::job::ID_CHARS_MAX;
use crate::provider::FreezeError;
use crate::provider::secret_grants::{SecretGrants, SecretReference, SecretReferenceError, SecretUse};

/// Hex digits of the fingerprint: enough to notice a change, useless for finding the value.
const FINGERPRINT_DIGITS: usize = 16;

/// Bytes that each header has beside its name and value: `: ` and the line end.
pub const HEADER_OVERHEAD_BYTES: usize = 4;
/// Largest total of a row's headers, in bytes. The rest is for the headers that the client sets: a content type has at
/// most 255 characters, a key 64 and a host 253.
const ROW_HEADERS_BYTES_MAX: usize = HEADERS_BYTES_MAX - 1024;

/// Headers that frame or route a request, which only the client sets, and `accept-encoding`: we ask for no encoded
/// response.
const RESERVED: [&str; 11] = [
    "accept-encoding",
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Whether no row may name this header.
pub fn is_reserved(name: &HeaderName) -> bool {
    RESERVED.contains(&name.as_str())
}

#[derive(Debug)]
enum ValueSource {
    /// Text of the row itself. It is redacted too, because an operator may write a secret there.
    Text(SecretString),
    Secret(SecretReference),
    JobAccount,
}

/// The headers of one provider row.
pub struct HeaderTemplates {
    headers: Vec<(HeaderName, Vec<ValueSource>)>,
    grants: SecretGrants,
    files: SecretFiles,
}

/// Header values for one request, which redact themselves.
#[derive(Debug)]
pub struct ResolvedHeaders(Vec<(HeaderName, SecretString)>);

impl HeaderTemplates {
    /// Checks names and references. The client sets `key_header`, so a row may not. [`Self::check_grants`] checks
    /// whether the secrets may be sent, because it knows the hosts.
    ///
    /// # Errors
    /// [`FreezeError::Header`] for the first invalid header.
    pub fn parse(
        written: &BTreeMap<String, String>,
        key_header: &HeaderName,
        outbound: &OutboundPolicy,
    ) -> Result<Self, FreezeError> {
        let mut templates = Vec::with_capacity(written.len());
        for (name, value) in written {
            let refused = |problem: String| FreezeError::Header { header: name.clone(), problem };
            let parsed = HeaderName::try_from(name.as_str()).map_err(|_| refused("not a header name".to_owned()))?;
            if is_reserved(&parsed) || parsed == *key_header {
                return Err(refused("is set by the client; remove it from `headers`".to_owned()));
            }
            let parts = split_placeholders(value).map_err(refused)?;
            let sources = parts.into_iter().map(parse_source).collect::<Result<_, _>>().map_err(refused)?;
            templates.push((parsed, sources));
        }
        let files = SecretFiles::new(&outbound.own_files);
        Ok(Self { headers: templates, grants: outbound.secret_grants.clone(), files })
    }

    /// The row's secrets, each with the header that carries it.
    pub fn references(&self) -> impl Iterator<Item = (&HeaderName, &SecretReference)> {
        self.headers.iter().flat_map(|(name, sources)| {
            sources.iter().filter_map(move |source| match source {
                ValueSource::Secret(reference) => Some((name, reference)),
                ValueSource::Text(_) | ValueSource::JobAccount => None,
            })
        })
    }

    /// Checks that each secret may be sent to each of these hosts.
    ///
    /// # Errors
    /// [`FreezeError::Header`] for the first secret that may not, with the configuration change that allows all.
    pub fn check_grants(&self, hosts: &[impl AsRef<str>]) -> Result<(), FreezeError> {
        let refused = |(name, reference)| {
            let refused =
                hosts.iter().map(AsRef::<str>::as_ref).filter(move |host| !self.grants.permits(reference, host));
            refused.map(move |host| (name, SecretUse { reference: reference.clone(), host: host.to_owned() }))
        };
        let refused: Vec<(&HeaderName, SecretUse)> = self.references().flat_map(refused).collect();
        let Some((header, SecretUse { reference, host })) = refused.first() else { return Ok(()) };
        let missing: Vec<SecretUse> = refused.iter().map(|(_, used)| used.clone()).collect();
        let fix = self.grants.fix_hint(&missing);
        let problem = format!("`${{{reference}}}` may not be sent to {host}: {fix}");
        Err(FreezeError::Header { header: header.to_string(), problem })
    }

    /// Reads every reference now, for a request to this host. Files are read off the runtime and in bounded time. A
    /// header that needs `${job:account}` is left out for a job without an account.
    ///
    /// # Errors
    /// [`FreezeError::Header`] when a reference may not be sent there or cannot be read, or when the headers are too
    /// long; [`FreezeError::Local`] when this process can read no file now.
    pub async fn resolve(&self, account: Option<&str>, host: &str) -> Result<ResolvedHeaders, FreezeError> {
        self.check_grants(&[host])?;
        let needs_account =
            |sources: &[ValueSource]| sources.iter().any(|source| matches!(source, ValueSource::JobAccount));
        let needed = || self.headers.iter().filter(|(_, sources)| account.is_some() || !needs_account(sources));
        let files = self.files.read_all(secret_paths(needed())).await;
        let mut resolved = Vec::with_capacity(self.headers.len());
        let mut bytes = 0;
        for (name, sources) in needed() {
            let refused = |unread| match unread {
                SecretReadError::Local(fault) => FreezeError::Local(fault),
                SecretReadError::Problem(problem) => FreezeError::Header { header: name.to_string(), problem },
            };
            let mut value = String::new();
            bytes += name.as_str().len() + HEADER_OVERHEAD_BYTES;
            for source in sources {
                let part = read_source(source, account.unwrap_or_default(), &files).map_err(refused)?;
                // Each account counts as the longest: whether a row's headers fit must not depend on the job.
                let is_account = matches!(source, ValueSource::JobAccount);
                bytes += if is_account { ID_CHARS_MAX } else { part.expose_secret().len() };
                if bytes > ROW_HEADERS_BYTES_MAX {
                    let problem = format!("makes the headers longer than {ROW_HEADERS_BYTES_MAX} bytes");
                    return Err(refused(SecretReadError::Problem(problem)));
                }
                value.push_str(part.expose_secret());
            }
            resolved.push((name.clone(), SecretString::from(value)));
        }
        Ok(ResolvedHeaders(resolved))
    }

    /// References that this process cannot read now, one error per header. A job's account is not checked. `host` is
    /// one that the secrets may be sent to.
    pub async fn unreadable(&self, host: &str) -> Vec<FreezeError> {
        let files = self.files.read_all(secret_paths(self.headers.iter())).await;
        let unreadable = |(name, sources): &(HeaderName, Vec<ValueSource>)| {
            let unread = sources.iter().filter_map(|source| read_source(source, "", &files).err());
            let problems: Vec<String> = unread.map(|unread| unread.to_string()).collect();
            let refused = FreezeError::Header { header: name.to_string(), problem: problems.join("; ") };
            (!problems.is_empty()).then_some(refused)
        };
        let mut found: Vec<FreezeError> = self.headers.iter().filter_map(unreadable).collect();
        if found.is_empty() {
            // All can be read. A line break in a value would otherwise be noticed by the first request.
            let resolved = self.resolve(Some("account"), host).await;
            let inserted = resolved.and_then(|resolved| resolved.insert_into(&mut HeaderMap::new()));
            found.extend(inserted.err());
        }
        found
    }
}

impl ResolvedHeaders {
    /// First 16 hex digits of SHA-256 over names and values. The name of the idempotency key's header is included if it
    /// is not the usual one: a provider does not recognise a key that comes under another name.
    pub fn fingerprint(&self, key_header: &HeaderName) -> String {
        let mut hash = Sha256::new();
        if key_header != request::KEY_HEADER {
            hash.update(key_header.as_str());
            hash.update([b'\n']);
        }
        for (name, value) in &self.0 {
            // Neither byte can occur in a name or a value, so two lists never hash the same bytes.
            hash.update(name.as_str());
            hash.update([0]);
            hash.update(value.expose_secret());
            hash.update([b'\n']);
        }
        hex::encode(&hash.finalize()[..FINGERPRINT_DIGITS / 2])
    }

    /// Puts the values into a request's headers, marked so that no library prints or indexes them.
    ///
    /// # Errors
    /// [`FreezeError::Header`] when a value has a character that a header cannot hold, most likely a line break.
    pub fn insert_into(&self, headers: &mut HeaderMap) -> Result<(), FreezeError> {
        for (name, value) in &self.0 {
            let mut value = HeaderValue::from_str(value.expose_secret()).map_err(|_| FreezeError::Header {
                header: name.to_string(),
                problem: "its value has a character that a header cannot hold".to_owned(),
            })?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        Ok(())
    }
}

impl fmt::Debug for HeaderTemplates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.headers.iter().map(|(name, _)| name)).finish()
    }
}

fn parse_source(part: TemplatePart) -> Result<ValueSource, String> {
    let name = match part {
        TemplatePart::Text(text) => return Ok(ValueSource::Text(text.into())),
        TemplatePart::Placeholder(name) => name,
    };
    if name == "job:account" {
        return Ok(ValueSource::JobAccount);
    }
    SecretReference::parse(&name).map(ValueSource::Secret).map_err(|error| match error {
        SecretReferenceError::ConfigVariable => {
            format!("`${{{name}}}` is a key of this program's own configuration: rename the secret's variable")
        }
        SecretReferenceError::RelativePath => "`${file:…}` needs an absolute path".to_owned(),
        SecretReferenceError::Other => {
            "placeholders of a header can only be ${env:NAME}, ${file:PATH} and ${job:account}".to_owned()
        }
    })
}

/// Paths of the files that these headers refer to.
fn secret_paths<'a>(headers: impl Iterator<Item = &'a (HeaderName, Vec<ValueSource>)>) -> Vec<PathBuf> {
    let path = |source: &ValueSource| match source {
        ValueSource::Secret(SecretReference::File(path)) => Some(path.clone()),
        ValueSource::Secret(SecretReference::Env(_)) | ValueSource::Text(_) | ValueSource::JobAccount => None,
    };
    headers.flat_map(|(_, sources)| sources).filter_map(path).collect()
}

/// Value of one source. `files` has the contents of all files that the row names.
fn read_source(source: &ValueSource, account: &str, files: &FileContents) -> Result<SecretString, SecretReadError> {
    let unset =
        |name: &str, problem: &str| Err(SecretReadError::Problem(format!("environment variable `{name}` {problem}")));
    match source {
        ValueSource::Text(text) => Ok(text.clone()),
        ValueSource::JobAccount => Ok(account.into()),
        ValueSource::Secret(SecretReference::Env(name)) => match std::env::var(name) {
            Ok(value) if value.is_empty() => unset(name, "is empty"),
            Ok(value) => Ok(value.into()),
            Err(std::env::VarError::NotPresent) => unset(name, "is not set"),
            Err(std::env::VarError::NotUnicode(_)) => unset(name, "is not UTF-8"),
        },
        ValueSource::Secret(SecretReference::File(path)) => {
            let unread = || Err(SecretReadError::Problem("was not read".to_owned()));
            files.get(path).cloned().unwrap_or_else(unread).map_err(|unread| match unread {
                SecretReadError::Problem(problem) => {
                    SecretReadError::Problem(format!("file `{}`: {problem}", path.display()))
                }
                local @ SecretReadError::Local(_) => local,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: HeaderName = HeaderName::from_static("idempotency-key");

    /// Headers whose secrets may all be sent to `x.example`.
    fn parse(headers: &[(&str, &str)]) -> Result<HeaderTemplates, FreezeError> {
        let written = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let mut templates = HeaderTemplates::parse(&written, &KEY, &OutboundPolicy::default())?;
        let entries: Vec<String> =
            templates.references().map(|(_, reference)| format!("{reference}@x.example")).collect();
        templates.grants = SecretGrants::parse(&entries).unwrap();
        Ok(templates)
    }

    async fn resolve(templates: &HeaderTemplates, account: Option<&str>) -> Result<ResolvedHeaders, FreezeError> {
        templates.resolve(account, "x.example").await
    }

    async fn unreadable(templates: &HeaderTemplates) -> Vec<FreezeError> {
        templates.unreadable("x.example").await
    }

    #[tokio::test]
    async fn secret_is_resolved_only_for_its_hosts() {
        let templates = parse(&[("authorization", "Bearer ${env:PATH}"), ("x-a", "${file:/run/a\"b}")]).unwrap();
        templates.check_grants(&["x.example"]).unwrap();
        let elsewhere = templates.resolve(None, "evil.example").await.unwrap_err().to_string();
        let wanted = "header `authorization`: `${env:PATH}` may not be sent to evil.example: to allow \
                      it, add \"env:PATH@evil.example\", \"file:/run/a\\\"b@evil.example\" to outbound.secrets in the \
                      workers' configuration";
        assert_eq!(elsewhere, wanted);
    }

    async fn values(templates: &HeaderTemplates, account: Option<&str>) -> Vec<(String, String)> {
        let mut headers = HeaderMap::new();
        resolve(templates, account).await.unwrap().insert_into(&mut headers).unwrap();
        assert!(headers.values().all(HeaderValue::is_sensitive));
        headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect()
    }

    /// An operator who writes rows must not have the worker's own secrets sent anywhere.
    #[test]
    fn own_configuration_is_rejected_as_secret() {
        let refused = parse(&[("x-a", "${env:SLUICEGATE_OPS__TOKEN}")]).err().unwrap().to_string();
        assert!(refused.contains("x-a") && refused.contains("SLUICEGATE_OPS__TOKEN"), "{refused}");
        parse(&[("x-a", "${env:SLUICEGATE_ACME_KEY}")]).unwrap();
    }

    #[tokio::test]
    async fn references_are_resolved_at_each_request() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "hunter2\n").unwrap();
        let written = format!("Bearer ${{file:{}}}", path.display());
        let templates = parse(&[("authorization", &written), ("x-path", "${env:PATH}")]).unwrap();
        let path_now = std::env::var("PATH").unwrap();
        let wanted = [("authorization", "Bearer hunter2"), ("x-path", &path_now)];
        assert_eq!(values(&templates, None).await, wanted.map(|(n, v)| (n.to_owned(), v.to_owned())));
        let before = resolve(&templates, None).await.unwrap().fingerprint(&KEY);
        std::fs::write(&path, "hunter3").unwrap();
        assert_eq!(values(&templates, None).await[0].1, "Bearer hunter3");
        assert!(unreadable(&templates).await.is_empty());
        let after = resolve(&templates, None).await.unwrap().fingerprint(&KEY);
        assert!(before != after && before.len() == 16, "{before} {after}");
        let under_another_name = HeaderName::from_static("x-key");
        assert_ne!(resolve(&templates, None).await.unwrap().fingerprint(&under_another_name), after);
    }

    #[tokio::test]
    async fn account_header_is_omitted_without_account() {
        let templates = parse(&[("stripe-account", "acct_${job:account}"), ("x-fixed", "1")]).unwrap();
        assert_eq!(values(&templates, Some("7")).await[0].1, "acct_7");
        assert_eq!(values(&templates, None).await, [("x-fixed".to_owned(), "1".to_owned())]);
        let fingerprint = async |account| resolve(&templates, account).await.unwrap().fingerprint(&KEY);
        assert_ne!(fingerprint(Some("7")).await, fingerprint(Some("8")).await);
    }

    #[test]
    fn invalid_headers_are_rejected_at_parsing() {
        for (name, value) in [
            ("bad name", "x"),
            ("x", "${env:KEY"),
            ("x", "${vault:KEY}"),
            ("x", "${env:}"),
            ("x", "${file:relative}"),
            ("x", "${job:id}"),
            ("Content-Length", "5"),
            ("Transfer-Encoding", "chunked"),
            ("HOST", "elsewhere"),
            ("Idempotency-Key", "x"),
        ] {
            assert!(matches!(parse(&[(name, value)]), Err(FreezeError::Header { .. })), "{name}: {value}");
        }
    }

    #[tokio::test]
    async fn unreadable_reference_error_names_the_source() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &[u8]| {
            std::fs::write(dir.path().join(name), content).unwrap();
            format!("${{file:{}}}", dir.path().join(name).display())
        };
        let long = vec![b'x'; 17 * 1024];
        let whole = file("whole", &vec![b'x'; 15 * 1024]);
        let broken = [
            "${env:SLUICEGATE_NO_SUCH_VARIABLE}".to_owned(),
            format!("${{file:{}}}", dir.path().join("missing").display()),
            file("empty", b"\n"),
            file("binary", &[0xff, 0xfe]),
            file("long", &long),
            whole,
        ];
        for value in broken {
            let templates = parse(&[("authorization", &value), ("x-path", "${env:PATH}")]).unwrap();
            let error = resolve(&templates, None).await.unwrap_err().to_string();
            assert!(error.contains("authorization"), "{error}");
            let found: Vec<String> = unreadable(&templates).await.iter().map(ToString::to_string).collect();
            assert_eq!(found, [error]);
        }
        let two_lines = file("two-lines", b"hunter2\r\nx-injected: 1");
        let resolved = resolve(&parse(&[("authorization", &two_lines)]).unwrap(), None).await.unwrap();
        let error = resolved.insert_into(&mut HeaderMap::new()).unwrap_err().to_string();
        let found = unreadable(&parse(&[("authorization", &two_lines)]).unwrap()).await;
        assert_eq!(found.iter().map(ToString::to_string).collect::<Vec<_>>(), [error.as_str()]);
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[tokio::test]
    async fn debug_output_has_no_secret() {
        let templates = parse(&[("authorization", "Bearer hunter2")]).unwrap();
        let resolved = resolve(&templates, None).await.unwrap();
        let mut headers = HeaderMap::new();
        resolved.insert_into(&mut headers).unwrap();
        let printed = format!("{templates:?} {resolved:?} {headers:?} {:?}", templates.headers);
        assert!(printed.contains("authorization") && !printed.contains("hunter2"), "{printed}");
    }
}
