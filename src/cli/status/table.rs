//! A table for a terminal: the columns that fit, numbers right-aligned, two blanks between columns and no lines between
//! rows.
//!
//! In a narrow terminal these steps follow each other until the table fits: optional columns are left out, one blank
//! separates columns, the name is cut, the usage is left out, the state is cut. Last, lines are cut.

use crate::domain::printable::printable;

/// Columns that are left out in a narrow terminal, in this order; `--json` has all of them.
const OPTIONAL_COLUMNS: [&str; 3] = ["in flight", "delayed", "rate"];
/// Left out before a line is cut, which would cut the clear time.
const LAST_OPTIONAL_COLUMN: &str = "used";
/// Blanks between two cells, and in a terminal that is too narrow for that.
const COLUMN_GAP: usize = 2;
const NARROW_GAP: usize = 1;
/// Minimum widths of the first two columns, a name and a state, in characters. A line below the row has the cause of
/// its state.
const WIDTHS_MIN: [usize; 2] = [8, 12];

/// One column, with a cell per row.
pub(super) struct TableColumn {
    pub title: &'static str,
    pub cells: Vec<String>,
    /// Whether the cells are right-aligned.
    pub is_right_aligned: bool,
}

impl TableColumn {
    fn width(&self) -> usize {
        let cells = self.cells.iter().map(|cell| cell.chars().count());
        cells.chain([self.title.chars().count()]).max().unwrap_or(0)
    }

    fn padded(&self, cell: &str, width: usize) -> String {
        if self.is_right_aligned { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
    }
}

/// The header line and one line per row.
pub(super) fn render_lines(mut columns: Vec<TableColumn>, width: Option<usize>) -> Vec<String> {
    for cell in columns.iter_mut().flat_map(|column| &mut column.cells) {
        *cell = printable(cell).into_owned();
    }
    let gap = width.map_or(COLUMN_GAP, |width| fit_width(&mut columns, width));
    let rows = columns.iter().map(|column| column.cells.len()).max().unwrap_or(0);
    let line = |cell: &dyn Fn(&TableColumn) -> String| {
        let cells: Vec<String> = columns.iter().map(|column| column.padded(&cell(column), column.width())).collect();
        let line = cells.join(&" ".repeat(gap));
        truncate(line.trim_end(), width.unwrap_or(usize::MAX))
    };
    let head = line(&|column: &TableColumn| column.title.to_owned());
    let rows = (0..rows).map(|row| line(&|column: &TableColumn| column.cells.get(row).cloned().unwrap_or_default()));
    [head].into_iter().chain(rows).collect()
}

fn total_width(columns: &[TableColumn], gap: usize) -> usize {
    columns.iter().map(|column| column.width() + gap).sum::<usize>().saturating_sub(gap)
}

/// Makes the columns fit; returns the blanks between them.
fn fit_width(columns: &mut Vec<TableColumn>, width: usize) -> usize {
    for optional in OPTIONAL_COLUMNS {
        if total_width(columns, COLUMN_GAP) <= width {
            return COLUMN_GAP;
        }
        columns.retain(|column| column.title != optional);
    }
    let gap = if total_width(columns, COLUMN_GAP) <= width { COLUMN_GAP } else { NARROW_GAP };
    let name_rest = columns.first().map_or(0, |names| names.width().saturating_sub(WIDTHS_MIN[0]));
    if total_width(columns, gap).saturating_sub(name_rest) > width {
        columns.retain(|column| column.title != LAST_OPTIONAL_COLUMN);
    }
    for (index, least) in WIDTHS_MIN.into_iter().enumerate() {
        let too_wide = total_width(columns, gap).saturating_sub(width);
        if let Some(column) = columns.get_mut(index) {
            let most = column.width().saturating_sub(too_wide).max(least);
            column.cells.iter_mut().for_each(|cell| *cell = truncate(cell, most));
        }
    }
    gap
}

/// Cuts a text to at most `most` characters; a cut text ends with `…`.
fn truncate(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let kept: String = text.chars().take(most.saturating_sub(1)).collect();
    format!("{kept}…")
}
