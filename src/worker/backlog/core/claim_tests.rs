//! Tests of what a claim takes while the lane is paused, and of what it leaves known.

use super::*;

const UNKNOWN: Flow<u8> = Flow { class: FlowClass::UNKNOWN, account: None };
const PLAIN: Flow<u8> = Flow { class: FlowClass::LAST, account: None };

fn facts(paused_until: Option<Instant>, sends_lookups: bool) -> LaneFacts {
    LaneFacts {
        bounds: AheadBounds { all: 12, of_one_flow: 4, release_waiters: 0 },
        paused_until,
        sends_lookups,
        can_start: true,
        order: JobOrder::None,
        cost_bound: None,
    }
}

/// A core that has looked, and knows these flows.
fn core_with(flows: &[Flow<u8>], now: Instant) -> DispatchCore<u8, u64> {
    let mut core = DispatchCore::new(now);
    core.looked(now, flows.iter().map(|flow| SeenFlow { flow: *flow, blocked_for: None }).collect(), now);
    core
}

#[test]
fn paused_lane_claims_lookups_alone() {
    let now = Instant::now() + Duration::from_secs(60);
    let paused = Some(now + Duration::from_secs(5));
    let step =
        |flows: &[Flow<u8>], sends_lookups| core_with(flows, now).next_step(now, || facts(paused, sends_lookups));
    let DispatchStep::Claim(claim) = step(&[UNKNOWN, PLAIN], true) else { panic!("no look-up is claimed") };
    assert_eq!(claim.class_max, FlowClass::UNKNOWN);
    for (flows, sends_lookups) in [(&[UNKNOWN, PLAIN][..], false), (&[PLAIN][..], true)] {
        assert!(matches!(step(flows, sends_lookups), DispatchStep::Wait(_)), "{flows:?}");
    }
    let unpaused = core_with(&[UNKNOWN, PLAIN], now).next_step(now, || facts(None, true));
    assert!(matches!(unpaused, DispatchStep::Claim(claim) if claim.class_max == FlowClass::LAST));
}

/// The next step after the pause claims what the look-ups have left.
#[test]
fn end_of_the_pause_is_not_missed() {
    let now = Instant::now() + Duration::from_secs(60);
    let until = now + Duration::from_millis(300);
    let mut core = core_with(&[UNKNOWN, PLAIN], now);
    let DispatchStep::Claim(claim) = core.next_step(now, || facts(Some(until), true)) else { panic!("no claim") };
    core.claimed(&claim, [UNKNOWN].into_iter(), None, now);
    assert!(matches!(core.next_step(now, || facts(Some(until), true)), DispatchStep::Wait(at) if at <= until));
    let after = core.next_step(until, || facts(None, true));
    assert!(matches!(after, DispatchStep::Claim(claim) if claim.class_max == FlowClass::LAST), "{claim:?}");
}

/// Otherwise new jobs of the flow would be recorded behind nothing.
#[test]
fn drained_flow_is_forgotten() {
    let began = Instant::now() + Duration::from_secs(60);
    let later = began + Duration::from_millis(1);
    let now = began + Duration::from_millis(2);
    let other = Flow { class: FlowClass::LAST, account: Some(7) };
    let mut core = core_with(&[PLAIN, other], began - Duration::from_secs(1));
    core.look_at = now + Duration::from_secs(1);
    let DispatchStep::Claim(claim) = core.next_step(began, || facts(None, false)) else { panic!("no claim") };
    // A job of one flow came during the claim, and the other flow gave as many as one may.
    core.record_new(&UNKNOWN, later);
    core.claimed(&claim, [other; 4].into_iter(), None, now);
    assert_eq!([PLAIN, other, UNKNOWN].map(|flow| core.knows(&flow)), [false, true, true]);
}

/// The look was made a second ago, for all lanes: the next one is not later because of that.
#[test]
fn next_look_follows_the_last_one() {
    let began = Instant::now();
    let mut core = DispatchCore::<u8, u64>::new(began);
    let facts = || facts(None, false);
    core.looked(began, Vec::new(), began);
    assert_eq!(core.next_step(began + Duration::from_secs(1), facts), DispatchStep::Wait(began + IDLE_INTERVAL));
    assert_eq!(core.next_step(began + IDLE_INTERVAL, facts), DispatchStep::Look);
}

/// A record of another process is looked for at once, unless flows are known: then looks come soon enough.
#[test]
fn news_make_an_idle_lane_look() {
    let now = Instant::now();
    let mut idle = core_with(&[], now);
    assert!(matches!(idle.next_step(now, || facts(None, true)), DispatchStep::Wait(_)));
    assert!(idle.record_news(now));
    assert_eq!(idle.next_step(now, || facts(None, true)), DispatchStep::Look);
    let mut busy = core_with(&[PLAIN], now);
    assert!(!busy.record_news(now));
    assert!(!matches!(busy.next_step(now, || facts(None, true)), DispatchStep::Look));
}
