//! Expansion of a job into its requests: addresses by template (`https://api.example.com/pay/${job:id}`), and the bounds
//! on body, addresses and headers.
//!
//! A form repeats a value's path before each value, and a template may repeat the payload. So a message of 64 KiB could
//! become gigabytes of request. Everything made from a job is written to a [`BoundedBuffer`], which stops at its bound.
//!
//! Invariant: a [`BoundedBuffer`] never reserves more than its bound.
//!
//! Placeholders are allowed in path and query only, so a job never decides which host is called. Every field is
//! percent-encoded into the address. A field that would change the path is an error.

use std::fmt;
use std::io;

use super::job::Job;

/// Largest request body, in bytes: sixteen times the largest message, and the common maximum of proxies (nginx: 1 MiB).
pub const REQUEST_BODY_BYTES_MAX: usize = 1024 * 1024;
/// Longest address of a request, in bytes: the common maximum of servers for a request line.
pub const URL_BYTES_MAX: usize = 8 * 1024;
/// Largest total of a request's headers, in bytes, names and separators included: the common maximum of servers.
pub const HEADERS_BYTES_MAX: usize = 16 * 1024;
/// Longest template of a request body in a provider row, in bytes. Each placeholder reads the payload again.
pub const TEMPLATE_BYTES_MAX: usize = 16 * 1024;
/// First capacity of a [`BoundedBuffer`], in bytes: most bodies and addresses fit.
const CAPACITY_MIN: usize = 256;

/// Bytes up to a bound, in memory that never exceeds it.
#[derive(Debug)]
pub struct BoundedBuffer {
    bytes: Vec<u8>,
    bytes_max: usize,
}

impl BoundedBuffer {
    pub fn new(bytes_max: usize) -> Self {
        Self { bytes: Vec::new(), bytes_max }
    }

    /// Appends the whole text, or nothing.
    ///
    /// # Errors
    /// If it does not fit; the kind is always [`io::ErrorKind::FileTooLarge`].
    pub fn push(&mut self, text: &str) -> io::Result<()> {
        self.append(text.as_bytes())
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let length = self.bytes.len() + bytes.len();
        if length > self.bytes_max {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        if length > self.bytes.capacity() {
            // Capacity doubles as in any vector, but never beyond the bound.
            let capacity = (2 * self.bytes.capacity()).max(CAPACITY_MIN).clamp(length, self.bytes_max);
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }
}

impl io::Write for BoundedBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.append(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Part of a request that is made from a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestPart {
    Body,
    Url,
    LookupUrl,
}

impl RequestPart {
    /// Name in errors; an address has the name of its column.
    pub fn name(self) -> &'static str {
        match self {
            Self::Body => "request body",
            Self::Url => "url",
            Self::LookupUrl => "lookup.url",
        }
    }

    pub fn bytes_max(self) -> usize {
        match self {
            Self::Body => REQUEST_BODY_BYTES_MAX,
            Self::Url | Self::LookupUrl => URL_BYTES_MAX,
        }
    }
}

/// A job that makes a part of its request too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// The message field that causes it.
    field: &'static str,
    part: RequestPart,
}

impl TooLarge {
    pub fn new(part: RequestPart, job: &Job) -> Self {
        let field = match part {
            RequestPart::Body if job.payload.is_some() => "payload",
            // If no payload causes it, the longest of the other fields does.
            _ if job.reference.is_some() => "reference",
            _ => "id",
        };
        Self { field, part }
    }
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (field, part, bytes_max) = (self.field, self.part.name(), self.part.bytes_max());
        let fix = match self.part {
            RequestPart::Body => "send less of it, or with shorter names",
            RequestPart::Url | RequestPart::LookupUrl => "send a shorter one",
        };
        write!(f, "{field}: the {part} that the provider's row makes of it exceeds {bytes_max} bytes: {fix}")
    }
}

/// Reason why no request can be made from a job; other jobs of the lane may be fine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestBuildError {
    /// The job lacks a field that the row needs, or has one that leads to another address.
    #[error("{0}")]
    Field(String),
    #[error("{0}")]
    TooLarge(TooLarge),
}

/// A validated `url` or `lookup.url` of a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UrlTemplate {
    parts: Vec<UrlPart>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum UrlPart {
    Text(String),
    Field(UrlField),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UrlField {
    Id,
    Account,
    Reference,
    IdempotencyKey,
}

/// Why an address is no template, and the fix. It never quotes the address, which may hold a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTemplate {
    #[error("has a placeholder in its host: put placeholders after it, in path or query")]
    PlaceholderInHost,
    #[error("has a `${{` that is never closed by `}}`")]
    Unclosed,
    #[error(
        "has an unknown placeholder: use ${{job:id}}, ${{job:idempotency_key}}, ${{job:reference}} or ${{job:account}}"
    )]
    UnknownPlaceholder,
    #[error("names no payment, so every payment would get the same answer: put ${{job:id}} in it")]
    NamesNoPayment,
}

