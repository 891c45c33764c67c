//! The `jobs` command: the details of one payment, lists of payments, and an operator's decisions about them.
//!
//! It does not show payloads and request bodies. Every change is checked against the state that the ledger has at that
//! moment, and audited.

use std::path::PathBuf;

use clap::{Subcommand, ValueEnum};

use super::{CommandError, Console, Exit};
use crate::app::Services;
use crate::config::Config;
use crate::domain::job::JobId;
use crate::domain::names::InvalidName;
use crate::ledger::operator::{Actor, STATES};

pub mod bulk;
pub mod decide;
mod erase;
mod explain;
pub mod show;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show one payment: its state, its requests, its events, and manual changes.
    Show {
        #[arg(value_parser = parse_id, allow_hyphen_values = true)]
        id: JobId,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show why a payment is in its state: the checks it passed, the one it waits for, and the estimated start.
    Explain(explain::Args),
    /// List payments, page by page in the order of their ids (with `--provider` alone: of their idempotency keys).
    List(show::ListArgs),
    /// Resolve a payment in `review`: record its outcome, or send it again.
    Resolve(decide::ResolveArgs),
    /// Cancel payments that are `waiting`; a request in flight is not stopped.
    Cancel(decide::CancelArgs),
    /// Erase the personal data of one account's finished payments. Ids and hashes stay.
    Erase(erase::Args),
}

/// One payment, or many from a file.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub struct IdArgs {
    #[arg(value_parser = parse_id, allow_hyphen_values = true)]
    id: Option<JobId>,
    /// One id per line; `-` is stdin. Invalid lines are reported by number, the others are processed.
    #[arg(long, value_name = "IDS")]
    file: Option<PathBuf>,
}

/// A state of the ledger, as an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateArg(pub &'static str);

impl ValueEnum for StateArg {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [StateArg; STATES.len()] = {
            let mut all = [StateArg(""); STATES.len()];
            let mut index = 0;
            while index < STATES.len() {
                all[index] = StateArg(STATES[index]);
                index += 1;
            }
            all
        };
        &ALL
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        Some(clap::builder::PossibleValue::new(self.0))
    }
}

/// Runs the command.
///
/// # Errors
/// When a backend fails, or the one payment does not exist. An id that is refused is reported and gives exit code 1.
pub async fn run(
    args: &Args,
    config: &Config,
    services: &Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    match &args.action {
        Action::Show { id, json } => show::show(id, None, *json, config, services, console).await,
        Action::Explain(args) => explain::run(args, config, services, console).await,
        Action::List(args) => show::list(args, config, services, console).await,
        Action::Resolve(args) => decide::resolve(args, config, services, console).await,
        Action::Cancel(args) => decide::cancel(args, config, services, console).await,
        Action::Erase(args) => erase::run(args, config, services, console).await,
    }
}

pub(super) fn parse_id(text: &str) -> Result<JobId, InvalidName> {
    JobId::new(text)
}

/// The user of this command, for the audit.
pub(super) fn actor(because: Option<&str>) -> Actor {
    Actor {
        os_user: super::os::user_at_host(),
        program: None,
        reason: because.filter(|because| !because.trim().is_empty()).map(str::to_owned),
    }
}
