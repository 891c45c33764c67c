//! The output of a command: data on stdout, messages on stderr, and tables that fit the terminal and are plain in a
//! pipe.
//!
//! Every text passes [`printable`] here, so no command can show a hidden character; in JSON they are escaped. Colours
//! ([`colour`]) are for tables and errors at a terminal alone.

use std::borrow::Cow;
use std::io::{self, BufRead, IsTerminal as _, Write};

use comfy_table::{ColumnConstraint, ContentArrangement, LineStyle, Table, TableStyle, Width, presets};
use serde::Serialize;

use super::CommandError;
use super::colour::{self, Colours};
use crate::domain::printable::{printable, printable_json};

/// Longest cell that stays on one line if there is room, in characters.
const UNBROKEN_CELL_MAX: usize = 24;
const COLUMN_CHARS_MIN: usize = 10;
/// Blanks beside a cell plus the blank between two cells.
const PADDING: usize = 3;
/// A line below the header and none between rows: the cells of the first column show where a row begins.
const HEADER_RULE_ONLY: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// The shape of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableShape {
    /// Columns separated by blanks, one line per row, nothing cut or wrapped: for pipes.
    Plain,
    /// Wrapped to the width in columns; `None`: the terminal's width.
    Terminal { width: Option<u16> },
}

/// Output of one command.
pub struct Console {
    out: Box<dyn Write + Send>,
    err: Box<dyn Write + Send>,
    shape: TableShape,
    colours: Colours,
    /// Where answers to questions come from; `None`: no terminal to ask at.
    input: Option<Box<dyn BufRead + Send>>,
    /// Whether the command has written its one JSON document.
    has_document: bool,
    /// Whether progress may be drawn on stderr.
    pub draws_progress: bool,
    /// The command line, the program's name first.
    pub(super) command_line: Vec<String>,
}

impl Console {
    pub fn new(out: Box<dyn Write + Send>, err: Box<dyn Write + Send>, shape: TableShape) -> Self {
        let colours = Colours::default();
        let command_line = vec!["sluicegate".to_owned()];
        Self { out, err, shape, colours, input: None, has_document: false, draws_progress: false, command_line }
    }

    /// Reads answers from here, as from a terminal.
    pub fn with_input(self, answers: Box<dyn BufRead + Send>) -> Self {
        Self { input: Some(answers), ..self }
    }

    /// Standard output of this process, with messages written to `err` instead of standard error.
    pub fn with_messages_to(err: Box<dyn Write + Send>) -> Self {
        let stdio = Self::stdio();
        Self { err, colours: Colours { err: false, ..stdio.colours }, ..stdio }
    }

    /// Standard output and error of this process.
    pub fn stdio() -> Self {
        let shape = if io::stdout().is_terminal() { TableShape::Terminal { width: None } } else { TableShape::Plain };
        let out = Box::new(io::BufWriter::new(io::stdout()));
        let is_asked = io::stdin().is_terminal() && io::stderr().is_terminal();
        let input = is_asked.then(|| Box::new(io::BufReader::new(io::stdin())) as Box<dyn BufRead + Send>);
        let draws_progress = io::stderr().is_terminal();
        let colours = Colours::of_terminals(io::stdout().is_terminal(), draws_progress);
        let command_line = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
        Self { colours, input, draws_progress, command_line, ..Self::new(out, Box::new(io::stderr()), shape) }
    }

    /// Where raw data goes (scripts, manual pages).
    pub fn data(&mut self) -> &mut (dyn Write + Send) {
        &mut self.out
    }

    /// Writes one line of data, with hidden characters escaped.
    pub fn line(&mut self, text: &str) -> io::Result<()> {
        writeln!(self.out, "{}", printable(text))
    }

    /// Writes data that is already in lines. Foreign text in it must be [`printable`], or it can add lines.
    pub fn lines(&mut self, text: &str) -> io::Result<()> {
        text.split('\n').try_for_each(|line| self.line(line))
    }

    /// Writes one JSON document of data.
    pub fn json(&mut self, value: &impl Serialize) -> io::Result<()> {
        self.has_document = true;
        writeln!(self.out, "{}", printable_json(&serde_json::to_string_pretty(value)?))
    }

