//! Validation of the columns `currencies`, `decimals` and `amount_step`: how the provider counts money.
//!
//! A wrong digit charges a hundredth or the hundredfold. So an unknown currency is a problem, and so is a rule for a
//! currency that the row does not list.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use serde_json::Value;

use super::validate::RowValidator;
use super::{Object, ProviderRow};
use crate::domain::amount::is_currency;
use crate::domain::sum::{AMOUNT_STEP_MAX, AmountRules, DECIMALS_MAX};

impl RowValidator {
    pub fn amounts(&mut self, row: &ProviderRow) -> AmountRules {
        let currencies = row.currencies.as_ref().map(|listed| self.currencies(listed));
        let digits = 0..=i64::from(DECIMALS_MAX);
        let decimals = self.by_currency("decimals", row.decimals.as_ref(), digits, currencies.as_ref());
        let steps = row.amount_step.as_ref();
        let steps = self.by_currency("amount_step", steps, 1..=AMOUNT_STEP_MAX, currencies.as_ref());
        let decimals = decimals.into_iter().filter_map(|(currency, digits)| Some((currency, digits.try_into().ok()?)));
        AmountRules { currencies, decimals: decimals.collect(), steps }
    }

    fn currencies(&mut self, listed: &[Value]) -> BTreeSet<String> {
        if listed.is_empty() {
            self.problem("currencies is empty: list the currencies of the provider, or leave it out for all");
        }
        let mut codes = BTreeSet::new();
        for item in listed {
            match item.as_str().filter(|code| is_currency(code)) {
                Some(code) if !codes.insert(code.to_owned()) => {
                    self.problem(format!("currencies: `{code}` is listed twice: list each currency once"));
                }
                Some(_) => {}
                None => {
                    let shown = item.as_str().map_or_else(|| item.to_string(), str::to_owned);
                    self.problem(format!("currencies holds `{shown}`: each item must be an ISO 4217 code like EUR"));
                }
            }
        }
        codes
    }

    fn by_currency(
        &mut self,
        column: &str,
        object: Option<&Object>,
        range: RangeInclusive<i64>,
        listed: Option<&BTreeSet<String>>,
    ) -> BTreeMap<String, i64> {
        let mut numbers = BTreeMap::new();
        for (currency, value) in object.into_iter().flatten() {
            if !is_currency(currency) {
                self.problem(format!("{column}: `{currency}` is not an ISO 4217 code like EUR"));
            } else if listed.is_some_and(|listed| !listed.contains(currency)) {
                self.problem(format!("{column}: `{currency}` is not in `currencies`: add it there, or remove it here"));
            }
            match value.as_i64().filter(|number| range.contains(number)) {
                Some(number) => drop(numbers.insert(currency.clone(), number)),
                None => {
                    let (least, most) = (range.start(), range.end());
                    self.problem(format!(
                        "{column}.{currency} is {value}: must be a whole number from {least} to {most}"
                    ));
                }
            }
        }
        numbers
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::with;
    use super::*;

    #[test]
    fn rules_of_amounts_are_read() {
        let row = with(json!({
            "currencies": ["EUR", "ISK", "KWD"], "decimals": {"ISK": 2, "EUR": 0}, "amount_step": {"KWD": 10},
        }));
        let amounts = row.validate(1).unwrap().amounts;
        assert_eq!(amounts.currencies, Some(["EUR", "ISK", "KWD"].map(str::to_owned).into()));
        assert_eq!(amounts.decimals, [("EUR".to_owned(), 0), ("ISK".to_owned(), 2)].into());
        assert_eq!(amounts.steps, [("KWD".to_owned(), 10)].into());
        assert_eq!(with(json!({})).validate(1).unwrap().amounts, AmountRules::default());
    }

    #[test]
    fn invalid_rules_of_amounts_are_named_with_their_fix() {
        let table = [
            (json!({"currencies": []}), "currencies is empty: list the currencies"),
            (json!({"currencies": ["EUR", "eur"]}), "currencies holds `eur`: each item must be an ISO 4217 code"),
            (json!({"currencies": [978]}), "currencies holds `978`"),
            (json!({"currencies": ["EUR", "EUR"]}), "currencies: `EUR` is listed twice"),
            (json!({"decimals": {"XYZ": 2}}), "decimals: `XYZ` is not an ISO 4217 code"),
            (json!({"decimals": {"ISK": 7}}), "decimals.ISK is 7: must be a whole number from 0 to 6"),
            (json!({"decimals": {"ISK": "2"}}), "decimals.ISK is \"2\": must be a whole number"),
            (json!({"decimals": {"ISK": 1.5}}), "decimals.ISK is 1.5: must be a whole number"),
            (json!({"currencies": ["EUR"], "decimals": {"ISK": 2}}), "decimals: `ISK` is not in `currencies`"),
            (json!({"amount_step": {"KWD": 0}}), "amount_step.KWD is 0: must be a whole number from 1 to 1000000"),
        ];
        for (columns, problem) in table {
            let found = with(columns.clone()).validate(1).unwrap_err().problems;
            assert!(found.len() == 1 && found[0].starts_with(problem), "{columns}: {found:#?}");
        }
        let all = json!({"currencies": ["EUR"], "decimals": {"ISK": 9}, "amount_step": {"XYZ": 0}});
        assert_eq!(with(all).validate(1).unwrap_err().problems.len(), 4, "every problem at once");
    }
}
