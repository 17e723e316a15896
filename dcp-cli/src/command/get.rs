//! `dcp get`.

use std::sync::Arc;

use dcp::checkpoint::{Checkpoint, Need, TargetFile, TargetOptions, cast_to};
use dcp::convert::{
    CastOptions, CastReport, ConvertError, Found, FoundTensor, JobOptions, Source,
    object_to_torch_save, view,
};
use dcp::core::escaped;
use serde_json::json;

use crate::args;
use crate::failure::{Exit, Failure};
use crate::progress::Bar;
use crate::render::value::python;
use crate::session::Session;
use crate::style::{printable, size};
use crate::summary::cast_notes;

pub(crate) fn get(args: &args::Get, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    session.run(args.output.is_some(), async {
        let opened = session.open(&args.uri, Need::Readable).await?;
        let (source, cast) = cast(args, opened.source()).await?;
        let found = dcp::convert::find(&source, &args.fqn, args.slice.as_deref()).await;
        let found = found.map_err(|error| absent(error, &opened, args))?;
        if let Found::Tensor(tensor) = &found {
            let shown = |fqn: &str| fqn == tensor.fqn();
            session.note_optimizer(&opened, shown, &JobOptions::default()).await;
        }
        let report = || cast.as_ref().map(|cast| of_one(cast.report(), &args.fqn));
        match (found, &args.output) {
            (Found::Tensor(tensor), Some(path)) => {
                let path = path.to_string_lossy();
                return save(args, (&opened, &tensor), &path, report, session).await;
            }
            (Found::Tensor(tensor), None) if args.json => out.json(&tensor.to_json().await?)?,
            (Found::Tensor(tensor), None) => {
                let text = tensor.to_text().await?;
                out.write(&format!("{text}\n"))?;
            }
            (Found::Object(_), Some(path)) => {
                let path = path.to_string_lossy();
                return save_object(args, (&opened, &source), &path, session).await;
            }
            (Found::Object(value), None) if args.json => {
                return out.json(&json!({ "kind": "object", "value": value }));
            }
            (Found::Object(value), None) => {
                let text = python(&value, usize::MAX);
                return out.write(&format!("{}\n", escaped(&text)));
            }
            _ => return Err(Failure::new(Exit::Usage, format!("{:?} cannot be shown", args.fqn))),
        }
        if let Some(report) = report().filter(|_| !args.json) {
            cast_notes(&report, out);
        }
        Ok(())
    })
}

/// The checkpoint with the tensor that is asked for cast, where a dtype is given.
async fn cast(
    args: &args::Get,
    source: &Source,
) -> Result<(Source, Option<Arc<view::Cast>>), Failure> {
    let Some(dtype) = args.dtype else { return Ok((source.clone(), None)) };
    let rule = |fqn: &str, from| cast_to(dtype, fqn, from).filter(|_| fqn == args.fqn);
    let (casts, options) = (CastOptions::default(), JobOptions::default());
    let (source, cast) = view::Cast::apply(source, rule, casts, &options).await?;
    Ok((source, Some(cast)))
}

/// What a cast did to one tensor.
fn of_one(mut report: CastReport, fqn: &str) -> CastReport {
    report.tensors.retain(|name, _| **name == *fqn);
    report
}

/// An error that says where a value is that Megatron-Core keeps in the common state.
fn absent(error: ConvertError, opened: &Checkpoint, args: &args::Get) -> Failure {
    let is_unknown = matches!(error, ConvertError::UnknownFqn { .. });
    let failure = Failure::from(error);
    let Some(checkpoint) = opened.megatron().filter(|_| is_unknown) else { return failure };
    let first = args.fqn.split('.').next().unwrap_or_default();
    match checkpoint.common().get(first) {
        Some(_) if first == "args" => {
            failure.hint("it is among the arguments of the run, which `dcp inspect --args` prints")
        }
        Some(_) => failure.hint("it is in the common state, which `dcp inspect --common` prints"),
        None => failure,
    }
}

/// A kind of file, by the ending of its name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Npy,
    Safetensors,
    TorchSave,
}

impl Kind {
    fn of(path: &str) -> Result<Self, Failure> {
        let is = |ending: &str| path.ends_with(ending);
        match () {
            () if is(".npy") => Ok(Self::Npy),
            () if is(".safetensors") => Ok(Self::Safetensors),
            () if is(".pt") || is(".pth") => Ok(Self::TorchSave),
            () => {
                let message = format!("cannot tell what kind of file {path:?} should be");
                Err(Failure::new(Exit::Usage, message)
                    .hint("end its name in .npy, .safetensors or .pt"))
            }
        }
    }
}

/// The file that is written.
async fn file(
    args: &args::Get,
    opened: &Checkpoint,
    path: &str,
    session: &Session,
) -> Result<TargetFile, Failure> {
    let options = TargetOptions::default().with_overwrite(args.overwrite);
    Ok(opened.target_file(path, &options.with_rollback(&session.rollback)).await?)
}

async fn save_object(
    args: &args::Get,
    (opened, source): (&Checkpoint, &Source),
    path: &str,
    session: &Session,
) -> Result<(), Failure> {
    let out = &session.out;
    let file = file(args, opened, path, session).await?;
    let target = file.target();
    if Kind::of(path)? != Kind::TorchSave {
        let message = format!("{:?} is an object, and only a .pt file can hold it", args.fqn);
        return Err(Failure::new(Exit::Usage, message).hint(
            "end the name of the file in .pt; without --output the object is printed, with \
             --json as JSON",
        ));
    }
    let options = JobOptions::default().with_callables(args.callables.filter());
    let bytes = object_to_torch_save(source, &args.fqn, target, &options).await?;
    file.keep();
    if args.json {
        return out.json(&json!({ "output": path, "kind": "object", "bytes": bytes }));
    }
    if !out.quiet {
        out.write(&format!("{path}: {}, {}\n", printable(&args.fqn), size(bytes)))?;
    }
    Ok(())
}

async fn save(
    args: &args::Get,
    (opened, tensor): (&Checkpoint, &FoundTensor),
    path: &str,
    cast: impl Fn() -> Option<CastReport>,
    session: &Session,
) -> Result<(), Failure> {
    let out = &session.out;
    let file = file(args, opened, path, session).await?;
    let target = file.target();
    let kind = Kind::of(path)?;
    let bar = Bar::new(out, "writing");
    let options = bar.options().with_callables(args.callables.filter());
    let note = match kind {
        Kind::Npy => tensor.to_npy(target, &options).await?,
        Kind::Safetensors => tensor.to_safetensors(target, &options).await.map(|()| None)?,
        Kind::TorchSave => tensor.to_torch_save(target, &options).await.map(|()| None)?,
    };
    drop(bar);
    file.keep();
    if let Some(note) = &note {
        out.note(note);
    }
    if args.json {
        let mut report = json!({
            "output": path,
            "dtype": tensor.dtype().name(),
            "shape": &**tensor.shape(),
            "bytes": tensor.byte_len(),
            "note": note,
        });
        if let (Some(report), Some(cast)) = (report.as_object_mut(), cast()) {
            report.insert("cast".to_owned(), json!(cast));
        }
        return out.json(&report);
    }
    if let Some(cast) = cast() {
        cast_notes(&cast, out);
    }
    if !out.quiet {
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        let bytes = size(tensor.byte_len());
        out.write(&format!("{path}: {} {dtype} {shape}, {bytes}\n", printable(tensor.fqn())))?;
    }
    Ok(())
}
