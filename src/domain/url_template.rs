//! Address with placeholders for a job's fields: `https://api.example.com/payments/${job:reference}/captures`.
//!
//! Placeholders are allowed in path and query only, so a job never decides which host is called. Every field is
//! percent-encoded into the address. A field that would change the path is an error.

use std::io;

use super::expansion::{BoundedBuffer, RequestBuildError, RequestPart, TooLarge};
use super::job::Job;

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

const PLACEHOLDERS: &str = "${job:id}, ${job:idempotency_key}, ${job:reference} or ${job:account}";

impl UrlTemplate {
    /// Parses the placeholders. The caller validates the address by its [sample](Self::sample).
    ///
    /// # Errors
    /// If a placeholder is wrong; the text says how to fix it. It never quotes the address, which may hold a secret.
    pub fn parse(text: &str) -> Result<Self, String> {
        let template = Self { parts: parts(text)? };
        if template.has_placeholders() && !template.host_is_fixed() {
            return Err("has a placeholder in its host: put placeholders after it, in path or query".to_owned());
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

fn parts(text: &str) -> Result<Vec<UrlPart>, String> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some((before, opened)) = rest.split_once("${") {
        let (name, after) = opened.split_once('}').ok_or("has a `${` that is never closed by `}`")?;
        if !before.is_empty() {
            parts.push(UrlPart::Text(before.to_owned()));
        }
        parts.push(UrlPart::Field(match name.strip_prefix("job:").unwrap_or(name) {
            "id" => UrlField::Id,
            "account" => UrlField::Account,
            "reference" => UrlField::Reference,
            "idempotency_key" => UrlField::IdempotencyKey,
            _ => return Err(format!("has an unknown placeholder: use {PLACEHOLDERS}")),
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
#[path = "url_template_tests.rs"]
mod tests;
