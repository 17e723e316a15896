//! Options of commands that write a checkpoint in any format, and the writing.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use dcp::DType;
use dcp::convert::{
    CastCounts, CastOptions, CastReport, ConvertError, JobOptions, Source, StatePart, WriteReport,
    view,
};
use dcp::core::{PutMode, StorageExt};
use dcp::formats::hf::{HfLayout, names_scales};
use dcp::formats::torch_save::TorchSaveForm;
use dcp::planner::KeyFilter;

use crate::apart::{Shape, keep_apart};
use crate::created::NewFolders;
use crate::failure::{Exit, Failure};
use crate::hf_config;
use crate::open;
use crate::output::Output;
use crate::style::{count, left, printable, right, shorten, size, thousands};

/// A format to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// One safetensors file.
    Safetensors,
    /// A directory of safetensors files with an index, as Hugging Face models have it.
    Hf,
    /// One file of torch.save, objects included.
    TorchSave,
    /// A directory of PyTorch's torch.distributed.checkpoint.
    Dcp,
}

impl fmt::Display for Format {
    /// As `--to` takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Safetensors => "safetensors",
            Self::Hf => "hf",
            Self::TorchSave => "torch-save",
            Self::Dcp => "dcp",
        })
    }
}

/// The most bytes of tensors in a file of a Hugging Face model, as transformers has it.
const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// How a checkpoint is written.
#[derive(Args, Clone, Debug)]
pub(crate) struct Destination {
    /// The format to write; by default what the name of the target says.
    #[arg(long, value_name = "FORMAT")]
    to: Option<Format>,

    /// How many ranks to write for; each gets a file. For dcp.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: Option<u32>,

    /// Cast floating-point tensors to this dtype, such as bf16. float8 and narrower ones stay, and
    /// so do the scales of quantized weights and the steps that an optimizer counts.
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype)]
    dtype: Option<DType>,

    /// Leave the dtype of keys that match, or lie below this (new) name; may be given again.
    #[arg(long, value_name = "GLOB", requires = "dtype")]
    keep_dtype: Vec<String>,

    /// The most bytes of tensors in a file; 5GB by default. For hf.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    max_shard_size: Option<u64>,

    /// Copy config and tokenizer files from this directory, so that transformers finds all it
    /// needs. For hf.
    #[arg(long, value_name = "DIR")]
    config: Option<PathBuf>,

    /// Write the stream that PyTorch before 1.6 reads. For torch-save.
    #[arg(long)]
    legacy: bool,

    #[command(flatten)]
    pub(crate) writing: Writing,
}

/// Options of everything that writes.
#[derive(Args, Clone, Debug)]
pub(crate) struct Writing {
    /// Replace the target if it exists; until the new one is complete, the old one stays.
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Only say what would be written.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Print a JSON report.
    #[arg(long)]
    pub(crate) json: bool,

    /// Tensor data to hold in memory at once, such as 64MiB.
    #[arg(long, value_name = "BYTES", default_value = "256MiB", value_parser = parse_bytes)]
    max_memory: u64,

    /// Reads in flight.
    #[arg(short, long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: u16,
}

impl Writing {
    /// `options` with what was asked for.
    pub(crate) fn options(&self, options: JobOptions) -> JobOptions {
        options
            .with_max_memory(self.max_memory)
            .with_parallelism(usize::from(self.jobs))
            .as_dry_run(self.dry_run)
    }
}

/// Whether a tensor is no weight but a number that has to stay as it is: the scales of block-scaled
/// weights, which give every one of them its value, and how many steps an optimizer has made.
fn is_exact(fqn: &str) -> bool {
    fqn.ends_with("_scale_inv") || fqn.rsplit('.').next() == Some("step")
}

/// Reads a dtype by PyTorch's name or the usual short one.
pub(crate) fn parse_dtype(text: &str) -> Result<DType, String> {
    let name = match text.strip_prefix("torch.").unwrap_or(text) {
        "bf16" => "bfloat16",
        "fp16" | "f16" | "half" => "float16",
        "fp32" | "f32" | "float" => "float32",
        "fp64" | "f64" | "double" => "float64",
        "fp8" | "f8" | "fp8_e4m3" | "e4m3" => "float8_e4m3fn",
        "fp8_e5m2" | "e5m2" => "float8_e5m2",
        name => name,
    };
    let dtype: DType = name.parse().map_err(|_| format!("{text:?} is no dtype"))?;
    if dcp::convert::is_float(dtype) { Ok(dtype) } else { Err(format!("{dtype} is no float")) }
}

