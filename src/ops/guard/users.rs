//! The users of the ops server and their passwords, as Argon2 hashes or as texts, read once at the start.
//!
//! A hash takes tens of milliseconds and megabytes to compare. So one is compared at a time, and a right password is
//! remembered as a digest with a key of this process: a page that polls pays once. An unknown name takes as long.

use std::fmt;
use std::sync::Arc;

use argon2::{Argon2, Params, PasswordHash, PasswordVerifier as _};
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use super::tokens::{TokenCheck, WrongTokens};
use crate::config::people::UserEntry;
use crate::domain::person::Role;
use crate::files;
use crate::ops::connections::ClientAddress;
use crate::provider::secret_grants::SecretReference;

/// Largest file with a password or a hash, in bytes.
const SECRET_BYTES_MAX: u64 = 4_096;
/// Shortest password, in characters.
const PASSWORD_CHARS_MIN: usize = 12;
/// Most memory of a hash, in KiB, and most passes: a comparison must not stop this process.
const MEMORY_KIB_MAX: u32 = 256 * 1_024;
const PASSES_MAX: u32 = 16;
const LANES_MAX: u32 = 16;

/// Compares a password with a hash. That is costly.
type Comparison = dyn Fn(&[u8], &PasswordHash) -> bool + Send + Sync;

/// The users of `ops.users`.
pub struct Users {
    list: Vec<User>,
    /// Key of the digests; random for each process.
    key: [u8; 32],
    /// Held while a hash is compared.
    comparing: tokio::sync::Mutex<()>,
    comparison: Arc<Comparison>,
}

struct User {
    name: String,
    role: Role,
    /// `None`: the password itself was given, and its digest is below.
    hash: Option<PasswordHash>,
    /// Digest of the right password, once it is known.
    right: Mutex<Option<[u8; 32]>>,
}

impl Default for Users {
    fn default() -> Self {
        Self {
            list: Vec::new(),
            key: [0; 32],
            comparing: tokio::sync::Mutex::default(),
            comparison: Arc::new(is_right),
        }
    }
}

impl fmt::Debug for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.list.iter().map(|user| (&user.name, user.role))).finish()
    }
}

impl Users {
    /// Reads the password or hash of each user.
    ///
    /// # Errors
    /// Every problem; none repeats a secret.
    pub fn load(entries: &[UserEntry], variable: impl Fn(&str) -> Option<String>) -> Result<Self, Vec<String>> {
        let key: [u8; 32] = rand::random();
        let (mut list, mut problems) = (Vec::new(), Vec::new());
        for entry in entries {
            match read_secret(&entry.reference, &variable).and_then(|secret| User::new(entry, &secret, &key)) {
                Ok(user) => list.push(user),
                Err(problem) => {
                    problems.push(format!("the password of `{}` ({}): {problem}", entry.name, entry.reference));
                }
            }
        }
        if problems.is_empty() { Ok(Self { list, key, ..Self::default() }) } else { Err(problems) }
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The role of a user.
    pub fn role_of(&self, name: &str) -> Option<Role> {
        self.find(name).map(|user| user.role)
    }

    fn find(&self, name: &str) -> Option<&User> {
        self.list.iter().find(|user| user.name == name)
    }

    /// Compares a password unless the address must wait. A name that no user has is compared with another's hash.
    pub async fn check(
        &self,
        name: &str,
        password: &[u8],
        guesses: &WrongTokens,
        address: ClientAddress,
    ) -> TokenCheck {
        let known = self.find(name);
        let digest = digest(&self.key, name, password);
        if known.is_some_and(|user| user.is_right(&digest)) {
            return guesses.check(address, || true);
        }
        let Some(hash) = known.or_else(|| self.list.first()).and_then(|user| user.hash.clone()) else {
            return guesses.check(address, || false);
        };
        // One comparison at a time, so that simultaneous guesses are counted one after the other.
        let _turn = self.comparing.lock().await;
        if guesses.must_wait(address) {
            return guesses.check(address, || false);
        }
        let (password, comparison) = (password.to_vec(), Arc::clone(&self.comparison));
        let compare = move || comparison(&password, &hash);
        let is_right = tokio::task::spawn_blocking(compare).await.unwrap_or(false);
        let check = guesses.check(address, || is_right && known.is_some());
        if let (TokenCheck::Valid, Some(user)) = (check, known) {
            *user.right.lock() = Some(digest);
        }
        check
    }
}

impl User {
    fn new(entry: &UserEntry, secret: &str, key: &[u8; 32]) -> Result<Self, String> {
        let user = |hash, right| Self { name: entry.name.clone(), role: entry.role, hash, right: Mutex::new(right) };
        if secret.starts_with('$') {
            return parse_hash(secret).map(|hash| user(Some(hash), None));
        }
        let characters = secret.chars().count();
        if characters < PASSWORD_CHARS_MIN {
            return Err(format!("has {characters} characters; it needs at least {PASSWORD_CHARS_MIN}"));
        }
        Ok(user(None, Some(digest(key, &entry.name, secret.as_bytes()))))
    }

