//! An operator's decisions: `jobs resolve`, `jobs cancel`, and the `dlq` command, about one payment or about many.
//!
//! `resolve` accepts no other state than `review`: only there is an operator's decision needed. `cancel` refuses a
//! payment that is in flight or may have been charged, and cancels one that a worker only holds. `dlq` is about `dead`
//! jobs: their retries are exhausted, and they are confirmed not charged. The sweeper handles messages that the broker
//! itself dead-lettered.
//!
//! A decision about one payment is applied at once, and so are a list that is cancelled and a replay of all dead payments:
//! scripts rely on it. With `--dry-run` and `--confirm` these are sets like any other: shown, confirmed by their digest, and
//! applied by workers. See `docs/decisions/0049-decisions-in-bulk.md`.

use clap::Subcommand;
use futures_util::stream::{self, StreamExt as _};
use tokio::time::{MissedTickBehavior, interval};

use crate::cli::jobs::bulk_decision::{BulkArgs, BulkDecision, BulkSelection, UNKNOWN_JOB, decide_in_bulk};
use crate::cli::jobs::ids::read_ids;
use crate::cli::jobs::report::DecisionReport;
use crate::cli::jobs::show::check_provider_exists;
use crate::cli::jobs::{IdArgs, actor, parse_id, show};
use crate::cli::provider::parse_name;
use crate::cli::{CommandContext, CommandError, Console, Exit};
use crate::domain::format::count;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::decision_batches::BatchDecision;
use crate::ledger::decision_input;
use crate::ledger::job_filter_input::RawJobFilter;
use crate::ledger::operator::{Actor, Charge, JobResolution, ResolutionRefusal};
use crate::ops::batch::{JobList, Selection, distinct};
use crate::ops::change::{JobDecision, ResolutionKind};
use crate::worker::resend::{ResendError, Resender, provider_names};

/// Concurrent cancellations: enough to hide the time of a commit, few enough to leave connections to the workers.
const IN_FLIGHT_MAX: usize = 8;

/// A backend failed: the next id would fail, too.
const STOPPED: &str = "stopped: the remaining ids are unchanged; fix the cause and run the same command again";

#[derive(Debug, clap::Args)]
pub struct ResolveArgs {
    #[command(flatten)]
    ids: IdArgs,
    /// What the provider's records say about the payment.
    #[arg(long = "as", value_name = "FINDING")]
    kind: ResolutionKind,
    /// With `--as succeeded`: the provider's reference for the charge.
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["file", "filter"], allow_hyphen_values = true)]
    reference: Option<String>,
    /// With `--as succeeded`: the amount that the provider charged, in minor units. Default: the payment's amount.
    #[arg(long, value_name = "MINOR_UNITS", conflicts_with_all = ["file", "filter"], allow_hyphen_values = true)]
    amount: Option<i64>,
    /// Why, for the audit; also in the job's reason and its outcome event.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
    #[command(flatten)]
    bulk: BulkArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When a backend fails, or nothing was confirmed.
pub async fn resolve(args: &ResolveArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let resolution = args
        .kind
        .resolution(Charge { reference: args.reference.clone(), amount: args.amount }, cx.config.worker.card_numbers)
        .map_err(|wrong| CommandError::Usage(format!("--{}: {}", wrong.field, wrong.problem)))?;
    let Some(id) = &args.ids.id else {
        let decision = match args.kind {
            ResolutionKind::Succeeded => BatchDecision::Succeeded,
            ResolutionKind::Declined => BatchDecision::Declined,
            ResolutionKind::Resend => BatchDecision::Resend,
        };
        let bulk = BulkDecision { decision, args: &args.bulk, because: args.because.as_deref(), json: args.json };
        let selection = selection(&args.ids, None, cx).await?;
        return decide_in_bulk(bulk, selection, cx).await;
    };
    if args.kind == ResolutionKind::Resend && !args.bulk.dry_run {
        confirm_resend(id, args.bulk.confirm.as_deref(), cx.console)?;
    }
    let actor = actor(args.because.as_deref());
    decide(DecisionRequest { ids: vec![id.clone()], resolution, actor, args: &args.bulk, json: args.json }, cx).await
}

/// The payments of a command: those of its filter, or the ids of its list or argument.
async fn selection(
    ids: &IdArgs,
    provider: Option<ProviderName>,
    cx: &CommandContext<'_>,
) -> Result<BulkSelection, CommandError> {
    if let Some(query) = &ids.filter {
        return BulkSelection::from_query(query);
    }
    Ok(BulkSelection::List(JobList { ids: given_ids(ids, cx).await?, provider }))
}

/// The ids of a list, each once, or the one of the argument.
async fn given_ids(ids: &IdArgs, cx: &CommandContext<'_>) -> Result<Vec<JobId>, CommandError> {
    Ok(match &ids.file {
        Some(path) => distinct(read_ids(path, cx.ledger().await?.selection_max()).await?),
        None => ids.id.iter().cloned().collect(),
    })
}

