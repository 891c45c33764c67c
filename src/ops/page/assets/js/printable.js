// Printable text: hidden characters are escaped, in the same form as in the commands (src/domain/printable.rs).

// Control characters; line and paragraph separators; characters that are invisible or reorder the text around them
// (Default_Ignorable_Code_Point); interlinear annotations.
const HIDDEN = /[\p{Cc}\u2028\u2029\p{Default_Ignorable_Code_Point}\ufff0-\ufffb]/gu;
const SHORT = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

export const printable = (text) => text.replace(HIDDEN, (c) => SHORT[c] ?? `\\u{${c.codePointAt(0).toString(16)}}`);
