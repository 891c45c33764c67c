//! What one of several workers may grant by itself while they cannot count together: every limit divided among them.
//!
//! Refuses to round up: the shares together never exceed the whole, even where that closes a limit to everybody.

use super::decision::{Call, Subject};
use super::limit::Algorithm;
use super::quota_spec::{LimitSpec, QuotaSpec};

impl LimitSpec {
    /// One of `of` equal shares; closed (0) when there is not one request, or no room for one at once, for each.
    #[must_use]
    pub fn share(&self, of: u32) -> Self {
        let of = of.max(1);
        let at_once = self.cost_max() / of;
        // GCRA lets one more come at once than its burst.
        let beyond = u32::from(self.algorithm == Algorithm::Gcra);
        Self {
            max_requests: if at_once == 0 { 0 } else { self.max_requests / of },
            burst: self.burst.map(|_| at_once.saturating_sub(beyond)),
            ..self.clone()
        }
    }
}

impl QuotaSpec {
    /// The same with each limit's share. What account rules allow is divided where a call names it ([`Call::share`]).
    #[must_use]
    pub fn share(&self, of: u32) -> Self {
        Self { limits: self.limits.iter().map(|limit| limit.share(of)).collect(), ..self.clone() }
    }
}

impl Subject {
    fn share(&self, spec: &QuotaSpec, of: u32) -> Self {
        let mut own = self.clone();
        for one in &mut own.limits {
            if let Some(limit) = spec.limits.get(one.index) {
                one.max_requests = LimitSpec { max_requests: one.max_requests, ..limit.clone() }.share(of).max_requests;
            }
        }
        own
    }
}

impl Call {
    /// The same call under shares of a spec's limits: those of its accounts and references are divided as well.
    #[must_use]
    pub fn share(&self, spec: &QuotaSpec, of: u32) -> Self {
        let mut call = self.clone();
        let wanted = call.wants.iter_mut().flat_map(|want| &mut want.subjects);
        let settled = call.settlements.iter_mut().flat_map(|settlement| &mut settlement.subjects);
        wanted.chain(settled).for_each(|subject| *subject = subject.share(spec, of));
        call
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn shares_together_are_never_more_than_the_whole() {
        use Algorithm::{FixedWindow, Gcra, SlidingLog, SlidingWindow, TokenBucket};
        // Algorithm, limit, burst and of how many; then what one of them has, and what may come at once.
        for (algorithm, max, burst, of, share, at_once) in [
            (SlidingLog, 100, None, 1, 100, 100),
            (SlidingLog, 100, None, 4, 25, 25),
            (SlidingLog, 100, None, 3, 33, 33),
            (SlidingLog, 3, None, 4, 0, 0),
            (SlidingLog, 0, None, 4, 0, 0),
            (SlidingWindow, 10, None, 3, 3, 3),
            (FixedWindow, 10, None, 10, 1, 1),
            (TokenBucket, 100, Some(10), 4, 25, 2),
            (TokenBucket, 100, None, 4, 25, 25),
            (TokenBucket, 100, Some(3), 4, 0, 0),
            (TokenBucket, 3, Some(10), 4, 0, 2),
            (Gcra, 100, Some(9), 4, 25, 2),
            (Gcra, 100, Some(3), 4, 25, 1),
            (Gcra, 100, Some(2), 4, 0, 0),
            (Gcra, 100, None, 2, 0, 0),
            (Gcra, 100, None, 1, 100, 1),
        ] {
            let limit = LimitSpec { algorithm, burst, ..LimitSpec::sliding_log("all", max, Duration::from_secs(1)) };
            let one = limit.share(of);
            let case = format!("{algorithm:?} {max} {burst:?} ÷ {of}");
            let at_once = if share == 0 { 0 } else { at_once };
            assert_eq!((one.max_requests, one.cost_max()), (share, at_once), "{case}");
            assert!(one.max_requests * of <= max && one.cost_max() * of <= limit.cost_max(), "{case}");
            assert_eq!((one.window, one.algorithm), (limit.window, limit.algorithm), "{case}");
        }
    }

    #[test]
    fn nobody_divides_by_none() {
        let limit = LimitSpec::sliding_log("all", 7, Duration::from_secs(1));
        assert_eq!(limit.share(0), limit);
    }
}
