//! The costs for which a limit of the provider has too few free slots: payments of such a cost wait, and cheaper ones
//! pass.
//!
//! A refusal by cost holds for every payment that costs as much or more, until its instant. A lane keeps a few of them, so
//! that costly payments stay in the backlog meanwhile and cheaper ones are claimed past them.

use std::collections::BTreeMap;

use tokio::time::Instant;

/// The costs that wait, with the limit that each waits for and until when.
#[derive(Debug, Default)]
pub struct CostWaits(BTreeMap<u32, CostWait>);

/// The wait of payments that cost as much as this, or more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostWait {
    pub cost: u32,
    pub limit: String,
    pub until: Instant,
}

/// A lane's payments that may be sent: those below this cost, until then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostBound {
    pub below: u32,
    pub until: Instant,
}

impl CostWaits {
    /// Records a refusal. A wait that is longer, of a cost as low, includes it.
    pub fn record(&mut self, wait: CostWait, now: Instant) {
        self.0.retain(|cost, known| known.until > now && (*cost < wait.cost || known.until > wait.until));
        let is_included = self.0.range(..=wait.cost).any(|(_, known)| known.until >= wait.until);
        if !is_included {
            self.0.insert(wait.cost, wait);
        }
    }

    /// The wait of a payment of this cost; `None`: it may ask for its permit.
    pub fn of(&self, cost: u32, now: Instant) -> Option<&CostWait> {
        let waits = self.0.range(..=cost).map(|(_, wait)| wait).filter(|wait| wait.until > now);
        waits.max_by_key(|wait| wait.until)
    }

    /// The wait of the least cost that waits.
    pub fn least(&self, now: Instant) -> Option<&CostWait> {
        self.0.values().find(|wait| wait.until > now)
    }

    /// What the lane may send now; `None`: every payment.
    pub fn bound(&self, now: Instant) -> Option<CostBound> {
        self.least(now).map(|wait| CostBound { below: wait.cost, until: wait.until })
    }

    /// Ends all waits: the limits may allow more.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn wait(cost: u32, until: Instant) -> CostWait {
        CostWait { cost, limit: "all".to_owned(), until }
    }

    #[test]
    fn cheaper_payments_pass_until_nothing_is_free() {
        let (now, mut waits) = (Instant::now(), CostWaits::default());
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!((waits.bound(now), waits.of(1_000, now)), (None, None));
        waits.record(wait(50, at(60)), now);
        assert_eq!(waits.bound(now), Some(CostBound { below: 50, until: at(60) }));
        assert_eq!((waits.of(49, now), waits.of(50, now).map(|wait| wait.until)), (None, Some(at(60))));
        waits.record(wait(20, at(30)), now);
        assert_eq!(waits.bound(now), Some(CostBound { below: 20, until: at(30) }));
        assert_eq!([20, 50, 80].map(|cost| waits.of(cost, now).unwrap().until), [at(30), at(60), at(60)]);
        assert_eq!(waits.bound(at(30)), Some(CostBound { below: 50, until: at(60) }));
        assert_eq!(waits.bound(at(60)), None);
        waits.clear();
        assert_eq!(waits.bound(now), None);
    }

    proptest! {
        /// Each cost waits exactly as long as the longest refusal of a cost that is as low.
        #[test]
        fn each_cost_waits_as_long_as_its_longest_refusal(
            refusals in prop::collection::vec((1..8_u32, 1..100_u64), 1..40), cost in 1..9_u32, at in 0..100_u64,
        ) {
            let now = Instant::now();
            let mut waits = CostWaits::default();
            for (cost, until) in &refusals {
                waits.record(wait(*cost, now + Duration::from_secs(*until)), now);
            }
            let of_cost = refusals.iter().filter(|(refused, until)| *refused <= cost && *until > at);
            let expected = of_cost.map(|(_, until)| now + Duration::from_secs(*until)).max();
            prop_assert_eq!(waits.of(cost, now + Duration::from_secs(at)).map(|wait| wait.until), expected);
        }
    }
}
