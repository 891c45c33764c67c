//! Random faults and latencies of requests, drawn from the seed, the key and the number of the try.
//!
//! There is no shared random stream. With one, each draw would depend on the order of arrival, and no run could be
//! repeated.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use sha2::{Digest as _, Sha256};

use super::FakeOptions;

/// Latency and faults of one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct FaultDraw {
    pub(super) latency: Duration,
    /// Status of an error response, 500 or 503.
    pub(super) error_status: Option<u16>,
    pub(super) loses_response: bool,
    pub(super) declines: bool,
    /// The payment's object is locked by another request.
    pub(super) is_busy: bool,
}

/// Draws for the `attempt`-th request under this key.
pub(super) fn draw(options: &FakeOptions, key: &str, attempt: u32) -> FaultDraw {
    let mut hash = Sha256::new();
    hash.update(options.seed.to_le_bytes());
    hash.update(attempt.to_le_bytes());
    hash.update(key);
    let mut rng = StdRng::from_seed(hash.finalize().into());
    let (least, most) = options.latency;
    let happens = |rng: &mut StdRng, rate: f64| rng.random::<f64>() < rate;
    // Always all draws, in this order, so that a change of one rate changes none of the other draws.
    let latency = least + most.saturating_sub(least).mul_f64(rng.random::<f64>());
    let failed = happens(&mut rng, options.error_rate);
    let status = if rng.random::<bool>() { 500 } else { 503 };
    FaultDraw {
        latency,
        error_status: failed.then_some(status),
        loses_response: happens(&mut rng, options.lost_answer_rate),
        declines: happens(&mut rng, options.decline_rate),
        is_busy: happens(&mut rng, options.busy_rate),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_repeat_and_keep_their_rates() {
        let options = FakeOptions {
            latency: (Duration::from_millis(20), Duration::from_millis(80)),
            error_rate: 0.1,
            lost_answer_rate: 0.2,
            decline_rate: 0.5,
            busy_rate: 0.3,
            seed: 7,
            ..FakeOptions::default()
        };
        let draws: Vec<FaultDraw> = (0..4_000).map(|n| draw(&options, &format!("pay-{n}"), 1)).collect();
        assert_eq!(draws[17], draw(&options, "pay-17", 1));
        assert_ne!(draws[17], draw(&options, "pay-17", 2));
        assert_ne!(draws[17], draw(&FakeOptions { seed: 8, ..options.clone() }, "pay-17", 1));
        let count = |what: fn(&FaultDraw) -> bool| draws.iter().filter(|draw| what(draw)).count();
        assert!((300..500).contains(&count(|draw| draw.error_status.is_some())));
        assert!((650..950).contains(&count(|draw| draw.loses_response)));
        assert!((1_850..2_150).contains(&count(|draw| draw.declines)));
        assert!((1_050..1_350).contains(&count(|draw| draw.is_busy)));
        assert!(draws.iter().all(|draw| (20..=80).contains(&draw.latency.as_millis())));
        let statuses: std::collections::BTreeSet<_> = draws.iter().filter_map(|draw| draw.error_status).collect();
        assert_eq!(statuses, [500, 503].into());
    }

    #[test]
    fn rate_zero_never_fails_rate_one_always() {
        let calm = draw(&FakeOptions::default(), "x", 1);
        assert_eq!(
            calm,
            FaultDraw {
                latency: Duration::ZERO,
                error_status: None,
                loses_response: false,
                declines: false,
                is_busy: false
            }
        );
        let all = FakeOptions { lost_answer_rate: 1.0, ..FakeOptions::default() };
        assert!((0..100).all(|attempt| draw(&all, "x", attempt).loses_response));
    }
}
