//! Bounds on a job's expansion: the largest body, addresses and headers that its requests may have.
//!
//! A form repeats a value's path before each value, and a template may repeat the payload. So a message of 64 KiB could
//! become gigabytes of request. Everything made from a job is written to a [`BoundedBuffer`], which stops at its bound.
//!
//! Invariant: a [`BoundedBuffer`] never reserves more than its bound.

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
            let capacity = (2 * self.bytes.capacity()).clamp(length, self.bytes_max);
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestBuildError {
    /// The job lacks a field that the row needs, or has one that leads to another address.
    Field(String),
    TooLarge(TooLarge),
}

impl fmt::Display for RequestBuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(problem) => f.write_str(problem),
            Self::TooLarge(too_large) => too_large.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn writes_never_reserve_beyond_the_bound(
            bytes_max in 0_usize..2_000,
            lengths in prop::collection::vec(0_usize..300, 0..40),
        ) {
            let mut bounded = BoundedBuffer::new(bytes_max);
            let mut written = 0;
            for length in lengths {
                let fits = written + length <= bytes_max;
                prop_assert_eq!(bounded.push(&"x".repeat(length)).is_ok(), fits);
                written += if fits { length } else { 0 };
                prop_assert_eq!(bounded.bytes.len(), written);
                prop_assert!(bounded.bytes.capacity() <= bytes_max);
            }
        }
    }
}
