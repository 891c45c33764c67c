//! Peeks at a limit while it fills and while it is idle: never an error, and always the usage of the specification.

use sluicegate::domain::quota::Quota;

use super::differential::{LuaSide, standings};
use super::*;

const START_US: u64 = 1_800_000_000_000_000;

/// 20 charges per second, one every 50 ms, each answered 7 ms later, for more than a minute; then none for two. The log
/// of the limit per minute fills many chunks. Its oldest use ends in every place: head, first chunk, middle, tail.
#[test]
fn peek_answers_while_a_limit_fills_and_idles() {
    let spec = spec(&[("per-minute", 600, 60_000), ("per-second", 20, 1_000)]);
    let (mut lua, mut twin) = (LuaSide::new("peek-fills"), Quota::default());
    let (mut now_us, mut born, mut most) = (START_US, None, 0);
    let mut granted: Option<u64> = None;
    for number in 1..=1_300 {
        let releases = granted.take().map(|call| used(call, 1, 43_000)).into_iter().collect();
        let call = LimiterCall {
            incarnation: 1,
            number,
            requests: wants(&[1]),
            releases,
            pause: None,
            rebuild: born.map(forgotten_nothing),
            seeds: None,
            invalidate_epoch: None,
            look_ahead: BOOKING_HORIZON,
            run_id: "run".to_owned(),
        };
        let reply = lua.call(Micros(now_us), &spec, &call);
        assert_eq!(reply, twin.call(Micros(now_us), &spec, &call));
        born = Some(reply.state_epoch);
        granted = (reply.permits() > 0).then_some(number);
        for part_us in [0, 16_667, 33_334] {
            let at = Micros(now_us + part_us);
            let counted = standings(&twin, at, &spec, None);
            assert_eq!(lua.peek(at, &spec, None), counted, "{} ms after the start", (at.0 - START_US) / 1_000);
            most = most.max(counted[0].used);
        }
        now_us += 50_000;
    }
    assert_eq!(most, 600, "the limit per minute was never full");
    let mut states = std::collections::BTreeSet::new();
    for idle_ms in 0..4_000 {
        let at = Micros(now_us + idle_ms * 31_000);
        let counted = standings(&twin, at, &spec, None);
        assert_eq!(lua.peek(at, &spec, None), counted, "idle for {} ms", idle_ms * 31);
        states.insert(counted[0].used);
    }
    assert!(states.len() > 500, "only {} different counts were seen", states.len());
}

/// Logs of one chunk, two chunks and so on, peeked at in each millisecond in which a use ends. The search for the
/// oldest use that counts ends in each chunk, along each path.
#[test]
fn peek_answers_for_any_number_of_chunks() {
    let (mut lua, mut spec) = (LuaSide::new("peek-chunks"), spec(&[("all", 1_000, 2_000)]));
    for chunks in 1..=40 {
        spec.quota = ProviderName::new(format!("chunks-{chunks}")).unwrap();
        let (mut twin, mut now_us, mut born) = (Quota::default(), START_US, None);
        for number in 1..=chunks {
            let granted = number > 2;
            let call = LimiterCall {
                incarnation: 1,
                number,
                requests: if number == 1 { Vec::new() } else { wants(&[1; 3]) },
                releases: if granted {
                    [3_000, 2_000, 1_000].map(|us| used(number - 1, 1, us)).into()
                } else {
                    Vec::new()
                },
                pause: None,
                rebuild: born.map(forgotten_nothing),
                seeds: None,
                invalidate_epoch: None,
                look_ahead: BOOKING_HORIZON,
                run_id: "run".to_owned(),
            };
            let reply = lua.call(Micros(now_us), &spec, &call);
            assert_eq!(reply, twin.call(Micros(now_us), &spec, &call));
            born = Some(reply.state_epoch);
            now_us += 3_000;
        }
        for ms in 0..3 * chunks + 10 {
            let at = Micros(START_US + 2_002_000 + ms * 1_000);
            let counted = standings(&twin, at, &spec, None);
            assert_eq!(lua.peek(at, &spec, None), counted, "{chunks} calls, {ms} ms after the first use ends");
        }
    }
}
