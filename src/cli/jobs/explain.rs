//! The `jobs explain` command: why a payment is in its state, and when it is estimated to start.
//!
//! Without a running process it explains from the ledger and from a shared Redis, and says so on stderr.

use super::super::connect::Services;
use super::super::console::{width, wrap_words};
use super::super::{CommandError, Console, Exit, ops_client};
use crate::config::{Config, LimiterUrl};
use crate::domain::job::JobId;
use crate::ops::explain::{ExplainResponse, FactSources, explain_job};
use crate::worker::settings_sync::LoadedSettings;

/// Explains one payment. An id that the ledger does not know gives exit code 1.
///
/// # Errors
/// When neither a running process nor the database answers.
pub async fn run(
    id: &JobId,
    json: bool,
    config: &Config,
    services: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
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
    if json {
        console.json(&answer)?;
    } else {
        print(&answer, console)?;
    }
    Ok(if answer.state == "unrecorded" { Exit::Failed } else { Exit::Success })
}

async fn explain_without_process(
    id: &JobId,
    config: &Config,
    services: &dyn Services,
) -> Result<ExplainResponse, CommandError> {
    let settings = services.settings(config).await?;
    let known = LoadedSettings::default().with_snapshot(settings.load().await?);
    let operator = services.operator(config).await?;
    let queue = services.queue(config).await?;
    // An embedded limiter exists only in its process.
    let limiter = match config.limiter.url {
        LimiterUrl::Embedded => None,
        LimiterUrl::Redis(_) | LimiterUrl::RedisCluster(_) => Some(services.limiter(config).await?),
    };
    let sources = FactSources {
        operator: operator.as_ref(),
        settings: &known,
        queue: Some(queue.as_ref()),
        limiter_facts: limiter.as_deref(),
        process: None,
        collector: None,
    };
    Ok(explain_job(&sources, id).await?)
}

fn print(answer: &ExplainResponse, console: &mut Console) -> Result<(), CommandError> {
    let here = answer.blocked_at.as_ref().map(|position| position.check.as_str());
    let provider = answer.provider.as_deref().map(|provider| format!(" of {provider}")).unwrap_or_default();
    let sentence = format!("{}{provider} is `{}`: {}", answer.id, answer.state, answer.summary);
    console.lines(&wrap_words("", &sentence, width(console.shape())))?;
    if answer.checks.is_empty() {
        return Ok(());
    }
    let rows: Vec<Vec<String>> = answer
        .checks
        .iter()
        .map(|check| {
            let passed = match (check.passed, here == Some(check.name.as_str())) {
                (true, _) => "passed",
                (false, true) => "here",
                (false, false) => "",
            };
            // The summary names the cause.
            let reason = if here == Some(check.name.as_str()) { "see above" } else { check.text.as_str() };
            vec![check.name.clone(), passed.to_owned(), reason.to_owned()]
        })
        .collect();
    console.line("")?;
    Ok(console.table(&["check", "", "why"], &rows)?)
}
