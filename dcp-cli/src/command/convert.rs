//! `dcp convert`.

use crate::args::{self, Format};
use crate::command::reshard::write_checkpoint;
use crate::failure::Failure;
use crate::open::{self, Need};
use crate::output::Output;
use crate::progress::Bar;
use crate::style::{count, printable, size};

pub(crate) fn convert(args: &args::Convert, out: &Output) -> Result<(), Failure> {
    open::refuse_same(&args.source, &args.target)?;
    match args.to {
        Format::Safetensors => to_safetensors(args, out),
        Format::Dcp => write_checkpoint(&args.source, &args.target, 1, args.writing, out),
    }
}

fn to_safetensors(args: &args::Convert, out: &Output) -> Result<(), Failure> {
    let report = open::run(true, async {
        let source = open::source(&args.source, Need::Whole).await?;
        let target = open::target_file(&args.target, args.writing.overwrite).await?;
        let bar = Bar::new(out, "converting");
        Ok(dcp::convert::to_safetensors(&source, &target, &bar.options()).await?)
    })?;
    if args.writing.json {
        return out.json(&report);
    }
    if !out.quiet {
        let (tensors, bytes) = (count(report.tensors, "tensor"), size(report.bytes));
        out.write(&format!("{}: {tensors}, {bytes}\n", args.target))?;
    }
    let list = |names: &[std::sync::Arc<str>]| {
        const SHOWN: usize = 5;
        let mut shown: Vec<_> = names.iter().take(SHOWN).map(|name| printable(name)).collect();
        if names.len() > SHOWN {
            shown.push(format!("and {} more", names.len() - SHOWN));
        }
        shown.join(", ")
    };
    if !report.left_out.is_empty() {
        let objects = count(report.left_out.len(), "object");
        out.note(&format!("left out {objects}: {}", list(&report.left_out)));
    }
    if !report.raw.is_empty() {
        let tensors = count(report.raw.len(), "tensor");
        out.note(&format!(
            "stored {tensors} as bytes, because safetensors has no name for the type: {}",
            list(&report.raw)
        ));
    }
    Ok(())
}
