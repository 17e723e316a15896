//! Escapes and shortens untrusted text for errors, notes, logs and terminals.

mod secrets;

use std::borrow::Cow;
use std::fmt::{self, Write as _};

pub use secrets::without_secrets;

/// The maximum number of characters of a displayed name; real ones have a quarter of it.
const NAME_MAX: usize = 256;
/// The maximum number of bytes of a displayed message.
const MESSAGE_MAX: usize = 16 << 10;

/// A name in quotation marks. Characters that a terminal acts on, that change the writing direction
/// or are invisible are escaped as in Rust; the middle of a long name is omitted. URLs are shown
/// [without secrets](without_secrets).
///
/// ```
/// assert_eq!(dcp_core::text::Quoted("a\x1b[31m").to_string(), r#""a\u{1b}[31m""#);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Quoted<'a>(pub &'a str);

/// A message that may contain names: one line, with the escapes of [`Quoted`] and long names
/// shortened, quoted or not. Applying it twice changes nothing.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let escape = |out: &mut String, c: char| match c {
            '"' | '\\' => out.extend(['\\', c]),
            c => push_escaped(out, c),
        };
        // Escapes no more of a long name than is displayed.
        let shown = without_secrets(self.0);
        let chars = shown.chars();
        let long = shown.len() > NAME_MAX && chars.clone().nth(NAME_MAX).is_some();
        let mut text = String::from('"');
        if long {
            let (front, back) = ends(NAME_MAX);
            chars.clone().take(front).for_each(|c| escape(&mut text, c));
            text.push('…');
            let behind: Vec<char> = chars.rev().take(back).collect();
            behind.into_iter().rev().for_each(|c| escape(&mut text, c));
        } else {
            chars.for_each(|c| escape(&mut text, c));
        }
        text.push('"');
        f.write_str(&text)
    }
}

impl fmt::Display for Message<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&message(self.0))
    }
}

/// The text of a [`Message`].
#[must_use]
pub fn message(text: &str) -> Cow<'_, str> {
    let safe = text.len() <= NAME_MAX && !text.chars().any(is_unsafe);
    if safe {
        return without_secrets(text);
    }
    // An escape takes up to ten bytes per byte of text.
    let text = without_secrets(text);
    let cut = text.len() > MESSAGE_MAX;
    let text = beginning(&text, MESSAGE_MAX);
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(piece_len(rest));
        push_shortened(&mut out, &escaped(piece));
        rest = after;
    }
    if cut {
        out.push('…');
    }
    Cow::Owned(out)
}

/// Escapes characters that a terminal acts on, that change the writing direction or are invisible,
/// as in Rust. Does not shorten the text.
#[must_use]
pub fn escaped(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    text.chars().for_each(|c| push_escaped(&mut out, c));
    Cow::Owned(out)
}

/// The longest prefix of a text with at most `max` bytes.
#[must_use]
pub fn beginning(text: &str, max: usize) -> &str {
    // A character has at most four bytes.
    let ends = (max.saturating_sub(3)..=max).rev();
    if text.len() <= max {
        text
    } else {
        ends.into_iter().find_map(|at| text.get(..at)).unwrap_or("")
    }
}

/// Whether a character must not reach a terminal: it is a control character, changes the writing
/// direction, breaks the line, or is invisible.
#[must_use]
pub fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

fn push_escaped(out: &mut String, c: char) {
    if is_unsafe(c) {
        let _ = write!(out, "{}", c.escape_default());
    } else {
        out.push(c);
    }
}

/// The length of the first quoted text, or of the text up to the next quotation mark or space,
/// inclusive.
fn piece_len(text: &str) -> usize {
    let mut chars = text.char_indices();
    let Some((_, first)) = chars.next() else { return 0 };
    if first == '"' {
        let mut is_escaped = false;
        for (at, c) in chars.clone() {
            match c {
                '\\' if !is_escaped => is_escaped = true,
                '"' if !is_escaped => return at + 1,
                _ => is_escaped = false,
            }
        }
    }
    if first == ' ' {
        return 1;
    }
    chars.find(|(_, c)| matches!(c, ' ' | '"')).map_or(text.len(), |(at, _)| at)
}

