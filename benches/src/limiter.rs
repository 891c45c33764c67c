//! The benchmark `limiter`: cost per call and per permit, memory, stalls and many waiting tasks, beside other limiters.

use std::net::IpAddr;
use std::time::Duration;

use sluicegate::cli::{CommandError, Console, Exit};
use url::Url;

use crate::cores::Cores;
use crate::interruption::Interruption;
use crate::meter::RedisMeter;
use crate::report::LimiterReport;
use crate::server::PrivateServer;
use crate::{BenchError, print, seconds, sequence};

/// Wait for the last calls of stopped tasks, before the keys are removed.
const LAST_CALLS: Duration = Duration::from_millis(100);

#[derive(Clone, Debug, clap::Args)]
pub struct LimiterArgs {
    /// Measure this server instead of a private one; keys are under a random prefix and removed afterwards.
    #[arg(long, value_name = "URL")]
    redis: Option<String>,
    /// Allow a server on another machine; it will be busy.
    #[arg(long, requires = "redis")]
    yes: bool,
    /// Short rounds and small logs: to check that it runs, not for figures to publish.
    #[arg(long)]
    pub quick: bool,
    /// Seconds per figure and round. Default: 1.
    #[arg(long, value_name = "N", value_parser = seconds)]
    pub seconds: Option<f64>,
    /// Rounds; each figure is their median. Default: 3.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=100))]
    pub rounds: Option<u16>,
    /// Print the figures as JSON.
    #[arg(long)]
    json: bool,
    /// Print the page docs/benchmarks.md.
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
}

/// Runs the benchmark. A missed target is no error.
pub fn run(args: &LimiterArgs, console: &mut Console) -> Result<Exit, CommandError> {
    if let Some(url) = &args.redis {
        require_local_or_yes(url, args.yes)?;
    }
    // Before the runtime counts its cores.
    let cores = Cores::detect().filter(|cores| args.redis.is_none() && cores.leave_to_server());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(on_server(args, cores.map(|cores| cores.server), console));
    let report = report?;
    if args.json {
        console.json(&report)?;
    } else if args.markdown {
        print::markdown(&report, console)?;
    } else {
        print::tables(&report, console)?;
    }
    Ok(Exit::Success)
}

/// A remote server would be busy for minutes, so it needs `--yes`.
fn require_local_or_yes(url: &str, yes: bool) -> Result<(), CommandError> {
    // The error of a bad URL may quote it, password and all.
    let parsed = Url::parse(url).map_err(|_| CommandError::Usage("--redis is not a URL".to_owned()))?;
    let host = parsed.host_str().unwrap_or_default().trim_matches(['[', ']']);
    let is_local = matches!(parsed.scheme(), "unix" | "redis+unix")
        || host == "localhost"
        || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if is_local || yes {
        return Ok(());
    }
    let text =
        format!("--redis: {host} is not this machine, and the benchmark would keep it busy: add --yes to allow that");
    Err(CommandError::Usage(text))
}

/// Measures on a private server or the named one, and always cleans up.
async fn on_server(
    args: &LimiterArgs,
    core: Option<usize>,
    console: &mut Console,
) -> Result<LimiterReport, BenchError> {
    // Before anything is started that a signal must end.
    let mut interruption = Interruption::catch()?;
    let interrupted = interruption.wait();
    if let Some(url) = &args.redis {
        return on_named(args, url, interrupted, console).await;
    }
    let server = PrivateServer::start(core).await?;
    let (url, place) = (server.url(), server.info.clone());
    let (port, pid, directory) = (place.port, place.pid, place.directory.display());
    let printed = console.message(&format!("private redis-server on 127.0.0.1:{port}, process {pid}, in {directory}"));
    let measuring = async {
        printed?;
        sequence::measure(&RedisMeter::connect(&url).await?, args, &url, &prefix(), console).await
    };
    let ended = tokio::select! {
        measured = measuring => measured,
        () = interrupted => Err(BenchError::Interrupted),
    };
    server.stop().await?;
    Ok(LimiterReport { server: Some(place), ..ended? })
}

/// Measures on a named server. Afterwards its slow log setting is restored, and our keys are removed.
async fn on_named(
    args: &LimiterArgs,
    url: &str,
    interrupted: impl Future<Output = ()>,
    console: &mut Console,
) -> Result<LimiterReport, BenchError> {
    let (meter, prefix) = (RedisMeter::connect(url).await?, prefix());
    let threshold_us = meter.slow_log_threshold().await?;
    let ended = tokio::select! {
        measured = sequence::measure(&meter, args, url, &prefix, console) => measured,
        () = interrupted => Err(BenchError::Interrupted),
    };
    if ended.is_err() {
        // Stopped tasks may have one more call in flight.
        tokio::time::sleep(LAST_CALLS).await;
    }
    let restored = meter.log_slower_than(&threshold_us).await;
    let removed = meter.remove(&prefix).await;
    let report = ended?;
    restored.and(removed).map(|()| report)
}

fn prefix() -> String {
    format!("sluicegate-bench-{}", uuid::Uuid::now_v7())
}

/// The command that produces this report, without the URL, which may contain a password.
pub fn command_line(args: &LimiterArgs) -> String {
    let mut words = vec!["sluicegate-bench limiter".to_owned()];
    words.extend(args.redis.as_ref().map(|_| "--redis URL".to_owned()));
    words.extend(args.yes.then(|| "--yes".to_owned()));
    words.extend(args.quick.then(|| "--quick".to_owned()));
    words.extend(args.seconds.map(|seconds| format!("--seconds {seconds}")));
    words.extend(args.rounds.map(|rounds| format!("--rounds {rounds}")));
    words.extend(args.json.then(|| "--json".to_owned()));
    words.extend(args.markdown.then(|| "--markdown".to_owned()));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_server_needs_yes_and_hides_its_password() {
        for url in ["redis://localhost:1", "redis://127.0.0.1", "redis://[::1]:6379/0", "unix:///run/redis.sock"] {
            assert!(require_local_or_yes(url, false).is_ok(), "{url}");
        }
        for url in ["redis://app:hunter2@redis.example.com", "redis://app:hunter2@10.0.0.1:1", "hunter2"] {
            let refused = require_local_or_yes(url, false).unwrap_err();
            assert_eq!(refused.exit(), Exit::Usage);
            assert!(!refused.to_string().contains("hunter2"), "{refused}");
        }
        assert!(require_local_or_yes("redis://10.0.0.1", true).is_ok());
    }
}