impl UrlTemplate {
    /// Parses the placeholders. The caller validates the address by its [sample](Self::sample).
    pub fn parse(text: &str) -> Result<Self, InvalidTemplate> {
        let template = Self { parts: parts(text)? };
        if template.has_placeholders() && !template.host_is_fixed() {
            return Err(InvalidTemplate::PlaceholderInHost);
        }
        Ok(template)
    }

    pub fn has_placeholders(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, UrlPart::Field(_)))
    }

    /// Whether two payments of one account get different addresses.
    pub fn names_payment(&self) -> bool {
        self.parts.iter().any(|part| matches!(part, UrlPart::Field(field) if *field != UrlField::Account))
    }

    /// URL parsers skip slashes before the host, so there must be exactly two.
    fn host_is_fixed(&self) -> bool {
        let Some(UrlPart::Text(first)) = self.parts.first() else { return false };
        let Some((_, rest)) = first.split_once("://") else { return false };
        rest.find(['/', '\\', '?', '#']).is_some_and(|end| end > 0)
    }

    /// The address with `x` at every placeholder, to check its host.
    pub fn sample(&self) -> String {
        let fill = |part: &UrlPart| match part {
            UrlPart::Text(text) => text.clone(),
            UrlPart::Field(_) => "x".to_owned(),
        };
        self.parts.iter().map(fill).collect()
    }

    /// The address for this job; `part` is named in the error.
    ///
    /// # Errors
    /// If the job has no value for a placeholder, or its value would change the path or make the address too long.
    pub fn for_job(&self, job: &Job, part: RequestPart) -> Result<String, RequestBuildError> {
        let too_large = |_: io::Error| RequestBuildError::TooLarge(TooLarge::new(part, job));
        let mut address = BoundedBuffer::new(part.bytes_max());
        for piece in &self.parts {
            match piece {
                UrlPart::Text(text) => address.push(text).map_err(too_large)?,
                UrlPart::Field(field) => push_encoded(&mut address, value(*field, job, part)?).map_err(too_large)?,
            }
        }
        // Only complete texts were written.
        let address = String::from_utf8(address.into_bytes()).unwrap_or_default();
        if self.has_placeholders() && has_dot_segment(&address) {
            return Err(RequestBuildError::Field(format!(
                "a field of the job would change the path of {}",
                part.name()
            )));
        }
        Ok(address)
    }
}

/// Whether a segment of the path is `.` or `..`; percent-encoding does not change their meaning.
/// <https://url.spec.whatwg.org/#double-dot-path-segment>
fn has_dot_segment(address: &str) -> bool {
    let path = address.split(['?', '#']).next().unwrap_or_default().to_ascii_lowercase().replace("%2e", ".");
    path.split(['/', '\\']).any(|segment| matches!(segment, "." | ".."))
}

fn parts(text: &str) -> Result<Vec<UrlPart>, InvalidTemplate> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some((before, opened)) = rest.split_once("${") {
        let (name, after) = opened.split_once('}').ok_or(InvalidTemplate::Unclosed)?;
        if !before.is_empty() {
            parts.push(UrlPart::Text(before.to_owned()));
        }
        parts.push(UrlPart::Field(match name.strip_prefix("job:").unwrap_or(name) {
            "id" => UrlField::Id,
            "account" => UrlField::Account,
            "reference" => UrlField::Reference,
            "idempotency_key" => UrlField::IdempotencyKey,
            _ => return Err(InvalidTemplate::UnknownPlaceholder),
        }));
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(UrlPart::Text(rest.to_owned()));
    }
    Ok(parts)
}

fn value(field: UrlField, job: &Job, part: RequestPart) -> Result<&str, RequestBuildError> {
    let (name, value) = match field {
        UrlField::Id => ("id", Some(job.id.as_str())),
        UrlField::IdempotencyKey => ("idempotency_key", Some(job.effective_key().as_str())),
        UrlField::Account => ("account", job.account.as_ref().map(|account| account.as_str())),
        UrlField::Reference => ("reference", job.reference.as_deref()),
    };
    let missing = || RequestBuildError::Field(format!("the job has no {name}, which {} needs", part.name()));
    value.filter(|value| !value.is_empty()).ok_or_else(missing)
}

/// Percent-encodes everything but the unreserved characters. <https://www.rfc-editor.org/rfc/rfc3986#section-2.3>
fn push_encoded(address: &mut BoundedBuffer, value: &str) -> io::Result<()> {
    let mut encoded = String::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    address.push(&encoded)
}

#[cfg(test)]
#[path = "expansion_tests.rs"]
mod tests;
