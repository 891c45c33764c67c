//! `simulate`: rehearses a change in virtual time, on the rows as they are or as they might be, several variants side by side.
//!
//! Refuses to touch anything: rows and history are read, nothing is sent. What is simulated is [`crate::simulation`].

use std::path::PathBuf;

use jiff::Timestamp;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::time::Instant;

use super::connect::Services;
use super::{CommandError, Console, Exit};
use crate::config::Config;
use crate::domain::explain::format::count;
use crate::simulation::{JobArrivals, Model, SimulationResult, simulate};

mod arrivals;
mod changes;
mod plot;
mod print;
mod rows;

use changes::SimulationSetup;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The provider whose lane is rehearsed; may be left out where there is one.
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,
    /// Rows from a provider file instead of the database.
    #[arg(long, value_name = "FILE")]
    providers: Option<PathBuf>,
    #[command(flatten)]
    arrivals: arrivals::ArrivalArgs,
    /// Changes something for all: limit=200/1s, limit.NAME=200/1s, any column of the row (mode=requeue), or one of the
    /// keys below (latency, transit, round_trip, commit, faults, processes); repeatable.
    #[arg(long = "with", value_name = "KEY=VALUE")]
    changes: Vec<String>,
    /// One more column beside the rows as they are: `at 50/s: limit=50/1s processes=2`; repeatable.
    #[arg(long, value_name = "NAME: KEY=VALUE …")]
    variant: Vec<String>,
    /// Worker processes that share the lane.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    processes: u32,
    /// The provider's time from receipt to answer: 80ms, 20ms..80ms, p50=80ms,p95=300ms, or a CSV file of milliseconds.
    #[arg(long, default_value = "50ms..150ms")]
    latency: String,
    /// One way over the network to the provider, in the same forms.
    #[arg(long, default_value = "1ms")]
    transit: String,
    /// A call to the limiter, there and back.
    #[arg(long, default_value = "1ms", value_name = "DURATION")]
    round_trip: String,
    /// One commit to the database.
    #[arg(long, default_value = "3ms", value_name = "DURATION")]
    commit: String,
    /// Share of requests that the provider answers with 500, 0 to 1.
    #[arg(long, default_value = "0")]
    faults: String,
    /// The limiter begins without memory, as the embedded one of a process that has just started.
    #[arg(long)]
    cold: bool,
    /// When the first instant of the arrivals is (RFC 3339); default: now, or the begin of the history.
    #[arg(long, value_name = "TIME")]
    start: Option<Timestamp>,
    /// Decides all that is random.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write a picture for a ticket: what waits, and the rate against the limit.
    #[arg(long, value_name = "FILE.svg", value_parser = parse_svg_path)]
    plot: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Nothing else can be written, and a picture under a wrong name opens nowhere.
fn parse_svg_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let is_svg = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("svg"));
    if is_svg { Ok(path) } else { Err("an SVG is written: let the name end in .svg".to_owned()) }
}

/// One column: what was changed and what came of it.
struct VariantRun {
    pub name: String,
    pub changes: Vec<String>,
    pub model: Model,
    pub figures: SimulationResult,
}

/// Runs the command.
///
/// # Errors
/// When rows, arrivals or changes cannot be meant or read. A window that held too much is no error but exit code 1.
pub async fn run(
    args: &Args,
    config: &Config,
    engines: &dyn Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let began = Instant::now();
    let (rows, provider) = rows::load(args, config, engines).await?;
    let mut setup = SimulationSetup::new(args, rows, provider)?;
    let wrong: Vec<String> = args
        .changes
        .iter()
        .filter_map(|change| Some(format!("--with {change}: {}", setup.apply_change(change).err()?)))
        .collect();
    if !wrong.is_empty() {
        return Err(CommandError::Problems { exit: Exit::Usage, lines: wrong });
    }
    let mut rng = StdRng::seed_from_u64(args.seed);
    let come = arrivals::gather(args, &setup, config, engines, &mut rng).await?;
    if come.arrivals.jobs().is_empty() {
        return Err(CommandError::Usage("no job ever comes: nothing to simulate".to_owned()));
    }
    let start = args.start.or(come.recorded_from).unwrap_or_else(Timestamp::now);
    let columns = run_variants(args, &setup, &come.arrivals, start, engines)?;
    if let Some(path) = &args.plot {
        plot::write(path, &columns, start)?;
    }
    if args.json {
        console.json(&print::to_json(args, &columns, start))?;
    } else {
        print::print_table(&columns, start, console)?;
        let jobs = count((columns.len() * come.arrivals.jobs().len()) as u64, "job");
        console.flush()?;
        console.message(&format!("{jobs} simulated in {:.1} s", began.elapsed().as_secs_f64()))?;
    }
    Ok(if columns.iter().all(|column| column.figures.holds()) { Exit::Success } else { Exit::Failed })
}

fn run_variants(
    args: &Args,
    setup: &SimulationSetup,
    arrivals: &JobArrivals,
    start: Timestamp,
    engines: &dyn Services,
) -> Result<Vec<VariantRun>, CommandError> {
    let mut planned = vec![("as it is".to_owned(), Vec::new())];
    if !args.changes.is_empty() {
        planned = vec![(args.changes.join(" "), Vec::new())];
    }
    for variant in &args.variant {
        planned.push(changes::parse_variant(variant).map_err(CommandError::Usage)?);
    }
    let mut columns = Vec::new();
    for (name, changes) in planned {
        let mut setup = setup.clone();
        for change in &changes {
            let said = |problem| CommandError::Usage(format!("variant `{name}`: {change}: {problem}"));
            setup.apply_change(change).map_err(said)?;
        }
        let changed = !changes.is_empty() || !args.changes.is_empty();
        let model = setup.model(start, engines).map_err(|problem| {
            let text = format!("{name}: {problem}");
            // Whose fault it is: what the line asks for, or the row as it stands.
            if changed { CommandError::Usage(text) } else { CommandError::Configuration(text) }
        })?;
        // Every column meets the same draws as far as it makes the same requests.
        let figures = simulate(&model, arrivals, &mut StdRng::seed_from_u64(args.seed));
        columns.push(VariantRun { name, changes, model, figures });
    }
    Ok(columns)
}
