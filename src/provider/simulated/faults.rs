//! Which requests go wrong, and how long each takes: drawn from the seed, the key and the number of the try.
//!
//! Refuses a shared random stream: which request draws what would then depend on the order of arrival, and no run could
//! be repeated.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use sha2::{Digest as _, Sha256};

use super::FakeOptions;

/// What is in store for one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Draw {
    pub(super) latency: Duration,
    /// Status of a fault, 500 or 503.
    pub(super) error: Option<u16>,
    pub(super) lost_answer: bool,
    pub(super) declined: bool,
    /// Another holds a lock on the payment's object.
    pub(super) busy: bool,
}

/// Draws for the `attempt`-th request under this key.
pub(super) fn draw(options: &FakeOptions, key: &str, attempt: u32) -> Draw {
    let mut hash = Sha256::new();
    hash.update(options.seed.to_le_bytes());
    hash.update(attempt.to_le_bytes());
    hash.update(key);
    let mut rng = StdRng::from_seed(hash.finalize().into());
    let (least, most) = options.latency;
    let happens = |rng: &mut StdRng, rate: f64| rng.random::<f64>() < rate;
    // Always in this order and always all of them, so that changing one rate moves none of the other draws.
    let latency = least + most.saturating_sub(least).mul_f64(rng.random::<f64>());
    let failed = happens(&mut rng, options.error_rate);
    let status = if rng.random::<bool>() { 500 } else { 503 };
    Draw {
        latency,
        error: failed.then_some(status),
        lost_answer: happens(&mut rng, options.lost_answer_rate),
        declined: happens(&mut rng, options.decline_rate),
        busy: happens(&mut rng, options.busy_rate),
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
        let draws: Vec<Draw> = (0..4_000).map(|n| draw(&options, &format!("pay-{n}"), 1)).collect();
        assert_eq!(draws[17], draw(&options, "pay-17", 1));
        assert_ne!(draws[17], draw(&options, "pay-17", 2));
        assert_ne!(draws[17], draw(&FakeOptions { seed: 8, ..options.clone() }, "pay-17", 1));
        let count = |what: fn(&Draw) -> bool| draws.iter().filter(|draw| what(draw)).count();
        assert!((300..500).contains(&count(|draw| draw.error.is_some())));
        assert!((650..950).contains(&count(|draw| draw.lost_answer)));
        assert!((1_850..2_150).contains(&count(|draw| draw.declined)));
        assert!((1_050..1_350).contains(&count(|draw| draw.busy)));
        assert!(draws.iter().all(|draw| (20..=80).contains(&draw.latency.as_millis())));
        let statuses: std::collections::BTreeSet<_> = draws.iter().filter_map(|draw| draw.error).collect();
        assert_eq!(statuses, [500, 503].into());
    }

    #[test]
    fn no_rate_means_no_fault_and_a_whole_one_always() {
        let calm = draw(&FakeOptions::default(), "x", 1);
        assert_eq!(
            calm,
            Draw { latency: Duration::ZERO, error: None, lost_answer: false, declined: false, busy: false }
        );
        let all = FakeOptions { lost_answer_rate: 1.0, ..FakeOptions::default() };
        assert!((0..100).all(|attempt| draw(&all, "x", attempt).lost_answer));
    }
}
