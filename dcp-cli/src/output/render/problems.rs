//! Renders the report of `dcp verify`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use dcp::core::text::Message;
use dcp::jobs::integrity::Problem;
use dcp::jobs::verify::VerifyReport;

use crate::output::Output;
use crate::output::style::{count, printable, size, thousands};

pub(crate) fn render(uri: &str, report: &VerifyReport, out: &Output) -> String {
    let style = out.style;
    let mut text = String::new();
    let what = format!(
        "{} ({}): {}, {}, {}",
        printable(uri),
        report.format,
        count(report.tensors, "tensor"),
        count(report.objects, "object"),
        count(report.files, "file"),
    );
    if report.ok {
        let how = if report.deep {
            let how = match &*report.format {
                "torch_dcp" | "torch_save" => {
                    "every byte read; archives agree with their checksums and directories"
                }
                _ => "every byte read",
            };
            format!("{how}, {}", size(report.bytes_checked))
        } else {
            "structure checked; --deep reads the data".to_owned()
        };
        let _ = writeln!(text, "{} {what}", style.good("ok"));
        let _ = writeln!(text, "   {}", style.dim(&how));
    } else {
        let _ = writeln!(text, "{} {what}", style.bad("bad"));
        let _ = writeln!(text, "    {}", style.bold(&count(report.problems.len(), "problem")));
        let mut by_file: BTreeMap<&str, Vec<&Problem>> = BTreeMap::new();
        for problem in &report.problems {
            by_file.entry(problem.file.as_deref().unwrap_or("")).or_default().push(problem);
        }
        for (file, problems) in by_file {
            let title = if file.is_empty() { "index" } else { file };
            let _ = writeln!(text, "\n{}", style.bold(&printable(title)));
            for problem in problems {
                let at = problem.byte_offset.map(|at| format!("  at byte {}", thousands(at)));
                let key = problem.key.as_deref().map_or_else(String::new, printable);
                if key.is_empty() && at.is_none() {
                    let message = Message(&problem.message);
                    let _ = writeln!(text, "  {} {message}", style.bad("✗"));
                    continue;
                }
                let _ = writeln!(
                    text,
                    "  {} {key}{}",
                    style.bad("✗"),
                    style.dim(&at.unwrap_or_default())
                );
                let _ = writeln!(text, "    {}", Message(&problem.message));
            }
        }
    }
    for note in &report.notes {
        let _ = writeln!(text, "{} {}", style.dim("note:"), Message(note));
    }
    text
}
