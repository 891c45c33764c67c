//! Obvious credentials in a text, and quotes of a wrong text in errors that contain none.
//!
//! A credential is known by the prefixes that issuers give to keys and tokens, or by the field name. Randomness alone
//! does not count: a reference is as random as a key, and a payment must not stop for it.
//!
//! A password that was pasted into the wrong place must not get into logs and tickets through the error about it. So
//! errors quote plain words only.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// Prefixes that an issuer reserves for secrets, with the minimum number of letters and digits after them.
const SECRET_PREFIXES: [(&str, usize); 27] = [
    ("sk_live_", 8), // Stripe, and many who follow it
    ("sk_test_", 8),
    ("sk_prod_", 8),
    ("sk_sbox_", 8), // Checkout.com
    ("live_sk_", 16),
    ("rk_live_", 8),
    ("rk_test_", 8),
    ("whsec_", 16),
    ("live_", 30),                   // Mollie
    ("access_token$production$", 8), // Braintree
    ("access_token$sandbox$", 8),
    ("shpat_", 16), // Shopify
    ("shpca_", 16),
    ("shppa_", 16),
    ("shpss_", 16),
    ("AKIA", 16), // AWS
    ("ASIA", 16),
    ("LTAI", 16),    // Alibaba Cloud
    ("dop_v1_", 32), // DigitalOcean
    ("ghp_", 30),    // GitHub
    ("gho_", 30),
    ("ghu_", 30),
    ("ghs_", 30),
    ("ghr_", 30),
    ("npm_", 30),
    ("dapi", 32), // Databricks
    ("AGE-SECRET-KEY-1", 32),
];
/// Further prefixes whose secrets may contain `_` and `-`; one of our ids with such a prefix may contain them too.
const SECRET_PREFIXES_DASHED: [(&str, usize); 26] = [
    ("sq0atp-", 16), // Square
    ("sq0csp-", 16),
    ("EAAA", 56),
    ("AIza", 35), // Google
    ("ya29.", 20),
    ("GOCSPX-", 20),
    ("AccountKey=", 20), // Azure
    ("SharedAccessKey=", 20),
    ("hvs.", 24),        // HashiCorp Vault
    ("github_pat_", 30), // GitHub
    ("glpat-", 16),      // GitLab
    ("gldt-", 16),
    ("glrt-", 16),
    ("xoxa-", 16), // Slack
    ("xoxb-", 16),
    ("xoxe-", 16),
    ("xoxe.", 16),
    ("xoxp-", 16),
    ("xoxr-", 16),
    ("xoxs-", 16),
    ("xapp-", 16),
    ("SG.", 20),       // SendGrid
    ("pypi-AgEI", 16), // PyPI
    ("sk-ant-", 20),   // Anthropic
    ("sk-proj-", 20),  // OpenAI
    ("PuTTY-User-Key-File-", 1),
];
/// Shortest token after `Bearer `, in characters. It must contain a digit, so that prose is not a token.
const BEARER_CHARS_MIN: usize = 16;
/// Shortest header and claims of a JWT, in characters.
const JWT_CHARS_MIN: usize = 10;
/// Shortest secret, in bytes. Most words of a message are shorter.
const SECRET_BYTES_MIN: usize = 16;

/// Last words of names of credentials. The word `key` alone is no credential: it may route, partition or identify
/// payments.
const CREDENTIAL_WORDS: [&str; 6] = ["authorization", "apikey", "api-key", "token", "secret", "password"];

/// Whether a header or parameter of this name carries a credential.
pub fn names_credential(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('_', "-");
    let ends_in = |word: &&str| name.strip_suffix(word).is_some_and(|rest| rest.is_empty() || rest.ends_with('-'));
    CREDENTIAL_WORDS.iter().any(ends_in)
}

/// Whether a text contains an obvious secret.
pub fn looks_secret(text: &str) -> bool {
    if text.len() < SECRET_BYTES_MIN {
        return false;
    }
    let bytes = text.as_bytes();
    let mut before = b' ';
    bytes.iter().enumerate().any(|(at, byte)| {
        let begins = !before.is_ascii_alphanumeric();
        before = *byte;
        begins && begins_secret(&bytes[at..])
    })
}