/// Requires the id a second time: a payment that is sent again may be charged again.
fn confirm_resend(id: &JobId, given: Option<&str>, console: &mut Console) -> Result<(), CommandError> {
    let typed = match given {
        Some(given) => Some(given.to_owned()),
        None => console.ask("The payment is charged again. Type its id to confirm:")?,
    };
    match typed {
        None => Err(CommandError::Usage(format!("--confirm: is missing: to send {id} again, add `--confirm {id}`"))),
        Some(typed) if typed != id.as_str() => {
            Err(CommandError::Failed(format!("this is not the id of the payment, {id}: nothing was changed")))
        }
        Some(_) => Ok(()),
    }
}

#[derive(Debug, clap::Args)]
pub struct CancelArgs {
    #[command(flatten)]
    ids: IdArgs,
    /// Their provider. With it, an id that the ledger does not know is cancelled too: if its message arrives later, it
    /// is acknowledged and nothing is sent.
    #[arg(long, value_name = "NAME", conflicts_with = "filter")]
    provider: Option<String>,
    /// Why, for the audit; also in the job's reason and its outcome event.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
    #[command(flatten)]
    bulk: BulkArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs `jobs cancel`. A payment that the ledger does not know is cancelled before its message arrives, if the provider
/// is named.
///
/// # Errors
/// When the database fails, the list cannot be read, or nothing was confirmed.
pub async fn cancel(args: &CancelArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let provider = args.provider.as_deref().map(parse_name).transpose()?;
    check_provider_exists(provider.as_ref(), cx).await?;
    if args.bulk.is_two_steps() || args.ids.filter.is_some() {
        let because = args.because.as_deref();
        let bulk = BulkDecision { decision: BatchDecision::Cancel, args: &args.bulk, because, json: args.json };
        let selection = selection(&args.ids, provider, cx).await?;
        return decide_in_bulk(bulk, selection, cx).await;
    }
    let by = actor(args.because.as_deref());
    let ids = given_ids(&args.ids, cx).await?;
    let ledger = cx.ledger().await?;
    let cancel = async |id: JobId| -> (JobId, Result<(), ResendError>) {
        let cancelled = match &provider {
            Some(provider) => ledger.precancel(&id, provider, &by).await,
            None => ledger.resolve_job(&id, &JobResolution::Cancel, None, &by).await,
        };
        (id, cancelled.map_err(ResendError::from))
    };
    let mut report = DecisionReport::new(&JobResolution::Cancel, args.json);
    let mut results = stream::iter(ids).map(cancel).buffered(IN_FLIGHT_MAX);
    let mut has_unknown = false;
    while let Some((id, result)) = results.next().await {
        has_unknown |= matches!(result, Err(ResendError::Refused(ResolutionRefusal::NoSuchJob)));
        if report.record(&id, result, cx.console)? {
            cx.console.message(STOPPED)?;
            break;
        }
    }
    if has_unknown {
        cx.console.message(UNKNOWN_JOB)?;
    }
    report.print(cx.console)
}

/// A decision that the command applies itself.
struct DecisionRequest<'a> {
    ids: Vec<JobId>,
    resolution: JobResolution,
    actor: Actor,
    args: &'a BulkArgs,
    json: bool,
}

/// Applies a decision to one payment after the other, at most at the given rate.
///
/// # Errors
/// When the database is unreachable before anything was changed, or the output is closed.
async fn decide(request: DecisionRequest<'_>, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let DecisionRequest { ids, resolution, actor, args, json } = request;
    let (ledger, dry_run) = (&cx.ledger().await?, args.dry_run);
    let mut report = DecisionReport::new(&resolution, json);
    let providers;
    let decision = if resolution.needs_resend() {
        providers = provider_names(ledger).await?;
        JobDecision::Resend(Resender { ledger, providers: &providers, resolution, actor })
    } else {
        JobDecision::Record { ledger, resolution, actor }
    };
    let mut pace = interval(args.rate.interval());
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for id in &ids {
        pace.tick().await;
        if dry_run {
            report.record_preview(id, decision.preview(id).await, cx.console)?;
        } else if report.record(id, decision.apply(id).await, cx.console)? && ids.len() > 1 {
            cx.console.message(STOPPED)?;
            break;
        }
    }
    report.print(cx.console)
}

const DEAD: &str = "dead";

#[derive(Debug, clap::Args)]
pub struct DlqArgs {
    #[command(subcommand)]
    action: DlqAction,
}

#[derive(Debug, Subcommand)]
enum DlqAction {
    /// List dead payments, page by page, newest first.
    List(Box<show::PageArgs>),
    /// Show one dead payment: its requests, its events, and manual changes.
    Show(show::ShowArgs),
    /// Try dead payments again, one or many: same key, same request, attempts reset, within the limits.
    Replay(ReplayArgs),
    /// End dead payments for good: they become `cancelled`.
    Discard(DiscardArgs),
}

