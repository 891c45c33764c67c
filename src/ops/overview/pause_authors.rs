//! The authors of pauses: who paused each paused provider, when and why, by the audit.
//!
//! While the audit cannot be read, the author is missing and the overview is still shown.

use std::collections::BTreeMap;

use crate::domain::provider::ProviderName;
use crate::ledger::database::Database;
use crate::ledger::provider_row::ProviderRow;

/// Changes of a provider that are searched: the pause is the last one, or close to it.
const CHANGES_MAX: u32 = 50;

/// The author of each pause by provider, in words.
pub async fn pause_authors(ledger: &Database, rows: &[ProviderRow]) -> BTreeMap<String, String> {
    let mut words = BTreeMap::new();
    for row in rows.iter().filter(|row| row.paused) {
        let Ok(name) = ProviderName::new(row.name.as_str()) else { continue };
        let Ok(changes) = ledger.settings_audit(Some(&name), CHANGES_MAX).await else { continue };
        let who = changes.iter().find_map(|change| change.describe_pause());
        words.extend(who.map(|who| (row.name.clone(), who)));
    }
    words
}