/// Whether a secret begins here, at the beginning of a word.
fn begins_secret(text: &[u8]) -> bool {
    match text {
        [b'-', ..] => is_private_key(text),
        [b'B' | b'b', b'e' | b'E', ..] if is_bearer(text) => true,
        [b'B' | b'b', b'a' | b'A', ..] if is_basic(text) => true,
        [b'e', b'y', b'J', ..] if is_jwt(text) => true,
        [first, ..] if first.is_ascii_alphabetic() && is_long(text) => has_secret_prefix(text),
        _ => false,
    }
}

/// Whether the word is long enough: most words are shorter than any secret.
fn is_long(text: &[u8]) -> bool {
    text.get(..SECRET_BYTES_MIN).is_some_and(|word| !word.iter().any(|byte| matches!(byte, b' ' | b',' | b'"' | b'\n')))
}

fn has_secret_prefix(text: &[u8]) -> bool {
    let marked = |(mark, least): &(&str, usize), others| {
        text.strip_prefix(mark.as_bytes()).is_some_and(|rest| run_length(rest, others) >= *least)
    };
    SECRET_PREFIXES.iter().any(|mark| marked(mark, b""))
        || SECRET_PREFIXES_DASHED.iter().any(|mark| marked(mark, b"_-"))
}

/// Number of leading letters, digits and `others`.
fn run_length(text: &[u8], others: &[u8]) -> usize {
    text.iter().take_while(|byte| byte.is_ascii_alphanumeric() || others.contains(byte)).count()
}

/// Private keys in PEM (RFC 7468), OpenSSH, and armour of RFC 9580: `-----BEGIN PGP PRIVATE KEY BLOCK-----`.
fn is_private_key(text: &[u8]) -> bool {
    const TITLE_BYTES_MAX: usize = 64;
    let Some(rest) = text.strip_prefix(b"-----BEGIN ") else { return false };
    let title = rest.get(..TITLE_BYTES_MAX.min(rest.len())).unwrap_or_default();
    title.windows(11).any(|window| window == b"PRIVATE KEY")
}

/// The text after the name of an HTTP scheme, without regard to case.
fn after_scheme<'a>(text: &'a [u8], scheme: &str) -> Option<&'a [u8]> {
    let (name, rest) = text.split_at_checked(scheme.len())?;
    name.eq_ignore_ascii_case(scheme.as_bytes()).then_some(rest)
}

/// Bearer token of RFC 6750, section 2.1.
fn is_bearer(text: &[u8]) -> bool {
    let Some(rest) = after_scheme(text, "bearer ") else { return false };
    let token = &rest[..run_length(rest, b"-._~+/=")];
    token.len() >= BEARER_CHARS_MIN && token.iter().any(u8::is_ascii_digit)
}

/// Basic credentials of RFC 7617, section 2: text that is no user and password in Base64 is prose.
fn is_basic(text: &[u8]) -> bool {
    let Some(rest) = after_scheme(text, "basic ") else { return false };
    let token = &rest[..run_length(rest, b"+/=")];
    let pair = STANDARD.decode(token).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    pair.as_deref().and_then(|pair| pair.split_once(':')).is_some_and(|(user, password)| {
        let is_text = !user.chars().chain(password.chars()).any(char::is_control);
        is_text && user.len() + password.len() > 2
    })
}

/// JWT of RFC 7519 in the compact form of RFC 7515 and RFC 7516: a JSON header, and more than a signature.
fn is_jwt(text: &[u8]) -> bool {
    let header = run_length(text, b"_-");
    let Some((b'.', rest)) = text[header..].split_first() else { return false };
    let claims = run_length(rest, b"_-");
    header >= JWT_CHARS_MIN && claims >= JWT_CHARS_MIN && rest.get(claims) == Some(&b'.')
}

