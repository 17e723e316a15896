//! `dcp get`.

use std::path::PathBuf;

use clap::Args;
use dcp::DType;
use dcp::core::format::WantedKeys;
use dcp::core::text::escaped;
use dcp::jobs::JobOptions;
use dcp::jobs::Need;
use dcp::jobs::TargetOptions;
use dcp::jobs::get::Found;
use dcp::jobs::get::Item;
use serde_json::json;

use crate::failure::{Exit, Failure};
use crate::options::{AllowCallable, parse_dtype};
use crate::output::progress::Bar;
use crate::output::render::value::python;
use crate::output::style::{printable, shown, size};
use crate::output::summary::cast_notes;
use crate::session::Session;

/// Print one tensor or object, or write it to a file.
///
/// Reads only the bytes that are needed: of a large tensor that is printed, its corners.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp get runs/step_1000 model.embed.weight
  dcp get runs/step_1000 model.embed.weight --slice 0:2,:
  dcp get runs/step_1000 model.embed.weight --slice=-1 --output last_row.npy
  dcp get runs/step_1000 model.embed.weight --output embed.safetensors --dtype bf16
  dcp get runs/step_1000 optimizer.state.0.exp_avg --output exp_avg.pt
  dcp get runs/step_1000 optimizer.param_groups.0.lr --json

Slices:
  As in NumPy: per axis START:STOP:STEP, each of which may be left out or negative, or one index,
  which drops the axis; `...` covers all axes that are not mentioned.
  Checksums are compared for the stored chunks that a slice holds whole; `dcp verify --deep`
  compares all.")]
pub(crate) struct Get {
    /// The checkpoint.
    pub(crate) uri: String,

    /// The name of the tensor or object, as `dcp inspect` shows it.
    pub(crate) fqn: String,

    /// Write it to this file: a tensor to .npy, .safetensors or .pt, an object to .pt. torch.load
    /// returns what a .pt file holds.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// Cast a floating-point tensor to this dtype, as `dcp convert --dtype` does.
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype)]
    pub(crate) dtype: Option<DType>,

    #[command(flatten)]
    pub(crate) callables: AllowCallable,

    /// Read only this slice of the tensor.
    #[arg(short, long, allow_hyphen_values = true)]
    pub(crate) slice: Option<String>,

    /// Replace the output file if there is one.
    #[arg(long, requires = "output")]
    pub(crate) overwrite: bool,

    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn get(args: &Get, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    session.run(args.output.is_some(), async {
        let keys = Some(WantedKeys::one(&args.fqn));
        let opened = session.open_for(&args.uri, Need::Readable, keys).await?;
        let lookup = opened.get(&args.fqn).dtype(args.dtype);
        let item = match &args.slice {
            Some(slice) => lookup.slice(slice).run().await?,
            None => lookup.run().await?,
        };
        if let Some(path) = &args.output {
            return save(args, &item, &path.to_string_lossy(), session).await;
        }
        match item.found() {
            Found::Tensor(tensor) if args.json => out.json(&tensor.to_json().await?)?,
            Found::Tensor(tensor) => {
                let text = tensor.to_text().await?;
                out.write(&format!("{text}\n"))?;
            }
            Found::Object(value) if args.json => {
                return out.json(&json!({ "kind": "object", "value": value }));
            }
            Found::Object(value) => {
                let text = python(value, usize::MAX);
                return out.write(&format!("{}\n", escaped(&text)));
            }
            _ => return Err(Failure::new(Exit::Usage, format!("{:?} cannot be shown", args.fqn))),
        }
        if let Some(report) = item.cast().filter(|_| !args.json) {
            cast_notes(&report, out);
        }
        Ok(())
    })
}

/// Writes the tensor or object to a file, and says what it is.
async fn save(args: &Get, item: &Item<'_>, path: &str, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let options =
        TargetOptions::default().with_overwrite(args.overwrite).with_rollback(&session.rollback);
    let bar = Bar::new(out, "writing");
    let job: JobOptions = bar.options().with_callables(args.callables.filter());
    let saved = item.save(path, &options, &job).await?;
    drop(bar);
    let path = shown(path);
    let Found::Tensor(tensor) = item.found() else {
        if args.json {
            let bytes = saved.bytes;
            return out.json(&json!({ "output": path, "kind": "object", "bytes": bytes }));
        }
        if !out.quiet {
            out.write(&format!("{path}: {}, {}\n", printable(&args.fqn), size(saved.bytes)))?;
        }
        return Ok(());
    };
    if let Some(note) = &saved.note {
        out.note(note);
    }
    if args.json {
        let mut report = json!({
            "output": path,
            "dtype": tensor.dtype().name(),
            "shape": &**tensor.shape(),
            "bytes": saved.bytes,
            "note": saved.note,
        });
        if let (Some(report), Some(cast)) = (report.as_object_mut(), item.cast()) {
            report.insert("cast".to_owned(), json!(cast));
        }
        return out.json(&report);
    }
    if let Some(cast) = item.cast() {
        cast_notes(&cast, out);
    }
    if !out.quiet {
        let (dtype, shape, bytes) = (tensor.dtype(), tensor.shape(), size(saved.bytes));
        out.write(&format!("{path}: {} {dtype} {shape}, {bytes}\n", printable(tensor.fqn())))?;
    }
    Ok(())
}
