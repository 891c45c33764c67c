//! The life of a reference's key in Redis while the reference is in use and its limits change: never shorter than its
//! uses count.

use super::*;

/// Longer than any key's life, in milliseconds. A key with less was renewed by the call.
const NOT_RENEWED_MS: u64 = 1 << 45;

#[test]
fn key_outlives_uses_without_renewal_on_each() {
    let mut lua = LuaSide::new("lifetimes");
    let with = |version, window: Duration, hold_max| {
        let reference = LimitSpec { scope: Scope::Reference, ..LimitSpec::sliding_log("own", 1_000, window) };
        let all = LimitSpec::sliding_log("all", 100_000, Duration::from_secs(86_400));
        QuotaSpec { version, hold_max, limits: vec![all, reference], ..spec(&[]) }
    };
    let (minute, hour) = (60 * SECOND, 3_600 * SECOND);
    let specs =
        [with(1, minute, SECOND), with(2, hour, SECOND), with(3, minute, SECOND), with(4, minute, 600 * SECOND)];
    let subjects = specs[0].subjects(None, Some("r")).unwrap();
    let (mut now, mut number, mut expires_us, mut renewed) = (Micros(START_US), 0, 0, 0);
    let call = |number, wants, rebuild| LimiterCall {
        incarnation: 1,
        number,
        requests: wants,
        releases: Vec::new(),
        pause: None,
        rebuild,
        seeds: None,
        invalidate_epoch: None,
        look_ahead: BOOKING_HORIZON,
        run_id: "run".to_owned(),
    };
    let born = lua.call(now, &specs[0], &call(1, Vec::new(), None)).state_epoch;
    lua.call(now, &specs[0], &call(2, Vec::new(), Some(forgotten_nothing(born))));
    for spec in &specs {
        for _ in 0..200 {
            now.0 += 7_000_000;
            number += 1;
            let subjects = spec.subjects(None, Some("r")).unwrap();
            let key = format!("lifetimes:{{{}}}:{}", spec.quota, subjects[0].key);
            redis::cmd("PEXPIRE").arg(&key).arg(NOT_RENEWED_MS).exec(&mut lua.connection).unwrap();
            lua.call(
                now,
                spec,
                &call(2 + number, vec![PermitRequest { subjects, ..PermitRequest::charges(1, 1) }], None),
            );
            let left_ms: u64 = redis::cmd("PTTL").arg(&key).query(&mut lua.connection).unwrap();
            if left_ms < NOT_RENEWED_MS / 2 {
                (expires_us, renewed) = (now.0 + left_ms * 1_000, renewed + 1);
            }
            let matters_us = now.0 + spec.count_delay_max_us() + padded_us(spec, 1);
            assert!(expires_us >= matters_us, "{} us too early, version {}", matters_us - expires_us, spec.version);
        }
    }
    assert!(renewed < 400, "renewed {renewed} times in 800 uses of {subjects:?}");
}
