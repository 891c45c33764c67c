//! Splits text at its `${name}` places: the one grammar that header values and request templates share.
//!
//! Refuses to know what a name means; there is no escape, because no provider needs a literal `${`.

/// A stretch of text, or the name inside one `${…}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Text(String),
    Place(String),
}

/// Splits `text` into its parts; no part is empty.
///
/// # Errors
/// When a `${` is never closed, or nothing stands inside.
pub(super) fn split(text: &str) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some((before, opened)) = rest.split_once("${") {
        let (name, after) = opened.split_once('}').ok_or("a `${` is never closed by `}`")?;
        if name.is_empty() {
            return Err("`${}` names nothing".to_owned());
        }
        if !before.is_empty() {
            parts.push(Part::Text(before.to_owned()));
        }
        parts.push(Part::Place(name.to_owned()));
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(Part::Text(rest.to_owned()));
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_split_at_its_places() {
        let text = |t: &str| Part::Text(t.to_owned());
        let place = |t: &str| Part::Place(t.to_owned());
        for (written, parts) in [
            ("", vec![]),
            ("plain $5 {x}", vec![text("plain $5 {x}")]),
            ("${id}", vec![place("id")]),
            ("Bearer ${env:KEY}!", vec![text("Bearer "), place("env:KEY"), text("!")]),
            ("${a}${b}", vec![place("a"), place("b")]),
        ] {
            assert_eq!(split(written).unwrap(), parts, "{written}");
        }
        for bad in ["${", "x ${env:KEY", "${}"] {
            assert!(split(bad).is_err(), "{bad}");
        }
    }
}