#[derive(Debug, clap::Args)]
struct DiscardArgs {
    #[arg(value_parser = parse_id, required_unless_present = "filter", allow_hyphen_values = true)]
    id: Option<JobId>,
    /// Required for one payment: a discarded payment cannot be restored.
    #[arg(long, required_unless_present = "filter")]
    yes: bool,
    /// All dead payments that match, written like the address of the page's list: `provider=acme`.
    #[arg(long, value_name = "QUERY", conflicts_with = "id", allow_hyphen_values = true)]
    filter: Option<String>,
    /// Why, for the audit; also in the job's reason and its outcome event.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
    #[command(flatten)]
    bulk: BulkArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When a backend fails, or the one payment does not exist. An id that is refused is reported and gives exit code 1.
pub async fn dlq(args: &DlqArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    match &args.action {
        DlqAction::List(page) => show::print_page(&[DEAD], page, cx).await,
        DlqAction::Show(args) => show::show(args, Some(DEAD), cx).await,
        DlqAction::Replay(args) => replay(args, cx).await,
        DlqAction::Discard(args) => discard(args, cx).await,
    }
}

/// Runs `dlq discard`.
async fn discard(args: &DiscardArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let because = args.because.as_deref();
    if let Some(id) = &args.id {
        let (ids, resolution, actor) = (vec![id.clone()], JobResolution::Discard, actor(because));
        return decide(DecisionRequest { ids, resolution, actor, args: &args.bulk, json: args.json }, cx).await;
    }
    let bulk = BulkDecision { decision: BatchDecision::Discard, args: &args.bulk, because, json: args.json };
    decide_in_bulk(bulk, BulkSelection::from_query(args.filter.as_deref().unwrap_or_default())?, cx).await
}

#[derive(Debug, clap::Args)]
struct ReplayArgs {
    /// One payment. Without it: all dead payments.
    #[arg(value_parser = parse_id, allow_hyphen_values = true)]
    id: Option<JobId>,
    /// The dead payments of this provider; with an id, the payment must be this provider's.
    #[arg(long)]
    provider: Option<String>,
    /// Why, for the audit; also in the job's reason.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
    /// Replay all payments of all providers without a question; without a terminal there is none.
    #[arg(long)]
    yes: bool,
    /// All dead payments that match, written like the address of the page's list: `provider=acme&account=a1`.
    #[arg(long, value_name = "QUERY", conflicts_with_all = ["id", "provider", "yes"], allow_hyphen_values = true)]
    filter: Option<String>,
    #[command(flatten)]
    bulk: BulkArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs `dlq replay`.
async fn replay(args: &ReplayArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let provider = args.provider.as_deref().map(parse_name).transpose()?;
    let Some(id) = &args.id else { return replay_many(args, provider, cx).await };
    let actual = cx.ledger().await?.job_details(id).await?.map(|details| details.line.provider);
    if let (Some(actual), Some(wanted)) = (actual, &provider)
        && actual != wanted.as_str()
    {
        return Err(CommandError::Failed(format!(
            "{id} is a payment of {actual}, not of {wanted}: nothing was replayed"
        )));
    }
    apply_replay(args, vec![id.clone()], cx).await
}

async fn apply_replay(args: &ReplayArgs, ids: Vec<JobId>, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let (resolution, actor) = (JobResolution::Replay, actor(args.because.as_deref()));
    decide(DecisionRequest { ids, resolution, actor, args: &args.bulk, json: args.json }, cx).await
}

/// Replays the dead payments that match a filter, or all of a provider, or all.
async fn replay_many(
    args: &ReplayArgs,
    provider: Option<ProviderName>,
    cx: &mut CommandContext<'_>,
) -> Result<Exit, CommandError> {
    check_provider_exists(provider.as_ref(), cx).await?;
    let all = RawJobFilter { provider: args.provider.clone(), ..RawJobFilter::default() };
    if args.bulk.is_two_steps() || args.filter.is_some() {
        let selection = match &args.filter {
            Some(query) => BulkSelection::from_query(query)?,
            None => BulkSelection::Filter(Box::new(all)),
        };
        let because = args.because.as_deref();
        let bulk = BulkDecision { decision: BatchDecision::Replay, args: &args.bulk, because, json: args.json };
        return decide_in_bulk(bulk, selection, cx).await;
    }
    let selection = Selection { filter: Some(all), ids: None };
    let ids = selection.ids(&cx.ledger().await?, BatchDecision::Replay).await?;
    if ids.is_empty() {
        cx.console.message("no dead payments: nothing to replay")?;
    } else if provider.is_none() && !args.yes {
        let question = format!("Replay {} of all providers?", count(ids.len() as u64, "dead payment"));
        if !cx.console.confirm(&question)?.unwrap_or(true) {
            cx.console.message("nothing was changed")?;
            return Ok(Exit::Failed);
        }
    }
    apply_replay(args, ids, cx).await
}
