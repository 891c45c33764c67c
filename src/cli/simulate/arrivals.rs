//! The job arrivals of a simulation: a rate, a burst, a recorded trace, or the ledger's history.
//!
//! If a trace has invalid lines, the error names them and nothing is simulated.

use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use rand::rngs::StdRng;

use super::{Args, SimulationSetup};
use crate::cli::input::job_count;
use crate::cli::provider::parse_name;
use crate::cli::{CommandContext, CommandError, Exit, input};
use crate::domain::format::count;
use crate::domain::job::{COST_MAX, Identifier};
use crate::domain::limit::Rate;
use crate::domain::time::parse_duration;
use crate::ledger::operator::{DatabaseTime, PastArrival};
use crate::simulation::arrivals::BYTE_ORDER_MARK;
use crate::simulation::arrivals::JOBS_MAX;
use crate::simulation::{JobArrival, JobArrivals};

/// Invalid lines that are listed; the rest is only counted.
const LISTED_PROBLEMS_MAX: usize = 10;
/// Largest trace, in bytes: [`JOBS_MAX`] lines with an account each.
const TRACE_BYTES_MAX: u64 = 512 * 1024 * 1024;
const COLUMNS: [&str; 5] = ["at_ms", "account", "cost", "priority", "expires_at_ms"];

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = true)]
pub struct ArrivalArgs {
    /// Jobs arrive at random at this mean rate: 50/s, 600/1m.
    #[arg(long, value_name = "N/DURATION", requires = "lasting")]
    rate: Option<Rate>,
    /// How long jobs arrive at that rate.
    #[arg(long = "for", id = "lasting", value_name = "DURATION", value_parser = parse_duration, requires = "rate")]
    lasting: Option<Duration>,
    /// Number of jobs at the start: 5000, 300_000, 300k.
    #[arg(long, value_name = "JOBS", value_parser = job_count)]
    burst: Option<usize>,
    /// A recording: CSV with the columns at_ms[,account][,cost][,priority][,expires_at_ms].
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// The provider's jobs that the ledger recorded between two times (RFC 3339), at their times.
    #[arg(long, value_name = "FROM..TO", value_parser = parse_time_range, conflicts_with_all = ["rate", "burst", "trace"])]
    history: Option<(Timestamp, Timestamp)>,
}

fn parse_time_range(text: &str) -> Result<(Timestamp, Timestamp), String> {
    let (from, to) = text.split_once("..").ok_or_else(|| format!("`{text}`: write FROM..TO"))?;
    let instant = |text: &str| text.parse::<Timestamp>().map_err(|error| format!("`{text}`: {error}"));
    let (from, to) = (instant(from)?, instant(to)?);
    if from < to { Ok((from, to)) } else { Err(format!("`{text}` ends before it begins")) }
}

/// The arrivals, and the start of a recording.
pub(super) async fn gather(
    args: &Args,
    setup: &SimulationSetup,
    cx: &CommandContext<'_>,
    rng: &mut StdRng,
) -> Result<(JobArrivals, Option<Timestamp>), CommandError> {
    let requested = &args.arrivals;
    check_expected_jobs(requested)?;
    if let Some((from, to)) = requested.history {
        let name = parse_name(setup.provider_name())?;
        let ledger = cx.ledger().await?;
        let past = ledger
            .arrivals(&name, DatabaseTime(from.as_millisecond()), DatabaseTime(to.as_millisecond()), JOBS_MAX)
            .await?;
        return Ok((from_history(from, &past), Some(from)));
    }
    let mut arrivals = match &requested.trace {
        Some(path) => read_trace(path).await?,
        None => JobArrivals::default(),
    };
    if let (Some(rate), Some(lasting)) = (requested.rate, requested.lasting) {
        arrivals.add(JobArrivals::at_rate(rate.per_second(), lasting, rng).jobs().iter().copied());
    }
    if let Some(burst) = requested.burst {
        arrivals.add(JobArrivals::burst(burst).jobs().iter().copied());
    }
    if arrivals.jobs().len() > JOBS_MAX {
        return Err(too_many());
    }
    Ok((arrivals, None))
}

/// Checks the expected number of jobs before any arrival is drawn.
fn check_expected_jobs(requested: &ArrivalArgs) -> Result<(), CommandError> {
    let per_second = requested.rate.map_or(0.0, Rate::per_second);
    let expected = per_second * requested.lasting.unwrap_or_default().as_secs_f64();
    #[allow(clippy::cast_precision_loss, reason = "both are far below 2^53 where it matters")]
    let (most, burst) = (JOBS_MAX as f64, requested.burst.unwrap_or(0) as f64);
    if expected + burst > most { Err(too_many()) } else { Ok(()) }
}

fn too_many() -> CommandError {
    CommandError::Usage(format!("at most {JOBS_MAX} jobs can be simulated at once: use fewer jobs or a shorter time"))
}

fn from_history(from: Timestamp, past: &[PastArrival]) -> JobArrivals {
    let mut arrivals = JobArrivals::default();
    let since = |at: DatabaseTime| u64::try_from(at.0 - from.as_millisecond()).unwrap_or(0) * 1_000;
    let jobs: Vec<JobArrival> = past
        .iter()
        .map(|job| JobArrival {
            at_us: since(job.created_at),
            account: job.account.as_deref().map(|name| arrivals.account(name)),
            cost: u16::try_from(job.cost).unwrap_or(COST_MAX),
            priority: u8::try_from(job.priority).unwrap_or(9),
            expires_us: job.expires_at.map(since),
        })
        .collect();
    arrivals.add(jobs);
    arrivals
}

