//! Waits that a response names: in `Retry-After`, or in the row's own field.
//!
//! The row gives the field's unit; it is never guessed from the size of the number. A number is rounded up to a whole
//! unit. An instant counts one second more, because its provider cut it to the second. It is compared with the
//! response's own `Date`, because the provider's clock is better for its own instants.
//!
//! The longest of several values counts. A wait of zero has ended, or cannot be read: the retry policy then decides.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use reqwest::header::{DATE, HeaderMap, RETRY_AFTER};

use super::classify::ProviderResponse;
use super::response_json::FieldValue;
use crate::domain::amount::Decimal;
use crate::domain::response::{ResponseLocation, WaitField, WaitUnit};

/// Longest wait that is returned. It keeps instants that are computed from it far from overflow; a policy may cap
/// lower.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(86_400);

/// Added to an instant, which may lie anywhere within the second that it names.
const INSTANT_MARGIN: Duration = Duration::from_secs(1);

/// The wait in `Retry-After`, from the time of the response; `None`: there is no such header. `now` replaces a missing
/// `Date`.
pub fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    header_wait(headers, RETRY_AFTER.as_str(), &WaitReader::new(headers, WaitUnit::Seconds, now))
}

/// The wait in the row's field, from the time of the response; `None`: the response does not have the field. `now`
/// replaces a missing `Date`.
pub fn read_wait_field(reading: &ProviderResponse, wait: &WaitField, now: SystemTime) -> Option<Duration> {
    let reader = WaitReader::new(&reading.headers, wait.unit, now);
    match &wait.location {
        ResponseLocation::Header(name) => header_wait(&reading.headers, name, &reader),
        ResponseLocation::Body(pointer) => match reading.json()?.field(pointer) {
            Ok(None | Some(FieldValue::Null)) => None,
            Ok(Some(FieldValue::List(items))) => items.iter().map(|item| reader.read_field(item)).max(),
            Ok(Some(value)) => Some(reader.read_field(&value)),
            Err(_) => Some(Duration::ZERO),
        },
    }
}

fn header_wait(headers: &HeaderMap, name: &str, reader: &WaitReader) -> Option<Duration> {
    headers.get_all(name).iter().map(|value| value.to_str().map_or(Duration::ZERO, |text| reader.read(text))).max()
}

struct WaitReader {
    unit: WaitUnit,
    /// Time of the response by the provider's clock, since 1970.
    response_time: Duration,
}

impl WaitReader {
    fn new(headers: &HeaderMap, unit: WaitUnit, now: SystemTime) -> Self {
        let date = headers.get(DATE).and_then(|value| value.to_str().ok()).and_then(parse_date);
        Self { unit, response_time: date.unwrap_or_else(|| since_1970(now)) }
    }

    fn read_field(&self, value: &FieldValue) -> Duration {
        value.to_text().map_or(Duration::ZERO, |text| self.read(&text))
    }

    /// The longest wait in a text; zero: none can be read. Proxies join several headers by commas, and a date has a
    /// comma of its own.
    fn read(&self, text: &str) -> Duration {
        let pieces: Vec<&str> = text.split(',').collect();
        let pairs = pieces.windows(2).map(|pair| pair.join(","));
        let dates =
            pieces.iter().filter_map(|piece| parse_date(piece)).chain(pairs.filter_map(|pair| parse_date(&pair)));
        let dates: Vec<Duration> = dates.map(|until| self.until(until)).collect();
        let numbers = pieces.iter().filter_map(|piece| self.read_number(piece.trim()));
        dates.into_iter().chain(numbers).max().unwrap_or_default().min(RETRY_AFTER_MAX)
    }

    fn read_number(&self, text: &str) -> Option<Duration> {
        let (number, unit) = match (text.strip_suffix("ms"), text.strip_suffix(['s', 'S'])) {
            (Some(number), _) => (number, WaitUnit::Milliseconds),
            (None, Some(number)) => (number, WaitUnit::Seconds),
            (None, None) => (text, self.unit),
        };
        let number = number.trim_end();
        let number = rounded_up(&Decimal::new(number.strip_prefix('+').unwrap_or(number))?);
        Some(match unit {
            WaitUnit::Seconds => Duration::from_secs(number),
            WaitUnit::Milliseconds => Duration::from_millis(number),
            WaitUnit::EpochSeconds => self.until(Duration::from_secs(number)),
            WaitUnit::EpochMilliseconds => self.until(Duration::from_millis(number)),
        })
    }

    /// The wait until an instant since 1970; zero when it has passed.
    fn until(&self, instant: Duration) -> Duration {
        instant.saturating_add(INSTANT_MARGIN).saturating_sub(self.response_time)
    }
}

fn parse_date(text: &str) -> Option<Duration> {
    httpdate::parse_http_date(text.trim()).ok().map(since_1970)
}

fn since_1970(instant: SystemTime) -> Duration {
    instant.duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The smallest whole number that is not less; zero for a negative one, and the largest for one that does not fit.
fn rounded_up(number: &Decimal) -> u64 {
    let Decimal { negative, digits, exponent } = number;
    if *negative || digits.is_empty() {
        return 0;
    }
    if *exponent >= 0 {
        // No u64 has more than 20 digits.
        let zeros = usize::try_from(*exponent).unwrap_or(usize::MAX).min(20);
        return format!("{digits}{}", "0".repeat(zeros)).parse().unwrap_or(u64::MAX);
    }
    let fraction = usize::try_from(exponent.unsigned_abs()).unwrap_or(usize::MAX).min(digits.len());
    let whole = &digits[..digits.len() - fraction];
    // The last digit of a fraction is no zero.
    if whole.is_empty() { 1 } else { whole.parse().map_or(u64::MAX, |whole: u64| whole.saturating_add(1)) }
}

#[cfg(test)]
#[path = "waits_tests.rs"]
mod tests;
