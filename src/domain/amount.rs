//! Amounts: in major units, for people and for request templates, and the exact value of a JSON number, by which amounts
//! and codes are compared.
//!
//! Minor units are divided as ISO 4217 divides each currency. Nothing is rounded: a binary float would change an id of
//! 26 digits.

use iso_currency::Currency;

/// `12.99` for 1299 EUR cents, `1299` for 1299 JPY. A code without decimals in ISO 4217, or that it does not list, has none.
pub fn decimal_amount(minor: i64, currency: &str) -> String {
    decimal_text(minor, iso_decimals(currency))
}

/// Digits after the point in ISO 4217; 0 for a code without any, or that it does not list.
pub fn iso_decimals(currency: &str) -> u8 {
    Currency::from_code(currency).and_then(Currency::exponent).map_or(0, |exponent| exponent.try_into().unwrap_or(0))
}

/// Whether ISO 4217 lists the code. It is in upper case.
pub fn is_currency(code: &str) -> bool {
    Currency::from_code(code).is_some_and(|currency| currency.code() == code)
}

/// The amount with other digits after the point; `None` if it has a remainder or does not fit.
pub fn rescale(amount: i64, from: u8, to: u8) -> Option<i64> {
    let factor = 10_i64.checked_pow(from.abs_diff(to).into())?;
    if to >= from { amount.checked_mul(factor) } else { (amount % factor == 0).then_some(amount / factor) }
}

/// Units of which 10^`decimals` are one, as text: `12.99` for 1299 and 2.
pub fn decimal_text(units: i64, decimals: u8) -> String {
    let decimals = usize::from(decimals);
    let digits = format!("{:0>width$}", units.unsigned_abs(), width = decimals + 1);
    let sign = if units < 0 { "-" } else { "" };
    match digits.split_at(digits.len() - decimals) {
        (units, "") => format!("{sign}{units}"),
        (units, rest) => format!("{sign}{units}.{rest}"),
    }
}

/// The reverse of [`decimal_amount`]. `None` for other text, a negative amount, and more decimals than the currency has.
pub fn minor_amount(text: &str, currency: &str) -> Option<i64> {
    let amount = Decimal::new(text).filter(|amount| !amount.negative)?;
    amount.units(iso_decimals(currency))
}

/// An amount for people: `EUR 12.99`.
pub fn display_amount(minor: i64, currency: &str) -> String {
    format!("{currency} {}", decimal_amount(minor, currency))
}

/// `digits` × 10^`exponent`, without leading or trailing zeros.
#[derive(Debug, PartialEq, Eq)]
pub struct Decimal {
    pub negative: bool,
    pub digits: String,
    pub exponent: i64,
}

impl Decimal {
    /// Reads a JSON number. `None` for other text, and when the exponent is beyond any use.
    pub fn new(number: &str) -> Option<Self> {
        let (negative, rest) = number.strip_prefix('-').map_or((false, number), |rest| (true, rest));
        let (mantissa, power) = rest.split_once(['e', 'E']).unwrap_or((rest, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        if whole.is_empty() || !whole.bytes().chain(fraction.bytes()).all(|b| b.is_ascii_digit()) {
            return None;
        }
        let power: i64 = power.strip_prefix('+').unwrap_or(power).parse().ok()?;
        let digits = format!("{whole}{fraction}");
        let significant = digits.trim_end_matches('0');
        let dropped = i64::try_from(digits.len() - significant.len()).ok()?;
        let exponent = power.checked_sub(i64::try_from(fraction.len()).ok()?)?.checked_add(dropped)?;
        let digits = significant.trim_start_matches('0').to_owned();
        if digits.is_empty() {
            return Some(Self { negative: false, digits, exponent: 0 });
        }
        Some(Self { negative, digits, exponent })
    }

    /// The value in units of which 10^`decimals` are one; `None` if it has a fraction of one or does not fit.
    pub fn units(self, decimals: u8) -> Option<i64> {
        Self { exponent: self.exponent.checked_add(decimals.into())?, ..self }.to_i64()
    }

    /// The value as a whole number; `None` if it has a fraction or does not fit.
    pub fn to_i64(&self) -> Option<i64> {
        if self.digits.is_empty() {
            return Some(0);
        }
        // No i64 has more than 19 digits.
        let zeros = usize::try_from(self.exponent).ok().filter(|zeros| *zeros < 20)?;
        format!("{}{}{}", if self.negative { "-" } else { "" }, self.digits, "0".repeat(zeros)).parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    #[test]
    fn notations_of_one_value_are_equal() {
        for (left, right) in
            [("1299", "1299.00"), ("1299", "1.299e3"), ("1299", "129900E-2"), ("0", "-0.0e9"), ("1e2", "100")]
        {
            assert_eq!(Decimal::new(left).unwrap(), Decimal::new(right).unwrap(), "{left} {right}");
        }
        assert_ne!(Decimal::new("20250416112233445566778801"), Decimal::new("20250416112233445566778802"));
    }

    #[test]
    fn only_whole_numbers_in_range_become_integers() {
        let table = [
            ("1299", Some(1_299)),
            ("1299.00", Some(1_299)),
            ("1.299e3", Some(1_299)),
            ("-5", Some(-5)),
            ("0", Some(0)),
            ("12.99", None),
            ("1299.0000000000000001", None),
            ("9223372036854775807", Some(i64::MAX)),
            ("-9223372036854775808", Some(i64::MIN)),
            ("9223372036854775808", None),
            ("9223372036854775807.5", None),
            ("1e400", None),
        ];
        for (number, whole) in table {
            assert_eq!(Decimal::new(number).and_then(|decimal| decimal.to_i64()), whole, "{number}");
        }
        for text in ["", "-", "e5", "1e", "1e99999999999999999999", "NaN", "inf", "0x10", "+1", "1_0", " 1"] {
            assert_eq!(Decimal::new(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_integer_is_read_in_every_notation(value: i64, shift in 0_usize..6) {
            let text = value.to_string();
            for number in [
                text.clone(),
                format!("{text}.{}", "0".repeat(shift + 1)),
                format!("{text}{}e-{shift}", "0".repeat(shift)),
            ] {
                prop_assert_eq!(Decimal::new(&number).and_then(|decimal| decimal.to_i64()), Some(value));
            }
        }

        #[test]
        fn any_text_is_read_without_a_panic(text: String) {
            let _ = Decimal::new(&text).map(|decimal| decimal.to_i64());
        }
    }
}