    /// Writes the error of a failed command as JSON, unless the command has written its document: stdout holds one
    /// document.
    pub fn json_error(&mut self, error: &str) -> io::Result<()> {
        if self.has_document {
            return Ok(());
        }
        self.json_line(&serde_json::json!({ "error": error }))?;
        self.out.flush()
    }

    /// Writes one JSON document on one line, for a stream of documents.
    pub fn json_line(&mut self, value: &impl Serialize) -> io::Result<()> {
        writeln!(self.out, "{}", printable_json(&serde_json::to_string(value)?))
    }

    /// Writes a table of data.
    pub fn table(&mut self, header: &[&str], rows: &[Vec<String>]) -> io::Result<()> {
        let text = render_table(header, rows, self.shape);
        self.table_text(&text)
    }

    /// Writes a table that is laid out already. Foreign text in it must be [`printable`], or it can add lines.
    pub fn table_text(&mut self, text: &str) -> io::Result<()> {
        let text = self.painted(text);
        writeln!(self.out, "{text}")
    }

    /// A table that is laid out already, with colours where this output has them. Hidden characters are escaped.
    pub fn painted(&self, text: &str) -> String {
        // Escaped first: a control sequence of a cell is never written.
        let lines: Vec<_> = text.split('\n').map(printable).collect();
        if self.colours.out { colour::paint_table(&lines).join("\n") } else { lines.join("\n") }
    }

    pub fn shape(&self) -> TableShape {
        self.shape
    }

    /// Height of the terminal in lines; `None` if there is no terminal or it reports no height.
    pub fn height(&self) -> Option<usize> {
        match self.shape {
            TableShape::Terminal { width: None } => {
                terminal_size::terminal_size().map(|(_, height)| usize::from(height.0))
            }
            TableShape::Plain | TableShape::Terminal { width: Some(_) } => None,
        }
    }

    /// Writes control sequences to the terminal; only if [`Console::shape`] says that there is one.
    pub fn raw(&mut self, text: &str) -> io::Result<()> {
        self.out.write_all(text.as_bytes())?;
        self.out.flush()
    }

    /// Writes one message to stderr, on one line, after the data before it.
    pub fn message(&mut self, text: &str) -> io::Result<()> {
        let flushed = self.out.flush();
        // One write, so that the message is written or dropped as a whole and not mixed with log lines.
        self.err.write_all(format!("{}\n", printable(text)).as_bytes())?;
        flushed
    }

    /// Writes to stderr why a command failed, after the data before it: `error: …`.
    pub fn error(&mut self, error: &CommandError) -> io::Result<()> {
        let flushed = self.out.flush();
        let lines: Vec<_> = error.lines().iter().map(|line| printable(line).into_owned()).collect();
        let label = if self.colours.err { colour::error("error:") } else { "error:".to_owned() };
        self.err.write_all(format!("{label} {}\n", lines.join("\n")).as_bytes())?;
        flushed
    }

    /// Asks on stderr whether to continue; only `y` or `yes` confirms. `None`: there is no terminal to ask at.
    pub fn confirm(&mut self, question: &str) -> io::Result<Option<bool>> {
        let answer = self.ask(&format!("{question} [y/N]"))?;
        Ok(answer.map(|answer| answer.eq_ignore_ascii_case("y") || answer.eq_ignore_ascii_case("yes")))
    }

    /// Asks on stderr for a text. `None`: there is no terminal to ask at.
    pub fn ask(&mut self, question: &str) -> io::Result<Option<String>> {
        let Some(answers) = &mut self.input else { return Ok(None) };
        write!(self.err, "{} ", printable(question))?;
        self.err.flush()?;
        let mut answer = String::new();
        answers.read_line(&mut answer)?;
        Ok(Some(answer.trim().to_owned()))
    }

    /// Writes what is still buffered.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()?;
        self.err.flush()
    }
}

/// Width of a shape in columns; `None`: unlimited.
pub fn width(shape: TableShape) -> Option<usize> {
    match shape {
        TableShape::Plain => None,
        TableShape::Terminal { width } => known_columns(width).map(usize::from),
    }
}

