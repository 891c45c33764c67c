//! Amounts in major units, for people and for request templates: minor units divided as ISO 4217 divides each currency.

use iso_currency::Currency;

/// `12.99` for 1299 EUR cents, `1299` for 1299 JPY. A code without decimals in ISO 4217, or that it does not list, has none.
pub fn decimal_amount(minor: i64, currency: &str) -> String {
    let decimals = Currency::from_code(currency).and_then(Currency::exponent).map_or(0, usize::from);
    let digits = format!("{:0>width$}", minor.unsigned_abs(), width = decimals + 1);
    let sign = if minor < 0 { "-" } else { "" };
    match digits.split_at(digits.len() - decimals) {
        (units, "") => format!("{sign}{units}"),
        (units, rest) => format!("{sign}{units}.{rest}"),
    }
}

/// An amount for people: `EUR 12.99`.
pub fn display_amount(minor: i64, currency: &str) -> String {
    format!("{currency} {}", decimal_amount(minor, currency))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_their_currencys_decimals() {
        let table = [
            (1_299, "EUR", "EUR 12.99"),
            (5, "EUR", "EUR 0.05"),
            (0, "EUR", "EUR 0.00"),
            (-5, "EUR", "EUR -0.05"),
            (1_299, "JPY", "JPY 1299"),
            (1_299, "KWD", "KWD 1.299"),
            (1_299, "CLF", "CLF 0.1299"),
            (3, "XAU", "XAU 3"),
            (3, "ZZZ", "ZZZ 3"),
            (i64::MIN, "EUR", "EUR -92233720368547758.08"),
        ];
        for (minor, currency, expected) in table {
            assert_eq!(display_amount(minor, currency), expected);
        }
    }
}
