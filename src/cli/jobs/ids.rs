//! A reader of a list of payments: one id per line of a file, a pipe or standard input, all valid or none used.
//!
//! A list is one decision. So an invalid line rejects the whole list, with the number of the line. The list is bounded,
//! because it is checked and written at once.

use std::path::Path;

use tokio::io::BufReader;

use crate::cli::input::{InputLine, LineReader};
use crate::cli::jobs::parse_id;
use crate::cli::{CommandError, input};
use crate::domain::job::JobId;

/// Longest line with an id, in bytes; longer lines are invalid.
const LINE_BYTES_MAX: usize = 1_024;

/// Reads all ids of a file. Empty lines are skipped.
///
/// # Errors
/// When the file cannot be read, has more than `ids_max` ids or none, or a line is no id.
pub async fn read_ids(path: &Path, ids_max: u32) -> Result<Vec<JobId>, CommandError> {
    let name = path.display();
    let failed = |problem: String| CommandError::Failed(format!("{name}: {problem}: nothing was changed"));
    let opened = input::open(path).await.map_err(|error| failed(error.to_string()))?;
    let mut lines = LineReader::new(BufReader::new(opened.reader), LINE_BYTES_MAX);
    let mut ids = Vec::new();
    while let Some(line) = lines.next().await.map_err(|error| failed(error.to_string()))? {
        let (number, id) = parse_line(line);
        match id {
            None => {}
            Some(Err(why)) => return Err(failed(format!("line {number}: an id {why}"))),
            Some(Ok(_)) if ids.len() >= ids_max as usize => {
                return Err(failed(format!("line {number}: the list has more than {ids_max} ids: split it")));
            }
            Some(Ok(id)) => ids.push(id),
        }
    }
    if ids.is_empty() { Err(failed("no line has an id".to_owned())) } else { Ok(ids) }
}

/// The number of a line and its id, if it has one. An invalid line is not quoted: it may contain anything.
fn parse_line(line: InputLine) -> (u64, Option<Result<JobId, String>>) {
    let (number, text) = match line {
        InputLine::Text { number, bytes } => (number, String::from_utf8_lossy(&bytes).trim().to_owned()),
        // Not an id, and its text was not kept.
        InputLine::TooLong { number } => (number, "too long a line".to_owned()),
    };
    (number, (!text.is_empty()).then(|| parse_id(&text).map_err(|why| why.to_string())))
}
