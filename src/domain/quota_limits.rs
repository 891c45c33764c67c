//! Limits of a quota, combined from its rows, and their shares: the part of every limit that each worker may grant by
//! itself while the workers cannot count together.
//!
//! Rows that name the same limit share it, with the stricter numbers (`docs/decisions/0018-strictest-row-of-a-quota.md`).
//! Shares are rounded down, so all of them together never exceed the limit, even where that closes a limit to every
//! worker (`docs/decisions/0015-fallback-shares-without-redis.md`).

use std::collections::BTreeMap;

use super::limit::{AppliesTo, Limit, Scope};
use super::permit_protocol::{LimiterCall, PermitRequest, Subject};
use super::provider::{Provider, ProviderName};
use super::quota_spec::{LimitSpec, QuotaSpec};

impl LimitSpec {
    /// As [`Limit::applies_to_every_charge`].
    pub fn applies_to_every_charge(&self) -> bool {
        self.scope == Scope::Provider && self.applies_to != AppliesTo::Lookup && !self.shadow
    }

    /// A limit of one row, without the row's reserve.
    pub fn of_row(row: &Provider, limit: &Limit) -> Self {
        Self {
            name: limit.name.clone(),
            algorithm: limit.algorithm,
            scope: limit.scope,
            applies_to: limit.applies_to,
            shadow: limit.shadow,
            max_requests: row.after_reserve(limit.rate.max_requests()),
            window: limit.rate.window(),
            offset: limit.offset,
            burst: limit.burst.map(|burst| row.burst_after_reserve(burst)),
        }
    }
}

/// Limits of a quota by their names in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuotaLimits(BTreeMap<String, LimitSpec>);

impl QuotaLimits {
    /// The limits of these rows.
    pub fn of_rows<'a>(rows: impl IntoIterator<Item = &'a Provider>) -> Self {
        let mut limits = Self::default();
        for row in rows {
            for limit in &row.limits {
                limits.add(&row.name, LimitSpec::of_row(row, limit));
            }
        }
        limits
    }

    /// Adds a row's limit and returns its name in the quota. Rows that name the same limit share it, with the lower
    /// numbers; if they count differently, each keeps its own.
    pub fn add(&mut self, row: &ProviderName, spec: LimitSpec) -> String {
        let name = spec.name.clone();
        let kind = |spec: &LimitSpec| (spec.algorithm, spec.scope, spec.applies_to, spec.shadow, spec.offset);
        match self.0.get_mut(&spec.name) {
            Some(other) if kind(other) == kind(&spec) => {
                *other = other.stricter_of(&spec);
            }
            Some(_) => {
                let name = format!("{name}@{row}");
                self.0.insert(name.clone(), LimitSpec { name: name.clone(), ..spec });
                return name;
            }
            None => {
                self.0.insert(name.clone(), spec);
            }
        }
        name
    }

    /// The limits in the order of their names; `None`: there are none.
    pub fn into_specs(self) -> Option<Vec<LimitSpec>> {
        (!self.0.is_empty()).then(|| self.0.into_values().collect())
    }
}

impl LimitSpec {
    /// One of `of` equal shares. It is closed (0) if there is less than one request, or less than one at once, for
    /// each.
    pub fn divided_by(&self, of: u32) -> Self {
        let of = of.max(1);
        let at_once = self.cost_max() / of;
        Self {
            max_requests: if at_once == 0 { 0 } else { self.max_requests / of },
            burst: self.burst.map(|_| self.algorithm.burst_for_capacity(at_once)),
            ..self.clone()
        }
    }
}

impl QuotaSpec {
    /// The spec with each limit divided by `of`. Account rules are divided where a call names them
    /// ([`LimiterCall::divided_by`]).
    pub fn divided_by(&self, of: u32) -> Self {
        Self { limits: self.limits.iter().map(|limit| limit.divided_by(of)).collect(), ..self.clone() }
    }
}

impl Subject {
    /// The subject with its limits under this spec divided by `of`.
    pub fn divided_by(&self, spec: &QuotaSpec, of: u32) -> Self {
        let mut own = self.clone();
        for subject_limit in &mut own.limits {
            if let Some(limit) = spec.limits.get(subject_limit.index) {
                let share = limit.with_subject_limit(subject_limit).divided_by(of);
                (subject_limit.max_requests, subject_limit.burst) = (share.max_requests, share.burst);
            }
        }
        own
    }
}

impl PermitRequest {
    /// The request under divided limits: those of its account and reference are divided as well.
    pub fn divided_by(&self, spec: &QuotaSpec, of: u32) -> Self {
        let subjects = self.subjects.iter().map(|subject| subject.divided_by(spec, of)).collect();
        Self { subjects, ..self.clone() }
    }

