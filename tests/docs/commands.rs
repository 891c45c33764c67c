//! Command lines of `sluicegate` in pages, configuration files and the compose file: each parses as one of this
//! program.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::SocketAddr;

use clap::CommandFactory as _;
use sluicegate::cli::{Cli, Exit};

use crate::page::{Page, plain};

/// The command lines in a piece of shell: after variables, before pipes, redirections and `&`.
fn command_lines(shell: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for line in shell.lines() {
        let mut words = words(line).into_iter().peekable();
        let mut starts = true;
        while let Some(word) = words.next() {
            if starts && (word == "sluicegate" || word == "cargo-run") {
                let end = |word: &String| !["|", "&", "&&", ";", ">", "2>"].contains(&word.as_str());
                let mut command = vec!["sluicegate".to_owned()];
                while let Some(argument) = words.next_if(end) {
                    command.push(argument);
                }
                found.push(command);
            }
            let assignment = word.split_once('=').is_some_and(|(name, _)| name.chars().all(is_variable));
            starts = ["|", "&&", ";", "export"].contains(&word.as_str()) || (starts && assignment);
        }
    }
    found
}

fn is_variable(c: char) -> bool {
    c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'
}

/// Words of a shell line with simple quotes; a comment ends it.
fn words(line: &str) -> Vec<String> {
    let line = line.replace("cargo run --release -- ", "cargo-run ");
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '\'' | '"') => quote = Some(c),
            (None, '#') if word.is_empty() => break,
            (None, c) if c.is_whitespace() => words.extend((!word.is_empty()).then(|| std::mem::take(&mut word))),
            (_, c) => word.push(c),
        }
    }
    words.extend((!word.is_empty()).then_some(word));
    words
}

fn parse(command: &[String]) -> Result<(), String> {
    use clap::error::ErrorKind::{DisplayHelpOnMissingArgumentOrSubcommand, MissingRequiredArgument};
    match Cli::from_arguments(command.iter().map(OsString::from)) {
        Ok(_) => Ok(()),
        Err(error) if error.exit_code() == 0 => Ok(()),
        // Prose may name a command without its arguments.
        Err(error) if error.kind() == DisplayHelpOnMissingArgumentOrSubcommand => Ok(()),
        Err(error) if error.kind() == MissingRequiredArgument && is_a_name(&command[1..]) => Ok(()),
        Err(error) => Err(format!("{}: {error}", command.join(" "))),
    }
}

/// Whether the words are only a command's name.
fn is_a_name(words: &[String]) -> bool {
    let mut command = Cli::command();
    words.iter().all(|word| match command.find_subcommand(word).cloned() {
        Some(found) => {
            command = found;
            true
        }
        None => false,
    })
}

#[test]
fn every_command_line_parses() {
    let mut lines = Vec::new();
    for page in Page::all() {
        let shells = page.blocks_of("sh").into_iter().chain(page.spans());
        lines.extend(shells.flat_map(|shell| command_lines(&shell)));
    }
    for path in ["config/default.toml", "config/example.production.toml", "config/providers.example.toml"] {
        let comments =
            Page::read(path).text.lines().filter_map(|line| line.strip_prefix('#')).collect::<Vec<_>>().join("\n");
        let spans = comments.split('`').skip(1).step_by(2).collect::<Vec<_>>().join("\n");
        lines.extend(command_lines(&comments).into_iter().chain(command_lines(&spans)));
    }
    assert!(lines.len() > 25, "command lines were not found: {lines:?}");
    let wrong: Vec<String> = lines.iter().filter_map(|line| parse(line).err()).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_table_of_commands_is_complete() {
    let rows = Page::read("docs/commands.md").table("# Commands", "command");
    let documented: BTreeSet<String> = rows
        .iter()
        .map(|row| row[0].strip_prefix("`sluicegate ").unwrap().split([' ', '`']).next().unwrap().to_owned())
        .collect();
    let commands = Cli::command();
    assert_eq!(documented, commands.get_subcommands().map(|command| command.get_name().to_owned()).collect());
}

/// Two faults made the compose file fail: an unknown argument, and an address without `--expose`.
#[test]
fn the_compose_file_runs_commands_that_start() {
    let compose = Page::read("docker-compose.yml").text;
    let ours = |line: &&str| line.contains(r#"["run""#) || line.contains(r#"["fake-provider""#);
    let commands: Vec<Vec<String>> = compose
        .lines()
        .filter_map(|line| line.trim().strip_prefix("command: ").filter(ours))
        .map(|list| {
            let list: Vec<String> = serde_json::from_str(list).unwrap();
            ["sluicegate".to_owned()].into_iter().chain(list).collect()
        })
        .collect();
    assert_eq!(commands.len(), 3, "a worker and two fake providers");
    for command in &commands {
        parse(command).unwrap();
        let listen = command.iter().skip_while(|word| *word != "--listen").nth(1);
        let reachable = listen.is_some_and(|at| !at.parse::<SocketAddr>().unwrap().ip().is_loopback());
        assert_eq!(reachable, command.contains(&"--expose".to_owned()), "{command:?}");
    }
    let setup = compose.lines().find_map(|line| line.split_once(r#"["sh", "-c", ""#)).unwrap().1;
    let commands = command_lines(setup.trim_end_matches("\"]"));
    assert_eq!(commands.len(), 2, "{commands:?}");
    commands.iter().for_each(|command| parse(command).unwrap());
}

#[test]
fn the_exit_codes_are_those_of_the_program() {
    let usage = Cli::from_arguments(["sluicegate", "--no-such-flag"].map(OsString::from)).unwrap_err().exit_code();
    let mut codes: Vec<i32> =
        [Exit::Success, Exit::Failed, Exit::BadConfiguration].map(|exit| i32::from(exit.code())).to_vec();
    codes.push(usage);
    codes.sort_unstable();
    let rows = Page::read("docs/commands.md").table("## Exit codes", "code");
    let documented: Vec<i32> = rows.iter().map(|row| plain(&row[0]).parse().unwrap()).collect();
    assert_eq!(documented, codes);
    let help = Cli::command().render_long_help().to_string();
    let listed = help.lines().find(|line| line.starts_with("Exit codes: ")).unwrap();
    codes.iter().for_each(|code| assert!(listed.contains(&format!("{code} ")), "{listed}"));
}

#[test]
fn command_lines_are_found_and_wrong_ones_refused() {
    let shell = "# sluicegate not\nA_B=1 sluicegate run\nseq 3 | sluicegate enqueue --file - &\n\
                 cargo run --release -- demo\necho sluicegate\nsluicegate a && sluicegate b 'c d'";
    let found: Vec<String> = command_lines(shell).into_iter().map(|words| words[1..].join(" ")).collect();
    assert_eq!(found, ["run", "enqueue --file -", "demo", "a", "b c d"]);
    for wrong in ["sluicegate runn", "sluicegate demo --limit 100", "sluicegate limits set acme per-second"] {
        assert!(parse(&words(wrong)).is_err(), "{wrong}");
    }
}
