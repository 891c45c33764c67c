//! The response classifier: no response is accepted unless the contract's table or the row allows it.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use reqwest::header::{HeaderMap, HeaderValue};
use sluicegate::domain::outcome::{Outcome, UnknownCause};
use sluicegate::domain::response::{
    CodeCondition, HeaderCondition, ResponseLocation, StatusCase, StatusMeaning, WaitField, WaitUnit,
};
use sluicegate::provider::http::classify::{ProviderResponse, ResponseBody, ResponseRules, classify};
use sluicegate::provider::http::waits::RETRY_AFTER_MAX;

use super::Bytes;

const NAMES: [&str; 4] = ["x-reason", "retry-after", "content-type", "date"];
const CODES: [&str; 4] = ["lock_timeout", "704", "card_declined", ""];
const PLACES: [Option<&str>; 4] = [None, Some("/code"), Some("/error/code"), Some("")];

/// Input: two bytes of status and one for how the body ended. Then the row's cases (count, then three bytes each) and
/// the headers (count, then a line each, whose first byte selects the name). The rest is the body.
pub fn holds(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let status = 100 + (u16::from(bytes.byte()) << 8 | u16::from(bytes.byte())) % 900;
    let end = bytes.byte();
    let cases: Vec<StatusCase> = (0..bytes.byte() % 4).map(|_| case(&mut bytes)).collect();
    let mut headers = HeaderMap::new();
    for _ in 0..bytes.byte() % 8 {
        let name = NAMES[usize::from(bytes.byte()) % NAMES.len()];
        if let Ok(value) = HeaderValue::from_bytes(bytes.until(b'\n')) {
            headers.append(name, value);
        }
    }
    let body = match end % 4 {
        0 | 1 => ResponseBody::Whole(bytes.0.to_vec()),
        2 => [ResponseBody::TooLarge, ResponseBody::HeadTooLarge, ResponseBody::Undecodable][usize::from(end >> 2) % 3]
            .clone(),
        _ if end >= 128 => ResponseBody::Ambiguous,
        _ => ResponseBody::Incomplete(UnknownCause::ConnectionLost),
    };
    let reading = ProviderResponse { status, headers, body };
    let pointer = ["/id", "/data/0/ref", ""][usize::from(end >> 2) % 3].to_owned();
    let wait = wait(end >> 4);
    let row = |statuses| ResponseRules { statuses, reference_pointer: pointer.clone(), wait_field: wait.clone() };
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    let plain = classify(&reading, &row(BTreeMap::new()), at);
    by_the_table(&reading, &plain);
    bounded(&plain);
    let elsewhere = BTreeMap::from([(if status == 100 { 101 } else { 100 }, cases.clone())]);
    assert_eq!(classify(&reading, &row(elsewhere), at), plain, "cases of another status");
    let outcome = classify(&reading, &row(BTreeMap::from([(status, cases.clone())])), at);
    bounded(&outcome);
    let covered = |means: fn(StatusMeaning) -> bool| cases.iter().any(|case| means(case.means));
    if outcome != plain {
        assert!(!cases.is_empty());
        match outcome {
            Outcome::Accepted { .. } => assert!(covered(|means| means == StatusMeaning::Accepted)),
            Outcome::Declined { .. } => assert!(covered(|means| means == StatusMeaning::Declined)),
            Outcome::Throttled { .. } => assert!(covered(|means| means == StatusMeaning::Throttled)),
            Outcome::Busy { .. } => assert!(covered(|means| means == StatusMeaning::Busy)),
            _ => {}
        }
    }
}

fn wait(choice: u8) -> Option<WaitField> {
    let place = match choice % 4 {
        0 => ResponseLocation::Header(NAMES[0].to_owned()),
        1 => ResponseLocation::Header("retry-after".to_owned()),
        2 => ResponseLocation::Body("/code".to_owned()),
        _ => return None,
    };
    Some(WaitField { location: place, unit: WaitUnit::ALL[usize::from(choice >> 2) % WaitUnit::ALL.len()] })
}

