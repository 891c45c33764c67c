//! Applying provider files: the comparison with the file that was applied last, and the transaction that writes both.
//!
//! Table `provider_files` has that file, so a change by hand is recognised in every order: one that the new file does not
//! touch stays, and one that it contradicts stops it. The audit says who made the change.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::apply;
use super::dialect::Template;
use super::engine::{Step, args};
use super::result::{FromRow as _, corrupt};
use super::settings::{TRIES_MAX, readable};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::operator::Actor;
use crate::ledger::provider_row::{HandChange, MergedRow, Object, ProviderRow, merge_file};
use crate::ledger::settings::{AuditRow, AuditedChange, SettingsChange};

/// Changes of one row that are searched for its author.
const AUDIT_ROWS_MAX: u32 = 100;

static FILES: Template = Template::new("SELECT provider, {text:file} AS file FROM provider_files");

static RECORD_FILE: Template = Template::new(
    "INSERT INTO provider_files (provider, file) VALUES ($1, {json:$2}) \
     ON CONFLICT (provider) DO UPDATE SET file = excluded.file",
);

static CHANGES_OF_ROW: Template = Template::new(
    "SELECT id, {ms:at} AS at_ms, who, os_user, program, because, table_name, row_key, \
         {text:old_row} AS old_row, {text:new_row} AS new_row FROM settings_audit \
     WHERE table_name = $1 AND row_key = $2 ORDER BY id DESC LIMIT $3",
);

/// What becomes of changes by hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApplyMode {
    /// They stay, unless the file contradicts them: then nothing is applied.
    Compare,
    /// The file wins.
    Reset,
}

/// A change by hand, with the audited change that made it.
#[derive(Clone, Debug, PartialEq)]
pub struct HandChangeBy {
    pub change: HandChange,
    /// `None`: the audit has none.
    pub by: Option<AuditedChange>,
}

/// What an apply did, or would do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AppliedFile {
    pub changes: Vec<SettingsChange>,
    /// Changes by hand that stay, though the file says otherwise.
    pub kept: Vec<HandChangeBy>,
}

/// Why a file was not applied.
#[derive(Debug, thiserror::Error)]
pub enum FileApplyError {
    /// The file and an operator have changed the same values.
    #[error("{} values were changed by hand and in the file", .0.len())]
    Conflicts(Vec<HandChangeBy>),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

/// The rows to write, and the changes by hand that they keep or would lose.
#[derive(Default)]
struct Comparison {
    wanted: Vec<ProviderRow>,
    kept: Vec<HandChange>,
    conflicts: Vec<HandChange>,
}

impl Database {
    /// Writes the rows as they are, whatever was changed by hand: [`Database::apply_file`] with [`ApplyMode::Reset`].
    /// Returns the changes, also in a dry run.
    pub async fn apply_settings(
        &self,
        rows: &[ProviderRow],
        dry_run: bool,
    ) -> Result<Vec<SettingsChange>, LedgerError> {
        match self.apply_file(rows, ApplyMode::Reset, dry_run, None).await {
            Ok(applied) => Ok(applied.changes),
            Err(FileApplyError::Ledger(error)) => Err(error),
            Err(conflicts @ FileApplyError::Conflicts(_)) => Err(LedgerError::StatementFailed(conflicts.to_string())),
        }
    }

    /// Applies the rows of a file in one transaction: inserts, updates, and deletes limits and account rules that a row no
    /// longer lists. Providers that are not named stay, and so does what a row does not mention. With `by`, the audit has
    /// author and reason.
    ///
    /// # Errors
    /// [`FileApplyError::Conflicts`]: nothing was applied.
    pub async fn apply_file(
        &self,
        rows: &[ProviderRow],
        mode: ApplyMode,
        dry_run: bool,
        by: Option<&Actor>,
    ) -> Result<AppliedFile, FileApplyError> {
        apply::check(rows)?;
        for _ in 0..TRIES_MAX {
            let (version, all) = self.read_settings(None).await?;
            let files = self.applied_files().await?;
            // Files and rows of different versions would look like changes by hand.
            if self.settings_version().await? != version {
                continue;
            }
            let named = |name: &str| rows.iter().any(|row| row.name == name);
            let named = all.into_iter().filter(|(name, _)| named(name)).map(|(_, row)| readable(row));
            let present: Vec<ProviderRow> = named.collect::<Result<_, _>>()?;
            let Comparison { wanted, kept, conflicts } = compare(rows, &present, &files, mode);
            if !conflicts.is_empty() {
                return Err(FileApplyError::Conflicts(self.with_authors(conflicts).await?));
            }
            apply::check(&wanted).map_err(|error| beside_hand_changes(error, &kept))?;
            let (changes, mut writes) = self.settings_difference(&present, &wanted);
            writes.extend(rows.iter().filter_map(|row| self.record_file(row, files.get(&row.name))));
            if !dry_run && !writes.is_empty() {
                writes.insert(0, self.unless_changed_since(version));
                if self.atomically_by(writes, by).await?.is_none() {
                    continue;
                }
            }
            return Ok(AppliedFile { changes, kept: self.with_authors(kept).await? });
        }
        Err(LedgerError::Unavailable("settings change faster than they can be applied".to_owned()).into())
    }

