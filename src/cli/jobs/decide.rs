//! An operator's decisions on many payments: `jobs resolve`, `jobs cancel`, and the `dlq` command.
//!
//! `resolve` accepts no other state than `review`: only there is an operator's decision needed. `cancel` refuses a
//! payment that is in flight or may have been charged, and cancels one that a worker only holds. A resend runs at a
//! steady rate. It does not start while RabbitMQ is unreachable, so that the ledger stays unchanged.
//!
//! `dlq` lists, shows, replays and discards `dead` jobs only: their retries are exhausted, and they are confirmed not
//! charged. The sweeper handles messages that the broker itself dead-lettered. At a terminal, `replay` asks before it
//! replays all payments of all providers, unless `--yes` is given. It goes through the ids once, so it replays no payment
//! twice in one run.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Subcommand;
use tokio::sync::Mutex;
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::cli::approvals::{gate, print_awaited};
use crate::cli::enqueue::declare_lanes;
use crate::cli::jobs::bulk::{BulkReport, IdSource, JobActionResult};
use crate::cli::jobs::bulk_decision::{BulkArgs, BulkDecision, decide_in_bulk, filter_selection, selection};
use crate::cli::jobs::show::check_provider_exists;
use crate::cli::jobs::unseen::{UNKNOWN_JOB, find_in_queue, gate_cancel};
use crate::cli::jobs::{IdArgs, actor, parse_id, show};
use crate::cli::provider::parse_name;
use crate::cli::{CommandContext, CommandError, Console, Exit};
use crate::domain::approval::GatedAction;
use crate::domain::job::JobId;
use crate::domain::provider::ProviderName;
use crate::ledger::approvals::{decision_of, gated_decision};
use crate::ledger::database::Database;
use crate::ledger::decision_batches::{BatchDecision, BatchRate};
use crate::ledger::decision_input;
use crate::ledger::operator::{Actor, JobFilter, JobResolution, ResolutionRefusal};
use crate::ops::approval::AwaitedApproval;
use crate::ops::change::{JobDecision, ResolutionKind};
use crate::worker::resend::{ResendError, Resender, provider_names};

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
pub async fn resolve(args: &ResolveArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let resolution = args
        .kind
        .resolution(args.reference.clone(), cx.config.worker.card_numbers)
        .map_err(|why| CommandError::Usage(format!("--reference: {why}")))?;
    let resends = args.kind == ResolutionKind::Resend;
    let is_gated = cx.config.approvals.rules.concern(gated_decision(decision_of(&resolution)));
    if is_in_bulk(&args.ids, &args.bulk) || ((resends || is_gated) && args.ids.file.is_some()) {
        let decision = match args.kind {
            ResolutionKind::Succeeded => BatchDecision::Succeeded,
            ResolutionKind::Declined => BatchDecision::Declined,
            ResolutionKind::Resend => BatchDecision::Resend,
        };
        let bulk = BulkDecision { decision, args: &args.bulk, because: args.because.as_deref(), json: args.json };
        return decide_in_bulk(bulk, selection(&args.ids).await?, cx).await;
    }
    if let Some(id) = args.ids.id.as_ref().filter(|_| resends && !args.bulk.dry_run) {
        confirm_resend(id, args.bulk.confirm.as_deref(), cx.console)?;
    }
    let actor = actor(args.because.as_deref());
    if let Some(awaited) = gate_one(args.ids.id.as_ref(), &resolution, &actor, &args.bulk, cx).await? {
        return print_awaited(&awaited, args.json, cx.console);
    }
    let source = IdSource::from_args(&args.ids).await?;
    let request = DecisionRequest { resolution, actor, args: Some(&args.bulk), json: args.json };
    decide(request, source, cx).await
}

