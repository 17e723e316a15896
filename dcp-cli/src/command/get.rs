//! `dcp get`.

use dcp::convert::{ConvertError, Found, FoundTensor, JobOptions};
use dcp::core::escaped;
use serde_json::json;

use crate::apart::{Shape, keep_apart};
use crate::args;
use crate::created::NewFolders;
use crate::failure::{Exit, Failure};
use crate::open::{self, Need, Opened};
use crate::optimizer::note_shifted;
use crate::output::Output;
use crate::progress::Bar;
use crate::render::value::python;
use crate::style::{printable, size};
use crate::target;

pub(crate) fn get(args: &args::Get, out: &Output) -> Result<(), Failure> {
    open::run(args.output.is_some(), async {
        let opened = open::checkpoint(&args.uri, Need::Readable, out).await?;
        let found = dcp::convert::find(&opened.source, &args.fqn, args.slice.as_deref()).await;
        let found = found.map_err(|error| absent(error, &opened, args))?;
        if let Found::Tensor(tensor) = &found {
            note_shifted(&opened, |fqn| fqn == tensor.fqn(), &JobOptions::default(), out).await;
        }
        match (found, &args.output) {
            (Found::Tensor(tensor), Some(path)) => {
                let path = path.to_string_lossy();
                keep_apart(&opened, &path, Shape::File).await?;
                save(args, &tensor, &path, out).await
            }
            (Found::Tensor(tensor), None) if args.json => out.json(&tensor.to_json().await?),
            (Found::Tensor(tensor), None) => {
                let text = tensor.to_text().await?;
                out.write(&format!("{text}\n"))
            }
            (Found::Object(_), Some(_)) => {
                let message = format!("{:?} is no tensor, so no file can hold it", args.fqn);
                Err(Failure::new(Exit::Usage, message)
                    .hint("without --output it is printed as JSON"))
            }
            (Found::Object(value), None) if args.json => {
                out.json(&json!({ "kind": "object", "value": value }))
            }
            (Found::Object(value), None) => {
                let text = python(&value, usize::MAX);
                out.write(&format!("{}\n", escaped(&text)))
            }
            _ => Err(Failure::new(Exit::Usage, format!("{:?} cannot be shown", args.fqn))),
        }
    })
}

/// An error that says where a value is that Megatron-Core keeps in the common state.
fn absent(error: ConvertError, opened: &Opened, args: &args::Get) -> Failure {
    let is_unknown = matches!(error, ConvertError::UnknownFqn { .. });
    let failure = Failure::from(error);
    let Some(checkpoint) = opened.megatron.as_ref().filter(|_| is_unknown) else { return failure };
    let first = args.fqn.split('.').next().unwrap_or_default();
    match checkpoint.common().get(first) {
        Some(_) if first == "args" => {
            failure.hint("it is among the arguments of the run, which `dcp inspect --args` prints")
        }
        Some(_) => failure.hint("it is in the common state, which `dcp inspect --common` prints"),
        None => failure,
    }
}

async fn save(
    args: &args::Get,
    tensor: &FoundTensor,
    path: &str,
    out: &Output,
) -> Result<(), Failure> {
    let is = |ending: &str| path.ends_with(ending);
    if !is(".npy") && !is(".safetensors") {
        let message = format!("cannot tell what kind of file {path:?} should be");
        return Err(Failure::new(Exit::Usage, message).hint("end its name in .npy or .safetensors"));
    }
    let folders = NewFolders::before(path);
    let target = target::file(path, args.overwrite, false).await?;
    let bar = Bar::new(out, "writing");
    let note = if is(".npy") {
        tensor.to_npy(&target, &bar.options()).await?
    } else {
        tensor.to_safetensors(&target, &bar.options()).await?;
        None
    };
    drop(bar);
    folders.keep();
    if let Some(note) = &note {
        out.note(note);
    }
    if args.json {
        return out.json(&json!({
            "output": path,
            "dtype": tensor.dtype().name(),
            "shape": &**tensor.shape(),
            "bytes": tensor.byte_len(),
            "note": note,
        }));
    }
    if !out.quiet {
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        let bytes = size(tensor.byte_len());
        out.write(&format!("{path}: {} {dtype} {shape}, {bytes}\n", printable(tensor.fqn())))?;
    }
    Ok(())
}
