//! The body of an API request: one JSON object in which every field is known and occurs once.
//!
//! The error names an unknown, missing or repeated field, or one of another type. A body over 16 KiB is rejected too.

use std::fmt;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use serde::de::value::{MapAccessDeserializer, StringDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error as _, IntoDeserializer as _, MapAccess, Visitor,
};
use serde_json::Value;

use super::problem::ApiError;
use crate::ledger::decision_input;

/// Largest body, in bytes.
const BYTES_MAX: usize = 16 * 1024;

/// A parsed and validated body.
pub struct ApiBody<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for ApiBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let bytes = Bytes::from_request(request, state).await.map_err(|_| {
            ApiError(StatusCode::PAYLOAD_TOO_LARGE, "the body is too long, or could not be read".into())
        })?;
        if bytes.len() > BYTES_MAX {
            let words = format!("the body is longer than {BYTES_MAX} bytes");
            return Err(ApiError(StatusCode::PAYLOAD_TOO_LARGE, words));
        }
        parse_body(&bytes).map(Self)
    }
}

fn parse_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let ApiBodyMembers(members) = serde_json::from_slice(body)
        .map_err(|_| ApiError::bad_request("the body must be one JSON object, like {\"because\": \"they said so\"}"))?;
    let mut names: Vec<&String> = members.iter().map(|(name, _)| name).collect();
    names.sort_unstable();
    // This program would use one of the two values, and a proxy before it may have checked the other.
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(ApiError::bad_request(format!("`{}` is given twice: write it once", pair[0])));
    }
    let fields = ApiBodyFields { rest: members.into_iter(), current: None };
    T::deserialize(MapAccessDeserializer::new(fields)).map_err(|error| ApiError::bad_request(error.to_string()))
}

/// The raw fields of an object, with repeated ones. No field of ours has an object as its value.
struct ApiBodyMembers(Vec<(String, Value)>);

impl<'de> serde::Deserialize<'de> for ApiBodyMembers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MembersVisitor;

        impl<'de> Visitor<'de> for MembersVisitor {
            type Value = ApiBodyMembers;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ApiBodyMembers, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(ApiBodyMembers(members))
            }
        }

        deserializer.deserialize_map(MembersVisitor)
    }
}

/// The fields of an object one by one, so that an error names the field of the invalid value.
struct ApiBodyFields {
    rest: std::vec::IntoIter<(String, Value)>,
    current: Option<(String, Value)>,
}

impl<'de> MapAccess<'de> for ApiBodyFields {
    type Error = serde_json::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Self::Error> {
        let Some((name, value)) = self.rest.next() else { return Ok(None) };
        let key: StringDeserializer<Self::Error> = name.clone().into_deserializer();
        self.current = Some((name, value));
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Self::Error> {
        let (name, value) = self.current.take().unwrap_or_default();
        seed.deserialize(value).map_err(|error| Self::Error::custom(format!("`{name}`: {error}")))
    }
}

/// Validates a reason for the audit; a blank reason counts as none.
pub fn validate_reason(given: Option<String>) -> Result<Option<String>, ApiError> {
    let Some(text) = given.filter(|text| !text.trim().is_empty()) else { return Ok(None) };
    decision_input::validate_reason(&text).map(Some).map_err(|why| ApiError::bad_request(format!("`because`: {why}")))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct TestBody {
        rate: String,
        #[serde(default)]
        dry_run: bool,
    }

    #[test]
    fn invalid_field_is_named() {
        let asked = |body: Value| parse_body::<TestBody>(body.to_string().as_bytes()).map_err(|problem| problem.1);
        let good = asked(json!({"rate": "1/1s", "dry_run": true})).unwrap();
        assert_eq!((good.rate.as_str(), good.dry_run), ("1/1s", true));
        for (body, words) in [
            (json!({"rate": 5}), "`rate`: invalid type: integer `5`, expected a string"),
            (json!({"rate": "1/1s", "dry_run": "yes"}), "`dry_run`: invalid type: string \"yes\", expected a boolean"),
            (json!({"rate": "1/1s", "dryrun": true}), "unknown field `dryrun`, expected `rate` or `dry_run`"),
            (json!({}), "missing field `rate`"),
        ] {
            assert_eq!(asked(body).unwrap_err(), words);
        }
        assert_eq!(validate_reason(Some("  ".to_owned())).unwrap(), None);
        assert!(validate_reason(Some("a".repeat(501))).unwrap_err().1.contains("`because`: has 501 characters"));
    }
}
