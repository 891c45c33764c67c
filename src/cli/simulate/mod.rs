//! The `simulate` command: simulates a change in virtual time, on the current or changed rows, with several variants
//! side by side.
//!
//! It reads rows and history, changes nothing and sends nothing. The model is in [`crate::simulation`].

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::time::Instant;

use super::input::{self, PROVIDER_FILE_BYTES_MAX};
use super::provider::parse_rows;
use super::{CommandError, Console, Exit};
use crate::app::Services;
use crate::config::Config;
use crate::domain::format::count;
use crate::ledger::provider_row::ProviderRow;
use crate::ops::SettingsChangeError;
use crate::simulation::{JobArrivals, Model, SimulationResult, simulate};

mod arrivals;
mod changes;
mod output;

use changes::SimulationSetup;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The provider whose lane is simulated; optional if there is only one.
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,
    /// Rows from a provider file instead of the database.
    #[arg(long, value_name = "FILE")]
    providers: Option<PathBuf>,
    #[command(flatten)]
    arrivals: arrivals::ArrivalArgs,
    /// Change a value in all variants: limit=200/1s, limit.NAME=200/1s, any column of the row (mode=requeue), or one of
    /// the keys below (latency, transit, round_trip, commit, faults, processes); repeatable.
    #[arg(long = "with", value_name = "KEY=VALUE")]
    changes: Vec<String>,
    /// Add a variant beside the unchanged rows: `at 50/s: limit=50/1s processes=2`; repeatable.
    #[arg(long, value_name = "NAME: KEY=VALUE …")]
    variant: Vec<String>,
    /// Worker processes that share the lane.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    processes: u32,
    /// The provider's time from request to response: 80ms, 20ms..80ms, p50=80ms,p95=300ms, or a CSV file of
    /// milliseconds.
    #[arg(long, default_value = "50ms..150ms")]
    latency: String,
    /// One-way network delay to the provider, in the same forms.
    #[arg(long, default_value = "1ms")]
    transit: String,
    /// Round trip of a call to the limiter.
    #[arg(long, default_value = "1ms", value_name = "DURATION")]
    round_trip: String,
    /// Time of one commit to the database.
    #[arg(long, default_value = "3ms", value_name = "DURATION")]
    commit: String,
    /// Share of requests that get a 500, 0 to 1.
    #[arg(long, default_value = "0")]
    faults: String,
    /// Begin with a cold start of the limiter, as an embedded limiter does when its process starts.
    #[arg(long)]
    cold: bool,
    /// Start of the simulation (RFC 3339); default: now, or the start of the history.
    #[arg(long, value_name = "TIME")]
    start: Option<Timestamp>,
    /// Seed of all random numbers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write a chart of the waiting jobs, and of the rate against the limit.
    #[arg(long, value_name = "FILE.svg", value_parser = parse_svg_path)]
    plot: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Accepts names that end in `.svg`: the chart is always SVG.
fn parse_svg_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let is_svg = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("svg"));
    if is_svg { Ok(path) } else { Err("the chart is an SVG: use a name that ends in .svg".to_owned()) }
}

/// One column: the changes and the result of a variant.
struct VariantRun {
    pub name: String,
    pub changes: Vec<String>,
    pub model: Model,
    pub figures: SimulationResult,
}

/// Runs the command.
///
/// # Errors
/// When rows, arrivals or changes are invalid or unreadable. An exceeded window is no error, but gives exit code 1.
pub async fn run(
    args: &Args,
    config: &Config,
    services: &Services,
    console: &mut Console,
) -> Result<Exit, CommandError> {
    let began = Instant::now();
    let (rows, provider) = load_rows(args, config, services).await?;
    let mut setup = SimulationSetup::new(args, rows, provider)?;
    let invalid: Vec<String> = args
        .changes
        .iter()
        .filter_map(|change| Some(format!("--with {change}: {}", setup.apply_change(change).err()?)))
        .collect();
    if !invalid.is_empty() {
        return Err(CommandError::Problems { exit: Exit::Usage, lines: invalid });
    }
    let mut rng = StdRng::seed_from_u64(args.seed);
    let gathered = arrivals::gather(args, &setup, config, services, &mut rng).await?;
    if gathered.arrivals.jobs().is_empty() {
        return Err(CommandError::Usage("no job arrives: nothing to simulate".to_owned()));
    }
    let start = args.start.or(gathered.recorded_from).unwrap_or_else(Timestamp::now);
    let columns = run_variants(args, &setup, &gathered.arrivals, start)?;
    if let Some(path) = &args.plot {
        output::write_plot(path, &columns, start)?;
    }
    if args.json {
        console.json(&output::to_json(args, &columns, start))?;
    } else {
        output::print_table(&columns, start, console)?;
        let jobs = count((columns.len() * gathered.arrivals.jobs().len()) as u64, "job");
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
            let usage_error = |problem| CommandError::Usage(format!("variant `{name}`: {change}: {problem}"));
            setup.apply_change(change).map_err(usage_error)?;
        }
        let changed = !changes.is_empty() || !args.changes.is_empty();
        let model = setup.model(start).map_err(|problem| {
            let text = format!("{name}: {problem}");
            // The mistake is in the command line, or in the unchanged row.
            if changed { CommandError::Usage(text) } else { CommandError::Configuration(text) }
        })?;
        // Every variant gets the same random numbers as far as it makes the same requests.
        let figures = simulate(&model, arrivals, &mut StdRng::seed_from_u64(args.seed));
        columns.push(VariantRun { name, changes, model, figures });
    }
    Ok(columns)
}

/// All rows, and the index of the one whose lane is simulated.
async fn load_rows(
    args: &Args,
    config: &Config,
    services: &Services,
) -> Result<(Vec<ProviderRow>, usize), CommandError> {
    let rows = match &args.providers {
        Some(path) => {
            let text = input::read_text(path, PROVIDER_FILE_BYTES_MAX).await?;
            let file_error = |problems: Vec<String>| {
                let lines = problems.iter().map(|problem| format!("{}: {problem}", path.display())).collect();
                CommandError::Problems { exit: Exit::BadConfiguration, lines }
            };
            parse_rows(&text).map_err(file_error)?
        }
        None => services.ledger(config).await?.readable_rows(None).await?,
    };
    let index = match (&args.provider, rows.len()) {
        (Some(name), _) => rows
            .iter()
            .position(|row| row.name == *name)
            .ok_or_else(|| no_such_provider(name, args.providers.as_deref(), &rows))?,
        (None, 1) => 0,
        (None, 0) => {
            let text = "no providers yet: `sluicegate provider apply FILE` adds some, or name a file with --providers";
            return Err(CommandError::Failed(text.to_owned()));
        }
        (None, _) => {
            let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
            let text = format!("name one with --provider: {}", names.join(", "));
            return Err(CommandError::Usage(text));
        }
    };
    Ok((rows, index))
}

/// The error for an unknown provider, with the source of the rows.
fn no_such_provider(name: &str, file: Option<&Path>, rows: &[ProviderRow]) -> CommandError {
    let Some(file) = file else {
        return CommandError::Usage(SettingsChangeError::NoProvider(name.to_owned()).to_string());
    };
    let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
    let has = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    CommandError::Usage(format!("there is no provider `{name}` in {}: it has {has}", file.display()))
}
