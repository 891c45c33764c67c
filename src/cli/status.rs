//! `status`: per provider what its rows say, and how many payments are in which state of the ledger.
//!
//! Refuses to guess at what only a running worker knows (used, rate, in flight): it counts rows.

use std::collections::BTreeMap;

use serde::Serialize;

use super::connect::Engines;
use super::rows::provider_cells;
use super::{CommandError, Console, Exit};
use crate::config::Config;
use crate::ledger::StateCount;
use crate::ledger::operator::STATES;
use crate::ledger::provider_row::ProviderRow;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Line {
    provider: String,
    /// `enabled`, `paused`, `disabled`, or `no row` for payments of a provider that is gone.
    state: String,
    limits: String,
    /// Every state, with its number of payments.
    jobs: BTreeMap<&'static str, i64>,
}

/// Runs the command.
///
/// # Errors
/// When the database fails.
pub async fn run(
    args: &Args,
    config: &Config,
    engines: &dyn Engines,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let rows = engines.settings(config).await?.rows(None).await?;
    let counts = engines.operator(config).await?.counts().await?;
    let lines = lines(&rows, &counts);
    if args.json {
        console.json(&serde_json::json!({ "providers": lines }))?;
    } else if lines.is_empty() {
        console.message("no providers yet: `sluicegate provider apply FILE` adds some")?;
    } else {
        let header = ["provider", "state", "limits"].into_iter().chain(STATES).collect::<Vec<_>>();
        console.table(&header, &lines.iter().map(cells).collect::<Vec<_>>())?;
    }
    Ok(Exit::Fine)
}

fn lines(rows: &[ProviderRow], counts: &[StateCount]) -> Vec<Line> {
    let none = || STATES.into_iter().map(|state| (state, 0)).collect::<BTreeMap<_, _>>();
    let mut lines: BTreeMap<String, Line> = BTreeMap::new();
    for row in rows {
        let [name, state, _, limits, _] = <[String; 5]>::try_from(provider_cells(row)).unwrap_or_default();
        lines.insert(name.clone(), Line { provider: name, state, limits, jobs: none() });
    }
    for count in counts {
        let line = lines.entry(count.provider.clone()).or_insert_with(|| Line {
            provider: count.provider.clone(),
            state: "no row".to_owned(),
            limits: String::new(),
            jobs: none(),
        });
        if let Some((_, jobs)) = line.jobs.iter_mut().find(|(state, _)| **state == count.state) {
            *jobs += count.jobs;
        }
    }
    lines.into_values().collect()
}

fn cells(line: &Line) -> Vec<String> {
    let jobs = STATES.iter().map(|state| line.jobs.get(state).copied().unwrap_or_default().to_string());
    [line.provider.clone(), line.state.clone(), line.limits.clone()].into_iter().chain(jobs).collect()
}