    /// The rows of the files that were applied last, by provider.
    async fn applied_files(&self) -> Result<BTreeMap<String, ProviderRow>, LedgerError> {
        let rows = self.query(&FILES, []).await?;
        let read = |row: &super::result::SqlRow| {
            let columns: Object = row.get("file")?;
            let pause_unmentioned = !columns.contains_key("paused");
            let file: ProviderRow = serde_json::from_value(Json::Object(columns))
                .map_err(|_| corrupt("file", "of provider_files is no provider's row"))?;
            Ok((row.get("provider")?, ProviderRow { pause_unmentioned, ..file }))
        };
        rows.iter().map(read).collect()
    }

    /// Records the row of a file; `None`: it is the one that was applied last.
    fn record_file(&self, row: &ProviderRow, applied: Option<&ProviderRow>) -> Option<Step> {
        let mut file = row.clone();
        if file.accounts_unmentioned {
            file.accounts = applied.map(|applied| applied.accounts.clone()).unwrap_or_default();
        }
        let columns = |row: &ProviderRow| {
            let mut columns = serde_json::to_value(row).unwrap_or_default();
            if let (true, Some(columns)) = (row.pause_unmentioned, columns.as_object_mut()) {
                columns.remove("paused");
            }
            columns
        };
        let file = columns(&file);
        let is_new = applied.map(columns).as_ref() != Some(&file);
        is_new.then(|| self.step(&RECORD_FILE, args![&row.name, file.to_string()]))
    }

    async fn with_authors(&self, changes: Vec<HandChange>) -> Result<Vec<HandChangeBy>, LedgerError> {
        let mut all = Vec::with_capacity(changes.len());
        for change in changes {
            let args = args![change.table, &change.row_key, AUDIT_ROWS_MAX];
            let rows = self.query(&CHANGES_OF_ROW, args).await?;
            let rows = rows.iter().filter_map(|row| AuditRow::from_row(row).ok());
            let mut by_hand = rows.filter(|row| !row.is_planned_return() && row.changes_any(&change.columns));
            let by = by_hand.next().map(AuditedChange::from);
            all.push(HandChangeBy { change, by });
        }
        Ok(all)
    }
}

fn compare(
    rows: &[ProviderRow],
    present: &[ProviderRow],
    files: &BTreeMap<String, ProviderRow>,
    mode: ApplyMode,
) -> Comparison {
    let mut all = Comparison::default();
    let no_file = ProviderRow { pause_unmentioned: true, ..ProviderRow::default() };
    for file in rows {
        let there = present.iter().find(|row| row.name == file.name);
        match there {
            Some(there) if mode == ApplyMode::Compare => {
                let applied = files.get(&file.name).unwrap_or(&no_file);
                let MergedRow { row, kept, conflicts } = merge_file(applied, there, file);
                all.wanted.push(row);
                all.kept.extend(kept);
                all.conflicts.extend(conflicts);
            }
            _ => all.wanted.push(file.keep_unmentioned(there)),
        }
    }
    all
}

/// The error of a file that is valid alone, and not beside the changes by hand that stay.
fn beside_hand_changes(error: LedgerError, kept: &[HandChange]) -> LedgerError {
    let names: Vec<String> = kept.iter().map(|change| format!("{}: {}", change.provider, change.what)).collect();
    match error {
        LedgerError::StatementFailed(why) if !names.is_empty() => LedgerError::StatementFailed(format!(
            "{why}. These changes by hand stay beside the file: {}. With --reset the file wins",
            names.join(", ")
        )),
        error => error,
    }
}
