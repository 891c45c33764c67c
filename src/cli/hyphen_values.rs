//! Check for option names that were taken as values: ids (nanoid), accounts, references and reasons may begin with a
//! hyphen.
//!
//! clap accepts such values where an argument allows them, and then accepts an option as a value too. This module
//! rejects such a command line: `--account --json` lacks a value, and `jobs show --jsn` has a misspelt option.

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{Arg, Command};

/// Minimum similarity for a suggestion.
const SIMILARITY_MIN: f64 = 0.7;

/// The problem with the first option in a valid command line that was taken as a value: the option before it has no
/// value, or the command has no such option.
pub(super) fn find_option_as_value(root: &Command, arguments: &[OsString]) -> Option<(ErrorKind, String)> {
    let mut root = root.clone();
    // This adds the global options to every command.
    root.build();
    let mut command = &root;
    let mut words = arguments.iter().skip(1).filter_map(|word| word.to_str()).peekable();
    while let Some(word) = words.next() {
        if word == "--" {
            return None;
        }
        if let Some(below) = command.find_subcommand(word) {
            command = below;
            continue;
        }
        let Some((name, value)) = split_long_option(word) else { continue };
        let Some(option) = find_option(command, name) else {
            let takes_hyphens = command.get_positionals().any(Arg::is_allow_hyphen_values_set);
            if takes_hyphens {
                let similar = similar_option(command, name).map(|similar| format!("; did you mean {similar}?"));
                let similar = similar.unwrap_or_default();
                let text =
                    format!("there is no option {word}{similar}; if it is a value, write it after `--`: -- {word}");
                return Some((ErrorKind::UnknownArgument, text));
            }
            continue;
        };
        if value.is_some() || !option.get_action().takes_values() {
            continue;
        }
        let next = words.next()?;
        let is_option =
            |next: &str| split_long_option(next).is_some_and(|(name, _)| self::find_option(command, name).is_some());
        if option.is_allow_hyphen_values_set() && (next == "--" || is_option(next)) {
            let text =
                format!("{word} needs a value, and {next} is an option; if {next} is the value, write {word}={next}");
            return Some((ErrorKind::InvalidValue, text));
        }
    }
    None
}

/// `--name` or `--name=value`.
fn split_long_option(word: &str) -> Option<(&str, Option<&str>)> {
    let name = word.strip_prefix("--").filter(|name| !name.is_empty())?;
    Some(name.split_once('=').map_or((name, None), |(name, value)| (name, Some(value))))
}

fn find_option<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|option| option.get_long() == Some(name))
}

