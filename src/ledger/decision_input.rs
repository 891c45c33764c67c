//! An operator's input to a decision: the reason, and the provider's reference of the charge.
//!
//! The ledger stores both unchanged. So input that it would cut or drop is rejected, with how to fix it.

use super::operator::{Charge, JobResolution};
use crate::domain::sensitive::{CardNumbers, TextContext, find_sensitive};

/// Longest reason, in characters: it is stored in the audit, the job's reason and its outcome event.
const REASON_CHARS_MAX: usize = 500;
/// Longest reference of a provider, in characters.
const REFERENCE_CHARS_MAX: usize = 255;

/// The reason as it is stored.
///
/// # Errors
/// When it is too long, or holds card data or a secret.
pub fn validate_reason(text: &str) -> Result<String, String> {
    let chars = text.chars().count();
    if chars > REASON_CHARS_MAX {
        return Err(format!("has {chars} characters: write at most {REASON_CHARS_MAX}"));
    }
    // A reason needs no card number, whatever `worker.card_numbers` allows in messages.
    reject_sensitive(text, CardNumbers::Refuse)?;
    Ok(text.to_owned())
}

fn reject_sensitive(text: &str, cards: CardNumbers) -> Result<(), String> {
    let found = find_sensitive(text, TextContext::Identifier, cards);
    found.map_or(Ok(()), |what| Err(format!("holds {}, which is not kept: leave it out", what.describe())))
}

/// A field of a charge that cannot be stored, and how to fix it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChargeError {
    pub field: &'static str,
    pub problem: String,
}

/// The resolution with the given charge.
///
/// # Errors
/// When the charge cannot be stored, or the resolution takes none.
pub fn with_charge(
    resolution: JobResolution,
    charge: Charge,
    cards: CardNumbers,
) -> Result<JobResolution, ChargeError> {
    let wrong = |field, problem: String| Err(ChargeError { field, problem });
    if !matches!(resolution, JobResolution::Succeeded(_)) {
        let none = |field| wrong(field, "only a payment that `succeeded` has one: leave it out".to_owned());
        return match charge {
            Charge { reference: Some(_), .. } => none("reference"),
            Charge { amount: Some(_), .. } => none("amount"),
            Charge { reference: None, amount: None } => Ok(resolution),
        };
    }
    if charge.amount.is_some_and(|amount| amount < 1) {
        return wrong("amount", "must be a whole number above 0, in minor units (12.99 EUR is 1299)".to_owned());
    }
    match charge.reference.as_deref().map_or(Ok(()), |text| check_reference(text, cards)) {
        Ok(()) => Ok(JobResolution::Succeeded(charge)),
        Err(problem) => wrong("reference", problem),
    }
}

fn check_reference(text: &str, cards: CardNumbers) -> Result<(), String> {
    if text.trim().is_empty() {
        return Err("is empty: leave it out, or write what the provider calls the charge".to_owned());
    }
    if text.chars().any(char::is_control) {
        return Err("holds control characters: write what the provider calls the charge".to_owned());
    }
    if text.chars().count() > REFERENCE_CHARS_MAX {
        return Err(format!("write at most {REFERENCE_CHARS_MAX} characters"));
    }
    reject_sensitive(text, cards)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decision_input_is_stored_whole_or_rejected() {
        assert_eq!(validate_reason(&"ä".repeat(500)), Ok("ä".repeat(500)));
        assert_eq!(validate_reason(&"a".repeat(501)).unwrap_err(), "has 501 characters: write at most 500");
        let with = |resolution, charge| with_charge(resolution, charge, CardNumbers::Refuse);
        let charge = |reference: &str| Charge { reference: Some(reference.to_owned()), amount: None };
        let succeeded = |text: &str| with(JobResolution::Succeeded(Charge::default()), charge(text));
        assert_eq!(succeeded(&"ä".repeat(255)), Ok(JobResolution::Succeeded(charge(&"ä".repeat(255)))));
        let paid = |amount| Charge { reference: None, amount: Some(amount) };
        let resolved = |amount| with(JobResolution::Succeeded(Charge::default()), paid(amount));
        assert_eq!(resolved(500), Ok(JobResolution::Succeeded(paid(500))));
        assert!(resolved(0).unwrap_err().problem.starts_with("must be a whole number above 0"));
        for (text, words) in [(" ", "is empty"), ("ch\n1", "control characters"), (&"x".repeat(256), "at most 255")] {
            assert!(succeeded(text).unwrap_err().problem.contains(words), "{text:?}");
        }
        for text in ["4111 1111 1111 1111", "sk_live_4eC39HqLyjWD"] {
            let refused =
                [validate_reason(&format!("seen: {text}")).unwrap_err(), succeeded(text).unwrap_err().problem];
            assert!(refused.iter().all(|why| why.contains("leave it out") && !why.contains(text)), "{refused:?}");
        }
        for resolution in [JobResolution::Declined, JobResolution::Resend] {
            assert_eq!(with(resolution.clone(), Charge::default()), Ok(resolution.clone()));
            for (field, charge) in [("reference", charge("ch_1")), ("amount", paid(1))] {
                let refused = with(resolution.clone(), charge).unwrap_err();
                assert!(refused.field == field && refused.problem.contains("`succeeded`"), "{refused:?}");
            }
        }
    }
}
