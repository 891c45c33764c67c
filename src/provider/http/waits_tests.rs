//! Each form of a wait as a table, and that no wait is shorter than its text says.

use proptest::prelude::*;
use reqwest::header::{HeaderMap, HeaderName};

use super::super::classify::ResponseBody;
use super::*;

const DATE_TEXT: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
/// The same instant.
const MADE_AT_S: u64 = 784_111_777;
const OWN_CLOCK_LATE_S: u64 = 7;

fn response(date: Option<&str>, name: &str, values: &[&str], body: &str) -> ProviderResponse {
    let mut headers = HeaderMap::new();
    headers.extend(date.map(|date| (DATE, date.parse().unwrap())));
    for value in values {
        headers.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
    }
    ProviderResponse { status: 429, headers, body: ResponseBody::Whole(body.as_bytes().to_vec()) }
}

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(MADE_AT_S + OWN_CLOCK_LATE_S)
}

fn read(date: Option<&str>, values: &[&str]) -> Option<Duration> {
    retry_after(&response(date, "retry-after", values, "").headers, now())
}

fn ms(ms: u64) -> Option<Duration> {
    Some(Duration::from_millis(ms))
}

#[test]
fn every_form_of_retry_after_is_read() {
    let seconds = |s: u64| ms(s * 1_000);
    let unreadable = seconds(0);
    let table: [(Option<&str>, &[&str], Option<Duration>); 34] = [
        (None, &[], None),
        (None, &["0"], seconds(0)),
        (None, &["0.0"], seconds(0)),
        (None, &[" 12 "], seconds(12)),
        (None, &["-5"], seconds(0)),
        (None, &["9999999999"], Some(RETRY_AFTER_MAX)),
        (None, &["99999999999999999999999"], Some(RETRY_AFTER_MAX)),
        (None, &["6.0"], seconds(6)),
        (None, &["6."], seconds(6)),
        (None, &["+6"], seconds(6)),
        (None, &["06"], seconds(6)),
        (None, &["6.001"], seconds(7)),
        (None, &["6.00000000000000000000001"], seconds(7)),
        (None, &["0.2"], seconds(1)),
        (None, &["0.0000001"], seconds(1)),
        (None, &["6e0"], seconds(6)),
        (None, &["1e1"], seconds(10)),
        (None, &["6s"], seconds(6)),
        (None, &["6.5 s"], seconds(7)),
        (None, &["1500ms"], ms(1_500)),
        (None, &["6, 12"], seconds(12)),
        (None, &["6", "12s", "soon"], seconds(12)),
        (None, &["soon"], unreadable),
        (None, &["6 minutes"], unreadable),
        (None, &["inf"], unreadable),
        (None, &["1-2"], unreadable),
        (None, &["12;w=60"], unreadable),
        (None, &[""], unreadable),
        (Some(DATE_TEXT), &["Sun, 06 Nov 1994 08:49:57 GMT"], seconds(21)),
        (None, &["Sun, 06 Nov 1994 08:49:57 GMT"], seconds(14)),
        (Some("garbage"), &["Sunday, 06-Nov-94 08:49:57 GMT"], seconds(14)),
        (Some(DATE_TEXT), &["Sun, 06 Nov 1994 08:49:00 GMT"], seconds(0)),
        (Some(DATE_TEXT), &["Sun, 06 Nov 2044 08:49:00 GMT"], Some(RETRY_AFTER_MAX)),
        (Some(DATE_TEXT), &["3, Sun, 06 Nov 1994 08:49:57 GMT, 4", "soon"], seconds(21)),
    ];
    for (date, values, wait) in table {
        assert_eq!(read(date, values), wait, "{date:?} {values:?}");
    }
}

