//! Parser of `Retry-After`: seconds, or an HTTP date, which is compared with the response's own `Date`.
//!
//! A malformed value is ignored (<https://www.rfc-editor.org/rfc/rfc9110#section-10.2.3>).

use std::time::{Duration, SystemTime};

use reqwest::header::{DATE, HeaderMap, HeaderValue, RETRY_AFTER};

/// Longest wait that is returned. It keeps instants that are computed from it far from overflow; a policy may cap
/// lower.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(86_400);

/// The wait that a response names, from the time of the response. The longest of several counts; a past date is zero.
///
/// `now` replaces a missing `Date`. The provider's own clock is better for its own dates.
pub fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let response_time = response_date(headers, now);
    headers.get_all(RETRY_AFTER).iter().filter_map(|value| parse_wait(value, response_time)).max()
}

/// Time of the response by the provider's clock; `now` if it has no `Date`.
pub(super) fn response_date(headers: &HeaderMap, now: SystemTime) -> SystemTime {
    headers.get(DATE).and_then(parse_date).unwrap_or(now)
}

fn parse_wait(value: &HeaderValue, response_time: SystemTime) -> Option<Duration> {
    let text = value.to_str().ok()?.trim();
    let seconds = text.strip_prefix('-').unwrap_or(text);
    if !seconds.is_empty() && seconds.bytes().all(|b| b.is_ascii_digit()) {
        if seconds.len() < text.len() {
            return Some(Duration::ZERO);
        }
        // More digits than fit still mean a very long wait.
        return Some(seconds.parse().map_or(RETRY_AFTER_MAX, Duration::from_secs).min(RETRY_AFTER_MAX));
    }
    let until = parse_date(value)?;
    Some(until.duration_since(response_time).unwrap_or_default().min(RETRY_AFTER_MAX))
}

fn parse_date(value: &HeaderValue) -> Option<SystemTime> {
    httpdate::parse_http_date(value.to_str().ok()?.trim()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATE_TEXT: &str = "Sun, 06 Nov 1994 08:49:37 GMT";

    fn read(date: Option<&str>, values: &[&str]) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        if let Some(date) = date {
            headers.insert(DATE, date.parse().unwrap());
        }
        for value in values {
            headers.append(RETRY_AFTER, value.parse().unwrap());
        }
        retry_after(&headers, httpdate::parse_http_date(DATE_TEXT).unwrap() + Duration::from_secs(7))
    }

    #[test]
    fn both_forms_are_read_invalid_ones_ignored() {
        let seconds = |s| Some(Duration::from_secs(s));
        let table: [(Option<&str>, &[&str], Option<Duration>); 15] = [
            (None, &[], None),
            (None, &["0"], seconds(0)),
            (None, &[" 12 "], seconds(12)),
            (None, &["-5"], seconds(0)),
            (None, &["9999999999"], Some(RETRY_AFTER_MAX)),
            (None, &["99999999999999999999999"], Some(RETRY_AFTER_MAX)),
            (None, &["1.5"], None),
            (None, &["soon"], None),
            (None, &[""], None),
            (Some(DATE_TEXT), &["Sun, 06 Nov 1994 08:49:57 GMT"], seconds(20)),
            (None, &["Sun, 06 Nov 1994 08:49:57 GMT"], seconds(13)),
            (Some("garbage"), &["Sun, 06 Nov 1994 08:49:57 GMT"], seconds(13)),
            (Some(DATE_TEXT), &["Sun, 06 Nov 1994 08:49:00 GMT"], seconds(0)),
            (Some(DATE_TEXT), &["Sun, 06 Nov 2044 08:49:00 GMT"], Some(RETRY_AFTER_MAX)),
            (Some(DATE_TEXT), &["3", "soon", "Sun, 06 Nov 1994 08:49:57 GMT", "4"], seconds(20)),
        ];
        for (date, values, wait) in table {
            assert_eq!(read(date, values), wait, "{date:?} {values:?}");
        }
    }
}
