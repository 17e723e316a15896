//! Where output goes: data to stdout, everything said about it to stderr.

use std::io::{self, Write};

use crate::args::Global;
use crate::failure::Failure;
use crate::style::{Style, terminal_width};

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
}

impl Output {
    pub(crate) fn new(global: Global) -> Self {
        Self {
            style: Style::for_stream(global.color, &io::stdout()),
            notes: Style::for_stream(global.color, &io::stderr()),
            width: terminal_width(),
            quiet: global.quiet,
        }
    }

    /// The same without notes.
    pub(crate) fn silent(self) -> Self {
        Self { quiet: true, ..self }
    }

    /// Writes data.
    pub(crate) fn write(&self, text: &str) -> Result<(), Failure> {
        #[cfg(test)]
        if crate::every_operation::heard(text) {
            return Ok(());
        }
        let mut stdout = io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()?;
        Ok(())
    }

    /// Writes one JSON value and a newline.
    pub(crate) fn json(&self, value: &impl serde::Serialize) -> Result<(), Failure> {
        let mut stdout = io::BufWriter::new(io::stdout().lock());
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
            let _ = writeln!(io::stderr(), "{} {text}", self.notes.dim("note:"));
        }
    }
}
