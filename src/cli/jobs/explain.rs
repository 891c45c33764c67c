//! The `jobs explain` command: why a payment is in its state, and when it is estimated to start.
//!
//! Without a running process it explains from the ledger and from a shared Redis, and says so on stderr.

use super::super::console::{width, wrap_words};
use super::super::{CommandError, Console, Exit, ops_client};
use crate::app::Services;
use crate::config::{Config, LimiterUrl};
use crate::domain::format::count;
use crate::domain::job::JobId;
use crate::ops::explain::{ExplainResponse, ExplainedCheck, FactSources, explain_job};
use crate::worker::settings_sync::LoadedSettings;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[arg(value_parser = super::parse_id, allow_hyphen_values = true)]
    id: JobId,
    /// List each check, also those that passed as usual or are not reached.
    #[arg(long)]
    all: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Explains one payment. An id that the ledger does not know gives exit code 1.
///
/// # Errors
/// When neither a running process nor the database answers.
pub async fn run(
    args: &Args,
    config: &Config,
    services: &Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let id = &args.id;
    let path = format!("/api/v1/jobs/{id}/explain");
    let answer = match ops_client::get_if_running::<ExplainResponse>(config, services, &path).await? {
        Some(answered) => {
            answered.unverified.iter().try_for_each(|why| console.message(why))?;
            answered.value
        }
        None => {
            console.message(
                "no running process on `ops.listen`: explained from the ledger alone, without lanes and wait queues",
            )?;
            explain_without_process(id, config, services).await?
        }
    };
    if args.json {
        console.json(&answer)?;
    } else {
        print(&answer, args.all, console)?;
    }
    Ok(if answer.state == "unrecorded" { Exit::Failed } else { Exit::Success })
}

async fn explain_without_process(
    id: &JobId,
    config: &Config,
    services: &Services,
) -> Result<ExplainResponse, CommandError> {
    let ledger = services.ledger(config).await?;
    let known = LoadedSettings::default().with_snapshot(ledger.load_settings().await?);
    let queue = services.queue(config).await?;
    // An embedded limiter exists only in its process.
    let limiter = match config.limiter.url {
        LimiterUrl::Embedded => None,
        LimiterUrl::Redis(_) | LimiterUrl::RedisCluster(_) => Some(services.limiter(config).await?),
    };
    let sources = FactSources {
        ledger: &ledger,
        settings: &known,
        queue: Some(queue.as_ref()),
        limiter_facts: limiter.as_deref(),
        process: None,
        collector: None,
    };
    Ok(explain_job(&sources, id).await?)
}

fn print(answer: &ExplainResponse, all: bool, console: &mut Console) -> Result<(), CommandError> {
    let provider = answer.provider.as_deref().map(|provider| format!(" of {provider}")).unwrap_or_default();
    let sentence = format!("{}{provider} is `{}`: {}", answer.id, answer.state, answer.summary);
    console.lines(&wrap_words("", &sentence, width(console.shape())))?;
    if answer.checks.is_empty() {
        return Ok(());
    }
    console.line("")?;
    Ok(console.table(&["check", "", "why"], &check_rows(answer, all))?)
}

/// How a check is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CheckRow {
    Passed,
    Routine,
    Here,
    NotReached,
}

impl CheckRow {
    fn status(self) -> &'static str {
        match self {
            Self::Passed | Self::Routine => "passed",
            Self::Here => "here",
            Self::NotReached => "",
        }
    }
}

/// One row per check. Unless all are wanted, neighbours that passed as usual or are not reached share a row.
fn check_rows(answer: &ExplainResponse, all: bool) -> Vec<Vec<String>> {
    let here = answer.blocked_at.as_ref().map(|block| block.check.as_str());
    let kind = |check: &ExplainedCheck| match (check.passed, check.is_routine) {
        (true, true) => CheckRow::Routine,
        (true, false) => CheckRow::Passed,
        (false, _) if here == Some(check.name.as_str()) => CheckRow::Here,
        (false, _) => CheckRow::NotReached,
    };
    let shares = |kind| !all && matches!(kind, CheckRow::Routine | CheckRow::NotReached);
    let runs = answer.checks.chunk_by(|check, next| shares(kind(check)) && kind(check) == kind(next));
    let row = |run: &[ExplainedCheck]| {
        let [first, others @ ..] = run else { return Vec::new() };
        let name = match others.len() as u64 {
            0 => first.name.clone(),
            others => count(others + 1, "check"),
        };
        let why = match kind(first) {
            // The summary names the cause.
            CheckRow::Here => "see above",
            CheckRow::Routine if !others.is_empty() => "",
            _ => first.text.as_str(),
        };
        vec![name, kind(first).status().to_owned(), why.to_owned()]
    };
    runs.map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::explain::ExplainedBlock;

    #[test]
    fn neighbouring_routine_checks_share_a_row() {
        let check = |name: &str, passed, is_routine, text: &str| ExplainedCheck {
            name: name.to_owned(),
            passed,
            is_routine,
            at: None,
            text: text.to_owned(),
        };
        let checks = vec![
            check("recorded", true, false, "in the ledger"),
            check("provider", true, true, "enabled"),
            check("time", true, false, "due"),
            check("lane", true, true, "takes jobs"),
            check("limiter", true, true, "grants permits"),
            check("limit", false, false, "waits for limit all"),
            check("queue", false, false, "not reached"),
            check("sent", false, false, "not reached"),
        ];
        let block = ExplainedBlock { check: "limit".to_owned(), ..ExplainedBlock::default() };
        let answer = ExplainResponse { checks, blocked_at: Some(block), ..ExplainResponse::default() };
        let shown = [
            ["recorded", "passed", "in the ledger"],
            ["provider", "passed", "enabled"],
            ["time", "passed", "due"],
            ["2 checks", "passed", ""],
            ["limit", "here", "see above"],
            ["2 checks", "", "not reached"],
        ];
        assert_eq!(check_rows(&answer, false), shown);
        assert_eq!(check_rows(&answer, true).len(), 8);
    }
}