/// Longest text that is quoted, in bytes. Keys, words and addresses are shorter; 16 random bytes in hexadecimal are
/// not.
const QUOTED_BYTES_MAX: usize = 31;

/// Whether a text is a plain word: short, of `a-z 0-9 _ . -`, and without the marks of a credential.
pub fn is_plain_word(text: &str) -> bool {
    is_safe_text(text, b"_.-")
}

/// The text in backticks if it is a plain word or an address, else a replacement.
pub fn quote_if_safe(text: &str) -> String {
    if is_safe_text(text, b"_.-:/[]") { format!("`{text}`") } else { "what is written there".to_owned() }
}

/// The path if it is certainly a path, else a replacement: the text may be the secret itself instead of its file's
/// path.
pub fn path_if_safe(path: &Path) -> String {
    let text = path.to_string_lossy();
    let begins = ["/", "./", "../"].iter().any(|begin| text.starts_with(begin));
    let is_path = begins && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_./-".contains(&byte));
    if is_path && !looks_secret(&text) { text.into_owned() } else { "(a path that is not shown)".to_owned() }
}

fn is_safe_text(text: &str, marks: &[u8]) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || marks.contains(&byte);
    (1..=QUOTED_BYTES_MAX).contains(&text.len()) && text.bytes().all(is_allowed) && !looks_secret(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_secret_is_shorter_than_the_minimum() {
        let shortest =
            SECRET_PREFIXES.iter().chain(&SECRET_PREFIXES_DASHED).map(|(mark, least)| mark.len() + least).min();
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
    fn credentials_are_detected_and_other_text_ignored() {
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
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\\n\\nlQ",
            "-----BEGIN OPENSSH PRIVATE KEY-----",
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dBjftJeZ4CVP-mB92K27",
            "token:eyJhbGciOiJub25lIn0.eyJzdWIiOiIxIn0.",
            "Basic dXNlcjpwYXNz",
            "authorization: basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==",
            "xoxp-123456789012-1234567890",
            "xoxb-123456789012-1234567890",
            "ya29.a0AfB_byC1234567890abcdef",
            "AIzaSyA1234567890abcdefghijklmnopqrstuv",
            "gho_0123456789abcdefghijABCDEFGHIJ012345",
            "DefaultEndpointsProtocol=https;AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq",
            "live_0123456789abcdefghijABCDEFGHIJ",
            "sk_sbox_0123456789abcdef",
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
            "Basic subscription, renewed each month",
            "Basic dXNlcg==",
            "eyJhbGciOiJIUzI1NiJ9..dBjftJeZ4CVP-mB92K27uh",
            "eyJ0aHJlZURTIjoiMi4xLjAifQ",
            "-----BEGIN PGP PUBLIC KEY BLOCK-----",
            "live_order-of-2026-11-21-of-customer-000123",
            "ASIA-order-of-2026-11-21",
            "SG.invoice.2026",
        ] {
            assert!(!looks_secret(other), "{other}");
        }
    }

    #[test]
    fn only_plain_words_and_paths_are_quoted() {
        for text in ["queue.preffix", "worker.drain_timeout", "10.0.0.0-8"] {
            assert!(is_plain_word(text), "{text}");
        }
        let hex = "0123456789abcdef0123456789abcdef";
        for text in
            ["", "postgres://u:hunter2@db/pay", "u:hunter2", "Hunter2", "hunter2!", "sk_live_51habcdefghijklmnop", hex]
        {
            assert!(!is_plain_word(text), "{text}");
        }
        assert_eq!(quote_if_safe("https://x.example:443"), "`https://x.example:443`");
        for text in ["https://u:hunter2@x.example", "a,b", hex] {
            assert_eq!(quote_if_safe(text), "what is written there", "{text}");
        }
        for (path, shown) in [("/run/secrets/db-url_1.txt", true), ("./token", true), (hex, false), ("/a b", false)] {
            assert_eq!(path_if_safe(Path::new(path)) == path, shown, "{path}");
        }
    }
}
