//! Reading a request's body: one JSON object whose every field is known.
//!
//! Refuses what it cannot mean, naming the field: an unknown one, a missing one, one of another type; and bodies that are
//! longer than any of ours.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use serde::de::value::{MapAccessDeserializer, StringDeserializer};
use serde::de::{DeserializeOwned, DeserializeSeed, Error as _, IntoDeserializer as _, MapAccess};
use serde_json::{Map, Value};

use super::problem::Problem;
use crate::ledger::said;

/// Longest body.
const BYTES_MAX: usize = 16 * 1024;

/// A body that was read and checked.
pub struct Body<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let bytes = Bytes::from_request(request, state)
            .await
            .map_err(|_| Problem(StatusCode::PAYLOAD_TOO_LARGE, "the body could not be read, or is too long".into()))?;
        if bytes.len() > BYTES_MAX {
            let words = format!("the body is longer than {BYTES_MAX} bytes");
            return Err(Problem(StatusCode::PAYLOAD_TOO_LARGE, words));
        }
        let fields: Map<String, Value> = serde_json::from_slice(&bytes)
            .map_err(|_| Problem::bad("the body must be one JSON object, like {\"because\": \"they said so\"}"))?;
        read(fields).map(Self)
    }
}

fn read<T: DeserializeOwned>(fields: Map<String, Value>) -> Result<T, Problem> {
    let fields = Fields { rest: fields.into_iter(), current: None };
    T::deserialize(MapAccessDeserializer::new(fields)).map_err(|error| Problem::bad(error.to_string()))
}

/// The fields of an object, one by one, so that a bad value can be told by its field.
struct Fields {
    rest: serde_json::map::IntoIter,
    current: Option<(String, Value)>,
}

impl<'de> MapAccess<'de> for Fields {
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

/// A reason as it is kept: a blank one is none.
///
/// # Errors
/// When it is too long.
pub fn because(given: Option<String>) -> Result<Option<String>, Problem> {
    let Some(text) = given.filter(|text| !text.trim().is_empty()) else { return Ok(None) };
    said::because(&text).map(Some).map_err(|why| Problem::bad(format!("`because`: {why}")))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Asked {
        rate: String,
        #[serde(default)]
        dry_run: bool,
    }

    #[test]
    fn a_bad_field_is_named() {
        let asked = |body: Value| read::<Asked>(body.as_object().unwrap().clone()).map_err(|problem| problem.1);
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
        assert_eq!(because(Some("  ".to_owned())).unwrap(), None);
        assert!(because(Some("a".repeat(501))).unwrap_err().1.contains("`because`: has 501 characters"));
    }
}