/// Reads a number of bytes: `300`, `64MiB`, `5GB`, `1.5g` (a letter alone is binary).
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is no number of bytes"))?;
    let unit = unit.trim().to_ascii_lowercase();
    let power = |base: f64, letter: &str| {
        let place = ["", "k", "m", "g", "t", "p"].iter().position(|known| *known == letter)?;
        Some(base.powi(i32::try_from(place).ok()?))
    };
    let factor = if let Some(letter) = unit.strip_suffix("ib") {
        power(1024.0, letter).filter(|_| !letter.is_empty())
    } else if let Some(letter) = unit.strip_suffix('b') {
        power(1000.0, letter)
    } else {
        power(1024.0, &unit)
    };
    let bytes = number * factor.ok_or_else(|| format!("{unit:?} is no unit; write KiB or MB"))?;
    // Above 2^53 there is no difference that anybody meant.
    if bytes < 9e15 { Ok(bytes as u64) } else { Err(format!("{text:?} is too many bytes")) }
}

impl Destination {
    /// The format for `target`: the one asked for, or the one that its name says. Options of
    /// another one are errors.
    pub(crate) fn format(&self, target: &str) -> Result<Format, Failure> {
        let format = self.asked_for(target)?;
        for (given, option, of) in [
            (self.ranks.is_some(), "--ranks", Format::Dcp),
            (self.max_shard_size.is_some(), "--max-shard-size", Format::Hf),
            (self.config.is_some(), "--config", Format::Hf),
            (self.legacy, "--legacy", Format::TorchSave),
        ] {
            if given && of != format {
                let message = format!("{option} is for {of}, and {target:?} becomes {format}");
                return Err(Failure::new(Exit::Usage, message)
                    .hint(format!("leave it out, or say --to {of}")));
            }
        }
        Ok(format)
    }

    fn asked_for(&self, target: &str) -> Result<Format, Failure> {
        if let Some(format) = self.to {
            return Ok(format);
        }
        if target.ends_with(".safetensors") {
            return Ok(Format::Safetensors);
        }
        if [".pt", ".pth", ".bin", ".ckpt"].iter().any(|ending| target.ends_with(ending)) {
            return Ok(Format::TorchSave);
        }
        Err(Failure::new(Exit::Usage, format!("cannot tell in which format to write {target:?}"))
            .hint("say --to safetensors, hf, torch-save or dcp"))
    }

    /// The part of a training state that such a target gets when nothing else is asked for.
    pub(crate) fn usual_part(&self, target: &str) -> Result<StatePart, Failure> {
        Ok(match self.format(target)? {
            Format::Safetensors | Format::TorchSave | Format::Dcp => StatePart::Everything,
            Format::Hf => StatePart::Model,
        })
    }

    /// Which dtype a tensor gets, by its name and the dtype it has, when one was asked for.
    pub(crate) fn cast_rule(
        &self,
    ) -> Option<impl Fn(&str, DType) -> Option<DType> + Send + Sync + use<>> {
        let (dtype, kept) = (self.dtype?, KeyFilter::any_of(&self.keep_dtype));
        Some(move |fqn: &str, from| {
            let wide = [DType::Float64, DType::Float32, DType::Float16, DType::BFloat16];
            let meant = wide.contains(&from) && !is_exact(fqn) && !kept.selects(fqn, None);
            meant.then_some(dtype)
        })
    }

    /// Refuses a target that would touch what was opened at `uri`.
    pub(crate) async fn keep_apart(
        &self,
        uri: &str,
        source: &Source,
        target: &str,
    ) -> Result<(), Failure> {
        let shape = match self.format(target)? {
            Format::Safetensors | Format::TorchSave => Shape::File,
            Format::Hf | Format::Dcp => Shape::Folder,
        };
        keep_apart(uri, source, target, shape).await
    }

