//! Who paused the providers that are paused, when and why, from the audit.
//!
//! Refuses to fail a picture for it: where the audit does not answer, nobody is named.

use std::collections::BTreeMap;

use crate::domain::provider::ProviderName;
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::Settings;

/// Changes of a provider that are looked through: a pause is its last, or close to it.
const CHANGES_MAX: u32 = 50;

/// By provider, in words.
pub async fn pause_authors(settings: &dyn Settings, rows: &[ProviderRow]) -> BTreeMap<String, String> {
    let mut words = BTreeMap::new();
    for row in rows.iter().filter(|row| row.paused) {
        let Ok(name) = ProviderName::new(row.name.as_str()) else { continue };
        let Ok(changes) = settings.audit(Some(&name), CHANGES_MAX).await else { continue };
        let who = changes.iter().find_map(|change| change.describe_pause());
        words.extend(who.map(|who| (row.name.clone(), who)));
    }
    words
}