#[test]
fn fields_are_read_in_the_configured_unit() {
    let field = |location, unit| WaitField { location, unit };
    let header = ResponseLocation::Header("X-Reset".to_owned());
    let table: [(&[&str], WaitUnit, Option<Duration>); 15] = [
        (&["12"], WaitUnit::Seconds, ms(12_000)),
        (&[" 0.65 "], WaitUnit::Seconds, ms(1_000)),
        (&["3", "soon", "4"], WaitUnit::Seconds, ms(4_000)),
        (&["1700000000"], WaitUnit::Seconds, Some(RETRY_AFTER_MAX)),
        (&["99999999999999999999999999"], WaitUnit::Milliseconds, Some(RETRY_AFTER_MAX)),
        (&["1500"], WaitUnit::Milliseconds, ms(1_500)),
        (&["1500.5"], WaitUnit::Milliseconds, ms(1_501)),
        (&["6s"], WaitUnit::Milliseconds, ms(6_000)),
        (&["784111807"], WaitUnit::EpochSeconds, ms(31_000)),
        (&["784111806.5"], WaitUnit::EpochSeconds, ms(31_000)),
        (&["784111700"], WaitUnit::EpochSeconds, ms(0)),
        (&["784111777500"], WaitUnit::EpochMilliseconds, ms(1_500)),
        (&["Sun, 06 Nov 1994 08:49:57 GMT"], WaitUnit::Seconds, ms(21_000)),
        (&[], WaitUnit::Seconds, None),
        (&[""], WaitUnit::Seconds, ms(0)),
    ];
    for (values, unit, wait) in table {
        let reading = response(Some(DATE_TEXT), "x-reset", values, "");
        assert_eq!(read_wait_field(&reading, &field(header.clone(), unit), now()), wait, "{values:?} {unit:?}");
    }
    let by_our_clock = response(None, "x-reset", &["784111787"], "");
    assert_eq!(read_wait_field(&by_our_clock, &field(header, WaitUnit::EpochSeconds), now()), ms(4_000));
    for (body, wait) in [
        (r#"{"error":{"retry_in":1500}}"#, ms(1_500)),
        (r#"{"error":{"retry_in":"1500"}}"#, ms(1_500)),
        (r#"{"error":{"retry_in":"6.0s"}}"#, ms(6_000)),
        (r#"{"error":{"retry_in":1500.5}}"#, ms(1_501)),
        (r#"{"error":{"retry_in":[700,"900",false]}}"#, ms(900)),
        (r#"{"error":{"retry_in":-1}}"#, ms(0)),
        (r#"{"error":{"retry_in":1e300}}"#, Some(RETRY_AFTER_MAX)),
        (r#"{"error":{"retry_in":{"ms":5}}}"#, ms(0)),
        (r#"{"error":{"retry_in":"soon"}}"#, ms(0)),
        (r#"{"error":{"retry_in":5,"retry_in":6}}"#, ms(0)),
        (r#"{"error":{"retry_in":null}}"#, None),
        (r#"{"retry_in":1500}"#, None),
        ("slow down", None),
        ("", None),
    ] {
        let place = ResponseLocation::Body("/error/retry_in".to_owned());
        let read = read_wait_field(&response(None, "x", &[], body), &field(place, WaitUnit::Milliseconds), now());
        assert_eq!(read, wait, "{body}");
    }
}

proptest! {
    /// In thousandths, so that the text and the wait are compared exactly.
    #[test]
    fn no_wait_is_shorter_than_its_text(thousandths in 0..90_000_000_u64, form in 0..6_usize, others in any::<bool>()) {
        let whole = format!("{}.{:03}", thousandths / 1_000, thousandths % 1_000);
        let made_at = MADE_AT_S * 1_000;
        let until = UNIX_EPOCH + Duration::from_millis(made_at + thousandths);
        let (text, unit) = match form {
            0 => (whole, WaitUnit::Seconds),
            1 => (format!("{whole}s"), WaitUnit::Milliseconds),
            2 => (format!("{thousandths}e-3"), WaitUnit::Seconds),
            3 => (format!("{}.0", made_at + thousandths), WaitUnit::EpochMilliseconds),
            // Cut to the second, as HTTP dates and epochs are.
            4 => (((made_at + thousandths) / 1_000).to_string(), WaitUnit::EpochSeconds),
            _ => (httpdate::fmt_http_date(until), WaitUnit::Seconds),
        };
        let text = if others { format!("0.5, {text}") } else { text };
        let wait = WaitField { location: ResponseLocation::Header("x-reset".to_owned()), unit };
        let read = read_wait_field(&response(Some(DATE_TEXT), "x-reset", &[&text], ""), &wait, now()).unwrap();
        prop_assert!(read >= Duration::from_millis(thousandths).min(RETRY_AFTER_MAX), "{text}: {read:?}");
        prop_assert!(read <= Duration::from_millis(thousandths + 2_000), "{text}: {read:?}");
    }

    #[test]
    fn any_text_names_a_bounded_wait(text in "[ -~]{0,40}") {
        prop_assert!(read(None, &[&text]).unwrap() <= RETRY_AFTER_MAX);
    }
}
