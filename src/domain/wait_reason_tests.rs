use std::collections::BTreeSet;

use super::*;

/// One of each, as the ledger may hold it.
fn stored() -> impl Iterator<Item = WaitReason> {
    WaitReason::all().into_iter().map(|reason| match reason {
        WaitReason::Limit(_) => WaitReason::Limit("per-minute".to_owned()),
        WaitReason::CostExceedsLimit(_) => WaitReason::CostExceedsLimit("per-minute".to_owned()),
        other => other,
    })
}

#[test]
fn wait_reasons_round_trip() {
    for reason in stored() {
        let (code, limit) = (reason.code(), reason.limit().map(str::to_owned));
        assert_eq!(LIMIT_CODES.contains(&code), limit.is_some(), "{code}");
        // A limit is named exactly where the code means one.
        let other = if limit.is_some() { None } else { Some("per-minute".to_owned()) };
        assert_eq!(WaitReason::from_columns(code, other), None, "{code}");
        assert_eq!(WaitReason::from_columns(code, limit), Some(reason));
    }
    for code in ["", "LIMIT", "limits", "waits for limit per-minute", "NULL"] {
        assert_eq!(WaitReason::from_columns(code, None), None, "{code}");
    }
}

#[test]
fn codes_are_distinct_snake_case() {
    let codes: BTreeSet<&str> = WaitReason::all().iter().map(WaitReason::code).collect();
    assert_eq!(codes.len(), WaitReason::all().len());
    for code in &codes {
        assert!(code.len() <= 32 && code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{code}");
    }
    assert!(LIMIT_CODES.iter().chain(&PROVIDER_WAIT_CODES).all(|code| codes.contains(code)));
}

#[test]
fn sentences_have_limit_and_detail() {
    assert_eq!(Wait::for_limit("per-minute").to_string(), "waits for limit per-minute");
    let costly = Wait::for_larger_limit("per-minute", 5, 3).to_string();
    assert_eq!(costly, "waits for limit per-minute: cost 5 exceeds the 3 that it admits at once");
    for reason in stored() {
        assert!(!sentence(&reason, None).is_empty() && !past_sentence(&reason, None).is_empty());
        let detailed = sentence(&reason, Some("connection refused"));
        assert!(detailed.ends_with("connection refused"), "{detailed}");
    }
    assert_eq!(past_sentence(&WaitReason::Limit("per-account".to_owned()), None), "waited for limit per-account");
    assert_eq!(past_sentence(&WaitReason::Throttled, None), "delayed (throttled by the provider)");
    let costly = past_sentence(&WaitReason::CostExceedsLimit("per-account".to_owned()), Some("cost 5 exceeds 3"));
    assert_eq!(costly, "waited for limit per-account: cost 5 exceeds 3");
    assert_eq!(past_sentence(&WaitReason::Misconfigured, Some("answered 401")), "delayed (answered 401)");
}
