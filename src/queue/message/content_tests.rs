//! What new jobs must not hold, field by field: the reason, the field that is named, and that no value is repeated.

use super::*;

const CARD: &str = "4111111111111111";
const SECRET: &str = "sk_live_4eC39HqLyjWDarjtT1zdp7dc";

fn read(body: &str, cards: CardNumbers) -> Result<Decoded, DecodeError> {
    decode(body.as_bytes(), &ProviderName::new("stripe").unwrap(), cards)
}

/// The smallest message, with one field set to `value` (as JSON text).
fn with(field: &str, value: &str) -> String {
    let id = if field == "id" { "" } else { r#""id":"p-1","# };
    format!(r#"{{{id}"amount":1299,"currency":"EUR","{field}":{value}}}"#)
}

fn refused(body: &str) -> InvalidMessage {
    match read(body, CardNumbers::Refuse) {
        Err(DecodeError::Invalid { invalid, claimed_id }) => {
            let message = format!("{invalid} {claimed_id:?}");
            assert!(![CARD, SECRET].iter().any(|value| message.contains(value)), "{message}");
            invalid
        }
        other => panic!("{body} gave {other:?}"),
    }
}

/// Each field that holds a text of the producer's own, with a message that has it.
fn fields(text: &str) -> [(&'static str, String); 8] {
    let quoted = format!("\"{text}\"");
    [
        ("id", with("id", &quoted)),
        ("account", with("account", &quoted)),
        ("reference", with("reference", &quoted)),
        ("idempotency_key", with("idempotency_key", &quoted)),
        ("payload", with("payload", &format!(r#"{{"a":[{{"b":{quoted}}}]}}"#))),
        ("payload", with("payload", &format!(r#"{{{quoted}:0}}"#))),
        ("payload", with("payload", &format!(r#"{{"headers":{{"x-a":{quoted}}},"metadata":{{"n":1}}}}"#))),
        ("payload", with("payload", &format!(r#"{{"metadata":[["{text}"]]}}"#))),
    ]
}

#[test]
fn card_numbers_are_rejected_in_every_field() {
    for (field, body) in fields(CARD) {
        let invalid = refused(&body);
        assert_eq!(invalid.reason, InvalidReason::CardNumber, "{body}");
        assert!(invalid.detail.starts_with(&format!("{field}: holds what looks like a card number; ")), "{invalid}");
        let warned = read(&body, CardNumbers::Warn).unwrap();
        assert_eq!(warned.warnings, [invalid.detail], "{body}");
        assert!(read(&body, CardNumbers::Off).unwrap().warnings.is_empty(), "{body}");
    }
}

#[test]
fn secrets_are_rejected_in_every_field() {
    for (field, body) in fields(SECRET) {
        for cards in [CardNumbers::Refuse, CardNumbers::Warn, CardNumbers::Off] {
            let Err(DecodeError::Invalid { invalid, .. }) = read(&body, cards) else { panic!("{body} was taken") };
            assert_eq!(invalid.reason, InvalidReason::Secret, "{body}");
            assert!(invalid.detail.starts_with(&format!("{field}: holds what is obviously a secret; ")), "{invalid}");
            assert_eq!(refused(&body), invalid);
        }
    }
    let other = with("colour", &format!("\"{SECRET}\"")).replace("\"id\":\"p-1\"", &format!("\"id\":\"{SECRET}\""));
    assert_eq!(refused(&other).reason, InvalidReason::UnknownField);
    assert_eq!(refused(&other.replace(SECRET, CARD)).reason, InvalidReason::UnknownField);
}

#[test]
fn card_data_in_payload_is_always_found() {
    for payload in [
        // As a number, in any notation.
        r#"{"n":4111111111111111}"#,
        r#"{"n":4.111111111111111e15}"#,
        r#"{"n":[4111111111111111.0]}"#,
        // In parts.
        r#"{"n":["4111","1111","1111","1111"]}"#,
        r#"{"n":["4111 ","1111 ","1111 ","1111"]}"#,
        r#"{"n":["411111","1111111111"]}"#,
        r#"{"n":["4","1","1","1","1","1","1","1","1","1","1","1","1","1","1","1"]}"#,
        r#"{"part1":"4111","part2":"1111","part3":"1111","part4":"1111"}"#,
        r#"{"a":"4111","b":"1111","c":"1111","d":"1111"}"#,
        r#"{"n":[{"d":"4111"},{"d":"1111"},{"d":"1111"},{"d":"1111"}]}"#,
        r#"{"bin":"411111","middle":"111111","last4":"1111"}"#,
        r#"{"card":{"bin":"411111","rest":"1111111111","month":"12","year":"27"}}"#,
        r#"{"card":[4111,1111,1111,1111]}"#,
        // By its name.
        r#"{"card_number":"4111111111111112"}"#,
        r#"{"PAN":4111111111111112}"#,
        r#"{"card":{"number":"4026000000000002"}}"#,
        r#"{"card":{"number":"501800000009"}}"#,
        r#"{"\uff50\uff41\uff4e":"4111111111111112"}"#,
        r#"{"cvv":"123"}"#,
        r#"{"cvc":123}"#,
        r#"{"card":{"CVV2":"1234"}}"#,
        r#"{"card":{"cid":"1234"}}"#,
        r#"{"Card-Security-Code":["123"]}"#,
        r#"{"cardVerificationValue":{"value":"123"}}"#,
        r#"{"c\u200bvv":"123"}"#,
        r#"{"raw":"{\"cvv\":\"123\"}"}"#,
        r#"{"track2":";4111111111111111=27121010000012345678?"}"#,
        // In other scripts, and where nothing shows.
        r#"{"n":"\uff14\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11\uff11"}"#,
        r#"{"n":"4\u200b111\u200b111111111111"}"#,
    ] {
        let invalid = refused(&with("payload", payload));
        assert_eq!(invalid.reason, InvalidReason::CardNumber, "{payload}");
        assert!(invalid.detail.starts_with("payload: "), "{invalid}");
    }
}

#[test]
fn payload_without_card_data_is_accepted() {
    for payload in [
        r#"{"card":"tok_1","cvv":null,"cvc":"","card_number":"4111 11** **** 1111","pan":"ABCDE1234F","last4":"1111"}"#,
        r#"{"bin":"411111","last4":"1111","exp":"1227"}"#,
        r#"{"cvv_check":"pass","cvc_provided":true,"cvv":true,"encryptedSecurityCode":"adyenjs_0_1_25$abc"}"#,
        r#"{"prices":[4500,1299,3500,1200],"total":10499,"rate":0.4111111111111111,"big":41111111111111110000}"#,
        r#"{"zip":"4000","house":"1111","mcc":"5411","terminal":"4711"}"#,
        r#"{"years":["2023","2024","2025","2026","2027"]}"#,
        r#"{"at":1732180000000,"id":1732180000000123,"order_id":"4032503713710866433","n":[1,2,3]}"#,
        r#"{"ean":"4006381333931","phone":"4917612345678","iban":"DE89370400440532013000"}"#,
    ] {
        let decoded = read(&with("payload", payload), CardNumbers::Refuse);
        assert!(decoded.as_ref().is_ok_and(|decoded| decoded.warnings.is_empty()), "{payload}: {decoded:?}");
    }
    assert!(read(&with("amount2", "1").replace("\"amount2\":1", "\"cost\":1"), CardNumbers::Refuse).is_ok());
    let large = with("amount", "4111111111111111").replacen("\"amount\":1299,", "", 1);
    assert!(read(&large, CardNumbers::Refuse).is_ok());
}
