//! `jobs`: one payment's whole story, lists of payments, and what a person decides about them.
//!
//! Refuses to show payloads and request bodies, and refuses to decide twice: every change is compared with the state
//! that the ledger has at that moment, and audited.

use std::path::PathBuf;

use clap::{Subcommand, ValueEnum};

use super::connect::Services;
use super::{CommandError, Console, Exit};
use crate::config::Config;
use crate::domain::job::JobId;
use crate::ledger::operator::{Actor, STATES};

pub(super) mod bulk;
mod cancel;
mod erase;
mod explain;
pub(super) mod ids;
pub(super) mod list;
pub(super) mod resend;
mod resolve;
pub(super) mod show;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// One payment: its state, its requests, its events, and who changed it by hand.
    Show {
        #[arg(value_parser = parse_id, allow_hyphen_values = true)]
        id: JobId,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Why a payment is where it is: the gates it has passed, the one it stands at, and when its turn comes.
    Explain {
        #[arg(value_parser = parse_id, allow_hyphen_values = true)]
        id: JobId,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Payments, page by page in the order of their ids (with `--provider` alone: of their idempotency keys).
    List(list::Args),
    /// Settle a payment in `review`, or have it sent again.
    Resolve(resolve::Args),
    /// Stop payments that are `waiting`; one that is on the wire is not stopped.
    Cancel(cancel::Args),
    /// Erase what says whose payments were, of one account, once they have ended. Ids and hashes stay.
    Erase(erase::Args),
}

/// One payment, or many from a file.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub struct IdArgs {
    #[arg(value_parser = parse_id, allow_hyphen_values = true)]
    id: Option<JobId>,
    /// One id per line; `-` is stdin. Bad lines are reported by number, the others are done.
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
            let mut at = 0;
            while at < STATES.len() {
                all[at] = StateArg(STATES[at]);
                at += 1;
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
/// When an engine fails, or the one payment does not exist. What cannot be done with an id is reported, and exits with 1.
pub async fn run(
    args: &Args,
    config: &Config,
    engines: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    match &args.action {
        Action::Show { id, json } => show::run(id, None, *json, config, engines, console).await,
        Action::Explain { id, json } => explain::run(id, *json, config, engines, console).await,
        Action::List(args) => list::run(args, config, engines, console).await,
        Action::Resolve(args) => resolve::run(args, config, engines, console).await,
        Action::Cancel(args) => cancel::run(args, config, engines, console).await,
        Action::Erase(args) => erase::run(args, config, engines, console).await,
    }
}

pub(super) fn parse_id(text: &str) -> Result<JobId, String> {
    JobId::new(text)
}

/// The person at this terminal.
pub(super) fn actor(because: Option<&str>) -> Actor {
    Actor {
        os_user: super::os_user::user_at_host(),
        program: None,
        reason: because.filter(|because| !because.trim().is_empty()).map(str::to_owned),
    }
}