    fn is_right(&self, given: &[u8; 32]) -> bool {
        self.right.lock().is_some_and(|right| right.ct_eq(given).into())
    }
}

fn is_right(password: &[u8], hash: &PasswordHash) -> bool {
    Argon2::default().verify_password(password, hash).is_ok()
}

fn digest(key: &[u8; 32], name: &str, password: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(key).chain_update(name).chain_update([0]).chain_update(password).finalize().into()
}

fn parse_hash(text: &str) -> Result<PasswordHash, String> {
    let fix = "write the output of `argon2 SALT -id -e`, which begins with $argon2id$";
    let hash = PasswordHash::new(text).map_err(|_| format!("is no password hash: {fix}"))?;
    if hash.algorithm.as_str() != "argon2id" || hash.salt.is_none() || hash.hash.is_none() {
        return Err(format!("is no complete Argon2id hash: {fix}"));
    }
    let params = Params::try_from(&hash).map_err(|_| format!("has invalid parameters: {fix}"))?;
    if params.m_cost() > MEMORY_KIB_MAX || params.t_cost() > PASSES_MAX || params.p_cost() > LANES_MAX {
        return Err(format!(
            "costs too much to compare: use at most m={MEMORY_KIB_MAX}, t={PASSES_MAX} and p={LANES_MAX}"
        ));
    }
    Ok(hash)
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
    use std::net::{IpAddr, Ipv4Addr};
    use std::sync::atomic::{AtomicU64, Ordering};

    use argon2::PasswordHasher as _;

    use super::*;

    /// A cheap hash of a password.
    pub fn hash_of(password: &str) -> String {
        let params = Params::new(8, 1, 1, None).unwrap();
        let hash = Argon2::from(params).hash_password_with_salt(password.as_bytes(), b"salt-of-this-test").unwrap();
        hash.to_string()
    }

    fn entry(name: &str, reference: &str) -> UserEntry {
        UserEntry { name: name.to_owned(), role: Role::Operator, reference: SecretReference::parse(reference).unwrap() }
    }

    fn load(secrets: &[(&str, &str)]) -> Result<Users, Vec<String>> {
        let entries: Vec<UserEntry> = secrets.iter().map(|(name, _)| entry(name, &format!("env:{name}"))).collect();
        Users::load(&entries, |name| secrets.iter().find(|(of, _)| *of == name).map(|(_, secret)| (*secret).to_owned()))
    }

    #[tokio::test]
    async fn passwords_are_compared_by_hash_or_text() {
        let hash = hash_of("correct horse");
        let users = load(&[("alice", &hash), ("bob", "battery staple")]).unwrap();
        let check = async |name: &str, password: &str| {
            let address = IpAddr::V4(Ipv4Addr::LOCALHOST).into();
            users.check(name, password.as_bytes(), &WrongTokens::default(), address).await == TokenCheck::Valid
        };
        // The second comparison is by the remembered digest.
        for _ in 0..2 {
            assert!(check("alice", "correct horse").await && check("bob", "battery staple").await);
            for (name, password) in [
                ("alice", "correct horsf"),
                ("alice", "battery staple"),
                ("bob", "correct horse"),
                ("carol", "correct horse"),
                ("carol", "battery staple"),
                ("alice", ""),
                ("alice", hash.as_str()),
            ] {
                assert!(!check(name, password).await, "{name}:{password}");
            }
        }
        assert_eq!((users.role_of("alice"), users.role_of("carol")), (Some(Role::Operator), None));
        assert!(!format!("{users:?}").contains("argon2"));
    }

    #[tokio::test]
    async fn early_password_is_not_compared() {
        let compared = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&compared);
        let counted = move |password: &[u8], hash: &PasswordHash| {
            counter.fetch_add(1, Ordering::Relaxed);
            is_right(password, hash)
        };
        let users = Users { comparison: Arc::new(counted), ..load(&[("alice", &hash_of("correct horse"))]).unwrap() };
        let (guesses, address) = (WrongTokens::default(), IpAddr::V4(Ipv4Addr::LOCALHOST).into());
        let check = async |password: &str| users.check("alice", password.as_bytes(), &guesses, address).await;
        for _ in 0..4 {
            assert_eq!(check("wrong").await, TokenCheck::Wrong);
        }
        assert_eq!(compared.load(Ordering::Relaxed), 4);
        for password in ["correct horse", "wrong"] {
            assert!(matches!(check(password).await, TokenCheck::TooSoon { .. }), "the response reveals nothing");
        }
        assert_eq!(compared.load(Ordering::Relaxed), 4, "a hash is costly, so an early guess has none");
        assert_eq!(guesses.failures().wrong_token, 4);
    }

    #[test]
    fn unusable_secrets_are_refused_and_not_repeated() {
        let costly = hash_of("x").replace("m=8", "m=1048576");
        for (secret, words) in [
            ("", "is empty"),
            ("short", "it needs at least 12"),
            ("$argon2id$hunter2", "is no password hash"),
            ("$2y$10$hunter2hunter2hunter2hu", "is no"),
            (costly.as_str(), "costs too much"),
        ] {
            let problems = load(&[("alice", secret)]).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains(words), "{secret}: {problems:?}");
            assert!(secret.is_empty() || !problems[0].contains(secret), "{problems:?}");
        }
        let missing = Users::load(&[entry("alice", "env:MISSING")], |_| None).unwrap_err();
        assert!(missing[0].contains("the variable is not set"), "{missing:?}");
    }

    #[test]
    fn password_file_must_be_trusted() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("alice");
        std::fs::write(&path, "battery staple\n").unwrap();
        let entry = entry("alice", &format!("file:{}", path.display()));
        assert!(Users::load(std::slice::from_ref(&entry), |_| None).is_ok());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert!(Users::load(&[entry], |_| None).unwrap_err()[0].contains("cannot be read"));
    }
}