/// A terminal that does not know its size reports 0.
fn known_columns(width: Option<u16>) -> Option<u16> {
    width.or_else(|| Table::new().width()).filter(|columns| *columns > 0)
}

/// Wraps a line between words, and breaks a word that is longer than a line; the following lines are indented to its
/// text.
pub fn wrap_words(indent: &str, text: &str, width: Option<usize>) -> String {
    let text = printable(text);
    let under = " ".repeat(indent.chars().count());
    let (mut lines, mut line) = (Vec::new(), indent.to_owned());
    let mut chars = indent.chars().count();
    let word_max = width.map_or(usize::MAX, |width| width.saturating_sub(under.len() + 1).max(1));
    for word in text.split(' ').flat_map(|word| pieces(word, word_max)) {
        let more = word.chars().count() + 1;
        if width.is_some_and(|width| chars + more > width) && line.trim() != indent.trim() {
            lines.push(line.trim_end().to_owned());
            (line, chars) = (under.clone(), under.len());
        }
        line.push_str(&word);
        line.push(' ');
        chars += more;
    }
    lines.push(line.trim_end().to_owned());
    lines.join("\n")
}

/// A word in pieces of at most so many characters.
fn pieces(word: &str, most: usize) -> Vec<String> {
    if word.chars().count() <= most {
        return vec![word.to_owned()];
    }
    let chars: Vec<char> = word.chars().collect();
    chars.chunks(most).map(|piece| piece.iter().collect()).collect()
}

/// `1,234,567`.
pub fn group_thousands(count: u64) -> String {
    let digits = count.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(|group| String::from_utf8_lossy(group).into_owned());
    groups.collect::<Vec<_>>().join(",")
}

/// Lays out a table.
pub fn render_table(header: &[&str], rows: &[Vec<String>], shape: TableShape) -> String {
    let rows: Vec<Vec<Cow<'_, str>>> =
        rows.iter().map(|row| row.iter().map(|cell| printable(cell)).collect()).collect();
    let mut table = Table::new();
    table.set_header(header.iter().copied());
    table.add_rows(&rows);
    match shape {
        TableShape::Plain => {
            table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        }
        TableShape::Terminal { width } => {
            let width = known_columns(width);
            let arrangement = width.map_or(ContentArrangement::Disabled, |_| ContentArrangement::Dynamic);
            table.load_style(HEADER_RULE_ONLY).set_content_arrangement(arrangement);
            if let Some(width) = width {
                table.set_width(width);
                keep_short_cells_unbroken(&mut table, header, &rows, usize::from(width));
            }
        }
    }
    table.trim_fmt()
}

