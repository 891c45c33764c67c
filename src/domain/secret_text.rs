//! Text that is obviously a credential: by the marks that their issuers gave keys and tokens so that they can be found, or
//! by the name under which it is sent.
//!
//! Refuses to guess by randomness alone: a reference is as random as a key, and a payment must not stop for it.

/// Beginnings that an issuer keeps for secrets, and how many of `A-Z a-z 0-9 _ -` follow at least.
const MARKS: [(&str, usize); 17] = [
    ("sk_live_", 8), // Stripe, and many who follow it
    ("sk_test_", 8),
    ("rk_live_", 8),
    ("rk_test_", 8),
    ("whsec_", 16),
    ("access_token$production$", 8), // Braintree
    ("sq0atp-", 16),                 // Square
    ("sq0csp-", 16),
    ("shpat_", 16),      // Shopify
    ("live_sk_", 16),    // Checkout.com and others
    ("AKIA", 16),        // AWS
    ("ASIA", 16),        // AWS
    ("ghp_", 30),        // GitHub
    ("github_pat_", 30), // GitHub
    ("glpat-", 16),      // GitLab
    ("xoxb-", 16),       // Slack
    ("AIza", 35),        // Google
];
/// Shortest token behind `Bearer ` that is one; with a digit in it, so that prose is not.
const BEARER_CHARS_MIN: usize = 16;
/// No shorter text is one: a message has many words, and most are short.
const SECRET_BYTES_MIN: usize = 16;

/// Last words of the names under which credentials are sent. A key alone may route, partition or tell payments apart.
const CREDENTIAL_WORDS: [&str; 6] = ["authorization", "apikey", "api-key", "token", "secret", "password"];

/// Whether a header or parameter of this name carries a credential.
#[must_use]
pub fn names_credential(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('_', "-");
    let ends_in = |word: &&str| name.strip_suffix(word).is_some_and(|rest| rest.is_empty() || rest.ends_with('-'));
    CREDENTIAL_WORDS.iter().any(ends_in)
}

/// Whether a text holds what is obviously a secret.
#[must_use]
pub fn looks_secret(text: &str) -> bool {
    if text.len() < SECRET_BYTES_MIN {
        return false;
    }
    let private_key = text.find("-----BEGIN ").is_some_and(|at| text[at..].contains("PRIVATE KEY-----"));
    private_key || holds_bearer(text) || MARKS.iter().any(|(mark, least)| holds_mark(text, mark, *least))
}

fn holds_mark(text: &str, mark: &str, least: usize) -> bool {
    text.match_indices(mark).any(|(at, _)| {
        let begins = !text[..at].chars().next_back().is_some_and(|before| before.is_ascii_alphanumeric());
        let rest = text[at + mark.len()..].bytes();
        begins && rest.take_while(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-')).count() >= least
    })
}

/// RFC 6750, section 2.1; the scheme's case does not matter.
fn holds_bearer(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    lower.match_indices("bearer ").any(|(at, scheme)| {
        let token: Vec<u8> = text[at + scheme.len()..]
            .bytes()
            .take_while(|b| b.is_ascii_alphanumeric() || b"-._~+/=".contains(b))
            .collect();
        token.len() >= BEARER_CHARS_MIN && token.iter().any(u8::is_ascii_digit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_mark_and_its_secret_are_shorter_than_the_shortest() {
        let shortest = MARKS.iter().map(|(mark, least)| mark.len() + least).min();
        assert_eq!(shortest, Some(SECRET_BYTES_MIN));
    }

    #[test]
    fn credentials_are_known_by_their_names() {
        for name in ["Authorization", "proxy-authorization", "X-API-Key", "apikey", "api_key", "X-Auth-Token"] {
            assert!(names_credential(name), "{name}");
        }
        for name in ["client_secret", "PASSWORD", "x-apikey"] {
            assert!(names_credential(name), "{name}");
        }
        for name in ["Idempotency-Key", "X-Routing-Key", "Stripe-Account", "tokenizer", "Token-Id", "Accept", "", "-"] {
            assert!(!names_credential(name), "{name}");
        }
    }

    #[test]
    fn credentials_are_found_and_other_texts_left_alone() {
        for secret in [
            "sk_live_4eC39HqLyjWDarjtT1zdp7dc",
            "the key is sk_test_4eC39HqLyjWD, keep it",
            "whsec_0123456789abcdef0123",
            "Bearer 0123456789abcdefghij",
            "authorization: bearer eyJhbGciOiJIUzI1NiJ9.e30.abc",
            "-----BEGIN RSA PRIVATE KEY-----\nMIIE",
            "-----BEGIN PRIVATE KEY-----\nMIIE",
            "AKIAIOSFODNN7EXAMPLE",
            "x-key=ghp_0123456789abcdefghijABCDEFGHIJ012345",
        ] {
            assert!(looks_secret(secret), "{secret}");
        }
        for other in [
            "",
            "tok_visa",
            "pm_1J2k3L4m5N6o7P8q",
            "pk_live_4eC39HqLyjWDarjtT1zdp7dc",
            "sk_live_",
            "task_live_4eC39HqLyjWDarjtT1zdp7dc",
            "Bearer of good tidings",
            "the bearer acknowledgements-of-receipt",
            "BAKIAIOSFODNN7EXAMPLE1",
            "-----BEGIN CERTIFICATE-----\nMIIE",
            "123e4567-e89b-12d3-a456-426614174000",
            "büro Bearer ü",
        ] {
            assert!(!looks_secret(other), "{other}");
        }
    }
}
