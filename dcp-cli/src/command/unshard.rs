//! `dcp unshard`.

use std::num::NonZeroU64;

use clap::{Args, ValueEnum};
use dcp::jobs::Need;
use dcp::jobs::text::{count, list};
use dcp::olmo::{UnshardFormat, UnshardOptions, UnshardStrategy};

use crate::failure::{Exit, Failure};
use crate::options::{Writing, parse_bytes};
use crate::output::progress::Bar;
use crate::output::style::{shown, size};
use crate::session::Session;

/// Write the model of a checkpoint as plain files, as OLMo-core's unshard_checkpoint does.
///
/// Takes what is below `model` of the state dict, and below `optim` with --optim, and
/// writes it without these prefixes: as one file, a file for each tensor, or chunks of about equal
/// size, under the names that OLMo-core gives them. Several files get an index. Objects, which
/// safetensors cannot hold, are written to a JSON file beside those of the optimizer.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp unshard run/step1000 out                                  out/model.safetensors
  dcp unshard run/step1000 out --format pt --optim              out/model.pt, out/optim.pt
  dcp unshard run/step1000 out --strategy chunks --chunk-size 5GB
                                                out/model/chunk-00000.safetensors, …
  dcp unshard run/step1000 out --strategy per-tensor
                                                out/model/model-blocks-0-w1-weight.safetensors, …")]
pub(crate) struct Unshard {
    /// The checkpoint: a step of an OLMo-core run, or any other with a `model` in its state dict.
    source: String,

    /// The directory to write into.
    target: String,

    /// How to divide it into files.
    #[arg(long, value_name = "STRATEGY", default_value = "one-file")]
    strategy: Strategy,

    /// Bytes of tensors in a file, such as 5GB. For chunks; a larger tensor gets a file alone.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, required_if_eq("strategy", "chunks"))]
    chunk_size: Option<u64>,

    /// The format of the files.
    #[arg(long, value_name = "FORMAT", default_value = "safetensors")]
    format: Format,

    /// Write the optimizer as well.
    #[arg(long)]
    optim: bool,

    #[command(flatten)]
    writing: Writing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Strategy {
    /// All in one file.
    OneFile,
    /// A file for each tensor.
    PerTensor,
    /// Files of at most --chunk-size.
    Chunks,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Files of torch.save.
    Pt,
    /// Files of safetensors.
    Safetensors,
}

impl Unshard {
    fn options(&self) -> Result<UnshardOptions, Failure> {
        let strategy = match (self.strategy, self.chunk_size) {
            (Strategy::OneFile, None) => UnshardStrategy::OneFile,
            (Strategy::PerTensor, None) => UnshardStrategy::OneFilePerTensor,
            (Strategy::Chunks, Some(bytes)) => {
                let bytes = NonZeroU64::new(bytes);
                let none = || Failure::new(Exit::Usage, "--chunk-size is 0");
                UnshardStrategy::Chunks(bytes.ok_or_else(none)?)
            }
            _ => {
                let message = "--chunk-size is for --strategy chunks, which needs it";
                return Err(Failure::new(Exit::Usage, message));
            }
        };
        let format = match self.format {
            Format::Pt => UnshardFormat::TorchSave,
            Format::Safetensors => UnshardFormat::Safetensors,
        };
        Ok(UnshardOptions::default()
            .strategy(strategy)
            .format(format)
            .optim(self.optim)
            .save_overwrite(self.writing.overwrite))
    }
}

pub(crate) fn unshard(args: &Unshard, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let how = args.options()?;
    let report = session.run(true, async {
        let opened = session.open(&args.source, Need::Whole).await?;
        let bar = Bar::new(out, "writing");
        let job = session.shared(args.writing.options(bar.options()));
        Ok(opened.write_files(&args.target, &how, &session.rollback, &job).await?)
    })?;
    if args.writing.json {
        return out.json(&report);
    }
    if out.quiet {
        return Ok(());
    }
    let verb = if report.dry_run { "would get" } else { "has" };
    let mut text = format!(
        "{}: {verb} {} in {}, {}\n",
        shown(&args.target),
        count(report.tensors, "tensor"),
        count(report.files.len(), "file"),
        size(report.bytes)
    );
    const SHOWN: usize = 8;
    for (name, bytes) in report.files.iter().take(SHOWN) {
        text.push_str(&format!("  {name}  {}\n", size(*bytes)));
    }
    if report.files.len() > SHOWN {
        text.push_str(&format!("  and {} more\n", report.files.len() - SHOWN));
    }
    out.write(&text)?;
    if !report.dropped.is_empty() {
        let keys = count(report.dropped.len(), "key");
        out.note(&format!("not written, as no part of it: {keys}: {}", list(&report.dropped)));
    }
    if !report.left_out.is_empty() {
        let objects = count(report.left_out.len(), "object");
        out.note(&format!("left out {objects}: {}", list(&report.left_out)));
    }
    Ok(())
}