fn similar_option(command: &Command, name: &str) -> Option<String> {
    let names = command.get_arguments().filter_map(Arg::get_long);
    let close =
        names.map(|known| (strsim::jaro_winkler(known, name), known)).filter(|(close, _)| *close >= SIMILARITY_MIN);
    close.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, known)| format!("--{known}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory as _;

    use super::super::Cli;
    use super::*;

    /// Arguments whose values never begin with a hyphen, or for which `-` alone has a meaning (stdin). An argument that
    /// takes an id, an account, a reference or free text does not belong here: it has `allow_hyphen_values`.
    const NO_HYPHENS: &[&str] = &[
        "before",
        "burst",
        "busy_rate",
        "changes",
        "commit",
        "concurrency",
        "config",
        "cost",
        "currency",
        "decline_rate",
        "error_rate",
        "expires_at",
        "faults",
        "file",
        "history",
        "jobs",
        "lasting",
        "latency",
        "limit",
        "limits",
        "listen",
        "lost_answer_rate",
        "name",
        "not_before",
        "number",
        "numbers",
        "on_limit",
        "out",
        "partial_rate",
        "payload",
        "priority",
        "processes",
        "provider",
        "providers",
        "rate",
        "retention",
        "round_trip",
        "rule",
        "seed",
        "set",
        "start",
        "trace",
        "transit",
        "until",
        "url",
        "variant",
        "weight",
    ];

    fn parsed(line: &[&str]) -> Result<Cli, clap::Error> {
        Cli::from_arguments(["sluicegate"].iter().chain(line).map(Into::into))
    }

    fn commands(command: &Command, path: &str, all: &mut Vec<(String, Command)>) {
        let path = format!("{path} {}", command.get_name()).trim().to_owned();
        command.get_subcommands().for_each(|below| commands(below, &path, all));
        all.push((path, command.clone()));
    }

    #[test]
    fn every_argument_sets_allow_hyphen_values() {
        let mut all = Vec::new();
        commands(&Cli::command(), "", &mut all);
        let (mut undecided, mut unused): (BTreeSet<String>, BTreeSet<&str>) =
            (BTreeSet::new(), NO_HYPHENS.iter().copied().collect());
        for (path, command) in all {
            for argument in command.get_arguments().filter(|argument| argument.get_action().takes_values()) {
                let id = argument.get_id().as_str();
                let closed = !argument.get_possible_values().is_empty() || argument.is_allow_negative_numbers_set();
                unused.remove(id);
                if !closed && !argument.is_allow_hyphen_values_set() && !NO_HYPHENS.contains(&id) {
                    undecided.insert(format!("{path} {id}"));
                }
            }
        }
        assert!(undecided.is_empty() && unused.is_empty(), "{undecided:?} {unused:?}");
    }

    #[test]
    fn values_with_leading_hyphen_are_accepted() {
        const ID: &str = "-EwXN_y0nAZb";
        for line in [
            vec!["jobs", "show", ID],
            vec!["jobs", "show", ID, "--json"],
            vec!["jobs", "show", "--json", ID],
            vec!["jobs", "show", "--", "--EwXN"],
            vec!["jobs", "show", "-1"],
            vec!["jobs", "explain", ID],
            vec!["jobs", "cancel", ID, "--because", "-- see ticket 4711"],
            vec!["jobs", "resolve", ID, "--as", "succeeded", "--reference", "-ch_1", "--because", "--really"],
            vec!["jobs", "resolve", "--as=declined", "--because=--json", ID],
            vec!["jobs", "list", "--account", "-x", "--after", ID, "--json"],
            vec!["dlq", "show", ID],
            vec!["dlq", "discard", ID, "--yes"],
            vec!["jobs", "resolve", ID, "--as", "resend", "--confirm", ID],
            vec!["batches", "show", ID],
            vec!["dlq", "replay", "--because", "-", ID],
            vec!["limits", "peek", "acme", "--account", "--acct"],
            vec!["limits", "set", "acme", "second", "5/1s", "--because", "-50 %"],
            vec!["provider", "pause", "acme", "--because", "-"],
            vec![
                "enqueue",
                "--provider",
                "acme",
                "--amount",
                "1",
                "--currency",
                "EUR",
                "--id",
                ID,
                "--account",
                "-a",
                "--reference",
                "-r",
                "--idempotency-key",
                "-k",
            ],
        ] {
            assert!(parsed(&line).is_ok(), "{line:?}: {}", parsed(&line).unwrap_err());
        }
        let shown = format!("{:?}", parsed(&["jobs", "show", "--json", ID]).unwrap().command);
        assert!(shown.contains(ID) && shown.contains("json: true"), "{shown}");
    }

    #[test]
    fn option_is_never_used_as_value() {
        for (line, words) in [
            (vec!["jobs", "show", "--jsn", "p1"], "--jsn"),
            (vec!["jobs", "show", "--jsn"], "did you mean --json?"),
            (vec!["dlq", "discard", "--yess", "--yes"], "did you mean --yes?"),
            (vec!["jobs", "list", "--account", "--json"], "--account needs a value, and --json is an option"),
            (vec!["jobs", "cancel", "p1", "--because", "--json"], "write --because=--json"),
            (vec!["jobs", "cancel", "p1", "--because", "--set", "log.level=warn"], "--because needs a value"),
            (vec!["jobs", "list", "--after", "--"], "--after needs a value"),
            (vec!["jobs", "show", "-EwXN", "-second"], "unexpected argument"),
            (vec!["jobs", "show"], "required"),
        ] {
            let error = parsed(&line).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line:?}");
            assert!(error.to_string().contains(words), "{line:?}: {error}");
        }
        assert_eq!(parsed(&["jobs", "show", "-h"]).unwrap_err().kind(), ErrorKind::DisplayHelp);
        assert_eq!(parsed(&["jobs", "show", "--help"]).unwrap_err().kind(), ErrorKind::DisplayHelp);
    }
}
