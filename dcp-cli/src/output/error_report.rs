//! Errors on stderr: `error:`, `caused by:`, `hint:`, or one line of JSON.

use std::io::{self, Write};
use std::process::ExitCode;

use dcp::core::text::Message;
use serde_json::json;

use super::JsonText;
use super::style::Style;
use crate::failure::Failure;

/// Prints the error to stderr.
pub(crate) fn print(failure: &Failure, style: Style) -> ExitCode {
    if !failure.silent {
        let mut text = format!("{} {}\n", style.bad("error:"), Message(&failure.message));
        for cause in &failure.causes {
            text.push_str(&format!("  {} {}\n", style.dim("caused by:"), Message(cause)));
        }
        if let Some(hint) = &failure.hint {
            text.push_str(&format!("{} {}\n", style.good("hint:"), Message(hint)));
        }
        // There is nowhere left to say that stderr is closed.
        let _ = io::stderr().write_all(text.as_bytes());
    }
    ExitCode::from(failure.exit as u8)
}

/// Prints the error to stderr as one line of JSON.
pub(crate) fn print_json(failure: &Failure) -> ExitCode {
    if !failure.silent {
        let shown = |text: &String| Message(text).to_string();
        let error = json!({
            "kind": failure.exit.kind(),
            "message": shown(&failure.message),
            "causes": failure.causes.iter().map(shown).collect::<Vec<_>>(),
            "hint": failure.hint.as_ref().map(shown),
            "exit_code": failure.exit as u8,
        });
        let text = format!("{}\n", json!({ "error": error }));
        let _ = JsonText(io::stderr()).write_all(text.as_bytes());
    }
    ExitCode::from(failure.exit as u8)
}
