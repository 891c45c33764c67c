//! Header values of a provider row: kept as references, resolved when a request is made, never printed.
//!
//! Refuses to keep a resolved value: it lives for one request, in types that redact themselves. Error texts name the
//! header and the reference, never what it held.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use secrecy::{ExposeSecret as _, SecretString};
use sha2::{Digest as _, Sha256};

use super::placeholder::{Part, split};
use super::request;
use super::secret_files::{FileContents, SecretFiles, Unread};
use crate::domain::expansion::HEADERS_BYTES_MAX;
use crate::domain::job::ID_CHARS_MAX;
use crate::domain::variable;
use crate::provider::FreezeError;

/// Hex digits of the fingerprint: enough to notice a change, useless for finding the value.
const FINGERPRINT_DIGITS: usize = 16;

/// Bytes beside each header's name and value: `: ` and the line's end.
pub(super) const SEPARATORS: usize = 4;
/// Largest headers of a row together, in bytes. The rest is for the headers that the client sets: content type and key have at
/// most 255 and 64 characters, and a host 253.
const ROW_HEADERS_BYTES_MAX: usize = HEADERS_BYTES_MAX - 1024;

/// What frames or routes the request belongs to the client alone, and what changes the answer's coding we cannot read.
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
pub(super) fn is_reserved(name: &HeaderName) -> bool {
    RESERVED.contains(&name.as_str())
}

#[derive(Debug)]
enum Source {
    /// Written in the row itself; redacted all the same, because somebody will write a secret there.
    Text(SecretString),
    Env(String),
    File(PathBuf),
    JobAccount,
}

/// The headers of one provider row.
pub(super) struct HeaderTemplates {
    headers: Vec<(HeaderName, Vec<Source>)>,
    files: SecretFiles,
}

/// Header values for one request. Prints names only.
pub(super) struct ResolvedHeaders(Vec<(HeaderName, SecretString)>);

impl HeaderTemplates {
    /// Checks names and references. `key_header` is set by the client and refused here.
    ///
    /// # Errors
    /// [`FreezeError::Header`] for the first header that cannot be meant.
    pub(super) fn parse(written: &BTreeMap<String, String>, key_header: &HeaderName) -> Result<Self, FreezeError> {
        let mut templates = Vec::with_capacity(written.len());
        for (name, value) in written {
            let refused = |problem: String| FreezeError::Header { header: name.clone(), problem };
            let parsed = HeaderName::try_from(name.as_str()).map_err(|_| refused("not a header name".to_owned()))?;
            if is_reserved(&parsed) || parsed == *key_header {
                return Err(refused("is set by the client; remove it from `headers`".to_owned()));
            }
            let parts = split(value).map_err(refused)?;
            let sources = parts.into_iter().map(source).collect::<Result<_, _>>().map_err(refused)?;
            templates.push((parsed, sources));
        }
        Ok(Self { headers: templates, files: SecretFiles::new() })
    }

    /// Reads every reference now, files off the runtime and in bounded time. A header that needs `${job:account}` is left out for a job without an account.
    ///
    /// # Errors
    /// [`FreezeError::Header`] when a reference cannot be read or its value cannot stand in a header;
    /// [`FreezeError::Local`] when this process can read no file now.
    pub(super) async fn resolve(&self, account: Option<&str>) -> Result<ResolvedHeaders, FreezeError> {
        let needs_account = |sources: &[Source]| sources.iter().any(|source| matches!(source, Source::JobAccount));
        let needed = || self.headers.iter().filter(|(_, sources)| account.is_some() || !needs_account(sources));
        let files = self.files.read(paths(needed())).await;
        let mut resolved = Vec::with_capacity(self.headers.len());
        let mut bytes = 0;
        for (name, sources) in needed() {
            let refused = |unread| match unread {
                Unread::Local(fault) => FreezeError::Local(fault),
                Unread::Problem(problem) => FreezeError::Header { header: name.to_string(), problem },
            };
            let mut value = String::new();
            bytes += name.as_str().len() + SEPARATORS;
            for source in sources {
                let part = read(source, account.unwrap_or_default(), &files).map_err(refused)?;
                // As if each account were the longest: whether a row's headers fit must not depend on the job.
                let is_account = matches!(source, Source::JobAccount);
                bytes += if is_account { ID_CHARS_MAX } else { part.expose_secret().len() };
                if bytes > ROW_HEADERS_BYTES_MAX {
                    let problem = format!("makes the headers longer than {ROW_HEADERS_BYTES_MAX} bytes");
                    return Err(refused(Unread::Problem(problem)));
                }
                value.push_str(part.expose_secret());
            }
            resolved.push((name.clone(), SecretString::from(value)));
        }
        Ok(ResolvedHeaders(resolved))
    }
}

