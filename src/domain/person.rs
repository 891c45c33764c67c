//! The people and programs that use the ops server or the commands: their names, roles, and how each was identified.
//!
//! A role has all rights of the roles below it. Two identities are the same person if one of their names is equal,
//! however they were identified: a second path to the server is no second person.

use std::collections::BTreeSet;
use std::fmt;

/// What a person or a program may do, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Reads everything that the server shows.
    Viewer,
    /// Also decides about payments and rejected messages, pauses and resumes providers.
    Operator,
    /// Also changes limits.
    Admin,
}

impl Role {
    pub const ALL: [Self; 3] = [Self::Viewer, Self::Operator, Self::Admin];

    pub fn name(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How a caller was identified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityPath {
    /// Not at all: the server listens on loopback and asks for nothing.
    Open,
    /// By `ops.token`, which many people may have.
    Token,
    /// By a name and a password of `ops.users`.
    User,
    /// By the header of an authenticating proxy.
    Proxy,
    /// By the operating system: the user of a command.
    Os,
}

impl IdentityPath {
    pub const ALL: [Self; 5] = [Self::Open, Self::Token, Self::User, Self::Proxy, Self::Os];

    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Token => "token",
            Self::User => "user",
            Self::Proxy => "proxy",
            Self::Os => "os",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|path| path.name() == name)
    }
}

impl fmt::Display for IdentityPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The identity of a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Empty if nothing names the caller. By the operating system: `user@host`, or `user (sudo caller)@host`.
    pub name: String,
    pub role: Role,
    pub path: IdentityPath,
}

impl Identity {
    /// Whether the identity names one person. A token and an open server do not.
    pub fn names_a_person(&self) -> bool {
        matches!(self.path, IdentityPath::User | IdentityPath::Proxy | IdentityPath::Os)
            && !person_names(&self.name, self.path).is_empty()
    }

    /// Whether both may be the same person. In doubt they are: `alice`, `Alice` and `alice@corp.example` are one person.
    pub fn may_be_same_person(&self, other: &Self) -> bool {
        let ours = person_names(&self.name, self.path);
        person_names(&other.name, other.path).iter().any(|name| ours.contains(name))
    }
}

/// The names of the person behind an identity, in lower case, without domain or host.
fn person_names(name: &str, path: IdentityPath) -> BTreeSet<String> {
    let bare = |name: &str| {
        let local = name.split('@').next().unwrap_or_default();
        local.rsplit('\\').next().unwrap_or_default().trim().to_lowercase()
    };
    let names = match (path, name.split_once(" (sudo ")) {
        // Root is the account that the caller used, and others use it too.
        (IdentityPath::Os, Some(("root", caller))) => vec![caller.split(')').next().unwrap_or_default()],
        (IdentityPath::Os, Some((owner, caller))) => vec![owner, caller.split(')').next().unwrap_or_default()],
        _ => vec![name],
    };
    names.into_iter().map(bare).filter(|name| !name.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(name: &str, path: IdentityPath) -> Identity {
        Identity { name: name.to_owned(), role: Role::Operator, path }
    }

    #[test]
    fn roles_are_ordered_and_named() {
        assert!(Role::Viewer < Role::Operator && Role::Operator < Role::Admin);
        for role in Role::ALL {
            assert_eq!(Role::from_name(role.name()), Some(role));
        }
        for path in IdentityPath::ALL {
            assert_eq!(IdentityPath::from_name(path.name()), Some(path));
        }
        assert_eq!((Role::from_name("Admin"), Role::from_name("")), (None, None));
    }

    #[test]
    fn another_path_is_no_other_person() {
        use IdentityPath::{Os, Proxy, User};
        let alice = identity("alice", User);
        for same in [
            identity("alice", Proxy),
            identity("Alice", Proxy),
            identity("alice@corp.example", Proxy),
            identity("CORP\\alice", Proxy),
            identity("alice@host-1", Os),
            identity("root (sudo alice)@host-1", Os),
            identity("deploy (sudo alice)@host-1", Os),
            // The environment names the caller, so another name there is no proof.
            identity("alice (sudo bob)@host-1", Os),
        ] {
            assert!(alice.may_be_same_person(&same) && same.may_be_same_person(&alice), "{same:?}");
        }
        for other in [identity("bob", User), identity("root (sudo bob)@host-1", Os), identity("alice2", Proxy)] {
            assert!(!alice.may_be_same_person(&other), "{other:?}");
        }
        let sudo = |caller: &str| identity(&format!("root (sudo {caller})@host-1"), Os);
        assert!(!sudo("alice").may_be_same_person(&sudo("bob")), "both use root");
    }

    #[test]
    fn a_token_names_no_person() {
        for (name, path, is_person) in [
            ("alice", IdentityPath::User, true),
            ("alice", IdentityPath::Token, false),
            ("alice", IdentityPath::Open, false),
            ("", IdentityPath::Proxy, false),
            ("@host", IdentityPath::Os, false),
        ] {
            assert_eq!(identity(name, path).names_a_person(), is_person, "{name} {path}");
        }
    }
}
