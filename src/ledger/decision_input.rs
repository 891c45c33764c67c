//! An operator's input to a decision: the reason, and the provider's reference of the charge.
//!
//! The ledger stores both unchanged. So input that it would cut or drop is rejected, with how to fix it.

use super::operator::JobResolution;
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

/// The resolution with the given reference.
///
/// # Errors
/// When the reference cannot be stored, or the resolution takes none.
pub fn with_provider_reference(
    resolution: JobResolution,
    reference: Option<String>,
    cards: CardNumbers,
) -> Result<JobResolution, String> {
    let Some(text) = reference else { return Ok(resolution) };
    if !matches!(resolution, JobResolution::Succeeded { .. }) {
        return Err("only a payment that `succeeded` has one: leave it out".to_owned());
    }
    if text.trim().is_empty() {
        return Err("is empty: leave it out, or write what the provider calls the charge".to_owned());
    }
    if text.chars().any(char::is_control) {
        return Err("holds control characters: write what the provider calls the charge".to_owned());
    }
    if text.chars().count() > REFERENCE_CHARS_MAX {
        return Err(format!("write at most {REFERENCE_CHARS_MAX} characters"));
    }
    reject_sensitive(&text, cards)?;
    Ok(JobResolution::Succeeded { reference: Some(text) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decision_input_is_stored_whole_or_rejected() {
        assert_eq!(validate_reason(&"ä".repeat(500)), Ok("ä".repeat(500)));
        assert_eq!(validate_reason(&"a".repeat(501)).unwrap_err(), "has 501 characters: write at most 500");
        let with_reference =
            |resolution, reference| super::with_provider_reference(resolution, reference, CardNumbers::Refuse);
        let succeeded =
            |text: &str| with_reference(JobResolution::Succeeded { reference: None }, Some(text.to_owned()));
        assert_eq!(succeeded(&"ä".repeat(255)), Ok(JobResolution::Succeeded { reference: Some("ä".repeat(255)) }));
        for (text, words) in [(" ", "is empty"), ("ch\n1", "control characters"), (&"x".repeat(256), "at most 255")] {
            assert!(succeeded(text).unwrap_err().contains(words), "{text:?}");
        }
        for text in ["4111 1111 1111 1111", "sk_live_4eC39HqLyjWD"] {
            let refused = [validate_reason(&format!("seen: {text}")).unwrap_err(), succeeded(text).unwrap_err()];
            assert!(refused.iter().all(|why| why.contains("leave it out") && !why.contains(text)), "{refused:?}");
        }
        for resolution in [JobResolution::Declined, JobResolution::Resend] {
            assert_eq!(with_reference(resolution.clone(), None), Ok(resolution.clone()));
            assert!(with_reference(resolution, Some("ch_1".to_owned())).unwrap_err().contains("`succeeded`"));
        }
    }
}
