//! The `fake-provider` command: a strict provider for rehearsals, on its own port.
//!
//! It listens on other than loopback addresses only with `--expose`: it has no authentication and keeps everything that
//! it receives.

use std::io::Write as _;
use std::net::SocketAddr;

use clap::Args;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::os::Signals;
use super::{CommandError, Console};
use crate::domain::printable::printable_json;
use crate::provider::simulated::{FakeOptions, FakeProvider, FakeProviderReport};

/// Arguments of `fake-provider`.
#[derive(Args, Clone, Debug)]
pub struct FakeProviderArgs {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:9000")]
    listen: SocketAddr,
    /// Allow an address that other machines can reach.
    #[arg(long)]
    expose: bool,
    #[command(flatten)]
    options: FakeOptions,
    /// Print the report as JSON, which is always the case.
    #[arg(long)]
    json: bool,
}

/// Serves until a stop signal, then prints the report as JSON on stdout. A second signal ends the process even if the
/// report is unread.
///
/// # Errors
/// When the address is not allowed or taken, or the listener fails.
pub async fn run(args: FakeProviderArgs, console: &mut Console) -> Result<(), CommandError> {
    // Before the address is announced: its reader may send a signal at once.
    let mut signals = Signals::watch()?;
    let listener = listen(&args).await?;
    console.message(&format!("fake provider listening on http://{}", listener.local_addr()?))?;
    let report = serve(&args, listener, async {
        signals.wait_for_stop().await;
    });
    let report = serde_json::to_string_pretty(&report.await?).map_err(to_command_error)?;
    let printed = tokio::task::spawn_blocking(move || writeln!(std::io::stdout(), "{}", printable_json(&report)));
    tokio::select! {
        printed = printed => Ok(printed.map_err(to_command_error)??),
        signal = signals.wait_for_stop() => Err(CommandError::Failed(format!("{signal}: the report was not read"))),
    }
}

async fn listen(args: &FakeProviderArgs) -> Result<TcpListener, CommandError> {
    if !args.listen.ip().is_loopback() && !args.expose {
        let text = format!("--listen {}: other machines could reach it; add --expose to allow that", args.listen);
        return Err(CommandError::Usage(text));
    }
    let refused = |error| CommandError::Failed(format!("--listen {}: {error}", args.listen));
    TcpListener::bind(args.listen).await.map_err(refused)
}

async fn serve(
    args: &FakeProviderArgs,
    listener: TcpListener,
    stopped: impl Future<Output = ()>,
) -> Result<FakeProviderReport, CommandError> {
    let fake = FakeProvider::new(args.options.clone());
    let (handle, stop) = (fake.handle(), CancellationToken::new());
    let serving = fake.serve(listener, stop.clone());
    tokio::pin!(serving);
    tokio::select! {
        ended = &mut serving => ended.map_err(to_command_error)?,
        () = stopped => {
            stop.cancel();
            serving.await.map_err(to_command_error)?;
        }
    }
    Ok(handle.report())
}

fn to_command_error(error: impl std::fmt::Display) -> CommandError {
    CommandError::Failed(error.to_string())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::*;
    use crate::provider::simulated::{AccountStatus, OnLimit};

    #[derive(Parser)]
    struct TestCommand {
        #[command(flatten)]
        args: FakeProviderArgs,
    }

    fn parse(line: &str) -> Result<FakeProviderArgs, clap::Error> {
        TestCommand::try_parse_from(line.split_whitespace()).map(|line| line.args)
    }

    #[test]
    fn arguments_become_options() {
        let line = "x --limit 100/1s --limit 600/1m --concurrency 5 --latency 5ms..1s --error-rate 0.25 \
                    --busy-rate 0.5 --partial-rate 0.125 --account-status acct_7=403 --no-dedupe --no-lookup --retention 1h --seed 9 --on-limit count";
        let options = parse(line).unwrap().options;
        let wanted = FakeOptions {
            limits: vec!["100/1s".parse().unwrap(), "600/1m".parse().unwrap()],
            concurrency: Some(5),
            on_limit: OnLimit::Count,
            latency: (Duration::from_millis(5), Duration::from_secs(1)),
            error_rate: 0.25,
            busy_rate: 0.5,
            partial_rate: 0.125,
            deduplicate: false,
            retention: Some(Duration::from_secs(3_600)),
            lookup: false,
            account_statuses: vec![AccountStatus { account: "acct_7".to_owned(), status: 403 }],
            seed: 9,
            ..FakeOptions::default()
        };
        assert_eq!(options, wanted);
        let plain = parse("x --latency 0ms").unwrap();
        assert_eq!(
            (plain.options.clone(), plain.listen.to_string().as_str()),
            (FakeOptions::default(), "127.0.0.1:9000")
        );
        for bad in [
            "--limit 100",
            "--latency 2s..1s",
            "--error-rate 1.5",
            "--error-rate NaN",
            "--on-limit maybe",
            "--account-status a=200",
        ] {
            assert!(parse(&format!("x {bad}")).is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn listens_beyond_loopback_only_when_exposed() {
        let listens = async |line: &str| listen(&parse(line).unwrap()).await;
        let refused = listens("x --listen 0.0.0.0:0").await.unwrap_err();
        assert!(refused.to_string().contains("--expose"), "{refused}");
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let line = format!("x --listen {}", taken.local_addr().unwrap());
        assert!(listens(&line).await.unwrap_err().to_string().contains("--listen"));
    }

    #[tokio::test]
    async fn prints_its_report_at_the_end() {
        let args = parse("x --listen 127.0.0.1:0 --limit 1/1s").unwrap();
        let report = serve(&args, listen(&args).await.unwrap(), async {}).await.unwrap();
        assert_eq!((report.requests, report.limits[0].limit.as_str()), (0, "1/1s"));
    }
}