/// Whether a command is about a set of payments that is first shown, then confirmed. A file alone is decided at once,
/// line by line.
fn is_in_bulk(ids: &IdArgs, args: &BulkArgs) -> bool {
    ids.filter.is_some() || (ids.file.is_some() && (args.dry_run || args.confirm.is_some()))
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
    #[arg(long, value_name = "NAME", conflicts_with_all = ["filter", "dry_run", "confirm"])]
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

/// Runs `jobs cancel`. A payment that the ledger does not know is cancelled before its message arrives. For that the
/// provider must be named, or the embedded queue must contain the message.
///
/// # Errors
/// When the database fails or the file cannot be read.
pub async fn cancel(args: &CancelArgs, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let is_gated = cx.config.approvals.rules.concern(GatedAction::Cancel) && args.ids.file.is_some();
    if is_gated && args.provider.is_some() {
        let problem = "--provider: `cancel` needs two people (approvals.require): give one id, or leave --provider out";
        return Err(CommandError::Usage(problem.to_owned()));
    }
    if is_in_bulk(&args.ids, &args.bulk) || args.bulk.dry_run || args.bulk.confirm.is_some() || is_gated {
        let (args, because) = (args, args.because.as_deref());
        let bulk = BulkDecision { decision: BatchDecision::Cancel, args: &args.bulk, because, json: args.json };
        return decide_in_bulk(bulk, selection(&args.ids).await?, cx).await;
    }
    let by = actor(args.because.as_deref());
    let provider = args.provider.as_deref().map(parse_name).transpose()?;
    check_provider_exists(provider.as_ref(), cx).await?;
    let ledger = cx.ledger().await?;
    if let Some(id) = &args.ids.id
        && let Some(awaited) = gate_cancel(id, provider.as_ref(), &by, cx).await?
    {
        return print_awaited(&awaited, args.json, cx.console);
    }
    let mut source = IdSource::from_args(&args.ids).await?;
    let (config, services) = (cx.config, cx.services);
    let decision = JobDecision::Record { ledger: &ledger, resolution: JobResolution::Cancel, actor: by.clone() };
    let cancel = |id: JobId| {
        let (ledger, by, provider, decision) = (&ledger, &by, &provider, &decision);
        async move {
            let provider = match provider {
                Some(provider) => Some(provider.clone()),
                None => match decision.apply(&id).await {
                    Ok(()) => return JobActionResult::Done,
                    Err(ResendError::Refused(ResolutionRefusal::NoSuchJob)) => {
                        find_in_queue(&id, config, services).await
                    }
                    Err(error) => return error.into(),
                },
            };
            match provider {
                Some(provider) => JobActionResult::from(ledger.precancel(&id, &provider, by).await),
                None => JobActionResult::Refused(UNKNOWN_JOB.to_owned()),
            }
        }
    };
    BulkReport::new(&JobResolution::Cancel, false, args.json).run_on_all(&mut source, cancel, cx.console).await
}

/// The gate before a decision about one payment; a dry run changes nothing.
async fn gate_one(
    id: Option<&JobId>,
    resolution: &JobResolution,
    by: &Actor,
    args: &BulkArgs,
    cx: &CommandContext<'_>,
) -> Result<Option<AwaitedApproval>, CommandError> {
    let Some(id) = id.filter(|_| !args.dry_run) else { return Ok(None) };
    Ok(gate(&cx.ledger().await?, cx.config, by.clone()).job(id, resolution).await?)
}

/// The resolution, its actor, and how it is applied.
struct DecisionRequest<'a> {
    resolution: JobResolution,
    actor: Actor,
    /// Without it, a decision that sends nothing again is applied.
    args: Option<&'a BulkArgs>,
    json: bool,
}

/// Applies a decision to every payment of the source.
///
/// # Errors
/// When a backend is unreachable before anything was changed, or the output is closed.
async fn decide(
    request: DecisionRequest<'_>,
    mut source: IdSource<'_>,
    cx: &mut CommandContext<'_>,
) -> Result<Exit, CommandError> {
    let DecisionRequest { resolution, actor, args, json } = request;
    let dry_run = args.is_some_and(|args| args.dry_run);
    let ledger = &cx.ledger().await?;
    let report = BulkReport::new(&resolution, dry_run, json);
    let (queue, providers);
    let (decision, ticks) = match args.filter(|_| resolution.needs_resend()) {
        None => (JobDecision::Record { ledger, resolution, actor }, None),
        Some(args) => {
            providers = provider_names(ledger).await?;
            queue = cx.queue().await?;
            if dry_run {
                queue.ping().await?;
            } else {
                // Safe: the ledger has these payments, and the sweeper republishes lost messages.
                for (name, why) in declare_lanes(queue.as_ref(), &providers, &providers).await? {
                    cx.console.message(&format!("warning: {name}: {why}"))?;
                }
            }
            let (queue, card_numbers) = (queue.as_ref(), cx.config.worker.card_numbers);
            let resender = Resender { ledger, queue, providers: &providers, card_numbers, resolution, actor };
            (JobDecision::Resend(resender), Some(Mutex::new(send_interval(args.rate))))
        }
    };
    let ended = AtomicBool::new(false);
    let decide = |id: JobId| {
        let (decision, ticks, ended) = (&decision, &ticks, &ended);
        async move {
            if dry_run {
                let preview = decision.preview(&id).await;
                return preview
                    .map_or_else(JobActionResult::from, |provider| JobActionResult::WouldChange(provider.to_string()));
            }
            if let Some(ticks) = ticks {
                ticks.lock().await.tick().await;
            }
            if ended.load(Ordering::Relaxed) {
                return JobActionResult::Skipped;
            }
            let outcome = decision.apply(&id).await.map_or_else(JobActionResult::from, |()| JobActionResult::Done);
            ended.fetch_or(outcome.aborts_batch(), Ordering::Relaxed);
            outcome
        }
    };
    report.run_on_all(&mut source, decide, cx.console).await
}

