//! State that the functions do not remember: what they check of it, and which operations make them forget it.

use sha2::{Digest, Sha256};

use super::*;

/// The layout of an earlier build: the head of `m` had no digest of the library's text and no number of calls.
#[tokio::test]
async fn state_of_another_layout_begins_cold() {
    let redis = Redis::start();
    let mut tampered = Tampered::new(&redis, "layout").await;
    let run_id = tampered.caller.limiter.run_id(&tampered.caller.spec.quota).await.unwrap();
    let state = tampered.field(b"m");
    let run = &Sha256::digest(run_id)[..8];
    tampered.overwrite(b"m", &[run, &state[8..16], &state[24..64], &state[70..]].concat());
    tampered.forget_what_was_written();
    assert_eq!(tampered.go_on("another layout").await, (LEFT, 0));
}

#[tokio::test]
async fn check_keeps_the_loaded_library() {
    let redis = Redis::start();
    let mut tampered = Tampered::new(&redis, "checked").await;
    let report = RedisLimiter::new(&redis.url(), "checked").unwrap().report().await.unwrap();
    assert!(report.nodes.iter().all(|node| node.facts.is_ok()), "{report:?}");
    let mut state = tampered.field(b"m");
    // One call more, which contradicts nothing else in the state.
    state[64] += 1;
    tampered.overwrite(b"m", &state);
    tampered.caller.number += 1;
    let error = tampered.caller.repeat(&[1]).await.unwrap_err();
    assert!(error.to_string().contains("not what was written last"), "{error}");
}

/// The next call remembers the fields of all callers, also of callers that have not called since.
#[tokio::test]
async fn silent_callers_field_is_remembered() {
    let redis = Redis::start();
    for deadline in [1, u64::MAX] {
        let mut tampered = Tampered::new(&redis, &format!("silent-{deadline}")).await;
        tampered.forget_what_was_written();
        let mut other = Caller::new(&tampered.caller.limiter, tampered.caller.spec.clone());
        other.call(&[]).await;
        let mut field = tampered.field(&tampered.mine());
        // The last permit in flight: call 6, deadline 7, charges 4, look-ups 4 bytes.
        let at = field.len() - 15;
        field[at..at + 7].copy_from_slice(&deadline.to_le_bytes()[..7]);
        tampered.overwrite(&tampered.mine(), &field);
        tampered.caller.number += 1;
        let error = tampered.caller.repeat(&[1]).await.unwrap_err();
        assert!(error.to_string().contains("not what was written last"), "{deadline}: {error}");
    }
}
