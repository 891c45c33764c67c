//! The colours of tables and errors at a terminal: which output has them, and which words get one.
//!
//! Colours only repeat what a word says. A full limit is the goal, so it has none.

const BOLD: &str = "\u{1b}[1m";
const DIM: &str = "\u{1b}[2m";
const RED: &str = "\u{1b}[31m";
const GREEN: &str = "\u{1b}[32m";
const YELLOW: &str = "\u{1b}[33m";
const RESET: &str = "\u{1b}[0m";

/// Cells that have a colour, as whole cells.
const CELLS: [(&str, &[&str]); 3] = [
    (GREEN, &["ok", "running", "succeeded"]),
    (YELLOW, &["paused", "review", "unknown", "warning"]),
    (RED, &["absent", "BROKEN", "dead", "error", "invalid", "lost", "stopped"]),
];

/// The outputs that have colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Colours {
    pub out: bool,
    pub err: bool,
}

impl Colours {
    /// Colours on the outputs that are terminals, unless the environment turns them off.
    pub fn of_terminals(out: bool, err: bool) -> Self {
        let variable = |name| std::env::var(name).unwrap_or_default();
        let wanted = are_wanted(&variable("NO_COLOR"), &variable("TERM"));
        Self { out: out && wanted, err: err && wanted }
    }
}

/// <https://no-color.org>: any value but the empty one.
fn are_wanted(no_color: &str, terminal: &str) -> bool {
    no_color.is_empty() && terminal != "dumb"
}

pub fn error(label: &str) -> String {
    format!("{BOLD}{RED}{label}{RESET}")
}

/// The lines of a table with a bold header, a dim rule, and coloured states. Their text is printable.
pub fn paint_table<L: AsRef<str>>(lines: &[L]) -> Vec<String> {
    let is_rule = |line: &str| !line.trim().is_empty() && line.trim().chars().all(|c| c == '─' || c == ' ');
    // Without a rule, the first line alone is the header.
    let header = lines.iter().take(4).position(|line| is_rule(line.as_ref())).unwrap_or(1);
    let paint = |(number, line): (usize, &L)| match line.as_ref() {
        line if is_rule(line) => format!("{DIM}{line}{RESET}"),
        line if number < header => format!("{BOLD}{line}{RESET}"),
        line => paint_cells(line),
    };
    lines.iter().enumerate().map(paint).collect()
}

/// Colours the cells of one line. Two blanks or more are between two cells.
fn paint_cells(line: &str) -> String {
    let (mut painted, mut rest) = (String::new(), line);
    while !rest.is_empty() {
        let (gap, after) = rest.split_at(rest.len() - rest.trim_start_matches(' ').len());
        let (cell, next) = after.split_at(after.find("  ").unwrap_or(after.len()));
        painted.push_str(gap);
        match CELLS.iter().find(|(_, words)| words.contains(&cell.trim_end())) {
            Some((colour, _)) => painted.extend([*colour, cell, RESET]),
            None => painted.push_str(cell),
        }
        rest = next;
    }
    painted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_rule_and_states_are_painted() {
        let table =
            [" name   state    reason", "────────────────────────", " acme   dead     a dead end", " bolt   running"];
        assert_eq!(
            paint_table(&table),
            [
                "\u{1b}[1m name   state    reason\u{1b}[0m",
                "\u{1b}[2m────────────────────────\u{1b}[0m",
                " acme   \u{1b}[31mdead\u{1b}[0m     a dead end",
                " bolt   \u{1b}[32mrunning\u{1b}[0m",
            ]
        );
        let without = |lines: Vec<String>| {
            let text = lines.join("\n");
            [BOLD, DIM, RED, GREEN, YELLOW, RESET].iter().fold(text, |text, code| text.replace(*code, ""))
        };
        assert_eq!(without(paint_table(&table)), table.join("\n"), "colours change no text");
        assert!(paint_table::<&str>(&[]).is_empty());
    }

    #[test]
    fn environment_turns_colours_off() {
        assert!(are_wanted("", "xterm-256color") && are_wanted("", ""));
        assert!(!are_wanted("1", "xterm") && !are_wanted("", "dumb"));
        assert_eq!(Colours::of_terminals(false, false), Colours::default());
    }
}
