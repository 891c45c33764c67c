//! The tokens that the ops server accepts, `ops.token` and the named ones of `ops.tokens`, kept as digests.
//!
//! A secret is compared with every token, and always with all of them. So the time of a comparison names neither the
//! token that fits nor its length.

use std::collections::BTreeSet;
use std::fmt;

use secrecy::ExposeSecret as _;
use sha2::{Digest as _, Sha256};
use subtle::{ConditionallySelectable as _, ConstantTimeEq as _};

use crate::config::people::{TOKEN_CHARS_MIN, TOKEN_DISTINCT_CHARACTERS_MIN, TOKEN_NAME, TokenEntry};
use crate::config::{OpsConfig, unusable_token};
use crate::domain::format::count;
use crate::domain::person::{Identity, IdentityPath, Role};
use crate::files;
use crate::provider::secret_grants::SecretReference;

/// Largest file with a secret, in bytes.
const SECRET_BYTES_MAX: u64 = 4_096;

/// All tokens, each with the identity that it gives.
#[derive(Default)]
pub struct TokenList {
    tokens: Vec<KnownToken>,
    /// Key of the digests; random for each process.
    key: [u8; 32],
}

struct KnownToken {
    identity: Identity,
    digest: [u8; 32],
}

impl fmt::Debug for TokenList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.tokens.iter().map(|token| &token.identity)).finish()
    }
}

impl TokenList {
    /// Reads the secret of each token.
    ///
    /// # Errors
    /// Every problem; none repeats a secret.
    pub fn load(ops: &OpsConfig, variable: impl Fn(&str) -> Option<String>) -> Result<Self, Vec<String>> {
        let mut list = Self { tokens: Vec::new(), key: rand::random() };
        if let Some(secret) = &ops.token {
            list.tokens.push(list.known(TOKEN_NAME, ops.people.token_role.0, secret.expose_secret()));
        }
        let mut problems = Vec::new();
        for TokenEntry { name, role, reference } in &ops.people.tokens {
            let added = read_secret(reference, &variable).and_then(|secret| list.add(name, *role, &secret));
            problems.extend(added.err().map(|problem| format!("`{name}` ({reference}): {problem}")));
        }
        if problems.is_empty() { Ok(list) } else { Err(problems) }
    }

    fn add(&mut self, name: &str, role: Role, secret: &str) -> Result<(), String> {
        check_secret(secret)?;
        let token = self.known(name, role, secret);
        if let Some(same) = self.tokens.iter().find(|known| known.digest == token.digest) {
            return Err(format!("has the secret of `{}`: give each token its own", same.identity.name));
        }
        self.tokens.push(token);
        Ok(())
    }

    fn known(&self, name: &str, role: Role, secret: &str) -> KnownToken {
        let identity = Identity { name: name.to_owned(), role, path: IdentityPath::Token };
        KnownToken { identity, digest: self.digest(secret.as_bytes()) }
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The identity of the token with this secret.
    pub fn find(&self, secret: &[u8]) -> Option<&Identity> {
        let digest = self.digest(secret);
        let mut found = u64::MAX;
        for (index, token) in (0..).zip(&self.tokens) {
            found.conditional_assign(&index, token.digest.ct_eq(&digest));
        }
        let index = usize::try_from(found).ok()?;
        self.tokens.get(index).map(|token| &token.identity)
    }

    fn digest(&self, secret: &[u8]) -> [u8; 32] {
        Sha256::new().chain_update(self.key).chain_update(secret).finalize().into()
    }
}

/// Refuses a secret that a header cannot carry, or that can be guessed.
fn check_secret(secret: &str) -> Result<(), String> {
    const FIX: &str = "use the output of `openssl rand -hex 24`";
    if let Some(what) = unusable_token(secret) {
        return Err(format!("{what}: {FIX}"));
    }
    let characters = secret.chars().count();
    if characters < TOKEN_CHARS_MIN {
        let has = count(characters as u64, "character");
        return Err(format!("has {has}, and needs at least {TOKEN_CHARS_MIN}: {FIX}"));
    }
    let different = secret.chars().collect::<BTreeSet<char>>().len();
    if different < TOKEN_DISTINCT_CHARACTERS_MIN {
        return Err(format!("can be guessed, because it has only {different} different characters: {FIX}"));
    }
    Ok(())
}

fn read_secret(reference: &SecretReference, variable: &impl Fn(&str) -> Option<String>) -> Result<String, String> {
    let text = match reference {
        SecretReference::Env(name) => variable(name).ok_or("the variable is not set")?,
        SecretReference::File(path) => {
            files::read_trusted(path, SECRET_BYTES_MAX).map_err(|error| format!("cannot be read: {error}"))?.text
        }
    };
    let text = text.trim_end_matches(['\r', '\n']);
    if text.is_empty() { Err("is empty".to_owned()) } else { Ok(text.to_owned()) }
}

#[cfg(test)]
pub mod tests {
    use secrecy::SecretString;

