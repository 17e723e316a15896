//! `dcp get`.

use dcp::checkpoint::{Item, Need, TargetOptions};
use dcp::convert::{Found, JobOptions};
use dcp::core::escaped;
use serde_json::json;

use crate::cli as args;
use crate::failure::{Exit, Failure};
use crate::output::progress::Bar;
use crate::output::render::value::python;
use crate::output::style::{printable, size};
use crate::output::summary::cast_notes;
use crate::session::Session;

pub(crate) fn get(args: &args::Get, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    session.run(args.output.is_some(), async {
        let opened = session.open(&args.uri, Need::Readable).await?;
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
async fn save(
    args: &args::Get,
    item: &Item<'_>,
    path: &str,
    session: &Session,
) -> Result<(), Failure> {
    let out = &session.out;
    let options =
        TargetOptions::default().with_overwrite(args.overwrite).with_rollback(&session.rollback);
    let bar = Bar::new(out, "writing");
    let job: JobOptions = bar.options().with_callables(args.callables.filter());
    let saved = item.save(path, &options, &job).await?;
    drop(bar);
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