fn case(bytes: &mut Bytes<'_>) -> StatusCase {
    let [means, header, code] = [bytes.byte(), bytes.byte(), bytes.byte()].map(usize::from);
    let name = NAMES[header / 4 % NAMES.len()].to_owned();
    let at = PLACES[code / 16 % PLACES.len()].map(str::to_owned);
    StatusCase {
        means: StatusMeaning::ALL[means % StatusMeaning::ALL.len()],
        header: (header % 4 > 1).then(|| HeaderCondition { name, value: (header % 4 == 3).then(|| "yes".to_owned()) }),
        code: (code % 2 == 1).then(|| CodeCondition { code: CODES[code / 2 % CODES.len()].to_owned(), pointer: at }),
    }
}

/// The contract's table, section "Request to the provider".
fn by_the_table(reading: &ProviderResponse, outcome: &Outcome) {
    let status = reading.status;
    let readable = match &reading.body {
        ResponseBody::Whole(body) => serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(body).is_ok(),
        _ => false,
    };
    let is_whole = matches!(reading.body, ResponseBody::Whole(_));
    let is_unknown = matches!(outcome, Outcome::Unknown { .. });
    assert!(reading.body != ResponseBody::Ambiguous || is_unknown, "{status} must not be {outcome:?}");
    let fits = match outcome {
        Outcome::Accepted { .. } => matches!(status, 200 | 201) && readable,
        Outcome::Declined { .. } => status == 402 && is_whole,
        Outcome::Throttled { .. } => status == 429,
        Outcome::InProgress { .. } => matches!(status, 202 | 409) && is_whole,
        Outcome::Misconfigured { status: reported } => {
            *reported == status && matches!(status, 401 | 403 | 404 | 405 | 407)
        }
        Outcome::Rejected { .. } => (300..500).contains(&status) && is_whole,
        Outcome::Unknown { retry_after, .. } => {
            let unread = matches!(status, 200 | 201) && (!readable || may_be_ambiguous(reading));
            let may_end = !is_whole && !matches!(status, 401 | 403 | 404 | 405 | 407 | 429);
            let is_other_success = (203..300).contains(&status);
            let named = status == 503;
            let of_any_status = reading.body == ResponseBody::Ambiguous;
            (unread || may_end || is_other_success || of_any_status || status == 408 || !(200..500).contains(&status))
                && (retry_after.is_none() || named)
        }
        // The provider answered, so the request was sent. Only a row can name locks.
        Outcome::NotSent { .. } | Outcome::LocalFault(_) | Outcome::Busy { .. } => false,
        // The connection decides that, not the response.
        Outcome::Unconfirmed { .. } => false,
        // The sum decides these, after the status.
        Outcome::PartlyAccepted(_) | Outcome::Differs { .. } => false,
    };
    assert!(fits, "{status} must not be {outcome:?}");
}

/// Whether a key on the path to the reference may occur twice.
fn may_be_ambiguous(reading: &ProviderResponse) -> bool {
    let ResponseBody::Whole(body) = &reading.body else { return false };
    let text = String::from_utf8_lossy(body);
    let is_there_twice = |key: &str| text.matches(key).count() > 1;
    text.contains("\\u") || ["\"id\"", "\"data\"", "\"ref\""].into_iter().any(is_there_twice)
}

/// Texts for ledger, events and logs are short and without control characters.
fn bounded(outcome: &Outcome) {
    match outcome {
        Outcome::Accepted { reference: Some(reference) } => {
            assert!((1..=255).contains(&reference.chars().count()) && !reference.chars().any(char::is_control));
        }
        Outcome::Declined { reason } | Outcome::Rejected { reason } => {
            let token = reason.strip_prefix("provider answered ").unwrap();
            assert!(token.len() <= 53 && token.bytes().filter(u8::is_ascii_digit).count() <= 9, "{reason}");
            assert!(token.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.: ".contains(&byte)), "{reason}");
        }
        Outcome::Throttled { retry_after: Some(wait) }
        | Outcome::Busy { retry_after: Some(wait) }
        | Outcome::InProgress { retry_after: Some(wait) }
        | Outcome::Unknown { retry_after: Some(wait), .. } => assert!(*wait <= RETRY_AFTER_MAX),
        _ => {}
    }
}