impl HeaderTemplates {
    /// What of the references could not be read by this process now, one error per header; a job's account apart.
    pub(super) async fn unreadable(&self) -> Vec<FreezeError> {
        let files = self.files.read(paths(self.headers.iter())).await;
        let unreadable = |(name, sources): &(HeaderName, Vec<Source>)| {
            let unread = sources.iter().filter_map(|source| read(source, "", &files).err());
            let problems: Vec<String> = unread
                .map(|unread| match unread {
                    Unread::Local(fault) => fault.to_string(),
                    Unread::Problem(problem) => problem,
                })
                .collect();
            let refused = FreezeError::Header { header: name.to_string(), problem: problems.join("; ") };
            (!problems.is_empty()).then_some(refused)
        };
        let mut found: Vec<FreezeError> = self.headers.iter().filter_map(unreadable).collect();
        if found.is_empty() {
            // All can be read; a line break within one would be noticed by the first request.
            let standing = self.resolve(Some("account")).await;
            let standing = standing.and_then(|resolved| resolved.insert_into(&mut HeaderMap::new()));
            found.extend(standing.err());
        }
        found
    }
}

impl ResolvedHeaders {
    /// First 16 hex digits of SHA-256 over names and values, and over the name of the header with the idempotency key if it
    /// is not the usual one: a provider that is given the key under another name does not know it again.
    pub(super) fn fingerprint(&self, key_header: &HeaderName) -> String {
        let mut hash = Sha256::new();
        if key_header != request::KEY_HEADER {
            hash.update(key_header.as_str());
            hash.update([b'\n']);
        }
        for (name, value) in &self.0 {
            // Neither byte can occur in a name or a value, so two lists never run into the same bytes.
            hash.update(name.as_str());
            hash.update([0]);
            hash.update(value.expose_secret());
            hash.update([b'\n']);
        }
        let mut hex = hex::encode(hash.finalize());
        hex.truncate(FINGERPRINT_DIGITS);
        hex
    }