/// A steady interval: a late tick delays the next ones instead of a burst.
fn send_interval(rate: BatchRate) -> Interval {
    let mut ticks = interval(rate.interval());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
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
    /// Try dead payments again, one or all: same key, same request, attempts reset, within the limits.
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
    if let Some(query) = &args.filter {
        let (decision, because) = (BatchDecision::Discard, args.because.as_deref());
        let bulk = BulkDecision { decision, args: &args.bulk, because, json: args.json };
        return decide_in_bulk(bulk, filter_selection(query)?, cx).await;
    }
    let (resolution, actor) = (JobResolution::Discard, actor(args.because.as_deref()));
    if let Some(awaited) = gate_one(args.id.as_ref(), &resolution, &actor, &args.bulk, cx).await? {
        return print_awaited(&awaited, args.json, cx.console);
    }
    let request = DecisionRequest { resolution, actor, args: Some(&args.bulk), json: args.json };
    decide(request, IdSource::Argument(args.id.clone()), cx).await
}

#[derive(Debug, clap::Args)]
struct ReplayArgs {
    /// One payment; without it and without --provider, all dead payments, after a confirmation.
    #[arg(value_parser = parse_id, allow_hyphen_values = true)]
    id: Option<JobId>,
    /// The dead payments of this provider; with an id, the payment must be this provider's.
    #[arg(long)]
    provider: Option<String>,
    /// Replay all dead payments of all providers without a confirmation; without a terminal there is none.
    #[arg(long, conflicts_with_all = ["id", "provider"])]
    yes: bool,
    /// Why, for the audit; also in the job's reason.
    #[arg(long, value_name = "TEXT", value_parser = decision_input::validate_reason, allow_hyphen_values = true)]
    because: Option<String>,
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
    let provider = args.provider.as_ref().map(|name| format!("&provider={name}")).unwrap_or_default();
    let all = format!("state={DEAD}{provider}");
    // All dead payments are shown first, and replayed as one batch.
    let is_gated = args.id.is_none() && cx.config.approvals.rules.concern(GatedAction::Replay);
    if let Some(query) = args.filter.as_ref().or(is_gated.then_some(&all)) {
        let (decision, because) = (BatchDecision::Replay, args.because.as_deref());
        let bulk = BulkDecision { decision, args: &args.bulk, because, json: args.json };
        return decide_in_bulk(bulk, filter_selection(query)?, cx).await;
    }
    let ledger = &cx.ledger().await?;
    let provider = args.provider.as_deref().map(parse_name).transpose()?;
    let source = match &args.id {
        Some(id) => {
            let actual = ledger.job_details(id).await?.map(|details| details.line.provider);
            if let (Some(actual), Some(wanted)) = (actual, &provider)
                && actual != wanted.as_str()
            {
                return Err(CommandError::Failed(format!(
                    "{id} is a payment of {actual}, not of {wanted}: nothing was replayed"
                )));
            }
            let by = actor(args.because.as_deref());
            if let Some(awaited) = gate_one(Some(id), &JobResolution::Replay, &by, &args.bulk, cx).await? {
                return print_awaited(&awaited, args.json, cx.console);
            }
            IdSource::Argument(Some(id.clone()))
        }
        None => {
            let dead = count_dead(ledger, provider.as_ref()).await?;
            if dead.is_empty() {
                // A success, unless the provider does not exist.
                check_provider_exists(provider.as_ref(), cx).await?;
                cx.console.message("no dead payments: nothing to replay")?;
                return print_empty_report(args, Exit::Success, cx.console);
            }
            if provider.is_none() && !args.bulk.dry_run && !args.yes && !confirm_replay(&dead, cx.console)? {
                cx.console.message("nothing was changed")?;
                return print_empty_report(args, Exit::Failed, cx.console);
            }
            let filter = JobFilter { provider, ..JobFilter::of_state(DEAD) };
            IdSource::Ledger { ledger, filter: Box::new(filter), page: VecDeque::new(), after: None, has_more: true }
        }
    };
    let (resolution, actor) = (JobResolution::Replay, actor(args.because.as_deref()));
    let request = DecisionRequest { resolution, actor, args: Some(&args.bulk), json: args.json };
    decide(request, source, cx).await
}

/// Dead payments, by provider.
async fn count_dead(ledger: &Database, provider: Option<&ProviderName>) -> Result<BTreeMap<String, i64>, CommandError> {
    let counts = ledger.job_counts(DEAD).await?.into_iter();
    let dead = counts.filter(|count| provider.is_none_or(|name| name.as_str() == count.provider));
    Ok(dead.map(|count| (count.provider, count.jobs)).collect())
}

fn print_empty_report(args: &ReplayArgs, exit: Exit, console: &mut Console) -> Result<Exit, CommandError> {
    if args.json {
        console.json(&BulkReport::new(&JobResolution::Replay, args.bulk.dry_run, true))?;
    }
    Ok(exit)
}

/// Asks for a confirmation; without a terminal the script has decided.
fn confirm_replay(dead: &BTreeMap<String, i64>, console: &mut Console) -> Result<bool, CommandError> {
    let total: i64 = dead.values().sum();
    let by_provider: Vec<String> = dead.iter().map(|(provider, jobs)| format!("{provider} {jobs}")).collect();
    let all = if total == 1 { "the one dead payment".to_owned() } else { format!("all {total} dead payments") };
    let question = format!("Replay {all} ({})?", by_provider.join(", "));
    Ok(console.confirm(&question)?.unwrap_or(true))
}
