//! Limits of a quota, combined from its rows: rows that name the same limit share it, with the stricter numbers.
//!
//! See `docs/decisions/0018-strictest-row-of-a-quota.md`.

use std::collections::BTreeMap;

use super::limit::Limit;
use super::provider::{Provider, ProviderName};
use super::quota_spec::LimitSpec;

impl LimitSpec {
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
