//! The `status` command: one table of all providers, as a running process reports them for all workers, with the cause
//! of each problem.
//!
//! Without a running process it shows database and queue only, and says so on stderr. In a narrow terminal these steps
//! follow each other until the table fits: optional columns are left out, one blank separates columns, the name is cut,
//! the usage is left out, the state is cut. Last, lines are cut.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::cli::console::TableShape;
use crate::cli::{CommandContext, CommandError, Console, Exit, ops_client};
use crate::domain::backend_fault::BackendFault;
use crate::domain::printable::printable;
use crate::domain::provider::ProviderName;
use crate::fleet::workers::{WorkerProcess, visible_workers};
use crate::fleet::{Overview, OverviewInput, by_provider, overview};
use crate::ledger::database::Database;
use crate::ops::{all_provider_names, pause_authors, unix_ms};
use crate::worker::settings_sync::LoadedSettings;
use crate::worker::sweeper::{CHECKED_JOBS, OVERDUE_ALARM_AFTER};

mod finish;
pub(super) mod text;

/// Refresh interval of `--watch`.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);
/// Longest time that a stalled reader may delay the exit.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time to wait for the queue.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(2);
/// Switch to the terminal's second screen and back, so that the earlier output stays.
/// <https://invisible-island.net/xterm/ctlseqs/ctlseqs.html>
const ALTERNATE_SCREEN: &str = "\x1b[?1049h";
const MAIN_SCREEN: &str = "\x1b[?1049l";
/// The last line of the screen, after an empty one.
const FOOTER: &str = "\n\nCtrl-C to quit";
const HOME: &str = "\x1b[H";
const CLEAR_LINE_REST: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Refresh every 2 seconds, until Ctrl-C.
    #[arg(long)]
    pub watch: bool,
    /// Print JSON: the whole overview, as /api/v1/overview; with --watch one object per line.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When neither a running process nor the database answers.
pub async fn run(args: &Args, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    if !args.watch {
        let (overview, fallback) = read_overview(cx).await?;
        fallback.iter().try_for_each(|why| cx.console.message(why))?;
        return print(args, &overview, cx.console);
    }
    let draws = !args.json && matches!(cx.console.shape(), TableShape::Terminal { .. });
    if draws {
        cx.console.raw(ALTERNATE_SCREEN)?;
    }
    let watched = watch(args, draws, cx).await;
    if draws {
        cx.console.raw(MAIN_SCREEN)?;
    }
    watched
}

async fn watch(args: &Args, draws: bool, cx: &mut CommandContext<'_>) -> Result<Exit, CommandError> {
    let mut last_note = None;
    let stop = tokio::signal::ctrl_c();
    tokio::pin!(stop);
    // A stalled reader blocks the writing, and with it the exit on Ctrl-C.
    let mut last_resort = JoinSet::new();
    last_resort.spawn(async {
        if tokio::signal::ctrl_c().await.is_ok() {
            sleep(STOP_TIMEOUT).await;
            std::process::exit(Exit::Success.code().into());
        }
    });
    loop {
        let result = tokio::select! {
            result = read_overview(cx) => result,
            stopped = &mut stop => return Ok(stopped.map(|()| Exit::Success)?),
        };
        match result {
            Ok((overview, fallback)) if draws => draw_screen(&overview, fallback.as_deref(), cx.console)?,
            Ok((overview, fallback)) => {
                if last_note != fallback {
                    fallback.iter().try_for_each(|why| cx.console.message(why))?;
                    last_note = fallback;
                }
                print(args, &overview, cx.console)?;
            }
            // Keep watching: the next read may succeed.
            Err(error) if draws => cx.console.raw(&redraw_sequence(&printable(&format!("error: {error}"))))?,
            Err(error) => return Err(error),
        }
        cx.console.flush()?;
        tokio::select! {
            () = sleep(WATCH_INTERVAL) => {}
            stopped = &mut stop => return Ok(stopped.map(|()| Exit::Success)?),
        }
    }
}

fn print(args: &Args, overview: &Overview, console: &mut Console) -> Result<Exit, CommandError> {
    if args.json && args.watch {
        console.json_line(overview)?;
    } else if args.json {
        console.json(overview)?;
    } else if overview.providers.is_empty() && !overview.outages.is_empty() {
        // Which providers there are, is not known.
        overview.outages.iter().try_for_each(|outage| console.message(&outage.problem))?;
    } else if overview.providers.is_empty() {
        console.message("no providers yet: `sluicegate provider apply FILE` adds some")?;
    } else {
        console.table_text(&text::render_overview(overview, console.shape(), None))?;
        if args.watch {
            console.line("")?;
        }
    }
    Ok(Exit::Success)
}

