//! Sums as one provider counts them: the currencies that its row lists, their digits after the point, and steps.
//!
//! A job's amount is in ISO 4217 minor units. Providers count some currencies differently. A sum is converted exactly or
//! not at all: nothing is rounded.

use std::collections::{BTreeMap, BTreeSet};

use super::amount::{decimal_text, iso_decimals, rescale};
use super::job::{InvalidReason, Job};

/// Most digits after the point that a row may set.
pub const DECIMALS_MAX: u8 = 6;
/// Largest step that a row may set.
pub const AMOUNT_STEP_MAX: i64 = 1_000_000;

/// A sum as it is sent: whole units of which 10^`decimals` are one unit of the currency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentSum {
    pub units: i64,
    pub decimals: u8,
}

impl SentSum {
    /// The sum in units of the currency, with all of its decimals: `12.99`.
    pub fn decimal(self) -> String {
        decimal_text(self.units, self.decimals)
    }
}

/// The validated columns `currencies`, `decimals` and `amount_step`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AmountRules {
    /// `None`: every currency of ISO 4217.
    pub currencies: Option<BTreeSet<String>>,
    /// Digits after the point where they differ from ISO 4217.
    pub decimals: BTreeMap<String, u8>,
    /// The sum as sent must be a multiple of it.
    pub steps: BTreeMap<String, i64>,
}

impl AmountRules {
    /// The job's sum as this provider counts it.
    pub fn sum_of(&self, job: &Job) -> Result<SentSum, UnsupportedSum> {
        self.convert(job.amount, &job.currency)
    }

    /// Converts an amount in ISO 4217 minor units.
    pub fn convert(&self, amount: i64, currency: &str) -> Result<SentSum, UnsupportedSum> {
        if self.currencies.as_ref().is_some_and(|listed| !listed.contains(currency)) {
            return Err(UnsupportedSum::Currency);
        }
        let iso = iso_decimals(currency);
        let decimals = self.decimals.get(currency).copied().unwrap_or(iso);
        let step = self.steps.get(currency).copied().unwrap_or(1);
        let units = rescale(amount, iso, decimals).filter(|units| units % step == 0);
        units.map(|units| SentSum { units, decimals }).ok_or(UnsupportedSum::Amount)
    }
}

/// Why a provider cannot be asked for a job's sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnsupportedSum {
    /// The row does not list the currency.
    Currency,
    /// The provider cannot express the amount exactly.
    Amount,
}

impl UnsupportedSum {
    pub fn reason(self) -> InvalidReason {
        match self {
            Self::Currency => InvalidReason::UnsupportedCurrency,
            Self::Amount => InvalidReason::UnsupportedAmount,
        }
    }

    /// The fault and its fix, for a producer. It names the field, never its value.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Currency => {
                "currency: the provider's row does not list it; use a listed one, or add it to `currencies`"
            }
            Self::Amount => {
                "amount: the provider cannot express it exactly, and it is never rounded; see `decimals` and \
                 `amount_step` of the provider's row"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> AmountRules {
        let decimals = [("ISK", 2), ("CVE", 0), ("HUF", 0)];
        AmountRules {
            currencies: Some(["EUR", "ISK", "CVE", "HUF", "KWD", "JPY"].map(str::to_owned).into()),
            decimals: decimals.map(|(currency, digits)| (currency.to_owned(), digits)).into(),
            steps: [("KWD".to_owned(), 10)].into(),
        }
    }

    #[test]
    fn sums_are_converted_exactly_or_refused() {
        let sum = |units, decimals| Ok(SentSum { units, decimals });
        let table = [
            (1_299, "EUR", sum(1_299, 2)),
            (1_299, "JPY", sum(1_299, 0)),
            (500, "ISK", sum(50_000, 2)),
            (1_200, "CVE", sum(12, 0)),
            (1_299, "CVE", Err(UnsupportedSum::Amount)),
            (100, "HUF", sum(1, 0)),
            (5_120, "KWD", sum(5_120, 3)),
            (5_124, "KWD", Err(UnsupportedSum::Amount)),
            (1_299, "USD", Err(UnsupportedSum::Currency)),
            (i64::MAX, "ISK", Err(UnsupportedSum::Amount)),
            (i64::MAX, "EUR", sum(i64::MAX, 2)),
        ];
        for (amount, currency, expected) in table {
            assert_eq!(rules().convert(amount, currency), expected, "{amount} {currency}");
        }
        assert_eq!(AmountRules::default().convert(500, "ISK"), sum(500, 0), "ISO 4217 without rules");
    }

    #[test]
    fn sums_are_written_with_their_own_decimals() {
        for (units, decimals, text) in [(50_000, 2, "500.00"), (12, 0, "12"), (5_120, 3, "5.120")] {
            assert_eq!(SentSum { units, decimals }.decimal(), text);
        }
    }
}
