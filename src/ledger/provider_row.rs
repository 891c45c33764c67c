//! A provider as an operator writes it, in a row or in a provider file, and its translation into what is meant.

use serde::{Deserialize, Serialize};

/// One `[[provider]]` table or row of `providers`, with what hangs on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProviderRow {
    pub name: String,
}