async fn read_trace(path: &Path) -> Result<JobArrivals, CommandError> {
    let text = input::read_text(path, TRACE_BYTES_MAX).await?;
    parse_trace(&text).map_err(|problems| {
        let lines = problems.iter().map(|problem| format!("{}:{problem}", path.display())).collect();
        CommandError::Problems { exit: Exit::BadConfiguration, lines }
    })
}

/// Parses a trace. Its earliest job arrives at the start of the simulation.
fn parse_trace(text: &str) -> Result<JobArrivals, Vec<String>> {
    let mut lines =
        text.trim_start_matches(BYTE_ORDER_MARK).lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let Some((number, title)) = lines.next() else { return Err(vec!["1: is empty".to_owned()]) };
    let columns: Vec<&str> = title.split(',').map(str::trim).collect();
    if let Some(unknown) = columns.iter().find(|column| !COLUMNS.contains(column)) {
        return Err(vec![format!(
            "{}: `{unknown}` is not a column; the columns are {}",
            number + 1,
            COLUMNS.join(", ")
        )]);
    }
    if !columns.contains(&"at_ms") {
        return Err(vec![format!("{}: column at_ms is missing", number + 1)]);
    }
    let (mut arrivals, mut jobs, mut problems, mut bad) = (JobArrivals::default(), Vec::new(), Vec::new(), 0);
    for (number, line) in lines {
        match parse_trace_line(&columns, line, &mut arrivals) {
            Ok(job) => jobs.push(job),
            Err(problem) => {
                bad += 1;
                if problems.len() < LISTED_PROBLEMS_MAX {
                    problems.push(format!("{}: {problem}", number + 1));
                }
            }
        }
    }
    if bad > LISTED_PROBLEMS_MAX {
        problems.push(format!(" {}", count((bad - LISTED_PROBLEMS_MAX) as u64, "more invalid line")));
    }
    if bad > 0 {
        return Err(problems);
    }
    let first_us = jobs.iter().map(|job| job.at_us).min().unwrap_or(0);
    arrivals.add(jobs.into_iter().map(|job| JobArrival {
        at_us: job.at_us - first_us,
        expires_us: job.expires_us.map(|at_us| at_us.saturating_sub(first_us)),
        ..job
    }));
    Ok(arrivals)
}

fn parse_trace_line(columns: &[&str], line: &str, arrivals: &mut JobArrivals) -> Result<JobArrival, String> {
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    if cells.len() != columns.len() {
        return Err(format!("has {}, the header has {}", count(cells.len() as u64, "cell"), columns.len()));
    }
    let mut job = JobArrival::at(0);
    for (column, cell) in columns.iter().zip(cells) {
        let number = |most: u64| {
            let value = cell.parse::<u64>().ok().filter(|value| *value <= most);
            value.ok_or_else(|| format!("{column} is `{cell}`: must be a whole number from 0 to {most}"))
        };
        match *column {
            "at_ms" => job.at_us = number(1 << 52)? * 1_000,
            _ if cell.is_empty() => {}
            "account" => {
                Identifier::new(cell).map_err(|problem| format!("account {problem}"))?;
                job.account = Some(arrivals.account(cell));
            }
            "cost" => {
                let cost = u16::try_from(number(u64::from(COST_MAX))?).unwrap_or(COST_MAX);
                if cost == 0 {
                    return Err("cost is 0: must be at least 1".to_owned());
                }
                job.cost = cost;
            }
            "priority" => job.priority = u8::try_from(number(9)?).unwrap_or(9),
            _ => job.expires_us = Some(number(1 << 52)? * 1_000),
        }
    }
    Ok(job)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_starts_at_its_earliest_job() {
        let arrivals =
            parse_trace("at_ms,account,cost,priority,expires_at_ms\n2000,acme,3,9,2500\n1000,,,,\n").unwrap();
        assert_eq!(arrivals.accounts(), ["acme"]);
        let urgent =
            JobArrival { at_us: 1_000_000, account: Some(0), cost: 3, priority: 9, expires_us: Some(1_500_000) };
        assert_eq!(arrivals.jobs(), [JobArrival::at(0), urgent]);
        assert_eq!(parse_trace("\u{feff}at_ms\n7\n").unwrap().jobs(), [JobArrival::at(0)]);
    }

    #[test]
    fn invalid_lines_are_listed() {
        let bad = |text| parse_trace(text).unwrap_err();
        assert_eq!(bad("at_ms,cost\n1,1\nx,1\n2,0\n3\n").len(), 3);
        assert_eq!(bad("at_ms\nx\n"), [format!("2: at_ms is `x`: must be a whole number from 0 to {}", 1_u64 << 52)]);
        assert_eq!(
            bad("at\n1\n"),
            ["1: `at` is not a column; the columns are at_ms, account, cost, priority, expires_at_ms"]
        );
        assert_eq!(bad("cost\n1\n"), ["1: column at_ms is missing"]);
        assert_eq!(bad(""), ["1: is empty"]);
        let many = format!("at_ms\n{}", "-1\n".repeat(25));
        assert_eq!((bad(&many).len(), bad(&many)[10].as_str()), (11, " 15 more invalid lines"));
    }

    #[test]
    fn time_ranges_are_parsed() {
        assert!(parse_time_range("2026-01-01T00:00:00Z..2026-01-02T00:00:00Z").is_ok());
        assert!(
            parse_time_range("2026-01-02T00:00:00Z..2026-01-01T00:00:00Z").is_err()
                && parse_time_range("today").is_err()
        );
    }
}
