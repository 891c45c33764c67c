//! The command `limits set`: a limit's new rate, for good or until an instant, and its rehearsal.
//!
//! A rate without an end ends a return that was planned. The answer says so, and so does the audit.

use serde_json::json;

use crate::cli::jobs::actor;
use crate::cli::provider::{parse_name, report_if_unusable};
use crate::cli::status::overview_input;
use crate::cli::status::text::clear_time_text;
use crate::cli::{CommandContext, CommandError, Exit};
use crate::config::LimiterUrl;
use crate::domain::limit::Rate;
use crate::domain::provider::ProviderName;
use crate::ledger::database::Database;
use crate::ledger::decision_input;
use crate::ledger::provider_row::LimitReturn;
use crate::limiter::LimitStatus;
use crate::ops::limit_change::{FinishChange, RateChange, WantedLimit, set_limit};
use crate::ops::until::Until;
use crate::worker::quotas::quota_specs;
use crate::worker::settings_sync::LoadedSettings;

#[derive(Debug, clap::Args)]
pub struct SetArgs {
    provider: String,
    limit: String,
    /// N/DURATION, like 200/1s, 50/s or 600/1m; 0/1s closes the limit. 'N at once' for requests in flight.
    #[arg(value_parser = Rate::parse_limit, required_unless_present = "until")]
    rate: Option<Rate>,
    /// Until when; then the limit goes back to what it was. A time of day such as 06:00 or '06:00 Europe/Berlin', an
    /// RFC 3339 instant, or none: it stays.
    #[arg(long, value_name = "TIME")]
    until: Option<Until>,
    /// Why, for the audit.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
    /// Show the old and the new rate and the clear time with each, and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When the database fails, the provider or limit does not exist, or the change is invalid.
pub async fn run(args: &SetArgs, ledger: &Database, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let SetArgs { provider, limit, rate, until, because, dry_run, json } = args;
    if rate.is_none() && until.as_ref().is_some_and(|until| *until != Until::NoEnd) {
        return Err(CommandError::Usage("RATE is missing: only `--until none` keeps the present rate".to_owned()));
    }
    let name = parse_name(provider)?;
    let wanted = WantedLimit { provider: &name, limit, rate: *rate, until: until.clone().unwrap_or(Until::NoEnd) };
    let by = Some(actor(because.as_deref())).filter(|_| !dry_run);
    let change = set_limit(ledger, &wanted, *dry_run, by.as_ref()).await?;
    let mut shown = json!({
        "provider": provider, "limit": limit, "from": change.rate_before.to_string(),
        "to": change.rate_after.to_string(),
        "until": change.returns_after.map(|returns| returns.until),
        "then": change.returns_after.map(|returns| returns.describe_rate()),
        "ended_return": change.ended_return().map(|returns| json!({
            "until": returns.until, "then": returns.describe_rate(),
        })),
    });
    let finish = if *dry_run { Some(rehearse(&change, ledger, cx).await?) } else { None };
    if *json {
        if let Some(finish) = finish {
            shown["dry_run"] = json!(true);
            shown["clears"] = json!(finish.clears);
            shown["clears_at"] = json!(finish.clears_at);
            shown["cutoff"] = json!(finish.cutoff);
        }
        cx.console.json(&shown)?;
        return report_if_unusable(ledger, &name, cx.console).await;
    }
    let returns = change.returns_after.map(|returns| format!(" {returns}")).unwrap_or_default();
    cx.console.line(&format!("{provider} {limit}: {} → {}{returns}", change.rate_before, change.rate_after))?;
    if let Some(finish) = finish {
        let (before, after) = (clear_time_text(&finish.clears.from), clear_time_text(&finish.clears.to));
        cx.console.line(&format!("clears in: {before} → {after}"))?;
    }
    if let Some(ended) = change.ended_return() {
        cx.console.message(&ended_words(&ended))?;
    }
    if *dry_run {
        cx.console.message("dry run: nothing was changed")?;
    }
    // An invalid row of its quota may keep the rate from being in force.
    report_if_unusable(ledger, &name, cx.console).await
}

fn ended_words(ended: &LimitReturn) -> String {
    format!("the limit no longer goes back to {} at {}", ended.describe_rate(), ended.until)
}

/// What the new rate would change.
async fn rehearse(
    change: &RateChange,
    ledger: &Database,
    cx: &mut CommandContext<'_>,
) -> Result<FinishChange, CommandError> {
    let mut input = overview_input(cx).await?;
    let quota = change.row_before.quota.as_deref().unwrap_or(&change.row_before.name);
    match limit_usage(quota, ledger, cx).await {
        Ok(usage) => input.limit_usage.extend(usage),
        Err(why) => cx.console.message(&format!("warning: the estimate takes the limits as unused: {why}"))?,
    }
    Ok(FinishChange::new(&input, change))
}

/// The usage of a quota's limits. The embedded limiter exists only in the running process.
async fn limit_usage(
    quota: &str,
    ledger: &Database,
    cx: &CommandContext<'_>,
) -> Result<Option<(ProviderName, Vec<LimitStatus>)>, CommandError> {
    if matches!(cx.config.limiter.url, LimiterUrl::Embedded) {
        return Err(CommandError::Failed("their usage is in the running process, which the page asks".to_owned()));
    }
    let known = LoadedSettings::default().with_snapshot(ledger.load_settings().await?);
    let spec = quota_specs(&known).into_iter().filter_map(|quota| quota.spec).find(|spec| spec.quota.as_str() == quota);
    let Some(spec) = spec else { return Ok(None) };
    let usage = cx.limiter().await?.peek(&spec, None).await.map_err(|error| CommandError::Failed(error.to_string()))?;
    Ok(Some((spec.quota, usage)))
}
