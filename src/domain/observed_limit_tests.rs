use proptest::prelude::*;

use super::*;

/// A provider with one limit.
#[derive(Clone, Copy, Debug)]
struct Judge {
    max_requests: u32,
    window: Duration,
    is_fixed: bool,
    counts_refused: bool,
}

impl Judge {
    /// Sends a request at each instant; after a 429, none for `backoff_ms`.
    fn answer(self, instants: &[i64], backoff_ms: i64) -> Vec<AnsweredRequest> {
        let window_ms = ms(self.window);
        let (mut sent, mut not_before) = (Vec::<AnsweredRequest>::new(), i64::MIN);
        for &at in instants {
            if at < not_before {
                continue;
            }
            let since = if self.is_fixed { at.div_euclid(window_ms) * window_ms } else { at - window_ms + 1 };
            let counted = sent.iter().rev().take_while(|other| other.at.0 >= since);
            let used = counted.filter(|other| self.counts_refused || !other.is_throttled).count();
            let is_throttled = used >= self.max_requests as usize;
            if is_throttled {
                not_before = at + backoff_ms;
            }
            sent.push(AnsweredRequest { at: EpochMs(at), is_throttled });
        }
        sent
    }

    fn per_second(self) -> f64 {
        f64::from(self.max_requests) / self.window.as_secs_f64()
    }
}

/// Requests at `load` times the judge's rate, with random gaps, for so many windows.
fn instants(judge: Judge, load: f64, windows: u32, gaps: &[u32]) -> Vec<i64> {
    let mean_ms = 1_000.0 / (judge.per_second() * load);
    let end = 10_000_000 + i64::from(windows) * ms(judge.window);
    let (mut at, mut all) = (10_000_000.0, Vec::new());
    for gap in gaps.iter().cycle() {
        at += mean_ms * f64::from(*gap) / 100.0;
        if at as i64 >= end {
            break;
        }
        all.push(at as i64);
    }
    all
}

fn seen(judge: Judge, sent: &[AnsweredRequest], configured: &[Duration]) -> Option<Rate> {
    let now = sent.last().map_or(EpochMs(0), |last| last.at);
    // The provider was idle before, and we know it.
    let from = EpochMs(10_000_000 - 2 * ms(judge.window).max(3_600_000));
    let recent = sent.iter().filter(|request| request.is_throttled && now.0 - request.at.0 <= ms(RECENT)).count();
    let observed = observe(sent, from, now, configured);
    assert_eq!(observed.is_some(), recent >= REPEATED);
    observed?.rate
}

fn judges() -> impl Strategy<Value = Judge> {
    let windows = prop::sample::select(vec![1_000_u64, 10_000, 60_000]);
    (20..200_u32, windows, any::<bool>(), any::<bool>()).prop_map(|(max_requests, window_ms, is_fixed, refused)| {
        Judge { max_requests, window: Duration::from_millis(window_ms), is_fixed, counts_refused: refused }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn suggestion_is_never_above_what_was_accepted(
        judge in judges(), load in 0.3..4.0_f64, backoff in 0..3_i64,
        gaps in prop::collection::vec(1..400_u32, 20..200),
    ) {
        let sent = judge.answer(&instants(judge, load, 8, &gaps), backoff * ms(judge.window) / 2);
        if let Some(rate) = seen(judge, &sent, &[judge.window]) {
            prop_assert!(rate.max_requests() <= largest_accepted(&sent, rate.window()), "{judge:?}: {rate}");
        }
    }

    /// The traffic probes the limit again and again: it comes back after each 429, and uses the window up.
    #[test]
    fn probed_limit_is_suggested_within_five_percent(
        judge in judges(), load in 1.6..4.0_f64, gaps in prop::collection::vec(50..150_u32, 20..200),
        knows_window in any::<bool>(),
    ) {
        prop_assume!(knows_window || judge.window.as_millis() != 10_000);
        let backoff_ms = if judge.counts_refused { ms(judge.window) } else { ms(judge.window) / 10 };
        let sent = judge.answer(&instants(judge, load, 12, &gaps), backoff_ms);
        let configured = [judge.window];
        let rate = seen(judge, &sent, if knows_window { &configured } else { &[] });
        let rate = rate.ok_or_else(|| TestCaseError::fail(format!("{judge:?}: nothing explains it")))?;
        let per_second = f64::from(rate.max_requests()) / rate.window().as_secs_f64();
        let ratio = per_second / judge.per_second();
        prop_assert!((0.95..=1.05).contains(&ratio), "{judge:?}: {rate}, {ratio}");
    }
}

#[test]
fn few_or_old_throttles_suggest_nothing() {
    let judge = Judge { max_requests: 10, window: Duration::from_secs(1), is_fixed: false, counts_refused: false };
    let sent = judge.answer(&instants(judge, 2.0, 6, &[100]), 500);
    let throttled = sent.iter().filter(|request| request.is_throttled).count();
    assert!(throttled >= REPEATED, "{throttled}");
    let from = EpochMs(0);
    let last = sent.last().unwrap().at;
    let observed = observe(&sent, from, last, &[]).unwrap();
    assert_eq!(observed.rate.map(|rate| rate.to_string()), Some("10/1s".to_owned()));
    assert_eq!(observe(&sent, from, EpochMs(last.0 + ms(RECENT) + 1), &[]), None, "long ago");
    let mut left = REPEATED;
    let few: Vec<AnsweredRequest> = sent
        .iter()
        .copied()
        .filter(|request| {
            left -= usize::from(request.is_throttled && left > 0);
            !request.is_throttled || left > 0
        })
        .collect();
    assert_eq!(observe(&few, from, last, &[]), None);
    assert_eq!(observe(&[], from, last, &[]), None);
}

/// 429s of locked objects, or of a limit that others use up, come at any count.
#[test]
fn unrelated_throttles_explain_no_window() {
    let sent: Vec<AnsweredRequest> = (0..7_200_i64)
        .map(|second| AnsweredRequest {
            at: EpochMs(second * 1_000 + second % 7 * 90),
            is_throttled: second % 97 == 50,
        })
        .flat_map(|request| [request, AnsweredRequest { is_throttled: false, ..request }])
        .collect();
    let observed = observe(&sent, EpochMs(-4_000_000), sent.last().unwrap().at, &[]).unwrap();
    assert_eq!(observed.rate, None);
}
