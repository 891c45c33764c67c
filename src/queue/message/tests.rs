//! The message table of the contract: what is taken, what is refused, and by which word.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::domain::job::Identifier;
use crate::domain::outcome::FinalState;
use crate::domain::time::EpochMs;
use crate::ledger::events::OutcomeEvent;

fn lane() -> ProviderName {
    ProviderName::new("stripe").unwrap()
}

fn read(body: impl AsRef<[u8]>) -> Result<Decoded, DecodeError> {
    decode(body.as_ref(), &lane(), CardNumbers::Refuse)
}

fn reason(body: impl AsRef<[u8]>) -> &'static str {
    match read(&body) {
        Err(DecodeError::Invalid { invalid, .. }) => invalid.reason.code(),
        other => panic!("{} gave {other:?}", String::from_utf8_lossy(body.as_ref())),
    }
}

/// The smallest message, with one field set to `value` (as JSON text).
fn with(field: &str, value: &str) -> String {
    let mut fields = vec![("id", r#""p-1""#), ("amount", "1299"), ("currency", r#""EUR""#)];
    fields.retain(|(name, _)| *name != field);
    fields.push((field, value));
    let fields: Vec<String> = fields.iter().map(|(name, value)| format!(r#""{name}":{value}"#)).collect();
    format!("{{{}}}", fields.join(","))
}

#[test]
fn the_smallest_message_is_a_job_with_defaults() {
    let decoded = read(br#"{"id":"p-1","amount":1299,"currency":"EUR"}"#).unwrap();
    let job = &decoded.job;
    assert_eq!((job.id.as_str(), job.provider.as_str(), job.amount), ("p-1", "stripe", 1_299));
    assert_eq!((job.cost, job.priority, job.payload.as_deref()), (1, 0, None));
    assert!(decoded.warnings.is_empty());
}

#[test]
fn non_object_json_is_malformed() {
    let deep = |levels: usize| with("payload", &format!("{}1{}", r#"{"a":"#.repeat(levels), "}".repeat(levels)));
    let cases: Vec<Vec<u8>> = vec![
        vec![],
        b"\xff\xfe".to_vec(),
        b"\xef\xbb\xbf{\"id\":\"p-1\",\"amount\":1,\"currency\":\"EUR\"}".to_vec(),
        b"{".to_vec(),
        b"null".to_vec(),
        b"[]".to_vec(),
        b"not json".to_vec(),
        br#"{"id":"p-1","amount":1,"currency":"EUR"}{}"#.to_vec(),
        br#"{"id":"p-1","amount":1,"amount":2,"currency":"EUR"}"#.to_vec(),
        with("payload", r#"{"a":{"b":1,"b":1}}"#).into_bytes(),
        with("payload", r#"{"a":1,"\u0061":2}"#).into_bytes(),
        with("payload", r#"{"a":["\u0000"]}"#).into_bytes(),
        with("payload", r#"{"a\u0000":1}"#).into_bytes(),
        with("payload", r#"{"a":"\ud800"}"#).into_bytes(),
        with("payload", r#"{"a":"\ud800\u0041"}"#).into_bytes(),
        with("reference", r#""\u0000""#).into_bytes(),
        deep(128).into_bytes(),
        deep(10_000).into_bytes(),
    ];
    for case in cases {
        assert_eq!(reason(&case), "malformed", "{}", String::from_utf8_lossy(&case));
    }
    assert!(read(deep(100)).is_ok());
}

#[test]
fn size_is_checked_before_anything_else() {
    let longest = with("payload", &format!(r#"{{"a":"{}"}}"#, "x".repeat(65_000)));
    let padding = " ".repeat(BODY_BYTES_MAX - longest.len());
    assert!(read(format!("{longest}{padding}")).is_ok());
    assert_eq!(reason(format!("{longest}{padding} ")), "too_large");
    assert_eq!(reason(vec![0xff; BODY_BYTES_MAX + 1]), "too_large");
}

#[test]
fn each_invalid_field_has_its_reason() {
    let long = format!("\"{}\"", "x".repeat(65));
    let long_reference = format!("\"{}\"", "é".repeat(256));
    let table = [
        ("id", vec![r#""""#, "1", "null", r#""a b""#, r#""a\n""#, r#""é""#, &long], "bad_id"),
        (
            "amount",
            vec!["0", "-1", "-0", "10.5", "10.0", "1e3", r#""10""#, "null", "9223372036854775808", "true"],
            "bad_amount",
        ),
        ("currency", vec![r#""eur""#, r#""EURO""#, r#""ZZZ""#, r#""""#, "978", "null"], "bad_currency"),
        ("account", vec!["1", r#""""#, r#""a.b""#, &long], "bad_field"),
        ("idempotency_key", vec!["[]", r#""""#, &long], "bad_field"),
        ("reference", vec!["1", "{}", &long_reference], "bad_field"),
        ("cost", vec!["0", "1001", "-1", "1.0", r#""1""#], "bad_field"),
        ("priority", vec!["-1", "10", "0.0", "99999999999999999999"], "bad_field"),
        ("not_before", vec!["1", r#""tomorrow""#, r#""2027-01-31""#, r#""2027-01-31T23:00:00""#], "bad_field"),
        ("expires_at", vec!["{}", r#""2027-13-31T23:00:00Z""#], "bad_field"),
        (
            "not_before",
            vec![
                r#""-005000-01-01T00:00:00Z""#,
                r#""+002027-01-01T00:00:00Z""#,
                r#""0000-12-31T23:59:59Z""#,
                r#""0001-01-01T00:00:00+01:00""#,
                r#""20270131T230000Z""#,
                r#""2027-01-31T23Z""#,
                r#""2027-01-31T23:00Z""#,
                r#""2027-01-31T23:00:00+01""#,
                r#""2027-01-31T23:00:00+0100""#,
                r#""2027-01-31T23:00:00,5Z""#,
                r#""2027-01-31T23:00:00.Z""#,
                r#""2027-01-31T23:00:00Z[Europe/Oslo]""#,
                r#""2027-01-31T24:00:00Z""#,
                r#""2027-02-29T00:00:00Z""#,
                r#""2027-01-31T23:00:00+24:00""#,
                r#""2027-01-31T23:00:00+01:60""#,
                r#""9999-12-31T23:59:59.9999Z""#,
                r#""9999-12-30T22:00:00.1Z""#,
                r#"" 2027-01-31T23:00:00Z""#,
            ],
            "bad_field",
        ),
        ("payload", vec!["[]", r#""{}""#, "1", "false"], "bad_field"),
        ("provider", vec![r#""adyen""#, r#""""#], "wrong_provider"),
        ("v", vec!["0", "-1", r#""1""#, "1.0", "{}"], "bad_field"),
        ("metadata", vec!["{}"], "unknown_field"),
        ("Amount", vec!["1"], "unknown_field"),
    ];
    for (field, values, expected) in table {
        for value in values {
            assert_eq!(reason(with(field, value)), expected, "{field} = {value}");
        }
    }
    for field in ["id", "amount", "currency"] {
        let mut message = json!({"id": "p-1", "amount": 1, "currency": "EUR"});
        message.as_object_mut().unwrap().remove(field);
        assert_eq!(reason(message.to_string()), format!("bad_{field}"));
    }
}

#[test]
fn invalid_message_keeps_its_claimed_id() {
    let claimed = |body: String| match read(body) {
        Err(DecodeError::Invalid { claimed_id, .. }) => claimed_id.map(|id| id.to_string()),
        other => panic!("{other:?}"),
    };
    assert_eq!(claimed(with("amount", "0")).as_deref(), Some("p-1"));
    assert_eq!(claimed(with("id", r#""a b""#)), None);
}

#[test]
fn newer_format_with_unknown_fields_is_kept() {
    assert_eq!(read(br#"{"v":2,"new":true}"#), Err(DecodeError::NewerVersion(2)));
    assert!(read(with("v", "1")).is_ok());
}

#[test]
fn error_details_never_repeat_input() {
    let secret = "SECRET4242";
    let cases = [
        with(secret, "1"),
        with("payload", &format!(r#"{{"{secret}":1,"{secret}":2}}"#)),
        with("payload", &format!(r#""{secret}""#)),
        with("payload", &format!(r#"{{"a":"\ud800{secret}"}}"#)),
        with("id", &format!("\"{secret} \"")),
        with("currency", &format!("\"{secret}\"")),
        with("not_before", &format!("\"{secret}\"")),
        with("provider", &format!("\"{secret}\"")),
        format!("{{\"payload\":{secret}}}"),
    ];
    for case in cases {
        let error = read(&case).unwrap_err();
        assert!(!format!("{error} {error:?}").contains(secret), "{case}: {error:?}");
    }
}

#[test]
fn hash_ignores_json_formatting() {
    let hash = |body: &str| read(body).unwrap().hash;
    let plain = r#"{"id":"p-1","amount":1299,"currency":"EUR","payload":{"a":1,"b":[1.50,"é"]}}"#;
    let same = [
        r#" { "payload" : {"b":[15e-1,"\u00e9"], "a":1.0}, "currency":"EUR","amount":1299,"id":"p-1" } "#,
        r#"{"v":1,"provider":"stripe","cost":1,"priority":0,"account":null,"idempotency_key":"p-1","id":"p-1",
            "amount":1299,"currency":"EUR","payload":{"a":10e-1,"b":[1.5,"é"]}}"#,
    ];
    for body in same {
        assert_eq!(hash(body), hash(plain), "{body}");
    }
    let different = [
        r#"{"id":"p-1","amount":1299,"currency":"EUR","payload":{"a":1,"b":["é",1.5]}}"#,
        r#"{"id":"p-1","amount":1299,"currency":"EUR","payload":{"a":-1,"b":[1.5,"é"]}}"#,
        r#"{"id":"p-1","amount":1299,"currency":"EUR","payload":{"a":"1","b":[1.5,"é"]}}"#,
        r#"{"id":"p-1","amount":1299,"currency":"EUR","payload":{"a":12345678901234567890123,"b":[1.5,"é"]}}"#,
        r#"{"id":"p-1","amount":1299,"currency":"EUR","payload":{"a":12345678901234567890124,"b":[1.5,"é"]}}"#,
        r#"{"id":"p-1","amount":1299,"currency":"EUR","payload":{}}"#,
        r#"{"id":"p-1","amount":1299,"currency":"EUR"}"#,
        r#"{"id":"p-1","amount":1300,"currency":"EUR"}"#,
        r#"{"id":"p-1","amount":1299,"currency":"USD"}"#,
        r#"{"id":"p-1","amount":1299,"currency":"EUR","account":"x"}"#,
        r#"{"id":"p-1","amount":1299,"currency":"EUR","reference":"x"}"#,
        r#"{"id":"p-1","amount":1299,"currency":"EUR","idempotency_key":"x"}"#,
        r#"{"id":"p-1","amount":1299,"currency":"EUR","not_before":"2027-01-01T00:00:00Z"}"#,
        r#"{"id":"p-1","amount":1299,"currency":"EUR","expires_at":"2027-01-01T00:00:00Z"}"#,
    ];
    let mut seen = vec![hash(plain)];
    for body in different {
        let hash = hash(body);
        assert!(!seen.contains(&hash), "{body}");
        seen.push(hash);
    }
}

/// A job comes back from the ledger in other words than its producer's: they must not make it too long.
#[test]
fn longest_message_can_be_reencoded() {
    let times = r#""not_before":"2027-01-31T23:00:00Z","expires_at":"2027-01-31T23:00:00.5Z""#;
    let message = |length| {
        let payload = format!(r#"{{"a":"{}"}}"#, "x".repeat(length));
        format!(r#"{{"id":"p-1","amount":1,"currency":"EUR",{times},"payload":{payload}}}"#)
    };
    let longest = message(BODY_BYTES_MAX - message(0).len());
    assert_eq!(longest.len(), BODY_BYTES_MAX);
    let decoded = read(longest).unwrap();
    assert_eq!(read(encode(&decoded.job)), Ok(decoded));
}

#[test]
fn times_round_to_the_safe_side() {
    let at = |field: &str, text: &str| {
        let job = read(with(field, &format!("\"{text}\""))).unwrap().job;
        job.not_before.or(job.expires_at).unwrap().0
    };
    assert_eq!(at("not_before", "1970-01-01T00:00:01.0001Z"), 1_001);
    assert_eq!(at("expires_at", "1970-01-01T01:00:01.0009+01:00"), 1_000);
    assert_eq!(at("not_before", "0001-01-01T00:00:00Z"), -62_135_596_800_000);
    for same in ["2027-01-31t23:00:00z", "2027-01-31 23:00:00.000000-00:00", "2027-02-01T05:30:00+06:30"] {
        assert_eq!(at("not_before", same), 1_801_436_400_000, "{same}");
    }
}

#[test]
fn the_payload_is_kept_as_written() {
    let payload = "{ \"b\" : 1.0 ,\n\"a\":\"\\u00e9\" }";
    let decoded = read(with("payload", payload)).unwrap();
    assert_eq!(decoded.job.payload.as_deref(), Some(payload));
    let again = read(encode(&decoded.job)).unwrap();
    assert_eq!(again, decoded);
}

#[test]
fn an_outcome_event_names_all_its_fields() {
    let event = OutcomeEvent {
        sequence: 7,
        event_id: "b6f2a8e0-3c41-4d0c-9a53-0d4d6f3f2a10".to_owned(),
        n: 2,
        id: "p-1".to_owned(),
        provider: lane(),
        state: FinalState::Succeeded,
        provider_reference: Some("ch_1".to_owned()),
        charged_amount: Some(500),
        reason: None,
        attempts: 2,
        at_ms: 1_500,
    };
    let written: Value = serde_json::from_slice(&outcome_event_json(&event)).unwrap();
    let expected = json!({
        "event_id": "b6f2a8e0-3c41-4d0c-9a53-0d4d6f3f2a10", "n": 2, "id": "p-1", "provider": "stripe", "state": "succeeded", "provider_reference": "ch_1", "charged_amount": 500, "reason": null,
        "attempts": 2, "at": "1970-01-01T00:00:01.500Z",
    });
    assert_eq!(written, expected);
}

fn token() -> impl Strategy<Value = Identifier> {
    "[A-Za-z0-9_-]{1,64}".prop_map(|text| Identifier::new(text).unwrap())
}

/// Years 0001 to 9998: what RFC 3339 can write.
fn instant() -> impl Strategy<Value = EpochMs> {
    (-62_135_596_800_000_i64..253_370_764_800_000).prop_map(EpochMs)
}

fn payload() -> impl Strategy<Value = String> {
    let text = "[^\\x00]{0,12}";
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        any::<f64>().prop_filter("finite", |n| n.is_finite()).prop_map(Value::from),
        text.prop_map(Value::from),
    ];
    let value = leaf.prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(text, inner, 0..4).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    });
    prop::collection::btree_map(text, value, 0..4).prop_map(|map| Value::Object(map.into_iter().collect()).to_string())
}

prop_compose! {
    fn job()(
        id in token(),
        amount in 1..i64::MAX,
        currency in prop::sample::select(vec!["EUR", "USD", "JPY", "CHF", "BHD"]),
        account in prop::option::of(token()),
        reference in prop::option::of("[^\\x00]{0,255}"),
        idempotency_key in prop::option::of(token()),
        cost in 1_u16..=1_000,
        priority in 0_u8..=9,
        not_before in prop::option::of(instant()),
        expires_at in prop::option::of(instant()),
        payload in prop::option::of(payload()),
    ) -> Job {
        Job {
            id, provider: lane(), amount, currency: currency.into(), account, reference: reference.map(Into::into),
            idempotency_key, cost, priority, not_before, expires_at, payload: payload.map(Into::into),
        }
    }
}

proptest! {
    #[test]
    fn encoded_job_decodes_to_itself(job in job()) {
        let decoded = decode(&encode(&job), &lane(), CardNumbers::Off).unwrap();
        prop_assert_eq!(decoded.job, job);
    }

    #[test]
    fn random_bytes_never_panic(body in prop::collection::vec(any::<u8>(), 0..512)) {
        prop_assert!(read(&body).is_err());
    }

    #[test]
    fn mutated_messages_never_panic(
        job in job(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 1..8),
    ) {
        let mut body = encode(&job);
        for (at, byte, kind) in edits {
            let at = at.index(body.len());
            match kind {
                0 => body[at] = byte,
                1 => body.insert(at, byte),
                _ if body.len() > 1 => { body.remove(at); }
                _ => {}
            }
        }
        if let Ok(decoded) = read(&body) {
            prop_assert_eq!(read(encode(&decoded.job)).unwrap(), decoded);
        }
    }
}

/// A job that was recorded before a rule existed keeps its content; all other rules hold.
#[test]
fn recorded_job_skips_content_checks() {
    let card = with("payload", r#"{"card":"4242424242424242"}"#);
    let secret = with("payload", r#"{"auth":"Bearer 0123456789abcdefghij"}"#);
    let recorded = |message: &str| decode_recorded(message.as_bytes(), &lane());
    let before = decode(card.as_bytes(), &lane(), CardNumbers::Off).unwrap();
    assert_eq!(recorded(&card), Ok(before));
    assert!(decode(secret.as_bytes(), &lane(), CardNumbers::Off).is_err());
    assert_ne!(recorded(&secret).unwrap().hash, recorded(&card).unwrap().hash);
    for other in [with("colour", "1"), with("amount", "0"), "{".to_owned()] {
        assert_eq!(recorded(&other), decode(other.as_bytes(), &lane(), CardNumbers::Refuse), "{other}");
    }
}

#[test]
fn recorded_job_is_unchanged() {
    for body in [
        r#"{"id":"p-1","amount":1299,"currency":"EUR"}"#,
        r#"{"id":"p-1","amount":1,"currency":"EUR","payload":{"card":"4242424242424242","auth":"Bearer 0123456789abcdefghij"}}"#,
        r#"{ "v": 1, "id": "p-1", "provider": "stripe", "amount": 1, "currency": "EUR", "account": "a", "cost": 7,
             "reference": "Rechnung \u00e9 \" \n", "idempotency_key": "k", "priority": 9,
             "not_before": "2027-01-31T23:00:00.0005+01:00", "expires_at": "2027-02-01T00:00:00.9Z",
             "payload": { "b" : 1.0e2, "a": "\u0041", "a b": [ ] } }"#,
    ] {
        let recorded = decode_recorded(body.as_bytes(), &lane()).unwrap();
        assert!(is_unchanged(&recorded.job, recorded.hash), "{body}");
    }
}

#[test]
fn changed_row_is_found() {
    let body = r#"{"id":"p-1","amount":1299,"currency":"EUR","payload":{"a":1}}"#;
    let recorded = decode_recorded(body.as_bytes(), &lane()).unwrap();
    let changes: [fn(&mut Job); 4] = [
        |job| job.payload = None,
        |job| job.payload = Some("{}".into()),
        |job| job.amount += 1,
        |job| job.payload = Some("no JSON".into()),
    ];
    for change in changes {
        let mut job = recorded.job.clone();
        change(&mut job);
        assert!(!is_unchanged(&job, recorded.hash), "{job:?}");
    }
}

/// What the lane name says need not be in the message, so a message of the largest size still fits.
#[test]
fn largest_job_is_unchanged() {
    let head = r#"{"id":"p-1","amount":1299,"currency":"EUR","payload":{"a":""#;
    let body = format!("{head}{}\"}}}}", "x".repeat(BODY_BYTES_MAX - head.len() - 3));
    assert_eq!(body.len(), BODY_BYTES_MAX);
    let recorded = decode_recorded(body.as_bytes(), &lane()).unwrap();
    assert!(is_unchanged(&recorded.job, recorded.hash));
}
