//! The identity of a deployment: the id that its database was given when it was created.
//!
//! A copy of a database, or a restored backup, has the id of its original.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Random UUID in the one row of table `deployment`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeploymentId(Uuid);

impl DeploymentId {
    pub fn parse(text: &str) -> Result<Self, String> {
        Uuid::parse_str(text).map(Self).map_err(|error| format!("a deployment id is a UUID: {error}"))
    }
}

impl TryFrom<String> for DeploymentId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text)
    }
}

impl From<DeploymentId> for String {
    fn from(id: DeploymentId) -> Self {
        id.to_string()
    }
}

impl fmt::Display for DeploymentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}
