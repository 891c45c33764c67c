//! The pause of all providers at once: who set it, which providers it holds, and what a resume of all leaves as it is.
//!
//! At most one is in force. It holds exactly the providers that it has paused itself. A provider that is resumed, or
//! paused by itself meanwhile, leaves it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A pause of all providers that is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PauseOfAll {
    pub id: i64,
    pub since: String,
    /// `user@host` as the command or the API named it, else the database's user.
    pub by: String,
    pub because: Option<String>,
    /// The providers that it holds, in the order of their names.
    pub providers: Vec<String>,
}

/// The result of a pause of all providers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct PauseAllResult {
    /// `null`: no pause of all is in force, because every provider was paused before.
    pub id: Option<i64>,
    /// The providers that this paused.
    pub paused: Vec<String>,
    /// Paused already by the pause of all that was in force; it keeps its id.
    pub held: Vec<String>,
    /// Paused otherwise before; a resume of all leaves them paused.
    pub paused_before: Vec<String>,
}

/// The result of a resume of all providers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct ResumeAllResult {
    /// `null`: no pause of all was in force, and nothing is resumed.
    pub id: Option<i64>,
    pub resumed: Vec<String>,
    /// Of the same pause, resumed by themselves meanwhile.
    pub resumed_before: Vec<String>,
    /// Paused otherwise, before the pause of all or since; they stay paused.
    pub still_paused: Vec<String>,
}