/// Appends a piece, without its middle if it is long.
fn push_shortened(out: &mut String, piece: &str) {
    // Quotation marks are not part of the name.
    let len = if piece.len() <= NAME_MAX { 0 } else { piece.chars().count() };
    if len <= NAME_MAX + 2 {
        out.push_str(piece);
        return;
    }
    let (front, back) = ends(NAME_MAX);
    out.extend(piece.chars().take(front + 1));
    out.push('…');
    out.extend(piece.chars().skip(len - back - 1));
}

/// The number of characters to keep at both ends of a name of which `max` are displayed.
fn ends(max: usize) -> (usize, usize) {
    let kept = max - 1;
    (kept.div_ceil(2), kept / 2)
}

/// A number with its noun: `1 file`, `2 files`.
#[must_use]
pub fn counted(number: u64, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\x1b[31m\r\n\x07\u{202e}\u{9b}1m\u{200b}é";

    #[test]
    fn names_are_quoted_escaped_and_shortened() {
        assert_eq!(Quoted("a.b").to_string(), "\"a.b\"");
        assert_eq!(Quoted("a\"b\\").to_string(), r#""a\"b\\""#);
        assert_eq!(
            Quoted(HOSTILE).to_string(),
            r#""a\u{1b}[31m\r\n\u{7}\u{202e}\u{9b}1m\u{200b}é""#
        );
        let long = Quoted(&"xé".repeat(1 << 20)).to_string();
        assert_eq!(long.chars().count(), NAME_MAX + 2);
        assert!(long.starts_with("\"xé") && long.contains('…') && long.ends_with("é\""), "{long}");
    }

    #[test]
    fn messages_are_safe_however_names_stand_in_them() {
        assert_eq!(message("plain text: \"a b\""), "plain text: \"a b\"");
        assert_eq!(message("dtype \x1b[31m\u{2066}"), r"dtype \u{1b}[31m\u{2066}");
        let name = "n ".repeat(4096);
        for text in [
            format!("there is no {name:?} here"),
            format!("there is no {} here", "n".repeat(5000)),
            format!("no {:?}, {:?} is", "n".repeat(5000), format!("\"{name}")),
        ] {
            let shown = message(&text);
            assert!(shown.len() < 700, "{} of {}", shown.len(), text.len());
            assert!(shown.contains('…') && shown.contains('n'), "{shown}");
            assert_eq!(message(&shown), shown, "shown twice");
        }
        // What looks like the beginning of a quoted name and is none.
        let open = format!("\"{name}");
        assert!(message(&open).len() <= MESSAGE_MAX + 8);
        let shown = message(HOSTILE).into_owned();
        assert!(!shown.chars().any(is_unsafe), "{shown:?}");
        assert_eq!(message(&shown), shown);
    }

    #[test]
    fn urls_in_names_and_messages_have_no_secrets() {
        let url = "https://me:pw@host/run?sig=5ec7e7";
        let long = format!("{url} {}", "n ".repeat(4096));
        for shown in [
            Quoted(url).to_string(),
            message(&format!("cannot open {url:?}")).into_owned(),
            message(&long).into_owned(),
        ] {
            assert!(!shown.contains("5ec7e7") && !shown.contains("pw"), "{shown}");
        }
    }

    #[test]
    fn a_beginning_ends_between_characters() {
        for (max, expected) in [(0, ""), (1, "a"), (2, "a"), (3, "aé"), (9, "aé😀"), (6, "aé")]
        {
            assert_eq!(beginning("aé😀", max), expected, "{max}");
        }
    }

    #[test]
    fn what_is_in_order_is_not_copied() {
        assert!(matches!(message("it is too long"), Cow::Borrowed(_)));
        assert!(matches!(escaped("é — ☃"), Cow::Borrowed(_)));
        assert_eq!(escaped("\u{85}\u{7f}\t"), r"\u{85}\u{7f}\t");
    }
}
