//! The `init` command: writes a provider file with comments, as the start for a row of one's own.
//!
//! The file is complete: `provider apply` reads it as it is. An existing file stays as it is, because it holds the
//! limits that were agreed with a provider.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;

use super::{CommandError, Console, Exit};
use crate::domain::limit::Rate;
use crate::domain::provider::ProviderName;

/// The file for provider `acme`, which allows 10 requests per second.
const FILE: &str = include_str!("init.provider.toml");
const URL: &str = "https://api.acme.example/v1/charges";

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The file to write.
    #[arg(default_value = "providers.toml")]
    file: PathBuf,
    /// Name of the provider.
    #[arg(long, default_value = "acme", value_parser = parse_name)]
    provider: ProviderName,
    /// Address of its charges. Default: one of an example.
    #[arg(long, default_value = URL)]
    url: String,
    /// What the provider allows.
    #[arg(long, value_name = "N/DURATION", default_value = "10/1s")]
    limit: Rate,
}

fn parse_name(text: &str) -> Result<ProviderName, String> {
    ProviderName::new(text).map_err(|problem| problem.to_string())
}

/// Runs the command.
///
/// # Errors
/// When the file exists, or cannot be written.
pub fn run(args: &Args, console: &mut Console) -> Result<Exit, CommandError> {
    if args.limit.window().is_zero() {
        return Err(CommandError::Usage("--limit: write N/DURATION, such as 10/1s".to_owned()));
    }
    let path = args.file.display();
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::AlreadyExists => {
            CommandError::Failed(format!("{path} exists and stays as it is: give `init` another file name"))
        }
        _ => CommandError::Failed(format!("{path}: {error}")),
    };
    let mut file = OpenOptions::new().write(true).create_new(true).open(&args.file).map_err(failed)?;
    file.write_all(text(args).as_bytes()).map_err(failed)?;
    console.message(&format!(
        "wrote {path}. Correct it, then: sluicegate provider apply {path} --dry-run, and without --dry-run"
    ))?;
    Ok(Exit::Success)
}

fn text(args: &Args) -> String {
    let url = toml::Value::String(args.url.clone()).to_string();
    FILE.replace("\"https://api.acme.example/v1/charges\"", &url)
        .replace("name = \"acme\"", &format!("name = \"{}\"", args.provider))
        .replace("max_requests = 10\n", &format!("max_requests = {}\n", args.limit.max_requests()))
        .replace("window_ms = 1000\n", &format!("window_ms = {}\n", args.limit.window().as_millis()))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::console::TableShape;
    use crate::ledger::provider_row::parse_provider_file;

    #[derive(Parser)]
    struct TestCommand {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &[&str]) -> Args {
        TestCommand::try_parse_from([&["x"][..], line].concat()).unwrap().args
    }

    #[test]
    fn the_written_file_is_a_valid_row() {
        let url = "http://127.0.0.1:9000/\"quoted\"";
        let args = parse(&["--provider", "bolt", "--url", "https://pay.example/c", "--limit", "600/1m"]);
        let rows = parse_provider_file(&text(&args)).unwrap();
        let [row] = rows.as_slice() else { panic!("{}", text(&args)) };
        let provider = row.validate(1).unwrap();
        assert_eq!((row.name.as_str(), row.url.as_str()), ("bolt", "https://pay.example/c"));
        assert_eq!((row.limits[0].max_requests, row.limits[0].window_ms), (600, 60_000));
        assert!(provider.idempotency_retention.is_some());
        let quoted = parse_provider_file(&text(&parse(&["--url", url]))).unwrap();
        assert_eq!(quoted[0].url, url);
        // Every column that is written with a value, or offered as a comment, exists.
        let offered: String = text(&args).lines().map(uncommented).collect();
        parse_provider_file(&offered).unwrap_or_else(|problem| panic!("{problem:?}\n{offered}"));
    }

    /// A line of TOML that is commented out, as it is without the comment's sign.
    fn uncommented(line: &str) -> String {
        let code = line.strip_prefix("#? ").unwrap_or(line);
        format!("{code}\n")
    }

    #[test]
    fn an_existing_file_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("mine.toml");
        let args = Args { file: file.clone(), ..parse(&[]) };
        let console = || Console::new(Box::new(std::io::sink()), Box::new(std::io::sink()), TableShape::Plain);
        assert_eq!(run(&args, &mut console()).unwrap(), Exit::Success);
        std::fs::write(&file, "mine").unwrap();
        let refused = run(&args, &mut console()).unwrap_err();
        assert!(refused.to_string().contains("exists and stays as it is"), "{refused}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
    }
}