    /// Writes `source` to `target`.
    pub(crate) async fn write(
        &self,
        source: &Source,
        target: &str,
        options: &JobOptions,
    ) -> Result<WriteReport, Failure> {
        let (overwrite, dry_run) = (self.writing.overwrite, options.dry_run);
        let (source, cast) = match self.cast_rule() {
            Some(rule) => {
                let casts = CastOptions::default();
                let (source, cast) = view::Cast::apply(source, rule, casts, options).await?;
                (source, Some(cast))
            }
            None => (source.clone(), None),
        };
        let source = &source;
        let folders = NewFolders::before(target);
        let mut report = match self.format(target)? {
            Format::Safetensors => {
                let target = open::target_file(target, overwrite, dry_run).await?;
                dcp::convert::to_safetensors(source, &target, options).await?
            }
            Format::TorchSave => {
                let target = open::target_file(target, overwrite, dry_run).await?;
                let zip = TorchSaveForm::default();
                let form = if self.legacy { TorchSaveForm::Legacy } else { zip };
                dcp::convert::to_torch_save(source, &target, form, options).await?
            }
            Format::Hf => self.write_hf(source, target, options).await?,
            Format::Dcp => {
                let writer = open::target_directory(target, overwrite, dry_run).await?;
                dcp::convert::reshard(source, &writer, self.ranks.unwrap_or(1), options).await?
            }
        };
        if !options.dry_run {
            folders.keep();
        }
        report.cast = cast.map(|cast| cast.report());
        Ok(report)
    }

    async fn write_hf(
        &self,
        source: &Source,
        target: &str,
        options: &JobOptions,
    ) -> Result<WriteReport, Failure> {
        let folder = open::target_folder(target, true, options.dry_run).await?;
        let mut config = match &self.config {
            Some(from) => hf_config::files(from)?,
            None => Vec::new(),
        };
        if !source.metadata().await?.iter().any(|(fqn, _)| names_scales(fqn)) {
            hf_config::say_plain(&mut config)?;
        }
        let overwrite = self.writing.overwrite;
        let (mut new, mut replaced) = (Vec::new(), Vec::new());
        for (key, bytes) in config {
            match folder.contains(&key).await? {
                false => new.push((key, bytes)),
                true if overwrite => replaced.push((key, bytes)),
                true => {
                    let target = format!("{target}/{key}");
                    return Err(ConvertError::TargetExists { target }.into());
                }
            }
        }
        let layout = HfLayout::MaxFileBytes(self.max_shard_size.unwrap_or(MAX_SHARD_BYTES));
        if options.dry_run {
            return Ok(dcp::convert::to_hf(source, &folder, &layout, overwrite, options).await?);
        }
        // The index of the weights, which makes the model, comes when these are there. Those of the
        // model that is replaced belong to its weights as long as they are.
        let mut made = Vec::new();
        let written = async {
            for (key, bytes) in new {
                folder.put(&key, bytes.into(), PutMode::Create).await?;
                made.push(key);
            }
            Ok::<_, Failure>(
                dcp::convert::to_hf(source, &folder, &layout, overwrite, options).await?,
            )
        };
        let report = match written.await {
            Ok(report) => report,
            Err(failure) => {
                for key in &made {
                    // What failed first is what is said.
                    let _ = folder.delete(key).await;
                }
                return Err(failure);
            }
        };
        for (key, bytes) in replaced {
            folder.put(&key, bytes.into(), PutMode::Overwrite).await?;
        }
        Ok(report)
    }
}

/// Says what was written, or would be.
pub(crate) fn tell(
    report: &WriteReport,
    target: &str,
    json: bool,
    out: &Output,
) -> Result<(), Failure> {
    if json {
        return out.json(report);
    }
    if out.quiet {
        return Ok(());
    }
    if report.dry_run {
        out.write(&planned(report, out))?;
    }
    let mut parts = vec![count(report.tensors, "tensor")];
    if report.chunks != report.tensors {
        parts.push(count(report.chunks, "chunk"));
    }
    if report.objects > 0 {
        parts.push(count(report.objects, "object"));
    }
    if report.files.len() > 1 {
        parts.push(count(report.files.len(), "file"));
    }
    parts.push(size(report.bytes));
    let would = if report.dry_run { "would be written: " } else { "" };
    out.write(&format!("{target}: {would}{}\n", parts.join(", ")))?;
    notes(report, out);
    Ok(())
}