    /// The tightest of the limits that count this request and can never admit its cost. A closed limit does not count:
    /// every request waits for it.
    pub fn exceeded_limit(&self, spec: &QuotaSpec) -> Option<usize> {
        let provider = spec.provider_limits().into_iter().zip(spec.provider_counters());
        let provider = provider.filter(|(_, counter)| !counter.is_pacing());
        let own = self.subjects.iter().flat_map(|subject| {
            let indices = subject.limits.iter().map(|own| own.index);
            indices.zip(spec.subject_counters(subject))
        });
        let counting = provider.chain(own).filter(|(_, counter)| !counter.shadow && counter.applies(self.kind));
        let exceeded = counting.filter(|(_, counter)| (1..self.cost).contains(&counter.max));
        exceeded.min_by_key(|(_, counter)| counter.max).map(|(index, _)| index)
    }
}

impl LimiterCall {
    /// The call under divided limits: those of its accounts and references are divided as well.
    pub fn divided_by(&self, spec: &QuotaSpec, of: u32) -> Self {
        let mut call = self.clone();
        call.requests.iter_mut().for_each(|request| *request = request.divided_by(spec, of));
        let released = call.releases.iter_mut().flat_map(|release| &mut release.subjects);
        released.for_each(|subject| *subject = subject.divided_by(spec, of));
        let seeded = call.seeds.iter_mut().flat_map(|seeds| &mut seeds.subjects);
        seeded.for_each(|seed| seed.subject = seed.subject.divided_by(spec, of));
        call
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::domain::limit::Algorithm;
    use crate::domain::permit_protocol::CallKind;
    use crate::domain::provider::{Pacing, StoreDown};

    #[test]
    fn shares_never_exceed_the_whole() {
        use Algorithm::{FixedWindow, Gcra, SlidingLog, SlidingWindow, TokenBucket};
        // Algorithm, limit, burst and number of shares; then one share's requests, and its requests at once.
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
            let one = limit.divided_by(of);
            let case = format!("{algorithm:?} {max} {burst:?} ÷ {of}");
            let at_once = if share == 0 { 0 } else { at_once };
            assert_eq!((one.max_requests, one.cost_max()), (share, at_once), "{case}");
            assert!(one.max_requests * of <= max && one.cost_max() * of <= limit.cost_max(), "{case}");
            assert_eq!((one.window, one.algorithm), (limit.window, limit.algorithm), "{case}");
        }
    }

    #[test]
    fn exceeded_limit_is_the_tightest_counting_it() {
        let limit = |name: &str, max| LimitSpec::sliding_log(name, max, Duration::from_secs(1));
        let lookups = LimitSpec { applies_to: AppliesTo::Lookup, ..limit("lookups", 2) };
        let own = LimitSpec { scope: Scope::Account, ..limit("own", 8) };
        let shadow = LimitSpec { shadow: true, ..limit("shadow", 1) };
        let spec = QuotaSpec {
            quota: ProviderName::new("q").unwrap(),
            version: 1,
            limits: vec![limit("all", 25), limit("more", 30), lookups, own, shadow],
            account_rules: Vec::new(),
            pacing: Some(Pacing::Even),
            grant_jitter: None,
            hold_max: Duration::from_secs(1),
            send_budget: Duration::from_secs(1),
            store_down: StoreDown::Wait,
            members: Vec::new(),
            resumed_at: 0,
            handover: Duration::ZERO,
        };
        let of_account = |max_requests| {
            let mut subjects = spec.subjects(Some("a"), None).unwrap();
            subjects[0].limits[0].max_requests = max_requests;
            subjects
        };
        for (cost, kind, subjects, exceeded) in [
            (25, CallKind::Charge, Vec::new(), None),
            (26, CallKind::Charge, Vec::new(), Some(0)),
            (31, CallKind::Charge, Vec::new(), Some(0)),
            (3, CallKind::Lookup, Vec::new(), Some(2)),
            (8, CallKind::Charge, of_account(8), None),
            (9, CallKind::Charge, of_account(8), Some(3)),
            (9, CallKind::Charge, of_account(0), None),
            (26, CallKind::Charge, of_account(0), Some(0)),
        ] {
            let request = PermitRequest { permits: 1, cost, kind, subjects };
            assert_eq!(request.exceeded_limit(&spec), exceeded, "{request:?}");
        }
    }

    #[test]
    fn zero_workers_divide_as_one() {
        let limit = LimitSpec::sliding_log("all", 7, Duration::from_secs(1));
        assert_eq!(limit.divided_by(0), limit);
    }
}
