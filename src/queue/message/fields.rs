//! The fields of a job message, one check each, and the hash of their content.
//!
//! A field is right as written, or the message is invalid: nothing is corrected. `null` in an optional field is the
//! same as its absence.
//!
//! All messages with the same content have one hash. Fields are hashed as parsed, so key order, white space, escapes,
//! number notation and defaults written out make no difference. The form never changes, because the ledger keeps hashes
//! longer than any version runs.

use std::sync::Arc;

use jiff::{RoundMode, Timestamp, TimestampRound, Unit};
use sha2::{Digest, Sha256};

use super::{Json, Member, named};
use crate::domain::amount::{Decimal, is_currency};
use crate::domain::job::{
    COST_MAX, ContentHash, Identifier, InvalidMessage, InvalidReason, Job, JobId, REFERENCE_CHARS_MAX,
};
use crate::domain::provider::ProviderName;
use crate::domain::time::EpochMs;

const KNOWN: [&str; 13] = [
    "v",
    "id",
    "provider",
    "amount",
    "currency",
    "account",
    "reference",
    "idempotency_key",
    "cost",
    "priority",
    "not_before",
    "expires_at",
    "payload",
];

pub struct MessageFields<'a>(&'a [Member<'a>]);

impl<'a> MessageFields<'a> {
    pub fn new(members: &'a [Member<'a>]) -> Self {
        Self(members)
    }

    /// The id, if it has the form of one, for messages that fail elsewhere.
    pub fn claimed_id(&self) -> Option<JobId> {
        match self.value("id") {
            Some(Json::Text(text)) => JobId::new(text).ok(),
            _ => None,
        }
    }

    pub fn version(&self) -> Result<u64, InvalidMessage> {
        let bad = || bad_field("v: must be an integer from 1, or left out");
        let version = self.integer("v", bad)?.unwrap_or(1);
        u64::try_from(version).ok().filter(|v| *v >= 1).ok_or_else(bad)
    }

    pub fn payload_json(&self) -> Option<&'a Json<'a>> {
        self.value("payload")
    }

    pub fn job(&self, lane: &ProviderName) -> Result<Job, InvalidMessage> {
        let id = self.identifier("id", InvalidReason::BadId)?.ok_or_else(|| {
            InvalidMessage::new(InvalidReason::BadId, "id: is required: 1 to 64 characters of A-Z a-z 0-9 _ -")
        })?;
        if let Some(member) = self.0.iter().find(|member| !KNOWN.contains(&&*member.key)) {
            let detail = format!("{} is not known: leave it out or put it into `payload`", named(&member.key));
            return Err(InvalidMessage::new(InvalidReason::UnknownField, detail));
        }
        if self.text("provider")?.is_some_and(|provider| provider != lane.as_str()) {
            let detail = format!("provider: does not agree with the lane `{lane}` that the message came by");
            return Err(InvalidMessage::new(InvalidReason::WrongProvider, detail));
        }
        Ok(Job {
            id,
            provider: lane.clone(),
            amount: self.amount()?,
            currency: self.currency()?,
            account: self.identifier("account", InvalidReason::BadField)?,
            reference: self.reference()?,
            idempotency_key: self.identifier("idempotency_key", InvalidReason::BadField)?,
            cost: self.within("cost", 1, 1..=COST_MAX)?,
            priority: self.within("priority", 0, 0..=9)?,
            // Rounded so that a job is never early and never late by the fraction that is dropped.
            not_before: self.instant("not_before", RoundMode::Ceil)?,
            expires_at: self.instant("expires_at", RoundMode::Floor)?,
            payload: self.payload()?,
        })
    }

    fn value(&self, key: &str) -> Option<&'a Json<'a>> {
        let member = self.0.iter().find(|member| member.key == key)?;
        (!matches!(member.value, Json::Null)).then_some(&member.value)
    }

    fn text(&self, key: &'static str) -> Result<Option<&'a str>, InvalidMessage> {
        match self.value(key) {
            None => Ok(None),
            Some(Json::Text(text)) => Ok(Some(text)),
            Some(_) => Err(bad_field(format!("{key}: must be a string"))),
        }
    }

    fn identifier(&self, key: &'static str, reason: InvalidReason) -> Result<Option<Identifier>, InvalidMessage> {
        match self.value(key) {
            None => Ok(None),
            Some(Json::Text(text)) => {
                Identifier::new(text).map(Some).map_err(|fix| InvalidMessage::new(reason, format!("{key}: {fix}")))
            }
            Some(_) => Err(InvalidMessage::new(reason, format!("{key}: must be a string"))),
        }
    }

    /// Digits alone: `1e3`, `10.0` and `"10"` are refused, since who writes an amount so may mean something else.
    fn integer(&self, key: &str, bad: impl Fn() -> InvalidMessage) -> Result<Option<i64>, InvalidMessage> {
        match self.value(key) {
            None => Ok(None),
            Some(Json::Number(number)) => number.parse().map(Some).map_err(|_| bad()),
            Some(_) => Err(bad()),
        }
    }

    fn amount(&self) -> Result<i64, InvalidMessage> {
        let fix = "amount: must be an integer above 0, in minor units (12.99 EUR is 1299), up to 2^63 - 1";
        let bad = || InvalidMessage::new(InvalidReason::BadAmount, fix);
        self.integer("amount", bad)?.filter(|amount| *amount > 0).ok_or_else(bad)
    }

    /// ISO 4217 codes are upper case; `iso_currency` holds the list.
    fn currency(&self) -> Result<Arc<str>, InvalidMessage> {
        let bad = || InvalidMessage::new(InvalidReason::BadCurrency, "currency: must be an ISO 4217 code like EUR");
        let Some(Json::Text(code)) = self.value("currency") else { return Err(bad()) };
        if is_currency(code) { Ok(Arc::from(&**code)) } else { Err(bad()) }
    }

    fn reference(&self) -> Result<Option<Arc<str>>, InvalidMessage> {
        let reference = self.text("reference")?;
        if reference.is_some_and(|text| text.chars().count() > REFERENCE_CHARS_MAX) {
            return Err(bad_field(format!("reference: must have at most {REFERENCE_CHARS_MAX} characters")));
        }
        Ok(reference.map(Arc::from))
    }

    fn within<N>(&self, key: &'static str, default: N, range: std::ops::RangeInclusive<N>) -> Result<N, InvalidMessage>
    where
        N: TryFrom<i64> + PartialOrd + std::fmt::Display,
    {
        let bad = || bad_field(format!("{key}: must be an integer from {} to {}", range.start(), range.end()));
        let Some(number) = self.integer(key, bad)? else { return Ok(default) };
        N::try_from(number).ok().filter(|number| range.contains(number)).ok_or_else(bad)
    }

    fn instant(&self, key: &'static str, mode: RoundMode) -> Result<Option<EpochMs>, InvalidMessage> {
        let bad = || bad_field(format!("{key}: must be an RFC 3339 time with offset, like 2027-01-31T23:00:00Z"));
        let Some(text) = self.text(key)? else { return Ok(None) };
        if !is_rfc_3339(text) {
            return Err(bad());
        }
        let at: Timestamp = text.parse().map_err(|_| bad())?;
        let rounded = at.round(TimestampRound::new().smallest(Unit::Millisecond).mode(mode)).map_err(|_| bad())?;
        // An offset can lead into the year before, and a job must be writable again.
        let at = EpochMs(rounded.as_millisecond());
        if at.is_writable() { Ok(Some(at)) } else { Err(bad()) }
    }

    fn payload(&self) -> Result<Option<Arc<str>>, InvalidMessage> {
        match self.0.iter().find(|member| member.key == "payload") {
            None | Some(Member { value: Json::Null, .. }) => Ok(None),
            Some(Member { value: Json::Object(_), raw, .. }) => Ok(Some((*raw).into())),
            Some(_) => Err(bad_field("payload: must be a JSON object")),
        }
    }
}

fn bad_field(detail: impl Into<String>) -> InvalidMessage {
    InvalidMessage::new(InvalidReason::BadField, detail)
}

/// jiff reads more than the standard has: years of six digits with a sign, hours alone, names of zones in brackets. What
/// lies within its numbers is jiff's to judge. <https://www.rfc-editor.org/rfc/rfc3339#section-5.6>
fn is_rfc_3339(text: &str) -> bool {
    let shape = |text: &str, shape: &str| {
        let fits = |(byte, wanted): (u8, u8)| match wanted {
            b'0' => byte.is_ascii_digit(),
            // Blank instead of T by agreement, which is this line.
            b'T' => matches!(byte, b'T' | b't' | b' '),
            b'+' => matches!(byte, b'+' | b'-'),
            _ => byte == wanted,
        };
        text.len() == shape.len() && text.bytes().zip(shape.bytes()).all(fits)
    };
    let Some((moment, rest)) = text.split_at_checked("0000-00-00T00:00:00".len()) else { return false };
    let offset = match rest.strip_prefix('.') {
        Some(fraction) => fraction.trim_start_matches(|c: char| c.is_ascii_digit()),
        None => rest,
    };
    let has_digits = !rest.starts_with('.') || offset.len() + 1 < rest.len();
    // jiff takes up to 25 hours.
    let within_a_day = offset.get(1..3).is_some_and(|hours| hours <= "23");
    let is_offset = matches!(offset, "Z" | "z") || (shape(offset, "+00:00") && within_a_day);
    shape(moment, "0000-00-00T00:00:00") && has_digits && is_offset
}

pub fn content_hash(job: &Job, payload: Option<&Json<'_>>) -> ContentHash {
    let mut sha = Sha256::new();
    put(&mut sha, b"sluicegate job 1");
    put(&mut sha, job.id.as_str().as_bytes());
    put(&mut sha, job.provider.as_str().as_bytes());
    put(&mut sha, &job.amount.to_be_bytes());
    put(&mut sha, job.currency.as_bytes());
    put_optional(&mut sha, job.account.as_ref().map(|account| account.as_str().as_bytes()));
    put_optional(&mut sha, job.reference.as_ref().map(|reference| reference.as_bytes()));
    put(&mut sha, job.effective_key().as_str().as_bytes());
    put(&mut sha, &job.cost.to_be_bytes());
    put(&mut sha, &[job.priority]);
    put_optional(&mut sha, job.not_before.map(|at| at.0.to_be_bytes()).as_ref().map(<[u8; 8]>::as_slice));
    put_optional(&mut sha, job.expires_at.map(|at| at.0.to_be_bytes()).as_ref().map(<[u8; 8]>::as_slice));
    match payload {
        None => sha.update([0]),
        Some(payload) => {
            sha.update([1]);
            put_json(&mut sha, payload);
        }
    }
    ContentHash(sha.finalize().into())
}

/// Length first, so that no two different sequences of fields run together.
fn put(sha: &mut Sha256, bytes: &[u8]) {
    sha.update((bytes.len() as u64).to_be_bytes());
    sha.update(bytes);
}

fn put_optional(sha: &mut Sha256, bytes: Option<&[u8]>) {
    sha.update([u8::from(bytes.is_some())]);
    put(sha, bytes.unwrap_or_default());
}

fn put_json(sha: &mut Sha256, json: &Json<'_>) {
    match json {
        Json::Null => sha.update(b"n"),
        Json::Bool(value) => sha.update(if *value { b"t" } else { b"f" }),
        Json::Number(number) => {
            sha.update(b"d");
            match Decimal::new(number) {
                Some(decimal) => {
                    sha.update([u8::from(decimal.negative)]);
                    put(sha, decimal.digits.as_bytes());
                    sha.update(decimal.exponent.to_be_bytes());
                }
                None => {
                    sha.update([2]);
                    put(sha, number.as_bytes());
                }
            }
        }
        Json::Text(text) => {
            sha.update(b"s");
            put(sha, text.as_bytes());
        }
        Json::Array(items) => {
            sha.update(b"a");
            sha.update((items.len() as u64).to_be_bytes());
            items.iter().for_each(|item| put_json(sha, item));
        }
        Json::Object(members) => {
            sha.update(b"o");
            sha.update((members.len() as u64).to_be_bytes());
            let mut members: Vec<_> = members.iter().collect();
            members.sort_by(|a, b| a.key.cmp(&b.key));
            for member in members {
                put(sha, member.key.as_bytes());
                put_json(sha, &member.value);
            }
        }
    }
}
