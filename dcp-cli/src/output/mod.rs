//! Output: data to stdout, notes and errors to stderr.

pub(crate) mod error_report;
pub(crate) mod mapping_notes;
pub(crate) mod progress;
pub(crate) mod render;
pub(crate) mod style;
pub(crate) mod summary;

use std::io::{self, Write};

use dcp::core::text::{Message, is_unsafe};

use crate::failure::Failure;
use crate::output::style::{ColorChoice, Style, guarded, terminal_width};
use crate::terms::of_command;

/// The two streams and how to write to them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    /// For stdout.
    pub(crate) style: Style,
    /// For stderr.
    notes: Style,
    /// Columns of the terminal that stdout is, if it is one.
    pub(crate) width: Option<usize>,
    pub(crate) quiet: bool,
    /// Whether another rank prints.
    muted: bool,
}

impl Output {
    pub(crate) fn new(color: ColorChoice, quiet: bool) -> Self {
        Self {
            style: Style::for_stream(color, &io::stdout()),
            notes: Style::for_stream(color, &io::stderr()),
            width: terminal_width(),
            quiet,
            muted: false,
        }
    }

    /// The same, of a rank whose output another one prints.
    pub(crate) fn mute(mut self, muted: bool) -> Self {
        self.muted = muted;
        self.quiet |= muted;
        self
    }

    /// Writes data.
    pub(crate) fn write(&self, text: &str) -> Result<(), Failure> {
        #[cfg(test)]
        if crate::every_operation::heard(text) {
            return Ok(());
        }
        self.write_own(&guarded(text, self.style.has_color()))
    }

    /// Writes a text that comes with the command and holds nothing of a checkpoint.
    pub(crate) fn write_own(&self, text: &str) -> Result<(), Failure> {
        if self.muted {
            return Ok(());
        }
        let mut stdout = io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()?;
        Ok(())
    }

    /// Writes one JSON value and a newline.
    pub(crate) fn json(&self, value: &impl serde::Serialize) -> Result<(), Failure> {
        if self.muted {
            return Ok(());
        }
        let mut stdout = JsonText(io::BufWriter::new(io::stdout().lock()));
        serde_json::to_writer_pretty(&mut stdout, value).map_err(io::Error::from)?;
        stdout.write_all(b"\n")?;
        stdout.flush()?;
        Ok(())
    }

    /// Says something that is no data.
    pub(crate) fn note(&self, text: &str) {
        #[cfg(test)]
        if crate::every_operation::heard(text) {
            return;
        }
        if !self.quiet {
            // Notes are not worth an error when stderr is closed.
            let text = of_command(text);
            let _ = writeln!(io::stderr(), "{} {}", self.notes.dim("note:"), Message(&text));
        }
    }
}

/// One JSON value and a newline, as [`Output::json`] writes it.
pub(crate) fn json_text(value: &impl serde::Serialize) -> Result<Vec<u8>, Failure> {
    let mut text = JsonText(Vec::new());
    serde_json::to_writer_pretty(&mut text, value).map_err(io::Error::from)?;
    text.write_all(b"\n")?;
    Ok(text.0)
}

/// JSON in which what a terminal would act on is escaped. JSON itself escapes less.
pub(crate) struct JsonText<W>(pub(crate) W);

impl<W: Write> Write for JsonText<W> {
    /// Characters outside of ASCII are in strings only, where they may be escaped. The serializer
    /// writes whole characters.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let acts = |c: char| !c.is_ascii_control() && is_unsafe(c) || c == '\x7f';
        if bytes.is_ascii() && !bytes.contains(&0x7f) {
            self.0.write_all(bytes)?;
            return Ok(bytes.len());
        }
        match str::from_utf8(bytes) {
            Ok(text) if text.contains(acts) => {
                for piece in text.split_inclusive(acts) {
                    let last = piece.chars().next_back().filter(|c| acts(*c));
                    let plain = last.map_or(piece.len(), |c| piece.len() - c.len_utf8());
                    self.0.write_all(piece.get(..plain).unwrap_or(piece).as_bytes())?;
                    for unit in last.iter().flat_map(|c| c.encode_utf16(&mut [0; 2]).to_vec()) {
                        write!(self.0, "\\u{unit:04x}")?;
                    }
                }
            }
            _ => self.0.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Where events of the libraries go: stderr, with what a terminal would act on escaped.
///
/// A stderr that is closed or full loses them. As an error, tracing-subscriber would print it to stderr,
/// which panics there.
pub(crate) struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let _ = io::stderr().write_all(guarded(&text, false).as_bytes());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = io::stderr().flush();
        Ok(())
    }
}

/// Where events go that a user sees without a flag: each is a note.
pub(crate) struct NoteLog;

impl Write for NoteLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(b"note: ");
        Log.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Log.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_the_same_value_and_harmless() {
        let value = serde_json::json!({ "a\u{202e}\x7f\x1b\n": ["\u{9b}é\u{e0041}", 1] });
        let mut out = JsonText(Vec::new());
        serde_json::to_writer_pretty(&mut out, &value).unwrap();
        let text = String::from_utf8(out.0).unwrap();
        assert!(!text.chars().any(|c| c != '\n' && is_unsafe(c)), "{text:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}
