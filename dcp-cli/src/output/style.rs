//! Color, which never carries meaning alone, and the width of the terminal.

use std::borrow::Cow;
use std::io::IsTerminal;

use clap::ValueEnum;
use dcp::core::text::{escaped, is_unsafe, without_secrets};
pub(crate) use dcp::jobs::text::{count, thousands};
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

/// Colors that distinguish neighbors.
const HUES: [&str; 6] = ["34", "35", "32", "33", "36", "31"];

/// When to color.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// How to color, or not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    color: bool,
}

impl Style {
    pub(crate) fn for_stream(choice: ColorChoice, stream: &impl IsTerminal) -> Self {
        let color = match choice {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto => {
                let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
                let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
                stream.is_terminal() && !no_color && !dumb
            }
        };
        Self { color }
    }

    pub(crate) fn has_color(self) -> bool {
        self.color
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.color && !text.is_empty() {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    pub(crate) fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    pub(crate) fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    pub(crate) fn bad(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    pub(crate) fn good(self, text: &str) -> String {
        self.paint("1;32", text)
    }

    pub(crate) fn dtype(self, text: &str) -> String {
        self.paint("36", text)
    }

    pub(crate) fn value(self, text: &str) -> String {
        self.paint("33", text)
    }

    /// A color of its own for each of a few neighbors.
    pub(crate) fn hue(self, index: usize, text: &str) -> String {
        self.paint(HUES.get(index % HUES.len()).copied().unwrap_or("0"), text)
    }
}

/// Columns to write in: those of the terminal, or what `COLUMNS` says; `None` where output goes
/// to a file or a program, which has no use for cut lines.
pub(crate) fn terminal_width() -> Option<usize> {
    let requested = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse::<usize>().ok());
    let width = requested.or_else(|| comfy_table::Table::new().width().map(usize::from));
    width.map(|width| width.clamp(40, 400))
}

/// The columns of a terminal that a text takes.
pub(crate) fn columns(text: &str) -> usize {
    text.width()
}

/// The text in at most `width` columns and characters, its middle replaced by `…` if it is longer.
pub(crate) fn shorten(text: &str, width: usize) -> String {
    // What takes no column counts as well: there may be millions of it.
    let takes = |c: char| c.width().unwrap_or(1).max(1);
    if text.chars().map(takes).sum::<usize>() <= width {
        return text.to_owned();
    }
    let within = |room: usize| {
        move |used: &mut usize, c: char| {
            *used += takes(c);
            (*used <= room).then_some(c)
        }
    };
    let kept = width.saturating_sub(1);
    let start: String = text.chars().scan(0, within(kept.div_ceil(2))).collect();
    let room = kept - start.chars().map(takes).sum::<usize>();
    let end: Vec<char> = text.chars().rev().scan(0, within(room)).collect();
    let end: String = end.into_iter().rev().collect();
    format!("{start}…{end}")
}

/// The text with spaces behind it, to `width` columns. Unlike a width in a format string, which
/// must not exceed 65535, it may be any.
pub(crate) fn left(text: &str, width: usize) -> String {
    format!("{text}{}", padding(text, width))
}

/// The text with spaces before it, to `width` columns.
pub(crate) fn right(text: &str, width: usize) -> String {
    format!("{}{text}", padding(text, width))
}

fn padding(text: &str, width: usize) -> String {
    " ".repeat(width.saturating_sub(columns(text)))
}

/// Characters of a name that are shown; `--json` has all of it.
const NAME_MAX: usize = 256;

/// A name on one line: what a terminal would act on is escaped, and so is what turns the direction
/// of writing or takes no room; the middle of a long name is left out, and so are the secrets of a
/// URL.
pub(crate) fn printable(name: &str) -> String {
    escaped(&shorten(&without_secrets(name), NAME_MAX)).into_owned()
}

/// A place that an argument names, without the secrets of a URL.
pub(crate) fn shown(uri: &str) -> Cow<'_, str> {
    without_secrets(uri)
}

/// Output in which nothing but line breaks, and the colors of [`Style`] where there are some, can
/// act on a terminal. Names are escaped where they are rendered; this holds where one was
/// forgotten.
pub(crate) fn guarded(text: &str, color: bool) -> Cow<'_, str> {
    if !text.chars().any(|c| c != '\n' && is_unsafe(c)) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let painted = color.then(|| paint_len(rest)).flatten();
        let (piece, after) = rest.split_at(painted.unwrap_or(c.len_utf8()));
        if painted.is_some() || c == '\n' {
            out.push_str(piece);
        } else {
            out.push_str(&escaped(piece));
        }
        rest = after;
    }
    Cow::Owned(out)
}

/// The bytes of the sequence at the beginning of `text` that sets a color of [`Style`] or none.
fn paint_len(text: &str) -> Option<usize> {
    let (code, _) = text.strip_prefix("\x1b[")?.split_once('m')?;
    let known = matches!(code, "0" | "1" | "2" | "1;31" | "1;32") || HUES.contains(&code);
    known.then_some(code.len() + 3)
}

/// Bytes as people say them: `1.5 GiB`.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut shift = 10;
    let mut unit = UNITS.iter();
    let mut name = unit.next();
    while bytes >> shift >= 1024 {
        shift += 10;
        name = unit.next();
    }
    // Rounded to a tenth; the quotient has at most four digits before the point.
    let whole = bytes >> shift;
    let rest = bytes & ((1 << shift) - 1);
    let tenths = (whole as f64 + rest as f64 / (1_u64 << shift) as f64) * 10.0;
    let rounded = tenths.round() / 10.0;
    let text = if rounded >= 100.0 { format!("{rounded:.0}") } else { format!("{rounded:.1}") };
    format!("{text} {}", name.copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(1536), "1.5 KiB");
        assert_eq!(size(150 << 20), "150 MiB");
        assert_eq!(size(u64::MAX), "16.0 EiB");
    }

    #[test]
    fn long_and_hostile_texts() {
        assert_eq!(shorten("abcdefgh", 5), "ab…gh");
        assert_eq!(shorten("abc", 5), "abc");
        assert_eq!((left("é", 3), right("é", 3)), ("é  ".to_owned(), "  é".to_owned()));
        assert_eq!(left("重み", 5), "重み ");
        assert_eq!(left("e\u{301}", 2), "e\u{301} ");
        assert_eq!(
            (shorten("重み重み", 8), shorten("重み重み", 6)),
            ("重み重み".into(), "重…み".into())
        );
        assert!(shorten(&"\u{200b}".repeat(4096), 9).chars().count() <= 9);
        assert_eq!(left("a", 1 << 17).len(), 1 << 17);
        assert_eq!(printable("a\x1b[31mb\n"), "a\\u{1b}[31mb\\n");
        assert_eq!(printable("a\u{202e}b\u{200b}é"), "a\\u{202e}b\\u{200b}é");
        let long = printable(&"\x1b".repeat(4096));
        assert!(long.len() <= 6 * NAME_MAX + 3 && long.contains('…'), "{long}");
    }

    #[test]
    fn nothing_but_colors_of_the_command_acts_on_a_terminal() {
        let painted = Style { color: true }.bad("x\n");
        assert_eq!(guarded(&painted, true), painted);
        assert_eq!(guarded(&painted, false), "\\u{1b}[1;31mx\n\\u{1b}[0m");
        let hostile = "\x1b[2J\x1b]0;t\x07\r\u{9b}31m\x1b[5m\x1b";
        let shown = guarded(hostile, true);
        assert!(!shown.chars().any(is_unsafe), "{shown:?}");
        assert_eq!(guarded("a\nb é", true), "a\nb é");
    }
}
