//! The `provider flows` command: the accounts of a provider whose payments wait in the ledger, and what blocks them.
//!
//! It shows what `/api/v1/providers/{name}/flows` does, and needs no running process. Payments that a worker has taken,
//! and those in the queue, are not among them.

use crate::cli::{CommandError, Console, Exit};
use crate::domain::format::{count, instant};
use crate::domain::provider::ProviderName;
use crate::domain::time::EpochMs;
use crate::ledger::backlog::{BlockedReason, FlowReport, LaneFlows};
use crate::ledger::database::Database;
use crate::ledger::operator::DatabaseTime;
use crate::ops::flows::{FLOWS_DEFAULT, FlowsResponse};

const HEADER: [&str; 7] = ["account", "priority", "waiting", "weight", "share", "blocked until", "reason"];

#[derive(Debug, clap::Args)]
pub struct FlowsArgs {
    pub name: String,
    /// Most flows that are listed.
    #[arg(long, value_name = "N", default_value_t = FLOWS_DEFAULT, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    limit: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Lists the flows of a provider that have waiting payments.
pub(super) async fn list(
    ledger: &Database,
    name: &ProviderName,
    FlowsArgs { limit, json, .. }: &FlowsArgs,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let lane = ledger.largest_flows(name, *limit).await?;
    if *json {
        console.json(&FlowsResponse::from(&lane))?;
    } else if lane.largest.is_empty() {
        console.message(&format!("no payment of {name} waits in the ledger's backlog"))?;
    } else {
        console.table(&HEADER, &lane.largest.iter().map(cells).collect::<Vec<_>>())?;
        if let Some(rest) = left_out(&lane) {
            console.message(&rest)?;
        }
    }
    Ok(Exit::Success)
}

fn cells(flow: &FlowReport) -> Vec<String> {
    let status = &flow.status;
    let block = status.block().zip(flow.blocked_until);
    let until = block.map(|(block, DatabaseTime(until))| {
        if block.reason == BlockedReason::AccountBlocked {
            return "the rule ends".to_owned();
        }
        let left_ms = i64::try_from(block.left.as_millis()).unwrap_or(i64::MAX);
        instant(EpochMs(until), EpochMs(until.saturating_sub(left_ms)))
    });
    vec![
        status.account.as_ref().map_or_else(|| "no account".to_owned(), |account| account.to_string()),
        status.class.priority().map_or_else(|| "outcome unknown".to_owned(), |priority| priority.to_string()),
        status.waiting.to_string(),
        flow.weight.to_string(),
        flow.share().map(percent).unwrap_or_default(),
        until.unwrap_or_default(),
        block.map(|(block, _)| block.wait().to_string()).unwrap_or_default(),
    ]
}

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// What the list leaves out, if anything.
fn left_out(lane: &LaneFlows) -> Option<String> {
    let listed = lane.largest.len() as u64;
    let waiting: u64 = lane.largest.iter().map(|flow| flow.status.waiting).sum();
    let others = lane.flows.saturating_sub(listed);
    (others > 0).then(|| {
        format!(
            "{} with {} not listed: `--limit N` lists more",
            count(others, "more flow"),
            count(lane.waiting.saturating_sub(waiting), "waiting payment")
        )
    })
}
