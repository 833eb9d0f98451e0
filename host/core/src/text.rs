//! Text from other sources on its way to a terminal or a log.

use std::borrow::Cow;
use std::fmt::Write;

/// Whether a terminal shows the character as itself. False for control characters, which may move the cursor or change
/// the title, and for invisible characters that reorder or hide their neighbours.
///
/// ```
/// use meridian_core::text::is_printable;
///
/// assert!(is_printable('é') && is_printable('思') && is_printable(' '));
/// assert!(!is_printable('\u{1b}') && !is_printable('\u{202e}') && !is_printable('\u{200b}'));
/// ```
#[must_use]
pub fn is_printable(c: char) -> bool {
    let is_invisible = matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{feff}'
        | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}');
    // The last two of every plane are no characters.
    !c.is_control() && !is_invisible && u32::from(c) & 0xfffe != 0xfffe
}

/// The text in one line that a terminal shows unchanged: characters that are not [printable](is_printable) become
/// `\u{..}`.
///
/// ```
/// use meridian_core::text::printable;
///
/// assert_eq!(printable("a\n\x1b[2J\u{202e}gpj.exe"), "a\\u{a}\\u{1b}[2J\\u{202e}gpj.exe");
/// ```
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, is_printable)
}

/// The text, cut behind so many characters, with its length: a value of others in a message of one line.
///
/// ```
/// use meridian_core::text::shortened;
///
/// assert_eq!(shortened("as it is", 8), "as it is");
/// assert_eq!(shortened(&"x".repeat(500), 3), "xxx... (500 bytes)");
/// ```
#[must_use]
pub fn shortened(text: &str, characters: usize) -> Cow<'_, str> {
    match text.char_indices().nth(characters) {
        None => Cow::Borrowed(text),
        Some((end, _)) => Cow::Owned(format!("{}... ({} bytes)", &text[..end], text.len())),
    }
}

/// As [`printable`], but line ends stay.
///
/// ```
/// assert_eq!(meridian_core::text::printable_lines("a\nb\x07\n"), "a\nb\\u{7}\n");
/// ```
#[must_use]
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c == '\n' || is_printable(c))
}

fn escaped(text: &str, is_kept: impl Fn(char) -> bool) -> Cow<'_, str> {
    if text.chars().all(&is_kept) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_kept(c) {
            out.push(c);
        } else {
            // Writing to a string does not fail.
            let _ = write!(out, "\\u{{{:x}}}", u32::from(c));
        }
    }
    Cow::Owned(out)
}