fn draw_screen(overview: &Overview, fallback: Option<&str>, console: &mut Console) -> std::io::Result<()> {
    let mut page = format!("sluicegate {}  {}\n\n", overview.version, overview.at);
    if let Some(why) = fallback {
        page.push_str(&format!("{}\n\n", printable(why)));
    }
    // The last line break takes one more line.
    let left = console.height().map(|height| height.saturating_sub(page.lines().count() + FOOTER.lines().count() + 1));
    page.push_str(&console.painted(&text::render_overview(overview, console.shape(), left)));
    page.push_str(FOOTER);
    console.raw(&redraw_sequence(&page))
}

/// The control sequence that draws one page over the previous one.
fn redraw_sequence(page: &str) -> String {
    let lines: String = page.lines().map(|line| format!("{}{CLEAR_LINE_REST}\r\n", printable(line))).collect();
    format!("{HOME}{lines}{CLEAR_BELOW}")
}

/// The overview, and a note if no running process answered or its deployment is unverified.
async fn read_overview(cx: &CommandContext<'_>) -> Result<(Overview, Option<String>), CommandError> {
    match ops_client::get::<Overview>(cx, "/api/v1/overview").await {
        Ok(answered) => Ok((answered.value, answered.unverified)),
        Err(error @ (CommandError::DatabaseMissing { .. } | CommandError::OtherDeployment(_))) => Err(error),
        Err(error) => {
            let overview = overview(&overview_input(cx).await?);
            Ok((overview, Some(format!("{error}; showing database and queue only"))))
        }
    }
}

/// The depths of the lanes' queues, and why some are unknown. Without a broker nothing waits before its record.
async fn queue_depths(cx: &CommandContext<'_>, names: &[ProviderName]) -> (BTreeMap<String, u64>, Vec<String>) {
    let queue = match timeout(QUEUE_TIMEOUT, cx.queue()).await {
        Ok(Ok(Some(queue))) => queue,
        Ok(Ok(None)) => return (names.iter().map(|name| (name.to_string(), 0)).collect(), Vec::new()),
        Ok(Err(error)) => return (BTreeMap::new(), vec![format!("queue: {error}")]),
        Err(_) => return (BTreeMap::new(), vec!["queue: no response within 2 s".to_owned()]),
    };
    let (mut depths, mut problems) = (BTreeMap::new(), Vec::new());
    for name in names {
        match timeout(QUEUE_TIMEOUT, queue.depth(name)).await {
            // A missing queue has no messages.
            Ok(Ok(depth)) => drop(depths.insert(name.to_string(), depth.unwrap_or(0))),
            Ok(Err(error)) => problems = vec![format!("queue: {error}")],
            Err(_) => return (depths, vec!["queue: no response within 2 s".to_owned()]),
        }
    }
    (depths, problems)
}

/// What the broker does not do though it answers.
async fn publish_fault(cx: &CommandContext<'_>) -> Option<BackendFault> {
    let queue = timeout(QUEUE_TIMEOUT, cx.queue()).await.ok()?.ok()??;
    timeout(QUEUE_TIMEOUT, queue.publish_fault()).await.ok()?
}

/// The contents of the database: rows, jobs, and the workers' heartbeats.
pub(super) async fn overview_input(cx: &CommandContext<'_>) -> Result<OverviewInput, CommandError> {
    let ledger = cx.ledger().await?;
    let known = LoadedSettings::default().with_snapshot(ledger.load_settings().await?);
    let at_ms = unix_ms();
    let accounts = ledger.reconcile(OVERDUE_ALARM_AFTER, CHECKED_JOBS).await?;
    let rows: Vec<_> = ledger.raw_rows(None).await?.into_iter().flatten().collect();
    let row_names =
        rows.iter().map(|row| row.name.as_str()).chain(known.invalid_rows.iter().map(|row| row.provider.as_str()));
    let names = all_provider_names(&known, row_names.chain(accounts.iter().map(|account| account.provider.as_str())));
    let (depths, mut problems) = queue_depths(cx, &names).await;
    let workers = visible_workers(ledger.worker_reports().await?, Duration::ZERO, None);
    let database_problem = commit_problem(&ledger, &workers).await;
    let mut missing = Vec::new();
    missing.extend(database_problem.as_ref().map(|_| "database"));
    missing.extend((!problems.is_empty()).then_some("queue"));
    problems.extend(publish_fault(cx).await.map(|fault| fault.to_string()));
    Ok(OverviewInput {
        at_ms,
        counted_at_ms: Some(at_ms),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        paused_by: pause_authors(&ledger, &rows).await,
        pause_of_all: ledger.pause_of_all().await?,
        rows,
        depths,
        missing,
        database_problem,
        backend_problems: problems,
        workers,
        reconciliation: Some(by_provider(accounts)),
        oldest_ms: Some(ledger.oldest_open(&names).await?.into_iter().collect()),
        rejected: Some(ledger.count_rejected().await?),
        held: Some(ledger.count_held().await?),
        throttling: Some(ledger.throttling(&names.iter().map(ProviderName::as_str).collect::<Vec<_>>()).await?),
        providers: known.providers,
        invalid_rows: known.invalid_rows,
        ..OverviewInput::default()
    })
}