/// What a cast did, and what it lost beyond precision.
fn cast_notes(report: &CastReport, out: &Output) {
    let tensors = count(report.tensors.len(), "tensor");
    let Some(first) = report.tensors.values().next() else {
        return out.note("no tensor had to be cast");
    };
    let error = report.total().max_relative_error;
    let rounded = if error > 0.0 && error < 5e-5 {
        "; values changed by less than 0.01 %".to_owned()
    } else if error > 0.0 {
        format!("; values changed by at most {:.2} %", error * 100.0)
    } else {
        "; no value changed".to_owned()
    };
    out.note(&format!("cast {tensors} to {}{rounded}", first.to));
    let lost: Vec<_> = report.lost_range().collect();
    for (what, of) in [
        ("beyond the range of the new dtype", (|c| c.out_of_range) as fn(&CastCounts) -> u64),
        ("too small for it and are zero now", |c| c.underflowed),
    ] {
        let in_tensors: Vec<_> = lost.iter().filter(|(_, cast)| of(&cast.counts) > 0).collect();
        if in_tensors.is_empty() {
            continue;
        }
        let elements = in_tensors.iter().map(|(_, cast)| of(&cast.counts)).sum();
        let names: Vec<_> = in_tensors.iter().map(|(fqn, _)| Arc::clone(fqn)).collect();
        let elements = if elements == 1 {
            "1 value is".to_owned()
        } else {
            format!("{} values are", thousands(elements))
        };
        out.note(&format!("{elements} {what}: {}", list(&names)));
    }
}

fn notes(report: &WriteReport, out: &Output) {
    if let Some(cast) = report.cast.as_ref().filter(|_| !report.dry_run) {
        cast_notes(cast, out);
    }
    if !report.left_out.is_empty() {
        let objects = count(report.left_out.len(), "object");
        out.note(&format!("left out {objects}: {}", list(&report.left_out)));
    }
    if !report.without_scale.is_empty() {
        let tensors = count(report.without_scale.len(), "quantized tensor");
        let names = list(&report.without_scale);
        out.note(&format!("wrote {tensors} as bare integers, without scale: {names}"));
    }
    if !report.tied.is_empty() {
        let tensors = count(report.tied.len(), "tied tensor");
        let names: Vec<_> = report.tied.keys().cloned().collect();
        out.note(&format!("wrote the bytes of {tensors} only once: {}", list(&names)));
    }
    if !report.raw.is_empty() {
        let tensors = count(report.raw.len(), "tensor");
        out.note(&format!(
            "stored {tensors} as bytes, because safetensors has no name for the type: {}",
            list(&report.raw)
        ));
    }
}

/// The first of some names, and how many more there are.
pub(crate) fn list(names: &[Arc<str>]) -> String {
    const SHOWN: usize = 5;
    let mut shown: Vec<_> = names.iter().take(SHOWN).map(|name| printable(name)).collect();
    if names.len() > SHOWN {
        shown.push(format!("and {} more", names.len() - SHOWN));
    }
    shown.join(", ")
}

/// The keys and files of a dry run.
fn planned(report: &WriteReport, out: &Output) -> String {
    let width = out.width.unwrap_or(100);
    let rows: Vec<_> = report
        .keys
        .iter()
        .map(|(fqn, key)| (printable(fqn), key.dtype, format!("{:?}", key.shape), size(key.bytes)))
        .collect();
    let widest = |of: fn(&(String, &str, String, String)) -> usize| rows.iter().map(of).max();
    let dtype = widest(|row| row.1.len()).unwrap_or(0);
    let shape = widest(|row| row.2.len()).unwrap_or(0);
    let bytes = widest(|row| row.3.len()).unwrap_or(0);
    let room = width.saturating_sub(dtype + shape + bytes + 6).max(16);
    let name = widest(|row| row.0.chars().count()).unwrap_or(0).min(room);
    let mut text = String::new();
    for (fqn, key_dtype, key_shape, key_bytes) in &rows {
        text.push_str(&format!(
            "{}  {}  {}  {}\n",
            left(&shorten(fqn, name), name),
            out.style.dtype(&left(key_dtype, dtype)),
            left(key_shape, shape),
            right(key_bytes, bytes)
        ));
    }
    for (file, len) in report.files.iter().filter(|_| report.files.len() > 1) {
        text.push_str(&format!(
            "{}  {}\n",
            out.style.dim("file"),
            printable(file) + ", " + &size(*len)
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::parse_bytes;

    #[test]
    fn bytes_are_written_in_many_ways() {
        for (text, bytes) in [
            ("300", 300),
            ("64MiB", 64 << 20),
            ("5GB", 5_000_000_000),
            ("1.5g", 3 << 29),
            ("2 KB", 2000),
            ("7b", 7),
            ("0", 0),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "MiB", "-1", "1x", "1.2.3", "9999999PiB", "1ib", "inf", "nan"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
