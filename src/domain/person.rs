//! The people and programs that use the ops server or the commands: their names, roles, and how each was identified.
//!
//! A role has all rights of the roles below it.

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
    /// By `ops.token` or one of `ops.tokens`, which several people or programs may have.
    Token,
    /// By the header of an authenticating proxy.
    Proxy,
}

impl IdentityPath {
    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Token => "token",
            Self::Proxy => "proxy",
        }
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
    /// Empty if nothing names the caller.
    pub name: String,
    pub role: Role,
    pub path: IdentityPath,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_ordered_and_named() {
        assert!(Role::Viewer < Role::Operator && Role::Operator < Role::Admin);
        for role in Role::ALL {
            assert_eq!(Role::from_name(role.name()), Some(role));
        }
        assert_eq!((Role::from_name("Admin"), Role::from_name("")), (None, None));
    }
}