/// Keeps short cells on one line, shortest columns first, while every other column has room for its longest word: a
/// name or a time that is broken in the middle cannot be read.
fn keep_short_cells_unbroken(table: &mut Table, header: &[&str], rows: &[Vec<Cow<'_, str>>], width: usize) {
    let of = |index: usize, length: fn(&str) -> usize| {
        let cells = rows.iter().filter_map(|row| row.get(index)).map(|cell| length(cell));
        cells.chain(header.get(index).map(|title| length(title))).max().unwrap_or(0)
    };
    let mut columns: Vec<(usize, usize)> =
        (0..header.len()).map(|index| (of(index, |cell| cell.chars().count()), index)).collect();
    columns.sort_unstable();
    let least_by = |word: fn(&str) -> usize| -> Vec<usize> {
        let least = |(content, index): &(usize, usize)| {
            (*content).min(COLUMN_CHARS_MIN.max(of(*index, word).min(UNBROKEN_CELL_MAX))) + PADDING
        };
        columns.iter().map(least).collect()
    };
    // In a narrow terminal an instant may be broken at its blank, and in a very narrow one each word.
    let fit = [longest_word as fn(&str) -> usize, longest_part].map(&least_by);
    let fit = fit.into_iter().find(|least| least.iter().sum::<usize>() <= width);
    let fits = fit.is_some();
    let least = fit.unwrap_or_else(|| least_by(|_| 0));
    let (mut left, mut taken) = (least.iter().sum::<usize>(), 0);
    for ((content, index), least) in columns.into_iter().zip(least) {
        left -= least;
        let is_whole = content <= UNBROKEN_CELL_MAX && taken + content + PADDING + left <= width;
        taken += if is_whole { content + PADDING } else { least };
        let constraint = if is_whole {
            ColumnConstraint::ContentWidth
        } else if fits {
            // With the blanks beside the cell, without the one between two cells.
            ColumnConstraint::LowerBoundary(Width::Fixed(u16::try_from(least - 1).unwrap_or(u16::MAX)))
        } else {
            continue;
        };
        if let Some(column) = table.column_mut(index) {
            column.set_constraint(constraint);
        }
    }
}

/// Length of the longest word of a cell. An instant with its blank is one word: `2026-11-22 03:58:40`.
fn longest_word(cell: &str) -> usize {
    let is_date = |word: &str| word.len() == 10 && word.bytes().enumerate().all(|(at, b)| is_date_byte(at, b));
    let mut words = cell.split(' ').peekable();
    let mut longest = 0;
    while let Some(word) = words.next() {
        let time = words.next_if(|next| is_date(word) && next.contains(':'));
        longest = longest.max(word.chars().count() + time.map_or(0, |time| time.chars().count() + 1));
    }
    longest
}

fn longest_part(cell: &str) -> usize {
    cell.split(' ').map(|word| word.chars().count()).max().unwrap_or(0)
}

fn is_date_byte(at: usize, byte: u8) -> bool {
    if matches!(at, 4 | 7) { byte == b'-' } else { byte.is_ascii_digit() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_plain_in_pipe_and_fits_terminal() {
        let rows = [vec!["acme".to_owned(), "https://pay.example.com/a/rather/long/path".to_owned()]];
        let plain = render_table(&["name", "url"], &rows, TableShape::Plain);
        let words: Vec<Vec<&str>> = plain.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words, [vec!["name", "url"], vec!["acme", "https://pay.example.com/a/rather/long/path"]]);
        let narrow = render_table(&["name", "url"], &rows, TableShape::Terminal { width: Some(30) });
        let hostile = vec![vec!["\u{1b}]0;owned\u{7}".to_owned(), "a\nb\tc\u{202e}".to_owned()]];
        let hostile = render_table(&["name", "url"], &hostile, TableShape::Plain);
        assert!(hostile.lines().count() == 2 && hostile.contains("\\u{1b}]0;owned\\u{7}"), "{hostile}");
        assert!(hostile.contains("a\\nb\\tc\\u{202e}"), "{hostile}");
        assert!(narrow.lines().all(|line| line.chars().count() <= 30), "{narrow}");
        let two = [["a", "1"], ["b", "2"]].map(|row| row.map(str::to_owned).to_vec());
        let terminal = render_table(&["name", "value"], &two, TableShape::Terminal { width: Some(40) });
        let starts: Vec<Option<char>> = terminal.lines().map(|line| line.trim_start().chars().next()).collect();
        assert_eq!(starts, [Some('n'), Some('─'), Some('a'), Some('b')], "{terminal}");
    }

    /// Both are one terminal: a message that follows a table must not stand above it or inside.
    #[test]
    fn messages_follow_the_data_before_them() {
        let (reader, writer) = io::pipe().unwrap();
        let out = io::BufWriter::new(writer.try_clone().unwrap());
        let mut console = Console::new(Box::new(out), Box::new(writer), TableShape::Plain);
        console.line("data").unwrap();
        console.message("a message").unwrap();
        console.line("more data").unwrap();
        console.error(&CommandError::Failed("gone".to_owned())).unwrap();
        drop(console);
        assert_eq!(io::read_to_string(reader).unwrap(), "data\na message\nmore data\nerror: gone\n");
    }

    #[test]
    fn text_is_wrapped_to_the_width() {
        for (text, wrapped) in [
            ("a few words here", "- a few\n  words\n  here"),
            ("a https://very.long", "- a\n  https:/\n  /very.l\n  ong"),
        ] {
            assert_eq!(wrap_words("- ", text, Some(10)), wrapped);
        }
        assert_eq!(wrap_words("- ", "a https://very.long", None), "- a https://very.long");
    }

    #[test]
    fn json_error_never_follows_a_document() {
        let (reader, writer) = io::pipe().unwrap();
        let mut console = Console::new(Box::new(writer), Box::new(io::sink()), TableShape::Plain);
        console.json_line(&"one of many").unwrap();
        console.json_error("the next could not be asked").unwrap();
        console.json(&["all"]).unwrap();
        console.json_error("too late").unwrap();
        drop(console);
        let out = io::read_to_string(reader).unwrap();
        assert_eq!(out, "\"one of many\"\n{\"error\":\"the next could not be asked\"}\n[\n  \"all\"\n]\n");
    }

    /// A new pseudo-terminal has no size.
    #[test]
    fn unknown_terminal_width_breaks_nothing() {
        let rows = [vec!["acme".to_owned(), "a reason of some words".to_owned()]];
        let table = render_table(&["name", "why"], &rows, TableShape::Terminal { width: Some(0) });
        assert!(table.contains("a reason of some words"), "{table}");
        assert_eq!(width(TableShape::Terminal { width: Some(0) }), None);
    }

    #[test]
    fn short_cells_stay_whole_where_they_fit() {
        let long = "a reason that goes on and on, over more than one line of any terminal of a usual width";
        let cells = ["invoice-2026-0001", "acme", "2026-11-22 03:58:40", long].map(str::to_owned).to_vec();
        let header = ["id", "provider", "wake at", "reason"];
        for width in [80, 72] {
            let table =
                render_table(&header, std::slice::from_ref(&cells), TableShape::Terminal { width: Some(width) });
            assert!(table.lines().all(|line| line.chars().count() <= usize::from(width)), "{table}");
            let whole = |cell: &String| table.lines().any(|line| line.contains(cell.as_str()));
            assert!(cells[..3].iter().all(whole), "{table}");
        }
    }

    /// From half of a laptop's screen to a wide one, no word is broken, and from 80 columns no cell with an instant.
    #[test]
    fn no_word_is_broken_at_usual_widths() {
        let why = "the limit per-second of its account is used up, and earlier payments of that account wait before it";
        let cells = ["invoice-2026-0001", "acme", "2026-11-22 03:58:40", why].map(str::to_owned).to_vec();
        let rows = [cells.clone(), ["p-2", "bolt", "", "until 2026-11-22 03:58:40"].map(str::to_owned).to_vec()];
        for width in 60..=200 {
            let table = render_table(
                &["id", "provider", "wake at", "reason"],
                &rows,
                TableShape::Terminal { width: Some(width) },
            );
            assert!(table.lines().all(|line| line.chars().count() <= usize::from(width)), "{width}:\n{table}");
            let words: Vec<&str> = table.split_whitespace().collect();
            let is_whole = |word: &str| words.contains(&word);
            assert!(
                rows.iter().flatten().flat_map(|cell| cell.split(' ')).filter(|word| !word.is_empty()).all(is_whole),
                "{width}:\n{table}"
            );
            // The instant in the sentence may be broken at its blank.
            let instant = table.lines().any(|line| line.contains("2026-11-22 03:58:40"));
            assert!(instant || width < 80, "{width}:\n{table}");
        }
        assert_eq!(longest_word("at 2026-11-22 03:58:40 or so"), 19);
        assert_eq!(longest_word("2026-11-22 is a day"), 10);
    }

    #[test]
    fn colours_are_painted_after_escaping() {
        let (reader, writer) = io::pipe().unwrap();
        let console = Console::new(Box::new(writer), Box::new(io::sink()), TableShape::Terminal { width: Some(60) });
        let mut console = Console { colours: Colours { out: true, err: false }, ..console };
        console.table(&["id", "state"], &[["\u{1b}[31mred", "dead"].map(str::to_owned).to_vec()]).unwrap();
        drop(console);
        let out = io::read_to_string(reader).unwrap();
        assert!(out.contains("\\u{1b}[31mred") && out.contains("\u{1b}[31mdead\u{1b}[0m"), "{out}");
    }
}