    /// Puts the values into a request's headers, marked so that no library prints or indexes them.
    ///
    /// # Errors
    /// [`FreezeError::Header`] when a value has a character that a header cannot hold (a line break, most likely).
    pub(super) fn insert_into(&self, headers: &mut HeaderMap) -> Result<(), FreezeError> {
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

impl fmt::Debug for ResolvedHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

fn source(part: Part) -> Result<Source, String> {
    let place = match part {
        Part::Text(text) => return Ok(Source::Text(text.into())),
        Part::Place(place) => place,
    };
    match place.split_once(':') {
        Some(("env", name)) if variable::is_own(name) => Err(format!(
            "`${{env:{name}}}` is a key of this program's own configuration: give the secret a name of its own"
        )),
        Some(("env", name)) if !name.is_empty() && !name.contains('=') => Ok(Source::Env(name.to_owned())),
        Some(("file", path)) if Path::new(path).is_absolute() => Ok(Source::File(path.into())),
        Some(("file", _)) => Err("`${file:…}` needs an absolute path".to_owned()),
        Some(("job", "account")) => Ok(Source::JobAccount),
        _ => Err("only ${env:NAME}, ${file:PATH} and ${job:account} can stand in a header".to_owned()),
    }
}

/// The files that these headers refer to.
fn paths<'a>(headers: impl Iterator<Item = &'a (HeaderName, Vec<Source>)>) -> Vec<PathBuf> {
    let path = |source: &Source| match source {
        Source::File(path) => Some(path.clone()),
        Source::Text(_) | Source::Env(_) | Source::JobAccount => None,
    };
    headers.flat_map(|(_, sources)| sources).filter_map(path).collect()
}

/// `files` holds what was read of the files.
fn read(source: &Source, account: &str, files: &FileContents) -> Result<SecretString, Unread> {
    let unset = |name: &str, problem: &str| Err(Unread::Problem(format!("environment variable `{name}` {problem}")));
    match source {
        Source::Text(text) => Ok(text.clone()),
        Source::JobAccount => Ok(account.into()),
        Source::Env(name) => match std::env::var(name) {
            Ok(value) if value.is_empty() => unset(name, "is empty"),
            Ok(value) => Ok(value.into()),
            Err(std::env::VarError::NotPresent) => unset(name, "is not set"),
            Err(std::env::VarError::NotUnicode(_)) => unset(name, "is not UTF-8"),
        },
        Source::File(path) => {
            let content = files.get(path).cloned();
            content.unwrap_or_else(|| Err(Unread::Problem("was not read".to_owned()))).map_err(|unread| match unread {
                Unread::Problem(problem) => Unread::Problem(format!("file `{}`: {problem}", path.display())),
                local @ Unread::Local(_) => local,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: HeaderName = HeaderName::from_static("idempotency-key");

    fn parse(headers: &[(&str, &str)]) -> Result<HeaderTemplates, FreezeError> {
        let written = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        HeaderTemplates::parse(&written, &KEY)
    }

    async fn values(templates: &HeaderTemplates, account: Option<&str>) -> Vec<(String, String)> {
        let mut headers = HeaderMap::new();
        templates.resolve(account).await.unwrap().insert_into(&mut headers).unwrap();
        assert!(headers.values().all(HeaderValue::is_sensitive));
        headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect()
    }

    /// Whoever writes rows must not have the worker's own secrets sent anywhere.
    #[test]
    fn the_programs_own_configuration_is_no_secret_of_a_provider() {
        let refused = parse(&[("x-a", "${env:SLUICEGATE_OPS__TOKEN}")]).err().unwrap().to_string();
        assert!(refused.contains("x-a") && refused.contains("SLUICEGATE_OPS__TOKEN"), "{refused}");
        parse(&[("x-a", "${env:SLUICEGATE_ACME_KEY}")]).unwrap();
    }

    #[tokio::test]
    async fn references_are_read_when_asked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "hunter2\n").unwrap();
        let written = format!("Bearer ${{file:{}}}", path.display());
        let templates = parse(&[("authorization", &written), ("x-path", "${env:PATH}")]).unwrap();
        let path_now = std::env::var("PATH").unwrap();
        let wanted = [("authorization", "Bearer hunter2"), ("x-path", &path_now)];
        assert_eq!(values(&templates, None).await, wanted.map(|(n, v)| (n.to_owned(), v.to_owned())));
        let before = templates.resolve(None).await.unwrap().fingerprint(&KEY);
        std::fs::write(&path, "hunter3").unwrap();
        assert_eq!(values(&templates, None).await[0].1, "Bearer hunter3");
        assert!(templates.unreadable().await.is_empty());
        let after = templates.resolve(None).await.unwrap().fingerprint(&KEY);
        assert!(before != after && before.len() == 16, "{before} {after}");
        let under_another_name = HeaderName::from_static("x-key");
        assert_ne!(templates.resolve(None).await.unwrap().fingerprint(&under_another_name), after);
    }

    #[tokio::test]
    async fn a_job_without_an_account_goes_without_the_header_that_names_it() {
        let templates = parse(&[("stripe-account", "acct_${job:account}"), ("x-fixed", "1")]).unwrap();
        assert_eq!(values(&templates, Some("7")).await[0].1, "acct_7");
        assert_eq!(values(&templates, None).await, [("x-fixed".to_owned(), "1".to_owned())]);
        let fingerprint = async |account| templates.resolve(account).await.unwrap().fingerprint(&KEY);
        assert_ne!(fingerprint(Some("7")).await, fingerprint(Some("8")).await);
    }

    #[test]
    fn what_cannot_be_meant_is_refused_at_once() {
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
    async fn what_cannot_be_read_is_an_error_that_says_where() {
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
            let error = templates.resolve(None).await.unwrap_err().to_string();
            assert!(error.contains("authorization"), "{error}");
            let found: Vec<String> = templates.unreadable().await.iter().map(ToString::to_string).collect();
            assert_eq!(found, [error]);
        }
        let two_lines = file("two-lines", b"hunter2\r\nx-injected: 1");
        let resolved = parse(&[("authorization", &two_lines)]).unwrap().resolve(None).await.unwrap();
        let error = resolved.insert_into(&mut HeaderMap::new()).unwrap_err().to_string();
        let found = parse(&[("authorization", &two_lines)]).unwrap().unreadable().await;
        assert_eq!(found.iter().map(ToString::to_string).collect::<Vec<_>>(), [error.as_str()]);
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[tokio::test]
    async fn nothing_prints_a_value() {
        let templates = parse(&[("authorization", "Bearer hunter2")]).unwrap();
        let resolved = templates.resolve(None).await.unwrap();
        let mut headers = HeaderMap::new();
        resolved.insert_into(&mut headers).unwrap();
        let printed = format!("{templates:?} {resolved:?} {headers:?} {:?}", templates.headers);
        assert!(printed.contains("authorization") && !printed.contains("hunter2"), "{printed}");
    }
}
