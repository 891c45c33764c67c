//! Changes by an operator while workers run: a decision about a payment, and a provider's pause.
//!
//! Commands and API share this code. [`super::limit_change`] changes a limit, [`super::account_rules`] an account's rule.
//! A change that would make the row invalid is rejected before anything is written. Limits are added and removed by the provider file only.

use clap::ValueEnum;
use serde::Deserialize;
use utoipa::ToSchema;

use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::decision_input::{self, ChargeError};
use crate::ledger::lane_holds::LaneHold;
use crate::ledger::operator::{Actor, Charge, JobResolution};
use crate::ledger::provider_row::ProviderRow;
use crate::ledger::settings::{InvalidRow, RawRate};
use crate::ops::row_in_force::{UnusableRow, unusable_row};
use crate::queue::message::CardNumbers;
use crate::worker::resend::{ResendError, Resender};

/// The kind of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ResolutionKind {
    /// The payment was charged.
    #[value(help = "Charged")]
    Succeeded,
    /// The payment was not charged; do not retry.
    #[value(help = "Not charged, do not retry")]
    Declined,
    /// The payment is confirmed not charged: charge again with the same key and the same request, within the limits.
    #[value(help = "Confirmed not charged: charge again, with the same key and request, within the limits")]
    Resend,
}

impl ResolutionKind {
    /// The resolution of a payment in `review`, with its charge.
    ///
    /// # Errors
    /// What is wrong with the charge.
    pub fn resolution(self, charge: Charge, card_numbers: CardNumbers) -> Result<JobResolution, ChargeError> {
        let resolution = match self {
            Self::Succeeded => JobResolution::Succeeded(Charge::default()),
            Self::Declined => JobResolution::Declined,
            Self::Resend => JobResolution::Resend,
        };
        decision_input::with_charge(resolution, charge, card_numbers)
    }
}

/// An operator's decision, ready to be applied to payments.
pub enum JobDecision<'a> {
    /// Only the ledger changes.
    Record { ledger: &'a Database, resolution: JobResolution, actor: Actor },
    /// The payment is sent again.
    Resend(Resender<'a>),
}

impl JobDecision<'_> {
    /// The provider of a payment that the decision would change; changes nothing.
    ///
    /// # Errors
    /// Why the decision would be refused.
    pub async fn preview(&self, id: &JobId) -> Result<ProviderName, ResendError> {
        let reloaded = match self {
            Self::Record { ledger, resolution, .. } => ledger.reload_job(id, resolution).await?,
            Self::Resend(resender) => resender.prepare(id).await?,
        };
        Ok(reloaded.job.provider)
    }

    /// Applies the decision to one payment.
    ///
    /// # Errors
    /// Why it was refused.
    pub async fn apply(&self, id: &JobId) -> Result<(), ResendError> {
        match self {
            Self::Record { ledger, resolution, actor } => Ok(ledger.resolve_job(id, resolution, None, actor).await?),
            Self::Resend(resender) => resender.send(id).await,
        }
    }
}

/// Why nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum SettingsChangeError {
    #[error("there is no provider `{0}`: `sluicegate provider list` shows those that exist")]
    NoProvider(String),
    #[error("provider `{provider}` has no limit `{limit}`; it has: {}", .names.join(", "))]
    NoLimit { provider: String, limit: String, names: Vec<String> },
    /// The change would make the row invalid; each problem with its fix.
    #[error("{}", .0.join("; "))]
    InvalidRow(Vec<String>),
    /// The row would stay invalid, and the change would not be in force.
    #[error("nothing was changed: {0}. Fix all of it at once: `sluicegate provider apply --reset FILE`")]
    Unusable(UnusableRow),
    #[error("limit `{limit}` would go back to the same rate, {rate}: leave the end out")]
    NothingToReturn { limit: String, rate: RawRate },
    #[error("account `{account}` would go back to the same rule, {rule}: leave the end out")]
    SameRuleAfterwards { account: String, rule: String },
    #[error("the lane of provider `{0}` is not held")]
    NotHeld(String),
    #[error("a release needs a reason, because payments may be charged twice: say what you compared")]
    NoReasonForRelease,
    #[error("{subject} has no rule at provider `{provider}`: `sluicegate accounts list {provider}` shows all rules")]
    NoRule { provider: String, subject: String },
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