/// Why no worker reports, if the database commits nothing. A user without the right to write learns nothing of it.
async fn commit_problem(ledger: &Database, workers: &[WorkerProcess]) -> Option<String> {
    if workers.iter().any(WorkerProcess::is_live) {
        return None;
    }
    let error = ledger.check_commit().await.err()?;
    error.is_unavailable().then(|| error.to_string())
}

/// Columns that are left out in a narrow terminal, in this order; `--json` has all of them.
const OPTIONAL_COLUMNS: [&str; 3] = ["in flight", "delayed", "rate"];
/// Left out before a line is cut, which would cut the clear time.
const LAST_OPTIONAL_COLUMN: &str = "used";
/// Blanks between two cells, and in a terminal that is too narrow for that.
const COLUMN_GAP: usize = 2;
const NARROW_GAP: usize = 1;
/// Minimum widths of the first two columns, a name and a state, in characters. A line below the row has the cause of
/// its state.
const WIDTHS_MIN: [usize; 2] = [8, 12];

/// One column, with a cell per row.
struct TableColumn {
    pub title: &'static str,
    pub cells: Vec<String>,
    /// Whether the cells are right-aligned.
    pub is_right_aligned: bool,
}

impl TableColumn {
    fn width(&self) -> usize {
        let cells = self.cells.iter().map(|cell| cell.chars().count());
        cells.chain([self.title.chars().count()]).max().unwrap_or(0)
    }

    fn padded(&self, cell: &str, width: usize) -> String {
        if self.is_right_aligned { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
    }
}

/// The header line and one line per row.
fn render_lines(mut columns: Vec<TableColumn>, width: Option<usize>) -> Vec<String> {
    for cell in columns.iter_mut().flat_map(|column| &mut column.cells) {
        *cell = printable(cell).into_owned();
    }
    let gap = width.map_or(COLUMN_GAP, |width| fit_width(&mut columns, width));
    let rows = columns.iter().map(|column| column.cells.len()).max().unwrap_or(0);
    let line = |cell: &dyn Fn(&TableColumn) -> String| {
        let cells: Vec<String> = columns.iter().map(|column| column.padded(&cell(column), column.width())).collect();
        let line = cells.join(&" ".repeat(gap));
        truncate(line.trim_end(), width.unwrap_or(usize::MAX))
    };
    let head = line(&|column: &TableColumn| column.title.to_owned());
    let rows = (0..rows).map(|row| line(&|column: &TableColumn| column.cells.get(row).cloned().unwrap_or_default()));
    [head].into_iter().chain(rows).collect()
}

fn total_width(columns: &[TableColumn], gap: usize) -> usize {
    columns.iter().map(|column| column.width() + gap).sum::<usize>().saturating_sub(gap)
}

/// Makes the columns fit; returns the blanks between them.
fn fit_width(columns: &mut Vec<TableColumn>, width: usize) -> usize {
    for optional in OPTIONAL_COLUMNS {
        if total_width(columns, COLUMN_GAP) <= width {
            return COLUMN_GAP;
        }
        columns.retain(|column| column.title != optional);
    }
    let gap = if total_width(columns, COLUMN_GAP) <= width { COLUMN_GAP } else { NARROW_GAP };
    let name_rest = columns.first().map_or(0, |names| names.width().saturating_sub(WIDTHS_MIN[0]));
    if total_width(columns, gap).saturating_sub(name_rest) > width {
        columns.retain(|column| column.title != LAST_OPTIONAL_COLUMN);
    }
    for (index, least) in WIDTHS_MIN.into_iter().enumerate() {
        let too_wide = total_width(columns, gap).saturating_sub(width);
        if let Some(column) = columns.get_mut(index) {
            let most = column.width().saturating_sub(too_wide).max(least);
            column.cells.iter_mut().for_each(|cell| *cell = truncate(cell, most));
        }
    }
    gap
}

/// Cuts a text to at most `most` characters; a cut text ends with `…`.
fn truncate(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let kept: String = text.chars().take(most.saturating_sub(1)).collect();
    format!("{kept}…")
}
