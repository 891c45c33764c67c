//! Pauses that a provider file does not mention: applying such a file keeps the pause of the stored row.
//!
//! The default of `paused` is `false`. Without this rule, a deployment that applies its rows would end the pause of an
//! incident.

use toml::{Table, Value};

use super::ProviderRow;

/// Marks the rows of a file, as [`super::parse_provider_file`] read them, that do not mention `paused`.
pub fn mark_unmentioned_pauses(text: &str, rows: &mut [ProviderRow]) {
    let Ok(file) = text.parse::<Table>() else { return };
    let tables = file.get("provider").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    for (row, table) in rows.iter_mut().zip(tables) {
        row.pause_unmentioned = table.get("paused").is_none();
    }
}

impl ProviderRow {
    /// The row to apply, with the pause of the stored row, if there is one.
    pub fn keep_unmentioned_pause(&self, present: Option<&Self>) -> Self {
        let kept = present.filter(|_| self.pause_unmentioned).map(|present| present.paused);
        Self { paused: kept.unwrap_or(self.paused), ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse_provider_file;
    use super::*;

    #[test]
    fn unmentioned_pause_is_kept() {
        let row = |name: &str, line: &str| {
            format!(
                "[[provider]]\nname = \"{name}\"\nurl = \"https://x.example/\"\n{line}\n\
                 [[provider.limit]]\nname = \"all\"\nmax_requests = 1\nwindow_ms = 1000\n"
            )
        };
        let text = [row("a", ""), row("b", "paused = false"), row("c", "paused = true")].concat();
        let mut rows = parse_provider_file(&text).unwrap();
        mark_unmentioned_pauses(&text, &mut rows);
        assert_eq!(rows.iter().map(|row| row.pause_unmentioned).collect::<Vec<_>>(), [true, false, false]);
        let applied = |there: Option<bool>| -> Vec<bool> {
            let present = there.map(|paused| ProviderRow { paused, ..ProviderRow::default() });
            rows.iter().map(|row| row.keep_unmentioned_pause(present.as_ref()).paused).collect()
        };
        assert_eq!(applied(None), [false, false, true]);
        assert_eq!(applied(Some(true)), [true, false, true]);
        assert_eq!(applied(Some(false)), [false, false, true]);
    }
}
