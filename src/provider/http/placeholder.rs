//! Parser of `${name}` placeholders, for header values and request templates.
//!
//! The caller decides what a name means. There is no escape, because no provider needs a literal `${`.

/// Literal text, or the name inside one `${…}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TemplatePart {
    Text(String),
    Placeholder(String),
}

/// Splits `text` into its parts; no part is empty.
///
/// # Errors
/// When a `${` is never closed, or has no name.
pub(super) fn split_placeholders(text: &str) -> Result<Vec<TemplatePart>, String> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some((before, opened)) = rest.split_once("${") {
        let (name, after) = opened.split_once('}').ok_or("a `${` is never closed by `}`")?;
        if name.is_empty() {
            return Err("`${}` has no name".to_owned());
        }
        if !before.is_empty() {
            parts.push(TemplatePart::Text(before.to_owned()));
        }
        parts.push(TemplatePart::Placeholder(name.to_owned()));
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(TemplatePart::Text(rest.to_owned()));
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_split_at_its_placeholders() {
        let text = |t: &str| TemplatePart::Text(t.to_owned());
        let place = |t: &str| TemplatePart::Placeholder(t.to_owned());
        for (written, parts) in [
            ("", vec![]),
            ("plain $5 {x}", vec![text("plain $5 {x}")]),
            ("${id}", vec![place("id")]),
            ("Bearer ${env:KEY}!", vec![text("Bearer "), place("env:KEY"), text("!")]),
            ("${a}${b}", vec![place("a"), place("b")]),
        ] {
            assert_eq!(split_placeholders(written).unwrap(), parts, "{written}");
        }
        for bad in ["${", "x ${env:KEY", "${}"] {
            assert!(split_placeholders(bad).is_err(), "{bad}");
        }
    }
}
