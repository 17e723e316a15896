//! `dcp rewrite-metadata`.

use clap::{Args, ValueEnum};
use dcp::formats::metadata::{IndexReader, Profile, ProfileChoice};
use dcp::jobs::text::count;

use crate::failure::Failure;
use crate::output::style::{shown, size};
use crate::session::Session;

/// Rewrite a checkpoint's index for PyTorch or OLMo-core, not its data.
///
/// OLMo-core names places in files by a class of its own, so that PyTorch cannot read the
/// .metadata it writes (torch.load of the class fails, and so do torch's own converters). And what
/// PyTorch 2.15 writes cannot be read by earlier versions. Only the .metadata is rewritten, as a
/// whole and at once; data files are neither read nor written. What the new form has no place for
/// is listed; it is never anything that a load needs.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp rewrite-metadata run/step1000/model_and_optim --to torch
  dcp rewrite-metadata run/step_1000 --to olmo --dry-run
  dcp rewrite-metadata run/step_1000 --to torch --profile torch2.3

Profiles:
  compat      PyTorch 2.1 and later; the default when OLMo-core's is rewritten for torch
  torch2.3    PyTorch 2.3 and later; for OLMo-core, every PyTorch that it runs on (its default)
  torch2.15   PyTorch 2.15 and later, with the strides that it records
  Compressed data is read by PyTorch 2.7 and later, whatever the profile.
  A .metadata that already is for the requested program stays as it is without --profile.")]
pub(crate) struct RewriteMetadata {
    /// The checkpoint: a directory with a .metadata.
    uri: String,

    /// The program that should read it.
    #[arg(long, value_name = "PROGRAM")]
    to: Program,

    /// The version of its form.
    #[arg(long, value_name = "PROFILE")]
    profile: Option<Form>,

    /// Say what would change, and write nothing.
    #[arg(long)]
    dry_run: bool,

    /// Print a JSON report.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Program {
    /// PyTorch, and OLMo-core too.
    Torch,
    /// OLMo-core only.
    Olmo,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    Compat,
    #[value(name = "torch2.3")]
    Torch2_3,
    #[value(name = "torch2.15")]
    Torch2_15,
}

impl From<Program> for IndexReader {
    fn from(program: Program) -> Self {
        match program {
            Program::Torch => Self::Torch,
            Program::Olmo => Self::Olmo,
        }
    }
}

impl From<Form> for Profile {
    fn from(form: Form) -> Self {
        match form {
            Form::Compat => Self::Compat,
            Form::Torch2_3 => Self::Torch2_3,
            Form::Torch2_15 => Self::Torch2_15,
        }
    }
}

pub(crate) fn rewrite_metadata(args: &RewriteMetadata, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let choice = ProfileChoice::of(args.to.into(), args.profile.map(Profile::from));
    let report = session.run(false, async {
        Ok(session.opener().rewrite_metadata(&args.uri, choice, args.dry_run).await?)
    })?;
    if args.json {
        return out.json(&report);
    }
    if out.quiet {
        return Ok(());
    }
    let (uri, from, to) = (shown(&args.uri), report.from, report.to);
    if !report.changed {
        return out.write(&format!("{uri}: the metadata is {to} already\n"));
    }
    let done = if report.dry_run { "would be rewritten" } else { "rewritten" };
    let entries = count(report.entries, "name");
    let (before, after) = (size(report.bytes_before), size(report.bytes_after));
    out.write(&format!(
        "{uri}: {done} from {from} to {to}: {entries}, {before} before, {after} now\n"
    ))?;
    if let Some(version) = report.oldest_torch {
        out.note(&format!(
            "the data is compressed or otherwise transformed, which PyTorch {version} and later \
             reads, whatever the form of the .metadata; `dcp convert --to dcp` writes it plain"
        ));
    }
    for what in &report.dropped {
        out.note(&format!("{to} has no place for {what}"));
    }
    Ok(())
}