    use super::*;
    use crate::config::people::{PeopleConfig, TokenRole};

    /// A secret that differs from those of other numbers in its last character.
    pub fn secret(number: usize) -> String {
        format!("0123456789abcdef0123456789abcde{number}")
    }

    pub fn entry(name: &str, role: Role, reference: &str) -> TokenEntry {
        TokenEntry { name: name.to_owned(), role, reference: SecretReference::parse(reference).unwrap() }
    }

    pub fn ops(token: Option<&str>, people: PeopleConfig) -> OpsConfig {
        OpsConfig { listen: None, token: token.map(SecretString::from), people }
    }

    fn load(secrets: &[(&str, &str)], token: Option<&str>) -> Result<TokenList, Vec<String>> {
        let entry = |(name, _): &(&str, &str)| entry(name, Role::Operator, &format!("env:{name}"));
        let tokens = secrets.iter().map(entry).collect();
        let people = PeopleConfig { tokens, token_role: TokenRole(Role::Viewer), ..PeopleConfig::default() };
        TokenList::load(&ops(token, people), |name| {
            secrets.iter().find(|(of, _)| *of == name).map(|(_, secret)| (*secret).to_owned())
        })
    }

    #[test]
    fn each_token_gives_its_identity() {
        let secrets = [0, 1, 2].map(secret);
        let list = load(&[("first", &secrets[0]), ("last", &secrets[1])], Some(&secrets[2])).unwrap();
        let found = |secret: &str| {
            list.find(secret.as_bytes()).map(|identity| (identity.name.as_str(), identity.role, identity.path))
        };
        assert_eq!(found(&secrets[0]), Some(("first", Role::Operator, IdentityPath::Token)));
        assert_eq!(found(&secrets[1]), Some(("last", Role::Operator, IdentityPath::Token)));
        assert_eq!(found(&secrets[2]), Some(("token", Role::Viewer, IdentityPath::Token)));
        for wrong in ["", "first", &secret(3), &secrets[0][1..], &format!("{}0", secrets[0])] {
            assert_eq!(found(wrong), None, "{wrong}");
        }
        assert_eq!(TokenList::default().find(b""), None);
        let shown = format!("{list:?}");
        assert!(shown.contains("first") && secrets.iter().all(|secret| !shown.contains(secret)), "{shown}");
    }

    #[test]
    fn unusable_secrets_are_refused_and_not_repeated() {
        let (good, same) = (secret(0), secret(0));
        let problems = load(
            &[
                ("empty", ""),
                ("short", "hunter2"),
                ("repeated", "hunterhunterhunterhunterhunterhunter"),
                ("spaced", "0123456789abcdef 0123456789abcdef"),
                ("example", "at-least-32-random-characters"),
                ("good", &good),
                ("same", &same),
                ("shared", &secret(1)),
            ],
            Some(&secret(1)),
        )
        .unwrap_err();
        let wanted = [
            "`empty` (env:empty): is empty",
            "`short` (env:short): has 7 characters, and needs at least 32",
            "`repeated` (env:repeated): can be guessed, because it has only 6 different characters",
            "`spaced` (env:spaced): contains characters that a header cannot carry",
            "`example` (env:example): is the placeholder of an example",
            "`same` (env:same): has the secret of `good`",
            "`shared` (env:shared): has the secret of `token`",
        ];
        assert_eq!(problems.len(), wanted.len(), "{problems:?}");
        for (problem, wanted) in problems.iter().zip(wanted) {
            assert!(problem.starts_with(wanted), "{problem}");
        }
        let all = problems.join("\n");
        assert!(!all.contains("hunter") && !all.contains("0123456789"), "{all}");
        let people = PeopleConfig { tokens: vec![entry("a", Role::Viewer, "env:MISSING")], ..PeopleConfig::default() };
        let missing = TokenList::load(&ops(None, people), |_| None).unwrap_err();
        assert!(missing[0].contains("the variable is not set"), "{missing:?}");
    }

    #[test]
    fn token_file_must_be_trusted() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("alice");
        std::fs::write(&path, format!("{}\n", secret(0))).unwrap();
        let tokens = vec![entry("alice", Role::Viewer, &format!("file:{}", path.display()))];
        let ops = ops(None, PeopleConfig { tokens, ..PeopleConfig::default() });
        let list = TokenList::load(&ops, |_| None).unwrap();
        assert!(list.find(secret(0).as_bytes()).is_some(), "the line's end is no part of the secret");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert!(TokenList::load(&ops, |_| None).unwrap_err()[0].contains("every user of this machine may write it"));
        std::fs::remove_file(&path).unwrap();
        assert!(TokenList::load(&ops, |_| None).unwrap_err()[0].contains("cannot be read"));
    }
}
