//! Characters that show nothing, end a line or steer a terminal: what may not pass from a foreign text to where it is shown.
//!
//! A foreign text is whatever a producer, a provider, a backend or a row says.

/// Characters that show nothing, or turn the order of what stands around them.
///
/// Property `Default_Ignorable_Code_Point` of Unicode 16, and the interlinear annotations.
#[must_use]
pub fn is_invisible(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}'
        | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}
