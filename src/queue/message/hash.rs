//! One hash for all messages with the same content, whatever their formatting.
//!
//! Fields are hashed as parsed, so key order, white space, escapes, number notation and defaults written out make no
//! difference. The form never changes, because the ledger keeps hashes longer than any version runs.

use sha2::{Digest, Sha256};

use super::json::Json;
use crate::amount::Decimal;
use crate::domain::job::{ContentHash, Job};

pub(super) fn content_hash(job: &Job, payload: Option<&Json<'_>>) -> ContentHash {
    let mut sha = Sha256::new();
    put(&mut sha, b"sluicegate job 1");
    put(&mut sha, job.id.as_str().as_bytes());
    put(&mut sha, job.provider.as_str().as_bytes());
    put(&mut sha, &job.amount.to_be_bytes());
    put(&mut sha, job.currency.as_bytes());
    put_optional(&mut sha, job.account.as_ref().map(|account| account.as_str().as_bytes()));
    put_optional(&mut sha, job.reference.as_ref().map(String::as_bytes));
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
