//! The `provider flows` command: the accounts of a provider whose payments wait in the ledger, and what blocks them.
//!
//! It reads the rows of the flows and no payment. Payments that a worker has taken, and those in the queue, are not among
//! them.

use serde::Serialize;

use crate::cli::{CommandError, Console, Exit};
use crate::domain::explain::format::duration;
use crate::domain::provider::ProviderName;
use crate::domain::wait_reason::Wait;
use crate::ledger::backlog::{Backlog, FlowStatus};

const HEADER: [&str; 5] = ["account", "priority", "waiting", "blocked for", "reason"];

#[derive(Debug, clap::Args)]
pub struct FlowsArgs {
    pub name: String,
    /// Most flows that are listed.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    limit: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A flow as JSON.
#[derive(Serialize)]
struct ShownFlow<'a> {
    /// `null`: payments without an account.
    account: Option<&'a str>,
    /// `null`: payments of unknown outcome.
    priority: Option<u8>,
    waiting: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    blocked: Option<ShownBlock<'a>>,
}

#[derive(Serialize)]
struct ShownBlock<'a> {
    reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<&'a str>,
    left_ms: u64,
}

impl<'a> From<&'a FlowStatus> for ShownFlow<'a> {
    fn from(flow: &'a FlowStatus) -> Self {
        let blocked = flow.blocked.as_ref().filter(|blocked| !blocked.left.is_zero());
        Self {
            account: flow.account.as_ref().map(|account| account.as_str()),
            priority: flow.class.priority(),
            waiting: flow.waiting,
            blocked: blocked.map(|blocked| ShownBlock {
                reason: blocked.reason.code(),
                limit: blocked.limit.as_deref(),
                left_ms: u64::try_from(blocked.left.as_millis()).unwrap_or(u64::MAX),
            }),
        }
    }
}

/// Lists the flows of a provider that have waiting payments.
pub(super) async fn list(
    backlog: &dyn Backlog,
    name: &ProviderName,
    FlowsArgs { limit, json, .. }: &FlowsArgs,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let flows = backlog.waiting_flows(name, *limit).await?;
    if *json {
        console.json(&flows.iter().map(ShownFlow::from).collect::<Vec<_>>())?;
    } else if flows.is_empty() {
        console.message(&format!("no payment of {name} waits in the ledger's backlog"))?;
    } else {
        console.table(&HEADER, &flows.iter().map(cells).collect::<Vec<_>>())?;
    }
    Ok(Exit::Success)
}

fn cells(flow: &FlowStatus) -> Vec<String> {
    let blocked = flow.blocked.as_ref().filter(|blocked| !blocked.left.is_zero());
    vec![
        flow.account.as_ref().map_or_else(|| "none".to_owned(), |account| account.to_string()),
        flow.class.priority().map_or_else(|| "unknown outcome".to_owned(), |priority| priority.to_string()),
        flow.waiting.to_string(),
        blocked.map(|blocked| duration(blocked.left)).unwrap_or_default(),
        blocked.map(|blocked| Wait::from(blocked.wait_reason()).to_string()).unwrap_or_default(),
    ]
}
