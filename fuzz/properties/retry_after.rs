//! The Retry-After parser: the longest wait that is named, within its bound, and zero for a wait that cannot be read.

use std::time::{Duration, SystemTime};

use reqwest::header::{DATE, HeaderMap, HeaderValue, RETRY_AFTER};
use sluicegate::provider::http::waits::{RETRY_AFTER_MAX, retry_after};

use super::Bytes;

/// Input: the first line is the response's `Date`, or none if it is empty. Each other line is a `Retry-After`.
pub fn holds(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let date = HeaderValue::from_bytes(bytes.until(b'\n')).ok().filter(|date| !date.is_empty());
    let mut values = Vec::new();
    while !bytes.0.is_empty() && values.len() < 8 {
        values.extend(HeaderValue::from_bytes(bytes.until(b'\n')));
    }
    let whole = read(date.as_ref(), &values);
    let alone: Vec<Option<Duration>> =
        values.iter().map(|value| read(date.as_ref(), std::slice::from_ref(value))).collect();
    assert_eq!(whole, alone.iter().copied().flatten().max());
    assert!(whole.is_none_or(|wait| wait <= RETRY_AFTER_MAX));
    for (value, wait) in values.iter().zip(alone) {
        let text = value.to_str().unwrap_or_default().trim();
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            let meant = text.parse().map_or(RETRY_AFTER_MAX, Duration::from_secs).min(RETRY_AFTER_MAX);
            assert_eq!((wait, read(None, std::slice::from_ref(value))), (Some(meant), Some(meant)));
        }
        // A value that is no text names no wait that can be read.
        assert!(wait.is_some() && (value.to_str().is_ok() || wait.is_some_and(|wait| wait.is_zero())));
    }
}

fn read(date: Option<&HeaderValue>, values: &[HeaderValue]) -> Option<Duration> {
    let mut headers = HeaderMap::new();
    headers.extend(date.map(|date| (DATE, date.clone())));
    for value in values {
        headers.append(RETRY_AFTER, value.clone());
    }
    retry_after(&headers, SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000))
}