/// How often a change restarts because settings changed meanwhile.
pub(super) const TRIES_MAX: u32 = 10;

/// The error after the last try.
pub(super) fn too_fast() -> SettingsChangeError {
    LedgerError::Unavailable("settings change faster than a row can be changed".to_owned()).into()
}

/// The row of a provider, with the settings version at which it was read.
pub(super) async fn row_to_change(
    ledger: &Database,
    provider: &ProviderName,
) -> Result<(i64, ProviderRow), SettingsChangeError> {
    let found = match ledger.readable_row_at(provider).await {
        Err(error) => match unusable_row(ledger, provider).await? {
            Some(row) => return Err(SettingsChangeError::Unusable(row)),
            None => return Err(error.into()),
        },
        Ok(found) => found,
    };
    found.ok_or_else(|| SettingsChangeError::NoProvider(provider.to_string()))
}

/// Rejects a row that no worker could use.
pub(super) async fn check_changed_row(
    ledger: &Database,
    provider: &ProviderName,
    row: &ProviderRow,
) -> Result<(), SettingsChangeError> {
    let Err(InvalidRow { problems, .. }) = row.validate(0) else { return Ok(()) };
    // What is in force is in doubt only if the row was invalid before.
    Err(match unusable_row(ledger, provider).await? {
        Some(row) => SettingsChangeError::Unusable(UnusableRow { problems, ..row }),
        None => SettingsChangeError::InvalidRow(problems),
    })
}

/// Pauses or resumes a provider; returns whether that changed anything. A resume always does: it also lifts waits that
/// the provider asked for, which are not in the row. So does a pause of a provider that a pause of all holds: a resume of
/// all then leaves it paused.
pub async fn set_paused(
    ledger: &Database,
    provider: &ProviderName,
    paused: bool,
    by: Option<&Actor>,
) -> Result<bool, SettingsChangeError> {
    // A provider whose row cannot be read can be paused too: workers may use its last valid row.
    if let Some(Ok(row)) = ledger.raw_rows(Some(provider)).await?.first()
        && row.paused
        && paused
        && !ledger.is_held_by_pause_of_all(provider).await?
    {
        return Ok(false);
    }
    match ledger.set_paused_as(provider, paused, by).await? {
        true => Ok(true),
        false => Err(SettingsChangeError::NoProvider(provider.to_string())),
    }
}

/// Resumes a provider, and releases the hold of its lane if that is asked for. Returns the hold that stays.
pub async fn resume(
    ledger: &Database,
    provider: &ProviderName,
    release_hold: bool,
    by: &Actor,
) -> Result<Option<LaneHold>, SettingsChangeError> {
    if release_hold {
        if by.reason.is_none() {
            return Err(SettingsChangeError::NoReasonForRelease);
        }
        if !ledger.release_lane(provider, by).await? {
            return Err(SettingsChangeError::NotHeld(provider.to_string()));
        }
    }
    set_paused(ledger, provider, false, Some(by)).await?;
    Ok(ledger.lane_hold(provider).await?)
}

/// What a hold that stays after a resume means, and how it ends.
pub fn still_held_text(hold: &LaneHold) -> String {
    let name = &hold.provider;
    format!(
        "the lane of {name} is held, so no charge starts ({hold}). Compare its payments with the provider's records, then \
         release it: sluicegate provider resume {name} --release-hold --because TEXT"
    )
}

pub(super) fn no_limit_error(row: &ProviderRow, limit: &str) -> SettingsChangeError {
    let names = row.limits.iter().map(|limit| limit.name.clone()).collect();
    SettingsChangeError::NoLimit { provider: row.name.clone(), limit: limit.to_owned(), names }
}
